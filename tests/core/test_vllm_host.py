"""The host that keeps a processor of vLLM's interface in step with the engine's rows."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from decodekit.core.errors import PluginImportError, ValidationError
from decodekit.core.stage import Kind
from decodekit.core.vllm_host import Outcome, ProcessorHost, stage_of
from decodekit.core.vllm_load import is_processor, load_processor
from decodekit.core.vllm_processors import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)

CPU = torch.device("cpu")


@dataclass(eq=False)
class Source:
    """A sequence as far as a host reads it."""

    name: str
    output_ids: list[int] = field(default_factory=list)
    prompt_ids: tuple[int, ...] = (7,)
    epoch: int = 0
    embeds: Any = None

    @property
    def request(self) -> Any:
        return SimpleNamespace(
            given=SimpleNamespace(extra_args={"name": self.name}), prompt_embeds=self.embeds
        )


class Spy(LogitsProcessor):
    """Adds to each row the number of its tokens, and keeps what it was told."""

    made: list["Spy"] = []

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.updates: list[BatchUpdate | None] = []
        self.rows: dict[int, tuple[str, list[int]]] = {}
        self.calls = 0
        self.fails_for: set[str] = set()
        Spy.made.append(self)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.updates.append(batch_update)

        def state(params: Any, prompt: list[int] | None, output: list[int]) -> Any:
            if params.extra_args["name"] == "bad":
                raise ValueError("not this one")
            return params.extra_args["name"], output

        process_dict_updates(self.rows, batch_update, state)

    def apply(self, logits: Tensor) -> Tensor:
        self.calls += 1
        assert sorted(self.rows) == list(range(len(logits)))
        for row, (name, output) in self.rows.items():
            if name == "poison":
                raise RuntimeError("poisoned")
            logits[row] += len(output)
        return logits


def host_of(kind: type[Any] = Spy) -> tuple[ProcessorHost, Any]:
    host = ProcessorHost(kind, None, CPU)
    return host, host.processor


def join(host: ProcessorHost, *groups: list[Source]) -> dict[str, Any]:
    """Run one step over rows of zeros, in the given groups; return each row's outcome."""
    outcomes = {source.name: Outcome() for group in groups for source in group}
    parts = []
    for group in groups:
        view = SimpleNamespace(
            rows=SimpleNamespace(sources=group),
            states=[outcomes[source.name] for source in group],
            host_positions=[len(source.output_ids) for source in group],
        )
        parts.append((view, torch.zeros(len(group), 3)))
    host.join(parts)  # type: ignore[arg-type]
    return {
        name: outcome.result.tolist() if isinstance(outcome.result, Tensor) else outcome.result
        for name, outcome in outcomes.items()
    }


def test_rows_come_go_and_move_as_vllm_says() -> None:
    host, spy = host_of()
    a, b, c, d = (Source(name) for name in "abcd")

    host.begin([a, b, c])
    host.begin([a, b, c])
    host.begin([a, c])  # b leaves a hole in the middle
    host.begin([a, c, d])
    host.begin([d])

    first, second, third, fourth, fifth = spy.updates
    assert [(row, prompt, output) for row, _, prompt, output in first.added] == [
        (0, [7], []),
        (1, [7], []),
        (2, [7], []),
    ]
    assert (first.batch_size, first.removed, first.moved) == (3, [], [])
    assert second is None
    assert (third.removed, third.added) == ([1], [])
    assert [(source, target) for source, target, _ in third.moved] == [(2, 1)]
    assert [row for row, *_ in fourth.added] == [2]
    assert (fifth.removed, fifth.batch_size) == ([1, 0], 1)
    assert [(source, target) for source, target, _ in fifth.moved] == [(2, 0)]
    assert {row: name for row, (name, _) in spy.rows.items()} == {0: "d"}


def test_a_newcomer_takes_a_freed_row_without_a_removal() -> None:
    host, spy = host_of()
    a, b, c = (Source(name) for name in "abc")
    host.begin([a, b])

    host.begin([c, b])

    update = spy.updates[-1]
    assert (list(update.removed), [row for row, *_ in update.added]) == ([], [0])
    assert {row: name for row, (name, _) in spy.rows.items()} == {0: "c", 1: "b"}


@given(st.lists(st.sets(st.integers(0, 6)), min_size=1, max_size=12))
def test_after_any_history_the_rows_are_dense_and_right(steps: list[set[int]]) -> None:
    host, spy = host_of()
    sources = [Source(str(number)) for number in range(7)]
    for members in steps:
        present = [sources[number] for number in sorted(members)]
        host.begin(present)
        found = join(host, present)
        for source in present:
            assert found[source.name] == [float(len(source.output_ids))] * 3
            source.output_ids.append(1)
        assert {name for name, _ in spy.rows.values()} == {source.name for source in present}


def test_output_lists_are_live_and_not_the_engines_own() -> None:
    host, spy = host_of()
    a = Source("a")
    host.begin([a])
    seen = spy.rows[0][1]

    a.output_ids.extend([4, 5])
    host.begin([a])
    assert seen == [4, 5]
    seen.clear()

    assert a.output_ids == [4, 5]


def test_who_comes_back_after_a_preemption_is_added_again_with_its_output() -> None:
    host, spy = host_of()
    a, b = Source("a", [4]), Source("b")
    host.begin([a, b])

    a.epoch += 1  # in one go: taken off the device and let in again
    host.begin([a, b])

    ((row, _, _, output),) = spy.updates[-1].added
    assert (row, output) == (0, [4])


def test_prompts_of_embeddings_have_no_ids() -> None:
    host, spy = host_of()

    host.begin([Source("a", embeds=torch.zeros(1, 2))])

    assert spy.updates[0].added[0][2] is None


def test_all_groups_of_a_step_are_one_call() -> None:
    host, spy = host_of()
    a, b, c = Source("a", [1]), Source("b"), Source("c", [1, 2])
    host.begin([a, b, c])

    found = join(host, [c, a], [b])

    assert spy.calls == 1
    assert found == {"a": [1.0] * 3, "b": [0.0] * 3, "c": [2.0] * 3}


def test_a_request_that_cannot_be_added_fails_alone() -> None:
    host, _ = host_of()
    a, bad = Source("a", [1]), Source("bad")

    host.begin([a, bad])
    found = join(host, [a, bad])
    host.begin([a])

    assert isinstance(found["bad"], ValueError)
    assert found["a"] == [1.0] * 3
    assert join(host, [a]) == {"a": [1.0] * 3}


def test_a_row_that_makes_apply_raise_fails_alone() -> None:
    host, _ = host_of()
    a, poison, b = Source("a", [1]), Source("poison"), Source("b", [1, 2])
    host.begin([a, poison, b])

    found = join(host, [a, poison, b])
    a.output_ids.append(3)
    host.begin([a, b])

    assert isinstance(found["poison"], RuntimeError)
    assert (found["a"], found["b"]) == ([1.0] * 3, [2.0] * 3)
    assert join(host, [a, b]) == {"a": [2.0] * 3, "b": [2.0] * 3}


class Callables(AdapterLogitsProcessor):
    """One callable a request; "odd" raises, "even" counts its calls."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        calls: list[int] = []

        def process(output: list[int], row: Tensor) -> Tensor:
            if params.extra_args["name"] == "odd":
                raise RuntimeError("odd")
            calls.append(1)
            return row + len(calls)

        return process


def test_a_failing_callable_does_not_start_its_neighbours_afresh() -> None:
    host, _ = host_of(Callables)
    even, odd = Source("even"), Source("odd")
    host.begin([even, odd])

    first = join(host, [even, odd])
    host.begin([even])

    assert isinstance(first["odd"], RuntimeError)
    assert first["even"] == [1.0] * 3
    assert join(host, [even]) == {"even": [2.0] * 3}


class Shapeless(Spy):
    def apply(self, logits: Tensor) -> Tensor:
        return logits[:, :1]


def test_a_wrong_shape_is_named() -> None:
    host, _ = host_of(Shapeless)
    a = Source("a")
    host.begin([a])

    found = join(host, [a])

    assert "Shapeless.apply must return a tensor of shape" in str(found["a"])


class Invariant(Spy):
    def is_argmax_invariant(self) -> bool:
        return True


def test_the_declaration_decides_the_place_in_the_chain() -> None:
    changing = stage_of(host_of()[0], "vllm.spy", ())
    invariant = stage_of(host_of(Invariant)[0], "vllm.invariant", ("vllm.spy",))

    assert (changing.kind, invariant.kind) == (Kind.BIAS, Kind.CUT)
    assert "repetition_penalty" in changing.order.before
    assert {"min_p", "vllm.spy"} <= set(invariant.order.after)
    assert {"top_k", "top_p"} <= set(invariant.order.before)
    assert invariant.argmax_invariant(None)
    assert not changing.argmax_invariant(None)


def test_names_classes_and_other_things_are_told_apart() -> None:
    name = "decodekit.core.vllm_processors:AdapterLogitsProcessor"
    assert load_processor(name) is AdapterLogitsProcessor
    assert load_processor(Spy) is Spy

    class Foreign:  # derived from vLLM's own base, which is not ours
        def is_argmax_invariant(self) -> bool:
            return True

        def update_state(self, batch_update: Any) -> None:
            """Nothing."""

        def apply(self, logits: Tensor) -> Tensor:
            return logits

    assert is_processor(Foreign)
    for wrong in (int, "decodekit.core.errors:did_you_mean", "decodekit.core.errors", ":X", 3):
        with pytest.raises(ValidationError, match="logits_processors must"):
            load_processor(wrong)
    for missing in ("decodekit.no_such_module:X", "decodekit.core.errors:NoSuch"):
        with pytest.raises(RuntimeError, match="cannot be imported") as caught:
            load_processor(missing)
        assert isinstance(caught.value, PluginImportError)

"""Logits processors of vLLM's batch interface: DEC-097 to DEC-101.

One object serves all rows; it is told which rows come, go and move.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from decodekit import SamplingParams
from decodekit.plugins.author.table_model import blank_table, flat_table
from decodekit.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
    process_dict_updates,
)

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

A, B, X, Y, Z, COMMA = 10, 11, 60, 61, 62, 63


class ByRow(LogitsProcessor):
    """Keeps a state for each row that asks for it with `extra_args={"on": name}`."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, Any] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def new_state(self, name: str, output_ids: list[int]) -> Any:
        raise NotImplementedError

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        def new(params: SamplingParams, prompt: list[int] | None, output: list[int]) -> Any:
            name = (params.extra_args or {}).get("on")
            return None if name is None else self.new_state(name, output)

        process_dict_updates(self.rows, batch_update, new)


def asking(name: str, **fields: Any) -> SamplingParams:
    return SamplingParams(extra_args={"on": name}, **fields)


class Recorder(ByRow):
    """Keeps a copy of the live output list at each step, by name."""

    seen: dict[str, list[list[int]]] = {}

    def new_state(self, name: str, output_ids: list[int]) -> Any:
        return name, output_ids

    def apply(self, logits: Tensor) -> Tensor:
        for name, output_ids in self.rows.values():
            self.seen.setdefault(name, []).append(list(output_ids))
        return logits


def test_dec_097_batch_processors_see_the_true_history(rough: Bench) -> None:
    bench = rough.fresh(logits_processors=[Recorder])
    Recorder.seen.clear()

    for count in (1, 8):
        names = [f"{count}-{number}" for number in range(count)]
        params = [
            asking(name, seed=seed, max_tokens=40, temperature=float(seed % 2))
            for seed, name in enumerate(names)
        ]
        found = bench.ids([[3 + number] for number in range(count)], params)
        for name, ids in zip(names, found, strict=True):
            assert Recorder.seen[name] == [ids[:length] for length in range(40)]


class CommaState:
    """Where a sequence stands; every living one is counted."""

    alive: weakref.WeakSet[CommaState] = weakref.WeakSet()

    def __init__(self, output_ids: list[int]) -> None:
        self.output_ids = output_ids
        self.alive.add(self)


class CommaOnce(ByRow):
    """Forces a comma once, after the letters xyz."""

    def new_state(self, name: str, output_ids: list[int]) -> Any:
        return CommaState(output_ids)

    def apply(self, logits: Tensor) -> Tensor:
        for row, state in self.rows.items():
            ids = state.output_ids
            if ids[-3:] == [X, Y, Z] and COMMA not in ids:
                logits[row] = -torch.inf
                logits[row, COMMA] = 0.0
        return logits


def test_dec_098_state_of_a_batch_processor_belongs_to_one_sequence(make: Make) -> None:
    table = flat_table(97, 60)
    table[:, X] = 3.0
    table[X, Y] = table[Y, Z] = 6.0
    bench = make(table, logits_processors=[CommaOnce], max_num_seqs=16)

    found = bench.ids([[1]] * 50, [asking("x", max_tokens=30, seed=seed) for seed in range(50)])
    five = [asking("x", max_tokens=30, seed=seed, n=5) for seed in range(4)]
    found += [ids for answers in bench.all_ids([[1]] * 4, five) for ids in answers]
    for number in range(18):
        each = asking("x", max_tokens=3 + 7 * (number % 6), seed=number)
        bench.add(f"{number}", [1], each)
        bench.step(2)
    done = bench.finish()
    found += [list(output.outputs[0].token_ids) for output in done.values()]

    for ids in found:
        places = [p for p in range(len(ids) - 3) if ids[p : p + 3] == [X, Y, Z]]
        commas = [place for place, token in enumerate(ids) if token == COMMA]
        assert commas == [place + 3 for place in places[:1]]
    assert sum(COMMA in ids for ids in found) > 50
    del done
    gc.collect()
    assert len(CommaState.alive) == 0


class Faulty(AdapterLogitsProcessor):
    """Fails as the request asks: when it is checked, when it is built, or at step 3."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        if (sampling_params.extra_args or {}).get("fail") not in (None, "built", "raises", "none"):
            raise ValueError("extra_args['fail'] must be 'built', 'raises' or 'none'")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Callable[..., Any] | None:
        kind = (params.extra_args or {}).get("fail")
        if kind == "built":
            raise RuntimeError("not built today")

        def process(output_ids: list[int], logits: Tensor) -> Any:
            if len(output_ids) < 3:
                return logits
            if kind == "none":
                return None
            raise RuntimeError("at step 3")

        return None if kind is None else process


@pytest.mark.parametrize(("kind", "count"), [("built", 0), ("raises", 3), ("none", 3)])
def test_dec_099_an_exception_of_a_batch_processor_is_that_requests_alone(
    rough: Bench, kind: str, count: int
) -> None:
    bench = rough.fresh(logits_processors=[Faulty])
    prompts = [[5 + number] for number in range(8)]
    healthy = [
        SamplingParams(seed=seed, max_tokens=10, temperature=float(seed % 2)) for seed in range(8)
    ]
    alone = [rough.ids([p], each)[0] for p, each in zip(prompts, healthy, strict=True)]
    bad = SamplingParams(seed=4, max_tokens=10, temperature=0.0, extra_args={"fail": kind})
    params = [*healthy[:4], bad, *healthy[5:]]

    parts = [output.outputs[0] for output in bench.generate(prompts, params)]
    streams = bench.stream(prompts, params)

    for number in range(8):
        expected, reason = alone[number], "length"
        if number == 4:
            expected, reason = expected[:count], "error"
        assert list(parts[number].token_ids) == streams[number].ids() == expected
        assert parts[number].finish_reason == streams[number].last().finish_reason == reason
    bench.check_answers()


def test_dec_099_bad_arguments_of_a_batch_processor_are_refused(rough: Bench) -> None:
    bench = rough.fresh(logits_processors=[Faulty])
    bench.add("healthy", [5], SamplingParams(temperature=0.0, max_tokens=8))
    bench.step(2)

    with pytest.raises(ValueError, match="fail"):
        bench.add("bad", [5], SamplingParams(extra_args={"fail": 17}))

    ids = {name: list(output.outputs[0].token_ids) for name, output in bench.finish().items()}
    assert ids == {"healthy": bench.path(5, 8)}
    bench.check_answers()


class AddTen(ByRow):
    """Adds 10 to B."""

    values: list[float] = []

    def new_state(self, name: str, output_ids: list[int]) -> Any:
        return name

    def apply(self, logits: Tensor) -> Tensor:
        for row in self.rows:
            logits[row, B] += 10.0
            self.values.append(float(logits[row, B]))
        return logits


class Halve(ByRow):
    """Halves everything."""

    def new_state(self, name: str, output_ids: list[int]) -> Any:
        return name

    def apply(self, logits: Tensor) -> Tensor:
        for row in self.rows:
            logits[row] /= 2.0
            AddTen.values.append(float(logits[row, B]))
        return logits


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    ("order", "values"), [((AddTen, Halve), [12.0, 6.0]), ((Halve, AddTen), [1.0, 11.0])]
)
def test_dec_100_batch_processors_act_on_greedy_batches_in_their_order(
    make: Make, order: Sequence[type], values: list[float], mixed: bool
) -> None:
    table = blank_table(97)
    table[[A, B], A], table[[A, B], B] = 4.0, 2.0
    bench = make(table, logits_processors=list(order))
    others = [SamplingParams(seed=s, temperature=float(mixed), max_tokens=3) for s in range(6)]
    AddTen.values.clear()

    params = [*others[:3], asking("x", temperature=0.0, max_tokens=3), *others[3:]]
    found = bench.ids([[A]] * 7, params)[3]

    assert found == [B] * 3
    assert AddTen.values == values * 3


class FourTokens(ByRow):
    """Counts the steps of each request, and lets no fifth different token come."""

    steps: dict[str, int] = {}

    def new_state(self, name: str, output_ids: list[int]) -> Any:
        return name, output_ids

    def apply(self, logits: Tensor) -> Tensor:
        for row, (name, output_ids) in self.rows.items():
            self.steps[name] = len(output_ids) + 1
            different = sorted(set(output_ids))
            if len(different) == 4:
                kept = logits[row, different].clone()
                logits[row] = -torch.inf
                logits[row, different] = kept
        return logits


def test_dec_101_batch_processors_and_preemption(
    make: Make, small_pool: Callable[[Bench, int], Bench]
) -> None:
    large = make(flat_table(97), logits_processors=[FourTokens])
    small = small_pool(large, 80)  # 16 requests of 151 tokens want 160 blocks
    prompts = [[number] for number in range(16)]
    params = [asking(f"{seed}", seed=seed, max_tokens=150) for seed in range(16)]

    expected = large.ids(prompts, params)
    FourTokens.steps.clear()
    found = small.ids(prompts, params)

    assert small.count("num_preemptions") > 0
    assert found == expected
    assert all(len(set(ids)) == 4 for ids in found)
    assert FourTokens.steps == {f"{seed}": 150 for seed in range(16)}

"""Logits processors that fail, as callables of a request and as stages: DEC-099."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytest
from torch import Tensor

from decodekit import Caps, RowView, SamplingParams, Stage, StageParams

if TYPE_CHECKING:
    from tests.cases.conftest import Bench


def none_at_3(output_ids: list[int], logits: Tensor) -> Any:
    return None if len(output_ids) == 3 else logits


def wrong_shape_at_3(output_ids: list[int], logits: Tensor) -> Tensor:
    return logits[:5] if len(output_ids) == 3 else logits


def raises_at_3(output_ids: list[int], logits: Tensor) -> Tensor:
    if len(output_ids) == 3:
        raise RuntimeError("at step 3")
    return logits


class RaisesAtOpen(Stage):
    """Raises when its state is built."""

    name = "dec_raises_at_open"
    caps = Caps(stateful=True)

    def open(self, params: Any, prompt: Sequence[int]) -> Any:
        raise RuntimeError("no state today")

    def transform(self, logits: Tensor, rows: RowView) -> None:
        raise AssertionError("a stage without a state must not run")


class RaisesAtThree(Stage):
    """Raises at the fourth token of any of its rows, so that the whole step fails at first."""

    name = "dec_raises_at_three"

    class Params(StageParams):
        place: int = 3

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, params in enumerate(rows.params):
            if len(rows.output(row)) == params.place:
                raise RuntimeError("at step 3")


BAD: dict[str, tuple[dict[str, Any], int, str]] = {
    "raises": ({"logits_processors": [raises_at_3]}, 3, "at step 3"),
    "none": ({"logits_processors": [none_at_3]}, 3, "nothing"),
    "shape": ({"logits_processors": [wrong_shape_at_3]}, 3, "shape"),
    "stage": ({"chain": ["dec_raises_at_three"]}, 3, "at step 3"),
    "open": ({"chain": ["dec_raises_at_open"]}, 0, "no state today"),
}


@pytest.mark.parametrize("kind", BAD)
@pytest.mark.parametrize("greedy", [True, False])
def test_dec_099_an_exception_is_that_requests_alone(rough: Bench, kind: str, greedy: bool) -> None:
    fields, count, said = BAD[kind]
    bench = rough.fresh(plugins=[RaisesAtOpen, RaisesAtThree])
    common: dict[str, Any] = {"temperature": 0.0} if greedy else {}
    healthy = [
        SamplingParams(seed=seed, max_tokens=10, **common, **extra)
        for seed, extra in enumerate(
            [
                {},
                {"repetition_penalty": 1.3},
                {"logits_processors": [lambda output_ids, logits: logits / 2]},
                {"chain": [{"stage": "dec_raises_at_three", "place": 99}]},
                {"logprobs": 2},
                {"presence_penalty": 1.0},
                {},
            ]
        )
    ]
    bad = SamplingParams(seed=9, max_tokens=10, **common, **fields)
    prompts = [[5 + number] for number in range(8)]
    params = [*healthy[:4], bad, *healthy[4:]]
    alone = [bench.ids([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    expected = rough.solo([9], SamplingParams(seed=9, max_tokens=10, **common))[:count]

    plain = [output.outputs[0] for output in bench.generate(prompts, params)]
    streams = bench.stream(prompts, params)

    for number in range(8):
        last = streams[number].last()
        if number == 4:
            assert (plain[4].finish_reason, last.finish_reason) == ("error", "error")
            assert said in (plain[4].error or "")
            assert said in (last.error or "")
            assert list(plain[4].token_ids) == streams[4].ids() == expected
        else:
            assert plain[number].finish_reason == last.finish_reason == "length"
            assert list(plain[number].token_ids) == streams[number].ids() == alone[number]
    bench.check_answers()


@pytest.mark.parametrize("bad", [lambda logits: logits, lambda a, b, c, d: d, "print"])
def test_dec_099_a_processor_that_cannot_be_built_is_refused(rough: Bench, bad: Any) -> None:
    rough.add("healthy", [5], SamplingParams(temperature=0.0, max_tokens=8))
    rough.step(2)
    with pytest.raises(ValueError, match="logits_processors"):
        rough.add("bad", [5], SamplingParams(logits_processors=[bad]))
    done = rough.finish()
    assert {name: list(o.outputs[0].token_ids) for name, o in done.items()} == {
        "healthy": rough.path(5, 8)
    }
    rough.check_answers()

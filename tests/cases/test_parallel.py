"""Parallel sampling and order: DEC-064 to DEC-066."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from decodekit import AsyncLLM, CompletionOutput, RequestOutput, SamplingParams
from decodekit.plugins.author.table_model import flat_table
from decodekit.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

LIMIT = 12


class Uneven(NamedTuple):
    """An engine, and a seed under which answer 0 of three ends early and the others do not."""

    bench: Bench
    params: SamplingParams
    plain: list[CompletionOutput]


@pytest.fixture(scope="module")
def uneven(make: Make, ascii_tokenizer: Callable[..., Any]) -> Uneven:
    bench = make(flat_table(128), model={"tokenizer": ascii_tokenizer(), "eos_token_id": 7})
    params = [SamplingParams(n=3, seed=seed, max_tokens=LIMIT) for seed in range(120)]
    for each, output in zip(params, bench.generate([[1]] * 120, params), strict=True):
        lengths = [len(part.token_ids) for part in output.outputs]
        if lengths[0] <= LIMIT // 2 and lengths[1:] == [LIMIT] * 2:
            return Uneven(bench, each, output.outputs)
    raise AssertionError("no seed of 120 lets answer 0 end early")


def parts_of(outputs: list[RequestOutput], index: int) -> list[CompletionOutput]:
    return [part for output in outputs for part in output.outputs if part.index == index]


def run_async(bench: Bench, params: SamplingParams) -> list[RequestOutput]:
    """All that the asynchronous generator yields."""
    delta = params.clone()
    delta.output_kind = RequestOutputKind.DELTA

    async def run(engine: Any) -> list[RequestOutput]:
        return [output async for output in engine.generate({"prompt_token_ids": [1]}, delta)]

    engine = AsyncLLM(str(bench.folder), **bench.options)
    try:
        return asyncio.run(run(engine))
    finally:
        engine.shutdown()


@pytest.mark.parametrize("door", ["step", "async"])
def test_dec_064_n_answers_in_a_stream_are_kept_apart(uneven: Uneven, door: str) -> None:
    bench, params, plain = uneven
    if door == "async":
        outputs = run_async(bench, params)
    else:
        outputs = bench.stream([[1]], params)[0].outputs

    order = [part.index for output in outputs for part in output.outputs]
    assert set(order) == {0, 1, 2}
    for index in range(3):
        parts = parts_of(outputs, index)
        assert [t for part in parts for t in part.token_ids] == list(plain[index].token_ids)
        assert plain[index].text
        assert "".join(part.text for part in parts) == plain[index].text
    after = order[len(order) - order[::-1].index(0) :]
    assert {1, 2} <= set(after), "the others go on after the first has ended"


@pytest.mark.parametrize("door", ["step", "async"])
def test_dec_065_one_finish_reason_for_each_choice(uneven: Uneven, door: str) -> None:
    bench, params, plain = uneven
    if door == "async":
        outputs = run_async(bench, params)
    else:
        outputs = bench.stream([[1]], params)[0].outputs

    for index, right in enumerate(("stop", "length", "length")):
        reasons = [part.finish_reason for part in parts_of(outputs, index)]
        assert reasons == [None] * (len(reasons) - 1) + [right]
        assert plain[index].finish_reason == right
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "temperature": 0.0},
        {"n": 0},
        {"n": -1},
        {"n": "2"},
        {"n": 1_000_000},
        {"n": 1_000_000, "temperature": 0.0},
    ],
)
def test_dec_066_n_beyond_reason_is_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^n must be "):
        SamplingParams(**fields)
    params = SamplingParams()
    with pytest.raises(ValueError, match=r"^n must be "):
        for name, value in fields.items():
            setattr(params, name, value)

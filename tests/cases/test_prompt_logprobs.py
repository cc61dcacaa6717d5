"""Log-probs of the prompt: DEC-060 and DEC-061."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from torch import Tensor

from decodekit import AsyncLLM, RequestOutput, SamplingParams
from decodekit.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

Scores = list[dict[int, float] | None]


def scores(output: RequestOutput) -> Scores:
    """Values by position and token."""
    assert output.prompt_logprobs is not None
    return [
        None if position is None else {token: e.logprob for token, e in position.items()}
        for position in output.prompt_logprobs
    ]


@pytest.mark.parametrize("name", ["rough", "attentive"])
def test_dec_060_prompt_logprobs_with_the_prefix_cache(
    request: pytest.FixtureRequest, name: str
) -> None:
    original: Bench = request.getfixturevalue(name)
    bench = original.fresh(enable_prefix_caching=True)
    plain = original.fresh(enable_prefix_caching=False)
    prompts = [[(3 * place) % 97 for place in range(length)] for length in (15, 16, 17, 33)]
    params = SamplingParams(temperature=0.0, prompt_logprobs=1, max_tokens=2)
    warm = SamplingParams(temperature=0.0, max_tokens=2)
    expected = [scores(output) for output in plain.generate(prompts, params)]

    for order in ([0, 1, 2, 3], [3, 2, 1, 0]):
        for _ in range(2):
            for number in order:
                found = scores(bench.generate([prompts[number]], params)[0])
                _check(found, expected[number], exact=name == "rough")
                bench.generate([prompts[number]], warm)  # so that its blocks are in use again
    assert bench.count("prefix_cache_hits") > 0
    if name == "rough":
        for prompt, found in zip(prompts, expected, strict=True):
            for place in range(1, len(prompt)):
                value = (found[place] or {})[prompt[place]]
                right = bench.logprobs_after(prompt[place - 1])[prompt[place]]
                assert value == pytest.approx(right, abs=1e-4)


def _check(found: Scores, expected: Scores, *, exact: bool) -> None:
    assert len(found) == len(expected)
    assert found[0] is None
    if exact:
        assert found == expected
        return
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-3)


@pytest.fixture(scope="module")
def chunked(make: Make, rough_table: Tensor) -> Bench:
    """At most eight prefill tokens a step."""
    return make(rough_table, max_num_batched_tokens=8, max_num_seqs=8)


PROMPT = [(11 * place + place * place) % 97 for place in range(30)]


def check_rows(bench: Bench, output: RequestOutput) -> None:
    """Entry t is the table's log-softmax for token t given token t - 1, with the two best."""
    found = scores(output)
    assert len(found) == 30
    assert found[0] is None
    for place in range(1, 30):
        row = bench.logprobs_after(PROMPT[place - 1])
        entries = found[place] or {}
        assert PROMPT[place] in entries
        assert len(entries) in (2, 3)
        for token, value in entries.items():
            assert value == pytest.approx(row[token], abs=1e-4)
        best = sorted(row, reverse=True)[:2]
        assert sorted(entries.values(), reverse=True)[:2] == pytest.approx(best, abs=1e-4)


def test_dec_061_prompt_logprobs_line_up_over_prefill_chunks(chunked: Bench) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=2)

    output = chunked.generate([PROMPT], params)[0]

    check_rows(chunked, output)
    assert list(output.outputs[0].token_ids) == chunked.path(PROMPT[-1], 2)


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_dec_061_no_output_comes_before_the_prefill_is_complete(
    chunked: Bench, kind: RequestOutputKind
) -> None:
    params = SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=2, output_kind=kind)

    async def run(engine: Any) -> list[RequestOutput]:
        return [output async for output in engine.generate({"prompt_token_ids": PROMPT}, params)]

    engine = AsyncLLM(str(chunked.folder), **chunked.options)
    try:
        outputs = asyncio.run(run(engine))
    finally:
        engine.shutdown()

    check_rows(chunked, outputs[0])
    assert all(output.outputs[0].token_ids for output in outputs)
    path = chunked.path(PROMPT[-1], 2)
    ids = [list(output.outputs[0].token_ids) for output in outputs]
    if kind is RequestOutputKind.CUMULATIVE:
        assert ids[-1] == path
    else:
        assert [token for part in ids for token in part] == path
        assert all(output.prompt_logprobs is None for output in outputs[1:])
    assert outputs[-1].finished

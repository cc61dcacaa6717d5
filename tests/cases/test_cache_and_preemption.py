"""Prefix cache and preemption: DEC-108 and DEC-109."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from decodekit import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tests.cases.conftest import Bench

Same = Callable[[RequestOutput, RequestOutput], bool]


@pytest.mark.parametrize("name", ["rough", "attentive"])
def test_dec_108_a_repeated_prompt_gives_the_same_answer(
    request: pytest.FixtureRequest, same_by_tie_rule: Same, name: str
) -> None:
    original: Bench = request.getfixturevalue(name)
    cached = original.fresh(enable_prefix_caching=True)
    plain = original.fresh(enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=2)

    for length in (15, 16, 17, 32, 33):
        prompt = [(5 * place + length) % 97 for place in range(length)]
        outputs = [cached.generate([prompt], params)[0] for _ in range(3)]
        right = plain.generate([prompt], params)[0]
        for output in outputs:
            if name == "rough":
                assert output.outputs[0].token_ids == right.outputs[0].token_ids
                assert output.outputs[0].logprobs == right.outputs[0].logprobs
            assert same_by_tie_rule(right, output)
            assert first_logprobs(output) == pytest.approx(first_logprobs(right), abs=1e-3)
            assert (output.num_cached_tokens or 0) <= length - 1
        most = (length - 1) // 16 * 16
        assert [output.num_cached_tokens for output in outputs[1:]] == [most, most]
        assert right.num_cached_tokens == 0


def first_logprobs(output: RequestOutput) -> dict[int, float]:
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    return {token: entry.logprob for token, entry in logprobs[0].items()}


@pytest.mark.parametrize("name", ["rough", "attentive"])
def test_dec_109_preemption_loses_and_repeats_nothing(
    request: pytest.FixtureRequest,
    small_pool: Callable[[Bench, int], Bench],
    same_by_tie_rule: Same,
    name: str,
) -> None:
    large: Bench = request.getfixturevalue(name)
    small = small_pool(large, 250)  # 32 requests of about 230 tokens want 460 blocks
    prompts = [[(number + 3 * place) % 97 for place in range(3 + 57 * number // 31)]
               for number in range(32)]  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    if name == "attentive":
        params.logprobs = 2  # for the tie rule

    expected = large.generate(prompts, params)
    streams = small.stream(prompts, params)

    assert small.count("num_preemptions") > 0
    assert small.count("generation_tokens") == 32 * 200
    for prompt, right, stream in zip(prompts, expected, streams, strict=True):
        last = stream.outputs[-1]
        assert last.finished
        assert last.prompt_token_ids == prompt
        assert stream.last().finish_reason == "length"
        assert len(stream.ids()) == 200
        if name == "rough":
            assert stream.ids() == list(right.outputs[0].token_ids)
        else:
            part = stream.last()
            part.token_ids = stream.ids()
            assert same_by_tie_rule(right, last)
    small.check_idle()

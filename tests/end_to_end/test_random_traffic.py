"""Whatever comes and goes: a finished request equals its solo run, an aborted one starts as it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.engine import LLMEngine
from decodekit.core.outputs import RequestOutput
from decodekit.core.params import RequestOutputKind

Maker = Callable[..., LLM]

VOCABULARY = 97
SMALL_POOL = 8  # blocks of 16 tokens, where sixteen requests may want sixty


class Engines(NamedTuple):
    """One that has to preempt, and one that never does."""

    small: LLMEngine
    large: LLM


class Traffic(NamedTuple):
    """A request, the step before which it comes, and the step before which it is aborted."""

    prompt: list[int]
    params: SamplingParams
    arrival: int
    abort: int | None


@pytest.fixture(scope="module")
def engines(make_llm: Maker) -> Engines:
    """Two engines on one table of exact logits."""
    generator = torch.Generator().manual_seed(3)
    table = (torch.randint(-64, 65, (VOCABULARY, VOCABULARY), generator=generator) / 16).float()
    model = {"eos_token_id": 96}
    large = make_llm(table, model=model)
    backend = large.llm_engine.parts.runner.backend
    block = backend.bytes_per_block(backend.layout)
    small = make_llm(
        table,
        model=model,
        kv_cache_memory_bytes=SMALL_POOL * block,
        max_model_len=128,
        max_num_batched_tokens=24,
        max_num_seqs=12,
    )
    return Engines(small.llm_engine, large)


def fading(output_ids: list[int], logits: Tensor) -> Tensor:
    """A request's own callable."""
    return logits * (1 + len(output_ids) % 3)


ids = st.integers(0, VOCABULARY - 1)
optional: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.0, 0.3, 0.9, 1.7]),
    "top_k": st.integers(1, 40),
    "top_p": st.floats(0.05, 1.0),
    "min_p": st.floats(0.0, 0.5),
    "repetition_penalty": st.floats(0.5, 2.0),
    "frequency_penalty": st.floats(-2.0, 2.0),
    "presence_penalty": st.floats(-2.0, 2.0),
    "min_tokens": st.integers(0, 8),
    "logit_bias": st.dictionaries(ids, st.floats(-100, 100), max_size=4),
    "allowed_token_ids": st.lists(ids, min_size=3, max_size=30, unique=True),
    "stop_token_ids": st.lists(ids, max_size=4),
    "ignore_eos": st.booleans(),
    "logprobs": st.integers(0, 4),
    "prompt_logprobs": st.integers(0, 2),
    "n": st.integers(1, 3),
    "logits_processors": st.just([fading]),
}


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    """Any valid mix of a few settings."""
    names = draw(st.lists(st.sampled_from(sorted(optional)), max_size=6, unique=True))
    fields = {name: draw(optional[name]) for name in names}
    if fields.get("temperature") == 0.0:
        fields.pop("n", None)
    return SamplingParams(
        seed=draw(st.integers(0, 5)),
        max_tokens=draw(st.integers(8, 24)),
        output_kind=RequestOutputKind.FINAL_ONLY,
        **fields,
    )


traffic = st.lists(
    st.builds(
        Traffic,
        prompt=st.lists(ids, min_size=1, max_size=30),
        params=parameters(),
        arrival=st.integers(0, 20),
        abort=st.none() | st.none() | st.integers(0, 40),
    ),
    min_size=4,
    max_size=16,
)


def drive(engine: LLMEngine, requests: list[Traffic]) -> dict[int, RequestOutput]:
    """Run the traffic step by step; return the last word on each request by its number."""
    results: dict[int, RequestOutput] = {}
    step = 0
    while len(results) < len(requests):
        for number, request in enumerate(requests):
            if request.arrival == step:
                engine.add_request(str(number), request.prompt, request.params)
            if request.abort is not None and max(request.abort, request.arrival) == step:
                engine.abort_request(str(number))
        for output in engine.step():
            assert output.finished
            results[int(output.request_id)] = output
        step += 1
        assert step < 3000, "the engine does not come to an end"
    return results


@pytest.mark.slow
def test_random_traffic_gives_solo_results(engines: Engines) -> None:
    @settings(max_examples=30)
    @given(requests=traffic)
    def check(requests: list[Traffic]) -> None:
        results = drive(engines.small, requests)

        assert not engines.small.has_unfinished_requests()
        assert engines.small.parts.pool.num_used == 0
        for number, request in enumerate(requests):
            [solo] = engines.large.generate([request.prompt], request.params, use_tqdm=False)
            check_one(request, results[number], solo)

    crowd = [
        Traffic(
            prompt=[(7 * number + place) % 90 for place in range(30)],
            params=SamplingParams(
                seed=number, max_tokens=24, output_kind=RequestOutputKind.FINAL_ONLY
            ),
            arrival=0,
            abort=None,
        )
        for number in range(16)
    ]
    check = example(requests=crowd)(check)  # more than the small pool holds, whatever is drawn
    check()

    assert engines.small.parts.scheduler.num_preemptions > 0


def check_one(request: Traffic, found: RequestOutput, solo: RequestOutput) -> None:
    """Compare a request's answers with those of its solo run."""
    for part, expected in zip(found.outputs, solo.outputs, strict=True):
        count = len(part.token_ids)
        assert list(part.token_ids) == list(expected.token_ids)[:count]
        if part.logprobs is not None:
            assert expected.logprobs is not None
            assert part.logprobs == expected.logprobs[:count]
        if part.finish_reason == "abort":
            assert request.abort is not None
            continue
        assert count == len(expected.token_ids)
        assert part.finish_reason == expected.finish_reason
        assert part.stop_reason == expected.stop_reason
        assert part.error is None
        assert found.prompt_logprobs == solo.prompt_logprobs

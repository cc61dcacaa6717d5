"""The step calls plans alone: no hook, no validation of parameters, no look-up in the registry."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pluggy
import pydantic
import pytest
from torch import Tensor

from decodekit import LLM, SamplingParams
from decodekit.core.registry import Registry
from decodekit.core.stage import Kind, Stage
from decodekit.plugins.author.table_model import flat_table

Maker = Callable[..., LLM]


class Nudge(Stage):
    """A guest's stage."""

    name = "nudge"
    kind = Kind.BIAS

    def transform(self, logits: Tensor, rows: Any) -> None:
        logits[:, 5] += 0.5


def untouched(output_ids: list[int], logits: Tensor) -> Tensor:
    """A request's own callable."""
    return logits


KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 1},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.1},
    {"allowed_token_ids": [1, 2, 3], "logit_bias": {1: 2.0}, "min_tokens": 3},
    {"logprobs": 3, "prompt_logprobs": 2},
    {"chain": ["top_p", "temperature"], "top_p": 0.8, "temperature": 1.3},
    {"chain": [Nudge(), "top_k"], "top_k": 9},
    {"logits_processors": [untouched], "n": 2, "stop_token_ids": [63]},
    {"temperature": 0.0, "speculation": {"method": "ngram", "prompt_lookup_min": 1}},
]


class Calls:
    """Counts of what must not happen at the step."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def note(self, what: str) -> None:
        self.counts[what] += 1


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    """Watch pluggy's hook calls, pydantic's validators and the registry's look-ups."""
    calls = Calls()
    call_hook = pluggy.HookCaller.__call__
    create, validate = pydantic.BaseModel.__init__, pydantic.BaseModel.model_validate.__func__
    stage = Registry.stage

    def counted_hook(self: Any, **kwargs: Any) -> Any:
        calls.note("hook")
        return call_hook(self, **kwargs)

    def counted_init(self: Any, /, **data: Any) -> None:
        calls.note("validation")
        create(self, **data)

    def counted_validate(cls: Any, *args: Any, **kwargs: Any) -> Any:
        calls.note("validation")
        return validate(cls, *args, **kwargs)

    def counted_stage(self: Any, name: str) -> Any:
        calls.note("look-up")
        return stage(self, name)

    monkeypatch.setattr(pluggy.HookCaller, "__call__", counted_hook)
    monkeypatch.setattr(pydantic.BaseModel, "__init__", counted_init)
    monkeypatch.setattr(pydantic.BaseModel, "model_validate", classmethod(counted_validate))
    monkeypatch.setattr(Registry, "stage", counted_stage)
    yield calls


def test_no_hook_no_validation_and_no_look_up_at_the_step(make_llm: Maker, calls: Calls) -> None:
    engine = make_llm(flat_table(97)).llm_engine
    assert calls.counts["hook"] > 0  # the counter sees pluggy at load
    for place, kind in enumerate(KINDS * 2):
        engine.add_request(str(place), [3, 4, place], SamplingParams(max_tokens=6, **kind))
    assert calls.counts["validation"] > 0  # and pydantic and the registry at admission
    assert calls.counts["look-up"] > 0
    calls.counts.clear()

    finished = 0
    for _ in range(8):
        finished += sum(output.finished for output in engine.step())

    assert finished == 2 * len(KINDS)
    assert calls.counts == Counter()


def test_preemption_and_a_second_prefill_call_nothing_either(make_llm: Maker, calls: Calls) -> None:
    large = make_llm(flat_table(97)).llm_engine
    block = large.parts.runner.backend.bytes_per_block(large.parts.runner.backend.layout)
    engine = make_llm(flat_table(97), kv_cache_memory_bytes=8 * block, max_model_len=128).llm_engine
    for place, kind in enumerate(KINDS):
        own = {**kind, "n": 1, "min_tokens": 0, "stop_token_ids": []}
        engine.add_request(str(place), [3] * 14, SamplingParams(max_tokens=20, **own))
    calls.counts.clear()

    while engine.has_unfinished_requests():
        engine.step()

    assert engine.parts.scheduler.num_preemptions > 0
    assert calls.counts == Counter()

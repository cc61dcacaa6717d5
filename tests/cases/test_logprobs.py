"""Log-probs: DEC-054 to DEC-058 and DEC-063."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decodekit import SamplingParams
from decodekit.core.errors import ValidationError

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make


@pytest.fixture(scope="module")
def untied_table() -> Tensor:
    """97 tokens; each row is a permutation of 97 different logits in multiples of 1/16."""
    generator = torch.Generator().manual_seed(21)
    rows = [torch.randperm(97, generator=generator) for _ in range(97)]
    return (torch.stack(rows) - 60) / 16.0


@pytest.fixture(scope="module")
def untied(make: Make, untied_table: Tensor) -> Bench:
    """That table, with no limit on the number of log-probs."""
    return make(untied_table, max_logprobs=-1)


def first_position(bench: Bench, prompt: list[int], **fields: Any) -> dict[int, Any]:
    """Log-probs of the first token."""
    fields = {"max_tokens": 1, "seed": 4, **fields}
    logprobs = bench.generate([prompt], SamplingParams(**fields))[0].outputs[0].logprobs
    assert logprobs is not None
    return dict(logprobs[0])


def test_dec_054_minus_infinity_breaks_nothing(untied: Bench) -> None:
    for mode in ("raw", "masked", "final", "raw_logits", "processed_logits"):
        for fields in (
            {"top_k": 1, "prompt_logprobs": 5},
            {"allowed_token_ids": [3]},
        ):
            params = SamplingParams(logprobs=5, logprobs_mode=mode, seed=1, max_tokens=6, **fields)
            output = untied.generate([[9, 8, 7]], params)[0]
            logprobs = output.outputs[0].logprobs
            assert logprobs is not None
            assert len(logprobs) == 6
            positions = [*logprobs, *filter(None, output.prompt_logprobs or ())]
            values = [entry.logprob for position in positions for entry in position.values()]
            assert not any(math.isnan(value) or value == math.inf for value in values)
            for token, position in zip(output.outputs[0].token_ids, logprobs, strict=True):
                assert math.isfinite(position[token].logprob)
    untied.check_answers()


def test_dec_055_default_logprobs_do_not_depend_on_sampling_settings(untied: Bench) -> None:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.1},
        {"temperature": 2.0},
        {"top_p": 0.1},
        {"top_k": 1},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"logit_bias": {5: 40.0, 6: -40.0}},
        {"bad_words": []},
    ]
    expected = untied.logprobs_after(40)
    best = list(np.argsort(-expected)[:3])

    for fields in settings:
        position = first_position(untied, [12, 40], logprobs=3, **fields)
        top = {token: entry for token, entry in position.items() if (entry.rank or 0) <= 3}
        assert sorted(top) == sorted(best), fields
        for token, entry in position.items():
            assert entry.logprob == pytest.approx(expected[token], abs=1e-3), fields


@pytest.mark.parametrize("where", ["engine", "request"])
def test_dec_056_processed_logprobs_are_those_of_the_draw(
    make: Make, untied_table: Tensor, where: str
) -> None:
    mode = "processed_logprobs"
    bench = make(
        untied_table, max_logprobs=-1, **({"logprobs_mode": mode} if where == "engine" else {})
    )
    fields = {"logprobs_mode": mode} if where == "request" else {}

    position = first_position(bench, [40], temperature=0.5, top_k=3, logprobs=-1, **fields)

    row = bench.logprobs_after(40) / 0.5
    kept = np.argsort(-row)[:3]
    mass = np.exp(row[kept] - row[kept].max())
    expected = dict(zip(kept.tolist(), (mass / mass.sum()).tolist(), strict=True))
    assert sorted(position) == list(range(97))
    alive = {token: math.exp(e.logprob) for token, e in position.items() if e.logprob > -math.inf}
    assert alive == pytest.approx(expected, abs=1e-5)
    assert sum(alive.values()) == pytest.approx(1.0, abs=1e-5)


def test_dec_057_how_many_alternatives_come_back(untied: Bench) -> None:
    counts = [None, 0, 1, 5, -1]
    params = [SamplingParams(logprobs=count, seed=2, max_tokens=8) for count in counts]

    outputs = untied.generate([[3]] * 5, params)

    assert outputs[0].outputs[0].logprobs is None
    allowed = [{0}, {1}, {1, 2}, {5, 6}, {97}]
    for output, sizes in list(zip(outputs, allowed, strict=True))[1:]:
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        assert len(logprobs) == 8
        assert {len(position) for position in logprobs} <= sizes


@pytest.mark.parametrize("place", [1, 3, 20])
def test_dec_058_alternatives_are_distinct_sorted_and_ranked(untied: Bench, place: int) -> None:
    row = untied.logprobs_after(40)
    forced = int(np.argsort(-row)[place - 1])

    for flat in (False, True):
        params = SamplingParams(
            logprobs=4, allowed_token_ids=[forced], max_tokens=1, flat_logprobs=flat
        )
        logprobs = untied.generate([[40]], params)[0].outputs[0].logprobs
        assert logprobs is not None
        position = logprobs[0]
        ids = list(position)
        assert len(ids) == (4 if place <= 4 else 5)
        assert ids[0] == forced
        assert position[forced].rank == place
        others = [position[token].logprob for token in ids[1:]]
        assert others == sorted(others, reverse=True)
        for token, entry in position.items():
            assert entry.rank == 1 + int((row > row[token]).sum())
            assert entry.logprob == pytest.approx(row[token], abs=1e-4)


def test_dec_063_counts_beyond_the_limit_or_the_vocabulary(untied: Bench, rough: Bench) -> None:
    with pytest.raises(ValidationError, match="logprobs") as caught:
        SamplingParams(logprobs=-2)
    assert caught.value.parameter == "logprobs"
    for fields in ({"logprobs": 21}, {"prompt_logprobs": 21}, {"logprobs": -1}):
        with pytest.raises(ValidationError, match="max_logprobs"):
            rough.generate([[1]], SamplingParams(**fields))  # type: ignore[arg-type]
    rough.check_answers()

    assert sorted(first_position(untied, [40], logprobs=98)) == list(range(97))
    output = untied.generate([[1, 2]], SamplingParams(prompt_logprobs=98, max_tokens=1))[0]
    assert output.prompt_logprobs is not None
    assert sorted(output.prompt_logprobs[1] or ()) == list(range(97))
    untied.check_answers()


def test_dec_063_ids_to_score_outside_the_vocabulary(untied: Bench) -> None:
    position = first_position(untied, [40], temperature=0.0, logprob_token_ids=[0, 96])
    expected = untied.logprobs_after(40)
    assert {0, 96} <= set(position)
    for token, entry in position.items():
        assert entry.logprob == pytest.approx(expected[token], abs=1e-4)
    for bad in ([-1], [97], [0, 97]):
        with pytest.raises(ValidationError, match="logprob_token_ids") as caught:
            untied.generate([[40]], SamplingParams(logprob_token_ids=bad, max_tokens=1))
        assert caught.value.parameter == "logprob_token_ids"
    untied.check_answers()

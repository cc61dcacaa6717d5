"""Repetition, frequency and presence penalties."""

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from decodekit.core.errors import ChainError
from decodekit.core.stage import Stage
from decodekit.logits_processors.bias.penalties import (
    FrequencyPenalty,
    PresencePenalty,
    RepetitionPenalty,
)
from decodekit.plugins.author.rows import apply_stage, make_context, make_rows

INF = float("inf")
VOCAB = 23
STAGES = [RepetitionPenalty, FrequencyPenalty, PresencePenalty]
PENALTY = {RepetitionPenalty: 1.3, FrequencyPenalty: 0.75, PresencePenalty: -0.5}


def histories(count: int, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    draw = random.Random(seed)
    prompts = [[draw.randrange(VOCAB) for _ in range(draw.randint(1, 90))] for _ in range(count)]
    outputs = [[draw.randrange(VOCAB) for _ in range(draw.randint(0, 40))] for _ in range(count)]
    return prompts, outputs


def by_brute_force(
    stage: type[Stage], logits: list[float], history: list[int], params: dict[str, Any]
) -> list[float]:
    """The definition, token by token, in double precision."""
    window = history[-params["last_n"] :] if params.get("last_n") else history
    sustain, decay = params.get("sustain"), params.get("decay") or 0
    penalty = params["penalty"]
    result = list(logits)
    for token in set(window) - set(params.get("exclude", ())):
        weights = []
        for place, seen in enumerate(window):
            age = len(window) - 1 - place
            weight = 1.0
            if sustain is not None and age >= sustain:
                weight = max(0.0, 1 - (age - sustain) / decay) if decay else 0.0
            if seen == token:
                weights.append(weight)
        if stage is RepetitionPenalty:
            factor = penalty ** max(weights)
            result[token] *= 1 / factor if result[token] > 0 else factor
        else:
            scale = sum(weights) if stage is FrequencyPenalty else max(weights)
            result[token] -= penalty * scale
    return result


def test_repetition_equals_transformers(rng: torch.Generator) -> None:
    prompts, outputs = histories(6)
    logits = torch.randn(6, VOCAB, generator=rng) * 4

    result = apply_stage(
        RepetitionPenalty, logits, [{"penalty": 1.3}] * 6, prompts=prompts, outputs=outputs
    )

    penalty = float(torch.tensor(1.3))
    for row in range(6):
        reference = RepetitionPenaltyLogitsProcessor(penalty)
        history = torch.tensor([prompts[row] + outputs[row]])
        assert torch.equal(result[row : row + 1], reference(history, logits[row : row + 1].clone()))


def test_frequency_and_presence_equal_vllms_formula(rng: torch.Generator) -> None:
    prompts, outputs = histories(6)
    logits = torch.randn(6, VOCAB, generator=rng)
    frequencies = torch.tensor([0.5, -0.5, 2.0, 0.1, 1.0, 0.3])
    presences = torch.tensor([0.2, 2.0, -2.0, 0.7, -0.1, 1.0])

    result = logits
    for stage, values in ((FrequencyPenalty, frequencies), (PresencePenalty, presences)):
        params = [{"penalty": float(value)} for value in values]
        result = apply_stage(stage, result, params, prompts=prompts, outputs=outputs)

    counts = torch.stack([torch.bincount(torch.tensor(o).long(), minlength=VOCAB) for o in outputs])
    expected = logits - frequencies[:, None] * counts
    expected -= presences[:, None] * (counts > 0)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("scope", ["prompt", "output", "both"])
@pytest.mark.parametrize(
    "window",
    [
        {},
        {"last_n": 1},
        {"last_n": 12},
        {"last_n": 5000},
        {"sustain": 6},
        {"sustain": 4, "decay": 9},
        {"sustain": 0, "decay": 30},
        {"sustain": 3, "decay": 20, "last_n": 10},
    ],
)
def test_scopes_and_windows_equal_brute_force(
    stage: type[Stage], scope: str, window: dict[str, int], rng: torch.Generator
) -> None:
    prompts, outputs = histories(5, seed=3)
    logits = torch.randn(5, VOCAB, generator=rng) * 3
    params = {"penalty": PENALTY[stage], "scope": scope, **window}

    result = apply_stage(stage, logits, [params] * 5, prompts=prompts, outputs=outputs)

    for row in range(5):
        scoped = {
            "prompt": prompts[row],
            "output": outputs[row],
            "both": prompts[row] + outputs[row],
        }[scope]
        expected = by_brute_force(stage, logits[row].double().tolist(), scoped, params)
        assert result[row].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("stage", STAGES)
def test_a_window_over_everything_is_bit_equal_to_no_window(
    stage: type[Stage], rng: torch.Generator
) -> None:
    prompts, outputs = histories(4, seed=8)
    logits = torch.randn(4, VOCAB, generator=rng) * 3
    params = {"penalty": PENALTY[stage]}

    plain = apply_stage(stage, logits, [params] * 4, prompts=prompts, outputs=outputs)
    windowed = apply_stage(
        stage, logits, [{**params, "last_n": 10**6}] * 4, prompts=prompts, outputs=outputs
    )

    assert torch.equal(plain, windowed)


@pytest.mark.parametrize("window", [{}, {"last_n": 100}])
def test_excluded_ids_are_not_penalised(window: dict[str, int]) -> None:
    logits = torch.tensor([[2.0, 2.0, 2.0, 2.0]] * 2)

    result = apply_stage(
        RepetitionPenalty,
        logits,
        [{"penalty": 2.0, "exclude": [1], **window}, {"penalty": 4.0, "exclude": [0, 2], **window}],
        prompts=[[0, 1], [0, 1]],
        outputs=[[2], [2]],
    )

    assert result.tolist() == [[1.0, 2.0, 1.0, 2.0], [2.0, 0.5, 2.0, 2.0]]


@pytest.mark.parametrize("window", [{}, {"last_n": 100}])
@pytest.mark.parametrize("penalty", [0.5, 3.0])
def test_masked_tokens_stay_masked_and_zero_stays_zero(
    window: dict[str, int], penalty: float
) -> None:
    logits = torch.tensor([[-INF, 0.0, -1.0, -INF]])

    result = apply_stage(
        RepetitionPenalty,
        logits,
        [{"penalty": penalty, **window}],
        prompts=[[0, 1, 2]],
        outputs=[[3, 3]],
    )

    assert result.tolist() == [[-INF, 0.0, -penalty, -INF]]


@pytest.mark.parametrize("stage", STAGES)
def test_taken_back_tokens_no_longer_count(stage: type[Stage]) -> None:
    logits = torch.ones(1, 6)
    made = make_rows(
        stage,
        [{"penalty": PENALTY[stage]}],
        vocab_size=6,
        prompts=[[1]],
        outputs=[[2, 3, 3, 1]],
    )
    made.rows.table.seen.rollback(made.rows.host_slots[0], [3, 1])
    made.rows.sources[0].output_ids[:] = [2, 3]
    made.rows.advance()

    result = logits.clone()
    stage.prototype().transform(result, made.view)

    fresh = apply_stage(
        stage, logits, [{"penalty": PENALTY[stage]}], prompts=[[1]], outputs=[[2, 3]]
    )
    assert torch.equal(result, fresh)


@pytest.mark.parametrize("stage", STAGES)
def test_neutral_values_and_forgetful_windows_are_identities(stage: type[Stage]) -> None:
    neutral = 1.0 if stage is RepetitionPenalty else 0.0

    for params in ({}, {"penalty": neutral}, {"penalty": 1.5, "sustain": 0}):
        assert stage.is_identity(stage.validate(params))
    assert not stage.is_identity(stage.validate({"penalty": 1.5, "sustain": 0, "decay": 1}))


@pytest.mark.parametrize(
    ("stage", "params"),
    [
        (RepetitionPenalty, {"penalty": 0.0}),
        (RepetitionPenalty, {"penalty": INF}),
        (FrequencyPenalty, {"penalty": 2.5}),
        (PresencePenalty, {"penalty": float("nan")}),
        (PresencePenalty, {"penalty": 1.0, "last_n": 0}),
        (PresencePenalty, {"penalty": 1.0, "scope": "all"}),
        (PresencePenalty, {"penalty": 1.0, "exclude": [1]}),
    ],
)
def test_values_out_of_range_are_refused(stage: type[Stage], params: dict[str, Any]) -> None:
    with pytest.raises(ChainError, match=stage.name):
        stage.validate(params)


def test_decay_without_sustain_and_unknown_excluded_ids_are_refused() -> None:
    context = make_context(10)

    with pytest.raises(ChainError, match="decay must come with sustain"):
        PresencePenalty.bind(PresencePenalty.validate({"penalty": 1, "decay": 3}), context)
    with pytest.raises(ChainError, match=r"exclude .*\[0, 10\)"):
        RepetitionPenalty.bind(RepetitionPenalty.validate({"penalty": 2, "exclude": [10]}), context)


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=30),
    theta=st.floats(0.05, 20),
)
def test_repetition_counts_a_token_once_however_often_it_was_seen(
    prompt: list[int], output: list[int], theta: float
) -> None:
    logits = torch.linspace(-3, 3, VOCAB)[None]
    params = [{"penalty": theta}]

    often = apply_stage(RepetitionPenalty, logits, params, prompts=[prompt], outputs=[output])
    once = apply_stage(
        RepetitionPenalty, logits, params, prompts=[sorted({*prompt, *output})], outputs=[[]]
    )

    assert torch.equal(often, once)

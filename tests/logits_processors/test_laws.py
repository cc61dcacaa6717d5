"""The laws that hold for every built-in stage, each tried on all of them."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from decodekit.core.batch import Ranking
from decodekit.core.stage import CutStage, Kind, Stage
from decodekit.kernels.ops import rank_top
from decodekit.logits_processors.bias import (
    dry,
    length_decay,
    logit_bias,
    penalties,
    sequence_bias,
)
from decodekit.logits_processors.cut import (
    epsilon_eta,
    min_p,
    p_less,
    tail_free,
    top_a,
    top_h,
    top_k,
    top_k_top_p,
    top_n_sigma,
    top_p,
    typical,
    xtc,
)
from decodekit.logits_processors.force import forced_tokens
from decodekit.logits_processors.mark import green_list, synthid
from decodekit.logits_processors.mask import (
    allowed,
    bad_words,
    min_tokens,
    no_repeat_ngram,
    vocab_padding,
)
from decodekit.logits_processors.shape import (
    dynamic_temperature,
    quadratic,
    temperature,
    temperature_schedule,
)
from decodekit.plugins.author.rows import apply_stage, make_context, make_rows

INF = float("inf")
Case = tuple[type[Stage], dict[str, Any]]

MASKS: list[Case] = [
    (vocab_padding.VocabPadding, {}),
    (allowed.AllowedTokens, {"ids": [0, 2, 5]}),
    (allowed.SuppressTokens, {"ids": [1, 4]}),
    (allowed.SuppressTokens, {"ids": [1, 4], "begin_only": True}),
    (bad_words.BadWords, {"words": [[1], [2, 3], [4, 4]]}),
    (bad_words.BadWords, {"words": [[3, 2]], "scope": "both"}),
    (min_tokens.MinTokens, {"n": 3}),
    (no_repeat_ngram.NoRepeatNGram, {"n": 1}),
    (no_repeat_ngram.NoRepeatNGram, {"n": 2, "whitelist": [3]}),
    (no_repeat_ngram.NoRepeatNGram, {"n": 2, "window": 4}),
]
BIASES: list[Case] = [
    (logit_bias.LogitBias, {"bias": {0: 1.25, 3: -4.0, 4: -INF}}),
    (penalties.RepetitionPenalty, {"penalty": 1.3}),
    (penalties.RepetitionPenalty, {"penalty": 0.7, "exclude": [1]}),
    (penalties.RepetitionPenalty, {"penalty": 1.3, "sustain": 1, "decay": 3}),
    (penalties.FrequencyPenalty, {"penalty": 0.7}),
    (penalties.FrequencyPenalty, {"penalty": 0.7, "scope": "both", "last_n": 4}),
    (penalties.PresencePenalty, {"penalty": -1.1}),
    (penalties.PresencePenalty, {"penalty": 1.1, "scope": "prompt"}),
    (sequence_bias.SequenceBias, {"bias": [([1], 2.5), ([2, 3], -7.0), ([4, 2, 0], -INF)]}),
    (dry.Dry, {"multiplier": 0.8, "allowed_length": 1, "breakers": [[5], [3, 0]]}),
    (length_decay.LengthDecay, {"start": 1, "factor": 1.5}),
]
SHAPES: list[Case] = [
    (temperature.Temperature, {"t": 0.3}),
    (temperature.Temperature, {"t": 7.0}),
    (dynamic_temperature.DynamicTemperature, {"low": 0.0, "high": 2.5, "exponent": 0.7}),
    (temperature_schedule.TemperatureSchedule, {"points": [(0, 0.4), (3, 2.0, "cosine"), (9, 1)]}),
    (quadratic.Quadratic, {"factor": 0.3}),
    (quadratic.Quadratic, {"factor": 2.0, "curve": 3.0}),
]
CUTS: list[Case] = [
    (top_k.TopK, {"k": 1}),
    (top_k.TopK, {"k": 3}),
    (top_k.TopK, {"k": 3, "ties": "index"}),
    (top_k.TopK, {"k": 2, "min_keep": 4}),
    (top_p.TopP, {"p": 0.6}),
    (top_p.TopP, {"p": 0.6, "ties": "value"}),
    (top_p.TopP, {"p": 0.05, "min_keep": 3}),
    (min_p.MinP, {"p": 0.2}),
    (min_p.MinP, {"p": 1.0}),
    (top_k_top_p.TopKTopP, {"k": 4, "p": 0.7}),
    (top_k_top_p.TopKTopP, {"p": 0.7, "min_keep": 3}),
    (epsilon_eta.Epsilon, {"epsilon": 0.05}),
    (epsilon_eta.Epsilon, {"epsilon": 0.9, "min_keep": 3}),
    (epsilon_eta.Eta, {"epsilon": 0.2}),
    (epsilon_eta.Eta, {"epsilon": 0.9, "min_keep": 3}),
    (top_a.TopA, {"a": 0.6}),
    (top_n_sigma.TopNSigma, {"n": 0.8}),
    (top_n_sigma.TopNSigma, {"n": 0.01, "min_keep": 3}),
    (tail_free.TailFree, {"z": 0.6}),
    (top_h.TopH, {"alpha": 0.4}),
    (top_h.TopH, {"alpha": 0.7, "window": 5}),
    (top_h.TopH, {"alpha": 0.01, "window": 2, "min_keep": 3}),
    (p_less.PLess, {}),
    (p_less.PLess, {"min_keep": 3}),
]
LOOSE_CUTS: list[Case] = [  # may drop the best token
    (typical.TypicalP, {"p": 0.4}),
    (typical.TypicalP, {"p": 0.05, "min_keep": 3}),
    (xtc.Xtc, {"probability": 1.0, "threshold": 0.1}),
    (xtc.Xtc, {"probability": 0.5, "threshold": 0.02, "min_keep": 3}),
    (xtc.Xtc, {"probability": 1.0, "threshold": 0.05, "protect": [0]}),
    (xtc.Xtc, {"probability": 0.7, "threshold": 0.05, "mode": "expected"}),
]
MARKS: list[Case] = [
    (green_list.GreenList, {}),
    (green_list.GreenList, {"context": 2, "scheme": "selfhash", "key": 17}),
    (synthid.SynthId, {"keys": [7, 90, -3], "ngram": 3}),
]
FORCES: list[Case] = [(forced_tokens.ForcedTokens, {"prefix": [2, 1, 2]})]
ALL = MASKS + BIASES + SHAPES + CUTS + LOOSE_CUTS + MARKS
PROMPTS = [[3], [2, 3], [0, 0, 5], [4, 1, 2, 3]]
OUTPUTS = [[], [2], [4, 2], [1, 1, 4, 3]]


def named(cases: list[Case]) -> Any:
    return pytest.mark.parametrize(
        ("stage", "params"), cases, ids=[f"{stage.name}-{params}" for stage, params in cases]
    )


def run(stage: type[Stage], params: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
    """Apply one stage to rows with various histories; the last tenth of the head is padding."""
    count, vocab = logits.shape
    context = make_context(
        vocab, tokenizer_size=max(6, vocab - vocab // 10), eos_ids=(0,), stop_ids=(0, 5)
    )
    return apply_stage(
        stage,
        logits,
        [params] * count,
        prompts=[PROMPTS[row % 4] for row in range(count)],
        outputs=[OUTPUTS[row % 4] for row in range(count)],
        context=context,
    )


def rows_with_dead_tokens(
    count: int, vocab: int, generator: torch.Generator, spread: float = 2.0
) -> torch.Tensor:
    """Random rows on a coarse grid, so that ties are common, a third of the tokens masked."""
    logits = (torch.randn(count, vocab, generator=generator) * spread * 4).round() / 4
    dead = torch.rand(count, vocab, generator=generator) < 0.33
    dead[:, 2] = False
    return logits.masked_fill(dead, -INF)


@named(ALL)
@pytest.mark.parametrize("vocab", [6, 97, 257, 1009])
def test_no_stage_revives_a_masked_token(
    stage: type[Stage], params: dict[str, Any], vocab: int, rng: torch.Generator
) -> None:
    logits = rows_with_dead_tokens(8, vocab, rng)

    result = run(stage, params, logits)

    assert bool(result[logits.isneginf()].isneginf().all())
    assert not bool(result.isnan().any())
    assert not bool(result.isposinf().any())


@named(ALL + FORCES)
@pytest.mark.parametrize("vocab", [6, 257, 1009])
def test_a_row_does_not_depend_on_its_batch(
    stage: type[Stage], params: dict[str, Any], vocab: int, rng: torch.Generator
) -> None:
    logits = rows_with_dead_tokens(8, vocab, rng)
    order = torch.randperm(8, generator=rng).tolist()

    def tried(members: list[int]) -> torch.Tensor:
        return apply_stage(
            stage,
            logits[members],
            [params] * len(members),
            prompts=[PROMPTS[row % 4] for row in members],
            outputs=[OUTPUTS[row % 4] for row in members],
            keys=[1000 + row for row in members],
        )

    together = tried(list(range(8)))

    assert torch.equal(tried(order), together[order])
    for row in range(8):
        assert torch.equal(tried([row])[0], together[row])


@named(SHAPES + CUTS + LOOSE_CUTS + MARKS)
def test_a_single_alive_token_survives(stage: type[Stage], params: dict[str, Any]) -> None:
    logits = torch.full((2, 300), -INF)
    logits[0, 299] = -12.5
    logits[1, 0] = 3e4

    result = run(stage, params, logits)

    assert (result > -INF).nonzero().tolist() == [[0, 299], [1, 0]]


@named(SHAPES + CUTS + LOOSE_CUTS + MARKS)
def test_a_vocabulary_of_one_token_works(stage: type[Stage], params: dict[str, Any]) -> None:
    result = apply_stage(stage, torch.tensor([[1.5]]), [params])

    assert bool((result > -INF).all())


@named(SHAPES + CUTS + LOOSE_CUTS + MARKS)
def test_a_stage_leaves_a_dead_row_dead(stage: type[Stage], params: dict[str, Any]) -> None:
    result = run(stage, params, torch.full((2, 40), -INF))

    assert bool(result.isneginf().all())


@named(CUTS)
@settings(max_examples=30)
@given(
    grid=st.lists(st.integers(-6, 6), min_size=6, max_size=60),
    dead=st.sets(st.integers(0, 59)),
    scale=st.sampled_from([0.25, 1.0, 7.0]),
)
def test_a_cut_keeps_a_prefix_of_the_order_and_the_best_token(
    stage: type[Stage], params: dict[str, Any], grid: list[int], dead: set[int], scale: float
) -> None:
    values = [-INF if i in dead else scale * value for i, value in enumerate(grid)]
    logits = torch.tensor([values])
    alive = [i for i in range(len(grid)) if values[i] > -INF]

    result = apply_stage(stage, logits, [params])

    order = sorted(alive, key=lambda i: (-values[i], i))
    kept = [i for i in alive if result[0, i] > -INF]
    assert sorted(order[: len(kept)]) == kept
    assert bool(kept) == bool(alive)
    assert result[0, kept].tolist() == [values[i] for i in kept]
    assert len(kept) >= min(params.get("min_keep", 1), len(alive))


@named(LOOSE_CUTS)
@pytest.mark.parametrize("vocab", [6, 257])
def test_a_loose_cut_keeps_as_many_as_it_must_and_changes_none(
    stage: type[Stage], params: dict[str, Any], vocab: int, rng: torch.Generator
) -> None:
    logits = rows_with_dead_tokens(60, vocab, rng)

    result = run(stage, params, logits)

    kept = result > -INF
    floor = (logits > -INF).sum(1).clamp(max=params.get("min_keep", 1))
    assert bool((kept.sum(1) >= floor).all())
    assert int(kept.sum()) < int((logits > -INF).sum()) or params.get("mode") == "expected"
    if params.get("mode") != "expected":
        assert torch.equal(result[kept], logits[kept])


@named(SHAPES + CUTS)
def test_what_claims_to_keep_the_winner_does(
    stage: type[Stage], params: dict[str, Any], rng: torch.Generator
) -> None:
    assert stage.argmax_invariant(stage.validate(params))
    logits = rows_with_dead_tokens(200, 97, rng)

    result = run(stage, params, logits)

    assert torch.equal(result.argmax(1), logits.argmax(1))


@named(MASKS + BIASES + LOOSE_CUTS + MARKS + FORCES)
def test_what_can_change_the_winner_says_so(stage: type[Stage], params: dict[str, Any]) -> None:
    assert not stage.argmax_invariant(stage.validate(params))


@named([case for case in CUTS if not case[0].caps.needs_full_row])
@pytest.mark.parametrize("vocab", [97, 257, 1009])
def test_a_cut_of_the_best_tokens_equals_the_cut_of_the_row(
    stage: type[Stage], params: dict[str, Any], vocab: int, rng: torch.Generator
) -> None:
    logits = rows_with_dead_tokens(40, vocab, rng, spread=4.0)
    whole = apply_stage(stage, logits, [params] * 40)
    runner = stage.prototype()
    assert isinstance(runner, CutStage)
    made = make_rows(stage, [params] * 40, vocab_size=vocab)
    ranked = rank_top(logits, 48)
    ranking = Ranking(
        ranked.values, ranked.ids, ranked.bound, total_of=lambda: Ranking.of_row(logits).total
    )

    mask = runner.cut(ranking, made.view)

    inside = (whole > -INF).sum(1) < 48
    result = torch.empty_like(logits)
    ranking.write(result, mask)
    assert int(inside.sum()) > 20
    assert torch.equal(result[inside], whole[inside])


def test_every_stage_belongs_to_the_kind_of_its_folder() -> None:
    for cases, kind in ((MASKS, Kind.MASK), (BIASES, Kind.BIAS), (SHAPES, Kind.SHAPE)):
        assert {stage.kind for stage, _ in cases} == {kind}
    assert {stage.kind for stage, _ in CUTS + LOOSE_CUTS} == {Kind.CUT}
    assert {stage.kind for stage, _ in MARKS} == {Kind.MARK}
    assert {stage.kind for stage, _ in FORCES} == {Kind.FORCE}

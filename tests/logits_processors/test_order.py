"""What commutes and what does not, and chains of several stages with known results."""

from typing import Any

import pytest
import torch

from decodekit.core.stage import Stage
from decodekit.logits_processors.bias.logit_bias import LogitBias
from decodekit.logits_processors.bias.penalties import (
    FrequencyPenalty,
    PresencePenalty,
    RepetitionPenalty,
)
from decodekit.logits_processors.cut.epsilon_eta import Epsilon, Eta
from decodekit.logits_processors.cut.min_p import MinP
from decodekit.logits_processors.cut.p_less import PLess
from decodekit.logits_processors.cut.tail_free import TailFree
from decodekit.logits_processors.cut.top_a import TopA
from decodekit.logits_processors.cut.top_h import TopH
from decodekit.logits_processors.cut.top_k import TopK
from decodekit.logits_processors.cut.top_n_sigma import TopNSigma
from decodekit.logits_processors.cut.top_p import TopP
from decodekit.logits_processors.cut.typical import TypicalP
from decodekit.logits_processors.cut.xtc import Xtc
from decodekit.logits_processors.mask.allowed import SuppressTokens
from decodekit.logits_processors.shape.dynamic_temperature import DynamicTemperature
from decodekit.logits_processors.shape.quadratic import Quadratic
from decodekit.logits_processors.shape.temperature import Temperature
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")
Step = tuple[type[Stage], dict[str, Any]]

TEMPERATURE: Step = (Temperature, {"t": 0.7})
TOP_K: Step = (TopK, {"k": 20})
TOP_P: Step = (TopP, {"p": 0.9})
MIN_P: Step = (MinP, {"p": 0.05})
MASK: Step = (SuppressTokens, {"ids": list(range(0, 400, 7))})
BIAS: Step = (LogitBias, {"bias": {i: 1.5 - i % 4 for i in range(40)}})
REPETITION: Step = (RepetitionPenalty, {"penalty": 1.3})
TYPICAL: Step = (TypicalP, {"p": 0.9})
EPSILON: Step = (Epsilon, {"epsilon": 1e-3})
ETA: Step = (Eta, {"epsilon": 1e-3})
TOP_A: Step = (TopA, {"a": 0.2})
TAIL_FREE: Step = (TailFree, {"z": 0.95})
N_SIGMA: Step = (TopNSigma, {"n": 1.5})
TOP_H: Step = (TopH, {"alpha": 0.4})
P_LESS: Step = (PLess, {})
XTC: Step = (Xtc, {"probability": 1.0, "threshold": 0.1})
QUADRATIC: Step = (Quadratic, {"factor": 0.3})
DYNAMIC: Step = (DynamicTemperature, {"low": 0.4, "high": 1.6})


def run(
    logits: torch.Tensor, *steps: Step, prompt: list[int] | None = None, output: Any = ()
) -> torch.Tensor:
    for stage, params in steps:
        logits = apply_stage(
            stage,
            logits,
            [params] * len(logits),
            prompts=[prompt or [0]] * len(logits),
            outputs=[list(output)] * len(logits),
        )
    return logits


def kept(logits: torch.Tensor) -> list[int]:
    return (logits[0] > -INF).nonzero()[:, 0].tolist()


def agreement(one: Step, other: Step, rng: torch.Generator) -> float:
    """The share of random rows on which two stages give the same set in either order."""
    logits = torch.randn(400, 400, generator=rng) * 3
    prompt = list(range(0, 400, 3))
    forth = run(logits, one, other, prompt=prompt)
    back = run(logits, other, one, prompt=prompt)
    same_set = forth.isneginf() == back.isneginf()
    near = (forth.softmax(1) - back.softmax(1)).abs() < 1e-5
    return float((same_set & near).all(1).float().mean())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TEMPERATURE, TOP_K),
        (TEMPERATURE, MASK),
        (TEMPERATURE, REPETITION),
        (MIN_P, TOP_K),
        (MASK, BIAS),
        (MASK, REPETITION),
        (TEMPERATURE, N_SIGMA),
        (TOP_K, QUADRATIC),
    ],
)
def test_pairs_that_commute_do(one: Step, other: Step, rng: torch.Generator) -> None:
    assert agreement(one, other, rng) == 1.0


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TEMPERATURE, TOP_P),
        (TEMPERATURE, MIN_P),
        (TOP_K, TOP_P),
        (BIAS, REPETITION),
        (TEMPERATURE, TYPICAL),
        (TEMPERATURE, EPSILON),
        (TEMPERATURE, ETA),
        (TEMPERATURE, TOP_H),
        (TEMPERATURE, QUADRATIC),
        (TEMPERATURE, DYNAMIC),
        (TOP_K, TOP_H),
        (TOP_K, N_SIGMA),
        (N_SIGMA, QUADRATIC),
        (N_SIGMA, TOP_P),
    ],
)
def test_pairs_whose_order_is_visible_differ(one: Step, other: Step, rng: torch.Generator) -> None:
    assert agreement(one, other, rng) < 0.5


@pytest.mark.parametrize(
    ("step", "always"),
    [
        (TOP_K, True),
        (MIN_P, True),
        (EPSILON, True),
        (TOP_P, False),
        (TYPICAL, False),
        (TOP_H, False),
        (N_SIGMA, False),
        (TOP_A, False),
        (TAIL_FREE, False),
    ],
)
def test_some_cuts_cut_again_when_asked_twice(
    step: Step, always: bool, rng: torch.Generator
) -> None:
    logits = torch.randn(50, 400, generator=rng) * 3

    once = run(logits, step)
    twice = run(once, step)

    assert torch.equal(once, twice) == always


@pytest.mark.parametrize(
    "step",
    [TOP_P, MIN_P, TYPICAL, EPSILON, ETA, TOP_A, TAIL_FREE, N_SIGMA, TOP_H, P_LESS, XTC]
    + [QUADRATIC, DYNAMIC],
    ids=lambda step: step[0].name,
)
def test_a_shift_of_the_whole_row_changes_no_distribution(step: Step, rng: torch.Generator) -> None:
    logits = (torch.randn(60, 300, generator=rng) * 12).round() / 4  # exact with the shift

    plain, shifted = run(logits, step), run(logits + 16.0, step)

    assert torch.equal(plain.isneginf(), shifted.isneginf())
    assert torch.allclose(plain.softmax(1), shifted.softmax(1), atol=2e-6)


@pytest.mark.parametrize(
    ("step", "least"), [((TypicalP, {"p": 0.2}), 0.02), (XTC, 0.1)], ids=["typical_p", "xtc"]
)
def test_these_cuts_change_the_winner(step: Step, least: float, rng: torch.Generator) -> None:
    logits = torch.randn(400, 400, generator=rng) * 2

    changed = run(logits, step).argmax(1) != logits.argmax(1)

    assert float(changed.float().mean()) > least


def test_top_p_after_top_k_sees_the_mass_of_the_survivors() -> None:
    row = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()

    assert kept(run(row, (TopK, {"k": 2}), (TopP, {"p": 0.5}))) == [0]
    stated = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    assert kept(run(stated, (TopK, {"k": 2}), (TopP, {"p": 0.6}))) == [0]


@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_small_cuts_in_a_row_never_empty_the_set(spread: float, rng: torch.Generator) -> None:
    row = torch.randn(1, 64, generator=rng) * spread
    best = int(row.argmax())

    cold = run(row, (Temperature, {"t": 0.01}), (TopK, {"k": 1}), (TopP, {"p": 0.8}))
    tiny = run(row, (TopK, {"k": 2}), (TopP, {"p": 0.05}))
    three = run(row, (MinP, {"p": 0.99}), (TopK, {"k": 3}), (TopP, {"p": 0.3}))

    assert kept(cold) == [best]
    assert kept(tiny) == ([best] if spread else [0, 1, 2, 3])  # 4 of 64 equals hold 0.05
    assert kept(three) == ([best] if spread else list(range(20)))


def test_bias_comes_before_the_repetition_penalty() -> None:
    row = torch.tensor([[2.0, 2.5]])
    bias: Step = (LogitBias, {"bias": {0: 2.0}})
    penalty: Step = (RepetitionPenalty, {"penalty": 2.0})

    assert run(row, bias, penalty, prompt=[0]).tolist() == [[2.0, 2.5]]
    assert int(run(row, penalty, bias, prompt=[0]).argmax()) == 0


A, B = 0, 1


def greedy(table: dict[int, list[float]], prompt: list[int], steps: int, *chain: Step) -> list[int]:
    """Decode a model whose next logits depend on the last token alone."""
    output: list[int] = []
    for _ in range(steps):
        row = torch.tensor([table[(prompt + output)[-1]]])
        output.append(int(run(row, *chain, prompt=prompt, output=output).argmax()))
    return output


@pytest.mark.parametrize("stage", [PresencePenalty, FrequencyPenalty])
def test_presence_and_frequency_count_only_what_was_generated(stage: type[Stage]) -> None:
    table = {A: [5.0, 4.5], B: [5.0, 4.5]}

    assert greedy(table, [A, A, A], 3, (stage, {"penalty": 1.0})) == [A, B, A]


def test_repetition_counts_prompt_and_output_once_with_the_right_sign() -> None:
    step: Step = (RepetitionPenalty, {"penalty": 2.0})
    first = {A: [5.0, 4.5], B: [5.0, 4.5]}
    second = {A: [-1.0, -1.5, -30.0]}

    assert greedy(first, [A], 3, step) == [B, A, A]
    assert greedy(first, [A] * 4, 3, step) == [B, A, A]
    assert greedy(second, [A], 1, step) == [B]


def test_frequency_alternates_between_two_tokens() -> None:
    table = {A: [5.0, 4.0], B: [5.0, 4.0]}

    result = greedy(table, [A], 8, (FrequencyPenalty, {"penalty": 1.5}))

    assert result == [A, B, A, B, A, B, A, B]


@pytest.mark.parametrize(
    ("stage", "penalty"),
    [(PresencePenalty, 1.0), (FrequencyPenalty, 1.0), (RepetitionPenalty, 1.3)],
)
def test_penalties_reach_back_to_the_first_token(stage: type[Stage], penalty: float) -> None:
    vocab = 60
    x, y = 50, 51
    chain = list(range(41))  # x leads through these to a last one whose row is x 5.0, y 4.5
    table = {
        token: one_hot(vocab, {following: 9.0})
        for token, following in zip([x, *chain[:-1]], chain, strict=True)
    }
    table[chain[-1]] = one_hot(vocab, {x: 5.0, y: 4.5})

    result = greedy(table, [chain[-1]], 43, (stage, {"penalty": penalty}))

    assert result[0] == x
    assert result[42] == y


def one_hot(vocab: int, values: dict[int, float]) -> list[float]:
    row = [-30.0] * vocab
    for token, value in values.items():
        row[token] = value
    return row

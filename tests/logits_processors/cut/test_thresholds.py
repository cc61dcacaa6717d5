"""Epsilon, eta, top-a, top-n-sigma and p-less: the edges of cuts above one logit."""

from typing import Any

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.core.stage import Stage
from decodekit.logits_processors.cut.epsilon_eta import Epsilon, Eta
from decodekit.logits_processors.cut.p_less import PLess
from decodekit.logits_processors.cut.top_a import TopA
from decodekit.logits_processors.cut.top_n_sigma import TopNSigma
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")
ROW = torch.tensor([[0.5, 0.25, 0.15, 0.06, 0.04]]).log()


def kept(stage: type[Stage], row: torch.Tensor, **params: Any) -> list[int]:
    return (apply_stage(stage, row, [params])[0] > -INF).nonzero()[:, 0].tolist()


def test_epsilon_keeps_an_absolute_probability() -> None:
    assert kept(Epsilon, ROW, epsilon=0.1) == [0, 1, 2]
    assert kept(Epsilon, ROW, epsilon=0.05) == [0, 1, 2, 3]


def test_epsilon_reads_the_mass_that_is_alive() -> None:
    row = ROW.clone()
    row[0, 0] = -INF  # what is left sums to 0.5, so 0.04 counts as 0.08

    assert kept(Epsilon, row, epsilon=0.07) == [1, 2, 3, 4]


@pytest.mark.parametrize("stage", [Epsilon, Eta])
def test_the_best_token_stays_where_none_reaches_the_bar(stage: type[Stage]) -> None:
    flat = torch.zeros(1, 100)
    flat[0, 7] = 0.1

    assert kept(Epsilon, flat, epsilon=0.9) == [7]
    assert 7 in kept(stage, flat, epsilon=0.9)


def test_a_tie_for_the_best_stays_whole() -> None:
    row = torch.tensor([[1.0, 3.0, 3.0, 3.0]])

    assert kept(Epsilon, row, epsilon=0.9) == [1, 2, 3]
    assert kept(Eta, row, epsilon=0.9) == [1, 2, 3]
    assert kept(PLess, row) == [1, 2, 3]
    assert kept(TopNSigma, row, n=0.001) == [1, 2, 3]


def test_eta_lowers_the_bar_on_flat_rows() -> None:
    flat = torch.zeros(1, 1000)
    flat[0, :10] = -1.0
    sharp = flat.clone()
    sharp[0, 500] = 12.0

    assert len(kept(Epsilon, flat, epsilon=0.01)) == 990  # none reaches it, so the best tie stays
    assert len(kept(Eta, flat, epsilon=0.01)) == 1000
    assert kept(Eta, sharp, epsilon=0.01) == [500]


def test_a_bar_far_below_the_resolution_of_masses_keeps_faint_tokens() -> None:
    row = torch.tensor([[0.0, -34.0, -40.0]])

    assert kept(Epsilon, row, epsilon=1e-15) == [0, 1]
    assert kept(TopA, row, a=1e-15) == [0, 1]


def test_top_a_squares_the_best_probability() -> None:
    assert kept(TopA, ROW, a=0.2) == [0, 1, 2, 3]  # 0.2 * 0.25 = 0.05
    assert kept(TopA, ROW, a=0.5) == [0, 1, 2]
    assert kept(TopA, torch.tensor([[0.9, 0.1]]).log(), a=0.2) == [0]
    assert kept(TopA, torch.tensor([[0.0, 0.0]]), a=1.0) == [0, 1]


def test_p_less_keeps_what_beats_a_collision() -> None:
    assert kept(PLess, ROW) == [0]  # 0.3402
    assert kept(PLess, torch.tensor([[0.4, 0.35, 0.25]]).log()) == [0, 1]  # 0.345
    assert kept(PLess, torch.zeros(1, 50)) == list(range(50))


def test_sigma_is_that_of_the_alive_tokens(rng: torch.Generator) -> None:
    """With masked tokens as zeros a different set stays, with them as -inf every token does."""
    logits = torch.full((20, 32000), -INF)
    alive = torch.randn(20, 640, generator=rng) * 1.5 + 8
    logits[:, ::50] = alive

    result = apply_stage(TopNSigma, logits, [{"n": 1.5}] * 20) > -INF

    own = alive.amax(1) - 1.5 * alive.std(1, unbiased=False)
    as_zeros = alive.amax(1) - 1.5 * logits.clamp(min=0).std(1)
    assert torch.equal(result.sum(1), (alive >= own[:, None]).sum(1))
    assert not torch.equal(result.sum(1), (alive >= as_zeros[:, None]).sum(1))


@pytest.mark.parametrize("t", [0.3, 4.0])
def test_sigma_scales_with_the_temperature(t: float, rng: torch.Generator) -> None:
    logits = torch.randn(50, 300, generator=rng) * 3
    params = [{"n": 1.0}] * 50

    assert torch.equal(
        apply_stage(TopNSigma, logits, params).isneginf(),
        apply_stage(TopNSigma, logits / t, params).isneginf(),
    )


@pytest.mark.parametrize("stage", [Eta, TopNSigma, PLess])
def test_min_keep_is_a_floor_in_rank_order(stage: type[Stage]) -> None:
    row = torch.tensor([[9.0, 1.0, 2.0, 2.0, -INF]])
    params: dict[str, Any] = {Eta: {"epsilon": 0.9}, TopNSigma: {"n": 0.1}, PLess: {}}[stage]

    result = apply_stage(stage, row.expand(3, 5), [{**params, "min_keep": k} for k in (2, 3, 5)])

    assert [(part > -INF).nonzero()[:, 0].tolist() for part in result] == [
        [0, 2],
        [0, 2, 3],
        [0, 1, 2, 3],
    ]


@pytest.mark.parametrize(
    ("stage", "bad"),
    [
        (Epsilon, {"epsilon": 0.0}),
        (Epsilon, {"epsilon": 1.0}),
        (Eta, {"epsilon": -0.1}),
        (TopA, {"a": 1.5}),
        (TopNSigma, {"n": 0.0}),
        (TopNSigma, {"n": INF}),
        (PLess, {"p": 0.5}),
    ],
)
def test_values_out_of_range_are_refused(stage: type[Stage], bad: dict[str, float]) -> None:
    with pytest.raises(ChainError, match=stage.name):
        stage(**bad)


def test_what_is_off_is_identity() -> None:
    for stage in (Epsilon, Eta, TopA, TopNSigma):
        assert stage.is_identity(stage.validate({}))
    assert TopA.is_identity(TopA.validate({"a": 0}))
    assert not PLess.is_identity(PLess.validate({}))

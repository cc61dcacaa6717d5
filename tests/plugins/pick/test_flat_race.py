"""The race with noise on every token, and the inverse-CDF draw: their laws."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from decodekit.core.batch import PickView, Ranking
from decodekit.core.errors import ChainError
from decodekit.core.stage import Picker
from decodekit.kernels.ops import rank_top
from decodekit.plugins.author.rows import make_rows
from decodekit.plugins.pick.flat_race import FlatRace
from decodekit.plugins.pick.icdf import InverseCdf, uniform53

INF = float("inf")
ROW = torch.tensor([0.05, 0.4, 0.0, 0.25, 0.25, 0.05]).log()
DRAWS = 16000
# The 99.99 % points of chi-squared, by degrees of freedom.
LIMITS = {4: 23.5, 5: 25.7}


def pick(
    picker: type[Picker],
    logits: Tensor,
    *,
    listed: int | None = None,
    params: dict[str, Any] | None = None,
    **rows: Any,
) -> Tensor:
    ranking = None
    if listed is not None:
        ranked = rank_top(logits, listed)
        ranking = Ranking(ranked.values, ranked.ids)
    view = PickView(
        ranking=ranking,
        dense=None if listed else logits,
        has_cut=listed is not None,
        vocab_size=logits.shape[1],
    )
    made = make_rows(picker, [params or {}] * len(logits), vocab_size=logits.shape[1], **rows)
    return picker.prototype().pick(view, made.view)


def chi_squared(tokens: Tensor, p: Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(p)).double()
    alive = p > 0
    assert int(counts[~alive].sum()) == 0
    expected = p[alive].double() * len(tokens)
    return float(((counts[alive] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("picker", [FlatRace, InverseCdf])
@pytest.mark.parametrize("listed", [None, 5])
def test_tokens_come_by_their_probability(picker: type[Picker], listed: int | None) -> None:
    tokens = pick(picker, ROW.expand(DRAWS, -1), listed=listed)

    assert chi_squared(tokens, ROW.exp()) < LIMITS[4]


@pytest.mark.parametrize("picker", [FlatRace, InverseCdf])
def test_positions_and_branches_are_other_draws(picker: type[Picker]) -> None:
    rows = ROW.expand(400, -1)
    keys = [9] * 400

    by_position = pick(picker, rows, keys=keys, outputs=[[0] * at for at in range(400)])
    by_branch = pick(picker, rows, keys=keys, branches=list(range(400)))

    assert chi_squared(by_position, ROW.exp()) < LIMITS[4]
    assert chi_squared(by_branch, ROW.exp()) < LIMITS[4]
    assert len(set(pick(picker, rows, keys=keys).tolist())) == 1


@pytest.mark.parametrize("picker", [FlatRace, InverseCdf])
def test_a_list_and_the_whole_row_draw_the_same(picker: type[Picker], rng: torch.Generator) -> None:
    logits = torch.randn(200, 500, generator=rng) * 3
    kept = torch.full_like(logits, -INF)
    best = rank_top(logits, 30)
    kept.scatter_(1, best.ids, best.values)

    whole = pick(picker, kept)

    assert torch.equal(pick(picker, kept, listed=30), whole)
    assert torch.equal(pick(picker, kept, listed=200), whole)


@pytest.mark.parametrize("picker", [FlatRace, InverseCdf])
def test_a_row_draws_the_same_alone(picker: type[Picker], rng: torch.Generator) -> None:
    logits = torch.randn(40, 300, generator=rng) * 2

    together = pick(picker, logits, keys=list(range(40)))

    for row in range(40):
        assert pick(picker, logits[row : row + 1], keys=[row]).item() == together[row]


@pytest.mark.parametrize("picker", [FlatRace, InverseCdf])
def test_a_single_alive_token_is_drawn(picker: type[Picker]) -> None:
    logits = torch.full((50, 70), -INF)
    logits[:, 41] = -3e4

    assert pick(picker, logits).tolist() == [41] * 50


def test_the_race_gives_one_token_for_two_truncations_that_keep_it(rng: torch.Generator) -> None:
    logits = torch.randn(500, 200, generator=rng) * 2
    cut = logits.masked_fill(logits < logits.amax(1, keepdim=True) - 3, -INF)

    wide, narrow = pick(FlatRace, logits), pick(FlatRace, cut)

    survives = cut.gather(1, wide[:, None])[:, 0] > -INF
    assert 50 < int(survives.sum()) < 450
    assert torch.equal(wide[survives], narrow[survives])


def test_the_race_is_the_argmax_of_logit_plus_gumbel_noise(rng: torch.Generator) -> None:
    logits = torch.randn(100, 90, generator=rng)
    made = make_rows(FlatRace, [{}] * 100, vocab_size=90)
    unit = made.view.uniform(torch.arange(90).expand(100, 90)).numpy()

    scores = logits.double().numpy() - np.log(-np.log1p(-unit))

    assert pick(FlatRace, logits).tolist() == scores.argmax(1).tolist()


# --- the inverse distribution ---------------------------------------------------------------------


def test_it_is_the_first_rank_whose_mass_exceeds_u(rng: torch.Generator) -> None:
    logits = (torch.randn(300, 40, generator=rng) * 2).round() / 2  # ties: ids ascending
    u = uniform53(make_rows(InverseCdf, [{}] * 300, vocab_size=40).view)

    expected = []
    for row, chance in zip(logits.double(), u.tolist(), strict=True):
        order = sorted(range(40), key=lambda i: (-float(row[i]), i))
        sums = row.softmax(0)[order].cumsum(0)
        expected.append(order[int((sums <= chance * float(sums[-1])).sum())])

    assert pick(InverseCdf, logits).tolist() == expected


@pytest.mark.parametrize("skew", [-1.0, 0.7, 2.0])
def test_a_skew_turns_the_distribution_into_its_power(skew: float) -> None:
    order = ROW.sort(descending=True, stable=True).indices
    sums = ROW.exp()[order].double().cumsum(0).clamp(max=1.0)
    leaned = torch.zeros(6, dtype=torch.float64)
    leaned[order] = torch.diff(sums ** np.exp(skew), prepend=torch.zeros(1, dtype=torch.float64))

    tokens = pick(InverseCdf, ROW.expand(DRAWS, -1), params={"skew": skew})

    assert chi_squared(tokens, leaned) < LIMITS[4]


def test_the_uniform_number_is_open_and_fine() -> None:
    u = uniform53(make_rows(InverseCdf, [{}] * 8000, vocab_size=4).view)

    assert 0.0 < float(u.min()) < 1e-3
    assert 1 - 1e-3 < float(u.max()) < 1.0
    assert abs(float(u.mean()) - 0.5) < 0.01
    assert int(((u * 2**40) % 1 != 0).sum()) > 7600  # more than 32 bits


def test_a_skew_out_of_range_is_refused() -> None:
    with pytest.raises(ChainError, match="icdf.skew"):
        InverseCdf(skew=float("nan"))

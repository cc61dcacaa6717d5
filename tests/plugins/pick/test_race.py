"""The default draw: which race a row takes, and that it takes it whatever shares its batch."""

import pytest
import torch
from torch import Tensor

from decodekit.core.batch import PickView, Ranking
from decodekit.kernels.ops import race_list, race_segments, rank_all, rank_top
from decodekit.plugins.author.rows import MadeRows, make_rows
from decodekit.plugins.pick.race import LONGEST_LIST, Race

INF = float("inf")


def rows_of(
    count: int, vocab: int, *, keys: list[int] | None = None, position: int = 3
) -> MadeRows:
    return make_rows(
        Race,
        [{}] * count,
        vocab_size=vocab,
        outputs=[[0] * 3] * count,
        keys=keys or list(range(100, 100 + count)),
        branches=[row % 3 for row in range(count)],
    )


def pick(logits: Tensor, made: MadeRows, *, has_cut: bool, listed: int | None = None) -> Tensor:
    ranking = None
    if listed is not None:
        ranked = rank_top(logits, listed)
        ranking = Ranking(ranked.values, ranked.ids)
    dense = logits if listed is None else None
    view = PickView(ranking=ranking, dense=dense, has_cut=has_cut, vocab_size=logits.shape[1])
    return Race.prototype().pick(view, made.view)


def address(made: MadeRows) -> tuple[Tensor, Tensor, Tensor]:
    return made.rows.keys, made.view.positions, made.rows.branches


def keep_best(logits: Tensor, count: int) -> Tensor:
    ranked = rank_all(logits)
    kept = torch.full_like(logits, -INF)
    return kept.scatter_(1, ranked.ids[:, :count], ranked.values[:, :count])


def test_without_a_truncation_the_race_has_two_levels(rng: torch.Generator) -> None:
    logits = keep_best(torch.randn(9, 700, generator=rng), 20)  # few alive, but by no truncation
    made = rows_of(9, 700)

    tokens = pick(logits, made, has_cut=False)

    assert torch.equal(tokens, race_segments(logits, *address(made)))


def test_with_a_truncation_the_race_runs_over_the_kept_tokens(rng: torch.Generator) -> None:
    logits = keep_best(torch.randn(9, 700, generator=rng), 20)
    made = rows_of(9, 700)
    ranked = rank_all(logits)
    expected = race_list(ranked.values, ranked.ids, *address(made))

    assert torch.equal(pick(logits, made, has_cut=True, listed=20), expected)
    assert torch.equal(pick(logits, made, has_cut=True, listed=64), expected)
    assert torch.equal(pick(logits, made, has_cut=True), expected)


@pytest.mark.parametrize("listed", [None, 3000])
def test_each_row_chooses_its_race_by_its_own_kept_set(
    listed: int | None, rng: torch.Generator
) -> None:
    logits = torch.randn(6, 3000, generator=rng)
    counts = [LONGEST_LIST, LONGEST_LIST + 1, 5, 3000, 1, 2000]
    logits = torch.cat([keep_best(logits[i : i + 1], n) for i, n in enumerate(counts)])
    made = rows_of(6, 3000)

    tokens = pick(logits, made, has_cut=True, listed=listed)

    ranked = rank_all(logits)
    lists = race_list(ranked.values, ranked.ids, *address(made))
    segments = race_segments(logits, *address(made))
    short = torch.tensor([count <= LONGEST_LIST for count in counts])
    assert torch.equal(tokens, torch.where(short, lists, segments))
    assert not torch.equal(lists, segments)


@pytest.mark.parametrize("has_cut", [False, True])
def test_a_row_draws_the_same_alone_and_in_any_order(has_cut: bool, rng: torch.Generator) -> None:
    logits = torch.randn(64, 1500, generator=rng)
    logits[::2] = keep_best(logits[::2], 40)
    keys = torch.randint(0, 2**62, (64,), generator=rng).tolist()
    order = torch.randperm(64, generator=rng).tolist()

    together = pick(logits, rows_at(list(range(64)), keys), has_cut=has_cut)
    shuffled = pick(logits[order], rows_at(order, keys), has_cut=has_cut)

    assert torch.equal(shuffled, together[order])
    for row in range(64):
        alone = pick(logits[row : row + 1], rows_at([row], keys), has_cut=has_cut)
        assert alone.item() == together[row]


def rows_at(rows: list[int], keys: list[int]) -> MadeRows:
    return make_rows(
        Race,
        [{}] * len(rows),
        vocab_size=1500,
        outputs=[[0] * (row % 7) for row in rows],
        keys=[keys[row] for row in rows],
        branches=[row % 3 for row in rows],
    )


def test_keys_positions_and_branches_are_different_draws(rng: torch.Generator) -> None:
    flat = torch.zeros(200, 64)
    base = {"vocab_size": 64, "keys": [7] * 200}
    views = [
        make_rows(Race, [{}] * 200, **{**base, "keys": list(range(200))}),
        make_rows(Race, [{}] * 200, **base, outputs=[[0] * row for row in range(200)]),
        make_rows(Race, [{}] * 200, **base, branches=list(range(200))),
    ]

    draws = [pick(flat, made, has_cut=True) for made in views]

    for draw in draws:
        assert len(set(draw.tolist())) > 45
    assert not torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[1], draws[2])
    again = make_rows(Race, [{}] * 200, **base, branches=list(range(200)))
    assert torch.equal(pick(flat, again, has_cut=True), draws[2])


def test_the_greatest_key_is_a_key(rng: torch.Generator) -> None:
    logits = torch.randn(2, 50, generator=rng)

    tokens = pick(logits, rows_of(2, 50, keys=[2**64 - 1, 2**63]), has_cut=False)

    assert bool(((tokens >= 0) & (tokens < 50)).all())


def test_gumbel_is_another_name() -> None:
    assert Race.aliases == ("gumbel",)
    assert Race.caps.random

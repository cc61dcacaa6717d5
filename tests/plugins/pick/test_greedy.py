"""The greedy pick."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.batch import PickView, Ranking
from decodekit.kernels.ops import rank_top
from decodekit.plugins.author.rows import make_rows
from decodekit.plugins.pick.greedy import Greedy

INF = float("inf")


def pick(logits: torch.Tensor, *, listed: int | None = None) -> list[int]:
    ranking = None
    if listed is not None:
        ranked = rank_top(logits, listed)
        ranking = Ranking(ranked.values, ranked.ids, ranked.bound)
    view = PickView(
        ranking=ranking,
        dense=None if listed else logits,
        has_cut=listed is not None,
        vocab_size=logits.shape[1],
    )
    rows = make_rows(Greedy, [{}] * len(logits), vocab_size=logits.shape[1])
    return Greedy.prototype().pick(view, rows.view).tolist()


@pytest.mark.parametrize("listed", [None, 1, 5])
@pytest.mark.parametrize("count", [1, 7, 8, 64])
def test_the_lowest_id_wins_a_tie_in_every_batch(count: int, listed: int | None) -> None:
    two = torch.zeros(300)
    two[[9, 5]] = 3.0
    four = torch.zeros(300)
    four[[299, 40, 41, 256]] = 3.0

    assert pick(two.expand(count, -1), listed=listed) == [5] * count
    assert pick(four.expand(count, -1), listed=listed) == [40] * count


@given(st.lists(st.sampled_from([-INF, -1.0, 0.0, 0.5, 2.0]), min_size=1, max_size=70))
def test_it_is_the_first_maximum(values: list[float]) -> None:
    best = max(range(len(values)), key=lambda i: (values[i], -i))

    assert pick(torch.tensor([values])) == [best]
    assert pick(torch.tensor([values]), listed=3) == [best]


def test_rows_of_a_wider_tensor_work(rng: torch.Generator) -> None:
    wide = torch.randn(6, 40, generator=rng)

    assert pick(wide[::2, 3:30]) == wide[::2, 3:30].argmax(1).tolist()

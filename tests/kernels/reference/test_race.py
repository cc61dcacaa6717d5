"""The race against the law that it must have, against its definition, and against its company."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from decodekit.kernels.reference.mass import row_weights, segment_mass, segment_max, token_mass
from decodekit.kernels.reference.noise import Purpose, exponential_for_ids
from decodekit.kernels.reference.race import race_list, race_segments
from decodekit.kernels.reference.ranked import rank_all

INF = float("inf")
DRAWS = 100_000


class Address(NamedTuple):
    """Where the noise of each row is read."""

    keys: Tensor
    positions: Tensor
    branches: Tensor

    def rows(self, index: Tensor | slice) -> "Address":
        return Address(*(column[index] for column in self))


def address(count: int, key: int = 1, branch: int = 0) -> Address:
    """Return positions 0, 1, ... of one request."""
    return Address(torch.full((count,), key), torch.arange(count), torch.full((count,), branch))


def chi_squared(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    """Return the statistic and its degrees of freedom; cells expecting under 5 are joined."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    if bool(rare.any()):
        counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def assert_law(tokens: Tensor, row: Tensor) -> None:
    """Compare draws with softmax; the bound is passed by chance once in about 10**7."""
    counts = torch.bincount(tokens, minlength=len(row)).double()
    assert bool((counts[row.isneginf()] == 0).all())
    alive = row > -INF
    statistic, freedom = chi_squared(counts[alive], row.double().softmax(0)[alive])
    # Wilson and Hilferty: the cube root of chi-squared / freedom is nearly normal.
    spread = 2 / (9 * max(freedom, 1))
    assert ((statistic / max(freedom, 1)) ** (1 / 3) - (1 - spread)) / spread**0.5 < 5.2


def test_the_list_race_draws_by_softmax(rng: torch.Generator) -> None:
    row = torch.randn(40, generator=rng) * 2
    row[7] = -INF
    ids = torch.arange(40).expand(DRAWS, -1)

    tokens = race_list(row.expand(DRAWS, -1), ids, *address(DRAWS))

    assert_law(tokens, row)


@pytest.mark.parametrize("vocab_size", [3, 700])
def test_the_two_level_race_draws_by_softmax(vocab_size: int, rng: torch.Generator) -> None:
    row = torch.randn(vocab_size, generator=rng) * 2
    row[vocab_size // 2] = -INF
    row[: vocab_size // 3] -= 4  # segments of different weight

    parts = [
        race_segments(row.expand(10_000, -1), *address(DRAWS).rows(slice(at, at + 10_000)))
        for at in range(0, DRAWS, 10_000)
    ]

    assert_law(torch.cat(parts), row)


def test_the_list_race_is_its_definition(rng: torch.Generator) -> None:
    logits = torch.randn(50, 64, generator=rng) * 2
    ids = torch.stack([torch.randperm(5000, generator=rng)[:64] for _ in range(50)])
    where = address(50, key=-3, branch=2)

    tokens = race_list(logits, ids, *where)

    times = exponential_for_ids(*where, Purpose.LIST, ids).numpy()
    scores = logits.double().numpy() - np.log(times)
    assert tokens.tolist() == [int(ids[row, scores[row].argmax()]) for row in range(50)]


def test_the_two_level_race_is_its_definition(rng: torch.Generator) -> None:
    vocab_size = 1000
    logits = torch.randn(20, vocab_size, generator=rng) * 2
    where = address(20, key=77)

    tokens = race_segments(logits, *where)

    smax = segment_max(logits)
    weights = row_weights(smax, segment_mass(logits, smax)).weights.numpy()
    for row in range(20):
        lanes = torch.arange(weights.shape[1])[None]
        here = where.rows(slice(row, row + 1))
        times = exponential_for_ids(*here, Purpose.SEGMENT, lanes)[0].numpy()
        segment = int((np.log(weights[row].astype(float)) - np.log(times)).argmax())
        ids = torch.arange(256 * segment, min(256 * segment + 256, vocab_size))[None]
        masses = token_mass(logits[row, ids], smax[row, segment][None])[0].numpy()
        times = exponential_for_ids(*here, Purpose.TOKEN, ids)[0].numpy()
        with np.errstate(divide="ignore"):
            winner = int((np.log(masses.astype(float)) - np.log(times)).argmax())
        assert int(tokens[row]) == int(ids[0, winner])


def test_the_order_and_the_length_of_a_list_do_not_matter(rng: torch.Generator) -> None:
    logits = torch.randn(30, 200, generator=rng).masked_fill(
        torch.rand(30, 200, generator=rng) < 0.5, -INF
    )
    ids = torch.arange(200).expand(30, -1)
    order = torch.randperm(200, generator=rng)
    ranked = rank_all(logits)
    longest = int((logits > -INF).sum(1).amax())

    plain = race_list(logits, ids, *address(30))

    assert torch.equal(race_list(logits[:, order], ids[:, order], *address(30)), plain)
    short = race_list(ranked.values[:, :longest], ranked.ids[:, :longest], *address(30))
    assert torch.equal(short, plain)


@pytest.mark.parametrize("vocab_size", [1, 97, 257, 1009])
def test_a_draw_is_the_same_alone_and_in_any_batch(vocab_size: int, rng: torch.Generator) -> None:
    logits = torch.randn(64, vocab_size, generator=rng)
    ids = torch.arange(vocab_size).expand(64, -1)
    where = Address(
        torch.randint(-(2**62), 2**62, (64,), generator=rng),
        torch.randint(0, 500, (64,), generator=rng),
        torch.randint(0, 4, (64,), generator=rng),
    )
    order = torch.randperm(64, generator=rng)

    listed = race_list(logits, ids, *where)
    dense = race_segments(logits, *where)

    assert torch.equal(race_list(logits[order], ids, *where.rows(order)), listed[order])
    assert torch.equal(race_segments(logits[order], *where.rows(order)), dense[order])
    for row in range(64):
        alone = slice(row, row + 1)
        assert race_list(logits[alone], ids[alone], *where.rows(alone)).item() == listed[row]
        assert race_segments(logits[alone], *where.rows(alone)).item() == dense[row]


def test_masked_tokens_and_padding_never_win() -> None:
    logits = torch.full((1000, 300), -INF)
    logits[:, 299] = -40.0
    ids = torch.arange(300).expand(1000, -1)

    assert set(race_list(logits, ids, *address(1000)).tolist()) == {299}
    assert set(race_segments(logits, *address(1000)).tolist()) == {299}


def test_far_apart_logits_leave_the_best_token() -> None:
    logits = torch.tensor([[0.0, 100.0, -3e38, 3.0]]).expand(1000, -1)

    assert set(race_segments(logits, *address(1000)).tolist()) == {1}
    assert set(race_list(logits, torch.arange(4).expand(1000, -1), *address(1000)).tolist()) == {1}

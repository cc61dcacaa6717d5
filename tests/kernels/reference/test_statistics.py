"""Statistics of rows against float64, over alive tokens alone, and bit for bit in any batch."""

import pytest
import torch
from torch import Tensor

from decodekit.kernels.reference.statistics import row_collision, row_entropy, row_spread

INF = float("inf")


def rows(vocab: int, rng: torch.Generator, masked: float = 0.3) -> Tensor:
    logits = torch.randn(24, vocab, generator=rng) * torch.linspace(0.1, 20, 24)[:, None]
    dead = torch.rand(24, vocab, generator=rng) < masked
    dead[:, vocab // 2] = False
    return logits.masked_fill(dead, -INF)


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 1009, 50257])
def test_they_equal_float64(vocab: int, rng: torch.Generator) -> None:
    logits = rows(vocab, rng)
    p = logits.double().softmax(1)
    alive = [row[row > -INF].double() for row in logits]

    entropy = torch.special.entr(p).sum(1)
    deviation = torch.stack([row.std(unbiased=False) for row in alive])

    found = row_entropy(logits)
    assert torch.allclose(found.nats, entropy, atol=2e-6)
    log_sum = found.total.log() + found.maximum
    assert torch.allclose(log_sum, logits.double().logsumexp(1), atol=2e-6)
    pair = row_collision(logits)
    assert torch.allclose(pair.squares / pair.total**2, (p**2).sum(1), rtol=1e-6)
    assert torch.allclose(row_spread(logits).deviation, deviation, rtol=1e-6)


@pytest.mark.parametrize("vocab", [257, 4097])
def test_a_row_has_the_same_bits_alone_and_among_others(vocab: int, rng: torch.Generator) -> None:
    logits = rows(vocab, rng)
    order = torch.randperm(24, generator=rng)

    for measure in (row_entropy, row_collision, row_spread):
        together = measure(logits)
        for one, other in zip(measure(logits[order]), together, strict=True):
            assert torch.equal(one, other[order])
        for row in range(24):
            for one, other in zip(measure(logits[row : row + 1]), together, strict=True):
                assert torch.equal(one[0], other[row])


def test_masked_tokens_count_nothing(rng: torch.Generator) -> None:
    few = torch.randn(3, 70, generator=rng)
    padded = torch.cat([few, torch.full((3, 1000), -INF)], 1)

    assert torch.allclose(row_spread(padded).deviation, row_spread(few).deviation, rtol=1e-12)
    assert torch.equal(row_entropy(padded).nats, row_entropy(few).nats)


def test_a_dead_row_has_no_nan() -> None:
    dead = torch.full((1, 300), -INF)

    assert row_entropy(dead).nats.tolist() == [0.0]
    assert row_spread(dead).deviation.tolist() == [0.0]
    assert row_collision(dead).total.tolist() == [1.0]


def test_far_tokens_and_huge_logits_are_no_nan() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [1e4, -1e4, -INF]])

    assert row_entropy(logits).nats.tolist() == [0.0, 0.0]
    assert bool(torch.isfinite(row_spread(logits).deviation[1]))

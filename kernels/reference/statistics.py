"""Statistics of whole rows over the alive tokens: entropy, collision, deviation.

A row's result depends on that row alone, to the bit. Sums of terms in [0, 1] are taken of integers
in units of 2**-40, as in `mass.py`, so that no order of adding matters; the rest is added segment
by segment, in float64. With M the row's maximum, d_i = M - l_i and w_i = exp(-d_i), p_i = w_i /
total.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .mass import ONE, SEGMENT_WIDTH, num_segments

__all__ = [
    "RowCollision",
    "RowEntropy",
    "RowSpread",
    "row_collision",
    "row_entropy",
    "row_spread",
]

_LOWEST = torch.finfo(torch.float32).min  # anchors dead rows, as in mass.py
_FARTHEST = 200.0  # exp(-200) is 0 in float32, and 200 * 0 is no NaN as inf * 0 is
_ROWS_AT_ONCE = 2  # on the CPU: the passes over so few rows stay in its caches


class RowEntropy(NamedTuple):
    """What the entropy of a row is made of; a dead row has total 1 and entropy 0."""

    maximum: Tensor  # M, float32 [R]; -inf for a dead row
    total: Tensor  # sum of w, float64 [R], at least 1
    mean_drop: Tensor  # sum of p * d, float64 [R]

    @property
    def nats(self) -> Tensor:
        """-sum of p ln p = ln total + mean_drop, float64 [R]."""
        return self.total.log() + self.mean_drop


class RowCollision(NamedTuple):
    """What the chance that two draws agree is made of: sum of p**2 = squares / total**2."""

    maximum: Tensor  # M, float32 [R]
    total: Tensor  # sum of w, float64 [R], at least 1
    squares: Tensor  # sum of w**2, float64 [R], at least 1


class RowSpread(NamedTuple):
    """The scatter of a row's logits."""

    maximum: Tensor  # M, float32 [R]
    deviation: Tensor  # population standard deviation of the alive logits, float64 [R]


def row_entropy(logits: Tensor) -> RowEntropy:
    """Return the entropy of each row of float32 [R, V]."""
    return RowEntropy(*_in_parts(logits, _entropy))


def row_collision(logits: Tensor) -> RowCollision:
    """Return the collision of each row of float32 [R, V]."""
    return RowCollision(*_in_parts(logits, _collision))


def row_spread(logits: Tensor) -> RowSpread:
    """Return the standard deviation of the alive logits of each row of float32 [R, V]."""
    return RowSpread(*_in_parts(logits, _spread))


def _in_parts(logits: Tensor, measure: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    step = _ROWS_AT_ONCE if logits.device.type == "cpu" else max(len(logits), 1)
    found = [measure(part) for part in torch.split(logits, step)]
    return [torch.cat(column) for column in zip(*found, strict=True)]


def _entropy(logits: Tensor) -> tuple[Tensor, ...]:
    maximum, drops = _drops(logits)
    weights = drops.neg().exp_()
    total = _exact_sum(weights).clamp_min_(1.0)
    return maximum, total, _exact_sum(weights.mul_(drops)) / total


def _collision(logits: Tensor) -> tuple[Tensor, ...]:
    maximum, drops = _drops(logits)
    weights = drops.neg_().exp_()
    total = _exact_sum(weights).clamp_min_(1.0)
    return maximum, total, _exact_sum(weights.square_()).clamp_min_(1.0)


def _spread(logits: Tensor) -> tuple[Tensor, ...]:
    maximum = logits.amax(1)
    dead = logits == -torch.inf
    count = (~dead).sum(1).clamp_min(1).double()
    drops = (maximum[:, None] - logits).masked_fill_(dead, 0.0)
    mean = _segment_sums(drops).sum(1) / count
    away = (drops - mean[:, None]).masked_fill_(dead, 0.0)  # float64
    return maximum, (_segment_sums(away.square_()).sum(1) / count).sqrt_()


def _drops(logits: Tensor) -> tuple[Tensor, Tensor]:
    maximum = logits.amax(1)
    drops = maximum.clamp_min(_LOWEST)[:, None] - logits
    return maximum, drops.clamp_(max=_FARTHEST)


def _exact_sum(terms: Tensor) -> Tensor:
    """Sum float32 [R, V] of numbers in [0, 1] as integers, float64 [R]."""
    return _segment_sums((terms * ONE).round_()).long().sum(1).double() / ONE


def _segment_sums(terms: Tensor) -> Tensor:
    """Sum [R, V] over each segment, float64 [R, S]; the number of rows cannot change the order."""
    num_rows, width = terms.shape
    segments = num_segments(width)
    padded = torch.nn.functional.pad(terms, (0, segments * SEGMENT_WIDTH - width))
    return padded.view(num_rows, segments, SEGMENT_WIDTH).sum(2, dtype=torch.float64)

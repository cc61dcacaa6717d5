"""Fixed-point masses: what a token or a 256-token segment weighs, in integers that sum exactly.

With y the logits of a row, M their maximum and s a segment's maximum, in units of 2**-40:

    mass of a token                round(exp(y - M) * 2**40)
    mass of a segment, to its own  sum over it of round(exp(y - s) * 2**40)        below 2**48
    weight of a segment            round(exp(s - M) * mass)                        below 2**48
    total of a row                 sum of the segments' weights                    below 2**63

The segment width is part of the meaning: another width rounds elsewhere. Masked tokens are -inf
and weigh 0. Rounding is to the nearest, ties to even. NaN and +inf are refused before the chain
and have no meaning here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "ONE",
    "SEGMENT_WIDTH",
    "RowWeights",
    "num_segments",
    "row_total",
    "row_weights",
    "segment_mass",
    "segment_max",
    "segment_view",
    "token_mass",
]

SEGMENT_WIDTH = 256
ONE = float(1 << 40)  # the mass of a row's best token

# Anchors dead rows: -inf - lowest is -inf, where -inf - -inf would be NaN.
_LOWEST = torch.finfo(torch.float32).min
_CACHED_TOKENS = 1 << 16  # a CPU pass handles so many at once that they stay in its L2 cache


class RowWeights(NamedTuple):
    """Segment weights of each row, on one scale."""

    maximum: Tensor  # M, float32 [R]; -inf for a row with no token alive
    weights: Tensor  # W_s, int64 [R, S]
    total: Tensor  # Z, int64 [R]


def num_segments(vocab_size: int) -> int:
    """Return S, the segments of a row; the last one may be short."""
    return -(-vocab_size // SEGMENT_WIDTH)


def segment_view(logits: Tensor) -> Tensor:
    """Return float32 [R, S, 256] of [R, V]: a view if 256 divides V, else a copy padded by -inf."""
    tail = -logits.shape[1] % SEGMENT_WIDTH
    if tail:
        logits = torch.nn.functional.pad(logits, (0, tail), value=-torch.inf)
    return logits.view(len(logits), logits.shape[1] // SEGMENT_WIDTH, SEGMENT_WIDTH)


def segment_max(logits: Tensor) -> Tensor:
    """Return the maximum of each segment, float32 [R, S]; -inf where every token is masked."""
    return torch.cat([part.amax(-1) for part in _parts(logits)], dim=1)


def segment_mass(logits: Tensor, smax: Tensor) -> Tensor:
    """Return each segment's mass relative to its own maximum `smax` [R, S], int64 [R, S].

    exp and the product are float32 and the sum, of integers, is exact; a segment with every token
    masked weighs 0.
    """
    anchors = smax.clamp_min(_LOWEST)
    masses, first = [], 0
    for part in _parts(logits):
        last = first + part.shape[1]
        masses.append(_fixed_point_sums(part, anchors[:, first:last]))
        first = last
    return torch.cat(masses, dim=1).long()


def row_weights(smax: Tensor, smass: Tensor) -> RowWeights:
    """Bring segment masses `smass` int64 [R, S] to the scale of their row, in float64."""
    maximum = smax.amax(-1)
    shifted = smax.double() - maximum.clamp_min(_LOWEST)[:, None]
    weights = shifted.exp_().mul_(smass).round_().long()
    return RowWeights(maximum, weights, weights.sum(-1))


def token_mass(values: Tensor, maximum: Tensor) -> Tensor:
    """Return the mass of tokens with logits `values` float32 [R, N] beside `maximum` [R], int64."""
    shifted = values - maximum.clamp_min(_LOWEST)[:, None]
    return shifted.exp_().mul_(ONE).round_().long()


def row_total(logits: Tensor) -> Tensor:
    """Return the total mass of whole rows of float32 [R, V], int64 [R]: the sum of their weights.

    It differs from the sum of `token_mass` by rounding alone, a few parts in 2**40.
    """
    smax = segment_max(logits)
    return row_weights(smax, segment_mass(logits, smax)).total


def _parts(logits: Tensor) -> list[Tensor]:
    """View [R, V] as whole segments [R, S, 256] and a short last one [R, 1, V % 256], if any."""
    whole = logits.shape[1] - logits.shape[1] % SEGMENT_WIDTH
    parts = []
    if whole:
        segments = logits[:, :whole].view(len(logits), whole // SEGMENT_WIDTH, SEGMENT_WIDTH)
        parts.append(segments)
    if whole < logits.shape[1]:
        parts.append(logits[:, None, whole:])
    return parts


def _fixed_point_sums(part: Tensor, anchors: Tensor) -> Tensor:
    """Sum round(exp(part - anchors) * ONE) over the last dimension, float64 [R, S]."""
    num_rows, width, size = part.shape
    step = max(1, _CACHED_TOKENS // (width * size)) if part.device.type == "cpu" else num_rows
    scratch = part.new_empty((min(step, num_rows), width, size))
    sums = part.new_empty((num_rows, width), dtype=torch.float64)
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        terms = scratch[: rows.stop - rows.start]
        torch.sub(part[rows], anchors[rows, :, None], out=terms)
        terms.exp_().mul_(ONE).round_()
        torch.sum(terms, -1, dtype=torch.float64, out=sums[rows])
    return sums

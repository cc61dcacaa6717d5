"""The race: every candidate draws an exponential time, and the least time / weight wins.

That is a fair draw: P(token) = weight / total weight. Written as the argmax of ln(weight) - ln(E),
in float64, ties to the lowest id. `race_list` runs over a short list; `race_segments` over a whole
row in two levels, first the 256-token segments by their weight, then the tokens of the chosen one
by their mass: exact in law because P(token) = P(segment) P(token | segment). The noise comes from
`noise.py`.
"""

import torch
from torch import Tensor

from .mass import SEGMENT_WIDTH, num_segments, row_weights, segment_mass, segment_max, token_mass
from .noise import Purpose, exponential_for_ids, exponential_for_range

__all__ = ["race_list", "race_segments"]

_NO_ID = torch.iinfo(torch.int64).max


def race_list(
    values: Tensor, ids: Tensor, keys: Tensor, positions: Tensor, branches: Tensor
) -> Tensor:
    """Return one of the alive `ids` int64 [R, N] for each row, int64 [R].

    `values` are the logits float32 [R, N], -inf where dead; the order of a row's entries does not
    matter. `keys`, `positions` and `branches` are int64 [R].
    """
    times = exponential_for_ids(keys, positions, branches, Purpose.LIST, ids)
    scores = values - times.log_()  # float64 [R, N]
    best = scores.amax(1, keepdim=True)
    return ids.masked_fill(scores < best, _NO_ID).amin(1)


def race_segments(logits: Tensor, keys: Tensor, positions: Tensor, branches: Tensor) -> Tensor:
    """Return one of the alive tokens of each row of `logits` float32 [R, V], int64 [R]."""
    num_rows, vocab_size = logits.shape
    smax = segment_max(logits)
    weights = row_weights(smax, segment_mass(logits, smax)).weights  # [R, S]
    first = torch.zeros_like(keys)
    segments = num_segments(vocab_size)
    times = exponential_for_range(keys, positions, branches, Purpose.SEGMENT, first, segments)
    first = _winner(weights, times) * SEGMENT_WIDTH

    tokens = first[:, None] + torch.arange(SEGMENT_WIDTH, device=logits.device)  # [R, 256]
    values = logits.gather(1, tokens.clamp(max=vocab_size - 1))
    values.masked_fill_(tokens >= vocab_size, -torch.inf)
    times = exponential_for_range(keys, positions, branches, Purpose.TOKEN, first, SEGMENT_WIDTH)
    return first + _winner(token_mass(values, values.amax(1)), times)


def _winner(weights: Tensor, times: Tensor) -> Tensor:
    """Return the winner's place, the first of equals; both are [R, N], int64 and float64."""
    return (weights.double().log_() - times.log_()).argmax(1)

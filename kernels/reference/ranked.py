"""Rows in rank order: value descending, id ascending among equals; whole, or the first n exactly.

A rank is one int64 key: the order-preserving bits of the value, inverted, in the high word, and
the id in the low word. Ascending keys are descending ranks, and no two tokens have the same key,
so a sort needs no stability.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .mass import SEGMENT_WIDTH

__all__ = ["Ranked", "rank_all", "rank_top"]

Keys = NDArray[np.int64]
Values = NDArray[np.float32]

_LOWEST = np.finfo(np.float32).min
_NO_KEY = np.iinfo(np.int64).max  # after every token
_MAGNITUDE = 0x7FFFFFFF
_DEAD_KEY = 0x7F800000 << 32  # the high word of -inf: the last value there is
_NARROWEST = 16  # tokens; maxima over fewer cost as much as sorting


@dataclass(frozen=True, slots=True)
class Ranked:
    """The first N tokens of each row in rank order."""

    values: Tensor  # float32 [R, N], descending
    ids: Tensor  # int64 [R, N], ascending among equal values
    bound: Tensor  # float32 [R], the greatest value not listed; -inf if none alive is missing


def rank_all(logits: Tensor) -> Ranked:
    """Rank every token of float32 [R, V], as a stable descending sort does; the bound is -inf."""
    if logits.device.type == "cpu":  # numpy sorts integers five times as fast as torch sorts floats
        keys = torch.from_numpy(np.sort(_keys(logits.numpy(), np.arange(logits.shape[1])), axis=1))
    else:
        keys = _keys_torch(logits).sort(dim=1).values
    return _ranked(logits, keys, logits.shape[1])


def rank_top(logits: Tensor, n: int, smax: Tensor | None = None) -> Ranked:
    """Return the first min(n, V) columns of `rank_all` without sorting the vocabulary.

    `smax` float32 [R, S], the segment maxima of `mass.segment_max`, saves a pass where they are
    known. Masked tokens fill a row with fewer than n alive, in the order of their ids.
    """
    num_listed = min(n, logits.shape[1])
    num_wanted = min(n + 1, logits.shape[1])  # one more than is listed tells the bound
    if logits.device.type == "cpu":
        keys = torch.from_numpy(
            _leading_keys(logits.numpy(), num_wanted, None if smax is None else smax.numpy())
        )
    else:
        keys = _keys_torch(logits).topk(num_wanted, largest=False, sorted=True).values
    return _ranked(logits, keys, num_listed)


def _ranked(logits: Tensor, keys: Tensor, num_listed: int) -> Ranked:
    """Read ids and values off ascending keys; the one after the list, if any, is the bound."""
    ids = keys & 0xFFFFFFFF
    values = logits.gather(1, ids)
    if keys.shape[1] > num_listed:
        bound = values[:, num_listed].clone()
    else:
        bound = values.new_full((len(values),), -torch.inf)
    return Ranked(values[:, :num_listed], ids[:, :num_listed], bound)


def _keys_torch(logits: Tensor) -> Tensor:
    """Return the keys of float32 [R, V], int64 [R, V]."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    descending = ~(bits ^ ((bits >> 31) & _MAGNITUDE))
    return (descending.long() << 32) | torch.arange(logits.shape[1], device=logits.device)


def _keys(values: Values, ids: NDArray[Any]) -> Keys:
    """Return the keys of tokens `ids` with `values`, of one shape."""
    bits = (values + np.float32(0.0)).view(np.int32)
    descending = ~(bits ^ ((bits >> 31) & np.int32(_MAGNITUDE)))
    keys: Keys = descending.astype(np.int64)
    keys <<= 32
    keys |= ids
    return keys


def _leading_keys(values: Values, num_keys: int, smax: Values | None) -> Keys:
    """Return the first `num_keys` keys of each row, ascending, int64 [R, num_keys].

    The m-th greatest of a row's segment maxima is a cut: at least m tokens reach it, and seldom
    many more. Those are listed and sorted; the rest of the row is only compared.
    """
    num_rows, vocab_size = values.shape
    maxima = _maxima(values, num_keys, smax)
    if maxima is None:
        return _smallest(_keys(values, np.arange(vocab_size)), num_keys)
    place = maxima.shape[1] - num_keys
    cut = np.maximum(np.partition(maxima, place, axis=1)[:, place], _LOWEST)
    flat = np.flatnonzero(values >= cut[:, None])  # row * V + id
    row_starts = np.arange(num_rows + 1) * vocab_size
    starts = np.searchsorted(flat, row_starts)
    counts = np.diff(starts)
    keys = _keys(values.reshape(-1)[flat], flat - np.repeat(row_starts[:-1], counts))
    table = _table(keys, starts, counts, num_keys)
    for row in np.flatnonzero(counts < num_keys):
        _append_dead(table[row], values[row], int(counts[row]))
    return table


def _maxima(values: Values, num_keys: int, smax: Values | None) -> Values | None:
    """Return maxima over groups of tokens, at least 1.5 groups a key; None if the row is too short.

    With 1.5 groups a key, about 1.65 tokens a key reach the cut.
    """
    num_groups = num_keys + num_keys // 2
    if smax is not None and smax.shape[1] >= num_groups:
        return smax
    width = SEGMENT_WIDTH
    while values.shape[1] // width < num_groups:
        width //= 2
        if width < _NARROWEST:
            return None
    whole = values.shape[1] // width * width
    groups = torch.from_numpy(values[:, :whole]).view(len(values), whole // width, width)
    maxima: Values = groups.amax(-1).numpy()
    return maxima


def _table(keys: Keys, starts: NDArray[Any], counts: NDArray[Any], num_keys: int) -> Keys:
    """Return the smallest of each ragged row of `keys`, ascending, int64 [R, num_keys]."""
    width = max(int(counts.max(initial=0)), num_keys)
    if width > 8 * num_keys:  # many equal values in some row: bring each row down by itself
        keys = np.concatenate([_shortened(row, num_keys) for row in np.split(keys, starts[1:-1])])
        counts = np.minimum(counts, num_keys)
        starts = np.concatenate(([0], np.cumsum(counts)))
        width = num_keys
    table: Keys = np.full((len(counts), width), _NO_KEY)
    shift = np.arange(len(counts)) * width - starts[:-1]
    table.reshape(-1)[np.arange(len(keys)) + np.repeat(shift, counts)] = keys
    return _smallest(table, num_keys)


def _smallest(table: Keys, num_keys: int) -> Keys:
    """Return the first `num_keys` of each row, ascending."""
    if table.shape[1] > 2 * num_keys:
        table = np.partition(table, num_keys, axis=1)[:, :num_keys]
    return np.sort(table, axis=1)[:, :num_keys]


def _shortened(keys: Keys, num_keys: int) -> Keys:
    """Return the first `num_keys` of one row's keys, in no order."""
    return np.partition(keys, num_keys)[:num_keys] if len(keys) > num_keys else keys


def _append_dead(keys: Keys, values: Values, num_alive: int) -> None:
    """Fill the end of a row's keys with masked tokens, lowest ids first.

    With fewer than `len(keys)` alive, the first 2 * len(keys) tokens hold enough masked ones.
    """
    dead = np.flatnonzero(values[: 2 * len(keys)] == -np.inf)
    keys[num_alive:] = _DEAD_KEY | dead[: len(keys) - num_alive]

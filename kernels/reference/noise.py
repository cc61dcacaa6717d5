"""Addressed noise: Philox4x32-10 whose counter says what a draw is for, so nothing is consumed.

The 128-bit counter is (lane, purpose, position, branch) and the key is the 64-bit request key (low
word first), so a draw depends on its own address and on nothing else: not on the batch, the row,
the step or the draws before it. One Philox call gives four 32-bit words. Item `i` (a token, a
segment, a place in a list) reads word `i % 4` of lane `i // 4`.

Keys stand in int64 tensors as two's complement (`signed_key`); every function reads both spellings
alike.
"""

import struct
import sys
from enum import IntEnum
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "Purpose",
    "exponential_for_ids",
    "exponential_for_range",
    "philox",
    "philox_torch",
    "purpose_of",
    "request_key",
    "seed_key",
    "signed_key",
    "uniform_for_ids",
    "uniform_for_range",
]

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF  # masks 32 bits

# Where the halves of a uint64 lie when it is viewed as two uint32.
_LOW, _HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)

Words = NDArray[np.uint32]
Integers = NDArray[Any]


class Purpose(IntEnum):
    """The second counter word: which decision a draw belongs to."""

    SEGMENT = 0  # the first level of a race without a list
    TOKEN = 1  # the second level: a token inside the chosen segment
    LIST = 2  # a race over a kept list
    SPECULATE = 3  # accepting a draft by rejection


def purpose_of(instance_id: str) -> int:
    """Return the purpose word of a random stage: 16 + a 31-bit hash of its instance id.

    It depends on the id alone, so adding or removing other stages moves no draw.
    """
    digest = blake2b(instance_id.encode(), digest_size=4).digest()
    return 16 + (int.from_bytes(digest, "little") & 0x7FFFFFFF)


def request_key(engine_seed: int, internal_number: int) -> int:
    """Return the key, in [0, 2**64), of an unseeded request: a hash of both numbers."""
    address = struct.pack("<QQ", seed_key(engine_seed), internal_number)
    return int.from_bytes(blake2b(address, digest_size=8).digest(), "little")


def seed_key(seed: int) -> int:
    """Return a user's seed as a key in [0, 2**64): itself, or two's complement if negative."""
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"seed is {seed}; it must be in [-2**63, 2**64)")
    return seed & 0xFFFFFFFFFFFFFFFF


def signed_key(key: int) -> int:
    """Return a key in [0, 2**64) as the int64 with the same bits, as tensors hold it."""
    return key - (1 << 64) if key >= 1 << 63 else key


def philox(
    key: Integers, lane: Integers, purpose: int, position: Integers, branch: Integers
) -> Words:
    """Return the four words of each address, uint32 [..., 4]; the arrays broadcast together.

    `key` is uint64 (or int64 with the same bits); counter words are taken modulo 2**32.
    """
    key, lane, position, branch = np.broadcast_arrays(key, lane, position, branch)
    words: Words = np.empty((key.size, 1, 4), dtype=np.uint32)
    _fill_words(
        words.transpose(2, 0, 1),
        key.reshape(-1, 1),
        lane.reshape(-1, 1),
        purpose,
        position.reshape(-1, 1),
        branch.reshape(-1, 1),
    )
    return words.reshape(*key.shape, 4)


@cache
def _round_increments() -> Words:
    """Return what each round adds to the key halves, uint32 [10, 2, 1, 1]."""
    rounds = np.arange(ROUNDS, dtype=np.uint32)[:, None]
    steps: Words = rounds * np.array([WEYL_0, WEYL_1], dtype=np.uint32)  # wraps, as the key does
    return steps[:, :, None, None]


def _round_keys(key: Integers, shape: tuple[int, int]) -> Words:
    """Return each round's key halves, uint32 [10, 2, R, 1], or [10, 2, R, N] where that is small.

    A whole operand makes the rounds' calls twice as fast, as long as the ten of them stay in the
    cache.
    """
    halves = key.view(np.uint32).T[[_LOW, _HIGH], :, None]  # [2, R, 1]
    if shape[0] * shape[1] > 2048:
        return _round_increments() + halves
    whole: Words = np.empty((ROUNDS, 2, *shape), dtype=np.uint32)
    return np.add(_round_increments(), halves, out=whole)


def _fill_words(
    words: Words,
    key: Integers,
    lane: Integers,
    purpose: int,
    position: Integers,
    branch: Integers,
) -> None:
    """Write the words of lanes [R, N] into uint32 [4, R, N]; key, position and branch are [R, 1].

    The state is two planes, so that a round is three calls: `even` (x0, x2) as the low halves of
    uint64, whose product with the multipliers holds every high and low half of the next state, and
    `odd` (x1, x3), a view of the low halves of the last product.
    """
    shape = lane.shape
    keys = _round_keys(key, shape)
    even = np.zeros((2, *shape), dtype=np.uint64)
    even_low = even.view(np.uint32).reshape(2, *shape, 2)[..., _LOW]
    odd: Words = np.empty((2, *shape), dtype=np.uint32)
    even_low[0], even_low[1] = lane, position
    odd[0], odd[1] = purpose, branch
    multipliers = np.empty((2, *shape), dtype=np.uint64)
    multipliers[0], multipliers[1] = MULTIPLIER_0, MULTIPLIER_1
    products = np.empty((2, 2, *shape), dtype=np.uint64)  # this round's and the last one's
    product_halves = products.view(np.uint32).reshape(2, 2, *shape, 2)[:, ::-1]
    lows, highs = product_halves[..., _LOW], product_halves[..., _HIGH]
    for round_idx, round_key in enumerate(keys):
        which = round_idx & 1
        np.multiply(even, multipliers, products[which])
        np.bitwise_xor(highs[which], odd, even_low)
        np.bitwise_xor(even_low, round_key, even_low)
        odd = lows[which]
    words[0], words[1], words[2], words[3] = even_low[0], odd[0], even_low[1], odd[1]


def philox_torch(
    key: Tensor, lane: Tensor, purpose: int, position: Tensor, branch: Tensor
) -> Tensor:
    """Return the words of `philox` as int64 [..., 4] in [0, 2**32), on the tensors' device."""
    key_0, key_1 = key & WORD, (key >> 32) & WORD
    x0, x2 = lane & WORD, position & WORD
    x1, x3 = torch.full_like(x0, purpose), branch & WORD
    for _ in range(ROUNDS):
        product_0, product_1 = x0 * MULTIPLIER_0, x2 * MULTIPLIER_1  # wrap modulo 2**64
        x0 = ((product_1 >> 32) & WORD) ^ x1 ^ key_0
        x2 = ((product_0 >> 32) & WORD) ^ x3 ^ key_1
        x1, x3 = product_1 & WORD, product_0 & WORD
        key_0, key_1 = (key_0 + WEYL_0) & WORD, (key_1 + WEYL_1) & WORD
    return torch.stack((x0, x1, x2, x3), dim=-1)  # three rounds have mixed every shape into each


def uniform_for_ids(
    keys: Tensor, positions: Tensor, branches: Tensor, purpose: int, ids: Tensor
) -> Tensor:
    """Return u in the open interval (0, 1), float64 [R, N], for items `ids` int64 [R, N].

    `keys`, `positions` and `branches` are int64 [R]. u = (word + 0.5) / 2**32: 33 significant bits,
    so both steps are exact in float64 and neither 0 nor 1 can come out of rounding.
    """
    if ids.device.type != "cpu":
        words = philox_torch(
            keys[:, None], ids >> 2, purpose, positions[:, None], branches[:, None]
        )
        return _to_unit(words.gather(-1, (ids & 3)[..., None])[..., 0])
    return torch.from_numpy(_unit_for_ids(keys, positions, branches, purpose, ids))


def uniform_for_range(
    keys: Tensor, positions: Tensor, branches: Tensor, purpose: int, first: Tensor, num_ids: int
) -> Tensor:
    """Return `uniform_for_ids` for items first, first + 1, ... of each row, float64 [R, num_ids].

    `first` is int64 [R], each a multiple of 4. One Philox call serves four items, so this is the
    cheap way for whole segments and for all segments of a row.
    """
    num_lanes = -(-num_ids // 4)
    if first.device.type != "cpu":
        lanes = (first >> 2)[:, None] + torch.arange(num_lanes, device=first.device)
        words = philox_torch(keys[:, None], lanes, purpose, positions[:, None], branches[:, None])
        return _to_unit(words.flatten(1)[:, :num_ids])
    return torch.from_numpy(_unit_for_range(keys, positions, branches, purpose, first, num_ids))


def exponential_for_ids(
    keys: Tensor, positions: Tensor, branches: Tensor, purpose: int, ids: Tensor
) -> Tensor:
    """Return E = -log1p(-u) > 0, float64 [R, N], with u of `uniform_for_ids`.

    The least E, which wins a race, is the one with the finest resolution: E is near u there.
    """
    if ids.device.type != "cpu":
        unit = uniform_for_ids(keys, positions, branches, purpose, ids)
        return unit.neg_().log1p_().neg_()
    return torch.from_numpy(_exponential_(_unit_for_ids(keys, positions, branches, purpose, ids)))


def exponential_for_range(
    keys: Tensor, positions: Tensor, branches: Tensor, purpose: int, first: Tensor, num_ids: int
) -> Tensor:
    """Return `exponential_for_ids` for the items of `uniform_for_range`, float64 [R, num_ids]."""
    if first.device.type != "cpu":
        unit = uniform_for_range(keys, positions, branches, purpose, first, num_ids)
        return unit.neg_().log1p_().neg_()
    return torch.from_numpy(
        _exponential_(_unit_for_range(keys, positions, branches, purpose, first, num_ids))
    )


def _unit_for_ids(
    keys: Tensor, positions: Tensor, branches: Tensor, purpose: int, ids: Tensor
) -> NDArray[np.float64]:
    items = ids.numpy()
    words: Words = np.empty((4, *items.shape), dtype=np.uint32)
    _fill_words(words, _column(keys), items >> 2, purpose, _column(positions), _column(branches))
    flat = (items & 3) * items.size  # word w of item n stands at w * R * N + n
    flat += np.arange(items.size).reshape(items.shape)
    return _to_unit_numpy(words.ravel().take(flat))


def _unit_for_range(
    keys: Tensor, positions: Tensor, branches: Tensor, purpose: int, first: Tensor, num_ids: int
) -> NDArray[np.float64]:
    lanes = _column(first) // 4 + np.arange(-(-num_ids // 4))
    words: Words = np.empty((*lanes.shape, 4), dtype=np.uint32)
    planes = words.transpose(2, 0, 1)
    _fill_words(planes, _column(keys), lanes, purpose, _column(positions), _column(branches))
    return _to_unit_numpy(words.reshape(len(lanes), -1)[:, :num_ids])


def _column(values: Tensor) -> Integers:
    """View int64 [R] as numpy [R, 1], without a copy."""
    return values.numpy()[:, None]


def _to_unit_numpy(words: Words) -> NDArray[np.float64]:
    unit = words.astype(np.float64)
    unit += 0.5
    unit *= 2.0**-32
    return unit


def _to_unit(words: Tensor) -> Tensor:
    return words.double().add_(0.5).mul_(2.0**-32)


def _exponential_(unit: NDArray[np.float64]) -> NDArray[np.float64]:
    """Turn u into E in place."""
    np.negative(unit, out=unit)
    np.log1p(unit, out=unit)
    np.negative(unit, out=unit)
    return unit

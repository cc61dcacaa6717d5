"""Bit masks of a row: int32 words, token `i` is bit `i % 32` of word `i // 32`, 1 is legal.

On a CPU a mask is added to the logits as float32 [vocab] of 0 and -inf, which a grammar repeats so
often that the last ones are kept; on other devices the words of a step are uploaded in one piece.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

Words = np.ndarray[Any, np.dtype[np.int32]]  # [ceil(vocab / 32)]

NEGATIVE_INFINITY = np.int32(-0x800000)  # the bits of -inf as float32
CACHE_BYTES = 64 * 2**20


def num_words(vocab_size: int) -> int:
    """Return the number of words that hold `vocab_size` bits."""
    return -(-vocab_size // 32)


def words_of(ids: Iterable[int], vocab_size: int) -> Words:
    """Return the words in which only `ids` are set; ids outside the vocabulary are left out."""
    bits = np.zeros(32 * num_words(vocab_size), dtype=np.uint8)
    bits[[token for token in ids if 0 <= token < vocab_size]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def ids_of(words: Words, most: int) -> list[int]:
    """Return the first `most` ids that are set, in order."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    found: list[int] = np.flatnonzero(bits)[:most].tolist()
    return found


def count_of(words: Words) -> int:
    """Return how many ids are set."""
    return int(np.unpackbits(words.view(np.uint8)).sum())


class Penalties:
    """Masks as float32 [vocab] of 0 and -inf, the last ones kept; safe for several threads."""

    def __init__(self, vocab_size: int, cache_bytes: int = CACHE_BYTES) -> None:
        self.vocab_size = vocab_size
        self.most = max(cache_bytes // (4 * vocab_size), 8)
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._lock = Lock()

    def of(self, words: Words) -> Tensor:
        """Return what to add to a row of logits so that only legal tokens stay."""
        key = words.tobytes()
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[: self.vocab_size]
        penalty = bits.astype(np.int32)
        penalty -= 1  # 0 where legal, all bits set where not
        penalty &= NEGATIVE_INFINITY
        made = torch.from_numpy(penalty.view(np.float32))
        with self._lock:
            self._kept[key] = made
            if len(self._kept) > self.most:
                self._kept.popitem(last=False)
        return made


def mask_rows(logits: Tensor, places: Sequence[int], rows: Sequence[Words]) -> None:
    """Set illegal tokens of `logits` [n, vocab] to -inf in the rows `places`, on any device.

    Tokens past the words are illegal.
    """
    stacked = torch.from_numpy(np.stack(rows))
    if logits.device.type == "cuda":
        stacked = stacked.pin_memory()
    words = stacked.to(logits.device, non_blocking=True)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    legal = (((words[:, :, None] >> shifts) & 1) == 1).flatten(1)  # [rows, 32 * words]
    width = logits.shape[1]
    if legal.shape[1] < width:
        legal = torch.nn.functional.pad(legal, (0, width - legal.shape[1]))
    legal = legal[:, :width]
    if len(places) == logits.shape[0]:
        logits.masked_fill_(~legal, -torch.inf)
        return
    at = torch.tensor(places, dtype=torch.int64, device=logits.device)
    logits.index_copy_(0, at, logits[at].masked_fill_(~legal, -torch.inf))

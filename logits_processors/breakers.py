"""Sequence breakers: texts across which a repetition does not count, as token sequences.

A breaker is a head token and a tail, the tokens that must follow it. A text becomes, for every
token of the vocabulary that contains it, that token with an empty tail; and for every token that
ends in a beginning of it, that token with the tokens of the rest as its tail (llama.cpp's rule). A
character that is spelled in several tokens is not recognised; such a breaker is given as ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import ChainError
from ..core.stage import BindContext
from .token_ids import check_ids

FIELD = "dry.breakers"
LONGEST_TEXT = 40  # bytes of a breaker that are looked at
LONGEST_TAIL = 20  # tokens
CHUNK = 64  # tokens looked at backwards in one go

Ids = tuple[int, ...]
Heads = Mapping[int, frozenset[Ids]]


@dataclass(frozen=True, slots=True)
class Breakers:
    """Every breaker of a request."""

    heads: Heads  # head token -> tails
    singles: frozenset[int]  # tokens that hold a whole breaker

    def since_last(self, tokens: NDArray[np.int64]) -> int:
        """Return how many tokens follow the last breaker in `tokens`; all if there is none."""
        size = len(tokens)
        if not self.heads:
            return size
        for end in range(size, 0, -CHUNK):
            start = max(end - CHUNK, 0)
            for back, token in enumerate(reversed(tokens[start:end].tolist())):
                tails = self.heads.get(token)
                if tails is not None:
                    at = end - 1 - back
                    matched = self._longest(tails, tokens[at + 1 :])
                    if matched >= 0:
                        return size - 1 - at - matched
        return size

    @staticmethod
    def _longest(tails: Iterable[Ids], following: NDArray[np.int64]) -> int:
        lengths = [len(tail) for tail in tails if tuple(following[: len(tail)].tolist()) == tail]
        return max(lengths, default=-1)


def find_breakers(breakers: Sequence[str | Ids], ctx: BindContext) -> Breakers:
    """Return texts and id sequences as breakers; ChainError for what cannot be one."""
    heads: dict[int, set[Ids]] = {}
    for breaker in breakers:
        if not breaker:
            raise ChainError(f"{FIELD} has an empty entry", parameter=FIELD, value=breaker)
        if isinstance(breaker, str):
            for head, tails in _of_text(breaker, ctx.tokenizer).items():
                heads.setdefault(head, set()).update(tails)
        else:
            check_ids(FIELD, breaker, ctx.vocab_size)
            heads.setdefault(breaker[0], set()).add(tuple(breaker[1:]))
    singles = frozenset(head for head, tails in heads.items() if () in tails)
    return Breakers({head: frozenset(tails) for head, tails in heads.items()}, singles)


def _of_text(text: str, tokenizer: Any) -> Heads:
    if tokenizer is None:
        raise ChainError(
            f"{FIELD} has the text {text!r}, but the tokenizer is not loaded; "
            "give id sequences, or () for none",
            parameter=FIELD,
            value=text,
        )
    return _scan(text, tokenizer)


@lru_cache(maxsize=64)
def _scan(text: str, tokenizer: Any) -> Heads:
    """Look at every token of the vocabulary, which takes a while: the last few texts are kept."""
    wanted = text.encode()[:LONGEST_TEXT].decode(errors="ignore").encode()
    heads: dict[int, set[Ids]] = {}
    tails: dict[bytes, Ids] = {}
    for token in range(tokenizer.max_token_id + 1):
        piece = tokenizer.piece(token)
        spelled: bytes = piece.encode() if isinstance(piece, str) else piece
        if wanted in spelled:
            heads.setdefault(token, set()).add(())
            continue
        for length in _overlaps(spelled, wanted):
            rest = wanted[length:]
            if rest not in tails:
                tails[rest] = _tail(rest, tokenizer)
            if tails[rest]:
                heads.setdefault(token, set()).add(tails[rest])
    return {head: frozenset(found) for head, found in heads.items()}


def _tail(rest: bytes, tokenizer: Any) -> Ids:
    """Return the tokens of the rest of a text; none if it begins inside a character."""
    try:
        text = rest.decode()
    except UnicodeDecodeError:
        return ()
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return tuple(ids[:LONGEST_TAIL])


def _overlaps(spelled: bytes, wanted: bytes) -> list[int]:
    """Return the lengths of the proper beginnings of `wanted` that `spelled` ends in."""
    return [
        length
        for length in range(1, min(len(spelled), len(wanted) - 1) + 1)
        if spelled.endswith(wanted[:length])
    ]

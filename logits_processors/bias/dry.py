"""Don't repeat yourself: the longer a passage that a token goes on copying, the more it loses.

For each earlier position i, m(i) is the length of the longest common suffix of h[..i] and h, the
history of prompt and output. With L(c) the greatest m(i) over the places i that c follows, and L(c)
>= a, the `allowed_length`: l_c -= multiplier * base**(L(c) - a). No match reaches across a sequence
breaker or out of the last `range` tokens, nothing happens right after a breaker, and a token that
holds a whole breaker is never made less likely. The exponent is held where base**x leaves float32.

Breakers are texts or id sequences. A text is matched as llama.cpp does: every token that contains
it is a breaker by itself, and a token that ends in a beginning of it is one if the tokens of the
rest follow. text-generation-webui takes the last token of the text alone, and exllamav2 every token
with one of its characters. From text-generation-webui PR 5677; equal to llama.cpp's `dry`.

State: the history with m(i) for every i, brought up to date in one pass for each token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from pydantic import Field, StrictInt
from torch import Tensor

from ...core.batch import RowView
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Kind, Stage, StageParams
from ..breakers import Breakers, find_breakers
from ..history import History, Tokens
from ..token_ids import pairs

LOG_MOST = 88.722839  # ln of the greatest float32
MOST = 1e30


class Repeats(History):
    """The history with m(i): how much of its end is also the end of h[..i]."""

    __slots__ = ("_lengths",)

    def __init__(self, prompt: Sequence[int]) -> None:
        super().__init__(prompt)
        self._lengths: Tokens | None = None  # of all tokens but the last; None: to be found

    @property
    def lengths(self) -> Tokens:
        """m(i) of every token but the last."""
        if self._lengths is None:
            self._lengths = common_suffixes(self.tokens)
        return self._lengths

    def extend(self, tokens: Sequence[int]) -> None:
        before = self.lengths
        for token in tokens:
            length = self.length
            super().extend((token,))
            after: Tokens = np.zeros(length, dtype=np.int64)
            after[1:] = before + 1
            if length:
                after[0] = 1
            after[self.tokens[:length] != token] = 0
            before = after
        self._lengths = before

    def drop(self, count: int) -> None:
        super().drop(count)
        self._lengths = None

    def copy(self) -> History:
        twin = super().copy()
        assert isinstance(twin, Repeats)
        twin._lengths = self._lengths  # replaced as a whole, never changed
        return twin


class Dry(Stage):
    """A growing penalty on what goes on repeating a passage."""

    name = "dry"
    kind = Kind.BIAS
    caps = Caps(stateful=True, spec="sequential")

    class Params(StageParams):
        """Strength, growth, what is free, how far back it looks (below 1: all), breakers."""

        multiplier: float | None = Field(default=None, ge=0, allow_inf_nan=False)
        base: float = Field(default=1.75, ge=1, allow_inf_nan=False)
        allowed_length: StrictInt = Field(default=2, ge=1)
        range: StrictInt | None = Field(default=None, ge=-1)
        breakers: tuple[str | tuple[StrictInt, ...], ...] = ("\n", ":", '"', "*")

    class Bound(Params):
        """With the breakers in ids."""

        found: Breakers

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        if cls.is_identity(params):
            return params
        return cls.Bound(
            multiplier=params.multiplier,
            base=params.base,
            allowed_length=params.allowed_length,
            range=params.range,
            breakers=params.breakers,
            found=find_breakers(params.breakers, ctx),
        )

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.multiplier

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def open(self, params: Any, prompt: Sequence[int]) -> Repeats:
        return Repeats(prompt)

    def accept(self, state: Repeats, tokens: Sequence[int]) -> None:
        state.extend(tokens)

    def rollback(self, state: Repeats, count: int) -> None:
        state.drop(count)

    def fork(self, state: Repeats) -> History:
        return state.copy()

    def transform(self, logits: Tensor, rows: RowView) -> None:
        found = [
            penalties(state, params, rows.vocab_size)
            for state, params in zip(rows.states, rows.params, strict=True)
        ]
        values = [value for row in found for value in row.values()]
        if values:
            places = pairs([list(row) for row in found], rows.device)
            logits[places] -= torch.tensor(values, dtype=torch.float32, device=rows.device)


def penalties(state: Repeats, params: Any, vocab_size: int) -> Mapping[int, float]:
    """Return what each token loses."""
    tokens = state.tokens
    first = 0
    if params.range is not None and params.range > 0:
        first = max(len(tokens) - params.range, 0)
    limit = params.found.since_last(tokens[first:])
    if limit < params.allowed_length or len(tokens) - first < 2:
        return {}
    lengths = state.lengths[first:]
    lengths = np.minimum(lengths, np.arange(1, len(lengths) + 1))  # none begins before the window
    places = np.flatnonzero((lengths >= params.allowed_length) & (tokens[first + 1 :] < vocab_size))
    places = places[np.argsort(lengths[places])]  # the longest one of a token comes last, and stays
    following = tokens[first + 1 :][places].tolist()
    longest = dict(zip(following, np.minimum(lengths[places], limit).tolist(), strict=True))
    most = int(LOG_MOST / math.log(params.base)) if params.base > 1.000001 else 0
    return {
        token: min(
            params.multiplier * params.base ** min(length - params.allowed_length, most), MOST
        )
        for token, length in longest.items()
        if token not in params.found.singles
    }


def common_suffixes(tokens: Tokens) -> Tokens:
    """Return m(i) of every token but the last, by the Z-algorithm on the reversed history."""
    text = tokens[::-1].tolist()
    size = len(text)
    found = [0] * size
    left = right = 0
    for at in range(1, size):
        length = min(right - at, found[at - left]) if at < right else 0
        while at + length < size and text[length] == text[at + length]:
            length += 1
        if at + length > right:
            left, right = at, at + length
        found[at] = length
    return np.array(found[:0:-1], dtype=np.int64)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [Dry]

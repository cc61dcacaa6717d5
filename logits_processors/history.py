"""The tokens of a sequence, for stages that search them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.batch import RowView
from ..core.stage import Stage

Tokens = NDArray[np.int64]


class History:
    """Prompt and output of one sequence, int64, so that no step copies them anew."""

    __slots__ = ("_buffer", "length", "num_prompt")

    def __init__(self, prompt: Sequence[int]) -> None:
        self.num_prompt = self.length = len(prompt)
        self._buffer: Tokens = np.empty(max(2 * len(prompt), 256), dtype=np.int64)
        self._buffer[: self.length] = prompt

    @property
    def tokens(self) -> Tokens:
        """All tokens so far, a view that the next `extend` may outdate."""
        return self._buffer[: self.length]

    def extend(self, tokens: Sequence[int]) -> None:
        """Append `tokens`."""
        end = self.length + len(tokens)
        if end > len(self._buffer):
            self._buffer = np.concatenate([self.tokens, np.empty(end, dtype=np.int64)])
        self._buffer[self.length : end] = tokens
        self.length = end

    def drop(self, count: int) -> None:
        """Take the last `count` tokens back."""
        self.length -= count

    def copy(self) -> History:
        """Return an independent copy."""
        twin = type(self)(())
        twin._buffer = self._buffer.copy()
        twin.length, twin.num_prompt = self.length, self.num_prompt
        return twin


class HistoryStage(Stage):
    """A stage whose state is the history."""

    def open(self, params: Any, prompt: Sequence[int]) -> History:
        return History(prompt)

    def accept(self, state: History, tokens: Sequence[int]) -> None:
        state.extend(tokens)

    def rollback(self, state: History, count: int) -> None:
        state.drop(count)

    def fork(self, state: History) -> History:
        return state.copy()


def tail(rows: RowView, row: int, count: int, *, with_prompt: bool = True) -> list[int]:
    """Return the last `count` tokens of a row, or all there are; the stage declares its needs."""
    if count == 0:
        return []
    found = list(rows.output(row)[-count:])
    missing = count - len(found)
    if with_prompt and missing:
        found = [*rows.prompt(row)[-missing:], *found]
    return found

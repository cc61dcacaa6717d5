"""Programs whose masks depend on a state number alone, so that each is computed once and kept.

A choice, a small regex and an outlines index are such. Their masks can be put on the device as one
table, and a step then uploads a row number instead of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..core.constraint import Vocabulary
from .matching import Gate, GatedMatcher, Words, token_words

if TYPE_CHECKING:
    from torch import Tensor

TABLE_LIMIT = 2_000  # states of a table on the device: 38 MB at a vocabulary of 152k
KEPT_BYTES = 64 << 20  # rows that a program keeps; past that they are computed at each visit


class StateProgram(ABC):
    """A deterministic automaton over tokens, shared by requests and threads."""

    start: int = 0

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._rows: dict[int, Words] = {}
        self._unique: dict[bytes, Words] = {}  # equal rows are kept once
        self._lock = Lock()

    @abstractmethod
    def next_state(self, state: int, token: int) -> int:
        """Return the state after a text token, -1 if it is not legal."""

    @abstractmethod
    def accepts(self, state: int) -> bool:
        """Whether the text may end in this state."""

    @abstractmethod
    def legal(self, state: int) -> Iterable[int]:
        """Return the ids that are legal in a state, in any order."""

    @abstractmethod
    def certain(self, state: int) -> Sequence[int]:
        """Return the ids of the text that must come next."""

    @abstractmethod
    def states(self, limit: int) -> list[int] | None:
        """Return every state in which a sequence can stand, or None if there are over `limit`."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of the kept rows."""
        return sum(words.nbytes for words in list(self._unique.values()))

    def row(self, state: int) -> Words:
        """Return the mask of a state, without stop ids. Not to be written to."""
        words = self._rows.get(state)
        if words is None:
            words = token_words(self.legal(state), self.vocabulary.size)
            with self._lock:
                if self.memory_bytes < KEPT_BYTES:
                    words = self._rows[state] = self._unique.setdefault(words.tobytes(), words)
        return words

    def matcher(self, stop_ids: Sequence[int]) -> GatedMatcher:
        """Return a matcher at the start; see `core.constraint.CompiledGrammar`."""
        return GatedMatcher(StateSteps(self), Gate(self.vocabulary, stop_ids))

    def mask_table(self, stop_ids: Sequence[int], limit: int = TABLE_LIMIT) -> Tensor | None:
        """Return the masks of all states, stop ids included, as int32 [states, ceil(vocab / 32)].

        Row `matcher.state` is what `matcher.fill` writes. None if there are more than `limit`.
        """
        import torch

        states = self.states(limit)
        if states is None:
            return None
        gate = Gate(self.vocabulary, stop_ids)
        table = np.zeros((max(states) + 1, gate.num_words), dtype=np.int32)
        for state in states:
            table[state] = self.row(state)
            gate.shut(table[state])
            if self.accepts(state):
                gate.open(table[state])
        return torch.from_numpy(table)


class StateSteps:
    """A walker that remembers the state after each token; rollback and fork are cheap."""

    mask_is_truth: ClassVar[bool] = True

    def __init__(self, program: StateProgram, path: Sequence[int] = ()) -> None:
        self._program = program
        self._path = list(path) or [program.start]

    @property
    def state(self) -> int:
        """Where the sequence stands; its row in the program's table."""
        return self._path[-1]

    def mask(self, bitmask: Any, row: int, words: Words) -> str | None:
        """Copy the kept row of the state."""
        words[:] = self._program.row(self._path[-1])
        return None

    def step(self, token: int) -> bool:
        """Advance, if the token is legal."""
        after = self._program.next_state(self._path[-1], token)
        if after < 0:
            return False
        self._path.append(after)
        return True

    def undo(self, count: int) -> None:
        """Forget the last states."""
        del self._path[len(self._path) - count :]

    def copy(self) -> StateSteps:
        """Return an independent walker at the same place."""
        return StateSteps(self._program, self._path)

    def restart(self) -> None:
        """Go back to the start."""
        del self._path[1:]

    def may_end(self) -> bool:
        """Whether the state accepts."""
        return self._program.accepts(self._path[-1])

    def certain(self) -> Sequence[int]:
        """Return the ids of the text that must come next."""
        return self._program.certain(self._path[-1])

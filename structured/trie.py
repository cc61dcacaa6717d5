"""One of a list of texts, exactly: every way to spell a choice in tokens is a path of it.

The choices are sorted, and a state is the range of those that begin with the text so far: nothing
is built but this list, and a mask is found by looking up the next bytes among the tokens.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from ..core.constraint import GrammarSpec, Refusal, Suited, Vocabulary
from ..core.hookspecs import hookimpl
from .matching import canonical
from .states import StateProgram
from .token_index import TokenIndex

_PAST = b"\xff"  # after every byte of UTF-8


class TrieBackend:
    """Choices, for one vocabulary."""

    name: ClassVar[str] = "trie"
    aliases: ClassVar[tuple[str, ...]] = ()
    rank: ClassVar[int] = 0

    @classmethod
    def missing(cls) -> str | None:
        """It needs nothing."""
        return None

    def __init__(self, vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
        self._index = TokenIndex(vocabulary)

    def suit(self, spec: GrammarSpec) -> Suited:
        """Take choices as they are, and nothing else."""
        if spec.kind == "choice":
            return Suited(spec)
        return Suited(spec, (Refusal("", spec.kind, "the trie knows choices alone"),))

    def compile(self, spec: GrammarSpec) -> ChoiceTrie:
        """Return the program of a list of texts."""
        return ChoiceTrie(json.loads(spec.text), self._index)


class ChoiceTrie(StateProgram):
    """The choices as an automaton; the first mask is computed when it is made."""

    def __init__(self, choices: Sequence[str], index: TokenIndex) -> None:
        super().__init__(index.vocabulary)
        self._index = index
        self._texts = sorted({choice.encode() for choice in choices})
        self._places = [(0, len(self._texts), 0)]  # state -> first text, past the last one, depth
        self._state_of = {self._places[0]: 0}
        self.row(self.start)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the texts, the states met so far and their rows."""
        return super().memory_bytes + sum(map(len, self._texts)) + 200 * len(self._places)

    def next_state(self, state: int, token: int) -> int:
        """Return the state of the texts that go on with the token's bytes."""
        bytes_ = self.vocabulary.tokens[token]
        if not bytes_ or token in self.vocabulary.control_ids:
            return -1
        low, high, depth = self._places[state]
        prefix = self._texts[low][:depth] + bytes_
        low = bisect_left(self._texts, prefix, low, high)
        high = bisect_left(self._texts, prefix + _PAST, low, high)
        return self._number((low, high, depth + len(bytes_))) if low < high else -1

    def accepts(self, state: int) -> bool:
        """Whether a text ends here; the shortest stands first."""
        low, _, depth = self._places[state]
        return len(self._texts[low]) == depth

    def legal(self, state: int) -> list[int]:
        """Return the tokens that are prefixes of what remains of some text."""
        low, high, depth = self._places[state]
        ids_of = self._index.ids_of
        found: list[int] = []
        pending = [(low, high, depth)]
        while pending:
            low, high, place = pending.pop()
            if high - low == 1:  # a single text: its prefixes, without looking for branches
                rest = self._texts[low][depth : depth + self._index.longest]
                for size in range(place - depth + 1, len(rest) + 1):
                    found += ids_of.get(rest[:size], ())
                continue
            for child in self._children(low, high, place):
                so_far = self._texts[child[0]][depth : place + 1]
                found += ids_of.get(so_far, ())
                if self._index.has_longer(so_far):
                    pending.append(child)
        return found

    def certain(self, state: int) -> list[int]:
        """Return the ids of what all remaining texts share."""
        low, high, depth = self._places[state]
        first, last = self._texts[low], self._texts[high - 1]
        shared = next(
            (i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b),
            min(len(first), len(last)),
        )
        text = first[depth:shared]
        return canonical(self.vocabulary, text, high - low == 1, self._index.has_longer)

    def states(self, limit: int) -> list[int] | None:
        """Return the states at the borders of tokens, found from the start."""
        seen, pending = {self.start}, [self.start]
        while pending:
            state = pending.pop()
            for token in self.legal(state):
                after = self.next_state(state, token)
                if after not in seen:
                    if len(seen) == limit:
                        return None
                    seen.add(after)
                    pending.append(after)
        return sorted(seen)

    def _children(self, low: int, high: int, place: int) -> list[tuple[int, int, int]]:
        """Split a range by the byte at `place`; a text that ends there has none."""
        parts = []
        if len(self._texts[low]) == place:
            low += 1
        while low < high:
            prefix = self._texts[low][: place + 1]
            past = bisect_left(self._texts, prefix + _PAST, low, high)
            parts.append((low, past, place + 1))
            low = past
        return parts

    def _number(self, place: tuple[int, int, int]) -> int:
        state = self._state_of.get(place)
        if state is None:
            with self._lock:
                state = self._state_of.get(place)
                if state is None:
                    state = len(self._places)
                    self._places.append(place)
                    self._state_of[place] = state
        return state


@hookimpl
def decodekit_constraint_backends() -> list[type[TrieBackend]]:
    return [TrieBackend]

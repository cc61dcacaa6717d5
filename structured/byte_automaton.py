"""A regular expression as a deterministic automaton over the bytes of UTF-8.

From the tree of `regex_tree`: every set becomes sequences of byte ranges, the whole a
non-deterministic automaton, then a table [states, 256]. States that cannot reach an end are cut
off, so that no path through the table is a dead end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .regex_tree import Alt, Edge, Node, Range, Ref, Rep, Seq, Set

MAX_STATES = 2_000
MAX_POSITIONS = 2_000  # bytes of the pattern with its repetitions written out
WIDE_SET = 8  # states of a set with characters of several bytes
MAX_WORK = 300_000  # sizes of all sets of states that are looked at: about 0.3 s

Moves = np.ndarray[Any, np.dtype[np.int32]]
ByteRanges = tuple[Range, ...]


class TooLarge(ValueError):
    """The automaton would be over a limit."""


@dataclass(frozen=True)
class ByteAutomaton:
    """State 0 is the start; moves [states, 256] int32, -1 is dead; ends [states] bool."""

    moves: Moves
    ends: Any

    @property
    def num_states(self) -> int:
        """Number of states; each can reach an end."""
        return len(self.moves)

    def after(self, state: int, text: bytes) -> int:
        """Return the state after some bytes, -1 if they do not fit."""
        moves = self.moves
        for byte in text:
            state = int(moves[state, byte])
            if state < 0:
                return -1
        return state

    def certain(self, state: int) -> tuple[bytes, bool]:
        """Return the bytes that must come next, and whether the text ends right after them."""
        text = bytearray()
        while not self.ends[state]:
            ways = np.flatnonzero(self.moves[state] >= 0)
            if len(ways) != 1 or len(text) > self.num_states:
                return bytes(text), False
            text.append(int(ways[0]))
            state = int(self.moves[state, ways[0]])
        return bytes(text), not bool((self.moves[state] >= 0).any())


def positions(node: Node) -> int:
    """Guess the states: bytes of a tree with its repetitions written out, as far as it matters."""
    if isinstance(node, Set):
        if not node.ranges:
            return 1
        low, high = node.ranges[0][0], node.ranges[-1][1]
        return len(chr(high).encode()) if high <= 0x7F or low == high else WIDE_SET
    if isinstance(node, Rep):
        times = max(node.low, 1) if node.high is None else node.high
        return min(times * positions(node.item), MAX_POSITIONS + 1)
    if isinstance(node, Seq | Alt):
        return min(sum(positions(item) for item in node.items), MAX_POSITIONS + 1)
    return 0


def unknown(node: Node) -> str | None:
    """Return a construct of the tree that this automaton does not know, or None."""
    if isinstance(node, Set):
        return node.props[0] if node.props else None
    if isinstance(node, Edge):
        return "an anchor"
    if isinstance(node, Ref):
        return "a reference"
    inner = (node.item,) if isinstance(node, Rep) else node.items
    return next((name for name in map(unknown, inner) if name), None)


def build(node: Node) -> ByteAutomaton:
    """Return the automaton of a tree without anchors.

    Raises TooLarge over a limit, and ValueError if no text matches.
    """
    if positions(node) > MAX_POSITIONS:
        raise TooLarge(f"the pattern takes more than {MAX_POSITIONS:,} bytes written out")
    net = _Net()
    start = net.state()
    end = net.add(node, start)
    return _trimmed(*_determined(net, start, end))


# --- UTF-8 ----------------------------------------------------------------------------------------


def utf8(low: int, high: int) -> Iterator[ByteRanges]:
    """Yield the sequences of byte ranges that spell the characters `low` to `high`.

    Surrogates must not be among them.
    """
    for bound in (0x7F, 0x7FF, 0xFFFF):  # one length of encoding at a time
        if low <= bound < high:
            yield from utf8(low, bound)
            yield from utf8(bound + 1, high)
            return
    if high <= 0x7F:
        yield ((low, high),)
        return
    for shift in (6, 12, 18):  # only the last ranges may be partial: align at both sides
        block = (1 << shift) - 1
        if low & ~block != high & ~block:
            if low & block:
                yield from utf8(low, low | block)
                yield from utf8((low | block) + 1, high)
                return
            if high & block != block:
                yield from utf8(low, (high & ~block) - 1)
                yield from utf8(high & ~block, high)
                return
    yield tuple(zip(chr(low).encode(), chr(high).encode(), strict=True))


# --- with choices ---------------------------------------------------------------------------------


class _Net:
    """Thompson's construction: states with silent steps and steps over byte ranges."""

    def __init__(self) -> None:
        self.silent: list[list[int]] = []
        self.steps: list[list[tuple[int, int, int]]] = []  # low, high, target
        self._spelled: dict[tuple[Range, ...], list[ByteRanges]] = {}

    def state(self) -> int:
        self.silent.append([])
        self.steps.append([])
        return len(self.steps) - 1

    def add(self, node: Node, start: int) -> int:
        """Add what leads from `start` over `node`; return where it ends."""
        if isinstance(node, Set):
            return self._set(node, start)
        if isinstance(node, Seq):
            for item in node.items:
                start = self.add(item, start)
            return start
        if isinstance(node, Alt):
            end = self.state()
            for item in node.items:
                self.silent[self.add(item, self._next(start))].append(end)
            return end
        if isinstance(node, Rep):
            return self._repeat(node, start)
        raise ValueError("an anchor is left in the pattern")

    def _next(self, start: int) -> int:
        state = self.state()
        self.silent[start].append(state)
        return state

    def _repeat(self, node: Rep, start: int) -> int:
        for _ in range(node.low):
            start = self.add(node.item, start)
        if node.high is None:
            loop = self._next(start)
            self.silent[self.add(node.item, loop)].append(loop)
            return self._next(loop)
        end = self.state()
        for _ in range(node.high - node.low):
            self.silent[start].append(end)
            start = self.add(node.item, self._next(start))
        self.silent[start].append(end)
        return end

    def _set(self, node: Set, start: int) -> int:
        end = self.state()
        if node.ranges not in self._spelled:
            spelled = [seq for low, high in node.ranges for seq in utf8(low, high)]
            self._spelled[node.ranges] = spelled
        tails: dict[ByteRanges, int] = {(): end}
        for sequence in self._spelled[node.ranges]:
            at = start
            for place, (low, high) in enumerate(sequence):
                tail = sequence[place + 1 :]
                if tail not in tails:
                    tails[tail] = self.state()
                step = (low, high, tails[tail])
                if step not in self.steps[at]:
                    self.steps[at].append(step)
                at = tails[tail]
        return end


# --- without choices ------------------------------------------------------------------------------


def _determined(net: _Net, start: int, end: int) -> tuple[Moves, Any]:
    """Subset construction; returns moves and ends, dead ends still among them."""
    closures = [_closure(net, state) for state in range(len(net.steps))]
    first = closures[start]
    number = {first: 0}
    pending, rows, ends, work = [first], [], [], 0
    for subset in pending:  # grows while it is walked
        work += len(subset) + 1
        row = np.full(256, -1, dtype=np.int32)
        ends.append(end in subset)
        for low, high, targets in _moves(net, subset):
            after = frozenset().union(*(closures[target] for target in targets))
            work += len(after)
            if after not in number:
                if len(number) == MAX_STATES:
                    raise TooLarge(f"the automaton has more than {MAX_STATES:,} states")
                number[after] = len(number)
                pending.append(after)
            row[low : high + 1] = number[after]
        if work > MAX_WORK:
            raise TooLarge("the automaton takes too much work to build")
        rows.append(row)
    return np.stack(rows), np.array(ends, dtype=np.bool_)


def _closure(net: _Net, state: int) -> frozenset[int]:
    """States reached without a byte that matter: those with steps or without any way on."""
    seen, pending = {state}, [state]
    while pending:
        for after in net.silent[pending.pop()]:
            if after not in seen:
                seen.add(after)
                pending.append(after)
    return frozenset(s for s in seen if net.steps[s] or not net.silent[s])


def _moves(net: _Net, subset: frozenset[int]) -> Iterator[tuple[int, int, frozenset[int]]]:
    """Yield (low, high, targets): byte ranges within which the same states are reached."""
    steps = [step for state in subset for step in net.steps[state]]
    bounds = sorted({step[0] for step in steps} | {step[1] + 1 for step in steps})
    for low, past in zip(bounds, bounds[1:], strict=False):
        targets = frozenset(step[2] for step in steps if step[0] <= low and past <= step[1] + 1)
        if targets:
            yield low, past - 1, targets


def _trimmed(moves: Moves, ends: Any) -> ByteAutomaton:
    """Cut off the states from which no end can be reached."""
    useful = ends.copy()
    while True:
        reaches = useful | (useful[moves] & (moves >= 0)).any(axis=1)
        if (reaches == useful).all():
            break
        useful = reaches
    if not useful[0]:
        raise ValueError("no text matches the pattern")
    number = np.full(len(moves) + 1, -1, dtype=np.int32)
    number[:-1][useful] = np.arange(int(useful.sum()), dtype=np.int32)
    return ByteAutomaton(number[moves[useful]], ends[useful])

"""Whether two regular expressions share a text, and the expression of all texts but some words."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from .regex_tree import ANY, EMPTY, Alt, Node, Range, Rep, Seq, Set, alternatives, complement

MOST_STATES = 3_000
_EVERY: tuple[Range, ...] = ((0, 0x10FFFF),)


class _Machine:
    """A nondeterministic automaton; state 0 is the end."""

    def __init__(self, tree: Node) -> None:
        self.empty: list[list[int]] = [[]]  # moves without a character
        self.moves: list[list[tuple[tuple[Range, ...], int]]] = [[]]
        self.start = self.build(tree, 0)

    def state(self) -> int:
        if len(self.empty) > MOST_STATES:
            raise OverflowError
        self.empty.append([])
        self.moves.append([])
        return len(self.empty) - 1

    def build(self, tree: Node, after: int) -> int:
        """Return the state from which `tree` leads to `after`."""
        if isinstance(tree, Set):
            here = self.state()
            # What a property holds is not known here, so it may be anything.
            self.moves[here].append((_EVERY if tree.props else tree.ranges, after))
            return here
        if isinstance(tree, Seq):
            for item in reversed(tree.items):
                after = self.build(item, after)
            return after
        if isinstance(tree, Alt):
            here = self.state()
            self.empty[here] = [self.build(item, after) for item in tree.items]
            return here
        if isinstance(tree, Rep):
            return self.repeat(tree, after)
        return after

    def repeat(self, tree: Rep, after: int) -> int:
        if tree.high is None:
            loop = self.state()
            self.empty[loop] = [self.build(tree.item, loop), after]
            after = loop
        else:
            end = after
            for _ in range(tree.high - tree.low):
                here = self.state()
                self.empty[here] = [self.build(tree.item, after), end]
                after = here
        for _ in range(tree.low):
            after = self.build(tree.item, after)
        return after

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        found, stack = set(states), list(states)
        while stack:
            for state in self.empty[stack.pop()]:
                if state not in found:
                    found.add(state)
                    stack.append(state)
        return frozenset(found)


@lru_cache(maxsize=1024)
def disjoint(left: Node, right: Node) -> bool:
    """Whether it is certain that no text matches both, as whole texts."""
    try:
        one, two = _Machine(left), _Machine(right)
    except OverflowError:
        return False
    seen: set[tuple[int, int]] = set()
    stack = [(a, b) for a in one.closure([one.start]) for b in two.closure([two.start])]
    while stack:
        pair = stack.pop()
        if pair in seen:
            continue
        seen.add(pair)
        if pair == (0, 0) or len(seen) > 20 * MOST_STATES:
            return False
        for ranges, after in one.moves[pair[0]]:
            for others, beyond in two.moves[pair[1]]:
                if any(a <= d and c <= b for a, b in ranges for c, d in others):
                    stack += [(x, y) for x in one.closure([after]) for y in two.closure([beyond])]
    return True


@lru_cache(maxsize=1024)
def lengths(tree: Node) -> tuple[int, int | None]:
    """The shortest and the longest text that matches, in characters; None is no bound."""
    if isinstance(tree, Set):
        return 1, 1
    if isinstance(tree, Rep):
        low, high = lengths(tree.item)
        bound = None if high is None or tree.high is None else high * tree.high
        return low * tree.low, 0 if high == 0 else bound
    if isinstance(tree, Seq | Alt):
        parts = [lengths(item) for item in tree.items]
        tops = [high for _, high in parts if high is not None]
        join = sum if isinstance(tree, Seq) else max
        low = (sum if isinstance(tree, Seq) else min)(low for low, _ in parts) if parts else 0
        return low, (join(tops) if tops else 0) if len(tops) == len(parts) else None
    return 0, 0


def matches(tree: Node, text: str) -> bool:
    """Whether a whole text may match; a property of Unicode is taken to hold."""
    return not disjoint(tree, Seq(tuple(Set(((ord(c), ord(c)),)) for c in text)))


def all_but(words: Iterable[str]) -> Node:
    """Every text that is none of `words`."""
    trie: dict[str, dict] = {}  # type: ignore[type-arg]
    for word in words:
        at = trie
        for char in word:
            at = at.setdefault(char, {})
        at[""] = {}
    return _other(trie)


def _other(trie: dict[str, dict]) -> Node:  # type: ignore[type-arg]
    children = sorted((char, below) for char, below in trie.items() if char)
    known = [(ord(char), ord(char)) for char, _ in children]
    options: list[Node] = [] if "" in trie else [EMPTY]
    options.append(Seq((Set(complement(known)), Rep(0, None, ANY))))
    options += [Seq((Set(((ord(char), ord(char)),)), _other(below))) for char, below in children]
    return alternatives(options)

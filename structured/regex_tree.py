"""The tree of a regular expression, and its text in the syntax that every backend reads alike.

Sets are ranges of code points, so a printed tree means the same to every engine: no flag, no
class that one reads as ASCII and another as Unicode, no lazy form, no anchor. Only `props`, such
as `\\p{L}`, need an engine that knows Unicode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

TOP = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)  # never part of text

Range = tuple[int, int]


class Set(NamedTuple):
    """One character of `ranges` or `props`, or, negated, one of no range and no prop."""

    ranges: tuple[Range, ...]  # sorted, apart
    props: tuple[str, ...] = ()  # as engines with Unicode tables spell them
    negated: bool = False  # only ever with props; without them the ranges are turned over


class Seq(NamedTuple):
    """One after the other; empty is the empty text."""

    items: tuple[Node, ...]


class Alt(NamedTuple):
    """Any one of these."""

    items: tuple[Node, ...]


class Rep(NamedTuple):
    """`low` to `high` times; None is no bound."""

    low: int
    high: int | None
    item: Node


class Edge(NamedTuple):
    """An anchor: the start or the end of the text."""

    start: bool
    position: int  # in the pattern, for errors


class Ref(NamedTuple):
    """A rule of a grammar; expressions have none."""

    name: str


Node = Set | Seq | Alt | Rep | Edge | Ref

EMPTY = Seq(())


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Sort ranges and join those that touch."""
    kept: list[Range] = []
    for low, high in sorted(ranges):
        if kept and low <= kept[-1][1] + 1:
            kept[-1] = (kept[-1][0], max(high, kept[-1][1]))
        else:
            kept.append((low, high))
    return tuple(kept)


def complement(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """All characters of text that are in none of `ranges`."""
    kept, start = [], 0
    for low, high in merged([*ranges, SURROGATES]):
        if low > start:
            kept.append((start, low - 1))
        start = high + 1
    if start <= TOP:
        kept.append((start, TOP))
    return tuple(kept)


def intersection(left: Iterable[Range], right: Iterable[Range]) -> tuple[Range, ...]:
    """Characters that are in both."""
    right = tuple(right)
    return merged(
        (max(a, c), min(b, d)) for a, b in left for c, d in right if max(a, c) <= min(b, d)
    )


ANY = Set(complement(()))


def literal(text: str) -> Node:
    """The text itself."""
    return Seq(tuple(Set(((ord(c), ord(c)),)) for c in text))


def alternatives(items: Iterable[Node]) -> Node:
    """Any one of `items`; a single one is itself."""
    items = tuple(items)
    return items[0] if len(items) == 1 else Alt(items)


def sets(node: Node) -> Iterator[Set]:
    """Every set of the tree."""
    if isinstance(node, Set):
        yield node
    elif isinstance(node, Rep):
        yield from sets(node.item)
    elif isinstance(node, Seq | Alt):
        for item in node.items:
            yield from sets(item)


def nullable(node: Node) -> bool:
    """Whether the empty text matches."""
    if isinstance(node, Set):
        return False
    if isinstance(node, Rep):
        return node.low == 0 or nullable(node.item)
    if isinstance(node, Alt):
        return any(nullable(item) for item in node.items)
    if isinstance(node, Seq):
        return all(nullable(item) for item in node.items)
    return True


_MEANT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}


def character(code: int) -> str:
    """One character, spelled so that every engine reads it alike."""
    char = chr(code)
    if char in _MEANT:
        return _MEANT[char]
    if code < 0x20 or 0x7F <= code < 0xA0:
        return f"\\x{code:02x}"
    if char in "\\^$.|?*+()[]{}-":
        return "\\" + char
    if code < 0x7F or (char.isprintable() and code < 0x10000):
        return char
    return char if char.isprintable() else _hex(code)


def _hex(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else chr(code)


def printed(node: Node) -> str:
    """The text of a tree without anchors."""
    return _print(node, 0)


def _print(node: Node, level: int) -> str:
    """`level`: 0 takes anything, 1 no bare alternation, 2 a single item only."""
    if isinstance(node, Set):
        return _print_set(node)
    if isinstance(node, Rep):
        text = _print(node.item, 2) + _times(node.low, node.high)
        return f"(?:{text})" if level == 2 else text
    if isinstance(node, Seq):
        text = "".join(_print(item, 1) for item in node.items)
        return text if level < 2 else f"(?:{text})"
    if isinstance(node, Alt):
        text = "|".join(_print(item, 1) for item in node.items)
        return text if level == 0 else f"(?:{text})"
    raise ValueError("an anchor or a rule is left in the expression")


def _times(low: int, high: int | None) -> str:
    if high is None:
        return {0: "*", 1: "+"}.get(low, f"{{{low},}}")
    if (low, high) == (0, 1):
        return "?"
    return f"{{{low}}}" if low == high else f"{{{low},{high}}}"


def _print_set(node: Set) -> str:
    if not node.props and len(node.ranges) == 1 and node.ranges[0][0] == node.ranges[0][1]:
        return character(node.ranges[0][0])
    parts = "".join(
        character(low) if low == high else f"{character(low)}-{character(high)}"
        for low, high in node.ranges
    )
    inner = parts + "".join(node.props)
    turned = complement(node.ranges)
    if not node.props and len(turned) < len(node.ranges) and turned:
        return _turned(turned)
    if not node.props and node.ranges and node.ranges[-1][1] == TOP and turned:
        return _turned(turned)
    return f"[{'^' if node.negated else ''}{inner}]"


def _turned(turned: tuple[Range, ...]) -> str:
    inner = "".join(
        character(low) if low == high else f"{character(low)}-{character(high)}"
        for low, high in turned
    )
    return f"[^{inner}]"

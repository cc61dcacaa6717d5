"""JSON strings as expressions of their text: characters with the escapes they need."""

from __future__ import annotations

from functools import lru_cache

from .regex_tree import (
    ANY,
    Alt,
    Node,
    Range,
    Rep,
    Seq,
    Set,
    alternatives,
    complement,
    intersection,
    literal,
    merged,
)

QUOTE = literal('"')
# What stands for itself; the rest is written with a backslash.
PLAIN = complement([(0x00, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
_SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
_HEX = {
    digit: Set(merged([(ord(digit), ord(digit)), (ord(digit.upper()), ord(digit.upper()))]))
    for digit in "0123456789abcdef"
}


class Unwritable(Exception):
    """A set of characters that only an engine with Unicode tables knows."""


@lru_cache(maxsize=1024)
def spelled(tree: Node) -> Node:
    """The expression of the text between quotes whose value matches `tree`."""
    if isinstance(tree, Set):
        return character(tree)
    if isinstance(tree, Rep):
        return Rep(tree.low, tree.high, spelled(tree.item))
    if isinstance(tree, Seq | Alt):
        return type(tree)(tuple(spelled(item) for item in tree.items))
    return tree


@lru_cache(maxsize=1024)
def character(node: Set) -> Node:
    """The spellings of one character."""
    if node.props:
        raise Unwritable(node.props[0])
    options: list[Node] = []
    plain = intersection(node.ranges, PLAIN)
    if plain:
        options.append(Set(plain))
    if _has(node.ranges, 0x2F):
        options.append(literal("\\/"))
    short: list[Range] = []
    for code, letter in _SHORT.items():
        if _has(node.ranges, code):
            short.append((ord(letter), ord(letter)))
    if short:
        options.append(Seq((literal("\\"), Set(merged(short)))))
    options += _long([code for code in range(0x20) if _has(node.ranges, code)])
    return alternatives(options)


def string(inside: Node) -> Node:
    """The text in its quotes."""
    return Seq((QUOTE, inside, QUOTE))


def _has(ranges: tuple[Range, ...], code: int) -> bool:
    return any(low <= code <= high for low, high in ranges)


def _long(codes: list[int]) -> list[Node]:
    """`\\u00XX` for control characters, by their first digit."""
    found: list[Node] = []
    for high in (0, 1):
        lows = [f"{code % 16:x}" for code in codes if code // 16 == high]
        if lows:
            digits = merged(r for low in lows for r in _HEX[low].ranges)
            found.append(Seq((literal(f"\\u00{high}"), Set(digits))))
    return found


CHARACTER = character(ANY)
STRING = string(Rep(0, None, CHARACTER))

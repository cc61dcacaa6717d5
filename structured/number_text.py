"""Numbers of a range as expressions of their JSON text."""

from __future__ import annotations

from decimal import Decimal

from .regex_tree import EMPTY, Node, Rep, Seq, Set, alternatives, literal

DIGIT = Set(((0x30, 0x39),))
NONZERO = Set(((0x31, 0x39),))
MINUS = literal("-")
WHOLE = alternatives([literal("0"), Seq((NONZERO, Rep(0, None, DIGIT)))])
FRACTION = Seq((literal("."), Rep(1, None, DIGIT)))
_ZEROS = Rep(0, 1, Seq((literal("."), Rep(1, None, literal("0")))))
_SOME = Seq((literal("."), Rep(0, None, DIGIT), NONZERO, Rep(0, None, DIGIT)))
INTEGER = Seq((Rep(0, 1, MINUS), WHOLE))
_EXPONENT = Seq(
    (
        Set(((0x45, 0x45), (0x65, 0x65))),
        Rep(0, 1, Set(((0x2B, 0x2B), (0x2D, 0x2D)))),
        Rep(1, 3, DIGIT),  # a double holds no larger one
    )
)
NUMBER = Seq((INTEGER, Rep(0, 1, FRACTION), Rep(0, 1, _EXPONENT)))


def integers(low: int | None, high: int | None) -> Node:
    """Integers from `low` to `high`, both included; at least one is there."""
    parts: list[Node] = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append(Seq((MINUS, wholes(least, None if low is None else -low))))
    if high is None or high >= 0:
        parts.append(wholes(max(low or 0, 0), high))
    return alternatives(parts)


def wholes(low: int, high: int | None) -> Node:
    """Whole numbers >= 0 from `low` to `high`, without leading zeros."""
    if high is None:
        if low == 0:
            return WHOLE
        width = len(str(low))
        longer = Seq((NONZERO, Rep(width, None, DIGIT)))
        return alternatives([wholes(low, 10**width - 1), longer])
    parts: list[Node] = []
    for width in range(len(str(low)), len(str(high)) + 1):
        first = max(low, 10 ** (width - 1) if width > 1 else 0)
        last = min(high, 10**width - 1)
        parts.append(_same_width(str(first), str(last)))
    return alternatives(parts)


def _same_width(low: str, high: str) -> Node:
    """Texts of digits of one width from `low` to `high`."""
    if not low:
        return EMPTY
    if set(low) == {"0"} and set(high) == {"9"}:
        return Rep(len(low), len(low), DIGIT)
    first, last = int(low[0]), int(high[0])
    rest = len(low) - 1
    if first == last:
        return Seq((_digits(first, first), _same_width(low[1:], high[1:])))
    parts: list[Node] = []
    if low[1:] != "0" * rest:
        parts.append(Seq((_digits(first, first), _same_width(low[1:], "9" * rest))))
        first += 1
    closing: list[Node] = []
    if high[1:] != "9" * rest:
        closing.append(Seq((_digits(last, last), _same_width("0" * rest, high[1:]))))
        last -= 1
    if first <= last:
        tail = (Rep(rest, rest, DIGIT),) if rest else ()
        parts.append(Seq((_digits(first, last), *tail)))
    return alternatives([*parts, *closing])


def _digits(low: int, high: int) -> Node:
    return Set(((0x30 + low, 0x30 + high),))


def numbers(low: Decimal | None, low_open: bool, high: Decimal | None, high_open: bool) -> Node:
    """Decimal numbers between whole bounds, without exponents."""
    parts: list[Node] = []
    if low is None or low < 0:
        # Sizes of the negative ones; minus zero is zero.
        least, least_open = (Decimal(0), True) if high is None or high >= 0 else (-high, high_open)
        parts.append(
            Seq((MINUS, _sizes(least, least_open, None if low is None else -low, low_open)))
        )
    if high is None or high > 0 or high == 0 and not high_open:
        start, start_open = (low, low_open) if low is not None and low >= 0 else (Decimal(0), False)
        parts.append(_sizes(start, start_open, high, high_open))
    return alternatives(parts)


def _sizes(low: Decimal, low_open: bool, high: Decimal | None, high_open: bool) -> Node:
    first, last = int(low), None if high is None else int(high) - 1
    parts: list[Node] = []
    if low_open and (last is None or first <= last):
        parts.append(Seq((literal(str(first)), _SOME)))
        first += 1
    if last is None or first <= last:
        parts.append(Seq((wholes(first, last), Rep(0, 1, FRACTION))))
    if high is not None and not high_open:
        parts.append(Seq((literal(str(int(high))), _ZEROS)))
    return alternatives(parts)

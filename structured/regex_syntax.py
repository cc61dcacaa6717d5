"""Read a regular expression as Python's `re` does; refuse what no mask can enforce.

The parse is Python's own (`re._parser`), so messages and positions are those that people know.
JSON Schema's dialect differs in spelling only: `(?<name>...)`, `\\p{L}` and `\\cX` are read too.
Character classes are ASCII unless the pattern says `(?u)`.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache
from re import _casefix, _constants, _parser  # type: ignore[attr-defined]
from typing import Any, NoReturn

from ..core.errors import ValidationError
from .limits import LIMITS, check, over
from .regex_tree import (
    ANY,
    EMPTY,
    Alt,
    Edge,
    Node,
    Range,
    Rep,
    Seq,
    Set,
    alternatives,
    complement,
    intersection,
    merged,
    printed,
)

DIGIT = ((0x30, 0x39),)
WORD = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
SPACE = ((0x09, 0x0D), (0x20, 0x20))
# What Python, ECMA-262 or Unicode call a space: none of these matches `\S` or `[^\s]` in a schema.
ANY_SPACE = merged(
    [(9, 13), (28, 32), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
    + [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)]
)
JSON_SPACE = ((0x09, 0x0A), (0x0D, 0x0D), (0x20, 0x20))
LINE_END = {False: ((10, 10),), True: ((10, 10), (13, 13), (0x2028, 0x2029))}  # by "in a schema"
_PLACE = 0xF0000  # private use: stands for the n-th `\p{..}` while Python parses
_PROP = re.compile(r"\\[pP](?:\{\^?[A-Za-z_=: ]+\}|[A-Z])")
_UNICODE = re.compile(r"^\(\?[aimsx]*u")
_CASES: dict[int, tuple[int, ...]] = _casefix._EXTRA_CASES
_LARGEST_CASED = 0x2000  # a range that is longer is not folded letter by letter


def checked(pattern: str, field: str = "regex") -> str:
    """Return the whole-match form of `pattern` in the common syntax; refuse it in one sentence."""
    if not pattern:
        _refuse(field, pattern, "must not be empty")
    tree = whole(parse(pattern, field), pattern, field)
    if tree == EMPTY:
        _refuse(field, pattern, "must not be empty")
    return printed(tree)


def checked_whitespace(pattern: str) -> str:
    """Return `whitespace_pattern`, narrowed to the four characters that JSON calls whitespace."""
    field = "whitespace_pattern"
    if not pattern:
        _refuse(field, pattern, "must not be empty; disable_any_whitespace=True writes none")
    return printed(_narrowed(whole(parse(pattern, field), pattern, field), pattern))


def _narrowed(node: Node, pattern: str) -> Node:
    if isinstance(node, Set):
        kept = () if node.props else intersection(node.ranges, JSON_SPACE)
        if not kept:
            _refuse("whitespace_pattern", pattern, "may match only spaces, tabs and line ends")
        return Set(kept)
    if isinstance(node, Rep):
        return Rep(node.low, node.high, _narrowed(node.item, pattern))
    if isinstance(node, Seq | Alt):
        return type(node)(tuple(_narrowed(item, pattern) for item in node.items))
    return node


def parse(pattern: str, field: str = "regex", *, schema: bool = False) -> Node:
    """Parse into a tree with anchors. `schema`: what Python and ECMA-262 read unlike is narrowed
    to what both accept, so that either validator agrees with the mask.
    """
    check(field, "characters", len(pattern), LIMITS.regex)
    if "\0" in pattern:
        _refuse(field, pattern, "must not hold a NUL character", pattern.index("\0"))
    text, props, places = _plain(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = _parser.parse(text)
    except re.error as error:
        at = None if error.pos is None else places[min(error.pos, len(places) - 1)]
        _refuse(field, pattern, f"is not a regular expression: {error.msg}", at)
    except (OverflowError, RecursionError) as error:
        _refuse(field, pattern, f"is not a regular expression: {error}")
    flags = tree.state.flags
    if not _UNICODE.search(pattern):
        flags &= ~re.UNICODE  # Python sets it for every text; we ask for it to be said
    return _Reader(pattern, field, props, schema).sequence(tree, flags, 1)


def whole(node: Node, pattern: str, field: str = "regex") -> Node:
    """The tree without anchors, read as a match of the whole text."""
    return _strip(node, True, True, pattern, field)


def search(node: Node, pattern: str, field: str = "pattern") -> Node:
    """The tree without anchors that matches a whole text wherever `node` is found in it."""
    found = []
    for branch in _branches(node):
        items = list(branch)
        left = _at_edge(items, True)
        right = _at_edge(items, False)
        body = _strip(Seq(tuple(items)), False, False, pattern, field)
        parts = () if left else (Rep(0, None, ANY),)
        found.append(Seq((*parts, body, *(() if right else (Rep(0, None, ANY),)))))
    return alternatives(dict.fromkeys(found))


@lru_cache(maxsize=1024)
def found_in(pattern: str) -> Node:
    """The tree of all texts in which the pattern of a schema is found."""
    return search(parse(pattern, "pattern", schema=True), pattern)


def _branches(node: Node) -> list[tuple[Node, ...]]:
    """Sequences whose union is `node`, opened far enough that anchors stand in the open."""
    if isinstance(node, Alt) and _anchored(node):
        return [branch for item in node.items for branch in _branches(item)]
    if not isinstance(node, Seq) or not _anchored(node):
        return [(node,)]
    lists: list[tuple[Node, ...]] = [()]
    for item in node.items:
        opened = _branches(item) if _anchored(item) else [(item,)]
        lists = [left + right for left in lists for right in opened]
        if len(lists) > 64:
            return [(node,)]
    return lists


def _anchored(node: Node) -> bool:
    if isinstance(node, Seq | Alt):
        return any(_anchored(item) for item in node.items)
    return isinstance(node, Edge) or isinstance(node, Rep) and _anchored(node.item)


def _at_edge(items: list[Node], start: bool) -> bool:
    """Take the anchors at one end of `items` away; say whether there was one."""
    found = False
    index = 0 if start else -1
    while items and isinstance(items[index], Edge) and items[index].start is start:  # type: ignore[union-attr]
        items.pop(index)
        found = True
    return found


def _strip(node: Node, first: bool, last: bool, pattern: str, field: str) -> Node:
    """Drop anchors at the ends; `first`/`last`: nothing can come before/after this node."""
    if isinstance(node, Edge):
        if first if node.start else last:
            return EMPTY
        _refuse(
            field,
            pattern,
            f"has an anchor {'^' if node.start else '$'} that is not at its "
            f"{'start' if node.start else 'end'}, which cannot be enforced token by token",
            node.position,
        )
    if isinstance(node, Alt):
        return Alt(tuple(_strip(item, first, last, pattern, field) for item in node.items))
    if isinstance(node, Rep):
        return Rep(node.low, node.high, _strip(node.item, False, False, pattern, field))
    if isinstance(node, Seq):
        ahead = [index for index, item in enumerate(node.items) if not isinstance(item, Edge)]
        start, end = (ahead[0], ahead[-1]) if ahead else (len(node.items), -1)
        items = (
            _strip(item, first and index <= start, last and index >= end, pattern, field)
            for index, item in enumerate(node.items)
        )
        kept = tuple(item for item in items if item != EMPTY)
        return kept[0] if len(kept) == 1 else Seq(kept)
    return node


def _plain(pattern: str) -> tuple[str, list[str], list[int]]:
    """Spell `\\p{..}`, `\\cX` and `(?<n>` as Python reads them; props, and places in `pattern`."""
    if "\\" not in pattern and "(?<" not in pattern:
        return pattern, [], [*range(len(pattern) + 1)]
    out: list[str] = []
    places: list[int] = []
    props: list[str] = []
    at = 0
    while at < len(pattern):
        piece, step = pattern[at], 1
        if pattern.startswith("\\", at):
            found = _PROP.match(pattern, at)
            if found:
                props.append(found.group())
                piece, step = chr(_PLACE + len(props) - 1), len(found.group())
            elif re.match(r"\\c[A-Za-z]", pattern[at : at + 3]):
                piece, step = f"\\x{ord(pattern[at + 2]) % 32:02x}", 3
            else:
                piece, step = pattern[at : at + 2], 2
        elif re.match(r"\(\?<[A-Za-z_]", pattern[at : at + 4]):
            piece, step = "(?P<", 3
        out.append(piece)
        places.extend([at] * len(piece))
        at += step
    return "".join(out), props, [*places, len(pattern)]


class _Reader:
    """Turns Python's parse into our tree."""

    def __init__(self, pattern: str, field: str, props: list[str], schema: bool) -> None:
        self.pattern, self.field, self.props, self.schema = pattern, field, props, schema

    def sequence(self, parsed: Any, flags: int, product: int) -> Node:
        items = [self.item(op, value, flags, product) for op, value in parsed]
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def item(self, op: Any, value: Any, flags: int, product: int) -> Node:
        name = str(op)
        if name in ("LITERAL", "NOT_LITERAL", "IN", "ANY"):
            return self.set(name, value, flags)
        if name == "BRANCH":
            return alternatives(self.sequence(part, flags, product) for part in value[1])
        if name == "SUBPATTERN":
            return self.sequence(value[3], (flags | value[1]) & ~value[2], product)
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            return self.repeat(value, flags, product)
        if name == "AT":
            return self.edge(str(value), flags)
        self.refuse(name)

    def repeat(self, value: Any, flags: int, product: int) -> Node:
        low, high, inner = value
        bound = None if high is _constants.MAXREPEAT else int(high)
        count = max(int(low), bound or 0)
        check(self.field, "repetitions", count, LIMITS.repetition)
        if product > 1 and count > 1 and product * count > LIMITS.nested_repetition:
            over(self.field, "nested repetitions", product * count, LIMITS.nested_repetition)
        return Rep(int(low), bound, self.sequence(inner, flags, product * max(count, 1)))

    def edge(self, name: str, flags: int) -> Node:
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING", "AT_END", "AT_END_STRING"):
            if flags & re.MULTILINE and not name.endswith("STRING"):
                self.refuse("(?m)")
            start = "BEGINNING" in name
            return Edge(start, max(self.pattern.find("^" if start else "$"), 0))
        self.refuse(name)

    def set(self, name: str, value: Any, flags: int) -> Set:
        if name == "ANY":
            return (
                Set(complement(())) if flags & re.DOTALL else Set(complement(LINE_END[self.schema]))
            )
        parts = value if name == "IN" else [(_constants.LITERAL, value)]
        negated = name == "NOT_LITERAL" or bool(parts) and str(parts[0][0]) == "NEGATE"
        ranges: list[Range] = []
        props: list[str] = []
        for op, item in parts:
            kind = str(op)
            if kind == "LITERAL" and _PLACE <= item < _PLACE + len(self.props):
                props.append(self.props[item - _PLACE])
            elif kind == "LITERAL":
                ranges += self.cased((item, item), flags)
            elif kind == "RANGE":
                ranges += self.cased(tuple(item), flags)
            elif kind == "CATEGORY":
                self.category(str(item), flags, negated, ranges, props)
        if props:
            return Set(merged(ranges), tuple(props), negated)
        return Set(complement(ranges) if negated else self.text_only(ranges))

    def category(
        self, name: str, flags: int, negated: bool, ranges: list[Range], props: list[str]
    ) -> None:
        letter = {"DIGIT": "d", "WORD": "w", "SPACE": "s"}[name.rsplit("_", 1)[1]]
        other = "_NOT_" in name
        if flags & re.UNICODE:
            props.append("\\" + (letter.upper() if other else letter))
        elif self.schema and other is not negated:
            # Python's idea of a digit or letter is wider than ECMA's: exclude them all.
            if letter == "s":
                ranges += complement(ANY_SPACE) if other else ANY_SPACE
            else:
                props.append("\\" + (letter.upper() if other else letter))
        else:
            inside = {"d": DIGIT, "w": WORD, "s": SPACE}[letter]
            ranges += complement(inside) if other else inside

    def cased(self, span: Range, flags: int) -> list[Range]:
        """The range, with the other cases of its letters under `(?i)`."""
        if not flags & re.IGNORECASE:
            return [span]
        if span[1] - span[0] > _LARGEST_CASED:
            self.refuse("(?i) over a range of more than 8,192 characters")
        found = [span]
        for code in range(span[0], span[1] + 1):
            lower, upper = chr(code).lower(), chr(code).upper()
            found += [(ord(c), ord(c)) for c in (lower, upper) if len(c) == 1]
            if len(lower) == 1:
                found += [(c, c) for c in _CASES.get(ord(lower), ())]
        return found

    def text_only(self, ranges: list[Range]) -> tuple[Range, ...]:
        """Ranges without the surrogates, which no text holds."""
        if any(low <= 0xDFFF and high >= 0xD800 for low, high in ranges):
            return complement(complement(ranges))
        return merged(ranges)

    def refuse(self, name: str) -> NoReturn:
        said, place = _UNMASKABLE.get(name, (name, None))
        at = re.search(place, self.pattern) if place else None
        _refuse(
            self.field,
            self.pattern,
            f"has {said}, which cannot be enforced token by token",
            at.start() if at else None,
        )


_UNMASKABLE = {
    "ASSERT": ("a lookaround", r"\(\?<?[=!]"),
    "ASSERT_NOT": ("a lookaround", r"\(\?<?[=!]"),
    "GROUPREF": ("a back-reference", r"\\[1-9]|\(\?P="),
    "GROUPREF_EXISTS": ("a conditional group", r"\(\?\("),
    "ATOMIC_GROUP": ("an atomic group", r"\(\?>"),
    "POSSESSIVE_REPEAT": ("a possessive repetition", r"[*+?}]\+"),
    "AT_BOUNDARY": (r"a word boundary \b", r"\\b"),
    "AT_NON_BOUNDARY": (r"a word boundary \B", r"\\B"),
    "(?m)": ("a line anchor under (?m)", r"\(\?[a-z]*m"),
}


def _refuse(field: str, pattern: str, problem: str, position: int | None = None) -> NoReturn:
    """Raise the sentence; where the place is known, the pattern follows with a caret under it."""
    where = "" if position is None else f" at position {position}"
    text = f"{field} {problem}{where}"
    if position is not None and len(pattern) <= 200 and pattern.isprintable():
        text += f"\n  {pattern}\n  {' ' * position}^"
    elif pattern:
        text += f", got {pattern[:80]!r}"
    raise ValidationError(text, parameter=field, value=pattern)

"""The normal form of a schema: every value is described by alternatives of one JSON type each.

A node is a list of shapes, any of which a value may have; nodes are numbered, and a shape names
its parts by number, so recursion is a circle of numbers. Every keyword that joins schemas
(`allOf`, `$ref` with siblings, `oneOf`, `not`, `if` ...) is resolved away.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from ..core.constraint import Refusal
from .regex_tree import Node as RegexTree

ANYTHING = 0  # the node that any JSON value satisfies


@dataclass(slots=True)
class Shape:
    """Values of one type; `at` is the pointer of each keyword that it came from."""

    at: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Anything(Shape):
    """Any JSON value."""


@dataclass(slots=True)
class Simple(Shape):
    """Every value of the type "null" or "boolean"."""

    type: str = "null"


@dataclass(slots=True)
class Literal(Shape):
    """One value."""

    value: Any = None


@dataclass(slots=True)
class Number(Shape):
    """A range of numbers; an integer's bounds are whole and inclusive."""

    integer: bool = False
    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False
    multiple: Decimal | None = None


@dataclass(slots=True)
class String(Shape):
    """Strings of a length, in characters, whose whole text matches every pattern."""

    low: int = 0
    high: int | None = None
    patterns: tuple[RegexTree, ...] = ()


@dataclass(slots=True)
class Array(Shape):
    """`prefix`, then any number of `rest`, `low` to `high` items in all."""

    prefix: tuple[int, ...] = ()
    rest: int | None = ANYTHING  # None: no more items
    low: int = 0
    high: int | None = None


@dataclass(slots=True)
class Member:
    """A named property."""

    node: int
    required: bool


@dataclass(slots=True)
class Object(Shape):
    """Declared members in order, then others.

    A name that is neither in `members` nor in `forbidden` takes the node of the one pattern that
    matches it, or `rest`. Counts are of all members.
    """

    members: dict[str, Member] = field(default_factory=dict)
    forbidden: tuple[str, ...] = ()
    patterns: tuple[tuple[RegexTree, int], ...] = ()  # of the whole name; no two share a name
    rest: int | None = ANYTHING  # None: no other names
    low: int = 0
    high: int | None = None

    @property
    def required(self) -> int:
        """How many members are required."""
        return sum(member.required for member in self.members.values())


@dataclass(slots=True)
class Schema:
    """All nodes of a schema, and what could not be described.

    Where there are refusals the nodes describe more values than the schema, never fewer.
    """

    nodes: list[list[Shape]]
    root: int
    refusals: tuple[Refusal, ...] = ()

"""What is known of a value on one branch of a schema: bounds, literals, groups of parts.

A branch starts with nothing known and takes in the keywords of one subschema after another; the
order does not matter. Turning the facts into shapes is `schema_normal`'s part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, NamedTuple

from ..core.constraint import Refusal
from .schema_document import step
from .validate import equal, exact, is_integer, is_number

ATOMS = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
MADE = "\0"  # in the pointer of a part that stands nowhere in the document
_OF_TYPE = {"number": ("integer", "fraction")}


class Part(NamedTuple):
    """A subschema that a value must satisfy, or, not positive, must not."""

    pointer: str
    schema: Any
    positive: bool = True

    @property
    def key(self) -> tuple[str, bool]:
        """What tells two parts of one document apart."""
        return (self.pointer, self.positive)


TRUE = Part("", True)


@dataclass(slots=True)
class Names:
    """`properties`, `patternProperties` and `additionalProperties` that speak of one another."""

    named: dict[str, Part]
    patterns: dict[str, Part]
    rest: Part | None
    scopes: frozenset[int] = frozenset()  # whose `unevaluatedProperties` counts them
    pointer: str = ""


@dataclass(slots=True)
class Items:
    """`prefixItems` and `items`."""

    prefix: list[Part]
    rest: Part | None
    scopes: frozenset[int] = frozenset()


@dataclass(slots=True)
class Facts:
    """One branch."""

    types: frozenset[str] = ATOMS
    literals: list[Any] | None = None
    excluded: list[tuple[Any, str]] = field(default_factory=list)  # values, and who says so
    low: tuple[Decimal, bool] | None = None  # bound, open
    high: tuple[Decimal, bool] | None = None
    multiples: list[Decimal] = field(default_factory=list)
    lengths: tuple[int, int | None] = (0, None)
    patterns: list[tuple[str, str, bool]] = field(default_factory=list)  # text, pointer, positive
    formats: list[tuple[str, str]] = field(default_factory=list)
    counts: tuple[int, int | None] = (0, None)  # of items
    unique: str | None = None  # pointer
    contains: list[tuple[Part, int, int | None, str]] = field(default_factory=list)
    items: list[Items] = field(default_factory=list)
    sizes: tuple[int, int | None] = (0, None)  # of members
    required: dict[str, str] = field(default_factory=dict)
    names: list[Names] = field(default_factory=list)
    name_parts: list[Part] = field(default_factory=list)
    unevaluated: list[tuple[int, str, Part]] = field(default_factory=list)  # scope, keyword, part
    problems: list[Refusal] = field(default_factory=list)
    at: dict[str, str] = field(default_factory=dict)
    done: set[tuple[str, bool]] = field(default_factory=set)

    def copy(self) -> Facts:
        """An independent copy; parts are shared, as they never change."""
        return replace(
            self,
            literals=None if self.literals is None else list(self.literals),
            excluded=list(self.excluded),
            multiples=list(self.multiples),
            patterns=list(self.patterns),
            formats=list(self.formats),
            contains=list(self.contains),
            items=list(self.items),
            required=dict(self.required),
            names=list(self.names),
            name_parts=list(self.name_parts),
            unevaluated=list(self.unevaluated),
            problems=list(self.problems),
            at=dict(self.at),
            done=set(self.done),
        )

    def problem(self, pointer: str, what: str, reason: str) -> None:
        """Note a keyword that no shape can say."""
        self.problems.append(Refusal(pointer, what, reason))

    def type(self, value: Any) -> None:
        """Keep the types of the keyword's value; the atom "fraction" is known here too."""
        names = value if isinstance(value, list) else [value]
        self.types &= {atom for name in names for atom in _OF_TYPE.get(name, (name,))}

    def above(self, bound: Any, is_open: bool) -> None:
        """Take in a lower bound."""
        new = (exact(bound), is_open)
        if self.low is None or new > self.low:
            self.low = new

    def below(self, bound: Any, is_open: bool) -> None:
        """Take in an upper bound."""
        new = (exact(bound), is_open)
        if self.high is None or (new[0], not is_open) < (self.high[0], not self.high[1]):
            self.high = new

    def at_least(self, name: str, count: int) -> None:
        """Take in a lower bound of `lengths`, `counts` or `sizes`."""
        low, high = getattr(self, name)
        setattr(self, name, (max(low, int(count)), high))

    def at_most(self, name: str, count: int) -> None:
        """Take in an upper bound of `lengths`, `counts` or `sizes`."""
        low, high = getattr(self, name)
        setattr(self, name, (low, int(count) if high is None else min(high, int(count))))

    def only(self, values: list[Any]) -> None:
        """Keep these values."""
        if self.literals is None:
            self.literals = list(values)
        else:
            self.literals = [v for v in self.literals if any(equal(v, w) for w in values)]

    @property
    def dead(self) -> bool:
        """Whether no value is left, as far as simple facts tell."""
        if not self.types or self.literals == []:
            return True
        if self.literals is None:
            return False
        return not any(atom_of(value) in self.types for value in self.literals)


def atom_of(value: Any) -> str:
    """The atom of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if is_number(value):
        return "integer" if is_integer(value) else "fraction"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def whole_bounds(facts: Facts) -> tuple[int | None, int | None]:
    """Inclusive whole bounds for an integer."""
    low = high = None
    if facts.low is not None:
        low = math.ceil(facts.low[0])
        low += low == facts.low[0] and facts.low[1]
    if facts.high is not None:
        high = math.floor(facts.high[0])
        high -= high == facts.high[0] and facts.high[1]
    return low, high


def names_of(part: Part) -> Names | None:
    """The group of names that a schema sets, or None."""
    schema, pointer = part.schema, part.pointer
    named = {
        name: Part(step(pointer, "properties", name), item)
        for name, item in schema.get("properties", {}).items()
    }
    patterns = {
        text: Part(step(pointer, "patternProperties", text), item)
        for text, item in schema.get("patternProperties", {}).items()
    }
    rest = None
    if "additionalProperties" in schema:
        rest = Part(step(pointer, "additionalProperties"), schema["additionalProperties"])
    if not named and not patterns and rest is None:
        return None
    return Names(named, patterns, rest, pointer=pointer)


def items_of(part: Part) -> Items | None:
    """The group of items that a schema sets, or None."""
    schema, pointer = part.schema, part.pointer
    prefix, items = schema.get("prefixItems", []), schema.get("items")
    first, word = "prefixItems", "items"
    if isinstance(items, list):
        prefix, first = items, "items"
        items, word = schema.get("additionalItems"), "additionalItems"
    if not prefix and items is None:
        return None
    parts = [Part(step(pointer, first, index), item) for index, item in enumerate(prefix)]
    rest = None if items is None else Part(step(pointer, word), items)
    return Items(parts, rest)

"""Take one subschema into the facts of a branch; say which others must hold, and which may.

Keywords that no validator knows are annotations and pass unread, as the standard says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from . import formats
from .facts import MADE, Facts, Names, Part, items_of, names_of
from .schema_document import Document, step
from .validate import exact

Alternative = list[Part]


@dataclass(slots=True)
class Joined:
    """What a subschema joins in the same place."""

    all: list[Part] = field(default_factory=list)
    choices: list[list[Alternative]] = field(default_factory=list)


@dataclass(slots=True)
class Context:
    """What reading needs to know of the whole."""

    document: Document
    assert_formats: bool
    disjoint: Callable[[Part, Part, Part], bool]  # two branches, and what stands beside them


class _Here(NamedTuple):
    """Where a keyword was met, and what it may change."""

    part: Part
    keyword: str
    facts: Facts
    joined: Joined
    context: Context


def take(facts: Facts, part: Part, scopes: frozenset[int], context: Context) -> Joined:
    """Read a positive part into `facts`."""
    schema = part.schema
    joined = Joined()
    if isinstance(schema, bool):
        if not schema:
            facts.types = frozenset()
        return joined
    document = context.document
    if "$ref" in schema and document.draft <= 7:
        joined.all.append(target(part, "$ref", document))
        return joined
    for keyword, value in schema.items():
        rule = _RULES.get(keyword)
        if rule is not None:
            rule(facts, value, schema)
            facts.at[keyword] = step(part.pointer, keyword)
        elif keyword in _JOINS:
            _JOINS[keyword](_Here(part, keyword, facts, joined, context), value)
    if schema.keys() & _NAME_WORDS and (names := names_of(part)):
        facts.names.append(replace(names, scopes=scopes))
    if schema.keys() & _ITEM_WORDS and (items := items_of(part)):
        facts.items.append(replace(items, scopes=scopes))
    return joined


_LATER = ("unevaluatedProperties", "unevaluatedItems")
_NAME_WORDS = {"properties", "patternProperties", "additionalProperties"}
_ITEM_WORDS = {"prefixItems", "items"}


def target(part: Part, keyword: str, document: Document, positive: bool = True) -> Part:
    """The part that a reference means."""
    place = document.follow(part.schema[keyword], step(part.pointer, keyword))
    return Part(place.pointer, place.schema, positive)


def with_names(pointer: str, names: list[str]) -> Part:
    """An object that has these members."""
    return Part(f"{pointer}{MADE}with", {"type": "object", "required": names})


def without_name(pointer: str, name: str) -> Part:
    """No object that has this member."""
    return Part(f"{pointer}{MADE}without", {"properties": {name: False}})


def _bound(facts: Facts, value: Any, schema: dict[str, Any]) -> None:
    """All four bounds of one schema, and draft 4's open ones."""
    if "minimum" in schema:
        facts.above(schema["minimum"], schema.get("exclusiveMinimum") is True)
    if "maximum" in schema:
        facts.below(schema["maximum"], schema.get("exclusiveMaximum") is True)
    for keyword, add in (("exclusiveMinimum", facts.above), ("exclusiveMaximum", facts.below)):
        if keyword in schema and not isinstance(schema[keyword], bool):
            add(schema[keyword], True)


def _required(facts: Facts, value: Any, schema: dict[str, Any]) -> None:
    for name in value if isinstance(value, list) else ():
        facts.required.setdefault(name, "")


def _exact(facts: Facts, value: Any, schema: dict[str, Any]) -> None:
    facts.multiples.append(exact(value))


_Rule = Callable[[Facts, Any, dict[str, Any]], None]
_RULES: dict[str, _Rule] = {
    "type": lambda facts, value, _: facts.type(value),
    "enum": lambda facts, value, _: facts.only(value),
    "const": lambda facts, value, _: facts.only([value]),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
    "multipleOf": _exact,
    "minLength": lambda facts, value, _: facts.at_least("lengths", value),
    "maxLength": lambda facts, value, _: facts.at_most("lengths", value),
    "minItems": lambda facts, value, _: facts.at_least("counts", value),
    "maxItems": lambda facts, value, _: facts.at_most("counts", value),
    "minProperties": lambda facts, value, _: facts.at_least("sizes", value),
    "maxProperties": lambda facts, value, _: facts.at_most("sizes", value),
    "required": _required,
}


def _pattern(here: _Here, value: Any) -> None:
    here.facts.patterns.append((value, step(here.part.pointer, here.keyword), True))


def _format(here: _Here, value: Any) -> None:
    pointer = step(here.part.pointer, here.keyword)
    if value in formats.FORMATS:
        here.facts.formats.append((value, pointer))
    elif here.context.assert_formats and "string" in here.facts.types:
        here.facts.problem(
            pointer, "format", f"the format {value!r} is not known, and format='assert' was asked"
        )


def _unique(here: _Here, value: Any) -> None:
    if value:
        here.facts.unique = step(here.part.pointer, here.keyword)


def _contains(here: _Here, value: Any) -> None:
    schema, pointer = here.part.schema, step(here.part.pointer, here.keyword)
    low, high = schema.get("minContains", 1), schema.get("maxContains")
    if low or high is not None:
        here.facts.contains.append((Part(pointer, value), int(low), high, pointer))


def _names(here: _Here, value: Any) -> None:
    here.facts.name_parts.append(Part(step(here.part.pointer, here.keyword), value))


def _dependent(here: _Here, value: Any) -> None:
    for name, needed in value.items():
        pointer = step(here.part.pointer, here.keyword, name)
        if isinstance(needed, list):
            if needed:
                having = [with_names(pointer, [name, *needed])]
                here.joined.choices.append([having, [without_name(pointer, name)]])
        else:
            having = [with_names(pointer, [name]), Part(pointer, needed)]
            here.joined.choices.append([having, [without_name(pointer, name)]])


def _reference(here: _Here, value: Any) -> None:
    here.joined.all.append(target(here.part, here.keyword, here.context.document))


def _dynamic(here: _Here, value: Any) -> None:
    pointer = step(here.part.pointer, here.keyword)
    place = here.context.document.dynamic(value, pointer)
    if place is None:
        here.facts.problem(
            pointer, here.keyword, "what it refers to depends on the path taken to it"
        )
    else:
        here.joined.all.append(Part(place.pointer, place.schema))


def _all_of(here: _Here, value: Any) -> None:
    here.joined.all += members(here.part, here.keyword)


def _any_of(here: _Here, value: Any) -> None:
    here.joined.choices.append([[item] for item in members(here.part, here.keyword)])


def _one_of(here: _Here, value: Any) -> None:
    items = members(here.part, here.keyword)
    beside = Part(
        f"{here.part.pointer}{MADE}beside",
        {k: v for k, v in here.part.schema.items() if k not in (here.keyword, *_LATER)},
    )
    alternatives: list[Alternative] = [[item] for item in items]
    for left in range(len(items)):
        for right in range(left + 1, len(items)):
            if not here.context.disjoint(items[left], items[right], beside):
                # Exactly one: the other must fail, on both sides.
                alternatives[left].append(items[right]._replace(positive=False))
                alternatives[right].append(items[left]._replace(positive=False))
    here.joined.choices.append(alternatives)


def _not(here: _Here, value: Any) -> None:
    here.joined.all.append(Part(step(here.part.pointer, here.keyword), value, False))


def _if(here: _Here, value: Any) -> None:
    schema, pointer = here.part.schema, here.part.pointer
    if "then" not in schema and "else" not in schema:
        return
    condition = Part(step(pointer, "if"), value)
    met, unmet = [condition], [condition._replace(positive=False)]
    if "then" in schema:
        met.append(Part(step(pointer, "then"), schema["then"]))
    if "else" in schema:
        unmet.append(Part(step(pointer, "else"), schema["else"]))
    here.joined.choices.append([met, unmet])


def _excluded(here: _Here, value: Any) -> None:
    here.facts.excluded += [(item, here.part.pointer.partition(MADE)[0]) for item in value]


def _not_pattern(here: _Here, value: Any) -> None:
    here.facts.patterns.append((value, here.part.pointer.partition(MADE)[0], False))


def _trouble(here: _Here, value: Any) -> None:
    here.facts.problem(
        here.part.pointer.partition(MADE)[0], value, "its opposite is not a form of grammar"
    )


def _members(here: _Here, value: Any) -> None:
    here.facts.names.append(Names(dict(value), {}, None))


def members(part: Part, keyword: str, positive: bool = True) -> list[Part]:
    """The parts that a keyword lists."""
    return [
        Part(step(part.pointer, keyword, index), item, positive)
        for index, item in enumerate(part.schema[keyword])
    ]


_Join = Callable[[_Here, Any], None]
_JOINS: dict[str, _Join] = {
    "pattern": _pattern,
    "format": _format,
    "uniqueItems": _unique,
    "contains": _contains,
    "propertyNames": _names,
    "dependentRequired": _dependent,
    "dependentSchemas": _dependent,
    "dependencies": _dependent,
    "$ref": _reference,
    "$dynamicRef": _dynamic,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    # Words of our own, which only `schema_negate` writes.
    "$excluded": _excluded,
    "$notPattern": _not_pattern,
    "$trouble": _trouble,
    "$members": _members,
}

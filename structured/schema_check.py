"""The first look at a schema: shapes of its keywords, sizes, references; errors name the place."""

from __future__ import annotations

from math import isfinite
from typing import Any

from ..core.errors import ValidationError, did_you_mean
from ..core.param_rules import shown
from . import regex_syntax
from .limits import LIMITS, check
from .schema_document import LISTS, MAPS, SINGLES, Document, refuse, step

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
COUNTS = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minContains", "maxContains"),
)
NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
TEXTS = ("$ref", "$dynamicRef", "$anchor", "$dynamicAnchor", "$id", "pattern", "format")
_PAIRS = (
    ("minimum", "maximum", "number"),
    ("minLength", "maxLength", "string"),
    ("minItems", "maxItems", "array"),
    ("minProperties", "maxProperties", "object"),
)


def check_schema(schema: Any) -> Document:
    """Check a whole schema and return it as a document; ValidationError names the first fault."""
    if not isinstance(schema, dict | bool):
        refuse("", f"a schema must be an object, true or false, got {shown(schema)}", schema)
    if schema is False:
        refuse("", "no value can satisfy false", schema)
    document = Document(schema)
    walk = _Walk(document)
    walk.schema("", schema, 1)
    check("json", "properties", walk.properties, LIMITS.properties)
    return document


class _Walk:
    """Visits every subschema once."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.properties = 0

    def schema(self, pointer: str, schema: Any, depth: int) -> None:
        if isinstance(schema, bool):
            return
        if not isinstance(schema, dict):
            refuse(pointer, f"a schema must be an object, true or false, got {shown(schema)}")
        if depth > LIMITS.schema_depth:
            check("json", "schemas inside one another", depth, LIMITS.schema_depth)
        for keyword, value in schema.items():
            rule = _RULES.get(keyword)
            if rule is not None:
                rule(self, pointer, keyword, value, depth)
        self.pairs(pointer, schema)

    def map(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        if not isinstance(value, dict):
            _shape(pointer, keyword, "an object of schemas", value)
        if keyword == "properties":
            self.properties += len(value)
        for name, item in value.items():
            if not isinstance(name, str):
                _shape(pointer, keyword, "an object with names of type string", value)
            at = step(pointer, keyword, name)
            if keyword == "patternProperties":
                pattern(at, name)
            self.schema(at, item, depth + 1)

    def list(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        if not isinstance(value, list) or not value:
            _shape(pointer, keyword, "a non-empty list of schemas", value)
        for index, item in enumerate(value):
            self.schema(step(pointer, keyword, index), item, depth + 1)

    def single(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        if keyword == "items" and isinstance(value, list):
            for index, item in enumerate(value):
                self.schema(step(pointer, keyword, index), item, depth + 1)
        else:
            self.schema(step(pointer, keyword), value, depth + 1)

    def type(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        names = value if isinstance(value, list) and value else [value]
        for name in names:
            if not isinstance(name, str):
                _shape(pointer, keyword, "a name of a type or a non-empty list of them", value)
            if name not in TYPES:
                refuse(
                    step(pointer, keyword),
                    f"type must be one of {', '.join(TYPES)}, got {name!r}"
                    f"{did_you_mean(name, TYPES)},",
                    value,
                )

    def enum(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        if not isinstance(value, list):
            _shape(pointer, keyword, "a list of values", value)
        if not value:
            refuse(step(pointer, keyword), "no value can satisfy an empty enum", value)

    def count(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        whole = isinstance(value, int | float) and not isinstance(value, bool)
        if not whole or value < 0 or value != int(value):
            _shape(pointer, keyword, "a whole number >= 0", value)

    def number(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        if isinstance(value, bool) and keyword.startswith("exclusive") and self.document.draft <= 4:
            return
        if not isinstance(value, int | float) or isinstance(value, bool) or not isfinite(value):
            _shape(pointer, keyword, "a number", value)
        if keyword == "multipleOf" and value <= 0:
            _shape(pointer, keyword, "a number above 0", value)

    def flag(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        if not isinstance(value, bool):
            _shape(pointer, keyword, "true or false", value)

    def names(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        if isinstance(value, bool) and self.document.draft <= 4:
            return
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            _shape(pointer, keyword, "a list of names", value)

    def dependent(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        if not isinstance(value, dict):
            _shape(pointer, keyword, "an object", value)
        for name, item in value.items():
            if isinstance(item, list):
                self.names(step(pointer, keyword), name, item, depth)
            elif keyword == "dependencies":
                self.schema(step(pointer, keyword, name), item, depth + 1)
            else:
                _shape(step(pointer, keyword), name, "a list of names", item)

    def text(self, pointer: str, keyword: str, value: Any, depth: int) -> None:
        if not isinstance(value, str):
            _shape(pointer, keyword, "a string", value)
        if keyword == "pattern":
            pattern(step(pointer, keyword), value)
        elif keyword == "$ref":
            self.reference(pointer, value)

    def reference(self, pointer: str, reference: str) -> None:
        """Follow a reference, and those it leads to at once, to something with content."""
        seen = {pointer}
        place = self.document.follow(reference, step(pointer, "$ref"))
        while isinstance(place.schema, dict) and set(place.schema) == {"$ref"}:
            if place.pointer in seen or not isinstance(place.schema["$ref"], str):
                refuse(step(pointer, "$ref"), f"the reference {reference!r} leads only to itself")
            seen.add(place.pointer)
            place = self.document.follow(place.schema["$ref"], step(place.pointer, "$ref"))

    def pairs(self, pointer: str, schema: dict[str, Any]) -> None:
        kinds = schema.get("type", TYPES)
        for low, high, kind in _PAIRS:
            if low in schema and high in schema and schema[low] > schema[high]:
                if kind in kinds or kind == "number" and "integer" in kinds:
                    refuse(
                        pointer,
                        f"no value can satisfy {low} {schema[low]} with {high} {schema[high]}",
                    )


def pattern(pointer: str, value: str) -> None:
    """Refuse a pattern that is no regular expression; whether it can be enforced comes later."""
    try:
        regex_syntax.parse(value, "pattern", schema=True)
    except ValidationError as error:
        if "cannot be enforced" in str(error):
            return
        raise ValidationError(
            f"json: {error} (at {pointer or 'the root'})", parameter="json", value=value
        ) from None


def _shape(pointer: str, keyword: str, allowed: str, value: object) -> None:
    place = step(pointer, keyword)
    refuse(place, f"{keyword} must be {allowed}, got {shown(value)}", value)


_RULES: dict[str, Any] = {
    **dict.fromkeys(MAPS, _Walk.map),
    **dict.fromkeys(LISTS, _Walk.list),
    **dict.fromkeys(SINGLES, _Walk.single),
    **dict.fromkeys(COUNTS, _Walk.count),
    **dict.fromkeys(NUMBERS, _Walk.number),
    **dict.fromkeys(TEXTS, _Walk.text),
    **dict.fromkeys(("dependentRequired", "dependencies"), _Walk.dependent),
    "type": _Walk.type,
    "enum": _Walk.enum,
    "required": _Walk.names,
    "uniqueItems": _Walk.flag,
}

"""Whether a JSON value satisfies a schema: for enum values beside other keywords, and to check a
finished text that could only be constrained approximately.

`Validator(document).valid(value)`. Numbers may be `Decimal`, so that `multipleOf` is exact. A
`format` that decodekit knows is asserted; any other is an annotation.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from fractions import Fraction
from functools import lru_cache
from typing import Any

from . import formats
from .schema_document import Document, Place, step

Seen = tuple[set[str], set[int]]  # names of properties and places of items that were evaluated


def loads(text: str) -> Any:
    """Parse JSON with exact numbers; a repeated key is an error, as it would hide a value."""
    return json.loads(text, parse_float=_decimal, object_pairs_hook=_unique)


def equal(left: Any, right: Any) -> bool:
    """Equality of JSON values: 1 is 1.0, and neither is true."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(equal(left[k], right[k]) for k in left)
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(map(equal, left, right))
    if is_number(left) and is_number(right):
        return exact(left) == exact(right)
    return type(left) is type(right) and bool(left == right)


def is_number(value: Any) -> bool:
    """Whether it is a JSON number."""
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """Whether it is a number without a fraction: 5.0 is one."""
    if isinstance(value, int):
        return not isinstance(value, bool)
    return is_number(value) and exact(value).is_finite() and _is_whole(exact(value))


def _is_whole(value: Decimal) -> bool:
    return value == value.to_integral_value()


def exact(value: Any) -> Decimal:
    """A number as it is written: 0.1 is a tenth."""
    return Decimal(repr(value)) if isinstance(value, float) else Decimal(value)


_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda v: v is None,
    "boolean": lambda v: isinstance(v, bool),
    "integer": is_integer,
    "number": is_number,
    "string": lambda v: isinstance(v, str),
    "array": lambda v: isinstance(v, list),
    "object": lambda v: isinstance(v, dict),
}


# Unicode's classes of letters and digits, as far as Python's own say the same.
_PROPS = {r"\p{L}": r"[^\W\d_]", r"\p{N}": r"\d", r"\p{Nd}": r"\d", r"\pL": r"[^\W\d_]"}


def found(pattern: str, text: str) -> bool:
    """Whether the pattern of a schema is found in `text`; one that Python cannot read is not."""
    compiled = _compiled(pattern)
    return compiled is not None and compiled.search(text) is not None


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str] | None:
    for prop, spelled in _PROPS.items():
        pattern = pattern.replace(prop, spelled)
    pattern = re.sub(r"\(\?<(?=[A-Za-z_])", "(?P<", pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return re.compile(pattern)
    except (re.error, OverflowError):
        return None


class Validator:
    """Validates against places of one document."""

    def __init__(self, document: Document) -> None:
        self.document = document

    def valid(self, value: Any, place: Place | None = None) -> bool:
        """Whether `value` satisfies the schema at `place`, the root by default."""
        return self._check(value, place or Place("", self.document.root)) is not None

    def _check(self, value: Any, place: Place) -> Seen | None:
        """None if invalid, else what was evaluated."""
        pointer, schema = place
        if isinstance(schema, bool):
            return (set(), set()) if schema else None
        if self.document.draft <= 7 and "$ref" in schema:
            return self._check(value, self.document.follow(schema["$ref"], step(pointer, "$ref")))
        seen: Seen = (set(), set())
        if not self._simple(value, schema):
            return None
        if not self._in_place(value, pointer, schema, seen):
            return None
        if isinstance(value, dict) and not self._object(value, pointer, schema, seen):
            return None
        if isinstance(value, list) and not self._array(value, pointer, schema, seen):
            return None
        return seen

    def _simple(self, value: Any, schema: dict[str, Any]) -> bool:
        kinds = schema.get("type")
        if kinds is not None:
            names = kinds if isinstance(kinds, list) else [kinds]
            if not any(_TYPES[name](value) for name in names):
                return False
        if "enum" in schema and not any(equal(value, item) for item in schema["enum"]):
            return False
        if "const" in schema and not equal(value, schema["const"]):
            return False
        if isinstance(value, str):
            return _string(value, schema)
        if is_number(value):
            return _number(exact(value), schema)
        return True

    def _in_place(self, value: Any, pointer: str, schema: dict[str, Any], seen: Seen) -> bool:
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in schema:
                at = step(pointer, keyword)
                find = self.document.follow if keyword == "$ref" else self.document.dynamic
                target = find(schema[keyword], at)
                if target is not None and not _add(self._check(value, target), seen):
                    return False
        for index, item in enumerate(schema.get("allOf", ())):
            if not _add(self._check(value, Place(step(pointer, "allOf", index), item)), seen):
                return False
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                found = [
                    self._check(value, Place(step(pointer, keyword, index), item))
                    for index, item in enumerate(schema[keyword])
                ]
                good = sum(_add(result, seen) for result in found)
                if not good or keyword == "oneOf" and good > 1:
                    return False
        if "not" in schema and self.valid(value, Place(step(pointer, "not"), schema["not"])):
            return False
        if "if" in schema:
            met = _add(self._check(value, Place(step(pointer, "if"), schema["if"])), seen)
            then = "then" if met else "else"
            if then in schema:
                return _add(self._check(value, Place(step(pointer, then), schema[then])), seen)
        return True

    def _object(
        self, value: dict[str, Any], pointer: str, schema: dict[str, Any], seen: Seen
    ) -> bool:
        count = len(value)
        if not schema.get("minProperties", 0) <= count <= schema.get("maxProperties", count):
            return False
        required = schema.get("required", ())
        if not isinstance(required, bool) and any(name not in value for name in required):
            return False
        if not self._dependent(value, pointer, schema, seen):
            return False
        if "propertyNames" in schema:
            names = Place(step(pointer, "propertyNames"), schema["propertyNames"])
            if not all(self.valid(name, names) for name in value):
                return False
        if not self._properties(value, pointer, schema, seen):
            return False
        if "unevaluatedProperties" in schema:
            rest = Place(step(pointer, "unevaluatedProperties"), schema["unevaluatedProperties"])
            if not all(self.valid(value[name], rest) for name in value if name not in seen[0]):
                return False
            seen[0].update(value)
        return True

    def _dependent(
        self, value: dict[str, Any], pointer: str, schema: dict[str, Any], seen: Seen
    ) -> bool:
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in schema.get(keyword, {}).items():
                if name not in value:
                    continue
                if isinstance(needed, list):
                    if any(item not in value for item in needed):
                        return False
                elif not _add(
                    self._check(value, Place(step(pointer, keyword, name), needed)), seen
                ):
                    return False
        return True

    def _properties(
        self, value: dict[str, Any], pointer: str, schema: dict[str, Any], seen: Seen
    ) -> bool:
        named = schema.get("properties", {})
        patterns = schema.get("patternProperties", {})
        own: set[str] = set()
        for name, item in value.items():
            if name in named:
                own.add(name)
                if not self.valid(item, Place(step(pointer, "properties", name), named[name])):
                    return False
            for pattern, inner in patterns.items():
                if found(pattern, name):
                    own.add(name)
                    at = step(pointer, "patternProperties", pattern)
                    if not self.valid(item, Place(at, inner)):
                        return False
        if "additionalProperties" in schema:
            rest = Place(step(pointer, "additionalProperties"), schema["additionalProperties"])
            if not all(self.valid(value[name], rest) for name in value if name not in own):
                return False
            own.update(value)
        seen[0].update(own)
        return True

    def _array(self, value: list[Any], pointer: str, schema: dict[str, Any], seen: Seen) -> bool:
        count = len(value)
        if not schema.get("minItems", 0) <= count <= schema.get("maxItems", count):
            return False
        if schema.get("uniqueItems") and any(
            equal(item, other) for index, item in enumerate(value) for other in value[:index]
        ):
            return False
        prefix, items, word = schema.get("prefixItems", ()), schema.get("items"), "items"
        first = "prefixItems"
        if isinstance(items, list):
            prefix, first = items, "items"
            items, word = schema.get("additionalItems"), "additionalItems"
        for index, item in enumerate(value):
            if index < len(prefix):
                place = Place(step(pointer, first, index), prefix[index])
            elif items is not None:
                place = Place(step(pointer, word), items)
            else:
                continue
            seen[1].add(index)
            if not self.valid(item, place):
                return False
        return self._contains(value, pointer, schema, seen)

    def _contains(self, value: list[Any], pointer: str, schema: dict[str, Any], seen: Seen) -> bool:
        if "contains" in schema:
            inner = Place(step(pointer, "contains"), schema["contains"])
            found = [index for index, item in enumerate(value) if self.valid(item, inner)]
            low, high = schema.get("minContains", 1), schema.get("maxContains", len(value))
            if not low <= len(found) <= high:
                return False
            if self.document.draft >= 2020:
                seen[1].update(found)
        if "unevaluatedItems" in schema:
            rest = Place(step(pointer, "unevaluatedItems"), schema["unevaluatedItems"])
            if not all(self.valid(v, rest) for i, v in enumerate(value) if i not in seen[1]):
                return False
        return True


def _string(value: str, schema: dict[str, Any]) -> bool:
    if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
        return False
    if "pattern" in schema and not found(schema["pattern"], value):
        return False
    known = formats.compiled(schema.get("format"))
    return known is None or known.fullmatch(value) is not None


def _number(value: Decimal, schema: dict[str, Any]) -> bool:
    low, high = schema.get("minimum"), schema.get("maximum")
    over, under = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    if over is True:
        low, over = None, low
    if under is True:
        high, under = None, high
    multiple = schema.get("multipleOf")
    return not (
        (low is not None and value < exact(low))
        or (high is not None and value > exact(high))
        or (over is not None and over is not False and value <= exact(over))
        or (under is not None and under is not False and value >= exact(under))
        or (multiple is not None and not _divides(exact(multiple), value))
    )


def _divides(multiple: Decimal, value: Decimal) -> bool:
    """Whether `value` is a multiple; a number too long to tell is none."""
    return (
        value.is_finite() and value.adjusted() < 2_000 and Fraction(value) % Fraction(multiple) == 0
    )


def _add(found: Seen | None, seen: Seen) -> bool:
    if found is None:
        return False
    seen[0].update(found[0])
    seen[1].update(found[1])
    return True


def _decimal(text: str) -> Decimal:
    """The number as written; one that is larger than any decimal is infinite, as for a float."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return Decimal(repr(float(text)))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key of an object occurs twice")
    return made

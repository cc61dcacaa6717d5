"""The opposite of a subschema, as alternatives in which one of its keywords fails.

`not`, `if` and `oneOf` need it. A keyword whose opposite no shape can say gives an alternative
with the word `$trouble`: it is refused, unless what stands beside it rules it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import formats
from .facts import ATOMS, MADE, Part
from .schema_document import Document, step
from .schema_read import Alternative, Joined, members, target, without_name


def take_negative(part: Part, document: Document) -> tuple[Joined, bool]:
    """Return what must hold for `part` to fail, and whether it can fail at all."""
    schema = part.schema
    joined = Joined()
    if isinstance(schema, bool):
        return joined, not schema
    if "$ref" in schema and document.draft <= 7:
        joined.all.append(target(part, "$ref", document, False))
        return joined, True
    alternatives: list[Alternative] = []
    for keyword, value in schema.items():
        rule = _RULES.get(keyword)
        if rule is not None:
            alternatives += rule(part, keyword, value, document)
    if not alternatives:
        return joined, False
    joined.choices.append(alternatives)
    return joined, True


def _made(part: Part, keyword: str, schema: dict[str, Any]) -> list[Alternative]:
    """One alternative of a schema that stands nowhere in the document."""
    return [[Part(f"{step(part.pointer, keyword)}{MADE}not", schema)]]


def _trouble(kind: str) -> Callable[[Part, str, Any, Document], list[Alternative]]:
    def rule(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
        schema = {"type": kind, "$trouble": keyword}
        return [[Part(f"{step(part.pointer, keyword)}{MADE}not", schema)]]

    return rule


def _type(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    names = value if isinstance(value, list) else [value]
    atoms = {a for n in names for a in (("integer", "fraction") if n == "number" else (n,))}
    rest = sorted(ATOMS - atoms)
    return _made(part, keyword, {"type": rest}) if rest else []


def _values(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    values = value if keyword == "enum" else [value]
    return _made(part, keyword, {"$excluded": values})


def _bound(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    schema = part.schema
    if isinstance(value, bool):  # draft 4's flag; `minimum` reads it
        return []
    low = "inimum" in keyword
    is_open = (
        keyword.startswith("exclusive")
        or schema.get("exclusiveMinimum" if low else "exclusiveMaximum") is True
    )
    word = (
        ("maximum" if low else "minimum")
        if is_open
        else ("exclusiveMaximum" if low else "exclusiveMinimum")
    )
    return _made(part, keyword, {"type": "number", word: value})


def _count(kind: str, low: str, high: str) -> dict[str, Any]:
    def least(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
        return _made(part, keyword, {"type": kind, high: value - 1}) if value > 0 else []

    def most(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
        return _made(part, keyword, {"type": kind, low: value + 1})

    return {low: least, high: most}


def _pattern(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    return _made(part, keyword, {"type": "string", "$notPattern": value})


def _format(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    # As an annotation it never fails; asserted, it might: the alternative that both allow is none.
    assert formats.FORMATS
    return []


def _required(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    at = step(part.pointer, keyword)
    is_object = Part(f"{at}{MADE}object", {"type": "object"})
    return [[is_object, without_name(step(at, name), name)] for name in value]


def _properties(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    found: list[Alternative] = []
    for name, item in value.items():
        if item is True or item == {}:
            continue
        at = step(part.pointer, keyword, name)
        schema = {
            "type": "object",
            "required": [name],
            "$members": {name: Part(at, item, False)},
        }
        found.append([Part(f"{at}{MADE}not", schema)])
    return found


def _all_of(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    return [[item] for item in members(part, keyword, False)]


def _any_of(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    return [members(part, keyword, False)]


def _one_of(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    items = members(part, keyword)
    pairs = [[a, b] for i, a in enumerate(items) for b in items[i + 1 :]]
    return [members(part, keyword, False), *pairs]


def _not(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    return [[Part(step(part.pointer, keyword), value)]]


def _if(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    condition = Part(step(part.pointer, keyword), value)
    found: list[Alternative] = []
    for word, positive in (("then", True), ("else", False)):
        if word in part.schema:
            other = Part(step(part.pointer, word), part.schema[word], False)
            found.append([condition._replace(positive=positive), other])
    return found


def _reference(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
    return [[target(part, keyword, document, False)]]


def _unless_true(kind: str) -> Callable[[Part, str, Any, Document], list[Alternative]]:
    trouble = _trouble(kind)

    def rule(part: Part, keyword: str, value: Any, document: Document) -> list[Alternative]:
        return [] if value is True or value == {} else trouble(part, keyword, value, document)

    return rule


_Rule = Callable[[Part, str, Any, Document], list[Alternative]]
_RULES: dict[str, _Rule] = {
    "type": _type,
    "enum": _values,
    "const": _values,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _bound),
    "multipleOf": _trouble("number"),
    **_count("string", "minLength", "maxLength"),
    **_count("array", "minItems", "maxItems"),
    **_count("object", "minProperties", "maxProperties"),
    "pattern": _pattern,
    "format": _format,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _unless_true("object"),
    **dict.fromkeys(
        ("patternProperties", "propertyNames", "dependentRequired", "dependentSchemas"),
        _trouble("object"),
    ),
    "dependencies": _trouble("object"),
    "unevaluatedProperties": _unless_true("object"),
    "items": _unless_true("array"),
    "unevaluatedItems": _unless_true("array"),
    **dict.fromkeys(("prefixItems", "contains"), _trouble("array")),
    "uniqueItems": lambda part, keyword, value, document: (
        _trouble("array")(part, keyword, value, document) if value else []
    ),
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "$ref": _reference,
    "$dynamicRef": lambda part, keyword, value, document: [
        [Part(f"{step(part.pointer, keyword)}{MADE}not", {"$trouble": keyword})]
    ],
}

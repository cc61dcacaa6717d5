"""What each backend honours exactly, as data, and the check of a grammar against it.

A backend that is not in a row drops the keyword or weakens it when its own reader of schemas meets
it; most of them, therefore, never do: `suit` rewrites a schema to what the table leaves. Every row
is tried against the libraries in `tests/structured/test_exactness.py`.
"""

from __future__ import annotations

import re
from decimal import Decimal

from ..core.constraint import GrammarSpec, Refusal
from . import regex_syntax
from .regex_tree import Node, sets
from .shapes import Number, Object, Schema, Shape, String

KINDS: dict[str, frozenset[str]] = {
    "xgrammar": frozenset(
        ("json", "json_object", "regex", "choice", "grammar", "lark", "structural_tag")
    ),
    "guidance": frozenset(("json", "json_object", "regex", "choice", "grammar", "lark")),
    "outlines": frozenset(("json", "json_object", "regex", "choice")),
}

# JSON Schema keywords that the normal form says outright, and who is exact for them as written by
# `suit`. What is in no row is resolved before any backend sees the schema: $ref, allOf, anyOf,
# oneOf, not, if, dependentRequired, propertyNames, unevaluatedProperties and the like.
HONOURED: dict[str, frozenset[str]] = {
    keyword: frozenset(backends.split())
    for keyword, backends in {
        "type": "xgrammar guidance outlines",
        "enum": "xgrammar guidance outlines",
        "const": "xgrammar guidance outlines",
        "properties": "xgrammar guidance outlines",
        "required": "xgrammar guidance outlines",
        "additionalProperties": "xgrammar guidance outlines",
        "any value": "xgrammar guidance",
        "patternProperties": "xgrammar guidance outlines",
        "patternProperties beside others": "guidance",
        "minProperties": "xgrammar guidance outlines",
        "maxProperties": "xgrammar guidance outlines",
        "recursion": "xgrammar guidance",
        "items": "xgrammar guidance outlines",
        "prefixItems": "xgrammar guidance outlines",
        "minItems": "xgrammar guidance outlines",
        "maxItems": "xgrammar guidance outlines",
        "minLength": "xgrammar guidance outlines",
        "maxLength": "xgrammar guidance outlines",
        "pattern": "xgrammar guidance outlines",
        "pattern with a length": "guidance",
        "several patterns": "guidance",
        "Unicode class": "guidance",
        "format": "xgrammar guidance outlines",
        "minimum": "xgrammar guidance outlines",
        "maximum": "xgrammar guidance outlines",
        "minimum with a fraction": "guidance",
        "multipleOf": "guidance",
    }.items()
}

_EXACT_WHOLE = 2**53  # bounds above it do not fit a double
_NEGATED = re.compile(r"\[\^(?:[^\]\\]|\\.)*\]")


def schema_refusals(backend: str, schema: Schema) -> list[Refusal]:
    """What of a normal form `backend` cannot be exact for, however it is written."""
    found = list(schema.refusals)
    for shapes in schema.nodes:
        for shape in shapes:
            for construct, keyword, reason in _needs(shape):
                if backend not in HONOURED[construct]:
                    pointer = shape.at.get(keyword, "").partition("\0")[0]
                    found.append(Refusal(pointer, keyword, reason))
            if backend == "guidance" and isinstance(shape, Number):
                found += _inexact_bounds(shape)
    return list(dict.fromkeys(found))


def _needs(shape: Shape) -> list[tuple[str, str, str]]:
    """Constructs that a shape needs beyond the common ones: construct, keyword, reason."""
    found: list[tuple[str, str, str]] = []
    if isinstance(shape, Number):
        if shape.multiple is not None and not (shape.integer and shape.multiple == 1):
            found.append(("multipleOf", "multipleOf", "multiples are no rule of its grammar"))
        for keyword, bound in (("minimum", shape.low), ("maximum", shape.high)):
            if bound is not None and bound != int(bound):
                reason = "a bound with a fraction is no rule of its grammar"
                found.append(("minimum with a fraction", keyword, reason))
    elif isinstance(shape, String):
        if len(shape.patterns) > 1:
            found.append(("several patterns", "pattern", "it cannot hold together with another"))
        if any(item.props for tree in shape.patterns for item in sets(tree)):
            found.append(("Unicode class", "pattern", "its classes need Unicode tables"))
    elif isinstance(shape, Object):
        if shape.patterns and shape.rest is not None:
            reason = "other names would have to match none of the patterns"
            found.append(("patternProperties beside others", "patternProperties", reason))
    return found


def _inexact_bounds(shape: Number) -> list[Refusal]:
    found = []
    for keyword, bound in (("minimum", shape.low), ("maximum", shape.high)):
        if bound is None:
            continue
        whole = bound == int(bound)
        if (whole and abs(bound) > _EXACT_WHOLE) or (
            not whole and Decimal(repr(float(bound))) != bound
        ):
            pointer = shape.at.get(keyword, "").partition("\0")[0]
            found.append(Refusal(pointer, keyword, "the bound has more digits than a double"))
    return found


def text_refusals(backend: str, spec: GrammarSpec) -> list[Refusal]:
    """What of a regex, a choice or a grammar `backend` cannot be exact for."""
    if spec.kind == "regex" and backend == "xgrammar":
        tree: Node = regex_syntax.parse(spec.text)
        props = [item.props[0] for item in sets(tree) if item.props]
        if props:
            offset = max(spec.text.find(props[0]), 0)
            return [Refusal(f"offset {offset}", props[0], "the class needs Unicode tables")]
    if spec.kind == "grammar" and backend == "guidance":
        return _conversion_refusals(spec.text)
    return []


def _conversion_refusals(text: str) -> list[Refusal]:
    """EBNF that llguidance's converter reads unlike xgrammar does."""
    found = []
    for match in _NEGATED.finditer(text):
        if "\\n" not in match.group():
            reason = "a negated class would leave out the end of a line"
            found.append(Refusal(f"offset {match.start()}", match.group(), reason))
    for match in re.finditer(r"\\U[0-9a-fA-F]{8}", text):
        reason = "this escape is not known; write the character itself"
        found.append(Refusal(f"offset {match.start()}", match.group(), reason))
    return found

"""Structural tags for xgrammar: each JSON part becomes a grammar of ours, with bounded whitespace.

xgrammar reads schemas inside a tag by its own rules, which drop keywords without a word, and the
whitespace bound of its compiler does not reach them.
"""

from __future__ import annotations

import json
from typing import Any

from ..core.constraint import GrammarSpec, Refusal, Suited
from ..core.errors import ValidationError
from . import regex_syntax
from .ebnf_print import ebnf
from .exactness import schema_refusals
from .regex_tree import Node
from .schema_document import step
from .schema_grammar import Grammar
from .schema_normal import normal_form
from .schema_print import printed_schema
from .shapes import Number, Object, Schema, String

MOST_SPACE = 8
_STYLED = ("qwen_xml_parameter",)


def suited_tag(spec: GrammarSpec, space: Node) -> Suited:
    """Return the tag with its parts rewritten; pointers are paths inside the tag."""
    rewriter = _Rewriter(space, spec.option("format") == "assert")
    tag = json.loads(spec.text)
    tag["format"] = rewriter.format(tag["format"], "/format")
    text = json.dumps(tag, ensure_ascii=False, separators=(",", ":"))
    return Suited(GrammarSpec(spec.kind, text), tuple(rewriter.refusals))


class _Rewriter:
    def __init__(self, space: Node, assert_formats: bool) -> None:
        self.space = space
        self.assert_formats = assert_formats
        self.refusals: list[Refusal] = []

    def format(self, value: Any, path: str) -> Any:
        """Return a format with everything inside it rewritten."""
        if isinstance(value, list):
            return [self.format(item, step(path, index)) for index, item in enumerate(value)]
        if not isinstance(value, dict):
            return value
        kind = value.get("type", "tag" if "begin" in value else None)
        if kind == "json_schema" or kind in _STYLED:
            return self.schema(value, path)
        if kind == "regex":
            return {**value, "pattern": regex_syntax.checked(value["pattern"])}
        inner = ("content", "elements", "tags", "rules")
        return {
            key: self.format(item, step(path, key)) if key in inner else item
            for key, item in value.items()
        }

    def schema(self, value: dict[str, Any], path: str) -> dict[str, Any]:
        """A schema in a tag: rules of ours, or, in another style than JSON, its simplest form."""
        at = step(path, "json_schema")
        text = json.dumps(value["json_schema"], ensure_ascii=False, separators=(",", ":"))
        try:
            schema = normal_form(text, self.assert_formats)
        except ValidationError as error:
            raise ValidationError(
                f"structural_tag at {at}: {error}", parameter="structural_tag", value=text
            ) from None
        found = schema_refusals("xgrammar", schema)
        if value.get("any_order"):
            reason = "neither the presence nor the repetition of keys would be checked"
            found.append(Refusal("", "any_order", reason))
        if value.get("style", "json") != "json" or value["type"] in _STYLED:
            found += _styled_refusals(schema)
            made = {
                **value,
                "type": "json_schema",
                "json_schema": printed_schema(schema),
                "max_whitespace_cnt": MOST_SPACE,
            }
            if value["type"] in _STYLED:
                made["style"] = "qwen_xml"
        elif value.get("excludes"):
            found += _styled_refusals(schema)
            made = {**value, "json_schema": printed_schema(schema)}
            made["max_whitespace_cnt"] = MOST_SPACE
        else:
            grammar = Grammar(schema, self.space, recursive=True)
            found += grammar.refusals
            made = {"type": "grammar", "grammar": ebnf(grammar)}
        self.refusals += [
            Refusal(at + item.pointer, item.what, item.reason) for item in dict.fromkeys(found)
        ]
        return made


def _styled_refusals(schema: Schema) -> list[Refusal]:
    """What xgrammar's own reader is not exact for, in the normal form."""
    found: list[Refusal] = []

    def refuse(at: dict[str, str], keyword: str) -> None:
        pointer = at.get(keyword, "").partition("\0")[0]
        found.append(Refusal(pointer, keyword, "not exact in a styled part of a structural tag"))

    for shapes in schema.nodes:
        for shape in shapes:
            if isinstance(shape, String):
                for keyword in ("pattern", "format", "minLength", "maxLength"):
                    if keyword in shape.at:
                        refuse(shape.at, keyword)
            elif isinstance(shape, Number) and shape.multiple is not None:
                refuse(shape.at, "multipleOf")
            elif isinstance(shape, Object):
                if shape.patterns:
                    refuse(shape.at, "patternProperties")
                if shape.low or shape.high is not None:
                    refuse(shape.at, "minProperties")
    return found

"""Structural tags: text with constrained regions. Checked here, compiled by xgrammar.

Two spellings: the legacy one with `structures` and `triggers`, and
`{"type": "structural_tag", "format": {...}}`; the first is turned into the second.
"""

from __future__ import annotations

import json
from json import JSONDecodeError
from typing import Any, NoReturn

from ..core.errors import ValidationError, did_you_mean
from ..core.param_rules import shown
from . import grammar_text, regex_syntax
from .limits import LIMITS, check
from .schema_check import check_schema

# What each format must have, and the keys that hold formats: one, or a list of them.
_NEEDS: dict[str, tuple[str, ...]] = {
    "const_string": ("value",),
    "json_schema": ("json_schema",),
    "qwen_xml_parameter": ("json_schema",),
    "any_text": (),
    "regex": ("pattern",),
    "grammar": ("grammar",),
    "sequence": ("elements",),
    "or": ("elements",),
    "tag": ("begin", "content", "end"),
    "triggered_tags": ("triggers", "tags"),
    "tags_with_separator": ("tags", "separator"),
    "optional": ("content",),
    "plus": ("content",),
    "star": ("content",),
    "repeat": ("content",),
    "dispatch": ("rules",),
    "token": ("token",),
    "exclude_token": (),
    "any_tokens": (),
    "token_triggered_tags": ("trigger_tokens", "tags"),
    "token_dispatch": ("rules",),
}
_LISTS = ("elements", "tags")


def checked(text: str | None) -> str:
    """Return the current spelling as canonical JSON; ValidationError names the path of a fault."""
    assert text is not None
    check("structural_tag", "characters", len(text), LIMITS.grammar)
    try:
        tag = json.loads(text)
    except JSONDecodeError as error:
        raise ValidationError(
            f"structural_tag is not valid JSON: {error.msg} at line {error.lineno} "
            f"column {error.colno}",
            parameter="structural_tag",
            value=text,
        ) from error
    if not isinstance(tag, dict):
        _refuse("", f"must be a JSON object, got {shown(tag)}")
    if "structures" in tag or "triggers" in tag and "format" not in tag:
        tag = _from_legacy(tag)
    if tag.get("type") != "structural_tag":
        _refuse("/type", f"must be 'structural_tag', got {shown(tag.get('type'))}")
    if "format" not in tag:
        _refuse("", "needs a 'format'")
    _format(tag["format"], "/format")
    return json.dumps(tag, ensure_ascii=False, separators=(",", ":"))


def _from_legacy(tag: dict[str, Any]) -> dict[str, Any]:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures:
        _refuse("/structures", "must be a non-empty list")
    tags = []
    for index, item in enumerate(structures):
        path = f"/structures/{index}"
        if not isinstance(item, dict) or not isinstance(item.get("begin"), str):
            _refuse(path, "needs 'begin', 'schema' and 'end'")
        schema = item.get("schema", item.get("structural_tag_schema"))
        tags.append(
            {
                "type": "tag",
                "begin": item["begin"],
                "content": {"type": "json_schema", "json_schema": {} if schema is None else schema},
                "end": item.get("end", ""),
            }
        )
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": tags},
    }


def _format(value: Any, path: str) -> None:
    if not isinstance(value, dict):
        _refuse(path, f"must be a format, got {shown(value)}")
    kind = value.get("type", "tag" if "begin" in value else None)
    if kind not in _NEEDS:
        hint = did_you_mean(kind, _NEEDS) if isinstance(kind, str) else ""
        _refuse(f"{path}/type", f"must be one of {', '.join(_NEEDS)}, got {shown(kind)}{hint}")
    for key in _NEEDS[kind]:
        if key not in value:
            _refuse(path, f"has the type {kind!r} and needs {key!r}")
    for key in _LISTS:
        if key in _NEEDS[kind]:
            if not isinstance(value[key], list) or not value[key]:
                _refuse(f"{path}/{key}", "must be a non-empty list")
            for index, item in enumerate(value[key]):
                _format(item, f"{path}/{key}/{index}")
    if "content" in value and kind in ("tag", "optional", "plus", "star", "repeat"):
        _format(value["content"], f"{path}/content")
    _leaf(kind, value, path)


def _leaf(kind: str, value: dict[str, Any], path: str) -> None:
    """Check what a format holds of its own: a schema, a pattern, a grammar, triggers."""
    try:
        if "json_schema" in _NEEDS[kind]:
            check_schema(value["json_schema"])
        elif kind == "regex":
            regex_syntax.checked(value["pattern"])
        elif kind == "grammar":
            grammar_text.checked(value["grammar"])
    except ValidationError as error:
        _refuse(path, f"is malformed: {error}")
    if kind == "triggered_tags":
        _triggers(value, path)


def _triggers(value: dict[str, Any], path: str) -> None:
    triggers = value["triggers"]
    good = isinstance(triggers, list) and triggers
    if not good or not all(isinstance(item, str) and item for item in triggers):
        _refuse(f"{path}/triggers", f"must be a non-empty list of texts, got {shown(triggers)}")
    for index, tag in enumerate(value["tags"]):
        begin = tag.get("begin")
        if not isinstance(begin, str):
            continue  # a token, which xgrammar checks
        matched = [item for item in triggers if begin.startswith(item)]
        if len(matched) != 1:
            _refuse(
                f"{path}/tags/{index}/begin",
                f"must start with exactly one trigger of {shown(triggers)}, {begin!r} starts with "
                f"{len(matched)}",
            )


def _refuse(path: str, problem: str) -> NoReturn:
    raise ValidationError(
        f"structural_tag{' at ' + path if path else ''} {problem}", parameter="structural_tag"
    )

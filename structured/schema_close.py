"""The option `disable_additional_properties`: an object that does not say is closed."""

from __future__ import annotations

from typing import Any

_SAID = ("additionalProperties", "unevaluatedProperties", "patternProperties")
_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("$ref", "then", "else", "dependentSchemas", "if", *_IN_PLACE_LISTS)


def closed(schema: Any) -> Any:
    """Return `schema` with every object closed that does not say what else it may hold.

    Parts that are joined in one place (`allOf`, a `$ref` with siblings ...) are closed together,
    by `unevaluatedProperties`, so that one part may still use names of another.
    """
    return _closed(schema, _shared(schema, schema, set()), "")


def _shared(node: Any, root: Any, found: set[str], pointer: str = "") -> set[str]:
    """Local references that stand beside other keywords: their targets are closed by the user."""
    if isinstance(node, dict):
        ref = node.get("$ref")
        if isinstance(ref, str) and ref.startswith("#") and _speaks_of_objects(node):
            found.add(ref[1:])
        for value in node.values():
            _shared(value, root, found)
        for part in node.get("allOf", []) if isinstance(node.get("allOf"), list) else []:
            if isinstance(part, dict) and str(part.get("$ref", "")).startswith("#"):
                found.add(part["$ref"][1:])
    elif isinstance(node, list):
        for value in node:
            _shared(value, root, found)
    return found


def _speaks_of_objects(schema: dict[str, Any]) -> bool:
    return any(key in schema for key in ("properties", "required", *_IN_PLACE[1:]))


def _closed(schema: Any, open_targets: set[str], pointer: str, joined: bool = False) -> Any:
    if not isinstance(schema, dict):
        return schema
    joined = joined or pointer in open_targets
    out: dict[str, Any] = {}
    for keyword, value in schema.items():
        out[keyword] = _keyword(
            keyword, value, open_targets, f"{pointer}/{keyword}", joined, schema
        )
    if joined or any(key in schema for key in _SAID) or not _is_object(schema):
        return out
    combined = any(key in schema for key in _IN_PLACE)
    out["unevaluatedProperties" if combined else "additionalProperties"] = False
    return out


def _keyword(
    keyword: str, value: Any, open_targets: set[str], at: str, joined: bool, schema: dict[str, Any]
) -> Any:
    if keyword in ("properties", "patternProperties", "$defs", "definitions"):
        if isinstance(value, dict):
            return {k: _closed(v, open_targets, f"{at}/{_escaped(k)}") for k, v in value.items()}
    elif keyword == "dependentSchemas" and isinstance(value, dict):
        return {k: _closed(v, open_targets, f"{at}/{_escaped(k)}", True) for k, v in value.items()}
    elif keyword in (*_IN_PLACE_LISTS, "prefixItems", "items") and isinstance(value, list):
        inner = keyword in _IN_PLACE_LISTS and (
            keyword == "allOf" or joined or _speaks_of_objects_beside(schema, keyword)
        )
        return [
            _closed(item, open_targets, f"{at}/{index}", inner) for index, item in enumerate(value)
        ]
    elif keyword in ("then", "else", "if", "not"):
        return _closed(value, open_targets, at, True)
    elif keyword in ("items", "additionalProperties", "additionalItems", "contains"):
        return _closed(value, open_targets, at)
    return value


def _speaks_of_objects_beside(schema: dict[str, Any], keyword: str) -> bool:
    others = {key: value for key, value in schema.items() if key != keyword}
    return _speaks_of_objects(others) or "$ref" in others


def _is_object(schema: dict[str, Any]) -> bool:
    kinds = schema.get("type")
    if kinds is not None and "object" not in kinds:
        return False
    alone = any(key in schema for key in ("enum", "const", "$ref"))
    if kinds is None and not _speaks_of_objects({**schema, "anyOf": 0, "oneOf": 0}):
        return False
    if kinds is None and not any(k in schema for k in ("properties", "required", "allOf")):
        return False
    return not (alone and "properties" not in schema and "allOf" not in schema)


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")

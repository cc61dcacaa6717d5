"""One JSON Schema as a document: its dialect, its places, and what its references point at.

A place is a JSON pointer in text form, "" for the root. Nothing is ever fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, NoReturn
from urllib.parse import unquote, urldefrag, urljoin

from ..core.errors import ValidationError

MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SINGLES = (
    *("items", "additionalProperties", "additionalItems", "unevaluatedProperties"),
    *("unevaluatedItems", "not", "if", "then", "else", "contains", "propertyNames"),
)
# Drafts by the number that their `$schema` holds; anything else is read as 2020-12.
_DRAFTS = {"draft-03": 3, "draft-04": 4, "draft-06": 6, "draft-07": 7, "2019-09": 2019}


class Place(NamedTuple):
    """A subschema and where it stands."""

    pointer: str
    schema: Any  # a dict or a bool


def step(pointer: str, *keys: str | int) -> str:
    """The pointer one or more keys further in."""
    for key in keys:
        if isinstance(key, str) and ("~" in key or "/" in key):
            key = key.replace("~", "~0").replace("/", "~1")
        pointer = f"{pointer}/{key}"
    return pointer


def refuse(pointer: str, problem: str, value: object = None) -> NoReturn:
    """Raise one sentence about a place in the schema."""
    raise ValidationError(
        f"json: {problem} at {pointer or 'the root of the schema'}", parameter="json", value=value
    )


def children(place: Place, draft: int = 2020) -> Iterator[Place]:
    """Every subschema one level down, also under keywords that only hold definitions."""
    pointer, schema = place
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in MAPS or (keyword == "dependencies" and isinstance(value, dict)):
            for name, item in value.items():
                if keyword != "dependencies" or not isinstance(item, list):
                    yield Place(step(pointer, keyword, name), item)
        elif keyword in LISTS or (keyword == "items" and isinstance(value, list)):
            for index, item in enumerate(value):
                yield Place(step(pointer, keyword, index), item)
        elif keyword in SINGLES and isinstance(value, dict | bool):
            # Draft 4 and before write exclusiveMinimum as a bool; no keyword here is one of them.
            yield Place(step(pointer, keyword), value)


class Document:
    """A schema with an index of its anchors and identifiers, made when the first one is asked."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self.draft = _draft(root)
        self._names: dict[str, Place] | None = None
        self._bases: dict[str, str] = {}

    def follow(self, reference: str, pointer: str) -> Place:
        """Return the place that `reference`, written at `pointer`, means."""
        if reference == "#":
            return Place("", self.root)
        if reference.startswith("#/") and not self._has_ids():
            return self._walk("", self.root, reference[1:], reference, pointer)
        names = self._index()
        url = urljoin(self._base(pointer), reference)
        if url in names:
            return names[url]
        base, fragment = urldefrag(url)
        start = names.get(base)
        if start is None:
            refuse(
                pointer,
                f"the reference {reference!r} has no target in the schema, and remote references "
                "are not fetched,",
                reference,
            )
        if fragment and not fragment.startswith("/"):
            refuse(pointer, f"the reference {reference!r} names no anchor of the schema", reference)
        return self._walk(start.pointer, start.schema, fragment, reference, pointer)

    def dynamic(self, reference: str, pointer: str) -> Place | None:
        """Return the one place that `$dynamicRef` can mean, or None if it depends on the path."""
        name = reference.rpartition("#")[2]
        found = [
            place
            for place in self._everything()
            if isinstance(place.schema, dict) and place.schema.get("$dynamicAnchor") == name
        ]
        if len(found) > 1:
            return None
        return found[0] if found else self.follow(reference, pointer)

    def _walk(self, at: str, node: Any, path: str, reference: str, pointer: str) -> Place:
        for part in path.split("/")[1:]:
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict) and key in node:
                node = node[key]
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                refuse(pointer, f"the reference {reference!r} has no target in the schema,")
            at = step(at, key)
        if not isinstance(node, dict | bool):
            refuse(pointer, f"the reference {reference!r} points at no schema", reference)
        return Place(at, node)

    def _has_ids(self) -> bool:
        if self._names is None:
            self._index()
        return len(self._bases) > 1

    def _base(self, pointer: str) -> str:
        """The identifier that the nearest enclosing `$id` sets."""
        self._index()
        while pointer not in self._bases:
            pointer = pointer.rpartition("/")[0]
        return self._bases[pointer]

    def _index(self) -> dict[str, Place]:
        if self._names is None:
            self._names = {}
            self._bases = {}
            self._collect(Place("", self.root), "https://schema.invalid/root")
        return self._names

    def _collect(self, place: Place, base: str) -> None:
        assert self._names is not None
        schema = place.schema
        if isinstance(schema, dict):
            own = schema.get("$id", schema.get("id") if self.draft <= 4 else None)
            if isinstance(own, str) and not ("$ref" in schema and self.draft <= 7):
                url, fragment = urldefrag(urljoin(base, own))
                if fragment:  # drafts 6 and 7 name an anchor so
                    self._names[f"{base}#{fragment}"] = place
                else:
                    base = url
                    self._bases[place.pointer] = base
                    self._names[base] = place
            for keyword in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(keyword), str):
                    self._names[f"{base}#{schema[keyword]}"] = place
        if place.pointer == "":
            self._bases.setdefault("", base)
            self._names.setdefault(base, place)
        for child in children(place, self.draft):
            self._collect(child, base)

    def _everything(self) -> Iterator[Place]:
        stack = [Place("", self.root)]
        while stack:
            place = stack.pop()
            yield place
            stack.extend(children(place, self.draft))


def _draft(root: Any) -> int:
    named = root.get("$schema") if isinstance(root, dict) else None
    if isinstance(named, str):
        for word, draft in _DRAFTS.items():
            if word in named:
                return draft
    return 2020

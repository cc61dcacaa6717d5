"""The normal form as a JSON Schema again, of the few words that llguidance honours exactly."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from functools import lru_cache
from typing import Any

from .regex_tree import TOP, Alt, Node, Rep, Seq, Set, intersection, merged, printed
from .schema_normal import children_of
from .shapes import (
    ANYTHING,
    Anything,
    Array,
    Literal,
    Number,
    Object,
    Schema,
    Shape,
    Simple,
    String,
)


def printed_schema(schema: Schema) -> Any:
    """Return a JSON Schema with the same values."""
    return _Printer(schema).document()


class _Printer:
    """Nodes that are met twice or in a circle become definitions, the others are written in."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.named = named_nodes(schema)
        self.definitions: dict[str, Any] = {}

    def document(self) -> Any:
        body = self.node(self.schema.root)
        if not self.definitions:
            return body
        if not isinstance(body, dict) or "$ref" not in body:
            return {"$defs": self.definitions, **(body if isinstance(body, dict) else {})}
        return {"$defs": self.definitions, "$ref": body["$ref"]}

    def node(self, number: int | None) -> Any:
        if number is None:
            return False
        if number == ANYTHING:
            return True
        if number not in self.named:
            return self.shapes(self.schema.nodes[number])
        name = f"n{number}"
        if name not in self.definitions:
            self.definitions[name] = True  # holds the place while the node is written
            self.definitions[name] = self.shapes(self.schema.nodes[number])
        return {"$ref": f"#/$defs/{name}"}

    def shapes(self, shapes: list[Shape]) -> Any:
        written: list[Any] = []
        scalars: list[Any] = []
        for shape in shapes:
            if isinstance(shape, Literal) and not isinstance(shape.value, dict | list):
                scalars.append(shape.value)
            else:
                written.append(self.shape(shape))
        if scalars:
            written.insert(0, {"enum": scalars})
        return written[0] if len(written) == 1 else {"anyOf": written}

    def shape(self, shape: Shape) -> Any:
        if isinstance(shape, Anything):
            return True
        if isinstance(shape, Simple):
            return {"type": shape.type}
        if isinstance(shape, Literal):
            return literal(shape.value)
        if isinstance(shape, Number):
            return number_words(shape)
        if isinstance(shape, String):
            return string_words(shape)
        if isinstance(shape, Array):
            return self.array(shape)
        assert isinstance(shape, Object)
        return self.object(shape)

    def array(self, shape: Array) -> dict[str, Any]:
        words: dict[str, Any] = {"type": "array"}
        if shape.prefix:
            words["prefixItems"] = [self.node(number) for number in shape.prefix]
        words["items"] = self.node(shape.rest)
        if shape.low:
            words["minItems"] = shape.low
        if shape.high is not None and shape.rest is not None:
            words["maxItems"] = shape.high
        return words

    def object(self, shape: Object) -> dict[str, Any]:
        words: dict[str, Any] = {"type": "object"}
        members = {name: self.node(member.node) for name, member in shape.members.items()}
        if shape.rest is not None or shape.patterns:
            members |= dict.fromkeys(shape.forbidden, False)
        if members:
            words["properties"] = members
        required = [name for name, member in shape.members.items() if member.required]
        if required:
            words["required"] = required
        if shape.patterns:
            words["patternProperties"] = {
                pattern_text(tree): self.node(number) for tree, number in shape.patterns
            }
        words["additionalProperties"] = self.node(shape.rest)
        if shape.low:
            words["minProperties"] = shape.low
        if shape.high is not None:
            words["maxProperties"] = shape.high
        return words


def literal(value: Any) -> Any:
    """A schema of one value; objects and arrays are spelled out, so that they may hold spaces."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {name: literal(item) for name, item in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        words: dict[str, Any] = {"type": "array", "items": False, "minItems": len(value)}
        if value:
            words["prefixItems"] = [literal(item) for item in value]
        return words
    return {"const": value}


def number_words(shape: Number) -> dict[str, Any]:
    """The words of a range of numbers."""
    words: dict[str, Any] = {"type": "integer" if shape.integer else "number"}
    if shape.low is not None:
        words["exclusiveMinimum" if shape.low_open else "minimum"] = plain(shape.low)
    if shape.high is not None:
        words["exclusiveMaximum" if shape.high_open else "maximum"] = plain(shape.high)
    if shape.multiple is not None:
        words["multipleOf"] = plain(shape.multiple)
    return words


def string_words(shape: String) -> dict[str, Any]:
    """The words of strings of some length and form."""
    words: dict[str, Any] = {"type": "string"}
    if shape.low:
        words["minLength"] = shape.low
    if shape.high is not None:
        words["maxLength"] = shape.high
    texts = [pattern_text(tree) for tree in shape.patterns]
    if len(texts) == 1:
        words["pattern"] = texts[0]
    elif texts:
        words["allOf"] = [{"pattern": text} for text in texts]
    return words


@lru_cache(maxsize=1024)
def pattern_text(tree: Node) -> str:
    """The pattern of a whole string.

    llguidance 1.9 reads a class that holds every control character as one that holds all escapes,
    so `[^"]` would let a quote through; without NUL, which no one misses, it is exact.
    """
    return f"^(?:{printed(_without_nul(tree))})$"


def _without_nul(tree: Node) -> Node:
    if isinstance(tree, Set):
        if tree.props:
            has_all = not tree.negated or not tree.ranges
            return tree if has_all else tree._replace(ranges=merged([*tree.ranges, (0, 0)]))
        if all(any(a <= code <= b for a, b in tree.ranges) for code in (0x22, 0x5C)):
            return tree
        return Set(intersection(tree.ranges, ((1, TOP),)))
    if isinstance(tree, Rep):
        return Rep(tree.low, tree.high, _without_nul(tree.item))
    if isinstance(tree, Seq | Alt):
        return type(tree)(tuple(_without_nul(item) for item in tree.items))
    return tree


def plain(value: Decimal) -> int | float:
    """The number as JSON writes it."""
    return int(value) if value == int(value) else float(value)


def named_nodes(schema: Schema) -> set[int]:
    """Nodes that are worth a name: in a circle, or large and met more than once."""
    uses: Counter[int] = Counter()
    circles: set[int] = set()
    state: dict[int, int] = {}  # 1 while its parts are visited, 2 after
    stack: list[tuple[int, bool]] = [(schema.root, False)]
    while stack:
        number, leaving = stack.pop()
        if leaving:
            state[number] = 2
            continue
        if state.get(number):
            continue
        state[number] = 1
        stack.append((number, True))
        for shape in schema.nodes[number]:
            for child in children_of(shape):
                uses[child] += 1
                if state.get(child) == 1:
                    circles.add(child)
                elif child not in state:
                    stack.append((child, False))
    large = {n for n, count in uses.items() if count > 1 and _is_large(schema.nodes[n])}
    return (circles | large) - {ANYTHING}


def _is_large(shapes: list[Shape]) -> bool:
    return len(shapes) > 4 or any(isinstance(shape, Object | Array) for shape in shapes)

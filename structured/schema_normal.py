"""From a schema to its normal form: `normal_form(schema)` gives nodes of shapes.

A node stands for a conjunction of subschemas. Its facts are gathered branch by branch, its parts
become nodes of their own: the conjunction of all that apply to a member or an item. As there are
finitely many conjunctions, recursion ends; a node that is met again is a circle.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from ..core.constraint import Refusal
from .facts import MADE, Facts, Part
from .schema_document import Document, Place, refuse
from .schema_negate import take_negative
from .schema_read import Context, take
from .schema_shape import Maker
from .shapes import ANYTHING, Anything, Array, Object, Schema, Shape
from .validate import Validator

MOST_BRANCHES = 512  # of one node
MOST_NODES = 20_000
Key = tuple[tuple[str, bool], ...]
_Queued = tuple[Part, frozenset[int], tuple[tuple[str, bool], ...]]  # part, scopes, where it is in


class TooMany(Exception):
    """The normal form would be too large; `pointer` is where it grew."""

    def __init__(self, pointer: str) -> None:
        super().__init__(pointer)
        self.pointer = pointer


@lru_cache(maxsize=256)
def normal_form(text: str, assert_formats: bool = False) -> Schema:
    """Return the normal form of a schema, given as canonical JSON text.

    ValidationError if no value can satisfy it.
    """
    document = Document(json.loads(text))
    normaliser = Normaliser(document, assert_formats)
    try:
        root = normaliser.node([Part("", document.root)])
    except TooMany as error:
        reason = f"resolving it takes more than {MOST_BRANCHES} alternatives of one value"
        return Schema([[Anything()]], 0, (Refusal(error.pointer, "the schema", reason),))
    schema = normaliser.finished(root)
    if not schema.nodes[schema.root]:
        refuse("", "no value can satisfy the schema", text)
    return schema


class Normaliser:
    """Makes nodes; each conjunction of parts once."""

    def __init__(self, document: Document, assert_formats: bool) -> None:
        self.document = document
        self.nodes: list[list[Shape]] = [[Anything()]]
        self.problems: list[list[Refusal]] = [[]]
        self.keys: dict[Key, int] = {(): ANYTHING}
        self.validator = Validator(document)
        self.context = Context(document, assert_formats, self.disjoint)
        self.open: set[int] = set()  # nodes whose shapes are being made

    def node(self, parts: Sequence[Part]) -> int:
        """The number of the node that satisfies all `parts`."""
        kept = {part.key: part for part in parts if not _is_true(part)}
        key = tuple(kept)
        if key in self.keys:
            return self.keys[key]
        number = len(self.nodes)
        if number >= MOST_NODES:
            raise TooMany(parts[0].pointer.partition(MADE)[0])
        self.keys[key] = number
        self.nodes.append([])
        self.problems.append([])
        self.open.add(number)
        self._fill(number, list(kept.values()))
        self.open.discard(number)
        return number

    def single(self, shape: Shape) -> int:
        """The number of a node of its own for one shape."""
        self.nodes.append([shape])
        self.problems.append([])
        return len(self.nodes) - 1

    def empty(self, number: int) -> bool:
        """Whether a node is known to have no value; one that is being made may have some."""
        return number not in self.open and not self.nodes[number]

    def valid(self, value: Any, parts: Iterable[Part]) -> bool:
        """Whether a value satisfies all parts."""
        return all(
            self.validator.valid(value, Place(part.pointer, part.schema)) is part.positive
            for part in parts
        )

    def disjoint(self, left: Part, right: Part, beside: Part) -> bool:
        """Whether no value satisfies all three."""
        number = self.node([beside, left, right])
        return self.empty(number)

    def _fill(self, number: int, parts: list[Part]) -> None:
        shapes, problems = self.nodes[number], self.problems[number]
        queue: list[_Queued] = [(part, frozenset(), ()) for part in parts]
        pending: list[tuple[Facts, list[_Queued], list[list[list[_Queued]]]]] = [
            (Facts(), queue, [])
        ]
        ended = 0
        while pending:
            facts, queue, choices = pending.pop()
            choices = list(choices)
            while queue and not facts.dead:
                choices += self._read(facts, queue.pop(0), queue)
            if facts.dead:
                continue
            if choices:
                first = choices.pop(0)
                for alternative in reversed(first):
                    pending.append((facts.copy(), list(alternative), choices))
            else:
                maker = Maker(self, facts, parts)
                found = maker.shapes()
                shapes += found
                problems += maker.problems if found else []
            ended += 1
            if ended > MOST_BRANCHES:
                raise TooMany(parts[0].pointer.partition(MADE)[0])

    def _read(
        self, facts: Facts, queued: _Queued, queue: list[_Queued]
    ) -> list[list[list[_Queued]]]:
        """Take one part in; what it joins goes to `queue`, its choices are returned."""
        part, scopes, inside = queued
        if part.key in inside:
            refuse(part.pointer, "a reference leads back to itself without any content between,")
        if part.key in facts.done:
            return []
        facts.done.add(part.key)
        if part.positive:
            scopes = self._scoped(facts, part, scopes)
            joined = take(facts, part, scopes, self.context)
        else:
            joined, possible = take_negative(part, self.document)
            if not possible:
                facts.types = frozenset()
                return []
        below = (*inside, part.key)
        queue[:0] = [(item, scopes, below) for item in joined.all]  # in the order of the text
        return [
            [[(item, scopes, below) for item in alternative] for alternative in choice]
            for choice in joined.choices
        ]

    def _scoped(self, facts: Facts, part: Part, scopes: frozenset[int]) -> frozenset[int]:
        if not isinstance(part.schema, dict):
            return scopes
        for keyword in ("unevaluatedProperties", "unevaluatedItems"):
            if keyword in part.schema:
                scope = len(facts.unevaluated)
                inner = Part(f"{part.pointer}/{keyword}", part.schema[keyword])
                facts.unevaluated.append((scope, keyword, inner))
                scopes |= {scope}
        return scopes

    def finished(self, root: int) -> Schema:
        """Drop what cannot come to an end, keep what the root reaches, gather its refusals."""
        ending = _ending(self.nodes)
        for number, shapes in enumerate(self.nodes):
            shapes[:] = [shape for shape in shapes if _ends(shape, ending)] if shapes else []
            for shape in shapes:
                if isinstance(shape, Object):
                    _drop_endless(shape, ending)
                elif isinstance(shape, Array):
                    _cut_endless(shape, ending)
            if number not in ending:
                shapes.clear()
        reached = _reached(self.nodes, root)
        refusals = dict.fromkeys(r for number in reached for r in self.problems[number])
        return Schema(self.nodes, root, tuple(refusals))


def _is_true(part: Part) -> bool:
    if part.positive:
        return part.schema is True or part.schema == {}
    return part.schema is False


def children_of(shape: Shape) -> list[int]:
    """Numbers of the nodes that a shape names."""
    if isinstance(shape, Array):
        rest = [] if shape.rest is None else [shape.rest]
        return [*shape.prefix, *rest]
    if isinstance(shape, Object):
        rest = [] if shape.rest is None else [shape.rest]
        named = [member.node for member in shape.members.values()]
        return [*named, *(node for _, node in shape.patterns), *rest]
    return []


def _needed(shape: Shape) -> list[int]:
    """The nodes without which the shape has no value."""
    if isinstance(shape, Array):
        prefix = list(shape.prefix[: shape.low])
        if shape.low > len(shape.prefix) and shape.rest is not None:
            prefix.append(shape.rest)
        return prefix
    if isinstance(shape, Object):
        return [member.node for member in shape.members.values() if member.required]
    return []


def _ends(shape: Shape, ending: set[int]) -> bool:
    return all(number in ending for number in _needed(shape))


def _ending(nodes: list[list[Shape]]) -> set[int]:
    """Nodes that have a finite value."""
    ending = {ANYTHING}
    grown = True
    while grown:
        found = {
            number
            for number, shapes in enumerate(nodes)
            if number not in ending and any(_ends(shape, ending) for shape in shapes)
        }
        ending |= found
        grown = bool(found)
    return ending


def _drop_endless(shape: Object, ending: set[int]) -> None:
    """Members that can have no value become forbidden names."""
    gone = tuple(name for name, member in shape.members.items() if member.node not in ending)
    for name in gone:
        del shape.members[name]
    shape.forbidden += gone
    shape.patterns = tuple(pair for pair in shape.patterns if pair[1] in ending)
    if shape.rest is not None and shape.rest not in ending:
        shape.rest = None


def _cut_endless(shape: Array, ending: set[int]) -> None:
    """An array stops before the first item that can have no value."""
    for index, number in enumerate(shape.prefix):
        if number not in ending:
            shape.prefix, shape.rest, shape.high = shape.prefix[:index], None, index
            return
    if shape.rest is not None and shape.rest not in ending:
        shape.rest, shape.high = None, len(shape.prefix)


def _reached(nodes: list[list[Shape]], root: int) -> list[int]:
    found, stack = {root}, [root]
    while stack:
        for shape in nodes[stack.pop()]:
            for child in children_of(shape):
                if child not in found:
                    found.add(child)
                    stack.append(child)
    return sorted(found)

"""Turn the facts of one branch into shapes."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from itertools import permutations
from math import gcd, lcm
from typing import TYPE_CHECKING, Any

from ..core.constraint import Refusal
from ..core.errors import ValidationError
from . import formats, regex_syntax
from .facts import ATOMS, MADE, Facts, Items, Names, Part, atom_of, whole_bounds
from .object_shape import ObjectMaker
from .regex_overlap import all_but, disjoint, lengths
from .regex_tree import ANY, Rep, Seq
from .regex_tree import Node as RegexTree
from .shapes import Anything, Array, Literal, Number, Shape, Simple, String
from .validate import equal

if TYPE_CHECKING:
    from .schema_normal import Normaliser

MOST_ORDERS = 400  # arrangements of unique items that are written out
_VALUE_WORDS = {"enum", "const", "type", "title", "description", "default", "examples", "$comment"}
MOST_PLACES = 8  # where an item that `contains` asks for may stand


class Maker:
    """Makes the shapes of one branch; `problems` are what they leave out."""

    def __init__(self, normaliser: Normaliser, facts: Facts, parts: list[Part]) -> None:
        self.normaliser = normaliser
        self.facts = facts
        self.parts = parts
        self.problems: list[Refusal] = []

    def shapes(self) -> list[Shape]:
        """Shapes whose union is the branch; empty if no value is left."""
        facts = self.facts
        if facts.literals is not None:
            return self._literals(facts.literals)
        if _says_nothing(facts):
            return [Anything()]
        self.problems += facts.problems
        self._unevaluated()
        found: list[Shape] = []
        for kind, make in (
            ("object", self._objects),
            ("array", self._arrays),
            ("string", self._strings),
            ("integer", self._numbers),
            ("boolean", self._booleans),
            ("null", self._nulls),
        ):
            if kind in facts.types or kind == "integer" and "fraction" in facts.types:
                found += make()
        return found

    def problem(self, pointer: str, what: str, reason: str) -> None:
        """Note what the shapes do not say."""
        self.problems.append(Refusal(pointer.partition(MADE)[0], what, reason))

    def _literals(self, values: list[Any]) -> list[Shape]:
        kept: dict[object, Any] = {}
        known = self._only_values()
        for value in values:
            if atom_of(value) not in self.facts.types:
                continue
            if known or self.normaliser.valid(value, self.parts):
                kept.setdefault(_mark(value), value)
        return [Literal(self.facts.at, value) for value in kept.values()]

    def _only_values(self) -> bool:
        """Whether one subschema gives the values, and nothing stands beside them but a type."""
        if len(self.parts) != 1 or not isinstance(self.parts[0].schema, dict):
            return False
        words = set(self.parts[0].schema)
        return (
            self.parts[0].positive and words <= _VALUE_WORDS and len(words & {"enum", "const"}) == 1
        )

    def _unevaluated(self) -> None:
        """`unevaluatedProperties` and `unevaluatedItems` become groups like any other."""
        facts = self.facts
        for scope, keyword, part in facts.unevaluated:
            if keyword == "unevaluatedProperties":
                groups = [group for group in facts.names if scope in group.scopes]
                if not any(group.rest is not None for group in groups):
                    true = Part(part.pointer, True)
                    named = {name: true for group in groups for name in group.named}
                    patterns = {text: true for group in groups for text in group.patterns}
                    facts.names.append(Names(named, patterns, part))
            else:
                if facts.contains:
                    self.problem(part.pointer, keyword, "it counts the items of contains")
                lists = [items for items in facts.items if scope in items.scopes]
                if not any(items.rest is not None for items in lists):
                    length = max((len(items.prefix) for items in lists), default=0)
                    true = Part(part.pointer, True)
                    facts.items.append(Items([true] * length, part))

    def _nulls(self) -> list[Shape]:
        return [] if self._excludes(None) else [Simple(self.facts.at, "null")]

    def _booleans(self) -> list[Shape]:
        left: list[Shape] = [
            Literal(self.facts.at, v) for v in (True, False) if not self._excludes(v)
        ]
        return [Simple(self.facts.at, "boolean")] if len(left) == 2 else left

    def _excludes(self, value: Any) -> bool:
        return any(equal(value, other) for other, _ in self.facts.excluded)

    def _numbers(self) -> list[Shape]:
        facts = self.facts
        integer, fraction = "integer" in facts.types, "fraction" in facts.types
        if not integer:
            self.problem(
                facts.at.get("type", self.parts[0].pointer if self.parts else ""),
                "type",
                "a number that is no integer is not a form of grammar",
            )
        if integer and fraction or not integer:
            shape = Number(facts.at, False, multiple=_multiple(facts.multiples))
            if facts.low is not None:
                shape.low, shape.low_open = facts.low
            if facts.high is not None:
                shape.high, shape.high_open = facts.high
            if _no_number(shape):
                return []
            self._excluded_numbers(shape)
            return [shape]
        low, high = whole_bounds(facts)
        multiple = _multiple(facts.multiples)
        return self._integers(low, high, multiple)

    def _integers(self, low: int | None, high: int | None, multiple: Decimal | None) -> list[Shape]:
        """Ranges of integers, cut where a value is excluded."""
        cuts = sorted(
            {int(value) for value, _ in self.facts.excluded if atom_of(value) == "integer"}
        )
        found: list[Shape] = []
        for cut in [*cuts, None]:
            if cut is not None and (
                low is not None and cut < low or high is not None and cut > high
            ):
                continue
            top = high if cut is None else cut - 1
            shape = Number(
                self.facts.at,
                True,
                None if low is None else Decimal(low),
                None if top is None else Decimal(top),
                multiple=multiple,
            )
            if not _no_number(shape):
                found.append(shape)
            if cut is not None:
                low = cut + 1
        return found

    def _excluded_numbers(self, shape: Number) -> None:
        for value, pointer in self.facts.excluded:
            if atom_of(value) in ("integer", "fraction"):
                inside = (shape.low is None or value >= shape.low) and (
                    shape.high is None or value <= shape.high
                )
                if inside:
                    self.problem(pointer, "not", f"numbers other than {value} are no range")

    def _strings(self) -> list[Shape]:
        facts = self.facts
        low, high = facts.lengths
        if high is not None and low > high:
            return []
        trees: list[RegexTree] = []
        for text, pointer, positive in dict.fromkeys(facts.patterns):
            try:
                tree = regex_syntax.found_in(text)
            except ValidationError as error:
                reason = str(error).partition("\n")[0].removeprefix("pattern ")
                self.problem(pointer, "pattern", f"the pattern {reason}")
                continue
            if not positive:
                self.problem(pointer, "pattern", "its opposite is not a form of grammar")
            elif not _is_any(tree):
                trees.append(tree)
        trees += [known_format(name) for name in dict.fromkeys(n for n, _ in facts.formats)]
        words = [value for value, _ in facts.excluded if isinstance(value, str)]
        if words:
            trees.append(all_but(words))
        at = dict(facts.at)
        if facts.formats:
            at["format"] = facts.formats[0][1]
        if facts.patterns:
            at["pattern"] = facts.patterns[0][1]
        kept = tuple(dict.fromkeys(trees))
        return [] if _no_string(low, high, kept) else [String(at, low, high, kept)]

    def _arrays(self) -> list[Shape]:
        facts, node = self.facts, self.normaliser.node
        low, high = facts.counts
        length = max((len(items.prefix) for items in facts.items), default=0)
        prefix_parts = [
            [
                items.prefix[index] if index < len(items.prefix) else items.rest
                for items in facts.items
                if index < len(items.prefix) or items.rest is not None
            ]
            for index in range(length)
        ]
        rest_parts = [items.rest for items in facts.items if items.rest is not None]
        prefix: list[int] = []
        rest: int | None = node(rest_parts)
        for index, parts in enumerate(prefix_parts):
            number = node([part for part in parts if part is not None])
            if self.normaliser.empty(number):
                high = index if high is None else min(high, index)
                break
            prefix.append(number)
        if rest is not None and self.normaliser.empty(rest):
            rest = None
        if rest is None:
            high = len(prefix) if high is None else min(high, len(prefix))
        if high is not None:
            prefix = prefix[:high]
            if high <= len(prefix):
                rest = None
        if high is not None and low > high:
            return []
        for value, pointer in facts.excluded:
            if isinstance(value, list):
                self.problem(pointer, "not", "arrays other than one are not a form of grammar")
        shape = Array(dict(facts.at), tuple(prefix), rest, low, high)
        return self._unique(self._containing(shape, prefix_parts, rest_parts))

    def _containing(
        self, shape: Array, prefix_parts: list[list[Part | None]], rest_parts: list[Part]
    ) -> list[Array]:
        shapes = [shape]
        for part, low, high, pointer in self.facts.contains:
            places = shape.high
            if high is None and low == 1 and places is not None and places <= MOST_PLACES:
                if len(self.facts.contains) == 1:
                    shapes = self._at_each_place(shape, part, prefix_parts, rest_parts)
                    continue
            if not self._all_contain(shape, part, low, high, rest_parts):
                self.problem(pointer, "contains", "an item at an unknown place cannot be counted")
        return shapes

    def _all_contain(
        self, shape: Array, part: Part, low: int, high: int | None, rest_parts: list[Part]
    ) -> bool:
        """Whether items satisfy `contains` anyway: its schema is that of all items."""
        same = part.schema is True or any(part.schema == item.schema for item in rest_parts)
        if not same or shape.prefix:
            return False
        shape.low = max(shape.low, low)
        if high is not None:
            shape.high = high if shape.high is None else min(shape.high, high)
        return True

    def _at_each_place(
        self,
        shape: Array,
        part: Part,
        prefix_parts: list[list[Part | None]],
        rest_parts: list[Part],
    ) -> list[Array]:
        found: list[Array] = []
        for index in range(shape.high or 0):
            own = prefix_parts[index] if index < len(shape.prefix) else rest_parts
            number = self.normaliser.node([*(p for p in own if p is not None), part])
            if self.normaliser.empty(number):
                continue
            before = [
                shape.prefix[i] if i < len(shape.prefix) else shape.rest for i in range(index)
            ]
            prefix = [p for p in before if p is not None] + [number]
            prefix += shape.prefix[index + 1 :]
            low = max(shape.low, index + 1)
            found.append(Array(shape.at, tuple(prefix), shape.rest, low, shape.high))
        return found

    def _unique(self, shapes: list[Array]) -> list[Shape]:
        pointer = self.facts.unique
        if pointer is None:
            return list(shapes)
        found: list[Shape] = []
        for shape in shapes:
            if shape.high is not None and shape.high <= 1:
                found.append(shape)
                continue
            orders = self._orders(shape)
            if orders is None:
                self.problem(pointer, "uniqueItems", "items cannot be compared token by token")
                found.append(shape)
            else:
                found += orders
        return found

    def _orders(self, shape: Array) -> list[Shape] | None:
        """Every arrangement, where items are few known values; else None."""
        nodes = self.normaliser.nodes
        if shape.prefix or shape.rest is None or shape.rest in self.normaliser.open:
            return None
        values = nodes[shape.rest]
        if not values or not all(isinstance(item, Literal) for item in values):
            return None
        most = len(values) if shape.high is None else min(len(values), shape.high)
        count, total = 1, 0
        for length in range(most + 1):
            total += count if length >= shape.low else 0
            count *= len(values) - length
        if total > MOST_ORDERS:
            return None
        numbers = [self.normaliser.single(item) for item in values]
        return [
            Array(shape.at, order, None, length, length)
            for length in range(shape.low, most + 1)
            for order in permutations(numbers, length)
        ]

    def _objects(self) -> list[Shape]:
        for value, pointer in self.facts.excluded:
            if isinstance(value, dict):
                self.problem(pointer, "not", "objects other than one are not a form of grammar")
        return ObjectMaker(self).shapes()


def _mark(value: Any) -> object:
    """Equal for equal JSON values: 1 is 1.0, and neither is true."""
    if isinstance(value, dict):
        return frozenset((name, _mark(item)) for name, item in value.items())
    if isinstance(value, list):
        return tuple(map(_mark, value))
    return (type(value) is bool, value)


def _no_string(low: int, high: int | None, trees: tuple[RegexTree, ...]) -> bool:
    """Whether it is certain that no string has the length and matches all."""
    for index, tree in enumerate(trees):
        shortest, longest = lengths(tree)
        if high is not None and shortest > high or longest is not None and longest < low:
            return True
        if any(disjoint(tree, other) for other in trees[index + 1 :]):
            return True
    return False


@lru_cache(maxsize=32)
def known_format(name: str) -> RegexTree:
    """The tree of a known format."""
    pattern = formats.FORMATS[name]
    return regex_syntax.whole(regex_syntax.parse(pattern, "format"), pattern, "format")


def _is_any(tree: RegexTree) -> bool:
    if isinstance(tree, Seq):
        return all(_is_any(item) for item in tree.items)
    return isinstance(tree, Rep) and tree.low == 0 and tree.high is None and tree.item == ANY


def _says_nothing(facts: Facts) -> bool:
    return (
        facts.types == ATOMS
        and not (facts.excluded or facts.multiples or facts.patterns or facts.formats)
        and not (facts.low or facts.high or facts.unique or facts.contains or facts.items)
        and not (facts.required or facts.names or facts.name_parts or facts.problems)
        and facts.lengths == facts.counts == facts.sizes == (0, None)
        and not facts.unevaluated
    )


def _multiple(values: list[Decimal]) -> Decimal | None:
    """The least common multiple of `multipleOf` values."""
    found: Fraction | None = None
    for value in values:
        new = Fraction(value)
        if found is None:
            found = new
        else:
            top = lcm(found.numerator, new.numerator)
            found = Fraction(top, gcd(found.denominator, new.denominator))
    return None if found is None else Decimal(found.numerator) / Decimal(found.denominator)


def _no_number(shape: Number) -> bool:
    if shape.low is None or shape.high is None:
        return False
    if shape.low > shape.high:
        return True
    if shape.low == shape.high and (shape.low_open or shape.high_open):
        return True
    if shape.multiple is not None:
        first = -(-shape.low // shape.multiple) * shape.multiple
        return first > shape.high
    return False

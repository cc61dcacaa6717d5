"""The normal form as a grammar of JSON text: rules for xgrammar, one expression for outlines.

The text is written here to the last comma, so a backend only has to know grammars: what its own
reader of schemas drops does not matter. Members come in the order of the schema, others after.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..core.constraint import Refusal
from . import json_text, number_text
from .regex_overlap import all_but, disjoint, lengths
from .regex_tree import ANY, EMPTY, Alt, Node, Ref, Rep, Seq, Set, alternatives, literal
from .schema_print import named_nodes
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

ANY_RULE = "anything"
_COMMA, _COLON = literal(","), literal(":")


class Grammar:
    """Rules made from a normal form; `refusals` say what no rule could.

    Where a keyword is refused the rules allow more than the schema, but for a value of any depth
    or a recursive one without rules, which has nothing wider.
    """

    def __init__(self, schema: Schema, space: Node, *, recursive: bool) -> None:
        self.schema = schema
        self.space = space
        self.recursive = recursive
        self.rules: dict[str, Node] = {}
        self.refusals: list[Refusal] = []
        self.named = named_nodes(schema) if recursive else set()
        self._inside: set[int] = set()  # nodes being written in, where there are no rules
        self._after: dict[tuple[int, int], Node] = {}
        self.root = self.node(schema.root)

    def refuse(self, shape: Shape, keyword: str, reason: str) -> None:
        """Note what this grammar cannot say."""
        pointer = shape.at.get(keyword, next(iter(shape.at.values()), ""))
        refusal = Refusal(pointer.partition("\0")[0], keyword, reason)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def node(self, number: int) -> Node:
        """The expression of a node, or the name of its rule."""
        if number == ANYTHING:
            return self.anything()
        if number in self.named:
            name = f"n{number}"
            if name not in self.rules:
                self.rules[name] = EMPTY  # holds the place while the rule is written
                self.rules[name] = self.shapes(self.schema.nodes[number])
            return Ref(name)
        if number in self._inside:
            shapes = self.schema.nodes[number]
            self.refuse(shapes[0], "$ref", "a recursive schema is no regular expression")
            return EMPTY
        self._inside.add(number)
        written = self.shapes(self.schema.nodes[number])
        self._inside.discard(number)
        return written

    def shapes(self, shapes: list[Shape]) -> Node:
        """Any of the shapes."""
        return alternatives(self.shape(shape) for shape in shapes)

    def anything(self) -> Node:
        """Any JSON value."""
        if not self.recursive:
            refusal = Refusal("", "any value", "a value of any depth is no regular expression")
            if refusal not in self.refusals:
                self.refusals.append(refusal)
            return EMPTY
        if ANY_RULE not in self.rules:
            self.rules[ANY_RULE] = EMPTY
            items = self._list(Ref(ANY_RULE), 0, None)
            pair = self._pair(self.text(), Ref(ANY_RULE))
            members = self._list(pair, 0, None)
            self.rules[ANY_RULE] = Alt(
                (
                    Seq((literal("{"), members, literal("}"))),
                    Seq((literal("["), items, literal("]"))),
                    self.text(),
                    number_text.NUMBER,
                    literal("true"),
                    literal("false"),
                    literal("null"),
                )
            )
        return Ref(ANY_RULE)

    def text(self) -> Node:
        """Any string, in its quotes."""
        return self._rule(json_text.STRING) if self.recursive else json_text.STRING

    def shape(self, shape: Shape) -> Node:
        """The text of one shape."""
        if isinstance(shape, Anything):
            return self.anything()
        if isinstance(shape, Simple):
            if shape.type == "null":
                return literal("null")
            return Alt((literal("true"), literal("false")))
        if isinstance(shape, Literal):
            return self.value(shape.value)
        if isinstance(shape, Number):
            return self.number(shape)
        if isinstance(shape, String):
            if not shape.low and shape.high is None and not shape.patterns:
                return self.text()
            return json_text.string(self.string(shape))
        if isinstance(shape, Array):
            return self.array(shape)
        assert isinstance(shape, Object)
        return self.object(shape)

    def value(self, value: object) -> Node:
        """One value, with space inside arrays and objects."""
        if isinstance(value, list):
            parts = [self.value(item) for item in value]
            return self._bracketed("[", self._joined(parts), "]")
        if isinstance(value, dict):
            parts = [self._member(name, self.value(item)) for name, item in value.items()]
            return self._bracketed("{", self._joined(parts), "}")
        return literal(json.dumps(value, ensure_ascii=False))

    def number(self, shape: Number) -> Node:
        """A range of numbers."""
        if shape.multiple is not None and not (shape.integer and shape.multiple == 1):
            self.refuse(shape, "multipleOf", "multiples are no rule of this grammar")
        if shape.integer:
            low = None if shape.low is None else int(shape.low)
            high = None if shape.high is None else int(shape.high)
            if low is None and high is None:
                return number_text.INTEGER
            return number_text.integers(low, high)
        if shape.low is None and shape.high is None:
            return number_text.NUMBER
        for bound in (shape.low, shape.high):
            if bound is not None and bound != int(bound):
                keyword = next((k for k in shape.at if "inimum" in k or "aximum" in k), "minimum")
                self.refuse(shape, keyword, "a bound with a fraction is no rule of this grammar")
        return number_text.numbers(shape.low, shape.low_open, shape.high, shape.high_open)

    def string(self, shape: String) -> Node:
        """The text between the quotes."""
        tree = _one_tree(shape)
        if tree is None:
            keyword = next((k for k in ("pattern", "format") if k in shape.at), "pattern")
            self.refuse(shape, keyword, "it would have to hold together with another bound")
            return Rep(shape.low, shape.high, json_text.CHARACTER)
        if self.recursive and isinstance(tree, Rep) and tree.item == ANY:
            return Rep(tree.low, tree.high, self._rule(json_text.CHARACTER))
        try:
            return json_text.spelled(tree)
        except json_text.Unwritable as error:
            self.refuse(shape, "pattern", f"the class {error} needs Unicode tables")
            return Rep(shape.low, shape.high, json_text.CHARACTER)

    def array(self, shape: Array) -> Node:
        """Prefix and rest, in brackets."""
        return self._bracketed("[", self._items(shape, 0), "]")

    def _items(self, shape: Array, index: int) -> Node:
        """Items from `index` on; empty text too where enough of them came before."""
        if index >= len(shape.prefix):
            if shape.rest is None:
                return EMPTY
            low = max(shape.low - index, 0)
            high = None if shape.high is None else shape.high - index
            if high == 0:
                return EMPTY
            item = self.node(shape.rest)
            if index:
                return Rep(low, high, self._next(item))
            return self._counted(item, low, high)
        item = self.node(shape.prefix[index])
        first = self._next(item) if index else Seq((self.space, item))
        more = Seq((first, self._items(shape, index + 1)))
        return more if index < shape.low else Rep(0, 1, more)

    def _counted(self, item: Node, low: int, high: int | None) -> Node:
        """`low` to `high` items with commas between."""
        rest = Rep(max(low - 1, 0), None if high is None else high - 1, self._next(item))
        some = Seq((self.space, item, rest if high != 1 else EMPTY))
        return some if low else Rep(0, 1, some)

    def _list(self, item: Node, low: int, high: int | None) -> Node:
        return Seq((self._counted(item, low, high), self.space))

    def _bracketed(self, left: str, inside: Node, right: str) -> Node:
        return Seq((literal(left), inside, self.space, literal(right)))

    def _next(self, item: Node) -> Node:
        return Seq((self.space, _COMMA, self.space, item))

    def _joined(self, parts: Sequence[Node]) -> Node:
        if not parts:
            return EMPTY
        return Seq((self.space, parts[0], *(self._next(part) for part in parts[1:])))

    def _pair(self, key: Node, value: Node) -> Node:
        return Seq((key, self.space, _COLON, self.space, value))

    def _member(self, name: str, value: Node) -> Node:
        return self._pair(literal(json.dumps(name, ensure_ascii=False)), value)

    def object(self, shape: Object) -> Node:
        """Members in order, then others."""
        others = self._others(shape)
        members = [
            (self._member(name, self.node(member.node)), member.required)
            for name, member in shape.members.items()
        ]
        if shape.low or shape.high is not None:
            if members or others is None:
                self.refuse(shape, "minProperties", "members cannot be counted by this grammar")
                return self._bracketed("{", self._members(members, others), "}")
            return self._bracketed("{", self._counted(others, shape.low, shape.high), "}")
        return self._bracketed("{", self._members(members, others), "}")

    def _members(self, members: list[tuple[Node, bool]], others: Node | None) -> Node:
        after: list[Node] = [EMPTY if others is None else Rep(0, None, self._next(others))]
        for written, required in reversed(members):
            here = self._next(written)
            tail = after[0]
            if self.recursive and len(members) > 3 and tail != EMPTY:
                tail = self._rule(tail)
            after.insert(0, Seq((here if required else Rep(0, 1, here), tail)))
        first = next((i for i, (_, required) in enumerate(members) if required), None)
        if first is not None:
            before = [
                Rep(0, 1, Seq((written, self.space, _COMMA, self.space)))
                for written, _ in members[:first]
            ]
            return Seq((self.space, *before, members[first][0], after[first + 1]))
        options = [
            Seq((written, self._rule(after[index + 1]) if self.recursive else after[index + 1]))
            for index, (written, _) in enumerate(members)
        ]
        if others is not None:
            options.append(Seq((others, after[-1])))
        if not options:
            return EMPTY
        return Rep(0, 1, Seq((self.space, alternatives(options))))

    def _rule(self, body: Node) -> Node:
        """Give an expression a name, so that it is written once."""
        if isinstance(body, Ref) or body == EMPTY:
            return body
        for name, known in self.rules.items():
            if known is body:
                return Ref(name)
        name = f"m{len(self.rules)}"
        self.rules[name] = body
        return Ref(name)

    def _others(self, shape: Object) -> Node | None:
        """A member whose name is not declared."""
        names = [*shape.members, *shape.forbidden]
        options: list[Node] = []
        for tree, number in shape.patterns:
            if any(not disjoint(tree, literal(name)) for name in names):
                self.refuse(shape, "patternProperties", "a pattern matches a declared name")
            options.append(self._named(shape, tree, number, "patternProperties"))
        if shape.rest is not None:
            if shape.patterns:
                self.refuse(
                    shape, "patternProperties", "other names would have to match no pattern"
                )
            tree = all_but(names)
            options.append(self._named(shape, tree, shape.rest, "additionalProperties"))
        return alternatives(options) if options else None

    def _named(self, shape: Object, tree: Node, number: int, keyword: str) -> Node:
        try:
            key = json_text.string(json_text.spelled(tree))
        except json_text.Unwritable as error:
            self.refuse(shape, keyword, f"the class {error} needs Unicode tables")
            key = json_text.STRING
        return self._pair(self._rule(key) if self.recursive else key, self.node(number))


def _one_tree(shape: String) -> Node | None:
    """The one expression of a string's value, or None where two must hold at once."""
    if not shape.patterns:
        return Rep(shape.low, shape.high, ANY)
    if len(shape.patterns) > 1:
        return None
    tree = shape.patterns[0]
    shortest, longest = lengths(tree)
    if shape.low <= shortest and (
        shape.high is None or longest is not None and longest <= shape.high
    ):
        return tree
    items = [tree] if not isinstance(tree, Seq) else [item for item in tree.items if item != EMPTY]
    if len(items) == 1 and isinstance(items[0], Rep) and isinstance(items[0].item, Set):
        rep = items[0]
        bounds = [high for high in (rep.high, shape.high) if high is not None]
        return Rep(max(rep.low, shape.low), min(bounds) if bounds else None, rep.item)
    return None

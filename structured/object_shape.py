"""Objects: which node each name gets, and how many members there may be."""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

from ..core.errors import ValidationError
from . import regex_syntax
from .facts import MADE, Names, Part
from .regex_overlap import disjoint, matches
from .regex_tree import ANY, Node, Rep
from .shapes import ANYTHING, Literal, Member, Object, Shape, String
from .validate import found as is_found

if TYPE_CHECKING:
    from .schema_shape import Maker

MOST_SUBSETS = 64  # of optional members that are written out, to count them


class ObjectMaker:
    """Makes the objects of one branch."""

    def __init__(self, maker: Maker) -> None:
        self.maker = maker
        self.facts = maker.facts
        self.normaliser = maker.normaliser

    def shapes(self) -> list[Shape]:
        """Object shapes; none if a required member can have no value."""
        facts = self.facts
        shape = Object(dict(facts.at), low=facts.sizes[0], high=facts.sizes[1])
        names = [name for group in facts.names for name in group.named]
        for name in dict.fromkeys([*names, *facts.required]):
            allowed = self.normaliser.valid(name, facts.name_parts)
            number = self.normaliser.node(self._parts_of(name)) if allowed else -1
            required = name in facts.required
            if number < 0 or self.normaliser.empty(number):
                if required:
                    return []
                shape.forbidden += (name,)
            else:
                shape.members[name] = Member(number, required)
        self._rest(shape)
        self._names(shape)
        return self._counted(shape)

    def _parts_of(self, name: str) -> list[Part]:
        """All that applies to the member called `name`."""
        parts: list[Part] = []
        for group in self.facts.names:
            found = [group.named[name]] if name in group.named else []
            found += [part for text, part in group.patterns.items() if is_found(text, name)]
            if not found and group.rest is not None:
                found = [group.rest]
            parts += found
        return parts

    def _rest(self, shape: Object) -> None:
        """Nodes of the names that are not declared."""
        groups = self.facts.names
        rest = self.normaliser.node([g.rest for g in groups if g.rest is not None])
        shape.rest = None if self.normaliser.empty(rest) else rest
        trees = self._trees(groups)
        texts = list(trees)
        found: list[tuple[Node, int]] = []
        for text in texts:
            number = self.normaliser.node(self._pattern_parts(text, trees))
            found.append((trees[text], number))
        for index, (tree, number) in enumerate(found):
            for text, (other, beyond) in zip(texts[index + 1 :], found[index + 1 :], strict=True):
                if number != beyond and not disjoint(tree, other):
                    pointer = self._pointer_of(text)
                    self.maker.problem(
                        pointer, "patternProperties", "a name may match another pattern as well"
                    )
        shape.patterns = tuple(found)

    def _trees(self, groups: list[Names]) -> dict[str, Node]:
        trees: dict[str, Node] = {}
        for group in groups:
            for text in group.patterns:
                try:
                    trees[text] = regex_syntax.found_in(text)
                except ValidationError as error:
                    reason = str(error).partition("\n")[0].removeprefix("pattern ")
                    self.maker.problem(
                        self._pointer_of(text), "patternProperties", f"the pattern {reason}"
                    )
        return trees

    def _pointer_of(self, text: str) -> str:
        for group in self.facts.names:
            if text in group.patterns:
                return group.patterns[text].pointer
        return ""

    def _pattern_parts(self, text: str, trees: dict[str, Node]) -> list[Part]:
        """What applies to a name that matches `text` and no other pattern."""
        parts: list[Part] = []
        for group in self.facts.names:
            if text in group.patterns:
                parts.append(group.patterns[text])
            elif group.rest is not None:
                parts.append(group.rest)
        return parts

    def _names(self, shape: Object) -> None:
        """`propertyNames`, for the names that are not declared."""
        if not self.facts.name_parts or (shape.rest is None and not shape.patterns):
            return
        text = Part(f"{self.facts.name_parts[0].pointer}{MADE}text", {"type": "string"})
        node = self.normaliser.node([*self.facts.name_parts, text])
        allowed = self.normaliser.nodes[node]
        if all(isinstance(item, Literal) for item in allowed):
            for item in allowed:
                assert isinstance(item, Literal)
                self._add_member(shape, item.value)
            shape.rest, shape.patterns = None, ()
            return
        tree = _tree_of(allowed)
        declared = (*shape.members, *shape.forbidden)
        if tree is not None and shape.rest != ANYTHING and any(matches(tree, n) for n in declared):
            tree = None  # a pattern would hold for the declared names too
        if tree is not None and not shape.patterns and shape.rest is not None:
            shape.patterns, shape.rest = ((tree, shape.rest),), None
        else:
            self.maker.problem(
                self.facts.name_parts[0].pointer,
                "propertyNames",
                "names of this form are not one regular expression",
            )

    def _add_member(self, shape: Object, name: str) -> None:
        if name in shape.members or name in shape.forbidden:
            return
        number = self.normaliser.node(self._parts_of(name))
        if not self.normaliser.empty(number):
            shape.members[name] = Member(number, False)

    def _counted(self, shape: Object) -> list[Shape]:
        """Resolve the bounds of the number of members, as far as optional members allow."""
        required, total = shape.required, len(shape.members)
        is_open = shape.rest is not None or bool(shape.patterns)
        if shape.low <= required:
            shape.low = 0
        if shape.high is not None and shape.high < required:
            return []
        if not is_open:
            if shape.low > total:
                return []
            if shape.high is not None and shape.high >= total:
                shape.high = None
        if not shape.low and shape.high is None:
            return [shape]
        return self._open_counted(shape) if is_open else self._closed_counted(shape)

    def _closed_counted(self, shape: Object) -> list[Shape]:
        optional = [name for name, member in shape.members.items() if not member.required]
        need = max(shape.low - shape.required, 0)
        room = len(optional) if shape.high is None else shape.high - shape.required
        if 2 ** len(optional) <= MOST_SUBSETS:
            return [
                self._with(shape, set(chosen), set())
                for count in range(need, room + 1)
                for chosen in combinations(optional, count)
            ]
        if need == 1 and room == len(optional):
            return [
                self._with(shape, {name}, set(optional[index + 1 :]))
                for index, name in enumerate(optional)
            ]
        self._count_problem(shape, need > 0)
        return [self._with(shape, set(), set(optional))]

    def _open_counted(self, shape: Object) -> list[Shape]:
        optional = [name for name, member in shape.members.items() if not member.required]
        need = max(shape.low - shape.required, 0)
        if need > 1 or (need and shape.required) or (shape.high is not None and shape.members):
            # A name that is not declared may come twice, and counts once.
            self._count_problem(shape, need > 0)
            return [self._with(shape, set(), set(optional), is_open=True)]
        if not need:
            return [shape]
        found: list[Shape] = [
            self._with(shape, {name}, set(optional[index + 1 :]), is_open=True)
            for index, name in enumerate(optional)
        ]
        last = self._with(shape, set(), set(), is_open=True)
        last.low = 1
        return [*found, last]

    def _with(
        self, shape: Object, chosen: set[str], optional: set[str], *, is_open: bool = False
    ) -> Object:
        """The same object with some optional members required, some optional and no others."""
        members = {
            name: Member(member.node, member.required or name in chosen)
            for name, member in shape.members.items()
            if member.required or name in chosen or name in optional
        }
        gone = tuple(name for name in shape.members if name not in members)
        forbidden = (*shape.forbidden, *gone)
        return Object(shape.at, members, forbidden, shape.patterns, shape.rest)

    def _count_problem(self, shape: Object, low: bool) -> None:
        keyword = "minProperties" if low else "maxProperties"
        pointer = self.facts.at.get(keyword, "")
        self.maker.problem(pointer, keyword, "members of this object cannot be counted")


def _tree_of(shapes: list[Shape]) -> Node | None:
    """The one expression of some strings, or None."""
    if len(shapes) != 1 or not isinstance(shapes[0], String):
        return None
    shape = shapes[0]
    if not shape.patterns:
        return Rep(shape.low, shape.high, ANY)
    if len(shape.patterns) == 1 and not shape.low and shape.high is None:
        return shape.patterns[0]
    return None

"""One deterministic order of stages by kind, profile and before/after; and the hard rules."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from typing import Protocol

from .errors import ChainError
from .stage import Kind, Profile, Stage

# SHAPE and CUT share a segment: which comes first is the profile's business.
SEGMENT = {
    Kind.FORWARD: 0,
    Kind.MASK: 1,
    Kind.FORCE: 2,
    Kind.BIAS: 3,
    Kind.SHAPE: 4,
    Kind.CUT: 4,
    Kind.MARK: 5,
    Kind.PICK: 6,
}

MOST_ARRANGED = 1024  # sets of stages whose order is remembered

StageClass = type[Stage]
Edges = Mapping[str, frozenset[str]]  # name -> names that come later


class Placed(Protocol):
    """A stage instance at its place in a chain."""

    @property
    def stage(self) -> StageClass: ...
    @property
    def instance(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Constraints:
    """The soft edges that hold between known stages, and those that contradict each other."""

    edges: Edges = field(default_factory=dict)
    pulls: Edges = field(default_factory=dict)  # those that the earlier of the two asked for
    conflicts: tuple[str, ...] = ()  # sentences


def settle(
    stages: Iterable[StageClass],
    *,
    owner: Callable[[StageClass], str] = lambda stage: stage.name,
    is_built_in: Callable[[StageClass], bool] = lambda stage: False,
) -> Constraints:
    """Turn the before/after of `stages` into edges without a cycle.

    An edge on a cycle, with others or with the hard rules, is dropped: those of guests first, and
    those of built-ins only if they still contradict each other. `owner` names a stage's plugin.
    """
    by_name = {stage.name: stage for stage in sorted(stages, key=lambda stage: stage.name)}
    rules = {(a.name, b.name) for a in by_name.values() for b in by_name.values() if _hard(a, b)}
    wishes: dict[tuple[str, str], set[str]] = {}  # edge -> names of the stages that ask for it
    for stage in by_name.values():
        for earlier, later in _wishes(stage, by_name.values()):
            wishes.setdefault((earlier.name, later.name), set()).add(stage.name)
    conflicts: list[str] = []
    for spares_built_ins in (True, False):
        reach = _reach(rules | wishes.keys())
        for edge in sorted(wishes):
            askers = {by_name[name] for name in wishes[edge]}
            spared = spares_built_ins and any(map(is_built_in, askers))
            if edge[0] in reach(edge[1]) and not spared:
                del wishes[edge]
                who = " and ".join(sorted({owner(stage) for stage in askers}))
                conflicts.append(
                    f"{edge[0]!r} before {edge[1]!r} (asked by {who}) contradicts other rules of "
                    f"order and is not applied; a request that needs both must give its chain"
                )
    pulls = [edge for edge, askers in wishes.items() if edge[0] in askers]
    return Constraints(_grouped(by_name, wishes), _grouped(by_name, pulls), tuple(conflicts))


class Order:
    """The default order of known stages under one profile."""

    def __init__(
        self, stages: Iterable[StageClass], profile: Profile, constraints: Constraints
    ) -> None:
        self.constraints = constraints
        self._position = {name: place for place, name in enumerate(profile.order)}
        self._arranged: dict[frozenset[StageClass], tuple[StageClass, ...]] = {}
        self._last: dict[Kind, int] = {}  # where the profile's stages of a kind end
        for stage in stages:
            place = self._position.get(stage.name)
            if place is not None:
                self._last[stage.kind] = max(place, self._last.get(stage.kind, place))

    def key(self, stage: StageClass) -> tuple[float, ...]:
        """Where `stage` stands if nothing moves it: mandatory first, segment, profile position.

        A stage that the profile does not name follows the last one of its kind.
        """
        place: float | None = self._position.get(stage.name)
        if place is None:
            last = self._last.get(stage.kind)
            if last is not None:
                place = last + 0.5
            else:
                place = -1.0 if stage.kind is Kind.SHAPE else float("inf")
        return (0 if stage.mandatory else 1, SEGMENT[stage.kind], place)

    def arrange(self, stages: Iterable[StageClass]) -> list[StageClass]:
        """Return `stages` (of different names) in order, whatever order they come in."""
        nodes = {stage.name: stage for stage in stages}
        asked = frozenset(nodes.values())
        if asked in self._arranged:
            return list(self._arranged[asked])
        later = {
            name: {
                other
                for other, second in nodes.items()
                if other in self.constraints.edges.get(name, ()) or _hard(first, second)
            }
            for name, first in nodes.items()
        }
        order = [nodes[name] for name in _sorted(later, self._urgency(nodes, later))]
        if len(self._arranged) >= MOST_ARRANGED:
            self._arranged.clear()
        self._arranged[asked] = tuple(order)
        return order

    def _urgency(
        self, nodes: Mapping[str, StageClass], later: Mapping[str, set[str]]
    ) -> dict[str, tuple[float, ...]]:
        """Keys in which a stage is as early as the earliest one that it asks to stand before.

        Who asks moves: one that asks to stand after another waits, and does not pull it forward.
        """
        keys: dict[str, tuple[float, ...]] = {}
        for name in TopologicalSorter(later).static_order():  # those that come last first
            pulled = later[name] & self.constraints.pulls.get(name, frozenset())
            keys[name] = min([self.key(nodes[name]), *(keys[other] for other in pulled)])
        return keys


def check_hard_rules(entries: Sequence[Placed]) -> None:
    """Refuse a chain that breaks a rule between kinds; ChainError names both stages and the reason.

    MASK and FORCE come before every CUT, MARK after every CUT, and exactly one PICK is last.
    """
    refuse_breaches(entries)
    if not entries or entries[-1].stage.kind is not Kind.PICK:
        raise ChainError("the chain must end in a picker", parameter="chain")


def refuse_breaches(entries: Sequence[Placed]) -> None:
    """Refuse two stages in an order that no chain may have; a missing picker is no breach."""
    for place, first in enumerate(entries):
        for second in entries[place + 1 :]:
            reason = _breach(first, second)
            if reason is not None:
                raise ChainError(reason, parameter="chain")


def soft_violations(entries: Sequence[Placed]) -> list[str]:
    """Return a note for each wish of a stage that the order of `entries` does not grant."""
    notes: list[str] = []
    for place, first in enumerate(entries):
        for second in entries[place + 1 :]:
            a, b = first.stage, second.stage
            if a is not b and _names(a.order.after, b):
                notes.append(f"{first.instance!r} asks to stand after {second.instance!r}")
            if a is not b and _names(b.order.before, a):
                notes.append(f"{second.instance!r} asks to stand before {first.instance!r}")
            if b.caps.reads_zero and (a.caps.shifts_row or a.kind is Kind.FORWARD):
                notes.append(
                    f"{second.instance!r} multiplies logits and stands after {first.instance!r}, "
                    f"which shifts the whole row, so its strength depends on that shift"
                )
    return list(dict.fromkeys(notes))


def _breach(first: Placed, second: Placed) -> str | None:
    a, b = first.stage.kind, second.stage.kind
    one, two = repr(first.instance), repr(second.instance)
    if a is Kind.PICK and b is Kind.PICK:
        return f"a chain has one picker, got {one} and {two}"
    if a is Kind.PICK:
        return (
            f"the picker {one} must be last, but {two} stands after it: the token is chosen by then"
        )
    if a is Kind.CUT and b in (Kind.MASK, Kind.FORCE):
        return (
            f"{two} ({b.name}) must stand before {one} (CUT): "
            f"a cut computed on illegal tokens may leave only illegal ones"
        )
    if a is Kind.MARK and b is Kind.CUT:
        return (
            f"{two} (CUT) must stand before {one} (MARK): "
            f"a mark reweights what the truncations left"
        )
    return None


def _hard(first: StageClass, second: StageClass) -> bool:
    """Say whether `first` must precede `second` in every default order."""
    a, b = first.kind, second.kind
    return (
        (a in (Kind.MASK, Kind.FORCE) and b is Kind.CUT)
        or (a is Kind.CUT and b is Kind.MARK)
        or (a is not Kind.PICK and b is Kind.PICK)
        or (first.mandatory and not second.mandatory)
    )


def _grouped(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> Edges:
    pairs = list(edges)
    return {name: frozenset(later for earlier, later in pairs if earlier == name) for name in names}


def _names(targets: tuple[str | Kind, ...], stage: StageClass) -> bool:
    """Say whether one of `targets` is this stage, by name, alias or kind."""
    return any(
        target is stage.kind
        if isinstance(target, Kind)
        else target == stage.name or target in stage.aliases
        for target in targets
    )


def _wishes(
    stage: StageClass, others: Iterable[StageClass]
) -> Iterable[tuple[StageClass, StageClass]]:
    for other in others:
        if other is not stage and _names(stage.order.before, other):
            yield stage, other
        if other is not stage and _names(stage.order.after, other):
            yield other, stage


def _sorted(later: Mapping[str, set[str]], urgency: Mapping[str, tuple[float, ...]]) -> list[str]:
    """Kahn's algorithm: of the stages that wait for nothing, take the most urgent, then by name."""
    waiting = dict.fromkeys(later, 0)
    for followers in later.values():
        for name in followers:
            waiting[name] += 1
    ready = [(urgency[name], name) for name, count in waiting.items() if not count]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        _, name = heapq.heappop(ready)
        order.append(name)
        for follower in later[name]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (urgency[follower], follower))
    if len(order) < len(later):
        raise CycleError(f"a cycle among {sorted(later.keys() - set(order))}")
    return order


def _reach(edges: Iterable[tuple[str, str]]) -> Callable[[str], set[str]]:
    """Return a function from a name to everything that must come later than it."""
    followers: dict[str, list[str]] = {}
    for earlier, later in edges:
        followers.setdefault(earlier, []).append(later)
    found: dict[str, set[str]] = {}

    def reach(name: str) -> set[str]:
        if name not in found:
            seen: set[str] = set()
            path = [name]
            while path:
                fresh = set(followers.get(path.pop(), ())) - seen
                seen |= fresh
                path += fresh
            found[name] = seen
        return found[name]

    return reach

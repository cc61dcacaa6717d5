"""From request parameters to the stages they ask for, in order, before anything is bound.

Two ways in: flat fields expand to the profile's chain; an explicit `chain` is taken as it stands,
and the flat fields fill what it leaves open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from .errors import ChainError, NotInThisVersion, ValidationError
from .order import Order, check_hard_rules, refuse_breaches
from .stage import Kind, Profile, Stage, StageParams
from .stage_rules import fault_of

if TYPE_CHECKING:
    from .params import RequestParams
    from .registry import Registry

MAX_STAGES = 64  # a request
CHAIN = "chain"  # the layer of values written in the chain itself
PROFILE = "profile"  # the layer of values that the profile gives to what is left open


@dataclass(eq=False, slots=True)
class Draft:
    """One stage instance as asked for. `sources` says of each parameter which layer gave it."""

    stage: type[Stage]
    instance: str = ""
    given: dict[str, object] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    flat: dict[str, str] = field(default_factory=dict)  # parameter -> request field that gave it
    params: StageParams | None = None  # set once checked

    def take(self, name: str, own: str, value: object, layer: str) -> None:
        """Set the parameter `own` from the request field `name`."""
        self.given[own] = value
        self.sources[own] = layer
        self.flat[own] = name
        self.params = None

    def settle(self, own: str, value: object, layer: str) -> None:
        """Set the parameter `own` if nothing gave it yet."""
        if own not in self.given:
            self.given[own] = value
            self.sources[own] = layer
            self.params = None

    def check(self) -> StageParams:
        """Check the parameters against the stage's model; errors name the request field."""
        if self.params is None:
            try:
                self.params = self.stage.validate(self.given)
            except ValidationError as error:
                self.blame(error)
        return self.params

    def blame(self, error: ValidationError) -> NoReturn:
        """Raise `error` again, with the request field in place of the parameter it filled."""
        message, parameter = str(error), error.parameter
        value = error.value
        for own, name in self.flat.items():
            place = f"{self.stage.name}.{own}"
            message = message.replace(place, name)
            if parameter in (place, own) or (parameter or "").startswith(f"{place}."):
                parameter = name
                value = self.given[own] if value is None else value
        raise type(error)(message, parameter=parameter or CHAIN, value=value) from error


@dataclass(frozen=True, slots=True)
class Drafted:
    """The chain of a request, hard rules kept, ending in its picker."""

    drafts: tuple[Draft, ...]
    notes: tuple[str, ...]


def draft_chain(
    params: RequestParams,
    registry: Registry,
    profile: Profile,
    order: Order,
    provenance: Mapping[str, str],
) -> Drafted:
    """Return the checked chain of `params`; ChainError names what is wrong.

    `provenance` says which layer set a request field ("generation_config", ...); a field it does
    not name comes from the request.
    """
    fields = _flat_fields(params, registry)
    layers = {name: provenance.get(name, "request") for name in fields}
    notes: list[str] = []
    written: list[Draft] = []
    if params.chain is None:
        drafts = _expand(fields, layers, registry, order, profile)
    else:
        written = [_listed(item, registry) for item in params.chain]
        layer = provenance.get(CHAIN, "request")
        if layer != "request":  # a preset wrote it
            for draft in written:
                draft.sources = dict.fromkeys(draft.sources, layer)
        drafts = _complete(written, fields, layers, registry, order, notes)
    for draft in drafts:
        for own, value in profile.settings.get(draft.stage.name, {}).items():
            draft.settle(own, value, PROFILE)
    _end_in_picker(drafts, params, registry, profile)
    if len(drafts) > MAX_STAGES:
        raise ChainError(
            f"chain must have at most {MAX_STAGES} stages, got {len(drafts)}", parameter="chain"
        )
    _name_instances(drafts)
    for draft in drafts:
        if draft.stage.kind is Kind.FORWARD:
            raise NotInThisVersion(
                f"stage {draft.stage.name!r} is of kind FORWARD, which this version cannot run",
                parameter="chain",
                value=draft.stage.name,
            )
    refuse_breaches(written)  # also where a stage that always runs first was moved
    check_hard_rules(drafts)
    for draft in drafts:
        draft.check()
    return Drafted(tuple(drafts), tuple(notes))


def _flat_fields(params: RequestParams, registry: Registry) -> dict[str, object]:
    """Return the request fields that are set and belong to stages."""
    for name, reason in registry.lost_fields.items():
        value = getattr(params, name)
        if value is not None:
            raise ChainError(
                f"{name}={value!r} cannot be honoured: {reason}", parameter=name, value=value
            )
    values = {name: getattr(params, name) for name in registry.fields}
    return {name: value for name, value in values.items() if value is not None}


def _expand(
    fields: Mapping[str, object],
    layers: Mapping[str, str],
    registry: Registry,
    order: Order,
    profile: Profile,
) -> list[Draft]:
    """The profile's chain: the stages that it always has, and one of each that a field asks for."""
    drafts = {
        stage: Draft(stage)
        for stage in registry.stages.values()
        if stage.mandatory or stage.automatic
    }
    for name, value in fields.items():
        stage, own = registry.fields[name]
        if name in profile.fields:
            other, own = profile.fields[name]
            stage = registry.stage(other)
        drafts.setdefault(stage, Draft(stage)).take(name, own, value, layers[name])
    return [drafts[stage] for stage in order.arrange(drafts)]


def _listed(item: object, registry: Registry) -> Draft:
    """One entry of an explicit chain: a name, a dict, a stage object or a stage class."""
    if isinstance(item, Stage):
        return _of_object(item, registry)
    if isinstance(item, type) and issubclass(item, Stage):
        _refuse_faulty(item, registry)
        return Draft(item)
    if isinstance(item, str):
        return Draft(registry.stage(item))
    if isinstance(item, Mapping) and isinstance(item.get("stage"), str):
        given = {key: value for key, value in item.items() if key not in ("stage", "id")}
        stage = registry.stage(item["stage"])
        return Draft(stage, item.get("id") or "", given, dict.fromkeys(given, CHAIN))
    raise ChainError(
        f'chain must hold names, dicts {{"stage": name, ...}} or stage objects, got {item!r}',
        parameter="chain",
        value=item,
    )


def _of_object(item: Stage, registry: Registry) -> Draft:
    stage = type(item)
    _refuse_faulty(stage, registry)
    given = {name: getattr(item.params, name) for name in item.params.model_fields_set}
    return Draft(stage, item.id or "", given, dict.fromkeys(given, CHAIN), params=item.params)


def _refuse_faulty(stage: type[Stage], registry: Registry) -> None:
    """A class that was never loaded is checked here, as loading would have."""
    if registry.stages.get(stage.name) is stage:
        return
    reason = fault_of(stage, is_local=True)
    if reason is not None:
        raise ChainError(
            f"stage {stage.name or stage.__name__!r} cannot be used: {reason}", parameter="chain"
        )


def _complete(
    drafts: list[Draft],
    fields: Mapping[str, object],
    layers: Mapping[str, str],
    registry: Registry,
    order: Order,
    notes: list[str],
) -> list[Draft]:
    """Let the flat fields fill an explicit chain, and put what must be in front of it in front."""
    front: dict[type[Stage], Draft] = {}
    listed: dict[type[Stage], list[Draft]] = {}
    for draft in drafts:
        listed.setdefault(draft.stage, []).append(draft)
    for stage in registry.stages.values():
        if stage.mandatory:
            front[stage] = listed[stage][0] if stage in listed else Draft(stage)
    for name, value in fields.items():
        stage, own = registry.fields[name]
        if stage in listed:
            notes += _fill(listed[stage], name, own, value, layers[name])
        elif stage.kind in (Kind.MASK, Kind.FORCE):
            front.setdefault(stage, Draft(stage)).take(name, own, value, layers[name])
        else:
            raise ChainError(
                f"{name}={value!r} would be ignored, since the chain has no stage "
                f"{stage.name!r}; add it to the chain or leave {name} unset",
                parameter=name,
                value=value,
            )
    notes += [
        f"{stage.name!r} does not run, as the chain does not list it"
        for stage in registry.stages.values()
        if stage.automatic and stage not in listed
    ]
    leading = [front[stage] for stage in order.arrange(front)]
    notes += [
        f"{draft.stage.name!r} always runs first"
        for draft in leading
        if draft in drafts and draft is not drafts[0]
    ]
    return leading + [draft for draft in drafts if draft not in leading]


def _fill(drafts: Sequence[Draft], name: str, own: str, value: object, layer: str) -> list[str]:
    """Give `value` to the instances that leave the parameter open; note it if none does."""
    open_ones = [draft for draft in drafts if own not in draft.given]
    for draft in open_ones:
        draft.take(name, own, value, layer)
    first = drafts[0].given[own]
    if open_ones or first == value:
        return []
    return [f"{name}={value!r} is not used: the chain gives {drafts[0].stage.name} {own}={first!r}"]


def _end_in_picker(
    drafts: list[Draft], params: RequestParams, registry: Registry, profile: Profile
) -> None:
    """Add the profile's picker where the chain has none."""
    pickers = [draft for draft in drafts if draft.stage.kind is Kind.PICK]
    if params.picker is not None:
        drafts.append(_named_picker(params.picker, pickers, registry))
        drafts[-1].sources = dict.fromkeys(drafts[-1].sources, "request")
        pickers = drafts[-1:]
    if not pickers:
        drafts.append(Draft(registry.stage(profile.greedy if params.greedy else profile.picker)))
    elif params.greedy and pickers[0].stage.name != profile.greedy:
        raise ChainError(
            f"temperature 0 asks for the picker {profile.greedy!r}, but the chain has "
            f"{pickers[0].stage.name!r}",
            parameter="temperature",
            value=0,
        )


def _named_picker(item: object, listed: Sequence[Draft], registry: Registry) -> Draft:
    """The picker that the field `picker` names; a chain with one of its own leaves no room."""
    if isinstance(item, Mapping) and isinstance(item.get("picker"), str):
        item = {"stage": item["picker"], **{k: v for k, v in item.items() if k != "picker"}}
    draft = _listed(item, registry)
    if draft.stage.kind is not Kind.PICK:
        known = ", ".join(registry.pickers)
        raise ChainError(
            f"picker must name one of {known}, got the {draft.stage.kind.name} stage "
            f"{draft.stage.name!r}",
            parameter="picker",
            value=draft.stage.name,
        )
    if listed:
        raise ChainError(
            f"picker={draft.stage.name!r} has no place, since the chain has the picker "
            f"{listed[0].stage.name!r}",
            parameter="picker",
            value=draft.stage.name,
        )
    return draft


def _name_instances(drafts: Sequence[Draft]) -> None:
    """Give each instance its id: its own, or the stage's name, `name#2`, ..."""
    taken: set[str] = set()
    for draft in drafts:
        if draft.instance in taken:
            raise ChainError(
                f"two stages of the chain have the id {draft.instance!r}",
                parameter="chain",
                value=draft.instance,
            )
        if draft.instance:
            taken.add(draft.instance)
    counts: dict[str, int] = {}
    for draft in drafts:
        if draft.instance:
            continue
        name = draft.stage.name
        while not draft.instance:
            counts[name] = counts.get(name, 0) + 1
            candidate = name if counts[name] == 1 else f"{name}#{counts[name]}"
            draft.instance = "" if candidate in taken else candidate
        taken.add(draft.instance)


def chain_key(items: Iterable[object] | None) -> Any:
    """Return a hashable form of a chain in which 1, 1.0 and True differ, or raise TypeError."""
    return None if items is None else tuple(map(_frozen, items))


def _frozen(value: object) -> Any:
    if isinstance(value, Stage):
        return (
            type(value),
            value.id,
            _frozen(dict(value.params)),
            frozenset(value.params.model_fields_set),
        )
    if isinstance(value, Mapping):
        return (
            dict,
            tuple(sorted((str(key), _frozen(key), _frozen(item)) for key, item in value.items())),
        )
    if isinstance(value, list | tuple):
        return (type(value), tuple(map(_frozen, value)))
    if isinstance(value, set | frozenset):
        return (frozenset, frozenset(map(_frozen, value)))
    hash(value)
    return (type(value), value)

"""Who owns which name: one owner for each, and a reason for everyone else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .discovery import Origin, Refusal, fold
from .errors import PluginError
from .offers import Item, Plugin
from .stage import Picker, Profile, Stage
from .stage_rules import fault_of

DEFAULT_PROFILE = "default"


@dataclass(slots=True)
class Settled:
    """The outcome: what is active, by kind and name, and why each other item is not."""

    active: dict[str, dict[str, Any]] = field(default_factory=dict)
    stage_names: dict[str, type[Stage]] = field(default_factory=dict)  # aliases too
    fields: dict[str, tuple[type[Stage], str]] = field(default_factory=dict)
    lost_fields: dict[str, str] = field(default_factory=dict)
    built_ins: set[type[Stage]] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    _faults: dict[tuple[int, int], Refusal] = field(default_factory=dict)
    _owners: dict[tuple[str, str], Plugin] = field(default_factory=dict)

    def fault(self, plugin: Plugin, item: Item) -> Refusal | None:
        """Return why this plugin's item is not active; None if it is."""
        return self._faults.get((id(plugin), id(item)))


def settle_names(plugins: Sequence[Plugin], denied: Iterable[str]) -> Settled:
    """Go through `plugins` in the order of their rank; the first to claim a name has it.

    Raises PluginError if a denied name is one that no chain can do without: a mandatory stage, or
    the default profile or a picker of it.
    """
    settled = Settled()
    blocked = {fold(name): name for name in denied}
    for plugin in plugins:
        for item in plugin.items:
            refusal = _refuse(plugin, item, blocked, settled)
            if refusal is None:
                _claim(plugin, item, settled)
            else:
                settled._faults[id(plugin), id(item)] = refusal
    _refuse_protected(plugins, settled)
    _drop_profiles_without_picker(plugins, settled)
    _tell_lost_fields(plugins, settled)
    return settled


def _refuse(
    plugin: Plugin, item: Item, blocked: dict[str, str], settled: Settled
) -> Refusal | None:
    source = plugin.source
    if source.refusal is not None:
        return source.refusal
    for name in (*item.names, *(source.names if source.origin in _LOCAL else ())):
        if fold(name) in blocked:
            return Refusal("blocked", f"no:{blocked[fold(name)]}")
    if item.kind == "stage":
        is_built_in = source.origin is Origin.BUILT_IN
        reason = fault_of(item.thing, is_built_in=is_built_in, is_local=source.origin in _LOCAL)
        if reason is not None:
            return Refusal("quarantined", reason)
    for what, name in _claims(item):
        owner = settled._owners.get((what, name))
        if owner is not None and not (owner is plugin and _same(settled, item)):
            return Refusal("shadowed", f"the {what} {name!r} belongs to {owner.source.label}")
    return None


_LOCAL = (Origin.IN_PROCESS, Origin.FILE)


def _same(settled: Settled, item: Item) -> bool:
    """Say whether this very thing is already active, as when two hooks of a plugin offer it."""
    return settled.active.get(item.kind, {}).get(item.name) is item.thing


def _claims(item: Item) -> list[tuple[str, str]]:
    claims = [(item.kind, name) for name in item.names]
    if item.kind == "stage":
        claims += [("request field", name) for name in item.thing.fields]
    return claims


def _claim(plugin: Plugin, item: Item, settled: Settled) -> None:
    for claim in _claims(item):
        settled._owners[claim] = plugin
    settled.active.setdefault(item.kind, {})[item.name] = item.thing
    if item.kind == "stage":
        for name in item.names:
            settled.stage_names[name] = item.thing
        for request_field, own in item.thing.fields.items():
            settled.fields[request_field] = (item.thing, own)
        if plugin.source.origin is Origin.BUILT_IN:
            settled.built_ins.add(item.thing)


def _refuse_protected(plugins: Sequence[Plugin], settled: Settled) -> None:
    own = [plugin for plugin in plugins if plugin.source.origin is Origin.BUILT_IN]
    items = [(plugin, item) for plugin in own for item in plugin.items]
    needed = {("profile", DEFAULT_PROFILE)}
    for _, item in items:
        if item.kind == "profile" and item.name == DEFAULT_PROFILE:
            needed |= {("stage", item.thing.picker), ("stage", item.thing.greedy)}
        elif item.kind == "stage" and item.thing.mandatory:
            needed.add(("stage", item.name))
    for plugin, item in items:
        fault = settled.fault(plugin, item)
        if fault is not None and fault.state == "blocked" and (item.kind, item.name) in needed:
            raise PluginError(
                f"{fault.reason} is refused: no chain can do without the {item.kind} {item.name!r}"
            )


def _drop_profiles_without_picker(plugins: Sequence[Plugin], settled: Settled) -> None:
    profiles: dict[str, Profile] = settled.active.get("profile", {})
    for plugin in plugins:
        for item in plugin.items:
            profile = profiles.get(item.name) if item.kind == "profile" else None
            if profile is None or profile is not item.thing:
                continue
            for picker in (profile.picker, profile.greedy):
                stage = settled.stage_names.get(picker)
                if stage is None or not issubclass(stage, Picker):
                    reason = f"it needs the picker {picker!r}, which is not available"
                    state = "blocked" if _is_blocked(plugins, settled, picker) else "quarantined"
                    settled._faults[id(plugin), id(item)] = Refusal(state, reason)
                    settled.notes.append(f"profile {item.name!r} is gone: {reason}")
                    del profiles[item.name]
                    break


def _is_blocked(plugins: Sequence[Plugin], settled: Settled, stage: str) -> bool:
    for plugin in plugins:
        for item in plugin.items:
            fault = settled.fault(plugin, item)
            if item.kind == "stage" and stage in item.names and fault is not None:
                return fault.state == "blocked"
    return False


def _tell_lost_fields(plugins: Sequence[Plugin], settled: Settled) -> None:
    for plugin in plugins:
        for item in plugin.items:
            fault = settled.fault(plugin, item)
            if fault is None or item.kind != "stage":
                continue
            for name in item.thing.fields:
                if name not in settled.fields:
                    settled.lost_fields[name] = (
                        f"its stage {item.name!r} is {fault.state} ({fault.reason})"
                    )
                    settled.notes.append(
                        f"the request field {name!r} is refused: {settled.lost_fields[name]}"
                    )

"""One plugin as a line of a list: who it is, what it offers, and its state."""

from __future__ import annotations

from dataclasses import dataclass

from .discovery import Origin
from .naming import Settled
from .offers import Plugin
from .stage import ApiRange

MOST_LETTERS = 300  # of an error in a list


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """One line of `decodekit plugin list`."""

    name: str
    distribution: str | None  # None for built-ins and for what was handed over in this process
    version: str | None
    api: ApiRange | None  # None if it offers no stage
    hooks: tuple[str, ...]
    stages: tuple[str, ...]
    state: str  # "active" | "blocked" | "quarantined" | "shadowed"
    reason: str = ""
    built_in: bool = False


def info_of(plugin: Plugin, settled: Settled) -> PluginInfo:
    """Describe `plugin` as names were settled."""
    source = plugin.source
    state, reason = _state(plugin, settled)
    return PluginInfo(
        name=source.name,
        distribution=source.distribution,
        version=source.version,
        api=plugin.api,
        hooks=plugin.hooks,
        stages=tuple(stage.name for stage in plugin.stages),
        state=state,
        reason=reason,
        built_in=source.origin is Origin.BUILT_IN,
    )


def brief(error: BaseException | None) -> str:
    """Name an error in one line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= MOST_LETTERS else f"{text[:MOST_LETTERS]}..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _state(plugin: Plugin, settled: Settled) -> tuple[str, str]:
    """Return the state and its reason; a plugin that lost only some of its items says which."""
    if plugin.source.refusal is not None:
        return plugin.source.refusal.state, plugin.source.refusal.reason
    if plugin.failure is not None:
        return "quarantined", brief(plugin.failure)
    faults = [
        (item, fault) for item in plugin.items if (fault := settled.fault(plugin, item)) is not None
    ]
    if not faults:
        return "active", "; ".join(plugin.notes)
    reason = "; ".join(f"{item.kind} {item.name!r}: {fault.reason}" for item, fault in faults)
    states = {fault.state for _, fault in faults}
    for state in ("quarantined", "shadowed"):
        if state in states:
            return state, reason
    return ("blocked" if len(faults) == len(plugin.items) else "active"), reason

"""Load one plugin and ask it what it offers; whatever goes wrong stays with that plugin."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pluggy

from . import hookspecs
from .discovery import Origin, Source
from .driver import Driver
from .errors import PluginError
from .hookspecs import PROJECT, hookimpl
from .parsers import ReasoningParser, ToolParser
from .proposer import Proposer
from .stage import ApiRange, CommandSpec, Observer, Picker, Profile, Reviewer, Stage, Stop

# The questions asked at load, and what kind of item each brings.
HOOKS = {
    "decodekit_stages": "stage",
    "decodekit_pickers": "stage",  # a picker is a stage, and shares the names of stages
    "decodekit_stops": "stop",
    "decodekit_observers": "observer",
    "decodekit_drivers": "driver",
    "decodekit_proposers": "proposer",
    "decodekit_constraint_backends": "constraint backend",
    "decodekit_attention_backends": "attention backend",
    "decodekit_profiles": "profile",
    "decodekit_reviewers": "reviewer",
    "decodekit_tool_parsers": "tool parser",
    "decodekit_reasoning_parsers": "reasoning parser",
    "decodekit_commands": "command",
}
DOCTOR = "decodekit_doctor"
_CLASSES = {
    "decodekit_stages": Stage,
    "decodekit_pickers": Picker,
    "decodekit_drivers": Driver,
    "decodekit_proposers": Proposer,
    "decodekit_tool_parsers": ToolParser,
}
_INSTANCES = {
    "decodekit_stops": Stop,
    "decodekit_observers": Observer,
    "decodekit_profiles": Profile,
    "decodekit_reviewers": Reviewer,
    "decodekit_reasoning_parsers": ReasoningParser,
    "decodekit_commands": CommandSpec,
}


@dataclass(frozen=True, slots=True)
class Item:
    """One thing that a plugin offers."""

    kind: str
    name: str
    thing: Any

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases."""
        return (self.name, *getattr(self.thing, "aliases", ()))


@dataclass(eq=False, slots=True)
class Plugin:
    """A plugin as far as it could be loaded."""

    source: Source
    subject: object = None  # what is registered with pluggy, None unless it is
    items: tuple[Item, ...] = ()
    hooks: tuple[str, ...] = ()
    failure: BaseException | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def stages(self) -> tuple[type[Stage], ...]:
        """The stages and pickers on offer."""
        return tuple(item.thing for item in self.items if item.kind == "stage")

    @property
    def api(self) -> ApiRange | None:
        """The stage API versions that all its stages were written for; None without a stage."""
        ranges = [stage.api for stage in self.stages]
        if not ranges:
            return None
        return ApiRange(max(r.low for r in ranges), min(r.high for r in ranges))


def new_manager() -> pluggy.PluginManager:
    """Return a pluggy manager that knows our hooks, and minds no others."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def load(manager: pluggy.PluginManager, source: Source, serial: int) -> Plugin:
    """Import `source`, register it under a unique name and collect its items.

    What the plugin raises, SystemExit included, is kept as `failure`.
    """
    plugin = Plugin(source)
    on_device = _device_is_up()
    try:
        subject = _subject_of(source.load(), source.origin)
        plugin.subject = subject
        manager.register(subject, f"{source.name}#{serial}")
        _collect(manager, plugin)
    except (Exception, SystemExit) as error:
        plugin.failure = error
        plugin.items = ()
        unload(manager, plugin)
    if _device_is_up() and not on_device:
        plugin.notes.append("importing it initialised the GPU, which a plugin must not do")
    return plugin


def unload(manager: pluggy.PluginManager, plugin: Plugin) -> None:
    """Take the plugin out of the manager, if it is in."""
    if plugin.subject is not None and manager.get_name(plugin.subject) is not None:
        manager.unregister(plugin.subject)
    plugin.subject = None


def ask(manager: pluggy.PluginManager, plugin: Plugin, hook: str) -> list[Any]:
    """Call `hook` of this plugin alone and return the items it answers with."""
    others = [other for other in manager.get_plugins() if other is not plugin.subject]
    answers = manager.subset_hook_caller(hook, others)()
    return [item for answer in answers for item in (answer or ())]


def _collect(manager: pluggy.PluginManager, plugin: Plugin) -> None:
    callers = manager.get_hookcallers(plugin.subject) or []
    plugin.hooks = tuple(sorted(caller.name for caller in callers))
    for caller in callers:
        for impl in caller.get_hookimpls():
            if impl.plugin is plugin.subject and (impl.hookwrapper or impl.wrapper):
                raise PluginError(f"{caller.name} is a hook wrapper, which plugins may not have")
    known = [*HOOKS, DOCTOR]
    plugin.notes += [
        f"hook {name!r} is unknown to this version and never called"
        for name in plugin.hooks
        if name not in known
    ]
    items: list[Item] = []
    for hook, kind in HOOKS.items():
        if hook in plugin.hooks:
            for thing in ask(manager, plugin, hook):
                items.append(_item(hook, kind, thing))
    plugin.items = tuple({(item.kind, item.name, id(item.thing)): item for item in items}.values())
    if not plugin.hooks:
        raise PluginError("it offers nothing: no function of it is marked with @hookimpl")


def _item(hook: str, kind: str, thing: Any) -> Item:
    base, expected = _CLASSES.get(hook), _INSTANCES.get(hook)
    is_class = isinstance(thing, type)
    if base is not None and not (is_class and issubclass(thing, base)):
        raise PluginError(f"{hook} returned {thing!r}, which is no subclass of {base.__name__}")
    if expected is not None and not isinstance(thing, expected):
        raise PluginError(f"{hook} returned {thing!r}, which is no {expected.__name__} object")
    name = getattr(thing, "name", None)
    if not isinstance(name, str) or not name:
        raise PluginError(f"{hook} returned {thing!r}, which has no name")
    return Item(kind, name, thing)


class _Single:
    """A plugin made of things that were handed over without any hook."""

    def __init__(self, things: Iterable[Any]) -> None:
        self._things = tuple(things)

    @hookimpl
    def decodekit_stages(self) -> Iterable[type[Stage]]:
        return [thing for thing in self._things if isinstance(thing, type)]

    @hookimpl
    def decodekit_stops(self) -> Iterable[Stop]:
        return [thing for thing in self._things if isinstance(thing, Stop)]

    @hookimpl
    def decodekit_observers(self) -> Iterable[Observer]:
        return [thing for thing in self._things if isinstance(thing, Observer)]

    @hookimpl
    def decodekit_profiles(self) -> Iterable[Profile]:
        return [thing for thing in self._things if isinstance(thing, Profile)]

    @hookimpl
    def decodekit_reviewers(self) -> Iterable[Reviewer]:
        return [thing for thing in self._things if isinstance(thing, Reviewer)]

    @hookimpl
    def decodekit_commands(self) -> Iterable[CommandSpec]:
        return [thing for thing in self._things if isinstance(thing, CommandSpec)]


def _subject_of(thing: object, origin: Origin) -> object:
    """Turn what a source loaded into something that pluggy can register."""
    if isinstance(thing, type):
        if issubclass(thing, Stage):
            return _Single([thing])
        thing = thing()  # a Stop, an Observer, or a class with hooks
    if isinstance(thing, Stop | Observer | Profile | Reviewer | CommandSpec):
        return _Single([thing])
    if isinstance(thing, Stage):
        raise PluginError(
            f"{thing!r} is one request's stage; register its class {type(thing).__name__}"
        )
    is_local = origin in (Origin.IN_PROCESS, Origin.FILE)
    if is_local and isinstance(thing, ModuleType) and not _has_hooks(thing):
        return _Single(_classes_of(thing))
    return thing


def _has_hooks(module: ModuleType) -> bool:
    return any(hasattr(value, f"{PROJECT}_impl") for value in vars(module).values())


def _classes_of(module: ModuleType) -> list[Any]:
    """Return the named stages of a plain module, and its stops, observers, reviewers as objects."""
    found: list[Any] = []
    for value in vars(module).values():
        is_own = isinstance(value, type) and value.__module__ == module.__name__
        if is_own and issubclass(value, Stage | Stop | Observer | Reviewer) and value.name:
            found.append(value if issubclass(value, Stage) else value())
    if not found:
        raise PluginError(
            "it offers nothing: no hook, and no named Stage, Stop, Observer or Reviewer class"
        )
    return found


def _device_is_up() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())

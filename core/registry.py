"""The set of plugins of one engine: load them, settle who owns which name, and list them.

Loading never stops at a broken plugin: it is quarantined with its error, one warning tells, and
whoever asks for its stage gets that error. A contested name goes to the built-in, then to what was
asked for explicitly, then to the first distribution by name; the other side is reported.
"""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from . import offers
from .discovery import PACKAGE, Origin, Selection, Source, find, fold, of_object
from .errors import ChainError, PluginError, did_you_mean
from .naming import Settled, settle_names
from .offers import Plugin
from .order import Constraints, settle
from .parsers import ReasoningParser, ToolParser
from .plugin_info import PluginInfo, brief, info_of
from .stage import CommandSpec, Finding, Observer, Picker, Profile, Reviewer, Stage, Stop

__all__ = ["PluginInfo", "Registry"]


class Registry:
    """Names and what they stand for. `Registry.load` makes one; `register` adds to this one only.

    Every view is read-only and in one order, whatever order things were installed in.
    """

    def __init__(self, denied: Iterable[str] = ()) -> None:
        self._manager = offers.new_manager()
        self._plugins: list[Plugin] = []
        self._denied = tuple(denied)
        self._serial = 0
        self._generation = 0
        self._settled = Settled()
        self._stops: tuple[Stop, ...] = ()
        self._observers: tuple[Observer, ...] = ()
        self._constraints = Constraints()

    @classmethod
    def load(
        cls,
        *,
        plugins: Sequence[object] = (),
        autoload: bool = True,
        strict: bool = False,
        catalogue: Sequence[str | ModuleType] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Registry:
        """Load the built-ins, then every selected plugin.

        `plugins` holds names ("acme", an entry point, a module or a distribution), "no:name",
        "./file.py", classes, objects and modules. `autoload=False` loads no entry point but those
        named. DECODEKIT_PLUGINS, if set, lists the entry points that may load (empty: none). What
        no chain can do without (mandatory stages, the default profile and its pickers) cannot be
        denied.

        Raises PluginError for an unknown name, for a broken built-in, file or object, and with
        `strict` for anything that is quarantined or shadowed.
        """
        selection = Selection.parse(plugins)
        if catalogue is None:
            catalogue = importlib.import_module(".plugins.catalogue", PACKAGE).BUILT_INS
        sources = find(
            selection,
            catalogue=catalogue,
            autoload=autoload,
            environ=os.environ if environ is None else environ,
        )
        registry = cls(selection.denied)
        registry._plugins = [registry._load(source) for source in sources]
        registry._settle()
        registry._refuse_unknown_denials()
        registry._report(strict)
        return registry

    # --- changes ----------------------------------------------------------------------------------

    def register(self, plugin: object) -> None:
        """Add a Stage or Picker class, a Stop, Observer, Profile, Reviewer, or a module of hooks.

        Registering the same thing again does nothing; a class that was defined again replaces its
        former self. Raises PluginError if it cannot be loaded or its name is taken.
        """
        if self._registered(plugin) is not None:
            return
        source = of_object(plugin)
        former = [mine for mine in self._plugins if _is_redefined(mine, source, plugin)]
        kept = [mine for mine in self._plugins if mine not in former]
        before = self._plugins
        added = self._load(source)
        self._plugins = sorted([*kept, added], key=lambda mine: mine.source.rank)
        try:
            self._settle()
            self._refuse_faults_of(added)
        except PluginError:
            offers.unload(self._manager, added)
            self._plugins = before
            self._settle()
            raise
        for mine in former:
            offers.unload(self._manager, mine)

    def unregister(self, plugin: object) -> None:
        """Take out what `register` added, given itself or by name; running requests keep theirs.

        Raises PluginError if there is no such plugin, or if it was not added by `register`.
        """
        mine = self._registered(plugin)
        if mine is None:
            raise PluginError(f"{plugin!r} is not registered with this engine")
        self._plugins = [other for other in self._plugins if other is not mine]
        offers.unload(self._manager, mine)
        self._settle()

    def reload(self, name: str | None = None) -> list[str]:
        """Load local files again, all or the one of this name; return the names of the plugins.

        For new requests: running ones keep the classes that they were planned with until they end.
        A file that cannot be loaded, or whose names are taken, leaves its former self in place.
        Raises PluginError for that, and for what is no file: an installed package needs a new
        process.
        """
        mine = [plugin for plugin in self._plugins if plugin.source.origin is Origin.FILE]
        if name is not None:
            mine = [plugin for plugin in mine if fold(name) in plugin.source.names]
            if not mine:
                raise PluginError(
                    f"{name!r} is no local file among the plugins, and nothing else can be "
                    "reloaded; start a new process"
                )
        for former in mine:
            self._reload(former)
        return [plugin.source.name for plugin in mine]

    def _reload(self, former: Plugin) -> None:
        before = self._plugins
        added = self._load(former.source)
        self._plugins = [added if plugin is former else plugin for plugin in before]
        try:
            self._settle()
            self._refuse_faults_of(added)
        except PluginError:
            offers.unload(self._manager, added)
            self._plugins = before
            self._settle()
            raise
        offers.unload(self._manager, former)

    # --- what there is ----------------------------------------------------------------------------

    def stage(self, name: str) -> type[Stage]:
        """Return the stage or picker called `name`, or so by an alias.

        Raises ChainError with a suggestion, or with the reason why the stage is not available.
        """
        found = self._settled.stage_names.get(name)
        if found is not None:
            return found
        self._refuse_stage(name)

    @property
    def stages(self) -> Mapping[str, type[Stage]]:
        """Every stage, pickers included, by name."""
        return self._view("stage")

    @property
    def pickers(self) -> Mapping[str, type[Picker]]:
        """The pickers, by name."""
        pickers = {name: stage for name, stage in self.stages.items() if issubclass(stage, Picker)}
        return MappingProxyType(pickers)

    @property
    def stops(self) -> tuple[Stop, ...]:
        """The stop conditions, in the order in which they are asked."""
        return self._stops

    @property
    def observers(self) -> tuple[Observer, ...]:
        """The observers."""
        return self._observers

    @property
    def drivers(self) -> Mapping[str, Any]:
        """The drivers, by name."""
        return self._view("driver")

    @property
    def proposers(self) -> Mapping[str, Any]:
        """What guesses tokens for speculation, by name."""
        return self._view("proposer")

    @property
    def constraint_backends(self) -> Mapping[str, Any]:
        """The grammar compilers, by name."""
        return self._view("constraint backend")

    @property
    def attention_backends(self) -> tuple[Any, ...]:
        """The attention implementations, best first."""
        return tuple(self._view("attention backend").values())

    @property
    def profiles(self) -> Mapping[str, Profile]:
        """The named default chains."""
        return self._view("profile")

    @property
    def reviewers(self) -> tuple[Reviewer, ...]:
        """The rules that review plans, in the order in which they are asked."""
        return tuple(self._view("reviewer").values())

    @property
    def tool_parsers(self) -> Mapping[str, type[ToolParser]]:
        """The parsers of tool calls, by name."""
        return self._view("tool parser")

    @property
    def reasoning_parsers(self) -> Mapping[str, ReasoningParser]:
        """The parsers of reasoning, by name."""
        return self._view("reasoning parser")

    @property
    def commands(self) -> tuple[CommandSpec, ...]:
        """The sub-commands."""
        return tuple(self._view("command").values())

    @property
    def fields(self) -> Mapping[str, tuple[type[Stage], str]]:
        """Request field -> the stage it expands to and that stage's parameter."""
        return MappingProxyType(self._settled.fields)

    @property
    def lost_fields(self) -> Mapping[str, str]:
        """Request fields whose stage is not available -> why."""
        return MappingProxyType(self._settled.lost_fields)

    @property
    def constraints(self) -> Constraints:
        """The before/after of all stages, without contradictions."""
        return self._constraints

    @property
    def notes(self) -> tuple[str, ...]:
        """What else a blocked name takes away, and order wishes that contradict each other."""
        return (*self._settled.notes, *self._constraints.conflicts)

    @property
    def generation(self) -> int:
        """A number that changes whenever the set of plugins does."""
        return self._generation

    @property
    def fingerprint(self) -> str:
        """A hash of every active plugin with versions; two processes with equal ones run alike."""
        lines = []
        for plugin in self._plugins:
            own = sorted(
                f"{item.kind}:{item.name}:{getattr(item.thing, 'version', '')}"
                for item in plugin.items
                if self._settled.fault(plugin, item) is None
            )
            source = plugin.source
            lines.append(f"{source.distribution} {source.version} {source.name} {own}")
        return blake2b("\n".join(sorted(lines)).encode(), digest_size=8).hexdigest()

    def built_in(self, stage: type[Stage]) -> bool:
        """Say whether a stage class comes from the catalogue."""
        return stage in self._settled.built_ins

    def plugins(self) -> list[PluginInfo]:
        """Return every plugin that was found, active or not, and why not."""
        return [info_of(plugin, self._settled) for plugin in self._plugins]

    def doctor(self) -> list[Finding]:
        """Report what is wrong with the set, and what each plugin's own self-check says."""
        findings = []
        levels = {"quarantined": "error", "shadowed": "warn", "blocked": "info"}
        for info in self.plugins():
            if info.state in levels:
                remedy = f"block it with no:{info.name}" if info.state == "quarantined" else ""
                text = f"plugin {info.name!r} is {info.state}: {info.reason}"
                findings.append(Finding(levels[info.state], text, remedy))
        findings += [Finding("info", note) for note in self._settled.notes]
        findings += [Finding("warn", note) for note in self._constraints.conflicts]
        for plugin in self._plugins:
            findings += [
                Finding("warn", f"plugin {plugin.source.name!r}: {note}") for note in plugin.notes
            ]
            if plugin.subject is not None and offers.DOCTOR in plugin.hooks:
                findings += self._self_check(plugin)
        return findings

    # --- inside -----------------------------------------------------------------------------------

    def _registered(self, thing: object) -> Plugin | None:
        for plugin in self._plugins:
            if plugin.source.origin is not Origin.IN_PROCESS:
                continue
            names = plugin.source.names.union(*(map(fold, item.names) for item in plugin.items))
            if plugin.source.load() is thing or (isinstance(thing, str) and fold(thing) in names):
                return plugin
        return None

    def _view(self, kind: str) -> Mapping[str, Any]:
        return MappingProxyType(self._settled.active.get(kind, {}))

    def _load(self, source: Source) -> Plugin:
        # A blocked built-in is loaded all the same: it is ours, and its names are then known.
        if source.refusal is not None and source.origin is not Origin.BUILT_IN:
            return Plugin(source)
        self._serial += 1
        plugin = offers.load(self._manager, source, self._serial)
        if plugin.failure is not None and source.origin is not Origin.ENTRY_POINT:
            kind = "built-in plugin" if source.origin is Origin.BUILT_IN else "plugin"
            raise PluginError(
                f"{kind} {source.name!r} cannot be loaded: {brief(plugin.failure)}"
            ) from plugin.failure
        return plugin

    def _settle(self) -> None:
        settled = settle_names(self._plugins, self._denied)
        stages = settled.active.get("stage", {}).values()
        owners = {
            item.thing: plugin.source.label
            for plugin in self._plugins
            for item in plugin.items
            if item.kind == "stage"
        }
        self._constraints = settle(
            stages, owner=owners.__getitem__, is_built_in=settled.built_ins.__contains__
        )
        stops = settled.active.get("stop", {}).values()
        self._stops = tuple(sorted(stops, key=lambda stop: (stop.rank, stop.name)))
        self._observers = tuple(settled.active.get("observer", {}).values())
        self._settled = settled
        self._generation += 1

    def _refuse_unknown_denials(self) -> None:
        known = {name for plugin in self._plugins for name in plugin.source.names}
        known |= {fold(n) for plugin in self._plugins for item in plugin.items for n in item.names}
        for name in self._denied:
            if fold(name) not in known:
                hint = did_you_mean(fold(name), sorted(known))
                raise PluginError(f"plugins: no:{name} blocks nothing that is known{hint}")

    def _refuse_faults_of(self, plugin: Plugin) -> None:
        for item in plugin.items:
            fault = self._settled.fault(plugin, item)
            if fault is not None:
                raise PluginError(f"{item.kind} {item.name!r} cannot be used: {fault.reason}")

    def _report(self, strict: bool) -> None:
        for plugin in self._plugins:
            if plugin.source.origin is not Origin.ENTRY_POINT and plugin.source.refusal is None:
                self._refuse_faults_of_own(plugin)
        lost = [info for info in self.plugins() if info.state in ("quarantined", "shadowed")]
        troubles = [f"{info.name} ({info.state}: {info.reason})" for info in lost]
        troubles += self._constraints.conflicts
        if not troubles:
            return
        text = f"plugin trouble: {'; '.join(troubles)}"
        if strict:
            failures = [plugin.failure for plugin in self._plugins if plugin.failure is not None]
            raise PluginError(text) from (failures[0] if failures else None)
        warnings.warn(f"{text} (see `decodekit doctor`)", RuntimeWarning, stacklevel=3)

    def _refuse_faults_of_own(self, plugin: Plugin) -> None:
        """What was asked for outright, and what is ours, is not quarantined but refused."""
        for item in plugin.items:
            fault = self._settled.fault(plugin, item)
            if fault is not None and fault.state != "blocked":
                raise PluginError(
                    f"{item.kind} {item.name!r} of {plugin.source.label} cannot be used: "
                    f"{fault.reason}"
                )

    def _refuse_stage(self, name: str) -> NoReturn:
        for plugin in self._plugins:
            for item in plugin.items:
                if item.kind == "stage" and name in item.names:
                    fault = self._settled.fault(plugin, item)
                    if fault is not None:
                        raise ChainError(
                            f"stage {name!r} is {fault.state}: {fault.reason}",
                            parameter="chain",
                            value=name,
                        )
        failed = [plugin for plugin in self._plugins if plugin.failure is not None]
        refused = [plugin for plugin in self._plugins if plugin.source.refusal is not None]
        prefix = fold(name).partition(".")[0]
        for plugin in (*failed, *refused):
            if any(f"_{prefix}_" in f"_{name.replace('.', '_')}_" for name in plugin.source.names):
                info = info_of(plugin, self._settled)
                raise ChainError(
                    f"stage {name!r} is not available, since the plugin {plugin.source.label} "
                    f"is {info.state}: {info.reason}",
                    parameter="chain",
                    value=name,
                ) from plugin.failure
        hint = did_you_mean(name, self._settled.stage_names)
        if failed and not hint:
            hint = f"; quarantined plugins: {', '.join(plugin.source.name for plugin in failed)}"
        raise ChainError(f"unknown stage {name!r}{hint}", parameter="chain", value=name)

    def _self_check(self, plugin: Plugin) -> list[Finding]:
        try:
            found = offers.ask(self._manager, plugin, offers.DOCTOR)
        except (Exception, SystemExit) as error:
            text = f"the self-check of plugin {plugin.source.name!r} failed: {brief(error)}"
            return [Finding("error", text)]
        return [item for item in found if isinstance(item, Finding)]


def _is_redefined(mine: Plugin, source: Source, plugin: object) -> bool:
    """Say whether `plugin` is `mine` defined once more, as when a notebook's cell runs again."""
    if mine.source.origin is not Origin.IN_PROCESS or mine.source.name != source.name:
        return False
    old = mine.source.load()
    return type(old) is not type(plugin) or isinstance(plugin, type)

"""What `decodekit plugin check` is pointed at: a file, a package's folder, or an installed name."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import PluginError
from ...core.registry import Registry
from ...core.stage import Observer, Stage, Stop
from ...core.stage_rules import fault_of
from .check import check_observer, check_stage, check_stop
from .report import BROKEN, KEPT, Outcome, Report
from .variants import examples_of

GROUP = "decodekit"  # of entry points


@dataclass(frozen=True, slots=True)
class Subject:
    """A plugin as it was found."""

    name: str
    things: tuple[Any, ...]  # stage and picker classes, stops, observers
    is_package: bool  # its stages must carry a prefix


def find_subject(target: str) -> Subject:
    """Find what `target` names, load it and collect what it offers; PluginError otherwise."""
    path = Path(target).expanduser()
    if path.is_dir():
        return _of_folder(path)
    if path.suffix == ".py" or "/" in target:
        registry = Registry.load(plugins=[path], autoload=False, environ={})
        return Subject(str(path), _offered(registry, str(path)), is_package=False)
    registry = Registry.load(plugins=[target], autoload=False, environ={})
    known = [info for info in registry.plugins() if not info.built_in and info.state == "active"]
    if not known:
        states = [info for info in registry.plugins() if info.name == target]
        reason = f": {states[0].state}, {states[0].reason}" if states else ""
        raise PluginError(f"{target!r} offers nothing that runs{reason}")
    return Subject(target, _offered(registry, known[0].name), is_package=True)


def check_subject(
    subject: Subject, params: Mapping[str, list[dict[str, object]]] | None = None
) -> list[Report]:
    """Check everything that a plugin offers; `params` are examples by the name of a stage."""
    reports: list[Report] = []
    for thing in subject.things:
        own = (params or {}).get(thing.name, [])
        if isinstance(thing, type) and issubclass(thing, Stage):
            examples = own or examples_of(thing)
            report = check_stage(thing, examples=examples)
            reports.append(_with_name_law(report, thing) if subject.is_package else report)
        elif isinstance(thing, Stop):
            reports.append(check_stop(thing, request=own[0] if own else {}))
        elif isinstance(thing, Observer):
            reports.append(check_observer(thing, wish=own[0] if own else {}))
    if not reports:
        raise PluginError(f"{subject.name!r} offers no stage, picker, stop or observer to check")
    return reports


def _with_name_law(report: Report, stage: type[Stage]) -> Report:
    """Add what is asked of an installed package on top of a local file."""
    reason = fault_of(stage, is_local=False)
    title = "The registry takes it from an installed package."
    outcome = (
        Outcome("installed", title, KEPT)
        if reason is None
        else Outcome("installed", title, BROKEN, f"the registry refuses it: {reason}")
    )
    return Report(report.subject, (*report.outcomes, outcome), report.num_rows, report.microseconds)


def _of_folder(folder: Path) -> Subject:
    """Load the module that the package's own pyproject.toml names, from its sources."""
    settings = folder / "pyproject.toml"
    if not settings.is_file():
        raise PluginError(f"{str(folder)!r} has no pyproject.toml, so it is no package")
    try:
        project = tomllib.loads(settings.read_text(encoding="utf-8")).get("project", {})
    except tomllib.TOMLDecodeError as error:
        raise PluginError(f"{str(settings)!r} cannot be read: {error}") from None
    points = project.get("entry-points", {}).get(GROUP, {})
    if not points:
        raise PluginError(
            f"{str(settings)!r} has no [project.entry-points.{GROUP}], so nobody would find it"
        )
    roots = [str(root.resolve()) for root in (folder / "src", folder) if root.is_dir()]
    modules = [_imported(value, roots) for value in points.values()]
    registry = Registry.load(plugins=modules, autoload=False, environ={})
    things = tuple(thing for module in modules for thing in _offered(registry, module.__name__))
    return Subject(str(project.get("name", folder.name)), things, is_package=True)


def _imported(value: str, roots: list[str]) -> ModuleType:
    """Import a module from the sources, not from what is installed under the same name."""
    name, _, attribute = value.partition(":")
    top = name.partition(".")[0]
    for loaded in [each for each in sys.modules if each == top or each.startswith(f"{top}.")]:
        del sys.modules[loaded]
    sys.path[:0] = roots
    try:
        thing: Any = importlib.import_module(name)
    except Exception as error:
        raise PluginError(
            f"the entry point {value!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    finally:
        del sys.path[: len(roots)]
    if attribute:
        raise PluginError(f"the entry point {value!r} must name a module to be checked here")
    module: ModuleType = thing
    return module


def _offered(registry: Registry, name: str) -> tuple[Any, ...]:
    """Return what the plugin of this name offers in a registry where only it is not built in."""
    ours = Registry.load(autoload=False, environ={})
    stages = [stage for key, stage in sorted(registry.stages.items()) if key not in ours.stages]
    stops = [stop for stop in registry.stops if stop.name not in {s.name for s in ours.stops}]
    known = {observer.name for observer in ours.observers}
    observers = [each for each in registry.observers if each.name not in known]
    return (*stages, *stops, *observers)

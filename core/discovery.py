"""Find plugins and say which are to be loaded: the catalogue, entry points, files, objects.

Nothing third-party is imported here; each `Source` knows how to load itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b
from importlib import metadata
from pathlib import Path
from types import ModuleType

from .errors import PluginError, did_you_mean
from .hookspecs import PROJECT

GROUP = PROJECT  # the entry-point group
ALLOW_LIST = ("DECODEKIT_PLUGINS", "VLLM_PLUGINS")  # the first that is set counts
PACKAGE = __name__.rpartition(".")[0].rpartition(".")[0]


class Origin(IntEnum):
    """Where a plugin comes from."""

    BUILT_IN = 0
    IN_PROCESS = 1  # an object handed to `register` or in `plugins=[...]`
    FILE = 2
    ENTRY_POINT = 3


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a plugin that was found is not loaded."""

    state: str  # "blocked" | "quarantined"
    reason: str


@dataclass(frozen=True, slots=True)
class Source:
    """A plugin that was found. `names` are all it answers to, folded (see `fold`)."""

    name: str
    origin: Origin
    load: Callable[[], object]
    names: frozenset[str]
    distribution: str | None = None
    version: str | None = None
    explicit: bool = False
    refusal: Refusal | None = None

    @property
    def rank(self) -> tuple[int, str, str]:
        """Who keeps a contested name, lowest first: built-in, asked for by name, by distribution.

        Built-ins all rank alike here: the catalogue's own order decides between them.
        """
        if self.origin is Origin.BUILT_IN:
            return (0, "", "")
        return (1 if self.explicit else 2, fold(self.distribution or ""), self.name)

    @property
    def label(self) -> str:
        """The plugin in a message."""
        owner = f" of {self.distribution}" if self.distribution else ""
        return f"{self.name!r}{owner}"


@dataclass(frozen=True, slots=True)
class Selection:
    """`plugins=[...]` taken apart: names asked for, names denied, and things given outright."""

    wanted: tuple[str, ...] = ()
    denied: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    objects: tuple[object, ...] = ()

    @classmethod
    def parse(cls, plugins: Iterable[object]) -> Selection:
        """Sort "name", "no:name", "./file.py" and objects apart; PluginError on an empty name."""
        if isinstance(plugins, str):
            raise PluginError(f"plugins must be a list, got the string {plugins!r}")
        wanted: list[str] = []
        denied: list[str] = []
        files: list[Path] = []
        objects: list[object] = []
        for item in plugins:
            if isinstance(item, Path):
                files.append(item)
            elif not isinstance(item, str):
                objects.append(item)
            elif not item.strip() or item.strip() == "no:":
                raise PluginError(f"plugins must not hold an empty name, got {item!r}")
            elif item.startswith("no:"):
                denied.append(item[3:].strip())
            elif item.endswith(".py") or "/" in item:
                files.append(Path(item))
            else:
                wanted.append(item.strip())
        return cls(tuple(wanted), tuple(denied), tuple(files), tuple(objects))


def find(
    selection: Selection,
    *,
    catalogue: Sequence[str | ModuleType],
    autoload: bool,
    environ: Mapping[str, str],
) -> list[Source]:
    """Return every plugin there is, selected or refused, in the order of `Source.rank`.

    PluginError for a name asked for that nothing answers to, and for a file that does not exist.
    """
    sources = [_built_in(item) for item in catalogue]
    sources += [of_file(path) for path in selection.files]
    sources += [of_object(item) for item in selection.objects]
    sources += _select(_entry_points(), selection, autoload, environ)
    _refuse_unknown(selection.wanted, sources, "plugins")
    denied = {fold(name): name for name in selection.denied}
    sources = [_deny(source, denied) for source in sources]
    return _one_owner_a_name(sorted(sources, key=lambda source: source.rank))


def fold(name: str) -> str:
    """Spell a name so that `Acme-Top_A` and `acme_top_a` are the same."""
    return name.replace("-", "_").lower()


def of_object(item: object) -> Source:
    """Describe a class, an object or a module handed over in this process."""
    if isinstance(item, ModuleType):
        name = item.__name__
    else:
        kind = item if isinstance(item, type) else type(item)
        name = f"{kind.__module__}.{kind.__qualname__}"
    own = getattr(item, "name", None)
    names = {name, own} if isinstance(own, str) and own else {name}
    return Source(
        name=name,
        origin=Origin.IN_PROCESS,
        load=lambda: item,
        names=frozenset(map(fold, names)),
        explicit=True,
    )


def of_file(path: Path) -> Source:
    """Describe a Python file outside any package; PluginError if it does not exist."""
    path = path.expanduser()
    if not path.is_file():
        raise PluginError(f"plugin file {str(path)!r} does not exist")
    return Source(
        name=str(path),
        origin=Origin.FILE,
        load=lambda: _import_file(path),
        names=frozenset({fold(str(path)), fold(path.stem)}),
        explicit=True,
    )


def _import_file(path: Path) -> ModuleType:
    digest = blake2b(str(path.resolve()).encode(), digest_size=4).hexdigest()
    name = f"_decodekit_file_{path.stem}_{digest}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"plugin file {str(path)!r} is no Python file")
    module = importlib.util.module_from_spec(spec)
    former = sys.modules.get(name)
    sys.modules[name] = module  # pydantic looks annotations up there
    try:
        # Not through a cached .pyc: that of a file changed within the same second would be stale.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        if former is not None:
            sys.modules[name] = former
        raise
    linecache.checkcache(str(path))
    return module


def _built_in(item: str | ModuleType) -> Source:
    if isinstance(item, ModuleType):
        name = item.__name__
        return Source(name, Origin.BUILT_IN, lambda: item, frozenset({fold(name)}))
    names = frozenset({fold(item), fold(f"{PACKAGE}.{item}")})
    return Source(
        item, Origin.BUILT_IN, lambda: importlib.import_module(f".{item}", PACKAGE), names
    )


def _entry_points() -> list[Source]:
    return [_of_entry_point(point) for point in metadata.entry_points(group=GROUP)]


def _of_entry_point(point: metadata.EntryPoint) -> Source:
    dist = point.dist
    names = {point.name, point.module}
    if dist is not None:
        names.add(dist.name)
    return Source(
        name=point.name,
        origin=Origin.ENTRY_POINT,
        load=point.load,
        names=frozenset(map(fold, names)),
        distribution=None if dist is None else dist.name,
        version=None if dist is None else dist.version,
    )


def _select(
    sources: Sequence[Source], selection: Selection, autoload: bool, environ: Mapping[str, str]
) -> list[Source]:
    """Mark entry points as asked for by name, or as refused."""
    wanted = frozenset(map(fold, selection.wanted))
    variable = next((name for name in ALLOW_LIST if name in environ), None)
    allowed: frozenset[str] | None = None
    if variable is not None:
        listed = [name.strip() for name in environ[variable].split(",") if name.strip()]
        if variable == ALLOW_LIST[0]:  # vLLM's variable may name plugins of vLLM alone
            _refuse_unknown(listed, sources, variable)
        allowed = frozenset(map(fold, listed))
    return [_choose(source, wanted, allowed, variable, autoload) for source in sources]


def _choose(
    source: Source,
    wanted: frozenset[str],
    allowed: frozenset[str] | None,
    variable: str | None,
    autoload: bool,
) -> Source:
    if source.names & wanted:
        return replace(source, explicit=True)
    if not autoload:
        return replace(source, refusal=Refusal("blocked", "plugin autoload is off"))
    if allowed is not None and not source.names & allowed:
        return replace(source, refusal=Refusal("blocked", f"{variable} does not list it"))
    return source


def _refuse_unknown(names: Iterable[str], sources: Sequence[Source], where: str) -> None:
    known = sorted(set().union(*(source.names for source in sources)))
    for name in names:
        if fold(name) not in known:
            hint = did_you_mean(fold(name), known)
            raise PluginError(f"{where}: no plugin, module or distribution {name!r}{hint}")


def _deny(source: Source, denied: Mapping[str, str]) -> Source:
    """Refuse a source that is denied by name: deny beats allow."""
    for name in sorted(source.names & denied.keys()):
        if source.origin in (Origin.IN_PROCESS, Origin.FILE):
            # Its own name may be a stage's; then the stage is denied when names are settled.
            continue
        return replace(source, refusal=Refusal("blocked", f"no:{denied[name]}"))
    return source


def _one_owner_a_name(sources: Sequence[Source]) -> list[Source]:
    """Quarantine the later of two distributions that ship one entry-point name."""
    owners: dict[str, Source] = {}
    settled = []
    for source in sources:
        if source.origin is Origin.ENTRY_POINT and source.refusal is None:
            owner = owners.setdefault(source.name, source)
            if owner is not source:
                reason = f"the entry-point name {source.name!r} belongs to {owner.distribution}"
                source = replace(source, refusal=Refusal("quarantined", reason))
        settled.append(source)
    return settled

"""Presets: named sets of request fields, read from a TOML or JSON file.

A preset may extend another, and pin fields, which a request can then not change. Presets of a file
of one's own stand beside the shipped ones (`presets.toml`); one of the same name replaces it, and
may extend the one that it replaces.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as dataclass_fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ParameterTypeError, ValidationError, did_you_mean
from .param_rules import shown
from .request_checks import integer_keys
from .request_params import FrozenDict, fresh, frozen
from .sampling_rules import FIELD_RULES

if TYPE_CHECKING:
    from .params import SamplingParams

SHIPPED = Path(__file__).with_name("presets.toml")
BUILT_IN = "built in"  # the source of a shipped preset
LAYER = "preset "  # a layer of a plan's provenance is this and the preset's name

_OWN_KEYS = ("description", "extends", "pinned", "unset")
# Fields that mean nothing in a file: what names a preset, and what Python objects are for.
_NO_FIELDS = frozenset({"preset", "skip_clone", "output_text_buffer_length", "logits_processors"})


@dataclass(frozen=True, slots=True)
class Preset:
    """One preset with all that it inherits. Every mapping is keyed by request fields."""

    name: str
    description: str
    fields: Mapping[str, Any]  # frozen, as SamplingParams settled them
    pinned: Mapping[str, str]  # field -> the preset that pins it
    origins: Mapping[str, str]  # field -> the preset that sets it
    lineage: tuple[str, ...]  # its own name, then what it extends, nearest first
    source: str  # "built in" or the file

    @property
    def layer(self) -> str:
        """How a plan's provenance names it."""
        return f"{LAYER}{self.name}"


class Presets(Mapping[str, Preset]):
    """The presets of one file, beside the shipped ones."""

    def __init__(self, presets: Iterable[Preset]) -> None:
        self._presets = {preset.name: preset for preset in presets}

    @classmethod
    def load(cls, file: str | os.PathLike[str] | None = None) -> Presets:
        """Read `file` (.toml or .json), or give the shipped presets alone.

        Raises ValidationError, with a suggestion where a name is nearly right, for an unreadable
        file, an unknown key, a bad value, an unknown or circular `extends`, and a pinned field that
        an heir sets again.
        """
        return _shipped() if file is None else cls(_read(Path(file), _shipped()).values())

    def __getitem__(self, name: str) -> Preset:
        return self._presets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._presets)

    def __len__(self) -> int:
        return len(self._presets)

    def find(self, name: str) -> Preset:
        """Return the preset called `name`; ValidationError with a suggestion if there is none."""
        if name not in self._presets:
            raise ValidationError(
                f"preset must be one of {', '.join(self)}, got {shown(name)}"
                f"{did_you_mean(str(name), self)}",
                parameter="preset",
                value=name,
            )
        return self._presets[name]


# --- from a preset to parameters ------------------------------------------------------------------


def merged(preset: Preset, override: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of `preset` under those of `override`; a pinned one is refused."""
    for name, value in override.items():
        refuse_pinned(preset, name, value)
    return {**_thawed(preset.fields), **override}


def refuse_pinned(preset: Preset, name: str, value: object) -> None:
    """Raise ValidationError if `preset` pins the field `name` to another value than this."""
    if name not in preset.pinned:
        return
    has_value = name in preset.fields
    if has_value and frozen(FIELD_RULES[name](value)) == preset.fields[name]:
        return
    kept = f"pinned to {preset.fields[name]!r}" if has_value else "pinned"
    raise ValidationError(
        f"{name} is {kept} by the preset {preset.pinned[name]!r}, got {shown(value)}; "
        f"leave {name} out or use another preset",
        parameter=name,
        value=value,
    )


def resolve(params: SamplingParams, presets: Presets, server: Preset | None = None) -> None:
    """Lay the preset that `params` names, else the server's, under the fields that it set itself.

    Pins hold: those of the named preset, and those of the server's, which also stay where another
    preset takes its place. Changes `params`, and does so only once.
    """
    if server is not None:
        for name in params.own_fields:
            refuse_pinned(server, name, getattr(params, name))
    named = params.applied_preset
    if params.preset is not None and named is None:
        named = presets.find(params.preset)
        lay(params, named)
    if server is None:
        return
    if named is None:
        lay(params, server)
    else:
        lay(params, server, only=frozenset(server.pinned))


def lay(params: SamplingParams, preset: Preset, only: frozenset[str] | None = None) -> None:
    """Set the fields of `preset` (`only` those) that `params` did not set itself."""
    own = params.own_fields
    for name in own if only is None else ():
        refuse_pinned(preset, name, getattr(params, name))
    names = [name for name in preset.fields if name not in own and (only is None or name in only)]
    params.take_layer(
        {name: fresh(_thaw(preset.fields[name])) for name in names},
        preset.layer,
        preset=preset if only is None else None,
    )


# --- reading --------------------------------------------------------------------------------------


@cache
def _shipped() -> Presets:
    return Presets(_read(SHIPPED, Presets([]), source=BUILT_IN).values())


def _read(path: Path, below: Presets, source: str | None = None) -> dict[str, Preset]:
    """Return the presets of `path`, laid over those `below`."""
    tables = _tables(path)
    reader = _Reader(tables, below, str(path) if source is None else source)
    own = {name: reader.preset(name, ()) for name in tables}
    return {**below, **own}


def _tables(path: Path) -> Mapping[str, Mapping[str, Any]]:
    place = f"preset_file {str(path)!r}"
    if path.suffix not in (".toml", ".json"):
        _refuse(f"{place} must end in .toml or .json", path)
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        _refuse(f"{place} cannot be read: {error.strerror}", path)
    except ValueError as error:
        _refuse(f"{place} is no valid {path.suffix[1:].upper()}: {error}", path)
    if not isinstance(found, dict):
        _refuse(f"{place} must hold one table a preset, got {shown(found)}", path)
    for name, table in found.items():
        if not isinstance(table, dict):
            _refuse(f"{place}: preset {name!r} must be a table of fields, got {shown(table)}", path)
        if not name:
            _refuse(f"{place}: a preset must have a name", path)
    return found


def _refuse(sentence: str, value: object) -> Any:
    raise ValidationError(sentence, parameter="preset_file", value=str(value))


class _Reader:
    """Makes the presets of one file, each after what it extends."""

    def __init__(
        self, tables: Mapping[str, Mapping[str, Any]], below: Presets, source: str
    ) -> None:
        self._tables = tables
        self._below = below
        self._source = source
        self._made: dict[str, Preset] = {}

    def preset(self, name: str, path: tuple[str, ...]) -> Preset:
        """Return the preset `name`, reached over the heirs `path`."""
        if name in path:
            _refuse(f"presets extend each other in a circle: {' > '.join((*path, name))}", name)
        if name not in self._made:
            self._made[name] = self._make(name, (*path, name))
        return self._made[name]

    def _make(self, name: str, path: tuple[str, ...]) -> Preset:
        table = self._tables[name]
        place = f"preset {name!r}" + ("" if self._source == BUILT_IN else f" of {self._source}")
        parent = self._parent(place, table.get("extends"), name, path)
        given = self._own_fields(place, table)
        pinned = self._names(place, table, "pinned")
        unset = self._names(place, table, "unset")
        unset += [key for key, value in table.items() if value is None]  # JSON's null
        inherited = {} if parent is None else _thawed(parent.fields)
        if parent is not None:
            _refuse_pinned_by_parent(place, parent, given, unset)
        values = {**{key: v for key, v in inherited.items() if key not in unset}, **given}
        settled = self._settled(place, values)
        origins = {
            field: name if field in given or parent is None else parent.origins[field]
            for field in settled
        }
        pins = dict.fromkeys(pinned, name)
        if parent is not None:
            pins = {**pins, **parent.pinned}
        description = table.get("description", parent.description if parent else "")
        if not isinstance(description, str):
            _refuse(f"{place}: description must be a text, got {shown(description)}", description)
        return Preset(
            name=name,
            description=description,
            fields=FrozenDict(settled),
            pinned=FrozenDict(pins),
            origins=FrozenDict(origins),
            lineage=(name, *(parent.lineage if parent else ())),
            source=self._source,
        )

    def _parent(
        self, place: str, extends: object, name: str, path: tuple[str, ...]
    ) -> Preset | None:
        if extends is None:
            return None
        if not isinstance(extends, str):
            _refuse(f"{place}: extends must be the name of a preset, got {shown(extends)}", extends)
        assert isinstance(extends, str)
        if extends == name and name in self._below:  # one that replaces a shipped preset
            return self._below[name]
        if extends in self._tables:
            return self.preset(extends, path)
        if extends in self._below:
            return self._below[extends]
        known = [*self._tables, *self._below]
        return _refuse(  # type: ignore[no-any-return]
            f"{place} extends {extends!r}, which there is not (known: "
            f"{', '.join(dict.fromkeys(known))}){did_you_mean(extends, known)}",
            extends,
        )

    def _own_fields(self, place: str, table: Mapping[str, Any]) -> dict[str, Any]:
        from .params import FIELDS

        known = [*_OWN_KEYS, *sorted(FIELDS - _NO_FIELDS)]
        for key in table:
            if key not in known:
                raise ParameterTypeError(
                    f"{place} has no field {key!r}{did_you_mean(key, known)}",
                    parameter=key,
                    value=table[key],
                )
        given = {key: value for key, value in table.items() if key not in _OWN_KEYS}
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = integer_keys(given["logit_bias"])
        return {key: value for key, value in given.items() if value is not None}

    def _names(self, place: str, table: Mapping[str, Any], key: str) -> list[str]:
        from .params import FIELDS

        names = list(table.get(key, [])) if isinstance(table.get(key, []), list) else table[key]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            _refuse(f"{place}: {key} must be a list of field names, got {shown(names)}", names)
        for name in names:
            if name not in FIELDS - _NO_FIELDS:
                _refuse(
                    f"{place}: {key} names {name!r}, which is no field of a preset"
                    f"{did_you_mean(name, FIELDS - _NO_FIELDS)}",
                    name,
                )
        return names

    @staticmethod
    def _settled(place: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Check the fields together and return them normalised and frozen."""
        from .params import SamplingParams

        try:
            params = SamplingParams(**values)
        except ValidationError as error:
            raise type(error)(
                f"{place}: {error}", parameter=error.parameter, value=error.value
            ) from None
        return {name: frozen(getattr(params, name)) for name in values}


def _refuse_pinned_by_parent(
    place: str, parent: Preset, given: Mapping[str, Any], unset: Iterable[str]
) -> None:
    for field in (*given, *unset):
        if field not in parent.pinned:
            continue
        value = frozen(FIELD_RULES[field](given[field])) if field in given else None
        if value is None or value != parent.fields.get(field):
            _refuse(
                f"{place} cannot change {field}, which is pinned by the preset "
                f"{parent.pinned[field]!r} that it extends",
                value,
            )


def _thaw(value: Any) -> Any:
    """Return frozen containers as the ordinary ones that SamplingParams takes."""
    if isinstance(value, Mapping):
        return {key: _thaw(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_thaw(item) for item in value]
    return value


def plain_fields(preset: Preset) -> dict[str, Any]:
    """Return the fields of `preset` as JSON data."""
    return {name: _plain(value) for name, value in preset.fields.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if is_dataclass(value):
        told = [item for item in dataclass_fields(value) if item.init]
        return {
            item.name: _plain(getattr(value, item.name))
            for item in told
            if getattr(value, item.name) != item.default
        }
    return value


def _thawed(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _thaw(value) for name, value in fields.items()}

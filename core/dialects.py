"""Settings of other systems, turned into fields of SamplingParams by tables (`dialects.toml`).

Every setting is mapped, dropped for a reason that is told, or refused with what to do instead. What
has no flat field here becomes a stage of a `chain`, which then is in that system's order; what is
left flat takes its order from the system's profile.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from . import dialect_rules, dialect_stages
from .errors import ParameterTypeError, ValidationError, did_you_mean
from .param_rules import shown
from .porting import RULES, Port

TABLES = Path(__file__).with_name("dialects.toml")
GENERATE = "transformers"
RULE_FILES = (dialect_rules, dialect_stages)  # importing them fills the table of rules
Ported = tuple[dict[str, Any], tuple[str, ...]]  # fields of SamplingParams, and notes


@cache
def tables() -> Mapping[str, Mapping[str, Any]]:
    """Return the tables of every dialect."""
    return tomllib.loads(TABLES.read_text(encoding="utf-8"))


def from_dialect(dialect: str, settings: Mapping[str, Any], *, defaults: bool = False) -> Ported:
    """Return the fields and notes for another system's `settings`; None means not given.

    Raises ValidationError for an unknown dialect, an unknown setting and one that is refused.
    """
    known = tables()
    if dialect not in known:
        raise ValidationError(
            f"dialect must be one of {', '.join(known)}, got {shown(dialect)}"
            f"{did_you_mean(str(dialect), known)}",
            parameter="dialect",
            value=dialect,
        )
    if not isinstance(settings, Mapping):
        raise ParameterTypeError(
            f"settings must be a mapping from names to values, got {shown(settings)}",
            parameter="settings",
            value=settings,
        )
    table = known[dialect]
    given = _given(dialect, table, settings)
    assumed: Mapping[str, Any] = table.get("defaults", {}) if defaults else {}
    port = Port(dialect, table, {**assumed, **given}, frozenset(given))
    # What asks for the greedy pick comes first, as it decides what else is used.
    for key in sorted(port.settings, key=lambda name: name != "do_sample"):
        _translate(port, key, port.settings[key], table["keys"].get(key))
    return port.finish()


def from_generate(config: Any, kwargs: Mapping[str, Any]) -> Ported:
    """Return the fields and notes for a call of transformers' generate with these arguments."""
    if config is not None and not isinstance(config, Mapping):
        if not hasattr(config, "do_sample"):
            raise ParameterTypeError(
                f"config must be a GenerationConfig or a dict of one, got {shown(config)}",
                parameter="config",
                value=config,
            )
        config = vars(config)
    own = {key: value for key, value in (config or {}).items() if not key.startswith("_")}
    return from_dialect(GENERATE, {**own, **kwargs}, defaults=True)


def _given(dialect: str, table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is set, by the table's own names; unknown and doubled names are refused."""
    from .params import FIELD_NAMES

    keys, aliases = table["keys"], table.get("aliases", {})
    known = [*keys, *aliases, *(FIELD_NAMES if table.get("own_names") else ())]
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in known:
            raise ParameterTypeError(
                f"{dialect} has no setting {name!r} that is known here"
                f"{did_you_mean(str(name), known)}",
                parameter=str(name),
                value=value,
            )
        key = aliases.get(name, name)
        if value is None:
            continue
        if key in found and found[key] != value:
            raise ValidationError(
                f"{name} and another spelling of it are both given: {shown(value)} and "
                f"{shown(found[key])}",
                parameter=str(name),
                value=value,
            )
        found[key] = value
    return found


def _translate(port: Port, key: str, value: Any, row: Any) -> None:
    if row is None:  # a field of our own name
        port.set(key, key, value)
        return
    if isinstance(row, str):
        port.set(key, row, value)
        return
    if any(_same(value, off) for off in row.get("off", ())):
        return
    if "refuse" in row:
        _refuse(port.dialect, key, value, row["refuse"])
    if row.get("sampling") and port.is_greedy:
        if key in port.given:
            port.note(f"{key} is not used, since do_sample is off")
        return
    if "note" in row:
        port.note(f"{key}: {row['note']}")
    if "drop" in row:
        if key in port.given:
            port.note(f"{key} is left out: {row['drop']}")
        return
    if "by" in row:
        name, *arguments = row["by"].split(":")
        RULES[name](port, key, value, *arguments)
        return
    port.set(key, row["to"], value / row["per"] if "per" in row else value)


def _same(value: Any, off: Any) -> bool:
    """Say whether a value is one that asks for nothing; True and 1 are told apart."""
    return isinstance(value, bool) == isinstance(off, bool) and bool(value == off)


def _refuse(dialect: str, key: str, value: object, instead: str) -> NoReturn:
    raise ValidationError(
        f"{key}={shown(value)} of {dialect} has no counterpart here: {instead}",
        parameter=key,
        value=value,
    )

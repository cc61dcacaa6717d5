"""The columns of a comparison: each is a set of request fields with a name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....core.errors import ValidationError, did_you_mean
from ....core.params import DEFAULTS

MOST_COLUMNS = 64


@dataclass(frozen=True, slots=True)
class Column:
    """Request fields under a name; in a sweep also which field was moved, and to what."""

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    varied: str | None = None
    value: Any = None


def columns_of(
    *,
    profiles: str | None = None,
    presets: str | None = None,
    given: Sequence[str] = (),
    baseline: Sequence[str] = (),
    vary: Sequence[str] = (),
) -> list[Column]:
    """Read the options; the first column is what the others are compared with.

    `given` are NAME=JSON objects, `baseline` are FIELD=VALUE, `vary` are FIELD=VALUE,VALUE,...
    Raises ValidationError for a bad one, for equal names, and where there is nothing to compare.
    """
    start = dict(_assignment("--baseline", text) for text in baseline)
    columns: list[Column] = []
    if baseline or vary:
        columns.append(Column("baseline", start))
    columns += [Column(name, {**start, "profile": name}) for name in _names("--profiles", profiles)]
    columns += [Column(name, {**start, "preset": name}) for name in _names("--presets", presets)]
    columns += [_column(text, start) for text in given]
    for text in vary:
        columns += _sweep(text, start)
    names = [column.name for column in columns]
    for name in names:
        if names.count(name) > 1:
            raise ValidationError(
                f"two columns are called {name!r}; each needs a name of its own",
                parameter="columns",
                value=name,
            )
    if not 2 <= len(columns) <= MOST_COLUMNS:
        raise ValidationError(
            f"a comparison needs 2 to {MOST_COLUMNS} columns, got {len(columns)}; they come from "
            "--profiles, --presets, --column, and --baseline with --vary",
            parameter="columns",
            value=len(columns),
        )
    return columns


def seeds_of(text: str) -> list[int]:
    """Read `1,2,3`; ValidationError unless all are different integers."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or len(set(seeds)) != len(seeds):
        raise ValidationError(
            f"--seeds must be different integers with commas between, got {text!r}",
            parameter="seeds",
            value=text,
        )
    return seeds


def _names(option: str, text: str | None) -> list[str]:
    if text is None:
        return []
    names = [part.strip() for part in text.split(",")]
    if not all(names):
        raise ValidationError(
            f"{option} must be names with commas between, got {text!r}",
            parameter=option.removeprefix("--"),
            value=text,
        )
    return names


def _column(text: str, start: Mapping[str, Any]) -> Column:
    name, equals, body = text.partition("=")
    try:
        fields = json.loads(body)
    except ValueError:
        fields = None
    if not name.strip() or not equals or not isinstance(fields, dict):
        raise ValidationError(
            f"--column must be NAME={{JSON object of request fields}}, got {text!r}",
            parameter="column",
            value=text,
        )
    for key in fields:
        _known("--column", key)
    return Column(name.strip(), {**start, **fields})


def _sweep(text: str, start: Mapping[str, Any]) -> list[Column]:
    """One column for each value of one field; a JSON list may be given for values with commas."""
    name, equals, values = text.partition("=")
    name = name.strip()
    if not equals or not values.strip():
        raise ValidationError(
            f"--vary must be FIELD=VALUE,VALUE,..., got {text!r}", parameter="vary", value=text
        )
    _known("--vary", name)
    listed = _value(values)
    if not isinstance(listed, list):
        listed = [_value(part) for part in values.split(",")]
    return [
        Column(f"{name}={_spelled(value)}", {**start, name: value}, name, value) for value in listed
    ]


def _assignment(option: str, text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValidationError(
            f"{option} must be FIELD=VALUE, got {text!r}",
            parameter=option.removeprefix("--"),
            value=text,
        )
    _known(option, name.strip())
    return name.strip(), _value(value)


def _known(option: str, name: str) -> None:
    if name not in DEFAULTS:
        raise ValidationError(
            f"{option} names {name!r}, which is no request field{did_you_mean(name, DEFAULTS)}",
            parameter=option.removeprefix("--"),
            value=name,
        )


def _value(text: str) -> Any:
    """Read a JSON value or a number such as `.7`; anything else is a word."""
    text = text.strip()
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)

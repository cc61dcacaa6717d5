"""Request parameters as JSON, for replay bundles; what JSON cannot hold is named, never guessed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from enum import Enum
from functools import cache, partial
from typing import Any

from pydantic import BaseModel

from .params import FIELD_NAMES, SamplingParams
from .request_params import NEUTRAL, RequestParams
from .stage import Observer, Stage

FLOAT = "$float"  # {"$float": "-inf"}, as JSON has no infinity
# Fields that say how an output is told, not what it is, and what others are derived from.
SILENT = frozenset({"output_kind", "output_text_buffer_length", "skip_clone", "trace", "preset"})


class Unwritable(Exception):
    """A value that JSON cannot hold; the text says what it is."""


def written_fields(params: RequestParams) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the fields that differ from their defaults as JSON, and those that cannot be written.

    The second maps a field to what stands in it, such as "function mymodule.penalise".
    """
    written: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    defaults = _defaults()
    for name in FIELD_NAMES:
        if name in SILENT or not hasattr(params, name):
            continue
        value = getattr(params, name)
        if value == getattr(defaults, name) and name not in params.fields_set:
            continue
        if name == "best_of" and value == params.n:
            continue
        if name == "temperature" and params.greedy:
            value = 0.0
        elif value is None:
            value = next(iter(NEUTRAL.get(name, ())), None)
        if name == "observers":  # objects change no token
            value = [item for item in value or () if not isinstance(item, Observer)]
        try:
            written[name] = to_json(value)
        except Unwritable as error:
            left_out[name] = str(error)
    return written, left_out


def read_fields(written: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords of SamplingParams from what `written_fields` made."""
    found = {name: from_json(value) for name, value in written.items()}
    if found.get("logit_bias"):
        found["logit_bias"] = {int(key): value for key, value in found["logit_bias"].items()}
    return found


def to_json(value: Any, *, lenient: bool = False) -> Any:
    """Return `value` as JSON data; Unwritable for callables, tensors and classes.

    `lenient`: what cannot be written becomes a text that names it.
    """
    plain = partial(to_json, lenient=lenient)
    if value is None or isinstance(value, bool | int | str):
        return value.value if isinstance(value, Enum) else value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: repr(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, Stage):
        return _stage(value)
    if isinstance(value, type) and issubclass(value, BaseModel):
        return value.model_json_schema()
    if isinstance(value, BaseModel):
        return plain({name: getattr(value, name) for name in value.model_fields_set})
    if is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: plain(getattr(value, item.name))
            for item in fields_of(value)
            if item.init and getattr(value, item.name) != item.default
        }
    if lenient:
        return f"<{_called(value)}>"
    raise Unwritable(_called(value))


def from_json(value: Any) -> Any:
    """Undo `to_json` as far as a request needs it."""
    if isinstance(value, dict):
        if set(value) == {FLOAT}:
            return float(value[FLOAT])
        return {key: from_json(item) for key, item in value.items()}
    return [from_json(item) for item in value] if isinstance(value, list) else value


def _stage(stage: Stage) -> dict[str, Any]:
    """Write a stage object as the entry of a chain; it is found again by its name."""
    entry: dict[str, Any] = {"stage": stage.name}
    if stage.id:
        entry["id"] = stage.id
    try:
        given: dict[str, Any] = to_json(stage.params)
    except Unwritable as error:
        raise Unwritable(f"stage {stage.name!r} with {error}") from None
    return entry | given


def _called(value: object) -> str:
    """Say what an object is and where its code stands."""
    named = value if hasattr(value, "__qualname__") else type(value)
    place = f"{named.__module__}.{named.__qualname__}"
    if named is not value:
        return f"an object of {place}"
    return f"class {place}" if isinstance(value, type) else f"function {place}"


@cache
def _defaults() -> RequestParams:
    return SamplingParams().snapshot()

"""The JSON schema of a request: every flat field, and a chain of the stages that are installed.

Draft 2020-12. What needs no schema to be read is under `x-decodekit`: for each stage its kind, its
place in the default order, a line of its docs and its defaults; profiles, presets and the other
plugins by name. A server publishes it, and an editor of chains is made from it.

A document that fits is accepted by `SamplingParams.from_optional`, but for what a schema cannot say
(`x-decodekit.relations`), and then by the planner, but for what only an engine knows: its
vocabulary, tokenizer and limits. `null` is a field's default everywhere.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, PydanticJsonSchemaWarning

from .draft import MAX_STAGES
from .order import Order
from .params import DEFAULTS
from .presets import Presets, plain_fields
from .registry import Registry
from .request_fields import FIELDS, NOT_IN_JSON, OFF, RELATIONS, Json, nullable, rules
from .stage import Observer, Picker, Stage, StageParams

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TITLE = "decodekit request"
# Classes of ours that are no pydantic models: their own schema says more than pydantic's guess.
BETTER_KNOWN = {"StructuredOutputsParams": FIELDS["structured_outputs"].schema}


def request_schema(
    registry: Registry | None = None,
    *,
    presets: Presets | None = None,
    max_n: int | None = None,
) -> Json:
    """Return the schema of a request's fields as plain JSON data.

    `registry` says which stages, profiles and other plugins there are; by default those that an
    engine of this process would load. `presets` are the shipped ones unless given. `max_n` bounds
    `n` where it is lower than the default bound.
    """
    registry = Registry.load() if registry is None else registry
    presets = Presets.load() if presets is None else presets
    definitions: Json = {}
    stages = {
        name: stage for name, stage in registry.stages.items() if not issubclass(stage, Picker)
    }
    for name, stage in registry.stages.items():
        definitions[f"stage.{name}"] = _entry("stage", name, stage.aliases, stage.Params, stage)
    properties = {name: _field(name) for name in DEFAULTS if name not in NOT_IN_JSON}
    if max_n is not None:
        properties["n"]["maximum"] = max_n
    properties["chain"] |= {
        "type": ["array", "null"],
        "maxItems": MAX_STAGES,
        "items": {
            "anyOf": [
                {"enum": _spellings(registry.stages)},
                {
                    "type": "object",
                    "required": ["stage"],
                    "discriminator": {"propertyName": "stage"},
                    "oneOf": [{"$ref": f"#/$defs/stage.{name}"} for name in registry.stages],
                },
            ]
        },
    }
    _add_pickers(registry, properties, definitions)
    _add_observers(registry, properties, definitions)
    properties["profile"] |= {"enum": [*registry.profiles, None]}
    properties["preset"] |= {"enum": [*presets, None]}
    for name, reason in registry.lost_fields.items():
        properties[name] = {"const": None, "description": f"Not available: {reason}."}
    return {
        "$schema": DIALECT,
        "title": TITLE,
        "description": "How one request is decoded. null is the default of a field.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "allOf": rules(),
        "$defs": definitions,
        "x-decodekit": _catalogue(registry, presets, stages),
    }


def _field(name: str) -> Json:
    row = FIELDS.get(name)
    schema: Json = {} if row is None else {**nullable(row.schema), "description": row.text}
    default = DEFAULTS[name]
    if default is None or isinstance(default, bool | int | float | str):
        # An IntEnum is its number in JSON.
        schema["default"] = default if not isinstance(default, IntEnum) else default.value
    if name in OFF:
        schema["x-off"] = list(OFF[name])
    return schema


def _spellings(stages: Mapping[str, type[Stage]]) -> list[str]:
    """Names and aliases of the stages that need no parameter, so that a bare name will do."""
    return [
        spelling
        for name, stage in stages.items()
        if not any(field.is_required() for field in stage.Params.model_fields.values())
        for spelling in (name, *stage.aliases)
    ]


def _entry(
    key: str, name: str, aliases: Iterable[str], params: type[StageParams], owner: Any
) -> Json:
    """The schema of one entry: its name under `key`, an id, and its parameters."""
    names = [name, *aliases]
    found = _parameters(params)
    properties = {
        key: {"const": name} if len(names) == 1 else {"enum": names},
        "id": {
            "type": ["string", "null"],
            "minLength": 1,
            "description": "Tells two of one kind apart.",
        },
        **found.pop("properties", {}),
    }
    if key != "stage":
        del properties["id"]
    return {
        "type": "object",
        "title": name,
        "description": first_line(owner),
        "properties": properties,
        "required": [key, *found.pop("required", [])],
        "additionalProperties": False,
        **found,
    }


class _Generator(GenerateJsonSchema):
    """Lets nothing through where JSON has no form for a value, and says which keys are ids."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}

    def callable_schema(self, schema: Any) -> Json:
        return {"not": {}, "description": "A Python object; it has no form in JSON."}

    def dict_schema(self, schema: Any) -> Json:
        found = super().dict_schema(schema)
        if schema.get("keys_schema", {}).get("type") == "int":  # JSON's keys are text
            found["propertyNames"] = {"pattern": "^[0-9]+$"}
        return found

    def is_instance_schema(self, schema: Any) -> Json:
        return self.callable_schema(schema)


def _parameters(params: type[StageParams]) -> Json:
    """The schema of a parameter model, references resolved into it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PydanticJsonSchemaWarning)
        found = TypeAdapter(params).json_schema(schema_generator=_Generator)
    resolved: Json = _resolved(found, found.pop("$defs", {}))
    for unwanted in ("title", "description", "type", "additionalProperties"):
        resolved.pop(unwanted, None)
    for value in resolved.get("properties", {}).values():
        value.pop("title", None)
    return resolved


def _resolved(schema: Any, definitions: Mapping[str, Any]) -> Any:
    if isinstance(schema, dict):
        if "$ref" in schema:
            name = schema["$ref"].rsplit("/", 1)[1]
            target = BETTER_KNOWN.get(name) or definitions[name]
            return _resolved({**target, **{k: v for k, v in schema.items() if k != "$ref"}},
                             definitions)  # fmt: skip
        return {key: _resolved(value, definitions) for key, value in schema.items()}
    if isinstance(schema, list):
        return [_resolved(value, definitions) for value in schema]
    return schema


def _add_pickers(registry: Registry, properties: Json, definitions: Json) -> None:
    for name, picker in registry.pickers.items():
        definitions[f"picker.{name}"] = _entry(
            "picker", name, picker.aliases, picker.Params, picker
        )
    properties["picker"] |= _one_of(
        "picker", _spellings(registry.pickers), [f"picker.{name}" for name in registry.pickers]
    )


def _add_observers(registry: Registry, properties: Json, definitions: Json) -> None:
    for observer in registry.observers:
        definitions[f"observer.{observer.name}"] = _entry(
            "observer", observer.name, (), observer.Params, observer
        )
    names = [observer.name for observer in registry.observers]
    properties["observers"] |= {
        "type": ["array", "null"],
        "items": _one_of("observer", names, [f"observer.{name}" for name in names], none=False),
    }


def _one_of(key: str, names: list[str], references: list[str], *, none: bool = True) -> Json:
    """A name, or an object that has one under `key`."""
    choices: list[Json] = [
        {"enum": names},
        {
            "type": "object",
            "required": [key],
            "discriminator": {"propertyName": key},
            "oneOf": [{"$ref": f"#/$defs/{reference}"} for reference in references],
        },
    ]
    return {"anyOf": [*choices, {"type": "null"}] if none else choices}


# --- what an editor wants to know -----------------------------------------------------------------


def _catalogue(registry: Registry, presets: Presets, stages: Mapping[str, type[Stage]]) -> Json:
    profile = registry.profiles["default"]
    arranged = Order(registry.stages.values(), profile, registry.constraints).arrange(
        list(stages.values())
    )
    place = {stage.name: number for number, stage in enumerate(arranged, start=1)}
    return {
        "relations": list(RELATIONS),
        "stages": {
            name: stage_card(stage, place.get(name), registry)
            for name, stage in registry.stages.items()
        },
        "profiles": {
            name: {
                "title": item.description,
                "order": [stage for stage in item.order if stage in registry.stages],
                "picker": item.picker,
                "greedy": item.greedy,
                "settings": {stage: dict(values) for stage, values in item.settings.items()},
                "fields": {field: list(target) for field, target in item.fields.items()},
                "notes": list(item.notes),
            }
            for name, item in registry.profiles.items()
        },
        "presets": {
            name: {
                "title": preset.description,
                "fields": plain_fields(preset),
                "pinned": sorted(preset.pinned),
                "extends": list(preset.lineage[1:]),
            }
            for name, preset in presets.items()
        },
        "observers": {item.name: {"title": first_line(item)} for item in registry.observers},
        "stops": {stop.name: {"title": first_line(stop)} for stop in registry.stops},
        "drivers": {name: {"title": first_line(item)} for name, item in registry.drivers.items()},
        "constraint_backends": sorted(registry.constraint_backends),
        "reviewers": {item.name: {"title": first_line(item)} for item in registry.reviewers},
        "fingerprint": registry.fingerprint,
    }


def stage_card(stage: type[Stage], place: int | None, registry: Registry) -> Json:
    """Return what an editor shows of a stage; `place` is its number in the default order."""
    defaults = {
        name: plain(field.get_default(call_default_factory=True))
        for name, field in stage.Params.model_fields.items()
        if not field.is_required()
    }
    return {
        "kind": stage.kind.name,
        "order": place,
        "title": first_line(stage),
        "docs": first_paragraph(inspect.getmodule(stage)),
        "defaults": defaults,
        "fields": dict(stage.fields),
        "aliases": list(stage.aliases),
        "mandatory": stage.mandatory,
        "built_in": registry.built_in(stage),
        "version": stage.version,
    }


def first_line(thing: Any) -> str:
    """Return the first line of a docstring, without its full stop."""
    owner = thing if isinstance(thing, type) else type(thing)
    text = inspect.getdoc(owner) or ""
    if any(text == inspect.getdoc(base) for base in (Stage, Picker, Observer)):
        return ""  # inherited, so it says nothing of this one
    return text.partition("\n")[0].rstrip(".")


def first_paragraph(module: Any) -> str:
    """Return the first paragraph of a module's docstring as one line."""
    text = inspect.getdoc(module) or ""
    return " ".join(text.partition("\n\n")[0].split())


def plain(value: Any) -> Any:
    """Return `value` as JSON data; what has no form there is shown as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return repr(value)

"""A body becomes SamplingParams: the request's fields, then the preset's, then the model's."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...core.params import RequestOutputKind, SamplingParams
from ...core.presets import resolve
from ...core.stage import Kind
from .errors import bad
from .protocol import SAMPLING_FIELDS, Common, Sampling
from .state import ServerState

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
GENERATION_CONFIG = "generation_config"  # a layer of a plan's provenance
SERVER = "server"  # another: what the server fills in
OPEN = 2**31  # stands for no limit until the length is settled


def own_fields(body: Sampling) -> dict[str, Any]:
    """Return the fields of SamplingParams that the body gives; null is not given."""
    given = {name: getattr(body, name) for name in SAMPLING_FIELDS}
    given = {name: value for name, value in given.items() if value is not None}
    if body.vllm_xargs is not None:
        given["extra_args"] = {**(body.extra_args or {}), **body.vllm_xargs}
    if isinstance(body, Common):
        if body.kv_transfer_params:
            raise bad("kv_transfer_params must be empty: this version moves no cache",
                      "kv_transfer_params")  # fmt: skip
        constraint = structured_outputs(body.structured_outputs, body.response_format)
        given.pop("structured_outputs", None)
        if constraint is not None:
            given["structured_outputs"] = constraint
        if body.use_beam_search and body.stream:
            raise bad("use_beam_search must be false with stream", "use_beam_search")
        if body.stream_options is not None and not body.stream:
            raise bad("stream_options needs stream", "stream_options")
        if body.stream and body.prompt_logprobs:
            raise bad(
                f"prompt_logprobs must be 0 or absent with stream, got {body.prompt_logprobs}",
                "prompt_logprobs",
            )
    return given


@dataclass(frozen=True, slots=True)
class Length:
    """How long an answer may be: the client's own number, else `default` (None: no end).

    `is_open`: the client asked for as much as the context holds, so that no default counts.
    """

    asked: int | None
    prompt_len: int
    default: int | None = None
    is_open: bool = False


def make_params(
    state: ServerState, model: str, given: Mapping[str, Any], length: Length, notes: list[str]
) -> SamplingParams:
    """Lay the request's fields over the preset of the served name and the model's own defaults.

    Warnings become `notes`. ValidationError for a bad value.
    """
    asked = OPEN if length.asked is None else length.asked
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = SamplingParams.from_optional(**{**given, "max_tokens": asked})
        if length.asked is None:
            params.note_layer(("max_tokens",), SERVER)
        parts = state.engine.engine.parts
        state.policy.check_stages(model, params, parts.registry)
        resolve(params, parts.presets, state.policy.preset(model) or parts.preset)
        _fill(state, params)
        _settle_length(state, params, length, notes)
    notes += [str(item.message) for item in caught]
    return params


def _fill(state: ServerState, params: SamplingParams) -> None:
    """Add the generation config's values where nothing is set, and where the chain has a place."""
    sources = params.sources
    missing = {
        name: value
        for name, value in state.engine.engine.sampling_defaults.items()
        if name not in params.fields_set or sources.get(name) == SERVER
    }
    if params.chain is not None:
        listed = {_stage_name(item) for item in params.chain}
        for name, (stage, _) in state.engine.engine.parts.registry.fields.items():
            is_free = stage.kind in (Kind.MASK, Kind.FORCE)  # these join any chain
            if not is_free and listed.isdisjoint((stage.name, *stage.aliases)):
                missing.pop(name, None)
    if missing:
        params.take_layer(missing, GENERATION_CONFIG)


def _stage_name(item: object) -> str:
    name = item.get("stage") if isinstance(item, Mapping) else item
    return name if isinstance(name, str) else str(getattr(item, "name", ""))


# --- how long -------------------------------------------------------------------------------------


def _settle_length(
    state: ServerState, params: SamplingParams, length: Length, notes: list[str]
) -> None:
    """Give `max_tokens` its value.

    The client's own number must fit the context and the server's hard limit; a default is cut to
    the limit instead, and the context ends it by itself.
    """
    limit = state.settings.max_tokens_limit
    if length.asked is not None:
        _check_asked(state, length.asked, length.prompt_len)
    wanted = params.max_tokens
    if params.sources.get("max_tokens") == SERVER or length.is_open:
        served = state.settings.default_max_tokens
        wanted = None if length.is_open else length.default if served is None else served
    bounds = [value for value in (wanted, limit, _config_cap(state)) if value is not None]
    final = min(bounds, default=None)
    if length.asked is not None and final is not None and final < length.asked:
        notes.append(f"max_tokens is cut from {length.asked} to {final} by the generation config")
    if final != params.max_tokens:
        params.take_layer({"max_tokens": final}, SERVER)


def _check_asked(state: ServerState, asked: int, prompt_len: int) -> None:
    limit, longest = state.settings.max_tokens_limit, state.max_model_len
    if limit is not None and asked > limit:
        raise bad(f"max_tokens must be at most {limit} on this server, got {asked}", "max_tokens")
    if 0 < prompt_len < longest < prompt_len + asked:
        raise bad(
            f"the prompt has {prompt_len} tokens and max_tokens is {asked}, but together they must "
            f"be at most {longest}, the longest that this model takes",
            "max_tokens",
        )


def _config_cap(state: ServerState) -> int | None:
    """Return the generation config's max_new_tokens where the operator chose that config."""
    config = state.engine.engine.config
    is_chosen = config.generation_config not in ("auto", "vllm")
    if is_chosen or "max_new_tokens" in config.override_generation_config:
        cap: int | None = state.engine.engine.sampling_defaults.get("max_tokens")
        return cap
    return None


# --- structured output ----------------------------------------------------------------------------


def structured_outputs(
    given: Mapping[str, Any] | None, response_format: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Join `structured_outputs` and `response_format` into fields of StructuredOutputsParams."""
    fields = dict(given or {})
    if isinstance(fields.get("structural_tag"), dict):
        fields["structural_tag"] = json.dumps(fields["structural_tag"])
    fields.update(_of_format(response_format))
    constraints = [name for name in CONSTRAINTS if fields.get(name) is not None]
    if given is None and not constraints:
        return None
    if len(constraints) > 1:
        raise bad(
            f"structured_outputs must have one constraint, got {' and '.join(constraints)}"
            + (" (response_format is one too)" if response_format else ""),
            "structured_outputs",
        )
    return fields


def _of_format(response_format: Mapping[str, Any] | None) -> dict[str, Any]:
    if response_format is None:
        return {}
    kind = response_format.get("type")
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind == "json_schema":
        named = response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if schema is None:
            raise bad(
                "response_format of type 'json_schema' needs json_schema.schema", "response_format"
            )
        assert isinstance(named, Mapping)
        return {"json": schema, **({"strict": False} if named.get("strict") is False else {})}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(dict(response_format))}
    raise bad(
        "response_format.type must be one of 'text', 'json_object', 'json_schema', "
        f"'structural_tag', got {kind!r}",
        "response_format",
    )


# --- as JSON --------------------------------------------------------------------------------------


def params_as_json(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that are set, as /inference/v1/generate takes them."""
    names = (params.fields_set | {"max_tokens"}) - {"output_kind", "skip_clone", "preset"}
    return {name: _plain(getattr(params, name)) for name in sorted(names)}


def params_of_json(
    state: ServerState, model: str, given: Mapping[str, Any], prompt_len: int, notes: list[str]
) -> SamplingParams:
    """Make the parameters of /inference/v1/generate; unknown keys are refused with a suggestion."""
    for name in ("logits_processors", "output_tensors", "output_kind", "skip_clone"):
        if given.get(name) is not None:
            raise bad(f"sampling_params.{name} is for Python only", f"sampling_params.{name}")
    own = {name: value for name, value in given.items() if name != "max_tokens"}
    asked = given.get("max_tokens", 16)
    length = Length(asked, prompt_len, is_open=asked is None)
    return make_params(state, model, own, length, notes)


def _plain(value: Any) -> Any:
    if isinstance(value, RequestOutputKind):
        return int(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        names = [name for name in value.__dataclass_fields__ if not name.startswith("_")]
        own = {name: _plain(getattr(value, name)) for name in names}
        return {name: item for name, item in own.items() if item is not None}
    return value

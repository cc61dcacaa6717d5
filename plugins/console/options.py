"""How the engine is made and how a request is decoded: the options of every command with a model.

Only what the user gave is passed on, so that defaults stay where they belong: with `EngineArgs`,
and with the model's generation config.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.config import EngineArgs
from ...core.errors import ValidationError
from ...core.generation_config import LAYER as MODEL_LAYER
from ...core.params import SamplingParams
from ...core.presets import resolve
from ...core.stage import Kind
from .chain_text import parse_chain
from .shared import Group, Opt

if TYPE_CHECKING:
    from ...core.engine import LLMEngine

COMMAND_LAYER = "this command"  # of values that a command assumes
MAX_TOKENS = 512  # of an answer, where neither the user nor the model says otherwise
LEVELS = ("debug", "info", "warning", "error")

_PLUGINS = (
    Opt(
        "plugins",
        list[str],
        "Load this plugin: a name, or a path to a file; no:NAME blocks one. Repeatable.",
        metavar="NAME",
        flags=("-p", "--plugin"),
    ),
    Opt("no_plugin_autoload", bool, "Load no installed plugin but those named with -p."),
    Opt("strict_plugins", bool, "Refuse to start with a broken plugin."),
)
_ENGINE = (
    Opt(
        "model",
        str,
        "A folder, a .gguf file or a hub name; by default the embedded model.",
        metavar="MODEL",
        is_argument=True,
    ),
    Opt("dtype", str, "auto, float32, bfloat16 or float16."),
    Opt(
        "max_model_len",
        str,
        "Longest prompt and answer together, in tokens: 8192, 25.6k, 32K or auto.",
        metavar="LENGTH",
    ),
    Opt("seed", int, "The engine's seed; a request without --request-seed gets its key from it."),
    Opt("max_num_seqs", int, "Most sequences that run together."),
    Opt("max_num_batched_tokens", int, "Most tokens of one step."),
    Opt("kv_cache_memory_bytes", str, "Memory of the key/value cache, such as 2G.", metavar="SIZE"),
    Opt("gpu_memory_utilization", float, "Share of the device's memory to use, in (0, 1]."),
    Opt("tokenizer", str, "Another tokenizer than the model's."),
    Opt("revision", str, "Branch, tag or commit on the hub."),
    Opt("trust_remote_code", bool, "Run code that comes with the model."),
    Opt("load_format", str, "auto, safetensors, gguf, or dummy for random weights."),
    Opt("chat_template", str, "A Jinja template, or a file with one."),
    Opt(
        "generation_config", str, "Sampling defaults: auto (the model's), vllm (none) or a folder."
    ),
    Opt("profile", str, "The named default chain."),
    Opt("preset_file", str, "Presets of yours, in TOML or JSON.", metavar="FILE"),
    Opt("no_fusion", bool, "Run every stage by itself."),
    Opt("debug", bool, "Check every stage as it runs; show tracebacks of errors."),
    Opt("engine_json", str, "Further arguments of LLM().", metavar="JSON", flags=("--engine",)),
    Opt("log_level", str, f"{', '.join(LEVELS[:-1])} or {LEVELS[-1]}."),
)
_SAMPLING = (
    Opt("temperature", float, "0 takes the best token."),
    Opt("top_p", float, "Keep the fewest tokens that hold this share."),
    Opt("top_k", int, "Keep the k best tokens."),
    Opt("min_p", float, "Keep tokens with at least this share of the best one's."),
    Opt("request_seed", int, "The request's own seed: equal seeds, equal tokens."),
    Opt(
        "max_tokens",
        int,
        f"Most tokens of an answer; {MAX_TOKENS} unless the model says otherwise.",
    ),
    Opt("min_tokens", int, "No end before so many tokens."),
    Opt("repetition_penalty", float, "Above 1: tokens already seen get less likely."),
    Opt("presence_penalty", float, "Subtracted once from tokens of the answer."),
    Opt("frequency_penalty", float, "Subtracted as often as the answer has the token."),
    Opt("stop", list[str], "Stop at this text. Repeatable.", metavar="TEXT"),
    Opt("stop_token_ids", list[int], "Stop at this id. Repeatable.", flags=("--stop-token-id",)),
    Opt("ignore_eos", bool, "Go on after the model's end token."),
    Opt("n", int, "How many answers to each prompt."),
    Opt("logprobs", int, "Log-probabilities of the n best tokens at each position."),
    Opt("logit_bias", str, "Added to logits: '{\"ID\": BIAS}'.", metavar="JSON"),
    Opt(
        "bad_words",
        list[str],
        "Never generate this text. Repeatable.",
        metavar="TEXT",
        flags=("--bad-word",),
    ),
    Opt(
        "chain",
        str,
        "The whole chain in order: temperature=0.7,top_p(p=0.9,min_keep=2), or JSON.",
    ),
    Opt(
        "preset",
        str,
        "A named set of these options (`decodekit presets list`); what else is given wins.",
        metavar="NAME",
    ),
    Opt(
        "json_schema",
        str,
        "The answer is JSON of this schema: a file, or the schema itself.",
        metavar="FILE",
    ),
    Opt("regex", str, "The whole answer matches this regular expression.", metavar="PATTERN"),
    Opt("choice", list[str], "The answer is one of these. Repeatable.", metavar="TEXT"),
    Opt("params_json", str, "Any SamplingParams fields.", metavar="JSON", flags=("--params",)),
)


def engine_args(given: Mapping[str, Any]) -> EngineArgs:
    """Make the engine's arguments; ValidationError for a bad one."""
    arguments = dict(given)
    if level := arguments.pop("log_level", None):
        set_log_level(level)
    for name, field_name in (("no_plugin_autoload", "plugin_autoload"), ("no_fusion", "fusion")):
        if arguments.pop(name, False):
            arguments[field_name] = False
    more = json_object("--engine", arguments.pop("engine_json", None))
    refuse_twice("--engine", more, arguments)
    return EngineArgs(**arguments, **more)


def set_log_level(level: str) -> None:
    """Set how much the engine's log says."""
    if level.lower() not in LEVELS:
        raise ValidationError(
            f"log_level must be one of {', '.join(LEVELS)}, got {level!r}",
            parameter="log_level",
            value=level,
        )
    logging.getLogger("decodekit").setLevel(level.upper())


@dataclass(frozen=True, slots=True)
class Sampling:
    """The request fields that the user gave; `chain` as it was typed."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    chain: str | None = None

    @classmethod
    def of_options(cls, given: Mapping[str, Any]) -> Sampling:
        """Read the options of the command line."""
        fields = dict(given)
        if "request_seed" in fields:  # `--seed` is the engine's, as in vLLM
            fields["seed"] = fields.pop("request_seed")
        chain = fields.pop("chain", None)
        more = json_object("--params", fields.pop("params_json", None))
        wanted = _constraint(fields)
        if wanted:
            fields["structured_outputs"] = wanted
        if "logit_bias" in fields:
            fields["logit_bias"] = json_object("--logit-bias", fields["logit_bias"])
        refuse_twice("--params", more, fields if chain is None else {**fields, "chain": chain})
        fields.update(more)
        # A bad value is refused before a model is loaded.
        SamplingParams.from_optional(**{"max_tokens": MAX_TOKENS, **fields})
        return cls(fields, chain)

    def with_fields(self, changes: Mapping[str, Any]) -> Sampling:
        """Return these fields with `changes`; None takes a field out."""
        fields = {**self.fields, **changes}
        chain = None if "chain" in changes else self.chain
        return Sampling({k: v for k, v in fields.items() if v is not None}, chain)

    def build(self, engine: LLMEngine) -> SamplingParams:
        """Lay the user's fields over the model's own defaults; ValidationError for a bad one.

        Where the user wrote the chain, defaults of stages that are not in it have no place.
        """
        given = dict(self.fields)
        registry = engine.parts.registry
        if self.chain is not None:
            given["chain"] = parse_chain(self.chain, registry)
        presets = engine.parts.presets
        named = presets.find(given["preset"]) if "preset" in given else engine.parts.preset
        defaults = {"max_tokens": MAX_TOKENS, **engine.sampling_defaults}
        chain = given.get("chain") or (None if named is None else named.fields.get("chain"))
        if chain is not None:
            listed = {stage_name(item) for item in chain}
            for name, (stage, _) in registry.fields.items():
                is_free = stage.kind in (Kind.MASK, Kind.FORCE)  # these join any chain
                if not is_free and listed.isdisjoint((stage.name, *stage.aliases)):
                    defaults.pop(name, None)
        params = SamplingParams.from_optional(**{**defaults, **given})
        params.note_layer([name for name in defaults if name not in given], MODEL_LAYER)
        if "max_tokens" not in given and "max_tokens" not in engine.sampling_defaults:
            params.note_layer(["max_tokens"], COMMAND_LAYER)
        resolve(params, presets, engine.parts.preset)
        return params


def _constraint(fields: dict[str, Any]) -> dict[str, Any]:
    """Take the options that constrain the answer out of `fields`, as one constraint."""
    wanted: dict[str, Any] = {}
    schema = fields.pop("json_schema", None)
    if schema is not None:
        text = schema if schema.lstrip().startswith("{") else _read("--json-schema", schema)
        wanted["json"] = json_object("--json-schema", text)
    for name in ("regex", "choice"):
        if name in fields:
            wanted[name] = fields.pop(name)
    return wanted


def _read(option: str, name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValidationError(
            f"{option} cannot read {name!r}: {error}", parameter=option, value=name
        ) from None


def stage_name(item: object) -> str:
    """Return the stage that an entry of a chain names; what is no entry is refused later."""
    name = item.get("stage") if isinstance(item, Mapping) else item
    return name if isinstance(name, str) else ""


def json_object(option: str, text: str | None) -> dict[str, Any]:
    """Read an option's JSON object; ValidationError with one sentence if it is none."""
    if text is None:
        return {}
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValidationError(
            f"{option} is not valid JSON: {error}", parameter=option, value=text
        ) from None
    if not isinstance(found, dict):
        raise ValidationError(
            f"{option} must be a JSON object, got {text!r}", parameter=option, value=text
        )
    return found


def refuse_twice(option: str, inside: Mapping[str, Any], beside: Mapping[str, Any]) -> None:
    """Refuse a name that is given by an option of its own and in a JSON object too."""
    for name in inside:
        if name in beside:
            raise ValidationError(
                f"{name} is given twice, by an option of its own and in {option}",
                parameter=name,
                value=inside[name],
            )


PLUGINS = Group({"Plugins": _PLUGINS}, dict)
ENGINE = Group({"Model and engine": _ENGINE, "Plugins": _PLUGINS}, engine_args)
SAMPLING = Group({"Sampling": _SAMPLING}, Sampling.of_options)

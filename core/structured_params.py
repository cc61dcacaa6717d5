"""The objects inside or beside SamplingParams: constraints, repetition detection, beam search.

Each is a dataclass checked when it is made; an unknown keyword is refused with a suggestion.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from .errors import NotInThisVersion, ValidationError
from .param_rules import (
    Rule,
    as_list,
    count,
    flag,
    one_of,
    real,
    refuse,
    refuse_type,
    refuse_unknown,
    shown,
    text,
)

if TYPE_CHECKING:
    from .params import SamplingParams

CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
EARLY_STOPPING = "True, False or 'never'"


class KnownKeywords:
    """Base of a dataclass of parameters: an unknown keyword is refused before anything else."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if kwargs:
            refuse_unknown(cls.__name__, kwargs, public_fields(cls))
        return super().__new__(cls)


def public_fields(cls: type) -> list[str]:
    """The names that the constructor of the dataclass `cls` takes, in order."""
    return [item.name for item in fields(cls) if item.init]


def apply_rules(owner: object, rules: dict[str, Rule]) -> None:
    """Replace each named attribute by what its rule makes of it."""
    for name, rule in rules.items():
        setattr(owner, name, rule(getattr(owner, name)))


@dataclass(repr=False)
class StructuredOutputsParams(KnownKeywords):
    """What the output must look like: exactly one of the first six is set.

    `StructuredOutputsParams(choice=["yes", "no"])`, `StructuredOutputsParams(json=MyModel)`.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    backend: str | None = None
    strict: bool = True
    format: str = "annotation"
    choice_probs: bool = False  # ours: return how likely each option of `choice` was
    # Set by the engine when the constraint is compiled.
    _backend: str | None = field(default=None, init=False, repr=False, compare=False)
    _backend_was_auto: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = [name for name in CONSTRAINTS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValidationError(
                f"structured_outputs needs exactly one of {', '.join(CONSTRAINTS)}, "
                f"got {' and '.join(given) or 'none'}",
                parameter="structured_outputs",
                value=given,
            )
        apply_rules(self, _STRUCTURED_RULES)
        if self.choice_probs and self.choice is None:
            refuse("choice_probs", True, "False without choice")

    def __repr__(self) -> str:
        """The fields that differ from their default; evaluates to an equal."""
        given = [
            f"{item.name}={getattr(self, item.name)!r}"
            for item in fields(self)
            if item.init and getattr(self, item.name) != item.default
        ]
        return f"StructuredOutputsParams({', '.join(given)})"

    def all_constraints_none(self) -> bool:
        """Say whether no constraint is set."""
        return all(getattr(self, name) is None for name in CONSTRAINTS)

    def all_non_structural_tag_constraints_none(self) -> bool:
        """Say whether no constraint but the structural tag is set."""
        return all(getattr(self, name) is None for name in CONSTRAINTS[:-1])


@dataclass
class RepetitionDetectionParams(KnownKeywords):
    """End a request whose last `min_count` blocks of a length up to `max_pattern_size` are equal.

    A `max_pattern_size` of 0 is off; a `min_pattern_size` of 0 is read as 1.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        apply_rules(self, _REPETITION_RULES)
        if self.min_pattern_size > self.max_pattern_size:
            refuse(
                "min_pattern_size",
                self.min_pattern_size,
                f"at most max_pattern_size ({self.max_pattern_size})",
            )
        if self.max_pattern_size > 0 and self.min_count < 2:
            refuse("min_count", self.min_count, "an integer >= 2 when max_pattern_size is set")


@dataclass
class BeamSearchParams(KnownKeywords):
    """What `LLM.beam_search` takes; see `profile` for whose scoring rules are followed."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    profile: str = "default"
    early_stopping: bool | str | None = None
    sampling_params: SamplingParams | None = None

    def __post_init__(self) -> None:
        apply_rules(self, _BEAM_RULES)


@dataclass
class StructuredOutputsConfig(KnownKeywords):
    """The engine's side of structured outputs: which backend, and what it may assume."""

    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False
    compile_timeout: float = 10.0  # ours: seconds that one grammar may take
    cache_bytes: int = 512 * 2**20  # ours: memory for compiled grammars

    def __post_init__(self) -> None:
        apply_rules(self, _CONFIG_RULES)
        for name in ("reasoning_parser", "reasoning_parser_plugin"):
            if getattr(self, name):
                raise NotInThisVersion(
                    f"structured_outputs_config.{name} is not in this version of decodekit; say "
                    "where reasoning ends by the engine's reasoning_config",
                    parameter="structured_outputs_config",
                    value=getattr(self, name),
                )


def structured_outputs_config(value: Any) -> StructuredOutputsConfig | None:
    """Normalise the engine argument: None, the object, a dict of its fields, or that as JSON."""
    allowed = "a StructuredOutputsConfig, a dict of its fields or that as JSON text"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            refuse("structured_outputs_config", value, allowed)
    if value is None or isinstance(value, StructuredOutputsConfig):
        return value
    if isinstance(value, dict):
        return StructuredOutputsConfig(**value)
    known = {name: getattr(value, name) for name in public_fields(StructuredOutputsConfig)
             if hasattr(value, name)}  # fmt: skip
    if "backend" not in known:
        refuse_type("structured_outputs_config", value, allowed)
    return StructuredOutputsConfig(**known)


def early_stopping(name: str, *, optional: bool = False) -> Rule:
    """True, False or "never"; None passes when `optional`."""
    allowed = f"None, {EARLY_STOPPING}" if optional else EARLY_STOPPING

    def check(value: Any) -> bool | str | None:
        if value is True or value is False or (value is None and optional):
            return value
        if not isinstance(value, str):
            refuse_type(name, value, allowed)
        if value != "never":
            refuse(name, value, allowed)
        return value

    return check


def structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """Normalise the field: the object, a dict of its fields, a model class, a type of outlines."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, dict):
        return StructuredOutputsParams(**value)
    if is_model_class(value):
        return StructuredOutputsParams(json=value)
    if type(value).__module__ == "outlines.types.dsl":
        return _from_outlines(value)
    refuse_type(
        "structured_outputs",
        value,
        "a StructuredOutputsParams, a dict of its fields, a pydantic model class or one of the "
        "types of outlines",
    )


def _from_outlines(value: Any) -> StructuredOutputsParams:
    """Read a term of outlines' types; its module is loaded, since the value came from there."""
    kind = type(value).__name__
    if kind == "JsonSchema":
        pattern = value.whitespace_pattern
        return StructuredOutputsParams(json=value.schema, whitespace_pattern=pattern)
    if kind == "Regex":
        return StructuredOutputsParams(regex=value.pattern)
    if kind == "CFG":
        return StructuredOutputsParams(grammar=value.definition)
    if kind == "Choice" and all(isinstance(item, str) for item in value.items):
        return StructuredOutputsParams(choice=list(value.items))
    return StructuredOutputsParams(regex=sys.modules[type(value).__module__].to_regex(value))


def repetition_detection(value: Any) -> RepetitionDetectionParams | None:
    """Normalise the field of SamplingParams: the object or a dict of its fields."""
    if value is None or isinstance(value, RepetitionDetectionParams):
        return value
    if isinstance(value, dict):
        return RepetitionDetectionParams(**value)
    refuse_type(
        "repetition_detection", value, "a RepetitionDetectionParams or a dict of its fields"
    )


def is_model_class(value: object) -> bool:
    """Say whether `value` is a pydantic model class, without importing pydantic."""
    return isinstance(value, type) and hasattr(value, "model_json_schema")


def _json(value: Any) -> Any:
    if value is None or isinstance(value, (str, dict)) or is_model_class(value):
        return value
    refuse_type("json", value, "a JSON schema (text or dict) or a pydantic model class")


def _choice(value: Any) -> list[str] | None:
    if value is None:
        return None
    allowed = "a non-empty list of strings"  # one of them may be empty: then nothing is an answer
    chosen: list[str] = as_list("choice", value, allowed)
    for place, item in enumerate(chosen):
        if not isinstance(item, str):
            refuse_type(f"choice[{place}]", item, "a string")
    if not chosen:
        refuse("choice", value, allowed)
    return chosen


def _grammar(value: Any) -> str | None:
    grammar: str | None = text("grammar", optional=True)(value)
    if grammar is not None and not grammar.strip():
        refuse("grammar", value, "a grammar that is not blank")
    return grammar


def _json_object(value: Any) -> bool | None:
    if value is False:
        raise ValidationError(
            f"json_object must be True or left out, got {shown(value)}",
            parameter="json_object",
            value=value,
        )
    chosen: bool | None = flag("json_object", optional=True)(value)
    return chosen


def _sampling_params(value: Any) -> Any:
    # Duck-typed: params.py imports this file.
    if value is None or hasattr(value, "fields_set"):
        return value
    refuse_type("sampling_params", value, "a SamplingParams or None")


_STRUCTURED_RULES: dict[str, Rule] = {
    "json": _json,
    "regex": text("regex", optional=True, empty=True),
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": text("structural_tag", optional=True),
    "disable_any_whitespace": flag("disable_any_whitespace"),
    "disable_additional_properties": flag("disable_additional_properties"),
    "whitespace_pattern": text("whitespace_pattern", optional=True),
    "backend": text("backend", optional=True),
    "strict": flag("strict"),
    "format": one_of("format", ("annotation", "assert")),
    "choice_probs": flag("choice_probs"),
}
_REPETITION_RULES: dict[str, Rule] = {
    name: count(name, 0) for name in ("max_pattern_size", "min_pattern_size", "min_count")
}
_BEAM_RULES: dict[str, Rule] = {
    "beam_width": count("beam_width", 1),
    "max_tokens": count("max_tokens", 1),
    "ignore_eos": flag("ignore_eos"),
    "temperature": real("temperature", 0.0, float("inf")),
    "length_penalty": real("length_penalty", float("-inf"), float("inf")),
    "include_stop_str_in_output": flag("include_stop_str_in_output"),
    "profile": text("profile"),
    "early_stopping": early_stopping("early_stopping", optional=True),
    "sampling_params": _sampling_params,
}
_CONFIG_RULES: dict[str, Rule] = {
    "backend": text("backend"),
    "disable_any_whitespace": flag("disable_any_whitespace"),
    "disable_additional_properties": flag("disable_additional_properties"),
    "reasoning_parser": text("reasoning_parser", empty=True),
    "reasoning_parser_plugin": text("reasoning_parser_plugin", empty=True),
    "enable_in_reasoning": flag("enable_in_reasoning"),
    "compile_timeout": real("compile_timeout", 0.0, float("inf"), open_low=True),
    "cache_bytes": count("cache_bytes", 0),
}

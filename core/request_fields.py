"""What each field of a request may be, as JSON schema, with a line about it.

The rules themselves stand in `sampling_rules.py`; the tests hold the two together. `NOT_IN_JSON`
are fields for Python alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from .request_params import NEUTRAL
from .sampling_rules import GREEDY_BELOW, LOGPROBS_MODES, MAX_N, ON_DEAD_ROW, TRACE

Json = dict[str, Any]


class Row(NamedTuple):
    """One field: its schema without null, and what it does."""

    schema: Json
    text: str


def nullable(schema: Json) -> Json:
    """Let null through."""
    if not schema:
        return {}
    if "type" in schema and not {"enum", "oneOf"} & schema.keys():
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        return {**schema, "type": [*types, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def _real(
    low: float | None = None, high: float | None = None, *, above: float | None = None
) -> Json:
    schema: Json = {"type": "number"}
    if low is not None:
        schema["minimum"] = low
    if above is not None:
        schema["exclusiveMinimum"] = above
    if high is not None:
        schema["maximum"] = high
    return schema


def _int(low: int, high: int | None = None) -> Json:
    schema: Json = {"type": "integer", "minimum": low}
    return schema if high is None else {**schema, "maximum": high}


_BOOL: Json = {"type": "boolean"}
_TEXT: Json = {"type": "string", "minLength": 1}
_TEXTS: Json = {"type": "array", "items": _TEXT}
_IDS: Json = {"type": "array", "items": _int(0)}
_OBJECT: Json = {"type": "object"}
_SCHEMA: Json = {"type": ["string", "object"]}
_STRUCTURED: Json = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "json": {"type": ["string", "object", "null"]},
        "regex": {"type": ["string", "null"]},
        "choice": {"type": ["array", "null"], "items": {"type": "string"}, "minItems": 1},
        "grammar": {"type": ["string", "null"]},
        "json_object": {"type": ["boolean", "null"]},
        "structural_tag": {"type": ["string", "null"]},
        "disable_any_whitespace": _BOOL,
        "disable_additional_properties": _BOOL,
        "whitespace_pattern": {"type": ["string", "null"]},
        "backend": {"type": ["string", "null"]},
        "strict": _BOOL,
        "format": {"enum": ["annotation", "assert"]},
        "choice_probs": _BOOL,
    },
    "oneOf": [
        {"required": [name], "properties": {name: {"not": {"type": "null"}}}}
        for name in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    ],
}
_REPETITION: Json = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "max_pattern_size": _int(0),
        "min_pattern_size": _int(0),
        "min_count": _int(0),
    },
}
_MODES: Json = {"enum": list(LOGPROBS_MODES)}

FIELDS: dict[str, Row] = {
    "n": Row(_int(1, MAX_N), "How many answers."),
    "presence_penalty": Row(_real(-2, 2), "Subtracted from the logit of each token of the answer."),
    "frequency_penalty": Row(_real(-2, 2), "Subtracted as often as the answer has the token."),
    "repetition_penalty": Row(
        _real(above=0), "Above 1: tokens of the prompt and of the answer get less likely."
    ),
    "temperature": Row(_real(0), "Divides the logits; 0 takes the best token."),
    "top_p": Row(_real(above=0, high=1), "Keep the fewest tokens that hold this share."),
    "top_k": Row(_int(-1), "Keep the k best tokens."),
    "min_p": Row(_real(0, 1), "Keep tokens with at least this share of the best one's."),
    "seed": Row(_int(-(2**63), 2**64 - 1), "Equal seeds, equal tokens."),
    "stop": Row({"anyOf": [_TEXT, _TEXTS]}, "Stop where one of these texts appears."),
    "stop_token_ids": Row(_IDS, "Stop at one of these ids."),
    "ignore_eos": Row(_BOOL, "Go on after the model's end token."),
    "max_tokens": Row(_int(1), "Most tokens of an answer."),
    "min_tokens": Row(_int(0), "No end before so many tokens."),
    "logprobs": Row(
        {"anyOf": [_int(-1), {"const": True}]}, "Log-probs of the n best tokens; -1: of all."
    ),
    "prompt_logprobs": Row(
        {"anyOf": [_int(-1), {"const": True}]}, "The same for the tokens of the prompt."
    ),
    "logprob_token_ids": Row(_IDS, "Log-probs of these ids at every position."),
    "flat_logprobs": Row(_BOOL, "Log-probs as flat lists."),
    "detokenize": Row(_BOOL, "Make text of the tokens."),
    "skip_special_tokens": Row(_BOOL, "Leave special tokens out of the text."),
    "spaces_between_special_tokens": Row(_BOOL, "A space between neighbouring special tokens."),
    "include_stop_str_in_output": Row(_BOOL, "Keep the stop text in the answer."),
    "output_kind": Row(
        {"type": "integer", "enum": [0, 1, 2]},
        "0: all so far, 1: what is new, 2: once, at the end.",
    ),
    "structured_outputs": Row(_STRUCTURED, "What the answer must look like."),
    "logit_bias": Row(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number"},
        },
        "Added to the logits of these ids, clamped to -100 ... 100.",
    ),
    "allowed_token_ids": Row({**_IDS, "minItems": 1}, "Every other id is banned."),
    "extra_args": Row(_OBJECT, "For plugins, which read it when the request is admitted."),
    "bad_words": Row(_TEXTS, "Texts whose last token is banned where it would complete them."),
    "skip_reading_prefix_cache": Row(_BOOL, "Compute the whole prompt anew."),
    "thinking_token_budget": Row(_int(-1), "Most tokens of the reasoning; -1: no limit."),
    "repetition_detection": Row(_REPETITION, "End an answer that goes in circles."),
    "best_of": Row(_int(1), "Draw so many and keep the n best."),
    "use_beam_search": Row(_BOOL, "Search with best_of beams."),
    "length_penalty": Row(_real(), "Of beams: above 1 favours long answers."),
    "early_stopping": Row({"enum": [True, False, "never"]}, "Of beams: when the search ends."),
    "truncate_prompt_tokens": Row(
        {"anyOf": [_int(1), {"const": -1}]}, "Keep the last so many tokens of the prompt."
    ),
    "chain": Row({}, "The stages in this order, in place of the profile's."),
    "profile": Row({}, "The named default chain."),
    "preset": Row({}, "A named set of fields, for those that the request does not set."),
    "picker": Row({}, "What chooses the token, in place of the profile's picker."),
    "plan_review": Row(_BOOL, "Whether the plan's notes give advice."),
    "on_dead_row": Row({"enum": list(ON_DEAD_ROW)}, "What happens where no token is left."),
    "logprobs_mode": Row(
        {"anyOf": [_MODES, {"type": "array", "items": _MODES, "minItems": 1, "uniqueItems": True}]},
        "Where log-probs are read; of several, the first feeds logprobs.",
    ),
    "kept_set": Row(_BOOL, "Report the ids that could be chosen."),
    "entropy": Row(_BOOL, "Report the entropy at every position."),
    "output_tensors": Row(_BOOL, "Report whole rows."),
    "trace": Row({"enum": list(TRACE)}, "Report what each stage did."),
    "stops": Row({"type": "array"}, "Stop plugins of this request."),
    "observers": Row({}, "Observer plugins of this request."),
    "driver": Row({"type": ["string", "object"]}, "What runs several sequences for one answer."),
    "speculation": Row(
        {
            "anyOf": [
                {"const": False},
                {"type": "string", "minLength": 1},
                {"type": "object", "minProperties": 1},
            ]
        },
        "What guesses tokens ahead, with its settings; false for nothing.",
    ),
}
# Python objects; what is derived; and how copies are made.
NOT_IN_JSON = frozenset({"logits_processors", "output_text_buffer_length", "skip_clone"})
OFF: dict[str, tuple[Any, ...]] = {
    name: values for name, values in NEUTRAL.items() if name not in NOT_IN_JSON
}
RELATIONS = (
    "min_tokens is at most max_tokens",
    "best_of is at least n",
    "ids of a chain's entries, of stops and of observers are different",
    "min_pattern_size is at most max_pattern_size, and min_count at least 2 where that is set",
    "a chain's bans and forced tokens stand before its cuts, and its one picker is last",
    "a flat field needs its stage in a chain that is written",
    "fields that a preset pins cannot be changed",
)


def rules() -> list[Json]:
    """The relations between fields that a schema can say."""
    cold = {"required": ["temperature"], "properties": {"temperature": _below(GREEDY_BELOW)}}
    beams = {"required": ["use_beam_search"], "properties": {"use_beam_search": {"const": True}}}
    return [
        {
            "if": {"allOf": [cold, {"not": beams}]},
            "then": _at_most(("n", "best_of"), 1),
        },
        {
            "if": beams,
            "then": {"anyOf": [_at_least("best_of", 2), _at_least("n", 2)]},
            "else": {
                "properties": {
                    "early_stopping": {"enum": [False, None]},
                    "length_penalty": {"enum": [1, None]},
                }
            },
        },
        {
            "if": {"required": ["detokenize"], "properties": {"detokenize": {"const": False}}},
            "then": {
                "properties": {
                    "stop": {"anyOf": [{"type": "null"}, {"type": "array", "maxItems": 0}]}
                }
            },
        },
        {
            "if": {
                "required": ["prompt_logprobs"],
                "properties": {"prompt_logprobs": {"not": {"type": "null"}}},
            },
            "then": {"properties": {"skip_reading_prefix_cache": {"enum": [True, None]}}},
        },
    ]


def _below(bound: float) -> Json:
    return {"type": "number", "exclusiveMaximum": bound}


def _at_most(names: Iterable[str], bound: int) -> Json:
    one = {"anyOf": [{"type": "null"}, {"type": "integer", "maximum": bound}]}
    return {"properties": dict.fromkeys(names, one)}


def _at_least(name: str, bound: int) -> Json:
    return {"required": [name], "properties": {name: {"type": "integer", "minimum": bound}}}

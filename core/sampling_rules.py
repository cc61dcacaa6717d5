"""What each field of SamplingParams may hold, how fields bind one another, and in which order.

Two halves: `FIELD_RULES`, one rule a field, and `settle`, which runs them and the relations
between fields over the dict of values of one object.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from .param_rules import (
    Rule,
    as_int,
    as_list,
    as_real,
    count,
    flag,
    mapping,
    one_of,
    real,
    refuse,
    refuse_type,
    strings,
    text,
    token_ids,
)
from .structured_params import early_stopping, repetition_detection, structured_outputs

GREEDY_BELOW = 1e-5  # a temperature under this is the greedy pick
MIN_TEMPERATURE = 0.01  # smaller positive temperatures are raised to it
MAX_N = 16384
MAX_LOGIT_BIAS = 100.0
ON_DEAD_ROW = ("error", "eos", "relax")
TRACE = ("off", "summary", "tokens")

# Spelling of a log-probability mode -> (point of the chain, "logprobs" or "logits").
LOGPROBS_MODES: dict[str, tuple[str, str]] = {
    "raw": ("raw", "logprobs"),
    "masked": ("masked", "logprobs"),
    "final": ("final", "logprobs"),
    "masked_logits": ("masked", "logits"),
    "raw_logprobs": ("raw", "logprobs"),
    "raw_logits": ("raw", "logits"),
    "processed_logprobs": ("final", "logprobs"),
    "processed_logits": ("final", "logits"),
}


class RequestOutputKind(IntEnum):
    """What each yield holds: everything so far, only what is new, or nothing until the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

    def __repr__(self) -> str:
        return f"RequestOutputKind.{self.name}"


class SamplingType(IntEnum):
    """How the token is chosen: greedy, drawn, or drawn with the request's own seed."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


def settle(values: dict[str, Any], names: Iterable[str], fields_set: set[str]) -> None:
    """Normalise and check the fields `names` of `values` in place; raise ValidationError.

    In this order, whatever the order of `names`:

    1. each field by its own rule, `min_tokens` against `max_tokens` on the way;
    2. stop strings need text; the hold-back length is derived from them;
    3. temperature 0 switches the truncations off and excludes n > 1;
    4. candidates and beams;
    5. reading the prefix cache against prompt log-probs.
    """
    ordered = sorted(names, key=_RANK.__getitem__)
    for name in ordered:
        if name in _BEFORE_MIN_TOKENS:
            values[name] = FIELD_RULES[name](values[name])
    _check_min_tokens(values)
    for name in ordered:
        if name not in _BEFORE_MIN_TOKENS:
            values[name] = FIELD_RULES[name](values[name])
    _settle_stop_strings(values)
    _settle_greedy(values)
    _check_candidates(values)
    _settle_prefix_cache(values, fields_set)


def max_n() -> int:
    """The largest `n`: 16384, or DECODEKIT_MAX_N_SEQUENCES (VLLM_MAX_N_SEQUENCES also read)."""
    for variable in ("DECODEKIT_MAX_N_SEQUENCES", "VLLM_MAX_N_SEQUENCES"):
        given = os.environ.get(variable)
        if given is not None:
            if not given.isdecimal() or int(given) < 1:
                refuse(variable, given, "an integer >= 1")
            return int(given)
    return MAX_N


# --- relations between fields -------------------------------------------------------------------


def _check_min_tokens(values: dict[str, Any]) -> None:
    limit = values["max_tokens"]
    if limit is not None and values["min_tokens"] > limit:
        refuse("min_tokens", values["min_tokens"], f"at most max_tokens ({limit})")


def _settle_stop_strings(values: dict[str, Any]) -> None:
    stop = values["stop"]
    if stop and not values["detokenize"]:
        refuse("stop", stop, "empty when detokenize is False, since it is matched on text")
    held = max(map(len, stop)) - 1 if stop and not values["include_stop_str_in_output"] else 0
    values["output_text_buffer_length"] = held


def _settle_greedy(values: dict[str, Any]) -> None:
    if values["temperature"] >= GREEDY_BELOW:
        values["_idle_cuts"] = ()
        return
    idle = tuple(name for name, off in _CUTS_OFF.items() if values[name] not in off)
    values["_idle_cuts"] = values.get("_idle_cuts", ()) + idle
    values["top_p"], values["top_k"], values["min_p"] = 1.0, 0, 0.0
    has_driver = values["use_beam_search"] or values["driver"] is not None
    if values["n"] > 1 and not has_driver:
        refuse("n", values["n"], "1 with temperature 0, since greedy outputs are all equal")


def _check_candidates(values: dict[str, Any]) -> None:
    n, best_of, beams = values["n"], values["best_of"], values["use_beam_search"]
    if best_of is not None and best_of < n:
        refuse("best_of", best_of, f"at least n ({n})")
    candidates = n if best_of is None else best_of
    if beams and candidates <= 1:
        refuse("best_of", best_of, "at least 2 with use_beam_search, where it is the beam width")
    if beams:
        return
    if candidates > 1 and values["driver"] is None and values["temperature"] < GREEDY_BELOW:
        refuse("best_of", best_of, "1 with temperature 0, since greedy candidates are all equal")
    if values["early_stopping"] is not False:
        refuse("early_stopping", values["early_stopping"], "False without use_beam_search")
    if values["length_penalty"] != 1.0:
        refuse("length_penalty", values["length_penalty"], "1.0 without use_beam_search")


def _settle_prefix_cache(values: dict[str, Any], fields_set: set[str]) -> None:
    name = "skip_reading_prefix_cache"
    needed = values["prompt_logprobs"] is not None
    if values[name] is None or name not in fields_set:
        fields_set.discard(name)
        values[name] = needed
    elif needed and not values[name]:
        refuse(name, False, "True or None with prompt_logprobs, which need every position")


# --- fields with a rule of their own ------------------------------------------------------------


def _n(value: Any) -> int:
    number = as_int("n", value, "an integer >= 1")
    if number < 1:
        refuse("n", value, "an integer >= 1")
    if number > 1 and number > (limit := max_n()):
        refuse("n", value, f"at most {limit} (DECODEKIT_MAX_N_SEQUENCES)")
    return number


def _temperature(value: Any) -> float:
    number: float = real("temperature", 0.0, math.inf)(value)
    if 0.0 < number < MIN_TEMPERATURE:
        warnings.warn(
            f"temperature {number:g} is raised to {MIN_TEMPERATURE}; 0 is the greedy pick",
            UserWarning,
            stacklevel=5,  # rule, settle, _settle, __init__ or __setattr__, the caller
        )
        return MIN_TEMPERATURE
    return number


def _top_k(value: Any) -> int:
    allowed = "0 or -1 (off) or an integer >= 1"
    if as_real("top_k", value, allowed) < -1:
        refuse("top_k", value, allowed)
    return as_int("top_k", value, allowed)


def _seed(value: Any) -> int | None:
    allowed = "None or an integer in [-2^63, 2^64 - 1]"
    if value is None or (number := as_int("seed", value, allowed)) == -1:
        return None
    if not -(2**63) <= number < 2**64:
        refuse("seed", value, allowed)
    return number


def _num_logprobs(name: str) -> Rule:
    counted = count(name, 0, also=-1, optional=True)
    return lambda value: 1 if value is True else counted(value)


def _thinking_token_budget(value: Any) -> int | None:
    number: int | None = count("thinking_token_budget", 0, also=-1, optional=True)(value)
    return None if number == -1 else number


def _output_kind(value: Any) -> RequestOutputKind:
    if isinstance(value, RequestOutputKind):
        return value
    allowed = "a RequestOutputKind (CUMULATIVE, DELTA or FINAL_ONLY)"
    number = as_int("output_kind", value, allowed)
    if number not in (0, 1, 2):
        refuse("output_kind", value, allowed)
    return RequestOutputKind(number)


def _truncate_prompt_tokens(value: Any) -> int | None:
    number: int | None = count("truncate_prompt_tokens", 1, also=-1, optional=True)(value)
    return number


def _logit_bias(value: Any) -> dict[int, float] | None:
    allowed = "None or a dict from token id to a bias"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        refuse_type("logit_bias", value, allowed)
    biases, is_clamped = {}, False
    for key, item in value.items():
        token = as_int("logit_bias", key, "keyed by token ids (integers >= 0)")
        if token < 0:
            refuse("logit_bias", key, "keyed by token ids (integers >= 0)")
        bias = as_real("logit_bias", item, "a dict of numbers")
        if math.isnan(bias) or bias == math.inf:
            refuse("logit_bias", item, "in [-100, 100] or -inf (a ban)")
        if bias != -math.inf and abs(bias) > MAX_LOGIT_BIAS:
            bias, is_clamped = math.copysign(MAX_LOGIT_BIAS, bias), True
        biases[token] = bias
    if is_clamped:
        warnings.warn("logit_bias is clamped to [-100, 100]", UserWarning, stacklevel=5)
    return biases


def _logits_processors(value: Any) -> list[Any] | None:
    allowed = "None or a list of callables of 2 or 3 parameters"
    if value is None:
        return None
    callables = as_list("logits_processors", value, allowed)
    for item in callables:
        if not callable(item) or isinstance(item, type):
            refuse_type("logits_processors", item, allowed)
    return callables


def _logprobs_mode(value: Any) -> str | list[str] | None:
    check = one_of("logprobs_mode", tuple(LOGPROBS_MODES))
    if value is None:
        return None
    if isinstance(value, str):
        mode: str = check(value)
        return mode
    modes = as_list("logprobs_mode", value, "None, a mode or a list of modes")
    for item in modes:
        check(item)
    if not modes or len(set(modes)) < len(modes):
        refuse("logprobs_mode", value, "a non-empty list of different modes")
    return modes


def _entries(name: str, key: str) -> Rule:
    """A list of plugin entries: names, dicts with `key`, or objects of a plugin class."""
    allowed = f'a list of names, dicts {{"{key}": name, ...}} or {key} objects'

    def check(value: Any) -> list[Any] | None:
        if value is None:
            return None
        entries = as_list(name, value, allowed)
        ids = [check_entry(name, key, item, allowed) for item in entries]
        given = [item for item in ids if item is not None]
        if len(set(given)) < len(given):
            refuse(name, value, "a list without two equal ids")
        return entries

    return check


def check_entry(name: str, key: str, entry: Any, allowed: str) -> str | None:
    """Check the shape of one entry and return its explicit id, if any."""
    if isinstance(entry, str):
        if not entry:
            refuse(name, entry, allowed)
        return None
    if isinstance(entry, Mapping):
        named, given = entry.get(key), entry.get("id")
        if not isinstance(named, str) or not named or not all(isinstance(k, str) for k in entry):
            refuse(name, entry, allowed)
        if given is not None and (not isinstance(given, str) or not given):
            refuse(name, entry, "made of entries whose id is a non-empty string")
        return given
    # Duck-typed, so that building parameters does not import the contract (and pydantic).
    if not isinstance(getattr(entry, "name", None), str):
        refuse_type(name, entry, allowed)
    given = getattr(entry, "id", None)
    return given if isinstance(given, str) else None


def _plugin(name: str) -> Rule:
    """One plugin: its name, a dict with that under `name` and parameters, or an object."""
    allowed = f'None, a name, a dict {{"{name}": name, ...}} or a {name} object'

    def check(value: Any) -> Any:
        if value is not None:
            check_entry(name, name, value, allowed)
        return value

    return check


def _speculation(value: Any) -> Any:
    allowed = 'None, False, a method\'s name or a dict {"method": name, ...}'
    if value is None or value is False or (isinstance(value, str) and value):
        return value
    is_named = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if not is_named and not isinstance(value, str):
        refuse_type("speculation", value, allowed)
    if not value:
        refuse("speculation", value, allowed)
    return value


_UNBOUNDED = (-math.inf, math.inf)
_CUTS_OFF: Mapping[str, tuple[float, ...]] = {"top_p": (1.0,), "top_k": (0, -1), "min_p": (0.0,)}

# In the order of the checks; the remaining fields follow in the order of declaration.
FIELD_RULES: dict[str, Rule] = {
    "n": _n,
    "presence_penalty": real("presence_penalty", -2.0, 2.0),
    "frequency_penalty": real("frequency_penalty", -2.0, 2.0),
    "repetition_penalty": real("repetition_penalty", 0.0, math.inf, open_low=True),
    "temperature": _temperature,
    "top_p": real("top_p", 0.0, 1.0, open_low=True),
    "top_k": _top_k,
    "min_p": real("min_p", 0.0, 1.0),
    "max_tokens": count("max_tokens", 1, optional=True),
    "min_tokens": count("min_tokens", 0),
    "logprobs": _num_logprobs("logprobs"),
    "prompt_logprobs": _num_logprobs("prompt_logprobs"),
    "stop_token_ids": token_ids("stop_token_ids", absent=[]),
    "stop": strings("stop", bare=True),
    "seed": _seed,
    "ignore_eos": flag("ignore_eos"),
    "logprob_token_ids": token_ids("logprob_token_ids"),
    "flat_logprobs": flag("flat_logprobs"),
    "detokenize": flag("detokenize"),
    "skip_special_tokens": flag("skip_special_tokens"),
    "spaces_between_special_tokens": flag("spaces_between_special_tokens"),
    "include_stop_str_in_output": flag("include_stop_str_in_output"),
    "output_kind": _output_kind,
    "skip_clone": flag("skip_clone"),
    "output_text_buffer_length": count("output_text_buffer_length", 0),
    "structured_outputs": structured_outputs,
    "logit_bias": _logit_bias,
    "allowed_token_ids": token_ids("allowed_token_ids", empty=False),
    "extra_args": mapping("extra_args"),
    "bad_words": strings("bad_words"),
    "skip_reading_prefix_cache": flag("skip_reading_prefix_cache", optional=True),
    "thinking_token_budget": _thinking_token_budget,
    "repetition_detection": repetition_detection,
    "best_of": count("best_of", 1, optional=True),
    "use_beam_search": flag("use_beam_search"),
    "length_penalty": real("length_penalty", *_UNBOUNDED),
    "early_stopping": early_stopping("early_stopping"),
    "logits_processors": _logits_processors,
    "truncate_prompt_tokens": _truncate_prompt_tokens,
    "chain": _entries("chain", "stage"),
    "profile": text("profile", optional=True),
    "preset": text("preset", optional=True),
    "picker": _plugin("picker"),
    "plan_review": flag("plan_review"),
    "on_dead_row": one_of("on_dead_row", ON_DEAD_ROW),
    "logprobs_mode": _logprobs_mode,
    "kept_set": flag("kept_set"),
    "entropy": flag("entropy"),
    "output_tensors": flag("output_tensors"),
    "trace": one_of("trace", TRACE),
    "stops": _entries("stops", "stop"),
    "observers": _entries("observers", "observer"),
    "driver": _plugin("driver"),
    "speculation": _speculation,
}

# Fields whose value is a container, which its owner may edit in place.
CONTAINERS = (
    "stop_token_ids",
    "stop",
    "logprob_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "extra_args",
    "bad_words",
    "logits_processors",
    "chain",
    "logprobs_mode",
    "stops",
    "observers",
)
_RANK = {name: i for i, name in enumerate(FIELD_RULES)}
_BEFORE_MIN_TOKENS = frozenset(tuple(FIELD_RULES)[: _RANK["min_tokens"] + 1])

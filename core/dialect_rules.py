"""The settings of other systems that need more than a name: values, constraints, generate's own.

One rule each, called by the tables. A rule gets the port, the setting's name and its value. Rules
about stages that several settings share stand in `dialect_stages.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .errors import ValidationError
from .param_rules import shown
from .porting import Port, rule
from .request_checks import integer_keys

# --- values ---------------------------------------------------------------------------------------


@rule
def cold(port: Port, key: str, value: Any) -> None:
    """A temperature, at or below 0 the greedy pick."""
    port.set(key, "temperature", max(port.number(key, value), 0.0))


@rule
def top_k(port: Port, key: str, value: Any) -> None:
    """A top-k that is off at 0 and below."""
    if port.whole(key, value) > 0:
        port.set(key, "top_k", value)


@rule
def if_positive(port: Port, key: str, value: Any, target: str) -> None:
    """A number that is off at 0 and below."""
    if port.number(key, value) > 0:
        port.set(key, target, value)


@rule
def length(port: Port, key: str, value: Any) -> None:
    """A length that has no limit below 0."""
    port.set(key, "max_tokens", None if port.whole(key, value) < 0 else value)


@rule
def auto_length(port: Port, key: str, value: Any) -> None:
    """As long as the context allows, whatever the length says."""
    port.later(lambda: port.fields.update(max_tokens=None))


@rule
def logit_bias(port: Port, key: str, value: Any) -> None:
    """A mapping, or pairs of an id and a number; False bans."""
    pairs = value.items() if isinstance(value, Mapping) else value
    biases: dict[Any, Any] = {}
    for pair in pairs:
        if len(pair) != 2 or (isinstance(pair[0], str) and not pair[0].isdecimal()):
            port.refuse(key, value, "given by token ids, since a text may be several tokens")
        biases[pair[0]] = float("-inf") if pair[1] is False else pair[1]
    if biases:
        port.set(key, "logit_bias", integer_keys(biases))


@rule
def token_bans(port: Port, key: str, value: Any) -> None:
    """Ids in a list or in a text with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        ids = [int(part) for part in parts]
    except (TypeError, ValueError):
        port.refuse(key, value, "token ids, with commas between them")
    port.stage("suppress_tokens", ids=ids)


@rule
def stop_conditions(port: Port, key: str, value: Any) -> None:
    """Texts and ids in one list."""
    texts = [item for item in value if isinstance(item, str)]
    ids = [item for item in value if not isinstance(item, str)]
    if texts:
        port.set(key, "stop", texts)
    if ids:
        port.set(key, "stop_token_ids", ids)


@rule
def trim_stop(port: Port, key: str, value: Any) -> None:
    port.set(key, "include_stop_str_in_output", not value)


@rule
def render_special(port: Port, key: str, value: Any) -> None:
    port.set(key, "skip_special_tokens", not value)


@rule
def prompt_details(port: Port, key: str, value: Any) -> None:
    port.set(key, "prompt_logprobs", 0)


@rule
def final_probs(port: Port, key: str, value: Any) -> None:
    """Probabilities after the samplers instead of before."""
    port.set(key, "logprobs_mode", "final")


@rule
def openai_logprobs(port: Port, key: str, value: Any) -> None:
    """True for the chosen token, unless `top_logprobs` says how many; or a number."""
    if value is not True:
        port.set(key, "logprobs", value)
    else:
        port.later(lambda: port.fields.setdefault("logprobs", 0))


@rule
def top_logprobs(port: Port, key: str, value: Any) -> None:
    port.set(key, "logprobs", value)


@rule
def koboldcpp_logprobs(port: Port, key: str, value: Any) -> None:
    port.set(key, "logprobs", 5)


# --- constraints ----------------------------------------------------------------------------------


@rule
def structured(port: Port, key: str, value: Any) -> None:
    """A constraint of the same name."""
    port.set_options(key, {key: value})


@rule
def json_schema(port: Port, key: str, value: Any) -> None:
    port.set_options(key, {"json": value})


@rule
def ebnf(port: Port, key: str, value: Any) -> None:
    port.set_options(key, {"grammar": value})


@rule
def gbnf(port: Port, key: str, value: Any) -> None:
    port.set_options(key, {"grammar": value})
    port.note(f"{key}: the grammar masks before the chain; {port.dialect} checks a drawn token")


@rule
def guided(port: Port, key: str, value: Any) -> None:
    """vLLM's older spelling."""
    port.set_options(key, {key.removeprefix("guided_"): value})


@rule
def response_format(port: Port, key: str, value: Any) -> None:
    """OpenAI's object."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "json_object":
        port.set_options(key, {"json_object": True})
    elif kind == "json_schema":
        wrapped = value.get("json_schema")
        if not isinstance(wrapped, Mapping) or "schema" not in wrapped:
            port.refuse(key, value, "an object with json_schema.schema")
        port.set_options(key, {"json": wrapped["schema"]})
    elif kind != "text":
        port.refuse(key, value, "an object of type text, json_object or json_schema")


@rule
def ollama_format(port: Port, key: str, value: Any) -> None:
    """The word "json", or a schema."""
    port.set_options(key, {"json_object": True} if value == "json" else {"json": value})


@rule
def tgi_grammar(port: Port, key: str, value: Any) -> None:
    """An object with a type and a value."""
    kinds = {"json": "json", "json_schema": "json", "regex": "regex"}
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind not in kinds:
        port.refuse(key, value, "an object of type json or regex")
    inner = value.get("value")
    if kind == "json_schema" and isinstance(inner, Mapping) and "schema" in inner:
        inner = inner["schema"]
    port.set_options(key, {kinds[str(kind)]: inner})


# --- transformers and TGI -------------------------------------------------------------------------


@rule
def do_sample(port: Port, key: str, value: Any) -> None:
    """Whether anything is drawn."""
    port.is_greedy = not value


@rule
def tgi_do_sample(port: Port, key: str, value: Any) -> None:
    """Any warper makes TGI draw, whatever do_sample says."""
    warpers = ("temperature", "top_k", "top_p", "typical_p")
    port.is_greedy = not value and not any(name in port.given for name in warpers)


@rule
def encoder_repetition_penalty(port: Port, key: str, value: Any) -> None:
    """Rewards the prompt's tokens: the repetition penalty turned round, on the prompt."""
    port.stage(
        "repetition_penalty",
        "encoder_repetition",
        penalty=1.0 / port.number(key, value),
        scope="prompt",
        last_n=None,
    )


@rule
def encoder_no_repeat_ngram(port: Port, key: str, value: Any) -> None:
    port.stage("no_repeat_ngram", "encoder_no_repeat_ngram", n=value, scope="prompt")


@rule
def begin_suppress(port: Port, key: str, value: Any) -> None:
    port.stage("suppress_tokens", "begin_suppress", ids=list(value), begin_only=True)


@rule
def sequence_bias(port: Port, key: str, value: Any) -> None:
    """A dict from tuples of ids, or pairs of a list of ids and a number."""
    pairs = value.items() if isinstance(value, Mapping) else value
    port.stage("sequence_bias", bias=[[list(ids), bias] for ids, bias in pairs])


@rule
def length_decay(port: Port, key: str, value: Any) -> None:
    start, factor = value
    port.stage("length_decay", start=start, factor=factor)


@rule
def forced_eos(port: Port, key: str, value: Any) -> None:
    port.stage("forced_tokens", eos_at_end=True)
    port.note(f"{key}: every end id of the model is allowed at the last place, not {value!r} alone")


@rule
def end_ids(port: Port, key: str, value: Any) -> None:
    """End ids beside the model's own."""
    ids = value.tolist() if hasattr(value, "tolist") else value
    port.set(key, "stop_token_ids", [ids] if isinstance(ids, int) else list(ids))


@rule
def num_beams(port: Port, key: str, value: Any) -> None:
    """The beam width."""
    if port.settings.get("do_sample"):
        raise ValidationError(
            f"{key}={shown(value)} with do_sample has no counterpart here: draw n answers, or "
            "leave do_sample out",
            parameter=key,
            value=value,
        )
    port.fields.update(use_beam_search=True, best_of=value)


@rule
def of_beams(port: Port, key: str, value: Any) -> None:
    """What only beams read."""
    if port.settings.get("num_beams", 1) > 1:
        port.set(key, key, value)
        if key == "length_penalty":
            port.note("length_penalty: transformers divides by the length with the prompt left out")
    else:
        port.note(f"{key} is not used, since num_beams is 1")


@rule
def watermark(port: Port, key: str, value: Any) -> None:
    """A WatermarkingConfig or a SynthIDTextWatermarkingConfig, or a dict of one."""
    found = value if isinstance(value, Mapping) else vars(value)
    if "keys" in found:
        names = {"keys": "keys", "ngram_len": "ngram", "context_history_size": "history"}
        stage = "synthid"
    else:
        names = {
            "greenlist_ratio": "gamma",
            "bias": "delta",
            "hashing_key": "key",
            "seeding_scheme": "scheme",
            "context_width": "context",
        }
        stage = "green_list"
    port.stage(stage, **{own: found[name] for name, own in names.items() if name in found})

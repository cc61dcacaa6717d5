"""RequestParams: the frozen form of SamplingParams that a request holds; unset and off are None.

Chains, plans and stages read this form only, so none of them has to know that `top_k=-1` means
"off".
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NoReturn

from .sampling_rules import GREEDY_BELOW, RequestOutputKind
from .structured_params import RepetitionDetectionParams, StructuredOutputsParams

if TYPE_CHECKING:
    from .params import SamplingParams


class FrozenDict(dict[Any, Any]):
    """A dict that refuses every change, and still reads, prints and serialises as one.

    Hashable if its values are.
    """

    __slots__ = ()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("the parameters of a request are frozen")

    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = __ior__ = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def __reduce__(self) -> tuple[object, ...]:
        return FrozenDict, (dict(self),)


@dataclass(frozen=True, kw_only=True)
class RequestParams:
    """What one request runs with.

    A field that feeds a stage is None when it would change nothing. `greedy` says that the token
    is the argmax, and `temperature` is then None. `stop` and `stop_token_ids` are plain, possibly
    empty collections; `stop_token_ids` holds the end ids of generation_config that stop, and
    `all_stop_token_ids` every end id, also those that `ignore_eos` switches off.
    """

    n: int
    best_of: int  # n where it was not given
    greedy: bool
    seed: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: tuple[int, ...] | None
    bad_words: tuple[str, ...] | None
    bad_words_token_ids: tuple[tuple[int, ...], ...] | None
    min_tokens: int | None
    max_tokens: int | None  # None: up to the context limit
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    eos_token_id: int | None
    all_stop_token_ids: frozenset[int]
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: tuple[int, ...] | None
    flat_logprobs: bool
    logprobs_mode: tuple[str, ...] | None
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    output_kind: RequestOutputKind
    output_text_buffer_length: int  # characters held back while running
    structured_outputs: StructuredOutputsParams | None
    extra_args: Mapping[str, Any] | None
    skip_reading_prefix_cache: bool
    thinking_token_budget: int | None
    repetition_detection: RepetitionDetectionParams | None
    use_beam_search: bool
    length_penalty: float
    early_stopping: bool | str
    logits_processors: tuple[Callable[..., Any], ...] | None
    truncate_prompt_tokens: int | None
    chain: tuple[Any, ...] | None  # names, FrozenDicts with "stage", or stage objects
    profile: str | None
    preset: str | None
    presets: tuple[str, ...]  # the preset that was taken and what it extends
    picker: Any
    plan_review: bool
    on_dead_row: str
    kept_set: bool
    entropy: bool
    output_tensors: bool
    trace: str
    stops: tuple[Any, ...] | None
    observers: tuple[Any, ...] | None
    driver: Any
    speculation: Any  # None: the engine's; False: none; a method, or a FrozenDict with one
    fields_set: frozenset[str]
    sources: Mapping[str, str]  # field -> the layer that gave it, where that is not the request
    idle_cuts: tuple[str, ...]  # cuts that the request gave and temperature 0 switched off
    notes: tuple[str, ...]  # what is to be said of values from another system


def freeze(params: SamplingParams) -> RequestParams:
    """Make the snapshot of `params`, which must be in order (see `SamplingParams.snapshot`)."""
    values = {name: getattr(params, name) for name in _DERIVED}
    values |= {name: params.__dict__[name] for name in _COPIED}
    for name, neutral in NEUTRAL.items():
        if values[name] in neutral:
            values[name] = None
    for name in _FROZEN:
        if values[name] is not None:
            values[name] = frozen(values[name])
    modes = params.logprobs_mode
    structured, repetition = params.structured_outputs, params.repetition_detection
    is_greedy = params.temperature < GREEDY_BELOW
    values.update(
        greedy=is_greedy,
        temperature=None if is_greedy else values["temperature"],
        best_of=params.n if params.best_of is None else params.best_of,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        bad_words=tuple(params.bad_words) or None,
        all_stop_token_ids=frozenset(params.all_stop_token_ids),
        sources=FrozenDict(params.sources),
        idle_cuts=tuple(x for x in params._idle_cuts if x not in params.sources),
        notes=params.porting_notes,
        logprobs_mode=(modes,) if isinstance(modes, str) else frozen(modes),
        structured_outputs=structured and copy.deepcopy(structured),
        repetition_detection=(
            copy.copy(repetition) if repetition and repetition.max_pattern_size else None
        ),
    )
    snapshot = object.__new__(RequestParams)
    snapshot.__dict__.update(values)  # one update instead of fifty guarded assignments
    return snapshot


def frozen(value: Any) -> Any:
    """Return `value` with lists as tuples and dicts frozen, all the way down; leaves are shared."""
    if isinstance(value, dict):
        return FrozenDict({key: frozen(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return tuple(frozen(item) for item in value)
    if isinstance(value, (set, frozenset)):
        return frozenset(value)
    return value


def fresh(value: Any) -> Any:
    """Return `value` with its own containers, all the way down; leaves are shared."""
    if isinstance(value, dict):
        return {key: fresh(item) for key, item in value.items()}
    if isinstance(value, (list, set)):
        return type(value)(fresh(item) for item in value)
    if isinstance(value, (StructuredOutputsParams, RepetitionDetectionParams)):
        return copy.deepcopy(value)
    return value


_DERIVED = ("bad_words_token_ids", "eos_token_id", "fields_set", "presets")
_COPIED = tuple(
    item.name
    for item in fields(RequestParams)
    if item.name not in {"greedy", "all_stop_token_ids", "sources", "idle_cuts", "notes", *_DERIVED}
)

# The values at which a field changes nothing; min_tokens and an empty bias among them.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (1.0,),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "frequency_penalty": (0.0,),
    "presence_penalty": (0.0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "logprob_token_ids": ([],),
    "logits_processors": ([],),
    "stops": ([],),
    "observers": ([],),
}


_FROZEN = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words_token_ids",
    "logprob_token_ids",
    "extra_args",
    "logits_processors",
    "chain",
    "stops",
    "observers",
    "driver",
    "speculation",
    "picker",
)

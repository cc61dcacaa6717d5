"""SamplingParams: all that one request may ask for, checked when made and when changed.

The rules of the fields are in `sampling_rules.py`; the frozen form that a request holds is in
`request_params.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from . import request_checks
from .errors import ParameterTypeError, ValidationError, did_you_mean
from .param_rules import refuse_unknown, shown
from .param_sources import LAYERED, FromElsewhere
from .request_params import RequestParams, freeze, fresh
from .sampling_rules import (
    CONTAINERS,
    GREEDY_BELOW,
    RequestOutputKind,
    SamplingType,
    settle,
)
from .structured_params import (
    BeamSearchParams,
    RepetitionDetectionParams,
    StructuredOutputsParams,
)

__all__ = [
    "BeamSearchParams",
    "RepetitionDetectionParams",
    "RequestOutputKind",
    "RequestParams",
    "SamplingParams",
    "SamplingType",
    "StructuredOutputsParams",
]

POSITIONAL = 25  # how many fields may be given by position


class _Recorded:
    """Notes which fields were given and refuses unknown ones, before `__init__` adds defaults."""

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        if len(args) > POSITIONAL:
            raise ParameterTypeError(
                f"SamplingParams takes at most {POSITIONAL} positional values, got {len(args)}"
            )
        if kwargs:
            refuse_unknown("SamplingParams", kwargs, FIELDS)
        params = super().__new__(cls)
        params.__dict__["_fields_set"] = set(FIELD_NAMES[: len(args)]).union(kwargs)
        return params


class SamplingParams(_Recorded, FromElsewhere):
    """How one request is decoded, with vLLM's names, defaults and off-values.

    `SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64)`; use keywords, the first is `n`.

    Checked at construction and on assignment: `params.temperature = -1` raises ValidationError and
    leaves the object as it was. Temperature 0 is greedy and resets top_p, top_k and min_p to off.
    The owner may change it between calls; a request works on `snapshot()`.
    """

    n: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    stop: list[str]
    stop_token_ids: list[int]
    ignore_eos: bool
    max_tokens: int | None
    min_tokens: int
    logprobs: int | None
    prompt_logprobs: int | None
    logprob_token_ids: list[int] | None
    flat_logprobs: bool
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    output_kind: RequestOutputKind
    skip_clone: bool
    output_text_buffer_length: int  # derived: how many characters are held back while running
    structured_outputs: StructuredOutputsParams | None
    logit_bias: dict[int, float] | None
    allowed_token_ids: list[int] | None
    extra_args: dict[str, Any] | None
    bad_words: list[str]
    skip_reading_prefix_cache: bool
    thinking_token_budget: int | None
    repetition_detection: RepetitionDetectionParams | None
    best_of: int | None
    use_beam_search: bool
    length_penalty: float
    early_stopping: bool | str
    logits_processors: list[Callable[..., Any]] | None
    truncate_prompt_tokens: int | None
    chain: list[Any] | None
    profile: str | None
    preset: str | None
    picker: Any
    plan_review: bool
    on_dead_row: str
    logprobs_mode: str | list[str] | None
    kept_set: bool
    entropy: bool
    output_tensors: bool
    trace: str
    stops: list[Any] | None
    observers: list[Any] | None
    driver: Any
    speculation: Any

    _fields_set: set[str]
    _eos_token_id: int | None  # set by update_from_generation_config
    _all_eos_ids: set[int]  # set by update_from_generation_config
    _bad_words_token_ids: list[list[int]] | None  # set by update_from_tokenizer

    def __init__(
        self,
        n: int = 1,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | list[str] | None = None,
        stop_token_ids: list[int] | None = None,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        logprob_token_ids: list[int] | None = None,
        flat_logprobs: bool = False,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        include_stop_str_in_output: bool = False,
        output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE,
        skip_clone: bool = False,
        output_text_buffer_length: int = 0,
        *,
        structured_outputs: StructuredOutputsParams | dict[str, Any] | type | None = None,
        logit_bias: dict[int, float] | None = None,
        allowed_token_ids: list[int] | None = None,
        extra_args: dict[str, Any] | None = None,
        bad_words: list[str] | None = None,
        skip_reading_prefix_cache: bool | None = None,
        thinking_token_budget: int | None = None,
        repetition_detection: RepetitionDetectionParams | dict[str, Any] | None = None,
        best_of: int | None = None,
        use_beam_search: bool = False,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        logits_processors: list[Callable[..., Any]] | None = None,
        truncate_prompt_tokens: int | None = None,
        chain: list[Any] | None = None,
        profile: str | None = None,
        preset: str | None = None,
        picker: Any = None,
        plan_review: bool = True,
        on_dead_row: str = "error",
        logprobs_mode: str | list[str] | None = None,
        kept_set: bool = False,
        entropy: bool = False,
        output_tensors: bool = False,
        trace: str = "off",
        stops: list[Any] | None = None,
        observers: list[Any] | None = None,
        driver: Any = None,
        speculation: str | dict[str, Any] | bool | None = None,
    ) -> None:
        values = locals()
        del values["self"]
        given_length = values["output_text_buffer_length"]
        self.__dict__.update(values)
        self.__dict__.update(_eos_token_id=None, _all_eos_ids=set(), _bad_words_token_ids=None)
        self.__dict__.update(LAYERED, _sources={})
        for name in ("stop", "stop_token_ids", "bad_words"):
            if values[name] is None:
                self.__dict__[name] = []
        self._settle(self._fields_set)
        if given_length not in (0, self.output_text_buffer_length):
            raise ValidationError(
                f"output_text_buffer_length is derived from stop "
                f"({self.output_text_buffer_length} here), got {shown(given_length)}",
                parameter="output_text_buffer_length",
                value=given_length,
            )

    def _settle(self, names: Iterable[str]) -> None:
        settle(self.__dict__, names, self._fields_set)

    def __setattr__(self, name: str, value: Any) -> None:
        """Change one field under the same rules as the constructor's."""
        if name not in FIELDS:
            raise AttributeError(
                f"SamplingParams has no field {name!r}{did_you_mean(name, FIELD_NAMES)}"
            )
        if name == "output_text_buffer_length":
            raise AttributeError("output_text_buffer_length is derived from stop and is read-only")
        before = dict(
            self.__dict__, _fields_set=set(self._fields_set), _sources=dict(self._sources)
        )
        try:
            self._before_assignment(name, value, _SETTLED)
            self.__dict__[name] = value
            self._fields_set.add(name)
            self._settle((name,))
        except ValueError:
            self.__dict__.update(before)
            raise

    # --- what was asked ---------------------------------------------------------------------------

    @property
    def fields_set(self) -> frozenset[str]:
        """The fields that were given or assigned, also where the value equals the default."""
        return frozenset(self._fields_set)

    @property
    def sampling_type(self) -> SamplingType:
        """Greedy, drawn, or drawn with a seed."""
        if self.temperature < GREEDY_BELOW:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def eos_token_id(self) -> int | None:
        """The primary end id; None with `ignore_eos`, or before the engine has set it."""
        return None if self.ignore_eos else self._eos_token_id

    @property
    def all_stop_token_ids(self) -> set[int]:
        """The user's stop ids and every end id of the model, also with `ignore_eos`."""
        return self._all_eos_ids.union(self.stop_token_ids)

    @property
    def bad_words_token_ids(self) -> list[list[int]] | None:
        """The tokenised `bad_words`; None before `update_from_tokenizer`."""
        return self._bad_words_token_ids

    # --- copies -----------------------------------------------------------------------------------

    @classmethod
    def from_optional(cls, **fields: Any) -> Self:
        """Make parameters from a request body.

        None means the default, and text keys of `logit_bias` become ids.
        """
        given = {name: value for name, value in fields.items() if value is not None}
        bias = given.get("logit_bias")
        if isinstance(bias, Mapping):
            given["logit_bias"] = request_checks.integer_keys(bias)
        return cls(**given)

    def clone(self) -> Self:
        """Return a copy with its own containers; a shallow one with `skip_clone`.

        Leaves (callables, stage objects, tensors) are shared either way.
        """
        twin = object.__new__(type(self))
        if self.skip_clone:
            twin.__dict__.update(self._shallow())
        else:
            twin.__dict__.update({name: fresh(value) for name, value in self.__dict__.items()})
        return twin

    def __copy__(self) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(self._shallow())
        return twin

    def _shallow(self) -> dict[str, Any]:
        own = {"_fields_set": set(self._fields_set), "_sources": dict(self._sources)}
        return {**self.__dict__, **own}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = object.__new__(type(self))
        twin.__dict__.update(
            {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()}
        )
        return twin

    def snapshot(self) -> RequestParams:
        """Return the frozen form for one request; lists edited in place are checked first."""
        self._settle(CONTAINERS)
        return freeze(self)

    # --- what the engine adds ---------------------------------------------------------------------

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Take the end ids of the tokenizer and of generation_config in; no other field changes.

        Further end ids join `stop_token_ids` unless `ignore_eos`. Call it on a clone.
        """
        more = generation_config.get("eos_token_id")
        ids = {more} if isinstance(more, int) else set(more or ())
        state = self.__dict__
        state["_eos_token_id"] = eos_token_id
        state["_all_eos_ids"] = ids if eos_token_id is None else ids | {eos_token_id}
        if not self.ignore_eos:
            known = {eos_token_id, *self.stop_token_ids}
            state["stop_token_ids"] = self.stop_token_ids + sorted(ids - known)

    def update_from_tokenizer(self, tokenizer: Any) -> None:
        """Tokenise `bad_words`, each word bare and with one leading space. Call it on a clone."""
        if self.bad_words:
            self.__dict__["_bad_words_token_ids"] = request_checks.bad_word_ids(
                self.bad_words, tokenizer
            )

    def verify(self, model_config: Any, spec_config: Any, so_config: Any, tokenizer: Any) -> None:
        """Check what only the engine knows: vocabulary, tokenizer and the limit on log-probs.

        `model_config` has `get_vocab_size()` or `vocab_size`, and `max_logprobs`. The other two
        configs set no limit here.
        """
        request_checks.check_request(
            self,
            vocab_size=request_checks.vocab_size_of(model_config),
            max_logprobs=model_config.max_logprobs,
            tokenizer=tokenizer,
        )

    @staticmethod
    def for_sampler_warmup() -> SamplingParams:
        """Return parameters that switch every code path of the sampler on."""
        params = SamplingParams(
            temperature=0.9,
            top_p=0.9,
            top_k=50,
            min_p=0.1,
            frequency_penalty=0.5,
            presence_penalty=0.5,
            repetition_penalty=1.2,
            min_tokens=2,
            logit_bias={0: -1.0, 1: 0.5},
            logprobs=5,
            prompt_logprobs=1,
        )
        params.__dict__["_bad_words_token_ids"] = [[0], [1, 2]]
        return params

    # --- as a value -------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SamplingParams):
            return NotImplemented
        return all(self.__dict__[name] == other.__dict__[name] for name in FIELD_NAMES)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        """The main fields and the others that differ from their default; evaluates to an equal."""
        shown_fields = [
            f"{name}={self.__dict__[name]!r}"
            for name in FIELD_NAMES
            if name in _MAIN or (name in _OTHERS and self.__dict__[name] != _SETTLED[name])
        ]
        return f"SamplingParams({', '.join(shown_fields)})"

    def __reduce__(self) -> tuple[object, ...]:
        state = {
            name: value
            for name, value in self.__dict__.items()
            if name not in FIELDS or name in self._fields_set or value != _SETTLED[name]
        }
        return _restore, (type(self), state)


def _restore(cls: type[SamplingParams], state: dict[str, Any]) -> SamplingParams:
    params = object.__new__(cls)
    params.__dict__.update({name: fresh(value) for name, value in _SETTLED.items()})
    params.__dict__.update(state)
    return params


def _declared_defaults() -> dict[str, Any]:
    init = SamplingParams.__init__
    positional = dict(zip(init.__code__.co_varnames[1:], init.__defaults__ or (), strict=False))
    return {**positional, **(init.__kwdefaults__ or {})}


DEFAULTS: dict[str, Any] = _declared_defaults()
FIELD_NAMES: tuple[str, ...] = tuple(DEFAULTS)
FIELDS = frozenset(FIELD_NAMES)

_SETTLED: dict[str, Any] = {
    name: value for name, value in SamplingParams().__dict__.items() if name in FIELDS
}
_MAIN = frozenset(FIELD_NAMES[:16]) | {"detokenize", "skip_special_tokens"}
_OTHERS = FIELDS - _MAIN - {"output_text_buffer_length"}

"""What a request returns: RequestOutput with its completions, its timing, and the plan that ran."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .logprobs import FlatLogprobs, KeptSets, Logprob, PromptLogprobs, SampleLogprobs
from .lora_request import LoRARequest
from .plan_report import DroppedStep, PlanReport, PlanStep
from .pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)

if TYPE_CHECKING:
    from torch import Tensor

    from .bundle import Bundle, RunRecord

__all__ = [
    "BeamSearchOutput",
    "BeamSearchSequence",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "DroppedStep",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "FlatLogprobs",
    "KeptSets",
    "Logprob",
    "PlanReport",
    "PlanStep",
    "PoolingOutput",
    "PoolingRequestOutput",
    "PromptLogprobs",
    "RequestOutput",
    "RequestStateStats",
    "SampleLogprobs",
    "ScoringOutput",
    "ScoringRequestOutput",
]


@dataclass
class CompletionOutput:
    """One generated sequence of a request.

    `finish_reason` is None while it runs, else "stop", "length", "abort", "error" or
    "repetition"; `stop_reason` is the stop string or id that ended it. `error` has the sentence
    when the reason is "error". Ids and log-probs are not trimmed to the text.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None  # of the values in `logprobs`
    logprobs: SampleLogprobs | None = None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None
    error: str | None = None
    logprobs_at: dict[str, SampleLogprobs] | None = None
    mean_logprob: float | None = None  # of the tokens, before every stage; None without tokens
    low_confidence: bool | None = None  # None unless the observer "confidence" was asked
    low_confidence_reason: str | None = None
    kept_set: KeptSets | None = None  # ids that the picker could choose from, a position each
    kept_mass: list[float] | None = None  # their probability before every stage
    entropy: list[float] | None = None  # nats, a position each
    tensors: dict[str, Tensor] | None = None  # log-probs mode -> float32 [tokens, vocabulary]
    trace: Any = None
    parsed: Any = None
    parse_error: str | None = None
    complete: bool | None = None
    beam_score: float | None = None  # of a beam: its log-probability over its length's power
    score: float | None = None  # of an output that a driver ranked: what it was ranked by
    answer: str | None = None  # that a driver read in the text
    suppressed: list[dict[str, Any]] | None = None  # what a driver took back, in order
    approximate: list[str] | None = None
    choice_probs: dict[str, float] | None = None  # share of each option of a `choice`

    def finished(self) -> bool:
        """Say whether the sequence has ended."""
        return self.finish_reason is not None

    def _merge(self, new: CompletionOutput) -> None:
        """Append what `new` brought since the last yield; its state replaces ours."""
        self.text += new.text
        if not isinstance(self.token_ids, MutableSequence):
            self.token_ids = list(self.token_ids)
        self.token_ids.extend(new.token_ids)
        for name in GROWING:
            setattr(self, name, _joined(getattr(self, name), getattr(new, name)))
        for mode, values in (new.logprobs_at or {}).items():
            self.logprobs_at = self.logprobs_at or {}
            self.logprobs_at[mode] = _joined(self.logprobs_at.get(mode), values)
        for mode, rows in (new.tensors or {}).items():
            self.tensors = self.tensors or {}
            mine = self.tensors.get(mode)
            self.tensors[mode] = rows if mine is None else _stacked(mine, rows)
        for name in _STATE:
            setattr(self, name, getattr(new, name))


# Fields of CompletionOutput that hold one value a position, and those that hold the latest state.
GROWING = ("logprobs", "kept_set", "kept_mass", "entropy")
_STATE = (
    "cumulative_logprob",
    "mean_logprob",
    "low_confidence",
    "low_confidence_reason",
    "finish_reason",
    "stop_reason",
    "error",
    "routed_experts",
    "trace",
    "parsed",
    "parse_error",
    "complete",
    "approximate",
    "suppressed",
    "choice_probs",
)


def _stacked(mine: Tensor, new: Tensor) -> Tensor:
    import torch  # here, so that outputs can be read without it

    return torch.cat([mine, new])


def _joined(mine: Any, new: Any) -> Any:
    if not new:
        return mine
    if mine is None:
        return new[:]
    mine.extend(new)
    return mine


@dataclass
class RequestStateStats:
    """When things happened to a request, in seconds.

    `arrival_time` is of the wall clock, `*_ts` of the monotonic one; 0.0 means "not yet". The
    older names of vLLM's RequestMetrics are properties, None where nothing is known.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False
    finished_ts: float = 0.0  # ours; vLLM stops at the last token
    num_draft_tokens: int = 0  # ours: guessed by speculation
    num_accepted_draft_tokens: int = 0  # of those, right

    @property
    def last_token_time(self) -> float | None:
        """Monotonic time of the latest token."""
        return self.last_token_ts or None

    @property
    def first_scheduled_time(self) -> float | None:
        """Monotonic time at which the request first ran."""
        return self.scheduled_ts or None

    @property
    def first_token_time(self) -> float | None:
        """Monotonic time of the first token."""
        return self.first_token_ts or None

    @property
    def finished_time(self) -> float | None:
        """Monotonic time at which the request ended."""
        return self.finished_ts or None

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between queueing and the first run."""
        return self.scheduled_ts - self.queued_ts if self.scheduled_ts else None

    @property
    def scheduler_time(self) -> float | None:
        """Not measured for single requests."""
        return None

    @property
    def model_forward_time(self) -> float | None:
        """Not measured for single requests, which share their forward passes."""
        return None

    @property
    def model_execute_time(self) -> float | None:
        """Not measured for single requests, which share their forward passes."""
        return None


class RequestOutput:
    """The result of one request, whole or so far: `n` completions in index order.

    An unknown keyword is dropped with one warning, as vLLM does, so that results of newer versions
    can be rebuilt.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_logprobs: PromptLogprobs | None,
        outputs: list[CompletionOutput],
        finished: bool,
        metrics: RequestStateStats | None = None,
        lora_request: LoRARequest | None = None,
        encoder_prompt: str | None = None,
        encoder_prompt_token_ids: list[int] | None = None,
        num_cached_tokens: int | None = None,
        *,
        kv_transfer_params: Mapping[str, Any] | None = None,
        plan: PlanReport | None = None,
        **unknown: Any,
    ) -> None:
        if unknown:
            warnings.warn(
                f"RequestOutput does not know {', '.join(sorted(unknown))}; dropped",
                UserWarning,
                stacklevel=2,
            )
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self.prompt_logprobs = prompt_logprobs
        self.outputs = outputs
        self.finished = finished
        self.metrics = metrics
        self.lora_request = lora_request
        self.encoder_prompt = encoder_prompt
        self.encoder_prompt_token_ids = encoder_prompt_token_ids
        self.num_cached_tokens = num_cached_tokens
        self.kv_transfer_params = kv_transfer_params
        self.plan = plan
        self._run: RunRecord | None = None  # what a bundle is made of; set by the engine

    @property
    def trace(self) -> Any:
        """The trace of the first completion, or None."""
        return self.outputs[0].trace if self.outputs else None

    def to_bundle(self) -> Bundle:
        """Return what reproduces this run, for `LLM.replay`; ValueError if the output is a part."""
        from .bundle import Bundle

        return Bundle.of(self)

    def add(self, next_output: RequestOutput, aggregate: bool) -> None:
        """Merge a later yield of the same request.

        A completion with the same index is extended when `aggregate` (yields are deltas), replaced
        otherwise (yields are cumulative); one with another index is added. Prompt log-probs and
        metrics are taken where the later yield has them.
        """
        self.finished |= next_output.finished
        self.kv_transfer_params = next_output.kv_transfer_params
        self.metrics = next_output.metrics or self.metrics
        self.plan = next_output.plan or self.plan
        if self._run is not None and next_output._run is not None:
            self._run.lengths |= next_output._run.lengths
        if self.prompt_logprobs is None:
            self.prompt_logprobs = next_output.prompt_logprobs
        places = {completion.index: i for i, completion in enumerate(self.outputs)}
        for new in next_output.outputs:
            place = places.get(new.index)
            if place is None:
                self.outputs.append(new)
            elif aggregate:
                self.outputs[place]._merge(new)
            else:
                self.outputs[place] = new

    def __repr__(self) -> str:
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        names = ", ".join(f"{name}={value!r}" for name, value in values.items())
        return f"RequestOutput({names})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None}  # its parameters may hold code


@dataclass
class BeamSearchSequence:
    """One hypothesis; `tokens` holds the prompt and what was generated."""

    orig_prompt: Any
    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    lora_request: LoRARequest | None = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    score: float = 0.0  # cum_logprob over a power of the length, as the profile has it


@dataclass
class BeamSearchOutput:
    """The hypotheses of one prompt, best first."""

    sequences: list[BeamSearchSequence] = field(default_factory=list)

"""A request and its sequences: tokens, status, slot, and why they ended."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .params import RequestParams


class Status(Enum):
    """Where a sequence stands; changed by the scheduler alone."""

    HELD = "held"  # its request may not run yet
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Sequence:
    """One growing list of tokens; `prompt_ids` never change, `output_ids` only grow."""

    uid: int  # unique in the engine, never reused
    request: Request
    branch: int  # index among the request's sequences, and part of the noise address
    prompt_ids: tuple[int, ...]  # empty where the prompt is embeddings
    prompt_len: int
    output_ids: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    slot: int = -1  # set by the scheduler while running
    blocks: list[int] = field(default_factory=list)  # set by the scheduler
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_reused: int = 0  # of those, tokens found in the prefix cache
    num_published: int = 0  # leading blocks that the prefix cache knows
    digests: list[bytes] = field(default_factory=list)  # names of the leading full blocks
    fork_from: Sequence | None = None  # set while the prompt of another branch is being computed
    epoch: int = -1  # set by the chain each time the sequence's state is opened
    states: list[Any] = field(default_factory=list)  # set by the chain, one per plan entry
    records: list[Any] = field(default_factory=list)  # set by the engine, one per observer
    text: Any = None  # core.detokenizer.TextStream, set by the engine
    num_sent: int = 0  # output tokens that an output has carried
    is_reported: bool = False  # its last output is out
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    score: float = 0.0  # sum of its tokens' log-probabilities before every stage
    is_pending: bool = False  # its distribution is known; it waits for the lanes beside it
    note: Any = None  # its driver's own
    undo: Any = None  # core.undo.Undo, where its driver may take tokens back
    ending: Any = None  # the Verdict that its newest token brought, while its driver looks
    draft: abc.Sequence[int] = ()  # guessed tokens that the next step computes along
    guesser: Any = None  # core.speculation.Guesser, made when it first guesses

    @property
    def key(self) -> int:
        """The 64-bit key of the request's noise."""
        return self.request.key

    @property
    def plan(self) -> Any:
        """The request's plan."""
        return self.request.plan

    @property
    def params(self) -> RequestParams:
        """The request's parameters."""
        return self.request.params

    @property
    def mean_logprob(self) -> float | None:
        """Mean log-probability of its tokens before every stage."""
        num = self.num_settled
        if not num:
            return None
        score: float = self.score if num == len(self.output_ids) else self.undo.score_of(self)
        return score / num

    @property
    def num_settled(self) -> int:
        """Output tokens that stay, whatever its driver does."""
        if self.undo is None or self.finish_reason is not None:
            return len(self.output_ids)
        settled: int = self.undo.settled
        return settled

    def record_of(self, observer: str) -> Any:
        """Return the record of an observer of the request, by its name; None without it."""
        for (each, _), record in zip(self.plan.observers, self.records, strict=True):
            if each.name == observer:
                return record
        return None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_len + len(self.output_ids)

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.status is Status.FINISHED

    def token_range(self, start: int, end: int) -> abc.Sequence[int]:
        """Return tokens [start, end) of prompt and output together; 0 stands for an embedding."""
        prompt = self.prompt_len
        if start >= prompt:
            return self.output_ids[start - prompt : end - prompt]
        known = self.prompt_ids or (0,) * prompt
        if end <= prompt:
            return known[start:end]
        return [*known[start:], *self.output_ids[: end - prompt]]


@dataclass(eq=False, slots=True)
class Request:
    """What a caller asked for: a prompt, frozen parameters, and one sequence for each answer."""

    request_id: str
    prompt: str | None
    prompt_ids: tuple[int, ...]  # empty where the prompt is embeddings
    params: RequestParams
    plan: Any  # core.plan.Plan
    key: int
    priority: int
    arrival_time: float  # seconds, wall clock
    arrival_index: int
    prompt_embeds: Any = None  # Tensor [prompt_len, hidden] in the model's dtype
    sequences: list[Sequence] = field(default_factory=list)
    output_kind: Any = None
    prompt_logprobs: Any = None  # collected by the engine while the prompt is computed
    metrics: Any = None
    given: Any = None  # its SamplingParams, for processors of vLLM's interface
    notes: dict[str, str] = field(default_factory=dict)  # what to tell of it besides its plan
    facts: Any = None  # core.bundle.EngineFacts, what a bundle says of the engine
    cache_root: bytes = b""  # what the names of this request's blocks start from
    num_cached_tokens: int | None = None  # set by the scheduler when the request first runs
    drive: Any = None  # core.drive.Drive, where the request has a driver
    asked_ids: tuple[int, ...] | None = None  # the prompt, where a driver took some of its end
    speculation: Any = None  # core.speculation.BoundProposer, where its tokens are guessed
    num_slots: int = 1  # that its sequences need at once, as they wait for each other
    is_reported: bool = (
        False  # what is told once is out: the final output, a delta's prompt log-probs
    )

    @property
    def is_finished(self) -> bool:
        """Whether every sequence ended."""
        return all(sequence.is_finished for sequence in self.sequences)

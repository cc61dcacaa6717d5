"""What the answers of chat and completions share: choices with ours and the stream's usage."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...core.outputs import CompletionOutput, RequestOutput
from ...core.params import SamplingParams
from .logprobs import finite_or_none
from .protocol import Common, StreamOptions
from .running import usage_of
from .state import ServerState


@dataclass(slots=True)
class Usage:
    """Token counts of one call, over all its requests."""

    prompt_tokens: int = 0
    cached: int | None = None
    completion: dict[tuple[int, int], int] = field(default_factory=dict)  # (job, choice) -> tokens

    def add(self, job: int, output: RequestOutput) -> None:
        """Take what an output brought."""
        for choice in output.outputs:
            key = (job, choice.index)
            self.completion[key] = self.completion.get(key, 0) + len(choice.token_ids)
        if output.num_cached_tokens:
            self.cached = max(self.cached or 0, output.num_cached_tokens)

    def told(self, state: ServerState) -> dict[str, Any]:
        """The usage object so far."""
        return usage_of(state, self.prompt_tokens, sum(self.completion.values()), self.cached)


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """Whether a stream tells of usage: at its end, and on every event."""

    at_end: bool
    always: bool

    @classmethod
    def of(cls, state: ServerState, options: StreamOptions | None) -> StreamUsage:
        """Read the options; the server may force both."""
        if state.settings.enable_force_include_usage:
            return cls(True, True)
        at_end = bool(options and options.include_usage)
        return cls(at_end, at_end and bool(options and options.continuous_usage_stats))


def now() -> int:
    """Seconds since the epoch, as `created` tells them."""
    return int(time.time())


def extras_of(
    body: Common, output: RequestOutput, choice: CompletionOutput, *, is_last: bool
) -> dict[str, Any]:
    """Return the fields of a choice that are ours, those that were asked for and are there."""
    told: dict[str, Any] = {}
    if body.kept_set and choice.kept_set is not None:
        told["kept_set"] = [list(ids) for ids in choice.kept_set]
        told["kept_mass"] = choice.kept_mass
    if body.entropy and choice.entropy is not None:
        told["entropy"] = [finite_or_none(value) for value in choice.entropy]
    if not is_last:
        return told
    if body.observers is not None:
        told["mean_logprob"] = finite_or_none(choice.mean_logprob)
        told["low_confidence"] = choice.low_confidence
        told["low_confidence_reason"] = choice.low_confidence_reason
    is_traced = body.trace not in (None, "off")
    if (body.return_plan or is_traced) and output.plan is not None:
        told["plan"] = output.plan.to_dict()
    if is_traced and choice.trace is not None:
        told["trace"] = as_plain(choice.trace)
    if body.structured_outputs is not None or body.response_format is not None:
        for name in ("complete", "approximate", "parse_error"):
            value = getattr(choice, name)
            if value is not None:
                told[name] = value
    return told


def stop_reason_of(params: SamplingParams, choice: CompletionOutput) -> int | str | None:
    """Return what ended a choice; of a beam the end token too, as vLLM tells it over HTTP."""
    is_ended = choice.finish_reason == "stop" and choice.stop_reason is None
    if params.use_beam_search and is_ended and choice.token_ids:
        return choice.token_ids[-1]
    return choice.stop_reason


def as_plain(value: Any) -> Any:
    """Return what an object tells of itself as plain data."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def headers_of(
    state: ServerState, call_id: str, told: Mapping[str, str], notes: list[str]
) -> dict[str, str]:
    """Return the headers of an answer: ignored fields, notes, the request's id."""
    from .fields import NOTE_HEADER

    headers = dict(told)
    if notes:
        text = "; ".join(dict.fromkeys(notes))
        headers[NOTE_HEADER] = text.encode("ascii", "replace").decode().replace("\n", " ")
    if state.settings.enable_request_id_headers:
        headers["X-Request-Id"] = call_id.partition("-")[2] or call_id
    return headers

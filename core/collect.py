"""Make the outputs of requests from their sequences: final, cumulative or what is new."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from .blame import blaming
from .errors import StageError
from .outputs import CompletionOutput, RequestOutput, RequestStateStats
from .params import RequestOutputKind
from .request import Request, Sequence


def note_token(metrics: RequestStateStats, now: float) -> None:
    """Record that a token came at monotonic time `now`."""
    metrics.num_generation_tokens += 1
    metrics.last_token_ts = now
    if not metrics.first_token_ts:
        metrics.first_token_ts = now
        metrics.first_token_latency = now - metrics.queued_ts


class LostRecord(Exception):
    """An observer failed to turn its record of `sequence` into fields; it is not asked again."""

    def __init__(self, sequence: Sequence, error: StageError) -> None:
        super().__init__(str(error))
        self.sequence = sequence
        self.error = error


def output_of(sequence: Sequence, interval: int) -> RequestOutput | None:
    """Return what this step has to say about `sequence`, by its request's output kind, or None.

    `interval`: of a running sequence, speak on its first token and on every `interval`th. Raises
    LostRecord, after which the call may be repeated.
    """
    request = sequence.request
    kind = request.output_kind
    if kind is RequestOutputKind.FINAL_ONLY:
        if not request.is_finished or request.is_reported:
            return None
        done = [_completion(child, 0) for child in request.sequences]
        request.is_reported = True
        return _request_output(request, done, finished=True)
    if sequence.is_reported:
        return None
    count = len(sequence.output_ids)
    if sequence.finish_reason is None and count > 1 and count % interval:
        return None
    if kind is RequestOutputKind.DELTA:
        completion = _completion(sequence, sequence.num_sent)
        completion.text = sequence.text.delta()
        sequence.num_sent = count
    else:
        completion = _completion(sequence, 0)
    sequence.is_reported = sequence.finish_reason is not None
    # Several branches may end in one step; only the last word on the request is final.
    finished = all(branch.is_reported for branch in request.sequences)
    return _request_output(request, [completion], finished=finished)


def _completion(sequence: Sequence, start: int) -> CompletionOutput:
    """Return a completion from output position `start` on."""
    observed = _observed(sequence)
    logprobs = observed.pop("logprobs", None)
    if logprobs is not None:
        logprobs = logprobs[start : len(sequence.output_ids)]
    return CompletionOutput(
        index=sequence.branch,
        text=sequence.text.text,
        token_ids=sequence.output_ids[start:],
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
        **observed,
    )


def _observed(sequence: Sequence) -> dict[str, Any]:
    """Ask the observers of a sequence for their fields."""
    observed: dict[str, Any] = {}
    for place, (observer, _) in enumerate(sequence.plan.observers):
        record = sequence.records[place]
        if record is _LOST:
            continue
        try:
            with blaming(observer.name, "observer", len(sequence.output_ids)):
                values = observer.result(record)
                unknown = sorted(set(values) - _FIELDS)
                if unknown:
                    raise ValueError(f"CompletionOutput has no field {unknown[0]!r}")
        except StageError as error:
            sequence.records[place] = _LOST
            raise LostRecord(sequence, error) from error
        observed.update(values)
    return observed


_LOST = object()  # in place of a record whose observer failed
_FIELDS = frozenset(item.name for item in fields(CompletionOutput))


def _request_output(
    request: Request, completions: list[CompletionOutput], *, finished: bool
) -> RequestOutput:
    prompt_logprobs = None
    collector = request.prompt_logprobs
    if collector is not None and collector.next_position >= len(request.prompt_ids):
        first = request.output_kind is not RequestOutputKind.DELTA or not request.is_reported
        if first:
            prompt_logprobs = collector.values
        if request.output_kind is RequestOutputKind.DELTA:
            request.is_reported = True
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=None if request.prompt_embeds is not None else list(request.prompt_ids),
        prompt_logprobs=prompt_logprobs,
        outputs=completions,
        finished=finished,
        metrics=request.metrics,
        num_cached_tokens=request.num_cached_tokens,
        plan=request.plan.report,
    )

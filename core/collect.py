"""Make the outputs of requests from their sequences: final, cumulative or what is new."""

from __future__ import annotations

from typing import Any

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


def output_of(request: Request, sequence: Sequence, interval: int) -> RequestOutput | None:
    """Return what this step has to say about `sequence`, by its request's output kind, or None.

    `interval`: of a running sequence, speak on its first token and on every `interval`th.
    """
    kind = request.output_kind
    if kind is RequestOutputKind.FINAL_ONLY:
        if not request.is_finished or request.is_reported:
            return None
        request.is_reported = True
        done = [_completion(child, 0) for child in request.sequences]
        return _request_output(request, done)
    if sequence.is_reported:
        return None
    count = len(sequence.output_ids)
    if sequence.finish_reason is None and count > 1 and count % interval:
        return None
    sequence.is_reported = sequence.finish_reason is not None
    if kind is RequestOutputKind.DELTA:
        completion = _completion(sequence, sequence.num_sent, sequence.text.delta())
        sequence.num_sent = count
    else:
        completion = _completion(sequence, 0)
    return _request_output(request, [completion])


def _completion(sequence: Sequence, start: int, text: str | None = None) -> CompletionOutput:
    """Return a completion from output position `start` on."""
    fields: dict[str, Any] = {}
    for (observer, _), record in zip(sequence.plan.observers, sequence.records, strict=True):
        fields.update(observer.result(record))
    logprobs = fields.pop("logprobs", None)
    if logprobs is not None:
        logprobs = logprobs[start:]
    return CompletionOutput(
        index=sequence.branch,
        text=sequence.text.text if text is None else text,
        token_ids=sequence.output_ids[start:],
        logprobs=logprobs,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
        **fields,
    )


def _request_output(request: Request, completions: list[CompletionOutput]) -> RequestOutput:
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
        prompt_token_ids=list(request.prompt_ids),
        prompt_logprobs=prompt_logprobs,
        outputs=completions,
        finished=request.is_finished,
        metrics=request.metrics,
        num_cached_tokens=request.num_cached_tokens,
        plan=request.plan.report,
    )

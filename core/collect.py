"""Make the outputs of requests from their sequences: final, cumulative or what is new."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from .blame import blaming
from .bundle import RunRecord
from .errors import StageError
from .outputs import GROWING, CompletionOutput, PlanReport, RequestOutput, RequestStateStats
from .params import RequestOutputKind
from .request import Request, Sequence
from .stage import Ending, Written


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

    `interval`: of a running sequence, speak on its first token and whenever it has passed a
    multiple of `interval`. Raises
    LostRecord, after which the call may be repeated.
    """
    request = sequence.request
    kind = request.output_kind
    if kind is RequestOutputKind.FINAL_ONLY:
        if not request.is_finished or request.is_reported:
            return None
        if request.drive is not None:
            done = _driven(request)
        else:
            done = [_completion(child, 0) for child in request.sequences]
        if request.drive is None and request.params.best_of > request.params.n:
            done = _best(request.sequences, done, request.params.n)
        request.is_reported = True
        return _request_output(request, done, finished=True)
    if sequence.is_reported:
        return None
    count, told = sequence.num_settled, sequence.num_sent
    if sequence.undo is not None and sequence.finish_reason is None and count == told:
        return None
    if sequence.finish_reason is None and told and count // interval == told // interval:
        return None
    if kind is RequestOutputKind.DELTA:
        completion = _completion(sequence, sequence.num_sent)
        completion.text = _text_of(sequence).delta()
    else:
        completion = _completion(sequence, 0)
    sequence.num_sent = count
    sequence.is_reported = sequence.finish_reason is not None
    # Several branches may end in one step; only the last word on the request is final.
    finished = all(branch.is_reported for branch in request.sequences)
    return _request_output(request, [completion], finished=finished)


def _driven(request: Request) -> list[CompletionOutput]:
    """Return the outputs of a request with a driver, in the order that it gives them."""
    try:
        sequences, fields = request.drive.outputs(request)
    except StageError as error:
        sequences, fields = (request.drive.done + request.sequences)[:1], [{}]
        sequences[0].finish_reason, sequences[0].error = "error", str(error)
    return [
        replace(_completion(sequence, 0), index=place, **extra)
        for place, (sequence, extra) in enumerate(zip(sequences, fields, strict=True))
    ]


def _completion(sequence: Sequence, start: int) -> CompletionOutput:
    """Return a completion from output position `start` on."""
    observed = _observed(sequence)
    new = slice(start, sequence.num_settled)
    for name in GROWING:
        if observed.get(name) is not None:
            observed[name] = observed[name][new]
    for name in ("logprobs_at", "tensors"):
        if observed.get(name) is not None:
            observed[name] = {mode: values[new] for mode, values in observed[name].items()}
    return CompletionOutput(
        index=sequence.branch,
        text=_text_of(sequence).text,
        token_ids=sequence.output_ids[new],
        mean_logprob=sequence.mean_logprob,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
        **{**observed, **_told(sequence), **_driver_fields(sequence)},
    )


def _text_of(sequence: Sequence) -> Any:
    """Return the text that may be read: a running sequence's settled one."""
    if sequence.undo is None or sequence.finish_reason is not None:
        return sequence.text
    return sequence.undo.shown


def _driver_fields(sequence: Sequence) -> Mapping[str, Any]:
    """Ask a sequence's driver for its fields; a failure is told in the notes instead."""
    drive = sequence.request.drive
    if drive is None:
        return {}
    name = drive.driver.name
    try:
        with blaming(name, "driver", len(sequence.output_ids)):
            fields: Mapping[str, Any] = drive.driver.fields(sequence)
    except StageError as error:
        sequence.request.notes[f"driver.{name}"] = str(error)
        return {}
    return fields


def _told(sequence: Sequence) -> dict[str, Any]:
    """Ask the stages of a sequence that tell of it for their fields; a failure is told instead."""
    fields: dict[str, Any] = {}
    if not sequence.plan.tellers or not sequence.states:
        return fields
    written = Written(
        _text_of(sequence).text,
        sequence.output_ids[: sequence.num_settled],
        sequence.finish_reason,
        sequence.stop_reason,
    )
    for place in sequence.plan.tellers:
        entry = sequence.plan.entries[place]
        try:
            with blaming(entry.stage.name, entry.instance, len(sequence.output_ids)):
                fields.update(entry.stage.result(entry.params, sequence.states[place], written))
        except StageError as error:
            sequence.request.notes[entry.instance] = str(error)
    return fields


def _best(
    sequences: list[Sequence], done: list[CompletionOutput], n: int
) -> list[CompletionOutput]:
    """Return the `n` best of a request's candidates, numbered from the best.

    By the sum of their tokens' raw log-probabilities; different token sequences come before
    copies, failed candidates last, and the lower branch wins a tie.
    """
    order = sorted(
        range(len(done)),
        key=lambda i: (sequences[i].finish_reason == "error", -sequences[i].score),
    )
    firsts: dict[tuple[int, ...], int] = {}
    for place in order:
        firsts.setdefault(tuple(sequences[place].output_ids), place)
    distinct = list(firsts.values())
    ranked = [*distinct, *(place for place in order if place not in set(distinct))]
    return [replace(done[place], index=rank) for rank, place in enumerate(ranked[:n])]


def note_failure(sequence: Sequence, measured: Iterable[tuple[int, Mapping[str, Any]]]) -> None:
    """Tell the observers of a sequence what they measured in the step in which it failed."""
    if sequence.undo is not None:
        try:
            sequence.undo.end(sequence)
        except StageError:  # the sequence ends with the error that it has
            return
    for place, values in measured:
        try:
            sequence.plan.observers[place][0].failed(sequence.records[place], values)
        except Exception:  # the sequence ends with the error that it has
            sequence.records[place] = _LOST


def end_records(sequence: Sequence) -> None:
    """Tell the observers of a sequence that it has ended; StageError for what one raises."""
    for place, (observer, _) in enumerate(sequence.plan.observers):
        record = sequence.records[place]
        if record is _LOST:
            continue
        ending = Ending(
            request_id=sequence.request.request_id,
            index=sequence.branch,
            reason=sequence.finish_reason or "",
            num_tokens=len(sequence.output_ids),
            mean_logprob=sequence.mean_logprob,
            error=sequence.error,
        )
        try:
            with blaming(observer.name, "observer", len(sequence.output_ids)):
                observer.finish(record, ending)
        except StageError:
            sequence.records[place] = _LOST
            raise


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
    output = RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=_prompt_ids(request),
        prompt_logprobs=prompt_logprobs,
        outputs=completions,
        finished=finished,
        metrics=request.metrics,
        num_cached_tokens=request.num_cached_tokens,
        plan=_report(request),
    )
    has_embeds = request.prompt_embeds is not None
    record = RunRecord(request.params, request.key, request.facts, has_embeds)
    if request.output_kind is RequestOutputKind.DELTA:
        told = {part.index for part in completions}
        for sequence in request.sequences:
            if sequence.branch in told:
                record.lengths[sequence.branch] = len(sequence.output_ids)
    output._run = record
    return output


def _prompt_ids(request: Request) -> list[int] | None:
    if request.prompt_embeds is not None:
        return None
    return list(request.prompt_ids if request.asked_ids is None else request.asked_ids)


def _report(request: Request) -> PlanReport:
    """Return the plan's report, which is shared, with the notes of this request added."""
    report: PlanReport = request.plan.report
    notes = list(request.notes.values())
    params = request.params
    if "max_tokens" not in params.fields_set and params.max_tokens is not None:
        ended = (
            sequence.finish_reason == "length" and len(sequence.output_ids) >= params.max_tokens
            for sequence in request.sequences
        )
        if any(ended):
            notes.append(
                f"max_tokens was left at its default of {params.max_tokens}, which ended the text; "
                "give a larger one, or None for as much as the context holds"
            )
    return replace(report, notes=(*report.notes, *notes)) if notes else report

"""Run the texts of a comparison on an engine, many at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ....core.errors import ValidationError
from ....core.outputs import RequestOutput
from ....core.params import RequestOutputKind, SamplingParams
from ..options import Sampling
from ..session import chat_request
from .outcome import Job, Outcome

if TYPE_CHECKING:
    from ....core.engine import LLMEngine


def check(engine: LLMEngine, sampling: Sampling, jobs: Sequence[Job]) -> None:
    """Refuse a column that cannot run, by its name, before anything is generated."""
    for column in {job.column.name: job.column for job in jobs}.values():
        try:
            engine.explain(_params(engine, sampling, column.fields, seed=0))
        except ValidationError as error:
            raise ValidationError(
                f"column {column.name!r}: {error}", parameter="column", value=column.name
            ) from None


def run(
    engine: LLMEngine, sampling: Sampling, jobs: Sequence[Job], *, chat: bool
) -> Iterator[Outcome]:
    """Yield each outcome as it is done; what is wrong with one job stays with it."""
    most = 2 * engine.config.max_num_seqs
    left = iter(jobs)
    running: dict[str, Job] = {}
    serial = 0
    exhausted = False
    while running or not exhausted:
        while not exhausted and len(running) < most:
            job = next(left, None)
            if job is None:
                exhausted = True
                break
            serial += 1
            try:
                name = f"compare-{serial}"
                _add(engine, sampling, name, job, chat)
                running[name] = job
            except ValidationError as error:
                yield Outcome(job, error=str(error))
        for output in engine.step() if running else ():
            yield _outcome(running.pop(output.request_id), output)


def _add(engine: LLMEngine, sampling: Sampling, name: str, job: Job, chat: bool) -> None:
    params = _params(engine, sampling, job.column.fields, seed=job.seed)
    prompt: Any = job.text
    if chat:
        prompt = chat_request(engine, [{"role": "user", "content": job.text}])
    engine.add_request(name, prompt, params)


def _params(engine: LLMEngine, sampling: Sampling, fields: Any, *, seed: int) -> SamplingParams:
    params = sampling.with_fields({"seed": seed, **fields}).build(engine)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    return params


def _outcome(job: Job, output: RequestOutput) -> Outcome:
    part = output.outputs[0]
    return Outcome(
        job,
        text=part.text,
        units=tuple(part.token_ids),
        num_tokens=len(part.token_ids),
        finish_reason=part.finish_reason,
        mean_logprob=part.mean_logprob,
        error=part.error,
        extra={
            "token_ids": list(part.token_ids),
            "fingerprint": None if output.plan is None else output.plan.fingerprint,
        },
    )

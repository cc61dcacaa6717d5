"""Running the requests of one call: admit all or none, wait for them or follow them, clean up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.async_llm import RequestStream
from ...core.outputs import RequestOutput
from ...core.params import RequestOutputKind, SamplingParams
from .errors import ApiError, shutting_down
from .prompts import Prompt
from .state import ServerState

log = logging.getLogger("decodekit.serve")


@dataclass(slots=True)
class Job:
    """One request to the engine."""

    prompt: Prompt
    params: SamplingParams
    priority: int = 0
    salt: str | None = None


class Part(NamedTuple):
    """What one of a call's requests said."""

    job: int
    output: RequestOutput


class Running:
    """The requests of one call, in the engine."""

    def __init__(
        self, state: ServerState, call_id: str, jobs: Sequence[Job], streams: list[RequestStream]
    ) -> None:
        self.state = state
        self.call_id = call_id
        self.jobs = jobs
        self.streams = streams
        self._started = time.monotonic()

    async def results(self) -> list[RequestOutput]:
        """Wait for the final outputs, in the order of the jobs."""
        outputs: list[RequestOutput] = []
        for number, stream in enumerate(self.streams):
            async for output in stream:
                self._check(output)
            self._finished(number, output)
            outputs.append(output)
        return outputs

    async def parts(self) -> AsyncIterator[Part]:
        """Yield what the requests say, as they say it."""
        if len(self.streams) == 1:
            async for output in self.streams[0]:
                self._check(output)
                self.state.meters.delta(self.call_id, output)
                if output.finished:
                    self._finished(0, output)
                yield Part(0, output)
            return
        async for part in self._merged():
            self._check(part.output)
            self.state.meters.delta(f"{self.call_id}-{part.job}", part.output)
            if part.output.finished:
                self._finished(part.job, part.output)
            yield part

    async def _merged(self) -> AsyncIterator[Part]:
        queue: asyncio.Queue[Part | BaseException] = asyncio.Queue()

        async def follow(number: int, stream: RequestStream) -> None:
            try:
                async for output in stream:
                    queue.put_nowait(Part(number, output))
            except Exception as error:
                queue.put_nowait(error)

        tasks = [
            asyncio.create_task(follow(number, stream))
            for number, stream in enumerate(self.streams)
        ]
        left = len(tasks)
        try:
            while left:
                part = await queue.get()
                if isinstance(part, BaseException):
                    raise part
                left -= part.output.finished
                yield part
        finally:
            for task in tasks:
                task.cancel()

    def _check(self, output: RequestOutput) -> None:
        """Raise for a choice that failed, and for what the end of the server cut off."""
        for choice in output.outputs:
            if choice.finish_reason == "error":
                self.state.meters.failed(choice.error)
                raise ApiError(500, choice.error or "the request failed while it ran")
            if choice.finish_reason == "abort" and self.state.is_stopping:
                raise shutting_down()

    def _finished(self, number: int, output: RequestOutput) -> None:
        self.state.meters.finished(output, self.jobs[number].params)
        settings = self.state.settings
        if settings.enable_log_outputs:
            texts = [choice.text[: settings.max_log_len] for choice in output.outputs]
            log.info("answer %s: %r", self.call_id, texts)


@asynccontextmanager
async def running(
    state: ServerState, call_id: str, jobs: Sequence[Job], *, stream: bool
) -> AsyncIterator[Running]:
    """Admit the jobs of a call, all or none, and abort at the end what still runs."""
    state.check_awake()
    ids = [call_id] if len(jobs) == 1 else [f"{call_id}-{number}" for number in range(len(jobs))]
    streams: list[RequestStream] = []
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    state.running[call_id] = ids
    try:
        for name, job in zip(ids, jobs, strict=True):
            job.params.output_kind = kind
            _log_request(state, name, job)
            streams.append(
                await state.engine.add_request(
                    name, job.prompt.for_engine(job.salt), job.params, priority=job.priority
                )
            )
        for opened in streams:
            await opened.ready()  # a grammar that cannot be compiled is a bad request
        yield Running(state, call_id, jobs, streams)
    finally:
        state.running.pop(call_id, None)
        for opened in streams:
            await opened.aclose()
        for name in ids:
            state.meters.forget(name)


def _log_request(state: ServerState, name: str, job: Job) -> None:
    settings = state.settings
    engine = state.engine.engine
    if job.priority and engine.config.scheduling_policy != "priority":
        engine.warn_once(
            "priority has no effect under --scheduling-policy fcfs; choose priority there"
        )
    if settings.enable_log_requests:
        text = (
            job.prompt.text if job.prompt.text is None else job.prompt.text[: settings.max_log_len]
        )
        log.info("request %s: prompt %r, %r", name, text, job.params)


def usage_of(
    state: ServerState, prompt_tokens: int, completion_tokens: int, cached: int | None
) -> dict[str, Any]:
    """Return the usage object; cached tokens are told where the server says so."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if state.settings.enable_prompt_tokens_details:
        usage["prompt_tokens_details"] = {"cached_tokens": cached or 0}
    return usage

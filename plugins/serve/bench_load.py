"""The load of `decodekit bench serve`: requests to a server, many at a time, each one timed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
MOST_ERRORS = 20  # whose texts are kept


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent, and how fast. Bounded: the first of `requests` and `seconds` ends it."""

    url: str
    endpoint: str
    model: str | None
    prompts: Sequence[str]
    requests: int
    seconds: float
    concurrency: int
    rate: float | None  # arrivals a second; None: as fast as `concurrency` lets them
    timeout: float
    seed: int
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Timing:
    """One request: times in seconds since it was sent."""

    total: float = 0.0
    first: float | None = None  # to the first token; None where the answer came whole
    gaps: list[float] = field(default_factory=list)  # between events with text
    tokens: int = 0
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """Seconds for each token after the first."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.total - self.first) / (self.tokens - 1)


@dataclass(slots=True)
class Run:
    """One setting and what its requests measured so far."""

    name: str
    fields: dict[str, Any]
    wanted: int
    timings: list[Timing] = field(default_factory=list)
    active: int = 0
    started: float | None = None
    seconds: float = 0.0  # of wall clock

    @property
    def done(self) -> list[Timing]:
        """The requests that were answered."""
        return [timing for timing in self.timings if timing.error is None]

    @property
    def errors(self) -> list[str]:
        """What the others said, the first of them."""
        told = [timing.error for timing in self.timings if timing.error is not None]
        return told[:MOST_ERRORS]

    @property
    def num_errors(self) -> int:
        """How many failed."""
        return len(self.timings) - len(self.done)


async def drive(load: Load, run: Run, seen: Callable[[], None]) -> None:
    """Send the requests of one setting; `seen` is called after each."""
    import httpx

    limits = httpx.Limits(max_connections=load.concurrency)
    timeout = httpx.Timeout(load.timeout)
    async with httpx.AsyncClient(
        base_url=load.url, headers=load.headers, timeout=timeout, limits=limits
    ) as client:
        run.started = time.perf_counter()
        slots = asyncio.Semaphore(load.concurrency)

        async def one(number: int) -> None:
            try:
                run.active += 1
                run.timings.append(await timed(client, load, run.fields, number))
            finally:
                run.active -= 1
                slots.release()
                run.seconds = time.perf_counter() - (run.started or 0.0)
                seen()

        async with asyncio.TaskGroup() as group:
            async for number in _arrivals(load, run.started):
                await slots.acquire()
                if time.perf_counter() - run.started >= load.seconds:
                    slots.release()
                    break
                group.create_task(one(number))
        run.seconds = time.perf_counter() - run.started


async def _arrivals(load: Load, started: float) -> AsyncIterator[int]:
    """Yield the requests' numbers at the times when they are due."""
    draw = random.Random(load.seed)
    due = started
    for number in range(load.requests):
        if load.rate is not None:
            due += draw.expovariate(load.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
        if time.perf_counter() - started >= load.seconds:
            return
        yield number


async def timed(
    client: httpx.AsyncClient, load: Load, fields: Mapping[str, Any], number: int
) -> Timing:
    """Send one request and time it; whatever goes wrong is its error."""
    import httpx

    timing = Timing()
    body = body_of(load, fields, number)
    begin = time.perf_counter()
    try:
        if body["stream"]:
            await _stream(client, load, body, timing, begin)
        else:
            await _whole(client, load, body, timing)
    except httpx.HTTPError as error:
        timing.error = f"{type(error).__name__}: {error}"
    except (ValueError, KeyError) as error:
        timing.error = f"the answer is not what a server sends: {error}"
    timing.total = time.perf_counter() - begin
    return timing


def body_of(load: Load, fields: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the body of one request; beams come whole, everything else is streamed."""
    prompt = load.prompts[number % len(load.prompts)]
    body: dict[str, Any] = {**fields}
    if load.endpoint == "chat":
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["prompt"] = prompt
    if load.model is not None:
        body["model"] = load.model
    body["stream"] = not (body.get("use_beam_search") or body.get("best_of"))
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    return body


async def _whole(
    client: httpx.AsyncClient, load: Load, body: Mapping[str, Any], timing: Timing
) -> None:
    answer = await client.post(PATHS[load.endpoint], json=body)
    if answer.status_code != 200:
        timing.error = _refusal(answer.status_code, answer.text)
        return
    _count(timing, answer.json()["usage"])


async def _stream(
    client: httpx.AsyncClient, load: Load, body: Mapping[str, Any], timing: Timing, begin: float
) -> None:
    is_done, last = False, begin
    async with client.stream("POST", PATHS[load.endpoint], json=body) as answer:
        if answer.status_code != 200:
            timing.error = _refusal(answer.status_code, (await answer.aread()).decode())
            return
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                is_done = True
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                timing.error = str(event["error"]["message"])
                continue
            if event.get("usage"):
                _count(timing, event["usage"])
            if any(_has_text(choice) for choice in event["choices"]):
                now = time.perf_counter()
                if timing.first is None:
                    timing.first = now - begin
                else:
                    timing.gaps.append(now - last)
                last = now
    if not is_done and timing.error is None:
        timing.error = "the stream broke off"


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice.get("text"))
    return any(delta.get(name) for name in ("content", "reasoning", "tool_calls"))


def _count(timing: Timing, usage: Mapping[str, int]) -> None:
    timing.tokens = usage["completion_tokens"]
    timing.prompt_tokens = usage["prompt_tokens"]


def _refusal(status: int, text: str) -> str:
    try:
        told = json.loads(text)["error"]
        message = told["message"] if isinstance(told, dict) else told
    except (ValueError, KeyError, TypeError):
        message = text[:200]
    return f"{status}: {message}"

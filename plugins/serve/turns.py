"""One streamed answer as message deltas, for the endpoints with events of their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from .answers import Usage
from .chat import ChatCall
from .reading import Delta
from .running import Running
from .wire import dumps


class Told(NamedTuple):
    """What one output of the engine brought."""

    deltas: list[Delta]
    reason: str | None  # set once, at the end
    stop_reason: int | str | None
    logprobs: list[dict[str, Any]]
    usage: Usage
    reasoning_tokens: int


async def told(call: ChatCall, run: Running) -> AsyncGenerator[Told, None]:
    """Yield the deltas of a call with one choice."""
    reader, writer = call.reader(), call.logprobs()
    usage = Usage(prompt_tokens=len(call.jobs[0].prompt.ids))
    async for part in run.parts():
        usage.add(0, part.output)
        for choice in part.output.outputs:
            deltas = reader.push(choice.text, choice.token_ids)
            reason = choice.finish_reason
            if reason is not None:
                held, reason = reader.end(reason)
                deltas = [*deltas, *held]
            logprobs: list[dict[str, Any]] = []
            if writer is not None and choice.logprobs is not None:
                logprobs = writer.content(list(choice.token_ids), choice.logprobs)
            yield Told(deltas, reason, choice.stop_reason, logprobs, usage, reader.reasoning_tokens)


def named_event(value: dict[str, Any]) -> bytes:
    """Write an event with its type in a line of its own."""
    return f"event: {value['type']}\ndata: {dumps(value)}\n\n".encode()

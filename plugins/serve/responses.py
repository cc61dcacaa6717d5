"""POST /v1/responses: OpenAI's Responses, plain and streamed, and the store behind them."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .answers import headers_of
from .chat import ChatCall, prepare
from .errors import as_api_error, bad, not_found
from .responses_body import ResponsesRequest, chat_body, messages_of
from .responses_items import Items
from .running import running
from .sse import EventStream, unless_gone
from .state import ServerState
from .turns import Told, named_event, told
from .wire import Json

PREFIX = "resp_"


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer that later requests may build on."""

    response: dict[str, Any]
    messages: list[dict[str, Any]]  # the conversation up to it, without instructions


class Turn:
    """One request on its way to a response."""

    def __init__(
        self, state: ServerState, call: ChatCall, body: ResponsesRequest,
        messages: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        self.state, self.call, self.body, self.messages = state, call, body, messages
        self.items = Items()
        self.last: Told | None = None

    def take(self, part: Told) -> list[dict[str, Any]]:
        """Take an output of the engine; return its events."""
        self.last = part
        return self.items.take(part.deltas, part.logprobs)

    def status(self) -> str:
        """The state of a response that has ended."""
        assert self.last is not None
        return {"length": "incomplete", "abort": "cancelled"}.get(
            self.last.reason or "", "completed"
        )

    def done(self) -> dict[str, Any]:
        """Return the finished response, and keep it where that is wanted."""
        response = self.response(self.status())
        most = self.state.settings.responses_store
        if most and self.body.store is not False:
            kept = self.state.responses
            kept[response["id"]] = Stored(response, self.messages)
            while len(kept) > most:
                kept.popitem(last=False)
        return response

    def response(self, status: str) -> dict[str, Any]:
        """Return the object as it stands."""
        body, params = self.body, self.call.jobs[0].params
        is_cut = status == "incomplete"
        return {
            "id": self.call.id,
            "object": "response",
            "created_at": self.call.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self.call.model,
            "output": self.items.output,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": body.reasoning and body.reasoning.model_dump(),
            "service_tier": "default",
            "store": bool(self.state.settings.responses_store and body.store is not False),
            "temperature": params.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if status == "in_progress" else self._usage(),
            "metadata": body.metadata or {},
        }

    def _usage(self) -> dict[str, Any]:
        assert self.last is not None
        usage = self.last.usage
        made = sum(usage.completion.values())
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached or 0, "cache_write_tokens": 0,
            },
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self.last.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + made,
        }  # fmt: skip


async def create(
    state: ServerState, request: Request, body: ResponsesRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Answer an input with items."""
    messages = [*_earlier(state, body.previous_response_id), *messages_of(body.input)]
    # Run as a stream in either form, so that both say the same.
    asked = chat_body(body, raw, messages).model_copy(update={"stream": True})
    plain = [message.model_dump(exclude_none=True) for message in asked.messages]
    if body.request_id is None and "x-request-id" not in request.headers:
        asked.request_id = uuid.uuid4().hex
    call = await prepare(state, request, asked, [plain], prefix=PREFIX)
    turn = Turn(state, call, body, messages)
    headers = headers_of(state, call.id, ignored, call.notes)
    if not body.stream:
        return Json(await unless_gone(request, _whole(turn)), headers=headers)
    stack = AsyncExitStack()
    run = await stack.enter_async_context(running(state, call.id, call.jobs, stream=True))
    return ResponseStream(turn, _events(turn, told(call, run)), stack, headers)


async def get(state: ServerState, request: Request) -> Response:
    """Return a stored response."""
    if request.query_params.get("stream") == "true":
        raise bad("stream must be false: events are sent once", "stream")
    return Json(_stored(state, request.path_params["response_id"]).response)


async def cancel(state: ServerState, request: Request) -> Response:
    """Refuse: only responses in the background can be cancelled, and there are none."""
    name = request.path_params["response_id"]
    _stored(state, name)
    raise bad(f"the response {name!r} has ended; close the connection to end a running one")


def _stored(state: ServerState, name: str) -> Stored:
    if name not in state.responses:
        raise not_found(
            f"there is no stored response {name!r} (--responses-store)", "previous_response_id"
        )
    found: Stored = state.responses[name]
    return found


def _earlier(state: ServerState, name: str | None) -> list[dict[str, Any]]:
    """Return the conversation that a request goes on with."""
    if name is None:
        return []
    stored = _stored(state, name)
    return [*stored.messages, *messages_of(stored.response["output"])]


async def _whole(turn: Turn) -> dict[str, Any]:
    call = turn.call
    async with running(turn.state, call.id, call.jobs, stream=True) as run:
        async for part in told(call, run):
            turn.take(part)
    turn.items.close()
    return turn.done()


# --- streams --------------------------------------------------------------------------------------


class ResponseStream(EventStream):
    """Tells failures on the way as an event of a failed response."""

    def __init__(
        self, turn: Turn, events: AsyncGenerator[bytes, None], owned: AsyncExitStack,
        headers: Mapping[str, str],
    ) -> None:  # fmt: skip
        super().__init__(events, owned, headers)
        self.turn = turn

    def failure(self, error: Exception) -> bytes:
        response = self.turn.response("in_progress")
        response["status"] = "failed"
        message = as_api_error(error).message
        response["error"] = {"code": "server_error", "message": message}
        number = self.turn.items.count
        return named_event(
            {"type": "response.failed", "sequence_number": number, "response": response}
        )


async def _events(turn: Turn, parts: AsyncGenerator[Told, None]) -> AsyncGenerator[bytes, None]:
    items = turn.items
    for kind in ("response.created", "response.in_progress"):
        yield named_event(items.numbered(kind, response=turn.response("in_progress")))
    async for part in parts:
        for event in turn.take(part):
            yield named_event(event)
    for event in items.close():
        yield named_event(event)
    response = turn.done()
    yield named_event(items.numbered(f"response.{response['status']}", response=response))

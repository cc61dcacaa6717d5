"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's way to ask for a chat answer."""

from __future__ import annotations

import json
import warnings
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ...core.params import SamplingParams
from .answers import headers_of
from .chat import ChatCall, prepare, reasoning_parser, whole
from .errors import ApiError, as_api_error
from .fields import IGNORED_HEADER
from .messages_body import CountRequest, MessagesRequest, chat_body
from .prompts import chat as chat_prompt
from .reading import Delta
from .running import Running, running
from .sampling import OPEN, own_fields
from .sse import EventStream, unless_gone
from .state import ServerState
from .tool_choice import tooling
from .turns import Told, named_event, told
from .wire import Json

PREFIX = "msg_"
ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


async def create(
    state: ServerState, request: Request, body: MessagesRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Answer one conversation with blocks."""
    asked = chat_body(body, raw, can_reason=reasoning_parser(state) is not None)
    messages = [message.model_dump(exclude_none=True) for message in asked.messages]
    call = await prepare(state, request, asked, [messages], prefix=PREFIX)
    forced = body.tool_choice is not None and body.tool_choice.get("type") == "tool"
    headers = headers_of(state, call.id, _with_thinking(state, body, ignored), call.notes)
    if not body.stream:
        answer = await unless_gone(request, whole(call))
        return Json(message_of(call, answer, body, forced), headers=headers)
    stack = AsyncExitStack()
    run = await stack.enter_async_context(running(state, call.id, call.jobs, stream=True))
    return MessageStream(events(call, run, body, forced), stack, headers)


async def count(
    state: ServerState, request: Request, body: CountRequest, raw: Mapping[str, Any],
    ignored: Mapping[str, str],
) -> Response:  # fmt: skip
    """Count the tokens of a prompt without running it."""
    state.model_named(body.model)
    asked = chat_body(body, raw, can_reason=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nothing is drawn here, but a bad field is refused
        SamplingParams.from_optional(**{"max_tokens": OPEN, **own_fields(asked)})
    messages = [message.model_dump(exclude_none=True) for message in asked.messages]
    tools = asked.tools if body.tool_choice is None else tooling(state, asked).shown
    prompt = await chat_prompt(state, asked, messages, tools=tools)
    size = len(prompt.ids)
    return Json(
        {"input_tokens": size, "context_management": {"original_input_tokens": size}},
        headers=dict(ignored),
    )


def _with_thinking(
    state: ServerState, body: CountRequest, ignored: Mapping[str, str]
) -> Mapping[str, str]:
    """Name `thinking` among the fields without effect where the server knows of no reasoning."""
    if body.thinking is None or reasoning_parser(state) is not None:
        return ignored
    named = [ignored[IGNORED_HEADER]] if IGNORED_HEADER in ignored else []
    return {**ignored, IGNORED_HEADER: ", ".join([*named, "thinking"])}


# --- whole answers --------------------------------------------------------------------------------


def message_of(
    call: ChatCall, answer: Mapping[str, Any], body: MessagesRequest, forced: bool
) -> dict[str, Any]:
    """Turn a chat answer into a message."""
    [choice] = answer["choices"]
    message = choice["message"]
    content: list[dict[str, Any]] = []
    if message["reasoning"]:
        content.append(_thinking(message["reasoning"]))
    if message["content"]:
        content.append({"type": "text", "text": message["content"]})
    for made in message["tool_calls"]:
        function = made["function"]
        content.append({
            "type": "tool_use", "id": made["id"], "name": function["name"],
            "input": _parsed(function["arguments"]),
        })  # fmt: skip
    usage = answer["usage"]
    told_usage = {
        "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]
    }  # fmt: skip
    ours = {
        name: choice[name]
        for name in ("plan", "trace", "kept_set", "kept_mass", "entropy")
        if name in choice
    }
    return {
        **_head(call, told_usage),
        "content": content,
        **_end(choice["finish_reason"], choice["stop_reason"], body, forced),
        **ours,
    }


def _head(call: ChatCall, usage: Mapping[str, int]) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": dict(usage),
    }


def _end(
    reason: str, stop_reason: object, body: MessagesRequest, forced: bool
) -> dict[str, str | None]:
    if reason == "stop" and isinstance(stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop_reason}
    if reason == "stop" and forced:
        return {"stop_reason": "tool_use", "stop_sequence": None}
    return {"stop_reason": REASONS.get(reason, "end_turn"), "stop_sequence": None}


def _thinking(text: str) -> dict[str, str]:
    return {"type": "thinking", "thinking": text, "signature": _signature(text)}


def _signature(text: str) -> str:
    """Return what clients hand back with the block; it says no more than that it is ours."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _parsed(arguments: str) -> Any:
    """Return the arguments of a call; a call cut off by the length keeps them as text."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {"partial_json": arguments}


# --- streams --------------------------------------------------------------------------------------


class MessageStream(EventStream):
    """Tells failures on the way as Anthropic's clients read them."""

    def failure(self, error: Exception) -> bytes:
        return named_event(error_body(as_api_error(error)))


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the body of a refusal or failure."""
    kind = ERRORS.get(error.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


async def events(
    call: ChatCall, run: Running, body: MessagesRequest, forced: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the events of a streamed message."""
    blocks = Blocks()
    size = len(call.jobs[0].prompt.ids)
    usage = {"input_tokens": size, "output_tokens": 0}
    yield named_event({"type": "message_start", "message": _head(call, usage)})
    last: Told | None = None
    async for last in told(call, run):
        for delta in last.deltas:
            for event in blocks.take(delta):
                yield named_event(event)
    assert last is not None
    for event in blocks.close():
        yield named_event(event)
    usage["output_tokens"] = sum(last.usage.completion.values())
    end = _end(last.reason or "stop", last.stop_reason, body, forced)
    yield named_event({"type": "message_delta", "delta": end, "usage": usage})
    yield named_event({"type": "message_stop"})


class Blocks:
    """Opens and closes the blocks of a stream as its deltas change their kind."""

    def __init__(self) -> None:
        self.index = -1
        self.kind: str | None = None  # of the block that is open
        self._reasoning = ""

    def take(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the events of one message delta."""
        sent: list[dict[str, Any]] = []
        if delta.get("reasoning"):
            sent += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            self._reasoning += delta["reasoning"]
            sent.append(self._delta("thinking_delta", "thinking", delta["reasoning"]))
        if delta.get("content"):
            sent += self._open("text", {"type": "text", "text": ""})
            sent.append(self._delta("text_delta", "text", delta["content"]))
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                sent += self.close()
                block = {"type": "tool_use", "id": call["id"], "input": {}}
                sent += self._open("tool_use", {**block, "name": call["function"]["name"]})
            if call["function"]["arguments"]:
                text = call["function"]["arguments"]
                sent.append(self._delta("input_json_delta", "partial_json", text))
        return sent

    def close(self) -> list[dict[str, Any]]:
        """Return the events that end the open block."""
        if self.kind is None:
            return []
        sent = []
        if self.kind == "thinking":
            sent.append(self._delta("signature_delta", "signature", _signature(self._reasoning)))
        self.kind = None
        return [*sent, {"type": "content_block_stop", "index": self.index}]

    def _open(self, kind: str, block: dict[str, Any]) -> list[dict[str, Any]]:
        if self.kind == kind:
            return []
        closed = self.close()
        self.kind, self.index = kind, self.index + 1
        start = {"type": "content_block_start", "index": self.index, "content_block": block}
        return [*closed, start]

    def _delta(self, kind: str, name: str, text: str) -> dict[str, Any]:
        return {
            "type": "content_block_delta", "index": self.index, "delta": {"type": kind, name: text},
        }  # fmt: skip

"""The body of /v1/responses, and how it becomes a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.param_rules import shown
from .errors import bad
from .protocol import SAMPLING_FIELDS, Body, ChatRequest, Int64, Sampling, StreamOptions

LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")


class ReasoningOptions(Body):
    """How hard to think."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(Sampling):
    """POST /v1/responses: OpenAI's fields, and every sampling field of ours beside them."""

    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    truncation: str | None = None
    prompt: dict[str, Any] | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_body(
    body: ResponsesRequest, raw: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]
) -> ChatRequest:
    """Return the chat request over `messages`; 400 for what has no counterpart."""
    _check(body)
    given: dict[str, Any] = {
        name: raw[name] for name in SAMPLING_FIELDS if raw.get(name) is not None
    }
    for name in ("model", "cache_salt", "priority", "request_id", "chat_template_kwargs",
                 "parallel_tool_calls", "stream"):  # fmt: skip
        if raw.get(name) is not None:
            given[name] = raw[name]
    given["messages"] = [*_instructions(body), *messages]
    if body.max_output_tokens is not None:
        given["max_completion_tokens"] = body.max_output_tokens
    if body.tools:
        given["tools"] = [_tool(tool, place) for place, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        given["tool_choice"] = _choice(body.tool_choice)
    if body.reasoning is not None and body.reasoning.effort is not None:
        given["reasoning_effort"] = body.reasoning.effort
    if (made := _format(body)) is not None:
        given["response_format"] = made
    if LOGPROBS in (body.include or ()):
        given |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return ChatRequest.model_validate(given)


def _check(body: ResponsesRequest) -> None:
    if body.prompt is not None:
        raise bad("prompt must be absent: this server stores no templates", "prompt")
    if body.background:
        raise bad("background must be false: this server answers while you wait", "background")
    if body.truncation not in (None, "disabled"):
        raise bad(f"truncation must be 'disabled', got {shown(body.truncation)}", "truncation")
    for name in ("n", "best_of"):
        if getattr(body, name) not in (None, 1):
            raise bad(f"{name} must be 1: a response has one answer", name)
    for name in body.include or ():
        if name not in (LOGPROBS, "reasoning.encrypted_content"):
            raise bad(f"include must hold {LOGPROBS!r} at most, got {shown(name)}", "include")
    if body.top_logprobs and LOGPROBS not in (body.include or ()):
        raise bad(f"top_logprobs needs include=[{LOGPROBS!r}]", "top_logprobs")


def _instructions(body: ResponsesRequest) -> list[dict[str, Any]]:
    return [{"role": "system", "content": body.instructions}] if body.instructions else []


# --- items ----------------------------------------------------------------------------------------


def messages_of(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return input or output items as the messages of a chat request."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(items):
        where = f"input[{place}]"
        kind = item.get("type", "message")
        if kind == "message":
            content = _content(item.get("content"), f"{where}.content")
            if item.get("role") == "assistant":
                _own(messages)["content"] = content
            else:
                messages.append({"role": item.get("role"), "content": content})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _own(messages, "tool_calls").setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            content = _content(item.get("output"), f"{where}.output")
            messages.append(
                {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            )
        elif kind == "reasoning":
            text = _content(item.get("content") or item.get("summary") or "", f"{where}.content")
            messages.append({"role": "assistant", "reasoning": text})
        else:
            raise bad(
                f"{where}.type must be 'message', 'function_call', 'function_call_output' or "
                f"'reasoning', got {shown(kind)}",
                "input",
            )
    return messages


def _own(messages: list[dict[str, Any]], joins: str = "reasoning") -> dict[str, Any]:
    """Return the assistant's turn that goes on: the last, unless something has ended it."""
    is_open = bool(messages) and messages[-1]["role"] == "assistant"
    if is_open and (joins == "tool_calls" or "content" not in messages[-1]):
        return messages[-1]
    messages.append({"role": "assistant"})
    return messages[-1]


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad(f"{where} must be text or a list of parts, got {shown(content)}", "input")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in _TEXTS else None
        if not isinstance(text, str):
            raise bad(f"{where} must hold parts of text, got {shown(part)}", "input")
        texts.append(text)
    return "".join(texts)


# --- tools and formats ----------------------------------------------------------------------------


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise bad(
            f"tools[{place}].type must be 'function': this server runs no tools of its own, "
            f"got {shown(tool.get('type'))}",
            "tools",
        )
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if name in tool}}


def _choice(choice: str | Mapping[str, Any]) -> Any:
    if isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        raise bad(
            "tool_choice must be a mode or {'type': 'function', 'name': ...}, "
            f"got {shown(dict(choice))}",
            "tool_choice",
        )
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(body: ResponsesRequest) -> dict[str, Any] | None:
    made = (body.text or {}).get("format")
    if made is None:
        return None
    if not isinstance(made, Mapping):
        raise bad(f"text.format must be an object, got {shown(made)}", "text")
    kind = made.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise bad(
            f"text.format.type must be 'text', 'json_object' or 'json_schema', got {shown(kind)}",
            "text",
        )
    if kind != "text" and body.structured_outputs:
        raise bad("text.format must be absent with structured_outputs", "text")
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {name: made[name] for name in made if name != "type"}}

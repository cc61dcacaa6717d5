"""The bodies of /v1/messages, and how they become chat requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from ...core.param_rules import shown
from .errors import bad
from .protocol import SAMPLING_FIELDS, Body, ChatRequest, Int64, Sampling

BILLING = "x-anthropic-billing-header"  # begins a block that is for nobody to read


class Turn(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class CountRequest(Sampling):
    """POST /v1/messages/count_tokens."""

    messages: list[Turn] = Field(min_length=1)
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages: Anthropic's fields, and every sampling field of ours beside them."""

    max_tokens: int = Field(gt=0)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    cache_salt: str | None = None
    priority: Int64 | None = None
    request_id: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def chat_body(body: CountRequest, raw: Mapping[str, Any], *, can_reason: bool) -> ChatRequest:
    """Return the chat request that the body comes down to; 400 for what has no counterpart."""
    given: dict[str, Any] = {
        name: raw[name] for name in SAMPLING_FIELDS if raw.get(name) is not None
    }
    for name in ("model", "cache_salt", "priority", "request_id", "chat_template_kwargs"):
        if raw.get(name) is not None:
            given[name] = raw[name]
    if isinstance(body, MessagesRequest):
        given["max_completion_tokens"] = body.max_tokens
        given["stream"] = bool(body.stream)
        if body.stop_sequences:
            stops = given.get("stop", [])
            stops = [stops] if isinstance(stops, str) else stops
            given["stop"] = [*stops, *body.stop_sequences]
    given["messages"] = conversation(body)
    last = given["messages"][-1]
    if last["role"] == "assistant" and not last.get("tool_calls"):
        given |= {"add_generation_prompt": False, "continue_final_message": True}
    if body.tools:
        given["tools"] = [_tool(tool, place) for place, tool in enumerate(body.tools)]
    if body.tool_choice is not None:
        given |= _choice(body.tool_choice)
    budget = _budget(body.thinking)
    if budget is not None and can_reason:
        given.setdefault("thinking_token_budget", budget)
    return ChatRequest.model_validate(given)


def conversation(body: CountRequest) -> list[dict[str, Any]]:
    """Return the messages as a chat request has them."""
    messages: list[dict[str, Any]] = []
    if system := _system(body.system):
        messages.append({"role": "system", "content": system})
    for place, turn in enumerate(body.messages):
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "user":
            messages += _user(turn.content, f"messages[{place}].content")
        else:
            messages.append(_assistant(turn.content, f"messages[{place}].content"))
    return messages


def _system(given: str | Sequence[Mapping[str, Any]] | None) -> str:
    if given is None or isinstance(given, str):
        return given or ""
    texts = [_text(block, f"system[{place}]") for place, block in enumerate(given)]
    return "\n".join(text for text in texts if not text.startswith(BILLING))


def _user(blocks: Sequence[Mapping[str, Any]], where: str) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, before what the user says."""
    results, texts = [], []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        if block.get("type") == "tool_result":
            content = block.get("content") or ""
            if not isinstance(content, str):
                content = "\n".join(_text(part, f"{at}.content") for part in content)
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content}
            )
        else:
            texts.append(_text(block, at))
    if texts or not results:
        results.append({"role": "user", "content": "\n".join(texts)})
    return results


def _assistant(blocks: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    texts, calls, reasoning = [], [], []
    for place, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input", {}))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            reasoning.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(_text(block, f"{where}[{place}]"))
    if texts or not calls:
        message["content"] = "\n".join(texts)
    if calls:
        message["tool_calls"] = calls
    if reasoning:
        message["reasoning"] = "\n".join(reasoning)
    return message


def _text(block: Any, where: str) -> str:
    if not isinstance(block, Mapping) or block.get("type") != "text":
        raise bad(
            f"{where} must be a block of type text: this version reads no images or documents, "
            f"got {shown(block)}",
            "messages",
        )
    text = block.get("text")
    if not isinstance(text, str):
        raise bad(f"{where}.text must be a string, got {shown(text)}", "messages")
    return text


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        raise bad(
            f"tools[{place}].type must be 'custom': this server runs no tools of its own, "
            f"got {shown(tool.get('type'))}",
            "tools",
        )
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    for name in ("description", "strict"):
        if tool.get(name) is not None:
            function[name] = tool[name]
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    names: dict[Any, Any] = {
        "auto": "auto",
        "any": "required",
        "none": "none",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if kind not in names:
        raise bad(
            f"tool_choice.type must be 'auto', 'any', 'tool' or 'none', got {shown(kind)}",
            "tool_choice",
        )
    is_alone = bool(choice.get("disable_parallel_tool_use"))
    return {"tool_choice": names[kind], "parallel_tool_calls": not is_alone}


def _budget(thinking: Mapping[str, Any] | None) -> int | None:
    """Return how many tokens may be spent on thinking, None where that is not said."""
    if thinking is None or thinking.get("type") not in ("enabled", "disabled"):
        return None
    if thinking["type"] == "disabled":
        return 0
    budget = thinking.get("budget_tokens")
    if not isinstance(budget, int) or isinstance(budget, bool) or budget < 1:
        raise bad(f"thinking.budget_tokens must be an integer >= 1, got {shown(budget)}",
                  "thinking")  # fmt: skip
    return budget

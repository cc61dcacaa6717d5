"""What a caller writes as messages, tools and documents, made into what templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NoReturn

from .chat_template import CompiledTemplate
from .errors import NotInThisVersion, ValidationError, did_you_mean
from .param_rules import shown

_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_MEDIA_WORDS = ("image", "audio", "video", "file", "vision")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # first found is the message's


def clean_messages(
    messages: Sequence[Any], template: CompiledTemplate, content_format: str = "auto"
) -> list[dict[str, Any]]:
    """Check and copy a conversation into plain dicts; keys whose value is None are left out."""
    if content_format not in ("auto", "string", "openai"):
        _refuse(
            "chat_template_content_format",
            content_format,
            f"'auto', 'string' or 'openai', got {content_format!r}",
        )
    messages = getattr(messages, "messages", messages)
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        _refuse("messages", messages, f"a list of messages, got {shown(messages)}")
    if not messages:
        _refuse("messages", messages, "a list of at least one message, got an empty one")
    chosen = template.content_format if content_format == "auto" else content_format
    wraps = chosen == "openai" and not template.tests_strings
    return [
        _clean_message(message, f"messages[{i}]", chosen == "string", wraps)
        for i, message in enumerate(messages)
    ]


def clean_tools(tools: Sequence[Any] | None) -> list[Any] | None:
    """Copy the tool specifications; no tools and an empty list are the same."""
    return _clean_dicts("tools", tools) or None


def clean_documents(documents: Sequence[Any] | None) -> list[Any] | None:
    """Copy the documents of a retrieval template."""
    return None if documents is None else _clean_dicts("documents", documents)


def plain_data(value: Any) -> Any:
    """Rebuild `value` from exact JSON types, so that a template finds no method to misuse.

    What has no such form becomes a text that names its type.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain_data(item) for item in value]
    if isinstance(value, tuple):
        return tuple(plain_data(item) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_data(getattr(value, field.name)) for field in fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):  # pydantic, openai's message objects
        return plain_data(dump())
    return f"<{type(value).__name__}>"


def _clean_message(
    given: Any, where: str, joins_parts: bool, wraps_strings: bool
) -> dict[str, Any]:
    plain = plain_data(given)
    if not isinstance(plain, dict):
        _refuse(where, given, f"a dict with 'role' and 'content', got {shown(given)}")
    message = {key: value for key, value in plain.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str):
        _refuse(f"{where}.role", role, f"a string, got {shown(role)}")
    if "content" in message:
        message["content"] = _clean_content(
            message["content"], f"{where}.content", joins_parts, wraps_strings
        )
    if "tool_calls" in message:
        message["tool_calls"] = _clean_calls(message["tool_calls"], f"{where}.tool_calls")
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _clean_content(content: Any, where: str, joins_parts: bool, wraps_strings: bool) -> Any:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if wraps_strings else content
    if not isinstance(content, list | tuple):
        _refuse(where, content, f"a string, a list of parts or None, got {shown(content)}")
    parts = [_clean_part(part, f"{where}[{i}]") for i, part in enumerate(content)]
    return "\n".join(part["text"] for part in parts) if joins_parts else parts


def _clean_part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict):
        _refuse(where, part, f"a string or a dict with 'type', got {shown(part)}")
    kind = part.get("type") or next((key for key in part if _is_media(key)), None)
    if isinstance(kind, str) and _is_media(kind):
        raise NotInThisVersion(
            f"{where} is of type {kind!r}, and this version has no multimodal input; send text",
            parameter=f"{where}.type",
            value=kind,
        )
    if kind not in _TEXT_PARTS:
        near = did_you_mean(str(kind), _TEXT_PARTS)
        _refuse(f"{where}.type", kind, f"one of {', '.join(_TEXT_PARTS)}, got {shown(kind)}{near}")
    key = "refusal" if kind == "refusal" else "text"
    text = part.get(key)
    if not isinstance(text, str):
        _refuse(f"{where}.{key}", text, f"a string, got {shown(text)}")
    return {**part, "type": "text", "text": text}


def _is_media(kind: str) -> bool:
    return any(word in kind for word in _MEDIA_WORDS)


def _clean_calls(calls: Any, where: str) -> list[Any]:
    """Copy tool calls with their arguments as dicts, which is how templates read them."""
    if not isinstance(calls, list | tuple) or not all(isinstance(call, dict) for call in calls):
        _refuse(where, calls, f"a list of dicts, got {shown(calls)}")
    cleaned = []
    for i, call in enumerate(calls):
        place = f"{where}[{i}]"
        if "function" not in call and "name" in call:  # the short form of some templates
            arguments = _parsed(call.get("arguments"), f"{place}.arguments")
            cleaned.append({**call, "arguments": arguments})
            continue
        function = call.get("function")
        if not isinstance(function, dict):
            _refuse(f"{place}.function", function, f"a dict, got {shown(function)}")
        arguments = _parsed(function.get("arguments"), f"{place}.function.arguments")
        cleaned.append({**call, "function": {**function, "arguments": arguments}})
    return cleaned


def _parsed(arguments: Any, where: str) -> dict[str, Any]:
    if arguments is None or arguments == "":
        return {}
    parsed = arguments
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
    if not isinstance(parsed, dict):
        _refuse(where, arguments, f"a JSON object, got {shown(arguments)}")
    return parsed


def _clean_dicts(name: str, items: Sequence[Any] | None) -> list[Any]:
    if items is not None and (not isinstance(items, Sequence) or isinstance(items, str | bytes)):
        _refuse(name, items, f"a list of dicts, got {shown(items)}")
    cleaned = [plain_data(item) for item in items or ()]
    for i, item in enumerate(cleaned):
        if not isinstance(item, dict):
            _refuse(f"{name}[{i}]", item, f"a dict, got {shown(item)}")
    return cleaned


def _refuse(parameter: str, value: object, allowed: str) -> NoReturn:
    raise ValidationError(f"{parameter} must be {allowed}", parameter=parameter, value=value)

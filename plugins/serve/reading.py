"""How the text of a chat answer is read: a reader turns it into the parts of a message.

The plain reader says that all of it is content. Tool and reasoning parsers are readers too; one is
made for each choice, fed every piece of text in order, and asked at the end for what it held back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Delta = dict[str, Any]  # of a message: content, reasoning, tool_calls


class Reader(Protocol):
    """Reads one choice."""

    def push(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        """Take the next piece; return what is certain by now."""
        ...

    def end(self, finish_reason: str) -> tuple[list[Delta], str]:
        """Return what was held back, and the reason to report."""
        ...


class PlainReader:
    """Takes every text as content."""

    def push(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        return [{"content": text}] if text else []

    def end(self, finish_reason: str) -> tuple[list[Delta], str]:
        return [], finish_reason


MakeReader = Callable[[], Reader]


@dataclass(slots=True)
class ReadMessage:
    """A whole message, put together from deltas as a client of a stream does."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def add(self, deltas: Sequence[Delta]) -> None:
        """Append what a reader said."""
        for delta in deltas:
            if "content" in delta:
                self.content = (self.content or "") + delta["content"]
            if "reasoning" in delta:
                self.reasoning = (self.reasoning or "") + delta["reasoning"]
            for call in delta.get("tool_calls", ()):
                self._add_call(call)

    def _add_call(self, call: Mapping[str, Any]) -> None:
        while len(self.tool_calls) <= call["index"]:
            self.tool_calls.append({"id": "", "type": "function", "function": {
                "name": "", "arguments": ""}})  # fmt: skip
        whole = self.tool_calls[call["index"]]
        whole["id"] = call.get("id") or whole["id"]
        for name, text in call.get("function", {}).items():
            whole["function"][name] += text or ""


def read_whole(reader: Reader, text: str, ids: Sequence[int], reason: str) -> tuple[
    ReadMessage, str
]:  # fmt: skip
    """Read a finished text at once; return the message and the reason to report."""
    message = ReadMessage()
    message.add(reader.push(text, ids))
    deltas, reason = reader.end(reason)
    message.add(deltas)
    if message.content is None and not message.tool_calls and message.reasoning is None:
        message.content = ""
    return message, reason

"""Reads one choice: reasoning apart from the answer, and the calls out of the answer."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...core.parsers import Piece, ToolParser
from .parsers.reasoning import Part, Splitter
from .reading import Delta
from .tool_choice import Tooling

ID_PREFIX = "chatcmpl-tool-"


@dataclass(frozen=True, slots=True)
class Shown:
    """What of the reasoning is told, and under which names."""

    reasoning: bool = True
    old_name: bool = False  # reasoning_content too


class MessageReader:
    """A `Reader` that knows of reasoning and of tools."""

    def __init__(
        self, splitter: Splitter | None, tooling: Tooling, shown: Shown, *, stream: bool
    ) -> None:
        self.splitter = splitter
        self.tooling = tooling
        self.shown = shown
        self.parser: ToolParser | None = tooling.reader(stream=stream)
        self.num_calls = 0
        self.reasoning_tokens = 0  # the markers among them
        self._is_dropping = False  # the calls that parallel_tool_calls=false leaves out

    def push(self, text: str, token_ids: Sequence[int]) -> list[Delta]:
        if self.splitter is None:
            return self._content(text)
        if self.splitter.is_open:
            self.reasoning_tokens += len(token_ids)
        parts = self.splitter.push(text)
        if not self.splitter.is_open and not self.splitter.has_reasoned:
            self.reasoning_tokens = 0
        return self._parts(parts)

    def end(self, finish_reason: str) -> tuple[list[Delta], str]:
        deltas = [] if self.splitter is None else self._parts(self.splitter.end())
        if self.parser is not None:
            deltas += self._pieces(self.parser.end())
        if finish_reason == "stop" and self.num_calls and self.tooling.reason is not None:
            finish_reason = self.tooling.reason
        return deltas, finish_reason

    def _parts(self, parts: Sequence[Part]) -> list[Delta]:
        deltas: list[Delta] = []
        for part in parts:
            if not part.is_reasoning:
                deltas += self._content(part.text)
            elif self.shown.reasoning:
                more = {"reasoning_content": part.text} if self.shown.old_name else {}
                deltas.append({"reasoning": part.text, **more})
        return deltas

    def _content(self, text: str) -> list[Delta]:
        if self.parser is not None:
            return self._pieces(self.parser.push(text))
        return [{"content": text}] if text else []

    def _pieces(self, pieces: Sequence[Piece]) -> list[Delta]:
        deltas: list[Delta] = []
        for piece in pieces:
            if piece.kind == "name":
                self._is_dropping = self.num_calls == self.tooling.most_calls
                self.num_calls += not self._is_dropping
            if piece.kind == "text":
                deltas.append({"content": piece.text})
            elif not self._is_dropping:
                deltas.append({"tool_calls": [self._call(piece)]})
        return deltas

    def _call(self, piece: Piece) -> dict[str, Any]:
        index = self.num_calls - 1
        if piece.kind == "arguments":
            return {"index": index, "function": {"arguments": piece.text}}
        assert self.parser is not None
        return {
            "index": index,
            "id": self.parser.call_id(index) or f"{ID_PREFIX}{uuid.uuid4().hex}",
            "type": "function",
            "function": {"name": piece.text, "arguments": ""},
        }

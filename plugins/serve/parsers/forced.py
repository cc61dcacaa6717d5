"""Readers of answers that a grammar has forced to be calls; no model's own format is involved."""

from __future__ import annotations

from collections.abc import Sequence

from ....core.parsers import Piece, ToolParser
from .json_calls import JsonCallParser


class ForcedCalls(JsonCallParser):
    """`[{"name": ..., "parameters": {...}}, ...]` and nothing else."""

    name = "forced"
    is_bare = True


class NamedCall(ToolParser):
    """The whole answer is the arguments of the one name."""

    name = "named"

    def __init__(self, names: Sequence[str], *, stream: bool) -> None:
        super().__init__(names, stream=stream)
        self._has_begun = False

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        first = [] if self._has_begun else [Piece("name", self.names[0])]
        self._has_begun = True
        return [*first, Piece("arguments", text)]

    def end(self) -> list[Piece]:
        return []

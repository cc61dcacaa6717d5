"""The built-in reasoning parsers, one line of data each, and the splitter that they drive."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ....core.hookspecs import hookimpl
from ....core.parsers import ReasoningParser

PARSERS = (
    ReasoningParser("deepseek_r1", "<think>", "</think>", opens=True, aliases=("nemotron_v3",)),
    ReasoningParser("qwen3", "<think>", "</think>", aliases=("glm45", "deepseek_v3", "holo2")),
    ReasoningParser("hunyuan_a13b", "<think>\n", "\n</think>"),
    ReasoningParser("kimi_k2", "<think>", "</think>", opens=True),
    ReasoningParser("seed_oss", "<seed:think>", "</seed:think>", opens=True),
    ReasoningParser("mistral", "[THINK]", "[/THINK]"),
    ReasoningParser("granite", "Here is my thought process:", "Here is my response:"),
)


class Part(NamedTuple):
    """A piece of text, and whether it is reasoning."""

    is_reasoning: bool
    text: str


class Splitter:
    """Cuts an answer at the markers of its reasoning, which belong to neither side.

    Line breaks around a marker are left out as well.
    """

    def __init__(self, parser: ReasoningParser, begins_inside: bool | None) -> None:
        self.parser = parser
        self._held = ""
        self._is_trimming = True  # leading space of the side is left out
        self._is_inside = parser.opens if begins_inside is None else begins_inside
        self._may_open = begins_inside is not False  # the start marker may come first
        self._is_over = begins_inside is False
        if self._is_over:
            self._is_trimming = False

    @property
    def is_open(self) -> bool:
        """Whether the reasoning goes on, or may yet begin."""
        return self._is_inside or self._may_open

    @property
    def has_reasoned(self) -> bool:
        """Whether the answer holds reasoning, so far as is known."""
        return self._is_inside or self._is_over

    def push(self, text: str) -> list[Part]:
        """Take the next text; return what is certain."""
        self._held += text
        parts: list[Part] = []
        while self._advance(parts):
            pass
        return parts

    def end(self) -> list[Part]:
        """Return what was held back."""
        held, self._held = self._held, ""
        if self._is_inside:
            held = held.rstrip()
        return [Part(self._is_inside, held)] if held else []

    def _advance(self, parts: list[Part]) -> bool:
        if self._may_open:
            return self._look_for_start()
        if self._is_trimming:
            self._held = self._held.lstrip()
            self._is_trimming = not self._held
        if not self._is_inside or self._is_over:
            self._send(parts, len(self._held))
            return False
        place = self._held.find(self.parser.end)
        if place < 0:
            kept = _beginning(self._held, self.parser.end)
            self._send(parts, len(self._held[: len(self._held) - kept].rstrip()))
            return False
        self._send(parts, len(self._held[:place].rstrip()))
        self._held = self._held[self._held.find(self.parser.end) + len(self.parser.end) :]
        self._is_inside, self._is_over, self._is_trimming = False, True, True
        return True

    def _look_for_start(self) -> bool:
        text, start = self._held.lstrip(), self.parser.start
        if not text.startswith(start) and start.startswith(text):
            return False
        self._may_open = False
        if text.startswith(start):
            self._held = text[len(start) :]
            self._is_inside = True
        elif not self._is_inside:
            self._is_trimming = False
        return True

    def _send(self, parts: list[Part], count: int) -> None:
        if count:
            parts.append(Part(self._is_inside, self._held[:count]))
            self._held = self._held[count:]


def _beginning(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0


@hookimpl
def decodekit_reasoning_parsers() -> Iterable[ReasoningParser]:
    return PARSERS

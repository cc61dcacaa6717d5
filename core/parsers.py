"""What reads a model's own format out of its text: parsers of tool calls and of reasoning.

A server makes one tool parser for each choice and feeds it every piece of text in order. It never
sees the reasoning, which the reasoning parser's markers cut off before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from .errors import ValidationError, did_you_mean


class Piece(NamedTuple):
    """A part of an answer. A "name" begins a call; "arguments" append to its JSON text."""

    kind: Literal["text", "name", "arguments"]
    text: str


class ToolParser:
    """Finds the calls in an answer.

    `names` are the functions that the request offers. With `stream` what `push` returned has been
    sent; without it nothing is sent before `end`, so that a broken call can become text again.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    markers: ClassVar[tuple[str, ...]] = ()  # texts that must survive where special ones are cut

    def __init__(self, names: Sequence[str], *, stream: bool) -> None:
        self.names = tuple(names)
        self.stream = stream

    def push(self, text: str) -> list[Piece]:
        """Take the next text; return what is certain by now."""
        raise NotImplementedError

    def end(self) -> list[Piece]:
        """Return what was held back; the answer has ended."""
        raise NotImplementedError

    def call_id(self, index: int) -> str | None:
        """Return the id of a call, None for one of the server's."""
        return None

    @classmethod
    def structural_tag(cls, functions: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return a structural tag that holds the arguments of calls to their schemas.

        `functions` are {"name", "parameters"}. None: the format has no marker to start from.
        """
        return None


@dataclass(frozen=True, slots=True)
class ReasoningParser:
    """Where the reasoning of a family of models stands.

    `opens`: an answer is reasoning from its first token on, unless the prompt has closed it. Else
    it is where the prompt or the answer has the start marker.
    """

    name: str
    start: str
    end: str
    opens: bool = False
    aliases: tuple[str, ...] = ()

    def begins_inside(self, prompt: str) -> bool | None:
        """Say where a prompt leaves off: inside the reasoning, behind it, or None if it is open."""
        opened, closed = prompt.rfind(self.start), prompt.rfind(self.end)
        tail = prompt[max(opened + len(self.start), closed + len(self.end)) :]
        if max(opened, closed) < 0 or tail.strip():
            return None  # the markers are of an earlier turn
        return opened > closed


T = TypeVar("T")


def find_parser(option: str, name: str, known: Mapping[str, T]) -> T:
    """Return the parser of this name or alias; ValidationError names `option` and what there is."""
    for own, parser in known.items():
        if name in (own, *getattr(parser, "aliases", ())):
            return parser
    raise ValidationError(
        f"{option} must be one of {', '.join(known)}, got {name!r}{did_you_mean(name, known)}",
        parameter=option,
        value=name,
    )

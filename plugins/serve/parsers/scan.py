"""Follows one call in JSON letter by letter, so that its arguments can be sent while they come."""

from __future__ import annotations

import json
from collections.abc import Container

from ....core.parsers import Piece

ARGUMENTS = ("arguments", "parameters")
_CLOSES = {"}": "{", "]": "["}


class CallScanner:
    """Reads `{"name": ..., "arguments": {...}}`, its keys in any order.

    `known` holds the names that count as calls, None for any. `raw` is everything read.
    """

    def __init__(self, known: Container[str] | None = None) -> None:
        self.known = known
        self.raw = ""
        self.is_done = False
        self.has_failed = False
        self.pieces: list[Piece] = []
        self.name: str | None = None
        self._key: str | None = None
        self._part = ""  # of the key or value that is being read
        self._held = ""  # arguments that came before the name
        self._has_arguments = False
        self._open: list[str] = []
        self._in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """Read until the object ends or breaks; return how many letters were taken."""
        for place, letter in enumerate(text):
            self.raw += letter
            self._step(letter)
            if self.is_done or self.has_failed:
                return place + 1
        return len(text)

    def take(self) -> list[Piece]:
        """Return the pieces since the last time."""
        taken, self.pieces = self.pieces, []
        return taken

    def _step(self, letter: str) -> None:
        if self._in_string:
            self._keep(letter)
            if self._is_escaped:
                self._is_escaped = False
            elif letter == "\\":
                self._is_escaped = True
            elif letter == '"':
                self._in_string = False
        elif letter == '"':
            self._in_string = True
            self._keep(letter)
        elif letter in "{[":
            if self._open:
                self._keep(letter)
            self._open.append(letter)
        elif letter in "}]":
            self._close(letter)
        elif len(self._open) == 1 and letter in ":,":
            self._separate(letter)
        elif len(self._open) > 1 or not letter.isspace():
            self._keep(letter)

    def _close(self, letter: str) -> None:
        if not self._open or self._open.pop() != _CLOSES[letter]:
            self.has_failed = True
        elif self._open:
            self._keep(letter)
        else:
            self._end_value()
            self._finish()

    def _separate(self, letter: str) -> None:
        if letter == ",":
            self._end_value()
        elif self._key is None:
            self._key, self._part = str(self._read(self._part)), ""
        else:
            self.has_failed = True

    def _keep(self, letter: str) -> None:
        self._part += letter
        if self._key in ARGUMENTS and self._part[0] == "{":
            self._argue(letter)

    def _argue(self, text: str) -> None:
        """Send arguments, or hold them until the name is known."""
        if self.name is None:
            self._held += text
        else:
            self.pieces.append(Piece("arguments", text))

    def _end_value(self) -> None:
        key, text, self._key, self._part = self._key, self._part, None, ""
        if key is None:
            self.has_failed = self.has_failed or bool(text)
        elif key == "name":
            self._named(self._read(text))
        elif key in ARGUMENTS:
            self._argued(text)

    def _named(self, name: object) -> None:
        if not isinstance(name, str) or not name or self.name is not None:
            self.has_failed = True
        elif self.known is not None and name not in self.known:
            self.has_failed = True
        else:
            self.name = name
            self.pieces.append(Piece("name", name))
            if self._held:
                self.pieces.append(Piece("arguments", self._held))

    def _argued(self, text: str) -> None:
        """End a value of arguments: an object, one written as a string, or null."""
        if self._has_arguments:
            self.has_failed = True
            return
        self._has_arguments = True
        if text.startswith("{"):
            return  # sent while it came
        value = self._read(text)
        if value is None:
            value = "{}"
        if isinstance(value, str):
            self._argue(value)
        else:
            self.has_failed = True

    def _finish(self) -> None:
        self._read(self.raw)
        if self.name is None:
            self.has_failed = True
        elif not self._has_arguments:
            self._argue("{}")
        self.is_done = not self.has_failed

    def _read(self, text: str) -> object:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            self.has_failed = True
            return None


class ArgumentsScanner(CallScanner):
    """Reads the arguments alone, where the name stands before them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.pieces = [Piece("name", name)]

    def _keep(self, letter: str) -> None:
        self._argue(letter)

    def _step(self, letter: str) -> None:
        if not self._open and letter == "{":
            self._argue(letter)
        super()._step(letter)

    def _separate(self, letter: str) -> None:
        self._argue(letter)

    def _end_value(self) -> None:
        self._argue("}")
        self._has_arguments = True

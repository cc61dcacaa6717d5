"""The machine behind the parsers of JSON calls: text, then calls, behind a marker or at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from ....core.parsers import Piece, ToolParser
from .scan import CallScanner


class JsonCallParser(ToolParser):
    """Calls are JSON objects, one or a list, between `starts` and `ends`.

    `is_bare`: they may also begin the answer without a marker; then only names that the request
    offers count, since an answer in JSON is no call.
    """

    starts: ClassVar[tuple[str, ...]] = ()
    ends: ClassVar[tuple[str, ...]] = ()
    is_bare: ClassVar[bool] = False

    def __init__(self, names: Sequence[str], *, stream: bool) -> None:
        super().__init__(names, stream=stream)
        self._text = ""  # not read yet
        self._out: list[Piece] = []
        self._pending: list[Piece] = []  # of the call that is being read
        self._was_sent = False  # whether a part of that call was
        self._raw = ""  # what was read since the last call or text
        self._scanner: CallScanner | None = None
        self._between = False  # whether a call may come next
        self._may_be_bare = self.is_bare
        self._has_calls = False

    def push(self, text: str) -> list[Piece]:
        self._text += text
        while self._advance():
            pass
        return self._flush(self.stream)

    def end(self) -> list[Piece]:
        if self._scanner is not None:
            self._give_up()
        elif self._between and (self._raw.strip() and not self._has_calls):
            self._say(self._raw)
        if not (self._between and self._has_calls and self._is_cut_mark()):
            self._say(self._text)
        self._text = ""
        return self._flush(True)

    # --- steps; each returns whether there is more to do --------------------------------------

    def _advance(self) -> bool:
        if self._scanner is not None:
            return self._follow(self._scanner)
        if self._between:
            return self._next_call()
        if self._may_be_bare:
            return self._look_for_bare()
        return self._look_for_start()

    def _look_for_start(self) -> bool:
        found = [(place, mark) for mark in self.starts if (place := self._text.find(mark)) >= 0]
        if found:
            place, mark = min(found)
            self._say(self._text[:place].rstrip())
            self._text = self._text[place:]
            self._skip(len(mark))
            self._between = True
            return True
        # A space may stand before a call, where it is left out.
        held = max((_overlap(self._text, mark) for mark in self.starts), default=0)
        end = len(self._text) - held
        if self.starts:
            end = len(self._text[:end].rstrip())
        self._say(self._text[:end])
        self._text = self._text[end:]
        return False

    def _look_for_bare(self) -> bool:
        text = self._text.lstrip()
        if not text or any(mark.startswith(text) and mark != text for mark in self.starts):
            return False
        self._may_be_bare = False
        if text[0] in "{[" and not text.startswith(self.starts or ("\0",)):
            self._between = True
        return True

    def _next_call(self) -> bool:
        self._skip(len(self._text) - len(self._text.lstrip()))
        if not self._text:
            return False
        for mark in (*self.starts, *self.ends):
            if self._text.startswith(mark):
                self._skip(len(mark))
                if mark in self.ends:
                    self._leave()
                return True
        if self._is_cut_mark():
            return False
        if self._text[0] in "[],;":
            self._skip(1)
            return True
        self._scanner = self._begin()
        if self._scanner is not None:
            self._was_sent = False
            return True
        return False

    def _is_cut_mark(self) -> bool:
        return any(mark.startswith(self._text) for mark in (*self.starts, *self.ends))

    def _begin(self) -> CallScanner | None:
        """Return a reader for the call that comes next, None for more text or for none at all."""
        if self._text[0] == "{":
            return CallScanner(self.names if self.is_bare else None)
        self._leave()
        return None

    def _leave(self) -> None:
        """Go back to plain text; a marker without a call was text too."""
        if not self._has_calls:
            self._say(self._raw)
        self._raw = ""
        self._between = False
        if self._text:
            while self._advance():
                pass

    def _follow(self, scanner: CallScanner) -> bool:
        used = scanner.feed(self._text)
        self._text = self._text[used:]
        self._pending += scanner.take()
        if scanner.has_failed:
            self._give_up()
        elif scanner.is_done:
            self._out += self._pending
            self._pending, self._scanner, self._raw = [], None, ""
            self._has_calls = True
        return bool(self._text)

    def _give_up(self) -> None:
        """Turn a broken call into text again, as far as it was not sent."""
        assert self._scanner is not None
        raw = self._raw + self._scanner.raw
        if self._was_sent:
            self._out += self._pending
        else:
            self._say(raw)
        self._pending, self._scanner, self._raw, self._between = [], None, "", False

    # --- what is sent -------------------------------------------------------------------------

    def _skip(self, count: int) -> None:
        self._raw += self._text[:count]
        self._text = self._text[count:]

    def _say(self, text: str) -> None:
        if text and not (self._has_calls and not text.strip()):
            self._out.append(Piece("text", text))

    def _flush(self, with_pending: bool) -> list[Piece]:
        sent, self._out = self._out, []
        if with_pending and self._pending:
            sent += self._pending
            self._pending, self._was_sent = [], True
        return merged(sent)


def merged(pieces: Sequence[Piece]) -> list[Piece]:
    """Join neighbours of one kind."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and piece.kind == joined[-1].kind != "name":
            joined[-1] = Piece(piece.kind, joined[-1].text + piece.text)
        else:
            joined.append(piece)
    return joined


def _overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark`."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-size:]):
            return size
    return 0

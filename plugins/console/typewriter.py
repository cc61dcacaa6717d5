"""Text as it comes: broken between words on a terminal, untouched in a pipe or a file."""

from __future__ import annotations

import shutil
from typing import TextIO

from rich.cells import cell_len


class Typewriter:
    """Writes pieces of text at once, except that a word waits for its end on a terminal.

    `width` in columns; None: that of the terminal, or no breaking where `file` is none.
    """

    def __init__(self, file: TextIO, width: int | None = None) -> None:
        self._file = file
        if width is None and file.isatty():
            width = shutil.get_terminal_size().columns
        self._width = width
        self._column = 0
        self._word = ""

    def write(self, text: str) -> None:
        """Write one piece and flush."""
        if self._width is None:
            self._file.write(text)
        else:
            for char in text:
                self._put(char, self._width)
        self._file.flush()

    def end(self) -> None:
        """Write what waits, and end the line."""
        if self._width is not None:
            self._end_word(self._width)
        self._file.write("\n")
        self._file.flush()
        self._column = 0

    def _put(self, char: str, width: int) -> None:
        if char == "\n":
            self._end_word(width)
            self._file.write(char)
            self._column = 0
        elif char.isspace():
            self._end_word(width)
            self._emit(char, width)
        elif cell_len(char) == 2:  # scripts without spaces break anywhere
            self._end_word(width)
            self._emit(char, width)
        else:
            self._word += char

    def _end_word(self, width: int) -> None:
        if self._word:
            self._emit(self._word, width)
            self._word = ""

    def _emit(self, text: str, width: int) -> None:
        """Write text that stays together, on a new line if it does not fit on this one."""
        size = cell_len(text)
        if self._column and self._column + size > width:
            self._file.write("\n")
            self._column = 0
            if text.isspace():  # a line does not begin with the space that ended the last one
                return
        self._file.write(text)
        self._column = (self._column + size) % width if size > width else self._column + size

"""Text that comes in pieces, broken between words."""

import io
import textwrap

from hypothesis import given
from hypothesis import strategies as st

from decodekit.plugins.console.typewriter import Typewriter

WORDS = st.lists(st.text("abcdefgh", min_size=1, max_size=12), max_size=30)


def typed(pieces: list[str], width: int | None) -> str:
    file = io.StringIO()
    page = Typewriter(file, width)
    for piece in pieces:
        page.write(piece)
    page.end()
    return file.getvalue()


@given(WORDS, st.integers(12, 40), st.integers(1, 7))
def test_lines_break_where_textwrap_breaks_them(words: list[str], width: int, size: int) -> None:
    text = " ".join(words)
    pieces = [text[i : i + size] for i in range(0, len(text), size)]

    lines = [line.rstrip() for line in typed(pieces, width).splitlines()]

    assert lines == (textwrap.wrap(text, width, break_on_hyphens=False) or [""])


def test_a_pipe_gets_the_text_as_it_is() -> None:
    text = "a long line " * 20 + "\n  indented"

    assert typed([text], None) == f"{text}\n"


def test_lines_and_indents_of_the_text_stay() -> None:
    assert typed(["- one\n", "  - two\n\nthree"], 20) == "- one\n  - two\n\nthree\n"


def test_a_word_is_shown_once_it_is_whole() -> None:
    file = io.StringIO()
    page = Typewriter(file, 20)

    page.write("one tw")

    assert file.getvalue() == "one "


def test_wide_characters_count_twice_and_break_anywhere() -> None:
    assert typed(["你好你好"], 6) == "你好你\n好\n"

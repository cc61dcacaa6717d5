"""Stop conditions, the strings: DEC-034 to DEC-040, DEC-042."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import pytest

from decodekit import CompletionOutput, SamplingParams
from decodekit.plugins.author.table_model import blank_table, byte_tokenizer, spelling_table

if TYPE_CHECKING:
    from tests.cases.conftest import Bench, Make

Spell = Callable[..., SamplingParams]

EXTRA = [" Paris", "...", " word"]
PARIS, DOTS, WORD = 256, 257, 258
DONE, END = 259, 260


@pytest.fixture(scope="module")
def writer(make: Make) -> Bench:
    """256 byte tokens, longer ones, `<|done|>` and an end token; scripts say what it writes."""
    tokenizer = byte_tokenizer(EXTRA, ["<|done|>", "<end>"], eos="<end>")
    return make(blank_table(261), model={"tokenizer": tokenizer})


def write(bench: Bench, params: SamplingParams) -> CompletionOutput:
    """Run a request plain and streamed, check that they agree, and return the plain result."""
    part = bench.generate([[0]], params)[0].outputs[0]
    stream = bench.stream([[0]], params)[0]
    shown = ""
    for delta in stream.parts():
        shown += delta.text
        assert part.text.startswith(shown), "something was shown that was taken back later"
    last = stream.last()
    assert shown == part.text
    assert stream.ids() == list(part.token_ids)
    assert (last.finish_reason, last.stop_reason) == (part.finish_reason, part.stop_reason)
    return part


def ended(part: CompletionOutput) -> tuple[str, str | None, int | str | None]:
    return part.text, part.finish_reason, part.stop_reason


def test_dec_034_stop_strings_need_not_align_with_tokens(
    writer: Bench, make: Make, ascii_tokenizer: Callable[..., Any], spell: Spell
) -> None:
    paris = spell([PARIS, *b" is big"], stop=["Pari"])
    assert ended(write(writer, paris)) == (" ", "stop", "Pari")

    # Each letter is one token here, its space included, so the stop spans three.
    letters = [f"{letter} " for letter in ascii_uppercase]
    table = spelling_table(154, [0, *range(128, 154)])
    alphabet = make(table, model={"tokenizer": ascii_tokenizer(letters)})
    params = SamplingParams(temperature=0.0, max_tokens=26, stop=["O P Q"])
    expected = "A B C D E F G H I J K L M N "
    assert ended(write(alphabet, params)) == (expected, "stop", "O P Q")

    spelled = spell(list(" ".join(ascii_uppercase).encode()), stop=["O P Q"])
    assert ended(write(writer, spelled)) == (expected, "stop", "O P Q")


@pytest.mark.parametrize(
    ("stop", "expected", "reason"),
    [
        ("DEFGHIJ", "ABC", "stop"),
        ("DEFX", "ABCDEFGHIJKL", "length"),
        ("JKLM", "ABCDEFGHIJKL", "length"),
    ],
)
def test_dec_035_nothing_is_streamed_that_a_stop_string_later_takes_back(
    make: Make, ascii_tokenizer: Callable[..., Any], stop: str, expected: str, reason: str
) -> None:
    bench = make(spelling_table(128, [0, *b"ABCDEFGHIJKL"]), model={"tokenizer": ascii_tokenizer()})
    params = SamplingParams(temperature=0.0, max_tokens=12, stop=[stop])

    part = write(bench, params)

    assert (part.text, part.finish_reason) == (expected, reason)


@pytest.mark.parametrize(("include", "expected"), [(False, "ok"), (True, "ok..")])
def test_dec_036_the_cut_is_exact_inside_the_last_token(
    writer: Bench, spell: Spell, include: bool, expected: str
) -> None:
    params = spell([*b"ok", DOTS, *b"more"], stop=[".."], include_stop_str_in_output=include)

    part = write(writer, params)

    assert ended(part) == (expected, "stop", "..")
    assert list(part.token_ids) == [*b"ok", DOTS]


@pytest.mark.parametrize(
    ("stops", "expected", "found"),
    [
        (["then", "long word", "z"], "a ", "long word"),
        (["z", "long word", "then"], "a ", "long word"),
        (["rd", "word"], "a long ", "word"),
        (["word", "rd"], "a long ", "word"),
    ],
)
def test_dec_037_the_earliest_match_wins_whatever_the_order(
    writer: Bench, spell: Spell, stops: list[str], expected: str, found: str
) -> None:
    tokens = [*b"a long", WORD, *b" then ab"]

    assert ended(write(writer, spell(tokens, stop=stops))) == (expected, "stop", found)


def test_dec_038_a_one_letter_stop_string_that_never_comes(
    make: Make, ascii_tokenizer: Callable[..., Any]
) -> None:
    bench = make(spelling_table(128, list(b"abcdefg")), model={"tokenizer": ascii_tokenizer()})
    params = SamplingParams(temperature=0.0, max_tokens=10, stop=["~"])

    part = write(bench, params)

    assert len(part.token_ids) == 10
    assert part.finish_reason == "length"
    assert len(part.text) == 10


@pytest.mark.parametrize(("stop", "expected"), [("世", "好"), ("🙂", "好世界")])
def test_dec_039_a_stop_string_whose_bytes_are_split_over_tokens(
    writer: Bench, spell: Spell, stop: str, expected: str
) -> None:
    params = spell("好世界🙂!".encode(), stop=[stop])

    assert ended(write(writer, params)) == (expected, "stop", stop)
    assert all("\ufffd" not in delta.text for delta in writer.stream([[0]], params)[0].parts())


def test_dec_040_a_special_token_given_as_a_stop_string(writer: Bench, spell: Spell) -> None:
    params = spell([*b"so", DONE, *b"more"], stop=["<|done|>"])

    part = write(writer, params)

    assert ended(part) == ("so", "stop", "<|done|>")
    assert list(part.token_ids) == [*b"so", DONE]


def test_dec_042_empty_and_odd_stop_values(writer: Bench, spell: Spell) -> None:
    tokens = list(b"one five two")

    def run(stop: Any) -> tuple[str, str | None, int | str | None]:
        return ended(write(writer, spell(tokens, stop=stop)))

    for bad in ([""], "", 17, [17], ["five", ""], [None]):
        with pytest.raises(ValueError, match="stop"):
            SamplingParams(stop=bad)
    whole = ("one five two", "length", None)
    assert run([]) == whole
    assert run(None) == whole
    cut = ("one ", "stop", "five")
    assert run("five") == cut
    assert run(["five"]) == cut
    assert run(["five", "five"]) == cut
    _check_alive(writer, spell, tokens)


def _check_alive(bench: Bench, spell: Spell, tokens: Sequence[int]) -> None:
    bench.check_idle()
    assert bench.ids([[0]], spell(tokens)) == [list(tokens)]

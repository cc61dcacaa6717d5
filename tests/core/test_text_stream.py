"""Stop strings, hold-back and the text of a finished sequence."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.detokenizer import StopMatcher, TextStream, special_stop_ids
from decodekit.core.tokenizer import Tokenizer

MakeTokenizer = Callable[..., Tokenizer]


def run(
    tokenizer: Tokenizer, words: str | Sequence[str], *, last_ends: bool = False, **options: Any
) -> tuple[TextStream, str]:
    """Push one token a word (for a string, a letter); return the stream and its joined deltas."""
    ids = [i for word in words for i in tokenizer.encode(word)]
    stream = TextStream(tokenizer, **options)
    deltas = ""
    for index, token_id in enumerate(ids):
        hit = stream.push([token_id], last_ends=last_ends and index == len(ids) - 1)
        deltas += stream.delta()
        assert stream.text.startswith(deltas)
        if hit is not None:
            break
    stream.finish()
    return stream, deltas + stream.delta()


@pytest.fixture(scope="module")
def tokenizer(make_byte_tokenizer: MakeTokenizer) -> Tokenizer:
    return make_byte_tokenizer([" Paris", "...", " word", "ok"])


def test_a_stop_string_starts_inside_a_token(tokenizer: Tokenizer) -> None:
    stream, deltas = run(tokenizer, [" Paris", " is", " big"], stops=["Pari"])

    assert stream.text == deltas == " "
    assert stream.hit is not None and stream.hit.stop == "Pari"


def test_a_stop_string_spans_tokens(tokenizer: Tokenizer) -> None:
    stream, deltas = run(tokenizer, "A B C D E F G H I J K L M N O P Q R S", stops=["O P Q"])

    assert stream.text == deltas == "A B C D E F G H I J K L M N "


@pytest.mark.parametrize(
    ("stop", "text"), [("DEFGHIJ", "ABC"), ("DEFX", "ABCDEFGHIJKL"), ("JKLM", "ABCDEFGHIJKL")]
)
def test_nothing_is_streamed_that_is_taken_back(tokenizer: Tokenizer, stop: str, text: str) -> None:
    stream, deltas = run(tokenizer, "ABCDEFGHIJKL", stops=[stop])

    assert stream.text == deltas == text


def test_the_last_characters_are_withheld_while_unfinished(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stops=["END", "~"])

    stream.push(tokenizer.encode("abcEN"))

    assert stream.text == stream.delta() == "abc"
    stream.finish()
    assert (stream.text, stream.delta()) == ("abcEN", "EN")


def test_nothing_is_withheld_when_stop_strings_are_included(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stops=["END"], include_stop_str_in_output=True)

    stream.push(tokenizer.encode("abcEN"))

    assert stream.text == "abcEN"


@pytest.mark.parametrize(("include", "text"), [(False, "ok"), (True, "ok..")])
def test_the_cut_is_exact_inside_the_last_token(
    tokenizer: Tokenizer, include: bool, text: str
) -> None:
    stream, deltas = run(
        tokenizer, ["ok", "...", "x"], stops=[".."], include_stop_str_in_output=include
    )

    assert stream.text == deltas == text
    assert stream.num_tokens == 2


@pytest.mark.parametrize(
    ("stops", "text", "stop"),
    [
        (["then", "long word", "z"], "a ", "long word"),
        (["z", "long word", "then"], "a ", "long word"),
        (["rd", "word"], "a long ", "word"),
        (["word", "rd"], "a long ", "word"),
        (["word", "wor"], "a long ", "word"),
        (["wor", "word"], "a long ", "wor"),
    ],
)
def test_the_earliest_match_wins_then_the_lists_order(
    tokenizer: Tokenizer, stops: list[str], text: str, stop: str
) -> None:
    stream, deltas = run(tokenizer, ["a", " long", " word", " then", " ab"], stops=stops)

    assert stream.text == deltas == text
    assert stream.hit is not None and stream.hit.stop == stop


def test_a_one_letter_stop_that_never_comes_withholds_nothing(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stops=["~"])

    assert stream.push(tokenizer.encode("abcdefghij")) is None
    assert stream.text == "abcdefghij"


@pytest.mark.parametrize(("stop", "text"), [("世", "好"), ("🙂", "好世界")])
def test_stops_of_characters_split_over_tokens(tokenizer: Tokenizer, stop: str, text: str) -> None:
    stream, deltas = run(tokenizer, "好世界🙂!", stops=[stop])

    assert stream.text == deltas == text


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab<|done|>")])
def test_a_special_token_as_a_stop_string(
    tokenizer: Tokenizer, skip: bool, include: bool, text: str
) -> None:
    stream, deltas = run(
        tokenizer,
        ["a", "b", "<|done|>", "c"],
        stops=["zz", "<|done|>"],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
    )

    assert stream.text == deltas == text
    assert stream.hit is not None
    assert (stream.hit.stop, stream.hit.num_tokens) == ("<|done|>", 3)


def test_special_stop_ids_are_whole_special_tokens_only(
    make_byte_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_byte_tokenizer(added=["<tool>"])
    done = tokenizer.encode("<|done|>")[0]

    assert special_stop_ids(tokenizer, ["<|done|>", "done", "<tool>", "a"]) == {done: "<|done|>"}


@pytest.mark.parametrize(
    ("end", "skip", "include", "text"),
    [
        ("Z", True, False, "ab"),
        ("Z", True, True, "abZ"),
        ("<|done|>", True, False, "ab"),
        ("<|done|>", True, True, "ab"),
        ("<|done|>", False, False, "ab"),
        ("<|done|>", False, True, "ab<|done|>"),
    ],
)
def test_what_an_end_token_leaves_in_the_text(
    tokenizer: Tokenizer, end: str, skip: bool, include: bool, text: str
) -> None:
    stream, deltas = run(
        tokenizer,
        ["a", "b", end],
        last_ends=True,
        stops=["long stop"],
        skip_special_tokens=skip,
        include_stop_str_in_output=include,
    )

    assert stream.text == deltas == text
    assert stream.hit is None
    assert stream.num_tokens == 3


def test_a_stop_string_wins_over_an_end_token(tokenizer: Tokenizer) -> None:
    stream, _ = run(tokenizer, ["a", "</s>"], last_ends=True, stops=["</s>"])

    assert stream.hit is not None and stream.hit.stop == "</s>"
    assert stream.text == "a"


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 6, 7])
def test_stops_are_not_seen_in_the_first_min_tokens(tokenizer: Tokenizer, min_tokens: int) -> None:
    stream, deltas = run(tokenizer, "ab" * 6, stops=["b"], min_tokens=min_tokens)

    expected = next(n for n in range(len("ab" * 6)) if n >= min_tokens and n % 2)
    assert stream.text == deltas == ("ab" * 6)[:expected]


def test_a_match_may_not_begin_in_the_first_min_tokens(tokenizer: Tokenizer) -> None:
    stream, _ = run(tokenizer, "xababab", stops=["ba"], min_tokens=3)

    assert (stream.text, stream.num_tokens) == ("xaba", 6)


def test_a_special_stop_does_not_act_before_min_tokens(tokenizer: Tokenizer) -> None:
    stream, _ = run(tokenizer, ["<|done|>", "a", "<|done|>"], stops=["<|done|>"], min_tokens=2)

    assert stream.text == "a"
    assert stream.num_tokens == 3


def test_tokens_after_a_hit_are_not_taken(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stops=["b"])

    hit = stream.push(tokenizer.encode("abcdef"))

    assert hit is not None and hit.num_tokens == stream.num_tokens == 2


def test_an_unfinished_character_comes_out_on_finish(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    stream.push(tokenizer.encode("a🙂")[:-1])

    before = stream.text
    stream.finish()
    stream.finish()

    assert (before, stream.text) == ("a", "a\N{REPLACEMENT CHARACTER}")


def test_without_a_tokenizer_tokens_are_counted(tokenizer: Tokenizer) -> None:
    stream = TextStream(None)

    assert stream.push([1, 2, 10**9]) is None
    stream.finish()

    assert (stream.num_tokens, stream.text, stream.delta()) == (3, "", "")


def test_clones_go_separate_ways(tokenizer: Tokenizer) -> None:
    first = TextStream(tokenizer, stops=["abc"])
    first.push(tokenizer.encode("xab"))
    second = first.clone()

    hit, other = first.push(tokenizer.encode("c")), second.push(tokenizer.encode("d"))
    second.finish()

    assert hit is not None and other is None
    assert (first.text, second.text) == ("x", "xabd")
    assert (first.delta(), second.delta()) == ("x", "xabd")


@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
)
def test_letter_by_letter_the_matcher_equals_a_plain_search(
    tokenizer: Tokenizer, text: str, stops: list[str], include: bool, min_tokens: int
) -> None:
    expected, stop = text, None
    for size in range(min_tokens + 1, len(text) + 1):
        starts = [(text.find(s, min_tokens, size), n) for n, s in enumerate(stops)]
        found = [pair for pair in starts if pair[0] >= 0]
        if found:
            start, number = min(found)
            stop = stops[number]
            expected = text[: start + len(stop) if include else start]
            break

    stream, deltas = run(
        tokenizer, text, stops=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )

    assert stream.text == deltas == expected
    assert (stream.hit.stop if stream.hit else None) == stop


def test_duplicate_stops_are_harmless() -> None:
    matcher = StopMatcher(["five", "five"])

    hit = matcher.feed("at five", 1)

    assert hit is not None and (hit.stop, hit.end) == ("five", 3)

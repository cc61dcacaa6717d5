"""Streamed text against the one-shot decoding of the `tokenizers` library, token by token."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from decodekit.core.detokenizer import Detokenizer, decoded_tokens
from decodekit.core.tokenizer import Tokenizer, tokenizer_from_hf

MakeTokenizer = Callable[..., Tokenizer]
FFFD = "\N{REPLACEMENT CHARACTER}"
FAMILY = "👩\N{ZERO WIDTH JOINER}👩\N{ZERO WIDTH JOINER}👧"


def stream(
    tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **options: bool
) -> list[str]:
    """The pieces that one push a token gives, and last what finish gives."""
    detokenizer = Detokenizer(tokenizer, prompt or [], **options)
    return [*(detokenizer.push([i]) for i in ids), detokenizer.finish()]


def byte_ids(tokenizer: Tokenizer, raw: bytes) -> list[int]:
    of_byte = {tokenizer.token_bytes(i): i for i in range(300) if tokenizer.has_token(i)}
    return [of_byte[bytes([b])] for b in raw]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        "好世界🙂!",
        FAMILY,
        "é e\N{COMBINING ACUTE ACCENT}",
        "\N{REPLACEMENT CHARACTER}a",
        "a\0b",
        "",
    ],
)
def test_characters_split_over_byte_tokens_come_whole(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_ids(byte_tokenizer, text.encode())

    pieces = stream(byte_tokenizer, ids)

    assert "".join(pieces) == text
    assert [p for p in pieces if p] == list(text)


@given(ids=st.lists(st.integers(-2, 300), max_size=40))
def test_any_ids_stream_to_the_one_shot_decoding(byte_tokenizer: Tokenizer, ids: list[int]) -> None:
    known = [i for i in ids if i >= 0]  # the library takes no negative ids
    assert byte_tokenizer.backend is not None

    for skip in (True, False):
        text = "".join(stream(byte_tokenizer, ids, skip_special_tokens=skip))

        assert text == byte_tokenizer.backend.decode(known, skip_special_tokens=skip)
        assert text == byte_tokenizer.decode(ids, skip_special_tokens=skip)


@given(text=st.text(), cuts=st.lists(st.integers(1, 5), min_size=1))
def test_chunking_does_not_show(byte_tokenizer: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = byte_tokenizer.encode(text)
    detokenizer = Detokenizer(byte_tokenizer)
    pieces, rest = [], ids

    for size in cuts * (len(ids) + 1):
        pieces.append(detokenizer.push(rest[:size]))
        rest = rest[size:]

    assert "".join(pieces) + detokenizer.finish() == text


@given(text=st.text(), cut=st.integers(0, 60))
def test_embedded_prompt_and_output_split_anywhere(
    embedded: Tokenizer, text: str, cut: int
) -> None:
    ids = embedded.encode(text)
    prompt, output = ids[:cut], ids[cut:]
    whole = embedded.decode(ids, skip_special_tokens=False)
    before = embedded.decode(prompt, skip_special_tokens=False)

    pieces = stream(embedded, output, prompt, skip_special_tokens=False)

    if whole.startswith(before):
        assert "".join(pieces) == whole[len(before) :]
    else:  # the prompt ends inside a character, which the output completes
        assert "".join(pieces) == whole[len(before) - 1 :]


def test_a_half_spelled_character_of_the_prompt_is_completed(byte_tokenizer: Tokenizer) -> None:
    ids = byte_ids(byte_tokenizer, "好!".encode())

    assert stream(byte_tokenizer, ids[2:], ids[:2]) == ["好", "!", ""]
    assert stream(byte_tokenizer, ids[1:], ids[:1]) == ["", "好", "!", ""]


def test_a_half_spelled_character_that_the_output_drops_is_the_prompts(
    byte_tokenizer: Tokenizer,
) -> None:
    lead = byte_ids(byte_tokenizer, "好".encode()[:2])

    assert stream(byte_tokenizer, byte_ids(byte_tokenizer, b"ab"), lead) == ["a", "b", ""]
    assert stream(byte_tokenizer, [], lead) == [""]
    assert stream(byte_tokenizer, lead[:1], lead) == ["", FFFD]


def test_unfinished_bytes_come_out_at_the_end_only(byte_tokenizer: Tokenizer) -> None:
    ids = byte_ids(byte_tokenizer, b"a\xf0\x9f\x99")

    assert stream(byte_tokenizer, ids) == ["a", "", "", "", FFFD]


def test_broken_bytes_are_replaced_where_they_break(byte_tokenizer: Tokenizer) -> None:
    ids = byte_ids(byte_tokenizer, b"\xe5\xa5c\xffd")

    assert stream(byte_tokenizer, ids) == ["", "", FFFD + "c", FFFD, "d", ""]


def test_special_and_unknown_ids_are_skipped(byte_tokenizer: Tokenizer) -> None:
    done = byte_tokenizer.encode("<|done|>")
    tool = byte_tokenizer.encode("<tool>")
    ids = [97, *done, 10**9, -1, *tool]
    a = byte_tokenizer.text_of_token(97)

    assert "".join(stream(byte_tokenizer, ids)) == f"{a}<tool>"
    shown = stream(byte_tokenizer, ids, skip_special_tokens=False)
    assert "".join(shown) == f"{a}<|done|><tool>"


def test_added_tokens_keep_their_own_text(make_byte_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_byte_tokenizer(added=["été", "\n\n", "a b"])
    ids = tokenizer.encode("xétéa b\n\n")

    assert len(ids) == 4
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids) == "xétéa b\n\n"


@pytest.mark.parametrize("style", ["llama", "gemma", "metaspace"])
@pytest.mark.parametrize("prompt_text", ["", "the", "the ", "é"])
@given(text=st.text(alphabet="the lzé世🙂\n"))
def test_marked_vocabularies_stream_to_the_one_shot_difference(
    make_marked_tokenizer: MakeTokenizer, style: str, prompt_text: str, text: str
) -> None:
    tokenizer = make_marked_tokenizer(style)
    assert tokenizer.backend is not None and tokenizer.bos_token_id is not None
    prompt = [tokenizer.bos_token_id]
    if prompt_text:
        prompt += tokenizer.encode(prompt_text, add_special_tokens=False)
    output = tokenizer.encode(text, add_special_tokens=False)

    for skip in (True, False):
        streamed = "".join(stream(tokenizer, output, prompt, skip_special_tokens=skip))

        whole = tokenizer.backend.decode([*prompt, *output], skip_special_tokens=skip)
        before = tokenizer.backend.decode(prompt, skip_special_tokens=skip)
        assert streamed == whole[len(before) :]
        assert tokenizer.decode([*prompt, *output], skip) == whole


def test_a_first_space_is_dropped_only_at_the_start(make_marked_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_marked_tokenizer()
    bos, the = [1], tokenizer.encode("the", add_special_tokens=False)

    assert "".join(stream(tokenizer, the * 2, bos)) == "the the"
    assert "".join(stream(tokenizer, the * 2, bos + the)) == " the the"
    assert "".join(stream(tokenizer, the, bos, skip_special_tokens=False)) == " the"


def test_byte_tokens_of_a_marked_vocabulary_wait_for_their_character(
    make_marked_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_marked_tokenizer()
    ids = [3 + byte for byte in "a🙂".encode()]

    assert stream(tokenizer, ids, [1, 4 + ord("x")]) == ["a", "", "", "", "🙂", ""]


@pytest.fixture(scope="module")
def piece_tokenizer() -> Tokenizer:
    """Word pieces joined by spaces: decoded through the library."""
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "<a>", "<b>", "he", "##llo", "world", "##s", ","]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(w) for w in words[:3]])
    return tokenizer_from_hf(PreTrainedTokenizerFast(tokenizer_object=backend))


@given(
    prompt=st.lists(st.integers(3, 5), max_size=3), ids=st.lists(st.integers(-1, 9), max_size=12)
)
def test_opaque_vocabularies_stream_to_the_one_shot_difference(
    piece_tokenizer: Tokenizer, prompt: list[int], ids: list[int]
) -> None:
    assert piece_tokenizer.backend is not None
    whole = piece_tokenizer.backend.decode(prompt + [i for i in ids if i >= 0])
    before = piece_tokenizer.backend.decode(prompt)

    streamed = "".join(stream(piece_tokenizer, ids, prompt))

    # A prefix that is cut off from the window reads "##llo" as a first word does.
    assert streamed.replace("##", "") == whole[len(before) :].replace("##", "")


def test_spaces_between_added_tokens_can_be_left_out(piece_tokenizer: Tokenizer) -> None:
    ids = [5, 1, 2, 2, 5]

    apart = stream(piece_tokenizer, ids, skip_special_tokens=False)
    together = stream(
        piece_tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False
    )

    assert "".join(apart) == "world <a> <b> <b> world"
    assert "".join(together) == "world <a><b><b> world"


@pytest.mark.parametrize("fixture", ["byte_tokenizer", "piece_tokenizer"])
def test_clones_go_separate_ways(fixture: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(fixture)
    first = Detokenizer(tokenizer)
    first.push([5, 3])
    second = first.clone()

    a, b = first.push([4, 5]), second.push([5, 5])

    assert a == tokenizer.decode([5, 3, 4, 5])[len(tokenizer.decode([5, 3])) :]
    assert b == tokenizer.decode([5, 3, 5, 5])[len(tokenizer.decode([5, 3])) :]


@given(text=st.text(max_size=20))
def test_decoded_tokens_join_to_the_text(byte_tokenizer: Tokenizer, text: str) -> None:
    ids = byte_tokenizer.encode(text)

    parts = [decoded_tokens(byte_tokenizer, [i], ids[:n])[0] for n, i in enumerate(ids)]

    assert "".join(parts) == text


def test_decoded_tokens_mend_halves_with_the_context(byte_tokenizer: Tokenizer) -> None:
    lead = byte_ids(byte_tokenizer, "好".encode()[:2])
    last = byte_ids(byte_tokenizer, "好".encode()[2:])
    a, done = byte_ids(byte_tokenizer, b"a")[0], byte_tokenizer.encode("<|done|>")[0]

    assert decoded_tokens(byte_tokenizer, [*last, a, done, 10**9], lead) == [
        "好",
        "a",
        "<|done|>",
        "",
    ]
    assert decoded_tokens(byte_tokenizer, [*last, *lead], []) == ["", "", ""]


def test_decoded_tokens_show_their_leading_space(make_marked_tokenizer: MakeTokenizer) -> None:
    tokenizer = make_marked_tokenizer()
    the = tokenizer.encode("the", add_special_tokens=False)

    assert decoded_tokens(tokenizer, the, [1]) == [" the"]


def test_decoded_tokens_of_an_opaque_vocabulary(piece_tokenizer: Tokenizer) -> None:
    assert decoded_tokens(piece_tokenizer, [5, 1, 99], [3, 4]) == ["world", "<a>", ""]

"""Loading from folders, prompts under truncation, exact bytes, bad words."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from decodekit.core.errors import ValidationError
from decodekit.core.spelling import spelling_of
from decodekit.core.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_hf

MakeTokenizer = Callable[..., Tokenizer]
TEXT = "the other thing, 好 and café"


@pytest.fixture
def bos_tokenizer(make_byte_tokenizer: MakeTokenizer) -> Tokenizer:
    """A byte tokenizer that puts <s> in front of a text and </s> behind it."""
    hf = make_byte_tokenizer(["the"]).hf
    hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> $B:1 </s>:1",
        special_tokens=[("<s>", hf.bos_token_id), ("</s>", hf.eos_token_id)],
    )
    return tokenizer_from_hf(hf)


@pytest.fixture
def word_tokenizer() -> Tokenizer:
    """A word-piece tokenizer, whose tokens have no bytes of their own."""
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "[CLS]", "[SEP]", "he", "##llo", "world", "##s"]
    backend = Backend(models.WordPiece({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken(w) for w in words[:3]])
    return tokenizer_from_hf(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_folder_loads_with_its_template_and_special_tokens(
    make_byte_tokenizer: MakeTokenizer, tmp_path: Path
) -> None:
    made = make_byte_tokenizer(["the"], chat_template="{{ messages }}")
    made.hf.save_pretrained(tmp_path)

    loaded = load_tokenizer("no/such-model", tokenizer=tmp_path)

    assert loaded.encode(TEXT) == made.encode(TEXT) == loaded.hf.encode(TEXT)
    assert loaded.special_ids == made.special_ids and len(made.special_ids) == 3
    assert (loaded.bos_token_id, loaded.eos_token_id) == (made.bos_token_id, made.eos_token_id)
    assert loaded.chat_template == "{{ messages }}"
    assert loaded.vocab_size == len(made.hf) == loaded.max_token_id + 1


def test_user_calls_do_not_truncate_our_prompts(byte_tokenizer: Tokenizer) -> None:
    before = byte_tokenizer.encode(TEXT)

    byte_tokenizer.hf(TEXT, truncation=True, max_length=2)

    assert byte_tokenizer.encode(TEXT) == before


@pytest.mark.parametrize("mode", ["slow", "mistral", ""])
def test_unknown_tokenizer_modes_are_refused(mode: str) -> None:
    with pytest.raises(ValidationError, match="tokenizer_mode") as caught:
        load_tokenizer("x", tokenizer_mode=mode)
    assert caught.value.value == mode


@pytest.mark.parametrize(("side", "cut"), [(None, "hij"), ("left", "hij"), ("right", "abc")])
def test_truncation_keeps_a_side_and_the_special_tokens(
    bos_tokenizer: Tokenizer, side: str | None, cut: str
) -> None:
    ids = bos_tokenizer.encode_prompt(
        "abcdefghij", truncate_prompt_tokens=5, truncation_side=side, max_model_len=64
    )
    hf = bos_tokenizer.hf
    hf.truncation_side = side or "left"

    assert bos_tokenizer.decode(ids, skip_special_tokens=False) == f"<s>{cut}</s>"
    assert ids == hf("abcdefghij", truncation=True, max_length=5)["input_ids"]


def test_truncation_without_special_tokens_counts_plain_ones(bos_tokenizer: Tokenizer) -> None:
    ids = bos_tokenizer.encode_prompt("abcdef", add_special_tokens=False, truncate_prompt_tokens=2)

    assert bos_tokenizer.decode(ids) == "ef"


@pytest.mark.parametrize(("limit", "expected"), [(1, 1), (2, 2), (3, 3), (-1, 4), (12, 12)])
def test_truncated_length_is_exact(bos_tokenizer: Tokenizer, limit: int, expected: int) -> None:
    size = 4 if limit == -1 else 64

    ids = bos_tokenizer.encode_prompt(
        "abcdefghij", truncate_prompt_tokens=limit, max_model_len=size
    )

    assert len(ids) == expected


@pytest.mark.parametrize("limit", [0, -2, 65, True, 1.5, "3"])
def test_bad_truncation_is_refused_with_its_range(bos_tokenizer: Tokenizer, limit: object) -> None:
    with pytest.raises(ValidationError, match=r"-1 or in \[1, 64\]") as caught:
        bos_tokenizer.encode_prompt("abc", truncate_prompt_tokens=limit, max_model_len=64)  # type: ignore[arg-type]
    assert (caught.value.parameter, caught.value.value) == ("truncate_prompt_tokens", limit)


def test_bad_truncation_side_is_refused(bos_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="'left' or 'right'"):
        bos_tokenizer.encode_prompt("abc", truncation_side="middle")


def test_tokenizer_keywords_reach_transformers_and_others_are_refused(
    bos_tokenizer: Tokenizer,
) -> None:
    ids = bos_tokenizer.encode_prompt("abcdef", truncation=True, max_length=4)

    assert ids == bos_tokenizer.hf("abcdef", truncation=True, max_length=4)["input_ids"]
    assert len(ids) == 4
    with pytest.raises(ValidationError, match="'max_lenght'"):
        bos_tokenizer.encode_prompt("abc", max_lenght=4)


@pytest.mark.parametrize("text", ["a\ud800b", 17, None, ["a"]])
def test_what_is_no_text_is_refused(byte_tokenizer: Tokenizer, text: object) -> None:
    with pytest.raises(ValidationError) as caught:
        byte_tokenizer.encode(text)  # type: ignore[arg-type]
    assert caught.value.parameter == "prompt"


def test_byte_level_tokens_have_exact_bytes(byte_tokenizer: Tokenizer) -> None:
    singles = sorted(byte_tokenizer.token_bytes(i) for i in range(256))

    assert singles == [bytes([b]) for b in range(256)]
    assert byte_tokenizer.token_bytes(byte_tokenizer.encode("<tool>")[0]) == b"<tool>"


@pytest.mark.parametrize("style", ["llama", "gemma", "metaspace"])
def test_marked_tokens_have_exact_bytes(make_marked_tokenizer: MakeTokenizer, style: str) -> None:
    tokenizer = make_marked_tokenizer(style)
    ids = tokenizer.encode("hé ß the", add_special_tokens=False)

    assert b"".join(tokenizer.token_bytes(i) for i in ids) == " hé ß the".encode()
    assert tokenizer.token_bytes(3 + 0xC3) == b"\xc3"


def test_ids_outside_the_vocabulary_have_nothing(byte_tokenizer: Tokenizer) -> None:
    for token_id in (-1, byte_tokenizer.max_token_id + 1, 10**12):
        assert byte_tokenizer.token_bytes(token_id) == b""
        assert byte_tokenizer.text_of_token(token_id) == ""
        assert byte_tokenizer.decode([token_id]) == ""


def test_word_pieces_have_no_bytes_but_a_text(word_tokenizer: Tokenizer) -> None:
    ids = word_tokenizer.encode("hello worlds")

    assert word_tokenizer.decode(ids) == word_tokenizer.hf.decode(ids) == "hello worlds"
    assert word_tokenizer.decode([1, *ids, 2]) == "hello worlds"
    assert word_tokenizer.text_of_token(1) == "[CLS]"
    with pytest.raises(ValueError, match="no bytes of their own"):
        word_tokenizer.token_bytes(ids[0])


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Replace("_", " "), decoders.Fuse()]),
        decoders.Metaspace("_"),
    ],
)
def test_decoders_not_known_to_be_bytewise_are_opaque(decoder: object) -> None:
    assert spelling_of(decoder).kind == "opaque"


def test_tokenizers_that_only_transformers_runs() -> None:
    tokenizer = tokenizer_from_hf(char_tokenizer_class()())
    ids = tokenizer.encode("abba")

    assert not tokenizer.is_fast
    assert ids == [0, 1, 1, 0]
    assert tokenizer.decode([*ids, 2, 99]) == "abba"
    assert tokenizer.special_ids == {2}
    assert tokenizer.encode_prompt("abab", truncate_prompt_tokens=3) == [1, 0, 1]
    assert tokenizer.decode([*ids, 2], skip_special_tokens=False).endswith("<e>")


@pytest.mark.parametrize("word", ["described", "  described"])
def test_bad_words_come_bare_and_spaced(make_byte_tokenizer: MakeTokenizer, word: str) -> None:
    tokenizer = make_byte_tokenizer([" described", "desc", "ribed"])

    forms = tokenizer.bad_word_sequences(word)

    assert [tokenizer.decode(form) for form in forms] == ["described", " described"]
    assert [len(form) for form in forms] == [2, 1]


def test_bad_words_of_a_space_first_tokenizer_include_the_glued_form(
    make_marked_tokenizer: MakeTokenizer,
) -> None:
    tokenizer = make_marked_tokenizer()

    forms = tokenizer.bad_word_sequences("the")

    spelled = [b"".join(tokenizer.token_bytes(i) for i in form) for form in forms]
    assert spelled == [b" the", b"the"]


def test_blank_bad_words_are_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(ValidationError, match="white space") as caught:
        byte_tokenizer.bad_word_sequences("  ")
    assert caught.value.parameter == "bad_words"


def char_tokenizer_class() -> type:
    from transformers import PreTrainedTokenizer

    class CharTokenizer(PreTrainedTokenizer):
        """Letters a and b; <e> is the end token."""

        vocab = {"a": 0, "b": 1}

        def __init__(self) -> None:
            super().__init__(eos_token="<e>")

        @property
        def vocab_size(self) -> int:
            return len(self.vocab)

        def get_vocab(self) -> dict[str, int]:
            return {**self.vocab, **self.added_tokens_encoder}

        def _tokenize(self, text: str, **_: object) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return self.vocab[token]

        def _convert_id_to_token(self, index: int) -> str | None:
            return {i: t for t, i in self.vocab.items()}.get(index)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens)

    return CharTokenizer

"""The bytes of every token: control ids unreachable, padding empty, text spelled as the model."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from decodekit.core.errors import ValidationError
from decodekit.core.tokenizer import Tokenizer, tokenizer_from_hf
from decodekit.structured.vocabulary import marker, vocabulary_of

MARK = "\N{LOWER ONE EIGHTH BLOCK}"


def marked_tokenizer(style: str) -> Tokenizer:
    """A sentencepiece-like tokenizer: byte tokens, space marks, a space before the first text."""
    from transformers import PreTrainedTokenizerFast

    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    tokens += [*'abcdehlort{}":,.', MARK, MARK + "t", "he", MARK + "the", "é"]
    merges = [(MARK, "t"), ("h", "e"), (MARK + "t", "he")]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    scheme = "first" if style == "llama" else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(MARK, prepend_scheme=scheme, split=False)
    steps = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if style == "llama":
        steps.append(decoders.Strip(" ", 1, 0))
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:3]])
    backend.add_tokens([AddedToken("<call>", normalized=False)])
    return tokenizer_from_hf(
        PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    )


def test_a_texts_tokens_join_to_its_bytes(embedded_tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(embedded_tokenizer)

    for text in ("plain words", '{"a": "żółć 😀", "b":\t[1, 2]}', "a\n\n  b\u0000"):
        ids = embedded_tokenizer.encode(text, add_special_tokens=False)
        assert b"".join(vocabulary.tokens[i] for i in ids) == text.encode()


def test_control_tokens_hold_bytes_that_no_text_has(embedded_tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(embedded_tokenizer)

    end = embedded_tokenizer.encode("<|im_end|>", add_special_tokens=False)[0]
    assert end in vocabulary.control_ids
    assert vocabulary.control_texts["<|im_end|>"] == end
    for token_id in vocabulary.control_ids:
        assert vocabulary.tokens[token_id] == marker(token_id)
        with pytest.raises(UnicodeDecodeError):
            vocabulary.tokens[token_id].decode()
    assert len({vocabulary.tokens[i] for i in vocabulary.control_ids}) == 17


def test_ids_past_the_tokenizer_are_empty(embedded_tokenizer: Tokenizer) -> None:
    known = embedded_tokenizer.max_token_id + 1

    vocabulary = vocabulary_of(embedded_tokenizer, known + 13)

    assert vocabulary.size == known + 13
    assert vocabulary.tokenizer_size == known
    assert set(vocabulary.tokens[known:]) == {b""}
    assert all(vocabulary.tokens[:known])


def test_a_narrow_head_cuts_the_vocabulary(embedded_tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(embedded_tokenizer, 1000)

    assert vocabulary.size == vocabulary.tokenizer_size == 1000


def test_ends_of_the_model_configuration_are_control_ids(embedded_tokenizer: Tokenizer) -> None:
    word = embedded_tokenizer.encode("hello", add_special_tokens=False)[0]

    vocabulary = vocabulary_of(embedded_tokenizer, end_ids=[word])

    assert word in vocabulary.eos_ids
    assert vocabulary.tokens[word] == marker(word)


def test_it_is_built_once_a_tokenizer(embedded_tokenizer: Tokenizer) -> None:
    first = vocabulary_of(embedded_tokenizer)

    assert vocabulary_of(embedded_tokenizer) is first
    assert vocabulary_of(embedded_tokenizer, first.size) is first
    assert vocabulary_of(embedded_tokenizer, first.size + 1) is not first


@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_marks_are_spaces_and_byte_tokens_are_bytes(style: str) -> None:
    tokenizer = marked_tokenizer(style)

    vocabulary = vocabulary_of(tokenizer)

    tokens = vocabulary.tokens
    assert tokens[3 + 0x0A] == b"\n" and tokens[3 + 0xFF] == b"\xff"
    assert b" the" in tokens and b"<call>" in tokens  # an added token that is not special is text
    assert vocabulary.control_ids == {0, 1, 2}
    begin = tokenizer.encode("a", add_special_tokens=False)
    for token_id in range(259, len(tokens) - 1):  # what a token adds to a text that has begun
        whole = tokenizer.decode([*begin, token_id], skip_special_tokens=False)
        assert whole.encode().endswith(tokens[token_id])


@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_a_continuation_has_no_space_in_front(style: str) -> None:
    vocabulary = vocabulary_of(marked_tokenizer(style))

    for text in ("the", "he the", '{"a":', "</s>", "é\n", " ", "\n\n"):
        ids = vocabulary.encode(text)
        assert b"".join(vocabulary.tokens[i] for i in ids) == text.encode()
        assert vocabulary.control_ids.isdisjoint(ids)


def test_the_text_of_a_control_token_is_spelled_in_pieces(embedded_tokenizer: Tokenizer) -> None:
    vocabulary = vocabulary_of(embedded_tokenizer)

    ids = vocabulary.encode("x<|im_end|>")

    assert vocabulary.control_ids.isdisjoint(ids)
    assert b"".join(vocabulary.tokens[i] for i in ids) == b"x<|im_end|>"


class Slow:
    """What a tokenizer looks like that only transformers can run."""

    is_fast = False
    backend = None
    end_ids: frozenset[int] = frozenset({2})
    special_ids = frozenset({0, 1, 2})
    spelling = SimpleNamespace(kind="opaque")
    added_tokens = {0: "<unk>", 1: "<s>", 2: "</s>"}

    def __init__(self, hf: Any, size: int) -> None:
        self.hf, self.max_token_id = hf, size - 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return []


def test_tokens_handed_out_as_bytes_are_taken_as_they_are() -> None:
    pieces = ["<unk>", "<s>", "</s>", b"a", b"\xff", b" \xe5\xa5"]
    hf = SimpleNamespace(convert_ids_to_tokens=pieces.__getitem__)

    vocabulary = vocabulary_of(Slow(hf, len(pieces)))

    assert vocabulary.tokens[3:] == (b"a", b"\xff", b" \xe5\xa5")
    assert vocabulary.encode("aa") == [3, 3]


def test_a_tekken_vocabulary_is_exact() -> None:
    class Tekken:
        num_special_tokens = 5

        def id_to_byte_piece(self, token_id: int) -> bytes:
            return [b"a", b"\xf0\x9f", b"bc"][token_id - 5]

    hf = SimpleNamespace(
        tokenizer=SimpleNamespace(instruct_tokenizer=SimpleNamespace(tokenizer=Tekken()))
    )

    vocabulary = vocabulary_of(Slow(hf, 8))

    assert vocabulary.tokens[5:] == (b"a", b"\xf0\x9f", b"bc")
    assert vocabulary.control_ids == set(range(5))


def test_sentencepiece_without_the_fast_library_is_exact() -> None:
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", MARK + "hi", "é"]

    class Model:
        def __len__(self) -> int:
            return len(pieces)

        def is_control(self, i: int) -> bool:
            return i in (1, 2)

        def is_unknown(self, i: int) -> bool:
            return i == 0

    hf = SimpleNamespace(sp_model=Model(), convert_ids_to_tokens=pieces.__getitem__)

    assert vocabulary_of(Slow(hf, 6)).tokens[3:] == (b"\n", b" hi", "é".encode())


def test_a_tokenizer_without_bytes_of_its_own_is_refused_by_name() -> None:
    class WordTokenizer:
        def convert_ids_to_tokens(self, token_id: int) -> str:
            return "word"

    with pytest.raises(ValidationError, match="WordTokenizer is none of these"):
        vocabulary_of(Slow(WordTokenizer(), 8))


def test_no_tokenizer_is_refused() -> None:
    with pytest.raises(ValidationError, match="needs the tokenizer"):
        vocabulary_of(None)


def test_the_tokenizer_itself_is_left_as_it_was(embedded_tokenizer: Tokenizer) -> None:
    tokenizer = copy.copy(embedded_tokenizer)

    vocabulary_of(tokenizer).encode("<|im_end|>")

    assert len(tokenizer.encode("<|im_end|>", add_special_tokens=False)) == 1

"""The embedded model's tokenizer, and what is refused of other GGUF vocabularies."""

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from decodekit.core.errors import ValidationError
from decodekit.core.gguf_vocab import tokenizer_from_gguf
from decodekit.core.models.locate import embedded_path
from decodekit.core.tokenizer import Tokenizer, load_tokenizer

NO_TOKEN = bytes([4, 6, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)])

KNOWN_IDS = {
    "Hello world": [19556, 905],
    "In 2024, 123 people": [788, 216, 34, 32, 34, 36, 28, 216, 33, 34, 35, 701],
    "  12  3": [256, 33, 34, 256, 35],
    "a\n\n1. b\n2. c": [81, 1116, 33, 30, 278, 198, 34, 30, 265],
    "x\n\n\n3": [104, 16506, 35],
    "I'll don't": [57, 3060, 1326, 982],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "1, 2, 3, 4, 5,": [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28, 216, 37, 28],
    "The future of AI is": [504, 1774, 282, 5646, 314],
}


def small_metadata(**changes: Any) -> dict[str, Any]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    space = "\u0120"  # a space in the byte alphabet
    tokens = [*alphabet, "12", space + "a", "ab", "<bos>", "<eos>", "<tool>", "<eot>"]
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 4) + [3, 3, 4, 3],
        "tokenizer.ggml.merges": ["1 2", f"{space} a", "a b"],
        "tokenizer.ggml.bos_token_id": tokens.index("<bos>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<eos>"),
        "tokenizer.ggml.eot_token_id": tokens.index("<eot>"),
        "tokenizer.ggml.padding_token_id": 2**32 - 1,
    }
    keys.update({f"tokenizer.{key}": value for key, value in changes.items()})
    return keys


def tokens_of(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.text_of_token(i) for i in tokenizer.encode(text)]


@pytest.mark.parametrize("text", KNOWN_IDS)
def test_embedded_ids_are_those_of_the_reference(embedded: Tokenizer, text: str) -> None:
    assert embedded.encode(text) == KNOWN_IDS[text]


def test_embedded_special_ids(embedded: Tokenizer) -> None:
    assert (embedded.bos_token_id, embedded.eos_token_id, embedded.pad_token_id) == (1, 2, 2)
    assert embedded.special_ids == frozenset(range(17))
    assert embedded.end_ids == {2}
    assert (embedded.vocab_size, embedded.max_token_id) == (49152, 49151)
    assert embedded.is_fast
    assert isinstance(embedded.chat_template, str) and len(embedded.chat_template) == 368


def test_embedded_file_is_loaded_without_transformers(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import sys; from decodekit.core.tokenizer import load_tokenizer;"
        f"t = load_tokenizer({str(embedded_path())!r}); print(t.encode('Hello world'));"
        "print('transformers' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )

    assert done.stdout.splitlines() == ["[19556, 905]", "False False"]


def test_transformers_twin_encodes_alike_and_carries_the_rest(embedded: Tokenizer) -> None:
    hf = embedded.hf

    for text in KNOWN_IDS:
        assert hf.encode(text) == embedded.encode(text)
    assert hf.chat_template == embedded.chat_template
    assert hf.special_tokens_map == embedded.special_tokens
    assert set(hf.all_special_ids) == embedded.special_ids
    assert (hf.eos_token_id, hf.model_max_length, len(hf)) == (2, 8192, 49152)
    assert embedded.hf is hf


@given(st.text())
def test_embedded_round_trip(embedded: Tokenizer, text: str) -> None:
    raw = text.encode()
    spelled = bytes(byte for byte in raw if byte not in NO_TOKEN)
    expected = spelled.decode("utf-8", "replace")

    ids = embedded.encode(text)

    assert embedded.decode(ids, skip_special_tokens=False) == expected
    assert b"".join(embedded.token_bytes(i) for i in ids) == spelled


def test_exactly_21_bytes_have_no_token(embedded: Tokenizer) -> None:
    single = {embedded.token_bytes(i) for i in range(embedded.vocab_size)}

    assert {b for b in range(256) if bytes([b]) not in single} == set(NO_TOKEN)


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "12 12", ["12", " ", "12"]),
        ("smollm", "12", ["1", "2"]),
        ("qwen2", "12", ["1", "2"]),
        ("llama-bpe", "12", ["12"]),
        ("gpt-2", "b ab", ["b", " a", "b"]),
        ("gpt-2", "b\nab", ["b", "\n", "ab"]),
    ],
)
def test_pre_tokenizers_split_as_their_names_say(pre: str, text: str, expected: list[str]) -> None:
    keys = small_metadata(**{"ggml.pre": pre, "ggml.add_bos_token": False})

    assert tokens_of(tokenizer_from_gguf(keys), text) == expected


def test_qwen2_composes_characters_first() -> None:
    tokenizer = tokenizer_from_gguf(small_metadata(**{"ggml.pre": "qwen2"}))

    assert tokenizer.decode(tokenizer.encode("e\N{COMBINING ACUTE ACCENT}")) == "é"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ["ab"]),
        ({"ggml.add_bos_token": True}, ["<bos>", "ab"]),
        ({"ggml.add_bos_token": True, "ggml.add_eos_token": True}, ["<bos>", "ab", "<eos>"]),
        ({"ggml.pre": "llama-bpe"}, ["<bos>", "ab"]),
        ({"ggml.pre": "llama-bpe", "ggml.add_bos_token": False}, ["ab"]),
    ],
)
def test_ends_are_added_as_the_file_says(keys: dict[str, Any], expected: list[str]) -> None:
    tokenizer = tokenizer_from_gguf(small_metadata(**keys))

    assert tokens_of(tokenizer, "ab") == expected
    assert tokenizer.encode("ab") == tokenizer.hf.encode("ab")
    assert tokenizer.decode(tokenizer.encode("ab", add_special_tokens=False), False) == "ab"


def test_ids_of_every_kind_of_token() -> None:
    tokenizer = tokenizer_from_gguf(small_metadata())
    tool = tokenizer.encode("<tool>")
    eot = tokenizer.encode("<eot>")

    assert len(tool) == len(eot) == 1
    assert tool[0] not in tokenizer.special_ids and eot[0] in tokenizer.special_ids
    assert tokenizer.end_ids == {tokenizer.eos_token_id, eot[0]}
    assert tokenizer.pad_token_id is None
    assert tokenizer.decode([*tool, *eot]) == "<tool>"


def test_named_chat_templates_are_read() -> None:
    keys = small_metadata(
        chat_template="plain",
        chat_templates=["tool_use"],
        **{"chat_template.tool_use": "with tools"},
    )

    assert tokenizer_from_gguf(keys).chat_template == {"default": "plain", "tool_use": "with tools"}


@pytest.mark.parametrize(
    ("key", "value"), [("ggml.model", "llama"), ("ggml.pre", "dbrx"), ("ggml.pre", None)]
)
def test_unknown_vocabularies_are_refused_by_name(key: str, value: str | None) -> None:
    with pytest.raises(ValidationError, match=f"{key} is {value!r}") as caught:
        tokenizer_from_gguf(small_metadata(**{key: value}))
    assert caught.value.parameter == "tokenizer"


def test_metadata_at_hand_spares_the_file(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tmp_path / "not-there.gguf", metadata=small_metadata())

    assert tokens_of(tokenizer, "ab") == ["ab"]

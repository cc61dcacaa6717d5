"""Tokenizers for the tests of the text rooms: the embedded one, and tiny ones made on the spot."""

from collections.abc import Callable, Sequence

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from decodekit.core.gguf_vocab import tokenizer_from_gguf
from decodekit.core.models.gguf import read_gguf
from decodekit.core.models.locate import embedded_path
from decodekit.core.tokenizer import Tokenizer, tokenizer_from_hf

MARK = "\N{LOWER ONE EIGHTH BLOCK}"
MakeTokenizer = Callable[..., Tokenizer]


@pytest.fixture(scope="session")
def embedded() -> Tokenizer:
    """The embedded model's tokenizer."""
    return tokenizer_from_gguf(read_gguf(embedded_path()).metadata)


@pytest.fixture(scope="session")
def make_byte_tokenizer() -> MakeTokenizer:
    """Make a byte-level BPE with all 256 bytes, given merges and special tokens.

    `words` become single tokens: they are merged from the left, so each word costs its prefixes.
    """

    def make(
        words: Sequence[str] = (),
        special: Sequence[str] = ("<s>", "</s>", "<|done|>"),
        added: Sequence[str] = (),
        **hf_arguments: object,
    ) -> Tokenizer:
        from transformers import PreTrainedTokenizerFast

        alphabet = pre_tokenizers.ByteLevel.alphabet()
        vocab = {char: i for i, char in enumerate(sorted(alphabet))}
        merges = []
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        for word in words:
            spelled = level.pre_tokenize_str(word)[0][0]
            for size in range(1, len(spelled)):
                pair = (spelled[:size], spelled[size])
                if pair not in merges:
                    merges.append(pair)
                    vocab.setdefault(spelled[: size + 1], len(vocab))
        backend = Backend(models.BPE(vocab=vocab, merges=merges))
        backend.pre_tokenizer = level
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(t, normalized=False) for t in special])
        backend.add_tokens([AddedToken(t, normalized=False) for t in added])
        named = {"bos_token": special[0], "eos_token": special[1]} if len(special) > 1 else {}
        hf = PreTrainedTokenizerFast(tokenizer_object=backend, **named, **hf_arguments)
        return tokenizer_from_hf(hf)

    return make


@pytest.fixture(scope="session")
def byte_tokenizer(make_byte_tokenizer: MakeTokenizer) -> Tokenizer:
    """256 bytes, a few merges, three special tokens, one added token that is not special."""
    return make_byte_tokenizer(["the", " the", "ing", "好"], added=["<tool>"])


@pytest.fixture(scope="session")
def make_marked_tokenizer() -> MakeTokenizer:
    """Make a sentencepiece-like BPE with byte tokens, in Llama's or in Metaspace's manner."""

    def make(style: str = "llama") -> Tokenizer:
        from transformers import PreTrainedTokenizerFast

        letters = [*"abcdefghijklmnopqrstuvwxyzHW.,!\n", MARK, "é", "世"]
        pairs = [(MARK, "t"), ("h", "e"), (MARK + "t", "he"), ("l", "l"), (MARK, MARK)]
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters]
        tokens += [a + b for a, b in pairs]
        vocab = {token: i for i, token in enumerate(tokens)}
        backend = Backend(
            models.BPE(
                vocab=vocab, merges=pairs, unk_token="<unk>", byte_fallback=True, fuse_unk=True
            )
        )
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            replacement=MARK, prepend_scheme="first", split=False
        )
        steps = [decoders.ByteFallback(), decoders.Fuse()]
        if style == "llama":
            steps = [decoders.Replace(MARK, " "), *steps, decoders.Strip(" ", 1, 0)]
        elif style == "gemma":
            steps = [decoders.Replace(MARK, " "), *steps]
        else:
            steps = [decoders.ByteFallback(), decoders.Metaspace(MARK, "always"), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps)
        backend.add_special_tokens([AddedToken(t, normalized=False) for t in tokens[:3]])
        hf = PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
        )
        return tokenizer_from_hf(hf)

    return make

"""Vocabularies for the tests of grammars: the embedded model's, and a tiny one with every trap."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from decodekit.core.constraint import GrammarSpec, Matcher, Vocabulary
from decodekit.core.gguf_vocab import tokenizer_from_gguf
from decodekit.core.models.gguf import read_gguf
from decodekit.core.models.locate import embedded_path
from decodekit.core.tokenizer import Tokenizer
from decodekit.structured.automaton import AutomatonBackend
from decodekit.structured.guidance import GuidanceBackend
from decodekit.structured.outlines import OutlinesBackend
from decodekit.structured.trie import TrieBackend
from decodekit.structured.vocabulary import marker, vocabulary_of
from decodekit.structured.xgrammar import XGrammarBackend

WORDS = [
    *("true", "fal", "se", "null", '{"', '":', '",', '"}', "a", "ab", "abc", "b", "1", "12", "123"),
    *("red", "re", "green", "gre", "é", "é!", "好", "😀", "  ", "\n\n", "0", "name", "-1", ".5"),
]
CONTROLS = {"<pad>": 0, "<end>": 1, "<turn>": 2, "<tool>": 3}
BACKENDS = {
    one.name: one
    for one in (TrieBackend, AutomatonBackend, GuidanceBackend, XGrammarBackend, OutlinesBackend)
}


def tiny_vocabulary_of(width: int = 317, known: int = 300) -> Vocabulary:
    """Controls, every byte, some words (a few of them twice), then padding to an odd width."""
    tokens = [marker(i) for i in CONTROLS.values()]
    tokens += [bytes([byte]) for byte in range(256)]
    tokens += [word.encode() for word in WORDS]
    tokens = tokens[:known]
    tokens += [b"true", b"a"][: known - len(tokens)]  # two ids with the same bytes
    size = len(tokens)
    ids: dict[bytes, int] = {}
    for token_id, token in enumerate(tokens):
        if token_id not in CONTROLS.values():
            ids.setdefault(token, token_id)

    def encode(text: str) -> list[int]:
        rest, spelled = text.encode(), []
        while rest:
            length = next(n for n in range(len(rest), 0, -1) if rest[:n] in ids)
            spelled.append(ids[rest[:length]])
            rest = rest[length:]
        return spelled

    return Vocabulary(
        tokens=tuple(tokens + [b""] * (width - size)),
        control_ids=frozenset(CONTROLS.values()),
        eos_ids=(CONTROLS["<end>"],),
        tokenizer_size=size,
        encode=encode,
        control_texts=dict(CONTROLS),
    )


@pytest.fixture(scope="session")
def tiny() -> Vocabulary:
    """The tiny vocabulary: 317 columns, of which the tokenizer knows fewer."""
    return tiny_vocabulary_of()


@pytest.fixture(scope="session")
def embedded_tokenizer() -> Tokenizer:
    """The embedded model's tokenizer."""
    return tokenizer_from_gguf(read_gguf(embedded_path()).metadata)


@pytest.fixture(scope="session")
def embedded_vocabulary(embedded_tokenizer: Tokenizer) -> Vocabulary:
    """Its vocabulary, with a head that is 40 columns wider."""
    return vocabulary_of(embedded_tokenizer, embedded_tokenizer.max_token_id + 41)


@pytest.fixture(scope="session")
def compile_with(tiny: Vocabulary, embedded_vocabulary: Vocabulary) -> Any:
    """Compile a text with a backend, past its `suit`; each backend is made once a vocabulary."""
    made: dict[tuple[str, bool], Any] = {}

    def compile_it(
        backend: str, kind: str, text: str, *, real: bool = False, **options: Any
    ) -> Any:
        key = (backend, real)
        if key not in made:
            made[key] = BACKENDS[backend](embedded_vocabulary if real else tiny, {})
        return made[key].compile(GrammarSpec(kind, text, tuple(sorted(options.items()))))

    yield compile_it
    for one in made.values():
        if hasattr(one, "close"):
            one.close()


@pytest.fixture(scope="session")
def legal() -> Callable[[Matcher], set[int]]:
    """Return the ids that a matcher allows; every bit of the row counts, and no other row may."""

    def ids(matcher: Matcher) -> set[int]:
        bitmask = torch.full((2, matcher._gate.num_words), 0x55555555, dtype=torch.int32)
        matcher.fill(bitmask, 1)
        assert (bitmask[0] == 0x55555555).all()
        bits = (bitmask[1][:, None] >> torch.arange(32, dtype=torch.int32)) & 1
        return set(bits.flatten().nonzero().flatten().tolist())

    return ids

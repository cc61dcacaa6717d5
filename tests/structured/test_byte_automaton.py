"""Our automata against Python's `re` and plain search over all tokens."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.constraint import Vocabulary
from decodekit.structured.byte_automaton import ByteAutomaton, TooLarge, build, utf8
from decodekit.structured.regex_syntax import parse, whole
from decodekit.structured.token_index import TokenIndex

PATTERNS = [
    r"[0-9]{2,4}(-[a-z]+)?",
    r"(a|ab|abc)*c?",
    r"[^a]{1,3}",
    r"é+|好{2}|😀?b",
    r".*b.*",
    r"\d+(\.\d*)?",
    r"[\w-]+@[\w-]+",
    r"(?i)abc|K",
    r"(a?){3}b{0,2}",
    r"x*|",
]
ALPHABET = "ab1c.-@éK好😀\nkx0"


def automaton_of(pattern: str) -> ByteAutomaton:
    return build(whole(parse(pattern), pattern))


def matches(automaton: ByteAutomaton, text: bytes) -> bool:
    state = automaton.after(0, text)
    return state >= 0 and bool(automaton.ends[state])


@pytest.mark.parametrize("pattern", PATTERNS)
@given(texts=st.lists(st.text(ALPHABET, max_size=7), min_size=20, max_size=40))
def test_it_matches_what_re_matches(pattern: str, texts: list[str]) -> None:
    automaton = automaton_of(pattern)

    for text in texts:
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
        assert matches(automaton, text.encode()) == expected, text


@given(st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF), st.integers(0, 0x10FFFF))
def test_byte_ranges_spell_exactly_the_characters(first: int, second: int, other: int) -> None:
    low, high = sorted((first, second))
    spans = [(max(low, a), min(high, b)) for a, b in ((0, 0xD7FF), (0xE000, 0x10FFFF))]
    sequences = [s for a, b in spans if a <= b for s in utf8(a, b)]

    for code in (low, high, other, (low + high) // 2):
        if 0xD800 <= code <= 0xDFFF:
            continue
        spelled = chr(code).encode()
        hits = [
            s
            for s in sequences
            if len(s) == len(spelled)
            and all(a <= byte <= b for byte, (a, b) in zip(spelled, s, strict=True))
        ]
        assert len(hits) == (low <= code <= high)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_no_state_is_a_dead_end(pattern: str) -> None:
    automaton = automaton_of(pattern)

    reached = automaton.ends.copy()
    for _ in range(automaton.num_states):
        reached |= (reached[automaton.moves] & (automaton.moves >= 0)).any(axis=1)
    assert reached.all()


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_mask_of_every_state_is_that_of_a_search_over_all_tokens(
    pattern: str, tiny: Vocabulary
) -> None:
    automaton, index = automaton_of(pattern), TokenIndex(tiny)

    for state in range(automaton.num_states):
        expected = {
            token_id
            for token_id, token in enumerate(tiny.tokens)
            if token and token_id not in tiny.control_ids and automaton.after(state, token) >= 0
        }
        found = index.trie.legal(automaton.moves, state).tolist()
        assert sorted(found) == sorted(expected)


def test_the_same_on_a_real_vocabulary(embedded_vocabulary: Vocabulary) -> None:
    automaton = automaton_of(r"[^a]{1,3}(é|\d)*")
    trie = TokenIndex(embedded_vocabulary).trie

    for state in range(automaton.num_states):
        expected = [
            token_id
            for token_id, token in enumerate(embedded_vocabulary.tokens)
            if token
            and token_id not in embedded_vocabulary.control_ids
            and automaton.after(state, token) >= 0
        ]
        assert sorted(trie.legal(automaton.moves, state).tolist()) == expected


def test_an_automaton_that_grows_past_the_limit_is_refused() -> None:
    for pattern in (r".*a.{15}", r"[a-z]{1,3000}", r"(.{0,60}x){0,10}"):
        with pytest.raises(TooLarge):
            automaton_of(pattern)


def test_a_pattern_that_nothing_matches_is_refused() -> None:
    from decodekit.structured.regex_tree import Set

    with pytest.raises(ValueError, match="no text matches"):
        build(Set(()))


def test_bytes_that_must_come_are_found() -> None:
    automaton = automaton_of(r"a(bcd|bce)f")

    assert automaton.certain(0) == (b"abc", False)
    assert automaton.certain(automaton.after(0, b"abcd")) == (b"f", True)
    assert automaton.certain(automaton.after(0, b"abcdf")) == (b"", True)


def test_the_trie_counts_every_distinct_prefix_once(tiny: Vocabulary) -> None:
    index = TokenIndex(tiny)
    prefixes = {token[:n] for token in index.ids_of for n in range(len(token) + 1)}

    assert index.trie.num_nodes == len(prefixes)
    assert np.sort(index.trie.tokens).tolist() == sorted(
        i for ids in index.ids_of.values() for i in ids
    )
    for prefix in prefixes:
        longer = any(token.startswith(prefix) and token != prefix for token in index.ids_of)
        assert index.has_longer(prefix) == longer

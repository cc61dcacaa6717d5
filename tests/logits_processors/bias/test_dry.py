"""DRY: lengths, breakers, windows and overflow."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from decodekit.core.errors import ChainError
from decodekit.logits_processors.bias.dry import Dry, Repeats, common_suffixes
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")


class Pieces:
    """A tokenizer of a few pieces; `encode` takes the longest that fits."""

    pieces = ["a", "b", "\n", "a\n", "##", "#", "x#", "END", "c:d", b"\xe2\x82", b"\xac", "!"]
    max_token_id = len(pieces) - 1

    def piece(self, token: int) -> str | bytes:
        return self.pieces[token]

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = []
        while text:
            fits = [p for p in self.pieces if isinstance(p, str) and text.startswith(p)]
            best = max(fits, key=len)
            ids.append(self.pieces.index(best))
            text = text[len(best) :]
        return ids


def loss(tokens: list[int], vocab: int = 12, **params: Any) -> dict[int, float]:
    given_params = {"multiplier": 1.0, "base": 2.0, "breakers": [], **params}
    split = len(tokens) // 2
    result = apply_stage(
        Dry,
        torch.zeros(1, vocab),
        [given_params],
        prompts=[tokens[:split]],
        outputs=[tokens[split:]],
        context=make_context(vocab, tokenizer=Pieces()),
    )
    return {token: -value for token, value in enumerate(result[0].tolist()) if value}


def test_the_penalty_grows_with_the_copied_length() -> None:
    assert loss([1, 2, 3, 4, 1]) == {}
    assert loss([1, 2, 3, 4, 1, 2]) == {3: 1.0}
    assert loss([1, 2, 3, 4, 1, 2, 3]) == {4: 2.0}
    assert loss([1, 2, 3, 4, 1, 2, 3, 4]) == {1: 4.0}


def test_of_several_copies_the_longest_counts() -> None:
    assert loss([1, 2, 3, 9, 2, 3, 5, 1, 2], allowed_length=1) == {3: 2.0}
    assert loss([9, 2, 5, 7, 1, 2, 5, 8, 1, 2], allowed_length=1) == {5: 2.0}


def test_no_match_crosses_a_breaker() -> None:
    copied = [1, 2, 9, 3, 4, 1, 2, 9, 3]

    assert loss(copied) == {4: 4.0}
    assert loss(copied, breakers=[[9]], allowed_length=1) == {4: 1.0}
    assert loss(copied, breakers=[[9]]) == {}
    assert loss(copied, breakers=[[2, 9]], allowed_length=1) == {4: 1.0}


def test_after_a_breaker_and_for_a_breaker_nothing_happens() -> None:
    assert loss([1, 9, 2, 1, 9], breakers=[[9]], allowed_length=1) == {}
    assert loss([1, 2, 9, 5, 1, 2], breakers=[[9]]) == {}
    assert loss([1, 2, 9, 5, 1, 2], breakers=[[9, 5]]) == {9: 1.0}  # its head alone is no breaker


def test_the_range_bounds_what_is_compared() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4]

    assert loss(tokens, range=10) == {5: 4.0}
    assert loss(tokens, range=8) == {5: 1.0}
    assert loss(tokens, range=7) == {}
    assert loss(tokens, range=0) == loss(tokens, range=-1) == loss(tokens)


def test_a_text_breaks_wherever_it_stands_in_a_token() -> None:
    assert loss([0, 1, 3, 5, 0, 1], breakers=["\n"]) == {}  # "a\n" holds it
    assert loss([0, 1, 3, 5, 0, 1], breakers=["*"]) == {3: 1.0}
    assert loss([0, 1, 8, 5, 0, 1], breakers=[":"]) == {}


def test_a_text_breaks_across_tokens() -> None:
    copied = [0, 1, 6, 5, 7, 0, 1, 6, 5, 7]  # a b x# # END

    assert loss(copied, allowed_length=1) == {0: 16.0}
    assert loss(copied, breakers=["##"], allowed_length=1) == {0: 1.0}
    assert loss(copied, breakers=["#!"], allowed_length=1) == {0: 16.0}


def test_a_character_in_several_tokens_breaks_as_ids_alone() -> None:
    euro = [0, 1, 9, 10, 0, 1]  # the euro sign in two tokens, neither a character

    assert loss(euro, breakers=["\N{EURO SIGN}"], allowed_length=1) == {9: 2.0}
    assert loss(euro, breakers=[[9, 10], "c:d"], allowed_length=1) == {9: 2.0}
    assert loss([1, *euro[2:], 9, 10], breakers=[[9, 10]], allowed_length=1) == {}


def test_texts_need_a_tokenizer() -> None:
    with pytest.raises(ChainError, match="dry.breakers.*tokenizer is not loaded"):
        Dry.bind(Dry.validate({"multiplier": 1.0}), make_context(5))
    assert Dry.bind(Dry.validate({"multiplier": 1.0, "breakers": ()}), make_context(5))


def test_long_copies_overflow_nothing() -> None:
    result = loss([1] * 3000, base=5.0, multiplier=3.0)

    assert 1e29 < result[1] <= 1.1e30
    assert loss([1] * 3000, base=1.0, multiplier=3.0) == {1: 3.0}


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=10))
def test_the_running_lengths_equal_those_found_anew(first: list[int], second: list[int]) -> None:
    state = Repeats(first)
    state.extend(second)
    tokens = first + second

    def common(at: int) -> int:
        length = 0
        while length <= at and tokens[at - length] == tokens[-1 - length]:
            length += 1
        return length

    expected = [common(at) for at in range(len(tokens) - 1)]
    assert state.lengths.tolist() == expected
    assert common_suffixes(state.tokens).tolist() == expected


@pytest.mark.parametrize(
    "bad",
    [
        {"multiplier": -1.0},
        {"base": 0.9},
        {"allowed_length": 0},
        {"range": -2},
        {"breakers": [""]},
        {"breakers": [[]]},
        {"breakers": [[99]]},
    ],
)
def test_values_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ChainError, match="dry"):
        loss([1, 2], **bad)


def test_zero_and_unset_are_identities() -> None:
    assert Dry.is_identity(Dry.validate({}))
    assert Dry.is_identity(Dry.bind(Dry.validate({"multiplier": 0}), make_context(5)))

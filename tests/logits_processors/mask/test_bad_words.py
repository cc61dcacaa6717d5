"""Bans of words and id sequences."""

import random
from typing import Any

import pytest
import torch
from transformers import NoBadWordsLogitsProcessor

from decodekit.core.errors import ChainError
from decodekit.logits_processors.mask.bad_words import BadWords
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")


class Spellings:
    """A tokenizer in which `described` is two tokens bare and one after a space."""

    def bad_word_sequences(self, word: str) -> list[list[int]]:
        return {"described": [[4, 5], [6]], "at the": [[1, 2]]}[word]


def banned(words: Any, output: list[int], prompt: list[int] | None = None, **more: Any) -> set[int]:
    result = apply_stage(
        BadWords,
        torch.zeros(1, 20),
        [{"words": words, **more}],
        prompts=[prompt or [0]],
        outputs=[output],
        context=make_context(20, tokenizer=Spellings()),
    )
    return set((result[0] == -INF).nonzero()[:, 0].tolist())


def test_a_word_is_banned_bare_and_after_a_space() -> None:
    assert banned(["described"], []) == {6}
    assert banned(["described"], [3, 4]) == {5, 6}


def test_only_the_last_token_of_a_sequence_is_banned_and_only_after_the_others() -> None:
    assert banned(["at the"], []) == set()
    assert banned(["at the"], [9]) == set()
    assert banned(["at the"], [9, 1]) == {2}
    assert banned([[7, 8, 9]], [8]) == set()
    assert banned([[7, 8, 9]], [7, 8]) == {9}


def test_a_match_does_not_begin_in_the_prompt_unless_asked() -> None:
    assert banned([[7, 8, 9]], [8], prompt=[7]) == set()
    assert banned([[7, 8, 9]], [], prompt=[7, 8]) == set()
    assert banned([[7, 8, 9]], [8], prompt=[7], scope="both") == {9}
    assert banned([[7, 8, 9]], [], prompt=[7, 8], scope="both") == {9}


def test_both_scopes_equal_transformers_on_random_histories() -> None:
    draw = random.Random(5)
    for _ in range(200):
        words = [
            [draw.randrange(1, 4) for _ in range(draw.randint(1, 3))]
            for _ in range(draw.randint(1, 5))
        ]
        history = [draw.randrange(4) for _ in range(draw.randint(2, 6))]
        at = draw.randint(1, len(history))

        ours = banned(words, history[at:], prompt=history[:at], scope="both")

        reference = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([19]))
        expected = reference(torch.tensor([history]), torch.zeros(1, 20))
        assert ours == set((expected[0] == -INF).nonzero()[:, 0].tolist())


def test_rows_have_their_own_words() -> None:
    result = apply_stage(
        BadWords,
        torch.zeros(3, 9),
        [{"words": [[1]]}, {"words": [[2, 3]]}, {"words": [[2, 4], [5]]}],
        outputs=[[2], [2], [2]],
    )

    assert [set((row == -INF).nonzero()[:, 0].tolist()) for row in result] == [{1}, {3}, {4, 5}]


def test_no_words_are_identity() -> None:
    assert BadWords.is_identity(BadWords.validate({}))
    assert BadWords.is_identity(BadWords.validate({"words": []}))
    assert not BadWords.is_identity(BadWords.validate({"words": [[1]]}))


@pytest.mark.parametrize(
    ("words", "said"), [([[1, 20]], r"\[0, 20\), got 20"), ([[-1]], "-1"), ([[]], "not empty")]
)
def test_bad_sequences_are_refused_by_name(words: Any, said: str) -> None:
    with pytest.raises(ChainError, match=f"bad_words .*{said}") as caught:
        banned(words, [])

    assert caught.value.parameter == "bad_words"


def test_text_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ChainError, match="tokenizer is not loaded"):
        BadWords.bind(BadWords.validate({"words": ["word"]}), make_context(20))

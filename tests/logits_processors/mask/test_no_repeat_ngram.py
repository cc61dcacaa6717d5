"""No n-gram twice: windows, exemptions and odd histories."""

from typing import Any

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.logits_processors.mask.no_repeat_ngram import NoRepeatNGram
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")


def banned(prompt: list[int], output: list[int], vocab: int = 10, **params: Any) -> list[int]:
    result = apply_stage(
        NoRepeatNGram, torch.zeros(1, vocab), [params], prompts=[prompt], outputs=[output]
    )
    return (result[0] == -INF).nonzero()[:, 0].tolist()


def test_what_followed_the_suffix_before_is_banned() -> None:
    assert banned([1, 2, 3], [1, 2], n=3) == [3]
    assert banned([1, 2, 3, 1, 2, 4], [1, 2], n=3) == [3, 4]
    assert banned([1, 2, 3], [2, 1], n=3) == []


def test_the_suffix_does_not_ban_its_own_successor() -> None:
    assert banned([], [5, 5], n=3) == []
    assert banned([], [5, 5, 5], n=3) == [5]


def test_a_window_forgets_what_lies_before_it() -> None:
    assert banned([1, 2, 3], [7, 1, 2], n=3, window=6) == [3]
    assert banned([1, 2, 3], [7, 1, 2], n=3, window=5) == []


def test_the_prompts_own_ngrams_alone() -> None:
    assert banned([1, 2, 3], [1, 2, 4, 1, 2], n=3, scope="prompt") == [3]
    assert banned([1, 2, 3], [1, 2, 4, 1, 2], n=3) == [3, 4]
    assert banned([1], [1, 2, 4, 1, 2], n=3, scope="prompt") == []


def test_listed_tokens_are_exempt() -> None:
    assert banned([1, 2, 3, 1, 2, 4], [1, 2], n=3, whitelist=[3]) == [4]


def test_one_bans_every_token_that_occurred() -> None:
    assert banned([1, 2], [4], n=1) == [1, 2, 4]
    assert banned([0, 1, 2], [], vocab=3, n=1) == [0, 1, 2]  # the row is dead, as asked


def test_a_history_shorter_than_an_ngram_bans_nothing() -> None:
    assert banned([], [], n=1) == []
    assert banned([1], [], n=3) == []


def test_tokens_that_the_head_does_not_have_are_passed_over() -> None:
    assert banned([1, 2, 12], [1, 2], n=3) == []


@pytest.mark.parametrize(
    "bad", [{"n": 0}, {"n": 2.5}, {"n": 3, "window": 2}, {"n": 1, "scope": "x"}]
)
def test_values_out_of_range_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ChainError, match="no_repeat_ngram"):
        NoRepeatNGram.bind(NoRepeatNGram.validate(bad), make_context(10))


def test_an_exempt_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ChainError, match="no_repeat_ngram.whitelist"):
        banned([1], [], n=2, whitelist=[10])


def test_unset_is_identity() -> None:
    assert NoRepeatNGram.is_identity(NoRepeatNGram.validate({"window": 5}))

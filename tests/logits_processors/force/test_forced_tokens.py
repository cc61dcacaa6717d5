"""Forced beginnings and ends."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.core.stage import BindContext
from decodekit.logits_processors.force.forced_tokens import ForcedTokens
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")
VOCAB = 8


def context(max_tokens: int | None = 5, **changes: Any) -> BindContext:
    return make_context(
        VOCAB, eos_ids=(6, 7), request=SimpleNamespace(max_tokens=max_tokens), **changes
    )


def allowed(position: int, ctx: BindContext | None = None, **params: Any) -> list[int]:
    logits = torch.full((1, VOCAB), -INF)  # forced tokens come back from anything
    logits[0, 1:4] = torch.tensor([0.5, 1.5, 2.5])
    result = apply_stage(
        ForcedTokens, logits, [params], outputs=[[0] * position], context=ctx or context()
    )
    return (result[0] > -INF).nonzero()[:, 0].tolist()


def test_the_prefix_comes_token_by_token() -> None:
    assert [allowed(t, prefix=[4, 5]) for t in range(3)] == [[4], [5], [1, 2, 3]]


def test_the_last_position_takes_any_end() -> None:
    assert [allowed(t, eos_at_end=True) for t in (3, 4, 5)] == [[1, 2, 3], [6, 7], [1, 2, 3]]


def test_the_end_wins_over_the_prefix() -> None:
    one = context(max_tokens=1)

    assert allowed(0, one, prefix=[4, 5], eos_at_end=True) == [6, 7]


def test_the_context_ends_an_answer_too() -> None:
    short = context(max_tokens=None, max_model_len=10, prompt_ids=(1,) * 7)

    assert [allowed(t, short, eos_at_end=True) for t in (1, 2)] == [[1, 2, 3], [6, 7]]
    assert allowed(2, context(99, max_model_len=10, prompt_ids=(1,) * 7), eos_at_end=True) == [6, 7]


def test_a_forced_token_has_the_logit_zero() -> None:
    logits = torch.full((2, VOCAB), 9.0)

    result = apply_stage(
        ForcedTokens, logits, [{"prefix": [3]}] * 2, outputs=[[], [3]], context=context()
    )

    assert result[0].tolist() == [-INF, -INF, -INF, 0.0, -INF, -INF, -INF, -INF]
    assert torch.equal(result[1], logits[1])


def test_a_text_is_tokenised_without_special_tokens() -> None:
    class Letters:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(letter) - ord("a") for letter in text]

    assert [allowed(t, context(tokenizer=Letters()), prefix="cb") for t in (0, 1)] == [[2], [1]]
    with pytest.raises(ChainError, match="tokenizer is not loaded"):
        allowed(0, prefix="cb")


def test_what_cannot_be_forced_is_refused() -> None:
    with pytest.raises(ChainError, match="forced_tokens.prefix"):
        allowed(0, prefix=[VOCAB])
    with pytest.raises(ChainError, match="needs an end token"):
        allowed(0, make_context(VOCAB, eos_ids=()), eos_at_end=True)


def test_nothing_to_force_is_identity() -> None:
    assert ForcedTokens.is_identity(ForcedTokens.validate({}))
    assert ForcedTokens.is_identity(ForcedTokens.bind(ForcedTokens.validate({}), context()))
    assert not ForcedTokens.is_identity(ForcedTokens.validate({"eos_at_end": True}))

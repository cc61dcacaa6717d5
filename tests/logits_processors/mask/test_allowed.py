"""Allow-lists and deny-lists."""

import pytest
import torch
from transformers import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor

from decodekit.core.errors import ChainError
from decodekit.logits_processors.mask.allowed import AllowedTokens, SuppressTokens
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")


def test_each_row_keeps_its_own_list(rng: torch.Generator) -> None:
    logits = torch.randn(3, 11, generator=rng)
    lists = [[3], [0, 10, 10, 4], list(range(11))]

    result = apply_stage(AllowedTokens, logits, [{"ids": ids} for ids in lists])

    for row, ids in enumerate(lists):
        outside = [i for i in range(11) if i not in ids]
        assert torch.equal(result[row, ids], logits[row, ids])
        assert bool((result[row, outside] == -INF).all())


def test_an_allowed_token_that_is_masked_stays_masked() -> None:
    logits = torch.tensor([[1.0, -INF, 2.0]])

    result = apply_stage(AllowedTokens, logits, [{"ids": [1, 2]}])

    assert result.tolist() == [[-INF, -INF, 2.0]]


def test_no_list_is_identity_and_an_empty_list_is_refused() -> None:
    assert AllowedTokens.is_identity(AllowedTokens.validate({}))
    with pytest.raises(ChainError, match="ids"):
        AllowedTokens(ids=[])


@pytest.mark.parametrize("bad", [-1, 9, 10**12])
def test_ids_outside_the_tokenizer_are_refused_by_name(bad: int) -> None:
    context = make_context(12, tokenizer_size=9)

    with pytest.raises(ChainError, match=r"allowed_token_ids .* \[0, 9\), got") as caught:
        AllowedTokens.bind(AllowedTokens.validate({"ids": [1, bad]}), context)

    assert caught.value.parameter == "allowed_token_ids"
    assert caught.value.value == bad


@pytest.mark.parametrize("bad", [["3"], [True], [1.5], "12"])
def test_ids_must_be_integers(bad: object) -> None:
    with pytest.raises(ChainError):
        AllowedTokens(ids=bad)


def test_suppressing_equals_transformers(rng: torch.Generator) -> None:
    logits = torch.randn(4, 50, generator=rng)
    ids = [3, 7, 49]

    result = apply_stage(SuppressTokens, logits, [{"ids": ids}] * 4)

    expected = SuppressTokensLogitsProcessor(ids, device="cpu")(torch.zeros(4, 1).long(), logits)
    assert torch.equal(result, expected)


@pytest.mark.parametrize("generated", [0, 1, 5])
def test_suppressing_at_the_beginning_equals_transformers(
    generated: int, rng: torch.Generator
) -> None:
    logits = torch.randn(1, 50, generator=rng)
    output = list(range(generated))

    result = apply_stage(
        SuppressTokens,
        logits,
        [{"ids": [3, 7], "begin_only": True}],
        prompts=[[1, 2]],
        outputs=[output],
    )

    reference = SuppressTokensAtBeginLogitsProcessor([3, 7], begin_index=2, device="cpu")
    assert torch.equal(result, reference(torch.tensor([[1, 2, *output]]), logits))


def test_rows_that_begin_and_rows_that_do_not_share_a_batch(rng: torch.Generator) -> None:
    logits = torch.randn(3, 9, generator=rng)

    result = apply_stage(
        SuppressTokens,
        logits,
        [{"ids": [i], "begin_only": True} for i in (1, 2, 3)],
        outputs=[[5], [], [5, 5]],
    )

    expected = logits.clone()
    expected[1, 2] = -INF
    assert torch.equal(result, expected)

"""The mask that holds back the end."""

import pytest
import torch
from transformers import MinNewTokensLengthLogitsProcessor

from decodekit.core.errors import ChainError
from decodekit.logits_processors.mask.min_tokens import MinTokens
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")
CONTEXT = make_context(30, eos_ids=(2, 7), stop_ids=(2, 7, 11))


@pytest.mark.parametrize("generated", [0, 3, 4, 9])
def test_it_equals_transformers(generated: int, rng: torch.Generator) -> None:
    logits = torch.randn(1, 30, generator=rng)
    prompt, output = [5] * 10, [6] * generated

    result = apply_stage(
        MinTokens, logits, [{"n": 4}], prompts=[prompt], outputs=[output], context=CONTEXT
    )

    reference = MinNewTokensLengthLogitsProcessor(10, 4, torch.tensor([2, 7, 11]), device="cpu")
    assert torch.equal(result, reference(torch.tensor([prompt + output]), logits))


def test_rows_are_lifted_one_by_one(rng: torch.Generator) -> None:
    logits = torch.randn(3, 30, generator=rng)

    result = apply_stage(
        MinTokens,
        logits,
        [{"n": 2}, {"n": 5}, {"n": 1}],
        outputs=[[1, 1], [1, 1], []],
        context=CONTEXT,
    )

    assert torch.equal(result[0], logits[0])
    for row in (1, 2):
        assert result[row].isneginf().nonzero()[:, 0].tolist() == [2, 7, 11]


def test_zero_and_a_model_without_ends_are_identities() -> None:
    nothing_ends = make_context(30, stop_ids=(99,))

    assert MinTokens.is_identity(MinTokens.bind(MinTokens.validate({"n": 0}), CONTEXT))
    assert MinTokens.is_identity(MinTokens.bind(MinTokens.validate({"n": 3}), nothing_ends))
    assert not MinTokens.is_identity(MinTokens.bind(MinTokens.validate({"n": 3}), CONTEXT))


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ChainError, match="min_tokens.n is -1"):
        MinTokens(n=-1)

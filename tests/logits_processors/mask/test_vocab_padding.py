"""The mask of the head's padding."""

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.logits_processors.mask.vocab_padding import VocabPadding
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")


def test_padding_is_masked_and_nothing_else(rng: torch.Generator) -> None:
    logits = torch.randn(3, 260, generator=rng)

    result = apply_stage(
        VocabPadding, logits, [{}] * 3, context=make_context(260, tokenizer_size=257)
    )

    assert torch.equal(result[:, :257], logits[:, :257])
    assert bool((result[:, 257:] == -INF).all())


@pytest.mark.parametrize("tokenizer_size", [257, 300])
def test_a_head_without_padding_is_identity(tokenizer_size: int) -> None:
    context = make_context(257, tokenizer_size=tokenizer_size)

    bound = VocabPadding.bind(VocabPadding.validate({}), context)

    assert VocabPadding.is_identity(bound)


def test_it_is_mandatory_and_takes_no_parameters() -> None:
    assert VocabPadding.mandatory
    with pytest.raises(ChainError, match="no parameter 'padding'"):
        VocabPadding(padding=3)

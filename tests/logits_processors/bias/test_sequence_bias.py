"""Sequence bias: what counts as a sequence, and numbers that are refused."""

from typing import Any

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.logits_processors.bias.sequence_bias import SequenceBias
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")


def biases(bias: Any, prompt: list[int], output: list[int], **changes: Any) -> dict[int, float]:
    result = apply_stage(
        SequenceBias,
        torch.zeros(1, 10),
        [{"bias": bias}],
        prompts=[prompt],
        outputs=[output],
        context=make_context(10, **changes),
    )
    return {token: value for token, value in enumerate(result[0].tolist()) if value}


def test_sequences_match_across_prompt_and_output_and_add_up() -> None:
    bias = [([4], 1.0), ([1, 2, 4], 2.0), ([2, 4], 0.5), ([2, 5], -3.0), ([9, 9, 9, 4], 50.0)]

    assert biases(bias, [1], [2]) == {4: 3.5, 5: -3.0}
    assert biases(bias, [1, 2], []) == {4: 3.5, 5: -3.0}
    assert biases(bias, [2], []) == {4: 1.5, 5: -3.0}
    assert biases(bias, [], []) == {4: 1.0}


def test_a_mapping_is_taken_as_pairs() -> None:
    assert biases({(4,): 1.0, (2, 5): -3.0}, [2], []) == {4: 1.0, 5: -3.0}


def test_minus_infinity_bans_and_revives_nothing() -> None:
    logits = torch.tensor([[0.0, -INF, 1.0]])

    result = apply_stage(SequenceBias, logits, [{"bias": [([1], 5.0), ([2], -INF)]}])

    assert result.tolist() == [[0.0, -INF, -INF]]


def test_a_text_is_biased_in_both_spellings() -> None:
    class Words:
        def bad_word_sequences(self, word: str) -> list[list[int]]:
            assert word == "yes"
            return [[7], [3, 8]]

    assert biases([("yes", 2.0)], [3], [], tokenizer=Words()) == {7: 2.0, 8: 2.0}
    with pytest.raises(ChainError, match="tokenizer is not loaded"):
        biases([("yes", 2.0)], [3], [])


@pytest.mark.parametrize("bad", [[([1], INF)], [([1], float("nan"))], [([], 1.0)], [([10], 1.0)]])
def test_what_cannot_be_added_is_refused(bad: Any) -> None:
    with pytest.raises(ChainError, match="sequence_bias.bias"):
        biases(bad, [1], [])


def test_nothing_and_zeros_are_identities() -> None:
    for bias in (None, [], [([1], 0.0)]):
        params = SequenceBias.validate({"bias": bias})
        assert SequenceBias.is_identity(params)
        assert SequenceBias.is_identity(SequenceBias.bind(params, make_context(10)))

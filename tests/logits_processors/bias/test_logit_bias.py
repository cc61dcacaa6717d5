"""The bias by token id."""

import math

import pytest
import torch
from transformers import SequenceBiasLogitsProcessor

from decodekit.core.errors import ChainError
from decodekit.logits_processors.bias.logit_bias import LogitBias
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")


def test_it_equals_transformers_sequence_bias_of_single_tokens(rng: torch.Generator) -> None:
    logits = torch.randn(2, 40, generator=rng)
    biases: list[dict[int, float]] = [{3: 1.5, 39: -2.25}, {1: 0.5}]

    result = apply_stage(LogitBias, logits, [{"bias": bias} for bias in biases])

    for row, bias in enumerate(biases):
        reference = SequenceBiasLogitsProcessor([[[i], value] for i, value in bias.items()])
        expected = reference(torch.tensor([[1, 2]]), logits[row : row + 1])
        assert torch.equal(result[row], expected[0])


@pytest.mark.parametrize(("bias", "winner"), [(0.3, 0), (0.5, 1), (100, 1), (1e9, 1), (-INF, 0)])
def test_it_adds_in_floating_point(bias: float, winner: int) -> None:
    result = apply_stage(LogitBias, torch.tensor([[2.0, 1.6]]), [{"bias": {1: bias}}])

    assert int(result.argmax()) == winner


def test_finite_biases_are_clamped_and_minus_infinity_bans() -> None:
    result = apply_stage(
        LogitBias, torch.zeros(1, 4), [{"bias": {0: 1e9, 1: -1e9, 2: -INF, 3: 7.0}}]
    )

    assert result.tolist() == [[100.0, -100.0, -INF, 7.0]]


def test_a_masked_token_stays_masked() -> None:
    result = apply_stage(
        LogitBias, torch.tensor([[-INF, -INF, 0.0]]), [{"bias": {0: 100.0, 1: -INF}}]
    )

    assert result.tolist() == [[-INF, -INF, 0.0]]


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_nan_and_plus_infinity_are_refused(bad: float) -> None:
    with pytest.raises(ChainError, match=r"logit_bias .*\[-100, 100\] or -inf") as caught:
        LogitBias.bind(LogitBias.validate({"bias": {1: bad}}), make_context(4))

    assert caught.value.parameter == "logit_bias"


@pytest.mark.parametrize("bad", [-1, 4])
def test_ids_outside_the_vocabulary_are_refused(bad: int) -> None:
    with pytest.raises(ChainError, match=r"logit_bias .*\[0, 4\)"):
        LogitBias.bind(LogitBias.validate({"bias": {bad: 1.0}}), make_context(4))


def test_text_keys_of_json_are_ids_and_other_keys_are_refused() -> None:
    assert LogitBias.validate({"bias": {"3": 5}}).bias == {3: 5.0}
    for key in ("AI", "2.5", 2.5):
        with pytest.raises(ChainError):
            LogitBias(bias={key: 5})


def test_no_bias_is_identity() -> None:
    for bias in (None, {}, {3: 0.0}):
        assert LogitBias.is_identity(LogitBias.validate({"bias": bias}))

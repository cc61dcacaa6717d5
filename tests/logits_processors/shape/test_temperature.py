"""The division by a temperature."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper

from decodekit.core.errors import ChainError
from decodekit.logits_processors.shape.temperature import Temperature
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")


@pytest.mark.parametrize("t", [0.01, 0.3, 0.7, 1.5, 2.0, 1e6])
def test_it_equals_transformers(t: float, rng: torch.Generator) -> None:
    logits = torch.randn(5, 301, generator=rng) * 8
    # One float32 divisor: a Python float would be rounded at another place.
    divisor = float(torch.tensor(t))

    result = apply_stage(Temperature, logits, [{"t": t}] * 5)

    expected = TemperatureLogitsWarper(divisor)(torch.zeros(5, 1).long(), logits)
    assert torch.equal(result, expected)


@pytest.mark.parametrize(
    ("t", "expected"),
    [
        (1.0, [0.6285, 0.2312, 0.1402]),
        (0.5, [0.8438, 0.1142, 0.0420]),
        (2.0, [0.4810, 0.2918, 0.2272]),
    ],
)
def test_it_reshapes_the_distribution_as_stated(t: float, expected: list[float]) -> None:
    result = apply_stage(Temperature, torch.tensor([[2.0, 1.0, 0.5]]), [{"t": t}])

    assert result.softmax(1)[0].tolist() == pytest.approx(expected, abs=1e-4)


def test_rows_have_their_own_temperature(rng: torch.Generator) -> None:
    logits = torch.randn(3, 7, generator=rng)

    result = apply_stage(Temperature, logits, [{"t": 0.5}, {"t": 1.0}, {"t": 4.0}])

    assert torch.equal(result, torch.stack([logits[0] * 2, logits[1], logits[2] / 4]))


def test_tiny_values_are_raised_and_stay_random() -> None:
    for tiny in (1e-12, 1e-5, 0.0099):
        assert Temperature.bind(Temperature.validate({"t": tiny}), make_context(5)).t == 0.01


def test_zero_is_refused_with_a_hint() -> None:
    with pytest.raises(ChainError, match="greedy"):
        Temperature.bind(Temperature.validate({"t": 0}), make_context(5))


@pytest.mark.parametrize("bad", [-0.5, float("nan"), INF])
def test_values_out_of_range_are_refused(bad: float) -> None:
    with pytest.raises(ChainError, match="temperature.t"):
        Temperature(t=bad)


def test_one_and_unset_are_identities() -> None:
    assert Temperature.is_identity(Temperature.validate({"t": 1}))
    assert Temperature.is_identity(Temperature.validate({}))


@given(
    st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=40),
    st.floats(0.01, 1e9),
)
def test_order_is_kept_and_masked_tokens_stay_masked(values: list[float], t: float) -> None:
    logits = torch.tensor([[*values, -INF]])

    result = apply_stage(Temperature, logits, [{"t": t}])

    order = logits[0].argsort(stable=True)
    assert bool((result[0, order].diff() >= 0).logical_or(result[0, order][:-1].isneginf()).all())
    assert result[0].isneginf().tolist() == logits[0].isneginf().tolist()
    assert not bool(result.isnan().any())

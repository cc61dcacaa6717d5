"""The dynamic temperature."""

import math

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.logits_processors.shape.dynamic_temperature import DynamicTemperature
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")


def heat(row: torch.Tensor, **params: float) -> float:
    """The divisor that a row of two different alive logits got."""
    result = apply_stage(DynamicTemperature, row, [params])
    first, second = (row[0] > -INF).nonzero()[:2, 0].tolist()
    return float((row[0, first] - row[0, second]) / (result[0, first] - result[0, second]))


def test_a_flat_row_gets_the_high_and_a_sharp_one_the_low_temperature() -> None:
    flat = torch.zeros(1, 50)
    flat[0, 0] = 1e-3
    sharp = torch.zeros(1, 50)
    sharp[0, 0] = 60.0

    assert heat(flat, low=0.5, high=1.7) == pytest.approx(1.7, rel=1e-3)
    assert heat(sharp, low=0.5, high=1.7) == pytest.approx(0.5, rel=1e-6)


def test_the_exponent_bends_the_way_between() -> None:
    row = torch.tensor([[0.9, 0.1]]).log()
    share = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1)) / math.log(2)

    for exponent in (0.5, 1.0, 3.0):
        expected = 0.4 + 1.6 * share**exponent
        assert heat(row, low=0.4, high=2.0, exponent=exponent) == pytest.approx(expected, rel=1e-5)


def test_masked_tokens_are_no_part_of_the_uncertainty() -> None:
    row = torch.tensor([[0.7, 0.2, 0.1]]).log()
    masked = torch.cat([torch.full((1, 40), -INF), row], 1)

    assert heat(masked, low=0.3, high=2.0) == heat(row, low=0.3, high=2.0)


def test_certainty_at_low_zero_leaves_all_mass_to_one_token() -> None:
    result = apply_stage(
        DynamicTemperature, torch.tensor([[300.0, 1.0, 2.0]]), [{"low": 0, "high": 2}]
    )

    assert result.softmax(1).tolist() == [[1.0, 0.0, 0.0]]
    assert bool(torch.isfinite(result).all())


def test_one_alive_token_is_left_alone() -> None:
    row = torch.tensor([[-INF, 3.5, -INF]])

    assert torch.equal(apply_stage(DynamicTemperature, row, [{"low": 0.1, "high": 3}]), row)


@pytest.mark.parametrize(
    "bad",
    [
        {"low": 1.0},
        {"high": 1.0},
        {"low": 2.0, "high": 1.0},
        {"low": 0.0, "high": 0.0},
        {"low": -1.0, "high": 1.0},
        {"low": 0.5, "high": 1.0, "exponent": 0.0},
        {"low": 0.5, "high": INF},
    ],
)
def test_values_that_make_no_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ChainError, match="dynamic_temperature"):
        apply_stage(DynamicTemperature, torch.zeros(1, 3), [bad])


def test_one_to_one_and_unset_are_identities() -> None:
    assert DynamicTemperature.is_identity(DynamicTemperature.validate({}))
    assert DynamicTemperature.is_identity(DynamicTemperature.validate({"low": 1, "high": 1}))
    assert not DynamicTemperature.is_identity(DynamicTemperature.validate({"low": 2, "high": 2}))
    assert DynamicTemperature.aliases == ("dynatemp",)

"""Quadratic smoothing."""

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.logits_processors.shape.quadratic import Quadratic
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")


def test_a_curve_of_one_is_a_parabola_and_of_three_a_cubic() -> None:
    row = torch.tensor([[5.0, 4.0, 3.0, -INF]])

    parabola = apply_stage(Quadratic, row, [{"factor": 0.5}])
    cubic = apply_stage(Quadratic, row, [{"factor": 0.5, "curve": 3}])

    assert parabola.tolist() == [[0.0, -0.5, -2.0, -INF]]
    assert cubic.tolist() == [[0.0, -0.5, -4.0, -INF]]


@pytest.mark.parametrize("curve", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("factor", [1e-3, 0.3, 10.0])
def test_the_order_stays_over_the_whole_range(
    curve: float, factor: float, rng: torch.Generator
) -> None:
    logits = torch.randn(50, 200, generator=rng) * 20 + 1000  # large, so that "+ M" would round

    result = apply_stage(Quadratic, logits, [{"factor": factor, "curve": curve}] * 50)

    assert torch.equal(result.argmax(1), logits.argmax(1))
    order = logits.argsort(1, descending=True)
    assert bool((result.gather(1, order).diff(dim=1) <= 0).all())


def test_far_tokens_neither_die_nor_overflow() -> None:
    result = apply_stage(
        Quadratic, torch.tensor([[0.0, -1e20, -INF]]), [{"factor": 5.0, "curve": 2.0}]
    )

    assert torch.isfinite(result).tolist() == [[True, True, False]]
    assert result[0, 2] == -INF


@pytest.mark.parametrize("bad", [{"factor": -1.0}, {"curve": 0.9}, {"curve": 3.1}, {"curve": 4}])
def test_values_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ChainError, match="quadratic"):
        Quadratic(**bad)


def test_zero_and_unset_are_identities() -> None:
    assert Quadratic.is_identity(Quadratic.validate({}))
    assert Quadratic.is_identity(Quadratic.validate({"factor": 0, "curve": 2}))
    assert Quadratic.caps.shifts_row

"""The temperature schedule."""

import math

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.logits_processors.shape.temperature import Temperature
from decodekit.logits_processors.shape.temperature_schedule import TemperatureSchedule
from decodekit.plugins.author.rows import apply_stage, make_context

POINTS = [(2, 0.5), (6, 1.5, "cosine"), (10, 0.5)]


def heats(points: list[tuple[object, ...]], positions: list[int]) -> list[float]:
    logits = torch.ones(len(positions), 3)
    outputs = [[0] * position for position in positions]
    result = apply_stage(
        TemperatureSchedule, logits, [{"points": points}] * len(positions), outputs=outputs
    )
    return (1 / result[:, 0]).tolist()


def test_it_runs_through_the_points_and_is_level_outside() -> None:
    found = heats(POINTS, [0, 2, 3, 4, 6, 8, 10, 99])

    assert found == pytest.approx([0.5, 0.5, 0.75, 1.0, 1.5, 1.0, 0.5, 0.5])


def test_a_cosine_piece_starts_and_ends_level() -> None:
    expected = 1.5 - (0.5 - 0.5 * math.cos(math.pi / 4))

    assert heats(POINTS, [7]) == pytest.approx([expected])


def test_it_divides_as_the_stage_temperature_does(rng: torch.Generator) -> None:
    logits = torch.randn(4, 50, generator=rng) * 5

    result = apply_stage(TemperatureSchedule, logits, [{"points": [(0, 0.7)]}] * 4)

    assert torch.equal(result, apply_stage(Temperature, logits, [{"t": 0.7}] * 4))


def test_tiny_temperatures_are_raised() -> None:
    assert heats([(0, 1e-5)], [0]) == pytest.approx([0.01])


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [(3, 1.0), (3, 2.0)],
        [(3, 1.0), (1, 2.0)],
        [(0, 0.0)],
        [(-1, 1.0)],
        [(0, 1.0, "cubic")],
        [(0.5, 1.0)],
    ],
)
def test_points_that_make_no_curve_are_refused(bad: list[tuple[object, ...]]) -> None:
    with pytest.raises(ChainError, match="temperature_schedule.points"):
        TemperatureSchedule.bind(TemperatureSchedule.validate({"points": bad}), make_context(10))


def test_one_everywhere_is_identity() -> None:
    assert TemperatureSchedule.is_identity(TemperatureSchedule.validate({}))
    assert TemperatureSchedule.is_identity(TemperatureSchedule.validate({"points": [(0, 1)]}))
    assert not TemperatureSchedule.is_identity(TemperatureSchedule.validate({"points": POINTS}))

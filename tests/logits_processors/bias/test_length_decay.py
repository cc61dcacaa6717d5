"""The pull towards the end."""

from typing import Any

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.logits_processors.bias.length_decay import LengthDecay
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")
PARAMS = {"start": 2, "factor": 2.0}


def decayed(row: list[float], position: int, **params: Any) -> list[float]:
    return apply_stage(
        LengthDecay,
        torch.tensor([row]),
        [params or PARAMS],
        outputs=[[0] * position],
        context=make_context(len(row), eos_ids=(0, 1)),
    )[0].tolist()


def test_every_end_rises_after_the_start() -> None:
    assert decayed([2.0, -2.0, 5.0], 2) == [2.0, -2.0, 5.0]
    assert decayed([2.0, -2.0, 5.0], 3) == [4.0, 0.0, 5.0]
    assert decayed([2.0, -2.0, 5.0], 4) == [8.0, 4.0, 5.0]


def test_a_masked_end_stays_masked() -> None:
    assert decayed([-INF, 1.0, 5.0], 4) == [-INF, 4.0, 5.0]


def test_a_long_answer_overflows_nothing() -> None:
    result = decayed([3.0, -3.0, 5.0], 5000)

    assert all(value == pytest.approx(1e30) for value in result[:2])
    assert decayed([0.0, 0.0, 5.0], 5000) == [0.0, 0.0, 5.0]


@pytest.mark.parametrize(
    "bad", [{"start": -1, "factor": 2.0}, {"start": 1, "factor": 0.9}, {"start": 1}, {"factor": 2}]
)
def test_values_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ChainError, match="length_decay"):
        decayed([0.0, 0.0], 1, **bad)


def test_one_unset_and_no_end_are_identities() -> None:
    assert LengthDecay.is_identity(LengthDecay.validate({}))
    assert LengthDecay.is_identity(LengthDecay.validate({"start": 3, "factor": 1}))
    bound = LengthDecay.bind(LengthDecay.validate(PARAMS), make_context(5, eos_ids=()))
    assert LengthDecay.is_identity(bound)

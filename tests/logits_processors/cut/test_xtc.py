"""Exclude top choices: when it fires, what goes, and what holds it back."""

from typing import Any

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.logits_processors.cut.xtc import Xtc
from decodekit.plugins.author.rows import apply_stage

INF = float("inf")
ROW = torch.tensor([[0.4, 0.3, 0.2, 0.06, 0.04]]).log()
ALWAYS = {"probability": 1.0, "threshold": 0.1}


def kept(row: torch.Tensor, **params: Any) -> list[int]:
    return (apply_stage(Xtc, row, [params])[0] > -INF).nonzero()[:, 0].tolist()


def test_all_top_choices_but_the_least_likely_go() -> None:
    assert kept(ROW, **ALWAYS) == [2, 3, 4]
    assert kept(ROW, probability=1.0, threshold=0.25) == [1, 2, 3, 4]


def test_one_top_choice_stays() -> None:
    assert kept(ROW, probability=1.0, threshold=0.35) == [0, 1, 2, 3, 4]
    assert kept(torch.tensor([[-INF, 2.0]]), **ALWAYS) == [1]


def test_a_threshold_of_zero_leaves_the_least_likely_token() -> None:
    assert kept(ROW, probability=1.0, threshold=0.0) == [4]


def test_the_highest_id_of_a_tie_is_the_one_spared() -> None:
    assert kept(torch.zeros(1, 4), **ALWAYS) == [3]


def test_min_keep_calls_it_off() -> None:
    assert kept(ROW, **ALWAYS, min_keep=3) == [2, 3, 4]
    assert kept(ROW, **ALWAYS, min_keep=4) == [0, 1, 2, 3, 4]


def test_a_protected_token_that_would_go_calls_it_off() -> None:
    assert kept(ROW, **ALWAYS, protect=[1]) == [0, 1, 2, 3, 4]
    assert kept(ROW, **ALWAYS, protect=[2]) == [2, 3, 4]  # it is the one spared
    assert kept(ROW, **ALWAYS, protect=[4]) == [2, 3, 4]


def fired(keys: list[int], position: int = 0, instance: str = "xtc") -> list[bool]:
    count = len(keys)
    result = apply_stage(
        Xtc,
        ROW.expand(count, 5),
        [{"probability": 0.3, "threshold": 0.1}] * count,
        keys=keys,
        outputs=[[0] * position] * count,
        instance=instance,
    )
    return result[:, 0].isneginf().tolist()


def test_it_fires_as_often_as_asked() -> None:
    share = sum(fired(list(range(6000)))) / 6000

    assert abs(share - 0.3) < 4 * (0.3 * 0.7 / 6000) ** 0.5


def test_one_number_decides_for_a_request_a_position_and_an_instance() -> None:
    keys = list(range(300))

    assert fired(keys) == fired(keys)
    assert fired(keys[::-1]) == fired(keys)[::-1]
    assert fired(keys, position=1) != fired(keys)
    assert fired(keys, instance="xtc#2") != fired(keys)


def test_whatever_the_row_the_draw_is_the_same() -> None:
    other = torch.tensor([[0.45, 0.45, 0.05, 0.05, 0.0]]).log()
    params = [{"probability": 0.3, "threshold": 0.1}] * 300

    result = apply_stage(Xtc, other.expand(300, 5), params, keys=range(300))

    assert result[:, 0].isneginf().tolist() == fired(list(range(300)))


def test_the_expected_form_is_the_mean_of_the_draws() -> None:
    params = {"probability": 0.3, "threshold": 0.1}
    draws = apply_stage(Xtc, ROW.expand(6000, 5), [params] * 6000, keys=range(6000)).softmax(1)

    mean = apply_stage(Xtc, ROW, [{**params, "mode": "expected"}]).softmax(1)[0]

    assert torch.allclose(mean, draws.mean(0), atol=0.025)
    certain = apply_stage(Xtc, ROW, [{**ALWAYS, "mode": "expected"}])
    assert torch.allclose(certain.softmax(1), apply_stage(Xtc, ROW, [ALWAYS]).softmax(1))


def test_the_expected_form_leaves_rows_with_one_choice(rng: torch.Generator) -> None:
    row = torch.tensor([[5.0, 0.0, 1.0]])

    assert torch.equal(apply_stage(Xtc, row, [{**ALWAYS, "mode": "expected"}]), row)


@pytest.mark.parametrize("bad", [{"probability": 1.1}, {"probability": -0.1}, {"threshold": 0.51}])
def test_values_out_of_range_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ChainError, match="xtc"):
        Xtc(**bad)


def test_zero_and_unset_are_identities() -> None:
    assert Xtc.is_identity(Xtc.validate({}))
    assert Xtc.is_identity(Xtc.validate({"probability": 0, "threshold": 0.2}))


def test_an_id_outside_the_vocabulary_is_refused() -> None:
    with pytest.raises(ChainError, match="xtc.protect"):
        apply_stage(Xtc, ROW, [{**ALWAYS, "protect": [5]}])

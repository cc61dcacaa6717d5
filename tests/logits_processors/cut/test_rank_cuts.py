"""Typical, tail-free, top-H and the joint top-k top-p: their edges, which follow an order."""

from typing import Any

import pytest
import torch

from decodekit.core.errors import ChainError
from decodekit.core.stage import Stage
from decodekit.logits_processors.cut.tail_free import TailFree
from decodekit.logits_processors.cut.top_h import TopH
from decodekit.logits_processors.cut.top_k import TopK
from decodekit.logits_processors.cut.top_k_top_p import TopKTopP
from decodekit.logits_processors.cut.top_p import TopP
from decodekit.logits_processors.cut.typical import TypicalP
from decodekit.plugins.author.rows import apply_stage, make_context

INF = float("inf")
ROW = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()


def kept(stage: type[Stage], row: torch.Tensor, **params: Any) -> list[int]:
    return (apply_stage(stage, row, [params])[0] > -INF).nonzero()[:, 0].tolist()


# --- typical --------------------------------------------------------------------------------------


def test_typical_may_drop_the_likeliest_token(rng: torch.Generator) -> None:
    logits = torch.randn(400, 400, generator=rng) * 3

    result = apply_stage(TypicalP, logits, [{"p": 0.2}] * 400)

    lost = (result.argmax(1) != logits.argmax(1)).float().mean()
    assert 0.02 < float(lost) < 0.9
    assert not TypicalP.argmax_invariant(TypicalP.validate({"p": 0.2}))


def test_typical_prefers_the_expected_surprise() -> None:
    row = torch.tensor([[0.6, 0.1, 0.1, 0.1, 0.1]]).log()  # H = 1.228, -ln p = 0.511 and 2.303

    assert kept(TypicalP, row, p=0.5) == [0]
    row = torch.tensor([[0.3, *[0.1] * 7]]).log()  # H = 1.973, -ln p = 1.204 and 2.303
    assert kept(TypicalP, row, p=0.15) == [1, 2]  # ids ascending among equals
    assert kept(TypicalP, row, p=0.15, min_keep=4) == [1, 2, 3, 4]


def test_typical_survives_probabilities_of_zero() -> None:
    row = torch.tensor([[0.0, -1.0, -2e4, -INF]])

    result = apply_stage(TypicalP, row, [{"p": 0.99}])

    assert result.tolist() == [[0.0, -1.0, -INF, -INF]]


# --- tail-free ------------------------------------------------------------------------------------


def test_tail_free_cuts_the_last_rank_always() -> None:
    curved = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()

    assert kept(TailFree, curved, z=0.999999) == [0, 1]  # bends 0.05 and 0.05, the second passes z
    masked = torch.cat([curved, torch.full((1, 3), -INF)], 1)
    assert kept(TailFree, masked, z=0.999999) == [0, 1]
    assert kept(TailFree, curved, z=0.4) == [0]


@pytest.mark.parametrize("row", [[0.0, 0.0, 0.0, 0.0], [1.0, -INF, 0.0], [2.0]])
def test_tail_free_leaves_rows_without_a_bend(row: list[float]) -> None:
    logits = torch.tensor([row])

    assert torch.equal(apply_stage(TailFree, logits, [{"z": 0.1}]), logits)


# --- top-H ----------------------------------------------------------------------------------------


def test_top_h_with_a_window_is_the_full_form_on_short_rows(rng: torch.Generator) -> None:
    short = torch.full((60, 400), -INF)
    short[:, :100] = torch.randn(60, 100, generator=rng) * 2
    long = torch.randn(60, 400, generator=rng) * 2

    def agrees(logits: torch.Tensor) -> float:
        full = apply_stage(TopH, logits, [{"alpha": 0.4}] * 60)
        cut = apply_stage(TopH, logits, [{"alpha": 0.4, "window": 100}] * 60)
        return float((full.isneginf() == cut.isneginf()).all(1).float().mean())

    assert agrees(short) == 1.0
    assert agrees(long) < 0.5


def test_top_h_keeps_a_share_of_the_entropy() -> None:
    row = torch.tensor([[0.5, 0.25, 0.25]]).log()  # terms 0.3466, 0.3466, 0.3466

    assert kept(TopH, row, alpha=0.1) == [0]
    assert kept(TopH, row, alpha=0.5) == [0]
    assert kept(TopH, row, alpha=0.7) == [0, 1]
    assert kept(TopH, row, alpha=1.0, window=2) == [0, 1]


# --- top-k top-p ----------------------------------------------------------------------------------


def test_the_joint_form_measures_p_on_the_whole_row() -> None:
    sequential = apply_stage(TopP, apply_stage(TopK, ROW, [{"k": 2}]), [{"p": 0.55}])

    assert (sequential > -INF).tolist() == [[True, False, False, False]]
    assert kept(TopKTopP, ROW, k=2, p=0.55) == [0, 1]
    assert kept(TopKTopP, ROW, k=3, p=0.55) == [0, 1]
    assert kept(TopKTopP, ROW, k=2) == [0, 1]
    assert kept(TopKTopP, ROW, p=0.75) == [0, 1, 2]


def test_the_joint_form_keeps_exactly_k_of_a_tie() -> None:
    assert kept(TopKTopP, torch.zeros(1, 6), k=3) == [0, 1, 2]
    assert kept(TopKTopP, torch.zeros(1, 6), k=3, min_keep=4) == [0, 1, 2, 3]


# --- all ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "off"),
    [
        (TypicalP, {}),
        (TypicalP, {"p": 1}),
        (TailFree, {}),
        (TailFree, {"z": 1}),
        (TopH, {}),
        (TopH, {"alpha": 1}),
        (TopKTopP, {}),
        (TopKTopP, {"k": 500, "p": 1}),
    ],
)
def test_what_is_off_is_identity(stage: type[Stage], off: dict[str, float]) -> None:
    assert stage.is_identity(stage.bind(stage.validate(off), make_context(100)))


@pytest.mark.parametrize(
    ("stage", "bad"),
    [
        (TypicalP, {"p": 0}),
        (TypicalP, {"p": 1.01}),
        (TailFree, {"z": 0}),
        (TopH, {"alpha": 0}),
        (TopH, {"alpha": 0.4, "window": 0}),
        (TopKTopP, {"k": 0}),
        (TopKTopP, {"p": 0}),
    ],
)
def test_values_out_of_range_are_refused(stage: type[Stage], bad: dict[str, float]) -> None:
    with pytest.raises(ChainError, match=stage.name):
        stage(**bad)


def test_the_known_aliases_are_declared() -> None:
    assert TypicalP.aliases == ("typical",)
    assert TailFree.aliases == ("tfs",)

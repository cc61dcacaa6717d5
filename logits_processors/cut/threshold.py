"""Truncations that keep what is above one logit, found from the whole row without a sort."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.batch import RowView
from ...core.stage import CutParams, CutStage
from ...kernels.ops import rank_top


class ThresholdCut(CutStage):
    """Keeps l_i >= threshold; equal logits stay or go together, and the best always stays."""

    caps = replace(CutStage.caps, needs_full_row=True)

    class Params(CutParams):
        """Only min_keep."""

    def threshold(self, logits: Tensor, rows: RowView) -> Tensor:
        """Return the least logit that stays, float64 [rows]; one above the best means the best."""
        raise NotImplementedError(f"stage {self.name!r} does not implement threshold")

    def transform(self, logits: Tensor, rows: RowView) -> None:
        least = torch.minimum(self.threshold(logits, rows), logits.amax(1).double())
        dropped = logits < least[:, None]
        if rows.min_keep:
            spare_best(dropped, logits, rows)
        logits.masked_fill_(dropped, -torch.inf)


def spare_best(dropped: Tensor, logits: Tensor, rows: RowView) -> None:
    """Take each row's best `min_keep` tokens out of `dropped`, bool [rows, vocab], in place."""
    floor: Tensor = rows.column("min_keep")
    most = rows.cached("most", lambda: max(_floors(rows)))
    best = rank_top(logits, most).ids
    is_spared = torch.arange(best.shape[1], device=best.device) < floor[:, None]
    dropped.scatter_(1, best, dropped.gather(1, best) & ~is_spared)


def _floors(rows: RowView) -> list[int]:
    return [_floor(params) for params in rows.params]


def _floor(params: Any) -> int:
    return int(params.min_keep)

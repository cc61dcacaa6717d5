"""Cuts the tail where the curve of sorted probabilities goes flat.

With p in rank order, slopes d_i = p_i - p_(i+1) and bends c_i = |d_i - d_(i+1)|, scaled to sum 1:
rank 0 stays, rank i >= 1 stays if c_0 + ... + c_(i-1) <= z, and the last rank always goes. Only
alive tokens are ranked. z = 1 is off, since the formula itself would still cut one token; a row
with fewer than three tokens alive, or without a bend, stays as it is. Follows rank order, so a tie
at the border may be kept in part. From Phil Wang's blog (2019); equal to text-generation-webui's
`TailFreeLogitsWarper`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pydantic import Field
from torch import Tensor

from ...core.batch import Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import CutParams, CutStage, Stage
from .share import weights_beside_best


class TailFree(CutStage):
    """The tokens before the curve goes flat."""

    name = "tail_free"
    aliases = ("tfs",)
    caps = replace(CutStage.caps, needs_full_row=True)

    class Params(CutParams):
        """The share of the bends that is kept."""

        z: float | None = Field(default=None, gt=0, le=1)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.z is None or params.z == 1.0

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {**super().table(params), "z": float(params.z)}

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        alive = ranking.alive
        if alive.shape[1] < 3:
            return alive
        weights = weights_beside_best(ranking)  # the scale of p falls out below
        slopes = weights[:, :-1] - weights[:, 1:]
        bends = (slopes[:, :-1] - slopes[:, 1:]).abs_()
        bends.masked_fill_(~alive[:, 2:], 0.0)
        running = bends.cumsum(1)  # in float64, and one after the other
        total = running[:, -1:]
        kept = alive.clone()
        kept[:, 1:-1] &= running <= rows.column("z").double()[:, None] * total
        kept[:, -1] = False
        kept[:, :-1] &= alive[:, 1:]  # the last alive rank goes
        kept[:, 0] = alive[:, 0]
        is_bent = (total > 0) & alive[:, 2:3]
        return kept.where(is_bent, alive)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [TailFree]

"""Keeps the best tokens that hold a share α of the row's entropy (2509.02510).

In rank order with e_i = -p_i ln p_i: keep while e_0 + ... + e_i <= α * H, and always the first. p
and H are of the alive tokens, or with `window` n of the n best ones alone, scaled to sum 1; n = 100
is transformers' `TopHLogitsWarper`, which agrees with the full form on rows with at most 100
tokens. Follows rank order, so a tie at the border may be kept in part. The paper recommends α =
0.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import CutParams, CutStage, Stage
from ...kernels.ops import rank_top
from .share import weights_beside_best


class TopH(CutStage):
    """The tokens that hold a share of the entropy."""

    name = "top_h"
    caps = replace(CutStage.caps, needs_full_row=True)

    class Params(CutParams):
        """The share, and how many of the best tokens are looked at."""

        alpha: float | None = Field(default=None, gt=0, le=1)
        window: int | None = Field(default=None, ge=1)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.alpha is None or (params.alpha == 1.0 and params.window is None)

    @classmethod
    def mode(cls, params: Any) -> bool:
        return params.window is not None

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {**super().table(params), "alpha": float(params.alpha)}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        if not rows.mode:
            ranking = Ranking.of_row(logits)
        else:
            longest = rows.cached("longest", lambda: max(_reach(params) for params in rows.params))
            listed = rank_top(logits, longest)
            ranking = Ranking(listed.values, listed.ids)
        ranking.write(logits, self.cut(ranking, rows))

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        inside = ranking.alive
        if rows.mode:
            inside = inside & (ranking.ranks < rows.column("window")[:, None])
        p = weights_beside_best(ranking).masked_fill_(~inside, 0.0)
        p /= p.cumsum(1)[:, -1:].clamp_min_(1.0)  # cumsum adds in rank order, whatever the width
        running: Tensor = torch.special.entr(p).cumsum(1)
        kept = inside & (running <= rows.column("alpha").double()[:, None] * running[:, -1:])
        first = inside & (ranking.ranks == 0)
        return kept | first


def _reach(params: Any) -> int:
    return int(max(params.window, params.min_keep))


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [TopH]

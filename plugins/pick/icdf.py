"""Draws a token by inverting the distribution: the first rank whose prefix mass exceeds u.

One uniform number u decides a row; tokens stand in rank order, logit descending and id ascending,
and their masses are integers, so that the sums are exact and compared with u times their own total.
`skew` s replaces u by u**exp(-s): above 0 it leans to less likely tokens, below 0 to likelier ones,
0 is off. Without rank order a skew would mean nothing. The skewed draw is exllamav2's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import PickView, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, Picker, StageParams
from .flat_race import ranked

BELOW_ONE = 1.0 - 2.0**-53


class InverseCdf(Picker):
    """A draw with one number a row."""

    name = "icdf"
    kernel = "icdf"
    caps = Caps(random=True, graph_safe=True, spec="any-history")

    class Params(StageParams):
        """How far the draw leans."""

        skew: float | None = Field(default=None, ge=-20, le=20)

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {"skew": float(params.skew or 0.0)}

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        ranking = ranked(view)
        chance = uniform53(rows).pow_(torch.exp(-rows.column("skew").double()))
        sums = ranking.mass.cumsum(1)
        total = sums[:, -1]
        target = (chance.clamp_(max=BELOW_ONE) * total).long().minimum(total - 1)
        place = (sums <= target[:, None]).sum(1, keepdim=True)
        return ranking.ids.gather(1, place.clamp_(max=ranking.ids.shape[1] - 1))[:, 0]


def uniform53(rows: RowView) -> Tensor:
    """Return one uniform number in (0, 1) for each row, from 64 random bits, float64 [rows]."""
    lanes = torch.arange(2, device=rows.device).expand(len(rows), 2)
    high, low = rows.uniform(lanes).unbind(1)
    return (high - 2.0**-33 + low * 2.0**-32).clamp_(max=BELOW_ONE)


@hookimpl
def decodekit_pickers() -> Iterable[type[Picker]]:
    return [InverseCdf]

"""Keeps the nucleus: token i stays if F(i) < p, F(i) being the mass before it in rank order.

This (1904.09751) is the smallest set, taken from the top, whose mass reaches p; the token that
crosses p stays, and after another cut the mass is that of the survivors. `ties`: "index" (default)
follows rank order, lower ids first, and may keep part of a tie; "value" keeps a group of equal
logits as one, if the mass strictly above it is below p.

Masses are integers (`kernels/reference/mass.py`), so F has no rounding of its own: F(i) < p holds
where mass_before < ceil(p * total), the product taken in float64 of the float32 p. Its error, under
2**-51 of the total, is far inside the band of 2**-20 in which either neighbour passes as right.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from ...core.batch import Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import CutParams, CutStage, Stage
from ...kernels.lang import tl, triton


@triton.jit
def keep_nucleus(before: tl.tensor, total: tl.tensor, p: tl.tensor) -> tl.tensor:
    """Keep a token if the mass before it is below p."""
    return before < tl.ceil(total.to(tl.float64) * p.to(tl.float64)).to(tl.int64)


@triton.jit
def keep_whole_nucleus(above: tl.tensor, total: tl.tensor, p: tl.tensor) -> tl.tensor:
    """Keep a group of equals if the mass above it is below p."""
    return above < tl.ceil(total.to(tl.float64) * p.to(tl.float64)).to(tl.int64)


class TopP(CutStage):
    """The fewest tokens that hold a share p of the mass."""

    name = "top_p"
    kernel = {"index": keep_nucleus, "value": keep_whole_nucleus}
    fields = {"top_p": "p"}
    needs_mass = True

    class Params(CutParams):
        """The share, and what a tie at the border does."""

        p: float | None = Field(default=None, gt=0, le=1)
        ties: Literal["value", "index"] = "index"

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.p is None or params.p == 1.0

    @classmethod
    def mode(cls, params: Any) -> str:
        return str(params.ties)

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {**super().table(params), "p": float(params.p)}

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        share = rows.cached("p", lambda: rows.column("p").double())
        bound = (ranking.total * share).ceil_().long()[:, None]  # [rows, 1]
        before = ranking.mass_before
        if rows.mode == "value":
            before = _mass_above(before, ranking.values)
        return before < bound


def _mass_above(before: Tensor, values: Tensor) -> Tensor:
    """Give each token the mass before the first of its equals."""
    starts = before.clone()
    # `before` never falls, so the running maximum over group starts is the latest start.
    starts[:, 1:].masked_fill_(values[:, 1:] == values[:, :-1], 0)
    return starts.cummax(1).values


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [TopP]

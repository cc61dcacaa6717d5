"""Keeps tokens near the best one: keep w_i >= p with w_i = exp(l_i - M) (2407.01082).

The same as p_i >= p * max p without a softmax. Compared as weights, in float32, since the usual
references compare probabilities. p = 1 keeps the maximal ties.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field
from torch import Tensor

from ...core.batch import Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import CutParams, CutStage, Stage
from ...kernels.lang import tl, triton


@triton.jit
def keep_near_best(values: tl.tensor, best: tl.tensor, p: tl.tensor) -> tl.tensor:
    """Keep weights of p or more beside the best one."""
    return tl.exp(values - best) >= p


class MinP(CutStage):
    """Tokens at least p times as likely as the best one."""

    name = "min_p"
    kernel = keep_near_best
    fields = {"min_p": "p"}

    class Params(CutParams):
        """The least share of the best token's probability."""

        p: float | None = Field(default=None, ge=0, le=1)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.p

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {**super().table(params), "p": float(params.p)}

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        weights = (ranking.values - ranking.values[:, :1]).exp_()
        return weights >= rows.cached("p", lambda: rows.column("p")[:, None])


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [MinP]

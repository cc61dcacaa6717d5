"""Keeps p_i >= a * (max p)**2: a bar that falls with the square of the best token's probability.

p is of the alive tokens. A threshold: equal logits stay or go together. From the community; equal
to text-generation-webui's `TopALogitsWarper`.
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
from .share import best_share, weights_beside_best


@triton.jit
def keep_top_a(values: tl.tensor, best: tl.tensor, total: tl.tensor, a: tl.tensor) -> tl.tensor:
    """Keep weights of a * max p or more beside the best one."""
    share = 1099511627776.0 / tl.maximum(total, 1099511627776).to(tl.float64)
    return tl.exp((values - best).to(tl.float64)) >= a.to(tl.float64) * share


class TopA(CutStage):
    """Tokens at least a * max p times as likely as the best one."""

    name = "top_a"
    kernel = keep_top_a
    needs_mass = True

    class Params(CutParams):
        """The factor before the square."""

        a: float | None = Field(default=None, ge=0, le=1)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.a

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {**super().table(params), "a": float(params.a)}

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        least = rows.column("a").double() * best_share(ranking)
        return weights_beside_best(ranking) >= least[:, None]


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [TopA]

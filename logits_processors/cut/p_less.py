"""Keeps p_i >= sum of p_j**2, the chance that two draws agree (2509.23234).

It has no parameter and never empties a row, since that sum is at most max p. p is of the alive
tokens. A threshold: equal logits stay or go together.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ...core.batch import RowView
from ...core.hookspecs import hookimpl
from ...core.stage import CutParams, Stage
from ...kernels.lang import tl, triton
from ...kernels.ops import row_collision
from .threshold import ThresholdCut


@triton.jit
def keep_p_less(
    values: tl.tensor, best: tl.tensor, total: tl.tensor, squares: tl.tensor
) -> tl.tensor:
    """Keep what is as likely as a collision."""
    weight = tl.maximum(total.to(tl.float64) / 1099511627776.0, 1.0)
    least = best.to(tl.float64) + tl.log(tl.maximum(squares, 1.0) / weight)
    return values.to(tl.float64) >= tl.minimum(least, best.to(tl.float64))


class PLess(ThresholdCut):
    """Tokens at least as likely as a collision."""

    name = "p_less"
    kernel = keep_p_less

    class Params(CutParams):
        """Only min_keep."""

    def threshold(self, logits: Tensor, rows: RowView) -> Tensor:
        found = row_collision(logits)
        return found.maximum.double() + (found.squares / found.total).log_()


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [PLess]

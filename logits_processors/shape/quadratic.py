"""Bends the row around its maximum: smooth sampling.

l' = -k f d**2 + s f d**3 with d = l - M, k = (3 - c) / 2 and s = (c - 1) / 2. M is the row's own
maximum, f the `factor` and c the `curve`: c = 1 is a parabola, that flattens what is near the best
token and sharpens the rest, c = 3 a cubic. Only for c in [1, 3] does the order stay, so other
curves are refused. The result stands relative to the maximum, without "+ M": the distribution is
the same, and no rounding near M makes equals of two. From text-generation-webui's
`QuadraticSamplingLogitsWarper`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import RowView
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, Form, Kind, Stage, StageParams

LOWEST = torch.finfo(torch.float32).min


class Quadratic(Stage):
    """Smooth sampling."""

    name = "quadratic"
    kind = Kind.SHAPE
    form = Form.ROW_STATISTIC
    caps = Caps(graph_safe=True, spec="any-history", shifts_row=True)

    class Params(StageParams):
        """The factor (0 is off) and the curve."""

        factor: float | None = Field(default=None, ge=0, allow_inf_nan=False)
        curve: float = Field(default=1.0, ge=1, le=3)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.factor

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return True

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {
            "square": -(3.0 - params.curve) / 2.0 * params.factor,
            "cube": (params.curve - 1.0) / 2.0 * params.factor,
        }

    def transform(self, logits: Tensor, rows: RowView) -> None:
        dead = logits == -torch.inf
        square = rows.cached("square", lambda: rows.column("square")[:, None])
        cube = rows.cached("cube", lambda: rows.column("cube")[:, None])
        drops = logits - logits.amax(1, keepdim=True)
        torch.mul(drops, cube, out=logits)
        logits.add_(square).mul_(drops).mul_(drops)
        # What overflows stays alive; what is dead stays dead, where 0 * inf made NaN of it.
        logits.clamp_(min=LOWEST).masked_fill_(dead, -torch.inf)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [Quadratic]

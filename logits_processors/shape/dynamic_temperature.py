"""Divides each row by a temperature that grows with its entropy.

T = low + (high - low) * (H / ln n)**exponent. H is the entropy of the n alive tokens of that row
alone, so a truncation before it changes what "uncertain" means. A row with one token stays as it
is. T = 0, which low = 0 gives at H = 0, leaves one token with all of the mass. From kalomaze; equal
to llama.cpp's `temp_ext` with low = t - range (at least 0) and high = t + range.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Stage, StageParams
from ...kernels.ops import row_entropy

LOWEST = 1e-30  # a divisor that makes one-hot rows without an infinity


class DynamicTemperature(Stage):
    """Cooler where the model is sure, hotter where it is not."""

    name = "dynamic_temperature"
    aliases = ("dynatemp",)
    kind = Kind.SHAPE
    form = Form.ROW_STATISTIC
    caps = Caps(graph_safe=True, spec="any-history")

    class Params(StageParams):
        """The temperatures of a certain and of a flat row, and the bend between them."""

        low: float | None = Field(default=None, ge=0, allow_inf_nan=False)
        high: float | None = Field(default=None, ge=0, allow_inf_nan=False)
        exponent: float = Field(default=1.0, gt=0, allow_inf_nan=False)

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        if (params.low is None) != (params.high is None):
            raise ChainError(
                "dynamic_temperature needs low and high together, "
                f"got low {params.low} and high {params.high}",
                parameter="dynamic_temperature",
            )
        if params.low is not None and (params.high < params.low or params.high == 0):
            raise ChainError(
                "dynamic_temperature.high must be above 0 and at least low, "
                f"got low {params.low} and high {params.high}",
                parameter="dynamic_temperature.high",
                value=params.high,
            )
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.low is None or params.low == params.high == 1.0

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return True

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {name: float(getattr(params, name)) for name in ("low", "high", "exponent")}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        count = (logits > -torch.inf).sum(1)
        spread = row_entropy(logits).nats / count.clamp_min(2).double().log()
        low, high = rows.column("low").double(), rows.column("high").double()
        bent = spread.clamp_(0.0, 1.0).pow_(rows.column("exponent").double())
        heat = (low + (high - low) * bent).clamp_min_(LOWEST).float()
        logits.div_(heat.where(count > 1, 1.0)[:, None])


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [DynamicTemperature]

"""Divides the row by a temperature that changes along the answer.

`points` are pairs (position, T) in rising position; T(t) runs through them on straight lines and is
level before the first and after the last, t being the number of tokens generated so far. A third
item "cosine" makes the piece that begins there fall or rise on half a cosine wave. Temperatures
below 0.01 are raised to it, as those of the stage `temperature` are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Stage, StageParams
from .temperature import LOWEST

Position = Annotated[int, Field(strict=True, ge=0)]
Heat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Point = tuple[Position, Heat] | tuple[Position, Heat, Literal["linear", "cosine"]]


class TemperatureSchedule(Stage):
    """A temperature by position."""

    name = "temperature_schedule"
    kind = Kind.SHAPE
    form = Form.ELEMENTWISE
    caps = Caps(monotone=True, graph_safe=True, spec="any-history", needs_full_row=False)

    class Params(StageParams):
        """The points of the curve."""

        points: tuple[Point, ...] | None = Field(default=None, min_length=1)

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        points = params.points or ()
        for (first, *_), (second, *_) in zip(points, points[1:], strict=False):
            if second <= first:
                raise ChainError(
                    "temperature_schedule.points must stand at rising positions, "
                    f"got {second} after {first}",
                    parameter="temperature_schedule.points",
                    value=second,
                )
        raised = tuple((at, max(heat, LOWEST), *form) for at, heat, *form in points)
        return params.model_copy(update={"points": raised or None})

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return all(heat == 1.0 for _, heat, *_ in params.points or ())

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return True

    def transform(self, logits: Tensor, rows: RowView) -> None:
        positions = rows.host_positions.tolist()
        heats = [
            heat_at(params.points, position)
            for params, position in zip(rows.params, positions, strict=True)
        ]
        divisor = torch.from_numpy(np.array(heats, dtype=np.float32)).to(rows.device)
        logits.div_(divisor[:, None])


def heat_at(points: Sequence[Sequence[Any]], position: int) -> float:
    """Return T at `position`; a handful of steps on the host, for each row."""
    at, heat, *form = points[0]
    if position <= at:
        return float(heat)
    for following in points[1:]:
        if position <= following[0]:
            share = (position - at) / (following[0] - at)
            if form == ["cosine"]:
                share = 0.5 - 0.5 * math.cos(math.pi * share)
            return float(heat + (following[1] - heat) * share)
        at, heat, *form = following
    return float(heat)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [TemperatureSchedule]

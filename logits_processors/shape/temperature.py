"""Divides the row by a temperature: l_i / t, in float32 (transformers' `TemperatureLogitsWarper`).

t < 1 sharpens, t > 1 flattens, never over masked tokens. 0 < t < 0.01 is raised to 0.01 and stays
random, as in vLLM. Zero is no division but a request for the picker "greedy".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Stage, StageParams
from ...kernels.ops import divide

LOWEST = 0.01


class Temperature(Stage):
    """Flattens or sharpens the distribution."""

    name = "temperature"
    kernel = divide
    kind = Kind.SHAPE
    form = Form.ELEMENTWISE
    fields = {"temperature": "t"}
    caps = Caps(monotone=True, graph_safe=True, spec="any-history", needs_full_row=False)

    class Params(StageParams):
        """The divisor."""

        t: float | None = Field(default=None, ge=0, allow_inf_nan=False)

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        if params.t == 0:
            raise ChainError(
                "temperature.t must be above 0 in a chain, got 0; "
                "for the most likely token end the chain with the picker 'greedy'",
                parameter="temperature.t",
                value=params.t,
            )
        if params.t is not None and params.t < LOWEST:
            return params.model_copy(update={"t": LOWEST})
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.t is None or params.t == 1.0

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return True

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {"t": float(params.t)}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits.div_(rows.cached("t", lambda: rows.column("t")[:, None]))


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [Temperature]

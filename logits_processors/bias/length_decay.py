"""Makes the end likelier the longer an answer runs.

l_eos += |l_eos| * (f**(t - start) - 1) for t > start. t counts generated tokens, and every end id
of the model is raised. An end token that is masked stays so, and one whose logit is exactly 0 never
moves. What is added is held at 1e30, so that no row overflows. Equal to transformers'
`ExponentialDecayLengthPenalty`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Stage, StageParams
from ..token_ids import Pairs, pairs

MOST = 1e30


class LengthDecay(Stage):
    """A pull towards the end after `start` tokens."""

    name = "length_decay"
    kind = Kind.BIAS
    form = Form.ELEMENTWISE
    caps = Caps(spec="any-history")

    class Params(StageParams):
        """Where the pull begins, and its growth a token."""

        start: int | None = Field(default=None, ge=0)
        factor: float | None = Field(default=None, ge=1, allow_inf_nan=False)

    class Bound(Params):
        """With the ids that end an answer."""

        ids: tuple[int, ...]

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        if (params.start is None) != (params.factor is None):
            raise ChainError(
                "length_decay needs start and factor together, "
                f"got start {params.start} and factor {params.factor}",
                parameter="length_decay",
            )
        ids = tuple(sorted({token for token in ctx.eos_ids if 0 <= token < ctx.vocab_size}))
        return cls.Bound(start=params.start, factor=params.factor, ids=ids)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        has_ids = not isinstance(params, cls.Bound) or bool(params.ids)
        return params.factor in (None, 1.0) or params.start is None or not has_ids

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {"start": params.start, "factor": float(params.factor)}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        starts = rows.cached("start", lambda: np.array([params.start for params in rows.params]))
        if not (rows.host_positions > starts).any():
            return
        places: Pairs = rows.cached(
            "places", lambda: pairs([params.ids for params in rows.params], rows.device)
        )
        late = (rows.positions - rows.column("start")).clamp_min(0).double()
        growth = (rows.column("factor").double() ** late - 1.0).clamp_(max=MOST)
        values = logits[places]
        added = (values.abs() * growth[places.rows]).clamp_(max=MOST).float()
        logits[places] = torch.where(torch.isfinite(values), values + added, values)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [LengthDecay]

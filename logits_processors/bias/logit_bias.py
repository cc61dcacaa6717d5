"""Adds a number to the logits of chosen tokens: l_i += b_i.

Finite biases are clamped to [-100, 100], as OpenAI documents them; -inf bans a token. A bias never
revives a masked token. The meaning is that of vLLM's `logit_bias`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Stage, StageParams
from ..token_ids import Pairs, check_ids, pairs

LIMIT = 100.0


class LogitBias(Stage):
    """A fixed bias for each listed token."""

    name = "logit_bias"
    kind = Kind.BIAS
    form = Form.ELEMENTWISE
    fields = {"logit_bias": "bias"}
    caps = Caps(graph_safe=True, spec="any-history")

    class Params(StageParams):
        """Bias by token id."""

        bias: Mapping[int, float] | None = None

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        bias = params.bias or {}
        check_ids("logit_bias", bias, ctx.vocab_size)
        return params.model_copy(
            update={"bias": {token: _in_range(token, value) for token, value in bias.items()}}
        )

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.bias or not any(params.bias.values())

    def sparse(self, rows: RowView) -> tuple[Pairs, Tensor]:
        """Return places in row order and what is added there."""
        return rows.cached("bias", lambda: _layout(rows))

    def transform(self, logits: Tensor, rows: RowView) -> None:
        places, values = self.sparse(rows)
        logits[places] += values  # a row names no token twice


def _in_range(token: int, value: float) -> float:
    if math.isnan(value) or value == math.inf:
        raise ChainError(
            f"logit_bias must be a number in [-100, 100] or -inf, got {value} for token {token}",
            parameter="logit_bias",
            value=value,
        )
    return value if value == -math.inf else min(max(value, -LIMIT), LIMIT)


def _layout(rows: RowView) -> tuple[Pairs, Tensor]:
    places = pairs([list(params.bias) for params in rows.params], rows.device)
    values = [value for params in rows.params for value in params.bias.values()]
    return places, torch.tensor(values, dtype=torch.float32, device=rows.device)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [LogitBias]

"""Holds back the end: l_i = -inf for every end id and stop id i while fewer than n tokens exist.

Counts generated tokens only, as vLLM's `min_tokens` and transformers'
`MinNewTokensLengthLogitsProcessor` do; the prompt does not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from ...core.batch import RowView
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Stage, StageParams
from ..token_ids import Pairs, bans, pairs


class MinTokens(Stage):
    """No end id and no stop id before n tokens."""

    name = "min_tokens"
    kind = Kind.MASK
    form = Form.ELEMENTWISE
    fields = {"min_tokens": "n"}
    caps = Caps(spec="any-history")
    yields = True  # a grammar that allows nothing but the end wins

    class Params(StageParams):
        """How many tokens must exist before the sequence may end."""

        n: int | None = Field(default=None, ge=0)

    class Bound(Params):
        """With the ids that would end the sequence."""

        ids: tuple[int, ...]

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        # A stop id that the head does not have can never come.
        ids = tuple(sorted({token for token in ctx.stop_ids if 0 <= token < ctx.vocab_size}))
        return cls.Bound(n=params.n, ids=ids)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.n or (isinstance(params, cls.Bound) and not params.ids)

    def sparse(self, rows: RowView) -> tuple[Pairs, Tensor]:
        """Return places in row order, and -inf to be added there."""
        least = rows.cached("n", lambda: np.array([params.n for params in rows.params]))
        early: NDArray[np.bool_] = rows.host_positions < least
        # The same tensors as long as the same rows are early, so that they are laid out once.
        return rows.cached(("bans", early.tobytes()), lambda: bans(_places(rows, early)))

    def transform(self, logits: Tensor, rows: RowView) -> None:
        least = rows.cached("n", lambda: np.array([params.n for params in rows.params]))
        early = rows.host_positions < least
        if early.any():
            logits[self.sparse(rows)[0]] = -torch.inf


def _places(rows: RowView, early: NDArray[np.bool_]) -> Pairs:
    pairing = zip(rows.params, early, strict=True)
    lists = [params.ids if is_early else () for params, is_early in pairing]
    return pairs(lists, rows.device)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [MinTokens]

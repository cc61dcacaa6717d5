"""Keeps the k best tokens: keep l_i >= the k-th largest logit (1805.04833).

`ties`: "value" (default; vLLM, transformers) keeps every token that equals the k-th, "index"
exactly k in rank order, lower ids first among equals (llama.cpp). k = 1 is always "index", so that
it is greedy.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from pydantic import Field
from torch import Tensor

from ...core.batch import Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, CutParams, CutStage, Stage
from ...kernels.lang import tl, triton


@triton.jit
def keep_top_k(values: tl.tensor, ranks: tl.tensor, k: tl.tensor) -> tl.tensor:
    """Keep what equals the k-th value or is above it."""
    return values >= tl.max(tl.where(ranks == k - 1, values, float("-inf")), 0)


@triton.jit
def keep_first_k(ranks: tl.tensor, k: tl.tensor) -> tl.tensor:
    """Keep the first k."""
    return ranks < k


class TopK(CutStage):
    """The k best tokens."""

    name = "top_k"
    kernel = {"value": keep_top_k, "index": keep_first_k}
    fields = {"top_k": "k"}

    class Params(CutParams):
        """How many, and what a tie at the last place does."""

        k: int | None = Field(default=None, ge=1)
        ties: Literal["value", "index"] = "value"

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        if params.k is not None and params.k >= ctx.vocab_size:
            return params.model_copy(update={"k": None})
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.k is None

    @classmethod
    def list_hint(cls, params: Any) -> int | None:
        return int(max(params.k, params.min_keep))

    @classmethod
    def mode(cls, params: Any) -> str:
        return "index" if params.k == 1 else str(params.ties)

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        if rows.mode == "index":
            return ranking.ranks < rows.cached("k", lambda: rows.column("k")[:, None])
        width = ranking.values.shape[1]
        place = rows.cached(
            ("place", width), lambda: (rows.column("k") - 1).clamp(max=width - 1)[:, None]
        )
        return ranking.values >= ranking.values.gather(1, place)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [TopK]

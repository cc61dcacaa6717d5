"""Top-k and top-p at once: keep rank < k with F < p, F the mass before it in the whole row.

The sequential form, top_k and then top_p, measures p against the survivors of k; this joint form
(SGLang's, and FlashInfer's "joint") measures it against every alive token, and so keeps as many or
more. Both conditions follow rank order, logit descending and id ascending, so exactly k tokens stay
where p allows it, and a tie at the border may be kept in part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field
from torch import Tensor

from ...core.batch import Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, CutParams, CutStage, Stage


class TopKTopP(CutStage):
    """The k best tokens that the nucleus of the whole row holds."""

    name = "top_k_top_p"
    needs_mass = True

    class Params(CutParams):
        """How many tokens, and the share of the mass; either may be off."""

        k: int | None = Field(default=None, ge=1)
        p: float | None = Field(default=None, gt=0, le=1)

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        if params.k is not None and params.k >= ctx.vocab_size:
            return params.model_copy(update={"k": None})
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.k is None and params.p in (None, 1.0)

    @classmethod
    def list_hint(cls, params: Any) -> int | None:
        return None if params.k is None else int(max(params.k, params.min_keep))

    @classmethod
    def mode(cls, params: Any) -> tuple[bool, bool]:
        return params.k is not None, params.p not in (None, 1.0)

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return super().table(params) | ({} if params.p is None else {"p": float(params.p)})

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        has_k, has_p = rows.mode
        kept = ranking.alive
        if has_k:
            kept = kept & (ranking.ranks < rows.column("k")[:, None])
        if has_p:
            bound = (ranking.total * rows.column("p").double()).ceil_().long()
            kept = kept & (ranking.mass_before < bound[:, None])
        return kept


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [TopKTopP]

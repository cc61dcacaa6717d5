"""Keeps the tokens whose surprise is nearest to the expected one (2202.00666).

With d_i = |-ln p_i - H|: the smallest set in ascending d whose mass reaches p. p_i and the entropy
H are of the alive tokens. The likeliest token may go, where the row is less certain than it is.
Follows the order of d (ids ascending among equals), so a tie at the border may be kept in part;
transformers' `TypicalLogitsWarper`, equal otherwise, keeps it whole. `min_keep` counts in that
order, too.

-ln p_i - H = (M - l_i) - sum of p_j (M - l_j), so neither needs a logarithm of p, which is
NaN-prone at 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import RowView
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, CutParams, CutStage, Stage
from ...kernels.ops import rank_all, row_entropy, token_mass


class TypicalP(CutStage):
    """The most typical tokens that hold a share p of the mass."""

    name = "typical_p"
    aliases = ("typical",)
    caps = Caps(graph_safe=True, spec="any-history")

    class Params(CutParams):
        """The share of the mass."""

        p: float | None = Field(default=None, gt=0, le=1)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.p is None or params.p == 1.0

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return False

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {**super().table(params), "p": float(params.p)}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        found = row_entropy(logits)
        alive = logits > -torch.inf
        drops = (found.maximum[:, None] - logits).double()
        oddness = (drops - found.mean_drop[:, None]).abs_().float()
        order = rank_all(oddness.neg_().masked_fill_(~alive, -torch.inf)).ids
        values = logits.gather(1, order)
        mass = token_mass(values, found.maximum)
        bound = (mass.sum(1) * rows.column("p").double()).ceil_().long()
        kept = mass.cumsum(1) - mass < bound[:, None]
        if rows.min_keep:
            ranks = torch.arange(values.shape[1], device=values.device)
            kept |= ranks < rows.column("min_keep")[:, None]
        logits.scatter_(1, order, values.masked_fill_(~kept, -torch.inf))


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [TypicalP]

"""Keeps p_i >= a * (max p)**2, p being of the alive tokens. A threshold: equal logits stay or go
together. From the community (text-generation-webui, KoboldAI)."""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field

from decodekit import RowView
from decodekit.core.batch import Ranking
from decodekit.core.stage import CutParams, CutStage


class TopA(CutStage):
    """Tokens at least a * max p times as likely as the best one."""

    name = "top_a_lite.top_a"
    needs_mass = True  # `keep` reads ranking.total

    class Params(CutParams):
        """The factor before the square; 0 keeps all."""

        a: float = Field(ge=0, le=1, examples=[0.2, 0.9])

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return bool(params.a == 0)

    def keep(self, ranking: Ranking, rows: RowView) -> torch.Tensor:
        # Masses are integers, so that their sum does not depend on its order.
        share = ranking.mass.double() / ranking.total[:, None]
        return share >= rows.column("a").double()[:, None] * share[:, :1] ** 2

"""Drops tokens below an absolute probability (2210.15191).

* epsilon: keep p_i >= ε, and the best token.
* eta: keep p_i >= η, and the best token, with η = min(ε, sqrt(ε) exp(-H)): the flatter the row, the
  lower the bar.

p and the entropy H are of the alive tokens. Both are thresholds: equal logits stay or go together.
Equal to transformers' `EpsilonLogitsWarper` and `EtaLogitsWarper`, except that a row with no token
alive stays as it is and raises nothing. Published values of ε: 3e-4 to 4e-3.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import CutParams, CutStage, Stage
from ...kernels.lang import tl, triton
from ...kernels.ops import row_entropy
from .share import best_share, weights_beside_best
from .threshold import ThresholdCut


@triton.jit
def keep_epsilon(
    values: tl.tensor, best: tl.tensor, total: tl.tensor, epsilon: tl.tensor
) -> tl.tensor:
    """Keep probabilities of epsilon or more, and the best token."""
    share = 1099511627776.0 / tl.maximum(total, 1099511627776).to(tl.float64)
    least = tl.minimum(epsilon.to(tl.float64) / share, 1.0)
    return tl.exp((values - best).to(tl.float64)) >= least


@triton.jit
def keep_eta(
    values: tl.tensor, best: tl.tensor, total: tl.tensor, mean_drop: tl.tensor, epsilon: tl.tensor
) -> tl.tensor:
    """Keep probabilities of eta or more, eta falling with the entropy, and the best token."""
    weight = tl.maximum(total.to(tl.float64) / 1099511627776.0, 1.0)
    nats = tl.log(weight) + mean_drop
    high = epsilon.to(tl.float64)
    eta = tl.minimum(high, tl.sqrt(high) * tl.exp(-nats))
    least = best.to(tl.float64) + tl.log(eta * weight)
    return values.to(tl.float64) >= tl.minimum(least, best.to(tl.float64))


class EpsilonParams(CutParams):
    """ε."""

    epsilon: float | None = Field(default=None, gt=0, lt=1)


class Epsilon(CutStage):
    """Tokens of probability ε or more."""

    name = "epsilon"
    kernel = keep_epsilon
    needs_mass = True

    class Params(EpsilonParams):
        """The least probability."""

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.epsilon is None

    def keep(self, ranking: Ranking, rows: RowView) -> Tensor:
        least = rows.column("epsilon").double() / best_share(ranking)
        return weights_beside_best(ranking) >= least.clamp_(max=1.0)[:, None]


class Eta(ThresholdCut):
    """Tokens of probability η or more, η falling with the entropy."""

    name = "eta"
    kernel = keep_eta

    class Params(EpsilonParams):
        """The highest bar."""

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.epsilon is None

    def threshold(self, logits: Tensor, rows: RowView) -> Tensor:
        found = row_entropy(logits)
        epsilon = rows.column("epsilon").double()
        eta = torch.minimum(epsilon, epsilon.sqrt() * (-found.nats).exp())
        return found.maximum.double() + (eta * found.total).log_()


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [Epsilon, Eta]

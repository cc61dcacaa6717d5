"""Probabilities read off a ranked list and the mass of its row."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.batch import Ranking
from ...kernels.ops import ONE


def weights_beside_best(ranking: Ranking) -> Tensor:
    """Return p_i / max p of the listed tokens, float64 [rows, n]; 0 where dead."""
    drops = ranking.values - ranking.values[:, :1]
    return drops.masked_fill(~ranking.alive, -torch.inf).double().exp_()


def best_share(ranking: Ranking) -> Tensor:
    """Return the probability of each row's best token, float64 [rows]; 1 for a dead row."""
    return ONE / ranking.total.clamp_min(int(ONE)).double()

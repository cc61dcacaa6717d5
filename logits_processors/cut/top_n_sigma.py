"""Keeps l_i >= M - n * σ, σ being the standard deviation of the alive logits (2411.07641).

Masked tokens count neither in σ nor in its mean: as zeros or as -inf they would change the kept set
beyond recognition. σ scales with the temperature, so a temperature before or after changes nothing
here; it is that of a population, which differs from a sample's by a factor sqrt(n / (n - 1)). A
threshold: equal logits stay or go together. Equal to llama.cpp's `top_n_sigma`. The paper uses n =
1.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field
from torch import Tensor

from ...core.batch import RowView
from ...core.hookspecs import hookimpl
from ...core.stage import CutParams, Stage
from ...kernels.lang import tl, triton
from ...kernels.ops import row_spread
from .threshold import ThresholdCut


@triton.jit
def keep_n_sigma(
    values: tl.tensor, best: tl.tensor, deviation: tl.tensor, n: tl.tensor
) -> tl.tensor:
    """Keep what is within n standard deviations of the best logit."""
    least = best.to(tl.float64) - n.to(tl.float64) * deviation
    return values.to(tl.float64) >= tl.minimum(least, best.to(tl.float64))


class TopNSigma(ThresholdCut):
    """Tokens within n standard deviations of the best logit."""

    name = "top_n_sigma"
    kernel = keep_n_sigma
    aliases = ("nsigma",)

    class Params(CutParams):
        """How many standard deviations."""

        n: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.n is None

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {**super().table(params), "n": float(params.n)}

    def threshold(self, logits: Tensor, rows: RowView) -> Tensor:
        found = row_spread(logits)
        return found.maximum.double() - rows.column("n").double() * found.deviation


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [TopNSigma]

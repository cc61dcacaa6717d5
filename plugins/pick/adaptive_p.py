"""Draws so that the chosen tokens' probabilities average to a target.

With W and N the decayed sums of those probabilities and of ones, T' = clamp(2 target - W / N, 0, 1)
and d_i = |p_i - T'| / 0.3: an alive token's logit becomes 5 - 10 d**2 / (1 + d), one of them is
drawn, and W <- p + decay W, N <- 1 + decay N with the p that the chosen token had before. W begins
at target / (1 - decay), N at 1 / (1 - decay), as if the target had been met so far. A target of
None draws from the probabilities as they are. It is the last step, and wants a mild truncation
before it. A token that this picker did not choose leaves W and N. Equal to llama.cpp's `adaptive_p`
(PR 17927).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import PickView, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, Picker, StageParams
from ...kernels.ops import ONE, row_total
from .control import Control, note
from .flat_race import candidates, winner

WIDTH, PEAK, SHARPNESS = 0.3, 5.0, 10.0

Sums = tuple[float, float]


class AdaptiveP(Picker):
    """A draw that aims at a probability."""

    name = "adaptive_p"
    caps = Caps(random=True, stateful=True, carried=True, spec="sequential")

    class Params(StageParams):
        """The probability to aim at, and how long choices are remembered."""

        target: float | None = Field(default=None, ge=0, le=1)
        decay: float = Field(default=0.9, ge=0, le=0.99)

    @classmethod
    def structure(cls, params: Any) -> bool:
        return params.target is not None

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def open(self, params: Any, prompt: Sequence[int]) -> Control[Sums]:
        decay = params.decay
        first = ((params.target or 0.0) / (1.0 - decay), 1.0 / (1.0 - decay))
        return Control(first, lambda sums, p: (p + decay * sums[0], 1.0 + decay * sums[1]))

    def accept(self, state: Control[Sums], tokens: Sequence[int]) -> None:
        state.accept(tokens)

    def rollback(self, state: Control[Sums], count: int) -> None:
        state.rollback(count)

    def fork(self, state: Control[Sums]) -> Control[Sums]:
        return state.fork()

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        values, ids = candidates(view)
        times = rows.exponential(ids)
        if not rows.mode:
            return winner(values, ids, times)
        aims = [_aim(params.target, *state.current) for params, state in _pairs(rows)]
        best = values.amax(1)
        drops = (values - best[:, None]).double()
        p = drops.exp_() * (ONE / row_total(values).clamp_min(1).double())[:, None]
        aim = torch.tensor(aims, dtype=torch.float64, device=rows.device)
        away = (p - aim[:, None]).abs_() / WIDTH
        bent = PEAK - SHARPNESS * away.square() / (1.0 + away)
        tokens = winner(bent.masked_fill(values == -torch.inf, -torch.inf), ids, times)
        note(rows, tokens, p.masked_fill(ids != tokens[:, None], 0.0).amax(1))
        return tokens


def _pairs(rows: RowView) -> Iterable[tuple[Any, Control[Sums]]]:
    return zip(rows.params, rows.states, strict=True)


def _aim(target: float, weighted: float, count: float) -> float:
    return min(max(2.0 * target - weighted / count, 0.0), 1.0)


@hookimpl
def decodekit_pickers() -> Iterable[type[Picker]]:
    return [AdaptiveP]

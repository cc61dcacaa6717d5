"""Mirostat: cuts and draws so that the surprise of the answer stays near a target (2007.14966).

μ begins at 2 τ. A step keeps tokens by μ, draws one of them by its probability, and with S = -log2
of that token's probability among the kept ones: μ <- μ - η (S - τ).

* mode 2 keeps the tokens with -log2 p_i <= μ, and always the best.
* mode 1 fits a power law to the m = 100 best, with t_i = ln((i + 2) / (i + 1)), b_i = ln(p_i /
  p_(i+1)), s = sum t b / sum t**2 and ε = s - 1, and keeps the max(k, 1) best, k = (ε 2**μ / (1 -
  V**-ε))**(1/s). At s = 1 the quotient is 2**μ / ln V, its limit.

Equal to llama.cpp's `mirostat` and `mirostat_v2`, in S as well (another engine takes S before the
renormalisation). Other stages run as usual before it; it stands in the place of another picker only
for the request that asks for it. Below 0, μ leaves the best token. A token that this picker did not
choose leaves μ as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import PickView, Ranking, RowView
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, Picker, StageParams
from ...kernels.ops import ONE
from .control import Control, note
from .flat_race import ranked, winner

FITTED = 100  # m


class Mirostat(Picker):
    """A draw that holds the surprise at a target."""

    name = "mirostat"
    caps = Caps(random=True, stateful=True, carried=True, spec="sequential")

    class Params(StageParams):
        """Version, target surprise in bits, and learning rate."""

        mode: Literal[1, 2] = 2
        tau: float = Field(default=5.0, gt=0, allow_inf_nan=False)
        eta: float = Field(default=0.1, gt=0, le=1)

    @classmethod
    def structure(cls, params: Any) -> int:
        return int(params.mode)

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def open(self, params: Any, prompt: Sequence[int]) -> Control[float]:
        tau, eta = params.tau, params.eta
        return Control(2.0 * tau, lambda mu, surprise: mu - eta * (surprise - tau))

    def accept(self, state: Control[float], tokens: Sequence[int]) -> None:
        state.accept(tokens)

    def rollback(self, state: Control[float], count: int) -> None:
        state.rollback(count)

    def fork(self, state: Control[float]) -> Control[float]:
        return state.fork()

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        mus = [state.current for state in rows.states]
        mu = torch.tensor(mus, dtype=torch.float64, device=rows.device)
        ranking = ranked(view)
        keep = _by_fit if rows.mode == 1 else _by_surprise
        kept = ranking.keep(keep(ranking, mu, view.vocab_size))
        tokens = winner(kept.values, kept.ids, rows.exponential(kept.ids))
        note(rows, tokens, _surprise(kept, tokens))
        return tokens


def _by_surprise(ranking: Ranking, mu: Tensor, vocab_size: int) -> Tensor:
    """Version 2: bool [rows, n]."""
    drops = (ranking.values[:, :1] - ranking.values).double() / math.log(2.0)
    surprise = drops + (ranking.total.clamp_min(1).double() / ONE).log2()[:, None]
    return ((surprise <= mu[:, None]) | (ranking.ranks == 0)) & ranking.alive


def _by_fit(ranking: Ranking, mu: Tensor, vocab_size: int) -> Tensor:
    """Version 1: bool [rows, n]."""
    best = ranking.values[:, :FITTED].double()
    alive = ranking.alive[:, 1 : best.shape[1]]
    places = torch.arange(1, best.shape[1], device=best.device, dtype=torch.float64)
    steps = ((places + 1) / places).log() * alive
    falls = (best[:, :-1] - best[:, 1:]).masked_fill(~alive, 0.0)
    # cumsum adds one after the other, so that the length of the list is nothing to the sum
    products, squares = (steps * falls).cumsum(1), steps.square().cumsum(1)
    if not products.shape[1]:
        return ranking.alive
    slope = products[:, -1] / squares[:, -1].clamp_min(torch.finfo(torch.float64).tiny)
    excess = slope - 1.0
    size = math.log(max(vocab_size, 2))
    quotient = excess / -torch.expm1(-excess * size)
    quotient = quotient.where(excess.abs() > 1e-9, torch.full_like(excess, 1.0 / size))
    exponent = (quotient.log() + mu * math.log(2.0)) / slope.clamp_min(1e-12)
    width = ranking.values.shape[1]
    count = exponent.clamp_(max=math.log(width + 1.0)).exp_().long().clamp_min_(1)
    return (ranking.ranks < count[:, None]) & ranking.alive


def _surprise(kept: Ranking, tokens: Tensor) -> Tensor:
    """Return -log2 of the chosen tokens' share of the kept mass, float64 [rows]."""
    is_chosen = kept.ids == tokens[:, None]
    value = kept.values.masked_fill(~is_chosen, -torch.inf).amax(1)
    drop = (kept.values[:, 0] - value).double() / math.log(2.0)
    return drop + (kept.total.clamp_min(1).double() / ONE).log2()


@hookimpl
def decodekit_pickers() -> Iterable[type[Picker]]:
    return [Mirostat]

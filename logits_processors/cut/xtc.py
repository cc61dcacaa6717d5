"""Removes the top choices, all but the least likely of them, now and then (XTC).

With S = {i : p_i >= threshold}: if S has two tokens or more, then with probability ρ all of S go
but its least likely member (the highest id among equals). One uniform number decides for each
request and position; it is addressed by the instance's id, so no other stage moves it. If a token
of `protect` would go, or fewer than `min_keep` would stay, nothing goes.

`mode` "draw" is that. "expected" averages the two outcomes instead: with E the mass of what would
go, a token that would go keeps (1 - ρ) p_i, and every other one gets (1 - ρ) p_i + ρ p_i / (1 - E).

A threshold above 0.5 could never find two tokens. From text-generation-webui's `XTCLogitsWarper`;
equal to llama.cpp's `xtc` without `protect`; the expected form is exllamav3's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, StrictInt
from torch import Tensor

from ...core.batch import RowView
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, CutParams, CutStage, Stage
from ...kernels.lang import tl, triton
from ...kernels.ops import ONE, row_total, token_mass
from ..token_ids import Pairs, check_ids, pairs


class Choice(NamedTuple):
    """What XTC would do to each row."""

    goes: Tensor  # bool [rows, vocab]
    total: Tensor  # mass of the row, int64 [rows]


@triton.jit
def keep_all_but_top(
    values: tl.tensor,
    ranks: tl.tensor,
    best: tl.tensor,
    total: tl.tensor,
    fires: tl.tensor,
    threshold: tl.tensor,
    min_keep: tl.tensor,
) -> tl.tensor:
    """Drop the tokens above the threshold but the last of them, where the draw says so."""
    alive = values > float("-inf")
    beside = tl.log(total.to(tl.float64) * threshold.to(tl.float64) / 1099511627776.0)
    is_top = alive & (values.to(tl.float64) >= best.to(tl.float64) + beside)
    num_top = tl.sum(is_top.to(tl.int32), 0)
    goes = is_top & (ranks < num_top - 1)
    stay = tl.sum(alive.to(tl.int32), 0) - tl.sum(goes.to(tl.int32), 0)
    acts = fires.to(tl.int32) * (stay >= min_keep).to(tl.int32)
    return goes.to(tl.int32) * acts == 0


class Xtc(CutStage):
    """Exclude top choices."""

    name = "xtc"
    kernel = {("draw", False): keep_all_but_top}
    caps = Caps(random=True, graph_safe=True, spec="any-history")

    class Params(CutParams):
        """How often, what counts as a top choice, and ids that may not go."""

        probability: float | None = Field(default=None, ge=0, le=1)
        threshold: float = Field(default=0.1, ge=0, le=0.5)
        protect: tuple[StrictInt, ...] = ()
        mode: Literal["draw", "expected"] = "draw"

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        check_ids("xtc.protect", params.protect, ctx.vocab_size)
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.probability

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return False

    @classmethod
    def mode(cls, params: Any) -> tuple[str, bool]:
        return params.mode, bool(params.protect)

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {
            "min_keep": params.min_keep,
            "probability": float(params.probability),
            "threshold": float(params.threshold),
        }

    def transform(self, logits: Tensor, rows: RowView) -> None:
        mode, protects = rows.mode
        choice = _choose(logits, rows, protects)
        if mode == "expected":
            _average(logits, choice, rows)
            return
        lane = torch.zeros(len(rows), 1, dtype=torch.int64, device=logits.device)
        fires = rows.uniform(lane) < rows.column("probability").double()[:, None]
        logits.masked_fill_(choice.goes & fires, -torch.inf)


def _choose(logits: Tensor, rows: RowView, protects: bool) -> Choice:
    best = logits.amax(1)
    total = row_total(logits)
    least_mass = total.double() * rows.column("threshold").double() / ONE  # beside the best token
    least = (best.double() + least_mass.log())[:, None]
    alive = logits > -torch.inf
    is_top = (logits >= least) & alive
    lowest = logits.masked_fill(~is_top, torch.inf).amin(1, keepdim=True)
    ids = torch.arange(logits.shape[1], device=logits.device)
    spared = ids.masked_fill(~(is_top & (logits == lowest)), -1).amax(1, keepdim=True)
    goes = is_top & (ids != spared)
    stay = alive.sum(1) - goes.sum(1)
    is_off = stay < rows.column("min_keep")
    if protects:
        is_off |= _would_lose(goes, rows)
    return Choice(goes & ~is_off[:, None], total)


def _would_lose(goes: Tensor, rows: RowView) -> Tensor:
    """Say for which rows a protected token is among those that would go, bool [rows]."""
    places: Pairs = rows.cached(
        "protect", lambda: pairs([params.protect for params in rows.params], rows.device)
    )
    lost = torch.zeros(len(goes), dtype=torch.int64, device=goes.device)
    return lost.index_add_(0, places.rows, goes[places].long()) > 0


def _average(logits: Tensor, choice: Choice, rows: RowView) -> None:
    """Scale both sides to what they are worth over many draws, in place."""
    rate = rows.column("probability").double()
    mass = token_mass(logits, logits.amax(1))
    rest = choice.total - mass.masked_fill_(~choice.goes, 0).sum(1)
    gone = (1.0 - rate).log()
    stays = (1.0 - rate + rate * choice.total / rest.clamp_min(1)).log()
    logits += torch.where(choice.goes, gone[:, None], stays[:, None]).float()


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [Xtc]

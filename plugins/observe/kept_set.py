"""What the picker could choose from, how much probability that was, and how sure the model was.

* `kept_set`: the ids alive at the pick, {i : l_i > -inf}, whatever chain ran; `kept_mass`: the sum
  of their probabilities before every stage, so that raw log-prob - ln mass is the log-prob within
  the set when the chain only cuts (2512.02556, section 3.1).
* `entropy`: -sum p ln p in nats at the first of the request's `logprobs_mode`s, raw by default.

Ids past the tokenizer count nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.batch import TapView
from ...core.hookspecs import hookimpl
from ...core.logprobs import KeptSets
from ...core.stage import BindContext, Observer, Tap
from .logprobs import known_part, points_of


class KeptSet(Observer):
    """Feeds `kept_set` and `kept_mass`."""

    name = "kept_set"

    class Record(NamedTuple):
        """What one sequence kept so far."""

        sets: KeptSets
        masses: list[float]

    def bind(self, ctx: BindContext) -> int | None:
        return ctx.tokenizer_size if ctx.request.kept_set else None

    def taps(self, order: int) -> frozenset[Tap]:
        return frozenset({Tap.RAW, Tap.FINAL})

    def measure(
        self, order: int, taps: Mapping[Tap, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        alive = known_part(taps[Tap.FINAL], order).logits > -torch.inf
        raw = known_part(taps[Tap.RAW], order).logprobs
        mass = raw.exp().masked_fill_(~alive, 0.0).sum(1).clamp_(max=1.0)
        return {"ids": _listed(alive), "count": alive.sum(1), "mass": mass}

    def open(self, order: int, tokenizer: Any) -> Record:
        return self.Record(KeptSets(), [])

    def record(self, record: Record, token: int, values: Mapping[str, Any]) -> None:
        record.sets.append(values["ids"][: int(values["count"])].tolist())
        record.masses.append(float(values["mass"]))

    def result(self, record: Record) -> Mapping[str, Any]:
        return {"kept_set": record.sets, "kept_mass": record.masses}


class EntropyOrder(NamedTuple):
    """Where the entropy is taken."""

    tap: Tap
    tokenizer_size: int


class Entropy(Observer):
    """Feeds `entropy`."""

    name = "entropy"

    def bind(self, ctx: BindContext) -> EntropyOrder | None:
        if not ctx.request.entropy:
            return None
        return EntropyOrder(points_of(ctx)[0].tap, ctx.tokenizer_size)

    def taps(self, order: EntropyOrder) -> frozenset[Tap]:
        return frozenset({order.tap})

    def measure(
        self, order: EntropyOrder, taps: Mapping[Tap, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        logprobs = known_part(taps[order.tap], order.tokenizer_size).logprobs
        return {"entropy": torch.special.entr(logprobs.exp()).sum(1)}

    def open(self, order: EntropyOrder, tokenizer: Any) -> list[float]:
        return []

    def record(self, record: list[float], token: int, values: Mapping[str, Any]) -> None:
        record.append(float(values["entropy"]))

    def result(self, record: list[float]) -> Mapping[str, Any]:
        return {"entropy": record}


def _listed(alive: Tensor) -> Tensor:
    """Return the places of True in each row, ascending, int64 [rows, most], padded with 0."""
    rows, ids = alive.nonzero(as_tuple=True)
    counts = alive.sum(1)
    starts = counts.cumsum(0) - counts
    places = torch.arange(len(ids), device=alive.device) - starts[rows]
    listed = ids.new_zeros(len(alive), int(counts.max()))
    listed[rows, places] = ids
    return listed


@hookimpl
def decodekit_observers() -> Iterable[Observer]:
    return [KeptSet(), Entropy()]

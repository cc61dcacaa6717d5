"""The sum of a sequence's log-probabilities under what its chain left, for drivers that rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...core.batch import TapView
from ...core.stage import BindContext, Observer, Tap

NAME = "final_score"


class FinalScore(Observer):
    """Keeps the sum; feeds no field. A driver puts it among the observers of its request."""

    name = NAME

    class Record:
        """The sum of one sequence."""

        total = 0.0

    def bind(self, ctx: BindContext) -> int:
        return 0

    def taps(self, order: int) -> frozenset[Tap]:
        return frozenset({Tap.FINAL})

    def measure(
        self, order: int, taps: Mapping[Tap, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        return {"value": taps[Tap.FINAL].logprobs.gather(1, tokens[:, None])[:, 0]}

    def open(self, order: int, tokenizer: Any) -> Record:
        return self.Record()

    def record(self, record: Record, token: int, values: Mapping[str, Any]) -> None:
        record.total += float(values["value"])

    def result(self, record: Record) -> Mapping[str, Any]:
        return {}


FINAL_SCORE = FinalScore()  # one for all requests, so that equal chains share a program

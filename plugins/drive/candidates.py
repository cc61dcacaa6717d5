"""Drivers that draw several candidates and put them in order: best of n, and minimum Bayes risk.

* best_of: `by` says what a candidate is worth. "raw_sum" and "raw_mean": the sum or mean of its
  tokens' log-probabilities before every stage; "final_sum" and "final_mean": after the chain, as
  they were drawn; with `length_penalty` a, a sum is divided by length ** a. A function is given the
  candidate (`text`, `output_ids`, `prompt_ids`, `score`, `mean_logprob`, `finish_reason`) and
  returns a number.
* mbr: a candidate's worth is the mean of its utility against every other candidate (2211.07634):
  "token_f1", the overlap of the two token multisets; "exact", 1 for equal texts; or a function of
  two texts.

Different token sequences come before copies, failed candidates last, and the lower branch wins a
tie. `score` of an output is its worth.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from ...core.driver import Adjusted, Driver, Lane, Ranked
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, StageParams
from .final_score import FINAL_SCORE, NAME

if TYPE_CHECKING:
    from ...core.request_params import RequestParams

MOST = 1024


class Candidates(Driver):
    """Base: `of` sequences, of which the request's `n` best are returned."""

    class Params(StageParams):
        """How many are drawn."""

        of: int = Field(ge=1, le=MOST)

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        request = ctx.request
        if request.n > params.of:
            raise ValidationError(
                f"n must be at most the number of candidates ({params.of}), got {request.n}",
                parameter="n",
                value=request.n,
            )
        if request.greedy and params.of > 1:
            raise ValidationError(
                f"driver {cls.name!r} with of={params.of} needs a temperature above 0, since the "
                "candidates would be equal",
                parameter="temperature",
                value=0,
            )
        return params

    @classmethod
    def width(cls, bound: Any, ctx: BindContext) -> int:
        return int(bound.of)


class BestOf(Candidates):
    """Draws candidates and returns the best by log-probability or by a function."""

    name = "best_of"

    class Params(Candidates.Params):
        """What makes the best; `length_penalty` works on sums."""

        by: Literal["raw_sum", "raw_mean", "final_sum", "final_mean"] | Callable[..., Any] = (
            "raw_sum"
        )
        length_penalty: float = Field(default=0.0, allow_inf_nan=False)

    @classmethod
    def adjust(cls, bound: Any, params: RequestParams) -> Adjusted:
        if bound.by not in ("final_sum", "final_mean"):
            return Adjusted(params)
        observers = (*(params.observers or ()), FINAL_SCORE)
        return Adjusted(dataclasses.replace(params, observers=observers))

    def rank(self, lanes: Sequence[Lane]) -> Ranked:
        return in_order(lanes, self._worth)

    def _worth(self, lane: Lane) -> float:
        by = self.bound.by
        if callable(by):
            return float(by(lane))
        total = lane.record_of(NAME).total if by.startswith("final") else lane.score
        length = max(len(lane.output_ids), 1)
        power = 1.0 if by.endswith("mean") else self.bound.length_penalty
        worth: float = total / length**power
        return worth


class MinimumRisk(Candidates):
    """Draws candidates and returns those most like the others (minimum Bayes risk)."""

    name = "mbr"

    class Params(Candidates.Params):
        """How alike two candidates are; a function is given two texts."""

        utility: Literal["token_f1", "exact"] | Callable[..., Any] = "token_f1"

    def rank(self, lanes: Sequence[Lane]) -> Ranked:
        good = [lane for lane in lanes if lane.finish_reason != "error"]

        def worth(lane: Lane) -> float:
            others = [self._utility(lane, other) for other in good if other is not lane]
            return math.fsum(others) / len(others) if others else 1.0

        return in_order(lanes, worth)

    def _utility(self, own: Lane, other: Lane) -> float:
        utility = self.bound.utility
        if callable(utility):
            return float(utility(own.text.text, other.text.text))
        if utility == "exact":
            return float(list(own.output_ids) == list(other.output_ids))
        return token_f1(own.output_ids, other.output_ids)


def token_f1(one: Sequence[int], other: Sequence[int]) -> float:
    """Return the harmonic mean of precision and recall of two multisets of tokens."""
    if not one or not other:
        return float(len(one) == len(other))
    shared = (Counter(one) & Counter(other)).total()
    return 2 * shared / (len(one) + len(other))


def in_order(
    lanes: Sequence[Lane],
    worth: Callable[[Lane], float],
    fields: Callable[[Lane], Mapping[str, Any]] = lambda lane: {},
) -> Ranked:
    """Rank by worth, best first: copies after different ones, failed ones last, then by branch."""
    worths = [-math.inf if lane.finish_reason == "error" else worth(lane) for lane in lanes]
    order = sorted(
        range(len(lanes)),
        key=lambda i: (lanes[i].finish_reason == "error", -worths[i], lanes[i].branch),
    )
    seen: set[tuple[int, ...]] = set()
    firsts: list[int] = []
    copies: list[int] = []
    for place in order:
        ids = tuple(lanes[place].output_ids)
        (copies if ids in seen else firsts).append(place)
        seen.add(ids)
    ranked = [*firsts, *copies]
    return Ranked(
        ranked, fields=[{"score": worths[place], **fields(lanes[place])} for place in ranked]
    )


@hookimpl
def decodekit_drivers() -> Iterable[type[Driver]]:
    return [BestOf, MinimumRisk]

"""Flags an output whose tokens the model itself held unlikely, by itself or beside recent outputs.

The measure is `mean_logprob`, the mean log-probability of the tokens before every stage. An output
is weak if

* it is below `threshold`, or
* at least `min_samples` outputs were seen before it and it lies more than `deviations` standard
  deviations below the mean of the latest `window` of them: the baseline, one for each model (an
  engine has one) and fed by every output that asks for this observer, `threshold` or not.

Ask with `observers=["confidence"]` or `[{"observer": "confidence", "threshold": -2.0}]`. A weak
output has `low_confidence=True` and the sentence in `low_confidence_reason`; it is counted in
`decodekit:low_confidence` (all that asked in `decodekit:confidence_checked`), and one line of the
log names its request. Outputs that failed or were aborted are not judged. The tokens never change;
which outputs the baseline flags depends on those before it.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from pydantic import Field
from torch import Tensor

from ...core.batch import TapView
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Ending, Observer, StageParams, Tap

log = logging.getLogger("decodekit")

MOST_REMEMBERED = 10_000
JUDGED = ("stop", "length", "repetition")


class Order(NamedTuple):
    """When one request's output is weak."""

    threshold: float | None
    window: int
    min_samples: int
    deviations: float | None


class Record:
    """The judgement of one sequence."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.is_weak: bool | None = None
        self.reason: str | None = None


class Confidence(Observer):
    """Feeds `low_confidence` and `low_confidence_reason`."""

    name = "confidence"

    class Params(StageParams):
        """The absolute threshold (a mean log-prob, so below 0) and the rolling baseline."""

        threshold: float | None = Field(default=None, le=0, allow_inf_nan=False)
        window: int = Field(default=200, ge=2, le=MOST_REMEMBERED)
        min_samples: int = Field(default=20, ge=2)
        deviations: float | None = Field(
            default=2.0, gt=0, allow_inf_nan=False
        )  # None: no baseline

    def __init__(self) -> None:
        self.seen: deque[float] = deque(maxlen=MOST_REMEMBERED)
        self.num_checked = 0
        self.num_weak = 0

    def bind(self, ctx: BindContext) -> Order | None:
        wish = ctx.wish
        if wish is None:
            return None
        return Order(wish.threshold, wish.window, wish.min_samples, wish.deviations)

    def taps(self, order: Order) -> frozenset[Tap]:
        return frozenset()

    def measure(
        self, order: Order, taps: Mapping[Tap, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        return {}

    def open(self, order: Order, tokenizer: Any) -> Record:
        return Record(order)

    def record(self, record: Record, token: int, values: Mapping[str, Any]) -> None:
        """Nothing: the engine keeps the sum."""

    def result(self, record: Record) -> Mapping[str, Any]:
        return {"low_confidence": record.is_weak, "low_confidence_reason": record.reason}

    def finish(self, record: Record, ending: Ending) -> None:
        mean = ending.mean_logprob
        if ending.reason not in JUDGED or mean is None or math.isnan(mean):
            return
        record.reason = self._judge(record.order, mean)
        record.is_weak = record.reason is not None
        self.num_checked += 1
        if mean > -math.inf:
            self.seen.append(mean)
        if record.is_weak:
            self.num_weak += 1
            log.warning(
                "request %s output %d has low confidence: %s",
                ending.request_id,
                ending.index,
                record.reason,
            )

    def metrics(self) -> Mapping[str, int]:
        return {"confidence_checked": self.num_checked, "low_confidence": self.num_weak}

    def _judge(self, order: Order, mean: float) -> str | None:
        """Return why an output of this mean log-prob is weak, or None."""
        if order.threshold is not None and mean < order.threshold:
            return f"mean log-prob {mean:.3f} is below the threshold {order.threshold:g}"
        recent = list(self.seen)[-order.window :]
        if order.deviations is None or len(recent) < order.min_samples:
            return None
        center = math.fsum(recent) / len(recent)
        spread = math.sqrt(math.fsum((each - center) ** 2 for each in recent) / len(recent))
        bound = center - order.deviations * spread
        if mean >= bound:
            return None
        return (
            f"mean log-prob {mean:.3f} is below {bound:.3f}, {order.deviations:g} standard "
            f"deviations under the mean of the last {len(recent)} outputs"
        )


@hookimpl
def decodekit_observers() -> Iterable[Observer]:
    return [Confidence()]

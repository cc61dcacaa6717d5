"""Ends a sequence that the model itself has come to hold unlikely.

`stops=[{"stop": "confidence", "threshold": -3.0, "window": 32}]` ends a sequence with the
stop_reason "confidence" when the mean log-probability, before every stage, of its last `window`
tokens is below `threshold` (after 2508.15260). Not asked before that many tokens exist.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Checker, SequenceView, StageParams, Stop, Verdict


class LowConfidence(Stop):
    """A moving mean of log-probabilities below a threshold."""

    name = "confidence"
    rank = 45

    class Params(StageParams):
        """The threshold (a mean log-prob, so below 0), and how many tokens are looked at."""

        threshold: float = Field(le=0, allow_inf_nan=False)
        window: int = Field(default=32, ge=1, le=4096)

    def bind(self, ctx: BindContext) -> Checker | None:
        wish = ctx.wish
        if wish is None:
            return None
        window, threshold = wish.window, wish.threshold
        verdict = Verdict("stop", "confidence")
        sums: dict[int, list[float]] = {}  # by branch: the score after each token, 0 before all

        def check(sequence: SequenceView) -> Verdict | None:
            count = len(sequence.output_ids)
            known = sums.setdefault(sequence.branch, [0.0])
            del known[count:]  # tokens may have been taken back
            known.append(sequence.score)
            if count < window:
                return None
            return verdict if (known[-1] - known[-1 - window]) / window < threshold else None

        return check


@hookimpl
def decodekit_stops() -> Iterable[Stop]:
    return [LowConfidence()]

"""Fill the rows of several sequences at once.

llguidance has threads of its own for this, which pay from a few rows on; for the other libraries a
plain loop is the fastest below some 64 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core.constraint import Fill, Matcher
from .guidance import GuidanceSteps
from .matching import GatedMatcher

if TYPE_CHECKING:
    from torch import Tensor

THREADED_ROWS = 8  # of llguidance, from which its threads are faster than a loop


class BatchFiller:
    """Fills rows; it holds llguidance's threads, which start when they are first of use."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._executor: Any = None

    def fill(self, matchers: Sequence[tuple[Matcher, int]], bitmask: Tensor) -> list[Fill]:
        """Fill row `row` of `bitmask` for each (matcher, row), in order."""
        together = [pair for pair in matchers if _is_threaded(pair[0])]
        if len(together) < THREADED_ROWS:
            return [matcher.fill(bitmask, row) for matcher, row in matchers]
        words = bitmask.numpy()
        steps = {row: matcher.steps for matcher, row in together}  # type: ignore[attr-defined]
        self._ready().unsafe_compute_mask_ptr(
            [(one.matcher, row) for row, one in steps.items()],
            bitmask.data_ptr(),
            4 * bitmask.shape[1],
            bitmask.shape[0],
        )
        fills = []
        for matcher, row in matchers:
            if row in steps and isinstance(matcher, GatedMatcher):
                fills.append(matcher.settle(bitmask, row, steps[row].settle(words[row])))
            else:
                fills.append(matcher.fill(bitmask, row))
        return fills

    def _ready(self) -> Any:
        if self._executor is None:
            import llguidance

            self._executor = llguidance.LLExecutor(self._threads)
        return self._executor


def _is_threaded(matcher: Matcher) -> bool:
    """Whether llguidance has to compute this mask."""
    if not isinstance(matcher, GatedMatcher) or not matcher.is_open:
        return False
    return isinstance(matcher.steps, GuidanceSteps) and matcher.steps.known() is None

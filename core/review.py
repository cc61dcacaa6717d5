"""The review of a plan: what reviewers find in it becomes notes; it changes nothing else.

Runs when a request is admitted, after its chain came from the planner's cache or was made, so that
a reviewer may look at any field of the request without making chains differ.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from .plan_report import PlanReport
from .stage import Finding, Reviewer

if TYPE_CHECKING:
    from .params import RequestParams

log = logging.getLogger("decodekit")


@dataclass(frozen=True, slots=True)
class Advice:
    """One finding of one reviewer."""

    rule: str  # the reviewer's name
    finding: Finding

    def __str__(self) -> str:
        remedy = f"; {self.finding.remedy}" if self.finding.remedy else ""
        return f"{self.finding.message}{remedy} [{self.rule}]"


class Review:
    """Asks the reviewers of one engine; one that raises is told of once and not asked again."""

    def __init__(self) -> None:
        self._failed: set[Reviewer] = set()

    def advise(
        self, reviewers: Iterable[Reviewer], report: PlanReport, params: RequestParams
    ) -> tuple[Advice, ...]:
        """Return what the reviewers say of this plan, in their order; raises nothing."""
        found: list[Advice] = []
        for reviewer in reviewers:
            if reviewer in self._failed:
                continue
            try:
                findings = [Advice(reviewer.name, item) for item in reviewer.review(report, params)]
            except Exception as error:
                self._failed.add(reviewer)
                log.warning(
                    "the plan reviewer %r failed and is not asked again: %s: %s",
                    reviewer.name,
                    type(error).__name__,
                    error,
                )
            else:
                found += findings
        return tuple(found)


def with_notes(report: PlanReport, params: RequestParams, advice: Iterable[Advice]) -> PlanReport:
    """Return `report` with the porting notes of the request and the advice; itself without any."""
    extra = (*params.notes, *(f"advice: {item}" for item in advice))
    return replace(report, notes=(*report.notes, *extra)) if extra else report

"""What a check found: one outcome a law, each breach one sentence with a small example."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KEPT, BROKEN, SKIPPED = "kept", "broken", "skipped"


class Breach(Exception):
    """A law is broken; carries the sentence and the example."""

    def __init__(self, sentence: str, example: str = "") -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.example = example


class NotTried(Exception):
    """A law does not apply; carries why."""


class ContractError(AssertionError):
    """A plugin breaks the contract; the message is the report's."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one law."""

    law: str
    title: str  # what the law says
    state: str  # "kept" | "broken" | "skipped"
    sentence: str = ""  # of a breach; or why it was not tried
    example: str = ""  # the smallest one found


@dataclass(frozen=True, slots=True)
class Report:
    """The outcomes of every law for one plugin."""

    subject: str
    outcomes: tuple[Outcome, ...]
    num_rows: int = 0  # rows that were run
    microseconds: float | None = None  # a row of 1,009 tokens in a batch of 64, on this machine

    @property
    def ok(self) -> bool:
        """Whether no law is broken."""
        return not self.broken

    @property
    def broken(self) -> tuple[Outcome, ...]:
        """The breaches."""
        return tuple(outcome for outcome in self.outcomes if outcome.state == BROKEN)

    def of(self, law: str) -> Outcome:
        """Return the outcome of one law; KeyError if there is none of that name."""
        for outcome in self.outcomes:
            if outcome.law == law:
                return outcome
        raise KeyError(law)

    def raise_if_broken(self) -> None:
        """Raise ContractError with every breach, if there is one."""
        if self.broken:
            raise ContractError(str(self))

    def __str__(self) -> str:
        kept = sum(outcome.state == KEPT for outcome in self.outcomes)
        if self.ok:
            return f"{self.subject} keeps its contract ({kept} laws, {self.num_rows} rows)"
        lines = [f"{self.subject} breaks {len(self.broken)} of its {kept + len(self.broken)} laws:"]
        for outcome in self.broken:
            lines.append(f"- {outcome.law}: {outcome.sentence}")
            if outcome.example:
                lines.append(f"    example: {outcome.example}")
        return "\n".join(lines)


def merged(subject: str, reports: Sequence[Report]) -> Report:
    """Return one report of several."""
    outcomes = tuple(outcome for report in reports for outcome in report.outcomes)
    return Report(subject, outcomes, sum(report.num_rows for report in reports))

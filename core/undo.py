"""What is kept of a sequence's last tokens while its driver may still take them back.

Those tokens are not told to observers, and not shown. `settle` tells and shows those that are
certain, in their order, so that an observer never has to forget and a stream never unsays anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .blame import blaming

if TYPE_CHECKING:
    from .detokenizer import TextStream
    from .request import Sequence as TokenSequence

Measured = Sequence[tuple[int, Mapping[str, Any]]]


class Step(NamedTuple):
    """One token that may be taken back."""

    measured: Measured  # what observers are to be told, each by its place
    score: float  # of the sequence before the token


class Undo:
    """The unsettled end of one sequence. `shown` is the text of the settled tokens."""

    __slots__ = ("settled", "shown", "steps")

    def __init__(self, text: TextStream) -> None:
        self.settled = 0  # tokens that stay
        self.steps: list[Step] = []  # one for each token after those
        self.shown = text.clone()

    def push(self, measured: Measured, score: float) -> None:
        """Take note of a token that is being written."""
        self.steps.append(Step(measured, score))

    def score_of(self, sequence: TokenSequence) -> float:
        """Return the score of the settled tokens."""
        return self.steps[0].score if self.steps else sequence.score

    def settle(self, sequence: TokenSequence, count: int) -> None:
        """Let the first `count` tokens stay; StageError for what an observer raises."""
        while self.settled < count:
            self.shown.push((sequence.output_ids[self.settled],))
            self._tell(sequence)

    def end(self, sequence: TokenSequence) -> None:
        """Settle all tokens of a sequence that has ended; its own text is the whole one."""
        while self.steps:
            self._tell(sequence)

    def _tell(self, sequence: TokenSequence) -> None:
        """Tell observers of the first token that is not settled, which now is."""
        place = self.settled
        token, step = sequence.output_ids[place], self.steps.pop(0)
        self.settled += 1
        for number, values in step.measured:
            observer = sequence.plan.observers[number][0]
            with blaming(observer.name, "observer", place):
                observer.record(sequence.records[number], token, values)

    def take_back(self, sequence: TokenSequence, keep: int) -> None:
        """Forget the tokens after the first `keep`, in ids, score and text; tell observers."""
        first = keep - self.settled
        gone = self.steps[first:]
        for place, step in reversed(list(enumerate(gone, start=keep))):
            for number, values in step.measured:
                observer = sequence.plan.observers[number][0]
                with blaming(observer.name, "observer", place):
                    observer.taken_back(
                        sequence.records[number], place, sequence.output_ids[place], values
                    )
        sequence.score = gone[0].score
        del self.steps[first:], sequence.output_ids[keep:]
        sequence.text = self.shown.clone()
        sequence.text.push(sequence.output_ids[self.settled :])

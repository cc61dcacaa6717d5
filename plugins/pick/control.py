"""What a picker remembers that steers by its own choices: a value for each position.

The value after a token depends on the probability that the token had, which tokens alone do not
tell. A picker notes its choice; `accept` of that very token moves the value on, and any other token
(a forced end, a text that another chain wrote) leaves it. So the state is carried through a
preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from torch import Tensor

from ...core.batch import RowView

Value = TypeVar("Value")


class Choice(NamedTuple):
    """What was chosen at a position; the tensors are read when the token is accepted."""

    position: int
    row: int
    tokens: Tensor  # int64 [rows]
    figures: Tensor  # float64 [rows], what the update needs


class Control(Generic[Value]):
    """The values of one sequence; `values[t]` steers the choice at position t."""

    __slots__ = ("choice", "update", "values")

    def __init__(self, first: Value, update: Callable[[Value, float], Value]) -> None:
        self.values = [first]
        self.update = update
        self.choice: Choice | None = None

    @property
    def current(self) -> Value:
        """The value that steers the next choice."""
        return self.values[-1]

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on by tokens that were really generated."""
        for token in tokens:
            value = self.current
            choice = self.choice
            if choice is not None and choice.position == len(self.values) - 1:
                if int(choice.tokens[choice.row]) == token:
                    value = self.update(value, float(choice.figures[choice.row]))
            self.values.append(value)

    def rollback(self, count: int) -> None:
        """Take the last `count` tokens back."""
        del self.values[len(self.values) - count :]
        self.choice = None

    def fork(self) -> Control[Value]:
        """Return an independent copy."""
        twin = Control(self.values[0], self.update)
        twin.values = list(self.values)
        twin.choice = self.choice
        return twin


def note(rows: RowView, tokens: Tensor, figures: Tensor) -> None:
    """Tell each row's control what was chosen; a second run of a step overwrites the first."""
    kept = tokens.clone()  # the engine may yet put other tokens in their place
    for row, position in enumerate(rows.host_positions.tolist()):
        rows.states[row].choice = Choice(position, row, kept, figures)

"""Ends a reasoning that has used up its budget: only the next id of the end sequence stays alive.

Over prompt and output together, the reasoning is open if the last start sequence lies after the
last end, and counts the tokens after that start. While it is open with `budget` tokens or more,
l_i = 0 for the next id of `message` + the end sequence and -inf for every other id, also for ids
that were masked. What the last tokens already hold of that sequence is not written again. A start
after the end opens a fresh count. Budget forcing is from 2501.19393; the meaning is that of vLLM's
`thinking_token_budget`, which needs the engine's `reasoning_config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from pydantic import Field, StrictInt
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Kind, Stage, StageParams
from ..token_ids import check_ids

UNLIMITED = -1


class Pattern:
    """Follows how much of an id sequence the last tokens match (Knuth, Morris, Pratt)."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = tuple(ids)
        self._back = [0] * (len(ids) + 1)  # the next shorter match to try
        for length in range(1, len(ids)):
            self._back[length + 1] = self.after(self._back[length], ids[length])

    def __len__(self) -> int:
        return len(self.ids)

    def after(self, length: int, token: int) -> int:
        """Return the length of the match after `token`, given that before it; below the whole."""
        while length and self.ids[length] != token:
            length = self._back[length]
        return length + 1 if self.ids[length] == token else 0


class Mark(NamedTuple):
    """Where a sequence stands; equal marks are one object, so that a long history is cheap."""

    opened: int  # tokens up to the end of the last start sequence; -1 while nothing is open
    start: int  # how much of the start the last tokens match
    closing: int  # how much of the closing marker
    cursor: int  # how much of what is to be written
    is_writing: bool  # the budget ran out and the end is not yet whole


class Rules(NamedTuple):
    """What decides the marks of a request."""

    budget: int
    start: Pattern
    closing: Pattern
    written: Pattern

    def forced(self, mark: Mark, position: int) -> int | None:
        """Return the only id allowed at `position` (tokens before it), or None if all are."""
        spent = mark.opened >= 0 and position - mark.opened >= self.budget
        return self.written.ids[mark.cursor] if spent or mark.is_writing else None

    def after(self, mark: Mark, position: int, token: int, is_output: bool) -> Mark:
        """Return the mark after `token`, which stands at `position`."""
        forced = self.forced(mark, position) if is_output else None
        start = self.start.after(mark.start, token)
        closing = self.closing.after(mark.closing, token)
        cursor = self.written.after(mark.cursor, token)
        is_writing = forced == token and cursor < len(self.written)
        opened = mark.opened
        if cursor == len(self.written):
            cursor = 0
            opened = -1
        if closing == len(self.closing):
            closing = start = 0
            opened = -1
            cursor = cursor if is_writing else 0
        elif start == len(self.start):
            start = closing = cursor = 0
            opened = position + 1
        found = Mark(opened, start, closing, cursor, is_writing)
        return mark if found == mark else found


CLOSED = Mark(-1, 0, 0, 0, False)


class State:
    """The marks of one sequence, one a generated token, so that tokens can be taken back."""

    __slots__ = ("forced", "marks", "num_prompt", "rules")

    def __init__(self, rules: Rules, num_prompt: int, marks: list[Mark]) -> None:
        self.rules = rules
        self.num_prompt = num_prompt
        self.marks = marks  # the first is the prompt's
        self.forced: int | None = None  # the only id allowed next
        self.look()

    def look(self) -> None:
        """Settle which id comes next."""
        position = self.num_prompt + len(self.marks) - 1
        self.forced = self.rules.forced(self.marks[-1], position)


class ThinkingBudget(Stage):
    """At most `budget` tokens of reasoning, then an optional message and the end marker."""

    name = "thinking_budget"
    kind = Kind.FORCE
    fields = {"thinking_token_budget": "budget"}
    caps = Caps(stateful=True, spec="sequential")

    class Params(StageParams):
        """The budget in tokens (-1: unlimited), and a message before the end marker."""

        budget: StrictInt | None = Field(default=None, ge=UNLIMITED)
        message: str | tuple[StrictInt, ...] = ()

    class Bound(StageParams):
        """The budget with the sequences as patterns."""

        rules: Rules

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        if cls.is_identity(params):
            return params
        markers = ctx.reasoning
        if markers is None:
            raise ChainError(
                f"thinking_budget.budget={params.budget} needs to know where reasoning begins and "
                'ends; build the engine with reasoning_config={"reasoning_start_str": ..., '
                '"reasoning_end_str": ...}',
                parameter="thinking_budget.budget",
                value=params.budget,
            )
        written = (*_message_ids(params.message, ctx), *markers.end)
        return cls.Bound(
            rules=Rules(
                budget=params.budget,
                start=Pattern(markers.start),
                closing=Pattern(markers.closing),
                written=Pattern(written),
            )
        )

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return isinstance(params, cls.Params) and params.budget in (None, UNLIMITED)

    def open(self, params: Any, prompt: Sequence[int]) -> State:
        rules: Rules = params.rules
        mark = CLOSED
        begin = _last_place(prompt, rules)
        for position in range(begin, len(prompt)):
            mark = rules.after(mark, position, prompt[position], is_output=False)
        return State(rules, len(prompt), [mark])

    def accept(self, state: State, tokens: Sequence[int]) -> None:
        position = state.num_prompt + len(state.marks) - 1
        for token in tokens:
            state.marks.append(state.rules.after(state.marks[-1], position, token, is_output=True))
            position += 1
        state.look()

    def rollback(self, state: State, count: int) -> None:
        del state.marks[len(state.marks) - count :]
        state.look()

    def fork(self, state: State) -> State:
        return State(state.rules, state.num_prompt, list(state.marks))

    def transform(self, logits: Tensor, rows: RowView) -> None:
        forced = [(row, state.forced) for row, state in enumerate(rows.states)]
        places = [(row, token) for row, token in forced if token is not None]
        if not places:
            return
        at = torch.tensor(places, dtype=torch.int64, device=rows.device)
        logits[at[:, 0]] = -torch.inf
        logits[at[:, 0], at[:, 1]] = 0.0


def _message_ids(message: str | tuple[int, ...], ctx: BindContext) -> Sequence[int]:
    if not isinstance(message, str):
        check_ids("thinking_budget.message", message, ctx.tokenizer_size)
        return message
    if not message:
        return ()
    if ctx.tokenizer is None:
        raise ChainError(
            f"thinking_budget.message is the text {message!r}, but the tokenizer is not loaded; "
            "give token ids",
            parameter="thinking_budget.message",
            value=message,
        )
    ids: list[int] = ctx.tokenizer.encode(message, add_special_tokens=False)
    return ids


def _last_place(prompt: Sequence[int], rules: Rules) -> int:
    """Return a place in the prompt from which the marks come out as if read from its beginning.

    The last start sequence decides everything before it; without one, only a match that is still
    growing at the end does.
    """
    start = rules.start.ids
    end = len(prompt)
    backwards = tuple(prompt[::-1])
    at = -1
    while True:
        try:
            at = backwards.index(start[-1], at + 1)
        except ValueError:
            longest = max(len(rules.start), len(rules.closing), len(rules.written))
            return max(end - longest, 0)
        first = end - at - len(start)
        if first >= 0 and tuple(prompt[first : end - at]) == start:
            return first


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [ThinkingBudget]

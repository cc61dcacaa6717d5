"""What becomes of a row that no token can be drawn from: who broke it, and what its request wants.

A forced token wins over whatever masked it later. Otherwise the request's `on_dead_row` decides:

* "error": the request fails, naming the stage that left no token alive;
* "eos": the end token is chosen;
* "relax": the soft mask that was added last is left out for this token and the row is tried again,
  until a token is alive or nothing is left to leave out. That is the stage that emptied the row,
  or, if that one is hard, the last MASK before it. Hard are what every chain has and a grammar.

Whatever it says, a stage that yields (`min_tokens`) is left out where a hard one such as a grammar
allows only what it bans.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .batch import Rows, RowView
from .blame import fault, stage_error
from .errors import StageError
from .program import Element, Program
from .stage import Kind


class Alone(Protocol):
    """One row with the views of its program's elements."""

    @property
    def program(self) -> Program: ...
    @property
    def rows(self) -> Rows: ...
    @property
    def views(self) -> Mapping[int, RowView]: ...


class Rescued(NamedTuple):
    """A row that has a token after all."""

    token: int | None  # None: to be drawn from `row`
    row: Tensor  # float32 [1, vocab]
    notes: dict[str, str]  # stage instance -> what was done about it


class _Walk(NamedTuple):
    """How far a row came."""

    row: Tensor
    killer: Element | None  # the stage that left no token alive
    error: StageError | None
    forced: int | None  # the token that a FORCE stage left


def rescue(alone: Alone, logits: Tensor) -> Rescued | StageError:
    """Run the chain on one row of `logits` [1, vocab] with a look after each stage."""
    position = int(alone.rows.positions[0])
    broken = _broken_from_the_start(logits.float(), position)
    if broken is not None:
        return broken
    source: Any = alone.rows.sources[0]
    policy, eos = source.request.params.on_dead_row, source.request.plan.eos_id
    left_out: dict[str, str] = {}
    while True:
        walk = _walk(alone, logits, left_out, position)
        if walk.error is not None:
            return walk.error
        if walk.killer is None:
            if left_out:
                return Rescued(None, walk.row, left_out)
            return _blame(alone.program.picker, position, "the row could not be drawn from")
        if walk.forced is not None:
            return _only(walk.forced, walk.row, left_out)
        before = _before(alone.program.elements, walk.killer)
        hard = next((element for element in before if not element.stage.soft), None)
        if walk.killer.stage.yields and hard is not None:
            left_out[walk.killer.instance] = (
                f"{walk.killer.instance!r} was left out where {hard.instance!r} allows only what "
                f"it bans, first at position {position}"
            )
            continue
        if policy == "eos" and eos is not None:
            return _only(eos, walk.row, left_out)
        weakest = _last_soft(alone.program.elements, walk.killer, left_out)
        if policy != "relax" or weakest is None:
            reason = f"it left no token alive{_told(alone, [*before, walk.killer])}"
            return _blame(walk.killer, position, reason)
        left_out[weakest.instance] = (
            f"{weakest.instance!r} was left out where no token stayed alive, "
            f"first at position {position} (on_dead_row='relax')"
        )


def _broken_from_the_start(row: Tensor, position: int) -> StageError | None:
    reason = fault(row)
    if reason is None:
        return None
    what = "the model left no token alive"
    if reason != "dead":
        what = "the model's logits hold NaN or infinity"
    return StageError(what, stage="model", instance="logits", position=position)


def _walk(alone: Alone, logits: Tensor, left_out: Mapping[str, str], position: int) -> _Walk:
    work = logits.float().clone()
    forced: int | None = None
    for element in alone.program.elements:
        if element.instance in left_out:
            continue
        try:
            element.stage.transform(work, alone.views[element.index])
        except Exception as error:
            blame = stage_error(error, element.name, element.instance, position)
            return _Walk(work, None, blame, forced)
        reason = fault(work)
        if reason == "dead":
            return _Walk(work, element, None, forced)
        if reason is not None:
            blame = _blame(element, position, "it left NaN or infinity in the logits")
            return _Walk(work, None, blame, forced)
        if element.stage.kind is Kind.FORCE:
            alive = (work[0] > -torch.inf).nonzero()[:, 0].tolist()
            forced = alive[0] if len(alive) == 1 else forced
    return _Walk(work, None, None, forced)


def _last_soft(
    elements: Iterable[Element], killer: Element, left_out: Mapping[str, str]
) -> Element | None:
    """Return the stage to leave out: the killer itself, or the last soft mask before it."""
    found: Element | None = None
    for element in elements:
        is_soft = element.stage.soft and not element.stage.mandatory
        if is_soft and element.instance not in left_out:
            if element is killer:
                return element
            if element.stage.kind is Kind.MASK:
                found = element
        if element is killer:
            break
    return found


def _before(elements: Iterable[Element], last: Element) -> list[Element]:
    """Return the elements that run before `last`."""
    return list(itertools.takewhile(lambda element: element is not last, elements))


def _told(alone: Alone, elements: Iterable[Element]) -> str:
    """Return what the stages of `elements` say of what they allow, as the end of a sentence."""
    said = ""
    for element in elements:
        try:
            text = element.stage.describe(alone.views[element.index].states[0])
        except Exception:  # the row fails with the reason that it has
            text = ""
        said += f"; {element.instance!r} allows {text}" if text else ""
    return said


def _only(token: int, row: Tensor, notes: dict[str, str]) -> Rescued:
    alone = torch.full_like(row, -torch.inf)
    alone[0, token] = 0.0
    return Rescued(token, alone, notes)


def _blame(element: Element, position: int, reason: str) -> StageError:
    return StageError(reason, stage=element.name, instance=element.instance, position=position)

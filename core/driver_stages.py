"""The stages that drivers bring along: what must not be chosen again, and what must be written.

They stand after the request's own MASKs and FORCEs and keep their states over a preemption, since
no token tells what was taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import RowView
from .draft import Draft
from .driver import Driver
from .stage import BindContext, Caps, Kind, Stage


class Places:
    """What a driver wants at places of one sequence; `now` is the place of the next token."""

    __slots__ = ("at", "now")

    def __init__(self, now: int = 0) -> None:
        self.now = now
        self.at: dict[int, frozenset[int]] = {}

    def here(self) -> frozenset[int]:
        """The tokens noted at the next place."""
        return self.at.get(self.now, frozenset())

    def go(self, count: int) -> None:
        """Go `count` places on, or back."""
        self.now += count

    def forget(self, first: int) -> None:
        """Drop what is noted from place `first` on."""
        self.at = {place: ids for place, ids in self.at.items() if place < first}

    def copy(self) -> Places:
        """Return an independent copy."""
        twin = Places(self.now)
        twin.at = dict(self.at)
        return twin


class _Placed(Stage):
    """A stage whose state is a `Places`."""

    caps = Caps(spec="any-history", stateful=True, carried=True)

    def open(self, params: Any, prompt: Sequence[int]) -> Places:
        return Places()

    def accept(self, state: Places, tokens: Sequence[int]) -> None:
        state.go(len(tokens))

    def fork(self, state: Places) -> Places:
        return state.copy()


class TakenBack(_Placed):
    """Tokens that a driver took back are dead where they stood, unless no other is alive there."""

    name = "taken_back"
    kind = Kind.MASK

    def rollback(self, state: Places, count: int) -> None:
        state.go(-count)
        state.forget(state.now + 1)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row in range(len(rows)):
            banned = rows.states[row].here()
            if not banned:
                continue
            ids = torch.tensor(sorted(banned), device=logits.device)
            left = logits[row].index_fill(0, ids, -torch.inf)
            if bool((left > -torch.inf).any()):
                logits[row] = left


class Injected(_Placed):
    """Tokens that a driver writes are the only ones alive where they are to stand."""

    name = "injected"
    kind = Kind.FORCE

    def rollback(self, state: Places, count: int) -> None:
        state.go(-count)
        state.forget(state.now)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row in range(len(rows)):
            for token in rows.states[row].here():
                logits[row] = -torch.inf
                logits[row, token] = 0.0


def ban(states: Iterable[Any], stages: Sequence[type[Stage]], banned: frozenset[int]) -> None:
    """Note tokens that may not stand at the next place of a sequence."""
    state = _state_of(TakenBack, states, stages)
    state.at[state.now] = state.here() | banned


def write(states: Iterable[Any], stages: Sequence[type[Stage]], tokens: Sequence[int]) -> None:
    """Note tokens that must stand at the next places of a sequence."""
    state = _state_of(Injected, states, stages)
    state.at.update(
        {place: frozenset({token}) for place, token in enumerate(tokens, start=state.now)}
    )


def _state_of(kind: type[Stage], states: Iterable[Any], stages: Sequence[type[Stage]]) -> Places:
    found: Places = next(
        state for state, stage in zip(states, stages, strict=True) if stage is kind
    )
    return found


def own_stages(kind: type[Driver], bound: Any, ctx: BindContext) -> tuple[Stage, ...]:
    """Return the stages that a driver adds to the chain of its request."""
    own = list(kind.stages(bound, ctx))
    if kind.rewinds:
        own.append(TakenBack())
    if kind.injects:
        own.append(Injected())
    return tuple(own)


def with_own(drafts: Sequence[Draft], own: Sequence[Stage]) -> list[Draft]:
    """Put a driver's stages behind the last of the chain's with a kind up to theirs.

    MASKs of the driver so stand after all masks of the request, and FORCEs after both.
    """
    together = list(drafts)
    for stage in own:
        given = {name: getattr(stage.params, name) for name in stage.params.model_fields_set}
        draft = Draft(
            type(stage),
            stage.id or f"driver.{stage.name}",
            given,
            dict.fromkeys(given, "driver"),
            params=stage.params,
        )
        early = [i for i, each in enumerate(together) if each.stage.kind <= stage.kind]
        together.insert(max(early, default=-1) + 1, draft)
    return together

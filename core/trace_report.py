"""Trace: what each stage of a chain did to the distribution, at every position of a sequence.

Values stand by point: before every stage, then after each stage in the order of the chain, so that
a chain of k stages has k + 1 of them. Ids past the tokenizer count nowhere.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .plan_report import PlanStep
from .trace_words import effect_line, explain, position_line

MODEL = "model"  # the first point, and who "removed" a token that was dead before every stage


@dataclass(frozen=True, slots=True)
class StageEffect:
    """What one stage did at one position; probabilities are those of the whole distribution."""

    id: str  # the stage instance
    alive_before: int  # tokens that are not -inf
    alive_after: int
    removed: float  # the probability, before the stage, of the tokens that it set to -inf
    moved: float  # half the sum of absolute changes of probability (total variation)
    entropy_before: float  # nats
    entropy_after: float
    best_before: int | None  # the id in front; None where no token is alive
    best_after: int | None
    seconds: float  # of the stage, on all the rows that ran it together

    @property
    def argmax_changed(self) -> bool:
        """Whether another token is in front than before."""
        return self.best_before != self.best_after

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        values = {name: finite(getattr(self, name)) for name in self.__slots__}
        return {**values, "argmax_changed": self.argmax_changed}


@dataclass(frozen=True, slots=True)
class TokenPath:
    """One token at one position, from point to point."""

    id: int
    text: str
    logits: tuple[float, ...]  # -inf where dead
    probs: tuple[float, ...]  # 0.0 where dead
    ranks: tuple[int | None, ...]  # 1 is the best, equal logits share one; None where dead
    killer: str | None = None  # the stage that set it to -inf, MODEL if none had to

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; -inf becomes None."""
        return {
            "id": self.id,
            "text": self.text,
            "logits": [finite(value) for value in self.logits],
            "probs": [finite(value) for value in self.probs],
            "ranks": list(self.ranks),
            "killer": self.killer,
        }


@dataclass(frozen=True, slots=True)
class TracePosition:
    """One position of a sequence: the effects of the stages, and at level "tokens" the tokens.

    `parent` and `state` place it in a tree of attempts: a sequence that is never taken back is a
    line of "kept" positions, each the child of the one before.
    """

    position: int
    token: int | None  # the chosen id; None where the step failed
    text: str
    effects: tuple[StageEffect, ...]
    alive: int  # before every stage
    entropy: float  # before every stage, nats
    best: int | None  # before every stage
    num_rows: int  # rows that ran the chain together
    tokens: tuple[TokenPath, ...] = ()  # the chosen one first, then by the last probability
    parent: int = -1  # the position that it continues; -1 for the first
    state: str = "kept"  # or "failed", or "rewound": taken back by a driver
    killers: bytes = field(default=b"", repr=False)  # a byte for each id, compressed

    def killer(self, token: int, points: tuple[str, ...]) -> str | None:
        """Return which of `points` set an id to -inf, None if it stayed alive.

        LookupError where the trace has no such id.
        """
        codes = np.frombuffer(zlib.decompress(self.killers), np.uint8) if self.killers else ()
        if not 0 <= token < len(codes):
            raise LookupError(token)
        code = int(codes[token])
        return points[code - 1] if code else None

    def path(self, token: int | None) -> TokenPath | None:
        """Return the path of a token if it was followed."""
        return next((path for path in self.tokens if path.id == token), None)

    @property
    def effect_of(self) -> Mapping[str, StageEffect]:
        """The effects by stage instance."""
        return {effect.id: effect for effect in self.effects}

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "position": self.position,
            "parent": self.parent,
            "state": self.state,
            "token": self.token,
            "text": self.text,
            "alive": self.alive,
            "entropy": finite(self.entropy),
            "best": self.best,
            "num_rows": self.num_rows,
            "effects": [effect.to_dict() for effect in self.effects],
            "tokens": [path.to_dict() for path in self.tokens],
        }


@dataclass(frozen=True, slots=True)
class StageTotal:
    """One stage over all positions."""

    id: str
    alive_before: float  # means over the positions
    alive_after: float
    removed: float
    moved: float
    num_changed: int  # positions at which another token came to the front
    seconds: float  # the sum


@dataclass(frozen=True)
class Trace:
    """The trace of one sequence so far; `print(trace)` shows it, `trace.why(" Paris")` asks it."""

    level: str  # "summary" or "tokens"
    steps: tuple[PlanStep, ...]  # the stages in order, without the picker
    picker: PlanStep
    positions: tuple[TracePosition, ...]
    vocab_size: int  # ids that the tokenizer knows
    top: int = 0  # how many of the best tokens were followed at each point
    error: str | None = None  # why the sequence failed
    notes: tuple[str, ...] = ()
    rewound: tuple[TracePosition, ...] = ()  # taken back by a driver, the newest of a run first
    encode: Callable[[str], list[int]] | None = field(default=None, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[TracePosition]:
        return iter(self.positions)

    def __getitem__(self, position: int) -> TracePosition:
        return self.positions[position]

    @property
    def points(self) -> tuple[str, ...]:
        """The names of the points: "model", then each stage instance."""
        return (MODEL, *(step.id for step in self.steps))

    def step(self, instance: str) -> PlanStep:
        """Return the stage of an instance."""
        return next(step for step in (*self.steps, self.picker) if step.id == instance)

    def why(self, token: str | int, *, position: int | None = None) -> str:
        """Say in one sentence which stage removed a token, or how it won or lost.

        `token` is an id or a text that is one token. Without a `position`, the one counts at which
        the token was most probable before every stage, as far as it was followed. Raises
        ValueError where the trace does not know the token.
        """
        return explain(self, token, position)

    def totals(self) -> list[StageTotal]:
        """Return each stage's means and sums over the positions."""
        totals = []
        for place, step in enumerate(self.steps):
            own = [each.effects[place] for each in self.positions]
            count = max(len(own), 1)
            totals.append(
                StageTotal(
                    step.id,
                    sum(each.alive_before for each in own) / count,
                    sum(each.alive_after for each in own) / count,
                    math.fsum(each.removed for each in own) / count,
                    math.fsum(each.moved for each in own) / count,
                    sum(each.argmax_changed for each in own),
                    math.fsum(each.seconds for each in own),
                )
            )
        return totals

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, fit for JSON."""
        return {
            "level": self.level,
            "points": list(self.points),
            "vocab_size": self.vocab_size,
            "error": self.error,
            "notes": list(self.notes),
            "positions": [position.to_dict() for position in self.positions],
            "rewound": [position.to_dict() for position in self.rewound],
        }

    def __str__(self) -> str:
        lines = [f"trace of {len(self)} positions, level {self.level}"]
        for each in self.positions:
            lines.append(position_line(self, each))
            lines += [f"    {effect_line(self.step(effect.id), effect)}" for effect in each.effects]
        if self.error is not None:
            lines.append(f"failed: {self.error}")
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "encode": None}  # a tokenizer need not be picklable


def finite(value: Any) -> Any:
    """Return `value`, or None in place of a float that JSON has no word for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

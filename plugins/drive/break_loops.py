"""Breaks out of a loop instead of ending there.

A loop is what `repetition_detection` stops at: the last tokens are `min_count` equal blocks of
`min_pattern_size` to `max_pattern_size` tokens. The copies after the first are taken back, and

* the token that began the second copy may not stand there again; and
* with `inject`, that text is written there ("Wait, but");
* with `scope="thinking"`, only loops inside an open reasoning count, and what ends the reasoning is
  written there (the engine needs `reasoning_config`).

After `max_breaks` at one place the request ends with the reason "repetition". Of a stream the last
`max_pattern_size * min_count` tokens are withheld. `suppressed` lists what was taken back.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from ...core.driver import Action, Driver, Finish, Lane, Rewind
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, StageParams, Verdict


class Bound(NamedTuple):
    """The parameters with what is written, in ids."""

    params: Any
    inject: tuple[int, ...]


@dataclass(slots=True)
class Track:
    """What happened in one lane."""

    breaks: dict[int, int] = field(default_factory=dict)  # by place
    settled: int = 0  # tokens that are out, where no loop is cut
    suppressed: list[dict[str, Any]] = field(default_factory=list)


class BreakLoops(Driver):
    """Takes a loop back and goes on another way."""

    name = "break_loops"
    rewinds = True
    injects = True
    streams = True

    class Params(StageParams):
        """What a loop is, and what is done about it."""

        max_pattern_size: int = Field(default=16, ge=1, le=1024)
        min_pattern_size: int = Field(default=1, ge=1)
        min_count: int = Field(default=4, ge=2)
        max_breaks: int = Field(default=5, ge=1)
        inject: str = ""
        scope: Literal["all", "thinking"] = "all"

        @model_validator(mode="after")
        def _fits(self) -> BreakLoops.Params:
            if self.min_pattern_size > self.max_pattern_size:
                raise ValueError("min_pattern_size must be at most max_pattern_size")
            return self

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Bound:
        if params.scope == "thinking":
            if ctx.reasoning is None:
                raise ValidationError(
                    "driver.scope 'thinking' needs an engine that was made with reasoning_config",
                    parameter="driver.scope",
                    value="thinking",
                )
            return Bound(params, ctx.reasoning.end)
        if not params.inject:
            return Bound(params, ())
        if ctx.tokenizer is None:
            raise ValidationError(
                "driver.inject is text, so it needs the tokenizer", parameter="driver.inject"
            )
        return Bound(params, tuple(ctx.tokenizer.encode(params.inject, add_special_tokens=False)))

    def __init__(self, bound: Bound, ctx: BindContext) -> None:
        super().__init__(bound, ctx)
        self.markers = ctx.reasoning if bound.params.scope == "thinking" else None

    def accepted(self, lane: Lane) -> Action | None:
        if lane.ending is not None and lane.ending.reason == "stop":
            return None
        params, output = self.bound.params, lane.output_ids
        size = loop_size(output, params.min_pattern_size, params.max_pattern_size, params.min_count)
        if not size or (self.markers is not None and not self._is_thinking(lane)):
            return None
        track = _track(lane)
        place = max(len(output) - size * (params.min_count - 1), track.settled)
        breaks = track.breaks[place] = track.breaks.get(place, 0) + 1
        if breaks > params.max_breaks:
            return Finish(Verdict("repetition", "repetition_detected"))
        track.breaks = {at: count for at, count in track.breaks.items() if at <= place}
        track.suppressed.append(
            {"token_ids": list(output[place:]), "position": place, "pattern_size": size}
        )
        return Rewind(len(output) - place, frozenset({output[place]}), self.bound.inject)

    def held(self, lane: Lane) -> int:
        params = self.bound.params
        longest: int = params.max_pattern_size * params.min_count
        track, count = _track(lane), len(lane.output_ids)
        track.settled = max(track.settled, count - longest)
        return count - track.settled

    def fields(self, lane: Lane) -> Mapping[str, Any]:
        return {"suppressed": [dict(each) for each in _track(lane).suppressed]}

    def _is_thinking(self, lane: Lane) -> bool:
        """Whether the last start of a reasoning lies after its last end."""
        assert self.markers is not None
        ids = [*lane.prompt_ids, *lane.output_ids]
        return _last(ids, self.markers.start) > _last(ids, self.markers.closing)


def loop_size(output: Sequence[int], shortest: int, longest: int, count: int) -> int:
    """Return the length of the block that the last tokens repeat `count` times, 0 for none."""
    for size in range(shortest, min(longest, len(output) // count) + 1):
        span = size * (count - 1)
        if output[-1] != output[-1 - size]:
            continue
        if output[-span:] == output[-span - size : -size]:
            return size
    return 0


def _last(ids: Sequence[int], wanted: Sequence[int]) -> int:
    size = len(wanted)
    for place in range(len(ids) - size, -1, -1):
        if tuple(ids[place : place + size]) == tuple(wanted):
            return place
    return -1


def _track(lane: Lane) -> Track:
    if lane.note is None:
        lane.note = Track()
    track: Track = lane.note
    return track


@hookimpl
def decodekit_drivers() -> Iterable[type[Driver]]:
    return [BreakLoops]

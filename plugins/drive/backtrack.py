"""Backtracking: banned strings and regexes are taken back when they appear, and written otherwise.

On a match the lane goes back to the token that the match begins in; that token may not stand there
again, nor any that was tried there before, and the chain chooses anew (antislop-sampler;
exllamav3's `banned_strings`). So a phrase is banned without banning the tokens that begin it.

* A string matches wherever it stands in the text, a regex as `re.search` finds it. A regex' match
  counts when a character follows it, or at the end, so that `\\b` and greedy repeats see their end.
* Every other choice may lead to a match too. After `max_retries` at one place, or where no other
  token is alive (a grammar may see to that), the text stands if `on_exhausted` is "allow", and the
  request fails if it is "error".
* Of a stream is withheld what may begin a banned string, now or once what follows is taken back.
  With a regex that is all of it. No match of a regex may be longer than `regex_span`.

`suppressed` of the output lists what was taken back: the text, what matched, the place of the first
token, and whether it was allowed in the end.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import Field, model_validator

from ...core.driver import Action, Driver, Lane, Rewind
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, StageParams


class Match(NamedTuple):
    """A banned piece of text."""

    start: int  # in characters
    text: str
    rule: str  # the string or regex as the request has it


@dataclass(slots=True)
class Track:
    """What is known of one lane."""

    ends: list[int] = field(default_factory=list)  # length of the text after each token
    tried: dict[int, set[int]] = field(default_factory=dict)  # by the place of the token
    allowed: set[int] = field(default_factory=set)  # places at which a match may begin
    suppressed: list[dict[str, Any]] = field(default_factory=list)


class Bound(NamedTuple):
    """The parameters, compiled."""

    params: Any
    strings: tuple[tuple[str, str], ...]  # as looked for, and as given
    regexes: tuple[re.Pattern[str], ...]


class Backtrack(Driver):
    """Takes banned strings and regexes back when they appear, and lets other text be written."""

    name = "backtrack"
    aliases = ("antislop",)
    rewinds = True
    streams = True

    class Params(StageParams):
        """What is banned; `ignore_case` folds case; `regex_span` is in characters."""

        strings: tuple[str, ...] = ()
        regexes: tuple[str, ...] = ()
        ignore_case: bool = True
        max_retries: int = Field(default=20, ge=1)
        on_exhausted: Literal["allow", "error"] = "allow"
        regex_span: int = Field(default=100, ge=1)

        @model_validator(mode="after")
        def _bans_something(self) -> Backtrack.Params:
            if not self.strings and not self.regexes:
                raise ValueError("give strings or regexes, at least one")
            if "" in self.strings or "" in self.regexes:
                raise ValueError("strings and regexes must not be empty")
            return self

    def __init__(self, bound: Bound, ctx: BindContext) -> None:
        super().__init__(bound, ctx)
        self.params = bound.params
        self.longest = max((len(wanted) for wanted, _ in bound.strings), default=0)

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Bound:
        if ctx.tokenizer is None or not ctx.request.detokenize:
            raise ValidationError(
                "driver 'backtrack' reads the text, so it needs the tokenizer and detokenize=True",
                parameter="driver",
            )
        fold = params.ignore_case
        strings = tuple((_fold(text) if fold else text, text) for text in params.strings)
        regexes = []
        for source in params.regexes:
            try:
                pattern = re.compile(source, re.IGNORECASE if fold else 0)
            except re.error as error:
                raise ValidationError(
                    f"driver.regexes has {source!r}, which is no regular expression: {error}",
                    parameter="driver.regexes",
                    value=source,
                ) from None
            if pattern.match(""):
                raise ValidationError(
                    f"driver.regexes has {source!r}, which matches the empty text",
                    parameter="driver.regexes",
                    value=source,
                )
            regexes.append(pattern)
        return Bound(params, strings, tuple(regexes))

    # --- at the step ----------------------------------------------------------------------------

    def accepted(self, lane: Lane) -> Action | None:
        track = _track(lane)
        text: str = lane.text.whole
        before = track.ends[-1] if track.ends else 0
        track.ends.append(max(len(text), before))
        for match in self._matches(text, before, is_last=lane.ending is not None):
            place = bisect_right(track.ends, match.start)
            if place in track.allowed or place >= len(lane.output_ids):
                continue
            action = self._take_back(lane, track, match, place)
            if action is not None:
                return action
        return None

    def _take_back(self, lane: Lane, track: Track, match: Match, place: int) -> Action | None:
        token = lane.output_ids[place]
        tried = track.tried.setdefault(place, set())
        is_stuck = token in tried or len(tried) >= self.params.max_retries
        report = {"text": match.text, "rule": match.rule, "position": place, "allowed": is_stuck}
        if is_stuck:
            if self.params.on_exhausted == "error":
                raise ValueError(
                    f"nothing but {match.text!r} could be written at token {place}, which "
                    f"{match.rule!r} bans ({len(tried)} tokens were tried)"
                )
            track.allowed.add(place)
            track.suppressed.append(report)
            return None
        tried.add(token)
        track.suppressed.append(report)
        del track.ends[place:]
        track.tried = {at: ids for at, ids in track.tried.items() if at <= place}
        track.allowed = {at for at in track.allowed if at < place}
        return Rewind(len(lane.output_ids) - place, frozenset({token}))

    def held(self, lane: Lane) -> int:
        """What may begin a match is withheld, and what may once that is taken back, and so on."""
        ends = _track(lane).ends
        text: str = lane.text.whole
        end, place = len(text), len(ends)
        while True:
            start = end - self._open(text, end)
            first = min(place, bisect_right(ends, start))
            if first == place:
                return len(ends) - place
            place = first
            end = ends[place - 1] if place else 0

    def _open(self, text: str, end: int) -> int:
        """Return how many characters before `end` may belong to a match that goes beyond it."""
        tail = self._folded(text[max(0, end - self.longest) : end])
        found = [_overlap(tail, wanted) for wanted, _ in self.bound.strings]
        if self.bound.regexes:
            found.append(min(end, self.params.regex_span))
        return max(found)

    def fields(self, lane: Lane) -> Mapping[str, Any]:
        return {"suppressed": [dict(each) for each in _track(lane).suppressed]}

    # --- matches --------------------------------------------------------------------------------

    def _matches(self, text: str, before: int, *, is_last: bool) -> Iterable[Match]:
        """Yield what is banned and was completed by the characters from `before` on, in order."""
        found = []
        shift = max(0, before - self.longest)
        tail = self._folded(text[shift:])
        for wanted, given in self.bound.strings:
            at = tail.find(wanted, max(0, before - shift - len(wanted) + 1))
            while at >= 0:
                start = shift + at
                found.append(Match(start, text[start : start + len(wanted)], given))
                at = tail.find(wanted, at + 1)
        first = max(0, before - self.params.regex_span)
        for pattern in self.bound.regexes:
            for match in pattern.finditer(text, first):
                is_settled = match.end() < len(text) or is_last
                if match.end() > match.start() and match.end() >= before and is_settled:
                    found.append(Match(match.start(), match.group(), pattern.pattern))
        return sorted(found)

    def _folded(self, text: str) -> str:
        return _fold(text) if self.params.ignore_case else text


def _fold(text: str) -> str:
    """Fold case, character by character, so that places stay."""
    return "".join([low if len(low := char.lower()) == 1 else char for char in text])


def _overlap(text: str, wanted: str) -> int:
    """Return the length of the longest end of `text` that begins `wanted` and is not all of it."""
    for size in range(min(len(text), len(wanted) - 1), 0, -1):
        if text.endswith(wanted[:size]):
            return size
    return 0


def _track(lane: Lane) -> Track:
    if lane.note is None:
        lane.note = Track()
    track: Track = lane.note
    return track


@hookimpl
def decodekit_drivers() -> Iterable[type[Driver]]:
    return [Backtrack]

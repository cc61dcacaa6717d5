"""Self-consistency: draw several answers, read the result in each, and return the commonest.

Of each candidate the last match of `answer`, a regex, is its vote: the first group, or the whole
match; white space around it is dropped, and case is folded unless `ignore_case` is False. One
without a match has no vote (2203.11171).

The votes are counted in the order of the branches, whichever is finished first. As soon as no other
answer can reach the leader's votes, the rest ends, or never begins, and does not count: the result
is the same in any company, and the winner that of all votes.

The outputs are those of the commonest answer first, each answer's by mean log-probability. `answer`
is what was read, `score` the share of the votes that were counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...core.driver import Driver, Lane, Ranked
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext
from .candidates import Candidates


class Bound(NamedTuple):
    """The parameters, compiled."""

    of: int
    pattern: re.Pattern[str]
    params: Any


class MajorityVote(Candidates):
    """Draws answers and returns the commonest; the rest is not written once the vote is decided."""

    name = "majority_vote"
    aliases = ("self_consistency",)

    class Params(Candidates.Params):
        """Where the answer stands; `early_stop` ends what can change nothing."""

        answer: str = r"(-?\d[\d,]*(?:\.\d+)?)"
        ignore_case: bool = True
        early_stop: bool = True

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Bound:
        super().bind(params, ctx)
        if ctx.tokenizer is None or not ctx.request.detokenize:
            raise ValidationError(
                f"driver {cls.name!r} reads the text, so it needs the tokenizer and "
                "detokenize=True",
                parameter="driver",
            )
        try:
            pattern = re.compile(params.answer, re.IGNORECASE if params.ignore_case else 0)
        except re.error as error:
            raise ValidationError(
                f"driver.answer is {params.answer!r}, which is no regular expression: {error}",
                parameter="driver.answer",
                value=params.answer,
            ) from None
        return Bound(params.of, pattern, params)

    def __init__(self, bound: Bound, ctx: BindContext) -> None:
        super().__init__(bound, ctx)
        self.wanted = ctx.request.n
        self.finished: list[Lane] = []

    def ended(self, lane: Lane, live: Sequence[Lane]) -> Iterable[Lane]:
        self.finished.append(lane)
        in_order = sorted(self.finished, key=_branch)
        certain = [each for place, each in enumerate(in_order) if each.branch == place]
        return live if self._num_counted(certain) is not None else ()

    def rank(self, lanes: Sequence[Lane]) -> Ranked:
        done = [lane for lane in lanes if lane.finish_reason not in ("abort", "error", None)]
        whole = sorted(
            [lane for lane in lanes if lane.finish_reason not in ("abort", None)], key=_branch
        )
        counted = whole[: self._num_counted(whole) or len(whole)]
        answers = {id(lane): self._answer(lane) for lane in counted}
        votes = Counter(answer for answer in answers.values() if answer is not None)
        total = votes.total()

        def key(lane: Lane) -> tuple[Any, ...]:
            answer = answers.get(id(lane))
            mean = lane.mean_logprob
            return (
                id(lane) not in answers,
                -votes[answer] if answer is not None else 0,
                answer or "",
                -(mean if mean is not None else 0.0),
                lane.branch,
            )

        others = [lane for lane in lanes if lane not in done]
        order = [*sorted(done, key=key), *others]

        def fields(lane: Lane) -> dict[str, Any]:
            answer = answers.get(id(lane))
            share = votes[answer] / total if answer is not None else 0.0
            return {"answer": answer, "score": share}

        places = {id(lane): place for place, lane in enumerate(lanes)}
        return Ranked([places[id(lane)] for lane in order], fields=[fields(lane) for lane in order])

    def _num_counted(self, finished: Iterable[Lane]) -> int | None:
        """Return after how many candidates the vote is decided, or None while it is open."""
        if not self.bound.params.early_stop:
            return None
        votes: Counter[str] = Counter()
        for number, lane in enumerate(sorted(finished, key=_branch), start=1):
            answer = self._answer(lane)
            if answer is not None:
                votes[answer] += 1
            best = [count for _, count in votes.most_common(2)] + [0, 0]
            left = self.bound.of - number
            if best[0] > best[1] + left and number >= self.wanted:
                return number
        return None

    def _answer(self, lane: Lane) -> str | None:
        if lane.finish_reason == "error":
            return None
        matches = list(self.bound.pattern.finditer(lane.text.text))
        if not matches:
            return None
        last = matches[-1]
        found = (last.group(1) if self.bound.pattern.groups else last.group()) or ""
        return found.strip().lower() if self.bound.params.ignore_case else found.strip()


def _branch(lane: Lane) -> int:
    return lane.branch


@hookimpl
def decodekit_drivers() -> Iterable[type[Driver]]:
    return [MajorityVote]

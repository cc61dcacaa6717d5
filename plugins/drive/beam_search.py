"""Beam search: keep the best hypotheses by their summed log-probability, and expand them together.

A hypothesis' distribution is its row after the request's own chain, so masks, bans, a grammar,
biases and penalties act on each. The score of a finished one is `sum / length ** length_penalty`;
what counts as its length, and when the search ends, depends on the profile:

* "default": the generated tokens without the end token;
* "vllm": prompt and generated tokens without the end token, penalties ignored;
* "transformers": the generated tokens with the end token; the chain runs on log-probabilities and
  the scores are not renormalised after it; only candidates among the `width` best may finish.

`early_stopping` None goes on until no beam is left; False stops when the best beam cannot beat the
worst finished one at its present length; "never" assumes the longest length where the penalty is
positive; True stops as soon as `width` have finished. Ties: the lower beam, then the lower id.

Sources: Sutskever et al. 2014 (1409.3215), Wu et al. 2016 (1609.08144), and the two systems. With
`groups`, beams of later groups pay `diversity` for each time an earlier group chose the token at
this step (Vijayakumar et al. 2016, 1610.02424). With `stochastic`, beams are a sample without
replacement by Gumbel-top-k (Kool et al. 2019, 1903.06059); with `sample`, the candidates of a step
are drawn without replacement by the probabilities of the hypotheses that they make.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.driver import Adjusted, Driver, Lane, Move, Ranked, Round
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, StageParams, Verdict

if TYPE_CHECKING:
    from ...core.request_params import RequestParams

CUTS = ("temperature", "top_k", "top_p", "min_p")
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
PURPOSE = "beam_search"


class Hypothesis(NamedTuple):
    """A lane's note: its score so far, and its perturbed score under `stochastic`."""

    total: float  # sum of log-probabilities
    gumbel: float = 0.0
    group: int = 0  # -1: of none yet


class BeamSearch(Driver):
    """Beam search, its sampled, stochastic and diverse forms."""

    name = "beam_search"
    aliases = ("beam",)
    chooses = True
    forks = True

    class Params(StageParams):
        """`width` beams; `profile` says whose rules hold."""

        width: int = Field(ge=1)
        length_penalty: float = Field(default=1.0, allow_inf_nan=False)
        early_stopping: bool | Literal["never"] | None = None
        profile: Literal["default", "vllm", "transformers"] = "default"
        sample: bool = False
        stochastic: bool = False
        groups: int = Field(default=1, ge=1)
        diversity: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
        strict: bool = False  # refuse fields that have no effect, instead of a warning

        @model_validator(mode="after")
        def _fits(self) -> BeamSearch.Params:
            if self.width % self.groups:
                raise ValueError(f"groups must divide width ({self.width}), got {self.groups}")
            if self.sample + self.stochastic + (self.groups > 1) > 1:
                raise ValueError("sample, stochastic and groups exclude each other")
            return self

    def __init__(self, bound: Params, ctx: BindContext) -> None:
        super().__init__(bound, ctx)
        request = ctx.request
        self.ends = _end_ids(ctx)
        self.prompt_len = ctx.prompt_len
        limit = ctx.max_model_len - ctx.prompt_len
        self.most = min(limit, request.max_tokens or limit)
        self.finished: list[float] = []  # scores, the best `width` of them

    @classmethod
    def of_fields(cls, params: RequestParams) -> Mapping[str, object] | None:
        if not params.use_beam_search:
            return None
        profile = params.profile if params.profile in ("vllm", "transformers") else "default"
        return {
            "width": params.best_of,
            "length_penalty": params.length_penalty,
            "early_stopping": params.early_stopping,
            "profile": profile,
        }

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        request = ctx.request
        if request.n > params.width:
            raise ValidationError(
                f"n must be at most the beam width ({params.width}), got {request.n}",
                parameter="n",
                value=request.n,
            )
        ignored = cls.adjust(params, request).ignored
        if params.strict and ignored:
            raise ValidationError(
                f"{', '.join(ignored)} must be unset with driver beam_search, where they have no "
                "effect (strict=True)",
                parameter=ignored[0],
                value=getattr(request, ignored[0]),
            )
        return params

    @classmethod
    def width(cls, bound: Any, ctx: BindContext) -> int:
        return int(bound.width)

    @classmethod
    def adjust(cls, bound: Any, params: RequestParams) -> Adjusted:
        """Leave the flat cuts out of the beams' chain, unless beams are drawn or it is explicit."""
        idle: list[str] = []
        is_drawn = bound.sample or bound.stochastic
        if params.chain is None and not is_drawn:
            idle += [name for name in CUTS if getattr(params, name) is not None]
        if params.chain is None and bound.profile == "vllm":
            idle += [name for name in PENALTIES if getattr(params, name) is not None]
        values: dict[str, Any] = dict.fromkeys(idle)
        if params.chain is None and not is_drawn:
            values["greedy"] = True  # nothing is drawn, so no noise is made
            idle += [name for name in params.idle_cuts if name not in idle]
        return Adjusted(
            dataclasses.replace(params, **values),
            ignored=tuple(idle),
            on_logprobs=bound.profile == "transformers" and bound.width > 1,  # one beam is greedy
        )

    # --- a round ----------------------------------------------------------------------------------

    def advance(self, round: Round) -> Sequence[Move]:
        notes = [lane.note or Hypothesis(0.0, group=-1) for lane in round.lanes]
        is_plain = self.bound.profile == "transformers"
        logprobs = round.logits if is_plain else round.logprobs()
        if self._is_over(notes, len(round.lanes[0].output_ids)):
            return ()
        if self.bound.groups > 1:
            return self._grouped(round, notes, logprobs)
        totals = torch.tensor([note.total for note in notes], device=logprobs.device)
        scores = totals[:, None] + logprobs
        if self.bound.stochastic:
            ranking = self._perturbed(round, notes, logprobs)
        elif self.bound.sample:
            ids = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
            ranking = scores - round.exponential(PURPOSE, ids).log()  # Gumbel-top-k: no replacement
        else:
            ranking = scores
        found = self._best(ranking, self._num_candidates(len(round.lanes)))
        if self.bound.sample and not self.bound.stochastic:
            found.sort(key=lambda place: (-float(scores[place]), place))
        return self._moves(round, notes, found, scores, ranking)

    def _num_candidates(self, num_lanes: int) -> int:
        """How many candidates are looked at over all beams, so that `width` go on."""
        width = self.bound.width
        if self.bound.early_stopping is None:  # each beam's own best 2 * width
            return int(2 * width * num_lanes)
        return int(max(2, 1 + len(self.ends)) * width)

    def _best(self, ranking: Tensor, count: int) -> list[tuple[int, int]]:
        """Return the places (lane, token) of the best alive candidates, best first."""
        width = min(self._per_lane(count), ranking.shape[1])
        values, ids = ranking.topk(width, 1)
        listed: list[tuple[float, int, int]] = []
        for lane, (row, tokens) in enumerate(zip(values.tolist(), ids.tolist(), strict=True)):
            bound = row[-1]
            listed += [(-value, lane, token) for value, token in zip(row, tokens, strict=True)
                       if value > -math.inf]  # fmt: skip
            if width < ranking.shape[1] and bound > -math.inf:  # ties at the end: lower ids first
                equal = (ranking[lane] == bound).nonzero()[:, 0].tolist()
                known = {token for value, token in zip(row, tokens, strict=True) if value == bound}
                listed += [(-bound, lane, token) for token in equal if token not in known]
        listed.sort()
        if self.bound.early_stopping is None:
            listed = _own_best(listed, 2 * self.bound.width)
        return [(lane, token) for _, lane, token in listed[:count]]

    def _per_lane(self, count: int) -> int:
        return int(2 * self.bound.width) if self.bound.early_stopping is None else count

    def _moves(
        self,
        round: Round,
        notes: Sequence[Hypothesis],
        found: Sequence[tuple[int, int]],
        scores: Tensor,
        ranking: Tensor,
        *,
        group: int = 0,
        room: int | None = None,
    ) -> list[Move]:
        """Let candidates that end finish, and the best others go on."""
        room = self.bound.width if room is None else room
        moves: list[Move] = []
        length = len(round.lanes[0].output_ids) + 1
        is_like_transformers = self.bound.profile == "transformers"
        is_last = is_like_transformers and length >= self.most
        num_going = 0
        for rank, (lane, token) in enumerate(found):
            total = float(scores[lane, token])
            gumbel = float(ranking[lane, token]) if self.bound.stochastic else 0.0
            note = Hypothesis(total, gumbel, group)
            ends = token in self.ends
            if ends or is_last:
                if is_like_transformers and rank >= self.bound.width:
                    continue  # only the best may finish there; the others are a reserve
                self._keep(self._score(total, length, ends))
                moves.append(Move(lane, token, note, ends=True))
            elif num_going < room:
                num_going += 1
                moves.append(Move(lane, token, note))
        return moves

    def _grouped(self, round: Round, notes: Sequence[Hypothesis], logprobs: Tensor) -> list[Move]:
        """One group after the other, each paying for what the earlier ones chose."""
        groups = self.bound.groups
        size = self.bound.width // groups
        chosen = torch.zeros(logprobs.shape[1], device=logprobs.device)
        moves: list[Move] = []
        for group in range(groups):
            mine = [place for place, note in enumerate(notes) if note.group in (-1, group)]
            if not mine:
                continue
            totals = torch.tensor([notes[place].total for place in mine], device=logprobs.device)
            scores = totals[:, None] + logprobs[mine]
            ranking = scores - self.bound.diversity * chosen
            found = self._best(ranking, 2 * size * len(mine))
            own = [
                move._replace(parent=mine[move.parent])
                for move in self._moves(
                    round, notes, found, scores, ranking, group=group, room=size
                )
            ]
            for move in own:
                chosen[move.token] += not move.ends
            moves += own
        return moves

    def _perturbed(self, round: Round, notes: Sequence[Hypothesis], logprobs: Tensor) -> Tensor:
        """Gumbels of the children, given that their largest is the parent's (Kool et al., 2019)."""
        ids = torch.arange(logprobs.shape[1], device=logprobs.device).expand_as(logprobs)
        totals = torch.tensor([note.total for note in notes], device=logprobs.device)
        own = (totals[:, None] + logprobs).double() - round.exponential(PURPOSE, ids).log()
        parents = torch.tensor(
            [note.gumbel if note.group >= 0 else 0.0 for note in notes],
            dtype=torch.float64,
            device=logprobs.device,
        )[:, None]
        largest = own.amax(1, keepdim=True)
        inner = parents - own + torch.log1p(-torch.exp(own - largest))
        return parents - inner.clamp_min(0) - torch.log1p(torch.exp(-inner.abs()))

    # --- scores and the end ---------------------------------------------------------------------

    def _score(self, total: float, length: int, ends: bool) -> float:
        """`sum / length ** penalty` by the profile's rule; `length` counts the token that ends."""
        profile = self.bound.profile
        counted = length - (ends and profile != "transformers")
        if profile == "vllm":
            counted += self.prompt_len
        return float(total / max(counted, 1) ** self.bound.length_penalty)

    def _keep(self, score: float) -> None:
        self.finished = sorted([*self.finished, score], reverse=True)[: self.bound.width]

    def _is_over(self, notes: Sequence[Hypothesis], length: int) -> bool:
        """Whether no live beam can get among the finished ones any more."""
        stopping = self.bound.early_stopping
        if stopping is None or len(self.finished) < self.bound.width:
            return False
        if stopping is True:
            return True
        longest = stopping == "never" and self.bound.length_penalty > 0
        assumed = self.most if longest else length
        best = self._score(max(note.total for note in notes), assumed, False)
        return bool(best <= self.finished[-1])

    def leftover(self, lane: Lane) -> Verdict | None:
        """Beams that are live when the search ends early are dropped."""
        return None

    def rank(self, lanes: Sequence[Lane]) -> Ranked:
        """Order by score; the sampled forms too, the stochastic one by its perturbed score."""
        scored = []
        for place, lane in enumerate(lanes):
            note: Hypothesis = lane.note or Hypothesis(0.0)
            ends = bool(lane.output_ids) and lane.output_ids[-1] in self.ends
            score = self._score(note.total, len(lane.output_ids), ends)
            key = note.gumbel if self.bound.stochastic else score
            scored.append((-key, place, score, note.total))
        scored.sort()
        return Ranked(
            [place for _, place, _, _ in scored],
            fields=[
                {"cumulative_logprob": total, "beam_score": score} for _, _, score, total in scored
            ],
        )


def _end_ids(ctx: BindContext) -> frozenset[int]:
    """Ids that end a hypothesis: the model's, unless they are ignored, and the request's own."""
    request = ctx.request
    ends = set(request.stop_token_ids)
    if not request.ignore_eos:
        ends.update(ctx.eos_ids)
    return frozenset(ends)


def _own_best(listed: Iterable[tuple[float, int, int]], count: int) -> list[tuple[float, int, int]]:
    """Keep the `count` best of each lane, of a list in order."""
    taken: dict[int, int] = {}
    kept = []
    for item in listed:
        lane = item[1]
        if taken.get(lane, 0) < count:
            taken[lane] = taken.get(lane, 0) + 1
            kept.append(item)
    return kept


@hookimpl
def decodekit_drivers() -> Iterable[type[Driver]]:
    return [BeamSearch]

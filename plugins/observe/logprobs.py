"""Log-probabilities of the chosen tokens and of the best alternatives at each position.

A request asks with `logprobs` (0: the chosen token alone, n: the n best beside it, -1: the whole
vocabulary), with `logprob_token_ids` (these ids at every position), or both. `logprobs_mode` names
the tap (raw, masked, final) and whether log-probs or logits are reported; of several modes the
first feeds `logprobs`, the others `logprobs_at`. An entry lists the chosen token, then the best by
rank, then the ids that were asked for. Ranks are 1 + the number of larger values, so ties share a
rank; they are listed by id. Ids past the tokenizer count nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.batch import TapView
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.logprobs import FlatLogprobs, Logprob
from ...core.sampling_rules import LOGPROBS_MODES
from ...core.stage import BindContext, Observer, Tap

NUM_CONTEXT = 8  # tokens before a token that its text may need: characters of several tokens

Values = Mapping[str, NDArray[Any]]


class Point(NamedTuple):
    """One log-probs mode."""

    mode: str  # as the request spelled it
    tap: Tap
    is_logit: bool  # report logits, not log-probs


class Order(NamedTuple):
    """What one request wants to know."""

    points: tuple[Point, ...]
    num_best: int  # how many alternatives
    ids: tuple[int, ...]  # reported at every position
    tokenizer_size: int
    is_flat: bool


class TokenTexts(Protocol):
    """What a tokenizer does for us."""

    def decoded_tokens(self, ids: Sequence[int], context_ids: Sequence[int]) -> list[str]:
        """Return the text of each of `ids` as the next token after `context_ids`."""
        ...


class Record:
    """The log-probs of one sequence; positions are turned into objects when they are read."""

    def __init__(self, order: Order, texts: TokenTexts | None) -> None:
        self.order = order
        self.texts = texts
        self.cumulative = 0.0
        self.tokens: list[int] = []
        self.pending: list[Values] = []  # those of the last tokens
        self.entries: list[list[dict[int, Logprob]] | FlatLogprobs] = [  # one list a point
            FlatLogprobs() if order.is_flat else [] for _ in order.points
        ]


class Logprobs(Observer):
    """Feeds `logprobs`, `logprobs_at` and `cumulative_logprob`."""

    name = "logprobs"

    def bind(self, ctx: BindContext) -> Order | None:
        count, ids = ctx.request.logprobs, ctx.request.logprob_token_ids or ()
        if count is None and not ids:
            return None
        if count == -1:
            count = ctx.tokenizer_size
        for token in ids:
            if token >= ctx.tokenizer_size:
                raise ValidationError(
                    f"logprob_token_ids must be made of token ids in [0, {ctx.tokenizer_size}), "
                    f"got {token}",
                    parameter="logprob_token_ids",
                    value=token,
                )
        return Order(
            points=points_of(ctx),
            num_best=min(count or 0, ctx.tokenizer_size),
            ids=tuple(dict.fromkeys(ids)),
            tokenizer_size=ctx.tokenizer_size,
            is_flat=ctx.request.flat_logprobs,
        )

    def taps(self, order: Order) -> frozenset[Tap]:
        return frozenset(point.tap for point in order.points)

    def measure(
        self, order: Order, taps: Mapping[Tap, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        measured: dict[str, Tensor] = {}
        known = {tap: known_part(view, order.tokenizer_size) for tap, view in taps.items()}
        for number, point in enumerate(order.points):
            own = _measure_point(order, point, known[point.tap], tokens)
            measured.update({f"{number}.{name}": value for name, value in own.items()})
        return measured

    def open(self, order: Order, tokenizer: TokenTexts | None) -> Record:
        return Record(order, tokenizer)

    def record(self, record: Record, token: int, values: Values) -> None:
        record.tokens.append(token)
        record.pending.append(values)
        record.cumulative += float(values["0.value"])

    def result(self, record: Record) -> Mapping[str, Any]:
        first = len(record.tokens) - len(record.pending)
        for place, values in enumerate(record.pending, first):
            _append(record, place, values)
        record.pending.clear()
        # The lists go on growing; the engine hands out copies of a part of them.
        first_list, *others = record.entries
        fields: dict[str, Any] = {
            "logprobs": first_list,
            "cumulative_logprob": record.cumulative,
        }
        if others:
            modes = [point.mode for point in record.order.points[1:]]
            fields["logprobs_at"] = dict(zip(modes, others, strict=True))
        return fields


def points_of(ctx: BindContext) -> tuple[Point, ...]:
    """Return the modes that a request asks for, or the engine's."""
    modes = ctx.request.logprobs_mode or (ctx.logprobs_mode,)
    found = [(mode, *LOGPROBS_MODES[mode]) for mode in modes]
    return tuple(Point(mode, Tap(tap), values == "logits") for mode, tap, values in found)


def known_part(view: TapView, tokenizer_size: int) -> TapView:
    """Return a view without the ids past the tokenizer."""
    if tokenizer_size >= view.logits.shape[1]:
        return view
    return TapView(view.logits[:, :tokenizer_size])


def _measure_point(
    order: Order, point: Point, tap: TapView, tokens: Tensor
) -> Mapping[str, Tensor]:
    values = tap.logits if point.is_logit else tap.logprobs
    measured = {"value": values.gather(1, tokens[:, None])[:, 0], "rank": tap.rank(tokens)}
    if order.num_best:
        best = tap.top(order.num_best)
        measured["ids"] = best.ids
        measured["values"] = values.gather(1, best.ids)
        measured["ranks"] = _shared_ranks(best.values)
    if order.ids:
        asked = torch.tensor(order.ids, device=tokens.device).expand(len(tokens), -1)
        measured["asked_values"] = values.gather(1, asked)
        measured["asked_ranks"] = torch.stack([tap.rank(column) for column in asked.T], 1)
    return measured


def _shared_ranks(values: Tensor) -> Tensor:
    """Return the rank of each of descending `values` [rows, n], equal ones sharing the first's."""
    ranks = torch.arange(1, values.shape[1] + 1, device=values.device).repeat(len(values), 1)
    ranks[:, 1:].masked_fill_(values[:, 1:] == values[:, :-1], 0)
    return ranks.cummax(1).values


def _append(record: Record, place: int, values: Values) -> None:
    """Add a position to the list of each point."""
    context = record.tokens[max(0, place - NUM_CONTEXT) : place]
    for number, entries in enumerate(record.entries):
        ids, scores, ranks = _position(record, number, record.tokens[place], values)
        texts: Sequence[str | None] = [None] * len(ids)
        if record.texts is not None:
            texts = record.texts.decoded_tokens(ids, context)
        if isinstance(entries, FlatLogprobs):
            entries.append_fast(ids, scores, ranks, texts)
        else:
            entries.append(dict(zip(ids, map(Logprob, scores, ranks, texts), strict=True)))


def _position(
    record: Record, number: int, token: int, values: Values
) -> tuple[list[int], list[float], list[int]]:
    """Return ids, values and ranks: the chosen token, the best by rank, those asked for."""
    ids = [token]
    scores = [float(values[f"{number}.value"])]
    ranks = [int(values[f"{number}.rank"])]
    if record.order.num_best:
        best = values[f"{number}.ids"]
        others = best != token
        ids += best[others].tolist()
        scores += values[f"{number}.values"][others].tolist()
        ranks += values[f"{number}.ranks"][others].tolist()
    if record.order.ids:
        listed = set(ids)
        asked = values[f"{number}.asked_values"].tolist()
        asked_ranks = values[f"{number}.asked_ranks"].tolist()
        for other, score, rank in zip(record.order.ids, asked, asked_ranks, strict=True):
            if other not in listed:
                ids.append(other)
                scores.append(score)
                ranks.append(rank)
    return ids, scores, ranks


@hookimpl
def decodekit_observers() -> Iterable[Observer]:
    return [Logprobs()]

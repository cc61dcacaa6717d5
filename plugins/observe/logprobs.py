"""Log-probabilities of the chosen tokens and of the best alternatives at each position.

A request asks with `logprobs` (0: the chosen token alone, n: the n best beside it, -1: the whole
vocabulary). `logprobs_mode` names the tap (raw, masked, final) and whether log-probs or logits are
reported. Ranks are 1 + the number of larger values, so ties share a rank; they are listed by id.
Ids past the tokenizer count nowhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from ...core.batch import TapView
from ...core.hookspecs import hookimpl
from ...core.logprobs import FlatLogprobs, Logprob
from ...core.sampling_rules import LOGPROBS_MODES
from ...core.stage import BindContext, Observer, Tap

NUM_CONTEXT = 8  # tokens before a token that its text may need: characters of several tokens

Values = Mapping[str, NDArray[Any]]


class Order(NamedTuple):
    """What one request wants to know."""

    tap: Tap
    is_logit: bool  # report logits, not log-probs
    num_best: int  # how many alternatives
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
        self.entries: list[dict[int, Logprob]] | FlatLogprobs = (
            FlatLogprobs() if order.is_flat else []
        )


class Logprobs(Observer):
    """Feeds `logprobs` and `cumulative_logprob`."""

    name = "logprobs"

    def bind(self, ctx: BindContext) -> Order | None:
        count = ctx.request.logprobs
        if count is None:
            return None
        if count == -1:
            count = ctx.tokenizer_size
        modes = ctx.request.logprobs_mode or (ctx.logprobs_mode,)
        tap, values = LOGPROBS_MODES[modes[0]]
        return Order(
            tap=Tap(tap),
            is_logit=values == "logits",
            num_best=min(count, ctx.tokenizer_size),
            tokenizer_size=ctx.tokenizer_size,
            is_flat=ctx.request.flat_logprobs,
        )

    def taps(self, order: Order) -> frozenset[Tap]:
        return frozenset({order.tap})

    def measure(
        self, order: Order, taps: Mapping[Tap, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        tap = taps[order.tap]
        if order.tokenizer_size < tap.logits.shape[1]:
            tap = TapView(tap.logits[:, : order.tokenizer_size])
        values = tap.logits if order.is_logit else tap.logprobs
        measured = {
            "value": values.gather(1, tokens[:, None])[:, 0],
            "rank": tap.rank(tokens),
        }
        if order.num_best:
            best = tap.top(order.num_best)
            measured["ids"] = best.ids
            measured["values"] = values.gather(1, best.ids)
            measured["ranks"] = _shared_ranks(best.values)
        return measured

    def open(self, order: Order, tokenizer: TokenTexts | None) -> Record:
        return Record(order, tokenizer)

    def record(self, record: Record, token: int, values: Values) -> None:
        record.tokens.append(token)
        record.pending.append(values)
        record.cumulative += float(values["value"])

    def result(self, record: Record) -> Mapping[str, Any]:
        first = len(record.tokens) - len(record.pending)
        for place, values in enumerate(record.pending, first):
            _append(record, place, values)
        record.pending.clear()
        # The list goes on growing; the engine hands out copies of a part of it.
        return {"logprobs": record.entries, "cumulative_logprob": record.cumulative}


def _shared_ranks(values: Tensor) -> Tensor:
    """Return the rank of each of descending `values` [rows, n], equal ones sharing the first's."""
    ranks = torch.arange(1, values.shape[1] + 1, device=values.device).repeat(len(values), 1)
    ranks[:, 1:].masked_fill_(values[:, 1:] == values[:, :-1], 0)
    return ranks.cummax(1).values


def _append(record: Record, place: int, values: Values) -> None:
    """Add a position: the chosen token first, then the others by rank."""
    token = record.tokens[place]
    ids, scores, ranks = [token], [float(values["value"])], [int(values["rank"])]
    if record.order.num_best:
        others = values["ids"] != token
        ids += values["ids"][others].tolist()
        scores += values["values"][others].tolist()
        ranks += values["ranks"][others].tolist()
    texts: Sequence[str | None] = [None] * len(ids)
    if record.texts is not None:
        texts = record.texts.decoded_tokens(ids, record.tokens[max(0, place - NUM_CONTEXT) : place])
    if isinstance(record.entries, FlatLogprobs):
        record.entries.append_fast(ids, scores, ranks, texts)
    else:
        entries = map(Logprob, scores, ranks, texts)
        record.entries.append(dict(zip(ids, entries, strict=True)))


@hookimpl
def decodekit_observers() -> Iterable[Observer]:
    return [Logprobs()]

"""What each stage of the chain did, at every position: the field `trace` of a request.

* "summary": for each stage the tokens alive before and after it, the probability that it removed
  and moved, the entropy (nats), whether another token came to the front, and its time;
* "tokens": besides, for the chosen token, the best ones at each point and those asked for, the
  logit, probability and rank after each stage, and for every id the stage that set it to -inf.

`observers=[{"observer": "trace", "level": "tokens", "top": 20, "watch": [" Paris"]}]` sets how many
of the best tokens are followed and names more of them, by text or id. A traced request runs its
stages one by one on whole rows, with the same tokens; requests beside it run as ever.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import TapView
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.plan_report import PlanReport, PlanStep
from ...core.stage import After, BindContext, Ending, Observer, Point, StageParams, Tap
from ...core.trace_report import MODEL, StageEffect, TokenPath, Trace, TracePosition
from .logprobs import NUM_CONTEXT, known_part

DEFAULT_TOP = 12
MOST_FOLLOWED = 256
Values = Mapping[str, Any]


class Order(NamedTuple):
    """How much one request wants to know."""

    level: str
    top: int  # how many of the best tokens are followed at each point
    watch: tuple[int, ...]  # ids that are followed at every position
    tokenizer_size: int


class TokenTexts(Protocol):
    """What a tokenizer does for us."""

    def decoded_tokens(self, ids: Sequence[int], context_ids: Sequence[int]) -> list[str]:
        """Return the text of each of `ids` as the next token after `context_ids`."""
        ...

    def ids(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        ...


class Record:
    """The trace of one sequence."""

    def __init__(self, order: Order, texts: TokenTexts | None) -> None:
        self.order = order
        self.texts = texts
        self.steps: tuple[PlanStep, ...] = ()
        self.tokens: list[int] = []
        self.positions: list[TracePosition] = []
        self.rewound: list[TracePosition] = []
        self.error: str | None = None

    @property
    def points(self) -> tuple[str, ...]:
        """The names of the points, the picker left out."""
        return (MODEL, *(step.id for step in self.steps[:-1]))


class TraceObserver(Observer):
    """Feeds `trace`."""

    name = "trace"

    class Params(StageParams):
        """The level, and which tokens are followed besides the chosen one."""

        level: Literal["summary", "tokens"] = "tokens"
        top: int = Field(default=DEFAULT_TOP, ge=1, le=MOST_FOLLOWED)
        watch: tuple[int | str, ...] = Field(default=(), max_length=MOST_FOLLOWED)

    def bind(self, ctx: BindContext) -> Order | None:
        wish, level = ctx.wish, ctx.request.trace
        if wish is None and level == "off":
            return None
        if wish is None:
            return Order(level, DEFAULT_TOP, (), ctx.tokenizer_size)
        level = wish.level if level != "tokens" else level
        watch = tuple(dict.fromkeys(_watched_id(item, ctx) for item in wish.watch))
        return Order(level, wish.top, watch, ctx.tokenizer_size)

    def taps(self, order: Order) -> frozenset[Point]:
        return frozenset({Tap.RAW, Tap.EACH})

    def measure(
        self, order: Order, taps: Mapping[Point, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        seen = [taps[Tap.RAW], *(view for point, view in taps.items() if isinstance(point, After))]
        views = [known_part(view, order.tokenizer_size) for view in seen]
        measured = _summary(views)
        passed = torch.tensor([view.seconds for view in seen[1:]], dtype=torch.float64)
        measured["seconds"] = passed.expand(len(tokens), -1)
        measured["num_rows"] = torch.full((len(tokens),), len(tokens))
        if order.level == "tokens":
            measured |= _paths(views, _followed(order, views, tokens), measured["totals"])
            measured["killers"] = _killers(views)
        return measured

    def open(self, order: Order, tokenizer: TokenTexts | None) -> Record:
        return Record(order, tokenizer)

    def planned(self, record: Record, plan: PlanReport) -> None:
        record.steps = plan.order

    def record(self, record: Record, token: int, values: Values) -> None:
        record.positions.append(_position(record, token, values))
        record.tokens.append(token)

    def taken_back(self, record: Record, position: int, token: int, values: Values) -> None:
        made = _position(record, token, values)
        record.rewound.append(
            replace(made, position=position, parent=position - 1, state="rewound")
        )

    def failed(self, record: Record, values: Values) -> None:
        record.positions.append(_position(record, None, values))

    def result(self, record: Record) -> Mapping[str, Any]:
        *steps, picker = record.steps
        trace = Trace(
            level=record.order.level,
            steps=tuple(steps),
            picker=picker,
            positions=tuple(record.positions),
            rewound=tuple(record.rewound),
            vocab_size=record.order.tokenizer_size,
            top=record.order.top,
            error=record.error,
            encode=record.texts.ids if record.texts is not None else None,
        )
        return {"trace": trace}

    def finish(self, record: Record, ending: Ending) -> None:
        record.error = ending.error
        del record.positions[ending.num_tokens + 1 :]
        if len(record.tokens) > ending.num_tokens:  # chosen, and then the sequence failed
            record.positions.pop()


def _watched_id(item: int | str, ctx: BindContext) -> int:
    """Return the id that a request wants to follow; ValidationError if it is none."""
    if isinstance(item, str):
        if ctx.tokenizer is None:
            raise ValidationError(
                f"watch has the text {item!r}, but the tokenizer is off; give token ids",
                parameter="observers",
                value=item,
            )
        ids = ctx.tokenizer.encode(item, add_special_tokens=False)
        if len(ids) != 1:
            raise ValidationError(
                f"watch has the text {item!r}, which is {len(ids)} tokens "
                f"({', '.join(map(str, ids))}); each must be one",
                parameter="observers",
                value=item,
            )
        return int(ids[0])
    if not 0 <= item < ctx.tokenizer_size:
        raise ValidationError(
            f"watch must be made of token ids in [0, {ctx.tokenizer_size}), got {item}",
            parameter="observers",
            value=item,
        )
    return item


# --- on the device --------------------------------------------------------------------------------


def _summary(views: Sequence[TapView]) -> dict[str, Tensor]:
    """Measure every point [rows, points] and the step between two [rows, points - 1]."""
    found: dict[str, list[Tensor]] = {}
    changes: dict[str, list[Tensor]] = {"removed": [], "moved": []}
    before: Tensor | None = None
    for view in views:
        logits = view.logits
        total = torch.logsumexp(logits, 1)
        probs = _probs(logits, total[:, None])
        alive = logits > -torch.inf
        count = alive.sum(1)
        best = view.top(1).ids[:, 0].masked_fill(count == 0, -1)
        entropy = torch.special.entr(probs).sum(1)
        values = {"alive": count, "entropy": entropy, "best": best, "totals": total}
        for name, value in values.items():
            found.setdefault(name, []).append(value)
        if before is not None:
            changes["removed"].append(before.masked_fill(alive, 0.0).sum(1).clamp(max=1.0))
            changes["moved"].append(((probs - before).abs().sum(1) / 2).clamp(max=1.0))
        before = probs
    stacked = {name: torch.stack(values, 1) for name, values in found.items()}
    rows = views[0].logits.shape[0]
    none = stacked["entropy"].new_empty(rows, 0)
    for name, steps in changes.items():
        stacked[name] = torch.stack(steps, 1) if steps else none
    return stacked


def _probs(logits: Tensor, total: Tensor) -> Tensor:
    """Return probabilities, all 0 in a row that no token is alive in."""
    return (logits - total.masked_fill(torch.isneginf(total), 0.0)).exp_()


def _followed(order: Order, views: Sequence[TapView], tokens: Tensor) -> Tensor:
    """Return the ids to follow, int64 [rows, n] with repeats: chosen, asked for, best anywhere."""
    chosen = tokens.clamp(0, order.tokenizer_size - 1)[:, None]
    asked = torch.tensor(order.watch, dtype=torch.int64, device=tokens.device)
    best = [view.top(order.top) for view in views]
    alive = [torch.where(each.alive, each.ids, chosen) for each in best]
    return torch.cat([chosen, asked.expand(len(tokens), -1), *alive], 1)


def _paths(views: Sequence[TapView], ids: Tensor, totals: Tensor) -> dict[str, Tensor]:
    """Return logit, probability and rank (0: dead) of `ids` [rows, n] at p points [rows, n, p]."""
    logits, probs, ranks = [], [], []
    for place, view in enumerate(views):
        own = view.logits.gather(1, ids)
        ascending = view.logits.sort(1).values
        larger = ascending.shape[1] - torch.searchsorted(ascending, own, right=True)
        logits.append(own)
        probs.append(_probs(own, totals[:, place, None]))
        ranks.append((larger + 1).masked_fill(torch.isneginf(own), 0))
    return {
        "ids": ids,
        "logits": torch.stack(logits, 2),
        "probs": torch.stack(probs, 2),
        "ranks": torch.stack(ranks, 2),
    }


def _killers(views: Sequence[TapView]) -> Tensor:
    """Say of each id since which point it is dead: 0 alive, else 1 + the point; uint8 [rows, V].

    A forced token may be alive again after it died.
    """
    codes = torch.zeros_like(views[0].logits, dtype=torch.uint8)
    for place, view in enumerate(views):
        dead = view.logits == -torch.inf
        codes.masked_fill_(dead & (codes == 0), place + 1).masked_fill_(~dead, 0)
    return codes


# --- on the host ----------------------------------------------------------------------------------


def _position(record: Record, token: int | None, values: Values) -> TracePosition:
    place = len(record.positions)
    alive, entropy, best = (values[name].tolist() for name in ("alive", "entropy", "best"))
    best = [None if each < 0 else each for each in best]
    removed, moved, seconds = (values[name].tolist() for name in ("removed", "moved", "seconds"))
    effects = tuple(
        StageEffect(
            step.id, alive[i], alive[i + 1], removed[i], moved[i], entropy[i], entropy[i + 1],
            best[i], best[i + 1], seconds[i],
        )
        for i, step in enumerate(record.steps[:-1])
    )  # fmt: skip
    paths = _token_paths(record, token, values) if "ids" in values else ()
    text = ""
    if token is not None:
        text = paths[0].text if paths else _texts(record, [token])[0]
    return TracePosition(
        position=place,
        token=token,
        text=text,
        effects=effects,
        alive=alive[0],
        entropy=entropy[0],
        best=best[0],
        num_rows=int(values["num_rows"]),
        tokens=paths,
        parent=place - 1,
        state="kept" if token is not None else "failed",
        killers=zlib.compress(values["killers"].tobytes(), 1) if "killers" in values else b"",
    )


def _token_paths(record: Record, token: int | None, values: Values) -> tuple[TokenPath, ...]:
    """Make the paths of the followed tokens: the chosen one, then by their last probability."""
    ids: list[int] = values["ids"].tolist()
    places = list({number: place for place, number in reversed(list(enumerate(ids)))}.values())
    if token is None:  # what stands first was not chosen
        places = [place for place in places if place or ids.count(ids[0]) > 1]
    probs = values["probs"]
    places.sort(key=lambda i: (ids[i] != token, -float(probs[i, -1]), -float(probs[i, 0]), ids[i]))
    texts = _texts(record, [ids[place] for place in places])
    points = record.points
    paths = []
    for place, text in zip(places, texts, strict=True):
        ranks = [rank or None for rank in values["ranks"][place].tolist()]
        last = max((i for i, rank in enumerate(ranks) if rank is not None), default=-1)
        paths.append(
            TokenPath(
                id=ids[place],
                text=text,
                logits=tuple(values["logits"][place].tolist()),
                probs=tuple(probs[place].tolist()),
                ranks=tuple(ranks),
                killer=points[last + 1] if last + 1 < len(points) else None,
            )
        )
    return tuple(paths)


def _texts(record: Record, ids: Sequence[int]) -> list[str]:
    if record.texts is None:
        return [""] * len(ids)
    return record.texts.decoded_tokens(ids, record.tokens[-NUM_CONTEXT:])


@hookimpl
def decodekit_observers() -> Iterable[Observer]:
    return [TraceObserver()]

"""Keeps only tokens that the request's grammar allows: l_i = -inf for every other id i.

First of the masks, so that all that comes after it sees legal tokens only. The mask of a sequence
is filled as soon as its last token is known, beside the forward pass; the grammar itself is
compiled beside other requests, and the request waits for it without holding them up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from pydantic import field_validator
from torch import Tensor

from ..core.batch import RowView
from ..core.constraint import FillState
from ..core.errors import ValidationError
from ..core.hookspecs import hookimpl
from ..core.stage import BindContext, Caps, Form, Kind, Stage, StageParams, Written
from ..core.structured_params import StructuredOutputsParams, structured_outputs
from .answer import Reader
from .bits import mask_rows
from .choosing import said
from .compiler import Ticket
from .follow import Follower, Rules
from .programs import programs_of


class Grammar(Stage):
    """Only what the constraint allows; it wins over everything but a forced token."""

    name = "grammar"
    kind = Kind.MASK
    form = Form.ELEMENTWISE
    soft = False
    fields = {"structured_outputs": "constraint"}
    caps = Caps(stateful=True, spec="sequential")

    class Params(StageParams):
        """What the output must look like."""

        constraint: StructuredOutputsParams | None = None

        @field_validator("constraint", mode="before")
        @classmethod
        def _normal(cls, value: Any) -> Any:
            return structured_outputs(value)

    class Bound(StageParams):
        """The same with its program, compiled or on the way."""

        rules: Any  # follow.Rules
        reader: Any  # answer.Reader
        ticket: Any  # compiler.Ticket

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        wanted: StructuredOutputsParams | None = params.constraint
        if wanted is None:
            return params
        tokenizer = ctx.tokenizer
        if tokenizer is None:
            raise ValidationError(
                "structured_outputs needs the tokenizer, which is off (skip_tokenizer_init)",
                parameter="structured_outputs",
            )
        programs = programs_of(ctx)
        spec, ticket = programs.order(wanted, ctx.constraint_backends)
        config = ctx.structured_outputs_config
        waits = ctx.reasoning is not None and not (config and config.enable_in_reasoning)
        rules = Rules(
            program=ticket.future.result,
            label=lambda: f"{spec.kind}, {ticket.backend}",
            vocab_size=ctx.vocab_size,
            stop_ids=tuple(ctx.stop_ids),
            decode=partial(tokenizer.decode, skip_special_tokens=False),
            shown=partial(tokenizer.decode, skip_special_tokens=ctx.request.skip_special_tokens),
            filler=programs.filler,
            penalties=programs.penalties if ctx.device.type == "cpu" else None,
            markers=ctx.reasoning if waits else None,
        )
        return cls.Bound(rules=rules, reader=Reader(wanted, spec, ticket), ticket=ticket)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return isinstance(params, cls.Params) and params.constraint is None

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    @classmethod
    def pending(cls, params: Any) -> Future[Any] | None:
        future: Future[Any] | None = params.ticket.future
        return future

    @classmethod
    def remarks(cls, params: Any) -> Sequence[str]:
        if cls.is_identity(params):
            return ()
        ticket: Ticket = params.ticket
        if not ticket.approximate:
            return (f"grammar: {params.rules.label()}, exact", *ticket.notes)
        places = "; ".join(map(said, ticket.approximate))
        return (
            f"grammar: {params.rules.label()}, approximate (strict=False): {places}; the finished "
            "text is checked",
            *ticket.notes,
        )

    def open(self, params: Any, prompt: Sequence[int]) -> Follower:
        return Follower.opened(params.rules, prompt)

    def accept(self, state: Follower, tokens: Sequence[int]) -> None:
        state.accept(tokens)

    def rollback(self, state: Follower, count: int) -> None:
        state.rollback(count)

    def fork(self, state: Follower) -> Follower:
        return state.fork()

    @classmethod
    def ended(cls, state: Follower) -> bool:
        return state.is_over

    @classmethod
    def describe(cls, state: Follower) -> str:
        return state.describe()

    @classmethod
    def result(cls, params: Any, state: Follower, written: Written) -> Mapping[str, Any]:
        reader: Reader = params.reader
        text = written.text
        start = state.answer_start
        if start:
            text = text.removeprefix(state.rules.shown(written.token_ids[:start]))
        if written.finish_reason is None:
            return reader.growing(text) if state.has_begun else {}
        if not state.has_begun:
            return {
                "complete": False,
                "parse_error": "the sequence ended before its reasoning did, so nothing was "
                "constrained",
            }
        stopped = isinstance(written.stop_reason, str)
        complete = state.is_whole and not stopped and written.finish_reason != "error"
        cut_by = None if complete else _cut_by(written)
        return reader.finished(text, complete=complete, cut_by=cut_by)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        uploads: list[tuple[int, Follower]] = []
        for row, follower in enumerate(rows.states):
            state = follower.mask()
            if state is FillState.FREE:
                continue
            if state is FillState.DEAD:
                logits[row] = -torch.inf
            elif follower.rules.penalties is not None:
                logits[row].add_(follower.penalty)
            else:
                uploads.append((row, follower))
        if uploads:
            places = [row for row, _ in uploads]
            mask_rows(logits, places, [follower.words for _, follower in uploads])


def _cut_by(written: Written) -> str:
    """Say what ended a text before its grammar did."""
    if isinstance(written.stop_reason, str):
        return f"the text was cut at the stop string {written.stop_reason!r}"
    if written.finish_reason == "length":
        return f"the text was cut after {len(written.token_ids)} tokens"
    return f"the text was cut (finish_reason {written.finish_reason!r})"


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [Grammar]

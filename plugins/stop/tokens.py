"""The stops that look at token ids and counts, in the order in which they are asked.

1. eos: the tokenizer's own end id; no stop_reason.
2. stop_ids: the caller's stop ids and the other end ids of the model; the id is the stop_reason.
3. length: `max_tokens` or the context is used up; asked even before `min_tokens`.

`ignore_eos` switches the model's end ids off, not those that the caller listed.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Checker, SequenceView, Stop, Verdict


class EndOfSequence(Stop):
    """The tokenizer's end id."""

    name = "eos"
    rank = 10

    def bind(self, ctx: BindContext) -> Checker | None:
        if ctx.request.ignore_eos or not ctx.eos_ids:
            return None
        eos = ctx.eos_ids[0]
        verdict = Verdict("stop")

        def check(sequence: SequenceView) -> Verdict | None:
            return verdict if sequence.output_ids[-1] == eos else None

        return check


class StopIds(Stop):
    """Ids that the caller or the model's generation config named."""

    name = "stop_ids"
    rank = 20

    def bind(self, ctx: BindContext) -> Checker | None:
        ids = set(ctx.request.stop_token_ids)
        if not ctx.request.ignore_eos:
            ids.update(ctx.eos_ids[1:])
        if not ids:
            return None

        def check(sequence: SequenceView) -> Verdict | None:
            token = sequence.output_ids[-1]
            return Verdict("stop", token) if token in ids else None

        return check


class Length(Stop):
    """`max_tokens` generated tokens, or a full context."""

    name = "length"
    rank = 30
    respects_min_tokens = False

    def bind(self, ctx: BindContext) -> Checker | None:
        limit = ctx.max_model_len - ctx.prompt_len
        if ctx.request.max_tokens is not None:
            limit = min(limit, ctx.request.max_tokens)
        verdict = Verdict("length")

        def check(sequence: SequenceView) -> Verdict | None:
            return verdict if len(sequence.output_ids) >= limit else None

        return check


@hookimpl
def decodekit_stops() -> Iterable[Stop]:
    return [EndOfSequence(), StopIds(), Length()]

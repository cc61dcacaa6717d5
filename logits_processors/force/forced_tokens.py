"""Forces how an answer begins and ends.

* prefix: at position t below its length, l of prefix[t] = 0 and -inf for every other id.
* eos_at_end: at the last position that the request may use, l = 0 for every end id of the model and
  -inf for the rest, also where that position lies in the prefix.

A forced id that was masked comes back, as FORCE stages may do. Equal to transformers'
`ForcedBOSTokenLogitsProcessor` (a prefix of one token) and `ForcedEOSTokenLogitsProcessor`. The
last position is that of `max_tokens` or of the context, whichever comes first; with one token
allowed it is the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import StrictInt
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Kind, Stage, StageParams
from ..token_ids import check_ids, pairs


class ForcedTokens(Stage):
    """A given beginning, and an end in time."""

    name = "forced_tokens"
    kind = Kind.FORCE
    caps = Caps(spec="any-history")

    class Params(StageParams):
        """The first tokens, as a text or as ids, and whether the last one must end the answer."""

        prefix: str | tuple[StrictInt, ...] = ()
        eos_at_end: bool = False

    class Bound(StageParams):
        """In ids; `end` is the position of the end ids, or -1."""

        prefix: tuple[int, ...]
        end: int
        end_ids: tuple[int, ...]

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        prefix = tuple(_prefix_ids(params.prefix, ctx))
        end_ids = tuple(sorted({token for token in ctx.eos_ids if 0 <= token < ctx.vocab_size}))
        if params.eos_at_end and not end_ids:
            raise ChainError(
                "forced_tokens.eos_at_end needs an end token, and the model has none",
                parameter="forced_tokens.eos_at_end",
                value=True,
            )
        end = _last_position(ctx) if params.eos_at_end else -1
        return cls.Bound(prefix=prefix, end=end, end_ids=end_ids)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        if isinstance(params, cls.Bound):
            return not params.prefix and params.end < 0
        return not params.prefix and not params.eos_at_end

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        positions = rows.host_positions.tolist()
        allowed = [
            _allowed(params, position)
            for params, position in zip(rows.params, positions, strict=True)
        ]
        forced = [row for row, ids in enumerate(allowed) if ids]
        if forced:
            logits[torch.tensor(forced, device=rows.device)] = -torch.inf
            logits[pairs(allowed, rows.device)] = 0.0


def _allowed(params: Any, position: int) -> tuple[int, ...]:
    """Return the only ids allowed at `position`, or nothing if all are."""
    if position == params.end:
        ids: tuple[int, ...] = params.end_ids
        return ids
    return tuple(params.prefix[position : position + 1])


def _prefix_ids(prefix: str | tuple[int, ...], ctx: BindContext) -> Sequence[int]:
    if not isinstance(prefix, str):
        check_ids("forced_tokens.prefix", prefix, ctx.tokenizer_size)
        return prefix
    if prefix and ctx.tokenizer is None:
        raise ChainError(
            f"forced_tokens.prefix is the text {prefix!r}, but the tokenizer is not loaded; "
            "give token ids",
            parameter="forced_tokens.prefix",
            value=prefix,
        )
    ids: list[int] = ctx.tokenizer.encode(prefix, add_special_tokens=False) if prefix else []
    return ids


def _last_position(ctx: BindContext) -> int:
    most = ctx.max_model_len - len(ctx.prompt_ids)
    asked = getattr(ctx.request, "max_tokens", None)
    return max(most if asked is None else min(asked, most), 1) - 1


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [ForcedTokens]

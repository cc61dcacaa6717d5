"""No n-gram twice: l_c = -inf if the last n - 1 tokens and then c already stand in the history.

The history is prompt and output. `window` looks at its last tokens only; `scope` "prompt" bans the
n-grams of the prompt alone, whatever was generated ("encoder" n-grams elsewhere). Tokens of
`whitelist` are never banned. The suffix that is being continued does not ban its own successor. n =
1 bans every token that occurred, which empties a small vocabulary. Equal to transformers'
`NoRepeatNGramLogitsProcessor` and `EncoderNoRepeatNGramLogitsProcessor`.

Compares the suffix with every place of the history at once; one pass on the host for each row.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, StrictInt
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Kind, Stage, StageParams
from ..history import History, HistoryStage, Tokens
from ..token_ids import check_ids, pairs


class NoRepeatNGram(HistoryStage):
    """No sequence of n tokens occurs again."""

    name = "no_repeat_ngram"
    kind = Kind.MASK
    caps = Caps(stateful=True, spec="sequential")

    class Params(StageParams):
        """The length, how far back it looks, and what is exempt."""

        n: StrictInt | None = Field(default=None, ge=1)
        window: StrictInt | None = Field(default=None, ge=1)
        whitelist: tuple[StrictInt, ...] = ()
        scope: Literal["both", "prompt"] = "both"

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        check_ids("no_repeat_ngram.whitelist", params.whitelist, ctx.vocab_size)
        if params.n is not None and params.window is not None and params.window < params.n:
            raise ChainError(
                f"no_repeat_ngram.window must be at least n={params.n}, got {params.window}",
                parameter="no_repeat_ngram.window",
                value=params.window,
            )
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.n is None

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        banned = [
            repeats(state, params, rows.vocab_size)
            for state, params in zip(rows.states, rows.params, strict=True)
        ]
        if any(banned):
            logits[pairs(banned, rows.device)] = -torch.inf


def repeats(history: History, params: Any, vocab_size: int) -> list[int]:
    """Return the tokens that would end a repeated n-gram."""
    tokens = history.tokens
    rest = params.n - 1
    suffix = tokens[len(tokens) - rest :]
    searched: Tokens = tokens
    if params.window is not None:
        searched = tokens[-params.window :]
    if params.scope == "prompt":
        start = len(tokens) - len(searched)
        searched = searched[: max(history.num_prompt - start, 0)]
    places = len(searched) - rest  # n-grams
    if places <= 0 or len(suffix) < rest:
        return []
    matches = np.ones(places, dtype=bool)
    for offset, token in enumerate(suffix):
        matches &= searched[offset : offset + places] == token
    found = np.unique(searched[rest:][matches])
    if params.whitelist:
        found = found[~np.isin(found, params.whitelist)]
    banned: list[int] = found[found < vocab_size].tolist()
    return banned


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [NoRepeatNGram]

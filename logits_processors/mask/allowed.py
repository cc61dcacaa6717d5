"""Allow-lists and deny-lists of token ids.

* allowed_tokens: l_i = -inf for every i that is not in the list.
* suppress_tokens: l_i = -inf for every i in the list, at every step or at the first one only.

The meaning is that of vLLM's `allowed_token_ids` and of transformers'
`SuppressTokens(AtBegin)LogitsProcessor`. A masked token that is on the allow-list stays masked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from pydantic import Field, StrictInt
from torch import Tensor

from ...core.batch import RowView
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Stage, StageParams
from ..token_ids import Pairs, bans, check_ids, pairs


class AllowedTokens(Stage):
    """Only the listed ids stay."""

    name = "allowed_tokens"
    kind = Kind.MASK
    form = Form.ELEMENTWISE
    fields = {"allowed_token_ids": "ids"}
    caps = Caps(graph_safe=True, spec="any-history")

    class Params(StageParams):
        """The ids that stay."""

        ids: tuple[StrictInt, ...] | None = Field(default=None, min_length=1)

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        check_ids("allowed_token_ids", params.ids or (), ctx.tokenizer_size)
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.ids is None

    def bits(self, rows: RowView) -> Tensor:
        """Return a mask of each row, int32 [rows, words], bit i % 32 of word i // 32 for id i."""
        words = np.zeros((len(rows), -(-rows.vocab_size // 32)), dtype=np.uint32)
        for row, params in enumerate(rows.params):
            ids = np.array(params.ids, dtype=np.int64)
            np.bitwise_or.at(words[row], ids >> 5, np.uint32(1) << (ids & 31).astype(np.uint32))
        return torch.from_numpy(words.view(np.int32)).to(rows.device)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        places = _places(rows)
        kept = logits[places]
        logits.fill_(-torch.inf)
        logits[places] = kept


class SuppressTokens(Stage):
    """The listed ids go."""

    name = "suppress_tokens"
    kind = Kind.MASK
    form = Form.ELEMENTWISE
    caps = Caps(spec="any-history")

    class Params(StageParams):
        """The ids that go, and when."""

        ids: tuple[StrictInt, ...] | None = None
        begin_only: bool = False  # only while nothing has been generated

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        check_ids("suppress_tokens.ids", params.ids or (), ctx.vocab_size)
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.ids

    @classmethod
    def structure(cls, params: Any) -> bool:
        return bool(params.begin_only)

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def sparse(self, rows: RowView) -> tuple[Pairs, Tensor]:
        """Return places in row order, and -inf to be added there."""
        if not rows.mode:
            return rows.cached("bans", lambda: bans(_places(rows)))
        begins = (rows.host_positions == 0).tolist()
        pairing = list(zip(rows.params, begins, strict=True))
        return rows.cached(
            ("bans", tuple(begins)),
            lambda: bans(pairs([p.ids if begun else () for p, begun in pairing], rows.device)),
        )

    def transform(self, logits: Tensor, rows: RowView) -> None:
        places = _places(rows)
        if rows.mode:
            if rows.host_positions.all():  # every row has begun
                return
            begins = (rows.positions == 0)[places.rows]
            places = Pairs(places.rows[begins], places.ids[begins])
        logits[places] = -torch.inf


def _places(rows: RowView) -> Pairs:
    found: Pairs = rows.cached(
        "places", lambda: pairs([params.ids for params in rows.params], rows.device)
    )
    return found


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [AllowedTokens, SuppressTokens]

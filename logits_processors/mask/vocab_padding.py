"""Masks the rows of the head that no token belongs to: l_i = -inf for i >= tokenizer size.

Heads are padded to a round width; nothing stops a model from giving mass to the padding
(decoding-methods: ids between the tokenizer's size and V are always masked).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...core.batch import RowView
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Stage, StageParams


class VocabPadding(Stage):
    """Part of every chain, and first; identity where the head is as wide as the tokenizer."""

    name = "vocab_padding"
    kind = Kind.MASK
    form = Form.ELEMENTWISE
    mandatory = True
    caps = Caps(graph_safe=True, spec="any-history")

    class Bound(StageParams):
        """How many ids at the end of the head stand for nothing."""

        padding: int

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        return cls.Bound(padding=max(0, ctx.vocab_size - ctx.tokenizer_size))

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return isinstance(params, cls.Bound) and params.padding == 0

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}  # the same for every row of an engine

    def transform(self, logits: Tensor, rows: RowView) -> None:
        logits[:, rows.tokenizer_size :] = -torch.inf


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [VocabPadding]

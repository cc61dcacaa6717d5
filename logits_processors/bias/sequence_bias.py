"""Adds a number to the token that would complete a sequence.

For each sequence s: l of s[-1] += b if the history ends with s[:-1]. The history is prompt and
output. Several sequences that end in one token add up. A sequence is a list of ids, or a text, that
is spelled bare and after a space as in `bad_words`. -inf bans, and a bias never revives a masked
token; unlike those of `logit_bias`, finite numbers are not clamped. Equal to transformers'
`SequenceBiasLogitsProcessor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from pydantic import StrictInt, field_validator
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Need, Stage, StageParams
from ..history import tail
from ..token_ids import check_ids, pairs

Ids = tuple[int, ...]
FIELD = "sequence_bias.bias"


class SequenceBias(Stage):
    """A bias for what would complete a sequence."""

    name = "sequence_bias"
    kind = Kind.BIAS
    form = Form.ELEMENTWISE
    caps = Caps(needs=frozenset({Need.PROMPT, Need.OUTPUT}), spec="any-history")

    class Params(StageParams):
        """Pairs (sequence, bias), or a mapping from one to the other."""

        bias: tuple[tuple[str | tuple[StrictInt, ...], float], ...] | None = None

        @field_validator("bias", mode="before")
        @classmethod
        def _as_pairs(cls, value: Any) -> Any:
            return tuple(value.items()) if isinstance(value, Mapping) else value

    class Bound(StageParams):
        """What each sequence adds, by the last token before the one it biases; -1: always."""

        endings: dict[int, tuple[tuple[Ids, float], ...]]
        longest: int  # tokens that must be looked back at

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        endings: dict[int, list[tuple[Ids, float]]] = {}
        longest = 0
        for sequence, value in params.bias or ():
            if math.isnan(value) or value == math.inf:
                raise ChainError(
                    f"{FIELD} must be made of finite numbers or -inf, got {value} for {sequence!r}",
                    parameter=FIELD,
                    value=value,
                )
            if value == 0:
                continue
            for ids in dict.fromkeys(_spellings(sequence, ctx)):
                check_ids(FIELD, ids, ctx.vocab_size)
                endings.setdefault(ids[-2] if len(ids) > 1 else -1, []).append((ids, value))
                longest = max(longest, len(ids) - 1)
        return cls.Bound(endings={k: tuple(v) for k, v in endings.items()}, longest=longest)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        if isinstance(params, cls.Bound):
            return not params.endings
        return not any(value for _, value in params.bias or ())

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        found = [
            _biases(params, tail(rows, i, params.longest)) for i, params in enumerate(rows.params)
        ]
        values = [value for row in found for value in row.values()]
        if values:
            places = pairs([list(row) for row in found], rows.device)
            logits[places] += torch.tensor(values, dtype=torch.float32, device=rows.device)


def _biases(params: Any, recent: list[int]) -> dict[int, float]:
    """Return what to add to which token, given the last tokens of the history."""
    total: dict[int, float] = {}
    candidates = params.endings.get(-1, ())
    if recent:
        candidates = (*candidates, *params.endings.get(recent[-1], ()))
    for ids, value in candidates:
        before = len(ids) - 1
        if before <= len(recent) and recent[len(recent) - before :] == list(ids[:-1]):
            total[ids[-1]] = total.get(ids[-1], 0.0) + value
    return total


def _spellings(sequence: str | Ids, ctx: BindContext) -> Sequence[Ids]:
    if not isinstance(sequence, str):
        if not sequence:
            raise ChainError(f"{FIELD} has an empty sequence", parameter=FIELD, value=sequence)
        return [sequence]
    if ctx.tokenizer is None:
        raise ChainError(
            f"{FIELD} has the text {sequence!r}, but the tokenizer is not loaded; give ids",
            parameter=FIELD,
            value=sequence,
        )
    return [tuple(form) for form in ctx.tokenizer.bad_word_sequences(sequence)]


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [SequenceBias]

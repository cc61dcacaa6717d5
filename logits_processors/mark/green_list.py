"""The green-list watermark (2301.10226, 2306.04634): l_i += δ for a pseudo-random list of tokens.

Each context seeds a permutation of the vocabulary, whose first γ * V tokens are green. Text with
more green tokens than γ explains is marked: z = (g - γ T) / sqrt(T γ (1 - γ)) of T scored tokens, g
of them green.

The scheme is that of transformers' `WatermarkLogitsProcessor`, so that its `WatermarkDetector` and
the one here agree. `scheme` "lefthash" seeds with key times the last token, whatever the context
width; "selfhash" with the least of key * a * b over the last `context` tokens, the candidate among
them, and looks at the 40 best candidates alone, a permutation for each, which is slow. While the
history has fewer than `context` tokens nothing is marked. Lists are made by torch's CPU generator,
so they are those of transformers on a CPU and the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, StrictInt
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, Kind, Need, Stage, StageParams
from ...kernels.ops import rank_top
from ..history import tail

Scheme = Literal["lefthash", "selfhash"]
TABLE_SIZE = 1_000_003
NUM_CANDIDATES = 40  # of a row with self-hashing, as in the original code
SEEDS = 2**64 - 1


class GreenList(Stage):
    """A watermark that makes listed tokens likelier."""

    name = "green_list"
    kind = Kind.MARK
    caps = Caps(needs=frozenset({Need.PROMPT, Need.OUTPUT}), spec="any-history")

    class Params(StageParams):
        """Share of green tokens, their bonus, the width of the context, and the secret."""

        gamma: float = Field(default=0.25, gt=0, lt=1)
        delta: float | None = Field(default=2.0, ge=0, allow_inf_nan=False)
        context: StrictInt = Field(default=1, ge=1)
        key: StrictInt = Field(default=15485863, ge=1, lt=2**63, repr=False)
        scheme: Scheme = "lefthash"

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.delta

    @classmethod
    def structure(cls, params: Any) -> bool:
        return bool(params.scheme == "selfhash")

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {"delta": float(params.delta)}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        best = rank_top(logits, NUM_CANDIDATES).ids.tolist() if rows.mode else None
        green = torch.zeros(logits.shape, dtype=torch.bool)
        for row, params in enumerate(rows.params):  # each row has lists of its own
            recent = tail(rows, row, params.context)
            if len(recent) < params.context:
                continue
            if best is None:
                green[row] = _list_of(recent, params, rows.vocab_size)
                continue
            for token in best[row]:
                green[row, token] = _list_of([*recent[1:], token], params, rows.vocab_size)[token]
        bonus = rows.cached("delta", lambda: rows.column("delta")[:, None])
        logits += bonus * green.to(logits.device)


class GreenCount(NamedTuple):
    """What a detector found."""

    num_scored: int
    num_green: int
    z_score: float  # standard deviations above what chance explains
    p_value: float  # the probability of as much by chance

    @property
    def green_fraction(self) -> float:
        """Green tokens among the scored ones."""
        return self.num_green / self.num_scored


def detect_green_list(
    ids: Sequence[int],
    *,
    vocab_size: int,
    gamma: float = 0.25,
    context: int = 1,
    key: int = 15485863,
    scheme: Scheme = "lefthash",
    ignore_repeated: bool = False,
) -> GreenCount:
    """Count the green tokens of a text; the numbers must be those of its generation.

    `vocab_size` is the width of the model's logits. `ignore_repeated` scores every n-gram once.
    Raises ValidationError if the text has no token to score.
    """
    params = GreenList.Params(gamma=gamma, context=context, key=key, scheme=scheme)
    size = context if scheme == "selfhash" else context + 1
    grams = [tuple(ids[at : at + size]) for at in range(len(ids) - size + 1)]
    if ignore_repeated:
        grams = list(dict.fromkeys(grams))
    if not grams:
        raise ValidationError(
            f"ids must hold at least {size} tokens, got {len(ids)}", parameter="ids", value=len(ids)
        )
    num_green = sum(_is_green(gram, params, vocab_size) for gram in grams)
    count = len(grams)
    z = (num_green - gamma * count) / math.sqrt(count * gamma * (1 - gamma))
    return GreenCount(count, num_green, z, math.erfc(z / math.sqrt(2)) / 2)


def _is_green(gram: tuple[int, ...], params: Any, vocab_size: int) -> bool:
    recent = gram if params.scheme == "selfhash" else gram[:-1]
    return bool(_list_of(recent, params, vocab_size)[gram[-1]])


def _list_of(recent: Sequence[int], params: Any, vocab_size: int) -> Tensor:
    """Return which tokens are green after `recent`, which self-hash ends in the candidate."""
    seed = params.key * recent[-1]
    if params.scheme == "selfhash":
        table = _fixed_table(params.key)
        last = int(table[recent[-1] % TABLE_SIZE]) + 1
        seed = min(
            _wrapped(params.key * (int(table[token % TABLE_SIZE]) + 1) * last) for token in recent
        )
    return _green(seed % SEEDS, vocab_size, int(vocab_size * params.gamma))


def _wrapped(number: int) -> int:
    """Return `number` as int64 arithmetic would have left it."""
    return (number + 2**63) % 2**64 - 2**63


@lru_cache(maxsize=256)
def _green(seed: int, vocab_size: int, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    green = torch.zeros(vocab_size, dtype=torch.bool)
    green[torch.randperm(vocab_size, generator=generator)[:count]] = True
    return green


@lru_cache(maxsize=8)
def _fixed_table(key: int) -> Tensor:
    return torch.randperm(TABLE_SIZE, generator=torch.Generator().manual_seed(key))


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [GreenList]

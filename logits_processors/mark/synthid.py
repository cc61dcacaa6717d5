"""The SynthID-Text watermark: a tournament of m layers over the distribution that is drawn from.

For each layer, with g_i in {0, 1} from the key, the context and the token i: p_i <- p_i (1 + g_i -
sum_j p_j g_j). On average over the keys the distribution is left as it was. Marked text has more
ones among its g than half: z = (mean g - 1/2) * 2 sqrt(T m). As every MARK it stands after all
truncations, so it sees what the picker sees; before them it is wrong. A context that occurred among
the last `history` ones of the answer is not marked again.

The hash, the table of g and the context (the last n - 1 generated tokens, zeros before the first)
are those of transformers' `SynthIDTextWatermarkLogitsProcessor`, so that its detectors agree with
the one here. Tokens that are dead stay dead, where that one revives them with the least number
there is. Source: Dathathri et al., Nature 634 (2024).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field, StrictInt
from torch import Tensor

from ...core.batch import RowView
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, Kind, Stage, StageParams
from ...kernels.ops import ONE, rank_top

MULTIPLIER = 6364136223846793005
TABLE_SIZE, TABLE_SEED = 65536, 0  # transformers' defaults
LEAST_REST = 2.0**-80  # keeps a token alive whose layer gave everything to the others

Key = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]


class Contexts:
    """The generated tokens of a sequence and the hash of the context at each position."""

    __slots__ = ("hashes", "span", "tokens")

    def __init__(self, span: int) -> None:
        self.span = span
        self.tokens = [0] * span
        self.hashes = [context_hash(self.tokens)]

    def push(self, token: int) -> None:
        """Append a token."""
        self.tokens.append(token)
        self.hashes.append(context_hash(self.tokens[-self.span :]))


class SynthId(Stage):
    """A watermark that leaves the distribution, averaged over keys, as it is."""

    name = "synthid"
    kind = Kind.MARK
    caps = Caps(stateful=True, spec="sequential")

    class Params(StageParams):
        """A secret number for each layer, tokens of an n-gram, contexts that are remembered."""

        keys: tuple[Key, ...] | None = Field(default=None, min_length=1, max_length=256, repr=False)
        ngram: StrictInt = Field(default=5, ge=2)
        history: StrictInt = Field(default=1024, ge=0)

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return params.keys is None

    @classmethod
    def structure(cls, params: Any) -> int:
        return len(params.keys or ())

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def open(self, params: Any, prompt: Sequence[int]) -> Contexts:
        return Contexts(params.ngram - 1)

    def accept(self, state: Contexts, tokens: Sequence[int]) -> None:
        for token in tokens:
            state.push(token)

    def rollback(self, state: Contexts, count: int) -> None:
        del state.tokens[len(state.tokens) - count :]
        del state.hashes[len(state.hashes) - count :]

    def fork(self, state: Contexts) -> Contexts:
        twin = Contexts(state.span)
        twin.tokens, twin.hashes = list(state.tokens), list(state.hashes)
        return twin

    def transform(self, logits: Tensor, rows: RowView) -> None:
        contexts = torch.tensor([state.hashes[-1] for state in rows.states], device=rows.device)
        repeated = torch.tensor(
            [
                _is_repeated(state, params.history)
                for state, params in zip(rows.states, rows.params, strict=True)
            ],
            device=rows.device,
        )
        ids, values = _alive(logits)
        best = values.amax(1, keepdim=True)
        weights = (values - best).nan_to_num_(nan=-torch.inf).double().exp_()
        change = torch.zeros_like(weights)
        keys = rows.cached("keys", lambda: _keys(rows))
        hashed = _accumulate(contexts[:, None], ids)
        for layer in range(rows.mode):
            ones = _table(rows.device)[_accumulate(hashed, keys[:, layer, None]) % TABLE_SIZE]
            step = ones + _rest(weights, ones)[:, None]  # 1 + g - sum p g = g + sum p (1 - g)
            weights *= step
            change += step.log_()
        change.masked_fill_(repeated[:, None], 0.0)
        logits.scatter_(1, ids, values + change.float())


def _keys(rows: RowView) -> Tensor:
    """Return the keys of each row, int64 [rows, layers]."""
    return torch.tensor([params.keys for params in rows.params], device=rows.device)


def _is_repeated(state: Contexts, history: int) -> bool:
    *before, current = state.hashes[-history - 1 :]
    return current in before


def _alive(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and logits of the alive tokens, or of all if they are many."""
    width = max(int((logits > -torch.inf).sum(1).max()), 1)
    if 4 * width > logits.shape[1]:
        return torch.arange(logits.shape[1], device=logits.device).expand(logits.shape), logits
    listed = rank_top(logits, width)
    return listed.ids, listed.values


def _rest(weights: Tensor, ones: Tensor) -> Tensor:
    """Return the share of the tokens whose g is 0, float64 [rows]; the sums are of integers."""
    scale = ONE / weights.amax(1, keepdim=True).clamp_min_(torch.finfo(torch.float64).tiny)
    mass = (weights * scale).round_().long()
    rest = (mass * (1 - ones.long())).sum(1).double()
    return (rest / mass.sum(1).clamp_min(1).double()).clamp_min_(LEAST_REST)


def _accumulate(hashed: Tensor, data: Tensor) -> Tensor:
    """One step of a linear congruential hash, in wrapping int64."""
    return (hashed + data) * MULTIPLIER + 1


def context_hash(tokens: Sequence[int]) -> int:
    """Return the hash of a context, as a signed 64-bit integer."""
    hashed = 1
    for token in tokens:
        hashed = ((hashed + token) * MULTIPLIER + 1) % 2**64
    return hashed - 2**64 if hashed >= 2**63 else hashed


@lru_cache(maxsize=8)
def _table(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(TABLE_SEED)
    return torch.randint(0, 2, (TABLE_SIZE,), generator=generator).double().to(device)


# --- detection ------------------------------------------------------------------------------------


class TournamentScore(NamedTuple):
    """What a detector found."""

    num_scored: int  # tokens
    mean_g: float
    z_score: float  # standard deviations above 1/2
    p_value: float  # the probability of as much by chance


def synthid_values(ids: Sequence[int], keys: Sequence[int], *, ngram: int = 5) -> Tensor:
    """Return g of each n-gram of a text and each layer, int64 [len(ids) - ngram + 1, layers]."""
    tokens = torch.tensor(list(ids), dtype=torch.int64)
    hashed = torch.ones(max(len(tokens) - ngram + 1, 0), dtype=torch.int64)
    for offset in range(ngram):
        hashed = _accumulate(hashed, tokens[offset : offset + len(hashed)])
    layers = _accumulate(hashed[:, None], torch.tensor(list(keys), dtype=torch.int64))
    return _table(torch.device("cpu"))[layers % TABLE_SIZE].long()


def detect_synthid(
    ids: Sequence[int], keys: Sequence[int], *, ngram: int = 5, history: int = 1024
) -> TournamentScore:
    """Score a generated text, without its prompt; the numbers must be those of its generation.

    N-grams whose context occurred before are left out. Raises ValidationError if none is left.
    """
    span = ngram - 1
    contexts = [context_hash(ids[at : at + span]) for at in range(len(ids) - span)]
    fresh = [
        at for at, found in enumerate(contexts) if found not in contexts[max(at - history, 0) : at]
    ]
    if not fresh:
        raise ValidationError(
            f"ids must hold at least {ngram} tokens, got {len(ids)}",
            parameter="ids",
            value=len(ids),
        )
    ones = synthid_values(ids, keys, ngram=ngram)[fresh].double()
    mean = float(ones.mean())
    z = (mean - 0.5) * 2 * math.sqrt(ones.numel())
    return TournamentScore(len(fresh), mean, z, math.erfc(z / math.sqrt(2)) / 2)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [SynthId]

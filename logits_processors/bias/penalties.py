"""Penalties on tokens that the history holds.

* repetition_penalty (1909.05858): l_i / θ if l_i > 0 else l_i * θ, once a token however often seen.
* frequency_penalty: l_i - α * count_i.
* presence_penalty:  l_i - α * [count_i > 0].

`scope` says which history counts: "prompt", "output" or "both". `last_n` keeps its most recent n
tokens. `sustain` s and `decay` d weigh a token by its age (0 for the most recent one): w = 1 for
age < s, then falling on a line to 0 over the next d. With weights, θ becomes θ^w and α becomes
w * α, w being that of the token's most recent place, and count_i becomes the sum of w.

Without a window the seen tokens come from the slot tables; with one, and for prompt counts, from
the token lists, on the host. Equal to vLLM's and transformers' penalties where those have it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, StrictInt
from torch import Tensor

from ...core.batch import RowView, Seen
from ...core.errors import ChainError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Form, Kind, Need, Stage, StageParams
from ...kernels.lang import tl, triton
from ...kernels.ops import divide, small_float
from ..token_ids import Pairs, check_ids

Scope = Literal["prompt", "output", "both"]
Additive = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
Floats = NDArray[np.float64]


@triton.jit
def repeat_both(y: tl.tensor, seen: tl.tensor, penalty: tl.tensor) -> tl.tensor:
    """Divide or multiply the logits of seen tokens."""
    return tl.where(seen, tl.where(y > 0, divide(y, penalty), y * penalty), y)


@triton.jit
def repeat_output(y: tl.tensor, count: tl.tensor, penalty: tl.tensor) -> tl.tensor:
    """The same for generated tokens alone."""
    return tl.where(count > 0, tl.where(y > 0, divide(y, penalty), y * penalty), y)


@triton.jit
def repeat_prompt(y: tl.tensor, in_prompt: tl.tensor, penalty: tl.tensor) -> tl.tensor:
    """The same for tokens of the prompt alone."""
    return tl.where(in_prompt, tl.where(y > 0, divide(y, penalty), y * penalty), y)


@triton.jit
def lower_by_count(y: tl.tensor, count: tl.tensor, penalty: tl.tensor) -> tl.tensor:
    """Lower a logit for each time that its token was generated."""
    return y - penalty * small_float(count)


@triton.jit
def lower_output(y: tl.tensor, count: tl.tensor, penalty: tl.tensor) -> tl.tensor:
    """Lower the logits of generated tokens."""
    return y - tl.where(count > 0, penalty, 0.0)


@triton.jit
def lower_prompt(y: tl.tensor, in_prompt: tl.tensor, penalty: tl.tensor) -> tl.tensor:
    """Lower the logits of the prompt's tokens."""
    return y - tl.where(in_prompt, penalty, 0.0)


@triton.jit
def lower_both(y: tl.tensor, seen: tl.tensor, penalty: tl.tensor) -> tl.tensor:
    """Lower the logits of all tokens seen."""
    return y - tl.where(seen, penalty, 0.0)


class WindowParams(StageParams):
    """Which part of the history counts, and how much."""

    last_n: int | None = Field(default=None, ge=1)
    sustain: int | None = Field(default=None, ge=0)
    decay: int | None = Field(default=None, ge=0)


class Path(NamedTuple):
    """The structure of a penalty: what decides the code that runs."""

    scope: str
    listed: bool  # weights come from the token lists
    excludes: bool


class Weighed(NamedTuple):
    """Distinct tokens of each row's history with their weights."""

    places: Pairs
    weights: Tensor  # float32 [n]


class Penalty(Stage):
    """What the three penalties share."""

    kind = Kind.BIAS
    form = Form.ELEMENTWISE
    caps = Caps(needs=frozenset({Need.PROMPT, Need.OUTPUT, Need.COUNTS}), spec="any-history")
    sums = False  # a token seen twice weighs twice
    neutral = 0.0

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        if params.decay is not None and params.sustain is None:
            raise ChainError(
                f"{cls.name}.decay must come with sustain, got decay {params.decay} alone",
                parameter=f"{cls.name}.decay",
                value=params.decay,
            )
        return params

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        forgets = params.sustain == 0 and not params.decay
        return params.penalty is None or params.penalty == cls.neutral or forgets

    @classmethod
    def structure(cls, params: Any) -> Path:
        windowed = params.last_n is not None or params.sustain is not None
        prompt_counts = cls.sums and params.scope != "output"
        return Path(params.scope, windowed or prompt_counts, bool(getattr(params, "exclude", ())))

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {"penalty": float(params.penalty)}

    def transform(self, logits: Tensor, rows: RowView) -> None:
        if rows.mode.listed:
            places, weights = _weigh_lists(rows, self.sums)
            penalty = rows.column("penalty")[places.rows]
            logits[places] = self.penalise(logits[places], weights, penalty)
            return
        seen = rows.seen
        weights = self.weigh(seen, rows)
        penalty = rows.cached("penalty", lambda: rows.column("penalty")[:, None])
        values = self.penalise(logits.gather(1, seen.ids), weights, penalty)
        logits.scatter_(1, seen.ids, values)  # the padding writes one value twice

    def weigh(self, seen: Seen, rows: RowView) -> Tensor:
        """Return the weights of the seen tokens, [rows, width]: whether they are in scope."""
        return _in_scope(seen, rows.mode.scope)

    def penalise(self, values: Tensor, weights: Tensor, penalty: Tensor) -> Tensor:
        """Return the penalised logits; all are of one shape, and weights may be bool."""
        return values - penalty * weights


class RepetitionPenalty(Penalty):
    """Makes seen tokens less likely by a factor; below 1 it rewards them."""

    name = "repetition_penalty"
    kernel = {
        Path("both", False, False): repeat_both,
        Path("output", False, False): repeat_output,
        Path("prompt", False, False): repeat_prompt,
    }
    fields = {"repetition_penalty": "penalty"}
    caps = replace(Penalty.caps, reads_zero=True)
    neutral = 1.0

    class Params(WindowParams):
        """θ, and ids that are never penalised."""

        penalty: float | None = Field(default=None, gt=0, allow_inf_nan=False)
        scope: Scope = "both"
        exclude: tuple[StrictInt, ...] = ()

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        check_ids("repetition_penalty.exclude", params.exclude, ctx.vocab_size)
        return super().bind(params, ctx)

    def weigh(self, seen: Seen, rows: RowView) -> Tensor:
        weights = _in_scope(seen, rows.mode.scope)
        if rows.mode.excludes:
            excluded = rows.cached("excluded", lambda: _excluded(rows))
            weights = weights & ~excluded.gather(1, seen.ids)
        return weights

    def penalise(self, values: Tensor, weights: Tensor, penalty: Tensor) -> Tensor:
        if weights.dtype == torch.bool:
            factor = torch.where(weights, penalty, 1.0)
        else:
            factor = penalty**weights
        return torch.where(values > 0, values / factor, values * factor)


class FrequencyPenalty(Penalty):
    """Makes tokens less likely by how often they occurred."""

    name = "frequency_penalty"
    kernel = {Path("output", False, False): lower_by_count}
    fields = {"frequency_penalty": "penalty"}
    sums = True

    class Params(WindowParams):
        """α."""

        penalty: Additive | None = None
        scope: Scope = "output"

    def weigh(self, seen: Seen, rows: RowView) -> Tensor:
        return seen.counts


class PresencePenalty(Penalty):
    """Makes tokens less likely that occurred at all."""

    name = "presence_penalty"
    kernel = {
        Path("both", False, False): lower_both,
        Path("output", False, False): lower_output,
        Path("prompt", False, False): lower_prompt,
    }
    fields = {"presence_penalty": "penalty"}

    class Params(WindowParams):
        """α."""

        penalty: Additive | None = None
        scope: Scope = "output"


def _in_scope(seen: Seen, scope: str) -> Tensor:
    if scope == "prompt":
        return seen.in_prompt
    # A count can be back at 0 after tokens were taken back.
    produced = seen.counts > 0
    return produced if scope == "output" else produced | seen.in_prompt


def _excluded(rows: RowView) -> Tensor:
    """Return which tokens are never penalised, bool [rows, vocab]."""
    mask = torch.zeros(len(rows), rows.vocab_size, dtype=torch.bool)
    for row, params in enumerate(rows.params):
        mask[row, list(params.exclude)] = True
    return mask.to(rows.device)


def _weigh_lists(rows: RowView, sums: bool) -> Weighed:
    """Weigh the tokens of each row's history by age."""
    ids: list[NDArray[np.int64]] = []
    weights: list[Floats] = []
    for row, params in enumerate(rows.params):
        recent = _recent(rows, row, params)
        tokens, first, places = np.unique(recent, return_index=True, return_inverse=True)
        ages = _weights_by_age(len(recent), params)
        # `recent` begins with the latest token, so `first` is the place with the greatest weight.
        by_token = np.bincount(places, ages, len(tokens)).astype(float) if sums else ages[first]
        if getattr(params, "exclude", ()):
            counted = ~np.isin(tokens, params.exclude)
            tokens, by_token = tokens[counted], by_token[counted]
        ids.append(tokens)
        weights.append(by_token)
    owners = np.repeat(np.arange(len(ids)), [len(part) for part in ids])
    places_on_device = Pairs(
        torch.from_numpy(owners).to(rows.device),
        torch.from_numpy(np.concatenate(ids)).to(rows.device),
    )
    flat = torch.from_numpy(np.concatenate(weights).astype(np.float32))
    return Weighed(places_on_device, flat.to(rows.device))


def _recent(rows: RowView, row: int, params: Any) -> NDArray[np.int64]:
    """Return the tokens of the scope that can weigh anything, the latest first."""
    reach = len(rows.prompt(row)) + len(rows.output(row))
    if params.last_n is not None:
        reach = min(reach, params.last_n)
    if params.sustain is not None:
        reach = min(reach, params.sustain + (params.decay or 0))
    output = [] if params.scope == "prompt" else list(rows.output(row)[-reach:])
    missing = reach - len(output)
    tail: list[int] = []
    if params.scope != "output" and missing > 0:
        tail = list(rows.prompt(row)[-missing:])
    return np.array([*tail, *output], dtype=np.int64)[::-1]


def _weights_by_age(length: int, params: Any) -> Floats:
    weights: Floats = np.ones(length)
    if params.sustain is not None:
        beyond = np.arange(length) - params.sustain
        fallen = beyond / params.decay if params.decay else beyond >= 0
        weights = np.clip(1.0 - fallen, 0.0, 1.0)
    return weights


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [RepetitionPenalty, FrequencyPenalty, PresencePenalty]

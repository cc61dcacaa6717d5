"""The Gumbel watermark: draws with noise that is a function of a key and the last tokens.

The token is argmax r_i**(1 / p_i), with r_i in (0, 1) pseudo-random by key, context and token: over
the keys, a fair draw from p. Text that was drawn so has greater r than chance: with T scored
tokens, the sum of -ln(1 - r) follows a Gamma(T, 1) law in other text. Source: Aaronson (2022);
Kuditipudi et al. 2307.15593.

The same context would draw the same token again and again, so a context that occurred before in the
answer, and one shorter than `context`, draws with the request's own noise instead; the detector
leaves the repeated ones out, too. Being a picker, it sees every stage's work.

r_i = 1 - u_i, u being the engine's addressed noise with the hash of key and context for a key, so
the noise of a token depends on nothing else. argmax r**(1/p) is argmax of l - ln(-ln r).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from pydantic import Field, StrictInt
from torch import Tensor

from ...core.batch import PickView, RowView
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import Caps, Picker, StageParams
from ...kernels.ops import exponential_for_ids, purpose_of, uniform_for_ids
from .flat_race import candidates, winner

PURPOSE = purpose_of("keyed_gumbel")  # the same for every instance: a detector must find it again


class Contexts:
    """The noise key of the context at each position of a sequence, and how often each occurred."""

    __slots__ = ("counts", "found", "key", "span", "tokens")

    def __init__(self, key: int, span: int, tokens: Sequence[int]) -> None:
        self.key = key
        self.span = span
        self.tokens = list(tokens[-span:])
        self.found: list[int | None] = []
        self.counts: Counter[int] = Counter()
        self._look()

    @property
    def current(self) -> int | None:
        """The noise key of the next position; None where the request's own noise serves."""
        found = self.found[-1]
        return None if found is None or self.counts[found] > 1 else found

    def push(self, token: int) -> None:
        """Append a token."""
        self.tokens.append(token)
        self._look()

    def drop(self, count: int) -> None:
        """Take the last `count` tokens back."""
        for found in self.found[len(self.found) - count :]:
            if found is not None:
                self.counts[found] -= 1
        del self.found[len(self.found) - count :]
        del self.tokens[len(self.tokens) - count :]

    def copy(self) -> Contexts:
        """Return an independent copy."""
        twin = Contexts(self.key, self.span, ())
        twin.tokens, twin.found = list(self.tokens), list(self.found)
        twin.counts = Counter(self.counts)
        return twin

    def _look(self) -> None:
        found = None
        if len(self.tokens) >= self.span:
            found = context_key(self.key, self.tokens[-self.span :])
            self.counts[found] += 1
        self.found.append(found)


class KeyedGumbel(Picker):
    """A watermark in the draw itself."""

    name = "keyed_gumbel"
    caps = Caps(random=True, stateful=True, spec="sequential")

    class Params(StageParams):
        """The secret, and how many tokens decide the noise of the next one."""

        key: StrictInt = Field(ge=0, lt=2**64, repr=False)
        context: StrictInt = Field(default=4, ge=1)

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def open(self, params: Any, prompt: Sequence[int]) -> Contexts:
        return Contexts(params.key, params.context, prompt)

    def accept(self, state: Contexts, tokens: Sequence[int]) -> None:
        for token in tokens:
            state.push(token)

    def rollback(self, state: Contexts, count: int) -> None:
        state.drop(count)

    def fork(self, state: Contexts) -> Contexts:
        return state.copy()

    def pick(self, view: PickView, rows: RowView) -> Tensor:
        values, ids = candidates(view)
        keys = [state.current for state in rows.states]
        times = _times([key or 0 for key in keys], ids)
        if None in keys:
            is_own = torch.tensor([key is None for key in keys], device=ids.device)
            times = torch.where(is_own[:, None], rows.exponential(ids), times)
        return winner(values, ids, times)


def context_key(key: int, tokens: Sequence[int]) -> int:
    """Return the noise key of a context, a signed 64-bit integer that is not 0."""
    packed = struct.pack(f"<Q{len(tokens)}q", key, *tokens)
    found = int.from_bytes(blake2b(packed, digest_size=8).digest(), "little", signed=True)
    return found or 1


def _times(keys: Sequence[int], ids: Tensor) -> Tensor:
    """Return -ln r, float64 in the shape of `ids` [rows, n]."""
    key = torch.tensor(keys, dtype=torch.int64, device=ids.device)
    zero = torch.zeros_like(key)
    return exponential_for_ids(key, zero, zero, PURPOSE, ids)


class GumbelScore(NamedTuple):
    """What a detector found."""

    num_scored: int  # tokens
    score: float  # the sum of -ln(1 - r); num_scored is expected by chance
    p_value: float  # the probability of as much by chance


def detect_keyed_gumbel(
    ids: Sequence[int], *, key: int, context: int = 4, prompt_ids: Sequence[int] = ()
) -> GumbelScore:
    """Score a text; the numbers must be those of its generation.

    Without its prompt, the first `context` tokens of a text are not scored. Raises ValidationError
    if no token is left.
    """
    state = Contexts(key, context, prompt_ids)
    scored: list[tuple[int, int]] = []
    for token in ids:
        if state.current is not None:
            scored.append((state.current, token))
        state.push(token)
    if not scored:
        raise ValidationError(
            f"ids must hold more than {context} tokens, got {len(ids)}",
            parameter="ids",
            value=len(ids),
        )
    keys = torch.tensor([found for found, _ in scored], dtype=torch.int64)
    tokens = torch.tensor([token for _, token in scored], dtype=torch.int64)
    zero = torch.zeros_like(keys)
    unit = uniform_for_ids(keys, zero, zero, PURPOSE, tokens[:, None])
    score = -unit.log().sum()
    count = torch.tensor(float(len(scored)), dtype=torch.float64)
    return GumbelScore(len(scored), float(score), float(torch.special.gammaincc(count, score)))


@hookimpl
def decodekit_pickers() -> Iterable[type[Picker]]:
    return [KeyedGumbel]

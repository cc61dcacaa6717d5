"""Token healing: the prompt's last token is written again, together with what follows it.

A prompt that ends inside a word ("http:") was cut into tokens as if the text ended there, and the
model has seen few such cuts. So the last `tokens` of the prompt are taken away, and the first
tokens written may only be ones that spell what they spelled: with r the bytes that are left, a
token of bytes b is alive if b begins with r or r with b. The text of the output goes on where the
prompt's ends, while its `token_ids` begin with the tokens that were written again.

Nothing is taken away where the text needs no healing, as no token goes beyond it, where it ends in
a special token or inside a character, or where nothing of the prompt would be left.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from ...core.batch import RowView
from ...core.driver import Driver
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Caps, Kind, Stage, StageParams


class Spelling:
    """The bytes of every plain token, in order."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        plain = [i for i in range(size) if i not in tokenizer.added_tokens]
        pairs = sorted((raw, i) for i in plain if (raw := tokenizer.token_bytes(i)))
        self.bytes = [raw for raw, _ in pairs]
        self.ids = [i for _, i in pairs]

    def fitting(self, left: bytes) -> list[int]:
        """Return the ids of tokens that begin with `left`, or that `left` begins with."""
        found = self.ids[bisect_left(self.bytes, left) : self._end(left)]
        for size in range(1, len(left)):
            first = bisect_left(self.bytes, left[:size])
            while first < len(self.bytes) and self.bytes[first] == left[:size]:
                found.append(self.ids[first])
                first += 1
        return found

    def goes_beyond(self, text: bytes) -> bool:
        """Whether a token begins with `text` and goes on."""
        first = bisect_left(self.bytes, text + b"\x00")
        return first < self._end(text)

    def _end(self, prefix: bytes) -> int:
        return bisect_left(self.bytes, prefix + b"\xff" * 64)


class Left:
    """The bytes that one sequence has yet to spell, and those after each token."""

    def __init__(self, left: bytes) -> None:
        self.path = [left]


class Healing(Stage):
    """Lets only tokens live that spell what was taken from the prompt's end."""

    name = "healing"
    kind = Kind.MASK
    caps = Caps(spec="any-history", stateful=True)
    soft = False

    class Params(StageParams):
        """The text to spell."""

        text: str

    class Bound(StageParams):
        """Its bytes, and those of every token."""

        text: bytes
        spelling: Any

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Bound:
        return cls.Bound(text=params.text.encode(), spelling=_spelling(ctx))

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    def open(self, params: Any, prompt: Sequence[int]) -> tuple[Left, Spelling]:
        return Left(params.text), params.spelling

    def accept(self, state: tuple[Left, Spelling], tokens: Sequence[int]) -> None:
        left, spelling = state
        for token in tokens:
            rest = left.path[-1]
            spelled = _bytes_of(spelling, token) if rest else b""
            left.path.append(rest[len(spelled) :])

    def rollback(self, state: tuple[Left, Spelling], count: int) -> None:
        del state[0].path[len(state[0].path) - count :]

    def fork(self, state: tuple[Left, Spelling]) -> tuple[Left, Spelling]:
        twin = Left(b"")
        twin.path = list(state[0].path)
        return twin, state[1]

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row in range(len(rows)):
            left, spelling = rows.states[row]
            if not left.path[-1]:
                continue
            ids = torch.tensor(spelling.fitting(left.path[-1]), device=logits.device)
            dead = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            dead[ids] = False
            logits[row].masked_fill_(dead, -torch.inf)


class TokenHealing(Driver):
    """Writes the prompt's last token again, so that a text cut inside a word goes on naturally."""

    name = "token_healing"
    streams = True

    class Params(StageParams):
        """How many tokens of the prompt's end are written again."""

        tokens: int = Field(default=1, ge=1, le=16)

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        if ctx.tokenizer is None:
            raise ValidationError("driver 'token_healing' needs the tokenizer", parameter="driver")
        if ctx.request.prompt_logprobs is not None:
            raise ValidationError(
                "driver 'token_healing' takes tokens from the prompt, so prompt_logprobs must be "
                "unset",
                parameter="prompt_logprobs",
                value=ctx.request.prompt_logprobs,
            )
        return params

    @classmethod
    def stages(cls, bound: Any, ctx: BindContext) -> Sequence[Stage]:
        count = cls.trim(bound, ctx)
        if not count:
            return ()
        return (Healing(text=_spelled(ctx, count).decode()),)

    @classmethod
    def trim(cls, bound: Any, ctx: BindContext) -> int:
        added = ctx.tokenizer.added_tokens
        count = 0
        for token in reversed(ctx.prompt_ids[1:]):
            if count == bound.tokens or token in added:
                break
            count += 1
        text = _spelled(ctx, count)
        try:
            text.decode()
        except UnicodeDecodeError:
            return 0
        return count if text and _spelling(ctx).goes_beyond(_last_spelled(ctx)) else 0


def _bytes_of(spelling: Spelling, token: int) -> bytes:
    by_id = spelling.__dict__.get("by_id")
    if by_id is None:
        by_id = spelling.__dict__["by_id"] = dict(zip(spelling.ids, spelling.bytes, strict=True))
    found: bytes = by_id.get(token, b"")
    return found


def _spelled(ctx: BindContext, count: int) -> bytes:
    ids = ctx.prompt_ids[len(ctx.prompt_ids) - count :] if count else ()
    return b"".join(ctx.tokenizer.token_bytes(token) for token in ids)


def _last_spelled(ctx: BindContext) -> bytes:
    spelled: bytes = ctx.tokenizer.token_bytes(ctx.prompt_ids[-1])
    return spelled


def _spelling(ctx: BindContext) -> Spelling:
    found = ctx.shared.get("token_healing")
    if found is None:
        found = ctx.shared["token_healing"] = Spelling(ctx.tokenizer, ctx.tokenizer_size)
    spelling: Spelling = found
    return spelling


@hookimpl
def decodekit_drivers() -> Iterable[type[Driver]]:
    return [TokenHealing]

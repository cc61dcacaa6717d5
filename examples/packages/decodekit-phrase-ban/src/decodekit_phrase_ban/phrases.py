"""Bans the token that would complete a phrase: l_t = -inf if the answer and then t contain one.

With w the bytes of the answer and b those of token t: t is banned if some phrase occurs in w b and
ends inside b. Phrases are compared as bytes, so it does not matter how text is cut into tokens.

When a request is admitted, the vocabulary is searched once for each phrase: the tokens that hold it
whole, and for each k the tokens that begin with what is left of it after k bytes. A step then looks
at the end of the answer only: for which k does it end in the first k bytes of a phrase?
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import Field, StringConstraints

from decodekit import Caps, Kind, RowView, Stage, StageParams
from decodekit.core.errors import ChainError
from decodekit.core.stage import BindContext

Phrase = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Tail:
    """The bytes of an answer, and how many each token brought: what lets tokens be taken back."""

    __slots__ = ("lengths", "params", "text")

    def __init__(self, params: Any) -> None:
        self.params = params
        self.text = bytearray()
        self.lengths: list[int] = []


class PhraseBan(Stage):
    """An answer without some phrases."""

    name = "phrase_ban.phrases"
    kind = Kind.MASK
    caps = Caps(stateful=True)

    class Params(StageParams):
        """The phrases, and whether large and small letters are the same."""

        phrases: tuple[Phrase, ...] = Field(min_length=1, max_length=256)
        ignore_case: bool = False

    class Bound(StageParams):
        """What a step needs: bytes by token, and tokens by what they complete."""

        phrases: tuple[bytes, ...]
        ignore_case: bool
        pieces: tuple[bytes, ...]  # by token id
        whole: tuple[int, ...]  # tokens that hold a phrase by themselves
        ends: dict[bytes, tuple[int, ...]]  # first bytes of a phrase -> tokens that complete it

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Bound:
        """Search the vocabulary, once for a request."""
        if ctx.tokenizer is None:
            raise ChainError(
                f"{cls.name} needs the tokenizer, which is not loaded",
                parameter=f"{cls.name}.phrases",
            )
        fold = params.ignore_case
        phrases = tuple(sorted({_bytes(phrase, fold) for phrase in params.phrases}))
        pieces = tuple(
            _fold(ctx.tokenizer.token_bytes(token) or b"", fold)
            for token in range(min(ctx.tokenizer_size, ctx.vocab_size))
        )
        whole = {t for t, piece in enumerate(pieces) if any(p in piece for p in phrases)}
        ends: dict[bytes, set[int]] = {}
        for phrase in phrases:
            for k in range(1, len(phrase)):
                rest = phrase[k:]
                found = {t for t, piece in enumerate(pieces) if piece.startswith(rest)}
                if found:
                    ends.setdefault(phrase[:k], set()).update(found)
        return cls.Bound(
            phrases=phrases,
            ignore_case=fold,
            pieces=pieces,
            whole=tuple(sorted(whole)),
            ends={begin: tuple(sorted(tokens)) for begin, tokens in ends.items()},
        )

    @classmethod
    def table(cls, params: Any) -> dict[str, float | int]:
        return {}

    # --- state: a function of the tokens ----------------------------------------------------------

    def open(self, params: Any, prompt: Sequence[int]) -> Tail:
        return Tail(params)

    def accept(self, state: Tail, tokens: Sequence[int]) -> None:
        pieces = state.params.pieces
        for token in tokens:
            piece = pieces[token] if token < len(pieces) else b""
            state.text += piece
            state.lengths.append(len(piece))

    def rollback(self, state: Tail, count: int) -> None:
        for length in state.lengths[len(state.lengths) - count :]:
            del state.text[len(state.text) - length :]
        del state.lengths[len(state.lengths) - count :]

    def fork(self, state: Tail) -> Tail:
        twin = Tail(state.params)
        twin.text, twin.lengths = bytearray(state.text), list(state.lengths)
        return twin

    # --- a step -----------------------------------------------------------------------------------

    def transform(self, logits: torch.Tensor, rows: RowView) -> None:
        for row, state in enumerate(rows.states):
            banned = set(state.params.whole)
            for begin, tokens in state.params.ends.items():
                if state.text.endswith(begin):
                    banned.update(tokens)
            if banned:
                ids = torch.tensor(sorted(banned), device=logits.device)
                logits[row, ids] = -torch.inf


def _bytes(text: str, ignore_case: bool) -> bytes:
    return _fold(text.encode(), ignore_case)


def _fold(piece: bytes, ignore_case: bool) -> bytes:
    return piece.lower() if ignore_case else piece  # bytes.lower changes ASCII letters alone

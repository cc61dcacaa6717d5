"""Log-probabilities in the shapes of HTTP: finite, with the bytes of each token."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...core.logprobs import Logprob

LOWEST = -9999.0  # stands for -inf, which JSON has not

Position = Mapping[int, Logprob]


def finite(value: float) -> float:
    """Return a log-probability that JSON can hold."""
    return value if value > LOWEST else LOWEST  # a NaN compares false


def finite_or_none(value: float | None) -> float | None:
    """Return a number for JSON; None where there is none, or it is no number."""
    return None if value is None or not math.isfinite(value) else value


@dataclass(slots=True)
class TokenNames:
    """How tokens are shown: by their text, or as "token_id:N"."""

    tokenizer: Any  # None: ids are all there is
    as_ids: bool

    def text(self, token: int, entry: Logprob | None = None) -> str:
        """Return what stands for a token."""
        if self.as_ids or self.tokenizer is None:
            return f"token_id:{token}"
        if entry is not None and entry.decoded_token is not None:
            return entry.decoded_token
        text: str = self.tokenizer.text_of_token(token)
        return text

    def bytes(self, token: int, text: str) -> list[int]:
        """Return the token's own bytes, also where it is a part of a character."""
        if self.as_ids or self.tokenizer is None or self.tokenizer.spelling.kind == "opaque":
            return list(text.encode())
        return list(self.tokenizer.token_bytes(token))


def best_of(position: Position, count: int) -> list[tuple[int, Logprob]]:
    """Return the `count` best entries of a position, ties by the lower id; -1 is all."""
    ranked = sorted(position.items(), key=lambda item: (-finite(item[1].logprob), item[0]))
    return ranked if count < 0 else ranked[:count]


@dataclass(slots=True)
class ChatLogprobs:
    """Writes `logprobs.content` entries of chat answers.

    `num_top` alternatives stand under each token, then those ids that the request listed.
    """

    names: TokenNames
    num_top: int
    listed: tuple[int, ...] = ()

    def content(self, ids: Sequence[int], positions: Iterable[Position]) -> list[dict[str, Any]]:
        """Return one entry a token."""
        return [self._entry(i, position) for i, position in zip(ids, positions, strict=True)]

    def _entry(self, token: int, position: Position) -> dict[str, Any]:
        best = best_of(position, self.num_top)
        shown = {i for i, _ in best}
        best += [(i, position[i]) for i in self.listed if i in position and i not in shown]
        entry = position.get(token)
        value = LOWEST if entry is None else entry.logprob
        return {
            **self._one(token, entry, value),
            "top_logprobs": [self._one(i, other, other.logprob) for i, other in best],
        }

    def _one(self, token: int, entry: Logprob | None, value: float) -> dict[str, Any]:
        text = self.names.text(token, entry)
        return {
            "token": text,
            "logprob": finite(value),
            "bytes": self.names.bytes(token, text),
        }


@dataclass(slots=True)
class CompletionLogprobs:
    """Writes the four parallel lists of the completions route, over all pieces of one choice.

    `text_offset` counts characters of the whole returned text; a token that shows nothing in it,
    such as a special one, keeps the offset.
    """

    names: TokenNames
    offset: int = 0
    lists: dict[str, list[Any]] = field(default_factory=dict)

    def piece(
        self,
        ids: Sequence[int],
        positions: Iterable[Position | None],
        hidden: frozenset[int] = frozenset(),
        text: str | None = None,
    ) -> dict[str, list[Any]]:
        """Return the lists for further tokens.

        `hidden` ids have no text in the answer; nor have tokens that are not found in `text`, the
        answer's beginning, where the offset stands.
        """
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token, position in zip(ids, positions, strict=True):
            entry = None if position is None else position.get(token)
            tokens.append(self.names.text(token, entry))
            offsets.append(self.offset)
            if position is None:
                values.append(None)
                tops.append(None)
            else:
                values.append(LOWEST if entry is None else finite(entry.logprob))
                tops.append(
                    {self.names.text(i, other): finite(other.logprob) for i, other in
                     position.items()}
                )  # fmt: skip
            if token not in hidden:
                self.offset += self._length(token, entry, text)
        return {
            "text_offset": offsets,
            "token_logprobs": values,
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _length(self, token: int, entry: Logprob | None, text: str | None) -> int:
        if self.names.tokenizer is None:
            return 0
        own = None if entry is None else entry.decoded_token
        if own is None:
            own = self.names.tokenizer.text_of_token(token)
        return len(own) if text is None or text.startswith(own, self.offset) else 0


def prompt_logprobs(values: Sequence[Position | None] | None) -> list[Any] | None:
    """Return `prompt_logprobs`: a dict from id to its numbers at each position, the first null."""
    if values is None:
        return None
    told: list[Any] = []
    for place, position in enumerate(values):
        if place == 0 or position is None:
            told.append(None)
            continue
        told.append(
            {
                str(token): {
                    "logprob": finite(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": entry.decoded_token,
                }
                for token, entry in position.items()
            }
        )
    return told

"""Small real doubles for tests: they compute what the real part computes, plainly and slowly."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.errors import ValidationError


class DenseAttention:
    """An attention step over plain key/value lists: float32 softmax, one sequence at a time.

    Keeps keys and values of any number of sequences. Call `begin` before each forward, then use
    the object as that forward's `AttentionStep`. Row i of a sequence at position p sees the
    positions j with p - window < j <= p; scores are capped as `cap * tanh(score / cap)`; a sink is
    one more column of scores that attends to nothing.
    """

    def __init__(self) -> None:
        self._cache: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (sequence, layer) -> k, v
        self._parts: list[tuple[int, int]] = []

    def begin(self, query_lens: Sequence[int], sequences: Sequence[int] | None = None) -> Tensor:
        """Announce the next flat batch; return its positions [T] int64.

        Sequence `sequences[s]` (by default s itself) brings `query_lens[s]` tokens that follow
        what it has already.
        """
        names = range(len(query_lens)) if sequences is None else sequences
        self._parts = list(zip(names, query_lens, strict=True))
        starts = [self.length(name) for name, _ in self._parts]
        return torch.cat(
            [
                torch.arange(start, start + count)
                for start, (_, count) in zip(starts, self._parts, strict=True)
            ]
        )

    def length(self, sequence: int) -> int:
        """Return how many tokens of a sequence are kept."""
        return next(
            (k.shape[0] for (name, _), (k, _) in self._cache.items() if name == sequence), 0
        )

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Keep k, v [T, kv_heads, d] and return causal attention [T, heads, d] of q."""
        outputs = []
        at = 0
        for name, count in self._parts:
            part = slice(at, at + count)
            at += count
            keys, values = k[part].float(), v[part].float()
            if (name, layer) in self._cache:
                old_keys, old_values = self._cache[name, layer]
                keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
            self._cache[name, layer] = (keys.clone(), values.clone())
            outputs.append(_softmax_attention(q[part], keys, values, scale, window, softcap, sinks))
        assert at == q.shape[0], f"begin() announced {at} tokens, the forward has {q.shape[0]}"
        return torch.cat(outputs).to(q.dtype)


def _softmax_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention [t, heads, d] of the last t positions over keys, values [n, kv_heads, d]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,nhd->htn", q.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    to = torch.arange(keys.shape[0], device=q.device)
    back = to[-q.shape[0] :].unsqueeze(1) - to  # how far column j lies behind row i, [t, n]
    hidden = back < 0 if window is None else (back < 0) | (back >= window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[0]]
    return torch.einsum("htn,nhd->thd", weights, values)


class ByteTokens:
    """As much of a tokenizer as stages ask for: a token a byte, ids 0..255, in a vocabulary of n.

    Raises ValidationError for text that needs an id from `size` on.
    """

    def __init__(self, size: int = 256) -> None:
        self.vocab_size = size
        self.max_token_id = size - 1
        self.special_ids: frozenset[int] = frozenset()
        self.bos_token_id = self.eos_token_id = self.pad_token_id = None
        self.end_ids: frozenset[int] = frozenset()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the bytes of `text`."""
        ids = list(text.encode())
        if ids and max(ids) >= self.vocab_size:
            raise ValidationError(
                f"text must be spelt with ids below {self.vocab_size}, got {text!r}",
                parameter="text",
                value=text,
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of `ids`; what is no byte is left out."""
        return bytes(token for token in ids if 0 <= token < 256).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token, nothing outside the vocabulary."""
        return bytes([token_id]) if self.has_token(token_id) else b""

    def piece(self, token_id: int) -> str | bytes:
        """Return the text of a token by itself."""
        return self.token_bytes(token_id)

    def has_token(self, token_id: int) -> bool:
        """Say whether an id has a text."""
        return 0 <= token_id < min(self.vocab_size, 256)

    def bad_word_sequences(self, word: str) -> list[list[int]]:
        """Return the bare and the spaced form of a word."""
        forms = [self.encode(word, False), self.encode(f" {word}", False)]
        return [form for form in forms if form]

    def decoded_tokens(self, ids: Sequence[int], context_ids: Sequence[int] = ()) -> list[str]:
        """Return the text of each token, as observers ask for it."""
        return [self.token_bytes(token).decode(errors="replace") for token in ids]

    def ids(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        return self.encode(text, False)

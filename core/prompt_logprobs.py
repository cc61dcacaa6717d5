"""Log-probabilities of a prompt's own tokens, collected while the prompt is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .detokenizer import decoded_tokens
from .logprobs import FlatLogprobs, Logprob, PromptLogprobs
from .tokenizer import Tokenizer


class PromptCollector:
    """Raw log-probabilities of prompt tokens, in order; position 0 has none.

    `count` is how many alternatives are listed at each position, -1 for the whole vocabulary; ids
    past the tokenizer are left out.
    """

    def __init__(
        self,
        count: int,
        prompt_ids: Sequence[int],
        *,
        tokenizer: Tokenizer | None,
        tokenizer_size: int,
        flat: bool,
    ) -> None:
        self.count = tokenizer_size if count == -1 else count
        self.prompt_ids = prompt_ids
        self.tokenizer = tokenizer
        self.tokenizer_size = tokenizer_size
        self.values: PromptLogprobs = FlatLogprobs() if flat else [None]
        if isinstance(self.values, FlatLogprobs):
            self.values.append(None)

    @property
    def next_position(self) -> int:
        """The first prompt position that is not collected yet."""
        return len(self.values)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Take raw logits float32 [n, vocab] that predict the prompt tokens `targets` [n]."""
        scores = torch.log_softmax(logits[:, : self.tokenizer_size], 1)
        inside = targets < self.tokenizer_size
        chosen = scores.gather(1, targets.clamp(max=self.tokenizer_size - 1)[:, None])
        chosen = chosen.masked_fill(~inside[:, None], -torch.inf)
        ranks = (scores > chosen).sum(1) + 1
        width = min(self.count, self.tokenizer_size)
        top = scores.topk(width, 1) if width else None
        for row, target in enumerate(targets.tolist()):
            entries = {target: (float(chosen[row]), int(ranks[row]))}
            if top is not None:
                listed = zip(top.indices[row].tolist(), top.values[row].tolist(), strict=True)
                ordered = sorted(listed, key=lambda pair: (-pair[1], pair[0]))
                rank = 0
                last = None
                for place, (token, value) in enumerate(ordered, 1):
                    rank = rank if value == last else place
                    last = value
                    entries.setdefault(token, (value, rank))
            self._append(entries)

    def _append(self, entries: dict[int, tuple[float, int]]) -> None:
        position = len(self.values)
        ids = list(entries)
        texts: list[Any] = [None] * len(ids)
        if self.tokenizer is not None:
            context = self.prompt_ids[max(position - 8, 0) : position]
            texts = list(decoded_tokens(self.tokenizer, ids, context))
        listed = zip(ids, entries.values(), texts, strict=True)
        self.values.append(
            {token: Logprob(value, rank, text) for token, (value, rank), text in listed}
        )

"""A model beside the engine's own, with a cache of its own that follows the sequences it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from .errors import ValidationError
from .kv_cache import BlockPool
from .models.config import CausalLM, LoadedModel, ModelSpec
from .stage import AttentionBackend, AttentionPlan, KVLayout
from .tokenizer import Tokenizer


@dataclass(eq=False, slots=True)
class Memory:
    """What one reader has read: the tokens whose keys and values are in its blocks."""

    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


class FurtherModel:
    """Reads tokens and says what may follow. `allocate` must be called before the first `read`."""

    def __init__(
        self,
        load: Callable[[], LoadedModel],
        backend_type: type[AttentionBackend],
        layout_of: Callable[[ModelSpec], KVLayout],
        *,
        max_tokens: int,
    ) -> None:
        """At most `max_tokens` are computed at once. `load` is called again after deep sleep."""
        loaded = load()
        self.load = load
        self.loaded = replace(loaded, model=cast(Any, None))  # all of it but the weights
        self.model: CausalLM = loaded.model
        self.layout = layout_of(loaded.spec)
        self.bytes_per_block = backend_type.bytes_per_block(self.layout)
        self.vocab_size = loaded.spec.vocab_size
        self._longest = loaded.spec.max_position
        self._device = loaded.spec.device
        self._backend_type = backend_type
        self._max_tokens = max_tokens
        self._memories: set[Memory] = set()

    def allocate(self, num_blocks: int) -> None:
        """Make the cache."""
        self.pool = BlockPool(num_blocks, self.layout.block_size)
        self.backend = self._backend_type(replace(self.layout, num_blocks=num_blocks))

    def open(self) -> Memory:
        """Return the memory of one reader, empty."""
        memory = Memory()
        self._memories.add(memory)
        return memory

    def close(self, memory: Memory) -> None:
        """Give the room of a reader back."""
        self._memories.discard(memory)
        self._cut(memory, 0)

    def release(self) -> None:
        """Give the cache's memory back until `backend.restore`; every reader reads anew then."""
        for memory in self._memories:
            self._cut(memory, 0)
        self.backend.release()

    @torch.inference_mode()
    def read(self, asked: Sequence[tuple[Memory, Sequence[int]]]) -> tuple[list[int], Tensor]:
        """Read all tokens of each (memory, tokens); see `core.proposer.FurtherModel`."""
        places: list[int] = []
        for place, (memory, tokens) in enumerate(asked):
            self._cut(memory, _common(memory.tokens, tokens))
            need = self.pool.blocks_for(len(tokens)) - len(memory.blocks)
            blocks = self.pool.allocate(max(need, 0))
            if blocks is None or len(tokens) > self._longest:
                self.pool.free(blocks or [])
                continue
            memory.blocks += blocks
            places.append(place)
        work = [asked[place] for place in places]
        last: list[Tensor | None] = [None] * len(work)  # hidden states of the last tokens
        while any(hidden is None for hidden in last):
            self._advance(work, last)
        rows = [hidden for hidden in last if hidden is not None]
        if not rows:
            return [], torch.empty(0, self.vocab_size)
        return places, self.model.logits(torch.stack(rows))

    def _advance(
        self, work: Sequence[tuple[Memory, Sequence[int]]], last: list[Tensor | None]
    ) -> None:
        """Compute the next tokens of all, as many as go at once."""
        ids: list[int] = []
        positions: list[int] = []
        counts: list[int] = []
        ends: list[int] = []
        tables: list[list[int]] = []
        parts: list[tuple[int, int]] = []  # place in `work`, row of its last token in this step
        for place, (memory, tokens) in enumerate(work):
            begin = len(memory.tokens)
            count = min(len(tokens) - begin, self._max_tokens - len(ids))
            if count <= 0:
                continue
            ids += tokens[begin : begin + count]
            positions += range(begin, begin + count)
            counts.append(count)
            ends.append(begin + count)
            tables.append(memory.blocks)
            memory.tokens += tokens[begin : begin + count]
            if len(memory.tokens) == len(tokens):
                parts.append((place, len(ids) - 1))
        hidden = self.model.forward(
            torch.tensor(ids, dtype=torch.int64, device=self._device),
            torch.tensor(positions, dtype=torch.int64, device=self._device),
            self.backend.begin(AttentionPlan(counts, ends, tables)),
        )
        for place, row in parts:
            last[place] = hidden[row]

    def _cut(self, memory: Memory, length: int) -> None:
        """Keep the first `length` tokens of a memory."""
        del memory.tokens[length:]
        keep = self.pool.blocks_for(length)
        self.pool.free(memory.blocks[keep:])
        del memory.blocks[keep:]


def check_tokenizers(
    name: str, own: Tokenizer | None, other: Tokenizer | None, sizes: tuple[int, int]
) -> None:
    """Refuse a further model whose ids mean other texts than the engine's.

    `sizes` are the numbers of logits of the engine's model and of this one.
    """
    if own is None or other is None:
        if sizes[0] != sizes[1]:
            raise ValidationError(
                f"speculative_config.model {name!r} has a vocabulary of {sizes[1]} tokens and the "
                f"engine's model one of {sizes[0]}; a draft model needs the same tokenizer",
                parameter="speculative_config.model",
                value=name,
            )
        return
    ours, theirs = own.hf.get_vocab(), other.hf.get_vocab()
    if ours != theirs:
        strange = sum(theirs.get(text) != token for text, token in ours.items())
        strange += sum(text not in ours for text in theirs)
        raise ValidationError(
            f"speculative_config.model {name!r} has another tokenizer than the engine's model "
            f"({strange} tokens differ); a draft model needs the same",
            parameter="speculative_config.model",
            value=name,
        )


def _common(known: Sequence[int], wanted: Sequence[int]) -> int:
    """Return how many leading tokens agree, always leaving the last one to compute."""
    most = min(len(known), len(wanted) - 1)
    if known[:most] == wanted[:most]:
        return most
    return next(i for i in range(most) if known[i] != wanted[i])

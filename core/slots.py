"""Per-request numbers on the device, in tables with one row a slot; a slot never moves.

`SlotTable` holds the scalars of stages as columns, `SeenTokens` which tokens a sequence has seen
and how often. Both are written when a sequence gets its slot and read by index at each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..kernels.lang import INTERPRETED


class SlotTable:
    """Columns by (stage instance, parameter), each a tensor [max_slots]."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self.max_slots = max_slots
        self.vocab_size = vocab_size
        self.device = device
        self._columns: dict[tuple[str, str], Tensor] = {}
        self._seen: SeenTokens | None = None

    @property
    def seen(self) -> SeenTokens:
        """The token history table; made on first use, since most requests need none."""
        if self._seen is None:
            self._seen = SeenTokens(self.max_slots, self.vocab_size, self.device)
        return self._seen

    def write(self, slot: int, instance: str, values: Mapping[str, float | int]) -> None:
        """Store a stage's scalars for `slot`; integers become int64 columns, floats float32."""
        for name, value in values.items():
            column = self._columns.get((instance, name))
            if column is None or (isinstance(value, float) and not column.is_floating_point()):
                column = self._new_column(column, instance, name, isinstance(value, float))
            column[slot] = value

    def column(self, instance: str, name: str) -> Tensor:
        """Return the column [max_slots]; KeyError if no request ever wrote it."""
        return self._columns[instance, name]

    def _new_column(self, old: Tensor | None, instance: str, name: str, floating: bool) -> Tensor:
        dtype = torch.float32 if floating else torch.int64
        column = torch.zeros(self.max_slots, dtype=dtype, device=self.device)
        if old is not None:
            column.copy_(old)
        self._columns[instance, name] = column
        return column


class SeenTokens:
    """For each slot: the distinct tokens seen, their output counts, and whether they are prompt.

    `ids` is a padded list [max_slots, capacity]; the padding repeats a token that the slot has
    seen, so that gather, change and scatter over a padded row write equal values twice.
    """

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self.device = device
        self.counts = torch.zeros(max_slots, vocab_size, dtype=torch.int32, device=device)
        self.in_prompt = torch.zeros(max_slots, vocab_size, dtype=torch.bool, device=device)
        # Bit i % 32 of word i // 32: token i was seen. Read by the kernels of a device alone.
        words = -(-vocab_size // 32) if device.type != "cpu" or INTERPRETED else 0
        self.bits = torch.zeros(max_slots, words, dtype=torch.int32, device=device)
        self.ids = torch.zeros(max_slots, 64, dtype=torch.int64, device=device)
        self._lengths = [0] * max_slots  # upper bound of distinct tokens, known to the host
        self._ends = torch.zeros(max_slots, dtype=torch.int64, device=device)

    def open(self, slot: int, prompt: Sequence[int], output: Sequence[int] = ()) -> None:
        """Set the history of `slot`, whatever was there before."""
        self.counts[slot].zero_()
        self.in_prompt[slot].zero_()
        inside = torch.tensor(sorted(set(prompt)), dtype=torch.int64, device=self.device)
        self.in_prompt[slot, inside] = True
        distinct = sorted(set(prompt) | set(output))
        self._reserve(max(len(distinct), 1))
        self._lengths[slot] = len(distinct)
        self._ends[slot] = len(distinct)
        self.ids[slot].fill_(distinct[0] if distinct else 0)
        self.ids[slot, : len(distinct)] = torch.tensor(
            distinct, dtype=torch.int64, device=self.device
        )
        if output:
            produced = torch.tensor(list(output), dtype=torch.int64, device=self.device)
            ones = torch.ones_like(produced, dtype=torch.int32)
            self.counts[slot].index_add_(0, produced, ones)
        self._write_bits(slot)

    def accept(self, slots: Tensor, host_slots: Sequence[int], tokens: Tensor) -> None:
        """Count one generated token for each slot; `slots` and `tokens` are int64 [rows]."""
        for slot in host_slots:
            self._lengths[slot] += 1
        self._reserve(max(self._lengths[slot] for slot in host_slots))
        fresh = (self.counts[slots, tokens] == 0) & ~self.in_prompt[slots, tokens]
        ends = self._ends[slots]
        # A token seen before is written onto the list's last place again: the same value twice.
        kept = self.ids[slots, ends.clamp(max=self.ids.shape[1] - 1)]
        self.ids[slots, ends] = torch.where(fresh, tokens, kept)
        self._ends[slots] = ends + fresh
        self.counts[slots, tokens] += 1
        if self.bits.shape[1]:
            words = self.bits[slots, tokens >> 5]
            self.bits[slots, tokens >> 5] = words | (1 << (tokens & 31)).int()

    def copy(self, source: int, target: int) -> None:
        """Make the history of slot `target` that of `source`."""
        for table in (self.counts, self.in_prompt, self.ids, self._ends):
            table[target] = table[source]
        self._lengths[target] = self._lengths[source]

    def rollback(self, slot: int, tokens: Sequence[int]) -> None:
        """Take generated tokens back; a token left without a count stays listed, harmlessly."""
        gone = torch.tensor(list(tokens), dtype=torch.int64, device=self.device)
        self.counts[slot].index_add_(0, gone, torch.full_like(gone, -1, dtype=torch.int32))
        self._write_bits(slot)

    def _write_bits(self, slot: int) -> None:
        """Set the bits of `slot` from its counts and its prompt."""
        words = self.bits.shape[1]
        if not words:
            return
        seen = (self.counts[slot] > 0) | self.in_prompt[slot]
        padded = torch.nn.functional.pad(seen, (0, 32 * words - len(seen))).view(words, 32)
        places = torch.arange(32, device=self.device)
        self.bits[slot] = (padded.long() << places).sum(1).int()  # wraps to the same 32 bits

    def width(self, host_slots: Sequence[int]) -> int:
        """Return how many list places cover every slot in `host_slots`."""
        return max(self._lengths[slot] for slot in host_slots)

    def _reserve(self, length: int) -> None:
        capacity = self.ids.shape[1]
        if length < capacity:
            return
        grown = max(length + 1, 2 * capacity)
        wider = self.ids[:, :1].expand(-1, grown).clone()
        wider[:, :capacity] = self.ids
        self.ids = wider

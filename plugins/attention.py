"""The attention implementations on offer: paged attention through torch's own kernels.

Decoding sequences with equally many pages are attended together, so nobody is padded to the
longest; how a sequence is summed depends on its own length only.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..core.hookspecs import hookimpl
from ..core.stage import AttentionBackend, AttentionPlan, KVLayout
from ..kernels.ops import attend_grouped, read_pages, write_pages


class _Part(NamedTuple):
    """Sequences of one step that are attended together."""

    rows: Tensor | slice  # flat tokens of this step, [B * n]
    batch: int
    num_queries: int
    tables: Tensor | None  # [B, pages]; None where every key is of this step
    bias: Tensor | None  # [B, 1, n, c]
    causal: bool


class TorchAttention:
    """Paged attention by `scaled_dot_product_attention`; runs wherever torch does."""

    name: ClassVar[str] = "torch"

    @classmethod
    def unsupported(cls, layout: KVLayout) -> str | None:
        return None

    @classmethod
    def bytes_per_block(cls, layout: KVLayout) -> int:
        values = layout.num_layers * layout.num_kv_heads * layout.block_size * layout.head_dim
        return 2 * values * layout.dtype.itemsize

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.restore()

    def release(self) -> None:
        self.keys.clear()
        self.values.clear()

    def restore(self) -> None:
        layout = self.layout
        shape = (layout.num_kv_heads, layout.num_blocks, layout.block_size, layout.head_dim)
        self.keys[:] = [_zeros(shape, layout) for _ in range(layout.num_layers)]
        self.values[:] = [_zeros(shape, layout) for _ in range(layout.num_layers)]

    def begin(self, plan: AttentionPlan) -> TorchAttentionStep:
        return TorchAttentionStep(self, plan)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if not pairs:
            return
        device = self.layout.device
        sources = torch.tensor([source for source, _ in pairs], device=device)
        targets = torch.tensor([target for _, target in pairs], device=device)
        for cache in (*self.keys, *self.values):
            cache[:, targets] = cache[:, sources]


class TorchAttentionStep:
    """One step: places of the new tokens, and the parts for each window size."""

    def __init__(self, backend: TorchAttention, plan: AttentionPlan) -> None:
        self.backend = backend
        self.plan = plan
        self.layout = backend.layout
        self._parts: dict[int | None, list[_Part]] = {}
        self._places = self._new_places()
        self._fresh = self._fresh_pages()

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
        keys, values = self.backend.keys[layer], self.backend.values[layer]
        if self._fresh is not None:
            keys.index_fill_(1, self._fresh, 0)
            values.index_fill_(1, self._fresh, 0)
        write_pages(keys, self._places, k)
        write_pages(values, self._places, v)
        parts = self._parts.get(window)
        if parts is None:
            parts = self._parts[window] = self._split(window)
        out: Tensor | None = None
        for part in parts:
            queries = self._heads_first(q[part.rows], part)
            if part.tables is None:
                part_keys = self._heads_first(k[part.rows], part)
                part_values = self._heads_first(v[part.rows], part)
            else:
                part_keys = read_pages(keys, part.tables)
                part_values = read_pages(values, part.tables)
                if part.num_queries > 1 and part.bias is not None:
                    length = part.bias.shape[-1]
                    part_keys, part_values = part_keys[:, :, :length], part_values[:, :, :length]
            result = attend_grouped(
                queries, part_keys, part_values, part.bias,
                scale=scale, causal=part.causal, softcap=softcap, sinks=sinks,
            )  # fmt: skip
            flat = result.transpose(1, 2).reshape(-1, q.shape[1], q.shape[2])
            if len(parts) == 1:
                return flat
            out = q.new_empty(q.shape) if out is None else out
            out[part.rows] = flat
        assert out is not None
        return out

    @staticmethod
    def _heads_first(rows: Tensor, part: _Part) -> Tensor:
        return rows.view(part.batch, part.num_queries, *rows.shape[1:]).transpose(1, 2)

    # --- preparation --------------------------------------------------------------------------

    def _new_places(self) -> Tensor:
        size = self.layout.block_size
        places: list[int] = []
        plan = self.plan
        for count, end, table in zip(
            plan.query_lens, plan.context_lens, plan.block_tables, strict=True
        ):
            places.extend(table[at // size] * size + at % size for at in range(end - count, end))
        return torch.tensor(places, dtype=torch.int64, device=self.layout.device)

    def _fresh_pages(self) -> Tensor | None:
        """Return the pages that are begun in this step and not filled; None if there are none.

        They are cleared first: the places after a sequence's end are read too, with weight 0, and
        NaN that a broken request left there would survive that.
        """
        size = self.layout.block_size
        plan = self.plan
        pages = [
            table[(end - 1) // size]
            for count, end, table in zip(
                plan.query_lens, plan.context_lens, plan.block_tables, strict=True
            )
            if 0 < end % size <= count
        ]
        return torch.tensor(pages, device=self.layout.device) if pages else None

    def _split(self, window: int | None) -> list[_Part]:
        """Group sequences: decoding ones by number of pages, prefilling ones by exact shape."""
        size = self.layout.block_size
        groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (count, end) in enumerate(
            zip(self.plan.query_lens, self.plan.context_lens, strict=True)
        ):
            if count == 1:
                first = self._first_page(end, window)
                groups[1, (end + size - 1) // size - first].append(index)
            else:
                groups[count, -end].append(index)
        return [
            self._decode_part(members, window)
            if key[0] == 1
            else self._prefill_part(members, window)
            for key, members in groups.items()
        ]

    def _first_page(self, end: int, window: int | None) -> int:
        return 0 if window is None else max(0, end - window) // self.layout.block_size

    def _rows(self, members: Iterable[int]) -> Tensor | slice:
        chosen = list(members)
        counts = self.plan.query_lens
        if len(chosen) == len(counts):
            return slice(None)
        starts = [0]
        for count in counts:
            starts.append(starts[-1] + count)
        rows = [row for index in chosen for row in range(starts[index], starts[index + 1])]
        if rows[-1] - rows[0] + 1 == len(rows):
            return slice(rows[0], rows[-1] + 1)
        return torch.tensor(rows, dtype=torch.int64, device=self.layout.device)

    def _decode_part(self, members: list[int], window: int | None) -> _Part:
        size, device = self.layout.block_size, self.layout.device
        ends = [self.plan.context_lens[index] for index in members]
        firsts = [self._first_page(end, window) for end in ends]
        count = (ends[0] + size - 1) // size - firsts[0]
        tables = torch.tensor(
            [
                list(self.plan.block_tables[index][first : first + count])
                for index, first in zip(members, firsts, strict=True)
            ],
            dtype=torch.int64,
            device=device,
        )
        starts = torch.tensor(firsts, device=device)[:, None] * size
        at = starts + torch.arange(count * size, device=device)
        ends_column = torch.tensor(ends, device=device)[:, None]
        visible = at < ends_column
        if window is not None:
            visible &= at >= ends_column - window
        bias = None if bool(visible.all()) else _bias(visible[:, None, None, :], self.layout.dtype)
        return _Part(self._rows(members), len(members), 1, tables, bias, causal=False)

    def _prefill_part(self, members: list[int], window: int | None) -> _Part:
        device, size = self.layout.device, self.layout.block_size
        count = self.plan.query_lens[members[0]]
        end = self.plan.context_lens[members[0]]
        rows = self._rows(members)
        if count == end and (window is None or window >= end):
            return _Part(rows, len(members), count, None, None, causal=True)
        queries = torch.arange(end - count, end, device=device)[:, None]
        keys = torch.arange(end, device=device)[None, :]
        visible = keys <= queries
        if window is not None:
            visible &= keys > queries - window
        bias = _bias(visible[None, None], self.layout.dtype)
        if count == end:
            return _Part(rows, len(members), count, None, bias, causal=False)
        pages = (end + size - 1) // size
        tables = torch.tensor(
            [list(self.plan.block_tables[index][:pages]) for index in members],
            dtype=torch.int64,
            device=device,
        )
        return _Part(rows, len(members), count, tables, bias, causal=False)


def _zeros(shape: Sequence[int], layout: KVLayout) -> Tensor:
    """Return zeros; on a CPU pages of memory are taken only when they are first written."""
    if layout.device.type != "cpu":
        return torch.zeros(shape, dtype=layout.dtype, device=layout.device)
    raw = np.zeros(math.prod(shape) * layout.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(layout.dtype).view(shape)


def _bias(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, -torch.inf
    )


@hookimpl
def decodekit_attention_backends() -> list[type[AttentionBackend]]:
    """Offer torch's attention."""
    return [TorchAttention]

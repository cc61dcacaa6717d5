"""Runs fused chains: workspace, launch sizes, and the arguments of generated kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .codegen import BROKEN, UNSURE, Generator, columns_of, module_of, num_summaries
from .lang import INTERPRETED
from .program import Program
from .reference.mass import num_segments

__all__ = ["BROKEN", "UNSURE", "Batch", "FusedChain", "History", "Result", "list_class"]


class ListClass(NamedTuple):
    """Sizes that a select kernel is built with."""

    entries: int  # N, places of a list
    groups: int  # G, groups of sub-segments whose maxima give the cut
    cap: int  # the largest top-k that the list is made for


LIST_CLASSES = (ListClass(128, 256, 64), ListClass(512, 512, 300), ListClass(1024, 1024, 480))


class History(NamedTuple):
    """What tokens a slot has seen, each [slots, ...]."""

    bits: Tensor  # int32 [slots, V / 32], bit i % 32 of word i // 32: token i was seen
    counts: Tensor  # int32 [slots, V], how often generated
    in_prompt: Tensor  # bool [slots, V]


class Sparse(NamedTuple):
    """Numbers that are added to some ids of each row."""

    starts: Tensor  # int32 [B + 1]
    ids: Tensor  # int32
    adds: Tensor  # float32


class Bits(NamedTuple):
    """Masks of rows."""

    words: Tensor  # int32 [n, V / 32], 1 where a token is allowed
    lines: Tensor  # int32 [B], the line of a row's mask, -1 for none


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one launch; row i of the result is place i here."""

    rows: Tensor  # int32 [B], lines of the logits
    slots: Tensor  # int32 [B], -1 for a row to leave alone
    keys: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]
    branches: Tensor  # int64 [B]
    same: bool = False  # row i is line i of the logits


class Result(NamedTuple):
    """What a launch gives, on the device."""

    tokens: Tensor  # int64 [B], -1 where a flag is set
    flags: Tensor  # int32 [B]
    logprobs: Tensor | None  # float32 [B], of the tokens, before every stage
    ranks: Tensor | None  # int64 [B]
    top_ids: Tensor | None  # int32 [B, n]
    top_logprobs: Tensor | None  # float32 [B, n]
    kept: Tensor | None  # int32 [B, N], what the picker chose from, -1 between


@dataclass(slots=True)
class _Space:
    """Tensors that a launch writes; made once for the largest batch."""

    sub: Tensor
    mass: Tensor
    raw_sub: Tensor
    raw_mass: Tensor
    sums: Tensor
    scratch: Tensor
    lists: Tensor
    tokens: Tensor
    flags: Tensor
    logprobs: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor
    kept: Tensor


class _Work(NamedTuple):
    """What both kernels of one run are given."""

    logits: Tensor
    batch: Batch
    space: _Space
    pointers: list[Any]
    segments: int
    padded: int  # segments, rounded up to a power of two
    sizes: ListClass


def list_class(longest: int) -> ListClass:
    """Return the sizes for top-k up to `longest`."""
    return next((each for each in LIST_CLASSES if longest <= each.cap), LIST_CLASSES[-1])


@dataclass
class FusedChain:
    """The kernels of one program with their workspace.

    Not to be used by two streams at once. Sizes follow the largest batch so far: capture a graph
    after a run of that batch.
    """

    program: Program
    vocab_size: int
    tokenizer_size: int
    device: torch.device
    segments_a_program: int = 0  # 0: chosen by the batch
    scan_warps: int = 4
    select_warps: int = 8
    _space: _Space | None = field(default=None, init=False)
    _module: Any = field(default=None, init=False)
    _generator: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._module = module_of(self.program)
        self._generator = Generator(self.program)

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The columns of the slot table that the kernels read, (instance, name)."""
        return list(self._generator.columns)

    def run(
        self,
        logits: Tensor,
        batch: Batch,
        columns: Mapping[tuple[str, str], Tensor],
        history: History | None = None,
        sparse: Mapping[int, Sparse] | None = None,
        bits: Mapping[int, Bits] | None = None,
        longest: int = 50,
    ) -> Result:
        """Choose a token for each row of `batch`; `longest` is the largest k of a top-k in it.

        `logits` [R, V] float32, bfloat16 or float16, with unit stride in a row. `sparse` and `bits`
        belong to steps of the program by place.
        """
        count = len(batch.rows)
        sizes = list_class(longest)
        segments = num_segments(self.vocab_size)
        padded = max(1 << (segments - 1).bit_length(), 4)
        sizes = ListClass(sizes.entries, min(sizes.groups, 4 * padded), sizes.cap)
        space = self._reserve(count, segments, padded, sizes)
        pointers = self._pointers(columns, history, sparse or {}, bits or {})
        work = _Work(logits, batch, space, pointers, segments, padded, sizes)
        self._scan(work, count)
        self._select(work, count)
        outputs = self.program.outputs
        top = outputs.num_top
        raw = outputs.raw or top > 0
        return Result(
            space.tokens[:count],
            space.flags[:count],
            space.logprobs[:count] if raw else None,
            space.ranks[:count] if top else None,
            space.top_ids[: count * top].view(count, top) if top else None,
            space.top_values[: count * top].view(count, top) if top else None,
            space.kept[:count] if self._generator.keeps else None,
        )

    def _scan(self, work: _Work, count: int) -> None:
        owner = self._generator
        space, batch, logits = work.space, work.batch, work.logits
        # Small tiles where a batch would leave the device idle, or where the history of a token
        # takes so many registers that with large ones too few programs would wait for memory.
        tile = self.segments_a_program or (4 if owner.history or count <= 8 else 16)
        extra: list[Any] = []
        if owner.raw:
            extra += [space.raw_sub, space.raw_mass]
        constants: dict[str, Any] = {"T": tile, "SAME": batch.same}
        if owner.statistics:
            extra.append(space.sums)
            constants["STATS"] = num_summaries(self.program)
        self._module.scan[(-(-work.segments // tile), count)](
            *(logits, logits.stride(0), batch.rows, batch.slots),
            *(self.vocab_size, self.tokenizer_size, work.segments, space.sub, space.mass),
            *extra,
            *work.pointers,
            **constants,
            num_warps=self.scan_warps,
            enable_fp_fusion=False,
        )

    def _select(self, work: _Work, count: int) -> None:
        owner = self._generator
        space, batch, logits, sizes = work.space, work.batch, work.logits, work.sizes
        extra: list[Any] = []
        if owner.raw:
            extra += [space.raw_sub, space.raw_mass, space.logprobs]
        if self.program.outputs.num_top:
            extra += [space.ranks, space.top_ids, space.top_values]
        if owner.keeps:
            extra.append(space.kept)
        constants: dict[str, Any] = {
            "P": work.padded,
            "G": sizes.groups,
            "N": sizes.entries,
            "CAP": sizes.cap,
            "SAME": batch.same,
        }
        if owner.statistics:
            extra.append(space.sums)
            constants["STATS"] = num_summaries(self.program)
        self._module.select[(count,)](
            *(logits, logits.stride(0), batch.rows, batch.slots),
            *(batch.keys, batch.positions, batch.branches),
            *(self.vocab_size, self.tokenizer_size, work.segments, space.sub, space.mass),
            *extra,
            *(space.scratch, space.lists, space.tokens, space.flags),
            *work.pointers,
            **constants,
            num_warps=self.select_warps,
            enable_fp_fusion=False,
            launch_pdl=not INTERPRETED,  # starts while the scan ends, and waits for it
        )

    def _pointers(
        self,
        columns: Mapping[tuple[str, str], Tensor],
        history: History | None,
        sparse: Mapping[int, Sparse],
        bits: Mapping[int, Bits],
    ) -> list[Any]:
        """Return the columns and the other tables in the order of the kernels' arguments."""
        owner = self._generator
        found: list[Any] = [columns[column] for column in columns_of(self.program)]
        if owner.history:
            assert history is not None
            found += [history.bits, history.bits.stride(0)]
            if "count" in owner.history:
                found += [history.counts, history.counts.stride(0)]
            if "in_prompt" in owner.history:
                found += [history.in_prompt, history.in_prompt.stride(0)]
        for place in owner.sparse:
            found += [*sparse[place]]
        for place in owner.bits:
            found += [bits[place].words, bits[place].words.stride(0), bits[place].lines]
        return found

    def _reserve(self, count: int, segments: int, padded: int, sizes: ListClass) -> _Space:
        space = self._space
        entries = sizes.entries
        if space is not None:
            if len(space.tokens) >= count and space.lists.shape[1] >= entries:
                return space
            count = max(count, len(space.tokens))
            entries = max(entries, space.lists.shape[1])
        top = max(self.program.outputs.num_top, 1)
        summaries = max(num_summaries(self.program), 1)
        keeps = count if self._generator.keeps else 0
        whole, short, real = torch.int64, torch.int32, torch.float32

        def empty(dtype: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=self.device)

        self._space = _Space(
            sub=empty(real, count, 4 * segments),
            mass=empty(whole, count, segments),
            raw_sub=empty(real, count, 4 * segments),
            raw_mass=empty(whole, count, segments),
            sums=empty(whole, count, segments, summaries),
            scratch=empty(short, count, 4 * padded),
            lists=empty(whole, count, entries),
            tokens=empty(whole, count),
            flags=empty(short, count),
            logprobs=empty(real, count),
            ranks=empty(whole, count),
            top_ids=empty(short, count * top),
            top_values=empty(real, count * top),
            kept=empty(short, keeps, entries),
        )
        return self._space

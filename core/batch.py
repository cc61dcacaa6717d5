"""What one step shows to stages, pickers and observers: rows, ranked lists and taps.

Nothing here knows a particular stage or the scheduler; rows are made by `chain.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..kernels.reference.mass import token_mass
from ..kernels.reference.noise import (
    exponential_for_ids,
    purpose_of,
    signed_key,
    uniform_for_ids,
)
from ..kernels.reference.ranked import rank_all, rank_top
from .slots import SlotTable

Built = TypeVar("Built")


class RowSource(Protocol):
    """What a row needs of its sequence."""

    @property
    def slot(self) -> int: ...
    @property
    def key(self) -> int: ...
    @property
    def branch(self) -> int: ...
    @property
    def prompt_ids(self) -> Sequence[int]: ...
    @property
    def output_ids(self) -> Sequence[int]: ...


class Seen(NamedTuple):
    """Distinct tokens of each row's history, padded with repeats."""

    ids: Tensor  # [rows, width] int64
    counts: Tensor  # [rows, width] int32, how often generated
    in_prompt: Tensor  # [rows, width] bool


class Rows:
    """A group of rows that run one program together; kept while its membership stays."""

    def __init__(
        self, sources: Sequence[RowSource], table: SlotTable, vocab_size: int, tokenizer_size: int
    ) -> None:
        self.sources = sources
        self.table = table
        self.vocab_size = vocab_size
        self.tokenizer_size = tokenizer_size
        self.host_slots = [source.slot for source in sources]
        int64 = partial(torch.tensor, dtype=torch.int64, device=table.device)
        self.slots = int64(self.host_slots)
        self.keys = int64([signed_key(source.key) for source in sources])
        self.branches = int64([source.branch for source in sources])
        self.positions = np.zeros(len(sources), dtype=np.int64)  # on the host
        self.cache: dict[Hashable, Any] = {}
        self._seen: Seen | None = None

    def __len__(self) -> int:
        return len(self.sources)

    def advance(self) -> None:
        """Read the positions of this step from the sequences."""
        self.positions = np.fromiter(
            (len(source.output_ids) for source in self.sources), np.int64, len(self.sources)
        )
        self._seen = None

    def seen(self) -> Seen:
        """Return this step's token history; gathered once for all stages."""
        if self._seen is None:
            seen = self.table.seen
            width = max(seen.width(self.host_slots), 1)
            ids = seen.ids[self.slots, :width]
            slots = self.slots[:, None]
            self._seen = Seen(ids, seen.counts[slots, ids], seen.in_prompt[slots, ids])
        return self._seen

    def select(self, indices: Sequence[int]) -> Rows:
        """Return the rows `indices` as a group of their own, at this step's positions."""
        part = Rows(
            [self.sources[i] for i in indices], self.table, self.vocab_size, self.tokenizer_size
        )
        part.positions = self.positions[list(indices)]
        return part


class RowView:
    """One stage's view of its rows; every list and tensor is in row order."""

    __slots__ = ("_purpose", "instance", "mode", "params", "rows", "stage", "states", "min_keep")

    def __init__(
        self,
        rows: Rows,
        *,
        stage: str,
        instance: str,
        params: Sequence[Any],
        states: Sequence[Any],
        mode: Any = (),
        min_keep: bool = False,
    ) -> None:
        self.rows = rows
        self.stage = stage
        self.instance = instance
        self.params = params
        self.states = states
        self.mode = mode  # what the stage's `structure` returned
        self.min_keep = min_keep
        self._purpose: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def slots(self) -> Tensor:
        """Slots of the rows, int64 [rows]."""
        return self.rows.slots

    @property
    def device(self) -> torch.device:
        """The device of every tensor here."""
        return self.rows.table.device

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.rows.vocab_size

    @property
    def tokenizer_size(self) -> int:
        """Number of ids that the tokenizer knows."""
        return self.rows.tokenizer_size

    @property
    def positions(self) -> Tensor:
        """Tokens generated so far, int64 [rows]."""
        return torch.from_numpy(self.rows.positions).to(self.device)

    @property
    def host_positions(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The same on the host."""
        return self.rows.positions

    @property
    def seen(self) -> Seen:
        """The token history; the stage must declare Need.COUNTS."""
        return self.rows.seen()

    def column(self, name: str) -> Tensor:
        """Return the scalar parameter `name` of each row, [rows]."""
        cache = self.rows.cache
        key = (self.instance, name)
        found = cache.get(key)
        if found is None:
            found = cache[key] = self.rows.table.column(self.instance, name)[self.rows.slots]
        return found

    def prompt(self, row: int) -> Sequence[int]:
        """Return the prompt ids of a row."""
        return self.rows.sources[row].prompt_ids

    def output(self, row: int) -> Sequence[int]:
        """Return the generated ids of a row."""
        return self.rows.sources[row].output_ids

    def uniform(self, ids: Tensor, purpose: int | None = None) -> Tensor:
        """Return addressed uniforms in (0, 1), float64 in the shape of `ids` [rows, n].

        The address is (request key, position, branch, this instance, id); `purpose` replaces the
        instance for the pickers that the design numbers.
        """
        rows = self.rows
        return uniform_for_ids(
            rows.keys, self.positions, rows.branches, self._address(purpose), ids
        )

    def exponential(self, ids: Tensor, purpose: int | None = None) -> Tensor:
        """Return addressed Exp(1) draws, float64 in the shape of `ids` [rows, n]."""
        rows = self.rows
        return exponential_for_ids(
            rows.keys, self.positions, rows.branches, self._address(purpose), ids
        )

    def cached(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """Return what `build` made for these rows; built once while the membership stays."""
        cache = self.rows.cache
        full = (self.instance, "cached", key)
        if full not in cache:
            cache[full] = build()
        built: Built = cache[full]
        return built

    def _address(self, purpose: int | None) -> int:
        if purpose is not None:
            return purpose
        if self._purpose is None:
            self._purpose = purpose_of(self.instance)
        return self._purpose


class Ranking:
    """Tokens of each row in rank order: logit descending, id ascending.

    `values` float32 [rows, n], -inf where dead; `ids` int64 [rows, n]. A short list has a `bound`
    [rows]: no token outside it has a larger value. `whole` marks a list of every alive token.
    """

    __slots__ = ("_alive", "_mass", "_ranks", "_total", "bound", "ids", "total_of", "values")

    def __init__(
        self,
        values: Tensor,
        ids: Tensor,
        bound: Tensor | None = None,
        total_of: Callable[[], Tensor] | None = None,
    ) -> None:
        self.values = values
        self.ids = ids
        self.bound = bound
        self.total_of = total_of  # mass of the whole row, where the list does not hold it
        self._mass: Tensor | None = None
        self._total: Tensor | None = None
        self._alive: Tensor | None = None
        self._ranks: Tensor | None = None

    @classmethod
    def of_row(cls, logits: Tensor) -> Ranking:
        """Rank every token of `logits` [rows, vocab] by a full sort."""
        ranked = rank_all(logits)
        return cls(ranked.values, ranked.ids)

    @property
    def alive(self) -> Tensor:
        """Which entries are alive, bool [rows, n]."""
        if self._alive is None:
            self._alive = self.values > -torch.inf
        return self._alive

    @property
    def ranks(self) -> Tensor:
        """0, 1, 2, ... int64 [n]."""
        if self._ranks is None:
            self._ranks = torch.arange(self.values.shape[1], device=self.values.device)
        return self._ranks

    @property
    def mass(self) -> Tensor:
        """Fixed-point probability masses relative to the row's maximum, int64 [rows, n]."""
        if self._mass is None:
            self._mass = token_mass(self.values, self.values[:, 0])
        return self._mass

    @property
    def total(self) -> Tensor:
        """Mass of all alive tokens of the row, int64 [rows]."""
        if self._total is None:
            self._total = self.mass.sum(1) if self.total_of is None else self.total_of()
        return self._total

    @property
    def mass_before(self) -> Tensor:
        """Mass strictly before each entry in rank order, int64 [rows, n]."""
        return self.mass.cumsum(1) - self.mass

    def keep(self, mask: Tensor) -> Ranking:
        """Return the ranking with only the entries in `mask` alive; its total is their mass."""
        return Ranking(self.values.masked_fill(~mask, -torch.inf), self.ids)

    def write(self, logits: Tensor, mask: Tensor | None = None) -> None:
        """Set `logits` [rows, vocab] to the alive (and `mask`ed) values here, -inf elsewhere."""
        values = self.values if mask is None else self.values.masked_fill(~mask, -torch.inf)
        logits.fill_(-torch.inf)
        logits.scatter_(1, self.ids, values)


class PickView:
    """What a picker chooses from: the ranked kept tokens, or the dense row, or either."""

    def __init__(
        self, *, ranking: Ranking | None, dense: Tensor | None, has_cut: bool, vocab_size: int
    ) -> None:
        self.ranking = ranking
        self.has_cut = has_cut  # some truncation ran in this chain
        self.vocab_size = vocab_size
        self._dense = dense

    @property
    def logits(self) -> Tensor:
        """The final row, float32 [rows, vocab], -inf where dead."""
        if self._dense is None:
            assert self.ranking is not None
            shape = (self.ranking.values.shape[0], self.vocab_size)
            self._dense = self.ranking.values.new_empty(shape)
            self.ranking.write(self._dense)
        return self._dense


class Scored(NamedTuple):
    """What the chain made of one row whose token a driver chooses."""

    logits: Tensor  # float32 [1, vocab], as the picker would have seen it
    raw: Tensor  # float32 [1, known ids] before every stage
    taps: Mapping[Any, TapView]  # of this row


class TapView:
    """The logits at one tap, float32 [rows, vocab]; what observers measure on."""

    def __init__(self, logits: Tensor, elapsed: Callable[[], float] | None = None) -> None:
        self.logits = logits
        self._logprobs: Tensor | None = None
        self._elapsed = elapsed

    @property
    def seconds(self) -> float | None:
        """How long the stage before an `After` took on all its rows; None at other taps.

        Waits for the device.
        """
        return None if self._elapsed is None else self._elapsed()

    def row(self, index: int) -> TapView:
        """Return the view of one row."""
        return TapView(self.logits[index : index + 1], self._elapsed)

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities of the whole rows, float32 [rows, vocab]."""
        if self._logprobs is None:
            self._logprobs = torch.log_softmax(self.logits, 1)  # one pass, unlike logsumexp
        return self._logprobs

    def logprob(self, ids: Tensor) -> Tensor:
        """Log-probabilities of `ids` [rows, n], float32 [rows, n]."""
        return self.logprobs.gather(1, ids)

    def top(self, n: int) -> Ranking:
        """The best `n` tokens of each row in rank order, or all if there are fewer."""
        ranked = rank_top(self.logits, n)
        return Ranking(ranked.values, ranked.ids)

    def rank(self, ids: Tensor) -> Tensor:
        """1 + the number of larger values, int64 [rows] for one id a row [rows]."""
        chosen = self.logits.gather(1, ids[:, None])
        if chosen.device.type == "cpu":  # NumPy counts three times as fast as torch
            counts = np.count_nonzero(self.logits.numpy() > chosen.numpy(), axis=1)
            return torch.from_numpy(counts.astype(np.int64)) + 1
        # Ones as float32 add up fast and, below 2**24 of them, exactly.
        larger = torch.gt(self.logits, chosen, out=torch.empty_like(self.logits))
        return larger.sum(1).long() + 1

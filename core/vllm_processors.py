"""vLLM's interface for custom logits processors, so that classes written for it run unchanged.

A processor sees the batch by row index and is told how rows come, go and move. Give the classes to
`LLM(logits_processors=[...])`; `vllm_host.py` runs them.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from .errors import ValidationError
from .params import SamplingParams

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class MoveDirectionality(Enum):
    """How two rows change places."""

    UNIDIRECTIONAL = auto()  # the first overwrites the second
    SWAP = auto()


RemovedRequest: TypeAlias = int
AddedRequest: TypeAlias = tuple[int, SamplingParams, "list[int] | None", list[int]]
MovedRequest: TypeAlias = tuple[int, int, MoveDirectionality]
RequestLogitsProcessor: TypeAlias = Callable[..., Any]


@dataclass(frozen=True)
class BatchUpdate:
    """How the rows of the batch changed; to be processed as removed, then added, then moved.

    `removed` is sorted descending. An added row may overwrite one that never appears in `removed`.
    The output list of an added row is live: it grows as tokens come.
    """

    batch_size: int
    removed: Sequence[RemovedRequest]
    added: Sequence[AddedRequest]
    moved: Sequence[MovedRequest]


class RowErrors(Exception):
    """Some rows failed; `logits` has what became of the others."""

    def __init__(self, errors: Mapping[int, Exception], logits: torch.Tensor) -> None:
        super().__init__("; ".join(f"row {row}: {error}" for row, error in errors.items()))
        self.errors = errors
        self.logits = logits


class LogitsProcessor(ABC):
    """Changes the logits of the whole batch, one object an engine worker."""

    @classmethod  # noqa: B027  (optional to override)
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for a request that this processor refuses; accepts all by default."""

    @abstractmethod
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Say whether `apply` never changes the greedy choice; asked once, after construction."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows; called before every forward step, with None when none came or went."""

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the changed logits [rows, vocab] float32; may work in place."""


class AdapterLogitsProcessor(LogitsProcessor):
    """Runs one callable a request over its own row.

    The callable takes (output_ids, row) or (prompt_ids, output_ids, row) and returns the row.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Any], Any]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the callable of one request, or None."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Bind the callables of new rows and follow the others."""
        process_dict_updates(self.req_info, batch_update, self._new_state)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Replace each row that has a callable by what it returns.

        Where callables raise, the other rows are done all the same; RowErrors tells of both.
        """
        errors: dict[int, Exception] = {}
        for row, process in self.req_info.items():
            before = logits[row]
            try:
                after = process(before)
                if after is not before:
                    logits[row] = after
            except Exception as error:
                errors[row] = error
        if errors:
            raise RowErrors(errors, logits)
        return logits

    def _new_state(
        self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]
    ) -> Callable[[Any], Any] | None:
        process = self.new_req_logits_processor(params)
        if process is None:
            return None
        if len(inspect.signature(process).parameters) < 3:
            return partial(process, output_ids)
        if prompt_ids is None:
            raise ValidationError(
                "a logits processor of 3 parameters needs prompt token ids, got none",
                parameter="logits_processors",
                value=None,
            )
        return partial(process, prompt_ids, output_ids)


def process_dict_updates(
    req_entries: dict[int, T],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], T | None],
) -> bool:
    """Keep a dict from row to state in step with the batch; return whether it changed.

    `new_state` makes the state of an added row, or None where the row needs none.
    """
    if batch_update is None:
        return False
    has_changed = False
    for row in batch_update.removed:
        has_changed |= req_entries.pop(row, None) is not None
    for row, params, prompt_ids, output_ids in batch_update.added:
        has_changed |= req_entries.pop(row, None) is not None
        state = new_state(params, prompt_ids, output_ids)
        if state is not None:
            req_entries[row] = state
            has_changed = True
    for source, target, direction in batch_update.moved:
        moving, overwritten = req_entries.pop(source, None), req_entries.pop(target, None)
        has_changed |= moving is not None or overwritten is not None
        if moving is not None:
            req_entries[target] = moving
        if overwritten is not None and direction is MoveDirectionality.SWAP:
            req_entries[source] = overwritten
    return has_changed


@dataclass
class BatchUpdateBuilder:
    """Collects the changes of one step.

    Once a removal has been read (`pop_removed`, `peek_removed`, `removed`), no further one may be
    registered until `get_and_reset`.
    """

    added: list[AddedRequest] = field(default_factory=list)
    moved: list[MovedRequest] = field(default_factory=list)
    _removed: list[RemovedRequest] = field(default_factory=list)
    _is_sorted: bool = False

    @property
    def removed(self) -> list[RemovedRequest]:
        """The freed rows, sorted descending."""
        if not self._is_sorted:
            self._removed.sort(reverse=True)
            self._is_sorted = True
        return self._removed

    def removed_append(self, index: int) -> None:
        """Register a freed row; RuntimeError after a removal has been read."""
        if self._is_sorted:
            raise RuntimeError("cannot register a removal after removals have been read")
        self._removed.append(index)

    def has_removed(self) -> bool:
        """Say whether any row is free."""
        return bool(self._removed)

    def peek_removed(self) -> int | None:
        """The lowest freed row, or None."""
        return self.removed[-1] if self._removed else None

    def pop_removed(self) -> int | None:
        """Take the lowest freed row, or None."""
        return self.removed.pop() if self._removed else None

    def get_and_reset(self, batch_size: int) -> BatchUpdate | None:
        """Return the changes since the last call, or None if there were none."""
        update = None
        if self._removed or self.added or self.moved:
            update = BatchUpdate(batch_size, self.removed, self.added, self.moved)
        self.added, self.moved, self._removed, self._is_sorted = [], [], [], False
        return update

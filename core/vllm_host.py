"""Runs a processor of vLLM's batch interface inside the chain.

Such a processor is one object for all rows and is told how rows come, go and move. A host keeps it
in step with the sequences whose plans hold its stage: rows are dense, new ones take the lowest free
place, the last ones move down into holes, and a sequence that comes back after a preemption is
added again. What a processor raises ends the requests it raises for and no others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .batch import RowView
from .errors import ValidationError
from .stage import Caps, JointStage, Kind, Need, Order
from .vllm_processors import (
    AddedRequest,
    BatchUpdate,
    BatchUpdateBuilder,
    MoveDirectionality,
    RowErrors,
)

PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


@dataclass(eq=False, slots=True)
class Member:
    """A sequence in the batch of a processor."""

    source: Any  # core.request.Sequence
    epoch: int
    output: list[int]  # what the processor sees; grows as tokens come

    @classmethod
    def of(cls, source: Any) -> Member:
        """Enter a sequence with the tokens that it has."""
        return cls(source, source.epoch, list(source.output_ids))

    def follow(self) -> None:
        """Take over tokens that came, or were taken back, since the last step."""
        theirs = self.source.output_ids
        del self.output[len(theirs) :]
        self.output.extend(theirs[len(self.output) :])

    def added(self, row: int) -> AddedRequest:
        """Return what a processor is told of it."""
        request = self.source.request
        has_ids = request.prompt_embeds is None
        prompt = list(self.source.prompt_ids) if has_ids else None
        return row, request.given, prompt, self.output


class Outcome:
    """What a processor made of one row at one position, so that it is asked once a token."""

    __slots__ = ("position", "result")

    def __init__(self) -> None:
        self.position = -1
        self.result: Tensor | Exception | None = None


class ProcessorHost:
    """One processor of one engine."""

    def __init__(self, kind: type[Any], config: Any, device: torch.device) -> None:
        self.kind = kind
        self._arguments = (config, device, device.type == "cuda")
        self.processor = self._new()
        self.is_argmax_invariant = bool(self.processor.is_argmax_invariant())  # asked once
        self._members: list[Member] = []  # by row
        self._failed: dict[Any, Exception] = {}
        self._is_stale = False  # the processor raised, so that it may have lost count

    def _new(self) -> Any:
        return self.kind(*self._arguments)

    # --- membership -------------------------------------------------------------------------------

    def begin(self, sources: Sequence[Any]) -> None:
        """Tell the processor which sequences are in this step; called before every `join`."""
        self._failed.clear()
        if self._is_stale:
            self._rebuild(sources)
            return
        update = self._update(sources)
        try:
            self.processor.update_state(update)
        except Exception:
            self._rebuild(sources)

    def _update(self, sources: Sequence[Any]) -> BatchUpdate | None:
        """Settle the rows of `sources` and return how they differ from the last step's."""
        wanted = {source: source.epoch for source in sources}
        builder = BatchUpdateBuilder()
        kept: set[Any] = set()
        for row, member in enumerate(self._members):
            if wanted.get(member.source) == member.epoch:
                kept.add(member.source)
                member.follow()
            else:
                builder.removed_append(row)
        rows: dict[int, Member] = {
            row: member for row, member in enumerate(self._members) if member.source in kept
        }
        end = len(self._members)
        for source in sources:
            if source in kept:
                continue
            free = builder.pop_removed()
            row = end if free is None else free
            end += free is None
            rows[row] = Member.of(source)
            builder.added.append(rows[row].added(row))
        for hole in sorted(builder.removed):
            last = max(rows, default=-1)
            if last > hole:
                rows[hole] = rows.pop(last)
                builder.moved.append((last, hole, MoveDirectionality.UNIDIRECTIONAL))
        self._members = [rows[row] for row in sorted(rows)]
        return builder.get_and_reset(len(self._members))

    def _rebuild(self, sources: Iterable[Any]) -> None:
        """Start a fresh processor with the sequences that it can take, each tried alone."""
        self._is_stale = False
        self._members = []
        for source in sources:
            member = Member.of(source)
            try:
                self._alone(member)
            except Exception as error:
                self._failed[source] = error
            else:
                self._members.append(member)
        added = [member.added(row) for row, member in enumerate(self._members)]
        try:
            self.processor = self._new()
            self.processor.update_state(BatchUpdate(len(added), [], added, []))
        except Exception as error:
            self._failed.update({member.source: error for member in self._members})
            self._members = []
            self._is_stale = True

    def _alone(self, member: Member) -> Any:
        """Return a fresh processor that knows one row."""
        processor = self._new()
        processor.update_state(BatchUpdate(1, [], [member.added(0)], []))
        return processor

    # --- a step -----------------------------------------------------------------------------------

    def join(self, parts: Sequence[tuple[RowView, Tensor]]) -> None:
        """Run the processor once on all rows of `parts` and leave each row its outcome."""
        places = {member.source: row for row, member in enumerate(self._members)}
        rows: list[Tensor] = []
        at: list[int] = []
        outcomes: list[Outcome] = []
        for view, logits in parts:
            for local, source in enumerate(view.rows.sources):
                outcome: Outcome = view.states[local]
                outcome.position = int(view.host_positions[local])
                outcome.result = self._failed.get(source)
                if outcome.result is None:
                    rows.append(logits[local])
                    at.append(places[source])
                    outcomes.append(outcome)
        if not rows:
            return
        before = torch.stack(rows)
        full = before.new_zeros(len(self._members), before.shape[1])
        full[at] = before
        for outcome, result in zip(outcomes, self._results(full, at, before), strict=True):
            outcome.result = result

    def _results(
        self, full: Tensor, at: Sequence[int], before: Tensor
    ) -> Sequence[Tensor | Exception]:
        """Apply the processor to `full`; return what it made of the rows `at`."""
        try:
            after = self._checked(self.processor.apply(full), full)
        except RowErrors as partial:
            whole = self._checked(partial.logits, full)[at].masked_fill_(
                before == -torch.inf, -torch.inf
            )
            return [partial.errors.get(row, result) for row, result in zip(at, whole, strict=True)]
        except Exception:
            self._is_stale = True
            return [
                self.apply_alone(self._members[row].source, logits)
                for row, logits in zip(at, before, strict=True)
            ]
        return list(after[at].masked_fill_(before == -torch.inf, -torch.inf))

    def apply_alone(self, source: Any, logits: Tensor) -> Tensor | Exception:
        """Apply a fresh processor to the row `logits` [vocab] of one sequence."""
        try:
            processor = self._alone(Member.of(source))
            row = logits.clone()[None]
            after = self._checked(processor.apply(row.clone()), row)[0]
        except RowErrors as partial:
            return next(iter(partial.errors.values()))
        except Exception as error:
            return error
        return after.masked_fill(logits == -torch.inf, -torch.inf)

    def _checked(self, after: object, before: Tensor) -> Tensor:
        if not isinstance(after, Tensor) or after.shape != before.shape:
            shape = list(after.shape) if isinstance(after, Tensor) else type(after).__name__
            raise ValueError(
                f"{self.kind.__name__}.apply must return a tensor of shape {list(before.shape)}, "
                f"got {shape}"
            )
        return after.to(before)

    def validate(self, params: Any) -> None:
        """Let the processor's class refuse a request."""
        check = getattr(self.kind, "validate_params", None)
        if check is None:
            return
        try:
            check(params)
        except ValidationError:
            raise
        except Exception as error:
            reason = (
                str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            )
            raise ValidationError(
                f"the logits processor {self.kind.__name__} refuses the request: {reason}",
                parameter="logits_processors",
                value=params.extra_args,
            ) from error


class ProcessorStage(JointStage):
    """The stage of one processor; `stage_of` makes a class of it for each."""

    caps = Caps(needs=frozenset({Need.PROMPT, Need.OUTPUT}), stateful=True)
    automatic = True
    host: ClassVar[ProcessorHost]

    @classmethod
    def argmax_invariant(cls, params: Any) -> bool:
        return cls.host.is_argmax_invariant

    def begin(self, sources: Sequence[Any]) -> None:
        self.host.begin(sources)

    def join(self, parts: Sequence[tuple[RowView, Tensor]]) -> None:
        self.host.join(parts)

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, source in enumerate(rows.rows.sources):
            outcome: Outcome = rows.states[row]
            if outcome.position != int(rows.host_positions[row]):
                raise RuntimeError(f"stage {self.name!r} was given a row that it has not met")
            result = outcome.result
            if isinstance(result, Tensor) and _is_dead(result) and not _is_dead(logits[row]):
                # A mask before it was left out since, so the row is not the one that it saw.
                result = self.host.apply_alone(source, logits[row])
            if isinstance(result, Exception):
                raise result
            assert result is not None
            logits[row] = result

    def open(self, params: Any, prompt: Sequence[int]) -> Outcome:
        return Outcome()

    def fork(self, state: Outcome) -> Outcome:
        return Outcome()

    def rollback(self, state: Outcome, count: int) -> None:
        state.position = -1


def stage_of(host: ProcessorHost, name: str, after: Iterable[str]) -> type[ProcessorStage]:
    """Return a stage class for `host`.

    Where it may change the winner it stands before the penalties, else after min-p and before top-k
    and top-p, as in vLLM, and behind the stages `after`: those of earlier processors at its place.
    """
    invariant = host.is_argmax_invariant
    first: tuple[str, ...] = ("min_p",) if invariant else ("logit_bias",)
    then: tuple[str, ...] = ("top_k", "top_p") if invariant else PENALTIES
    body: Mapping[str, object] = {
        "__doc__": f"vLLM's processor {host.kind.__qualname__}.",
        "__module__": __name__,
        "name": name,
        "kind": Kind.CUT if invariant else Kind.BIAS,
        "order": Order(before=then, after=(*first, *after)),
        "host": host,
    }
    return type(host.kind.__name__, (ProcessorStage,), dict(body))


def _is_dead(row: Tensor) -> bool:
    return bool((row == -torch.inf).all())

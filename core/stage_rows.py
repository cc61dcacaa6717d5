"""Runs stages on rows that another library owns: no engine, no scheduler, a slot a row.

Used by the adapters. A row brings its tokens and its noise key; the state of each stage follows the
tokens, by accept where they grew, by rollback where they were taken back, else by rebuild.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .batch import PickView, Rows, RowView
from .blame import refuse_resurrection, stage_error
from .errors import StageError, ValidationError
from .slots import SlotTable
from .stage import BindContext, CutStage, JointStage, Kind, Need, Picker, Stage

Build = tuple[type[Stage], Any]  # a stage class with the parameters of a row, bound


@dataclass(eq=False, slots=True)
class ForeignRow:
    """A row of somebody else's batch."""

    prompt_ids: tuple[int, ...]
    output_ids: Sequence[int]  # may grow, or shrink, from call to call
    key: int
    branch: int = 0
    slot: int = -1
    known: list[int] = field(default_factory=list)  # output tokens that the states have taken in
    states: list[Any] | None = None

    def follow(self, chain: Sequence[Build]) -> None:
        """Bring the states to `output_ids`."""
        now = list(self.output_ids)
        if any(token < 0 for token in now):
            raise ValidationError(
                "the output tokens hold placeholders (negative ids), so that no stage can read "
                "them; switch asynchronous scheduling off",
                parameter="logits_processors",
            )
        if self.states is None:
            self.states = [
                stage.prototype().rebuild(params, self.prompt_ids, now) for stage, params in chain
            ]
            self.known = now
            return
        same = next(
            (i for i, pair in enumerate(zip(self.known, now, strict=False)) if pair[0] != pair[1]),
            min(len(self.known), len(now)),
        )
        gone, fresh = len(self.known) - same, now[same:]
        for (stage, _), state in zip(chain, self.states, strict=True):
            if keeps_state(stage):
                if gone:
                    stage.prototype().rollback(state, gone)
                if fresh:
                    stage.prototype().accept(state, fresh)
        self.known = now

    def forked(self, chain: Sequence[Build]) -> list[Any]:
        """Return independent copies of the states."""
        assert self.states is not None
        return [
            stage.prototype().fork(state) if keeps_state(stage) else state
            for (stage, _), state in zip(chain, self.states, strict=True)
        ]


def keeps_state(stage: type[Stage]) -> bool:
    """Say whether the stage makes a state for each sequence."""
    return stage.open is not Stage.open or stage.rebuild is not Stage.rebuild


def instances_of(stages: Sequence[type[Stage]], ids: Sequence[str | None]) -> list[str]:
    """Return the instance ids that a chain of these stages would have: name, name#2, ..."""
    counts: dict[str, int] = {}
    found = []
    for stage, own in zip(stages, ids, strict=True):
        counts[stage.name] = counts.get(stage.name, 0) + 1
        number = counts[stage.name]
        found.append(own or (stage.name if number == 1 else f"{stage.name}#{number}"))
    return found


def refuse_unsuited(stages: Sequence[type[Stage]], where: str) -> None:
    """Raise ValidationError for a stage that only the engine can run, and for a wrong order."""
    for place, stage in enumerate(stages):
        if issubclass(stage, JointStage) or stage.kind is Kind.FORWARD:
            raise ValidationError(
                f"stage {stage.name!r} needs the engine and cannot run in {where}",
                parameter="stages",
                value=stage.name,
            )
        if issubclass(stage, Picker) and place < len(stages) - 1:
            raise ValidationError(
                f"the picker {stage.name!r} must be last", parameter="stages", value=stage.name
            )


class StageRunner:
    """Runs a chain of stages on foreign rows of one width; each row has its own parameters."""

    def __init__(self, stages: Sequence[type[Stage]], instances: Sequence[str]) -> None:
        self.stages = tuple(stages)
        self.instances = tuple(instances)
        self._table: SlotTable | None = None

    def run(
        self,
        rows: Sequence[ForeignRow],
        chains: Sequence[Sequence[Build]],
        logits: Tensor,
        tokenizer_size: int,
    ) -> Tensor:
        """Return `logits` float32 [rows, vocab] after every stage; the argument is not changed.

        A picker leaves its choice alone alive, with the logit 0. Raises StageError for what a stage
        raises, and where one revives a masked token or leaves none alive.
        """
        work = logits.float().clone()
        table = self._ready(len(rows), work)
        for slot, row in enumerate(rows):
            row.slot = slot
            row.follow(chains[slot])
        for place, stage in enumerate(self.stages):
            bound = [chain[place][1] for chain in chains]
            groups: dict[Hashable, list[int]] = {}
            for at, params in enumerate(bound):
                if issubclass(stage, Picker) or not stage.is_identity(params):
                    groups.setdefault(stage.structure(params), []).append(at)
            for members in groups.values():
                self._run_group(place, rows, bound, members, work, table, tokenizer_size)
        return work

    def _run_group(
        self,
        place: int,
        rows: Sequence[ForeignRow],
        bound: Sequence[Any],
        members: Sequence[int],
        work: Tensor,
        table: SlotTable,
        tokenizer_size: int,
    ) -> None:
        stage, instance = self.stages[place], self.instances[place]
        sources = [rows[at] for at in members]
        for at in members:
            table.write(rows[at].slot, instance, stage.table(bound[at]))
            if Need.COUNTS in stage.caps.needs:
                table.seen.open(rows[at].slot, rows[at].prompt_ids, rows[at].known)
        group = Rows(sources, table, work.shape[1], tokenizer_size)
        group.advance()
        params = [bound[at] for at in members]
        view = RowView(
            group,
            stage=stage.name,
            instance=instance,
            params=params,
            states=[row.states[place] for row in sources if row.states is not None],
            mode=(stage.mode if issubclass(stage, CutStage) else stage.structure)(params[0]),
            min_keep=getattr(params[0], "min_keep", 1) > 1,
        )
        before = work[list(members)]
        position = len(sources[0].known)
        try:
            after = _deed(stage.prototype(), before.clone(), view)
            if stage.kind is not Kind.FORCE:
                refuse_resurrection(after, torch.isneginf(before))
        except Exception as error:
            raise stage_error(error, stage.name, instance, position) from error
        died = (after == -torch.inf).all(1) & ~(before == -torch.inf).all(1)
        if bool(died.any()):
            raise StageError(
                "it left no token alive", stage=stage.name, instance=instance, position=position
            )
        work[list(members)] = after

    def _ready(self, count: int, work: Tensor) -> SlotTable:
        table = self._table
        wrong = table is None or (
            table.max_slots < count
            or table.vocab_size != work.shape[1]
            or table.device != work.device
        )
        if table is None or wrong:
            table = self._table = SlotTable(max(count, 8), work.shape[1], work.device)
        return table


def _deed(runner: Stage, logits: Tensor, view: RowView) -> Tensor:
    if not isinstance(runner, Picker):
        runner.transform(logits, view)
        return logits
    pick = PickView(ranking=None, dense=logits, has_cut=True, vocab_size=logits.shape[1])
    tokens = runner.pick(pick, view)
    chosen = torch.full_like(logits, -torch.inf)
    return chosen.scatter_(1, tokens[:, None], 0.0)


def bind_all(
    stages: Sequence[type[Stage]], params: Sequence[Mapping[str, object] | Any], ctx: BindContext
) -> list[Build]:
    """Check and bind the parameters of each stage; ValidationError names what is wrong."""
    return [
        (stage, stage.bind(stage.validate(given) if isinstance(given, Mapping) else given, ctx))
        for stage, given in zip(stages, params, strict=True)
    ]

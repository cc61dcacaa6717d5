"""Run the chains of one step: group rows by program, transform, pick, measure, and accept tokens.

A program is a plan without its numbers. Its stages run on dense rows [rows, vocab], except that a
run of monotone shapes and truncations works on the few best tokens of each row, when that list
provably holds every token that survives; a row whose list does not is run densely. Both give the
same tokens, and `fusion=False` keeps to the dense form.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..kernels.reference.mass import row_total
from ..kernels.reference.ranked import rank_top
from .batch import PickView, Ranking, Rows, RowView, TapView
from .errors import StageError
from .program import Element, Program, Segment, compile_program
from .slots import SlotTable
from .stage import CutStage, Picker, Tap

if TYPE_CHECKING:
    from .plan import Plan
    from .request import Sequence as TokenSequence

LIST_SIZES = (64, 128, 256, 512, 1024)
DEFAULT_LIST = 256  # where no stage of a row says how many tokens survive
LIST_MARGIN = 14  # room for ties beyond a top-k


@dataclass(slots=True)
class StepResult:
    """Tokens by row; a row in `errors` has none."""

    tokens: list[int]
    errors: dict[int, StageError] = field(default_factory=dict)
    measured: dict[int, list[tuple[int, Mapping[str, Any]]]] = field(default_factory=dict)


class _ElementError(Exception):
    """A stage raised; carries which one."""

    def __init__(self, element: Element, cause: Exception) -> None:
        super().__init__(str(cause))
        self.element = element
        self.cause = cause


class _Group:
    """The rows of one program with the views of its elements; lives while its membership does."""

    def __init__(self, program: Program, rows: Rows) -> None:
        self.program = program
        self.rows = rows
        self.views = {
            element.index: RowView(
                rows,
                stage=element.name,
                instance=element.instance,
                params=_ParamList(rows.sources, element.index),
                states=_StateList(rows.sources, element.index),
                mode=element.mode,
                min_keep=element.min_keep,
            )
            for element in (*program.elements, program.picker)
        }

    def select(self, indices: Sequence[int]) -> _Group:
        return _Group(self.program, self.rows.select(indices))


class _StateList(Sequence[Any]):
    """States of one plan entry in row order, read from the sequences when asked for."""

    __slots__ = ("_index", "_sources")

    def __init__(self, sources: Sequence[Any], index: int) -> None:
        self._sources = sources
        self._index = index

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, row: Any) -> Any:
        return self._sources[row].states[self._index]


class _ParamList(_StateList):
    """Parameters of one plan entry in row order."""

    __slots__ = ()

    def __getitem__(self, row: Any) -> Any:
        return self._sources[row].plan.entries[self._index].params


class ChainRunner:
    """Holds the slot tables and programs of one engine and runs the chain of each step."""

    def __init__(
        self,
        *,
        max_slots: int,
        vocab_size: int,
        tokenizer_size: int,
        device: torch.device,
        fusion: bool = True,
        debug: bool = False,
    ) -> None:
        self.table = SlotTable(max_slots, vocab_size, device)
        self.vocab_size = vocab_size
        self.tokenizer_size = tokenizer_size
        self.fusion = fusion
        self.debug = debug
        self.dense_rows = 0  # rows whose short list could not prove itself
        self._programs: dict[Any, Program] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._epochs = itertools.count()

    # --- a sequence's life --------------------------------------------------------------------

    def program(self, plan: Plan) -> Program:
        """Return the program of `plan`, compiled once for each structure."""
        program = self._programs.get(plan.key)
        if program is None:
            program = self._programs[plan.key] = compile_program(plan, self.fusion)
        return program

    def open(self, sequence: TokenSequence) -> None:
        """Write a sequence's numbers to its slot and build its states from its tokens."""
        plan = sequence.plan
        slot = sequence.slot
        sequence.epoch = next(self._epochs)
        sequence.states = []
        prompt, output = sequence.prompt_ids, sequence.output_ids
        for entry in plan.entries:
            stage = entry.stage
            self.table.write(slot, entry.instance, stage.table(entry.params))
            runner = stage.prototype()
            sequence.states.append(runner.rebuild(entry.params, prompt, output))
        if self.program(plan).needs_seen:
            self.table.seen.open(slot, prompt, output)

    def accept(
        self, sequences: Sequence[TokenSequence], tokens: Sequence[int]
    ) -> dict[int, StageError]:
        """Advance states by one real token a sequence; the tokens are not yet in `output_ids`.

        Returns the failures by row.
        """
        errors: dict[int, StageError] = {}
        counted: list[int] = []
        for row, sequence in enumerate(sequences):
            program = self._programs[sequence.plan.key]
            if program.needs_seen:
                counted.append(row)
            for index in program.stateful:
                entry = sequence.plan.entries[index]
                try:
                    entry.stage.prototype().accept(sequence.states[index], (tokens[row],))
                except Exception as error:
                    errors[row] = _stage_error(
                        error, entry.stage.name, entry.instance, len(sequence.output_ids)
                    )
        if counted:
            host = [sequences[row].slot for row in counted]
            device = self.table.device
            slots = torch.tensor(host, dtype=torch.int64, device=device)
            chosen = torch.tensor([tokens[row] for row in counted], device=device)
            self.table.seen.accept(slots, host, chosen)
        return errors

    # --- a step -------------------------------------------------------------------------------

    def run(self, sequences: Sequence[TokenSequence], logits: Tensor) -> StepResult:
        """Choose a token for each sequence from its row of `logits` [rows, vocab].

        `logits` keeps the model's dtype and is not changed.
        """
        result = StepResult([-1] * len(sequences))
        by_program: dict[int, list[int]] = {}
        programs: dict[int, Program] = {}
        for row, sequence in enumerate(sequences):
            program = self._programs[sequence.plan.key]
            programs[id(program)] = program
            by_program.setdefault(id(program), []).append(row)
        live: dict[tuple[int, ...], _Group] = {}
        for mark, members in by_program.items():
            group = self._group(programs[mark], [sequences[row] for row in members], live)
            whole = len(members) == len(sequences)
            part = logits if whole else logits[members]
            self._run_group(group, part, members, result)
        self._groups = live
        return result

    def _group(
        self,
        program: Program,
        sources: list[TokenSequence],
        live: dict[tuple[int, ...], _Group],
    ) -> _Group:
        mark = tuple(source.epoch for source in sources)
        group = self._groups.get(mark)
        if group is None:
            rows = Rows(sources, self.table, self.vocab_size, self.tokenizer_size)
            group = _Group(program, rows)
        group.rows.advance()
        live[mark] = group
        return group

    def _run_group(
        self, group: _Group, logits: Tensor, members: Sequence[int], result: StepResult
    ) -> None:
        try:
            tokens, healthy, taps = self._execute(group, logits)
        except _ElementError as failure:
            self._run_alone(group, logits, members, result, failure)
            return
        chosen: list[int] = tokens.tolist()
        broken = [] if bool(healthy.all()) else (~healthy).nonzero()[:, 0].tolist()
        for local in broken:
            outcome = self._diagnose(group, logits, local)
            if isinstance(outcome, StageError):
                result.errors[members[local]] = outcome
            else:
                chosen[local] = outcome
                tokens[local] = outcome
        for local, row in enumerate(members):
            result.tokens[row] = chosen[local]
        self._measure(group.program, taps, tokens, members, result)

    def _measure(
        self,
        program: Program,
        taps: Mapping[Tap, TapView],
        tokens: Tensor,
        members: Sequence[int],
        result: StepResult,
    ) -> None:
        for place, (observer, order) in enumerate(program.observers):
            values = observer.measure(order, taps, tokens)
            host = {name: value.cpu().numpy() for name, value in values.items()}
            for local, row in enumerate(members):
                part = {name: value[local] for name, value in host.items()}
                result.measured.setdefault(row, []).append((place, part))

    def _run_alone(
        self,
        group: _Group,
        logits: Tensor,
        members: Sequence[int],
        result: StepResult,
        failure: _ElementError,
    ) -> None:
        """After a stage raised: run each row by itself, so that only the culprits fail."""
        if len(members) == 1:
            position = int(group.rows.positions[0])
            result.errors[members[0]] = _stage_error(
                failure.cause, failure.element.name, failure.element.instance, position
            )
            return
        for local, row in enumerate(members):
            self._run_group(group.select([local]), logits[local : local + 1], [row], result)

    # --- execution of one group ---------------------------------------------------------------

    def _execute(self, group: _Group, logits: Tensor) -> tuple[Tensor, Tensor, dict[Tap, TapView]]:
        program = group.program
        raw = logits.float()
        keep_raw = Tap.RAW in program.taps or raw is logits
        work = raw.clone() if program.mutates and keep_raw else raw
        taps = {Tap.RAW: TapView(raw)} if Tap.RAW in program.taps else {}
        healthy = torch.isfinite(raw.amax(1)) if program.hides else None
        view: PickView | None = None
        dense_tokens: tuple[Tensor, Tensor] | None = None
        for number, segment in enumerate(program.segments):
            if number == program.last_mask and Tap.MASKED in program.taps:
                taps[Tap.MASKED] = TapView(work.clone())
            last = number == len(program.segments) - 1
            if not segment.ranked:
                self._run_dense(segment.elements, work, group)
            elif last and Tap.FINAL not in program.taps:
                view, dense_tokens = self._run_ranked(segment, work, group)
            else:
                self._write_ranked(segment, work, group)
        if program.last_mask >= len(program.segments) and Tap.MASKED in program.taps:
            taps[Tap.MASKED] = TapView(work.clone())
        if view is None:
            view = PickView(
                ranking=None, dense=work, has_cut=program.has_cut, vocab_size=self.vocab_size
            )
        if Tap.FINAL in program.taps:
            taps[Tap.FINAL] = TapView(view.logits)
        return *self._pick(group, view, dense_tokens, healthy), taps

    def _pick(
        self,
        group: _Group,
        view: PickView,
        rescued: tuple[Tensor, Tensor] | None,
        healthy: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the picker; return tokens and whether each row was fit to draw from."""
        if view.ranking is not None:
            top = view.ranking.values[:, 0]
        else:
            top = view.logits.amax(1)
        if rescued is not None:  # the short list of these rows means nothing
            indices, dense = rescued
            top = top.index_copy(0, indices, dense.amax(1))
        fit = torch.isfinite(top)
        if healthy is not None:
            fit &= healthy
        tokens = self._call_picker(group, view)
        if rescued is not None:
            part = group.select(indices.tolist())
            dense_view = PickView(
                ranking=None, dense=dense, has_cut=view.has_cut, vocab_size=self.vocab_size
            )
            tokens = tokens.index_copy(0, indices, self._call_picker(part, dense_view))
        return tokens, fit

    def _call_picker(self, group: _Group, view: PickView) -> Tensor:
        picker = group.program.picker
        stage = picker.stage
        assert isinstance(stage, Picker)
        try:
            return stage.pick(view, group.views[picker.index])
        except Exception as error:
            raise _ElementError(picker, error) from error

    def _run_dense(self, elements: Sequence[Element], work: Tensor, group: _Group) -> None:
        for element in elements:
            view = group.views[element.index]
            dead = torch.isneginf(work) if element.guarded or self.debug else None
            try:
                element.stage.transform(work, view)
                if dead is not None:
                    _refuse_resurrection(work, dead)
            except Exception as error:
                raise _ElementError(element, error) from error

    def _write_ranked(self, segment: Segment, work: Tensor, group: _Group) -> None:
        """Run a ranked segment and write its survivors back to the dense rows."""
        view, rescued = self._run_ranked(segment, work, group)
        assert view.ranking is not None
        view.ranking.write(work)
        if rescued is not None:
            work.index_copy_(0, *rescued)

    def _run_ranked(
        self, segment: Segment, work: Tensor, group: _Group
    ) -> tuple[PickView, tuple[Tensor, Tensor] | None]:
        """Run shapes and cuts on the best tokens of each row.

        Returns the view of the survivors and, for rows whose list was too short to be sure, their
        indices and dense results.
        """
        size = min(self._list_size(segment, group), work.shape[1])
        ranked = rank_top(work, size)
        # The bound goes through the shapes as one more column: order survives them, rounding too.
        values = torch.cat([ranked.values, ranked.bound[:, None]], 1)
        shapes: list[Element] = []
        ranking: Ranking | None = None
        sure: Tensor | None = None
        for element in segment.elements:
            view = group.views[element.index]
            stage = element.stage
            try:
                if not isinstance(stage, CutStage):
                    stage.transform(values, view)
                    shapes.append(element)
                    continue
                total = partial(_total_of, work, tuple(shapes), group) if ranking is None else None
                if stage.needs_mass and ranking is not None and sure is None:
                    sure = _is_sure(values)
                ranking = Ranking(values[:, :-1], ranked.ids, total_of=total)
                mask = stage.cut(ranking, view)
                values[:, :-1].masked_fill_(~mask, -torch.inf)
            except Exception as error:
                raise _ElementError(element, error) from error
        if sure is None:
            sure = _is_sure(values)
        kept = values[:, :-1]
        ids = ranked.ids
        if kept.device.type == "cpu":  # fewer draws of noise; the host may look without waiting
            width = max(int((kept > -torch.inf).sum(1).max()), 1)
            kept, ids = kept[:, :width], ids[:, :width]
        view_out = PickView(
            ranking=Ranking(kept, ids), dense=None, has_cut=True, vocab_size=self.vocab_size
        )
        if bool(sure.all()):
            return view_out, None
        return view_out, self._rescue(segment, work, group, sure)

    def _rescue(
        self, segment: Segment, work: Tensor, group: _Group, sure: Tensor
    ) -> tuple[Tensor, Tensor]:
        indices = (~sure).nonzero()[:, 0]
        self.dense_rows += indices.numel()
        dense = work[indices]
        self._run_dense(segment.elements, dense, group.select(indices.tolist()))
        return indices, dense

    def _list_size(self, segment: Segment, group: _Group) -> int:
        cache = group.rows.cache
        key = ("list_size", segment.elements[0].index)
        if key not in cache:
            cache[key] = _needed_size(segment, group)
        return int(cache[key])

    # --- when a row is not fit to draw from -----------------------------------------------------

    def _diagnose(self, group: _Group, logits: Tensor, local: int) -> StageError | int:
        """Find which stage broke a row, by running it alone with a look after each stage.

        Returns the end token where the request asked for it on a dead row.
        """
        alone = group.select([local])
        position = int(alone.rows.positions[0])
        work = logits[local : local + 1].float().clone()
        reason = _fault(work)
        if reason is not None:
            what = (
                "the model's logits hold NaN or infinity"
                if reason != "dead"
                else ("the model left no token alive")
            )
            return StageError(what, stage="model", instance="logits", position=position)
        for element in alone.program.elements:
            try:
                element.stage.transform(work, alone.views[element.index])
            except Exception as error:
                return _stage_error(error, element.name, element.instance, position)
            reason = _fault(work)
            if reason == "dead":
                return self._dead_row(alone, element, position)
            if reason is not None:
                return StageError(
                    "it left NaN or infinity in the logits",
                    stage=element.name,
                    instance=element.instance,
                    position=position,
                )
        picker = group.program.picker
        return StageError(
            "the row could not be drawn from",
            stage=picker.name,
            instance=picker.instance,
            position=position,
        )

    def _dead_row(self, alone: _Group, element: Element, position: int) -> StageError | int:
        source: Any = alone.rows.sources[0]
        params = source.request.params
        if params.on_dead_row == "eos" and source.request.plan.eos_id is not None:
            return int(source.request.plan.eos_id)
        return StageError(
            "it left no token alive",
            stage=element.name,
            instance=element.instance,
            position=position,
        )


# --- small parts ----------------------------------------------------------------------------------


def _needed_size(segment: Segment, group: _Group) -> int:
    need = 0
    for row in range(len(group.rows)):
        hints = [
            element.stage.list_hint(group.views[element.index].params[row])
            for element in segment.elements
            if isinstance(element.stage, CutStage)
        ]
        known = [hint for hint in hints if hint is not None]
        need = max(need, min(known) + LIST_MARGIN if known else DEFAULT_LIST)
    return next((size for size in LIST_SIZES if size >= need), LIST_SIZES[-1])


def _is_sure(values: Tensor) -> Tensor:
    """Say for each row whether the list provably holds every survivor.

    `values` [rows, n + 1] holds the survivors, -inf elsewhere, and the bound in the last column.
    A cut that drops a listed token drops all that come after it, so a list whose end was dropped is
    complete, unless a survivor equals the bound: then a tie may have been split by a missing id.
    """
    kept = values[:, :-1]
    last = kept.masked_fill(kept == -torch.inf, torch.inf).amin(1)
    bound = values[:, -1]
    is_cut_short = (kept[:, -1] == -torch.inf) & (last > bound)
    return is_cut_short | (bound == -torch.inf)


def _total_of(work: Tensor, shapes: Sequence[Element], group: _Group) -> Tensor:
    """Return the mass of whole rows as they stand after `shapes`."""
    full = work
    if shapes:
        full = work.clone()
        for element in shapes:
            element.stage.transform(full, group.views[element.index])
    return row_total(full, full.amax(1))


def _refuse_resurrection(work: Tensor, dead: Tensor) -> None:
    if bool((dead & (work != -torch.inf)).any()):
        raise ValueError("it gave a masked token (-inf) a finite logit")


def _fault(work: Tensor) -> str | None:
    if bool(torch.isnan(work).any()) or bool(torch.isposinf(work).any()):
        return "nonfinite"
    return "dead" if bool(torch.isneginf(work).all()) else None


def _stage_error(error: Exception, stage: str, instance: str, position: int) -> StageError:
    text = str(error) or type(error).__name__
    reason = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return StageError(reason, stage=stage, instance=instance, position=position)

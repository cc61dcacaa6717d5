"""Run the chains of one step: group rows by program, transform, pick, measure, and accept tokens.

A program is a plan without its numbers. Its stages run on dense rows [rows, vocab], except that a
run of monotone shapes and truncations works on the few best tokens of each row, when that list
provably holds every token that survives; a row whose list does not is run densely. Both give the
same tokens, and `fusion=False` keeps to the dense form.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.reference.log_total import log_total
from ..kernels.reference.mass import row_total
from ..kernels.reference.ranked import rank_top
from .batch import PickView, Ranking, Rows, RowView, Scored, TapView
from .blame import both, checked_choice, measured, refuse_resurrection, stage_error
from .errors import StageError
from .fused import FusedChains, Group
from .program import Element, Program, Segment, compile_program
from .rescue import rescue
from .slots import SlotTable
from .stage import CutStage, JointStage, Kind, Picker, Point, Stage, Tap
from .stopwatch import stopwatch

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
    scores: list[float] = field(default_factory=list)  # raw log-probabilities of the tokens
    notes: dict[int, dict[str, str]] = field(default_factory=dict)  # stage instance -> sentence
    scored: dict[int, Scored] = field(default_factory=dict)  # rows whose token a driver chooses


class _ElementError(Exception):
    """A stage raised; carries which one."""

    def __init__(self, element: Element, cause: Exception) -> None:
        super().__init__(str(cause))
        self.element = element
        self.cause = cause

    def blame(self, position: int) -> StageError:
        """Return the error of the request."""
        return stage_error(self.cause, self.element.name, self.element.instance, position)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Who runs what in a step; rows are places in the step's list of sequences."""

    mark: tuple[int, ...]  # the epochs of the sequences
    parts: Sequence[tuple[Program, Sequence[int]]] = ()  # each program with its rows
    stateful: Sequence[int] = ()  # rows with a stage that keeps a state
    counted: Sequence[int] = ()  # rows whose tokens are counted
    counted_host: Sequence[int] = ()  # their slots
    counted_slots: Tensor | None = None


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
        self.fused: FusedChains | None = None  # where kernels run whole chains
        if fusion and not debug and FusedChains.possible(device):
            self.fused = FusedChains(self.table, vocab_size, tokenizer_size)
        self.dense_rows = 0  # rows whose short list could not prove itself
        self._programs: dict[Any, Program] = {}
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._last = _Layout((-1,))
        self._epochs = itertools.count()

    # --- a sequence's life --------------------------------------------------------------------

    def program(self, plan: Plan) -> Program:
        """Return the program of `plan`, compiled once for each structure."""
        program = self._programs.get(plan.key)
        if program is None:
            program = self._programs[plan.key] = compile_program(plan, self.fusion)
        return program

    def open(self, sequence: TokenSequence) -> None:
        """Write a sequence's numbers to its slot and build its states from its tokens.

        A sequence that comes back after a preemption keeps the states that are carried. Raises
        StageError for what a stage raises.
        """
        plan = sequence.plan
        slot = sequence.slot
        sequence.epoch = next(self._epochs)
        before, sequence.states = sequence.states, []
        prompt, output = sequence.prompt_ids, sequence.output_ids
        for index, entry in enumerate(plan.entries):
            stage = entry.stage
            try:
                self.table.write(slot, entry.instance, stage.table(entry.params))
                if before and stage.caps.carried:
                    state = before[index]
                else:
                    state = stage.prototype().rebuild(entry.params, prompt, output)
            except Exception as error:
                raise stage_error(error, stage.name, entry.instance, len(output)) from error
            sequence.states.append(state)
        if self.program(plan).needs_seen:
            self.table.seen.open(slot, prompt, output)

    def accept(
        self, sequences: Sequence[TokenSequence], tokens: Sequence[int]
    ) -> dict[int, StageError]:
        """Advance states by one real token a sequence; the tokens are not yet in `output_ids`.

        Returns the failures by row.
        """
        errors: dict[int, StageError] = {}
        layout = self._layout(sequences)
        for row in layout.stateful:
            sequence = sequences[row]
            for index in self._programs[sequence.plan.key].stateful:
                entry = sequence.plan.entries[index]
                try:
                    entry.stage.prototype().accept(sequence.states[index], (tokens[row],))
                except Exception as error:
                    errors[row] = stage_error(
                        error, entry.stage.name, entry.instance, len(sequence.output_ids)
                    )
        if layout.counted_slots is not None:
            chosen = torch.tensor([tokens[row] for row in layout.counted], device=self.table.device)
            self.table.seen.accept(layout.counted_slots, layout.counted_host, chosen)
        return errors

    def _layout(self, sequences: Sequence[TokenSequence]) -> _Layout:
        """Return who runs what; computed when the sequences of a step are not those of the last."""
        mark = tuple([sequence.epoch for sequence in sequences])
        if mark != self._last.mark:
            programs = [self._programs[sequence.plan.key] for sequence in sequences]
            members: dict[int, list[int]] = {}
            for row, program in enumerate(programs):
                members.setdefault(id(program), []).append(row)
            counted = [row for row, program in enumerate(programs) if program.needs_seen]
            host = [sequences[row].slot for row in counted]
            self._last = _Layout(
                mark=mark,
                parts=[(programs[rows[0]], rows) for rows in members.values()],
                stateful=[row for row, program in enumerate(programs) if program.stateful],
                counted=counted,
                counted_host=host,
                counted_slots=(
                    torch.tensor(host, dtype=torch.int64, device=self.table.device)
                    if host
                    else None
                ),
            )
        return self._last

    def accept_lanes(
        self, lanes: Sequence[TokenSequence], tokens: Sequence[int]
    ) -> dict[int, StageError]:
        """`accept` for the lanes of a driver, of which some may have no slot yet."""
        errors: dict[int, StageError] = {}
        for place, (lane, token) in enumerate(zip(lanes, tokens, strict=True)):
            program = self._programs[lane.plan.key]
            for index in program.stateful:
                entry = lane.plan.entries[index]
                try:
                    entry.stage.prototype().accept(lane.states[index], (token,))
                except Exception as error:
                    position = len(lane.output_ids)
                    errors[place] = stage_error(error, entry.stage.name, entry.instance, position)
            if program.needs_seen and lane.slot >= 0:
                device = self.table.device
                slots = torch.tensor([lane.slot], device=device)
                self.table.seen.accept(slots, [lane.slot], torch.tensor([token], device=device))
        return errors

    def rewind(self, sequence: TokenSequence, keep: int) -> None:
        """Take the states back to the first `keep` output tokens; the ids still hold all.

        StageError for what a stage raises.
        """
        program = self.program(sequence.plan)
        prompt, output = sequence.prompt_ids, sequence.output_ids
        count = len(output) - keep
        for index in program.stateful:
            entry = sequence.plan.entries[index]
            stage = entry.stage.prototype()
            try:
                if entry.stage.rollback is not Stage.rollback:
                    stage.rollback(sequence.states[index], count)
                else:
                    kept = stage.rebuild(entry.params, prompt, output[:keep])
                    sequence.states[index] = kept
            except Exception as error:
                raise stage_error(error, entry.stage.name, entry.instance, len(output)) from error
        if program.needs_seen and sequence.slot >= 0:
            self.table.seen.open(sequence.slot, prompt, output[:keep])
        sequence.epoch = next(self._epochs)  # what was cached for its rows is of another history

    def fork(self, parent: TokenSequence) -> list[Any]:
        """Return independent copies of a sequence's states; StageError for what a stage raises."""
        states: list[Any] = []
        for entry, state in zip(parent.plan.entries, parent.states, strict=True):
            try:
                copied = None if state is None else entry.stage.prototype().fork(state)
            except Exception as error:
                position = len(parent.output_ids)
                raise stage_error(error, entry.stage.name, entry.instance, position) from error
            states.append(copied)
        return states

    def fork_history(self, parent: TokenSequence, child: TokenSequence) -> None:
        """Give the slot of `child` the token history of `parent`."""
        if not self.program(parent.plan).needs_seen:
            return
        if parent.slot >= 0:
            self.table.seen.copy(parent.slot, child.slot)
        else:
            self.table.seen.open(child.slot, parent.prompt_ids, parent.output_ids)

    def rest(self) -> None:
        """Let go of the sequences of the last step, as none of them goes on."""
        self._groups.clear()
        joint = {type(stage): stage for each in self._programs.values() for stage in each.joint}
        for stage in joint.values():
            stage.begin([])

    # --- a step -------------------------------------------------------------------------------

    def run(self, sequences: Sequence[TokenSequence], logits: Tensor) -> StepResult:
        """Choose a token for each sequence from its row of `logits` [rows, vocab].

        `logits` keeps the model's dtype and is not changed.
        """
        result = StepResult([-1] * len(sequences))
        layout = self._layout(sequences)
        if any(program.joint for program, _ in layout.parts):
            self._begin_joint(sequences)
        live: dict[tuple[int, ...], _Group] = {}
        tasks: list[_Task] = []
        launched: list[_Launched] = []
        for program, members in layout.parts:
            whole = len(members) == len(sequences)
            own = sequences if whole else [sequences[row] for row in members]
            group = self._group(program, own, live)
            if self.fused is not None:
                handed = Group(program, group.rows, group.views)
                kernels = self.fused.chain_of(handed, logits)
                if kernels is not None:
                    started = self.fused.launch(kernels, handed, logits, members)
                    launched.append(_Launched(group, members, started))
                    continue
            part = logits if whole else logits[members]
            tasks.append(self._run_group(group, part, members, result))
        scores: dict[int, float] = {}
        for each in launched:
            tasks += self._finish(each, logits, result, scores)
        _drive(tasks)
        self._groups = live
        if scores:
            rest = [row for row in range(len(sequences)) if row not in scores]
            if rest:
                tokens = [result.tokens[row] for row in rest]
                scores.update(zip(rest, self._scores(logits[rest], tokens), strict=True))
            result.scores = [scores[row] for row in range(len(sequences))]
        else:
            result.scores = self._scores(logits, result.tokens)
        return result

    def _finish(
        self, each: _Launched, logits: Tensor, result: StepResult, scores: dict[int, float]
    ) -> list[_Task]:
        """Take over what the kernels chose; return the work on rows that they could not do."""
        assert self.fused is not None
        outcome = self.fused.read(each.started)
        members = each.members
        done = [local for local, token in enumerate(outcome.tokens) if token >= 0]
        for local in done:
            result.tokens[members[local]] = outcome.tokens[local]
            scores[members[local]] = outcome.scores[local]
        if each.group.program.observers and done:
            group = each.group.select(done)
            rows = [members[local] for local in done]
            taps: dict[Point, TapView] = {Tap.RAW: TapView(logits[rows].float())}
            tokens = torch.tensor([result.tokens[row] for row in rows], device=logits.device)
            self._measure(group, taps, tokens, rows, result)
        left = [local for local, token in enumerate(outcome.tokens) if token < 0]
        if not left:
            return []
        rows = [members[local] for local in left]
        return [self._run_group(each.group.select(left), logits[rows], rows, result)]

    def _begin_joint(self, sequences: Sequence[TokenSequence]) -> None:
        """Tell each joint stage which sequences its rows belong to, in row order."""
        stages: dict[type[JointStage], tuple[JointStage, list[TokenSequence]]] = {}
        for sequence in sequences:
            for stage in self._programs[sequence.plan.key].joint:
                stages.setdefault(type(stage), (stage, []))[1].append(sequence)
        for stage, sources in stages.values():
            stage.begin(list(dict.fromkeys(sources)))

    def _group(
        self,
        program: Program,
        sources: Sequence[TokenSequence],
        live: dict[tuple[int, ...], _Group],
    ) -> _Group:
        mark = tuple([source.epoch for source in sources])
        group = self._groups.get(mark)
        if group is None:
            rows = Rows(sources, self.table, self.vocab_size, self.tokenizer_size)
            group = _Group(program, rows)
        group.rows.advance()
        live[mark] = group
        return group

    def _run_group(
        self, group: _Group, logits: Tensor, members: Sequence[int], result: StepResult
    ) -> _Task:
        try:
            tokens, healthy, taps = yield from self._execute(group, logits)
        except _ElementError as failure:
            yield self._run_alone(group, logits, members, result, failure)
            return
        chosen: list[int] = tokens.tolist()
        broken = [] if bool(healthy.all()) else (~healthy).nonzero()[:, 0].tolist()
        for local in broken:
            outcome, notes = self._rescue_row(group, logits, local, taps)
            if isinstance(outcome, StageError):
                result.errors[members[local]] = outcome
            else:
                chosen[local] = outcome
                tokens[local] = outcome
            if notes:
                result.notes[members[local]] = notes
        if group.program.chooses:
            self._score_rows(logits, taps, members, result)
            return
        for local, row in enumerate(members):
            result.tokens[row] = chosen[local]
        self._measure(group, taps, tokens, members, result)

    def _score_rows(
        self,
        logits: Tensor,
        taps: Mapping[Point, TapView],
        members: Sequence[int],
        result: StepResult,
    ) -> None:
        """Keep the distributions of rows whose token a driver chooses."""
        for local, row in enumerate(members):
            if row not in result.errors:
                own = {point: view.row(local) for point, view in taps.items()}
                raw = logits[local : local + 1, : self.tokenizer_size].float()
                result.scored[row] = Scored(own[Tap.FINAL].logits, raw, own)

    def _scores(self, logits: Tensor, tokens: Sequence[int]) -> list[float]:
        """Return the log-probability of each row's token before every stage, NaN without one."""
        known = logits[:, : self.tokenizer_size]
        ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
        chosen = known.gather(1, ids.clamp(0, known.shape[1] - 1)[:, None])[:, 0].float()
        values = chosen - log_total(known)
        return values.masked_fill(ids < 0, torch.nan).tolist()

    def _measure(
        self,
        group: _Group,
        taps: Mapping[Point, TapView],
        tokens: Tensor,
        members: Sequence[int],
        result: StepResult,
    ) -> None:
        for place, (observer, order) in enumerate(group.program.observers):
            parts = measured(observer, order, taps, tokens)
            for local, row in enumerate(members):
                part = parts[local]
                if not isinstance(part, Exception):
                    result.measured.setdefault(row, []).append((place, part))
                elif row not in result.errors:
                    position = int(group.rows.positions[local])
                    result.errors[row] = stage_error(part, observer.name, "observer", position)

    def _run_alone(
        self,
        group: _Group,
        logits: Tensor,
        members: Sequence[int],
        result: StepResult,
        failure: _ElementError,
    ) -> list[_Task]:
        """After a stage raised: run each row by itself, so that only the culprits fail."""
        if len(members) == 1:
            result.errors[members[0]] = failure.blame(int(group.rows.positions[0]))
            return []
        return [
            self._run_group(group.select([local]), logits[local : local + 1], [row], result)
            for local, row in enumerate(members)
        ]

    # --- execution of one group ---------------------------------------------------------------

    def _execute(
        self, group: _Group, logits: Tensor
    ) -> Generator[_Meeting, None, tuple[Tensor, Tensor, dict[Point, TapView]]]:
        """Run a group's chain up to the tokens; pause where a joint stage waits for other rows."""
        program = group.program
        raw = logits.float()
        if program.on_logprobs:
            raw = torch.log_softmax(raw, 1)
        keep_raw = Tap.RAW in program.taps or raw is logits
        work = raw.clone() if program.mutates and keep_raw else raw
        taps: dict[Point, TapView] = {Tap.RAW: TapView(raw)} if Tap.RAW in program.taps else {}
        sound = torch.isfinite(raw.amax(1)) if program.hides else None  # [rows], None: all are
        view: PickView | None = None
        dense_tokens: tuple[Tensor, Tensor] | None = None
        for number, segment in enumerate(program.segments):
            if number == program.last_mask and Tap.MASKED in program.taps:
                taps[Tap.MASKED] = TapView(work.clone())
            last = number == len(program.segments) - 1
            if not segment.ranked:
                first = segment.elements[0]
                if isinstance(first.stage, JointStage):
                    yield _Meeting(first.stage, group.views[first.index], work)
            if segment.tap is not None:
                found = self._run_watched(segment, work, group, taps)
            elif not segment.ranked:
                found = self._run_dense(segment.elements, work, group)
            elif last and Tap.FINAL not in program.taps:
                view, dense_tokens, found = self._run_ranked(segment, work, group)
            else:
                found = self._write_ranked(segment, work, group)
            sound = both(sound, found)
        if program.last_mask >= len(program.segments) and Tap.MASKED in program.taps:
            taps[Tap.MASKED] = TapView(work.clone())
        if view is None:
            view = PickView(
                ranking=None, dense=work, has_cut=program.has_cut, vocab_size=self.vocab_size
            )
        if Tap.FINAL in program.taps:
            taps[Tap.FINAL] = TapView(view.logits)
        return *self._pick(group, view, dense_tokens, sound), taps

    def _pick(
        self,
        group: _Group,
        view: PickView,
        rescued: tuple[Tensor, Tensor] | None,
        sound: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run the picker; return tokens and whether each row was fit to draw from."""
        if view.ranking is not None:
            top = view.ranking.values[:, 0]
        else:
            top = view.logits.amax(1)
        fit = torch.isfinite(top)
        if sound is not None:
            fit &= sound
        if rescued is None:
            return self._call_picker(group, view, fit), fit
        indices, dense = rescued
        part = group.select(indices.tolist())
        dense_view = PickView(
            ranking=None, dense=dense, has_cut=view.has_cut, vocab_size=self.vocab_size
        )
        dense_fit = torch.isfinite(dense.amax(1))
        if sound is not None:
            dense_fit &= sound[indices]
        listed_fit = fit.index_fill(0, indices, False)  # the short list of these means nothing
        tokens = self._call_picker(group, view, listed_fit)
        rest = self._call_picker(part, dense_view, dense_fit)
        return tokens.index_copy(0, indices, rest), fit.index_copy(0, indices, dense_fit)

    def _call_picker(self, group: _Group, view: PickView, fit: Tensor) -> Tensor:
        picker = group.program.picker
        stage = picker.stage
        assert isinstance(stage, Picker)
        try:
            tokens = stage.pick(view, group.views[picker.index])
            return checked_choice(tokens, view, fit) if self._watches(picker) else tokens
        except Exception as error:
            raise _ElementError(picker, error) from error

    def _watches(self, element: Element) -> bool:
        """Whether what `element` does is checked: a guest's always is."""
        return element.guarded or self.debug

    def _transform(self, element: Element, work: Tensor, group: _Group) -> Tensor | None:
        """Run one stage; of a watched one, return which rows it left sound, bool [rows]."""
        watched = self._watches(element)
        is_force = element.stage.kind is Kind.FORCE  # which may revive the token that it names
        dead = torch.isneginf(work) if watched and not is_force else None
        try:
            element.stage.transform(work, group.views[element.index])
            if dead is not None:
                refuse_resurrection(work, dead)
        except Exception as error:
            raise _ElementError(element, error) from error
        return torch.isfinite(work.amax(1)) if watched else None

    def _run_dense(self, elements: Sequence[Element], work: Tensor, group: _Group) -> Tensor | None:
        """Run stages one by one on whole rows; return which rows stayed sound, None: all did."""
        sound: Tensor | None = None
        for element in elements:
            sound = both(sound, self._transform(element, work, group))
        return sound

    def _run_watched(
        self, segment: Segment, work: Tensor, group: _Group, taps: dict[Point, TapView]
    ) -> Tensor | None:
        """Run a segment whose last stage an observer looks at; keep its rows and its time."""
        assert segment.tap is not None
        stop = stopwatch(work.device)
        if segment.ranked:
            sound = self._write_ranked(segment, work, group)
        else:
            sound = self._run_dense(segment.elements, work, group)
        seconds = stop()
        taps[segment.tap] = TapView(work.clone(), seconds)
        return sound

    def _write_ranked(self, segment: Segment, work: Tensor, group: _Group) -> Tensor | None:
        """Run a ranked segment and write its survivors back to the dense rows."""
        view, rescued, sound = self._run_ranked(segment, work, group)
        assert view.ranking is not None
        view.ranking.write(work)
        if rescued is not None:
            work.index_copy_(0, *rescued)
        return sound

    def _run_ranked(
        self, segment: Segment, work: Tensor, group: _Group
    ) -> tuple[PickView, tuple[Tensor, Tensor] | None, Tensor | None]:
        """Run shapes and cuts on the best tokens of each row.

        Returns the view of the survivors; for rows whose list was too short to be sure, their
        indices and dense results; and which rows stayed sound, None: all did.
        """
        size = min(self._list_size(segment, group), work.shape[1])
        ranked = rank_top(work, size)
        # The bound goes through the shapes as one more column: order survives them, rounding too.
        values = torch.cat([ranked.values, ranked.bound[:, None]], 1)
        ids = ranked.ids
        shapes: list[Element] = []
        ranking: Ranking | None = None
        sure: Tensor | None = None
        sound: Tensor | None = None
        for element in segment.elements:
            view = group.views[element.index]
            stage = element.stage
            if not isinstance(stage, CutStage):
                sound = both(sound, self._transform(element, values, group))
                ids = _ids_in_order(values[:, :-1], ids)
                shapes.append(element)
                continue
            try:
                total = partial(_total_of, work, tuple(shapes), group) if ranking is None else None
                if stage.needs_mass and ranking is not None and sure is None:
                    sure = _is_sure(values)
                ranking = Ranking(values[:, :-1], ids, total_of=total)
                mask = stage.cut(ranking, view)
                values[:, :-1].masked_fill_(~mask, -torch.inf)
            except Exception as error:
                raise _ElementError(element, error) from error
        if sure is None:
            sure = _is_sure(values)
        kept = values[:, :-1]
        if kept.device.type == "cpu":  # fewer draws of noise; the host may look without waiting
            width = max(int((kept > -torch.inf).sum(1).max()), 1)
            kept, ids = kept[:, :width], ids[:, :width]
        view_out = PickView(
            ranking=Ranking(kept, ids), dense=None, has_cut=True, vocab_size=self.vocab_size
        )
        if bool(sure.all()):
            return view_out, None, sound
        return view_out, self._rescue(segment, work, group, sure), sound

    def _rescue(
        self, segment: Segment, work: Tensor, group: _Group, sure: Tensor
    ) -> tuple[Tensor, Tensor]:
        indices = (~sure).nonzero()[:, 0]
        self.dense_rows += indices.numel()
        dense = work[indices]
        sound = self._run_dense(segment.elements, dense, group.select(indices.tolist()))
        if sound is not None:
            dense.masked_fill_(~sound[:, None], -torch.inf)  # not fit to draw from
        return indices, dense

    def _list_size(self, segment: Segment, group: _Group) -> int:
        cache = group.rows.cache
        key = ("list_size", segment.elements[0].index)
        if key not in cache:
            cache[key] = _needed_size(segment, group)
        return int(cache[key])

    # --- when a row is not fit to draw from -----------------------------------------------------

    def _rescue_row(
        self,
        group: _Group,
        logits: Tensor,
        local: int,
        taps: Mapping[Point, TapView],
    ) -> tuple[StageError | int, dict[str, str]]:
        """Find out what broke a row and choose its token all the same, if its request wants that.

        Taps that saw no token alive get the row that the token was chosen from.
        """
        alone = group.select([local])
        outcome = rescue(alone, logits[local : local + 1])
        if isinstance(outcome, StageError):
            return outcome, {}
        token = outcome.token
        if token is None:
            view = PickView(
                ranking=None,
                dense=outcome.row,
                has_cut=group.program.has_cut,
                vocab_size=self.vocab_size,
            )
            try:
                fit = torch.ones(1, dtype=torch.bool, device=self.table.device)
                token = int(self._call_picker(alone, view, fit))
            except _ElementError as failure:
                return failure.blame(int(alone.rows.positions[0])), {}
        for tap in (Tap.MASKED, Tap.FINAL):
            if tap in taps and bool(torch.isneginf(taps[tap].logits[local]).all()):
                taps[tap].logits[local] = outcome.row[0]
        return token, outcome.notes


class _Launched(NamedTuple):
    """A group that the kernels work on."""

    group: _Group
    members: Sequence[int]
    started: Any


# --- groups that meet ---------------------------------------------------------------------------


class _Meeting(NamedTuple):
    """A group that waits at a joint stage."""

    stage: JointStage
    view: RowView
    work: Tensor


# A group on its way through its chain; it yields where it waits, and groups that it split into.
_Task = Generator["_Meeting | list[_Task]", None, None]


def _drive(tasks: list[_Task]) -> None:
    """Run every group to its end; those at a joint stage go on when no other can come to it."""
    ready = tasks
    waiting: dict[type[JointStage], list[tuple[_Task, _Meeting]]] = {}
    while ready or waiting:
        if not ready:
            together = waiting.pop(next(iter(waiting)))
            meetings = [meeting for _, meeting in together]
            meetings[0].stage.join([(meeting.view, meeting.work) for meeting in meetings])
            ready = [task for task, _ in together]
        task = ready.pop()
        for event in task:
            if isinstance(event, _Meeting):
                waiting.setdefault(type(event.stage), []).append((task, event))
                break
            ready += event


# --- small parts ----------------------------------------------------------------------------------


def _needed_size(segment: Segment, group: _Group) -> int:
    need = 0
    for row in range(len(group.rows)):
        known = [hint for hint in _hints(segment, group, row) if hint is not None]
        need = max(need, min(known) + LIST_MARGIN if known else DEFAULT_LIST)
    return next((size for size in LIST_SIZES if size >= need), LIST_SIZES[-1])


def _hints(segment: Segment, group: _Group, row: int) -> Iterator[int | None]:
    """Ask each truncation about how many tokens of a row survive it."""
    for element in segment.elements:
        if isinstance(element.stage, CutStage):
            try:
                yield element.stage.list_hint(group.views[element.index].params[row])
            except Exception as error:
                raise _ElementError(element, error) from error


def _ids_in_order(values: Tensor, ids: Tensor) -> Tensor:
    """Return `ids` [rows, n] in rank order again: a shape's rounding may have made equals of two.

    `values` are in order as they are, and stay so.
    """
    is_wrong = (values[:, 1:] == values[:, :-1]) & (ids[:, 1:] < ids[:, :-1])
    if not bool(is_wrong.any()):
        return ids
    ascending, places = ids.sort(1)
    ranks = values.gather(1, places).sort(dim=1, descending=True, stable=True).indices
    return ascending.gather(1, ranks)


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
    return row_total(full)

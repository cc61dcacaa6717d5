"""Runs drivers: gathers the distributions of a request's lanes, asks, and does what was said."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..kernels.reference.noise import exponential_for_ids, purpose_of, signed_key
from .batch import Scored
from .blame import blaming, measured
from .driver import Driver, Finish, Inject, Move, Rewind, Round
from .driver_stages import ban, write
from .errors import StageError
from .lanes import Lanes, twin
from .request import Request
from .request import Sequence as TokenSequence
from .stage import Verdict

Measured = Sequence[tuple[int, Mapping[str, Any]]]


@dataclass(eq=False, slots=True)
class Drive:
    """The driver of one running request. Its live lanes are the request's sequences."""

    driver: Driver
    width: int
    scored: dict[int, Scored] = field(default_factory=dict)  # by the lane's id()
    failed: dict[int, StageError] = field(default_factory=dict)
    done: list[TokenSequence] = field(default_factory=list)  # finished, in order of time
    looks: bool = False  # it is shown every token that the picker chose
    notes_ends: bool = False  # it is told of every lane that ends
    noted: set[int] = field(default_factory=set)  # branches of the lanes that it was told of

    def __post_init__(self) -> None:
        kind = type(self.driver)
        self.looks = not kind.chooses and (
            kind.rewinds or kind.injects or kind.accepted is not Driver.accepted
        )
        self.notes_ends = not kind.chooses and kind.ended is not Driver.ended

    def outputs(self, request: Request) -> tuple[list[TokenSequence], list[Mapping[str, Any]]]:
        """Return the sequences to hand out, best first, and further fields of their outputs."""
        stuck = [lane for lane in request.sequences if lane.finish_reason == "error"]
        if stuck and (self.driver.chooses or len(stuck) == len(request.sequences)):
            return stuck[:1], [{}]
        lanes = [*self.done, *(lane for lane in request.sequences if lane not in self.done)]
        with blaming(self.driver.name, "driver", 0):
            ranked = self.driver.rank(lanes)
        for name, note in ranked.notes.items():
            request.notes.setdefault(name, note)
        order = list(ranked.order)[: request.params.n]
        fields = list(ranked.fields)[: len(order)] or [{}] * len(order)
        return [lanes[place] for place in order], fields


class Drives:
    """Turns the rounds of choosing drivers into tokens.

    `write(sequence, token, measured, score)` takes a token down, with whatever ends the sequence;
    `end(sequence, verdict)` and `fail(sequence, error)` end it otherwise; `new(request, branch)`
    makes a sequence at the prompt's end; `queue(sequence)` lets it run.
    """

    def __init__(
        self,
        lanes: Lanes,
        *,
        max_model_len: int,
        accept: Callable[[Sequence[TokenSequence], Sequence[int]], Mapping[int, StageError]],
        write: Callable[[TokenSequence, int, Measured, float], None],
        end: Callable[[TokenSequence, Verdict], None],
        fail: Callable[[TokenSequence, BaseException], None],
        new: Callable[[Request, int], TokenSequence],
        queue: Callable[[TokenSequence], None],
    ) -> None:
        self._lanes = lanes
        self._max_model_len = max_model_len
        self._accept = accept
        self._write = write
        self._end = end
        self._fail = fail
        self._new = new
        self._queue = queue

    # --- drivers that look on ---------------------------------------------------------------------

    def look(self, lane: TokenSequence, verdict: Verdict | None) -> Verdict | None:
        """Show a driver the newest token of a lane and do what it says; return why the lane ends.

        `verdict` is what the token brought so far.
        """
        driver: Driver = lane.request.drive.driver
        position = len(lane.output_ids) - 1
        lane.ending = verdict
        try:
            with blaming(driver.name, "driver", position):
                action = driver.accepted(lane)
                if isinstance(action, Rewind):
                    self._check_rewind(driver, lane, action)
                elif isinstance(action, Inject) and not driver.injects:
                    raise ValueError("it writes tokens, but does not say that it injects")
                elif action is not None and not isinstance(action, Finish | Inject):
                    raise TypeError(f"accepted returned {action!r}")
            if isinstance(action, Rewind):
                self._rewind(lane, action)
                return None
            if isinstance(action, Finish):
                verdict = action.verdict
            elif isinstance(action, Inject) and verdict is None:
                self._inject(lane, action.tokens)
            if lane.undo is not None and verdict is None:
                self._settle(driver, lane)
        except StageError as error:
            self._fail(lane, error)
            return None
        finally:
            lane.ending = None
        return verdict

    def _check_rewind(self, driver: Driver, lane: TokenSequence, action: Rewind) -> None:
        if not driver.rewinds:
            raise ValueError("it takes tokens back, but does not say that it rewinds")
        most = len(lane.output_ids) - lane.undo.settled
        if not 1 <= action.count <= most:
            raise ValueError(f"it takes {action.count} tokens back, of which {most} may be")
        if not action.banned and not action.inject:
            raise ValueError("it takes tokens back and neither bans nor writes any there")
        if action.inject and not driver.injects:
            raise ValueError("it writes tokens, but does not say that it injects")

    def _rewind(self, lane: TokenSequence, action: Rewind) -> None:
        self._lanes.rewind(lane, action.count)
        metrics = lane.request.metrics
        if metrics is not None:
            metrics.num_generation_tokens -= action.count
        if action.banned:
            ban(lane.states, [entry.stage for entry in lane.plan.entries], action.banned)
        if action.inject:
            self._inject(lane, action.inject)

    def _inject(self, lane: TokenSequence, tokens: Sequence[int]) -> None:
        """Have tokens written next; all but the first are computed along with it."""
        write(lane.states, [entry.stage for entry in lane.plan.entries], tokens)
        room = self._max_model_len - lane.num_tokens
        if lane.params.max_tokens is not None:
            room = min(room, lane.params.max_tokens - len(lane.output_ids))
        lane.draft = tuple(tokens[: max(room - 1, 0)])

    def _settle(self, driver: Driver, lane: TokenSequence) -> None:
        count = len(lane.output_ids)
        with blaming(driver.name, "driver", count - 1):
            held = driver.held(lane)
        lane.undo.settle(lane, count - held)

    def note_ended(self, touched: Iterable[TokenSequence]) -> list[TokenSequence]:
        """Tell drivers of their lanes that ended in a step; return those that end with them."""
        ended: list[TokenSequence] = []
        for lane in touched:
            drive: Drive | None = lane.request.drive
            if drive is None or not drive.notes_ends or not lane.is_finished:
                continue
            if lane.finish_reason == "abort" or lane.branch in drive.noted:
                continue
            drive.noted.add(lane.branch)
            live = [each for each in lane.request.sequences if not each.is_finished]
            try:
                with blaming(drive.driver.name, "driver", len(lane.output_ids)):
                    idle = list(drive.driver.ended(lane, live))
            except StageError as error:
                ended += self._fail_all(live, error)
                continue
            for each in idle:
                self._end(each, Verdict("abort"))  # type: ignore[arg-type]
                ended.append(each)  # type: ignore[arg-type]
        return ended

    # --- drivers that choose ---------------------------------------------------------------------

    def collect(self, lane: TokenSequence, found: Scored | StageError) -> None:
        """Keep what a lane's row came to, until its siblings have theirs."""
        drive: Drive = lane.request.drive
        lane.is_pending = True
        if isinstance(found, StageError):
            drive.failed[id(lane)] = found
        else:
            drive.scored[id(lane)] = found

    def turn(self, requests: Iterable[Request]) -> list[TokenSequence]:
        """Advance each request whose lanes are all known; return sequences that ended."""
        ended: list[TokenSequence] = []
        for request in requests:
            drive: Drive = request.drive
            live = [lane for lane in request.sequences if not lane.is_finished]
            known = drive.scored.keys() | drive.failed.keys()
            if live and all(id(lane) in known for lane in live):
                ended += self._turn(request, drive, live)
        return ended

    def _turn(
        self, request: Request, drive: Drive, live: Sequence[TokenSequence]
    ) -> list[TokenSequence]:
        scored, failed = drive.scored, drive.failed
        drive.scored, drive.failed = {}, {}
        good = [lane for lane in live if id(lane) in scored]
        if not good and not drive.done:
            return self._fail_all(live, failed[id(live[0])])
        rows = [scored[id(lane)] for lane in good]
        try:
            moves = self._ask(drive, good, rows) if good else []
            ended = [
                self._finish(drive, good[move.parent], rows[move.parent], move)
                for move in moves
                if move.ends
            ]
            going = [move for move in moves if not move.ends]
            if going:
                ended += self._go(request, drive, live, good, rows, going)
            else:
                ended += self._close(drive, live, set(map(id, good)))
        except StageError as error:
            return self._fail_all(
                [lane for lane in request.sequences if not lane.is_finished], error
            )
        return ended

    def _ask(
        self, drive: Drive, lanes: Sequence[TokenSequence], rows: Sequence[Scored]
    ) -> list[Move]:
        logits = torch.cat([row.logits for row in rows])
        round = Round(
            lanes=lanes,
            logits=logits,
            raw=torch.cat([row.raw for row in rows]),
            exponential=_noise(lanes, logits.device),
        )
        position = len(lanes[0].output_ids)
        with blaming(drive.driver.name, "driver", position):
            moves = list(drive.driver.advance(round))
            for move in moves:
                if not 0 <= move.parent < len(lanes):
                    raise ValueError(f"it continues lane {move.parent} of {len(lanes)}")
                if not bool(torch.isfinite(logits[move.parent, move.token])):
                    raise ValueError(f"it chose token {move.token}, which is not alive")
            if sum(not move.ends for move in moves) > drive.width:
                raise ValueError(f"it wants more than {drive.width} lanes")
        return moves

    def _go(
        self,
        request: Request,
        drive: Drive,
        live: Sequence[TokenSequence],
        good: Sequence[TokenSequence],
        rows: Sequence[Scored],
        moves: Sequence[Move],
    ) -> list[TokenSequence]:
        """Give every move a lane: the first of a parent goes on in place, others fork."""
        placed: list[tuple[TokenSequence, Move]] = []
        forks: list[tuple[TokenSequence, Move]] = []
        staying: set[int] = set()
        for move in moves:
            parent = good[move.parent]
            if id(parent) not in staying:
                staying.add(id(parent))
                placed.append((parent, move))
            else:
                forks.append((parent, move))
        free = [lane for lane in live if id(lane) not in staying]
        used = {lane.branch for lane in request.sequences}
        pairs: list[tuple[TokenSequence, TokenSequence]] = []
        for parent, move in forks:
            if free:
                lane = free.pop(0)
            else:
                branch = next(number for number in range(drive.width) if number not in used)
                used.add(branch)
                lane = self._new(request, branch)
                request.sequences.append(lane)
                self._queue(lane)
            pairs.append((lane, parent))
            placed.append((lane, move))
        self._lanes.follow(pairs)
        for lane in free:
            self._lanes.drop(lane)
        order = {id(move): place for place, move in enumerate(moves)}
        placed.sort(key=lambda item: order[id(item[1])])
        ended = self._take(drive, placed, rows)
        request.sequences.sort(key=lambda lane: lane.branch)
        return ended

    def _take(
        self,
        drive: Drive,
        placed: Sequence[tuple[TokenSequence, Move]],
        rows: Sequence[Scored],
    ) -> list[TokenSequence]:
        errors = self._accept([lane for lane, _ in placed], [move.token for _, move in placed])
        ended: list[TokenSequence] = []
        for place, (lane, move) in enumerate(placed):
            lane.is_pending = False
            lane.note = move.note
            if place in errors:
                self._fail(lane, errors[place])
            else:
                self._write_move(lane, rows[move.parent], move)
            if lane.is_finished:
                ended.append(lane)
                if lane.finish_reason != "error":
                    lane.request.sequences.remove(lane)
                    drive.done.append(lane)
        return ended

    def _finish(
        self, drive: Drive, parent: TokenSequence, row: Scored, move: Move
    ) -> TokenSequence:
        """Write a move that ends its hypothesis to a copy of the parent."""
        lane = twin(parent)
        lane.note = move.note
        self._write_move(lane, row, move)
        if lane.finish_reason is None:
            self._end(lane, Verdict("stop"))
        drive.done.append(lane)
        return lane

    def _close(
        self, drive: Drive, live: Sequence[TokenSequence], good: set[int]
    ) -> list[TokenSequence]:
        """End the request: the driver says how each live lane ends, or drops it."""
        ended = []
        for lane in live:
            with blaming(drive.driver.name, "driver", len(lane.output_ids)):
                verdict = drive.driver.leftover(lane) if id(lane) in good else None
            if verdict is None:
                self._lanes.drop(lane)
                continue
            self._end(lane, verdict)
            lane.request.sequences.remove(lane)
            drive.done.append(lane)
            ended.append(lane)
        return ended or drive.done[-1:]

    def _write_move(self, lane: TokenSequence, row: Scored, move: Move) -> None:
        token = torch.tensor([move.token], dtype=torch.int64, device=row.logits.device)
        found: list[tuple[int, Mapping[str, Any]]] = []
        for place, (observer, order) in enumerate(lane.plan.observers):
            part = measured(observer, order, row.taps, token)[0]
            if isinstance(part, Exception):
                self._fail(lane, part)
                return
            found.append((place, part))
        score = torch.log_softmax(row.raw, 1)[0, move.token]
        self._write(lane, move.token, found, float(score))

    def _fail_all(
        self, lanes: Sequence[TokenSequence], error: BaseException
    ) -> list[TokenSequence]:
        for lane in lanes:
            self._fail(lane, error)
        return list(lanes)


def _noise(lanes: Sequence[TokenSequence], device: torch.device) -> Callable[[str, Tensor], Tensor]:
    def column(values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device)

    def exponential(purpose: str, ids: Tensor) -> Tensor:
        return exponential_for_ids(
            column(signed_key(lane.key) for lane in lanes),
            column(len(lane.output_ids) for lane in lanes),
            column(lane.branch for lane in lanes),
            purpose_of(purpose),
            ids,
        )

    return exponential

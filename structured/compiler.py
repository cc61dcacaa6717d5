"""Compiles grammars in the background, each once, and keeps the programs within a memory limit.

Requests that ask for the same grammar at the same time share one compilation, which is dropped when
all of them are gone before it begins. A grammar that failed is remembered for a short while.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Lock
from time import monotonic, perf_counter
from typing import Any

from ..core.constraint import CompiledGrammar, ConstraintBackend, GrammarSpec, Refusal, Vocabulary
from ..core.errors import ValidationError
from .choosing import AUTO, Backends, Candidate

CACHE_BYTES = 512 << 20
WORKERS = 2
FAILURES_KEPT = 256
FAILURE_SECONDS = 30.0
_CLOSED = "the engine is shutting down"

Key = tuple[str, str, bool]  # backend, digest of the spec, whether another backend may take over


@dataclass
class Stats:
    """What the compiler has done since it was made."""

    compiles: int = 0  # finished, well or not
    failures: int = 0
    hits: int = 0  # answered from the kept programs
    joined: int = 0  # waited for a compilation that was already on the way
    cancelled: int = 0  # dropped before they began
    evictions: int = 0
    compile_ms: float = 0.0  # of all compilations together
    longest_ms: float = 0.0
    programs: int = 0  # kept now
    program_bytes: int = 0


@dataclass(eq=False)
class Ticket:
    """One request's claim on a program. Cancelling `future` gives the claim up."""

    future: Future[CompiledGrammar]
    backend: str  # who compiles it; final when the future is done
    notes: tuple[str, ...] = ()
    approximate: tuple[Refusal, ...] = ()  # what is not enforced; empty where it is exact


@dataclass(eq=False)
class _Job:
    """A compilation on the way, and everybody who waits for it."""

    key: Key
    first: Candidate
    others: Iterator[Candidate]
    tickets: list[Ticket] = field(default_factory=list)
    work: Future[None] | None = None


@dataclass(frozen=True, slots=True)
class _Kept:
    """A program and who compiled it."""

    program: CompiledGrammar
    candidate: Candidate


class Compiler:
    """The programs of one vocabulary. Safe for several threads; close it at the end.

    settings: "cache_bytes" (512 MB), "workers" (2 threads), and what the backends read, such as
    "compile_seconds" (10).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        backends: Mapping[str, type[ConstraintBackend]],
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        settings = settings or {}
        self.vocabulary = vocabulary
        self.backends = Backends(vocabulary, backends, settings)
        self._most_bytes = int(settings.get("cache_bytes", CACHE_BYTES))
        self._pool = ThreadPoolExecutor(
            int(settings.get("workers", WORKERS)), thread_name_prefix="decodekit-compile"
        )
        self._lock = Lock()
        self._kept: OrderedDict[Key, _Kept] = OrderedDict()
        self._failed: OrderedDict[Key, tuple[float, Exception]] = OrderedDict()
        self._jobs: dict[Key, _Job] = {}
        self._stats = Stats()
        self._closed = False

    def submit(
        self, spec: GrammarSpec, wanted: str = AUTO, *, strict: bool = True, insist: bool = True
    ) -> Ticket:
        """Choose a backend and return a claim on the program, which may be there already.

        See `Backends.candidates` for the arguments. Raises ValidationError if no backend can
        enforce the grammar; a compilation that fails is the future's exception.
        """
        others = self.backends.candidates(spec, wanted, strict=strict, insist=insist)
        first = next(others)
        key = (first.name, first.suited.spec.key, wanted == AUTO)
        ticket = Ticket(Future(), first.name, first.suited.notes, tuple(first.suited.refusals))
        with self._lock:
            if self._closed:
                raise RuntimeError(_CLOSED)
            if self._answered(key, ticket):
                return ticket
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(key, first, others)
                job.work = self._pool.submit(self._run, job)
            else:
                self._stats.joined += 1
            job.tickets.append(ticket)
        ticket.future.add_done_callback(lambda future: self._left(job, ticket))
        return ticket

    def warm(self) -> Ticket:
        """Load the library and compile "any JSON object", so that the first request need not."""
        return self.submit(GrammarSpec("json_object", '{"type":"object"}'))

    @property
    def stats(self) -> Stats:
        """A copy of the counters."""
        with self._lock:
            kept = [kept.program for kept in self._kept.values()]
            size = sum(program.memory_bytes for program in kept)
            return replace(self._stats, programs=len(kept), program_bytes=size)

    def close(self) -> None:
        """Drop what waits, end what can be ended, and wait for the threads."""
        with self._lock:
            self._closed = True
            waiting = [ticket for job in self._jobs.values() for ticket in job.tickets]
        for ticket in waiting:
            ticket.future.cancel()
        self.backends.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    # --- inside -----------------------------------------------------------------------------------

    def _answered(self, key: Key, ticket: Ticket) -> bool:
        """Settle the ticket from what is known; the lock is held."""
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            self._stats.hits += 1
            _name(ticket, kept.candidate)
            ticket.future.set_result(kept.program)
            return True
        until, error = self._failed.get(key, (0.0, None))
        if error is None or monotonic() > until:
            return False
        ticket.future.set_exception(error)
        return True

    def _left(self, job: _Job, ticket: Ticket) -> None:
        """A future is done; if it was cancelled and was the last one, the job is dropped."""
        if not ticket.future.cancelled():
            return
        with self._lock:
            if ticket in job.tickets:
                job.tickets.remove(ticket)
            if job.tickets or self._jobs.get(job.key) is not job:
                return
            if job.work is not None and job.work.cancel():
                del self._jobs[job.key]
                self._stats.cancelled += 1

    def _run(self, job: _Job) -> None:
        """Compile in a worker; whatever goes wrong is the waiters' answer."""
        start = perf_counter()
        kept: _Kept | None = None
        error: Exception | None = None
        try:
            kept = _compiled(job)
            kept.program.memory_bytes  # noqa: B018, measured here, where it may take a moment
        except Exception as fault:
            error = fault
        took = 1000 * (perf_counter() - start)
        with self._lock:
            self._jobs.pop(job.key, None)
            self._stats.compiles += 1
            self._stats.compile_ms += took
            self._stats.longest_ms = max(self._stats.longest_ms, took)
            if kept is not None:
                self._keep(job.key, kept)
            elif error is not None:
                self._stats.failures += 1
                self._failed[job.key] = (monotonic() + FAILURE_SECONDS, error)
                if len(self._failed) > FAILURES_KEPT:
                    self._failed.popitem(last=False)
            tickets = list(job.tickets)
        for ticket in tickets:
            if not ticket.future.set_running_or_notify_cancel():
                continue
            if kept is not None:
                _name(ticket, kept.candidate)
                ticket.future.set_result(kept.program)
            else:
                ticket.future.set_exception(error)

    def _keep(self, key: Key, kept: _Kept) -> None:
        """Keep a program, and drop the ones not asked for the longest over the memory limit.

        Programs in use live on with their matchers. One that is over the limit alone is not kept.
        """
        self._kept[key] = kept
        sizes = {one: entry.program.memory_bytes for one, entry in self._kept.items()}
        total = sum(sizes.values())
        while total > self._most_bytes:
            oldest, _ = self._kept.popitem(last=False)
            total -= sizes[oldest]
            self._stats.evictions += 1


def _compiled(job: _Job) -> _Kept:
    """Compile with the first backend; where `auto` chose it, the next exact one may take over."""
    try:
        return _Kept(job.first.backend.compile(job.first.suited.spec), job.first)
    except ValidationError as error:
        for candidate in job.others:
            try:
                return _Kept(candidate.backend.compile(candidate.suited.spec), candidate)
            except ValidationError:
                continue
        raise error


def _name(ticket: Ticket, candidate: Candidate) -> None:
    """Say so where another backend took over; specs that become one may differ in their notes."""
    if candidate.name == ticket.backend:
        return
    ticket.backend = candidate.name
    ticket.notes = candidate.suited.notes
    ticket.approximate = tuple(candidate.suited.refusals)

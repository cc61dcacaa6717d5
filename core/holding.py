"""Requests that wait for something a stage prepares, such as a grammar that is being compiled.

They stand beside the queue, so that others run, and join it in the order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from typing import Any

from .request import Request, Status
from .scheduler import Scheduler

PATIENCE = 0.01  # seconds that a step waits where nothing else can run


class Holding:
    """The requests of one engine that may not run yet."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    def queue(self, request: Request) -> None:
        """Queue a request, or hold it until all that its plan waits for is done."""
        is_ready = all(
            future.done() and _failure(future) is None for future in request.plan.pending
        )
        for sequence in request.sequences:
            if is_ready:
                self._scheduler.add(sequence)
            else:
                self._scheduler.hold(sequence)
        if not is_ready:
            self._requests.append(request)

    def release(self, *, may_wait: bool) -> Iterator[tuple[Request, BaseException]]:
        """Queue those that are ready, and yield those whose preparation failed, with the error.

        `may_wait`: wait a little for the first of them if none is ready.
        """
        for request in self._requests:
            if request.is_finished:  # aborted: nobody waits for its preparation any more
                for future in request.plan.pending:
                    future.cancel()
        waiting = [request for request in self._requests if not request.is_finished]
        if may_wait and waiting and not any(map(_is_settled, waiting)):
            futures = {future for request in waiting for future in request.plan.pending}
            unfinished = {future for future in futures if not future.done()}
            wait(unfinished, timeout=PATIENCE, return_when=FIRST_COMPLETED)
        self._requests = []
        for request in waiting:
            errors = [_failure(future) for future in request.plan.pending if future.done()]
            error = next((error for error in errors if error is not None), None)
            if error is not None:
                yield request, error
            elif len(errors) < len(request.plan.pending):
                self._requests.append(request)
            else:
                self._enter(request)

    def _enter(self, request: Request) -> None:
        for sequence in request.sequences:
            if sequence.status is Status.HELD:
                self._scheduler.release(sequence)


def _is_settled(request: Request) -> bool:
    """Whether its preparation is done or has failed."""
    futures = request.plan.pending
    done = [future for future in futures if future.done()]
    return len(done) == len(futures) or any(_failure(future) is not None for future in done)


def _failure(future: Future[Any]) -> BaseException | None:
    """What a finished future failed with, or None; a cancelled one has failed too."""
    return CancelledError() if future.cancelled() else future.exception()

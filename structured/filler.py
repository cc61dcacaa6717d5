"""Fills masks beside the forward pass: one thread takes what was just advanced, oldest first.

Whoever needs a mask that the thread has not come to fills it itself, so that nothing waits for a
thread that is late; the lock of each job decides who does the work.
"""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import Protocol


class Job(Protocol):
    """Something to fill once; what goes wrong is kept and raised where the mask is needed."""

    def settle(self) -> None: ...


class Filler:
    """A queue of jobs and the thread that works on it; the thread ends with the queue."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def start(self, job: Job) -> None:
        """Have `job` settled soon."""
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=_work, args=(self._queue,), name="decodekit-masks", daemon=True
                    )
                    self._thread.start()
        self._queue.put(job)

    def __del__(self) -> None:
        self._queue.put(None)


def _work(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.settle()

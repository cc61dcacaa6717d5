"""A helper process for work in a library that cannot be interrupted: it can be ended.

The process starts at the first job, serves one job at a time, and is killed when a job passes its
time or this side goes away.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Lock, Timer
from time import process_time
from typing import IO, Any

PACKAGE = __name__.split(".")[0]


class OverTime(Exception):
    """The job was ended because it took too long."""


class Died(Exception):
    """The process ended by itself, most likely for want of memory."""


class Workshop:
    """One helper process; `call` may be used from several threads, which then wait in turn."""

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._held: list[subprocess.Popen[bytes]] = []  # the process, if there is one
        self._lock = Lock()
        self._closed = False
        weakref.finalize(self, _end, self._held)  # also when this process ends

    def call(self, function: Callable[..., Any], *arguments: Any, seconds: float) -> Any:
        """Return `function(*arguments)`, run in the process; it must be importable there.

        The time counts from the moment at which the process is free and ready. Raises OverTime,
        Died, or what the function raised.
        """
        where = (function.__module__, function.__qualname__)
        job = pickle.dumps((where, arguments, seconds), protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            process = self._started()
            over = False

            def end() -> None:
                nonlocal over
                over = True
                process.kill()

            timer = Timer(seconds, end)
            timer.daemon = True
            timer.start()
            try:
                assert process.stdin is not None and process.stdout is not None
                _send(process.stdin, job)
                answer = _receive(process.stdout)
            except OSError:
                answer = None
            finally:
                timer.cancel()
            if answer is None:
                _end(self._held)
                raise OverTime(f"over {seconds:g} seconds") if over else Died("the process ended")
        is_good, value = pickle.loads(answer)
        if is_good:
            return value
        raise value

    def close(self) -> None:
        """End the process, and the job in it; later calls are refused."""
        self._closed = True
        for process in list(self._held):
            process.kill()  # whoever waits for an answer gets none, and lets the lock go
        with self._lock:
            _end(self._held)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise Died("the workshop is closed")
        if self._held and self._held[0].poll() is None:
            return self._held[0]
        _end(self._held)
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from {PACKAGE}.structured.workshop import serve; serve({self._memory_bytes})"
        )
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(sys.prefix),  # nothing of the caller's folder is imported by chance
        )
        self._held.append(process)
        assert process.stdout is not None
        if _receive(process.stdout) is None:  # its greeting
            _end(self._held)
            raise Died("the process could not start")
        return process


def _end(held: list[subprocess.Popen[bytes]]) -> None:
    """Kill the process and wait for it."""
    while held:
        process = held.pop()
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # a job that was half written
                    pipe.close()


def serve(memory_bytes: int) -> None:
    """Run in the helper process: take jobs from the standard input until it ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # what a library prints must not get in between
    _limit("RLIMIT_AS", memory_bytes)
    _send(target, b"ready")
    while (job := _receive(source)) is not None:
        (module, name), arguments, seconds = pickle.loads(job)
        _limit("RLIMIT_CPU", int(process_time() + seconds) + 2)  # ends it if nobody else does
        answer: tuple[bool, Any]
        try:
            answer = True, getattr(import_module(module), name)(*arguments)
        except Exception as error:
            answer = False, error
        try:
            spelled = pickle.dumps(answer, protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # what was raised cannot be sent as it is
            spelled = pickle.dumps((False, RuntimeError(f"{answer[1]!r}: {error}")))
        _send(target, spelled)


def _limit(name: str, value: int) -> None:
    """Set a limit of this process, where the system has it."""
    try:
        import resource
    except ImportError:
        return
    kind = getattr(resource, name)
    hard = resource.getrlimit(kind)[1]
    soft = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (soft, hard))


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(8, "little"))
    pipe.write(data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    size = pipe.read(8)
    if len(size) < 8:
        return None
    data = pipe.read(int.from_bytes(size, "little"))
    return data if len(data) == int.from_bytes(size, "little") else None

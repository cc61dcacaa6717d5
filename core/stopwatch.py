"""Time a piece of work on its device; the host waits for the answer only when it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

Seconds = Callable[[], float]


def stopwatch(device: torch.device) -> Callable[[], Seconds]:
    """Start to measure; the result stops it, and what that returns gives the seconds.

    On an accelerator the time is that of the device between two events of its stream.
    """
    if device.type != "cuda":
        begin = time.perf_counter()

        def stop() -> Seconds:
            passed = time.perf_counter() - begin
            return lambda: passed

        return stop
    make_event: Any = torch.cuda.Event
    first = make_event(enable_timing=True)
    first.record(torch.cuda.current_stream(device))

    def mark() -> Seconds:
        last = make_event(enable_timing=True)
        last.record(torch.cuda.current_stream(device))

        def seconds() -> float:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3

        return seconds

    return mark

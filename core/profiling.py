"""Record what an engine does with torch's profiler, to trace files that Perfetto opens."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from .errors import ValidationError


class Profiling:
    """At most one recording at a time, written when it stops.

    `config`: the `profiler_config` of the engine, a dict (or an object with these attributes):
    `torch_profiler_dir`, the folder for the traces, and `profiler`, which is "torch".
    """

    def __init__(self, config: Any) -> None:
        self._folder = _folder(config)
        self._running: Any = None
        self._prefix = "decodekit"
        self._numbers = itertools.count()

    def start(self, prefix: str | None = None) -> None:
        """Begin to record; RuntimeError without a profiler_config or while one runs."""
        if self._folder is None:
            raise RuntimeError(
                "start_profile needs an engine that was made with "
                "profiler_config={'torch_profiler_dir': FOLDER}"
            )
        if self._running is not None:
            raise RuntimeError("a profile is being recorded already; call stop_profile first")
        self._prefix = prefix or "decodekit"
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(activities=activities)
        self._running.__enter__()

    def stop(self) -> None:
        """End the recording and write FOLDER/PREFIX-rank0-N.json."""
        if self._running is None or self._folder is None:
            raise RuntimeError("no profile is being recorded; call start_profile first")
        running, self._running = self._running, None
        running.__exit__(None, None, None)
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"{self._prefix}-rank0-{next(self._numbers)}.json"
        running.export_chrome_trace(str(self._folder / name))


def _folder(config: Any) -> Path | None:
    if config is None:
        return None
    values = config if isinstance(config, Mapping) else vars(config)
    known = {"profiler", "torch_profiler_dir"}
    for name in sorted(set(values) - known):
        raise ValidationError(
            f"profiler_config has no key {name!r} (known: {', '.join(sorted(known))})",
            parameter="profiler_config",
            value=values[name],
        )
    if values.get("profiler", "torch") != "torch":
        raise ValidationError(
            f"profiler_config.profiler must be 'torch', got {values['profiler']!r}",
            parameter="profiler_config",
            value=values["profiler"],
        )
    folder = values.get("torch_profiler_dir")
    return None if not folder else Path(folder)

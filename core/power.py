"""Put an engine to sleep and wake it: pause the scheduler, drop the cache, take the weights off."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from .build import Parts, load_weights
from .errors import ValidationError

log = logging.getLogger("decodekit")

TAGS = ("weights", "kv_cache", "scheduling")


class Power:
    """What of one engine is asleep.

    Level 0 pauses the scheduler. Level 1 also drops the cache and moves the weights to the host (on
    a CPU they are there already). Level 2 drops the weights; waking reads them from the source
    again.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._missing: set[str] = set()  # of "weights" and "kv_cache"
        self._level = 0
        self._is_paused = False

    @property
    def is_sleeping(self) -> bool:
        """Whether nothing can run: paused, or memory is away."""
        return self._is_paused or bool(self._missing)

    @property
    def is_memory_away(self) -> bool:
        """Whether weights or cache have to come back before anything can run."""
        return bool(self._missing)

    @property
    def level(self) -> int:
        """The level at which memory is away, 0 if none is."""
        return self._level if self._missing else 0

    def sleep(
        self, level: int, mode: str, *, abort_all: Callable[[], None], has_work: bool
    ) -> None:
        """Go to sleep; see `LLM.sleep`."""
        if level not in (0, 1, 2):
            raise ValidationError(
                f"level must be 0, 1 or 2, got {level!r}", parameter="level", value=level
            )
        if mode not in ("abort", "wait", "keep"):
            raise ValidationError(
                f"mode must be 'abort', 'wait' or 'keep', got {mode!r}",
                parameter="mode",
                value=mode,
            )
        if level and not self._parts.config.enable_sleep_mode:
            raise RuntimeError(
                f"sleep level {level} needs an engine that was made with enable_sleep_mode=True"
            )
        if mode == "wait" and has_work:
            raise ValidationError(
                "mode is 'wait', but an in-process engine makes no step while sleep waits; finish "
                "the requests first, or use 'abort' or 'keep'",
                parameter="mode",
                value=mode,
            )
        if self.is_sleeping:
            log.warning("the engine is asleep already; sleep does nothing")
            return
        self._is_paused = True
        if level == 0:
            return
        if mode == "abort":
            abort_all()
        self._level = level
        self._parts.scheduler.preempt_all()
        self._parts.pool.forget()
        self._parts.runner.backend.release()
        for further in self._parts.further:
            further.release()
        self._drop_weights()
        self._missing = {"weights", "kv_cache"}

    def wake_up(self, tags: Iterable[str] | None) -> None:
        """Bring parts back; scheduling resumes when all memory is there."""
        wanted = set(TAGS) if tags is None else set(tags)
        for tag in sorted(wanted - set(TAGS)):
            raise ValidationError(
                f"tags must be of {', '.join(TAGS)}, got {tag!r}", parameter="tags", value=tag
            )
        if "weights" in wanted & self._missing:
            self._restore_weights()
            self._missing.discard("weights")
        if "kv_cache" in wanted & self._missing:
            self._parts.runner.backend.restore()
            for further in self._parts.further:
                further.backend.restore()
            self._missing.discard("kv_cache")
        if not self._missing:
            self._is_paused = False

    def _drop_weights(self) -> None:
        runner = self._parts.runner
        if self._level == 2:
            del runner.model
            self._parts.loaded = replace(self._parts.loaded, model=cast(Any, _Gone()))
            for further in self._parts.further:
                further.model = cast(Any, _Gone())
        elif runner.device.type != "cpu":
            for model in (runner.model, *(further.model for further in self._parts.further)):
                move_tensors(model, torch.device("cpu"))
            torch.cuda.empty_cache()

    def _restore_weights(self) -> None:
        parts = self._parts
        if self._level == 2:
            parts.loaded = load_weights(parts.config)
            parts.runner.model = parts.loaded.model
            for further in parts.further:
                further.model = further.load().model
        elif parts.runner.device.type != "cpu":
            for model in (parts.runner.model, *(further.model for further in parts.further)):
                move_tensors(model, parts.runner.device)


class _Gone:
    """Stands where the weights were."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the weights are asleep (level 2); call wake_up first")


def move_tensors(holder: Any, device: torch.device, seen: set[int] | None = None) -> None:
    """Move every tensor that `holder` owns, through lists, dicts and plain objects, in place."""
    seen = set() if seen is None else seen
    if id(holder) in seen:
        return
    seen.add(id(holder))
    if isinstance(holder, torch.nn.Module):
        holder.to(device)
        return
    if isinstance(holder, list):
        pairs: list[tuple[Any, Any]] = list(enumerate(holder))
        put: Callable[[Any, Any], None] = holder.__setitem__
    elif isinstance(holder, dict):
        pairs, put = list(holder.items()), holder.__setitem__
    elif type(holder).__module__.startswith("decodekit"):
        names = [*getattr(holder, "__dict__", {}), *getattr(type(holder), "__slots__", ())]
        pairs = [(name, getattr(holder, name)) for name in names if hasattr(holder, name)]

        def put(name: Any, value: Any) -> None:
            setattr(holder, name, value)

    else:
        return
    for name, value in pairs:
        if isinstance(value, Tensor):
            put(name, value.to(device))
        elif (
            isinstance(value, (list, dict, torch.nn.Module))
            or hasattr(value, "__dict__")
            or (hasattr(type(value), "__slots__"))
        ):
            move_tensors(value, device, seen)

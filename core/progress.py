"""The progress bars of offline calls: prompts read, prompts done, tokens a second."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from .outputs import RequestOutput

T = TypeVar("T")


class Progress:
    """Two bars, or none; `option` is True, False, or a callable that makes a tqdm-like bar."""

    def __init__(self, option: bool | Callable[..., Any]) -> None:
        self._make: Callable[..., Any] | None = None
        if callable(option):
            self._make = option
        elif option:
            from tqdm.auto import tqdm

            self._make = tqdm
        self._bar: Any = None
        self._begun = 0.0
        self._input = 0
        self._output = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def adding(self, prompts: Iterable[T]) -> Iterator[T]:
        """Iterate over `prompts` under the first bar."""
        if self._make is None:
            return iter(prompts)
        return iter(self._make(prompts, desc="Rendering prompts"))

    def start(self, total: int) -> None:
        """Show the second bar for `total` requests."""
        self._begun = time.perf_counter()
        if self._make is not None:
            self._bar = self._make(
                total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_speed(0.0, 0.0)
            )

    def finished(self, output: RequestOutput) -> None:
        """Count one finished request."""
        if self._bar is None:
            return
        self._input += len(output.prompt_token_ids or ())
        self._output += sum(len(part.token_ids) for part in output.outputs)
        passed = max(time.perf_counter() - self._begun, 1e-9)
        self._bar.postfix = _speed(self._input / passed, self._output / passed)
        self._bar.update(1)


def _speed(prompt_rate: float, output_rate: float) -> str:
    return f"est. speed input: {prompt_rate:.2f} toks/s, output: {output_rate:.2f} toks/s"

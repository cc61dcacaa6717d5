"""Values of the whole vocabulary at every position, as one tensor a sequence and mode.

`output_tensors=True` fills `CompletionOutput.tensors`: for each of the request's `logprobs_mode`s
(or the engine's) a float32 tensor [tokens, tokenizer size] on the CPU. No Python objects are made,
and `max_logprobs` does not bound it. The tensors are parts of buffers that grow with the sequence:
copy one before changing it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.batch import TapView
from ...core.hookspecs import hookimpl
from ...core.stage import BindContext, Observer, Tap
from .logprobs import Point, known_part, points_of

FIRST_ROWS = 16


class Order(NamedTuple):
    """Which values one request wants."""

    points: tuple[Point, ...]
    tokenizer_size: int


class Record:
    """The rows of one sequence, one buffer a mode."""

    def __init__(self, order: Order) -> None:
        self.modes = [point.mode for point in order.points]
        self.length = 0
        self.buffers = [torch.empty(FIRST_ROWS, order.tokenizer_size) for _ in order.points]

    def append(self, rows: Iterable[Tensor]) -> None:
        """Add one position; full buffers are replaced by ones of twice the length."""
        for place, row in enumerate(rows):
            buffer = self.buffers[place]
            if self.length == len(buffer):
                grown = buffer.new_empty(2 * len(buffer), buffer.shape[1])
                grown[: len(buffer)] = buffer
                buffer = self.buffers[place] = grown
            buffer[self.length] = row
        self.length += 1


class OutputTensors(Observer):
    """Feeds `tensors`."""

    name = "output_tensors"

    def bind(self, ctx: BindContext) -> Order | None:
        if not ctx.request.output_tensors:
            return None
        return Order(points_of(ctx), ctx.tokenizer_size)

    def taps(self, order: Order) -> frozenset[Tap]:
        return frozenset(point.tap for point in order.points)

    def measure(
        self, order: Order, taps: Mapping[Tap, TapView], tokens: Tensor
    ) -> Mapping[str, Tensor]:
        known = {tap: known_part(view, order.tokenizer_size) for tap, view in taps.items()}
        return {
            str(number): known[point.tap].logits if point.is_logit else known[point.tap].logprobs
            for number, point in enumerate(order.points)
        }

    def open(self, order: Order, tokenizer: Any) -> Record:
        return Record(order)

    def record(self, record: Record, token: int, values: Mapping[str, Any]) -> None:
        record.append(torch.from_numpy(values[str(n)]) for n in range(len(record.modes)))

    def result(self, record: Record) -> Mapping[str, Any]:
        pairs = zip(record.modes, record.buffers, strict=True)
        return {"tensors": {mode: buffer[: record.length] for mode, buffer in pairs}}


@hookimpl
def decodekit_observers() -> Iterable[Observer]:
    return [OutputTensors()]

"""Runs a request's own callables: ([prompt_ids,] output_ids, logits) -> logits.

The form that vLLM had in 2024 and that whole libraries of processors are written in. Each callable
gets fresh lists and a copy of the row, float32 [vocab], and returns a row. Slow: Python runs once
for each row and token. Masked tokens stay masked whatever a callable returns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.batch import RowView
from ..core.errors import ChainError
from ..core.hookspecs import hookimpl
from ..core.stage import BindContext, Caps, Kind, Need, Stage, StageParams

Processor = Callable[..., Any]


class LastRow:
    """What the callables gave at one position, so that none is called twice for one token.

    The engine may run a step again row by row to find out which row failed; a callable that counts
    its calls must not notice.
    """

    __slots__ = ("outcome", "position")

    def __init__(self) -> None:
        self.position = -1
        self.outcome: Tensor | Exception | None = None


class PerRequest(Stage):
    """Adapts `logits_processors` to the chain, one row at a time."""

    name = "per_request"
    kind = Kind.BIAS
    fields = {"logits_processors": "callables"}
    caps = Caps(needs=frozenset({Need.PROMPT, Need.OUTPUT}), stateful=True)
    slow: ClassVar[str] = "calls Python once for each row and token"

    class Params(StageParams):
        """The callables, in the order in which they run."""

        callables: tuple[Processor, ...] | None = None

    class Bound(StageParams):
        """The callables, and for each whether it takes the prompt."""

        callables: tuple[Processor, ...]
        takes_prompt: tuple[bool, ...]

    @classmethod
    def bind(cls, params: Any, ctx: BindContext) -> Any:
        callables = params.callables or ()
        return cls.Bound(
            callables=callables, takes_prompt=tuple(_takes_prompt(each) for each in callables)
        )

    @classmethod
    def is_identity(cls, params: Any) -> bool:
        return not params.callables

    def open(self, params: Any, prompt: Any) -> LastRow:
        return LastRow()

    def fork(self, state: LastRow) -> LastRow:
        return LastRow()

    def rollback(self, state: LastRow, count: int) -> None:
        state.position = -1

    def transform(self, logits: Tensor, rows: RowView) -> None:
        for row, params in enumerate(rows.params):
            state: LastRow = rows.states[row]
            position = int(rows.host_positions[row])
            if state.position != position:
                state.outcome = _outcome(logits[row], params, rows, row)
                state.position = position
            if isinstance(state.outcome, Exception):
                raise state.outcome
            assert state.outcome is not None
            logits[row] = state.outcome


def _takes_prompt(processor: Processor) -> bool:
    """Say whether `processor` takes three arguments, not two; refuse any other number."""
    try:
        signature = inspect.signature(processor)
    except (TypeError, ValueError):
        raise ChainError(
            f"logits_processors must be callables with a readable signature, got {processor!r}",
            parameter="logits_processors",
            value=processor,
        ) from None
    for count in (3, 2):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count == 3
    raise ChainError(
        "logits_processors must be callables of (output_ids, logits) or "
        f"(prompt_ids, output_ids, logits), got {_name(processor)}{signature}",
        parameter="logits_processors",
        value=processor,
    )


def _outcome(logits: Tensor, params: Any, rows: RowView, row: int) -> Tensor | Exception:
    """Return the row after all callables, or what one of them raised."""
    current = logits
    for processor, takes_prompt in zip(params.callables, params.takes_prompt, strict=True):
        history = [list(rows.output(row))]
        if takes_prompt:
            history.insert(0, list(rows.prompt(row)))
        try:
            current = _checked(processor, processor(*history, current.clone()), logits)
        except Exception as error:
            return error
    return current.to(logits).masked_fill(torch.isneginf(logits), -torch.inf)


def _checked(processor: Processor, result: object, logits: Tensor) -> Tensor:
    if isinstance(result, Tensor):
        if result.shape == logits.shape and result.is_floating_point():
            if bool(torch.isnan(result).any()) or bool(torch.isposinf(result).any()):
                raise ValueError(
                    f"the logits processor {_name(processor)} returned NaN or infinity"
                )
            return result.detach()
        got = f"a {result.dtype} tensor of shape {list(result.shape)}"
    else:
        got = "nothing" if result is None else f"a {type(result).__name__}"
    raise ValueError(
        f"the logits processor {_name(processor)} must return a float tensor of shape "
        f"{list(logits.shape)}, it returned {got}"
    )


def _name(processor: Processor) -> str:
    return getattr(processor, "__qualname__", type(processor).__qualname__)


@hookimpl
def decodekit_stages() -> Iterable[type[Stage]]:
    return [PerRequest]

"""What is checked of stages, pickers and observers while they run, and who is blamed."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .batch import PickView, TapView
from .errors import StageError
from .stage import Point, Verdict


def stage_error(error: Exception, stage: str, instance: str, position: int) -> StageError:
    """Return the error that a request ends with; what a stage refuses itself speaks for itself."""
    text = str(error) or type(error).__name__
    reason = text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}"
    return StageError(reason, stage=stage, instance=instance, position=position)


class blaming:
    """Turns what is raised inside a `with` into a StageError that names who raised it.

    A class, as it is entered several times a token: a generator would cost three times as much.
    """

    __slots__ = ("_instance", "_name", "_position")

    def __init__(self, name: str, instance: str, position: int) -> None:
        self._name = name
        self._instance = instance
        self._position = position

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception):
            raise stage_error(error, self._name, self._instance, self._position) from error


def checked_verdict(verdict: object) -> Verdict | None:
    """Return what a stop said; TypeError for anything else than a Verdict or None."""
    if verdict is None or isinstance(verdict, Verdict):
        return verdict
    raise TypeError(f"a stop must return a Verdict or None, got {verdict!r}")


def fault(work: Tensor) -> str | None:
    """Say what is wrong with rows: "nonfinite" (NaN or +inf), "dead" (no token alive), or None."""
    if bool(torch.isnan(work).any()) or bool(torch.isposinf(work).any()):
        return "nonfinite"
    return "dead" if bool(torch.isneginf(work).all()) else None


def refuse_resurrection(work: Tensor, dead: Tensor) -> None:
    """Raise ValueError if a token that was `dead` is not any more."""
    if bool((dead & (work != -torch.inf)).any()):
        raise ValueError("it gave a masked token (-inf) a finite logit")


def checked_choice(tokens: object, view: PickView, fit: Tensor) -> Tensor:
    """Return a guest picker's choice if every `fit` row has the id of an alive token.

    Rows that are not fit get 0, since their choice means nothing.
    """
    if not isinstance(tokens, Tensor) or tokens.shape != fit.shape:
        shape = list(tokens.shape) if isinstance(tokens, Tensor) else type(tokens).__name__
        raise ValueError(f"pick must return a tensor of shape {list(fit.shape)}, got {shape}")
    if tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise ValueError(f"pick must return integer ids, got {tokens.dtype}")
    chosen = tokens.long()
    outside = ((chosen < 0) | (chosen >= view.vocab_size)) & fit
    if bool(outside.any()):
        raise ValueError(
            f"it chose the id {int(chosen[outside][0])}, which is not in [0, {view.vocab_size})"
        )
    chosen = torch.where(fit, chosen, 0)
    dead = torch.isneginf(view.logits.gather(1, chosen[:, None])[:, 0]) & fit
    if bool(dead.any()):
        raise ValueError(f"it chose the id {int(chosen[dead][0])}, which is masked or cut")
    return chosen


def measured(
    observer: Any, order: Any, taps: Mapping[Point, TapView], tokens: Tensor
) -> list[Mapping[str, Any] | Exception]:
    """Return what an observer measured on each row, or what it raised for that row alone."""
    try:
        values = observer.measure(order, taps, tokens)
        host = {name: value.cpu().numpy() for name, value in values.items()}
        return [{name: value[row] for name, value in host.items()} for row in range(len(tokens))]
    except Exception as error:
        if len(tokens) == 1:
            return [error]
    parts: list[Mapping[str, Any] | Exception] = []
    for row in range(len(tokens)):
        own = {tap: view.row(row) for tap, view in taps.items()}
        parts += measured(observer, order, own, tokens[row : row + 1])
    return parts


def both(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Return where both hold; None holds everywhere."""
    if first is None or second is None:
        return second if first is None else first
    return first & second

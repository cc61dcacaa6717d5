"""Every exception that decodekit raises on purpose, in one small tree.

* DecodekitError
    * ValidationError (a ValueError): bad input, refused before any work
        * ParameterTypeError (also a TypeError): a value of the wrong type, or an unknown keyword
        * NotInThisVersion: a known name that this version does not have
        * ChainError: an unknown stage, an illegal order, a stage that cannot be bound
    * PluginError: a plugin that cannot be loaded or contradicts another
        * PluginImportError (also a RuntimeError): a processor of vLLM's that cannot be imported
    * StageError: a stage failed inside one request while it ran
    * EngineDeadError: the engine stopped and answers no more
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class DecodekitError(Exception):
    """Base of every deliberate exception."""


class ValidationError(DecodekitError, ValueError):
    """A bad value: one sentence naming the field, the value and the allowed range.

    `parameter` is the field's name and `value` what was given; either may be None where a
    sentence speaks of no single field.
    """

    def __init__(self, message: str, *, parameter: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.parameter = parameter
        self.value = value

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), str(self), self.parameter, self.value)


class ParameterTypeError(ValidationError, TypeError):
    """A value of the wrong type, or a keyword that does not exist."""


class NotInThisVersion(ValidationError):
    """A known argument, method or task that this version does not have yet."""


class ChainError(ValidationError):
    """A chain that cannot run: an unknown stage, an illegal order, a bad parameter."""


class PluginError(DecodekitError):
    """A plugin that cannot be loaded, or that contradicts another one."""


class PluginImportError(PluginError, RuntimeError):
    """A processor of vLLM's interface that cannot be imported."""


class StageError(DecodekitError):
    """A stage failed while one request ran; says which stage, instance and position."""

    def __init__(self, reason: str, *, stage: str, instance: str, position: int) -> None:
        super().__init__(f"stage={stage} instance={instance} position={position}: {reason}")
        self.reason = reason
        self.stage = stage
        self.instance = instance
        self.position = position

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_stage, (self.reason, self.stage, self.instance, self.position)


class EngineDeadError(DecodekitError, RuntimeError):
    """The engine stopped after an internal failure and takes no more requests."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'x'?" for the closest of `known`, or an empty string."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _rebuild(
    kind: type[ValidationError], message: str, parameter: str | None, value: object
) -> ValidationError:
    return kind(message, parameter=parameter, value=value)


def _rebuild_stage(reason: str, stage: str, instance: str, position: int) -> StageError:
    return StageError(reason, stage=stage, instance=instance, position=position)

"""Every question that decodekit asks its plugins. Hooks return descriptions; nothing is done here.

Write `@hookimpl` over a function of the same name in a module, and offer the module by an entry
point in the group "decodekit" or by `LLM.register`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from .driver import Driver
    from .parsers import ReasoningParser, ToolParser
    from .proposer import Proposer
    from .stage import (
        AttentionBackend,
        CommandSpec,
        ConstraintBackend,
        Finding,
        Observer,
        Picker,
        Profile,
        Reviewer,
        Stage,
        Stop,
    )

PROJECT = "decodekit"
HOOK_API = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def decodekit_stages() -> Iterable[type[Stage]]:  # type: ignore[empty-body]
    """Return the stage classes on offer."""


@hookspec
def decodekit_pickers() -> Iterable[type[Picker]]:  # type: ignore[empty-body]
    """Return the picker classes on offer."""


@hookspec
def decodekit_stops() -> Iterable[Stop]:  # type: ignore[empty-body]
    """Return the stop conditions on offer."""


@hookspec
def decodekit_observers() -> Iterable[Observer]:  # type: ignore[empty-body]
    """Return the observers on offer."""


@hookspec
def decodekit_drivers() -> Iterable[type[Driver]]:  # type: ignore[empty-body]
    """Return the drivers on offer."""


@hookspec
def decodekit_proposers() -> Iterable[type[Proposer]]:  # type: ignore[empty-body]
    """Return the proposers on offer, which guess tokens for speculation."""


@hookspec
def decodekit_constraint_backends() -> Iterable[type[ConstraintBackend]]:  # type: ignore[empty-body]
    """Return the grammar compilers on offer."""


@hookspec
def decodekit_attention_backends() -> Iterable[type[AttentionBackend]]:  # type: ignore[empty-body]
    """Return the attention implementations on offer, best first."""


@hookspec
def decodekit_profiles() -> Iterable[Profile]:  # type: ignore[empty-body]
    """Return the named default chains on offer."""


@hookspec
def decodekit_reviewers() -> Iterable[Reviewer]:  # type: ignore[empty-body]
    """Return the rules on offer that review plans."""


@hookspec
def decodekit_tool_parsers() -> Iterable[type[ToolParser]]:  # type: ignore[empty-body]
    """Return the parsers of tool calls on offer."""


@hookspec
def decodekit_reasoning_parsers() -> Iterable[ReasoningParser]:  # type: ignore[empty-body]
    """Return the parsers of reasoning on offer."""


@hookspec
def decodekit_commands() -> Iterable[CommandSpec]:  # type: ignore[empty-body]
    """Return the sub-commands on offer; import what they need inside them."""


@hookspec
def decodekit_doctor() -> Iterable[Finding]:  # type: ignore[empty-body]
    """Return the results of this plugin's self-check."""

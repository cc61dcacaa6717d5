"""A sub-command of the command line."""

from __future__ import annotations

from collections.abc import Iterable

from ...core.hookspecs import hookimpl
from ...core.stage import CommandSpec


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return []

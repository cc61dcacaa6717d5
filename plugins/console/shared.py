"""Options that several sub-commands share: declared once in a table, merged into each command."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any

import typer


@dataclass(frozen=True, slots=True)
class Opt:
    """One option. Its flag is its name unless `flags` say otherwise; bool makes a switch."""

    name: str
    type: Any  # int, float, str, bool or list[str]
    help: str
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    is_argument: bool = False  # a positional one

    def parameter(self, panel: str) -> inspect.Parameter:
        """Describe the option as typer reads it off a function."""
        info: Any
        if self.is_argument:
            info = typer.Argument(help=self.help, metavar=self.metavar, show_default=False)
        else:
            flags = self.flags or (f"--{self.name.replace('_', '-')}",)
            info = typer.Option(
                *flags,
                help=self.help,
                metavar=self.metavar,
                rich_help_panel=panel,
                show_default=False,
            )
        is_switch = self.type is bool
        return inspect.Parameter(
            self.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if is_switch else None,
            annotation=Annotated[self.type if is_switch else self.type | None, info],
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Options, by panel of the help, and what is made of those that were given."""

    panels: Mapping[str, Sequence[Opt]]
    make: Callable[[dict[str, Any]], Any]

    def without(self, *names: str) -> Group:
        """Return the group without the options of these names."""
        panels = {
            panel: [opt for opt in opts if opt.name not in names]
            for panel, opts in self.panels.items()
        }
        return Group(panels, self.make)

    def parameters(self) -> list[inspect.Parameter]:
        """Describe every option."""
        return [opt.parameter(panel) for panel, opts in self.panels.items() for opt in opts]


def takes(**groups: Group) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `groups` in place of its parameters of these names.

    Over `def chat(sampling, system: ...)`, `@takes(sampling=SAMPLING)` makes a command with the
    options of SAMPLING and `system`; `chat` gets what SAMPLING made of what the user gave.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        shared = {name: group.parameters() for name, group in groups.items()}
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in inspect.signature(command, eval_str=True).parameters.items()
            if name not in groups
        ]
        parameters = [*(part for parts in shared.values() for part in parts), *own]

        @wraps(command)
        def merged(**values: Any) -> None:
            made = {}
            for name, parts in shared.items():
                taken = {part.name: values.pop(part.name) for part in parts}
                given = {key: value for key, value in taken.items() if _is_given(value)}
                made[name] = groups[name].make(given)
            command(**values, **made)

        setattr(merged, "__signature__", inspect.Signature(parameters))  # noqa: B010
        merged.__annotations__ = {part.name: part.annotation for part in parameters}
        return merged

    return decorate


def _is_given(value: object) -> bool:
    return value is not None and value is not False and value != []

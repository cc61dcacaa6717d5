"""The command group `decodekit`: finds its sub-commands among the plugins.

No sub-command stands here: plugins offer them by `decodekit_commands`. Built-in ones are found
without loading anything third-party, so that a broken package cannot take the commands away that
would show it. Errors of ours end as one red sentence and an exit code.
"""

from __future__ import annotations

import importlib
import logging
import sys
import traceback
import warnings
from typing import Annotated, Any, TextIO

import typer
from typer.core import TyperCommand, TyperGroup

from . import absent
from .discovery import PACKAGE
from .errors import DecodekitError, PluginError, ValidationError, did_you_mean
from .registry import Registry
from .stage import CommandSpec

# The rooms that offer sub-commands. Loading only these keeps torch out of `--help`.
COMMAND_ROOMS = ("plugins.console.", "plugins.serve.", "plugins.author.")
BAD_INPUT = 2  # exit code, as for a wrong option
FAILED = 1


class CommandGroup(TyperGroup):
    """A group whose sub-commands are those that plugins offer, looked up when one is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Every sub-command, third-party ones included; a broken plugin costs a warning."""
        return [spec.name for spec in _all_specs(ctx)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the sub-command of this name or alias, None if there is none."""
        for specs in (_built_in_specs, _all_specs):
            for spec in specs(ctx):
                if cmd_name in (spec.name, *spec.aliases):
                    return _command(spec)
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Take the sub-command's name off `args`; refuse a known absent one with its sentence."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            if any(row.name == name for row in absent.COMMANDS):
                absent.refuse(name, absent.COMMAND)
            known = self.list_commands(ctx)
            raise ValidationError(
                f"there is no command {name!r} (known: {', '.join(known)})"
                + did_you_mean(name, known),
                parameter="command",
                value=name,
            )
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Note whether a traceback is wanted, then parse."""
        ctx.meta[__name__] = "--debug" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the sub-command; one of our own errors becomes one sentence and an exit code."""
        try:
            return super().invoke(ctx)
        except DecodekitError as error:
            if ctx.meta[__name__]:
                traceback.print_exc()
            say("error", str(error), "red")
            is_input = isinstance(error, ValidationError | PluginError)
            raise typer.Exit(BAD_INPUT if is_input else FAILED) from error
        except Exception as error:
            # Of the parser's errors only that of an unknown option may be ours to explain.
            refusal = _absent_option(getattr(error, "option_name", None))
            if refusal is None:
                raise
            say("error", refusal, "red")
            raise typer.Exit(BAD_INPUT) from error


app = typer.Typer(
    name=PACKAGE,
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        print(PACKAGE, getattr(sys.modules[PACKAGE], "__version__"))  # noqa: B009
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Decode with a language model; every step of the pipeline is a plugin.

    Without a model the commands use the small one that pip installs.
    """


def main() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(
            stream, "reconfigure"
        ):  # a terminal that cannot write a character shows its code
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger(PACKAGE)
    logger.addHandler(handler)
    logger.propagate = False
    app()


def say(word: str, sentence: str, style: str) -> None:
    """Write one line such as "error: ..." to standard error, in colour on a terminal."""
    from rich.console import Console
    from rich.text import Text

    line = Text.assemble((f"{word}: ", f"bold {style}"), (sentence, style))
    Console(stderr=True).print(line, soft_wrap=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning without its place in our code, which means nothing to a user."""
    say("warning", str(message), "yellow")


# --- sub-commands ---------------------------------------------------------------------------------


def _built_in_specs(ctx: Any) -> tuple[CommandSpec, ...]:
    """Return the commands of the catalogue, without a look at anything third-party."""
    return _load(ctx, "built-in", autoload=False, environ={})


def _all_specs(ctx: Any) -> tuple[CommandSpec, ...]:
    """Return every command that the environment selects; at least the built-in ones."""
    try:
        return _load(ctx, "all")
    except PluginError as error:  # such as an unknown name in DECODEKIT_PLUGINS
        say("warning", str(error), "yellow")
        return _built_in_specs(ctx)


def _load(ctx: Any, which: str, **selection: Any) -> tuple[CommandSpec, ...]:
    found: dict[str, tuple[CommandSpec, ...]] = ctx.meta.setdefault(f"{__name__}.specs", {})
    if which not in found:
        catalogue = importlib.import_module(".plugins.catalogue", PACKAGE).BUILT_INS
        rooms = [name for name in catalogue if name.startswith(COMMAND_ROOMS)]
        found[which] = Registry.load(catalogue=rooms, **selection).commands
    return found[which]


def _command(spec: CommandSpec) -> Any:
    """Turn a CommandSpec into a command of the parser; None, with a warning, if it cannot be."""
    try:
        command: Any
        if isinstance(spec.app, TyperCommand):
            command = spec.app
        elif isinstance(spec.app, typer.Typer):
            command = typer.main.get_group(spec.app)
            command.help = spec.help or command.help
        else:
            single = typer.Typer(add_completion=False, rich_markup_mode="rich")
            single.command(help=spec.help or None)(spec.app)
            command = typer.main.get_command(single)
    except Exception as error:  # whatever typer says of a plugin's function
        say("warning", f"the command {spec.name!r} cannot be used: {error}", "yellow")
        return None
    command.name = spec.name
    return command


def _absent_option(option: object) -> str | None:
    """Return the sentence for an unknown option that names something this version lacks."""
    if not isinstance(option, str) or not option.startswith("--"):
        return None
    name = option[2:].replace("-", "_")
    for row in (*absent.FLAGS, *absent.ENGINE_ARGUMENTS, *absent.REQUEST_FIELDS):
        if row.name == name:
            instead = f"; {row.instead}" if row.instead else ""
            return f"the option {option} is not in this version of decodekit{instead}"
    return None

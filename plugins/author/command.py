"""`decodekit plugin`: the plugins that are there, and what became of each.

`new`, `check`, `doctor` and `reload` stand in `author_commands.py`, which joins them to the group.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ...core.hookspecs import hookimpl
from ...core.registry import PluginInfo, Registry
from ...core.stage import CommandSpec

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
STYLES = {"active": "green", "quarantined": "red", "shadowed": "yellow", "blocked": "dim"}
NAME_WIDTH = 24  # letters of a name that still leave room for the rest on a narrow terminal


@app.callback()
def _plugin() -> None:
    """See, write, check and reload plugins."""


@app.command("list")
def list_plugins(
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "-p",
            "--plugin",
            metavar="NAME",
            show_default=False,
            help="Load this plugin too: a name or a file; no:NAME blocks one. Repeatable.",
        ),
    ] = None,
    no_plugin_autoload: Annotated[
        bool,
        typer.Option(
            "--no-plugin-autoload", help="Load no installed plugin but those named with -p."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write a JSON list.")] = False,
) -> None:
    """List every plugin that was found, with its state and the reason for it."""  # fmt: skip
    plugins = loaded(plugin or (), autoload=not no_plugin_autoload).plugins()
    if as_json:
        print(json.dumps([described(info) for info in plugins], indent=2))
    else:
        show(plugins)


def loaded(plugins: Sequence[str], *, autoload: bool) -> Registry:
    """Load a registry without its warning: the command tells itself what is wrong."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="plugin trouble", category=RuntimeWarning)
        return Registry.load(plugins=plugins, autoload=autoload)


def described(info: PluginInfo) -> dict[str, Any]:
    """Return a plugin as plain data; `api` is a pair of version numbers, or None."""
    found = asdict(info)
    found["api"] = None if info.api is None else [info.api.low, info.api.high]
    return found


def show(plugins: Iterable[PluginInfo]) -> None:
    """Print a table, third-party plugins first, and under it why some are not active."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("plugin", "from", "api", "offers", "state"):
        table.add_column(title, overflow="fold", no_wrap=title == "state")
    ordered = sorted(plugins, key=lambda info: info.built_in)
    for info in ordered:
        state = Text(info.state, style=STYLES.get(info.state, ""))
        table.add_row(
            Text(_name(info)), Text(_home(info)), _range(info), Text(_offers(info)), state
        )
    console = Console(highlight=False)
    console.print(table)
    for info in ordered:
        if info.reason:
            style = STYLES.get(info.state, "")
            console.print(Text(f"{info.name} is {info.state}: {info.reason}", style=style))


def _name(info: PluginInfo) -> str:
    """Break a long module name before its last part."""
    home, dot, last = info.name.rpartition(".")
    is_long = len(info.name) > NAME_WIDTH and "/" not in info.name
    return f"{home}.\n{last}" if dot and is_long else info.name


def _home(info: PluginInfo) -> str:
    if info.built_in:
        return "built-in"
    return f"{info.distribution} {info.version or ''}".strip() if info.distribution else "local"


def _range(info: PluginInfo) -> str:
    if info.api is None:
        return "-"
    return str(info.api.low) if info.api.low == info.api.high else f"{info.api.low}-{info.api.high}"


def _offers(info: PluginInfo) -> str:
    """Name the stages, and the other hooks by their last word."""
    hooks = [hook.removeprefix("decodekit_") for hook in info.hooks]
    others = [hook for hook in hooks if hook not in ("stages", "pickers")]
    stages = [f"{'stage' if len(info.stages) == 1 else 'stages'} {', '.join(info.stages)}"]
    return "; ".join((stages if info.stages else []) + others)


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    from .author_commands import join

    join(app)
    help = "See, write, check and reload plugins (also: plugins)."
    return [CommandSpec("plugin", app, help, aliases=("plugins",))]

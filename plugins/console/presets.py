"""`decodekit presets`: what presets there are, what one sets, and whether they run on a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.config import EngineArgs
from ...core.errors import DecodekitError
from ...core.hookspecs import hookimpl
from ...core.params import SamplingParams
from ...core.presets import Preset, Presets
from ...core.stage import CommandSpec
from .options import ENGINE
from .session import open_engine, screen, steps_of
from .shared import takes

if TYPE_CHECKING:
    from ...core.engine import LLMEngine

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich")
MOST_LETTERS = 60  # of one value

File = Annotated[
    str | None,
    typer.Option(
        "--preset-file",
        metavar="FILE",
        help="Presets of yours, in TOML or JSON.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


@app.callback()
def _presets() -> None:
    """Named sets of request fields: --preset NAME chooses one."""


@app.command("list")
def list_presets(preset_file: File = None, as_json: AsJson = False) -> None:
    """List the presets, shipped ones and yours."""
    presets = Presets.load(preset_file)
    if as_json:
        print(json.dumps({name: data_of(item) for name, item in presets.items()}, indent=2))
        return
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("preset", no_wrap=True)
    table.add_column("sets", overflow="fold")
    table.add_column("for", overflow="fold")
    for name, preset in presets.items():
        table.add_row(_cell(name), _cell(_summary(preset)), _cell(preset.description))
    screen().print(table)


@app.command("show")
def show_preset(
    name: Annotated[str, typer.Argument(help="The preset.", metavar="NAME")],
    preset_file: File = None,
    as_json: AsJson = False,
) -> None:
    """Show what a preset sets, what it inherits and what it pins."""
    preset = Presets.load(preset_file).find(name)
    if as_json:
        print(json.dumps(data_of(preset), indent=2))
        return
    from rich import box
    from rich.table import Table

    console = screen()
    extends = "".join(f" > {parent}" for parent in preset.lineage[1:])
    console.print(f"{preset.name}{extends}  ({preset.source})", markup=False)
    if preset.description:
        console.print(preset.description, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("field", no_wrap=True)
    table.add_column("value", overflow="fold")
    table.add_column("from", overflow="fold")
    names = [*preset.fields, *(pin for pin in preset.pinned if pin not in preset.fields)]
    for field in names:
        value = _written(preset.fields[field]) if field in preset.fields else "(not set)"
        pin = f", pinned by {preset.pinned[field]}" if field in preset.pinned else ""
        table.add_row(field, _cell(value), _cell(f"{preset.origins.get(field, '')}{pin}"))
    console.print(table)


@app.command("check")
@takes(engine_args=ENGINE)
def check_presets(
    engine_args: EngineArgs,
    preset: Annotated[
        list[str] | None,
        typer.Option(
            "--preset", metavar="NAME", help="This one alone. Repeatable.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the plan of every preset on a model, and show what runs with the notes.

    Exit code 1 if one cannot run.
    """  # fmt: skip
    presets = Presets.load(
        engine_args.preset_file
    )  # a bad file is told of before a model is loaded
    names = [presets.find(name).name for name in preset or presets]
    engine = open_engine(engine_args)
    found = {name: checked(engine, name) for name in names}
    if as_json:
        print(json.dumps(found, indent=2, ensure_ascii=False, default=repr))
    else:
        _show_checked(engine.model_name, found)
    if any(item["error"] for item in found.values()):
        raise typer.Exit(1)


def checked(engine: LLMEngine, name: str) -> dict[str, Any]:
    """Plan one preset: the steps with their values, the notes, or the error."""
    try:
        report = engine.explain(SamplingParams(preset=name))
    except DecodekitError as error:
        return {"steps": [], "notes": [], "fingerprint": None, "error": str(error)}
    of_profile = engine.parts.registry.profiles[report.profile].notes
    return {
        "steps": steps_of(report),
        "notes": [note for note in report.notes if note not in of_profile],
        "fingerprint": report.fingerprint,
        "error": None,
    }


def _show_checked(model: str, found: Mapping[str, Mapping[str, Any]]) -> None:
    console = screen()
    console.print(f"on {model}", markup=False)
    for name, item in found.items():
        verdict = "cannot run" if item["error"] else "runs"
        style = "red" if item["error"] else "green"
        console.print(_cell(f"{name}: "), _cell(verdict, style), sep="", end="")
        text = item["error"] or " > ".join(item["steps"])
        console.print(f"  {text}", markup=False)
        for note in item["notes"]:
            console.print(f"  note: {note}", style="dim", markup=False)


def data_of(preset: Preset) -> dict[str, Any]:
    """Return a preset as plain data."""
    from ...core.presets import plain_fields

    return {
        "description": preset.description,
        "extends": list(preset.lineage[1:]),
        "fields": plain_fields(preset),
        "pinned": dict(preset.pinned),
        "source": preset.source,
    }


def _summary(preset: Preset) -> str:
    parts = []
    for name, value in preset.fields.items():
        if name == "chain":
            stages = [item if isinstance(item, str) else item["stage"] for item in value]
            parts.append(f"chain of {len(stages)}")
        elif isinstance(value, int | float | str):
            parts.append(f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}")
        else:
            parts.append(name)
    return ", ".join(parts)


def _written(value: Any) -> str:
    if isinstance(value, tuple):
        return "\n".join(_written(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item!r}" for key, item in value.items())
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= MOST_LETTERS * 4 else f"{text[: MOST_LETTERS * 4]}..."


def _cell(text: str, style: str = "") -> Any:
    """Keep brackets of a value from being read as markup."""
    from rich.text import Text

    return Text(text, style)


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("presets", app)]

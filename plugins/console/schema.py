"""`decodekit schema`: the JSON schema of a request, with the stages that are installed here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.presets import Presets
from ...core.registry import Registry
from ...core.stage import CommandSpec
from .options import PLUGINS
from .shared import takes


@takes(plugins=PLUGINS)
def schema(
    plugins: Mapping[str, Any],
    stage: Annotated[
        str | None,
        typer.Option("--stage", metavar="NAME", help="Of this stage alone.", show_default=False),
    ] = None,
    preset_file: Annotated[
        str | None,
        typer.Option("--preset-file", metavar="FILE", help="Presets of yours.", show_default=False),
    ] = None,
    compact: Annotated[bool, typer.Option("--compact", help="On one line.")] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write to a file.", show_default=False),
    ] = None,
) -> None:
    """Write the JSON schema (Draft 2020-12) of a request's fields and of its chain.

    It knows the plugins that are installed; no model is loaded. Under x-decodekit it has what an
    editor of chains shows: kinds, orders, defaults, profiles, presets.
    """
    from ...core.request_schema import request_schema

    registry = Registry.load(
        plugins=plugins.get("plugins", ()),
        autoload=not plugins.get("no_plugin_autoload", False),
        strict=plugins.get("strict_plugins", False),
    )
    found = request_schema(registry, presets=Presets.load(preset_file))
    if stage is not None:
        name = registry.stage(stage).name
        found = {
            "$schema": found["$schema"],
            **found["$defs"][f"stage.{name}"],
            "x-decodekit": found["x-decodekit"]["stages"][name],
        }
    text = json.dumps(found, indent=None if compact else 2, ensure_ascii=False)
    if output is None:
        print(text)
        return
    try:
        output.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValidationError(
            f"output file {str(output)!r} cannot be written: {error.strerror}",
            parameter="output",
            value=str(output),
        ) from error


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("schema", schema)]

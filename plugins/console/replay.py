"""`decodekit replay`: run a bundle again; the tokens are the same, or it says what differs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace as changed
from typing import Annotated, Any

import typer

from ...core.bundle import Bundle
from ...core.config import EngineArgs
from ...core.hookspecs import hookimpl
from ...core.stage import CommandSpec
from .options import ENGINE
from .session import screen
from .shared import takes

# What the bundle's engine had is taken over unless the user gives it.
TAKEN = (
    "profile",
    "dtype",
    "load_format",
    "seed",
    "model_impl",
    "tokenizer",
    "skip_tokenizer_init",
)


@takes(engine_args=ENGINE.without("model"))
def replay(
    engine_args: EngineArgs,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A bundle, as `to_bundle().save` writes it.")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", help="Another model than the bundle names.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Reproduce a recorded run, or say what differs: tokens, versions, model, plan.

    Exit code 1 if the tokens differ.
    """
    from ...core.llm import LLM  # costs the import of torch

    bundle = Bundle.read(file)
    arguments = _arguments(engine_args, bundle, model)
    with screen(stderr=True).status(f"Replaying {file}"):
        found = LLM.from_engine_args(arguments).replay(bundle)
    if as_json:
        print(
            json.dumps(
                {
                    "same": found.same,
                    "tokens": [each._asdict() for each in found.tokens],
                    "endings": [each._asdict() for each in found.endings],
                    "differences": [each._asdict() for each in found.differences],
                    "text": [part.text for part in found.output.outputs],
                },
                indent=2,
                ensure_ascii=False,
                default=repr,
            )
        )
    else:
        screen().print(str(found), markup=False)
    if not found.same:
        raise typer.Exit(1)


def _arguments(given: EngineArgs, bundle: Bundle, model: str | None) -> EngineArgs:
    """Return the engine's arguments: the user's, then the bundle's, then the defaults."""
    defaults = EngineArgs()
    recorded = bundle.data["engine"]
    values: dict[str, Any] = {
        name: recorded[name]
        for name in TAKEN
        if name in recorded and getattr(given, name) == getattr(defaults, name)
    }
    named = bundle.data["model"]
    values["model"] = model or (None if named["kind"] == "embedded" else named["name"])
    return changed(given, **values)


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("replay", replay)]

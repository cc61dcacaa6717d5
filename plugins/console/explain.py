"""`decodekit explain`: what would run for a request, in order, and where each value came from."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.config import EngineArgs
from ...core.hookspecs import hookimpl
from ...core.params import DEFAULTS, SamplingParams
from ...core.stage import CommandSpec
from .options import ENGINE, SAMPLING, Sampling
from .session import open_engine, screen
from .shared import takes

if TYPE_CHECKING:
    from ...core.engine import LLMEngine
    from ...core.outputs import PlanReport


@takes(engine_args=ENGINE, sampling=SAMPLING)
def explain(
    engine_args: EngineArgs,
    sampling: Sampling,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Show the chain that these options run: its order, each value's source, and what was dropped.

    Loads the model, since its vocabulary and its defaults decide too; generates nothing.
    """
    engine = open_engine(engine_args)
    params = sampling.build(engine)
    report = engine.explain(params)
    others = other_fields(engine, params)
    if as_json:
        fields = {name: {"value": value, "from": source} for name, value, source in others}
        found = {"model": engine.model_name, **report.to_dict(), "fields": fields}
        print(json.dumps(found, indent=2, ensure_ascii=False, default=repr))
    else:
        show(engine.model_name, report, others)


def other_fields(engine: LLMEngine, params: SamplingParams) -> list[tuple[str, Any, str]]:
    """Return the request fields that no stage of the chain takes: name, value, source."""
    of_stages = {*engine.parts.registry.fields, "chain", "picker"}
    found = []
    for name in DEFAULTS:
        if name not in params.fields_set or name in of_stages:
            continue
        found.append((name, getattr(params, name), params.sources.get(name, "request")))
    return found


def show(model: str, report: PlanReport, others: list[tuple[str, Any, str]]) -> None:
    """Print the report as tables."""
    from rich import box
    from rich.table import Table

    console = screen()
    console.print(f"{model}, profile {report.profile}, plan {report.fingerprint}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="what runs", title_justify="left")
    for title in ("#", "stage", "kind", "value", "from"):
        table.add_column(title, overflow="fold", no_wrap=title == "#")
    for number, step in enumerate(report.order, start=1):
        label = step.stage if step.id in ("", step.stage) else f"{step.stage} as {step.id}"
        head = [str(number), label, step.kind]
        for name, value in step.params.items() or [("", "")]:
            shown = _cell(f"{name} = {value!r}" if name else "")
            table.add_row(*map(_cell, head), shown, step.provenance.get(name, ""))
            head = ["", "", ""]
    console.print(table)
    if report.dropped:
        lines = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="dropped", title_justify="left")
        lines.add_column("stage", overflow="fold")
        lines.add_column("why", overflow="fold")
        for item in report.dropped:
            lines.add_row(_cell(item.stage), _cell(item.reason))
        console.print(lines)
    if others:
        fields = Table(
            box=box.SIMPLE_HEAD, pad_edge=False, title="outside the chain", title_justify="left"
        )
        for title in ("field", "value", "from"):
            fields.add_column(title, overflow="fold")
        for name, value, source in others:
            fields.add_row(name, _cell(repr(value)), source)
        console.print(fields)
    for note in report.notes:
        console.print(f"note: {note}", style="dim", markup=False)


def _cell(text: str) -> Any:
    """Keep brackets of a value from being read as markup."""
    from rich.text import Text

    return Text(text)


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("explain", explain)]

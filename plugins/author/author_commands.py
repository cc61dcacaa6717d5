"""`decodekit plugin new | check | doctor | reload`: what an author of plugins does all day."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from ...core.errors import ValidationError
from .scaffold import KINDS, names_of, write_package

LEVELS = {"ok": "green", "info": "dim", "warn": "yellow", "error": "bold red"}
STATES = {"kept": "green", "broken": "bold red", "skipped": "dim"}


def join(app: typer.Typer) -> None:
    """Add the commands to the group `plugin`, once."""
    if any(command.name == "new" for command in app.registered_commands):
        return
    app.command("new")(new)
    app.command("check")(check)
    app.command("doctor")(doctor)
    app.command("reload")(reload)


def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of the distribution, such as acme-top-a.")
    ],
    kind: Annotated[
        str, typer.Option("--kind", metavar="KIND", help=f"One of {', '.join(KINDS)}.")
    ] = "cut",
    stage: Annotated[
        str | None,
        typer.Option(
            "--stage",
            metavar="PREFIX.NAME",
            show_default=False,
            help="What requests call it; made from NAME if left out.",
        ),
    ] = None,
    into: Annotated[
        Path, typer.Option("--into", metavar="FOLDER", help="Where the package's folder goes.")
    ] = Path("."),
) -> None:
    """Write a package that can be installed, with a plugin of KIND, tests and a README."""
    from rich.console import Console

    names = names_of(name, stage)
    folder = into.expanduser() / name
    written = write_package(folder, names, kind)
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"[green]wrote[/] {folder} with the {_word(kind)} [bold]{names.stage}[/]:")
    for path in written:
        console.print(f"  {path.relative_to(folder)}")
    console.print(f"next: cd {folder} && pip install -e '.\\[test]' && pytest")


def check(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A .py file, a package's folder, or an installed plugin."
        ),
    ],
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--params",
            metavar="JSON",
            show_default=False,
            help='Parameters to try, such as \'{"stage": "acme.top_a", "a": 0.2}\'. Repeatable.',
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="List the laws that are kept, too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write one JSON object.")] = False,
) -> None:
    """Try every law of the contract on what a plugin offers; exit code 1 if one is broken."""
    from .subjects import check_subject, find_subject

    begun = time.perf_counter()
    subject = find_subject(target)
    reports = check_subject(subject, _examples(params or ()))
    seconds = time.perf_counter() - begun
    ok = all(report.ok for report in reports)
    if as_json:
        found = [{"ok": report.ok, **asdict(report)} for report in reports]
        print(json.dumps({"ok": ok, "plugin": subject.name, "checked": found}, indent=2))
    else:
        _show(reports, verbose, seconds)
    if not ok:
        raise typer.Exit(1)


def doctor(
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            "-p", "--plugin", metavar="NAME", show_default=False, help="Load this plugin too."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write a JSON list.")] = False,
) -> None:
    """Say what is wrong with the installed plugins, and what their own self-checks find."""
    from ...core.stage import Finding
    from .command import loaded

    registry = loaded(plugin or (), autoload=True)
    found = registry.doctor()
    active = [info for info in registry.plugins() if info.state == "active"]
    summary = (
        f"{sum(info.built_in for info in active)} built-in and "
        f"{sum(not info.built_in for info in active)} other plugins are active, "
        f"fingerprint {registry.fingerprint}"
    )
    lines = [Finding("ok", summary), *found]
    if as_json:
        listed = [{"level": line.level, "message": line.message, "remedy": line.remedy}
                  for line in lines]  # fmt: skip
        print(json.dumps(listed, indent=2))
    else:
        _say(lines)
    if any(line.level == "error" for line in lines):
        raise typer.Exit(1)


def reload(
    path: Annotated[str, typer.Argument(metavar="FILE", help="A local plugin: a .py file.")],
) -> None:
    """Try what a running engine would do with a changed FILE: load it anew, and check it.

    An engine takes the new file with `LLM.reload_plugins()`; requests that run keep the old one.
    Installed packages need a new process.
    """
    from ...core.registry import Registry
    from ...core.stage import Finding
    from .subjects import check_subject, find_subject

    registry = Registry.load(plugins=[Path(path)], autoload=False, environ={})
    names = registry.reload(path)
    reports = check_subject(find_subject(path))
    broken = [outcome for report in reports for outcome in report.broken]
    lines = [Finding("ok", f"{names[0]} can be loaded anew")]
    lines += [
        Finding("error" if report.broken else "ok", str(report).partition("\n")[0])
        for report in reports
    ]
    lines.append(
        Finding(
            "info",
            "a running engine takes it for new requests with LLM.reload_plugins(); requests that "
            "run keep the former one until they end",
        )
    )
    _say(lines)
    if broken:
        raise typer.Exit(1)


# --- small parts ----------------------------------------------------------------------------------


def _word(kind: str) -> str:
    return {"pick": "picker", "stop": "stop", "observer": "observer"}.get(kind, "stage")


def _examples(given: Sequence[str]) -> dict[str, list[dict[str, object]]]:
    """Read `--params`: JSON objects that name their stage."""
    found: dict[str, list[dict[str, object]]] = {}
    for text in given:
        try:
            entry: Any = json.loads(text)
            name = entry.pop("stage")
        except (ValueError, KeyError, AttributeError):
            raise ValidationError(
                f'--params must be a JSON object with the key "stage", got {text!r}',
                parameter="params",
                value=text,
            ) from None
        found.setdefault(name, []).append(entry)
    return found


def _show(reports: Sequence[Any], verbose: bool, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for report in reports:
        counts = {
            state: sum(outcome.state == state for outcome in report.outcomes) for state in STATES
        }
        verdict = Text("ok  ", "green") if report.ok else Text("FAIL", "bold red")
        told = (
            f"{counts['kept']} laws kept, {counts['broken']} broken, {counts['skipped']} not tried"
        )
        speed = "" if report.microseconds is None else f", {report.microseconds:.0f} µs a row"
        console.print(Text.assemble(verdict, " ", (report.subject, "bold"), f": {told}{speed}"))
        table = Table.grid(padding=(0, 1))
        table.add_column(width=7)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for outcome in report.outcomes:
            if outcome.state != "broken" and not verbose:
                continue
            sentence = outcome.sentence if outcome.state != "kept" else outcome.title
            style = STATES[outcome.state]
            table.add_row(Text(outcome.state, style), Text(outcome.law), Text(sentence))
            if outcome.example:
                table.add_row("", "", Text(f"example: {outcome.example}", "dim"))
        if table.row_count:
            console.print(table)
    rows = sum(report.num_rows for report in reports)
    console.print(f"{rows} rows in {seconds:.1f} s", style="dim")


def _say(lines: Sequence[Any]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    for line in lines:
        style = LEVELS[line.level]
        word = "FAIL" if line.level == "error" else line.level
        console.print(Text.assemble((f"{word:4} ", style), line.message))
        if line.remedy:
            console.print(Text(f"     -> {line.remedy}", style))

"""`decodekit compare`: one set of prompts under several settings, as texts, figures and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...core.config import EngineArgs
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import CommandSpec
from .comparison import local, plot, remote, report
from .comparison.columns import Column, columns_of, seeds_of
from .comparison.metrics import Figures, figures_of
from .comparison.outcome import Job, Outcome
from .options import ENGINE, SAMPLING, Sampling
from .prompt_file import Record, of_file, of_texts
from .results import dump
from .session import open_engine, screen
from .shared import takes

OUTPUTS, SUMMARY, PAGE, PICTURE = "outputs.jsonl", "summary.json", "texts.md", "plot.png"
FILES = (OUTPUTS, SUMMARY, PAGE, PICTURE)
PANEL = "What is compared"


@takes(engine_args=ENGINE, sampling=SAMPLING)
def compare(
    engine_args: EngineArgs,
    sampling: Sampling,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="A prompt. Repeatable.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts",
            metavar="FILE",
            show_default=False,
            help="Prompts: one a line, or .jsonl with objects that have prompt.",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take each prompt as a user's message.")
    ] = False,
    profiles: Annotated[
        str | None,
        typer.Option(
            "--profiles",
            metavar="A,B,...",
            rich_help_panel=PANEL,
            show_default=False,
            help="A column for each of these named default chains.",
        ),
    ] = None,
    presets: Annotated[
        str | None,
        typer.Option(
            "--presets",
            metavar="A,B,...",
            rich_help_panel=PANEL,
            show_default=False,
            help="A column for each of these presets.",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="NAME=JSON",
            rich_help_panel=PANEL,
            show_default=False,
            help="A column with these request fields: wild='{\"temperature\": 1.4}'. Repeatable.",
        ),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            metavar="FIELD=VALUE",
            rich_help_panel=PANEL,
            show_default=False,
            help="A field of the first column, which the others start from. Repeatable.",
        ),
    ] = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="FIELD=V,V,...",
            rich_help_panel=PANEL,
            show_default=False,
            help="A column for each value of this field, all else as the baseline. Repeatable.",
        ),
    ] = None,
    seeds: Annotated[
        str,
        typer.Option(
            "--seeds",
            metavar="N,N,...",
            rich_help_panel=PANEL,
            help="Every column writes each prompt once a seed.",
        ),
    ] = "1",
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FOLDER", help="Where the files go."),
    ] = Path("comparison"),
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a comparison in FOLDER.")
    ] = False,
    plot_: Annotated[
        bool, typer.Option("--plot/--no-plot", help="Draw plot.png; needs matplotlib.")
    ] = True,
    show: Annotated[
        int, typer.Option("--show", metavar="N", min=0, help="Show the texts of N prompts.")
    ] = 3,
    url: Annotated[
        str | None,
        typer.Option(
            "--url",
            metavar="URL",
            rich_help_panel="A server instead of a model here",
            show_default=False,
            help="Ask this OpenAI-compatible server; MODEL is its model's name.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            rich_help_panel="A server instead of a model here",
            show_default=False,
            help="Its key; by default OPENAI_API_KEY.",
        ),
    ] = None,
    progress: Annotated[
        bool, typer.Option("--progress/--no-progress", help="A bar on standard error.")
    ] = True,
) -> None:
    """Run prompts under several settings and show what each does to the texts.

    Options under Sampling hold for every column. Writes outputs.jsonl, summary.json, texts.md and
    plot.png to FOLDER. Exit code 1 if any text failed.
    """  # fmt: skip
    columns = columns_of(
        profiles=profiles,
        presets=presets,
        given=column or (),
        baseline=baseline or (),
        vary=vary or (),
    )
    jobs = [
        Job(record.index, record.prompt["prompt"], each, seed)
        for record in _prompts(prompt, prompts)
        for seed in seeds_of(seeds)
        for each in columns
    ]
    if plot_:
        plot.check()
    _prepare(output, overwrite)
    if url is None:
        engine = open_engine(engine_args)
        local.check(engine, sampling, jobs)
        done = local.run(engine, sampling, jobs, chat=chat)
    else:
        server = remote.Server(
            url, key=api_key or os.environ.get("OPENAI_API_KEY"), model=engine_args.model or None
        )
        done = remote.run(server, _common(sampling), jobs, chat=chat)
    outcomes = _collect(done, jobs, output / OUTPUTS, progress)
    figures = _figures(columns, outcomes)
    plot_ = plot_ and any(row.texts for row in figures.values())
    _write(output, columns, figures, outcomes, plot_)
    _show(columns, figures, outcomes, show)
    where = ", ".join(name for name in FILES if plot_ or name != PICTURE)
    screen().print(f"written to {output}: {where}", style="dim", markup=False)
    if any(outcome.error is not None for outcome in outcomes):
        raise typer.Exit(1)


def _prompts(texts: Sequence[str] | None, file: Path | None) -> list[Record]:
    if bool(texts) == (file is not None):
        raise ValidationError(
            "prompts come from --prompt or from --prompts FILE, from one of the two",
            parameter="prompts",
        )
    records = of_texts(texts or ()) if file is None else of_file(file, "auto")
    for record in records:
        if record.error is not None:
            raise ValidationError(record.error, parameter="prompts")
        if "prompt" not in record.prompt or record.params:
            raise ValidationError(
                f"line {record.line}: a comparison takes text prompts alone, without params",
                parameter="prompts",
            )
    if not records:
        raise ValidationError(f"{file} holds no prompt", parameter="prompts", value=str(file))
    return records


def _prepare(folder: Path, overwrite: bool) -> None:
    """Make the folder, empty of an earlier comparison, before anything is loaded."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        old = [folder / name for name in FILES if (folder / name).exists()]
        if old and not overwrite:
            raise ValidationError(
                f"output folder {str(folder)!r} has a comparison already; --overwrite replaces it, "
                "-o names another folder",
                parameter="output",
                value=str(folder),
            )
        for path in old:
            path.unlink()
    except OSError as error:
        raise ValidationError(
            f"output folder {str(folder)!r} cannot be used: {error.strerror}",
            parameter="output",
            value=str(folder),
        ) from error


def _common(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of the command line as a server takes them."""
    if sampling.chain is not None:
        raise ValidationError(
            "--chain is read with the plugins of a model here; for a server write it as JSON: "
            "--params '{\"chain\": [...]}'",
            parameter="chain",
        )
    return dict(sampling.fields)


def _collect(
    done: Iterator[Outcome], jobs: Sequence[Job], path: Path, progress: bool
) -> list[Outcome]:
    """Write every outcome as it comes; return them in the order of the jobs."""
    from tqdm import tqdm

    places = {id(job): place for place, job in enumerate(jobs)}
    outcomes: list[Outcome] = []
    with path.open("w", encoding="utf-8") as file:
        for outcome in tqdm(
            done, total=len(jobs), unit="text", disable=not progress, dynamic_ncols=True
        ):
            file.write(f"{dump(outcome.to_dict())}\n")
            file.flush()
            outcomes.append(outcome)
    return sorted(outcomes, key=lambda outcome: places[id(outcome.job)])


def _figures(columns: Sequence[Column], outcomes: Sequence[Outcome]) -> dict[str, Figures]:
    own: dict[str, list[Outcome]] = {column.name: [] for column in columns}
    for outcome in outcomes:
        own[outcome.job.column.name].append(outcome)
    reference = own[columns[0].name]
    return {name: figures_of(listed, reference) for name, listed in own.items()}


def _write(
    folder: Path,
    columns: Sequence[Column],
    figures: Mapping[str, Figures],
    outcomes: Sequence[Outcome],
    plotted: bool,
) -> None:
    found = json.dumps(report.summary(columns, figures), indent=2, ensure_ascii=False, default=repr)
    (folder / SUMMARY).write_text(f"{found}\n", encoding="utf-8")
    (folder / PAGE).write_text(report.markdown(columns, figures, outcomes), encoding="utf-8")
    if plotted:
        plot.draw(columns, figures, folder / PICTURE)


def _show(
    columns: Sequence[Column],
    figures: Mapping[str, Figures],
    outcomes: Sequence[Outcome],
    count: int,
) -> None:
    from rich.table import Table
    from rich.text import Text

    console = screen()
    for group in list(report.grouped(outcomes).values())[:count]:
        console.print(f"\n{group[0].job.text}", style="bold cyan", markup=False)
        texts = Table.grid(padding=(0, 2))
        texts.add_column(style="bold", max_width=24, overflow="fold")
        texts.add_column(overflow="fold")
        for outcome in group:
            texts.add_row(Text(outcome.job.column.name), report.beside(group[0], outcome))
        console.print(texts)
    console.print()
    console.print(report.table(figures))
    console.print(
        f"agreement and identical are with {columns[0].name!r}; dim text is what both begin with",
        style="dim",
        markup=False,
    )


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("compare", compare)]

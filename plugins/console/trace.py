"""`decodekit trace`: what every stage did at every position, as tables and as an HTML page."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.bundle import own_version
from ...core.cli import say
from ...core.config import EngineArgs
from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.params import RequestOutputKind, SamplingParams
from ...core.stage import CommandSpec
from .options import ENGINE, SAMPLING, Sampling
from .session import chat_request, open_engine, screen
from .shared import takes
from .trace_html import Run, page
from .trace_table import show_position, show_totals

if TYPE_CHECKING:
    from ...core.engine import LLMEngine
    from ...core.outputs import RequestOutput

MAX_TOKENS = 24  # a trace is read token by token
SEED = 0  # of every run that names none, so that runs differ by their chains alone


@takes(engine_args=ENGINE.without("profile"), sampling=SAMPLING.without("chain"))
def trace(
    engine_args: EngineArgs,
    sampling: Sampling,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="The prompt.", show_default=False)
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take the prompt as a user's message.")
    ] = False,
    chain: Annotated[
        list[str] | None,
        typer.Option(
            "--chain",
            help="The whole chain in order: temperature=0.7,top_p(p=0.9), or JSON. Repeatable: "
            "one run each.",
            show_default=False,
        ),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            "--profile",
            help="The named default chain. Repeatable: one run each.",
            show_default=False,
        ),
    ] = None,
    level: Annotated[
        str, typer.Option("--level", help="summary, or tokens to follow single tokens.")
    ] = "tokens",
    top: Annotated[
        int, typer.Option("--top", help="How many of the best tokens are followed.")
    ] = 12,
    watch: Annotated[
        list[str] | None,
        typer.Option(
            "--watch",
            metavar="TOKEN",
            show_default=False,
            help="Follow this token too, by its text or id. Repeatable.",
        ),
    ] = None,
    why: Annotated[
        list[str] | None,
        typer.Option(
            "--why",
            metavar="TOKEN",
            show_default=False,
            help="Say of this token, at each position, what became of it. Repeatable.",
        ),
    ] = None,
    position: Annotated[
        list[int] | None,
        typer.Option("--position", help="Show this position only. Repeatable.", show_default=False),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", help="Tokens in a table.")] = 6,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            show_default=False,
            help="Write a page with every position, the runs side by side; no tables then.",
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE",
            show_default=False,
            help="Write what reproduces the first run, for `decodekit replay`.",
        ),
    ] = None,
) -> None:
    """Show what each stage of the chain does to the distribution, token by token.

    Several chains or profiles run on one prompt with one seed (0, or --request-seed), side by side.
    """  # fmt: skip
    if prompt is None:
        raise ValidationError("there is no prompt: give --prompt TEXT", parameter="prompt")
    fields: dict[str, Any] = {"trace": level}
    if level == "tokens":
        wish = {"observer": "trace", "top": top, "watch": _tokens([*(watch or ()), *(why or ())])}
        fields["observers"] = [*sampling.fields.get("observers", ()), wish]
    for name, value in (("max_tokens", MAX_TOKENS), ("seed", SEED)):
        if name not in sampling.fields:
            fields[name] = value
    own = sampling.with_fields(fields)
    engine = open_engine(engine_args)
    asked: Any = prompt
    if chat:
        asked = chat_request(engine, [{"role": "user", "content": prompt}])
    outputs = _run(engine, asked, _plans(own, engine, chain or [], profile or []))
    runs = [run for name, output, seed in outputs for run in _runs(name, output, seed)]
    if bundle is not None:
        outputs[0][1].to_bundle().save(bundle)
        print(f"wrote {bundle}", file=sys.stderr)
    if html is not None:
        text = page(
            runs, model=engine.model_name, prompt=prompt, footer=f"decodekit {own_version()}"
        )
        html.write_text(text, encoding="utf-8")
        print(f"wrote {html}", file=sys.stderr)
    else:
        for run in runs:
            _show(run, position, rows, why or [])
    failed = [run for run in runs if run.completion.error is not None]
    for run in failed:
        say("error", f"{run.name}: {run.completion.error}", "red")
    if failed:
        raise typer.Exit(1)


def _tokens(texts: Iterable[str]) -> list[int | str]:
    """Read tokens as typed: a number is an id."""
    return list(dict.fromkeys(int(text) if text.isdecimal() else text for text in texts))


def _plans(
    sampling: Sampling, engine: LLMEngine, chains: Sequence[str], profiles: Sequence[str]
) -> list[tuple[str, SamplingParams]]:
    """Return the parameters of each run with its name: one a chain, one a profile, or one."""
    plans = [
        (chain, Sampling(sampling.fields, chain).build(engine)) for chain in chains
    ] + [
        (f"profile {name}", sampling.with_fields({"profile": name}).build(engine))
        for name in profiles
    ]  # fmt: skip
    return plans or [("default", sampling.build(engine))]


def _run(
    engine: LLMEngine, prompt: Any, plans: Sequence[tuple[str, SamplingParams]]
) -> list[tuple[str, RequestOutput, int | None]]:
    """Run every plan in one batch; return the outputs in order."""
    ids = []
    for place, (_, params) in enumerate(plans):
        params.output_kind = RequestOutputKind.FINAL_ONLY
        ids.append(engine.add_request(f"trace-{place}", prompt, params))
    done: dict[str, RequestOutput] = {}
    with screen(stderr=True).status("Tracing"):
        while engine.has_unfinished_requests():
            done.update((output.request_id, output) for output in engine.step())
    return [(name, done[own], params.seed) for (name, params), own in zip(plans, ids, strict=True)]


def _runs(name: str, output: RequestOutput, seed: int | None) -> list[Run]:
    """Return a run for each answer of an output."""
    assert output.plan is not None
    several = len(output.outputs) > 1
    return [
        Run(f"{name} #{part.index}" if several else name, part, output.plan, seed)
        for part in output.outputs
    ]


def _show(run: Run, positions: Sequence[int] | None, rows: int, tokens: Sequence[str]) -> None:
    console = screen()
    trace = run.trace
    console.print(f"{run.name}: plan {run.plan.fingerprint}", style="bold", markup=False)
    console.print(repr(run.completion.text), markup=False)
    for at in trace.positions:
        if positions and at.position not in positions:
            continue
        if not tokens:
            show_position(console, trace, at, rows)
        for token in _tokens(tokens):
            console.print(trace.why(token, position=at.position), markup=False)
    if not positions and not tokens:
        show_totals(console, trace)


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("trace", trace)]

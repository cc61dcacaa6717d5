"""`decodekit bench serve`: how fast a running server answers, under one setting or several."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.live import Live

from ...core.errors import ValidationError
from ...core.hookspecs import hookimpl
from ...core.stage import CommandSpec
from ..console.options import SAMPLING, Sampling
from ..console.shared import takes
from .bench_load import PATHS, Load, Run, drive
from .settings import keys_of_environment

app = typer.Typer(no_args_is_help=True, rich_markup_mode="rich", add_completion=False)
DEFAULT_URL = "http://127.0.0.1:8000"
PROMPTS = (
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "List five uses of a paper clip.",
    "What is the difference between a lake and a sea?",
    "Translate 'good morning, my friend' into French.",
)
WORDS = "river stone light winter paper garden music bridge morning letter window forest".split()
MOST_REQUESTS = 1_000_000
MOST_SECONDS = 86_400.0


@app.callback()
def bench() -> None:
    """Measure how fast things are."""


@app.command("serve")
@takes(sampling=SAMPLING)
def serve(
    sampling: Sampling,
    url: Annotated[str, typer.Option(help="The server.", metavar="URL")] = DEFAULT_URL,
    endpoint: Annotated[str, typer.Option(help=f"{' or '.join(PATHS)}.")] = "chat",
    model: Annotated[str | None, typer.Option(help="A served name.", metavar="NAME")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Also DECODEKIT_API_KEY or VLLM_API_KEY.", metavar="KEY"),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests of each setting.")] = 100,
    seconds: Annotated[float, typer.Option(help="Send nothing more after so long.")] = 60.0,
    concurrency: Annotated[int, typer.Option(help="Most requests at a time.")] = 16,
    rate: Annotated[
        float | None, typer.Option(help="Arrivals a second, at random; unless said, at once.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that one answer may take.")] = 120.0,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Ask this. Repeatable.", metavar="TEXT")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Ask the lines of a file.", metavar="FILE")
    ] = None,
    input_words: Annotated[
        int | None, typer.Option(help="Ask random texts of so many words.")
    ] = None,
    best_of: Annotated[int | None, typer.Option(help="Best of so many answers.")] = None,
    beams: Annotated[int | None, typer.Option(help="Beam search of this width.")] = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="A further setting: NAME={fields as JSON}, or preset:NAME. Repeatable; "
            "the other options hold in each.",
            metavar="SETTING",
        ),
    ] = None,
    load_seed: Annotated[int, typer.Option(help="Of arrivals and random texts.")] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures.", metavar="FILE")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the distributions (.png, .svg).", metavar="FILE")
    ] = None,
    remote: Annotated[
        bool, typer.Option("--remote", help="Allow a server that is not this machine.")
    ] = False,
) -> None:
    """Send requests to a running server and measure its times.

    Beams and best-of are answered whole, so that only E2E is measured there.
    """
    _check_installed(plot is not None)
    _check(
        ("endpoint", endpoint in PATHS, f"one of {', '.join(PATHS)}", endpoint),
        ("requests", 1 <= requests <= MOST_REQUESTS, f"in [1, {MOST_REQUESTS}]", requests),
        ("seconds", 0 < seconds <= MOST_SECONDS, f"in (0, {MOST_SECONDS:.0f}]", seconds),
        ("concurrency", 1 <= concurrency <= 10_000, "in [1, 10000]", concurrency),
        ("rate", rate is None or rate > 0, "above 0", rate),
        ("timeout", timeout > 0, "above 0", timeout),
        ("input_words", input_words is None or 1 <= input_words <= 1_000_000, "in [1, 1000000]",
         input_words),
        ("beams", beams is None or beams >= 1, "at least 1", beams),
        ("url", remote or is_here(url), "on this machine (or give --remote)", url),
    )  # fmt: skip
    fields = request_fields(sampling, endpoint, best_of, beams)
    runs = [Run(name, made, requests) for name, made in settings_of(fields, compare or [])]
    asked = _prompts(prompt or [], prompts, input_words, load_seed)
    keys = [api_key] if api_key else keys_of_environment()
    headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
    load = Load(
        url.rstrip("/"), endpoint, model, asked, requests, seconds, concurrency, rate, timeout,
        load_seed, headers,
    )  # fmt: skip
    measure(load, runs)
    _tell(load, runs, json_file, plot)


def measure(load: Load, runs: list[Run]) -> None:
    """Run one setting after the other under a live table; Ctrl-C keeps what was measured."""
    from .bench_report import table

    console = Console(file=sys.stdout)
    with Live(table(runs), console=console, auto_refresh=False, transient=False) as live:

        def seen() -> None:
            if console.is_terminal:
                live.update(table(runs), refresh=True)

        try:
            for run in runs:
                asyncio.run(drive(load, run, seen))
        except KeyboardInterrupt:
            pass
        live.update(table(runs), refresh=True)


def _tell(load: Load, runs: list[Run], json_file: Path | None, plot: Path | None) -> None:
    from .bench_report import write_json, write_plot

    if json_file is not None:
        write_json(json_file, load, runs)
    if plot is not None:
        write_plot(plot, runs)
    for run in runs:
        for message in sorted(set(run.errors)):
            typer.echo(f"{run.name}: {message}", err=True)
    if any(run.num_errors for run in runs):
        raise typer.Exit(1)


def request_fields(
    sampling: Sampling, endpoint: str, best_of: int | None, beams: int | None
) -> dict[str, Any]:
    """Return the sampling fields as a body has them."""
    fields = dict(sampling.fields)
    if sampling.chain is not None:
        from ..console.chain_text import installed_chain

        fields["chain"] = installed_chain(sampling.chain)
    if best_of is not None:
        fields["best_of"] = best_of
    if beams is not None:
        fields |= {"use_beam_search": True, "n": beams, "temperature": 0}
    if endpoint == "chat" and isinstance(fields.get("logprobs"), int):
        fields |= {"top_logprobs": fields["logprobs"], "logprobs": True}
    return fields


def settings_of(fields: dict[str, Any], compare: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the settings by name; without any to compare there is one, the options'."""
    if not compare:
        return [("options", fields)]
    found: dict[str, dict[str, Any]] = {}
    for item in compare:
        name, equals, text = item.partition("=")
        if not equals and name.startswith("preset:"):
            made: Any = {"preset": name.removeprefix("preset:")}
        else:
            try:
                made = json.loads(text)
            except ValueError:
                made = None
        if not isinstance(made, dict) or not name or name in found:
            raise ValidationError(
                f"compare must be NAME={{fields as JSON}} with names of their own, or preset:NAME, "
                f"got {item!r}",
                parameter="compare",
                value=item,
            )
        found[name] = {**fields, **made}
    return list(found.items())


def is_here(url: str) -> bool:
    """Whether the server runs on this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _prompts(given: list[str], file: Path | None, words: int | None, seed: int) -> list[str]:
    asked = list(given)
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValidationError(
                f"prompts cannot be read from {str(file)!r}: {error}", parameter="prompts"
            ) from error
        asked += [line for line in lines if line.strip()]
    if words is not None:
        draw = random.Random(seed)
        asked += [" ".join(draw.choices(WORDS, k=words)) for _ in range(64)]
    return asked or list(PROMPTS)


def _check(*rules: tuple[str, bool, str, object]) -> None:
    for name, is_fine, allowed, value in rules:
        if not is_fine:
            raise ValidationError(
                f"{name} must be {allowed}, got {value!r}", parameter=name, value=value
            )


def _check_installed(draws: bool) -> None:
    for package in ("httpx", *(["matplotlib"] if draws else [])):
        if find_spec(package) is None:
            raise ValidationError(f"bench needs {package}: pip install 'decodekit[bench]'")


@hookimpl
def decodekit_commands() -> Iterable[CommandSpec]:
    return [CommandSpec("bench", app)]

"""What `decodekit bench serve` tells: the table, the JSON and the plot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from .bench_load import Load, Run, Timing

PERCENTILES = (50, 90, 95, 99)
METRICS: dict[str, tuple[str, Callable[[Timing], Iterable[float | None]]]] = {
    "ttft": ("time to the first token", lambda timing: [timing.first]),
    "tpot": ("time for each further token", lambda timing: [timing.per_token]),
    "itl": ("time between two events", lambda timing: timing.gaps),
    "e2e": ("time for the whole request", lambda timing: [timing.total]),
}


def samples(run: Run, metric: str) -> list[float]:
    """Return a metric's values, in milliseconds, of the requests that were answered."""
    read = METRICS[metric][1]
    found = [value for timing in run.done for value in read(timing) if value is not None]
    return [1000 * value for value in found]


def figures(run: Run) -> dict[str, Any]:
    """Return everything that is measured of one setting; times in milliseconds."""
    tokens = sum(timing.tokens for timing in run.done)
    seconds = run.seconds or 1e-9
    told: dict[str, Any] = {
        "name": run.name,
        "fields": run.fields,
        "requests": len(run.timings),
        "errors": run.num_errors,
        "error_messages": sorted(set(run.errors)),
        "seconds": run.seconds,
        "prompt_tokens": sum(timing.prompt_tokens for timing in run.done),
        "completion_tokens": tokens,
        "requests_per_second": len(run.done) / seconds,
        "tokens_per_second": tokens / seconds,
    }
    for metric in METRICS:
        values = samples(run, metric)
        told[f"{metric}_ms"] = None if not values else {
            "mean": float(np.mean(values)),
            **{f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES},
            "max": max(values),
        }  # fmt: skip
    return told


def table(runs: Sequence[Run]) -> Table:
    """Return the table as it stands: a column for each setting, so that many figures fit."""
    shown = Table(
        box=box.SIMPLE_HEAD, caption="times in ms: p50 / p90 / p99", caption_justify="left",
        pad_edge=False,
    )  # fmt: skip
    shown.add_column("")
    for run in runs:
        shown.add_column(run.name, justify="right", overflow="fold")
    told = [figures(run) for run in runs]
    rows: dict[str, list[str]] = {
        "requests": [f"{len(run.timings)} of {run.wanted}" for run in runs],
        "failed": [f"[red]{run.num_errors}[/red]" if run.num_errors else "0" for run in runs],
        "requests/s": [_short(each["requests_per_second"]) for each in told],
        "tokens/s": [_short(each["tokens_per_second"]) for each in told],
    }
    for metric in METRICS:
        rows[metric.upper()] = [_times(each[f"{metric}_ms"]) for each in told]
    for name, cells in rows.items():
        states = zip(runs, cells, strict=True)
        shown.add_row(name, *("-" if run.started is None else cell for run, cell in states))
    return shown


def _times(told: dict[str, float] | None) -> str:
    if told is None:
        return "-"
    return " / ".join(_short(told[name]) for name in ("p50", "p90", "p99"))


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def write_json(path: Path, load: Load, runs: Sequence[Run]) -> None:
    """Write the figures; keys and headers stay out of it."""
    told = {
        "load": {
            "url": load.url,
            "endpoint": load.endpoint,
            "model": load.model,
            "requests": load.requests,
            "concurrency": load.concurrency,
            "rate": load.rate,
            "seconds": load.seconds,
        },
        "runs": [figures(run) for run in runs],
    }
    path.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def write_plot(path: Path, runs: Sequence[Run]) -> None:
    """Draw the share of requests (of gaps, for ITL) that took at most so long."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    for axis, (metric, (meaning, _)) in zip(axes.flat, METRICS.items(), strict=True):
        for run in runs:
            values = np.sort(samples(run, metric))
            if len(values):
                share = np.arange(1, len(values) + 1) / len(values)
                axis.step(values, share, where="post", label=run.name)
        axis.set_title(f"{metric.upper()}: {meaning}", fontsize=10)
        axis.set_xlabel("ms")
        axis.set_ylim(0, 1.02)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)
        else:
            axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
    axes[0][0].set_ylabel("share")
    axes[1][0].set_ylabel("share")
    figure.savefig(path, dpi=110)

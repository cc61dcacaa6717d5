"""Write traces as one HTML page that needs nothing else: no network, no other file.

The page's data are a list of runs; a run is a list of positions, each of which names the position
that it continues (`parent`) and how it stands (`state`), so that it may as well be a tree.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ...core.outputs import CompletionOutput, PlanReport
from ...core.trace_report import Trace, TracePosition, finite
from ...core.trace_words import sentence
from .session import set_values

DATA = "/*DATA*/"  # where the template takes them
DIGITS = 6  # significant ones of a number in the page


@dataclass(frozen=True, slots=True)
class Run:
    """One traced answer and what it is called."""

    name: str
    completion: CompletionOutput
    plan: PlanReport
    seed: int | None

    @property
    def trace(self) -> Trace:
        """Its trace."""
        trace: Trace = self.completion.trace
        return trace


def page(runs: Sequence[Run], *, model: str, prompt: str, footer: str = "") -> str:
    """Return the page that shows `runs` side by side."""
    level = runs[0].trace.level
    data = {
        "version": 1,
        "title": f"decodekit trace: {model}",
        "about": f"{len(runs)} run{'s' if len(runs) > 1 else ''}, level {level}",
        "prompt": prompt,
        "footer": footer,
        "runs": [_run(run) for run in runs],
    }
    text = json.dumps(_rounded(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    template = files(__package__).joinpath("trace.html").read_text(encoding="utf-8")
    # Inside a script element nothing but "</" and "<!--" can end or change it.
    return template.replace(DATA, text.replace("<", "\\u003c"), 1)


def _run(run: Run) -> dict[str, Any]:
    trace = run.trace
    return {
        "name": run.name,
        "points": list(trace.points),
        "steps": [
            {
                "stage": step.stage,
                "kind": step.kind,
                "given": ", ".join(f"{k}={_short(v)}" for k, v in set_values(step).items()),
            }
            for step in trace.steps
        ],
        "picker": trace.picker.id,
        "profile": run.plan.profile,
        "fingerprint": run.plan.fingerprint,
        "notes": list(run.plan.notes),
        "seed": run.seed,
        "text": run.completion.text,
        "finish_reason": run.completion.finish_reason,
        "error": run.completion.error,
        "positions": [_position(trace, at) for at in _in_time(trace)],
    }


def _in_time(trace: Trace) -> list[TracePosition]:
    """Return kept positions, each after the runs of tokens that were taken back before it."""
    runs: list[list[TracePosition]] = []
    for at in trace.rewound:  # of a run the newest token comes first
        if not runs or at.position >= runs[-1][0].position:
            runs.append([])
        runs[-1].insert(0, at)
    shown: list[TracePosition] = []
    for at in trace.positions:
        due = [i for i, run in enumerate(runs) if run[0].position <= at.position]
        for run in runs[: max(due, default=-1) + 1]:
            shown += run
        del runs[: max(due, default=-1) + 1]
        shown.append(at)
    return shown


def _position(trace: Trace, at: TracePosition) -> dict[str, Any]:
    described = at.to_dict()
    for entry in described["tokens"]:
        entry["why"] = sentence(trace, at, entry["id"])
    return described


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _rounded(value: Any) -> Any:
    """Cut floats to a few digits, which halves the page."""
    if isinstance(value, float):
        return None if finite(value) is None else float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value

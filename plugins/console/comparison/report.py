"""A comparison as tables, as texts beside the first column's, and as files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .columns import Column
from .metrics import LABELS, Figures, shared
from .outcome import Outcome

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MOST_LETTERS = 400  # of one text on the terminal
ON_FILE = ("distinct_1", "distinct_3")  # figures that a terminal is too narrow for
DASH = "–"


def table(figures: Mapping[str, Figures]) -> Table:
    """Return the figures, one row a column of the comparison."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    made.add_column("", overflow="fold")
    shown = [name for name in _told(figures) if name not in ON_FILE]
    for name in shown:
        made.add_column(LABELS[name], justify="right")
    with_errors = any(row.errors for row in figures.values())
    if with_errors:
        made.add_column("failed", justify="right", style="red")
    for name, row in figures.items():
        cells = [_cell(key, getattr(row, key)) for key in shown]
        made.add_row(Text(name), *cells, *([str(row.errors)] if with_errors else ()))
    return made


def beside(reference: Outcome, other: Outcome, *, most: int | None = MOST_LETTERS) -> Text:
    """Return a text in which the beginning that it shares with the reference is dim."""
    from rich.text import Text

    if other.error is not None:
        return Text(other.error, style="red")
    if not other.text:
        return Text("(no text: it ended at once)", style="dim italic")
    same = common_text(reference, other)
    text = other.text if most is None else _shortened(other.text, most)
    made = Text(text)
    if other is not reference:
        made.stylize("dim", 0, min(len(same), len(text)))
    return made


def common_text(reference: Outcome, other: Outcome) -> str:
    """Return the characters that both texts begin with."""
    if reference.error is not None or other.error is not None:
        return ""
    return other.text[: shared(reference.text, other.text)]


def markdown(
    columns: Sequence[Column],
    figures: Mapping[str, Figures],
    outcomes: Sequence[Outcome],
) -> str:
    """Return the whole comparison as a page: the table, then each prompt's texts."""
    shown = _told(figures)
    lines = [
        "# Comparison",
        "",
        f"The first column, `{columns[0].name}`, is what the others are compared with. A text is "
        "split by `|` where it leaves the first column's.",
        "",
        f"| | {' | '.join(LABELS[name] for name in shown)} |",
        f"|---|{'---:|' * len(shown)}",
    ]
    for name, row in figures.items():
        cells = " | ".join(_cell(key, getattr(row, key)) for key in shown)
        lines.append(f"| `{_escaped(name)}` | {cells} |")
    lines += ["", "Fields of the columns:", ""]
    for column in columns:
        spelled = json.dumps(dict(column.fields), ensure_ascii=False, default=repr)
        lines.append(f"- `{column.name}`: `{spelled}`")
    for place, group in grouped(outcomes).items():
        prompt, seed = place
        reference = group[0]
        lines += [
            "",
            f"## {_escaped(reference.job.text)}",
            "",
            f"Prompt {prompt}, seed {seed}.",
            "",
        ]
        for outcome in group:
            lines.append(
                f"- **{_escaped(outcome.job.column.name)}**: {_marked(reference, outcome)}"
            )
    return "\n".join(lines) + "\n"


def summary(columns: Sequence[Column], figures: Mapping[str, Figures]) -> dict[str, Any]:
    """Return the figures with the fields that led to them."""
    return {
        "columns": [
            {
                "name": column.name,
                "fields": dict(column.fields),
                "varied": column.varied,
                "value": column.value,
                **asdict(figures[column.name]),
            }
            for column in columns
        ]
    }


def grouped(outcomes: Sequence[Outcome]) -> dict[tuple[int, int], list[Outcome]]:
    """Return the outcomes by prompt and seed, each group in the order of the columns."""
    groups: dict[tuple[int, int], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.job.prompt, outcome.job.seed), []).append(outcome)
    return groups


def _told(figures: Mapping[str, Figures]) -> list[str]:
    """Return the figures that any column has."""
    return [
        name for name in LABELS if any(getattr(row, name) is not None for row in figures.values())
    ]


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return DASH
    return f"{value:.1f}" if name == "length" else f"{value:.3f}"


def _marked(reference: Outcome, outcome: Outcome) -> str:
    if outcome.error is not None:
        return f"failed: {_escaped(outcome.error)}"
    if outcome is reference:
        return _escaped(outcome.text) or "(no text: it ended at once)"
    same = common_text(reference, outcome)
    rest = outcome.text[len(same) :]
    if not rest and len(same) == len(reference.text):
        return "the same text"
    return f"{_escaped(same)} **|** {_escaped(rest)}"


def _escaped(text: str) -> str:
    for mark in "\\`*_|<>#[]":
        text = text.replace(mark, f"\\{mark}")
    return " ".join(text.split("\n")).strip()


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"

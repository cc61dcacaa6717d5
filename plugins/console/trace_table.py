"""A trace at a terminal: one table a position, whose columns are the points of the chain."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...core.trace_report import TokenPath, Trace, TracePosition
from ...core.trace_words import duration, share, token_name
from .session import set_values

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

DEAD = "x"


def show_position(console: Console, trace: Trace, at: TracePosition, num_tokens: int) -> None:
    """Print what each stage did at one position, and the first of its tokens."""
    table = _table(trace, f"{at.position}. {_chosen(trace, at)}")
    effects = at.effects
    table.add_row("alive", f"{at.alive:,}", *(f"{each.alive_after:,}" for each in effects))
    table.add_row("removed", "", *(share(each.removed) if each.removed else "" for each in effects))
    table.add_row("moved", "", *(share(each.moved) if each.moved else "" for each in effects))
    entropies = [at.entropy, *(each.entropy_after for each in effects)]
    table.add_row("entropy", *(f"{value:.2f}" for value in entropies))
    table.add_row("time", "", *(duration(each.seconds) for each in effects), end_section=True)
    for path in at.tokens[:num_tokens]:
        style = "bold" if path.id == at.token else ""
        table.add_row(_cell(token_name(path.id, path.text)), *_probabilities(path), style=style)
    console.print(table)


def show_totals(console: Console, trace: Trace) -> None:
    """Print each stage's means over the positions."""
    if not trace.steps or not trace.positions:
        return
    table = _plain(f"all {len(trace)} positions")
    for title in ("stage", "alive", "removed", "moved", "another in front", "time"):
        table.add_column(title, justify="left" if title == "stage" else "right", overflow="fold")
    for total in trace.totals():
        table.add_row(
            total.id,
            f"{total.alive_before:,.0f} > {total.alive_after:,.0f}",
            share(total.removed) if total.removed else "",
            share(total.moved) if total.moved else "",
            f"{total.num_changed} times" if total.num_changed else "",
            duration(total.seconds),
        )
    console.print(table)


def _table(trace: Trace, title: str) -> Table:
    table = _plain(title)
    table.add_column("", overflow="fold")
    table.add_column("model", justify="right")
    for step in trace.steps:
        values = ", ".join(f"{name}={value!r}"[:24] for name, value in set_values(step).items())
        table.add_column(_cell(f"{step.id}\n{values}"), justify="right", overflow="fold")
    return table


def _plain(title: str) -> Table:
    from rich import box
    from rich.table import Table

    return Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title=_cell(title), title_justify="left",
        title_style="bold cyan",
    )  # fmt: skip


def _probabilities(path: TokenPath) -> list[Any]:
    from rich.text import Text

    dead = next((i for i, rank in enumerate(path.ranks) if rank is None), len(path.ranks))
    return [
        share(probability) if rank is not None else Text(DEAD, "red") if place == dead else ""
        for place, (rank, probability) in enumerate(zip(path.ranks, path.probs, strict=True))
    ]


def _chosen(trace: Trace, at: TracePosition) -> str:
    if at.token is None:
        return "no token: the step failed"
    return f"{token_name(at.token, at.text)}, chosen by {trace.picker.id}"


def _cell(text: str) -> Any:
    """Keep brackets of a value from being read as markup."""
    from rich.text import Text

    return Text(text)

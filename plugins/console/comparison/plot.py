"""The figures of a comparison as a picture: bars for columns, lines for a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ....core.errors import ValidationError
from .columns import Column
from .metrics import LABELS, Figures

PLOTTED = ("length", "mean_logprob", "distinct_2", "repetition", "agreement")
BLUE, GREY, RED = "#3b6fb6", "#9aa3ad", "#b6493b"
LONGEST_NAME = 28


def check() -> None:
    """Raise ValidationError, with what to install, where there is no matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValidationError(
            "the plot needs matplotlib: pip install 'decodekit[compare]', or use --no-plot",
            parameter="plot",
        )


def draw(columns: Sequence[Column], figures: Mapping[str, Figures], path: Path) -> None:
    """Write the picture to `path`; the suffix says in which format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    metrics = [
        name
        for name in PLOTTED
        if any(getattr(figures[column.name], name) is not None for column in columns)
    ]
    varied = list(dict.fromkeys(column.varied for column in columns if column.varied is not None))
    fixed = [column for column in columns if column.varied is None]
    is_sweep = bool(varied)
    bars = 0 if is_sweep and len(fixed) <= 1 else 1
    rows = len(varied) + bars
    heights = [*([0.5 + 0.32 * len(fixed)] * bars), *([2.3] * len(varied))]
    figure = Figure(figsize=(2.7 * len(metrics) + 1.2, sum(heights) + 0.9), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(
        rows, len(metrics), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    if bars:
        for place, name in enumerate(metrics):
            _bars(axes[0][place], fixed, figures, name, with_names=place == 0)
    for row, variable in enumerate(varied, start=bars):
        moved = [column for column in columns if column.varied == variable]
        for place, name in enumerate(metrics):
            _line(axes[row][place], moved, columns[0], figures, name, variable)
    figure.savefig(path, dpi=150)


def _bars(
    axis: Any,
    columns: Sequence[Column],
    figures: Mapping[str, Figures],
    metric: str,
    *,
    with_names: bool,
) -> None:
    names = [_short(column.name) for column in columns]
    values = [getattr(figures[column.name], metric) for column in columns]
    places = range(len(columns))
    drawn = [0.0 if value is None else value for value in values]
    colours = [GREY if place == 0 else BLUE for place in places]
    axis.barh(places, drawn, color=colours, height=0.62)
    for place, value in zip(places, values, strict=True):
        said = "no value" if value is None else f" {value:.3g} "
        side = "left" if value is None or value >= 0 else "right"
        axis.text(drawn[place], place, said, va="center", ha=side, fontsize=8)
    axis.set_yticks(list(places), names if with_names else [""] * len(names), fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.28)
    axis.set_title(LABELS[metric], fontsize=10)
    _plain(axis)


def _line(
    axis: Any,
    columns: Sequence[Column],
    baseline: Column,
    figures: Mapping[str, Figures],
    metric: str,
    variable: str,
) -> None:
    """Draw a metric over the values of one field, and the baseline as a dashed line."""
    are_numbers = all(
        isinstance(column.value, int | float) and not isinstance(column.value, bool)
        for column in columns
    )
    listed = sorted(columns, key=lambda column: column.value) if are_numbers else list(columns)
    where = [column.value if are_numbers else str(column.value) for column in listed]
    values = [getattr(figures[column.name], metric) for column in listed]
    axis.plot(
        where,
        [float("nan") if value is None else value for value in values],
        marker="o",
        markersize=4,
        linewidth=1.6,
        linestyle="-" if are_numbers else "none",
        color=BLUE,
    )
    known = getattr(figures[baseline.name], metric)
    if known is not None and metric not in ("agreement", "identical"):
        axis.axhline(known, color=RED, linewidth=1, linestyle="--", label=_short(baseline.name))
        axis.legend(fontsize=7, frameon=False)
    axis.set_xlabel(variable, fontsize=9)
    axis.set_title(LABELS[metric], fontsize=10)
    axis.margins(y=0.2)
    _plain(axis)


def _plain(axis: Any) -> None:
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=8)


def _short(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 1]}…"

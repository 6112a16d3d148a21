"""Draws all figures with matplotlib in one plain style."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# The palette of Okabe and Ito, which colour-blind readers can distinguish. lastgood is black.
COLORS = {
    "lastgood": "#000000",
    "lastgood-slots": "#555555",
    "PCcheck": "#0072B2",
    "CheckFreq": "#D55E00",
    "GPM": "#009E73",
    "traditional": "#CC79A7",
    "Gemini": "#E69F00",
    "DCP async": "#56B4E9",
}
MARKERS = dict(zip(COLORS, "oDs^v*Pp", strict=True))
_SPARE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.5,
    "svg.hashsalt": "lastgood",
}


def save(draw: Callable[[], Figure], *paths: Path) -> None:
    """Draw a figure once in this module's style, and write it to each path in the format that the suffix names."""
    with matplotlib.rc_context(_STYLE):
        figure = draw()
        for path in paths:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def panels(count: int, columns: int = 3, wide: float = 3.6, high: float = 3.0) -> tuple[Figure, list[Axes]]:
    """Make a figure with `count` panels in rows of `columns`. `wide` and `high` are the inches of one panel."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(wide * columns, high * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    axes = [one for row in grid for one in row]
    for spare in axes[count:]:
        spare.set_axis_off()
    return figure, axes[:count]


def style(name: str, at: int = 0) -> dict[str, Any]:
    """The line style of a contender, which is the same in all figures. lastgood is drawn on top of the others.

    A contender that is not in `COLORS` takes the spare colour number `at`.
    """
    color, marker = COLORS.get(name, _SPARE[at % len(_SPARE)]), MARKERS.get(name, "o")
    return {"color": color, "marker": marker, "label": name, "zorder": 3 if name.startswith("lastgood") else 2}


def steps_axis(axes: Axes, intervals: Sequence[int], label: str = "save every ... steps") -> None:
    """Make the x axis logarithmic, with a tick at each measured interval."""
    axes.set_xscale("log")
    axes.set_xticks(list(intervals), [str(one) for one in intervals])
    axes.minorticks_off()
    axes.set_xlabel(label)


def legend_below(figure: Figure, axes: Axes) -> None:
    """Draw one legend for all panels below them, with as many columns as fit into the figure's width."""
    handles, labels = axes.get_legend_handles_labels()
    room = int(figure.get_figwidth() // (0.5 + 0.07 * max(map(len, labels))))
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, min(room, len(labels))), frameon=False)

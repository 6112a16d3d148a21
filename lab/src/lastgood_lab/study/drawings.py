"""The figures of the study: goodput by suite, gain by suite, and gain against the reduction of the stall."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from .. import figures

if TYPE_CHECKING:
    from .tables import Triple


FIGURES, KINDS = ("2-goodput", "3-gain", "4-stall"), ("png", "svg")


def write(whole: Sequence[Triple], out: Path) -> list[Path]:
    """Draw the figures into `out`; none without a complete suite. Returns their paths."""
    if not whole:
        return []
    paths = []
    for name, draw in zip(FIGURES, (_goodput, _gain, _stall), strict=True):
        made = [out / f"figure-{name}.{kind}" for kind in KINDS]
        figures.save(lambda draw=draw: draw(whole), *made)  # type: ignore[misc]
        paths += made
    return paths


def _suites(whole: Sequence[Triple]) -> list[str]:
    return list(dict.fromkeys(one.unit.suite for one in whole))


def _goodput(whole: Sequence[Triple]) -> Figure:
    figure, (axes,) = figures.panels(1, wide=8)
    suites = _suites(whole)
    for at, (variant, name) in enumerate((("ref", "reference"), ("blk", "blocking"), ("ovl", "overlapped"))):
        shares = [
            statistics.fmean(1 + one.drop(variant) / 100 for one in whole if one.unit.suite == suite)
            for suite in suites
        ]
        axes.bar([place + 0.27 * (at - 1) for place in range(len(suites))], shares, 0.25, label=name)
    axes.set_xticks(range(len(suites)), suites, rotation=20, ha="right")
    axes.set_ylabel("goodput, reference = 1")
    figures.legend_below(figure, axes)
    return figure


def _gain(whole: Sequence[Triple]) -> Figure:
    figure, (axes,) = figures.panels(1, wide=8)
    suites = _suites(whole)
    for at, suite in enumerate(suites):
        gains = [one.gain for one in whole if one.unit.suite == suite]
        axes.bar([at], [statistics.fmean(gains)], 0.5, color="#56B4E9")
        axes.plot([at] * len(gains), gains, "k.")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(suites)), suites, rotation=20, ha="right")
    axes.set_ylabel("gain of overlapped over blocking, %")
    return figure


def _stall(whole: Sequence[Triple]) -> Figure:
    figure, (axes,) = figures.panels(1, wide=6.5)
    for at, suite in enumerate(_suites(whole)):
        mine = [one for one in whole if one.unit.suite == suite]
        look = {**figures.style(suite, at), "marker": "osD^"[at // 2 % 4], "linestyle": "none"}
        axes.plot([one.stall_cut for one in mine], [one.gain for one in mine], **look)
    axes.set_xlabel("stall less by, %")
    axes.set_ylabel("gain, %")
    figures.legend_below(figure, axes)
    return figure

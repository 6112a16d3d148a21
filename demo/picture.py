"""The picture of the demo: both loss curves, what was done to one of the runs, and where it went on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from run import Attempt

PEACE, TROUBLE, AGAIN, IN_A_SAVE, ELSEWHERE, DAMAGE = "#9ecae1", "#08306b", "#c6dbef", "#d62728", "#f28e2b", "#6a3d9a"


def draw(
    file: Path, peace: torch.Tensor, trouble: torch.Tensor, attempts: Sequence[Attempt], steps_per_epoch: int
) -> None:
    """Write the picture as PNG. `peace`, `trouble`: the loss of each step; `attempts`: of the run in trouble."""
    figure = Figure(figsize=(11, 7), layout="constrained", dpi=140)
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[3, 2], sharex=True)
    kills = [one for one in attempts if not one.finished]
    damages = sum(one.damage is not None for one in kills)
    differing = int((peace != trouble).sum())
    verdict = (
        f"{differing} of {len(peace)} losses differ" if differing else f"all {len(peace)} losses equal, bit for bit"
    )
    figure.suptitle(f"Killed {len(kills)} times, damaged {damages} times: {verdict}", fontsize=14, fontweight="bold")
    _curves(above, peace, trouble, kills)
    _lives(below, attempts, len(peace))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_xticks(range(0, len(peace) + 1, steps_per_epoch), minor=True)
        axes.grid(axis="x", which="minor", color="#eeeeee")
        axes.set_axisbelow(True)
    below.set_xlim(0, len(peace) * 1.01)
    below.set_xlabel(f"optimizer step (pale lines: epochs of {steps_per_epoch} steps)")
    figure.savefig(file)


def _curves(axes: Axes, peace: torch.Tensor, trouble: torch.Tensor, kills: Sequence[Attempt]) -> None:
    steps = range(1, len(peace) + 1)
    axes.plot(steps, peace, color=PEACE, linewidth=6, solid_capstyle="round", label="uninterrupted run")
    axes.plot(steps, trouble, color=TROUBLE, linewidth=1.2, label="killed and damaged run")
    for color, label, some in (
        (IN_A_SAVE, "killed inside a save", [one for one in kills if one.half_a_save]),
        (ELSEWHERE, "killed elsewhere", [one for one in kills if not one.half_a_save]),
    ):
        at = [one.reached for one in some]
        axes.plot(at, trouble[[step - 1 for step in at]], "o", color=color, markeredgecolor="white", ms=8, label=label)
    axes.set_yscale("log")
    axes.set_ylabel("training loss (log scale)")
    axes.legend(frameon=False, loc="upper right", ncols=2)


def _lives(axes: Axes, attempts: Sequence[Attempt], total: int) -> None:
    """One bar for each life of the trainer, from where it resumed to where it was killed."""
    for row, one in enumerate(attempts):
        kept = attempts[row + 1].resumed if row + 1 < len(attempts) else one.reached
        axes.barh(row + 1, kept - one.resumed, left=one.resumed, height=0.5, color=TROUBLE)
        axes.barh(row + 1, one.reached - kept, left=kept, height=0.5, color=AGAIN)
        if not one.finished:
            color = IN_A_SAVE if one.half_a_save else ELSEWHERE
            axes.plot(one.reached, row + 1, "o", color=color, markeredgecolor="white", ms=8)
        if one.damage:
            axes.plot(one.damage.step, row + 1, "X", color=DAMAGE, markeredgecolor="white", ms=9)
            right = one.reached < total / 2
            axes.annotate(
                f"step {one.damage.step}: {one.damage.kind}, stepped over; resumed from step {kept}",
                (one.reached if right else one.resumed, row + 1), (12 if right else -8, 0), textcoords="offset points",
                va="center", ha="left" if right else "right", fontsize=9, color=DAMAGE,
            )  # fmt: skip
    axes.barh([1], [0], color=AGAIN, label="steps lost with the process, done again")
    axes.plot([], [], "X", color=DAMAGE, markeredgecolor="white", ms=9, label="newest generation damaged while dead")
    axes.set_yticks(range(1, len(attempts) + 1))
    axes.set_ylim(len(attempts) + 0.6, 0.4)
    axes.set_ylabel("life of the trainer")
    axes.legend(frameon=False, loc="lower left")

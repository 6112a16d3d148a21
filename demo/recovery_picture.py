"""The picture of demo/recovery.py: what each rank of each node does over time, and below it the steps of the job."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from recovery_story import HUNG, NAN, NODE, Blow, Life, Story

TRAIN, AGAIN, DETECT, TEAR_DOWN = "train", "train again (replay)", "detect the fault", "tear down"
AGREE, START, RESTORE, RESERVE, END = "nodes agree who is left", "start", "restore", "wait in reserve", "save, end"
COLORS = {
    TRAIN: "#2b6cb0",
    AGAIN: "#a9cdee",
    DETECT: "#f28e2b",
    TEAR_DOWN: "#4a4a4a",
    AGREE: "#b39ddb",
    START: "#f7dc6f",
    RESTORE: "#3a9d5d",
    RESERVE: "#e3e3e3",
    END: "#8c9aa8",
}
FAULT = "#c0152f"
MARKS = {HUNG: "s", NAN: "*"}
"""kind of fault -> its mark; a cross for the others"""


def draw(file: Path, story: Story, holds: bool) -> None:
    """Write the picture as PNG. `holds`: whether all checks of the demo do."""
    figure = Figure(figsize=(15, 8.5), layout="constrained", dpi=120)
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, height_ratios=[3, 2], sharex=True)
    verdict = (
        "the same losses, weights and samples as without faults, bit for bit" if holds else "SOMETHING DOES NOT HOLD"
    )
    figure.suptitle(
        f"A job on two nodes, with {len(story.blows)} faults and nobody at hand: {verdict}",
        fontsize=14,
        fontweight="bold",
    )
    _lanes(above, story)
    _faults(above, story)
    _steps(below, story)
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
        for blow in story.blows:
            axes.axvline(blow.at - story.began(0), color=FAULT, linewidth=1, linestyle=":", zorder=3)
    below.set_xlim(0, (story.over(len(story.attempts) - 1) - story.began(0)) * 1.01)
    below.set_xlabel("seconds since the first ranks were started")
    figure.savefig(file)


def _lanes(axes: Axes, story: Story) -> None:
    """A lane for each place of a rank: a node, and the number of the process there."""
    lanes = sorted({(one.node, one.local) for one in story.lives})
    row = {lane: number for number, lane in enumerate(lanes)}
    for life in story.lives:
        for phase, begin, end in _bars(story, life):
            axes.barh(
                row[life.node, life.local], end - begin, left=begin - story.began(0), height=0.66, color=COLORS[phase]
            )
    for number, blow in enumerate(story.blows):
        hit = [one for one in story.lives if one.attempt == number and one.rank in blow.ranks]
        rows = [row[one.node, one.local] for one in hit]
        axes.plot(
            [blow.at - story.began(0)] * len(rows), rows, MARKS.get(blow.kind, "X"), color=FAULT,
            markeredgecolor="white", ms=18 if blow.kind is NAN else 13, zorder=5,
        )  # fmt: skip
        if blow.kind is NODE:
            for at in rows:
                axes.annotate(
                    "lost, with all that ran on it", (blow.at - story.began(0), at), (14, 0),
                    textcoords="offset points", va="center", fontsize=10, color=FAULT,
                )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [f"{node}, process {local}" for node, local in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    for number, (one, other) in enumerate(pairwise(lanes)):
        if one[0] != other[0]:
            axes.axhline(number + 0.5, color="#bbbbbb", linewidth=0.8)
    handles = [Patch(color=color, label=name) for name, color in COLORS.items()]
    axes.legend(handles=handles, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.03), ncols=len(COLORS))


def _bars(story: Story, life: Life) -> list[tuple[str, float, float]]:
    """What one rank does in one attempt, and until the next one begins: phase, begin and end."""
    number = life.attempt
    blow = story.blows[number] if number < len(story.blows) else None
    mine = [one for one in story.steps[life.rank] if one.attempt == number]
    before = story.reached(number - 1)
    began, noticed, over = story.began(number), story.noticed(number), story.over(number)
    restored = noticed if life.restored is None else life.restored
    again = max((one.at_seconds for one in mine if one.global_step <= before), default=restored)
    last = max((one.at_seconds for one in mine), default=restored)
    waits = story.reserve is not None and story.reserve[0] == life.node
    bars = [(RESERVE, story.reserve[1], began)] if waits and story.reserve is not None else []
    bars += [
        (START, began, life.opened),
        (RESTORE, life.opened, restored),
        (AGAIN, restored, again),
        (TRAIN, again, last),
    ]
    if blow is None:
        bars += [(END, last, over)]
    elif not (blow.kind.lost and life.rank in blow.ranks):
        bars += [(DETECT, last, max(last, noticed)), (TEAR_DOWN, max(last, noticed), over)]
        bars += [(AGREE, over, story.began(number + 1))] if number + 1 < len(story.attempts) else []
    return bars


def _faults(axes: Axes, story: Story) -> None:
    """The name of each fault, and how long the job needed to be where it was."""
    for number, blow in enumerate(story.blows):
        axes.annotate(
            _text(story, number, blow), (blow.at - story.began(0), 1.0), (-4, 6), xycoords=("data", "axes fraction"),
            textcoords="offset points", fontsize=10, color=FAULT, ha="left", va="bottom",
        )  # fmt: skip


def _text(story: Story, number: int, blow: Blow) -> str:
    back = story.back(number)
    seconds = "it never came back" if back is None else f"{back - blow.at:.1f} s until this step\nis trained again"
    return f"{number + 1}. {blow.kind.short}\n{seconds}"


def _steps(axes: Axes, story: Story) -> None:
    """How far the job was: after a fault it falls back to the newest good save, and repeats some steps."""
    at, reached = 0.0, 0
    for number, attempt in enumerate(story.attempts):
        mine = [one for one in story.steps[0] if one.attempt == number]
        times, steps = [one.at_seconds - story.began(0) for one in mine], [one.global_step for one in mine]
        if number and mine:
            axes.plot([at, times[0]], [reached, steps[0]], color="#888888", linewidth=1, linestyle="--")
            axes.annotate(
                f"back to step {attempt.restored_step},\n{attempt.replayed_steps} steps again", (times[0], steps[0]),
                (8, -6), textcoords="offset points", fontsize=10, va="top",
            )  # fmt: skip
        new = next((place for place, step in enumerate(steps) if step > story.reached(number - 1)), len(steps))
        axes.plot(times[new:], steps[new:], color=COLORS[TRAIN], linewidth=4, solid_capstyle="butt")
        axes.plot(times[: new + 1], steps[: new + 1], color=COLORS[AGAIN], linewidth=4, solid_capstyle="butt")
        at, reached = (times[-1], steps[-1]) if mine else (at, reached)
    axes.set_ylim(bottom=-story.reached(len(story.attempts)) / 8)
    axes.set_ylabel("step")
    axes.grid(axis="y", color="#eeeeee")
    axes.set_axisbelow(True)

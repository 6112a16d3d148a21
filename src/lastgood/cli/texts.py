"""Texts, tables and states of generations that several commands show. Prints nothing and reads no tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from ..format.commit import Survey
from ..policy import restore
from ..records import GenerationId
from ..units import plural as plural

MIN_COLUMNS = 80
"""the width for which tables are laid out on a terminal that has less, which then breaks their lines"""
STYLES = {
    "verified": "green",
    "good": "green",
    "committed": "",
    "damaged": "bold red",
    "lost": "bold red",
    "unreadable": "bold red",
    "not good": "bold red",
}


def when(seconds: float | None, form: str = "%Y-%m-%d %H:%M") -> str:
    """Local date and time of seconds since 1970; "?" for a number that is no date."""
    try:
        return "" if seconds is None else datetime.fromtimestamp(seconds).strftime(form)
    except (OverflowError, ValueError, OSError):
        return "?"


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts h.2 before h.10, for numbers of any length."""
    parts = [part.lstrip("0") if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    return [(len(part), part) if place % 2 else (-1, part) for place, part in enumerate(parts)]


def named(at: GenerationId) -> dict[str, Any]:
    """The keys of `--json` that name a generation."""
    return {"step": at.step, "incarnation": at.incarnation}


def id_of(row: Mapping[str, Any]) -> GenerationId:
    """The generation that a row of `--json` names; the opposite of `named`."""
    return GenerationId(step=row["step"], incarnation=row["incarnation"])


def title(row: Mapping[str, Any], state: str, style: str) -> Text:
    """The first line of what is shown about one generation."""
    return Text.assemble((f"step {row['step']}", "bold"), f" ({row['incarnation']})  ", (state, style))


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


class _Table(Table):
    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return super().__rich_console__(console, options.update(max_width=max(options.max_width, MIN_COLUMNS)))


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines. The columns in `right` are aligned to the right and never wrapped.

    No cell is cut: the other columns are folded, and a table may be wider than a terminal of less than MIN_COLUMNS.
    """
    table = _Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right, overflow="fold")
    return table


def state_text(state: str) -> Text:
    """The state of a generation in its colour."""
    return Text(state.upper() if state in ("damaged", "lost") else state, style=STYLES.get(state, "yellow"))


def newest_first(survey: Survey, those: Iterable[GenerationId]) -> list[GenerationId]:
    """Sorted by the order in which they were saved, the newest first."""
    order = {one.id: one.order for one in survey.incarnations.values()}
    return sorted(those, key=lambda at: (order.get(at.incarnation, 0), at.step), reverse=True)


def state_of(survey: Survey, at: GenerationId) -> tuple[str, str]:
    """The state of a generation (docs/cli.md, "States"), and the reason if it is not good."""
    chain, lost = restore.lineage(survey)
    if at in survey.broken:
        return ("unreadable" if at in survey.unread else "damaged"), str(survey.broken[at])
    if at in lost:
        return "lost", "its COMMIT is gone although nobody deleted it"
    if at in survey.incomplete or at in survey.going:
        return ("incomplete" if at in survey.incomplete else "deleting"), ""
    one = survey.generations[at]
    if one.damaged:
        return "damaged", restore.summary(one.damaged)
    if one.unfit:
        return "not good", restore.summary(one.unfit)
    if at not in chain:
        return "abandoned", ""
    return ("verified" if one.verified else "committed"), ""

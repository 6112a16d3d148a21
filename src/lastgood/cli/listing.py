"""`lastgood ls`: every generation of a run, and which one a restore would take. Reads no tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..format import commit, layout
from ..format.commit import Survey
from ..policy import restore
from ..ports import Tier
from ..records import GenerationId
from ..run import access, place_list
from ..run.left_behind import Left, newer_in_memory
from ..units import size
from .answer import Answer
from .arguments import Json, Run
from .protection import unprotected
from .terminal import clean
from .texts import named, new_table, newest_first, plural, state_of, state_text, when

MEANINGS = {
    "committed": "durable, not yet read back",
    "not good": "intact, and not good to go on from; never chosen by itself, restore(step=...) takes it",
    "abandoned": "left behind by a rewind; never chosen by itself, restore(step=...) takes it",
    "incomplete": "no COMMIT: a save that is under way, or one that did not end (`lastgood gc` clears it)",
    "unreadable": "it may be good; restores that would go back past it fail until it can be read",
    "deleting": "a deletion that did not end: it was interrupted, or a file cannot be removed (`lastgood gc`)",
}


def list_run(run: Run, as_json: Json = False) -> Answer:
    """Every generation of a run, newest first, and which one a restore would take."""
    tier = access.for_reading(run)
    data = listing(tier, commit.survey(tier))
    return Answer(data, listing_view(data))


def listing(tier: Tier, survey: Survey) -> dict[str, Any]:
    takes = next(iter(restore.choose(survey, None).candidates), None)
    hint = survey.pointer
    points = GenerationId(step=hint.step, incarnation=hint.incarnation) if hint else None
    known = {*survey.generations, *survey.broken, *survey.incomplete, *survey.going}
    lacking, unread = unprotected(tier, survey), survey.unread
    rows = []
    for at in newest_first(survey, known):
        (state, why), one = state_of(survey, at), survey.generations.get(at)
        rows.append(
            {
                **named(at),
                "state": state,
                "verified": one is not None and one.good,
                "created": one.commit.created if one else None,
                "bytes": one.bytes if one else 0 if at in unread else bytes_on_disk(tier, at),
                "milestone": one is not None and one.commit.milestone,
                "metrics": one.commit.metrics if one else {},
                "lastgood": at == points,
                "restores": at == takes,
                "root": one.root if one else None,
                "why": why,
                "unprotected": lacking.get(at, ""),
            }
        )
    return {
        "place": tier.place,
        "run": survey.run,
        "lastgood": points and named(points),
        "restores": takes and named(takes),
        "generations": rows,
        "newer_in_memory": [one._asdict() for one in newer_in_memory(place_list.listed(tier), [tier])],
    }


def bytes_on_disk(tier: Tier, at: GenerationId) -> int:
    """Bytes of the files in the folder of a generation, whether it is complete or not."""
    return sum(length for length in tier.list(layout.folder(at)).values() if length is not None and length > 0)


def listing_view(data: Mapping[str, Any]) -> RenderableType:
    rows = data["generations"]
    newer = [Text(clean(Left(**one).listed()), style="yellow") for one in data["newer_in_memory"]]
    if not rows:
        return Group(Text(restore.NOTHING_YET), *newer)
    remarks: list[Text] = newer
    for row in rows:
        if row["why"]:
            remarks.append(Text(f"step {row['step']} ({row['incarnation']}): {clean(row['why'])}", style="red"))
        if row["unprotected"]:
            remarks.append(Text(f"step {row['step']} ({row['incarnation']}) {row['unprotected']}", style="yellow"))
    total = size(sum(row["bytes"] for row in rows))
    takes = data["restores"]
    end = f"a restore takes step {takes['step']} ({takes['incarnation']})" if takes else "NOTHING HERE CAN BE RESTORED"
    last = [Text(f"{plural(len(rows), 'generation')}, {total}; {end}", style="bold")]
    if any(row["lastgood"] for row in rows):
        last.append(Text(f"* {layout.POINTER} points here", style="dim"))
    elif data["lastgood"]:
        last.append(Text(f"{layout.POINTER} points to step {data['lastgood']['step']}, which is gone", style="yellow"))
    states = {row["state"] for row in rows}
    last += [Text(f"{state}: {what}", style="dim") for state, what in MEANINGS.items() if state in states]
    return Group(_table(rows), *([Text(), *remarks] if remarks else []), Text(), *last)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = new_table("", "step", "incarnation", "when", "size", "state", "notes", right=("step", "size"))
    for row in rows:
        notes = ["milestone"] * row["milestone"] + [f"{clean(k)} {v:.6g}" for k, v in sorted(row["metrics"].items())]
        cells = ("*" if row["lastgood"] else "", str(row["step"]), row["incarnation"], when(row["created"]))
        table.add_row(*cells, size(row["bytes"]), state_text(row["state"]), ", ".join(notes))
    if not any(row["milestone"] or row["metrics"] for row in rows):
        table.columns.pop()
    return table

"""`lastgood drill`: copies of a run are killed, cut and damaged, and must come back (run/drill.py). Holds no rule."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import Damaged
from ..run import access, read_places
from ..run import drill as drills
from ..run.drill_peers import UNKNOWN, PeerRead
from ..units import size
from .answer import Answer
from .arguments import Json, Run
from .interrupts import ended_as_by_ctrl_c
from .terminal import clean
from .texts import id_of, named, new_table


def drill(
    run: Run,
    folder: Annotated[
        str | None,
        typer.Option("--in", metavar="DIR", help="The directory for the copies; without it, the one beside RUN."),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Copy the newest good generation, kill, cut and damage the copies, and show that each way back works, with times.

    RUN is only read; the copies are removed at the end. Exit code 4 where a way back did not work.
    """
    data = drilled(run, folder)
    newer = read_places.found(access.for_reading(run)).newer_part(id_of(data))
    return Answer(data, drilled_view(data), 0 if data["good"] else Damaged.exit_code, note=newer)


def drilled(run: str, folder: str | None) -> dict[str, Any]:
    """Play the drill. Raises what `run.drill.drill` raises."""
    with ended_as_by_ctrl_c():
        found = drills.drill(run, folder, lambda text: print(f"lastgood: {clean(text)}", file=sys.stderr))
    generation = found.generation
    return {
        "place": found.place,
        **named(generation.id),
        "good": found.good,
        "bytes": generation.bytes,
        "copied_seconds": round(found.copied_seconds, 3),
        "acts": [_rounded(dataclasses.asdict(one)) for one in found.acts],
        "peers": [_rounded({**one._asdict(), "bytes_per_second": _speed(one)}) for one in found.peers],
        "cleared": found.cleared,
    }


def _speed(one: PeerRead) -> int | None:
    return round(one.bytes / one.seconds) if one.good and one.seconds else None


def _rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "seconds": None if row["good"] is None else round(row["seconds"], 3)}


def drilled_view(data: Mapping[str, Any]) -> RenderableType:
    table = new_table("what was done to the copy", "result", "seconds", "the way back", right=("seconds",))
    for row in data["acts"]:
        table.add_row(row["what"], _result(row), _seconds(row), clean(row["way_back"] or row["why"]))
    for row in data["peers"]:
        text = row["why"]
        if row["good"]:
            done = "read" if row["what"] == "copies" else "computed"
            text = f"step {row['step']}, {size(row['bytes'])} {done} and verified, {size(row['bytes_per_second'])}/s"
            text += f"; not needed: {row['why']}" if row["why"] else ""
        where = "copies on node" if row["what"] == "copies" else "parity on nodes"
        where = "copies on other nodes" if row["node"] == UNKNOWN else f"{where} {row['node']}"
        table.add_row(clean(where), _result(row), _seconds(row), clean(text))
    head = (
        f"step {data['step']} ({data['incarnation']}), {size(data['bytes'])}, copied in {data['copied_seconds']:.2f} s"
    )
    played = [row for row in (*data["acts"], *data["peers"]) if row["good"] is not None]
    failed = sum(not row["good"] for row in played)
    last = f"{len(played)} ways back tried, {f'{failed} failed' if failed else 'all work'}"
    color = "bold red" if failed else "green"
    if not played:
        last, color = "nothing was tried", "yellow"
    cleared = [Text(f"removed what a killed drill had left: {clean(one)}") for one in data["cleared"]]
    return Group(*cleared, Text(head, style="bold"), table, Text(last, style=color))


def _result(row: Mapping[str, Any]) -> Text:
    if row["good"] is None:
        return Text("not tried", style="yellow")
    return Text("works", style="green") if row["good"] else Text("FAILED", style="bold red")


def _seconds(row: Mapping[str, Any]) -> str:
    return "" if row["seconds"] is None else f"{row['seconds']:.2f}"

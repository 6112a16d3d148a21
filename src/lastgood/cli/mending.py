"""What `scrub` and `repair` do: read generations again, put back what is damaged. Hold no rule of either.

Both lock the run: a trainer that has it open reads old generations by itself (`scrub=`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..engine.arena import Arena
from ..errors import Damaged, LastgoodError, Unreadable
from ..format import commit, layout
from ..format.commit import Survey
from ..policy import restore
from ..records import GenerationId, intact
from ..run import access
from ..run.reader import WORKERS, read_on
from ..run.scrubber import Scrubbed, Scrubber
from ..run.watched import Watched
from ..run.writer import RunWriter
from ..units import size
from .protection import unprotected
from .show import named, plural
from .terminal import clean, progress


@contextmanager
def _writing(run: str, what: str) -> Iterator[tuple[RunWriter, Arena]]:
    """A run to be written, with a bar over what is read of it."""
    access.for_reading(run)  # what is no run is refused here, before writing would make it one
    with access.for_writing(run, "atomic_dirsync") as tier, ThreadPoolExecutor(WORKERS, "lastgood-read") as workers:
        total = sum(one.bytes for one in commit.survey(tier).generations.values())
        with progress(what, total) as seen:
            watched = Watched(tier, seen)
            yield RunWriter(watched, workers), Arena(WORKERS * layout.CHUNK_BYTES, layout.CHUNK_BYTES)


def scrubbed(run: str, bytes_per_second: float) -> dict[str, Any]:
    """Every generation, once; raises what opening and reading raise."""
    rows = []
    with _writing(run, "reading again") as (writer, arena):
        scrubber = Scrubber(writer, lambda: arena, bytes_per_second=bytes_per_second)
        while (one := scrubber.next_one()) is not None:
            rows.append(
                {
                    **named(one.generation.id),
                    "state": _state(one),
                    "bytes": one.generation.bytes,
                    "seconds": round(one.seconds, 3),
                    "repaired": writer.mended.get(one.generation.id, []) if one.repaired else [],
                    "why": restore.told(one.findings),
                }
            )
        writer.point()
        place, lacking = writer.tier.place, unprotected(writer.tier, writer.survey)
    for row in rows:
        row["unprotected"] = lacking.get(GenerationId(step=row["step"], incarnation=row["incarnation"]), "")
    return {
        "place": place,
        "intact": all(one["state"] != "damaged" for one in rows),
        "good": all(one["state"] in ("good", "repaired") for one in rows),
        "generations": rows,
    }


def _state(one: Scrubbed) -> str:
    if one.repaired:
        return "repaired"
    return "damaged" if not one.whole else "not good" if one.findings else "good"


def repaired(run: str, wanted: GenerationId | None, known: bool) -> dict[str, Any]:
    """Read one generation, or all of them, and put back what is damaged. Raises BeyondRepair for one.

    `known`: read only what is known to be damaged already.
    """
    rows, read = [], 0
    with _writing(run, "repairing") as (writer, arena):
        there = set() if known else {*writer.survey.generations}
        for at in [wanted] if wanted else sorted({*damaged(writer.survey), *there}):
            try:
                if not known and _whole(writer, at, arena):
                    read += 1
                    rows += [{**named(at), "repaired": [], "why": ""}] if wanted else []
                    continue
                rows.append({**named(at), "repaired": writer.mend(at, arena), "why": ""})
            except LastgoodError as error:
                if wanted:
                    raise
                rows.append({**named(at), "repaired": [], "why": error.what})
        writer.point()
        place = writer.tier.place
    good = all(not one["why"] for one in rows)
    return {"place": place, "good": good, "looked": not known, "whole": read, "generations": rows}


def _whole(writer: RunWriter, at: GenerationId, arena: Arena) -> bool:
    """Read a generation past the page cache; where it is damaged, mark it. Whether every byte is as committed."""
    generation = writer.survey.generations.get(at)
    if generation is None:
        return False
    try:
        findings = read_on(writer.reading(generation, arena), lambda: False)
    except Unreadable:
        return False
    if intact(findings):
        return True
    writer.conclude(generation, findings)
    return False


def damaged(survey: Survey) -> list[GenerationId]:
    """What is known to be damaged or lost."""
    marked = {at for at, one in survey.generations.items() if not intact(one.damaged)}
    broken = {at for at, error in survey.broken.items() if isinstance(error, Damaged)}
    return sorted(marked | broken | survey.witnessed | set(restore.lineage(survey).lost))


def scrubbed_view(data: Mapping[str, Any]) -> RenderableType:
    lines: list[RenderableType] = []
    for row in data["generations"]:
        style = {"good": "green", "repaired": "yellow"}.get(row["state"], "bold red")
        told = f"  {size(row['bytes'])} in {row['seconds']:.1f} s"
        state = row["state"] if style == "green" else row["state"].upper()
        lines.append(Text.assemble((f"step {row['step']}", "bold"), f" ({row['incarnation']})  ", (state, style), told))
        lines += [Text(f"  {clean(row['why'])}")] if row["why"] else []
        lines += [Text(f"  put back from parity: {', '.join(row['repaired'])}")] if row["repaired"] else []
        lines += [Text(f"  it {row['unprotected']}", style="yellow")] if row["unprotected"] else []
    return Group(*lines, Text(f"{plural(len(data['generations']), 'generation')} read again", style="bold"))


def repaired_view(data: Mapping[str, Any]) -> RenderableType:
    lines: list[RenderableType] = []
    for row in data["generations"]:
        told = f"put back {', '.join(row['repaired'])}" if row["repaired"] else row["why"] or "nothing was damaged"
        style = "bold red" if row["why"] else "green"
        state = "BEYOND REPAIR" if row["why"] else "good"
        lines.append(Text.assemble((f"step {row['step']}", "bold"), f" ({row['incarnation']})  ", (state, style)))
        lines.append(Text(f"  {clean(told)}"))
    if data["whole"] and not data["generations"]:
        lines.append(Text(f"{plural(data['whole'], 'generation')} read: nothing is damaged", style="green"))
    return Group(*lines) if lines else Text("nothing is known to be damaged")

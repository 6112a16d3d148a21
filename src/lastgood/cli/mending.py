"""`lastgood scrub` and `lastgood repair`: read generations again and rebuild what is damaged. Hold no rule of either.

Both lock the run. A trainer that has the run open scrubs it by itself (`Checkpointer(scrub=...)`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from .. import reporting
from ..engine.arena import Arena
from ..errors import BeyondRepair, Damaged, LastgoodError, NotFinite, Refused, Unavailable, Unreadable
from ..format import commit
from ..format.commit import Survey
from ..limits import CHUNK_BYTES, WORKERS
from ..policy import restore
from ..ports import Tier, never
from ..records import GenerationId, intact, with_suspicion
from ..run import access, copying, place_list
from ..run.left_behind import given_back
from ..run.reader import read_on
from ..run.scrubber import Scrubbed, Scrubber
from ..run.watched import Watched
from ..run.writer import RunWriter
from ..units import size
from .answer import Answer
from .arguments import AnyStep, From, Json, Run, TakeOver, bytes_of
from .protection import unprotected
from .selection import find
from .terminal import clean, progress
from .texts import id_of, named, plural, title
from .writing import for_command

MEANWHILE = (
    "If a job has it open, give that job Checkpointer(scrub=lastgood.Scrub()): it then reads and mends old generations "
    "while it runs. `lastgood verify RUN --all` finds damage beside it, and changes nothing."
)


def scrub(
    run: Run,
    rate: Annotated[
        int | None,
        typer.Option(metavar="SIZE", parser=bytes_of, help="Bytes a second, at most.", show_default=False),
    ] = None,
    other: From = None,
    take_over: TakeOver = False,
    as_json: Json = False,
) -> Answer:
    """Read every generation again, past the page cache; mark what is damaged; rebuild it from parity or other places.

    After one that is damaged come its neighbours in time. Exit code 4 where one stays damaged, 8 where one is not good.
    """
    data = scrubbed(run, rate or float("inf"), take_over, other or [])
    code = 0 if data["good"] else NotFinite.exit_code if data["intact"] else Damaged.exit_code
    return Answer(data, scrubbed_view(data), code)


def repair(
    run: Run,
    step: AnyStep = None,
    known: Annotated[bool, typer.Option("--known", help="Read only what is known to be damaged already.")] = False,
    other: From = None,
    take_over: TakeOver = False,
    as_json: Json = False,
) -> Answer:
    """Read STEP, or every generation if none is given, and rebuild what is damaged from parity or other places.

    Exit code 4 where there is more damage than these can rebuild, 5 where a generation could not be repaired for
    another reason, such as a disk that failed or is full.

    A damaged file stays until its replacement is durable and was read back.
    """
    survey = commit.survey(access.for_reading(run))
    data = repaired(run, find(survey, step) if step is not None else None, known, take_over, other or [])
    failed = [row["error"] for row in data["generations"] if row["error"]]
    unavailable = bool(failed) and BeyondRepair.__name__ not in failed
    code = Unavailable.exit_code if unavailable else Damaged.exit_code if failed else 0
    return Answer(data, repaired_view(data), code)


@contextmanager
def _writing(run: str, what: str, take_over: bool, others: Sequence[str]) -> Iterator[tuple[RunWriter, Arena]]:
    """Open a run for writing, with a progress bar over the bytes that are read from it.

    `others`: further places of it, from which damage is repaired; so is it from those that the run names.
    """
    access.for_reading(run)  # refuses a path that is no run, before opening it for writing would make it one
    with (
        for_command(run, take_over, MEANWHILE) as tier,
        ThreadPoolExecutor(WORKERS, "lastgood-read") as workers,
    ):
        total = sum(one.bytes for one in commit.survey(tier).generations.values())
        with progress(what, total) as count_bytes:
            writer = RunWriter(Watched(tier, count_bytes), workers)
            writer.mender.sources = sources(tier, writer.known.run_id, others)
            yield writer, Arena(WORKERS * CHUNK_BYTES, CHUNK_BYTES)


def sources(tier: Tier, run_id: str, others: Sequence[str]) -> list[Tier]:
    """The other places of a run, open for reading: `others`, and those that the run names and that can be read now.

    Raises Refused if one of `others` holds another run, and what opening it raises.
    """
    found = [access.for_reading(one) for one in others]
    for one in found:
        if (run := copying.run_of(commit.survey(one))) != run_id:
            raise Refused(
                f"{one.place} holds another run ({run}), not that of {tier.place} ({run_id})",
                safe="Nothing was touched.",
                todo="Give places of the same run.",
            )
    for place in place_list.listed(tier):
        if place in (tier.place, *(one.place for one in found)):
            continue
        if note := given_back(place):
            reporting.info(f"{place}, which is a place of this run too, is {note}")
            continue
        try:
            one = access.for_reading(place)
            if copying.run_of(commit.survey(one)) == run_id:
                found.append(one)
        except LastgoodError as error:
            reporting.warning(f"{place}, which is a place of this run too, cannot be read: {error.what}")
    return found


def scrubbed(run: str, bytes_per_second: float, take_over: bool = False, others: Sequence[str] = ()) -> dict[str, Any]:
    """Read every generation once, at `bytes_per_second` at most. Raises what opening and reading raise."""
    rows = []
    with _writing(run, "reading again", take_over, others) as (writer, arena):
        scrubber = Scrubber(writer.known, writer.mender, lambda: arena, bytes_per_second=bytes_per_second)
        while (one := scrubber.scrub_next()) is not None:
            rows.append(
                {
                    **named(one.generation.id),
                    "state": _state(one),
                    "bytes": one.generation.bytes,
                    "seconds": round(one.seconds, 3),
                    "repaired": writer.mender.mended.get(one.generation.id, []) if one.repaired else [],
                    "why": restore.summary(one.findings),
                }
            )
        writer.marks.point()
        place, lacking = writer.tier.place, unprotected(writer.tier, writer.survey)
    for row in rows:
        row["unprotected"] = lacking.get(id_of(row), "")
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


def repaired(
    run: str, wanted: GenerationId | None, known: bool, take_over: bool = False, other_places: Sequence[str] = ()
) -> dict[str, Any]:
    """Read the `wanted` generation, or all of them if None, and rebuild what is damaged.

    `known`: read only what is known to be damaged. A failure to rebuild `wanted` is raised; of several generations it
    is reported in the row of each.
    """
    rows, read = [], 0
    with _writing(run, "repairing", take_over, other_places) as (writer, arena):
        others = set() if known else {*writer.survey.generations}
        for at in [wanted] if wanted else sorted({*damaged(writer.survey), *others}):
            try:
                if not known and _intact(writer, at, arena):
                    read += 1
                    rows += [{**named(at), "repaired": [], "error": "", "why": ""}] if wanted else []
                    continue
                rows.append({**named(at), "repaired": writer.mend(at, arena), "error": "", "why": ""})
            except LastgoodError as error:
                if wanted:
                    raise
                rows.append({**named(at), "repaired": [], "error": type(error).__name__, "why": error.what})
        writer.marks.point()
        place = writer.tier.place
    good = all(not one["why"] for one in rows)
    return {"place": place, "good": good, "looked": not known, "whole": read, "generations": rows}


def _intact(writer: RunWriter, at: GenerationId, arena: Arena) -> bool:
    """Read a generation past the page cache, and mark it if it is damaged. Whether every byte is what was committed."""
    generation = writer.survey.generations.get(at)
    if generation is None:
        return False
    try:
        findings = read_on(writer.mender.reading(generation, arena), never)
    except Unreadable:
        return False
    if intact(findings) and not generation.damaged:
        return True
    writer.conclude(generation, with_suspicion(generation, findings))  # of damage that is not there, the mark goes
    return intact(findings)


def damaged(survey: Survey) -> list[GenerationId]:
    """The generations that are known to be damaged or lost."""
    marked = {at for at, one in survey.generations.items() if not intact(one.damaged)}
    broken = {at for at, error in survey.broken.items() if isinstance(error, Damaged)}
    return sorted(marked | broken | survey.witnessed | set(restore.lineage(survey).lost))


def scrubbed_view(data: Mapping[str, Any]) -> RenderableType:
    lines: list[RenderableType] = []
    for row in data["generations"]:
        style = {"good": "green", "repaired": "yellow"}.get(row["state"], "bold red")
        state = row["state"] if style == "green" else row["state"].upper()
        lines.append(title(row, state, style).append(f"  {size(row['bytes'])} in {row['seconds']:.1f} s"))
        lines += [Text(f"  {clean(row['why'])}")] if row["why"] else []
        lines += [Text(f"  put back: {', '.join(row['repaired'])}")] if row["repaired"] else []
        lines += [Text(f"  it {row['unprotected']}", style="yellow")] if row["unprotected"] else []
    return Group(*lines, Text(f"{plural(len(data['generations']), 'generation')} read again", style="bold"))


def repaired_view(data: Mapping[str, Any]) -> RenderableType:
    lines: list[RenderableType] = []
    for row in data["generations"]:
        what = f"put back {', '.join(row['repaired'])}" if row["repaired"] else row["why"] or "nothing was damaged"
        style = "bold red" if row["why"] else "green"
        failed = "BEYOND REPAIR" if row["error"] == BeyondRepair.__name__ else "NOT REPAIRED"
        state = failed if row["error"] else "good"
        lines += [title(row, state, style), Text(f"  {clean(what)}")]
    if data["whole"] and not data["generations"]:
        lines.append(Text(f"{plural(data['whole'], 'generation')} read: nothing is damaged", style="green"))
    return Group(*lines) if lines else Text("nothing is known to be damaged")

"""What `gc` does: ends deletions that did not end, deletes what is damaged or not kept. Holds no rule of retention.

A dry run goes the same way without a writer: it takes no lock and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ..engine.arena import Arena
from ..errors import Damaged, LastgoodError, NothingGood
from ..format import commit, layout
from ..format.commit import Survey
from ..policy import restore
from ..policy.retention import Keep, surplus
from ..ports import Tier
from ..records import LAYERS, Finding, Generation, GenerationId, judged
from ..run import access
from ..run.reader import WORKERS, read_all
from ..run.watched import Watched
from ..run.writer import RunWriter
from ..units import size
from .show import named, new_table, plural, weight
from .terminal import clean, progress

NAMES_SHOWN = 3
"""of what is left in the folder of a generation that could not be deleted"""


def swept(run: str, keep: Keep | None, damaged: bool, dry_run: bool) -> dict[str, Any]:
    """What went, or would go. `keep`: retention is asked too; `damaged`: what is damaged or lost goes as well.

    Raises NothingGood where `damaged` would delete and the lineage has no verified one; what opening and reading raise.
    """
    tier: Tier = access.for_reading(run)  # what is no run is refused here, before writing would make it one
    with ExitStack() as open_run:
        workers = open_run.enter_context(ThreadPoolExecutor(WORKERS))
        if not dry_run:
            tier = open_run.enter_context(access.for_writing(run, "atomic_dirsync"))
        survey = commit.survey(tier)
        lost = survey.incomplete - restore.never_committed(survey)
        rows = [_going(tier, at, "an unfinished deletion") for at in sorted(survey.going)]
        rows += [_going(tier, at, "never committed") for at in sorted(survey.incomplete - lost)]
        litter = [name for folder in ("", "incarnations") for name in _litter(tier, folder)]
        litter += [
            name
            for at in sorted({*survey.generations, *survey.broken, *lost})
            for name in _litter(tier, layout.folder(at))
        ]
        writer = None if dry_run else RunWriter(tier, workers)  # clears all of these
        if writer:
            survey = writer.survey
            writer.point()
        found = _verify_newest(tier, survey, workers, writer) if keep or damaged else []
        chain = [survey.generations[at] for at in restore.lineage(survey).chain if at in survey.generations]
        going: dict[GenerationId, str] = {}
        if damaged:
            going |= {at: "damaged" for at, one in survey.generations.items() if one.damaged}
            going |= {at: "damaged" for at, error in survey.broken.items() if isinstance(error, Damaged)}
            going |= dict.fromkeys(lost, "lost")
            if going and not any(one.good for one in chain):
                raise NothingGood(
                    "no generation of the lineage is verified, so the damaged ones are all there is",
                    safe="No generation was deleted.",
                    todo="Save or import a good one first.",
                )
        if keep:
            abandoned = [one for at, one in survey.generations.items() if one not in chain]
            going |= dict.fromkeys(surplus(keep, chain, abandoned), "not kept")
        rows += [_going(tier, at, going[at]) for at in sorted(going)]
        reasons = _retired(tier, sorted(going)) if writer else {}
        stuck = [{**named(at), "why": why} for at, why in _left(tier, rows, reasons).items()] if writer else []
        litter = [name for name in litter if not writer or not _is_there(tier, name)]
    rows = [row for row in rows if not any(_id_of(row) == _id_of(one) for one in stuck)]
    done = {"place": tier.place, "dry_run": dry_run, "deleted": rows, "litter": litter, "damaged": found}
    return {**done, "stuck": stuck}


def _retired(tier: Tier, going: Sequence[GenerationId]) -> dict[GenerationId, str]:
    """Delete these generations; why those stay that could not be deleted."""
    reasons = {}
    for at in going:
        try:
            commit.retire(tier, at)
        except LastgoodError as error:
            reasons[at] = error.what
    return reasons


def _left(
    tier: Tier, rows: Sequence[Mapping[str, Any]], reasons: Mapping[GenerationId, str]
) -> dict[GenerationId, str]:
    """Generations of these rows whose folder is still there, and why: the error where known, else what lies in it."""
    left = {}
    for at in map(_id_of, rows):
        folder = layout.folder(at)
        if _is_there(tier, folder):
            names = ", ".join(sorted(tier.list(folder).keys() - {layout.GOING})[:NAMES_SHOWN])
            left[at] = reasons.get(at) or f"its folder stays, with {names or 'nothing in it'}"
    return left


def _is_there(tier: Tier, name: str) -> bool:
    folder, _, own = name.rpartition("/")
    return own in tier.list(folder)


def _id_of(row: Mapping[str, Any]) -> GenerationId:
    return GenerationId(step=row["step"], incarnation=row["incarnation"])


def swept_view(data: Mapping[str, Any]) -> RenderableType:
    verb, rows = ("would delete" if data["dry_run"] else "deleted"), data["deleted"]
    parts: list[RenderableType] = []
    if rows:
        table = new_table("step", "incarnation", "size", "why", right=("step", "size"))
        for row in rows:
            table.add_row(str(row["step"]), row["incarnation"], size(row["bytes"]), row["why"])
        parts += [table, Text()]
    parts += [Text(f"step {one['step']} is DAMAGED: {clean(one['why'])}", style="red") for one in data["damaged"]]
    parts += [
        Text(f"step {one['step']} ({one['incarnation']}) could not be deleted: {clean(one['why'])}", style="red")
        for one in data["stuck"]
    ]
    freed = size(sum(row["bytes"] for row in rows))
    litter = f" and {plural(len(data['litter']), 'file')} of litter" if data["litter"] else ""
    parts.append(Text(f"{verb} {plural(len(rows), 'generation')}, {freed}{litter}", style="bold"))
    return Group(*parts)


def _going(tier: Tier, at: GenerationId, why: str) -> dict[str, Any]:
    return {**named(at), "bytes": weight(tier, at), "why": why}


def _litter(tier: Tier, folder: str) -> list[str]:
    """Records that were never finished, and probes of processes that died."""
    names = (name for name, length in tier.list(folder).items() if length is not None)
    return sorted(f"{folder}/{name}".lstrip("/") for name in names if layout.is_litter(folder, name))


def _verify_newest(
    tier: Tier, survey: Survey, workers: ThreadPoolExecutor, writer: RunWriter | None
) -> list[dict[str, Any]]:
    """Read until the lineage has a verified generation that nothing unread is newer than; tells what is damaged."""
    told = []
    for at in restore.lineage(survey).chain:
        one = survey.generations.get(at)
        if one is None or one.damaged or one.unfit:
            continue
        if one.verified:
            break
        with progress(f"checking step {at.step}", one.bytes) as seen:
            findings = damage(Watched(tier, seen), one, workers)
        survey.generations[at] = judged(one, findings)
        if writer:
            writer.conclude(one, findings)
        if not findings:
            break
        told.append({**named(at), "why": restore.told(findings)})
    return told


def damage(
    tier: Tier, generation: Generation, workers: ThreadPoolExecutor, layers: Collection[str] = LAYERS
) -> list[Finding]:
    """What these layers of the guard find in a generation, read past the page cache."""
    arena = Arena(WORKERS * layout.CHUNK_BYTES, layout.CHUNK_BYTES)
    findings = read_all(tier, generation, arena, workers, layers=layers)
    there = tier.list(layout.folder(generation.id))
    # Deleted by a trainer's retention while it was read here: that is no damage.
    return [] if not there or layout.GOING in there else findings

"""`lastgood gc`: finish interrupted deletions; delete what is damaged or not kept. Holds no rule of retention.

A dry run takes the same steps without a writer: it takes no lock and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..engine.arena import Arena
from ..errors import Cancelled, Damaged, LastgoodError, NothingGood, Unavailable, Unfit
from ..format import commit, layout
from ..format.commit import Survey
from ..limits import CHUNK_BYTES, WORKERS
from ..policy import restore
from ..policy.retention import KEEP, Keep, surplus
from ..ports import Tier
from ..records import LAYERS, Finding, Generation, GenerationId, intact, judged
from ..run import access
from ..run.kept import require_not_deleted
from ..run.late_commit import sealed_by_all
from ..run.reader import read_all
from ..run.watched import Watched
from ..run.writer import RunWriter
from ..units import size
from .answer import Answer
from .arguments import Json, Run, TakeOver
from .listing import bytes_on_disk
from .terminal import clean, progress
from .texts import id_of, named, new_table, plural
from .writing import for_command

MEANWHILE = (
    "A job that has it open deletes what its Checkpointer(retention=...) does not keep. `lastgood gc RUN --dry-run` "
    "shows what this command would delete, and changes nothing."
)
NAMES_SHOWN = 3
"""names that are shown of the files left in the folder of a generation that could not be deleted"""


def gc(
    run: Run,
    keep_last: Annotated[
        int | None,
        typer.Option(min=1, help="Keep the newest N verified generations; delete older ones.", show_default=False),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Keep the first of every N steps too; without --keep-last also the newest 3.",
            show_default=False,
        ),
    ] = None,
    damaged: Annotated[bool, typer.Option("--damaged", help="Delete what is damaged or lost, too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; show what would be deleted.")] = False,
    take_over: TakeOver = False,
    as_json: Json = False,
) -> Answer:
    """Finish deletions and clear saves that did not end; with --keep-*, delete older generations.

    The newest verified generation always stays, and so do milestones that are not damaged. With --keep-* or --damaged,
    the newest generation is read and checked first, unless it was verified before.
    """
    keep = Keep(last=keep_last or KEEP.last, every=keep_every) if keep_last or keep_every else None
    data = swept(run, keep, damaged, dry_run, take_over)
    codes = {"damaged": Damaged.exit_code, "stuck": Unavailable.exit_code, "not_good": Unfit.exit_code}
    code = next((code for name, code in codes.items() if data[name]), 0)
    return Answer(data, swept_view(data), code)


def swept(run: str, keep: Keep | None, damaged: bool, dry_run: bool, take_over: bool = False) -> dict[str, Any]:
    """Finish deletions and clear interrupted saves. Returns what was deleted, or with `dry_run` what would be.

    `keep`: also delete generations that this retention does not keep. `damaged`: also delete those that are damaged or
    lost; raises NothingGood if there are such ones and no generation of the lineage is verified. Raises what opening
    and reading raise.
    """
    tier: Tier = access.for_reading(run)  # refuses a path that is no run: opening it for writing would make it one
    with ExitStack() as open_run:
        workers = open_run.enter_context(ThreadPoolExecutor(WORKERS))
        if not dry_run:
            tier = open_run.enter_context(for_command(run, take_over, MEANWHILE))
        survey = commit.survey(tier)
        lost = survey.incomplete - restore.never_committed(survey)
        rows = [_going(tier, at, "an unfinished deletion") for at in sorted(survey.going)]
        rows += [_going(tier, at, "never committed") for at in sorted(survey.incomplete - lost)]
        litter = [name for folder in ("", "incarnations") for name in _litter(tier, folder)]
        for at in sorted({*survey.generations, *survey.broken, *lost} - survey.unread.keys()):
            litter += _litter(tier, layout.folder(at))
        writer = None if dry_run else RunWriter(tier, workers)  # opening deletes all of these, or commits one late
        late = sealed_by_all(tier, survey, survey.run or "") if dry_run else None
        kept = {*(writer.survey.generations if writer else ()), *([late[0].id] if late else ())}
        rows = [row for row in rows if id_of(row) not in kept]
        if writer:
            survey = writer.survey
            lost &= survey.incomplete
            writer.marks.point()
        found = _verify_newest(tier, survey, workers, writer) if keep or damaged else []
        doomed = _doomed(survey, lost, keep, damaged)
        rows += [_going(tier, at, doomed[at]) for at in sorted(doomed)]
        reasons = _retired(tier, sorted(doomed)) if writer else {}
        stuck = [{**named(at), "why": why} for at, why in _left(tier, rows, reasons).items()] if writer else []
        litter = [name for name in litter if not writer or not _exists(tier, name)]
    stuck_ids = {id_of(one) for one in stuck}
    rows = [row for row in rows if id_of(row) not in stuck_ids]
    bad = [{**named(at), "why": restore.summary(findings)} for at, findings in found if not intact(findings)]
    unfit = [{**named(at), "why": restore.summary(findings)} for at, findings in found if intact(findings)]
    done = {"place": tier.place, "dry_run": dry_run, "deleted": rows, "litter": litter}
    return {**done, "damaged": bad, "not_good": unfit, "stuck": stuck}


def _doomed(survey: Survey, lost: set[GenerationId], keep: Keep | None, damaged: bool) -> dict[GenerationId, str]:
    """The committed generations to delete, and why. Raises NothingGood."""
    chain = [survey.generations[at] for at in restore.lineage(survey).chain if at in survey.generations]
    doomed: dict[GenerationId, str] = {}
    if damaged:
        doomed |= {at: "damaged" for at, one in survey.generations.items() if one.damaged}
        doomed |= {at: "damaged" for at, error in survey.broken.items() if isinstance(error, Damaged)}
        doomed |= dict.fromkeys(lost, "lost")
        if doomed and not any(one.good for one in chain):
            raise NothingGood(
                "no generation of the lineage is verified, so the damaged ones are all there is",
                safe="No committed generation was deleted.",
                todo="Save or import a good one first.",
            )
    if keep:
        abandoned = [one for one in survey.generations.values() if one not in chain]
        doomed |= dict.fromkeys(surplus(keep, chain, abandoned), "not kept")
    return doomed


def _retired(tier: Tier, going: Sequence[GenerationId]) -> dict[GenerationId, str]:
    """Delete these generations. Returns for each one that could not be deleted the reason."""
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
    """Generations of these rows whose folder still exists, and why: the error, or the files in it if there was none."""
    left = {}
    for at in map(id_of, rows):
        folder = layout.folder(at)
        listing = tier.list(folder)  # an object store may go on listing a folder that is empty
        if listing or (at in reasons and _exists(tier, folder)):
            names = ", ".join(sorted(listing.keys() - {layout.GOING})[:NAMES_SHOWN])
            left[at] = reasons.get(at) or f"its folder stays, with {names or 'nothing in it'}"
    return left


def _exists(tier: Tier, name: str) -> bool:
    folder, _, own = name.rpartition("/")
    return own in tier.list(folder)


def swept_view(data: Mapping[str, Any]) -> RenderableType:
    verb, rows = ("would delete" if data["dry_run"] else "deleted"), data["deleted"]
    parts: list[RenderableType] = []
    if rows:
        table = new_table("step", "incarnation", "size", "why", right=("step", "size"))
        for row in rows:
            table.add_row(str(row["step"]), row["incarnation"], size(row["bytes"]), row["why"])
        parts += [table, Text()]
    for state, name in (("DAMAGED", "damaged"), ("NOT GOOD", "not_good")):
        parts += [Text(f"step {one['step']} is {state}: {clean(one['why'])}", style="red") for one in data[name]]
    parts += [
        Text(f"step {one['step']} ({one['incarnation']}) could not be deleted: {clean(one['why'])}", style="red")
        for one in data["stuck"]
    ]
    freed = size(sum(row["bytes"] for row in rows))
    litter = f" and {plural(len(data['litter']), 'file')} of litter" if data["litter"] else ""
    parts.append(Text(f"{verb} {plural(len(rows), 'generation')}, {freed}{litter}", style="bold"))
    return Group(*parts)


def _going(tier: Tier, at: GenerationId, why: str) -> dict[str, Any]:
    return {**named(at), "bytes": bytes_on_disk(tier, at), "why": why}


def _litter(tier: Tier, folder: str) -> list[str]:
    """Unfinished records, and probe files of processes that died."""
    names = (name for name, length in tier.list(folder).items() if length is not None)
    return sorted(f"{folder}/{name}".lstrip("/") for name in names if layout.is_litter(folder, name))


def _verify_newest(
    tier: Tier, survey: Survey, workers: ThreadPoolExecutor, writer: RunWriter | None
) -> list[tuple[GenerationId, list[Finding]]]:
    """Verify generations of the lineage, newest first, until one is good. Returns each that is not, and why."""
    bad = []
    for at in restore.lineage(survey).chain:
        one = survey.generations.get(at)
        if one is None or one.damaged or one.unfit:
            continue
        if one.verified:
            break
        try:
            with progress(f"checking step {at.step}", one.bytes) as count_bytes:
                findings = damage(Watched(tier, count_bytes), one, workers)
        except Cancelled:  # training has deleted it since it was listed
            del survey.generations[at]
            continue
        survey.generations[at] = judged(one, findings)
        if writer:
            writer.conclude(one, findings)
        if not findings:
            break
        bad.append((at, findings))
    return bad


def damage(
    tier: Tier, generation: Generation, workers: ThreadPoolExecutor, layers: Collection[str] = LAYERS
) -> list[Finding]:
    """Read a generation past the page cache. Returns what these layers of the guard find in it.

    Raises Cancelled if a trainer has deleted it meanwhile.
    """
    arena = Arena(WORKERS * CHUNK_BYTES, CHUNK_BYTES)
    findings = read_all(tier, generation, arena, workers, layers=layers)
    if findings:
        require_not_deleted(tier, generation.id)
    return findings

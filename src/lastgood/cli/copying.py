"""`lastgood copy`: generations of a run, from one place to another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, cast

import typer
from rich.text import Text

from ..engine.arena import Arena
from ..errors import Cancelled, Damaged, LastgoodError, NotARun, Refused, Unreadable
from ..format import commit
from ..limits import CHUNK_BYTES, WORKERS
from ..ports import Mendable, Tier
from ..records import Generation
from ..run import access, copying, paths
from ..run.kept import kept
from ..units import size
from .answer import Answer
from .arguments import Json, TakeOver, step_of
from .selection import find
from .terminal import progress
from .texts import named, plural


def copy(
    source: Annotated[str, typer.Argument(metavar="RUN", help="Where the run is.", show_default=False)],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The other place of it.", show_default=False)],
    steps: Annotated[
        list[str] | None,
        typer.Argument(metavar="STEP...", parser=step_of, help="Only these; without them, all.", show_default=False),
    ] = None,
    take_over: TakeOver = False,
    as_json: Json = False,
) -> Answer:
    """Copy generations between any two places. Each is read again at the target before it counts as copied.

    What was verified there already is left, and not read again: `lastgood scrub TARGET` finds new damage, which the
    next copy mends. Exit code 4 where a generation is damaged in RUN; the others are copied.
    """
    data = copied(source, target, steps or [], take_over)
    lines = [f"step {row['step']} ({row['incarnation']}): {row['why']}" for row in data["failed"]]
    lines.append(
        f"{plural(len(data['copied']), 'generation')} copied to {data['target']} and verified there, "
        f"{size(data['bytes'])}; {len(data['present'])} were there already"
    )
    return Answer(data, Text("\n".join(lines)), 4 if data["failed"] else 0)


def _opened(source: str, target: str) -> Tier:
    """The run, for reading. Raises what `access.for_reading` raises, which says so where TARGET is the run."""
    try:
        return access.for_reading(source)
    except NotARun as error:
        try:
            access.for_reading(target)
        except LastgoodError:
            raise error from None
        todo = f"RUN comes first, then TARGET. {error.todo}"
        raise NotARun(error.what, safe=error.safe, todo=todo) from error


def _require_apart(source: str, target: str) -> None:
    """Raise Refused for a target that is the run itself, or lies in it."""
    run, other = paths.parsed(source), paths.parsed(target)
    if paths.lies_in(other, run):
        raise Refused(
            f"{target} is {'the run itself' if paths.lies_in(run, other) else f'a folder in the run {source}'}",
            safe="Nothing was copied.",
            todo="Name another place.",
        )


def copied(source: str, target: str, steps: list[str], take_over: bool) -> dict[str, Any]:
    """Copy the generations that `steps` name, or all. Raises what opening, reading and writing raise."""
    tier = _opened(source, target)
    _require_apart(source, target)
    place = access.many_files(target)
    survey = commit.survey(tier)
    wanted = [find(survey, one) for one in steps] if steps else [*survey.generations, *survey.broken]
    failed = [{**named(at), "why": survey.broken[at].what} for at in wanted if at in survey.broken]
    chosen = [survey.generations[at] for at in sorted(set(wanted)) if at in survey.generations]
    present, done = list[Generation](), list[Generation]()
    with (
        access.for_writing(place, "atomic_dirsync", take_over=take_over) as to,
        ThreadPoolExecutor(WORKERS, "lastgood-copy") as workers,
        progress("copying", sum(one.bytes for one in chosen)) as count_bytes,
    ):
        copying.adopt_run(tier, to, survey)
        how = copying.Copying(Arena(WORKERS * CHUNK_BYTES, CHUNK_BYTES), workers, count_bytes, plain=True)
        for one in chosen:  # the oldest first: what is there at any time is a beginning of the run
            if copying.holds(to, one):
                present.append(one)
                count_bytes(one.bytes)
                continue
            try:
                with kept(tier, one.id) as read:
                    copying.complete(cast(Mendable, to), [read], one, how)
            except Unreadable:
                raise
            except Cancelled:
                if steps or (one is chosen[-1] and not (present or done or failed)):  # guard: empty-copy-is-no-success
                    raise
                continue  # training has deleted it since it was listed
            except Damaged as error:
                failed.append({**named(one.id), "why": error.what})
                continue
            done.append(one)
        copying.copy_incarnations(tier, to)
    return {
        "place": tier.place,
        "target": to.place,
        "copied": [named(one.id) for one in done],
        "present": [named(one.id) for one in present],
        "failed": failed,
        "bytes": sum(one.bytes for one in done),
    }

"""Puts a generation into the memory of a node before a training process needs it there, for a node in reserve.

Invariants
  1. What only this memory has is never deleted: a generation goes only if the place from which is copied has it too.
  2. COMMIT comes after the files, which are read again before they count, as in every copy (copying.py).
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec

from ..engine.arena import Arena
from ..errors import Damaged, Refused
from ..format import commit, layout
from ..limits import CHUNK_BYTES, WORKERS
from ..policy.retention import Keep
from ..ports import Mendable, Tier
from ..records import Generation, GenerationId, intact
from . import access, agent_link, copying, memory_place, paths, reader
from .agent_messages import AgentSpec, CopyTo
from .file_copies import Copying
from .watched import CountBytes


def stage(
    source: Tier,
    survey: commit.Survey,
    run: str,
    generation: Generation,
    of: Collection[int] | None = None,
    count_bytes: CountBytes = lambda count: None,
) -> str:
    """Copy a generation into this node's memory of a run. Returns the folder.

    `source`: where it is read. `survey`: of that place. `run`: the last place of the run, which names its memory. `of`:
    the ranks whose files are copied; default None: all. `count_bytes`: called with the bytes of each chunk that is
    done. A training process that opens the memory meanwhile goes first. Raises Refused if an agent has the memory
    already, and Cancelled if a training process has come; RunLocked, NoSpace, NotWritable, Damaged, TierDown.
    """
    keep = CopyTo(url=paths.parsed(run).url, keep=Keep())  # an agent would copy there what is only in memory
    url = memory_place.url_of(run)
    folder = paths.parsed(url).root
    _require_ranks(generation, of)
    _require_no_agent(folder, run)
    memory_place.make(folder)
    # As an agent does, so that a start asks this process to give way.
    with (
        ThreadPoolExecutor(WORKERS, "lastgood-stage") as workers,
        access.for_writing(url, "atomic_dirsync", agent_order=survey.order) as opened,
    ):
        target, arena = cast(Mendable, opened), Arena(WORKERS * CHUNK_BYTES, CHUNK_BYTES)
        how = Copying(arena, workers, count_bytes, stop=access.Wanted(folder))
        copying.adopt_run(source, target, survey)
        copying.copy_incarnations(source, target)
        if agent_link.read_spec(folder) is None:  # guard: staging-keeps-what-agents-know
            spec = AgentSpec(format=layout.FORMAT, places=[keep], order=survey.order, spill=None)
            agent_link.write_spec(target, spec)
        here = commit.survey(target)
        _retire(target, {*here.incomplete, *here.going} - {generation.id}, survey)  # of a staging that was interrupted
        if of is None:
            copying.complete(target, [source], generation, how)
        else:
            _copy_part(source, target, generation, of, how)
        _retire(target, here.generations.keys() - {generation.id}, survey)
    return folder


def _retire(target: Tier, ats: Collection[GenerationId], there: commit.Survey) -> None:
    """Delete these generations here, if the other place has them. A file may be all that is left of another job's."""
    for at in ats:
        if at in there.generations and there.generations[at].restorable:  # guard: staging-keeps-what-is-only-here
            commit.retire(target, at)


def _require_ranks(generation: Generation, of: Collection[int] | None) -> None:
    lacking = sorted(set(of or ()) - {one.rank for one in generation.commit.seals})
    if lacking:
        raise Refused(
            f"{generation.id} has no files of rank {lacking[0]}: {len(generation.commit.seals)} ranks have written it",
            safe="Nothing was copied.",
            todo="Give ranks from 0 on, for example --ranks 0-7.",
        )


def _require_no_agent(folder: str, run: str) -> None:
    try:
        agent_link.connected(folder).close()
    except OSError:
        return
    raise Refused(
        f"{folder} is in use: an agent has it",
        safe="Nothing was touched.",
        todo=f"The next start reads from it what it has. To stage anew, first: lastgood agent stop {run}",
    )


def _copy_part(source: Tier, target: Mendable, generation: Generation, of: Collection[int], how: Copying) -> None:
    seals = [one for one in generation.commit.seals if one.rank in of]
    copying.copy_files(target, [source], generation, of, how)
    part = msgspec.structs.replace(generation, commit=msgspec.structs.replace(generation.commit, seals=seals))
    commit.copy_records([source], target, part)
    findings = reader.read_all(target, generation, how.arena, how.workers, how.stop, of=of)
    commit.mark(target, generation, findings)
    if not intact(findings):
        raise Damaged(f"{generation.id} does not read back in {target.place}: {findings[0].what}")

"""Puts a generation into the memory of a node before a training process needs it there, for a node in reserve.

Invariants
  1. What only this memory has is never deleted: a generation goes only if the place from which is copied has it too, or
     if a supervisor has copied it from there.
  2. COMMIT comes after the files, which are read again before they count, as in every copy (copying.py).
  3. Nothing is copied unless memory has room for all of it. What other processes take meanwhile ends the copy, and
     what is there of it goes.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec

from ..engine.arena import Arena
from ..errors import Damaged, NoSpace, Refused
from ..format import commit, layout
from ..io import memory_files, os_errors
from ..io.reused_files import ReusedFiles
from ..limits import CHUNK_BYTES, WORKERS
from ..policy.retention import Keep
from ..ports import Mendable, Tier
from ..records import Generation, intact
from ..units import size
from . import access, agent_link, copying, memory_place, paths, reader, staged
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
    held: staged.Held | None = None,
) -> str:
    """Copy a generation into this node's memory of a run. Returns the folder.

    `source`: where it is read. `survey`: of that place. `run`: the last place of the run, which names its memory. `of`:
    the ranks whose files are copied; default None: all. `count_bytes`: called with the bytes of each chunk that is
    done. `held`: of the supervisor that stages; default None: a person does, and what is there stays until a start
    uses it. A training process that opens the memory meanwhile goes first. Raises Refused if an agent has the memory
    already, NoSpace if memory has too little room, and Cancelled if a training process has come; RunLocked,
    NotWritable, Damaged, TierDown.
    """
    url = memory_place.url_of(run)
    folder = paths.parsed(url).root
    _require_ranks(generation, of)
    _require_no_agent(folder, run)
    _require_room(source, generation, of, folder)
    made = not os.path.isdir(folder)
    memory_place.make(folder)
    # As an agent does, so that a start asks this process to give way.
    with (
        ThreadPoolExecutor(WORKERS, "lastgood-stage") as workers,
        access.for_writing(url, "atomic_dirsync", agent_order=survey.order) as opened,
    ):
        target, arena = cast(Mendable, opened), Arena(WORKERS * CHUNK_BYTES, CHUNK_BYTES)
        how = Copying(arena, workers, count_bytes, stop=access.Wanted(folder))
        here = commit.survey(target)
        is_new = generation.id not in here.generations
        copies = {at for at, one in survey.generations.items() if one.restorable}
        older = here.generations.keys() - {generation.id}
        if held is None:
            staged.forget(folder)  # guard: staged-by-hand-stays
            older &= copies  # guard: staging-keeps-what-is-only-here
        else:
            noted = held.note([generation.id] * is_new, made)  # guard: supervisor-notes-only-its-own
            older, copies = older & noted, copies | noted  # guard: supervisor-replaces-only-its-own
        _make_run(source, target, survey, run)
        interrupted = {*here.incomplete, *here.going} - {generation.id}
        for at in interrupted & copies:
            commit.retire(target, at)
        try:
            if of is None:
                copying.complete(target, [source], generation, how)
            else:
                _copy_part(source, target, generation, of, how)
        except NoSpace:
            if is_new:
                commit.retire(target, generation.id)  # guard: half-a-copy-frees-its-memory
                ReusedFiles(folder).drop()
            raise
        for at in older:
            commit.retire(target, at)
    return folder


def _make_run(source: Tier, target: Mendable, survey: commit.Survey, run: str) -> None:
    """Make the memory a place of the run, with what an agent needs that finds a newer save there."""
    copying.adopt_run(source, target, survey)
    copying.copy_incarnations(source, target)
    if agent_link.read_spec(paths.parsed(target.place).root) is None:  # guard: staging-keeps-what-agents-know
        keep = CopyTo(url=paths.parsed(run).url, keep=Keep())
        spec = AgentSpec(format=layout.FORMAT, places=[keep], order=survey.order, spill=None)
        agent_link.write_spec(target, spec)


def _require_ranks(generation: Generation, of: Collection[int] | None) -> None:
    lacking = sorted(set(of or ()) - {one.rank for one in generation.commit.seals})
    if lacking:
        raise Refused(
            f"{generation.id} has no files of rank {lacking[0]}: {len(generation.commit.seals)} ranks have written it",
            safe="Nothing was copied.",
            todo="Give ranks from 0 on, for example --ranks 0-7.",
        )


def _require_room(source: Tier, generation: Generation, of: Collection[int] | None, folder: str) -> None:
    """Raise NoSpace unless what is to be copied fits into memory, with the margin that every writer to it leaves."""
    inside = layout.folder(generation.id)
    ranks = [one.rank for one in generation.commit.seals if of is None or one.rank in of]
    prefixes = tuple(f"{layout.rank_folder(rank)}." for rank in ranks)
    here = access.directory_tier(paths.Place(folder, "memory"), "atomic_dirsync").list(inside)
    there = {name: length or 0 for name, length in source.list(inside).items() if name.startswith(prefixes)}
    needed = sum(length for name, length in there.items() if here.get(name) != length)
    parent = folder
    while not os.path.isdir(parent):
        parent = os.path.dirname(parent)
    with os_errors.translated(parent):
        if needed > memory_files.free_bytes(parent):
            ReusedFiles(folder).drop()
        free = memory_files.free_bytes(parent)
    if needed > free:  # guard: staging-needs-free-memory
        raise NoSpace(
            f"step {generation.step} takes {size(needed)} in the memory of this node, and {size(free)} may be taken, "
            "with what is left for the job",
            safe="Nothing was copied.",
            todo="Give the node more memory, in a container also a larger /dev/shm, or stage by hand what some ranks "
            "wrote: lastgood agent stage RUN --ranks A-B. `lastgood agent status` lists what takes memory.",
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
    if findings or generation.verified:  # guard: staged-part-verifies-nothing
        commit.mark(target, generation, findings)
    else:
        target.delete(f"{layout.folder(generation.id)}/{layout.DAMAGED}")  # guard: staged-anew-is-not-damaged
    if not intact(findings):
        raise Damaged(f"{generation.id} does not read back in {target.place}: {findings[0].what}")

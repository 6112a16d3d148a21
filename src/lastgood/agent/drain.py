"""Copies what is in memory to the places below, for a job whose training processes have ended.

A mover: which generations are to be copied is decided in policy/places.py.

Invariants
  1. Nothing is deleted anywhere, and no place is made: a place that does not exist any more is reported.
  2. A place is opened for writing only while no other process has it open, so no running job is disturbed.
  3. Of several nodes each copies the files that its ranks wrote. COMMIT is created by the one that finds the manifests
     of all ranks there; a manifest is created after the files that it describes are durable.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from ..engine.arena import Arena
from ..errors import Cancelled, Damaged, LastgoodError, Refused
from ..format import commit, layout, sealed
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS, WORKERS
from ..policy.places import lacking, merged
from ..ports import Mendable, Tier
from ..records import Generation, intact
from ..run import access, copying
from ..run.agent_link import AgentSpec, CopyTo
from ..run.reader import read_all


def drained(memory: Tier, spec: AgentSpec, stop: Callable[[], bool]) -> list[str]:
    """Copy what the places lack. Returns what is still missing, each with the reason; empty if nothing is.

    `memory`: the tier in memory. `stop`: polled before each chunk; once it is true, Cancelled is raised.
    """
    missing = list[str]()
    for place in spec.places:
        if stop():
            raise Cancelled("the copies were stopped")
        try:
            missing += _drained_to(place, memory, spec.order, stop)
        except Cancelled:
            raise
        except (LastgoodError, OSError) as error:
            missing.append(f"{place.url}: {type(error).__name__}: {getattr(error, 'what', error)}")
    return missing


def _drained_to(place: CopyTo, memory: Tier, order: int, stop: Callable[[], bool]) -> list[str]:
    here, there = commit.survey(memory), commit.survey(access.for_reading(place.url))
    run = copying.run_of(here)
    if run is None:
        return []
    if there.run not in (None, run):
        raise Refused(f"{place.url} holds another run ({there.run}) than memory ({run}) now", safe="", todo="")
    wanted = lacking(here, there, merged([here, there]), place.keep)
    # Of several nodes one may lack the newest COMMIT, so that each copies its part of all generations.
    wanted += [
        one
        for at, one in sorted(here.generations.items(), reverse=True)
        if one.restorable and at not in there.generations and one not in wanted and not _is_whole(memory, one)
    ]
    if not wanted:
        return []
    order = max(order, here.order)
    missing = list[str]()
    with (
        access.for_writing(place.url, "atomic_dirsync", take_over=False, own_claims=order) as tier,
        ThreadPoolExecutor(WORKERS, "lastgood-drain") as workers,
    ):
        target = cast(Mendable, tier)
        how = copying.Copying(Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), workers, stop=stop)
        copying.copy_incarnations(memory, target)
        for one in wanted:
            if lacks := _copied(memory, target, one, how):
                missing.append(f"{place.url}: {one.id} lacks {lacks}, which other nodes have")
    return missing


def _is_whole(memory: Tier, one: Generation) -> bool:
    """Whether this node has the files of all ranks."""
    here = memory.list(layout.folder(one.id))
    return all(seal.manifest in here for seal in one.commit.seals)


def _copied(memory: Tier, target: Mendable, one: Generation, how: copying.Copying) -> str:
    """Copy the files of a generation that this node has. Returns which files of other nodes are missing, or ""."""
    if _is_whole(memory, one):
        copying.complete(target, [memory], one, how)
        return ""
    folder = layout.folder(one.id)
    here = memory.list(folder)
    mine = [seal for seal in one.commit.seals if seal.manifest in here]
    ranks = [seal.rank for seal in mine]
    copying.copy_files(target, [memory], one, ranks, how)
    for seal in mine:
        target.put_new(f"{folder}/{seal.manifest}", sealed.record_bytes([memory], one, seal))
    there = target.list(folder)
    lacks = [seal.manifest for seal in one.commit.seals if seal.manifest not in there]
    if lacks:  # guard: commit-copied-after-all-nodes
        return ", ".join(lacks[:3]) + (f" and {len(lacks) - 3} more" if len(lacks) > 3 else "")
    commit.copy_records([memory, target], target, one)
    findings = read_all(target, one, how.arena, how.workers, how.stop, of=ranks)
    if not intact(findings):
        raise Damaged(f"the copy of {one.id} does not read back: {findings[0].what}")
    return ""

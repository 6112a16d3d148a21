"""Commits in a place below the newest save in memory that all ranks of several nodes had sealed when the job was lost.

Where the agents of the nodes do not listen to each other (copies=1, no parity), none of them sees the seals of all
ranks. A place below that all nodes reach does:

    agent of the coordinator's node    copies INTENT of each such save to the place, and the files of its ranks
    agents of the other nodes          find INTENT there, and copy the files of their ranks
    who finds the seals of all ranks   creates COMMIT there

Invariants
  1. Nothing newer than the save is known, here or in the place; otherwise it is left alone.
  2. COMMIT has the bytes that the next opening would create in memory: those of INTENT with the seals of all ranks.
  3. Nothing is copied for a run whose nodes have whole generations: no other node could complete a save there.
  4. The place is written under its lock, and only while no other process has it open. Nothing is deleted there but
     INTENT, once COMMIT is beside it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import cast

import msgspec

from .. import reporting
from ..engine.arena import Arena
from ..engine.read_file import RankFiles
from ..errors import Cancelled, LastgoodError, NotARun, RunLocked
from ..format import commit, intents, layout, sealed
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS, WORKERS
from ..policy import restore
from ..ports import Mendable, Stop, Tier
from ..records import Generation, GenerationId
from ..run import access, copying
from ..run.agent_messages import AgentSpec
from ..run.file_copies import reads_back
from ..run.late_commit import HELD
from .drain import giving_way, uncommitted

Intents = Mapping[GenerationId, intents.Intent]


def completed(memory: Mendable, spec: AgentSpec, stop: Stop) -> str:
    """Commit what all ranks had sealed in the places below. No process has the run open in memory.

    Returns why it is to be tried again, or "". Raises Cancelled once `stop()` is true.
    """
    found = [_completed_in(one.url, memory, spec.order, stop) for one in spec.places]
    return HELD if HELD in found else next(filter(None, found), "")  # guard: late-copy-waits-for-its-turn


def committed_below(memory: Tier, spec: AgentSpec) -> list[str]:
    """The names of the folders of saves that have no COMMIT in memory, and one in a place below that can be read."""
    found, left = list[str](), uncommitted(memory)
    for place in spec.places if left else []:
        with contextlib.suppress(LastgoodError):
            below = access.for_reading(place.url)
            found.extend(name for name in left if layout.COMMIT in below.list(f"gen/{name}"))
    return found


def given_up(memory: Tier, below: Collection[str]) -> list[str]:
    """The names of the folders of saves that ranks have sealed, and that nobody has committed; they are reported.

    `below`: as `committed_below`. The memory is to be removed.
    """
    left = [name for name in uncommitted(memory) if name not in below]
    if left:
        reporting.warning(f"{memory.place}: removed with saves that have no COMMIT: {left}")
    return left


def _completed_in(url: str, memory: Mendable, order: int, stop: Stop) -> str:
    gives_way = giving_way(url, stop)
    try:
        here = commit.survey(memory)
        mine = _sealed(memory, here)
        if not mine:
            return ""
        reading = access.for_reading(url)
        there = commit.survey(reading)
        found = _wanted(memory, here, reading, there, mine)
        if not found:
            known = max((*here.generations, *there.generations))
            waiting = [at for at in mine if at > known and there.run == here.run]
            return f"{url}: step {max(waiting).step} lacks {layout.INTENT} of another node" if waiting else ""
        waits = list[str]()
        with access.for_writing(url, "atomic_dirsync", take_over=False, agent_order=max(order, here.order)) as target:
            copying.copy_incarnations(memory, target)
            for at, intent in found.items():
                if lacks := _copied(memory, cast(Mendable, target), at, intent, gives_way):
                    waits.append(f"{url}: step {at.step} lacks {lacks}, which other nodes have")
                else:
                    return ""  # those that are left are older
        return waits[0]
    except Cancelled:
        if stop():
            raise
        return HELD
    except RunLocked:  # most often by the agent of another node, which copies its part
        return HELD
    except NotARun:  # it was removed: drain.py says so
        return ""
    except (LastgoodError, OSError) as error:
        return f"{url}: {type(error).__name__}: {error}"


def _wanted(memory: Tier, here: commit.Survey, below: Tier, there: commit.Survey, mine: Set[GenerationId]) -> Intents:
    """The saves that may be committed there, the newest first, each with its intent. `mine`: as `_sealed`."""
    run, found = copying.run_of(here), dict[GenerationId, intents.Intent]()
    if run is None or there.run != run:
        return {}
    for tier, survey in ((below, there), (memory, here)):
        for at in survey.incomplete & mine:
            listing = survey.listings[layout.folder(at).partition("/")[2]]
            if (one := intents.find(tier, at, run, listing)) is not None:
                found[at] = one
    known = replace(  # guard: late-copy-newer-than-all-known
        here,
        generations=there.generations | here.generations,
        broken=there.broken | here.broken,
        witnessed=there.witnessed | here.witnessed,
        incarnations=there.incarnations | here.incarnations,
        order=max(there.order, here.order),
    )
    return {at: found[at] for at in restore.under_way(known, {at: one.record for at, one in found.items()})}


def _sealed(memory: Tier, here: commit.Survey) -> set[GenerationId]:
    """The saves of several nodes that ranks of this one have sealed, and that have no COMMIT here."""
    if all(copying.is_whole(memory, one) for one in here.generations.values()):
        return set()  # guard: half-save-of-one-node-stays
    found = {layout.parse_folder(name) for name in uncommitted(memory)}
    return {at for at in here.incomplete if at in found}


def _copied(memory: Mendable, target: Mendable, at: GenerationId, intent: intents.Intent, stop: Stop) -> str:
    """Copy the part of this node, and create COMMIT if that was the last one. Returns what is missing, or ""."""
    folder, mine = layout.folder(at), intents.seals_of(memory, at)
    if layout.INTENT not in target.list(folder):
        intents.write(target, intent)
    part = Generation(commit=msgspec.structs.replace(intent.record, seals=mine), root="")
    with ThreadPoolExecutor(WORKERS, "lastgood-drain") as workers:
        how = copying.Copying(Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), workers, stop=stop)
        copying.copy_files(target, [memory], part, None, how)
        for seal in mine:
            target.put_new(f"{folder}/{seal.manifest}", sealed.record_bytes([memory], part, seal))
        seals = intents.seals_of(target, at)
        record = intent.sealed(seals)
        if record is None:
            missing = sorted({*range(intent.record.world.ranks)} - {one.rank for one in seals})
            return f"the files of rank {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
        whole = Generation(commit=record, root="")
        for seal in seals:  # who wrote it may have been killed before it was durable
            target.put_new(f"{folder}/{seal.manifest}", sealed.record_bytes([target], whole, seal))
        for manifest in (sealed.sealed_record(target, whole, one) for one in seals):
            files = RankFiles(target, folder, manifest)
            # guard: late-copy-read-before-commit
            if bad := [one.name for one in manifest.blobs if not reads_back(files, one, how)]:
                return f"a whole copy of {bad[0]}"
    commit.publish(target, record, intent.algorithm)
    with contextlib.suppress(LastgoodError):  # beside a COMMIT it has no effect
        intents.withdraw(target, at)
    return ""

"""Copies what is in memory to the places below, for a job whose training processes have ended.

A mover: which generations are to be copied is decided in policy/places.py.

Invariants
  1. Nothing is deleted anywhere, and no place is made: a place that does not exist any more is reported.
  2. A place is opened for writing only while no other process has it open, so no running job is disturbed.
  3. Memory is given up for a place where the run is not any more only if that place had all that is in memory, when it
     could be read last.
  4. Of several nodes each copies the files that its ranks wrote. COMMIT is created by the one that finds the manifests
     of all ranks there; a manifest is created after the files that it describes are durable. It reads the files of all
     ranks there, and marks the copy.
  5. What a rewind has left behind is copied nowhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, cast

from .. import reporting
from ..engine.arena import Arena
from ..errors import Cancelled, Damaged, LastgoodError, NotARun
from ..format import commit, intents, layout, sealed
from ..format.pack_layout import is_manifest
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS, WORKERS
from ..policy.places import lacking, merged
from ..policy.restore import lineage
from ..policy.retention import Keep
from ..ports import Mendable, Stop, Tier, never
from ..records import Generation, GenerationId, intact
from ..run import access, agent_link, copying, pack_copies, paths
from ..run.agent_messages import AgentSpec, Copied, CopyTo
from ..run.reader import read_all
from ..units import shortened


class Drained(NamedTuple):
    """What an attempt has found. `missing`: what places lack, each with the reason. `absent`, `deleted`: as in
    `Answer`; what an absent place lacks is `missing` too."""

    missing: list[str]
    absent: list[str]
    deleted: list[str]


def committed(memory: Tier) -> list[str]:
    """The names of the folders of all generations that are committed in memory."""
    return sorted(name for name in memory.list("gen") if layout.COMMIT in memory.list(f"gen/{name}"))


def uncommitted(memory: Tier) -> list[str]:
    """The names of the folders in which ranks have sealed what nobody committed, and that are newer than all that is
    committed. After a rewind the steps of the newest branch may be lower."""
    done = committed(memory)
    newest = max(done, default="")
    folders = {name: memory.list(f"gen/{name}") for name in memory.list("gen") if name not in done}
    # One that was committed, and whose deletion was cut short, has GOING.
    found = [name for name, files in folders.items() if layout.GOING not in files and any(map(is_manifest, files))]
    newer = [name for name in found if name > newest]
    if lower := [at for name in found if name < newest and (at := layout.parse_folder(name)) is not None]:
        newer += [layout.folder(at).partition("/")[2] for at in _of_newest_branch(memory, lower)]
    return sorted(newer)


def _of_newest_branch(memory: Tier, sealed_ones: Sequence[GenerationId]) -> list[GenerationId]:
    """Those of these saves, which nobody committed, that are newer than what is committed of their own branch. Not if a
    later branch is known. Of several nodes only one has the intent: a branch of unknown order counts."""
    survey = commit.survey(memory)
    found = list[GenerationId]()
    for at in sealed_ones:
        intent = intents.find(memory, at, survey.run or "", memory.list(layout.folder(at)))
        known = survey.incarnations.get(at.incarnation)
        order = intent.record.order if intent is not None else known.order if known is not None else survey.order
        replaced = any(one.incarnation == at.incarnation and one > at for one in survey.generations)
        if order >= survey.order and not replaced:
            found.append(at)  # guard: branch-after-rewind-not-forgotten
    return found


def report_left(memory: Tier, copied: Sequence[str]) -> None:
    """A signal ends the agent: name the newest generation that is committed in memory and not among `copied`."""
    left = list[GenerationId]()
    with contextlib.suppress(LastgoodError):  # the memory may have been removed
        left = [at for name in committed(memory) if name not in copied and (at := layout.parse_folder(name))]
    if left:
        reporting.warning(
            f"a signal has ended this agent before it has found {left[-1]} in each place below. It stays in "
            f"{memory.place} until this machine stops. The next opening of the run here copies it, and so does "
            "`lastgood agent run`. `lastgood agent stop` ends an agent when everything is copied."
        )


class Notes:
    """What agents of a folder have found copied: the record COPIED, and what this one notes in it.

    `memory`: the tier in memory; of a disk nothing is noted, because it is never removed.
    """

    def __init__(self, memory: Mendable) -> None:
        self._memory, self._folder = memory, memory.place.removeprefix(paths.MEMORY)
        self._in_memory = paths.in_memory(memory.place)
        self._places = dict(agent_link.read_copied(self._folder).places)

    def of(self, url: str) -> list[str]:
        """As `Copied.places`."""
        return self._places.get(url, [])

    def note(self, url: str, folders: list[str]) -> None:
        """Note what a place has; [] if it lacks something. Raises nothing: without a record memory is kept longer."""
        if not self._in_memory or self.of(url) == folders:
            return
        self._places[url] = folders
        with contextlib.suppress(LastgoodError):
            try:
                agent_link.write_copied(self._memory, Copied(format=layout.FORMAT, places=self._places))
            except LastgoodError:
                self._memory.delete(agent_link.COPIED)  # what was noted before may not be true any more


def drained(memory: Mendable, spec: AgentSpec, here: list[str], stop: Stop) -> Drained:
    """Copy what the places lack, and note which of them lack nothing.

    `memory`: the tier in memory. `here`: what was committed there before. `stop`: polled before each chunk; once it is
    true, Cancelled is raised.
    """
    notes = Notes(memory)
    found = Drained([], [], [])
    for place in spec.places:
        if stop():
            raise Cancelled("the copies were stopped")
        gives_way = giving_way(place.url, stop)
        try:
            lacks = _drained_to(place, memory, spec.order, notes, gives_way)
            found.missing.extend(lacks)
            notes.note(place.url, [] if lacks else here)
        except Cancelled:
            if stop():
                raise
            found.missing.append(f"{place.url}: another process opens it, or it was moved away")
        except NotARun as error:
            if set(committed(memory)) <= set(notes.of(place.url)):  # guard: deleted-place-had-everything
                found.deleted.append(place.url)
            else:
                found.absent.append(place.url)
                found.missing.append(f"{place.url}: {error.what}, and it was not seen to have all that is in memory")
        except (LastgoodError, OSError) as error:
            found.missing.append(f"{place.url}: {type(error).__name__}: {error}")
    return found


def giving_way(url: str, stop: Stop) -> Stop:
    """Whether `stop()` is true, or another process waits from now on for the directory at this URL."""
    wanted: Stop = access.Wanted(url) if paths.parsed(url).kind == "directory" else never
    return lambda: stop() or wanted()  # guard: late-copy-gives-way


def _drained_to(place: CopyTo, memory: Tier, order: int, notes: Notes, stop: Stop) -> list[str]:
    here, reading = commit.survey(memory), access.for_reading(place.url)
    there = commit.survey(reading)
    run = copying.run_of(here)
    if run is None:
        return []
    if there.run not in (None, run):
        raise NotARun(f"it holds another run ({there.run}) than {memory.place} ({run}) now", safe="", todo="")
    order, missing = max(order, here.order), list[str]()
    while wanted := _wanted(memory, here, there, place.keep):
        one = wanted[0]
        notes.note(place.url, [])  # guard: lacking-place-has-not-everything
        del here.generations[one.id]  # the next one is chosen without it, for it may turn out to be unfit
        if lacks := _waits_for(memory, reading, one):
            missing.append(f"{place.url}: {one.id} lacks {lacks}, which other nodes have")
            continue
        try:
            with access.for_writing(place.url, "atomic_dirsync", take_over=False, agent_order=order) as target:
                if lacks := _copied(memory, cast(Mendable, target), one, stop):
                    missing.append(f"{place.url}: {one.id} lacks {lacks}, which other nodes have")
                else:
                    there.generations[one.id] = commit.read_generation(target, one.id, run)
                order = max(order, getattr(target, "order", 0))
        except Damaged as error:
            missing.append(f"{place.url}: {one.id}: {error.what}")
    return missing


def _wanted(memory: Tier, here: commit.Survey, there: commit.Survey, keep: Keep) -> list[Generation]:
    """What is to be copied, the newest first."""
    everywhere = merged([here, there])
    wanted, chain = lacking(here, there, everywhere, keep), lineage(everywhere).chain
    # Of several nodes one may lack the newest COMMIT, so that each copies its part of the older ones too.
    newest = max(there.generations, default=None)
    # guard: abandoned-part-not-copied
    parts = [
        one
        for at, one in sorted(here.generations.items(), reverse=True)
        if one.restorable
        and at in chain
        and at not in there.generations
        and (newest is None or at > newest)
        and not copying.is_whole(memory, one)
    ]
    return wanted + [one for one in parts if one not in wanted]


def _waits_for(memory: Tier, there: Tier, one: Generation) -> str:
    """The files of other nodes that a generation waits for, if this node has copied all of its own; otherwise ""."""
    folder = layout.folder(one.id)
    mine, found = memory.list(folder), there.list(folder)
    lacks = [seal.manifest for seal in one.commit.seals if seal.manifest not in found]
    return "" if not lacks or any(name in mine for name in lacks) else shortened(lacks, 3)


def _copied(memory: Tier, target: Mendable, one: Generation, stop: Stop) -> str:
    """Copy the files of a generation that this node has. Returns which files of other nodes are missing, or ""."""
    copying.copy_incarnations(memory, target)
    with ThreadPoolExecutor(WORKERS, "lastgood-drain") as workers:
        how = copying.Copying(Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), workers, stop=stop)
        return _copied_with(memory, target, one, how)


def _copied_with(memory: Tier, target: Mendable, one: Generation, how: copying.Copying) -> str:
    if copying.is_whole(memory, one):
        copying.complete(target, [memory], one, how)
        return ""
    folder = layout.folder(one.id)
    here = memory.list(folder)
    mine = [seal for seal in one.commit.seals if seal.manifest in here]
    ranks = [seal.rank for seal in mine]
    if pack_copies.wanted(target, [memory], one, how):
        copying.pack_files(target, [memory], one, ranks, how)
        pack_copies.pack_manifests(target, [memory], one, mine, how)
    else:
        copying.copy_files(target, [memory], one, ranks, how)
        for seal in mine:
            target.put_new(f"{folder}/{seal.manifest}", sealed.record_bytes([memory], one, seal))
    there = target.list(folder)
    lacks = [seal.manifest for seal in one.commit.seals if seal.manifest not in there]
    if lacks:  # guard: commit-copied-after-all-nodes
        return shortened(lacks, 3)
    commit.copy_records([memory, target], target, one)
    # No other agent verifies the files that other nodes have copied. A copy that is good loses its mark of damage.
    findings = read_all(target, one, how.arena, how.workers, how.stop)  # guard: last-node-reads-all-parts
    commit.mark(target, one, findings)  # guard: copy-of-parts-is-marked
    if not intact(findings):
        raise Damaged(f"the copy of {one.id} does not read back: {findings[0].what}")
    return ""

"""Copies the part of a generation that a node has in memory to a place below; also of a save that nobody has committed.

The training processes of a job on several nodes may all have ended between their seals and COMMIT. Each agent then
copies the files of its node. The agent that has the intent of the save (format/intents.py) commits it in the place
below once the manifests of all ranks are there. On one node the agent commits in memory instead (run/late_commit.py).

Invariants
  1. A save is committed only from its intent, after the files of all ranks are durable in the same place.
  2. Nothing is deleted. Parts of a save that a rank did not seal are removed by the next opening of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from ..engine.arena import Arena
from ..errors import Damaged
from ..format import commit, intents, layout, sealed
from ..io.checksum import digest
from ..limits import CHUNK_BYTES, EXAMINATION_CHUNKS, WORKERS
from ..policy import restore
from ..ports import Mendable, Tier
from ..records import Commit, Generation, GenerationId, Manifest, Seal, World, intact
from ..run import access, copying, pack_copies
from ..run.reader import read_all

PARTS = 3
"""So many saves may have been in flight of which other nodes know more: of so many the parts are copied."""


def copied(memory: Tier, url: str, order: int, stop: Callable[[], bool], waits: bool) -> list[str]:
    """Copy what this node has of the newest sealed saves that nobody has committed to the place `url`; commit there.

    `order`: as `AgentSpec.order`. `stop`: as for `drained`. Returns what is missing, with the reason: also the parts of
    other nodes, if `waits`. Raises what opening a place for writing, and writing to it, raises.
    """
    here, reading, missing = commit.survey(memory), access.for_reading(url), list[str]()
    there = commit.survey(reading)
    if here.run is None or here.run != there.run:
        return []
    for at in _under_way(here)[:PARTS]:
        if at in there.generations:
            break
        mine = _part(memory, at)
        intent = intents.found(memory, at, here.run, memory.list(layout.folder(at)))
        if mine is None or (intent is not None and not restore.under_way(here, {at: intent})):
            continue
        listing = reading.list(layout.folder(at))
        if any(seal.manifest not in listing for seal in mine.commit.seals) or (intent and not _lacks(intent, listing)):
            with access.for_writing(url, "atomic_dirsync", take_over=False, agent_order=max(order, here.order)) as to:
                if _completed(memory, cast(Mendable, to), mine, intent, here, stop):
                    break
                listing = to.list(layout.folder(at))
        if intent is not None and waits:
            lacks = named(_lacks(intent, listing))
            missing.append(f"{url}: {at}, which nobody has committed, lacks {lacks}, which other nodes may have")
    return missing


def _completed(
    memory: Tier,
    target: Mendable,
    mine: Generation,
    intent: Commit | None,
    here: commit.Survey,
    stop: Callable[[], bool],
) -> bool:
    """Copy the part of this node. Returns whether all parts are there, and the save is committed at the target."""
    with ThreadPoolExecutor(WORKERS, "lastgood-drain") as workers:
        how = copying.Copying(Arena(EXAMINATION_CHUNKS * CHUNK_BYTES, CHUNK_BYTES), workers, stop=stop)
        copy_part(memory, target, mine, mine.commit.seals, how)
        listing = target.list(layout.folder(mine.id))
        record = intents.sealed_by_all(target, intent, listing, here.generations) if intent else None
        if record is not None:
            check(target, commit.publish(target, *record), mine.commit.seals, how)
    return record is not None


def copy_part(memory: Tier, target: Mendable, one: Generation, seals: Sequence[Seal], how: copying.Copying) -> None:
    """Copy the files that the ranks of these seals have written, and then their manifests. Commits nothing."""
    ranks = [seal.rank for seal in seals]
    if pack_copies.wanted(target, [memory], one, how):
        copying.pack_files(target, [memory], one, ranks, how)
        pack_copies.pack_manifests(target, [memory], one, seals, how)
        return
    copying.copy_files(target, [memory], one, ranks, how)
    for seal in seals:
        target.put_new(f"{layout.folder(one.id)}/{seal.manifest}", sealed.record_bytes([memory], one, seal))


def check(target: Mendable, one: Generation, seals: Sequence[Seal], how: copying.Copying) -> None:
    """Read back the files that the ranks of these seals have written, and mark what is found. Raises Damaged."""
    findings = read_all(target, one, how.arena, how.workers, how.stop, of=[seal.rank for seal in seals])
    if findings:
        commit.mark(target, one, findings)
    if not intact(findings):
        raise Damaged(f"the copy of {one.id} does not read back: {findings[0].what}")


def named(files: Sequence[str]) -> str:
    """The names of files as a text: three of them, and the number of the others."""
    return ", ".join(files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")


def _under_way(here: commit.Survey) -> list[GenerationId]:
    """The saves that nobody has committed and nothing newer has replaced, as far as this node knows; newest first."""
    newest = dict[str, int]()
    for at in sorted(here.generations):
        newest[at.incarnation] = at.step
    orders = {one.id: one.order for one in here.incarnations.values()}
    return sorted(
        (
            at
            for at in here.incomplete - here.witnessed
            if at.step > newest.get(at.incarnation, -1) and orders.get(at.incarnation, here.order) == here.order
        ),
        reverse=True,
    )


def _part(memory: Tier, at: GenerationId) -> Generation | None:
    """What this node has sealed of a save, in the form of a generation; None if that is nothing, or damaged.

    Other nodes have sealed the rest: how many ranks there are is not known here.
    """
    seals, folder = list[Seal](), layout.folder(at)
    for name, length in sorted(memory.list(folder).items()):
        if name.endswith(".manifest.json"):
            try:
                data = sealed.read(memory, f"{folder}/{name}", length)
                manifest = layout.decode(data, Manifest, name)
            except Damaged:
                return None
            seals.append(
                Seal(rank=manifest.rank, manifest=name, length=len(data), digest=digest(manifest.digest, data))
            )
    if not seals:
        return None
    record = Commit(
        format=layout.FORMAT,
        run="",
        step=at.step,
        incarnation=at.incarnation,
        order=0,
        world=World(ranks=len(seals) + 1),
        continues=None,
        parent=None,
        seals=seals,
        created=0.0,
    )
    return Generation(commit=record, root="")


def _lacks(intent: Commit, listing: Mapping[str, int | None]) -> list[str]:
    """The manifests of a save that a place lacks."""
    return [name for name in map(layout.manifest_name, range(intent.world.ranks)) if name not in listing]

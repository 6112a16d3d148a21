"""Checks one crash state against the promises in the ledger.

A crash state is a `HostileDisk` with the content that a power loss or a kill leaves. `hold` reads it with the real code
and checks that:

- a folder with a COMMIT has every file of its generation, byte for byte as it was sealed;
- each generation that the ledger owes exists;
- a restore loads a generation of the current lineage bit for bit, and none older than the newest that is owed;
- the pointer and the marks, which may be out of date, are never wrong about a generation;
- acknowledged labels exist, and no label exists that was not requested.

`hold_in_slots` checks the same for a run in slots, where one table lists all files. For the two weaker write modes,
`hold_weakly` checks only that a generation that loads is one that was saved. Each raises `Violation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Damaged, NotFinite, NothingGood
from lastgood.format import layout
from lastgood.format.commit import read_manifests, survey
from lastgood.io.files import round_up
from lastgood.ports import Tier
from lastgood.records import Commit, Generation, GenerationId, Mark, Pointer
from lastgood.run import access
from lastgood.run.candidates import Candidates, Found
from lastgood.storage.directory import Disk

from .hostile import Folder, HostileDisk
from .ledger import Choices, Ledger, Violation, decoded, must, named
from .plain import State, load, read_rank

INLINE = Inline()
CHUNK_BYTES = 4096


def at_of(found: Found) -> GenerationId | None:
    return found.generation.id if found.generation else None


def opened(disk: HostileDisk, ledger: Ledger) -> Tier:
    """Open the tier of the run as a new process does."""
    if ledger.in_flight:
        return access.slots(disk, disk.path, in_flight=ledger.in_flight, direct=ledger.direct)
    return Disk(disk, disk.path, mode=ledger.mode, direct=ledger.direct)


def hold(disk: HostileDisk, ledger: Ledger) -> None:
    """Check every promise in one crash state of the default write mode. Raises Violation."""
    if ledger.in_flight:
        hold_in_slots(disk, ledger)
        return
    hold_files(disk, ledger)
    try:
        found, state = load(opened(disk, ledger), workers=INLINE)
    except NothingGood as error:
        hold_restored(ledger, ledger.choices(), None, {}, str(error))
    else:
        hold_restored(ledger, ledger.choices(), at_of(found), state)


def hold_files(disk: HostileDisk, ledger: Ledger) -> None:
    """Check the files of every generation, which generations exist, the marks, the pointer and the labels."""
    folders = disk.root.names.get("gen", Folder()).names
    for name, folder in folders.items():
        must(isinstance(folder, Folder), f"{name} is in gen/ although it is no folder")
        _whole(disk, ledger, named(name), folder.names)
    for owed in ledger.owed():
        names = folders[layout.folder(owed)[4:]].names if layout.folder(owed)[4:] in folders else {}
        must(layout.COMMIT in names, f"{owed} was acknowledged, but has no COMMIT")
    _hints(disk, ledger, folders)
    if ledger.labels.asked:
        generations = survey(opened(disk, ledger)).generations
        for owed in ledger.owed() & ledger.labels.asked:
            must(owed in generations, f"{owed} has a label, but cannot be read")
        _labelled(ledger, generations)


def hold_restored(ledger: Ledger, choices: Choices, at: GenerationId | None, state: State, reason: str = "") -> None:
    """Check what a restore has loaded. `at`: None if it found nothing, `reason`: why all generations were refused."""
    if at is None:
        must(
            any(oldest is None for _, oldest in choices),
            f"a restore finds nothing good although a generation must exist: {reason}",
        )
        return
    must(at in ledger.given, f"{at} was never saved")
    must(state == ledger.given[at], f"the loaded bytes of {at} differ from the saved ones")
    must(
        any(at in line and (oldest is None or ledger.rank(at) >= ledger.rank(oldest)) for line, oldest in choices),
        f"{at} is loaded, which is not in the lineage, or older than {[str(oldest) for _, oldest in choices]}",
    )


def hold_in_slots(disk: HostileDisk, ledger: Ledger) -> None:
    """Check a run in slots: its table is one that a crash may leave, and its newest good generation loads."""
    tier = opened(disk, ledger)
    seen = survey(tier)
    must(
        not seen.broken and not seen.incomplete and not seen.going,
        f"incomplete in the table: {[*seen.broken, *seen.incomplete]}",
    )
    tables = " or ".join(str(sorted(map(str, table))) for table in ledger.tables)
    must(
        seen.generations.keys() in ledger.tables,
        f"the table holds {sorted(map(str, seen.generations))} instead of {tables}",
    )
    _labelled(ledger, seen.generations)
    for at, generation in seen.generations.items():
        if at not in ledger.rotten:
            must(bits(tier, generation) == ledger.given.get(at), f"the loaded bytes of {at} differ from the saved ones")
        must(at not in ledger.rotten - ledger.verified or not generation.verified, f"{at} is damaged, but verified")
    if seen.pointer and not ledger.rotten and not ledger.disturbed:
        at = GenerationId(step=seen.pointer.step, incarnation=seen.pointer.incarnation)
        must(at in seen.generations and seen.generations[at].verified, f"the pointer names {at}")
    good = {at for at, one in seen.generations.items() if at not in ledger.rotten and not one.damaged}
    newest = [next((at for at in ledger.line(one) if at in good), None) for one in {ledger.current, *ledger.opening}]

    found, candidates = None, Candidates(seen)
    try:
        for generation in candidates:
            try:
                bits(tier, generation)
                found = generation.id
                break
            except (Damaged, NotFinite) as error:
                candidates.failed(error)
    except NothingGood as error:
        must(None in newest, f"a restore finds nothing good although a generation must exist: {error}")
        return
    must(found in newest, f"{found} is loaded instead of {[str(one) for one in newest]}")


def bits(tier: Tier, generation: Generation) -> State:
    (manifest,) = read_manifests(tier, generation)
    size = sum(round_up(blob.length, blob.chunk_bytes) for blob in manifest.blobs)
    found = read_rank(tier, generation, manifest, Arena(size, CHUNK_BYTES), INLINE)
    return {piece.name: bytes(found[piece.name]) for piece in manifest.pieces}


def _whole(disk: HostileDisk, ledger: Ledger, at: GenerationId, names: dict[str, Any]) -> None:
    """Check that a folder with a valid COMMIT holds all files that were sealed, with the same bytes."""
    node = names.get(layout.COMMIT)
    if node is None or at in ledger.rotten:
        return
    must(at in ledger.sealed, f"{at} has a COMMIT although none was created")
    sealed = ledger.sealed[at]
    if layout.COMMIT in sealed and disk.links:  # the record was not created in place where it was sealed
        must(node.digest() == sealed[layout.COMMIT], f"the COMMIT of {at} is torn or was replaced")
    elif decoded(bytes(node.data), Commit) is None:
        must(not disk.links and at not in ledger.owed(), f"the COMMIT of {at} is torn")
        return
    for name, digest in sealed.items():
        if name != layout.COMMIT:
            must(name in names, f"{at} has a COMMIT, and its {name} is missing")
            must(names[name].digest() == digest, f"{at} has a COMMIT, and its {name} differs from the sealed file")


def _labelled(ledger: Ledger, generations: Mapping[GenerationId, Generation]) -> None:
    """Check that acknowledged labels are found, and no label that was never requested."""
    for at, generation in generations.items():
        problem = ledger.labels.problem(generation)
        must(not problem, f"{at} {problem}")


def _hints(disk: HostileDisk, ledger: Ledger, folders: dict[str, Folder]) -> None:
    """Check that the pointer and the marks are right, or out of date."""

    def verified(at: GenerationId) -> bool:
        names = folders[layout.folder(at)[4:]].names if layout.folder(at)[4:] in folders else {}
        node = names.get(layout.VERIFIED)
        # A mark that is created in place is visible before it is durable: if the process is killed in between, the
        # next one may write a pointer, and a power loss then removes the mark and keeps the pointer.
        return layout.COMMIT in names and (not disk.links or (node and decoded(bytes(node.data), Mark)) is not None)

    for at in ledger.rotten - ledger.verified - ledger.mending:
        must(not (disk.links and verified(at)), f"{at} is damaged, but marked as verified")
    if ledger.rotten or ledger.disturbed:
        return
    node = disk.root.names.get(layout.POINTER)
    if node is not None:
        pointer = decoded(bytes(node.data), Pointer)
        if pointer is None:
            raise Violation("the pointer is torn")
        at = GenerationId(step=pointer.step, incarnation=pointer.incarnation)
        must(verified(at), f"the pointer names {at}, which does not exist or is not verified")
    link = disk.root.names.get("latest_ok")
    if link is not None:
        at = named(link.removeprefix("gen/"))
        must(verified(at), f"latest_ok names {link}, which does not exist or is not verified")


def hold_weakly(disk: HostileDisk, ledger: Ledger) -> bool:
    """Check only that a state that loads was saved. Returns whether the promise of the default mode holds too."""
    choices = ledger.choices()
    try:
        found, state = load(opened(disk, ledger), workers=INLINE)
    except NothingGood:
        return not ledger.owed()
    at = at_of(found)
    if at is None:
        return not ledger.owed()
    must(at in ledger.given and state == ledger.given[at], f"{at} was never saved, or its loaded bytes differ")
    return any(at in line and (not oldest or ledger.rank(at) >= ledger.rank(oldest)) for line, oldest in choices)


def survived(disk: HostileDisk, ledger: Ledger) -> Ledger:
    """Return the ledger of the next process after a crash, in which every commit on the disk is durable."""
    after = ledger.copied()
    if after.in_flight:
        found = survey(opened(disk, ledger)).generations.keys()
        after.tables = (frozenset(found),)
        after.acknowledged |= found
    for name, folder in disk.root.names.get("gen", Folder()).names.items():
        if layout.COMMIT in folder.names and decoded(bytes(folder.names[layout.COMMIT].data), Commit):
            after.acknowledged.add(named(name))
    for ident in sorted(after.opening, key=after.orders.__getitem__):
        if any(at.incarnation == ident for at in after.acknowledged):
            after.current = ident
    after.opening.clear()
    return after


def newest_incarnation(disk: HostileDisk, ledger: Ledger) -> str | None:
    """The newest incarnation that a place has a record or a readable COMMIT of; None if it has none."""
    records = disk.root.names.get("incarnations", Folder()).names
    known = {one.id for one in map(layout.parse_incarnation, records) if one is not None}
    for name, folder in disk.root.names.get("gen", Folder()).names.items():
        if layout.COMMIT in folder.names and decoded(bytes(folder.names[layout.COMMIT].data), Commit):
            known.add(named(name).incarnation)
    return max(known, key=ledger.orders.__getitem__, default=None)


def note_whole(ledger: Ledger, disk: HostileDisk) -> None:
    """Let retention count the damaged generations that have their files back, from a repair of any place.

    They are owed again only after a process has reported that it has mended them.
    """
    for at in ledger.found & ledger.mending:
        there = disk.root.names["gen"].names.get(layout.folder(at)[4:], Folder()).names
        if all(name in there and there[name].digest() == one for name, one in ledger.sealed[at].items()):
            ledger.found.discard(at)

"""The commit protocol: only this module makes a generation exist, and only this module ends one.

    blobs durable -> manifest durable -> every rank sealed -> COMMIT created     <- the generation exists from here on
     write_file        seal                the caller           publish

    GOING durable -> COMMIT removed, durably -> other files removed -> GOING removed      <- ended by COMMIT's removal
                                retire

Invariants
  1. A COMMIT names only manifests, and a manifest only extents, that were durable before it was created.
  2. A COMMIT is created once and never changed. If the outcome is unknown, it is read: identical bytes are success.
  3. A folder without a COMMIT is not a generation, whatever else it holds.
  4. Names contain the incarnation, so no later COMMIT can reach the blobs of an earlier attempt.
  5. Nothing that a COMMIT reaches is removed before the removal of that COMMIT is durable.
Assumes that a tier's put_new is atomic and exclusive, and that its effect survives the failures that the tier states,
together with every blob of the same folder that was finished before (docs/format.md, "What is assumed of the media").
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import msgspec

from ..errors import Damaged, LastgoodError, MissingBlob, NameTaken, NoSpace, SumMismatch, Truncated
from ..io.checksum import digest
from ..ports import Mendable, Tier
from ..records import (
    Commit,
    Finding,
    Generation,
    GenerationId,
    Incarnation,
    Label,
    Manifest,
    Mark,
    PlaceList,
    Pointer,
    RunHeader,
    Seal,
    intact,
)
from . import catalog, folders, layout, parity_layout, unfinished, validation
from .catalog import Listing
from .sealed import read, record_bytes

READS_AT_ONCE = 16  # generations, where each read is a request
FINDINGS_LIMIT = 1000  # of one mark


def seal(tier: Tier, manifest: Manifest) -> Seal:
    """Make one rank's manifest durable and return its seal, the promise that manifest and blobs are durable.

    The blobs must have been finished before. Raises NameTaken, CommitUnknown, NoSpace, NotWritable, TierDown.
    """
    at = GenerationId(step=manifest.step, incarnation=manifest.incarnation)
    data = layout.encode(manifest, manifest.digest)
    name = layout.manifest_name(manifest.rank)
    tier.put_new(f"{layout.folder(at)}/{name}", data)  # guard: manifest-before-commit  # gap: after_blobs
    return Seal(rank=manifest.rank, manifest=name, length=len(data), digest=digest(manifest.digest, data))


def publish(tier: Tier, commit: Commit, algorithm: str) -> Generation:
    """Create the commit record, which makes the generation exist. `algorithm`: of its digest.

    Raises CommitUnknown if it is not known whether the generation exists; ManifestInvalid for a record that does not
    fit together; NameTaken, NoSpace, NotWritable, TierDown.
    """
    validation.validate_commit(commit, commit.id, commit.run)  # refuses before anything is touched
    data = layout.encode(commit, algorithm)
    # gap: after_seal
    tier.put_new(f"{layout.folder(commit.id)}/{layout.COMMIT}", data)  # <- the generation exists after this line
    return Generation(commit=commit, root=layout.root_of(data))


def confirm(tier: Tier, at: GenerationId) -> None:
    """Make a visible commit record durable: its writer may have crashed before the record was durable.

    `put_new` of the bytes that a record has already writes nothing, and syncs the record and its name.
    """
    name = f"{layout.folder(at)}/{layout.COMMIT}"
    data = read(tier, name, tier.list(layout.folder(at)).get(layout.COMMIT))
    # In an object store another process may have deleted the generation since: its COMMIT must not come back.
    if not visible_is_durable(tier):  # guard: deleted-commit-not-created-again
        tier.put_new(name, data)


def visible_is_durable(tier: Tier) -> bool:
    """Whether what can be read is durable: in an object store, which has no page cache."""
    return hasattr(tier, "tree") and getattr(tier, "visible_is_durable", True)


def confirm_labels(tier: Tier, at: GenerationId) -> None:
    """Make the visible labels of a generation durable: their writer may have crashed before they were durable."""
    folder = layout.folder(at)
    for name, length in tier.list(folder).items():
        if layout.label_number(name) is not None:
            with contextlib.suppress(Damaged):  # a damaged label has no effect, so it need not be durable
                tier.put_new(f"{folder}/{name}", read(tier, f"{folder}/{name}", length))


def copy_records(sources: Sequence[Tier], target: Mendable, generation: Generation) -> list[str]:
    """Make a generation exist in `target`, where every tensor file of it is finished already. Returns what was written.

    The records are copied byte for byte, so all places hold the same generation: manifests first, then COMMIT, then its
    labels. Each comes from the first of `sources` that has it as committed. A manifest that is damaged at the target is
    replaced; a damaged COMMIT is deleted first, because it is of no use. Raises Damaged if no source has a record;
    NameTaken if the target holds another generation of this id; CommitUnknown, NoSpace, NotWritable, TierDown.
    """
    folder, written = layout.folder(generation.id), list[str]()
    records = {one.manifest: record_bytes(sources, generation, one) for one in generation.commit.seals}
    records[layout.COMMIT] = record_bytes(sources, generation, None)
    listing = target.list(folder)
    for name, data in records.items():  # COMMIT is the last: the generation exists in `target` after it
        kept = Commit if name == layout.COMMIT else None
        if _put_copy(target, f"{folder}/{name}", data, listing.get(name), kept):
            written.append(name)
    for source in sources:
        for name, length in sorted(source.list(folder).items()):
            if layout.label_number(name) is not None:
                with contextlib.suppress(Damaged, NameTaken):  # a damaged label has no effect
                    data = read(source, f"{folder}/{name}", length)
                    _put_copy(target, f"{folder}/{name}", data, listing.get(name), Label)
    return written


def _put_copy(target: Mendable, name: str, data: bytes, length: int | None, kept: type[Commit | Label] | None) -> bool:
    """Create a record. One of other bytes is replaced, unless it reads as a `kept`. Returns whether it was written.

    `length`: of the record that is there; None: there is none.
    """
    try:
        target.put_new(name, data)
    except NameTaken:
        if kept is None:  # a manifest
            target.delete(f"{name}.tmp")
            target.put_new(f"{name}.tmp", data)
            target.replace(name, f"{name}.tmp")
            return True
        if read_hint(target, name, length, kept) is not None:
            raise  # guard: other-commit-not-replaced
        target.delete(name)  # guard: damaged-record-copied-anew
        target.put_new(name, data)
        return True
    return length is None


def retire(tier: Tier, at: GenerationId) -> None:
    """Delete a generation, finish a deletion that a crash cut short, or remove the files of an unfinished save.

    GOING is deleted last, so that remaining files are known to belong to a deletion, and a later call finishes it.
    """
    folder = layout.folder(at)
    listing = folders.names(tier, folder)
    if layout.INTENT in listing:  # otherwise the next opening could commit it again
        tier.delete(f"{folder}/{layout.INTENT}")  # guard: intent-goes-first
    if layout.COMMIT in listing:
        if layout.GOING in listing:  # guard: torn-going-record-replaced
            tier.delete(f"{folder}/{layout.GOING}")  # from a crash; on a tier without hard links it may be torn
        # On a full disk the deletion begins without GOING: after a crash here the COMMIT is reported as lost.
        with contextlib.suppress(NoSpace):  # guard: full-disk-skips-going-record
            # guard: going-record-before-uncommit
            # gap: before_retire
            tier.put_new(f"{folder}/{layout.GOING}", layout.encode(Mark(format=layout.FORMAT, root="")))
    # Also without COMMIT: who removed it may have crashed before the removal was durable.
    # guard: uncommit-before-delete
    # gap: before_uncommit
    tier.delete(f"{folder}/{layout.COMMIT}")  # <- the generation does not exist after this line
    getattr(tier, "clear", partial(clear, tier))(folder)  # a place on several nodes clears all of them at once
    left = set(folders.names(tier, folder))
    if layout.COMMIT in left:  # guard: late-commit-removed
        # In an object store: of a process that was replaced while its creation was on the way.
        tier.delete(f"{folder}/{layout.COMMIT}")
        left.discard(layout.COMMIT)
    # guard: going-record-stays-with-leftovers
    if left <= {layout.GOING}:  # NFS keeps a file that is open elsewhere, under another name
        tier.delete(f"{folder}/{layout.GOING}")  # deleting the last file also removes the folder


def clear(tier: Tier, folder: str) -> None:
    """Delete all files of a folder without COMMIT but GOING. The first error is raised at the end."""
    first: LastgoodError | None = None
    for name, length in sorted(folders.names(tier, folder).items()):  # gap: before_blobs_go
        # guard: going-record-deleted-last
        if name != layout.GOING and length is not None:  # this package makes no folders here, so they stay
            try:
                tier.delete(f"{folder}/{name}")
            except LastgoodError as error:
                first = first or error  # guard: delete-continues-past-failure
    if first is not None:
        raise first


# ---- reading -------------------------------------------------------------------------------------------------


def read_generation(tier: Tier, at: GenerationId, run: str | None, listing: Listing | None = None) -> Generation:
    """The generation with its marks and labels. `run`: the id of the run; None if it is not known. `listing` (default:
    read here): of its folder. Raises Damaged, Unavailable or UnknownFormat."""
    folder = layout.folder(at)
    listing = folders.names(tier, folder) if listing is None else listing
    data = read(tier, f"{folder}/{layout.COMMIT}", listing.get(layout.COMMIT))
    commit = layout.decode(data, Commit, f"{folder}/{layout.COMMIT}")
    validation.validate_commit(commit, at, run)  # guard: commit-record-validated
    root = layout.root_of(data)
    damage = _mark(tier, folder, layout.DAMAGED, root, listing)
    unfit = _mark(tier, folder, layout.UNFIT, root, listing)
    labels, label_unread = _labels(tier, folder, listing)
    for one in labels:
        commit = _with(commit, one) if one.root == root else commit
    return Generation(
        commit=commit,
        root=root,
        verified=_mark(tier, folder, layout.VERIFIED, root, listing) is not None,
        damaged=damage.findings if damage else [],
        unfit=unfit.findings if unfit else [],
        label_unread=label_unread,
        bytes=sum(length for length in listing.values() if length is not None and length > 0),
    )


def first_generation(places: Sequence[Tier], at: GenerationId) -> Generation:
    """The generation as the first of these places has it in which its commit record can be read. Raises as
    `read_generation` for the last one."""
    for tier in places[:-1]:
        with contextlib.suppress(Damaged):
            return read_generation(tier, at, None)
    return read_generation(places[-1], at, None)


def read_manifest(tier: Tier, generation: Generation, rank: int = 0, listing: Listing | None = None) -> Manifest:
    """One rank's manifest, checked against its seal; the files that it names exist and have their committed lengths.

    So no reader reserves memory or opens a file because of a manifest alone. `listing` (default: read here): the
    listing of the folder; reading it once per rank would be O(ranks²). Raises Damaged or Unavailable.
    """
    listing = tier.list(layout.folder(generation.id)) if listing is None else listing
    return sealed_manifest(tier, generation.id, generation.commit.seals[rank], generation.commit.world.ranks, listing)


def sealed_manifest(tier: Tier, at: GenerationId, one: Seal, ranks: int, listing: Listing) -> Manifest:
    """As `read_manifest`, for a generation that may not be committed yet. `ranks`: their number in this save."""
    folder = layout.folder(at)
    name = f"{folder}/{one.manifest}"
    if one.manifest not in listing:
        read(tier, name, one.length, limit=one.length)  # raises why it is missing, as far as the tier knows
    _need_length(name, listing.get(one.manifest), one.length)  # guard: manifest-length-checked
    data = read(tier, name, one.length, limit=one.length)
    manifest = layout.decode(data, Manifest, name)
    validation.validate_manifest(manifest, at, one.rank, ranks)  # guard: manifest-record-validated
    if digest(manifest.digest, data) != one.digest:  # guard: manifest-matches-seal
        raise SumMismatch(f"{name} differs from the manifest that was sealed", blob=name)
    for blob in manifest.blobs:
        _need_length(f"{folder}/{blob.name}", listing.get(blob.name), blob.length)  # guard: blob-length-checked
    return manifest


def read_manifests(tier: Tier, generation: Generation) -> list[Manifest]:
    """The manifests of all ranks, in ascending order. Raises Damaged or Unavailable."""
    listing = tier.list(layout.folder(generation.id))
    return [read_manifest(tier, generation, seal.rank, listing) for seal in generation.commit.seals]


def _need_length(name: str, length: int | None, committed: int) -> None:
    blob = name.rpartition("/")[2]
    if length is None or length < 0:
        raise MissingBlob(f"{name} is missing, or is not a file", blob=blob)
    if length != committed:
        raise Truncated(f"{name} has {length:,} bytes, committed were {committed:,}", blob=blob)


@dataclass
class Survey:
    """What a run contains. Decisions about it are made in policy/."""

    run: str | None = None
    generations: dict[GenerationId, Generation] = field(default_factory=dict)
    broken: dict[GenerationId, LastgoodError] = field(default_factory=dict)
    """generations whose COMMIT exists and is damaged, and those that could not be read"""
    incomplete: set[GenerationId] = field(default_factory=set)
    """folders without COMMIT and GOING: the save was not finished, or its COMMIT is lost"""
    witnessed: set[GenerationId] = field(default_factory=set)
    """those of `incomplete` that hold a mark, a label or parity, which only a committed generation gets"""
    unfinished: set[GenerationId] = field(default_factory=set)
    """those of `incomplete` that a copy has left which did not end: that others name them means nothing here"""
    going: set[GenerationId] = field(default_factory=set)
    """folders without COMMIT, and with GOING or without any file: their deletion was begun"""
    incarnations: dict[str, Incarnation] = field(default_factory=dict)
    order: int = 0  # the highest of an incarnation
    pointer: Pointer | None = None
    listings: Mapping[str, Listing] = field(default_factory=dict)  # the folders below `gen`, by their names
    catalogued: frozenset[GenerationId] = frozenset()  # those that were read from the catalog

    @property
    def unread(self) -> dict[GenerationId, LastgoodError]:
        """Those of `broken` that could not be read, so that they may be good, or were never committed."""
        return {at: error for at, error in dict(self.broken).items() if not isinstance(error, Damaged)}


def survey(tier: Tier) -> Survey:
    """Read every commit record and every incarnation of a run. Raises Unavailable, NotWritable, and UnknownFormat for
    newer records. In a directory one generation that cannot be read is among `broken`.

    Header, pointer and incarnation records are hints: if one is damaged or missing, its file name or the commits supply
    the same facts.
    """
    root = tier.list("")
    header = read_hint(tier, layout.HEADER, root.get(layout.HEADER), RunHeader)
    pointer = read_hint(tier, layout.POINTER, root.get(layout.POINTER), Pointer)
    pointer = pointer or read_hint(tier, layout.OLD_POINTER, root.get(layout.OLD_POINTER), Pointer)
    unread = dict[str, LastgoodError]()
    tree = folders.listed(tier, unread)
    found = Survey(run=header.run if header else None, pointer=pointer, listings=tree)
    found.broken |= {at: error for name, error in unread.items() if (at := layout.parse_folder(name)) is not None}
    committed = dict[GenerationId, Listing]()
    for name, listing in sorted(tree.items()):
        at = layout.parse_folder(name)
        if at is None:
            continue
        if layout.COMMIT in listing:
            committed[at] = listing
        # guard: unfinished-deletion-is-no-loss
        elif layout.GOING in listing or not listing:  # an empty folder is the last state of a deletion
            found.going.add(at)
        else:
            found.incomplete.add(at)
            if any(one in catalog.MARKS or parity_layout.is_record(one) or layout.label_number(one) for one in listing):
                found.witnessed.add(at)
    catalogued = None
    if catalog.NAME in root:
        catalogued = read_hint(tier, catalog.NAME, root[catalog.NAME], catalog.Catalog)
    found.generations |= catalog.found(catalogued, tree)
    found.catalogued = frozenset(found.generations)
    _read_generations(tier, found, {at: one for at, one in committed.items() if at not in found.generations})
    if found.incomplete:
        listed = read_hint(tier, layout.PLACES, root.get(layout.PLACES), PlaceList)
        found.unfinished = unfinished.copies(tier, listed, found.incomplete - found.witnessed, found.generations)
    for name, length in sorted(tier.list("incarnations").items()):
        named = layout.parse_incarnation(name)
        if named is None or length is None or length < 0:  # guard: incarnation-record-is-file
            continue
        found.order = max(found.order, named.order)
        record: Incarnation | None = None
        with contextlib.suppress(*folders.unread_errors(tier)):  # guard: unread-incarnation-from-its-name
            record = read_hint(tier, f"incarnations/{name}", length, Incarnation)
        # guard: incarnation-matches-its-name
        if record in (None, named):  # otherwise it was moved here
            found.incarnations[named.id] = named
    for at, generation in found.generations.items():
        found.order = max(found.order, generation.commit.order)
        if at.incarnation not in found.incarnations:  # guard: commits-imply-incarnations
            one = generation.commit
            found.incarnations[at.incarnation] = Incarnation(
                format=layout.FORMAT, order=one.order, id=at.incarnation, parent=one.continues
            )
    return found


def _read_generations(tier: Tier, found: Survey, committed: Mapping[GenerationId, Listing]) -> None:
    """Read these generations into `found`: several at a time where each read is a request."""

    def read(at: GenerationId) -> Generation | LastgoodError | None:
        try:
            return read_generation(tier, at, found.run, committed[at])
        except Damaged as error:
            return None if folders.is_deleted(tier, at) else error  # guard: deleted-commit-is-not-broken
        except folders.unread_errors(tier) as error:
            return error  # guard: unread-commit-noted

    with contextlib.ExitStack() as threads:
        several = len(committed) > 1 and visible_is_durable(tier)
        each = threads.enter_context(ThreadPoolExecutor(READS_AT_ONCE, "lastgood-survey")).map if several else map
        for at, one in zip(committed, each(read, committed), strict=True):
            if one is None:
                continue  # who deletes it finishes that
            if isinstance(one, LastgoodError):
                found.broken[at] = one  # guard: broken-commit-recorded
            else:
                found.generations[at] = one


def newest_incarnation(tier: Tier) -> Incarnation | None:
    """The newest incarnation of a run, from the names of the incarnation records; None if there is none."""
    named = filter(None, map(layout.parse_incarnation, tier.list("incarnations")))
    return max(named, key=lambda one: one.order, default=None)


def mark(tier: Tier, generation: Generation, findings: list[Finding]) -> None:
    """Store the findings of a complete reading beside the generation. Durable on return. Raises as `Tier.put_new`."""
    name = layout.VERIFIED if not findings else layout.UNFIT if intact(findings) else layout.DAMAGED
    folder = layout.folder(generation.id)
    record = Mark(format=layout.FORMAT, root=generation.root, findings=findings[:FINDINGS_LIMIT])
    if name in folders.names(tier, folder):
        tier.delete(f"{folder}/{name}")
    tier.put_new(f"{folder}/{name}", layout.encode(record))  # gap: before_mark
    for old in catalog.MARKS & set(folders.names(tier, folder)) - {
        name
    }:  # last, so that a full disk leaves the old mark
        tier.delete(f"{folder}/{old}")  # guard: old-mark-deleted


def label(tier: Tier, generation: Generation, milestone: bool, metrics: Mapping[str, float]) -> Generation:
    """Add a label to a generation, for retention; its commit never changes. Durable on return.

    Returns the generation with the label's effect. Raises as `Tier.put_new`.
    """
    folder = layout.folder(generation.id)
    number = 1 + max((layout.label_number(name) or 0 for name in folders.names(tier, folder)), default=0)
    record = Label(format=layout.FORMAT, root=generation.root, milestone=milestone, metrics=dict(metrics))
    tier.put_new(f"{folder}/{layout.label_name(number)}", layout.encode(record))
    return msgspec.structs.replace(generation, commit=_with(generation.commit, record))


def _labels(tier: Tier, folder: str, listing: Listing) -> tuple[list[Label], bool]:
    """The labels in a folder in ascending order, and whether there are others that cannot be read."""
    names = sorted((number, name) for name in listing if (number := layout.label_number(name)) is not None)
    found = [read_hint(tier, f"{folder}/{name}", listing[name], Label) for _, name in names]
    return [one for one in found if one is not None], None in found


def _with(commit: Commit, label: Label) -> Commit:
    milestone, metrics = commit.milestone or label.milestone, {**commit.metrics, **label.metrics}
    return msgspec.structs.replace(commit, milestone=milestone, metrics=metrics)


def _mark(tier: Tier, folder: str, name: str, root: str, listing: Mapping[str, int | None]) -> Mark | None:
    found = read_hint(tier, f"{folder}/{name}", listing.get(name), Mark)
    return found if found and found.root == root else None  # guard: mark-belongs-to-commit


def read_hint(tier: Tier, name: str, length: int | None, kind: type[layout.T]) -> layout.T | None:
    """A record that is not needed; None if it is missing or damaged. `length`: from the listing of its folder."""
    if length is None:
        return None
    try:
        return layout.decode(read(tier, name, length), kind, name)
    except Damaged:
        return None  # guard: damaged-hint-ignored

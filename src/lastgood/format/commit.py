"""Commit: the one place where a generation comes into being, and where it ends.

    blobs durable -> manifest durable -> every rank sealed -> COMMIT created     <- exists from here
       persist         seal                the caller           publish

    GOING durable -> COMMIT removed, durably -> everything else removed          <- gone from the middle arrow on
                            retire

Invariants
  1. A COMMIT names only manifests, and a manifest only extents, that were durable before it.
  2. A COMMIT is created once and never changed. If its outcome is unknown it is read: identical bytes are success.
  3. A reader that finds no COMMIT finds no generation, whatever else lies around.
  4. Names carry the incarnation, so a dead attempt's blobs can never be reached from a later COMMIT.
  5. Nothing that a COMMIT reaches is removed before that COMMIT is durably gone.
Assumes: a tier's put_new is atomic and exclusive; what it returned from survives that tier's stated failures, and with
it every blob of the same folder that was finished before (docs/format.md, "What is assumed of the media").
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from ..errors import (
    Damaged,
    LastgoodError,
    ManifestInvalid,
    MissingBlob,
    NoSpace,
    SumMismatch,
    Truncated,
)
from ..io.checksum import digest
from ..ports import Tier
from ..records import (
    Commit,
    Extent,
    Finding,
    Generation,
    GenerationId,
    Incarnation,
    Label,
    Manifest,
    Mark,
    Pointer,
    RunHeader,
    Seal,
    intact,
)
from . import layout, parity_layout

MARKS = {layout.VERIFIED, layout.DAMAGED, layout.UNFIT}
FINDINGS_LIMIT = 1000
"""kept as evidence in one mark"""


def seal(tier: Tier, manifest: Manifest) -> Seal:
    """Make one rank's manifest durable. Its blobs must be; the seal is the promise that both are."""
    at = GenerationId(step=manifest.step, incarnation=manifest.incarnation)
    data = layout.encode(manifest, manifest.digest)
    name = layout.manifest_name(manifest.rank)
    tier.put_new(f"{layout.folder(at)}/{name}", data)  # guard: manifest-before-commit  # gap: after_blobs
    return Seal(rank=manifest.rank, manifest=name, length=len(data), digest=digest(manifest.digest, data))


def publish(tier: Tier, commit: Commit, algorithm: str) -> Generation:
    """Bring the generation into being. Raises CommitUnknown when nobody can say whether it exists."""
    layout.validate_commit(commit, commit.id, commit.run)  # refuses before anything is touched
    data = layout.encode(commit, algorithm)
    # gap: after_seal
    tier.put_new(f"{layout.folder(commit.id)}/{layout.COMMIT}", data)  # <- the generation exists after this line
    return Generation(commit=commit, root=layout.root_of(data))


def confirm(tier: Tier, at: GenerationId) -> None:
    """Make durable what can be seen of a generation: whoever published it may have died before it was."""
    name = f"{layout.folder(at)}/{layout.COMMIT}"
    tier.put_new(name, _read(tier, name, tier.list(layout.folder(at)).get(layout.COMMIT)))


def confirm_labels(tier: Tier, at: GenerationId) -> None:
    """Make durable what can be seen of a generation's labels: whoever added them may have died before they were."""
    home = layout.folder(at)
    for name, length in tier.list(home).items():
        if layout.label_number(name) is not None:
            with contextlib.suppress(Damaged):  # nothing was read from it either
                tier.put_new(f"{home}/{name}", _read(tier, f"{home}/{name}", length))


def retire(tier: Tier, at: GenerationId) -> None:
    """End a generation, or finish an ending that a crash cut short, or clear what never became one.

    A file that cannot be deleted does not keep the others: its error is raised at the end. GOING stays as long as
    anything else is left, so that the rest is known to be of a deletion, and a later call finishes it.
    """
    home = layout.folder(at)
    there = tier.list(home)
    if layout.COMMIT in there:
        if layout.GOING in there:  # guard: torn-going-record-replaced
            tier.delete(f"{home}/{layout.GOING}")  # somebody died over it: where there are no links it may be torn
        # On a full disk it goes without its reason: what a crash right here leaves is then taken for a lost COMMIT.
        with contextlib.suppress(NoSpace):  # guard: full-disk-skips-going-record
            # guard: going-record-before-uncommit
            # gap: before_retire
            tier.put_new(f"{home}/{layout.GOING}", layout.encode(Mark(format=layout.FORMAT, root="")))
    # Also when it is gone: whoever removed it may have died before that was durable.
    # guard: uncommit-before-delete
    # gap: before_uncommit
    tier.delete(f"{home}/{layout.COMMIT}")  # <- the generation is gone after this line
    first: LastgoodError | None = None
    for name, length in sorted(tier.list(home).items()):  # gap: before_blobs_go
        # guard: going-record-deleted-last
        if name != layout.GOING and length is not None:  # a folder is nobody's of this house, and stays
            try:
                tier.delete(f"{home}/{name}")
            except LastgoodError as error:
                first = first or error  # guard: delete-continues-past-failure
    if first is not None:
        raise first
    # guard: going-record-stays-with-leftovers
    if tier.list(home).keys() <= {layout.GOING}:  # NFS keeps a file that somebody has open, under another name
        tier.delete(f"{home}/{layout.GOING}")  # the reason goes last, and an empty folder with it


# ---- reading -------------------------------------------------------------------------------------------------


def read_generation(tier: Tier, at: GenerationId, run: str | None) -> Generation:
    """The generation at `at`, its marks beside it. Raises Damaged, Unavailable or UnknownFormat."""
    home = layout.folder(at)
    there = tier.list(home)
    data = _read(tier, f"{home}/{layout.COMMIT}", there.get(layout.COMMIT))
    commit = layout.decode(data, Commit, f"{home}/{layout.COMMIT}")
    layout.validate_commit(commit, at, run)  # guard: commit-record-validated
    root = layout.root_of(data)
    damage = _mark(tier, home, layout.DAMAGED, root, there)
    unfit = _mark(tier, home, layout.UNFIT, root, there)
    labels, label_unread = _labels(tier, home, there)
    for one in labels:
        commit = _with(commit, one) if one.root == root else commit
    return Generation(
        commit=commit,
        root=root,
        verified=_mark(tier, home, layout.VERIFIED, root, there) is not None,
        damaged=damage.findings if damage else [],
        unfit=unfit.findings if unfit else [],
        label_unread=label_unread,
        bytes=sum(length for length in there.values() if length is not None and length > 0),
    )


Listing = Mapping[str, int | None]
"""as `Tier.list` gives it"""


def read_manifest(tier: Tier, generation: Generation, rank: int = 0, there: Listing | None = None) -> Manifest:
    """One rank's manifest, checked against its seal and itself, its files known to be there and as long as they were.

    So nobody reserves memory, or opens a file, on the word of a manifest alone. `there`: what lies in its folder, for
    who reads many: a listing each would grow with the square of the ranks. Raises Damaged or Unavailable.
    """
    there = tier.list(layout.folder(generation.id)) if there is None else there
    return sealed_manifest(tier, generation.id, generation.commit.seals[rank], generation.commit.world.ranks, there)


def sealed_manifest(tier: Tier, at: GenerationId, one: Seal, ranks: int, there: Listing) -> Manifest:
    """As `read_manifest`, of a generation that may still be committed."""
    home = layout.folder(at)
    name = f"{home}/{one.manifest}"
    _need_length(name, there.get(one.manifest), one.length)  # guard: manifest-length-checked
    data = _read(tier, name, one.length, limit=one.length)
    manifest = layout.decode(data, Manifest, name)
    layout.validate_manifest(manifest, at, one.rank, ranks)  # guard: manifest-record-validated
    if digest(manifest.digest, data) != one.digest:  # guard: manifest-matches-seal
        raise SumMismatch(f"{name} is not the manifest that was sealed", blob=name)
    for blob in manifest.blobs:
        _need_length(f"{home}/{blob.name}", there.get(blob.name), blob.length)  # guard: blob-length-checked
    return manifest


def read_manifests(tier: Tier, generation: Generation) -> list[Manifest]:
    """Those of all ranks, in order. Raises Damaged or Unavailable."""
    there = tier.list(layout.folder(generation.id))
    return [read_manifest(tier, generation, seal.rank, there) for seal in generation.commit.seals]


def _need_length(name: str, length: int | None, committed: int) -> None:
    blob = name.rpartition("/")[2]
    if length is None or length < 0:
        raise MissingBlob(f"{name} is gone, or no file", blob=blob)
    if length != committed:
        raise Truncated(f"{name} has {length:,} bytes, committed were {committed:,}", blob=blob)


@dataclass
class Survey:
    """What lies in a run, as found; nothing is decided here."""

    run: str | None = None
    generations: dict[GenerationId, Generation] = field(default_factory=dict)
    broken: dict[GenerationId, LastgoodError] = field(default_factory=dict)
    """their COMMIT is there and cannot be believed"""
    incomplete: set[GenerationId] = field(default_factory=set)
    """no COMMIT: never finished, or lost"""
    witnessed: set[GenerationId] = field(default_factory=set)
    """of these: a mark or parity lies there, which are made for what was committed only"""
    going: set[GenerationId] = field(default_factory=set)
    """no COMMIT, and GOING says why"""
    incarnations: dict[str, Incarnation] = field(default_factory=dict)
    order: int = 0
    """highest that an incarnation claims"""
    pointer: Pointer | None = None


def survey(tier: Tier) -> Survey:
    """Read every commit record and every incarnation of a run. Raises UnknownFormat for what a newer version wrote.

    Header, pointer and incarnation records are hints: where one is damaged or gone, its name or the commits stand in.
    """
    root = tier.list("")
    header = _hint(tier, layout.HEADER, root.get(layout.HEADER), RunHeader)
    pointer = _hint(tier, layout.POINTER, root.get(layout.POINTER), Pointer)
    pointer = pointer or _hint(tier, layout.OLD_POINTER, root.get(layout.OLD_POINTER), Pointer)
    found = Survey(run=header.run if header else None, pointer=pointer)
    for name, length in sorted(tier.list("gen").items()):
        at = layout.parse_folder(name)
        # guard: generation-folder-is-no-link
        if at is None or length is not None:  # a link would lead out of the run
            continue
        there = tier.list(f"gen/{name}")
        if layout.COMMIT in there:
            try:
                found.generations[at] = read_generation(tier, at, found.run)
            except Damaged as error:
                found.broken[at] = error  # guard: broken-commit-recorded
        # guard: unfinished-deletion-is-no-loss
        elif layout.GOING in there or not there:  # an empty folder is the last that an ending leaves
            found.going.add(at)
        else:
            found.incomplete.add(at)
            if any(one in MARKS or parity_layout.is_record(one) or layout.label_number(one) for one in there):
                found.witnessed.add(at)
    for name, length in sorted(tier.list("incarnations").items()):
        named = layout.parse_incarnation(name)
        if named is None or length is None or length < 0:  # guard: incarnation-record-is-file
            continue
        found.order = max(found.order, named.order)
        # guard: incarnation-matches-its-name
        if _hint(tier, f"incarnations/{name}", length, Incarnation) in (None, named):  # else it was moved here
            found.incarnations[named.id] = named
    for at, generation in found.generations.items():
        found.order = max(found.order, generation.commit.order)
        if at.incarnation not in found.incarnations:  # guard: commits-imply-incarnations
            one = generation.commit
            found.incarnations[at.incarnation] = Incarnation(
                format=layout.FORMAT, order=one.order, id=at.incarnation, parent=one.continues
            )
    return found


def newest_incarnation(tier: Tier) -> Incarnation | None:
    """The newest incarnation that is recorded in a run, from the names of the records; None where there is none."""
    named = filter(None, map(layout.parse_incarnation, tier.list("incarnations")))
    return max(named, key=lambda one: one.order, default=None)


def mark(tier: Tier, generation: Generation, findings: list[Finding]) -> None:
    """Note beside a generation what reading all of it found. Durable on return."""
    name = layout.VERIFIED if not findings else layout.UNFIT if intact(findings) else layout.DAMAGED
    home = layout.folder(generation.id)
    record = Mark(format=layout.FORMAT, root=generation.root, findings=findings[:FINDINGS_LIMIT])
    if name in tier.list(home):
        tier.delete(f"{home}/{name}")
    tier.put_new(f"{home}/{name}", layout.encode(record))  # gap: before_mark
    for old in MARKS & set(tier.list(home)) - {name}:  # last: on a full disk the old evidence stays
        tier.delete(f"{home}/{old}")  # guard: old-mark-deleted


def label(tier: Tier, generation: Generation, milestone: bool, metrics: Mapping[str, float]) -> Generation:
    """Add to what retention goes by, beside the commit, which never changes. Durable on return."""
    home = layout.folder(generation.id)
    number = 1 + max((layout.label_number(name) or 0 for name in tier.list(home)), default=0)
    record = Label(format=layout.FORMAT, root=generation.root, milestone=milestone, metrics=dict(metrics))
    tier.put_new(f"{home}/{layout.label_name(number)}", layout.encode(record))
    return msgspec.structs.replace(generation, commit=_with(generation.commit, record))


def _labels(tier: Tier, home: str, there: Listing) -> tuple[list[Label], bool]:
    """The labels in a folder, in their order, and whether there are others, which cannot be read."""
    names = sorted((number, name) for name in there if (number := layout.label_number(name)) is not None)
    found = [_hint(tier, f"{home}/{name}", there[name], Label) for _, name in names]
    return [one for one in found if one is not None], None in found


def _with(commit: Commit, label: Label) -> Commit:
    milestone, metrics = commit.milestone or label.milestone, {**commit.metrics, **label.metrics}
    return msgspec.structs.replace(commit, milestone=milestone, metrics=metrics)


def _mark(tier: Tier, home: str, name: str, root: str, there: Mapping[str, int | None]) -> Mark | None:
    found = _hint(tier, f"{home}/{name}", there.get(name), Mark)
    return found if found and found.root == root else None  # guard: mark-belongs-to-commit


def _hint(tier: Tier, name: str, length: int | None, kind: type[layout.T]) -> layout.T | None:
    """A record that may be damaged or gone without harm."""
    if length is None:
        return None
    try:
        return layout.decode(_read(tier, name, length), kind, name)
    except Damaged:
        return None  # guard: damaged-hint-ignored


def _read(tier: Tier, name: str, length: int | None, limit: int = layout.RECORD_LIMIT_BYTES) -> bytes:
    if length is None:
        raise MissingBlob(f"{name} is gone", blob=name)
    if not 0 <= length <= limit:  # guard: record-length-limit
        raise ManifestInvalid(f"{name} is no file of a record's length", blob=name)
    buffer = bytearray(length)
    # guard: record-read-bypasses-cache
    tier.read_into(Extent(blob=name, offset=0, length=length), memoryview(buffer), fresh=True)
    return bytes(buffer)

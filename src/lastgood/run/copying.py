"""Makes a generation whole in one place from other places, where it is the same: ids, manifests, records, digests.

A place that lacks the generation gets a copy. A place whose copy is damaged is mended, chunk by chunk.

    tensor files, chunk by chunk, verified -> manifests -> COMMIT -> labels -> read again -> VERIFIED

In an object store, and in a directory behind memory, the files of several ranks are put into packs (pack_copies.py).

Invariants
  1. A generation exists at the target only after every file of it is durable there, as after a save (format/commit.py).
  2. No byte is written to the target that differs from its digest in the manifest.
  3. A file of a committed generation is replaced only by a whole one (Mendable.replace); it is never deleted first.
  4. What was interrupted is continued: a file that exists at the target counts if it reads back as committed.
  5. A file gets its name at the target once all bytes are there. Two processes may copy the same one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from typing import Literal, Protocol

from ..engine.read_file import RankFiles
from ..errors import Damaged, Refused
from ..format import commit, layout, sealed
from ..ports import Mendable, Stop, Tier
from ..records import Blob, Finding, Generation, GenerationId, Manifest, RunHeader, intact
from . import pack_copies
from .file_copies import Copying as Copying
from .file_copies import reads_back, write
from .packed import PackedTier
from .reader import disagreeing


def adopt_run(source: Tier, target: Tier, survey: commit.Survey) -> None:
    """Make the target a place of the run that `survey` describes. Raises Refused if it holds another run."""
    run, there = run_of(survey), commit.survey(target)
    other = run_of(there)
    if run is None:
        raise Refused(
            f"{source.place} has no generation and no header that names the run", safe="Nothing was copied.", todo=""
        )
    if other not in (None, run):  # guard: copy-only-into-same-run
        raise Refused(
            f"{target.place} is a place of another run ({other}), and {source.place} holds the run {run}",
            safe="Nothing was copied.",
            todo="Give an empty place, or one to which this run was copied before.",
        )
    if there.run is None:
        target.put_new(layout.HEADER, layout.encode(RunHeader(format=layout.FORMAT, run=run)))


def run_of(survey: commit.Survey) -> str | None:
    """The id of a run, from its header or from a commit."""
    return survey.run or next((one.commit.run for one in survey.generations.values()), None)


def is_whole(tier: Tier, one: Generation) -> bool:
    """Whether a place has the manifests of all ranks of a generation, which are written after the files they name."""
    here = tier.list(layout.folder(one.id))
    return all(seal.manifest in here for seal in one.commit.seals)


def copy_incarnations(source: Tier, target: Tier) -> None:
    """Copy the records of incarnations, which say what descends from what. They are small, and never change."""
    have = target.list("incarnations").keys()
    for name in sorted(source.list("incarnations").keys() - have):
        if (one := layout.parse_incarnation(name)) is not None:
            target.put_new(f"incarnations/{name}", layout.encode(one))


Task = Literal["copy", "pack", "read", "protect"]
"""What a rank does with the files of its part: copy them to a place, put them with those of its node into a pack there,
read them there again, write their parity there."""


class Others(Protocol):
    """The other ranks, which do their part of the same work at the same time (part_copies.OtherRanks)."""

    def own_part(self, generation: Generation) -> Collection[int] | None:
        """The ranks that wrote the generation whose files are the part of this process; None: all of them."""

    def packed_part(self, generation: Generation) -> Collection[int] | None:
        """The ranks that wrote the generation whose files this process puts into a pack; None: all of them."""

    def confirm(self, generation: Generation, of: Collection[int], seconds: float, stop: Stop) -> bool:
        """Let the others read the files that these ranks wrote. Returns whether all of them were reported as good in so
        many seconds. Raises Cancelled once `stop()` is true."""

    def ask(self, generation: Generation, task: Task, code: str = "") -> None:
        """Ask the others to do their part. `code`: of the parity, as "8+2"."""

    def answers(self) -> list[Finding]:
        """Wait until they have done so. Returns their findings; raises what has failed."""

    def end(self) -> None:
        """Tell the others that nothing more is asked."""


class Nobody:
    """`Others` where this process does everything."""

    def own_part(self, generation: Generation) -> None:
        """All ranks."""

    def packed_part(self, generation: Generation) -> None:
        """All ranks."""

    def confirm(self, generation: Generation, of: Collection[int], seconds: float, stop: Stop) -> bool:
        return False

    def ask(self, generation: Generation, task: Task, code: str = "") -> None:
        """Nobody is there to ask."""

    def answers(self) -> list[Finding]:
        return []

    def end(self) -> None:
        """Nobody waits."""


def complete(
    target: Mendable,
    sources: Sequence[Tier],
    generation: Generation,
    copying: Copying,
    others: Others | None = None,
) -> list[str]:
    """Make a generation whole at the target, and read it again there. Returns the names of the files that were written.

    `sources`: places that may hold the generation, the cheapest first; `generation`: as one of them has it. Each chunk
    comes from the target if it is good there, else from the first source where it is. `others`: processes that copy a
    part of it (None: nobody). Raises Damaged if no place has a chunk or record, and if the result does not read back;
    NameTaken if the target holds another generation of this id; the errors of writing.
    """
    others = others or Nobody()
    mine = others.own_part(generation)
    packed = target if pack_copies.wanted(target, sources, generation, copying) else None
    others.ask(generation, "pack" if packed else "copy")
    if packed:
        written = pack_files(packed, sources, generation, others.packed_part(generation), copying)
    else:
        written = copy_files(target, sources, generation, mine, copying)
    others.answers()  # guard: commit-copied-after-all-parts
    records = sources
    if packed:
        written += pack_copies.pack_manifests(packed, sources, generation, generation.commit.seals, copying)
        records = [target, *sources]  # manifests of other nodes are not asked for twice
    written += commit.copy_records(records, target, generation)
    if isinstance(target, PackedTier):
        pack_copies.remove_unfinished(target, generation)
    others.ask(generation, "read")
    findings = copying.agent.read_all(target, generation, copying.arena, copying.workers, copying.stop, mine)
    findings += others.answers()
    if mine is not None and not findings:
        findings = disagreeing(target, generation)
    commit.mark(target, generation, findings)  # guard: copy-marked-after-reading
    if not intact(findings):
        raise Damaged(
            f"the copy of {generation.id} in {target.place} does not read back: {findings[0].what}",
            safe="What was copied from is untouched. The copy is marked as damaged.",
            todo=f"Check {target.place}, then copy it again.",
        )
    return written


def copy_files(
    target: Mendable, sources: Sequence[Tier], generation: Generation, of: Collection[int] | None, copying: Copying
) -> list[str]:
    """Make the tensor files of these ranks whole at the target. Returns the names of those that were written.

    `of`: the ranks that wrote them; None: all. The other parameters and the errors are those of `complete`.
    """
    if (done := copying.agent.copy(target, sources, generation, of, copying.stop)) is not None:
        return done  # guard: copied-by-agent-is-named
    files = [(one, blob) for one in _manifests([*sources, target], generation, of) for blob in one.blobs]
    return [blob.name for one, blob in files if _complete_blob(target, sources, generation.id, one, blob, copying)]


def pack_files(
    target: Mendable, sources: Sequence[Tier], generation: Generation, of: Collection[int] | None, copying: Copying
) -> list[str]:
    """As `copy_files`, with the files that are missing at the target in one pack."""
    if (done := copying.agent.copy(target, sources, generation, of, copying.stop, "pack")) is not None:
        return done
    assert isinstance(target, PackedTier)
    listing = target.list(layout.folder(generation.id))
    files = [(one, blob) for one in _manifests([*sources, target], generation, of) for blob in one.blobs]
    found = [(one, blob) for one, blob in files if blob.name in listing]
    written = [blob.name for one, blob in found if _complete_blob(target, sources, generation.id, one, blob, copying)]
    missing = [(one, blob) for one, blob in files if blob.name not in listing]
    return written + pack_copies.pack_tensors(target, sources, generation, missing, copying)


def _manifests(places: Sequence[Tier], generation: Generation, of: Collection[int] | None) -> list[Manifest]:
    """The manifests of these ranks (None: of all), each as `sealed.first_sealed`."""
    seals = [one for one in generation.commit.seals if of is None or one.rank in of]
    return [sealed.first_sealed(places, generation, one) for one in seals]


def holds(tier: Tier, generation: Generation) -> bool:
    """Whether a place has this generation and has read it back. One that was not read yet counts as absent."""
    if layout.COMMIT not in tier.list(layout.folder(generation.id)):
        return False
    try:
        there = commit.read_generation(tier, generation.id, generation.commit.run)
    except Damaged:
        return False
    return there.root == generation.root and not there.damaged and (there.verified or bool(there.unfit))


def _complete_blob(
    target: Mendable, sources: Sequence[Tier], at: GenerationId, manifest: Manifest, blob: Blob, copying: Copying
) -> bool:
    """Make one tensor file whole at the target. Returns whether it was written."""
    folder = layout.folder(at)
    name, listing = f"{folder}/{blob.name}", target.list(folder)
    there = blob.name in listing
    # guard: found-copy-read-back
    if listing.get(blob.name) == blob.length and reads_back(RankFiles(target, folder, manifest), blob, copying):
        copying.count_bytes(blob.length)
        return False
    # Of a job whose coordinator has died, another rank may still copy this file while an agent does: neither may write
    # into what the other has finished, or remove it.
    staged = there or not commit.visible_is_durable(target)  # guard: copy-has-own-name
    by = f"{name}.{os.getpid()}-{threading.get_ident()}.tmp" if staged else name
    if by.rpartition("/")[2] in listing:  # of a process that has ended, whose number this one has
        target.delete(by)  # guard: stale-copy-removed
    places = [RankFiles(tier, folder, manifest) for tier in ([target, *sources] if there else sources)]
    upload = target.create(by, blob.length)
    try:
        write(upload, 0, places, blob, copying)
        upload.finish()
    except BaseException:
        upload.abort()
        raise
    if staged:
        target.replace(name, by)
    return True

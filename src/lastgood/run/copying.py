"""Makes a generation whole in one place from other places, where it is the same: ids, manifests, records, digests.

A place that lacks the generation gets a copy. A place whose copy is damaged is mended, chunk by chunk.

    tensor files, chunk by chunk, verified -> manifests -> COMMIT -> labels -> read again -> VERIFIED

Invariants
  1. A generation exists at the target only after every file of it is durable there, as after a save (format/commit.py).
  2. No byte is written to the target that differs from its digest in the manifest.
  3. A file of a committed generation is replaced only by a whole one (Mendable.replace); it is never deleted first.
  4. What was interrupted is continued: a file that exists at the target counts if it reads back as committed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal, Protocol

from ..engine import read_file
from ..engine.arena import Arena
from ..engine.read_file import RankFiles, VerifiedChunks
from ..errors import Cancelled, Damaged, Refused
from ..format import commit, layout
from ..io.files import round_up
from ..ports import Mendable, Tier
from ..records import Blob, Finding, Generation, GenerationId, Manifest, RunHeader, intact
from .reader import disagreeing, read_all
from .watched import CountBytes

Stop = Callable[[], bool]


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


def copy_incarnations(source: Tier, target: Tier) -> None:
    """Copy the records of incarnations, which say what descends from what. They are small, and never change."""
    have = target.list("incarnations").keys()
    for name in sorted(source.list("incarnations").keys() - have):
        if (one := layout.parse_incarnation(name)) is not None:
            target.put_new(f"incarnations/{name}", layout.encode(one))


@dataclass(frozen=True)
class Copying:
    """How copies are made. `arena`: buffers for one chunk after another. `workers`: the threads that read and digest.

    `count_bytes`: called with the bytes of each chunk that is done. `stop`: polled before each chunk; once it is true,
    Cancelled is raised.
    """

    arena: Arena
    workers: Executor
    count_bytes: CountBytes = lambda count: None
    stop: Stop = lambda: False


Task = Literal["copy", "read", "protect"]
"""What a rank does with the files of its part: copy them to a place, read them there again, write their parity there.
"""


class Others(Protocol):
    """The other ranks, which do their part of the same work at the same time (part_copies.OtherRanks)."""

    def own_part(self, generation: Generation) -> Collection[int] | None:
        """The ranks that wrote the generation whose files are the part of this process; None: all of them."""

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
    others.ask(generation, "copy")
    written = copy_files(target, sources, generation, mine, copying)
    others.answers()  # guard: commit-copied-after-all-parts
    written += commit.copy_records(sources, target, generation)
    others.ask(generation, "read")
    findings = read_all(target, generation, copying.arena, copying.workers, copying.stop, of=mine)
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
    ranks = [one.rank for one in generation.commit.seals if of is None or one.rank in of]
    manifests = [_manifest([*sources, target], generation, rank) for rank in ranks]
    return [name for manifest in manifests for name in copy_files_of(target, sources, manifest, copying)]


def copy_files_of(target: Mendable, sources: Sequence[Tier], manifest: Manifest, copying: Copying) -> list[str]:
    """As `copy_files`, for the rank of this manifest."""
    at = GenerationId(step=manifest.step, incarnation=manifest.incarnation)
    return [one.name for one in manifest.blobs if _complete_blob(target, sources, at, manifest, one, copying)]


def holds(tier: Tier, generation: Generation) -> bool:
    """Whether a place has this generation and has read it back. One that was not read yet counts as absent."""
    if layout.COMMIT not in tier.list(layout.folder(generation.id)):
        return False
    try:
        there = commit.read_generation(tier, generation.id, generation.commit.run)
    except Damaged:
        return False
    return there.root == generation.root and not there.damaged and (there.verified or bool(there.unfit))


class _FirstGood:
    """`read_file.Chunks` of one tensor file: each chunk from the first place where it is good."""

    def __init__(self, places: Sequence[RankFiles], blob: Blob) -> None:
        self.blob = blob
        self._places = [VerifiedChunks(files, blob) for files in places]

    def read(self, index: int, buffer: memoryview) -> memoryview:
        for chunks in self._places[:-1]:
            with contextlib.suppress(Damaged):
                return chunks.read(index, buffer)
        return self._places[-1].read(index, buffer)


def _manifest(places: Sequence[Tier], generation: Generation, rank: int) -> Manifest:
    """One rank's manifest, from the first place where it agrees with its seal. Its files may be damaged there."""
    seal = generation.commit.seals[rank]
    for tier in places[:-1]:
        with contextlib.suppress(Damaged):
            return commit.sealed_record(tier, generation, seal)
    return commit.sealed_record(places[-1], generation, seal)


def _complete_blob(
    target: Mendable, sources: Sequence[Tier], at: GenerationId, manifest: Manifest, blob: Blob, copying: Copying
) -> bool:
    """Make one tensor file whole at the target. Returns whether it was written."""
    folder = layout.folder(at)
    name, listing = f"{folder}/{blob.name}", target.list(folder)
    there = blob.name in listing
    # guard: found-copy-read-back
    if listing.get(blob.name) == blob.length and _reads_back(RankFiles(target, folder, manifest), blob, copying):
        copying.count_bytes(blob.length)
        return False
    by = f"{name}.tmp" if there else name
    if there:
        target.delete(by)
    places = [RankFiles(tier, folder, manifest) for tier in ([target, *sources] if there else sources)]
    upload = target.create(by, blob.length)
    try:
        with (
            read_file.borrowed(copying.arena, read_file.buffer_bytes([blob])) as buffers,
            contextlib.closing(read_file.in_order(_FirstGood(places, blob), buffers, copying.workers)) as chunks,
        ):
            for number, (data, error) in enumerate(chunks):
                if error is not None:  # guard: damaged-chunk-not-copied
                    raise error
                if copying.stop():
                    raise Cancelled(f"the copy of {name} was interrupted")
                padded = buffers[number % len(buffers)][: round_up(len(data))]
                padded[len(data) :] = bytes(len(padded) - len(data))
                upload.write_at(padded, number * blob.chunk_bytes)
                copying.count_bytes(len(data))
        upload.finish()
    except BaseException:
        upload.abort()
        raise
    if there:
        target.replace(name, by)
    return True


def _reads_back(files: RankFiles, blob: Blob, copying: Copying) -> bool:
    """Whether a file that exists already has the bytes that were committed."""
    with (
        read_file.borrowed(copying.arena, read_file.buffer_bytes([blob])) as buffers,
        contextlib.closing(read_file.in_order(VerifiedChunks(files, blob), buffers, copying.workers)) as chunks,
    ):
        for _, error in chunks:
            if error is not None:
                return False
            if copying.stop():
                raise Cancelled("the reading of a copy was interrupted")
    return True

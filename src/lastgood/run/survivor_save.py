"""A generation of all ranks, of which those that have survived another one have written the tensors.

    each survivor              what it holds of tensors, in files that no manifest names yet       `write_held`
    a process that outlives    what the ranks have noted, the manifests of all ranks, and COMMIT   `commit_for_all`
    all of them

Nobody waits for anybody: all survivors derive the id of the generation from the step and the opening of the run.

Invariants
  1. It is committed by a new opening of the run, under the lock of the run: no other process commits meanwhile, and
     what the dead attempt has left unfinished is settled first.
  2. Nothing is committed if anything was committed since the state that is to be saved (`Origin.is_superseded`).
  3. Of the ranks that hold the same parts of tensors, one writes them: the first one that claims them.
  4. The commit protocol is that of every save (save.py): until COMMIT exists there is no generation, and every earlier
     one stays as it is.
  5. Of a run in several places, one directory that all ranks see receives it. It has a higher order than every
     generation of the attempt, in whatever place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import msgspec

from ..engine import write_file
from ..engine.arena import Arena
from ..engine.write_file import Chunk
from ..errors import CommitUnknown, LastgoodError, NameTaken, NotARun, TierDown
from ..format import layout
from ..format.layout import Image, Tensor
from ..limits import CHUNK_BYTES, WORKERS
from ..policy.survival import Holders
from ..ports import Tier
from ..records import Blob, Generation, GenerationId, Incarnation, Piece
from ..storage.directory import WriteMode
from . import access, memory_place, paths
from .known import Environment, KnownRun
from .save import RankPart, RankWriter, sealed_part
from .survivor_notes import Note, Written, stores
from .writer import RunWriter

CLAIM = "claim-{}.tmp"
"""The name of a file that claims what some ranks hold; it is deleted before the commit."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """From what the state descends. `incarnation`: in which the attempt has saved, or would have; None: in none yet."""

    step: int
    incarnation: Incarnation | None

    @property
    def order(self) -> int:
        """That of the incarnation; 0 without one."""
        return self.incarnation.order if self.incarnation is not None else 0

    def parent(self, generations: Sequence[Generation]) -> GenerationId | None:
        """The generation that a save of the state continues; None: it starts from scratch.

        Of `generations`: the newest of the attempt, else the one that the attempt has continued.
        """
        mine = self.incarnation
        if mine is None:
            return None
        return max((one.id for one in generations if one.id.incarnation == mine.id), default=mine.parent)

    def is_superseded(self, generations: Sequence[Generation]) -> bool:
        """Whether one of `generations` holds this step or a later one, or was saved by a later opening of the run."""
        own = self.incarnation.id if self.incarnation is not None else ""
        return any(
            one.step >= self.step if one.id.incarnation == own else one.commit.order >= self.order
            for one in generations
        )


def generation_id(opening: str, step: int) -> GenerationId:
    """The id of the just-in-time save of a step: the same for all ranks. `opening`: as in `Note`."""
    return GenerationId(step=step, incarnation=hashlib.sha256(f"{opening}/{step}".encode()).hexdigest()[:8])


# ---- at a survivor -------------------------------------------------------------------------------------------


class HeldWriter:
    """Writes what one survivor holds into the folder of the generation `at`. `by`: how this rank writes."""

    def __init__(self, at: GenerationId, by: RankWriter) -> None:
        self._at, self._by = at, by
        self._folder = layout.folder(at)

    def claim(self, holders: Holders) -> bool:
        """Whether this rank is the one that writes what these ranks hold. Raises as `Tier.put_new`."""
        name = CLAIM.format(hashlib.sha256(repr(holders).encode()).hexdigest()[:16])
        try:
            self._by.tier.put_new(f"{self._folder}/{name}", f"rank {self._by.rank}".encode())
        except NameTaken:
            return False  # guard: shard-is-written-once
        return True

    def write(self, images: Sequence[Image], chunks: Iterator[Chunk]) -> tuple[list[Blob], list[Piece]]:
        """Make tensor files durable. `chunks`: yields the bytes of `images`, in chunks of CHUNK_BYTES. Raises as a
        save."""
        return _written(self._by, self._folder, images, chunks)


@contextlib.contextmanager
def held_writer(
    path: str | os.PathLike[str], at: GenerationId, rank: int, *, mode: WriteMode, algorithm: str
) -> Iterator[HeldWriter]:
    """Write tensor files of a generation that another process commits. Takes no lock. `path`: a directory of the run.
    `mode`, `algorithm`: as the attempt has saved. Raises NotARun, NotWritable."""
    with access.for_sharing(path, mode) as tier, ThreadPoolExecutor(WORKERS, "lastgood-write") as workers:
        yield HeldWriter(at, RankWriter(tier, rank, algorithm, workers))


# ---- at the process that commits -----------------------------------------------------------------------------


def commit_for_all(notes: Sequence[Note], written: Sequence[Written], last_place: str) -> Generation | None:
    """Commit a step, durable on return. None: this step or a later state was saved, in any place of the run.

    `notes`: of every rank, at this step. `written`: what survivors have written of it. `last_place`: of the run, which
    names its memory. Raises RunLocked while another process has the run open, and what a save raises: no generation
    exists then, except after CommitUnknown, where it may.
    """
    first = written[0]
    at = generation_id(first.opening, first.step)
    origin = Origin(step=first.step, incarnation=first.incarnation)
    # On a full disk the save fails: what retention may delete, only the attempt knew.
    environment = Environment(new_id=lambda: at.incarnation, make_room=lambda _: False)
    mode = msgspec.convert(first.mode, WriteMode)
    # Raises NotARun where this process does not see the directory of the ranks.
    access.for_reading(first.place)  # guard: no-run-made-for-survivors
    with access.for_writing(first.place, mode) as tier, ThreadPoolExecutor(WORKERS, "lastgood-write") as workers:
        run = RunWriter(tier, workers, algorithm=first.algorithm, environment=environment, resumes=at)
        if at in run.survey.generations:  # the process that has decided before was lost after its commit
            return run.survey.generations[at]
        # What a survivor calls the memory of the run is that of its node.
        # guard: memory-of-committing-node-counts
        others = [memory_place.url_of(last_place) if paths.in_memory(one) else one for one in first.others]
        # guard: what-other-places-hold-counts
        run.known.below = [KnownRun(one, environment) for one in _others_seen(others)]
        parent = origin.parent([*run.known.everywhere.generations.values()])
        if parent is not None and parent not in run.known.everywhere.generations:  # guard: parent-in-a-bucket-is-found
            buckets = _others_seen(others, objects=True)
            run.known.below = [*run.known.below, *(KnownRun(one, environment) for one in buckets)]
        generations = [*run.known.everywhere.generations.values()]
        if origin.is_superseded(generations):  # guard: newer-generation-not-shadowed
            return None
        run.begin(origin.parent(generations), above=origin.order)  # guard: order-above-that-of-the-attempt
        at = run.admit(first.step)
        with _cleared_on_failure(run, at):
            _require_written(tier, at, written)
            by = run.rank_writer(workers)
            parts = [_part(replace(by, rank=rank), at, note, notes[0], written) for rank, note in enumerate(notes)]
            generation = run.publish(at, parts, pinned=False, milestone=False, metrics={})
        with contextlib.suppress(LastgoodError):  # COMMIT holds the same; the next opening writes it
            run.record_incarnation()
        return generation


def _others_seen(urls: Sequence[str], objects: bool = False) -> list[Tier]:
    """Of the other places of the run those that this process can read: directories, and the memory of this machine.

    `objects`: object stores in their place (default False: what one holds of the attempt, a directory above it held
    first; but the generation that the attempt has continued may be only there).
    """
    found = list[Tier]()
    for url in urls:
        if (paths.parsed(url).kind == "objects") == objects:
            with contextlib.suppress(NotARun):  # a front that no rank of this node has
                found.append(access.for_reading(url))
    return found


def _require_written(tier: Tier, at: GenerationId, written: Sequence[Written]) -> None:
    """Delete the claims. Raises TierDown where a file of a survivor is not there any more: another process, which had
    the run open meanwhile, has removed it."""
    folder = layout.folder(at)
    found: Mapping[str, int | None] = getattr(tier, "list_files", tier.list)(folder)  # remembers nothing
    for name in found:
        if layout.is_litter(folder, name):
            tier.delete(f"{folder}/{name}")
    lost = [blob.name for one in written for blob in one.blobs if found.get(blob.name) != blob.length]
    if lost:  # guard: removed-file-not-committed
        safe = "Every committed generation is untouched."
        raise TierDown(f"{folder}/{lost[0]} was removed before it was committed", safe=safe)


def _part(by: RankWriter, at: GenerationId, note: Note, first: Note, written: Sequence[Written]) -> RankPart:
    """The sealed part of one rank: what it has written as a survivor, if it has, and what only it had."""
    mine = [one for one in written if one.rank == by.rank]
    finite = {name for one in written for name in one.finite}
    own = {one.name: one for one in note.tensors if stores(one, by.rank, first)}
    tensors = [Tensor(name, one.dtype, tuple(one.shape), name in finite, own=by.rank != 0) for name, one in own.items()]
    blobs = [blob for one in mine for blob in one.blobs]
    pieces = [piece for one in mine for piece in one.pieces]
    if tensors or not blobs:
        files = layout.images(tensors, by.rank, first=len(blobs))
        more = _written(by, layout.folder(at), files, _chunks(files, {name: one.data for name, one in own.items()}))
        blobs, pieces = blobs + more[0], pieces + more[1]
    return sealed_part(by, at, blobs, pieces, note.aliases, msgspec.json.decode(note.values))


def _chunks(files: Sequence[Image], data: Mapping[str, bytes]) -> Iterator[Chunk]:
    """The bytes of tensor files, in order. `data`: name of a whole tensor -> its bytes."""
    arena = Arena(CHUNK_BYTES * (WORKERS + 1), CHUNK_BYTES)
    for image in files:
        yield from write_file.filled(image, data, arena)


@contextlib.contextmanager
def _cleared_on_failure(run: RunWriter, at: GenerationId) -> Iterator[None]:
    """Remove the files of a save that fails in the block, unless its generation may exist."""
    try:
        yield
    except (CommitUnknown, NameTaken):
        raise
    except BaseException:
        run.clear(at)
        raise


def _written(
    by: RankWriter, folder: str, images: Sequence[Image], chunks: Iterator[Chunk]
) -> tuple[list[Blob], list[Piece]]:
    blobs, pieces = list[Blob](), list[Piece]()
    for image in images:
        blob, of_blob = write_file.write(
            by.tier, folder, image, chunks, chunk_bytes=CHUNK_BYTES, algorithm=by.algorithm, writers=by.writers
        )
        blobs.append(blob)
        pieces += of_blob
    return blobs, pieces

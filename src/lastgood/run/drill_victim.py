"""A process that saves into the scratch run of a drill, and is killed there. Never opens any other run.

`python -m lastgood.run.drill_victim PLACE DRILL` saves all tensors of the newest generation again, as the next step.
Halfway it writes a line to stdout and waits for one on stdin, so that it can be killed within the save. It ends with
the drill, the process DRILL: the next drill removes PLACE, and a process that opens it later would make it anew.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from ..engine.arena import Arena, Lease
from ..errors import Cancelled, LastgoodError, NoSpace, TierDown
from ..format import commit, layout
from ..io import processes
from ..io.files import round_up
from ..limits import CHUNK_BYTES, WORKERS
from ..ports import Tier
from ..records import Extent, Generation, GenerationId, Manifest
from . import access
from .reader import RunReader
from .save import ReadyChunks, SaveRequest
from .writer import RunWriter

HALFWAY, GO_ON = b"halfway\n", b"go on\n"
CHUNKS_LEAST = 8
"""A small state is saved in so many chunks, so that there is a middle."""


# ---- the drill ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def halfway(place: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has written half of a save into a scratch place, and waits. It is killed at the end of the block.

    `place`: absolute path or URL. Raises TierDown if the process does not come so far, NoSpace if its disk is full.
    """
    with subprocess.Popen(
        processes.command_of("lastgood.run.drill_victim", place, str(os.getpid())),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={**os.environ, "PYTHONPATH": processes.python_path()},
    ) as process:
        try:
            assert process.stdout is not None
            if process.stdout.readline() != HALFWAY:
                raise _failed(process)
            yield process
        finally:
            process.kill()


def saved(place: str) -> None:
    """Let a process save into a scratch place, from start to end. Raises TierDown if it fails, NoSpace as `halfway`."""
    with halfway(place) as process:
        assert process.stdin is not None
        process.stdin.write(GO_ON)
        process.stdin.close()
        process.stdin = None
        if process.wait():
            raise _failed(process)


def _failed(process: subprocess.Popen[bytes]) -> LastgoodError:
    last = process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]  # its stdin ends: so does it
    kind = NoSpace if process.returncode == NoSpace.exit_code else TierDown
    return kind(f"a process could not save into the scratch run: {last}", safe="It is a copy.")


# ---- the process -------------------------------------------------------------------------------------------------


def main(place: str, drill: int) -> None:
    """Save the newest generation of a scratch place again, as its next step. `drill`: the process of the drill."""
    processes.die_with(drill)
    with (
        access.for_writing(place, "atomic_dirsync") as tier,
        ThreadPoolExecutor(WORKERS, "lastgood-write") as workers,
    ):
        newest = RunReader(tier).generation()
        manifests = commit.read_manifests(tier, newest)
        writer = RunWriter(tier, workers, algorithm=manifests[0].digest)
        images = layout.images(_tensors(manifests))
        total = sum(one.length for one in images)
        arena = Arena(2 * WORKERS * CHUNK_BYTES, min(CHUNK_BYTES, round_up(-(-total // CHUNKS_LEAST))))
        writer.begin(newest.id)
        chunks = _waiting(_filled(tier, newest, manifests, images, arena), total // arena.chunk_bytes // 2)
        at = writer.admit(newest.step + 1)
        writer.save(SaveRequest(at=at, images=images, chunks=ReadyChunks(chunks), chunk_bytes=arena.chunk_bytes))


def _tensors(manifests: Sequence[Manifest]) -> list[layout.Tensor]:
    """Every piece of every rank as a tensor of its own, with a name that says which piece it is."""
    return [
        layout.Tensor(f"{one.rank}/{index}", piece.dtype, tuple(piece.shape), piece.finite)
        for one in manifests
        for index, piece in enumerate(one.pieces)
    ]


def digests(manifests: Sequence[Manifest], of_copy: bool = False) -> dict[str, str]:
    """The content digest of each piece, by the name that it has in a save of this process.

    `of_copy`: these are the manifests of such a save.
    """
    if of_copy:
        return {piece.name: piece.digest for one in manifests for piece in one.pieces}
    return {f"{one.rank}/{index}": piece.digest for one in manifests for index, piece in enumerate(one.pieces)}


def _filled(
    tier: Tier, source: Generation, manifests: Sequence[Manifest], images: Sequence[layout.Image], arena: Arena
) -> Iterator[Lease]:
    """The chunks of the images, with bytes of the generation `source`. The consumer releases each lease."""
    pieces = {f"{one.rank}/{index}": piece for one in manifests for index, piece in enumerate(one.pieces)}
    for image in images:
        for parts in layout.segments(image, arena.chunk_bytes):
            lease = arena.take()
            assert lease is not None
            for tensor, start, at, length in parts:
                target = lease.buffer[at : at + length]
                if tensor < 0:
                    target[:] = image.header[start : start + length]
                elif length:
                    extent = pieces[image.tensors[tensor][0].name].extent
                    _read(tier, source.id, extent, start, target)
            yield lease


def _read(tier: Tier, at: GenerationId, extent: Extent, start: int, target: memoryview) -> None:
    name = f"{layout.folder(at)}/{extent.blob}"
    tier.read_into(Extent(blob=name, offset=extent.offset + start, length=len(target)), target)


def _waiting(chunks: Iterator[Lease], count: int) -> Iterator[Lease]:
    """The chunks, with a wait before the one of this number."""
    for number, chunk in enumerate(chunks):
        if number == count:
            sys.stdout.buffer.write(HALFWAY)
            sys.stdout.buffer.flush()
            if sys.stdin.buffer.readline() != GO_ON:
                chunk.release()
                raise Cancelled("the drill has ended")
        yield chunk


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except NoSpace as error:
        print(error.what, file=sys.stderr)
        sys.exit(error.exit_code)

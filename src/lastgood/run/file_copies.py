"""Copies of tensor files, chunk by chunk: each chunk is verified, and comes from the first place where it is good.

Decides nothing about which files are copied where (copying.py, pack_copies.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from ..engine import read_file
from ..engine.arena import Arena
from ..engine.read_file import RankFiles, VerifiedChunks
from ..errors import NODE_FAILED, Cancelled, Damaged, LastgoodError
from ..io.files import round_up
from ..ports import Stop, Upload, never
from ..records import Blob
from .agent_work import AgentWork
from .watched import CountBytes


@dataclass(frozen=True)
class Copying:
    """How copies are made. `arena`: buffers for one chunk after another. `workers`: the threads that read and digest.

    `count_bytes`: called with the bytes of each chunk that is done. `stop`: polled before each chunk; once it is true,
    Cancelled is raised. `agent`: reads and copies what lies in memory for this process, where it can. `plain`: what
    comes into a directory is not put into packs.
    """

    arena: Arena
    workers: Executor
    count_bytes: CountBytes = lambda count: None
    stop: Stop = never
    agent: AgentWork = field(default_factory=lambda: AgentWork(None))
    plain: bool = False


class _FirstGood:
    """`read_file.Chunks` of one tensor file: each chunk from the first place where it is good."""

    def __init__(self, places: Sequence[RankFiles], blob: Blob) -> None:
        self.blob = blob
        self._places = [VerifiedChunks(files, blob) for files in places]
        self._failed = dict[VerifiedChunks, LastgoodError]()
        """places on nodes that cannot be used, which are not asked again"""

    def read(self, index: int, buffer: memoryview) -> memoryview:
        for chunks in self._places[:-1]:
            try:
                if chunks not in self._failed:
                    return chunks.read(index, buffer)
            except Damaged:
                continue
            except NODE_FAILED as error:
                self._failed[chunks] = error  # guard: failed-node-passed-over
        try:
            return self._places[-1].read(index, buffer)
        except Damaged as error:
            for outage in self._failed.values():
                raise outage from error  # guard: outage-is-no-damage
            raise


def write(upload: Upload, offset: int, places: Sequence[RankFiles], blob: Blob, copying: Copying) -> None:
    """Write a tensor file into an upload, from `offset` on, in whole pages.

    Raises Damaged if no place has a chunk, Cancelled once `copying.stop()` is true, and the errors of writing.
    """
    with (
        read_file.borrowed(copying.arena, read_file.buffer_bytes([blob])) as buffers,
        contextlib.closing(read_file.in_order(_FirstGood(places, blob), buffers, copying.workers)) as chunks,
    ):
        for number, (data, error) in enumerate(chunks):
            if error is not None:  # guard: damaged-chunk-not-copied
                raise error
            if copying.stop():
                raise Cancelled(f"the copy of {blob.name} was interrupted")
            padded = buffers[number % len(buffers)][: round_up(len(data))]
            padded[len(data) :] = bytes(len(padded) - len(data))
            upload.write_at(padded, offset + number * blob.chunk_bytes)
            copying.count_bytes(len(data))


def reads_back(files: RankFiles, blob: Blob, copying: Copying) -> bool:
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

"""Chunks that several ranks of a machine want of a generation in an object store: read once, into a shared file.

    each rank    the chunks that it wants -> rank 0, which names those that two ranks of a machine want
    each rank    reads its share of them from the store into a file that the ranks of its machine share
    all ranks    wait for each other, then read these chunks from the file, and everything else from the store

Ranks that see a directory share its page cache instead (loop/load.py).

Invariants
  1. What is read from the file is verified like what is read from the store.
  2. The file has no name any more once all ranks of the machine have it open: it ends with the last of them.
  3. Where a machine has no room for the file, its ranks read everything from the store.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyTopic
from ..format import layout
from ..io import memory_files
from ..io.files import round_up
from ..io.machine import machine
from ..ports import Tier
from ..records import Extent
from . import memory_place
from .content import Content
from .watched import Watched

Chunks = Mapping[str, Sequence[int]]
"""File -> the indices of chunks of it."""


class NodeCache(Watched):
    """`tier`, whose chunks that several ranks of this machine want are read once (`fill`). Counts nothing by itself."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier, lambda count: None)
        self._file: int | None = None
        self._places: dict[tuple[str, int], tuple[int, int]] = {}
        """file and offset of a chunk -> its length, and its offset in the file of this machine"""

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        length, at = self._places.get((extent.blob, extent.offset), (0, 0))
        if self._file is None or extent.length > length:
            self._tier.read_into(extent, mv, fresh=fresh)
            return
        done = 0
        while done < extent.length and (count := os.preadv(self._file, [mv[done : extent.length]], at + done)):
            done += count

    def fill(self, content: Content, wanted: Chunks, ranks: RankGroup, topic: AnyTopic) -> None:
        """Read the chunks of a generation that several ranks of this machine want. All ranks call it.

        `wanted`: by this rank.
        """
        posts = topic.agree([machine(), dict(wanted)], shared_by)
        here, chunks = posts.get(machine(), ([], {}))
        blobs = {blob.name: blob for one in content.manifests for blob in one.blobs}
        extents = [layout.extent_of(blobs[name], index) for name in sorted(chunks) for index in chunks[name]]
        path = os.path.join(tempfile.gettempdir(), f"lastgood-{ranks.opening.rpartition('/')[2]}-{ranks.restore_count}")
        first = bool(here) and here[0] == ranks.rank
        made = first and _made(path, sum(round_up(one.length) for one in extents))
        try:
            roomy = topic.agree(made, lambda answers: [rank for rank, one in enumerate(answers) if one])
            if here and here[0] in roomy:
                with contextlib.suppress(OSError):  # a rank may have another folder for temporary files, or none
                    self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            has = self._file is not None
            opened = topic.agree(has, lambda answers: [rank for rank, one in enumerate(answers) if one])
        finally:
            if made:  # before it is filled, which takes minutes: a rank that is killed leaves no file
                os.unlink(path)
        if not {*here} <= {*opened}:  # guard: cache-shared-by-all-ranks
            self.close()
        if self._file is not None:
            self._read_share(extents, layout.folder(content.generation.id), here.index(ranks.rank), len(here))
        topic.agree(None, lambda _: None)  # every chunk is in the file

    def _read_share(self, extents: Sequence[Extent], folder: str, share: int, ways: int) -> None:
        """Read every `ways`-th chunk from the store into the file, and note where all of them are."""
        assert self._file is not None
        at = 0
        for number, one in enumerate(extents):
            extent = Extent(blob=f"{folder}/{one.blob}", offset=one.offset, length=one.length)
            if number % ways == share:
                buffer = memoryview(bytearray(extent.length))
                self._tier.read_into(extent, buffer)
                while buffer:
                    buffer = buffer[os.pwrite(self._file, buffer, at + extent.length - len(buffer)) :]
            self._places[extent.blob, extent.offset] = extent.length, at
            at += round_up(extent.length)

    def close(self) -> None:
        """Release the file."""
        if self._file is not None:
            os.close(self._file)
        self._file, self._places = None, {}


def shared_by(posts: Sequence[Any]) -> dict[str, tuple[list[int], dict[str, list[int]]]]:
    """Machine -> its ranks, and the chunks that at least two of them want. Pure.

    `posts`: the machine of each rank, and the chunks that it wants, file -> indices.
    """
    found: dict[str, tuple[list[int], dict[str, list[int]]]] = {}
    for at in {at for at, _ in posts}:
        ranks = [rank for rank, (machine_, _) in enumerate(posts) if machine_ == at]
        counts: dict[tuple[str, int], int] = {}
        for rank in ranks:
            for name, chunks in posts[rank][1].items():
                for index in chunks:
                    counts[name, index] = counts.get((name, index), 0) + 1
        shared: dict[str, list[int]] = {}
        for (name, index), count in sorted(counts.items()):
            if count > 1:
                shared.setdefault(name, []).append(index)
        if shared:
            found[at] = ranks, shared
    return found


def _made(path: str, length: int) -> bool:
    """Make a file of this length that only this user can read. Returns whether there was room for it."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        # In a tmpfs the kernel ends a process that takes more memory than there is.
        folder = os.path.dirname(path)
        # guard: cache-takes-no-memory-beyond-limits
        if memory_place.in_memory(folder) and length > memory_files.free_bytes(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        os.posix_fallocate(file, 0, length)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return False
    finally:
        os.close(file)
    return True

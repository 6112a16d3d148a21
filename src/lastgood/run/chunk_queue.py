"""Queue of filled chunks from the thread that copies a state to the lane that writes them. Copies no byte.

Each lease in the queue belongs to the queue; the lane that takes it owns it and releases it. After a cancellation the
copier may still put chunks: `drain` receives and releases them.
"""

from __future__ import annotations

import queue

from ..engine.arena import Lease
from .save_handle import Save


class ChunkQueue:
    """The chunks of one save, in file order: the lane iterates over it as `save.ChunkStream`.

    The copier calls `put` for each chunk and `close` at the end, also after an error or a cancellation.
    """

    def __init__(self, save: Save) -> None:
        self._save = save
        self._queue: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._ended = False
        self._cancelled: BaseException | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the save was cancelled: the copier may stop, because the lane takes no further chunk."""
        return self._cancelled is not None

    def cancel(self, reason: BaseException) -> None:
        """Make the lane raise `reason` when it takes its next chunk. Only the first reason counts."""
        self._cancelled = self._cancelled or reason

    def put(self, lease: Lease) -> None:
        """Pass a filled chunk to the lane, which releases it."""
        self._queue.put(lease)

    def close(self, failed: BaseException | None) -> None:
        """End the queue. `failed`: the error that ended the copy early, and that the lane raises (None: complete).

        The first error counts: the copier may end its copy after Ctrl-C has ended the save.
        """
        self._failed = self._failed or failed
        self._queue.put(None)

    def __iter__(self) -> ChunkQueue:
        return self

    def __next__(self) -> Lease:
        if self._cancelled is None and not self._ended:
            lease = self._queue.get()
            if lease is not None:
                return lease
            self._ended = True
        if self._cancelled is not None:
            raise self._cancelled
        if self._failed is not None:
            raise self._failed
        raise StopIteration

    def finish(self) -> None:
        """Note that the save is written, and wait until the copier closes the queue. Raises the error of the copy."""
        self._save.note_written()
        while True:
            try:
                lease = next(self)
            except StopIteration:
                return
            lease.release()

    def drain(self) -> None:
        """Receive and release all remaining chunks, until the copier closes the queue."""
        while not self._ended:
            lease = self._queue.get()
            if lease is None:
                self._ended = True
            else:
                lease.release()

"""Filled chunks on their way from the thread that copies a state to the lane that writes them. Copies no byte."""

from __future__ import annotations

import queue

from ..engine.arena import Lease
from .save_handle import Save


class ChunkQueue:
    """The chunks of one save, in order; `save.ChunkStream` for the lane. The copier always closes it."""

    def __init__(self, save: Save) -> None:
        self._save = save
        self._queue: queue.SimpleQueue[Lease | None] = queue.SimpleQueue()
        self._failed: BaseException | None = None
        self._ended = False
        self._cancelled: BaseException | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the lane takes no further chunk."""
        return self._cancelled is not None

    def cancel(self, reason: BaseException) -> None:
        """The lane ends at its next chunk, with this."""
        self._cancelled = self._cancelled or reason

    def put(self, lease: Lease) -> None:
        """Hand a filled chunk to the lane, which releases it."""
        self._queue.put(lease)

    def close(self, failed: BaseException | None) -> None:
        """No chunk follows. `failed`: what kept the copier from the others."""
        self._failed = failed
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
        """Wait until the copier has closed it. Raises what made the copy fail."""
        self._save.note_written()
        while True:
            try:
                lease = next(self)
            except StopIteration:
                return
            lease.release()

    def drain(self) -> None:
        """Release every chunk that still comes, to the end."""
        while not self._ended:
            lease = self._queue.get()
            if lease is None:
                self._ended = True
            else:
                lease.release()

"""One save between its start and its end, as the pipeline has it (pipeline.py). Reads and writes no file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from ..coordination.single_rank import AnyTopic
from ..engine.arena import Arena, FileMemory, Lease
from ..errors import Cancelled
from ..format import layout
from ..io.reused_files import LentFile
from ..ports import Tier
from ..storage.directory import Disk
from .chunk_queue import ChunkQueue
from .known import KnownRun
from .node_disks import own_disk
from .planned_save import PlannedSave
from .save import SaveRequest
from .save_handle import Save


class Flight:
    """One save between `start` and its end."""

    def __init__(self, handle: Save, request: SaveRequest, planned: PlannedSave, topic: AnyTopic) -> None:
        self.handle, self.request, self.planned, self.topic = handle, request, planned, topic
        self.at, self.pinned = request.at, request.pinned
        self.memory: Arena | FileMemory = planned.arena
        """where the state is copied to"""
        self._lent: LentFile | None = None
        self._copying = threading.Lock()
        """held while the state is copied"""

    def copy_into_file(self, tier: Tier) -> None:
        """If `tier` has a deleted file of this length in memory, have the state copied into it: it becomes the tensor
        file, and nothing is copied again. Tensors on CUDA devices go to the arena, which is page-locked."""
        disk, images = own_disk(tier), self.planned.images
        if isinstance(disk, Disk) and len(images) == 1 and not self.planned.page_locked:
            lent = self._lent = disk.lend(f"{layout.folder(self.at)}/{images[0].blob}", images[0].length)
            if lent is not None:
                self.memory = FileMemory(lent.memory, self.planned.arena.chunk_bytes)

    def copy(self, known: KnownRun) -> None:
        """Copy the live state into chunks. When it returns, the live state may change again."""
        failed: BaseException | None = None
        begun = time.monotonic()
        try:
            for lease in self._fill():
                self.chunks.put(lease)
            known.emit("staged", self.at, time.monotonic() - begun, self.planned.bytes)
        except Exception as error:  # noqa: BLE001 - raised where the chunks are written, and reported from there
            failed = error
        except BaseException:
            failed = Cancelled("the copy was interrupted", safe="Nothing of it was committed.")
            raise  # guard: interrupt-in-copy-raised
        finally:
            self.handle.note_staged()  # guard: failed-copy-unblocks-loop
            self.chunks.close(failed)  # guard: failed-copy-fails-save

    def end(self) -> None:
        """Release the file that was lent. Called once. A save that Ctrl-C interrupted may still be copied: then this
        waits until the copy has ended."""
        if self._lent is not None:
            with self._copying:  # guard: filled-file-not-released
                self._lent.close()

    @property
    def chunks(self) -> ChunkQueue:
        chunks = self.request.chunks
        assert isinstance(chunks, ChunkQueue)
        return chunks

    def cancel(self, reason: BaseException) -> None:
        """End the save with `reason` at its next chunk."""
        self.chunks.cancel(reason)
        self.memory.wake()  # guard: memory-waiters-woken

    def _fill(self) -> Iterator[Lease]:
        """Copy the state, and yield the filled chunks, as `Source.fill`. Raises Cancelled after `cancel`."""
        with self._copying:
            # guard: copier-stops-when-unwanted
            yield from self.planned.source.fill(lambda: self.chunks.cancelled, self.memory)

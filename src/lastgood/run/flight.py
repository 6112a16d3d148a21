"""One save between its start and its end, as the pipeline has it (pipeline.py). Does no I/O."""

from __future__ import annotations

from ..coordination.single_rank import AnyTopic
from .chunk_queue import ChunkQueue
from .planned_save import PlannedSave
from .save import SaveRequest
from .save_handle import Save


class Flight:
    """One save between `start` and its end."""

    def __init__(self, handle: Save, request: SaveRequest, planned: PlannedSave, topic: AnyTopic) -> None:
        self.handle, self.request, self.planned, self.topic = handle, request, planned, topic
        self.at, self.pinned = request.at, request.pinned

    @property
    def chunks(self) -> ChunkQueue:
        chunks = self.request.chunks
        assert isinstance(chunks, ChunkQueue)
        return chunks

    def cancel(self, reason: BaseException) -> None:
        """End the save with `reason` at its next chunk."""
        self.chunks.cancel(reason)
        self.planned.arena.wake()  # guard: memory-waiters-woken

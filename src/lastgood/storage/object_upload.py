"""Uploads to an object store: one request for a short blob, else an ordered stream of parts, several in flight.

Invariants
  1. An object is visible only as a whole: a multipart upload that was not completed does not exist for readers.
  2. Memory is bounded: parts in flight, and QUEUED chunks that wait for the stream.
  3. The thread of a stream ends with `finish` or `abort`, in a bounded time: every request has a deadline.
A store that failed in the middle of a stream may keep the parts that it has; nobody sees them, and they cost space
until they are removed (unfinished_uploads.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import obstore

from ..errors import Cancelled, LastgoodError, TierDown
from ..io.files import round_up
from .object_errors import translated
from .object_store import Deadlines

if TYPE_CHECKING:
    from .objects import Objects

PART_BYTES = 8 << 20
"""The length of a part of an upload, unless the blob would need more than PARTS_LIMIT of them."""
PARTS_LIMIT = 10_000
"""S3 accepts so many parts in one upload."""
IN_FLIGHT_BYTES = 64 << 20
"""The parts of one upload that are in flight at the same time, all together; at least LEAST_IN_FLIGHT parts."""
LEAST_IN_FLIGHT = 2
QUEUED = 2
"""Chunks that wait for the stream."""

assert PARTS_LIMIT * PART_BYTES > 64 << 30
assert IN_FLIGHT_BYTES // PART_BYTES >= LEAST_IN_FLIGHT


def part_bytes(length: int) -> int:
    """The length of a part for a blob of `length` bytes."""
    return max(PART_BYTES, round_up(-(-length // PARTS_LIMIT), 1 << 20))


class ShortUpload:
    """`ports.Upload` of a blob that is sent in one request, by `finish`."""

    def __init__(self, objects: Objects, name: str, length: int) -> None:
        self._objects, self._name = objects, name
        self._data: bytearray | None = bytearray(length)

    def write_at(self, mv: memoryview, offset: int) -> None:
        assert self._data is not None
        length = min(len(mv), len(self._data) - offset)
        self._data[offset : offset + length] = mv[:length]

    def finish(self) -> None:
        assert self._data is not None
        self._objects.put(self._name, bytes(self._data))
        self._data = None

    def abort(self) -> None:
        if self._data is not None:
            self._data = None
            return
        self._objects.discard(self._name)


class StreamedUpload:
    """`ports.Upload` as a multipart upload. A writer that is ahead waits for the ranges before its own."""

    def __init__(self, objects: Objects, name: str, length: int, deadlines: Deadlines) -> None:
        self._objects, self._name, self._length, self._deadlines = objects, name, length, deadlines
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._accepted = 0
        """bytes that the stream has accepted, from the beginning of the blob"""
        self._finishing = self._aborted = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._send, name="lastgood-upload")
        self._thread.start()

    def write_at(self, mv: memoryview, offset: int) -> None:
        data = bytes(mv[: min(len(mv), self._length - offset)])  # the caller uses its buffer again

        def has_turn() -> bool:
            turn = offset == self._accepted and len(self._queue) < QUEUED
            return turn or self._aborted or self._error is not None

        with self._changed:
            ready = self._changed.wait_for(has_turn, self._deadlines.stall_seconds)
            self._require_running()
            if not ready:
                raise TierDown(
                    f"{self._objects.place}/{self._name}: the upload accepted nothing for "
                    f"{self._deadlines.stall_seconds:.0f} s",
                    safe="Nothing of this save was committed.",
                )
            self._queue.append(data)
            self._accepted += len(data)
            self._changed.notify_all()

    def finish(self) -> None:
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        self._thread.join()
        if self._error is None:
            return
        # The reply to the last request may be the only thing that was lost.
        if self._objects.length_of(self._name) != self._length:  # guard: failed-upload-read-back
            self._require_running()

    def abort(self) -> None:
        with self._changed:
            self._aborted = True
            self._changed.notify_all()
        self._thread.join()
        if self._finishing:
            self._objects.discard(self._name)

    def _send(self) -> None:
        part = part_bytes(self._length)
        try:
            obstore.put(
                self._objects.store,
                self._objects.key(self._name),
                self._parts(),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=max(LEAST_IN_FLIGHT, IN_FLIGHT_BYTES // part),
            )
        except BaseException as error:  # noqa: BLE001 - raised by the next call of the writer
            with self._changed:
                self._error = error
                self._queue.clear()
                self._changed.notify_all()

    def _parts(self) -> Iterator[bytes]:
        """The bytes of the blob in order. Raises Cancelled when the upload is aborted, which ends it at the store."""
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._queue or self._aborted or (self._finishing and self._accepted == self._length)
                )
                if self._aborted:
                    raise Cancelled("the upload was aborted")  # guard: aborted-upload-never-completes
                if not self._queue:
                    return
                data = self._queue.popleft()
                self._changed.notify_all()
            yield data

    def _require_running(self) -> None:
        if self._error is not None:
            if isinstance(self._error, LastgoodError):
                raise self._error
            raise translated(self._error, self._objects.place, self._name) from self._error
        if self._aborted:
            raise Cancelled("the upload was aborted")

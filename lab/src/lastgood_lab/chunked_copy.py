"""Lays out a workload's tensors as one sequence of bytes, which is copied in chunks to a store and back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch

from lastgood.engine.arena import Arena, Lease
from lastgood.format import layout
from lastgood.io.files import round_up
from lastgood.snapshot.staging import Pin
from lastgood.state.tensors import as_bytes, dtype_name

from .models import Workload
from .stores import Store


class Snapshot:
    """The tensors of a workload, laid out in chunks. Several threads may copy chunks at once, without the GIL."""

    def __init__(self, workload: Workload, chunk_bytes: int) -> None:
        self._workload = workload
        live = workload.tensors()
        tensors = {name: as_bytes(one) for name, one in live.items()}
        assert all(tensors[name].data_ptr() == one.data_ptr() for name, one in live.items()), "not contiguous"
        (image,) = layout.images(
            layout.Tensor(name, dtype_name(one.dtype), tuple(one.shape)) for name, one in live.items()
        )
        self.chunk_bytes, self.length = chunk_bytes, image.length
        self.slot_bytes = round_up(image.length)
        self._header = np.frombuffer(image.header, np.uint8)
        self._tensors = [tensors[one.name] for one, _ in image.tensors]
        self._segments = list(layout.segments(image, chunk_bytes))
        volatile = workload.buffers()
        self._volatile = {at for at, (one, _) in enumerate(image.tensors) if one.name in volatile}
        self._stream = torch.cuda.Stream() if workload.device.type == "cuda" else None

    def __len__(self) -> int:
        return len(self._segments)

    def padded(self, index: int) -> int:
        """The bytes of a chunk in a slot: the last chunk is rounded up to whole blocks."""
        return min(self.chunk_bytes, self.slot_bytes - index * self.chunk_bytes)

    def keep_volatile(self) -> dict[int, torch.Tensor]:
        """Return copies of the tensors that the forward pass may change, made before the loop continues."""
        kept = {at: self._tensors[at].clone() for at in self._volatile}
        if self._stream is not None:
            torch.cuda.current_stream().synchronize()
        return kept

    def copy_out(self, index: int, buffer: memoryview, kept: dict[int, torch.Tensor]) -> None:
        """Copy a chunk of the live state, with the tensors in `kept` instead of the live ones, into `buffer`."""
        target = np.frombuffer(buffer, np.uint8)
        for place, start, at, length in self._segments[index]:
            if place < 0:
                np.copyto(target[at : at + length], self._header[start : start + length])
                continue
            source = kept.get(place, self._tensors[place])[start : start + length]
            if self._stream is None:
                np.copyto(target[at : at + length], source.numpy())
            else:
                with torch.cuda.stream(self._stream):
                    torch.from_numpy(target[at : at + length]).copy_(source, non_blocking=True)
        if self._stream is not None:
            self._stream.synchronize()

    def copy_in(self, index: int, buffer: memoryview) -> None:
        """Copy a chunk from `buffer` into the live state."""
        source = torch.frombuffer(buffer, dtype=torch.uint8)
        for place, start, at, length in self._segments[index]:
            if place >= 0:
                self._tensors[place][start : start + length].copy_(source[at : at + length])


def open_arena(workload: Workload, arena_bytes: int, chunk_bytes: int, held: ExitStack) -> Arena:
    """Allocate an arena. If the workload is on a GPU, the arena is pinned for copies until `held` is closed."""
    arena = Arena(arena_bytes, chunk_bytes)
    if workload.device.type == "cuda":
        held.callback(Pin(arena).release)
    return arena


def load_newest(store: Store, snapshot: Snapshot, arena: Arena, readers: ThreadPoolExecutor) -> int:
    """Load the newest state of a store into the workload; returns its step, or 0 if the store has none."""
    newest = store.newest()
    if newest is None:
        return 0

    def one(index: int) -> None:
        lease = lease_chunk(arena)
        try:
            store.read(newest.slot, lease.buffer[: snapshot.padded(index)], index * snapshot.chunk_bytes)
            snapshot.copy_in(index, lease.buffer)
        finally:
            lease.release()

    list(readers.map(one, range(len(snapshot))))
    return newest.step


def lease_chunk(arena: Arena) -> Lease:
    """Wait for a free chunk of the arena. The caller owns the lease and must release it."""
    lease = arena.take()
    assert lease is not None
    return lease


def write_chunk(store: Store, slot: int, lease: Lease, snapshot: Snapshot, index: int) -> None:
    """Write a filled chunk to a slot, and release its lease."""
    try:
        store.write(slot, lease.buffer[: snapshot.padded(index)], index * snapshot.chunk_bytes)
    finally:
        lease.release()

"""Staging: live tensors -> the image of their files, in arena chunks. Copies; writes no file, decides nothing.

    cut (training thread)  what forward may change is cloned, the rest is looked at           the save returns
    fill (copier)          chunk by chunk into the arena, behind the next forward and backward
    fence (training thread, before the next update)  waits until the last copy is enqueued;
                           a stream of a device waits for the copies themselves, the host does not

Invariants
  1. Between the cut and the fence nothing that is copied behind it is written to by an update.
  2. What was written to all the same is found by the torn-snapshot check (torn.py) before the save is published.
  3. The fence ends: whatever happens to the copy, `enqueued` is set.
"""

from __future__ import annotations

import ctypes
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch.optim import Optimizer

from ..engine.arena import Arena, Lease
from ..errors import Cancelled, Refused, TornSnapshot
from ..format.layout import Image, Segment, Tensor, content_hasher, images, segments
from ..state.tensors import as_bytes, dtype_name
from .torn_check import ChunkSamples, Look, Watch

SIDE_BYTES = 32 << 20
"""what is cloned at the cut, beside the arena; a state with more of it is staged while the loop waits"""


def lay_out(tensors: Mapping[str, torch.Tensor], finite: Collection[str] = ()) -> list[Image]:
    """The files that these tensors make, in a world of one. `finite`: those that must hold no NaN or infinity."""
    return images(
        Tensor(name, dtype_name(one.dtype), tuple(one.shape), name in finite) for name, one in tensors.items()
    )


def in_chunks(files: Sequence[Image], chunk_bytes: int) -> list[tuple[Image, Sequence[list[Segment]]]]:
    """The files, and what lies in each of their chunks."""
    return [(image, list(segments(image, chunk_bytes))) for image in files]


def devices(tensors: Mapping[str, torch.Tensor]) -> set[torch.device]:
    """Those other than the host that hold some of these tensors."""
    return {one for one in set(map(operator.attrgetter("device"), tensors.values())) if one.type == "cuda"}


class Snapshot:
    """One state at one instant, on its way into the arena. Made on the training thread, at the cut.

    `layout`: the files, and what lies in each of their chunks. `devices`: as `devices(tensors)` says. `addresses`:
    where each tensor lies, to find what is moved before it is read. `at_once`: names that are cloned here; all others
    are read by `fill`. `watch`: of what is read later, if that is to be checked. `witness`: what is read too, for its
    digests only.
    """

    def __init__(
        self,
        layout: Sequence[tuple[Image, Sequence[list[Segment]]]],
        tensors: Mapping[str, torch.Tensor],
        devices: Iterable[torch.device],
        arena: Arena,
        *,
        addresses: Sequence[int] = (),
        at_once: Collection[str] = (),
        watch: Watch | None = None,
        samples: Sequence[Sequence[Sequence[ChunkSamples]]] = (),
        witness: Mapping[str, torch.Tensor] | None = None,
        algorithm: str = "",
    ) -> None:
        self._layout, self._arena, self._watch, self._samples = layout, arena, watch, samples
        self._at_once = {name: tensors[name].clone() for name in at_once}
        self._tensors, self._addresses = tensors, addresses
        self._witness, self._algorithm = witness or {}, algorithm
        self.witnessed: dict[str, str] = {}
        """content digests of what others write"""
        self._cut = watch.look() if watch else None
        self.enqueued = threading.Event()
        self._events: list[torch.cuda.Event] = []
        self._streams = {device: _side_stream(device) for device in devices}

    def fill(self, stop: Callable[[], bool] = lambda: False) -> Iterator[Lease]:
        """Copy everything, chunk by chunk; each filled chunk is the taker's, who releases it.

        Waits for free chunks where the arena is smaller than the state. Raises Cancelled when `stop()`, TornSnapshot
        after the last chunk.
        """
        torn: set[str] = set()
        waiting: deque[tuple[Lease, list[torch.cuda.Event], Sequence[ChunkSamples]]] = deque()

        def arrived() -> Lease:
            lease, events, samples = waiting.popleft()
            for event in events:
                event.synchronize()
            if self._cut is not None and samples:
                torn.update(self._cut.differs_in(lease.buffer, samples))  # guard: samples-compared-during-copy
            return lease

        try:
            source = _Source(self._tensors, self._addresses, self._at_once)
            torn |= source.moved  # guard: moved-before-read-is-torn
            for number, (image, chunks) in enumerate(self._layout):
                samples = self._samples[number] if self._samples else ()
                for chunk, parts in enumerate(chunks):
                    lease = self._arena.take_now()
                    while lease is None and waiting:
                        yield arrived()
                        lease = self._arena.take_now()
                    lease = lease or self._arena.take(stop)
                    if lease is not None and stop():
                        lease.release()
                        lease = None
                    if lease is None:
                        raise Cancelled("the copy of the state was given up", safe="Nothing was committed.")
                    events: list[torch.cuda.Event] = []
                    waiting.append((lease, events, samples[chunk] if samples else ()))
                    events += self._copy(image, parts, lease, source)
                    if not self._streams:
                        yield arrived()
            self.witnessed = {key: content_digest(one, self._algorithm) for key, one in self._witness.items()}
            torn |= self._look_again()
            self.enqueued.set()
            while waiting:
                yield arrived()
            torn |= self._compare()  # guard: samples-compared-after-copy
        finally:
            self.enqueued.set()  # guard: failed-copy-releases-update
            while waiting:
                arrived().release()
            self._tensors, self._at_once, self._witness = {}, {}, {}
        if torn:  # guard: torn-save-dropped
            raise torn_error(torn)

    @property
    def read(self) -> bool:
        """Whether nothing of it is still to be copied, on no device."""
        return self.enqueued.is_set() and all(map(torch.cuda.Event.query, self._events))

    def hold(self) -> None:
        """Let the next update wait until what it would change has been copied."""
        # guard: update-waits-for-copy
        self.enqueued.wait()  # waiting for an event that is not recorded yet would be no wait at all
        for event in self._events:
            torch.cuda.current_stream(event.device).wait_event(event)

    def _copy(self, image: Image, parts: list[Segment], lease: Lease, source: _Source) -> list[torch.cuda.Event]:
        touched = set()
        whole: torch.Tensor | None = None
        for place, start, at, length in parts:
            if place < 0:
                lease.buffer[at : at + length] = image.header[start : start + length]
                continue
            if not length:
                continue
            name = image.tensors[place][0].key
            if (address := source.address(name)) is not None:
                ctypes.memmove(lease.address + at, address + start, length)  # without the GIL, on this thread only
                continue
            whole = torch.frombuffer(lease.buffer, dtype=torch.uint8) if whole is None else whole
            device = source.device(name)
            with torch.cuda.stream(self._streams[device]):
                whole[at : at + length].copy_(source.bytes(name)[start : start + length], non_blocking=True)
            touched.add(device)
        return [self._streams[device].record_event() for device in touched]

    def _look_again(self) -> set[str]:
        """Before the next update may begin: identity and versions now, samples behind the copies on each stream."""
        found: set[str] = set()
        self._after: Look | None = None
        if self._watch is not None and self._cut is not None:
            found = self._watch.replaced(self._cut.versions)  # guard: replaced-tensors-are-torn
            with _all(self._streams.values()):
                self._after = self._watch.look()
        self._events = [stream.record_event() for stream in self._streams.values()]
        return found

    def _compare(self) -> set[str]:
        if self._cut is None or self._after is None:
            return set()
        for event in self._events:
            event.synchronize()
        return self._cut.differs(self._after)


class _Source:
    """Where each tensor's bytes are read: an address in host memory, or bytes on a device."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], addresses: Sequence[int], at_once: Mapping[str, torch.Tensor]
    ) -> None:
        # Detached, it keeps its memory: whoever moves the live one meanwhile frees nothing that is read here.
        held = {name: one.detach() for name, one in tensors.items()}
        now = list(map(torch.Tensor.data_ptr, held.values()))
        self.moved: set[str] = set()
        """names of those that were moved between the cut and here"""
        if addresses and now != list(addresses):
            places = zip(held, now, addresses, strict=True)
            self.moved = {name for name, here, then in places if here != then} - at_once.keys()
        self._tensors = {**held, **at_once}
        self._addresses: dict[str, int] = {
            name: one.data_ptr()
            for name, one in self._tensors.items()
            if one.is_cpu and one.is_contiguous() and not one.is_conj() and not one.is_neg()
        }
        self._name, self._bytes = "", torch.empty(0)

    def device(self, name: str) -> torch.device:
        return self._tensors[name].device

    def address(self, name: str) -> int | None:
        found = self._addresses.get(name)
        if found is None and self._tensors[name].is_cpu:
            found = self.bytes(name).data_ptr()
        return found

    def bytes(self, name: str) -> torch.Tensor:
        """In row-major order. Of what must be rearranged one tensor is held at a time."""
        if self._name != name:
            self._name, self._bytes = name, as_bytes(self._tensors[name])
        return self._bytes


class Pin:
    """Makes the memory of an arena what a device copies to without the host's help, until `release`."""

    def __init__(self, arena: Arena) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._arena, self._runtime = arena, runtime
        # Where the system allows no more locked memory, copies are slower and no less right.
        self._held = int(runtime.cudaHostRegister(arena.address, arena.arena_bytes, 0)) == 0
        if not self._held:
            with suppress(RuntimeError):  # the runtime tells of it once more, and not in somebody's next kernel
                torch.zeros(1, device="cuda")

    def release(self) -> None:
        """Nothing may be copied to it any more."""
        if self._held:
            self._held = False
            self._runtime.cudaHostUnregister(self._arena.address)


class Fence:
    """Holds the next update of every hooked optimizer until what is being copied has been read."""

    def __init__(self) -> None:
        self._pending: list[Snapshot] = []
        self._hooks: dict[int, tuple[Optimizer, Any]] = {}
        self.waited_seconds = 0.0
        """in all, by the host"""
        self._process = os.getpid()

    def hook(self, optimizers: Sequence[Optimizer]) -> None:
        """Let these optimizers, and no others, ask before each step."""
        wanted = {id(one): one for one in optimizers}
        gone = self._hooks.keys() - wanted.keys()
        if gone:
            # guard: unhook-waits-for-copy
            self.wait()  # an older copy may still want to be read before their next step
        for ident in gone:
            self._hooks.pop(ident)[1].remove()  # guard: stale-hooks-removed
        for ident in wanted.keys() - self._hooks.keys():
            # guard: hook-before-each-step
            self._hooks[ident] = (wanted[ident], wanted[ident].register_step_pre_hook(self._before_step))

    def add(self, snapshot: Snapshot) -> None:
        self._pending = [one for one in self._pending if not one.read]
        self._pending.append(snapshot)

    def _before_step(self, *_: object) -> None:
        self.wait()

    def wait(self) -> None:
        """Until every copy that was begun is enqueued, and on a device ordered before what comes next."""
        # guard: fork-waits-for-no-copy
        if not self._pending or self._process != os.getpid():  # in a fork nobody copies
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise Refused(
                "an optimizer step is being captured into a CUDA graph while a save is copied behind it",
                todo='Save with staging="blocking": a captured step asks nobody before it runs again.',
            )
        begun = time.monotonic()
        held = not all(one.enqueued.is_set() for one in self._pending)
        for snapshot in self._pending:
            snapshot.hold()
        self._pending.clear()
        self.waited_seconds += time.monotonic() - begun if held else 0.0

    def close(self) -> None:
        for _, handle in self._hooks.values():  # guard: hooks-removed-at-close
            handle.remove()
        self._hooks.clear()
        self._pending.clear()


def content_digest(tensor: torch.Tensor, algorithm: str) -> str:
    """The content digest of a tensor, as its piece will have it; waits for a device."""
    hasher = content_hasher(algorithm, dtype_name(tensor.dtype), tuple(tensor.shape))
    hasher.update(as_bytes(tensor).cpu().numpy().data)
    return hasher.hexdigest()


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that goes on from where the current one of the device stands."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _all(streams: Iterable[torch.cuda.Stream]) -> ExitStack:
    """Each the current one of its device."""
    stack = ExitStack()
    for stream in streams:
        stack.enter_context(torch.cuda.stream(stream))
    return stack


def torn_error(names: set[str]) -> TornSnapshot:
    shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return TornSnapshot(
        f"the state changed while it was copied: {shown}",
        safe="This save was dropped; every committed generation is untouched.",
        todo='Call fence() before changing state outside of optimizer.step(), or use staging="blocking".',
    )

"""Staging: live tensors -> the images of their files, in chunks of memory. Copies; writes no file, decides nothing.

    Snapshot(...)  training thread       clones what forward may change, samples the other tensors; the call of `save`
                                         returns after this
    fill()         copier thread         copies chunk by chunk, during the next forward and backward: into the arena, or
                                         into the mapped memory of the file itself
    Fence.wait()   training thread,      waits until the last copy is enqueued. On a CUDA device the current stream
                   before the next       waits for the copies themselves, and the host does not
                   update

Invariants
  1. Between the snapshot and the fence, no update of an optimizer writes to a tensor that is still to be copied.
  2. If other code has written to one, the torn-snapshot check (torn_check.py) finds it before the save is committed.
  3. The fence always ends: once `fill` has begun, `enqueued` is set, whatever happens to the copy.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from ..engine.arena import Arena, FileMemory, Lease
from ..errors import Cancelled, Refused, TornSnapshot
from ..format.layout import Image, Segment, Tensor, content_hasher, images, segments
from ..io.uncached import Copy
from ..ports import Stop, never
from ..state.tensors import as_bytes, dtype_name
from ..units import shortened
from .torn_check import ChunkSamples, Observation, Watch

UNCACHED_BYTES = 256 << 10
"""what is copied past the caches, at least"""
SIDE_BYTES = 32 << 20
"""how much may be cloned outside of the arena; if a state needs more, the loop waits while it is copied"""


def lay_out(tensors: Mapping[str, torch.Tensor], finite: Collection[str] = ()) -> list[Image]:
    """The files of these tensors, for a single process. `finite`: names of those that must be finite."""
    return images(
        Tensor(name, dtype_name(one.dtype), tuple(one.shape), name in finite) for name, one in tensors.items()
    )


def in_chunks(files: Sequence[Image], chunk_bytes: int) -> list[tuple[Image, Sequence[list[Segment]]]]:
    """Each file with its chunks; a chunk is the list of its segments, which are parts of the header and of tensors."""
    return [(image, list(segments(image, chunk_bytes))) for image in files]


def devices(tensors: Mapping[str, torch.Tensor]) -> set[torch.device]:
    """The CUDA devices that hold some of these tensors."""
    return {one for one in set(map(operator.attrgetter("device"), tensors.values())) if one.type == "cuda"}


@dataclass(frozen=True)
class CopyPlan:
    """What one snapshot copies. By default everything is copied by `Snapshot.fill`, without a torn-snapshot check."""

    chunks: Sequence[tuple[Image, Sequence[list[Segment]]]]
    """the files and their chunks, as `in_chunks` returns them"""
    tensors: Mapping[str, torch.Tensor]
    """the live tensors, by the keys that they have in the files"""
    devices: Collection[torch.device]
    """as `devices(tensors)` returns them"""
    addresses: Sequence[int] = ()
    """of each of `tensors` at the capture, to find those that are moved before they are copied; empty: not checked"""
    cloned: Collection[str] = ()
    """keys of the tensors that are cloned when the snapshot is made; `fill` copies these from the clones"""
    watch: Watch | None = None
    """of the tensors that are copied later, if they are to be checked for changes"""
    samples: Sequence[Sequence[Sequence[ChunkSamples]]] = ()
    """the samples of `watch` in each chunk of each file, as `Watch.in_chunks` returns them; empty: not compared"""
    replicas: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """key -> this rank's replica of a tensor that another rank writes; only its content digest is taken, which the
    replica check compares with that of the rank that writes"""
    algorithm: str = ""
    """digest algorithm for `replicas`"""
    copy: Copy = ctypes.memmove
    """copies what is large in host memory (io/uncached.py)"""


def copy_all(files: Sequence[Image], tensors: Mapping[str, torch.Tensor], arena: Arena) -> Snapshot:
    """A snapshot that copies all of these tensors in `fill`, while the caller lets nothing change them."""
    return Snapshot(CopyPlan(in_chunks(files, arena.chunk_bytes), tensors, devices(tensors)), arena)


class Snapshot:
    """One state at one instant, on its way into memory of a save. To be made on the training thread."""

    def __init__(self, plan: CopyPlan, arena: Arena) -> None:
        self._chunks, self._samples, self._arena = plan.chunks, plan.samples, arena
        self._clones = {name: plan.tensors[name].clone() for name in plan.cloned}
        self._tensors, self._addresses = plan.tensors, plan.addresses
        self._replicas, self._algorithm = plan.replicas, plan.algorithm
        self._copy_bytes = plan.copy
        self.replica_digests: dict[str, str] = {}
        """key -> content digest of each tensor of `CopyPlan.replicas`, once all is copied"""
        self._watch = plan.watch
        self._before: Observation | None = plan.watch.observe() if plan.watch else None
        self._after: Observation | None = None
        self.enqueued = threading.Event()
        """set once the last copy is enqueued, or given up"""
        self._events: list[torch.cuda.Event] = []
        self._streams = {device: _copy_stream(device) for device in plan.devices}

    def fill(self, stop: Stop = never, into: Arena | FileMemory | None = None) -> Iterator[Lease]:
        """Copy everything, and yield the filled chunks in file order. The consumer owns each and must `release()` it.

        `into`: what is filled (None: the arena), with chunks of the same length.

        Waits for free chunks if the arena is smaller than the state. Raises Cancelled once `stop()` returns true, and
        TornSnapshot after the last chunk if the state changed while it was copied.
        """
        arena = self._arena if into is None else into
        torn: set[str] = set()
        waiting: deque[tuple[Lease, list[torch.cuda.Event], Sequence[ChunkSamples]]] = deque()

        def next_filled() -> Lease:
            """Wait until the oldest chunk is filled."""
            lease, events, samples = waiting.popleft()
            for event in events:
                event.synchronize()
            if self._before is not None and samples:
                torn.update(self._before.differs_in(lease.buffer, samples))  # guard: samples-compared-during-copy
            return lease

        try:
            source = _Source(self._tensors, self._addresses, self._clones)
            torn |= source.moved  # guard: moved-before-read-is-torn
            for number, (image, chunks) in enumerate(self._chunks):
                samples = self._samples[number] if self._samples else ()
                for chunk, parts in enumerate(chunks):
                    lease = arena.take_now()
                    while lease is None and waiting:
                        yield next_filled()
                        lease = arena.take_now()
                    lease = lease or arena.take(stop)
                    if lease is not None and stop():
                        lease.release()
                        lease = None
                    if lease is None:
                        raise Cancelled("the copy of the state was given up", safe="Nothing was committed.")
                    events: list[torch.cuda.Event] = []
                    waiting.append((lease, events, samples[chunk] if samples else ()))
                    events += self._copy(image, parts, lease, source)
                    if not self._streams:
                        yield next_filled()
            self.replica_digests = {key: content_digest(one, self._algorithm) for key, one in self._replicas.items()}
            torn |= self._observe_again()
            self.enqueued.set()
            while waiting:
                yield next_filled()
            torn |= self._compare()  # guard: samples-compared-after-copy
        finally:
            self.enqueued.set()  # guard: failed-copy-releases-update
            while waiting:
                next_filled().release()
            self._tensors, self._clones, self._replicas = {}, {}, {}
        if torn:  # guard: torn-save-dropped
            raise torn_error(torn)

    @property
    def copied(self) -> bool:
        """Whether all copies have ended, those of devices included."""
        return self.enqueued.is_set() and all(map(torch.cuda.Event.query, self._events))

    def wait_for_copies(self) -> None:
        """Wait until all copies are enqueued, and let the current stream of each device wait for its copies."""
        # guard: update-waits-for-copy
        self.enqueued.wait()  # a stream does not wait for an event that is not recorded yet
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
                # Both release the GIL. A small tensor stays in the caches, for the thread that digests it.
                copy = self._copy_bytes if length >= UNCACHED_BYTES else ctypes.memmove
                copy(lease.address + at, address + start, length)
                continue
            whole = torch.frombuffer(lease.buffer, dtype=torch.uint8) if whole is None else whole
            device = source.device(name)
            with torch.cuda.stream(self._streams[device]):
                whole[at : at + length].copy_(source.bytes(name)[start : start + length], non_blocking=True)
            touched.add(device)
        return [self._streams[device].record_event() for device in touched]

    def _observe_again(self) -> set[str]:
        """Names of the tensors that were replaced. Takes the samples after the copy, on each stream behind its copies.

        Runs before `enqueued` is set: no update may come between the copy and this.
        """
        found: set[str] = set()
        if self._watch is not None and self._before is not None:
            found = self._watch.replaced(self._before.versions)  # guard: replaced-tensors-are-torn
            with _current(self._streams.values()):
                self._after = self._watch.observe()
        self._events = [stream.record_event() for stream in self._streams.values()]
        return found

    def _compare(self) -> set[str]:
        """Names of the tensors whose samples changed during the copy; waits for the devices."""
        if self._before is None or self._after is None:
            return set()
        for event in self._events:
            event.synchronize()
        return self._before.differs(self._after)


class _Source:
    """Where the bytes of each tensor are read: an address in host memory, or a tensor of bytes on a device.

    `addresses`, `clones`: as `CopyPlan.addresses` and the clones of `CopyPlan.cloned`.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], addresses: Sequence[int], clones: Mapping[str, torch.Tensor]
    ) -> None:
        # A detached tensor keeps its memory: replacing the `.data` of the live one frees nothing that is still read.
        detached = {name: one.detach() for name, one in tensors.items()}
        now = list(map(torch.Tensor.data_ptr, detached.values()))
        self.moved: set[str] = set()
        """names of the tensors that were moved since the capture"""
        if addresses and now != list(addresses):
            places = zip(detached, now, addresses, strict=True)
            self.moved = {name for name, address, captured in places if address != captured} - clones.keys()
        self._tensors = {**detached, **clones}
        self._addresses: dict[str, int] = {
            name: one.data_ptr()
            for name, one in self._tensors.items()
            if one.is_cpu and one.is_contiguous() and not one.is_conj() and not one.is_neg()
        }
        self._name, self._bytes = "", torch.empty(0)

    def device(self, name: str) -> torch.device:
        return self._tensors[name].device

    def address(self, name: str) -> int | None:
        """The address of its bytes in row-major order; None for a tensor on a device."""
        found = self._addresses.get(name)
        if found is None and self._tensors[name].is_cpu:
            found = self.bytes(name).data_ptr()
        return found

    def bytes(self, name: str) -> torch.Tensor:
        """Its bytes in row-major order. Keeps at most one rearranged copy of a tensor at a time."""
        if self._name != name:
            self._name, self._bytes = name, as_bytes(self._tensors[name])
        return self._bytes


class Pin:
    """Page-locks the memory of an arena until `release`, so that a CUDA device copies to it without the host."""

    def __init__(self, arena: Arena) -> None:
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._arena, self._runtime = arena, runtime
        # If the system allows no more locked memory, copies are slower and still correct.
        self._locked = int(runtime.cudaHostRegister(arena.address, arena.arena_bytes, 0)) == 0
        if not self._locked:
            with suppress(RuntimeError):  # clears the error, which the next CUDA call would raise otherwise
                torch.zeros(1, device="cuda")

    def release(self) -> None:
        """Unlock the memory. No copy to it may be under way."""
        if self._locked:
            self._locked = False
            self._runtime.cudaHostUnregister(self._arena.address)


class Fence:
    """Makes the next step of every hooked optimizer wait until the tensors that are being copied have been read."""

    def __init__(self) -> None:
        self._pending: list[Snapshot] = []
        self._hooks: dict[int, tuple[Optimizer, Any]] = {}
        self.waited_seconds = 0.0
        """total time that the host has waited"""
        self.update_begun = False
        """whether a hooked optimizer has begun a step since the loop has completed one; who notes that clears it"""
        self._process = os.getpid()
        self.waiting: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        """entered while an optimizer waits"""

    def hook(self, optimizers: Sequence[Optimizer]) -> None:
        """Register a step pre-hook on these optimizers, and remove it from all others."""
        wanted = {id(one): one for one in optimizers}
        removed = self._hooks.keys() - wanted.keys()
        if removed:
            # guard: unhook-waits-for-copy
            self.wait()  # a copy that is under way may still read what their next step would change
        for ident in removed:
            self._hooks.pop(ident)[1].remove()  # guard: stale-hooks-removed
        for ident in wanted.keys() - self._hooks.keys():
            # guard: hook-before-each-step
            self._hooks[ident] = (wanted[ident], wanted[ident].register_step_pre_hook(self._before_step))

    def add(self, snapshot: Snapshot) -> None:
        """Let `wait` wait for this snapshot too. To be called before its copy begins."""
        self._pending = [one for one in self._pending if not one.copied]
        self._pending.append(snapshot)

    def _before_step(self, optimizer: Optimizer, arguments: Sequence[object], keywords: Mapping[str, object]) -> None:
        self.wait()
        # Not in the post-hook: Ctrl-C may leave the step half done.
        if not self.update_begun:
            self.update_begun = bool(keywords) or len(arguments) > 1 or not _is_idle(optimizer)

    def wait(self) -> None:
        """Wait until every copy is enqueued, and on each device let the following work wait for the copies.

        Raises Refused while a CUDA graph is being captured and a copy is under way.
        """
        # guard: fork-waits-for-no-copy
        if not self._pending or self._process != os.getpid():  # a forked process has no copier
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise Refused(
                "an optimizer step is being captured into a CUDA graph while a save is copied behind it",
                todo='Save with staging="blocking": a captured step runs again without any hook that could wait.',
            )
        started = time.monotonic()
        host_waits = not all(one.enqueued.is_set() for one in self._pending)
        with self.waiting() if host_waits else contextlib.nullcontext():
            for snapshot in self._pending:
                snapshot.wait_for_copies()
        self._pending.clear()
        self.waited_seconds += time.monotonic() - started if host_waits else 0.0

    def close(self) -> None:
        """Remove all hooks, and forget the snapshots that are still copied without waiting for them."""
        for _, handle in self._hooks.values():  # guard: hooks-removed-at-close
            handle.remove()
        self._hooks.clear()
        self._pending.clear()


def _is_idle(optimizer: Optimizer) -> bool:
    """Whether a step without a closure changes nothing: torch's own optimizers pass over parameters without gradients.
    Any other one may have its gradients elsewhere."""
    if not type(optimizer).__module__.startswith("torch.optim."):  # guard: only-own-optimizers-are-idle
        return False
    return all(one.grad is None for group in optimizer.param_groups for one in group["params"])


def content_digest(tensor: torch.Tensor, algorithm: str) -> str:
    """The content digest of a tensor, equal to the digest of its stored piece. Waits for the device of the tensor."""
    hasher = content_hasher(algorithm, dtype_name(tensor.dtype), tuple(tensor.shape))
    hasher.update(as_bytes(tensor).cpu().numpy().data)
    return hasher.hexdigest()


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """A new stream whose work waits for what the current stream of the device has enqueued so far."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _current(streams: Iterable[torch.cuda.Stream]) -> ExitStack:
    """A context in which each of these is the current stream of its device."""
    stack = ExitStack()
    for stream in streams:
        stack.enter_context(torch.cuda.stream(stream))
    return stack


def torn_error(names: set[str]) -> TornSnapshot:
    """The error for a save of which these tensors changed while they were copied."""
    return TornSnapshot(
        f"the state changed while it was copied: {shortened(sorted(names), 5)}",
        safe="This save was dropped; every committed generation is untouched.",
        todo='Call fence() before changing state outside of optimizer.step(), or use staging="blocking".',
    )

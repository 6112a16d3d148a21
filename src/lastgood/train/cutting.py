"""Cutting: from the live state to a snapshot under way. Holds the arena, the fence and what is known of the last cut.

Decides how a state is staged: behind the next forward and backward where the fence can hold its updates, else while
the loop waits. Everything here runs on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..engine.arena import Arena, Lease
from ..format import layout
from ..format.layout import Image
from ..rawio.files import round_up
from ..records import Piece
from . import behind, staging, torn
from . import state as live

Staging = Literal["overlap", "blocking"]
TornCheck = Literal["sampled", "full"]


@dataclass(frozen=True)
class Cut:
    """A state at one instant, and how it gets into its files."""

    images: Sequence[Image]
    arena: Arena
    snapshot: staging.Snapshot
    approve: Callable[[Sequence[Piece]], None]
    overlapped: bool
    options: Mapping[str, Any]

    @property
    def bytes(self) -> int:
        return sum(image.length for image in self.images)

    def fill(self, stop: Callable[[], bool]) -> Iterator[Lease]:
        return self.snapshot.fill(stop)


class Cutter:
    """Makes cuts of one state. `quiet` waits until no lease of the arena is out."""

    def __init__(
        self,
        wanted: Staging | None,
        torn_check: TornCheck,
        memory: int | None,
        chunk_bytes: int,
        algorithm: str,
        quiet: Callable[[], None],
    ) -> None:
        self.fence = staging.Fence()
        self._wanted, self._torn_check, self._memory, self._chunk_bytes = wanted, torn_check, memory, chunk_bytes
        self._algorithm, self._quiet = algorithm, quiet
        self._arena: Arena | None = None
        self._pin: staging.Pin | None = None
        self._watch: torn.Watch | None = None
        self._samples: list[list[list[torn.ChunkSamples]]] = []
        self._laid_out: tuple[object, list[Image]] | None = None

    def cut(self, state: Mapping[str, Any], include: Sequence[str], exclude: Sequence[str]) -> Cut:
        """Everything in the state as it is now; `begun` gives what is read later to the fence. Raises Unstorable."""
        captured = live.capture(state, include, exclude)
        tensors = captured.tensors
        images = self._images(tensors)
        arena = self._writing_arena(images)
        if self._pin is None and any(one.is_cuda for one in tensors.values()):
            self._pin = staging.Pin(arena)
        bearers, optimizers = self._overlapped(state, tensors)
        self.fence.hook(optimizers)
        watch = self._watched(bearers, images, arena) if bearers is not None else None
        at_once = tensors.keys() - bearers.keys() if bearers is not None else ()
        digests = self._digests(tensors, bearers) if bearers is not None and self._torn_check == "full" else {}

        def approve(pieces: Sequence[Piece]) -> None:
            wrong = {one.name for one in pieces if one.name in digests and digests[one.name] != one.digest}
            if wrong:
                raise staging.torn_error(wrong)

        snapshot = staging.Snapshot(
            images, tensors, arena, at_once=at_once, watch=watch, samples=self._samples if watch else ()
        )
        return Cut(
            images,
            arena,
            snapshot,
            approve,
            bearers is not None,
            {"aliases": captured.aliases, "values": captured.values, "chunk_bytes": arena.chunk_bytes},
        )

    def begun(self, cut: Cut) -> None:
        """The copy is on its way: no update goes before it."""
        self.fence.add(cut.snapshot)

    def stop_overlapping(self) -> bool:
        """From now on the loop waits for the copy. False if it did so already."""
        before, self._wanted = self._wanted, "blocking"
        return before != "blocking"

    def close(self) -> None:
        self.fence.close()
        self._drop_arena()
        self._laid_out = None
        self._samples = []

    def reading_arena(self, image_bytes: int, chunk_bytes: int) -> Arena:
        """Memory for a restore; nothing may be in flight."""
        bound = image_bytes if self._memory is None else min(self._memory, image_bytes)
        if self._arena is None or self._arena.chunk_bytes != chunk_bytes or self._arena.arena_bytes < bound:
            self._drop_arena()
            self._arena = Arena(max(bound // chunk_bytes, 1) * chunk_bytes, chunk_bytes)
        return self._arena

    # ---- steps ---------------------------------------------------------------------------------------------

    def _images(self, tensors: Mapping[str, torch.Tensor]) -> list[Image]:
        key = [(name, one.dtype, one.shape) for name, one in tensors.items()]
        if self._laid_out is None or self._laid_out[0] != key:
            self._laid_out, self._watch = (key, staging.lay_out(tensors)), None
        return self._laid_out[1]

    def _overlapped(
        self, state: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> tuple[dict[str, torn.Bearer] | None, list[torch.optim.Optimizer]]:
        """What is copied behind the fence, None for nothing; and the optimizers that must wait for it."""
        if self._wanted == "blocking":
            return None, []
        found = behind.find(state, tensors)
        if self._wanted is None and not (found.hookable and found.optimizers):
            return None, []
        bearers = found.trained if found.optimizers else found.trained | found.others
        rest = sum(one.nbytes for name, one in tensors.items() if name not in bearers)
        if rest > staging.SIDE_BYTES:
            rest -= sum(one.tensor.nbytes for one in found.others.values())
            bearers = bearers | found.others
        if rest > staging.SIDE_BYTES or (self._torn_check == "full" and any(one.is_cuda for one in tensors.values())):
            return None, found.optimizers
        return bearers, found.optimizers

    def _watched(self, bearers: Mapping[str, torn.Bearer], images: Sequence[Image], arena: Arena) -> torn.Watch:
        if self._watch is None or not self._watch.fits(bearers):
            self._watch = watch = torn.Watch(bearers)
            self._samples = [watch.in_chunks(image, layout.segments(image, arena.chunk_bytes)) for image in images]
        return self._watch

    def _digests(self, tensors: Mapping[str, torch.Tensor], bearers: Mapping[str, torn.Bearer]) -> dict[str, str]:
        return {name: staging.content_digest(tensors[name], self._algorithm) for name in bearers}

    def _writing_arena(self, images: Sequence[Image]) -> Arena:
        total = sum(image.length for image in images)
        most = min(self._chunk_bytes, round_up(total))
        chunk_bytes = most if self._memory is None else max(4096, min(most, self._memory // 4 // 4096 * 4096))
        wanted = sum(round_up(image.length, chunk_bytes) for image in images)
        wanted = wanted if self._memory is None else min(self._memory // chunk_bytes * chunk_bytes, wanted)
        if self._arena is None or self._arena.chunk_bytes != chunk_bytes or self._arena.arena_bytes < wanted:
            self._quiet()  # the old arena must have come home before a new one is made beside it
            self._drop_arena()
            self._arena = Arena(max(wanted, chunk_bytes), chunk_bytes)
        return self._arena

    def _drop_arena(self) -> None:
        if self._pin is not None:
            self._pin.release()
        self._arena = self._pin = self._watch = None

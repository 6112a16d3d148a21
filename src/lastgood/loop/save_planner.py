"""Cutting: from the live state to a snapshot under way. Holds the arena, the fence and what is known of the last cut.

Decides how a state is staged: behind the next forward and backward where the fence can hold its updates, else while
the loop waits. Everything here runs on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..coordination.rounds import Topic
from ..coordination.single_rank import AnyTopic
from ..engine.arena import Arena
from ..format.layout import Image, Segment
from ..format.layout import images as lay_out
from ..io.files import round_up
from ..ranks.partition import Partition
from ..ranks.replica_check import ReplicaCheck, Replicas
from ..records import Piece
from ..run.planned_save import PlannedSave
from ..run.save import Files
from ..snapshot import overlap, staging, torn_check
from ..state.capture import Capture, Captured, Origin, finite
from ..state.exempt import masks, untrained
from ..state.patterns import Patterns
from ..state.storable import require_storable
from .options import Options

SMALL_BYTES = 4 << 20
"""of a state that is copied in less time than it takes to watch it being copied"""

FSDP1_NOTE = (
    "FullyShardedDataParallel moves its weights about in forward and backward: the loop waits while the state is copied"
)


@dataclass(frozen=True)
class _NotTorn:
    """What must hold of a save once its pieces are written: their content is what it was when the save was planned."""

    digests: Mapping[str, str]
    """of tensors that were digested then"""
    replicas: ReplicaCheck | None
    """what the ranks compare after that"""

    def approve(self, pieces: Sequence[Piece]) -> Files:
        wrong = {one.name for one in pieces if one.key in self.digests and self.digests[one.key] != one.digest}
        if wrong:  # guard: full-check-compares
            raise staging.torn_error(wrong)
        return self.replicas.approve(pieces) if self.replicas else ()


@dataclass
class _Plan:
    """What holds from one cut to the next, as long as names, dtypes and shapes are the same."""

    key: int
    finite: frozenset[str]
    images: list[Image]
    division: Partition | None = None
    behind: overlap.Overlappable | None = None
    origins: Mapping[str, Origin] | None = None
    """when it was last asked which tensors must be finite"""
    stepped: bool = False
    """whether an optimizer is in the state; without one `requires_grad` says what trains, and that may change"""
    found_in: Mapping[str, Origin] | None = None
    """when `behind` was found"""
    watch: torn_check.Watch | None = None
    chunk_bytes: int = 0
    chunks: Sequence[tuple[Image, Sequence[list[Segment]]]] = ()
    samples: Sequence[Sequence[Sequence[torn_check.ChunkSamples]]] = ()


class SavePlanner:
    """Plans the saves of one state. `wait_idle` waits until no lease of the arena is out.

    `replicas`: what several ranks agree on; None in a world of one.
    """

    def __init__(self, options: Options, wait_idle: Callable[[], None], replicas: Replicas | None) -> None:
        self._replicas = replicas
        self.fence = staging.Fence()
        self.note = ""
        """why the loop waits for each copy where one would not expect it; for whoever takes and tells it"""
        self._capture = Capture(options.include, options.exclude)
        tuning = options.tuning
        self._wanted, self._torn_check = tuning.staging, tuning.torn_check
        self._memory, self._chunk_bytes, self._algorithm = tuning.memory, tuning.chunk, tuning.digest
        self._finite = options.finite_also, options.finite_except
        self._wait_idle = wait_idle
        self._exempt: frozenset[str] | None = None
        """parameters that held NaN or infinity before the training began; None: nobody has looked"""
        self._arena: Arena | None = None
        self._spoiled = False
        self._pin: staging.Pin | None = None
        self._plan: _Plan | None = None

    def plan(self, state: Mapping[str, Any], topic: AnyTopic) -> PlannedSave:
        """Everything in the state as it is now; `begun` gives what is read later to the fence. Raises Unstorable.

        `topic`: where the ranks come to an answer about this save.
        """
        captured = self._capture.take(state)
        tensors, addresses = captured.tensors, captured.addresses
        plan = self._planned(state, captured, topic)
        if plan.division:
            tensors = {item.tensor.key: item.view(captured.tensors) for item in plan.division.mine}
            addresses = [one.data_ptr() for one in tensors.values()]
        images = plan.images
        arena = self._writing_arena(images)
        if plan.chunk_bytes != arena.chunk_bytes:
            plan.chunk_bytes, plan.watch = arena.chunk_bytes, None
            plan.chunks = staging.in_chunks(images, arena.chunk_bytes)
        devices = staging.devices(tensors)
        if devices and self._pin is None:
            self._pin = staging.Pin(arena)
        bearers = self._overlapped(plan, state, captured, bool(devices))
        self.fence.hook(captured.optimizers if bearers is not None else [])
        watch = self._watched(plan, bearers) if bearers is not None else None
        at_once = _at_once(plan, tensors, bearers) if bearers is not None else set[str]()
        witness, kept = self._witnessed(plan.division, captured)
        later = tensors.keys() - at_once if bearers is not None and self._torn_check == "full" else ()
        digests = {key: staging.content_digest(tensors[key], self._algorithm) for key in later}
        copy_plan = staging.CopyPlan(
            plan.chunks,
            tensors,
            devices,
            addresses=addresses,
            cloned=at_once,
            watch=watch,
            samples=plan.samples if watch else (),
            witness=witness or {},
            algorithm=self._algorithm,
        )
        snapshot = staging.Snapshot(copy_plan, arena)
        replicas = None
        if self._replicas and plan.division and isinstance(topic, Topic):
            replicas = self._replicas.check(topic, plan.division, captured, snapshot, kept)
        return PlannedSave(
            images=images,
            arena=arena,
            source=snapshot,
            check=_NotTorn(digests, replicas),
            overlapped=bearers is not None,
            aliases=captured.aliases,
            values=captured.values,
        )

    def exempt(self, state: Mapping[str, Any], stored: Collection[str] | None = None) -> None:
        """Find the parameters that hold infinity although nothing has diverged: no later save is unfit for them.

        `stored`: after a restore, the names that the generation was saved with and that were not demanded to be finite;
        only those are exempt. None: nothing was restored; only the first such call of an opening looks, and it must
        come before any training.
        """
        if stored is None and self._exempt is not None:
            return
        self._exempt, self._plan = masks(state, stored), None  # guard: exemption-follows-restore

    def examine(self, state: Mapping[str, Any], patterns: Patterns, beside: Executor) -> int | None:
        """What can be known before the first save: whether all of the state can be stored; `Patterns.require`.

        Ranks also start to find out who holds what: the next save must wait for nobody. Copies nothing. Returns the
        bytes of the tensor files of a save; None with several ranks, which do not know yet what each writes. Raises
        Unstorable with everything that cannot be stored; Refused.
        """
        if self._replicas is None:
            captured = require_storable(self._capture, state)
            patterns.require(state)  # guard: patterns-checked-at-first-step
            return sum(image.length for image in staging.lay_out(captured.tensors))
        with self._replicas.topic() as topic:
            captured = require_storable(self._capture, state)
            self._replicas.start_exchange(topic, captured, patterns.unmatched(state), beside)
        return None

    def captured(self, state: Mapping[str, Any]) -> Captured:
        """The live tensors of the state, as a cut would take them."""
        return self._capture.take(state)

    def begun(self, planned: PlannedSave) -> None:
        """The copy is on its way: no update goes before it."""
        assert isinstance(planned.source, staging.Snapshot)
        self.fence.add(planned.source)  # guard: snapshot-holds-update

    def interrupted(self) -> None:
        """Ctrl-C came from anywhere: a chunk may have been in hand, and be lost to the arena."""
        self._spoiled = True

    def stop_overlapping(self) -> bool:
        """From now on the loop waits for the copy. False if it did so already."""
        before, self._wanted = self._wanted, "blocking"
        self._plan = None  # what it watched may be gone, and would be kept alive
        return before != "blocking"

    def close(self) -> None:
        self.fence.close()
        self._drop_arena()
        self._plan = None

    def reading_arena(self, image_bytes: int, chunk_bytes: int) -> Arena:
        """Memory for a restore; nothing may be in flight."""
        bound = image_bytes if self._memory is None else min(self._memory, image_bytes)
        arena = self._fitting(bound, chunk_bytes)
        if arena is None:
            self._drop_arena()
            arena = self._arena = Arena(max(bound // chunk_bytes, 1) * chunk_bytes, chunk_bytes)
        return arena

    # ---- steps ---------------------------------------------------------------------------------------------

    def _planned(self, state: Mapping[str, Any], captured: Captured, topic: AnyTopic) -> _Plan:
        """The plan of the last cut, where it still holds; of several ranks, of what this one writes."""
        plan = self._plan
        known = plan is not None and plan.key == captured.key and plan.origins is captured.origins
        if Origin.STEPPED not in captured.origins.values():
            known = (
                False  # without an optimizer nothing but `requires_grad` says what trains, and that may have changed
            )
        must = plan.finite if plan is not None and known else self._must_be_finite(state, captured)
        division = (
            self._replicas.partition(captured, must, topic) if self._replicas and isinstance(topic, Topic) else None
        )
        # guard: stale-layout-rebuilt
        if plan is None or (plan.key, plan.finite) != (captured.key, must) or plan.division is not division:
            if self._replicas and division:
                files = lay_out([item.tensor for item in division.mine], self._replicas.rank)
            else:
                files = staging.lay_out(captured.tensors, must)
            plan = self._plan = _Plan(captured.key, must, files, division)
        if plan.origins is not captured.origins:
            plan.origins, plan.stepped = captured.origins, Origin.STEPPED in captured.origins.values()
        return plan

    def _must_be_finite(self, state: Mapping[str, Any], captured: Captured) -> frozenset[str]:
        exempt = {captured.aliases.get(name, name) for name in self._exempt or ()}
        return finite(captured, *self._finite, exempt=untrained(state, captured) | exempt)

    def _overlapped(
        self, plan: _Plan, state: Mapping[str, Any], captured: Captured, on_device: bool
    ) -> Mapping[str, torn_check.Bearer] | None:
        """What is copied behind the fence; None where the loop waits for the copy."""
        if self._wanted == "blocking" or (
            self._wanted is None and sum(one.length for one in plan.images) <= SMALL_BYTES
        ):
            return None
        # guard: stale-bearers-refreshed
        if plan.behind is None or plan.found_in is not captured.origins or not plan.behind.holds(captured):
            plan.behind, plan.found_in = overlap.find(state, captured), captured.origins
        found = plan.behind
        if self._wanted is None and not (found.hookable and captured.optimizers):  # guard: no-hook-no-overlap
            self.note = FSDP1_NOTE if found.moves else ""
            return None
        if self._torn_check == "full" and on_device:
            return None
        if captured.optimizers and found.beside_trained_bytes <= staging.SIDE_BYTES:  # guard: averages-cloned
            return found.trained
        return found.all if found.beside_all_bytes <= staging.SIDE_BYTES else None  # guard: large-averages-not-cloned

    def _watched(self, plan: _Plan, bearers: Mapping[str, torn_check.Bearer]) -> torn_check.Watch:
        if plan.watch is None or plan.watch.bearers is not bearers:
            plan.watch = watch = torn_check.Watch(bearers)
            in_part = {item.name for item in plan.division.mine if item.rows} if plan.division else ()
            plan.samples = [watch.in_chunks(image, chunks, in_part) for image, chunks in plan.chunks]
        return plan.watch

    def _witnessed(
        self, division: Partition | None, captured: Captured
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What other ranks write and this one holds too; and a copy of what of it may turn out to be its own."""
        witness: dict[str, torch.Tensor] = {}
        kept: dict[str, torch.Tensor] = {}
        for item in chain.from_iterable(division.witnessed.values()) if division else ():
            key, one = item.tensor.key, item.view(captured.tensors)
            if captured.origins[item.name] is Origin.OTHER:
                one = kept[key] = one.clone()
            witness[key] = one
        return witness, kept

    def _writing_arena(self, images: Sequence[Image]) -> Arena:
        total = sum(image.length for image in images)
        most = min(self._chunk_bytes, round_up(total))
        chunk_bytes = most if self._memory is None else max(4096, min(most, self._memory // 4 // 4096 * 4096))
        wanted = sum(round_up(image.length, chunk_bytes) for image in images)
        wanted = wanted if self._memory is None else min(self._memory // chunk_bytes * chunk_bytes, wanted)
        arena = self._fitting(wanted, chunk_bytes)
        if arena is None:
            self._wait_idle()  # the old arena must have come home before a new one is made beside it
            self._drop_arena()
            arena = self._arena = Arena(max(wanted, chunk_bytes), chunk_bytes)
        return arena

    def _fitting(self, wanted: int, chunk_bytes: int) -> Arena | None:
        """The arena that is there, if it serves."""
        own = self._arena
        serves = own is not None and own.chunk_bytes == chunk_bytes and own.arena_bytes >= wanted
        return own if serves and not self._spoiled else None

    def _drop_arena(self) -> None:
        if self._pin is not None:
            self._pin.release()
        self._arena = self._pin = None
        self._spoiled = False


def _at_once(plan: _Plan, tensors: Mapping[str, torch.Tensor], bearers: Mapping[str, torn_check.Bearer]) -> set[str]:
    """Keys of what is cloned before the loop goes on, because forward and backward may change it."""
    if plan.division is None:
        return tensors.keys() - bearers.keys()  # guard: forward-buffers-cloned
    return {item.tensor.key for item in plan.division.mine if item.name not in bearers}

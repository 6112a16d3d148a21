"""Save planner: live state -> the plan of one save, with its files and the snapshot from which they are written.

Decides how a state is staged: during the next forward and backward if the fence can delay its updates, else while the
loop waits. Owns the arena and the fence. Keeps the layout of the files from one save to the next, as long as the names,
dtypes and shapes of the state, the tensors that must be finite, and the partition stay the same. Everything here runs
on the training thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from .. import reporting
from ..coordination.rounds import Topic
from ..coordination.single_rank import AnyTopic
from ..engine.arena import Arena
from ..format.layout import Image, Segment
from ..format.layout import images as lay_out
from ..io.files import round_up
from ..io.uncached import uncached_copy
from ..limits import PAGE_BYTES, STAGING_CHUNKS
from ..policy.arguments import require
from ..ranks.partition import Partition
from ..ranks.replica_check import ReplicaCheck, Replicas
from ..records import Piece
from ..run.pipeline import Pipeline
from ..run.planned_save import PlannedSave
from ..run.save import Files
from ..snapshot import overlap, staging, torn_check
from ..state.capture import Capture, Captured, Origin, finite
from ..state.exempt import masks, untrained
from ..state.objects import can_be_hooked, find_objects, is_fsdp1, modules_of
from ..state.patterns import Patterns
from ..state.saved_size import saved_bytes
from ..state.storable import require_storable
from ..state.wrappers import Wrappers
from ..units import shortened
from .options import Options

SMALL_BYTES = 4 << 20
"""A state up to this size is copied while the loop waits: checking an overlapped copy for changes takes longer."""

FSDP1_NOTE = (
    "FullyShardedDataParallel moves its weights in forward and backward: the loop waits while the state is copied"
)


@dataclass(frozen=True)
class _ContentCheck:
    """A `run.save.Check`: the written pieces have the content that the tensors had when the save was planned."""

    digests: Mapping[str, str]
    """key -> content digest of each tensor that was digested when the save was planned"""
    replicas: ReplicaCheck | None
    """the comparison between ranks, which follows; None in a world of one"""

    def approve(self, pieces: Sequence[Piece]) -> Files:
        wrong = {one.name for one in pieces if one.key in self.digests and self.digests[one.key] != one.digest}
        if wrong:  # guard: full-check-compares
            raise staging.torn_error(wrong)
        return self.replicas.approve(pieces) if self.replicas else ()


@dataclass
class _Plan:
    """What holds from one save to the next, while names, dtypes, shapes, finite names and partition are the same."""

    key: int
    """`Captured.key` of the capture that this was made for"""
    finite: frozenset[str]
    """names of the tensors that must be finite"""
    images: list[Image]
    """the files of this rank"""
    shapes: Mapping[str, torch.Size]
    """of the tensors of the state, by name"""
    partition: Partition | None = None
    """which tensors this rank writes; None in a world of one"""
    origins: Mapping[str, Origin] | None = None
    """`Captured.origins` of the capture for which `finite` was found"""
    overlappable: overlap.Overlappable | None = None
    """the tensors that can be copied while training goes on"""
    found_in: Mapping[str, Origin] | None = None
    """`Captured.origins` of the capture in which `overlappable` was found"""
    watch: torn_check.Watch | None = None
    chunk_bytes: int = 0
    chunks: Sequence[tuple[Image, Sequence[list[Segment]]]] = ()
    """the files in chunks of `chunk_bytes`"""
    samples: Sequence[Sequence[Sequence[torn_check.ChunkSamples]]] = ()
    """the samples of `watch` in each of `chunks`"""


class SavePlanner:
    """Plans the saves of one state. `replicas`: the comparison of several ranks; None in a world of one."""

    def __init__(self, options: Options, pipeline: Pipeline, replicas: Replicas | None) -> None:
        self._pipeline, self._replicas = pipeline, replicas
        self.fence = staging.Fence()
        self.note = ""
        """why the loop waits for each copy although overlap is the default; empty if it does not; reported once"""
        self._capture = Capture(options.include, options.exclude)
        tuning = options.tuning
        self._staging, self._torn_check = tuning.staging, tuning.torn_check
        self._memory, self._chunk_bytes, self._algorithm = tuning.memory, tuning.chunk, tuning.digest
        self._copy = uncached_copy()
        self._finite = options.finite_also, options.finite_except
        self._exempt: frozenset[str] | None = None
        """parameters that held infinity and no NaN before training (`exempt.masks`); None: not searched for yet"""
        self._arena: Arena | None = None
        self._reshaped_reported = False
        self._spoiled = False
        """whether a chunk of the arena may be lost: then the next save makes a new arena"""
        self._pin: staging.Pin | None = None
        self._plan: _Plan | None = None

    def plan(self, state: Mapping[str, Any], topic: AnyTopic) -> PlannedSave:
        """Plan a save of the state as it is now. After its start, `hold_updates` must be called if it is overlapped.

        `topic`: where the ranks agree about this save. Raises Unstorable, and what the other ranks raise.
        """
        captured = self._capture.take(state)
        tensors, addresses = captured.tensors, captured.addresses
        plan = self._layout(state, captured, topic)
        if plan.partition:
            tensors = {item.tensor.key: item.view(captured.tensors) for item in plan.partition.mine}
            addresses = [one.data_ptr() for one in tensors.values()]
        images = plan.images
        arena = self._writing_arena(images)
        if plan.chunk_bytes != arena.chunk_bytes:
            plan.chunk_bytes, plan.watch = arena.chunk_bytes, None
            plan.chunks = staging.in_chunks(images, arena.chunk_bytes)
        devices = staging.devices(tensors)
        if devices and self._pin is None:
            self._pin = staging.Pin(arena)
        references = self._overlapped(plan, state, captured, bool(devices))
        self.fence.hook(captured.optimizers)
        watch = self._watched(plan, references) if references is not None else None
        cloned = _cloned(plan, tensors, references) if references is not None else set[str]()
        witness, kept = self._witnessed(plan.partition, captured)
        later = tensors.keys() - cloned if references is not None and self._torn_check == "full" else ()
        digests = {key: staging.content_digest(tensors[key], self._algorithm) for key in later}
        copy_plan = staging.CopyPlan(
            plan.chunks,
            tensors,
            devices,
            addresses=addresses,
            cloned=cloned,
            watch=watch,
            samples=plan.samples if watch else (),
            replicas=witness or {},
            algorithm=self._algorithm,
            copy=self._copy,
        )
        snapshot = staging.Snapshot(copy_plan, arena)
        replicas = None
        if self._replicas and plan.partition and isinstance(topic, Topic):
            replicas = self._replicas.check(topic, plan.partition, captured, snapshot, kept)
        return PlannedSave(
            images=images,
            arena=arena,
            source=snapshot,
            check=_ContentCheck(digests, replicas),
            overlapped=references is not None,
            page_locked=bool(devices),
            aliases=captured.aliases,
            values=captured.values,
        )

    def exempt(self, state: Mapping[str, Any], stored: Collection[str] | None = None) -> None:
        """Find the parameters that hold infinity and no NaN before training: these make no later save unfit.

        `stored`: after a restore, the names of the generation that may hold NaN or infinity; only those are exempt.
        None: nothing was restored. Then only the first call searches, and it must come before any training.
        """
        if stored is None and self._exempt is not None:
            return
        self._exempt, self._plan = masks(state, stored), None  # guard: exemption-follows-restore

    def examine(
        self,
        state: Mapping[str, Any],
        patterns: Patterns,
        beside: Executor,
        report: Callable[[Sequence[int]], None],
    ) -> None:
        """Check before the first save that all of the state can be stored and that each pattern matches a name.

        Several ranks also begin to exchange which tensors each of them holds (`beside` runs that), so that the next
        save waits for no other rank. Copies nothing. `report`: called with the bytes that each rank writes in a save;
        of several ranks at the coordinator, on `beside`, once all have posted what they hold. Raises Unstorable with
        everything that cannot be stored; Refused for a pattern.
        """
        if self._replicas is None:
            captured = require_storable(self._capture, state)
            self.fence.hook(captured.optimizers)
            patterns.require(state)  # guard: patterns-checked-at-first-step
            report([saved_bytes(captured)])
            return
        with self._replicas.topic() as topic:
            captured = require_storable(self._capture, state)
            self.fence.hook(captured.optimizers)
            self._replicas.start_exchange(topic, captured, patterns.unmatched(state), beside, report)

    def watch_updates(self, state: Mapping[str, Any]) -> None:
        """Hook the optimizers of a state now, before its first save, so that `fence.update_begun` shows their steps."""
        objects = {id(one): one for one in map(Wrappers().unwrapped, find_objects(state).values())}
        self.fence.hook([one for one in objects.values() if can_be_hooked(one)])

    def captured(self, state: Mapping[str, Any]) -> Captured:
        """The live tensors and values of the state, as a save would store them."""
        return self._capture.take(state)

    def hold_updates(self, planned: PlannedSave) -> None:
        """Make the fence delay the next update until this overlapped save has copied its tensors."""
        assert isinstance(planned.source, staging.Snapshot)
        self.fence.add(planned.source)  # guard: snapshot-holds-update

    def interrupted(self) -> None:
        """Record that KeyboardInterrupt came while the state was read: a chunk of the arena may never be released."""
        self._spoiled = True

    def stop_overlapping(self) -> bool:
        """Copy while the loop waits from now on. Returns False if that was so already."""
        before, self._staging = self._staging, "blocking"
        self._plan = None  # it would keep tensors alive that the state may not hold any more
        return before != "blocking"

    def close(self) -> None:
        """Release the memory and the hooks. No save may be in flight."""
        self.fence.close()
        self._drop_arena()
        self._plan = None

    def reading_arena(self, image_bytes: int, chunk_bytes: int) -> Arena:
        """The arena for a restore; a new one replaces it if it is too small. No save may be in flight."""
        bound = image_bytes if self._memory is None else min(self._memory, image_bytes)
        arena = self._fitting(bound, chunk_bytes)
        if arena is None:
            self._drop_arena()
            arena = self._arena = Arena(max(bound // chunk_bytes, 1) * chunk_bytes, chunk_bytes)
        return arena

    # ---- steps ---------------------------------------------------------------------------------------------

    def _layout(self, state: Mapping[str, Any], captured: Captured, topic: AnyTopic) -> _Plan:
        """The plan of the last save, if it still holds, else a new one; with several ranks, of this rank's part."""
        plan = self._plan
        known = plan is not None and plan.key == captured.key and plan.origins is captured.origins
        if Origin.STEPPED not in captured.origins.values():
            known = False  # without an optimizer only `requires_grad` shows what trains, and it may have changed
        must = plan.finite if plan is not None and known else self.must_be_finite(state, captured)
        partition = (
            self._replicas.partition(captured, must, topic) if self._replicas and isinstance(topic, Topic) else None
        )
        # guard: stale-layout-rebuilt
        if plan is None or (plan.key, plan.finite) != (captured.key, must) or plan.partition is not partition:
            if self._replicas and partition:
                files = lay_out([item.tensor for item in partition.mine], self._replicas.rank)
            else:
                files = staging.lay_out(captured.tensors, must)
            shapes = {name: one.shape for name, one in captured.tensors.items()}
            if plan is not None:
                self._report_reshaped(plan.shapes, shapes, state)
            plan = self._plan = _Plan(captured.key, must, files, shapes, partition)
        plan.origins = captured.origins
        return plan

    def _report_reshaped(
        self, before: Mapping[str, torch.Size], now: Mapping[str, torch.Size], state: Mapping[str, Any]
    ) -> None:
        """Report, once and at rank 0, tensors in plain containers whose shape has changed between two saves: a restart
        that builds them as before cannot restore them. Modules and other objects may change theirs in a load."""
        if self._reshaped_reported or (self._replicas is not None and self._replicas.rank):
            return
        found = [name for name, shape in now.items() if before.get(name, shape) != shape]
        objects = tuple(f"{path}." for path in find_objects(state)) if found else ()
        found = [name for name in found if not name.startswith(objects)]
        if found:  # guard: reshaped-tensor-is-reported
            self._reshaped_reported = True
            listed = shortened([f"{name} {list(before[name])}, now {list(now[name])}" for name in found], 3)
            reporting.warning(
                f"a tensor has another shape than in the save before: {listed}. restore() refuses it (StateMismatch) "
                "where a restart builds it in another shape than the saved one. Keep records that grow in a list, "
                "which is restored with any length"
            )

    def must_be_finite(self, state: Mapping[str, Any], captured: Captured) -> frozenset[str]:
        """Names of the tensors in which NaN or infinity makes a state unfit."""
        exempt = {captured.aliases.get(name, name) for name in self._exempt or ()}
        return finite(captured, *self._finite, exempt=untrained(state, captured) | exempt)

    def _overlapped(
        self, plan: _Plan, state: Mapping[str, Any], captured: Captured, on_device: bool
    ) -> Mapping[str, torn_check.Reference] | None:
        """The tensors that are copied while training goes on; None if the loop waits for the whole copy.

        It waits with staging="blocking", and by default for a small state and for optimizers that cannot be made to
        wait; also if more than SIDE_BYTES would have to be cloned, and with torn_check="full" on a CUDA device.
        """
        small = self._staging is None and sum(one.length for one in plan.images) <= SMALL_BYTES
        if self._staging == "blocking" or small:
            return None
        # guard: stale-bearers-refreshed
        if plan.overlappable is None or plan.found_in is not captured.origins or not plan.overlappable.holds(captured):
            plan.overlappable, plan.found_in = overlap.find(state, captured), captured.origins
        found = plan.overlappable
        if self._staging is None and not (found.hookable and captured.optimizers):  # guard: no-hook-no-overlap
            self.note = FSDP1_NOTE if found.moves else ""
            return None
        if self._torn_check == "full" and on_device:
            return None
        if captured.optimizers and found.beside_trained_bytes <= staging.SIDE_BYTES:  # guard: averages-cloned
            return found.trained
        return found.all if found.beside_all_bytes <= staging.SIDE_BYTES else None  # guard: large-averages-not-cloned

    def _watched(self, plan: _Plan, references: Mapping[str, torn_check.Reference]) -> torn_check.Watch:
        if plan.watch is None or plan.watch.references is not references:
            plan.watch = watch = torn_check.Watch(references)
            in_part = {item.name for item in plan.partition.mine if item.rows} if plan.partition else ()
            plan.samples = [watch.in_chunks(image, chunks, in_part) for image, chunks in plan.chunks]
        return plan.watch

    def _witnessed(
        self, partition: Partition | None, captured: Captured
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The replicas of tensors that other ranks write, by key; and clones of those that this rank may have to write.

        A replica that is no parameter (`Origin.OTHER`) may differ between ranks: this rank stores its own value then.
        """
        witness: dict[str, torch.Tensor] = {}
        kept: dict[str, torch.Tensor] = {}
        for item in chain.from_iterable(partition.witnessed.values()) if partition else ():
            key, one = item.tensor.key, item.view(captured.tensors)
            if captured.origins[item.name] is Origin.OTHER:
                one = kept[key] = one.clone()
            witness[key] = one
        return witness, kept

    def _writing_arena(self, images: Sequence[Image]) -> Arena:
        total = sum(image.length for image in images)
        most = min(self._chunk_bytes, round_up(total))
        bounded = most if self._memory is None else self._memory // STAGING_CHUNKS // PAGE_BYTES * PAGE_BYTES
        chunk_bytes = max(min(most, bounded), PAGE_BYTES)
        wanted = sum(round_up(image.length, chunk_bytes) for image in images)
        wanted = wanted if self._memory is None else min(self._memory // chunk_bytes * chunk_bytes, wanted)
        arena = self._fitting(wanted, chunk_bytes)
        if arena is None:
            # Until every lease of the old arena is released: both would exceed the bound.
            self._pipeline.wait_for_saves()  # guard: larger-state-waits-for-no-copy
            self._drop_arena()
            arena = self._arena = Arena(max(wanted, chunk_bytes), chunk_bytes)
        return arena

    def _fitting(self, wanted: int, chunk_bytes: int) -> Arena | None:
        """The present arena, if it has chunks of this length and is at least as large as wanted."""
        own = self._arena
        serves = own is not None and own.chunk_bytes == chunk_bytes and own.arena_bytes >= wanted
        return own if serves and not self._spoiled else None

    def _drop_arena(self) -> None:
        if self._pin is not None:
            self._pin.release()
        self._arena = self._pin = None
        self._spoiled = False


def _cloned(
    plan: _Plan, tensors: Mapping[str, torch.Tensor], references: Mapping[str, torn_check.Reference]
) -> set[str]:
    """Keys of the tensors that are cloned before the loop goes on, because forward and backward may change them."""
    if plan.partition is None:
        return tensors.keys() - references.keys()  # guard: forward-buffers-cloned
    return {item.tensor.key for item in plan.partition.mine if item.name not in references}


def flat_modules(state: Mapping[str, Any]) -> list[str]:
    """The paths of the modules that FSDP1 has wrapped: each rank holds a slice of all parameters in one flat tensor,
    which has neither their names nor their shapes.
    """
    return [path for path, one in modules_of(state).items() if any(map(is_fsdp1, one.modules()))]


def require_no_flat_parameters(state: Mapping[str, Any]) -> None:
    """Raises Refused, with their names, for modules that FSDP1 has wrapped: several ranks cannot save these."""
    flat = flat_modules(state)
    require(
        not flat,
        f"FSDP1 with several ranks: {', '.join(flat)} is in flat parameters of each rank",
        "Give an object that hands it out in shards, by torch's get_state_dict: see docs/ranks.md.",
    )

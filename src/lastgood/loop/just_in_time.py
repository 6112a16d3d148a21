"""Just-in-time save: when a rank has died, a survivor saves the newest step for all ranks before the attempt ends.

    each step, each rank   notes what only it has (values, random numbers, buffers) in memory that outlives it
    a rank dies            the others fail in a collective; their exception leaves the `with`
    the first survivor     its parameters and optimizer states are still those of the step: proven, not assumed
    that gets the lock     writes them and the notes of all ranks as one generation (run/survivor_save.py)

Invariants
  1. Every byte of the generation is that of the boundary after its step: a copy that was made there, or memory whose
     version counters and samples are still those that were noted there.
  2. Where that is not so, or a rank has not noted the step, nothing is saved, and the reason is reported.
  3. A rank saves only if another one has ended or is about to: an exception of its own is no reason.

What a rank holds apart from the others is copied; so shards, which no other rank has, are refused.
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from .. import reporting
from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks
from ..engine.arena import Arena
from ..errors import LastgoodError, RunLocked, TrainingDiverged
from ..format.layout import Tensor, images
from ..io import heartbeat, rank_notes
from ..io.checksum import digest
from ..limits import CHUNK_BYTES, WORKERS
from ..policy import survival
from ..policy.survival import Noted
from ..ranks.partition import structure_digest
from ..records import Record
from ..run.pipeline import Pipeline
from ..run.survivor_save import Origin, RankContent, save_for_all
from ..snapshot import staging, torn_check
from ..state.capture import Capture, Captured
from ..state.capture import Origin as Changes
from ..state.tensors import as_bytes, dtype_name, from_buffer
from .beat import Beat
from .options import Options
from .save_planner import SavePlanner

NOTE_LIMIT_BYTES = 16 << 20
"""What a rank may note at a step: copying more would take longer than a small step."""
DEATH_SECONDS = 0.2
"""How long an exception may come before the end of the process that has caused it can be seen."""
CLOSE_SECONDS = 0.5
"""How long saves in flight have to end before a just-in-time save: it is of the same step, or of a later one."""
_ALGORITHM = "xxh3_128"


class NotedTensor(Record, frozen=True, kw_only=True):
    """A tensor as it was at the boundary. `data`: its bytes in row-major order."""

    name: str
    dtype: str
    shape: list[int]
    data: bytes


class Note(Record, frozen=True, kw_only=True):
    """What one rank notes when it has completed a step. `values`: JSON, as in a manifest."""

    step: int
    opening: str
    """of the run by this job, since its last restore"""
    process: int
    structure: str
    samples: str
    aliases: dict[str, str]
    values: bytes
    tensors: list[NotedTensor]

    @property
    def noted(self) -> Noted:
        """What the policy needs of it."""
        return Noted(self.step, self.structure, self.samples)


@dataclass
class _Boundary:
    """The newest step that this rank has completed, and how to see whether the live memory is still that of it."""

    step: int
    captured: Captured
    watch: torn_check.Watch
    observed: torn_check.Observation

    def changed(self) -> list[str]:
        """Names of the tensors that have changed since."""
        found = self.watch.replaced(self.observed.versions) | self.observed.differs(self.watch.observe())
        return sorted(found)


class JustInTime:
    """The just-in-time save of one rank. `url`: of the run. `page`: path of the heartbeat page of this rank.

    Every method is called on the training thread.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        url: str,
        page: str,
        options: Options,
        pipeline: Pipeline,
        planner: SavePlanner,
        ranks: RankGroup,
        beat: Beat,
    ) -> None:
        self._state, self._url, self._page, self._options = state, url, page, options
        self._pipeline, self._planner, self._ranks, self._beat = pipeline, planner, ranks, beat
        self._notes, self._capture = rank_notes.RankNotes(page), Capture(options.include, options.exclude)
        self._boundary: _Boundary | None = None
        self._structure, self._structure_of = "", -1
        self._off = False

    def note(self, n: int) -> None:
        """Note the boundary after step `n`, at the first call for it. Where that cannot be done, report it, and note
        nothing any more."""
        if self._off or (self._boundary is not None and self._boundary.step == n):
            return
        captured = self._capture.take(self._state)
        if captured.sharded:
            name = next(iter(captured.sharded))
            self._turn_off(f"{name} is sharded: what a dead rank held of it, no other rank has")
            return
        watch = self._watched(captured)
        beside = {name: one for name, one in captured.tensors.items() if name not in watch.references}
        size = sum(one.nbytes for one in beside.values())
        if size > NOTE_LIMIT_BYTES:
            largest = max(beside, key=lambda name: beside[name].nbytes)
            what = f"{size >> 20} MiB beside parameters and optimizer states, {largest} first"
            self._turn_off(f"{what}: at most {NOTE_LIMIT_BYTES >> 20} MiB can be copied at each step")
            return
        observed = watch.observe()
        note = Note(
            step=n,
            opening=self._ranks.name,
            process=os.getpid(),
            structure=self._structure_digest(captured),
            samples=digest(_ALGORITHM, *(one.tobytes() for one in observed.arrays)),
            aliases=captured.aliases,
            values=msgspec.json.encode(captured.values),
            tensors=[_noted(name, one) for name, one in beside.items()],
        )
        try:
            self._notes.write(msgspec.msgpack.encode(note))
        except OSError as error:
            self._turn_off(f"{type(error).__name__}: {error}")
            return
        self._boundary = _Boundary(n, captured, watch, observed)
        assert self._options.ranks.just_in_time_seconds is not None
        self._beat.can_save_just_in_time(self._options.ranks.just_in_time_seconds)

    def restart(self) -> None:
        """The state was restored, or is about to be: what was noted before is not the state any more."""
        self._boundary = None
        self._beat.can_save_just_in_time(0.0)

    def wanted(self, error: BaseException | None) -> bool:
        """Whether to save after this exception: another rank has ended, or is about to, and this one has noted a step.

        Not after one that ends the loop on purpose, and not where training has diverged.
        """
        own = not isinstance(error, Exception) or isinstance(error, TrainingDiverged)
        return not own and self._boundary is not None and bool(self._ended())

    def save(self) -> bool:
        """Save the noted step for all ranks, if it can be proven, and report what became of it. Returns whether it is
        saved now. To be called once the pipeline was closed, also if that has timed out.

        Does nothing where another process has the lock of the run: rank 0, which lives, or another survivor.
        """
        boundary = self._boundary
        assert boundary is not None
        if self._pipeline.releasing is not None:
            self._pipeline.releasing.result()
        notes = {rank: self._read(rank, boundary.step) for rank in range(self._ranks.size)}
        noted = {rank: note.noted if note else None for rank, note in notes.items()}
        why = survival.why_not(boundary.step, self._ranks.rank, noted, boundary.changed())
        if why:
            reporting.warning(f"{self._url}: no just-in-time save of step {boundary.step}: {why}")
            return False
        begun = self._pipeline.run.known.environment.monotonic_seconds()
        origin = Origin(step=boundary.step, incarnation=self._pipeline.run.known.incarnation)
        tuning = self._options.tuning
        try:
            contents = self._contents(boundary, [note for note in notes.values() if note is not None])
            mode, algorithm = tuning.write_mode, tuning.digest
            found = save_for_all(
                self._url, origin, contents, mode=mode, algorithm=algorithm, keep=self._options.retention
            )
        except RunLocked:
            return False
        except (LastgoodError, OSError) as error:
            reporting.threat(f"{self._url}: the just-in-time save of step {boundary.step} failed: {error}")
            return False
        self._beat.saved_just_in_time(boundary.step)
        if found is not None:
            seconds = self._pipeline.run.known.environment.monotonic_seconds() - begun
            what = f"rank {self._ranks.rank} has saved step {found.step} for all ranks in {seconds:.1f} s"
            reporting.warning(f"{self._url}: {what}, because another one has ended")
        return True

    # ---- steps ---------------------------------------------------------------------------------------------

    def _turn_off(self, why: str) -> None:
        self._off, self._boundary = True, None
        self._beat.can_save_just_in_time(0.0)
        reporting.warning(f"{self._url}: rank {self._ranks.rank} makes no just-in-time saves: {why}")

    def _watched(self, captured: Captured) -> torn_check.Watch:
        """The tensors that only training changes: that of the last step, if their memory is still the same."""
        before = self._boundary
        if before is not None and _memory(captured) == _memory(before.captured):
            return before.watch
        return torn_check.Watch(
            {
                name: torn_check.Reference({name: one}, name, one)
                for name, one in captured.tensors.items()
                if captured.origins[name] is not Changes.OTHER and torn_check.watchable(one)
            }
        )

    def _structure_digest(self, captured: Captured) -> str:
        if self._structure_of != captured.key:
            self._structure, self._structure_of = structure_digest(captured), captured.key
        return self._structure

    def _page_of(self, rank: int) -> str:
        return os.path.join(os.path.dirname(self._page), str(rank))

    def _read(self, rank: int, step: int | None = None) -> Note | None:
        """What a rank has noted at `step`, or (None) last; None if there is no such note."""
        read = (msgspec.msgpack.decode(one, type=Note) for one in rank_notes.read(self._page_of(rank)))
        found = (one for one in read if one.opening == self._ranks.name and step in (None, one.step))
        return max(found, key=lambda one: one.step, default=None)

    def _ended(self) -> list[int]:
        """The other ranks that have ended, or whose script has failed or has closed the run."""
        pages = {rank: self._page_of(rank) for rank in range(self._ranks.size) if rank != self._ranks.rank}
        notes = {rank: self._read(rank) for rank in pages}
        found = _ended_processes({rank: one.process for rank, one in notes.items() if one is not None})
        shown = {rank: heartbeat.read(page) for rank, page in pages.items()}
        return sorted(found | {rank for rank, one in shown.items() if one.failed is not None or one.closed is not None})

    def _contents(self, boundary: _Boundary, notes: list[Note]) -> list[RankContent]:
        """What the manifest of each rank holds. `notes`: of all ranks. Tensors that all ranks share are written once,
        in the part of rank 0, and so is what they have noted alike."""
        arena = Arena(2 * WORKERS * CHUNK_BYTES, CHUNK_BYTES)
        first = {one.name: one.data for one in notes[0].tensors}
        finite = self._planner.must_be_finite(self._state, boundary.captured)
        found = []
        for rank, note in enumerate(notes):
            private = [one for one in note.tensors if rank == 0 or _is_own(one, first)]
            tensors = {one.name: from_buffer(bytearray(one.data), one.dtype, one.shape) for one in private}
            if rank == 0:
                shared = {name: boundary.captured.tensors[name] for name in boundary.watch.references}
                tensors |= shared
            files = images(
                [
                    Tensor(name, dtype_name(one.dtype), tuple(one.shape), name in finite, own=rank != 0)
                    for name, one in tensors.items()
                ],
                rank,
            )
            chunks = staging.copy_all(files, tensors, arena).fill()
            found.append(
                RankContent(
                    images=files,
                    chunks=chunks,
                    chunk_bytes=CHUNK_BYTES,
                    aliases=note.aliases,
                    values=msgspec.json.decode(note.values),
                )
            )
        return found


def _memory(captured: Captured) -> tuple[int, list[int]]:
    """Which memory the tensors have that only training changes. Others, as random numbers, are new in each capture."""
    places = zip(captured.addresses, captured.origins.values(), strict=True)
    return captured.key, [address for address, origin in places if origin is not Changes.OTHER]


def _noted(name: str, tensor: torch.Tensor) -> NotedTensor:
    data = as_bytes(tensor).cpu().numpy().tobytes()
    return NotedTensor(name=name, dtype=dtype_name(tensor.dtype), shape=list(tensor.shape), data=data)


def _is_own(tensor: NotedTensor, first: Mapping[str, bytes]) -> bool:
    """Whether a rank other than 0 stores this tensor itself, as every save does (ranks/partition.py)."""
    random = tensor.name == "rng" or tensor.name.startswith("rng.")
    return random or first[tensor.name] != tensor.data


def _ended_processes(processes: Mapping[int, int]) -> set[int]:
    """Which of these ranks have ended. `processes`: rank -> process id. Waits a moment if none has."""
    with contextlib.ExitStack() as opened:
        poll, by_descriptor, found = select.poll(), dict[int, int](), set[int]()
        for rank, process in processes.items():
            try:
                descriptor = os.pidfd_open(process)
            except ProcessLookupError:
                found.add(rank)
                continue
            opened.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
            by_descriptor[descriptor] = rank
        wait = 0 if found else int(1000 * DEATH_SECONDS)
        return found | {by_descriptor[descriptor] for descriptor, _ in poll.poll(wait)}


def opened(
    state: Mapping[str, Any],
    url: str,
    options: Options,
    pipeline: Pipeline,
    planner: SavePlanner,
    ranks: AnyRanks,
    beat: Beat,
    environ: Mapping[str, str] = os.environ,
) -> JustInTime | None:
    """The just-in-time save of this rank; None if it is not asked for, or where no other rank could survive this one.

    Without `lastgood run` nobody waits for survivors, and on several nodes what a lost one has noted is lost with it:
    both are reported.
    """
    if options.ranks.just_in_time_seconds is None or not isinstance(ranks, RankGroup):
        return None
    page = environ.get(heartbeat.VARIABLE, "")
    several = environ.get("LOCAL_WORLD_SIZE") != environ.get("WORLD_SIZE")
    if several or not beat.is_shown or os.path.basename(page) != str(ranks.rank):
        if ranks.is_coordinator:
            where = "on several nodes" if several else "without `lastgood run`"
            reporting.warning(f"{url}: just_in_time_seconds has no effect {where}")
        return None
    return JustInTime(state, url, page, options, pipeline, planner, ranks, beat)

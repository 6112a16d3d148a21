"""Just-in-time save: when a rank has died, the survivors save the newest step before the attempt ends.

    each step, each rank    notes what only it has (values, random numbers, buffers) in memory that outlives it
    a rank dies             the others fail in a collective; their exception leaves the `with`
    each survivor           its parameters and optimizer states are still those of the step: proven, not assumed; it
                            writes those that no other survivor has claimed, and ends
    the supervisor          commits them with the notes of all ranks, once nothing is missing (run/survivor_save.py)

Invariants
  1. Every byte of the generation is that of the boundary after its step: a copy that was made there, or memory whose
     version counters and samples are still those that were noted there.
  2. Where that is not so, nothing is written, and the reason is reported.
  3. A survivor waits for no other rank. Gloo lets a rank fail only once its neighbours in a ring have closed their
     connections, which they do when they end: a survivor that waited would keep others from failing.

What a rank holds apart from the others is copied; so shards that one rank alone holds are refused (boundary.py).
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from .. import reporting
from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks
from ..engine.arena import Arena
from ..errors import LastgoodError, TrainingDiverged
from ..format.layout import images
from ..io import heartbeat, rank_notes
from ..limits import CHUNK_BYTES, WORKERS
from ..policy import blame, survival
from ..run import paths
from ..run.pipeline import Pipeline
from ..run.survivor_notes import Note, Written, decoded
from ..run.survivor_save import HeldWriter, generation_id, held_writer
from ..snapshot import staging
from ..state.capture import Capture
from .beat import Beat
from .boundary import Boundary, CannotNote, Held, Notes
from .options import Options
from .save_planner import SavePlanner

DEATH_SECONDS = 0.2
"""How long an exception may come before the end of the process that has caused it can be seen."""
CLOSE_SECONDS = 0.5
"""How long saves in flight have to end before a just-in-time save: it is of the same step, or of a later one."""


@dataclass(frozen=True)
class Seat:
    """Where this rank is. `page`: path of its heartbeat page. `first`: the first rank of its node. `alone`: whether all
    ranks are on this node."""

    page: str
    first: int
    alone: bool

    def page_of(self, rank: int) -> str:
        """The heartbeat page of a rank of this node."""
        return os.path.join(os.path.dirname(self.page), str(rank - self.first))


class JustInTime:
    """The just-in-time save of one rank. `url`: of the run.

    Every method is called on the training thread.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        url: str,
        seat: Seat,
        options: Options,
        pipeline: Pipeline,
        planner: SavePlanner,
        ranks: RankGroup,
        beat: Beat,
    ) -> None:
        self._state, self._url, self._seat, self._options = state, url, seat, options
        places = [paths.parsed(one.path).url for one in options.places(url)]
        self._place = options.just_in_time_place(url)
        self._others = [one for one in places if one != self._place]
        # Copies are always written so (run/places.py).
        self._mode = options.tuning.write_mode if places[0] == self._place else "atomic_dirsync"
        self._pipeline, self._planner, self._ranks, self._beat = pipeline, planner, ranks, beat
        self._pages, self._capture = rank_notes.RankNotes(seat.page), Capture(options.include, options.exclude)
        self._notes = Notes(ranks.size)
        self._pages.remove()  # of an earlier opening in this process
        self._boundary: Boundary | None = None
        self._off = False

    def note(self, n: int) -> None:
        """Note the boundary after step `n`, at the first call for it. Where that cannot be done, report it, and note
        nothing any more."""
        if self._off or (self._boundary is not None and self._boundary.step == n):
            return
        try:
            boundary = self._notes.boundary(n, self._capture.take(self._state), self._boundary)
            self._pages.write(msgspec.msgpack.encode(self._notes.note(boundary, self._ranks.name)))
        except CannotNote as error:
            self._turn_off(str(error))
            return
        except OSError as error:
            self._turn_off(f"{type(error).__name__}: {error}")
            return
        self._boundary = boundary
        assert self._options.ranks.just_in_time_seconds is not None
        self._beat.can_save_just_in_time(self._options.ranks.just_in_time_seconds)

    def restart(self) -> None:
        """The state was restored, or is about to be: what was noted before is not the state any more."""
        self._boundary = None
        self._beat.can_save_just_in_time(0.0)

    def wanted(self, error: BaseException | None) -> bool:
        """Whether to save after this exception: it is one of ranks that have lost another one, such as a connection
        that was closed, and the state is still that of a noted step. Reports why not, if only that prevents it.

        Not after an exception of the program itself: all ranks may raise it, and then none is dead. The end of a rank
        of another node cannot be seen here; on one node it is looked for.
        """
        if self._boundary is None or not isinstance(error, Exception) or isinstance(error, TrainingDiverged):
            return False
        if not _is_follower(error) or (self._seat.alone and not self._ended()):  # guard: own-exception-saves-nothing
            return False
        return self._is_unchanged(self._boundary)  # guard: changed-state-closes-as-usual

    def save(self) -> bool:
        """Write what this rank holds of the noted step, if it can be proven, and report why not. Returns whether all
        was done that this rank can do. To be called once the pipeline was closed, also if that has timed out.
        """
        boundary = self._boundary
        assert boundary is not None
        if self._pipeline.releasing is not None:
            self._pipeline.releasing.result()
        if not self._is_unchanged(boundary):  # guard: changed-state-not-saved
            return False
        at, algorithm = generation_id(self._ranks.name, boundary.step), self._options.tuning.digest
        try:
            with held_writer(self._place, at, self._ranks.rank, mode=self._mode, algorithm=algorithm) as writer:
                held = [one for one in boundary.held if writer.claim(one.holders)]
                written = self._written(boundary, held, writer) if held else None
                if not self._is_unchanged(boundary):  # guard: change-during-the-copy-not-saved
                    return False
                if written is not None:
                    self._pages.write_result(msgspec.msgpack.encode(written))
        except (LastgoodError, OSError) as error:
            reporting.threat(f"{self._url}: the just-in-time save of step {boundary.step} failed: {error}")
            return False
        self._beat.wrote_just_in_time()
        return True

    # ---- steps ---------------------------------------------------------------------------------------------

    def _is_unchanged(self, boundary: Boundary) -> bool:
        """Whether the state is still that of the boundary, as far as it shows. Reports what has changed."""
        changed = boundary.changed()
        if changed:
            why = survival.changed_text(boundary.step, changed)
            reporting.warning(f"{self._url}: no just-in-time save of step {boundary.step}: {why}")
        return not changed

    def _turn_off(self, why: str) -> None:
        self._off, self._boundary = True, None
        self._pages.remove()
        self._beat.can_save_just_in_time(0.0)
        reporting.warning(f"{self._url}: rank {self._ranks.rank} makes no just-in-time saves: {why}")

    def _written(self, boundary: Boundary, held: list[Held], writer: HeldWriter) -> Written:
        """Write these parts of tensors. Raises as a save."""
        finite = self._planner.must_be_finite(self._state, boundary.captured)
        parts = [part for one in held for part in one.parts]
        files = images([part.stored._replace(finite=part.stored.name in finite) for part in parts], self._ranks.rank)
        arena = Arena(2 * WORKERS * CHUNK_BYTES, CHUNK_BYTES)
        chunks = staging.copy_all(files, {part.stored.key: part.memory for part in parts}, arena).fill()
        blobs, pieces = writer.write(files, chunks)
        return Written(
            rank=self._ranks.rank,
            step=boundary.step,
            opening=self._ranks.name,
            held=[[*one.holders] for one in held],
            blobs=blobs,
            pieces=pieces,
            finite=sorted(finite),
            incarnation=self._pipeline.run.known.incarnation,
            place=self._place,
            others=self._others,
            mode=self._mode,
            algorithm=self._options.tuning.digest,
        )

    def _ended(self) -> set[int]:
        """The other ranks that have ended, or whose script has failed. All are on this node. Waits a moment if none
        has."""
        others = [rank for rank in range(self._ranks.size) if rank != self._ranks.rank]
        processes = dict[int, int]()
        for rank in others:
            for one in rank_notes.read(self._seat.page_of(rank)):
                note = decoded(one, Note)
                if note is not None and note.opening == self._ranks.name:
                    processes[rank] = note.process
        found = _ended_processes(processes)
        shown = {rank: heartbeat.read(self._seat.page_of(rank)) for rank in others}
        return found | {rank for rank, one in shown.items() if one.failed is not None}


def _is_follower(error: BaseException | None) -> bool:
    """Whether this exception, or one from which it comes, is one of ranks that have lost another one."""
    seen = list[BaseException]()
    while error is not None and error not in seen:
        if blame.is_follower(f"{type(error).__name__}: {error}"):
            return True
        seen.append(error)
        error = error.__cause__ or error.__context__
    return False


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

    Without `lastgood run` nobody commits what survivors write, which is reported.
    """
    if options.ranks.just_in_time_seconds is None or not isinstance(ranks, RankGroup):
        return None
    page = environ.get(heartbeat.VARIABLE, "")
    local = os.path.basename(page)  # LOCAL_RANK is 0 on each rank that sees its own device alone
    if not beat.is_shown or not local.isdigit():
        if ranks.is_coordinator:
            reporting.warning(f"{url}: just_in_time_seconds has no effect without `lastgood run`")
        return None
    alone = environ.get("LOCAL_WORLD_SIZE") == str(ranks.size)
    seat = Seat(page, ranks.rank - int(local), alone)
    return JustInTime(state, url, seat, options, pipeline, planner, ranks, beat)

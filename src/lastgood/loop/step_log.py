"""The logs of one open run under `lastgood run --records DIR`: its steps, and on rank 0 its saves. Decides nothing.

run/job_logs.py says what is in them. Everything here runs on the training thread.
"""

from __future__ import annotations

import math
import os
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..coordination.single_rank import AnyRanks
from ..data.audit import Audit
from ..data.trained import multiset_hash, trained_ids
from ..events import Event
from ..limits import ENTRIES_SEARCHED
from ..run import job_logs
from ..run.job_logs import SAVES, VARIABLE, Lines, SaveLine, StepLine
from ..state.dtensor import is_sharded
from ..state.objects import instances_of
from .beat import Beat
from .metrics import number
from .progress import Progress

ENDS = frozenset({"durable", "dropped", "refused", "failed"})
"""the kinds of events with which a save ends"""
PARTS = {
    "staged": "snapshot_seconds",
    "written": "write_seconds",
    "waited": "backpressure_seconds",
}
"""kind of an event -> the field of a SaveLine that its seconds are added to"""


def opened(state: Mapping[str, Any], ranks: AnyRanks, progress: Progress, beat: Beat) -> StepLog | None:
    """The logs that the environment of this process asks for; None: it asks for none."""
    folder = os.environ.get(VARIABLE)
    return StepLog(Path(folder), state, ranks, progress, beat) if folder else None


class StepLog:
    """The logs of this rank in `folder`. `state`: of the training, in which samplers and audits are found."""

    def __init__(self, folder: Path, state: Mapping[str, Any], ranks: AnyRanks, progress: Progress, beat: Beat) -> None:
        self._state, self._ranks, self._progress, self._beat = state, ranks, progress, beat
        self._attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        self._steps = Lines(folder / job_logs.rank_log(ranks.rank))
        self._saves = Lines(folder / SAVES) if ranks.is_coordinator else None
        self._parts: defaultdict[int, dict[str, float]] = defaultdict(dict)
        """step of a save that has not ended -> field of its line -> seconds"""

    def restored(self, step: int, seconds: float) -> None:
        """The state is that of `step`. `seconds`: of the restore."""
        self._add("restored", step, seconds=seconds)

    def step(self, n: int, metrics: Mapping[str, Any] | None) -> None:
        """Step `n` is completed, and counted on the samplers."""
        given: Any = (metrics or {}).get("loss")
        is_part = is_sharded(given) and not all(one.is_replicate() for one in given.placements)
        # The whole is known by a collective only, and this rank may be the only one that has a log.
        loss = number("loss", None if is_part else given)
        line = StepLine(
            attempt=self._attempt,
            global_step=n,
            **self._samples(),
            world_size=self._ranks.size,
            rank=self._ranks.rank,
            loss=loss if math.isfinite(loss) else None,
            at_seconds=time.monotonic(),
            stall_seconds=self._beat.stall_seconds,
        )
        self._steps.add(line)

    def enqueued(self, step: int, seconds: float) -> None:
        """The call that began the save of `step` has returned. `seconds`: of it, without the wait for a place."""
        self._parts[step]["enqueue_seconds"] = seconds

    def fenced(self, step: int, seconds: float) -> None:
        """The loop has waited at the fence for the save of `step`."""
        self._count(step, "fence_seconds", seconds)

    def note(self, event: Event) -> None:
        """Something has happened to a save."""
        if event.kind in PARTS:
            self._count(event.step, PARTS[event.kind], event.seconds)
        elif event.kind in ENDS:
            self._add(event.kind, event.step, event.seconds, event.bytes, self._parts.pop(event.step, {}))

    def _count(self, step: int, field: str, seconds: float) -> None:
        self._parts[step][field] = self._parts[step].get(field, 0.0) + seconds

    def close(self) -> None:
        """The run is closed."""
        self._add("closed", self._progress.step)
        for one in (self._steps, self._saves):
            if one is not None:
                one.close()

    def _add(
        self, kind: str, step: int, seconds: float = 0.0, size: int = 0, parts: Mapping[str, float] | None = None
    ) -> None:
        if self._saves is not None:
            line = SaveLine(
                kind=kind,
                attempt=self._attempt,
                step=step,
                at_seconds=time.monotonic(),
                stall_seconds=self._beat.stall_seconds,
                seconds=seconds,
                bytes=size,
                **(parts or {}),
            )
            self._saves.add(line)

    def _samples(self) -> dict[str, Any]:
        """Where the last step was in the data, and the hash and number of the ids that this rank has trained."""
        trained = self._progress.trained
        if trained is None:
            return dict.fromkeys(("epoch", "cursor_step", "sample_ids_hash", "sample_ids_count"))
        (sampler,) = self._progress.samplers
        ids = trained_ids(instances_of(self._state, Audit, ENTRIES_SEARCHED), sampler, *trained)
        return {
            "epoch": trained.epoch,
            "cursor_step": trained.window,
            "sample_ids_hash": f"{multiset_hash(ids):016x}",
            "sample_ids_count": len(ids),
        }

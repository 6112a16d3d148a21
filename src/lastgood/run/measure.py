"""Measures the disk of a run and this machine's memory, with the parts that saves use, in a scratch run beside it.

The disk has room for everything before the first byte is written, and how much will be written is known before
(`Bounds`). Decides nothing: policy/tune.py says which settings to try and which one to choose.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from ..errors import NoSpace
from ..format import layout
from ..io.files import round_up
from ..policy import tune
from ..policy.tune import Measured, Setting
from . import scratch
from .trial_saves import Clock, TrainingLoad, TrialSaves, image_of
from .watched import CountBytes

RECORDS_BYTES = 1 << 20
"""room for the manifest, the commit and the folders of one save"""
PILOT_BYTES = 4 << 20
"""the first sample; the time it takes decides how large the real one may be"""


@dataclass(frozen=True)
class Effort:
    """How much is written for one figure, how often it is measured, and after how long no further setting is tried."""

    sample_bytes: int
    repeats: int
    limit_seconds: float


FULL = Effort(128 << 20, 5, 120.0)
QUICK = Effort(64 << 20, 3, 20.0)


@dataclass(frozen=True)
class Bounds:
    """What a measurement takes at most. The setting that is being tried at `limit_seconds` is finished."""

    written_bytes: int
    at_once_bytes: int
    limit_seconds: float


@dataclass(frozen=True)
class Figures:
    """The medians of what was measured, if nothing else is said. Seconds are those of the whole state.

    Where a smaller sample was written, the times are extrapolated (`TrialSaves.extrapolated_seconds`).
    """

    sample_bytes: int
    copy_bytes_per_second: float
    """one thread, from memory into the arena"""
    storage_bytes_per_second: float
    """one writer, flushed, without digests and commits"""
    fixed_seconds: float
    """the quickest save of a single page"""
    measured: list[Measured]
    chosen: Measured
    write_seconds: float
    """Tw of the chosen setting while a load runs on every core"""
    write_seconds_range: tuple[float, float]
    """the quickest and the slowest of these measurements"""
    contention_seconds: float
    """how much one save, its copying included, delays that load"""
    load_seconds: float
    """a verified read past the page cache"""
    complete: bool
    """whether every setting was tried that `tune.next_setting` asked for, before the time limit"""


def bounds(allowed: list[Setting], state_bytes: int, effort: Effort) -> Bounds:
    """What measuring these settings takes at most."""
    sample = min(state_bytes, effort.sample_bytes)
    alone = [one for one in allowed if one.in_flight == 1]
    tried = len({one.writers for one in alone}) + len({one.chunk_bytes for one in alone}) - 1
    most = max(one.in_flight for one in allowed)
    # The pilot, the copy, the write without digests; the search; the chosen setting beside the load.
    samples = 3 + tried + sum(range(2, most + 1)) + most
    records = most * RECORDS_BYTES
    return Bounds((samples * sample + records) * effort.repeats, most * sample + records, effort.limit_seconds)


def figures(
    run: str,
    allowed: list[Setting],
    state_bytes: int,
    memory_bytes: int,
    effort: Effort,
    enough_seconds: float = 0.0,
    count_bytes: CountBytes = lambda _: None,
    clock: Clock = time.monotonic,
) -> Figures:
    """Measure the `allowed` settings for a state of `state_bytes` beside `run`.

    `memory_bytes`: bound of the staging memory. `enough_seconds` (default 0.0): a Tw / N that need not be improved.
    `count_bytes`: called with the number of bytes of every copy and write. Raises NoSpace before a byte is written,
    Damaged, and what opening and writing raise.
    """
    needs = bounds(allowed, state_bytes, effort)
    folder = scratch.parent_folder(run)
    free = shutil.disk_usage(folder).free
    if free < needs.at_once_bytes:
        raise NoSpace(
            f"measuring needs {needs.at_once_bytes:,} bytes in {folder} for a while, free are {free:,}",
            safe="Nothing was written.",
            todo="Free space on this disk, or measure less at a time: --quick, or a smaller --disk.",
        )
    with scratch.opened(run) as tier:
        trials = TrialSaves(tier, state_bytes, memory_bytes, count_bytes, clock)
        return _Search(trials, effort, clock).figures(allowed, state_bytes, enough_seconds)


class _Search:
    """The order in which the figures are measured."""

    def __init__(self, trials: TrialSaves, effort: Effort, clock: Clock) -> None:
        self._trials, self._effort, self._clock = trials, effort, clock

    def figures(self, allowed: list[Setting], state_bytes: int, enough_seconds: float) -> Figures:
        trials, until = self._trials, self._clock() + self._effort.limit_seconds
        fixed = self._fix_sample(min(allowed), state_bytes)
        copy, write = self._median(trials.copy), self._median(trials.write)
        measured: list[Measured] = []
        late = False
        while not late and (setting := tune.next_setting(allowed, measured, enough_seconds)):
            trials.make_arena(setting, 2 * setting.least_bytes)
            seconds = self._median(partial(trials.save, setting, trials.image))
            measured.append(Measured(setting, trials.extrapolated_seconds(seconds, fixed)))
            late = self._clock() > until
        chosen = tune.choose(measured, enough_seconds)
        spans, losses = self._beside_a_load(chosen.setting, fixed)
        return Figures(
            sample_bytes=trials.sample_bytes,
            copy_bytes_per_second=trials.sample_bytes / copy,
            storage_bytes_per_second=trials.sample_bytes / write,
            fixed_seconds=fixed,
            measured=measured,
            chosen=chosen,
            write_seconds=median(spans),
            write_seconds_range=(min(spans), max(spans)),
            contention_seconds=median(losses),
            load_seconds=self._median(trials.read) * trials.scale,
            complete=not late,
        )

    def _fix_sample(self, smallest: Setting, state_bytes: int) -> float:
        """Choose the size of the sample. Returns the seconds of the quickest save of one page."""
        trials, effort = self._trials, self._effort
        trials.set_sample(PILOT_BYTES)
        trials.make_arena(smallest)
        page = image_of(min(layout.PAGE_BYTES, state_bytes))
        fixed = min(trials.save(smallest, page) for _ in range(effort.repeats))
        pilot = self._median(partial(trials.save, smallest, trials.image))
        # On a slow disk, too, the four figures that are always measured stay within the time limit.
        in_time = int(trials.sample_bytes / pilot * effort.limit_seconds / (4 * effort.repeats))
        trials.set_sample(min(effort.sample_bytes, max(PILOT_BYTES, in_time)))
        return fixed

    def _beside_a_load(self, setting: Setting, fixed: float) -> tuple[list[float], list[float]]:
        """Tw of each repetition while a load runs, and how many seconds one save delays the load."""
        trials, load = self._trials, TrainingLoad(self._clock)
        trials.make_arena(setting, setting.in_flight * round_up(trials.sample_bytes, setting.chunk_bytes))
        spans, losses = [], []
        for _ in range(self._effort.repeats):
            load.calibrate()
            span = trials.save(setting, trials.image, load)
            spans.append(trials.extrapolated_seconds(span, fixed))
            losses.append(max(0.0, span - load.work_seconds) / setting.in_flight * trials.scale)
        return spans, losses

    def _median(self, once: Callable[[], float]) -> float:
        return median(once() for _ in range(self._effort.repeats))

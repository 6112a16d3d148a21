"""Measures the disk of a run and the memory of this machine with real saves, in a scratch run beside the run.

The number of bytes that will be written is computed first (`Bounds`), and the free space is checked before the first
byte is written. Decides nothing: policy/tune.py chooses the settings to try and the best one.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

from ..errors import NoSpace
from ..io.files import round_up
from ..limits import PAGE_BYTES
from ..policy import tune
from ..policy.tune import Measured, Setting
from . import scratch
from .trial_saves import Clock, TrainingLoad, TrialSaves, image_of
from .watched import CountBytes

RECORDS_BYTES = 1 << 20
"""The space that is reckoned for the manifest, the commit and the folders of one save."""
PILOT_BYTES = 4 << 20
"""The length of the first sample. The time that it takes bounds the length of the real one."""


@dataclass(frozen=True)
class Effort:
    """The length of a sample, the repetitions of each measurement, and after how long no new setting is tried."""

    sample_bytes: int
    repeats: int
    limit_seconds: float


FULL = Effort(128 << 20, 5, 120.0)
QUICK = Effort(64 << 20, 3, 20.0)


@dataclass(frozen=True)
class Bounds:
    """The most that a measurement takes: bytes written in all, bytes on the disk at a time, and seconds.

    The setting that is being tried when `limit_seconds` have passed is still finished.
    """

    written_bytes: int
    at_once_bytes: int
    limit_seconds: float


@dataclass(frozen=True)
class Figures:
    """The results of a measurement: medians, unless noted otherwise. Seconds are those for the whole state.

    Where a smaller sample was written, the times are extrapolated (`TrialSaves.extrapolated_seconds`).
    """

    sample_bytes: int
    copy_bytes_per_second: float
    """copying from memory into the arena, by one thread"""
    storage_bytes_per_second: float
    """writing by one thread, flushed to the disk, without digests and commits"""
    fixed_seconds: float
    """the quickest save of a single page"""
    measured: list[Measured]
    chosen: Measured
    write_seconds: float
    """Tw, the time from the start of a save to its commit, for the chosen setting while a load runs on every core"""
    write_seconds_range: tuple[float, float]
    """the shortest and the longest of these measurements"""
    contention_seconds: float
    """the time by which one save, its copying included, delays that load"""
    load_seconds: float
    """a reading past the page cache that verifies every digest"""
    complete: bool
    """Whether all settings that `tune.next_setting` chose were tried before the time limit."""


def bounds(allowed: list[Setting], state_bytes: int, effort: Effort) -> Bounds:
    """The most that measuring these settings takes."""
    sample = min(state_bytes, effort.sample_bytes)
    alone = [one for one in allowed if one.in_flight == 1]
    tried = len({one.writers for one in alone}) + len({one.chunk_bytes for one in alone}) - 1
    most = max(one.in_flight for one in allowed)
    # Three samples (pilot, copy, write without digests), those of the search, and the chosen setting with the load.
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

    `memory_bytes`: the bound of the staging memory. `enough_seconds` (default 0.0): the search ends when the time of a
    save, divided by the saves in flight, is as short as this. `count_bytes` (default: ignored): called with the number
    of bytes of every copy and write. `clock`: returns seconds. Raises NoSpace before a byte is written; Damaged; and
    what opening and writing the scratch run raise.
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
        page = image_of(min(PAGE_BYTES, state_bytes))
        fixed = min(trials.save(smallest, page) for _ in range(effort.repeats))
        pilot = self._median(partial(trials.save, smallest, trials.image))
        # The sample is small enough that the four figures that are always measured fit in the time limit on any disk.
        in_time = int(trials.sample_bytes / pilot * effort.limit_seconds / (4 * effort.repeats))
        trials.set_sample(min(effort.sample_bytes, max(PILOT_BYTES, in_time)))
        return fixed

    def _beside_a_load(self, setting: Setting, fixed: float) -> tuple[list[float], list[float]]:
        """Save while a load runs. Returns Tw of each repetition, and the seconds by which one save delays the load."""
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

"""Disk space: the bound of a run compared with the free space, and a tier that makes room when the disk is full."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping

from .. import reporting
from ..errors import NoSpace
from ..io import files, memory_files
from ..limits import SLOTS_BESIDE
from ..policy.retention import Keep
from ..ports import Tier, Upload
from ..records import Extent
from ..units import size
from . import paths

LEAST_STATES = 2
"""The newest verified generation, and the one that is being written. No save can succeed with room for fewer."""


class RetryingTier:
    """`ports.Tier` of a save. If the disk is full, it calls `make_room` and repeats the failed call.

    `make_room`: receives the number of bytes that did not fit, and returns whether it has deleted something. If not,
    NoSpace is raised. Space is reserved before the first byte of a file is written, so a repeated call starts anew.
    """

    def __init__(self, tier: Tier, make_room: Callable[[int], bool]) -> None:
        self._tier, self._make_room = tier, make_room
        self.place, self.newest_only, self.reads_at_once = tier.place, tier.newest_only, tier.reads_at_once

    def create(self, name: str, length: int) -> Upload:
        while True:
            try:
                return self._tier.create(name, length)
            except NoSpace as error:
                if not (is_full(error) and self._make_room(length)):  # guard: full-disk-relieved
                    raise

    def put_new(self, name: str, data: bytes) -> None:
        while True:
            try:
                self._tier.put_new(name, data)
            except NoSpace as error:
                if not (is_full(error) and self._make_room(len(data))):
                    raise
            else:
                return

    def point(self, name: str, data: bytes, to: str) -> None:
        self._tier.point(name, data, to)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        self._tier.read_into(extent, mv, fresh=fresh)

    def list(self, folder: str) -> Mapping[str, int | None]:
        return self._tier.list(folder)

    def delete(self, name: str) -> None:
        self._tier.delete(name)


def is_full(error: NoSpace) -> bool:
    """Whether deleting may help. It does not after EFBIG, the limit on the length of one file."""
    cause = error.__cause__
    return not (isinstance(cause, OSError) and cause.errno == errno.EFBIG)


def may_fit(place: str, needed_bytes: int, released_bytes: int) -> bool:
    """Whether `needed_bytes` fit once `released_bytes` are deleted. True if the free space cannot be found out."""
    try:
        return needed_bytes <= room_bytes(place) + released_bytes
    except OSError:
        return True


def room_bytes(place: str) -> int:
    """Bytes that may still be written to a place on this machine, as tiers name it. Raises OSError."""
    if paths.in_memory(place):
        return memory_files.free_bytes(place.removeprefix(paths.MEMORY))
    return files.free_bytes(place)


def report_bound(
    tier: Tier,
    keep: Keep,
    in_flight: int | None,
    state_bytes: int,
    held_bytes: int,
    waiting: int = 0,
    compared: int = 0,
) -> None:
    """Report how much of its disk a place takes at most, and warn if the disk has less room than that.

    `in_flight`: saves that are written there at a time; None: for a place below, which receives one copy at a time.
    `state_bytes`: the size of one generation with its parity. `held_bytes`: the size of the generations that it holds
    already. `waiting` (default 0): so many generations more are kept there while copies to a place below are slow;
    they are reported, and not compared. `compared` (default 0): so many are kept for a Sentinel, beside
    those of `keep`.
    """
    flights = in_flight or 1
    if tier.newest_only:
        beside = getattr(getattr(tier, "own", tier), "beside", SLOTS_BESIDE)  # more in those of several ranks
        most = size((flights + beside) * state_bytes)
        what = f"({flights} in flight + {beside}) slots of {size(state_bytes)} = {most}, and a little for records"
        reporting.info(f"{tier.place} takes {what}")
        return
    kept = keep.last + len(keep.milestones) + (keep.best[2] if keep.best else 0) + compared
    states, more = kept + flights + 2, f", and the first of each {keep.every} steps" if keep.every else ""
    what, further = f"{flights} in flight + 2", "; milestones and damaged generations come on top, and for a while the "
    further += "generations that a rewind abandoned"
    if in_flight is None:  # the one that is copied, and what is left of one whose copy was given up
        states, what, further = kept + 2, "2 copied", ""
    if waiting:
        more += f", and {waiting} more while copies wait for a slow place below"
    most = size(states * state_bytes)
    reporting.info(f"{tier.place} takes at most ({kept} kept + {what}) x {size(state_bytes)} = {most}{more}{further}")
    with contextlib.suppress(OSError):  # a write reports a failing disk
        compare(tier.place, state_bytes, states, held_bytes, room_bytes(tier.place), compared)


def compare(place: str, state_bytes: int, bound_states: int, held_bytes: int, free: int, compared: int = 0) -> None:
    """Report if the disk has less room than the run may take: a threat if not even two generations fit, else a warning.

    `bound_states`: the number of generations of `state_bytes` that the run holds at most. `held_bytes`: the bytes that
    it holds already. `free`: the further bytes that the disk and this user's quotas allow. `compared`: as for
    `report_bound`.
    """
    fit = (held_bytes + free) // max(state_bytes, 1)
    if fit >= bound_states:
        return
    states = "state" if fit == 1 else "states"
    has = f"{place} has room for {fit} {states} of {size(state_bytes)} ({size(free)} free, {size(held_bytes)} held)"
    if paths.in_memory(place):
        reporting.warning(
            f"{has}, besides a margin that stays free, and the run may take {bound_states}. What does not fit is "
            "written to the first directory below, at the speed of its disk; without one such a save fails. Give the "
            "job more memory (in a container also a larger /dev/shm), or keep fewer saves in flight (in_flight=1)."
        )
        return
    if fit < LEAST_STATES:
        why = ", so no save can succeed there"
        if fit:
            why = ": a save needs room beside the newest verified generation, so none can succeed there once it has one"
        lacking = size(LEAST_STATES * state_bytes - held_bytes - free)
        reporting.threat(f"{has}{why}. Free {lacking}, or give another disk.")
        return
    newest = "the newest verified one" + (" and the newest that a Sentinel has compared" if compared else "")
    reporting.warning(
        f"{has}, and the run may take {bound_states}: when the disk is full, older verified generations are deleted, "
        f"down to {newest}. Free {size(bound_states * state_bytes - held_bytes - free)}, or keep "
        "fewer generations (retention=Keep(last=...))."
    )

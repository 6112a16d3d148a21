"""Room on the disk: what a run may take beside what is free, and what a save does when the disk is full."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable, Mapping

from .. import reporting
from ..errors import NoSpace
from ..io.files import free_bytes
from ..policy.retention import Keep
from ..ports import Tier, Upload
from ..records import Extent
from ..units import size

LEAST_STATES = 2
"""the newest verified generation and the one that is being written: with room for fewer no save can succeed"""


class Roomy:
    """`ports.Tier` of a save: where it finds the disk full, `make_room(bytes)` is called and the call is tried again.

    `make_room` is given what does not fit, and returns whether it has deleted something. Space is reserved before the
    first byte of a file, so nothing has been written by then.
    """

    def __init__(self, tier: Tier, make_room: Callable[[int], bool]) -> None:
        self._tier, self._make_room = tier, make_room
        self.place, self.newest_only = tier.place, tier.newest_only

    def create(self, name: str, length: int) -> Upload:
        while True:
            try:
                return self._tier.create(name, length)
            except NoSpace as error:
                if not (_is_full(error) and self._make_room(length)):  # guard: full-disk-relieved
                    raise

    def put_new(self, name: str, data: bytes) -> None:
        while True:
            try:
                self._tier.put_new(name, data)
            except NoSpace as error:
                if not (_is_full(error) and self._make_room(len(data))):
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


def _is_full(error: NoSpace) -> bool:
    """Whether deleting something may help. It does not where a limit on the size of one file was reached (EFBIG)."""
    cause = error.__cause__
    return not (isinstance(cause, OSError) and cause.errno == errno.EFBIG)


def may_fit(place: str, needed_bytes: int, released_bytes: int) -> bool:
    """Whether `needed_bytes` may fit once `released_bytes` are deleted; True where what is free is not known."""
    try:
        return needed_bytes <= free_bytes(place) + released_bytes
    except OSError:
        return True


def report_bound(tier: Tier, keep: Keep, in_flight: int, state_bytes: int, held_bytes: int) -> None:
    """Report the most that a run takes on its disk, and where that is more than there is room for.

    `state_bytes`: of one generation, its parity included; `held_bytes`: of those that are there already.
    """
    if tier.newest_only:
        most = size((in_flight + 2) * state_bytes)
        what = f"({in_flight} in flight + 2) slots of {size(state_bytes)} = {most}, and a little for records"
        reporting.info(f"{tier.place} takes {what}")
        return
    kept = keep.last + len(keep.milestones) + (keep.best[2] if keep.best else 0)
    more = f", and each {keep.every}th step" if keep.every else ""
    states = kept + in_flight + 2
    reporting.info(
        f"{tier.place} takes at most ({kept} kept + {in_flight} in flight + 2) x {size(state_bytes)} = "
        f"{size(states * state_bytes)}{more}; beside that stay milestones, what is found damaged, and for a while what "
        "a rewind left"
    )
    with contextlib.suppress(OSError):  # a disk that fails says so when it is written
        compare(tier.place, state_bytes, states, held_bytes, free_bytes(tier.place))


def compare(place: str, state_bytes: int, bound_states: int, held_bytes: int, free: int) -> None:
    """Report where the disk has less room than a run may take.

    `bound_states`: states of `state_bytes` that the run takes at most. `held_bytes`: what it holds already;
    `free`: bytes that the disk, and the quotas of this user, give beside that.
    """
    fit = (held_bytes + free) // max(state_bytes, 1)
    if fit >= bound_states:
        return
    states = "state" if fit == 1 else "states"
    has = f"{place} has room for {fit} {states} of {size(state_bytes)} ({size(free)} free, {size(held_bytes)} held)"
    if fit < LEAST_STATES:
        reporting.threat(
            f"{has}: a save needs room beside the newest verified one, so none can follow the first. "
            f"Free {size(LEAST_STATES * state_bytes - held_bytes - free)}, or give another disk."
        )
        return
    reporting.warning(
        f"{has}, and the run may take {bound_states}: when the disk is full, older verified generations are deleted, "
        f"down to the newest verified one. Free {size(bound_states * state_bytes - held_bytes - free)}, or keep "
        "fewer generations (retention=Keep(last=...))."
    )

"""The end of ranks: how each has ended, and the end of those that are left, with all that they have started.

Decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .. import reporting
from ..policy.blame import Ended
from .placement import TOUCH_SECONDS
from .watch import RankProcess

SHORTEST_SECONDS, LONGEST_SECONDS = 0.001, 0.05
"""how long to wait between two looks at what ranks have started"""
REPORT_SECONDS = 30.0
"""A process that has not ended so long after SIGKILL is reported."""
LIFE_SECONDS = 120.0
"""So long this node shows life meanwhile: to free the memory of a large rank takes a while. A process that waits for a
device may never end, and the other nodes go on without this one then."""
TRACKER = b"from multiprocessing.resource_tracker import main"
"""in the command line of the process that Python starts with the first named shared memory (or semaphore) of a program:
it removes what the program has left behind, once all processes of the program have ended"""
TRACKERS_SECONDS = 1.0
"""how long those may take"""


class _Wait:
    """A wait for processes to end after SIGKILL. `touch`: shows that this node lives."""

    def __init__(self, touch: Callable[[], None]) -> None:
        self._touch, self._began, self._reported = touch, time.monotonic(), False

    def goes_on(self, one: RankProcess) -> None:
        """The wait goes on, for this rank or for what it has started."""
        seconds = time.monotonic() - self._began
        if seconds < LIFE_SECONDS:
            self._touch()  # guard: node-that-ends-ranks-shows-life
        if seconds > REPORT_SECONDS and not self._reported:
            self._reported = True
            reporting.warning(
                f"rank {one.rank}, process {one.pid}, or what it has started, has not ended {seconds:.0f} s after "
                "SIGKILL: it frees memory, or waits for a disk or another device. Nothing is started here until then"
            )


def how_ended(one: RankProcess) -> Ended:
    """How a rank has ended. It stays a zombie, so that its number is not given to another process (`end_all`)."""
    found = os.waitid(os.P_PIDFD, one.descriptor, os.WEXITED | os.WNOWAIT)
    assert found is not None
    code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
    return Ended(one.rank, time.monotonic(), code)


def reap_orphans(ranks: Sequence[RankProcess]) -> None:
    """Reap what these ranks, which have not ended, had started and left behind: it became a child of this process when
    its parent ended (adopt_orphans). In a long attempt that could be more processes than a container may have."""
    for one in ranks:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitid(os.P_PGID, one.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if found.si_pid == one.pid:  # guard: ended-rank-not-reaped
                    break
                os.waitpid(found.si_pid, os.WNOHANG)


def end_all(ranks: Sequence[RankProcess], touch: Callable[[], None]) -> None:
    """End every process of these ranks, those in their process groups too, and wait until none is left.

    `touch`: shows that this node lives; is called now and then while processes do not end. Raises what it raises.
    """
    # No rank was reaped yet, so no other process has its number.
    _await_trackers([one.pid for one in ranks])  # guard: named-memory-is-removed
    for one in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(one.pid, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):  # a rank that was just forked has no group of its own yet
            signal.pidfd_send_signal(one.descriptor, signal.SIGKILL)  # guard: rank-without-group-killed
    waits = _Wait(touch)
    for one in ranks:
        if one.ended is None:
            over = select.poll()
            over.register(one.descriptor, select.POLLIN)
            while not over.poll(1000 * TOUCH_SECONDS):
                waits.goes_on(one)
            one.ended = how_ended(one)
            one.killed = True
        with contextlib.suppress(ChildProcessError):
            os.waitpid(one.pid, 0)
            _await_group(one, waits)  # guard: processes-of-ranks-awaited


def _await_trackers(groups: Sequence[int]) -> None:
    """Kill what is in these process groups, except resource trackers, and let those end by themselves. Returns at once
    where there are none. With SIGKILL to all, the next attempt would find the named memory of this one."""
    until, pause = time.monotonic() + TRACKERS_SECONDS, SHORTEST_SECONDS
    while (found := _members(groups)) and any(found.values()) and time.monotonic() < until:
        for pid, is_tracker in found.items():
            if not is_tracker:
                _kill(pid, groups)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_SECONDS)


def _members(groups: Sequence[int]) -> dict[int, bool]:
    """The processes of these groups, each with whether it is a resource tracker that has not ended."""
    found = dict[int, bool]()
    for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
        with contextlib.suppress(OSError):  # it has ended
            if os.getpgid(pid) in groups:
                found[pid] = TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return found


def _kill(pid: int, groups: Sequence[int]) -> None:
    """Kill a process, if the number is still that of a process in these groups."""
    with contextlib.suppress(OSError):  # it has ended, or belongs to another user (sudo)
        descriptor = os.pidfd_open(pid)
        try:
            if os.getpgid(pid) in groups:
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        finally:
            os.close(descriptor)


def _await_group(one: RankProcess, waits: _Wait) -> None:
    """Wait for what a rank had started, which became a child of this process (adopt_orphans). Raises ChildProcessError
    once there is nothing more."""
    pause = SHORTEST_SECONDS
    while True:
        if os.waitpid(-one.pid, os.WNOHANG)[0]:
            continue
        waits.goes_on(one)
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_SECONDS)

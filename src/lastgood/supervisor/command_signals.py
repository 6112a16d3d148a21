"""How a signal reaches a rank that is a command: a shell, or a program that starts the training as another process.

The process whose run is open has it first, and alone. A shell would end at once, and the rank with it, before the last
save; and the workers of a DataLoader would end, so that torch raises in the loop. Decides nothing about the attempt.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..io import processes
from ..io.heartbeat import Owner
from .watch import RankProcess, warn_groups

SEARCH_SECONDS = 1.0
"""how often all processes are searched for those of a command that a signal would not end"""
AFTER_SECONDS = 1.0
"""how long a command has to end by itself, once the process whose run was open has ended"""


@dataclass
class _Owed:
    """A signal that the rest of a rank is still to receive. `ended`: when the `owner` of its run was found to have
    ended."""

    rank: RankProcess
    number: int
    owner: Owner
    ended: float | None = None


class CommandSignals:
    """The signals of one attempt whose ranks are commands."""

    def __init__(self) -> None:
        self._owed = list[_Owed]()
        self._searched_at = dict[int, float]()
        """signal -> when those processes were searched for that have a handler for it"""

    def send(self, one: RankProcess, number: int) -> None:
        """Send a signal to a rank that has not ended: to the process whose run is open, or, without one, to all."""
        owner = one.owner()  # guard: owner-of-run-is-asked-first
        if owner is None or not _reached(owner, number):
            os.killpg(one.pid, number)
        else:
            self._owed.append(_Owed(one, number, owner))

    def settle(self, live: Sequence[RankProcess], now: float) -> None:
        """Send what is left of each of these ranks the signals that the owner of its run had, once that has ended."""
        for owed in [*self._owed]:
            if not any(one is owed.rank for one in live):
                self._owed.remove(owed)
            elif processes.started_ticks(owed.owner.pid) == owed.owner.started_ticks:
                continue
            elif owed.ended is None:
                owed.ended = now
            elif now - owed.ended >= AFTER_SECONDS:
                self._owed.remove(owed)
                os.killpg(owed.rank.pid, owed.number)  # guard: rest-of-command-is-asked-too

    def warn(self, ranks: Sequence[RankProcess], number: int) -> list[RankProcess]:
        """Send a warning to the processes of these ranks that have a handler for it, which are searched for now and
        then. Returns the ranks that have one."""
        if (now := time.monotonic()) < self._searched_at.get(number, 0.0) + SEARCH_SECONDS:
            return []
        self._searched_at[number] = now
        return warn_groups(ranks, number)


def _reached(owner: Owner, number: int) -> bool:
    """Send a signal to a process. Returns False where it belongs to another user (sudo). One that has just ended counts
    as reached: the rest of its command has a little time to end by itself."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(owner.pid)
        try:
            if processes.started_ticks(owner.pid) == owner.started_ticks:
                signal.pidfd_send_signal(descriptor, number)
        except PermissionError:
            return False
        finally:
            os.close(descriptor)
    return True

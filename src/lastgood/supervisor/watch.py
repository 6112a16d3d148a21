"""What the supervisor sees of ranks: their progress, and the stacks of those that hang. Decides nothing.

A rank writes the stacks of its threads into a file of its own when it receives a signal (program.py). Only an attempt
that is over is asked so: those of a healthy job are read from outside (stack_reader.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..io import heartbeat
from ..policy import hang
from ..policy.blame import Ended
from ..policy.hang import END, FIRST_STEP, START, STEP, Signs, Stuck
from .program import STACKS, STACKS_FILE

PAUSE_SECONDS = 5.0
"""A supervisor that has not looked for so long was stopped, as by a scheduler that suspends a job."""
DUMP_SECONDS, POLL_SECONDS = 1.0, 0.02
"""how long ranks have to write their stacks, and how often their files are read"""


@dataclass
class RankProcess:
    """One rank. `descriptor`: a pidfd of its process."""

    rank: int
    pid: int
    descriptor: int
    folder: Path
    page: Path
    shown: heartbeat.Progress
    """what its page showed when it was read last"""
    ended: Ended | None = None
    killed: bool = False
    """whether this supervisor has ended it"""
    failed: bool = False
    """whether it has ended with a failure, or has shown that an exception has ended its program"""
    page_descriptor: int | None = None
    """through which its page is read: others may remove the file, as systemd does when the user logs out (RemoveIPC)"""

    def read(self) -> heartbeat.Progress:
        """What its page shows now."""
        return heartbeat.read(self._opened_page())

    def owner(self) -> heartbeat.Owner | None:
        """The process whose run is open now, as `heartbeat.owner`."""
        return heartbeat.owner(self._opened_page())

    def _opened_page(self) -> str:
        return str(self.page) if self.page_descriptor is None else f"/proc/self/fd/{self.page_descriptor}"

    def close(self) -> None:
        """Close its descriptors."""
        os.close(self.descriptor)
        if self.page_descriptor is not None:
            os.close(self.page_descriptor)


def signs(rank: int, shown: heartbeat.Progress, ended: bool = False) -> Signs:
    """What a rank has shown, as the policy takes it. A rank whose run is not open yet cannot hang; one whose run is
    closed only if another rank has `ended`: torch's process groups sometimes do not, when they are destroyed."""
    if shown.opened is None:  # also where an opening has failed, and was closed  # guard: failed-opening-is-no-end
        return Signs(rank, None, START, shown.step)
    if shown.closed is not None:
        return Signs(rank, shown.closed if ended else None, END, shown.step)
    if shown.phase_began is not None:
        return Signs(rank, shown.phase_began, shown.phase, shown.step)
    if shown.first is not None and shown.sign is not None:
        return Signs(rank, shown.sign, STEP, shown.step, shown.longest_seconds)
    if shown.restored is not None:
        return Signs(rank, max(shown.restored, shown.opened, shown.sign or 0.0), FIRST_STEP, shown.step)
    return Signs(rank, shown.opened, START)


def restored_step(ranks: Sequence[heartbeat.Progress], first: heartbeat.Progress | None = None) -> int | None:
    """The step from which all ranks went on that have opened a run; None: one of them has restored nothing yet, or none
    has opened one. Others may serve those that train.

    `first`: the rank that failed first, which counts in any case (default: none has failed).
    """
    opened = [one for one in ranks if one.opened is not None]
    asked = opened if first is None or first in opened else [*opened, first]
    if not asked or any(one.restored is None for one in asked):  # guard: serving-ranks-restore-nothing
        return None
    return min(one.restored_step for one in asked)


def incarnation(ranks: Sequence[heartbeat.Progress], step: int | None) -> str:
    """Of the generation of this step from which ranks went on; empty: they began anew, or none has restored it."""
    return next((one.incarnation for one in ranks if one.incarnation and one.restored_step == step), "")


def just_in_time_seconds(ranks: Sequence[RankProcess]) -> float:
    """How long the ranks that have not failed may take to save for all, after another one has; 0.0: none would."""
    return max((one.shown.just_in_time_seconds for one in ranks if not one.failed), default=0.0)


def stacks(ranks: Sequence[RankProcess]) -> dict[int, str]:
    """rank -> the stacks of its threads; ranks that do not answer in time, or cannot, are left out."""
    sizes = {one.rank: _stacks_size(one) for one in ranks if state(one.pid) not in hang.STATES}
    before = {rank: size for rank, size in sizes.items() if size is not None}
    asked = [one for one in ranks if one.rank in before]
    for one in asked:
        signal.pidfd_send_signal(one.descriptor, STACKS)
    until = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        now = {one.rank: _stacks_size(one) for one in asked}
        if now == sizes and all((now[rank] or 0) > size for rank, size in before.items()):
            break
        sizes = now
    found = dict[int, bytes]()
    for one in asked:
        with contextlib.suppress(OSError):  # guard: unread-stacks-end-no-job
            found[one.rank] = (one.folder / STACKS_FILE).read_bytes()[before[one.rank] :]
    return {rank: text.decode(errors="replace") for rank, text in found.items() if text}


def _stacks_size(one: RankProcess) -> int | None:
    """The length of the file with the stacks of a rank; None if it has none, or it cannot be read."""
    try:
        return (one.folder / STACKS_FILE).stat().st_size
    except OSError:
        return None


def stuck(ranks: Sequence[RankProcess], texts: dict[int, str]) -> list[Stuck]:
    """How ranks look now. `texts`: their stacks."""
    found = []
    for one in ranks:
        text = texts.get(one.rank, "")
        threads, main = calls(text), main_stack(text)
        found.append(Stuck(signs(one.rank, one.shown), state(one.pid), main, threads[: len(threads) - len(main)]))
    return found


def main_stack(text: str) -> list[str]:
    """The calls of the main thread in a text of faulthandler, the innermost first.

    The main thread is the last one there: threads are listed from the newest to the oldest.
    """
    return calls(re.split(r"^(?:Current thread|Thread) .*:$", text, flags=re.MULTILINE)[-1])


def calls(text: str) -> list[str]:
    """The calls of all threads in a text of faulthandler."""
    return [line.strip() for line in text.splitlines() if line.strip().startswith("File ")]


def state(pid: int) -> str:
    """The letter of a process's state; empty if it has ended."""
    return next(iter(_stat(f"/proc/{pid}/stat")), "")


def processor_seconds(pid: int) -> float:
    """The processor time of a process's main thread; 0.0 if it has ended."""
    user, system = _stat(f"/proc/{pid}/task/{pid}/stat")[11:13] or ("0", "0")
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def heeds(pid: int, number: int) -> bool:
    """Whether a process does with a signal what it wants, or has ended; else the signal would end it."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        masks = [int(line.split()[1], 16) for line in text.splitlines() if line.startswith(("SigIgn:", "SigCgt:"))]
        return any(mask >> (number - 1) & 1 for mask in masks)
    return True


def warn_groups(ranks: Sequence[RankProcess], number: int) -> list[RankProcess]:
    """Send a signal to those processes in the groups of some ranks that it would not end. Returns whose groups have
    one that does with it what it wants."""
    by_group, reached = {str(one.pid): one for one in ranks}, dict[int, RankProcess]()
    for name in filter(str.isdecimal, os.listdir("/proc")):
        for group in by_group.keys() & set(_stat(f"/proc/{name}/stat")[2:3]):
            with contextlib.suppress(OSError):  # it has ended, or belongs to another user (sudo)
                descriptor = os.pidfd_open(int(name))
                try:
                    if heeds(int(name), number):  # guard: warning-ends-no-command
                        signal.pidfd_send_signal(descriptor, number)
                        reached[by_group[group].rank] = by_group[group]
                finally:
                    os.close(descriptor)
    return [*reached.values()]


def _stat(path: str) -> list[str]:
    """What /proc shows of a process or thread, from its state on; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(path).read_text().rpartition(")")[2].split()
    return []

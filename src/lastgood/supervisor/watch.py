"""What the supervisor sees of ranks that run: progress, and, of those that hang, their stacks. Decides nothing.

A rank writes the stacks of its threads into a file of its own when it receives a signal (program.py).
"""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..io import heartbeat
from ..policy import hang
from ..policy.blame import Ended
from ..policy.hang import END, FIRST_STEP, START, STEP, STOPPED, Limits, Signs, Silent, Stuck
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


class ProgressWatch:
    """The progress of the ranks of one attempt. `limits`: how long they may show none."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._open = dict[int, tuple[str, float]]()
        """rank -> the phase that was open when it was looked at last, and when it began"""
        self._completed = dict[str, float]()
        self._stopped = dict[int, float]()
        """rank that is in no step -> since when its process is stopped by a signal"""
        self._looked_at: float | None = None
        self._resumed_at = 0.0
        """when this process went on after it had been stopped, and with it perhaps the whole job"""

    def silent(
        self, ranks: Sequence[RankProcess], now: float, ended: bool, others: Sequence[Signs] = ()
    ) -> Silent | None:
        """The rank that hangs; None if none does. `ranks`: those that have not ended. `ended`: whether another has.
        `others`: what ranks of other nodes show (default: there are none)."""
        if self._looked_at is not None and now - self._looked_at > PAUSE_SECONDS:  # guard: stopped-job-is-no-hang
            self._resumed_at = now
        self._looked_at = now
        found = [*others]
        for one in ranks:
            self._note_phase(one.rank, one.shown, now)
            sign = self._stopped_too(one, signs(one.rank, one.shown, ended), now)
            since = None if sign.since is None else max(sign.since, self._resumed_at)
            found.append(replace(sign, since=since))
        return hang.silent(found, now, self._limits, self._completed)

    def _stopped_too(self, one: RankProcess, sign: Signs, now: float) -> Signs:
        """The same signs; those of a stopped process where a rank may be silent for longer than in a step, or for ever.
        The others may wait for ever too: torch's timeouts are counted by its store."""
        in_step = sign.where == STEP and sign.since is not None
        if in_step or _state(one.pid) != STOPPED:
            self._stopped.pop(one.rank, None)
            return sign
        return replace(sign, since=self._stopped.setdefault(one.rank, now), stopped=True)  # guard: stopped-rank-hangs

    def _note_phase(self, rank: int, shown: heartbeat.Progress, now: float) -> None:
        now_open = None if shown.phase_began is None else (shown.phase, shown.phase_began)
        before = self._open.pop(rank, None)
        if before is not None and before != now_open:
            name, began = before
            self._completed[name] = max(self._completed.get(name, 0.0), (shown.sign or now) - began)
        if now_open is not None:
            self._open[rank] = now_open


def signs(rank: int, shown: heartbeat.Progress, ended: bool = False) -> Signs:
    """What a rank has shown, as the policy takes it. A rank whose run is not open yet cannot hang; one whose run is
    closed only if another rank has `ended`: torch's process groups sometimes do not, when they are destroyed."""
    if shown.closed is not None:
        return Signs(rank, shown.closed if ended else None, END, shown.step)
    if shown.opened is None:
        return Signs(rank, None, START, shown.step)
    if shown.phase_began is not None:
        return Signs(rank, shown.phase_began, shown.phase, shown.step)
    if shown.first is not None and shown.sign is not None:
        return Signs(rank, shown.sign, STEP, shown.step, shown.longest_seconds)
    if shown.restored is not None:
        return Signs(rank, max(shown.restored, shown.opened, shown.sign or 0.0), FIRST_STEP, shown.step)
    return Signs(rank, shown.opened, START)


def just_in_time_seconds(ranks: Sequence[RankProcess]) -> float:
    """How long the ranks that have not failed may take to save for all, after another one has; 0.0: none would."""
    return max((one.shown.just_in_time_seconds for one in ranks if not one.failed), default=0.0)


def stacks(ranks: Sequence[RankProcess]) -> dict[int, str]:
    """rank -> the stacks of its threads; ranks that do not answer in time, or cannot, are left out."""
    asked = [one for one in ranks if (one.folder / STACKS_FILE).exists() and _state(one.pid) not in hang.STATES]
    before = {one.rank: _stacks_size(one) for one in asked}
    for one in asked:
        signal.pidfd_send_signal(one.descriptor, STACKS)
    until, sizes = time.monotonic() + DUMP_SECONDS, before
    while time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        now = {one.rank: _stacks_size(one) for one in asked}
        if now == sizes and all(now[rank] > size for rank, size in before.items()):
            break
        sizes = now
    found = {one.rank: (one.folder / STACKS_FILE).read_bytes()[before[one.rank] :] for one in asked}
    return {rank: text.decode(errors="replace") for rank, text in found.items() if text}


def _stacks_size(one: RankProcess) -> int:
    return (one.folder / STACKS_FILE).stat().st_size


def stuck(ranks: Sequence[RankProcess], texts: dict[int, str]) -> list[Stuck]:
    """How ranks look now. `texts`: their stacks."""
    return [Stuck(signs(one.rank, one.shown), _state(one.pid), main_stack(texts.get(one.rank, ""))) for one in ranks]


def main_stack(text: str) -> list[str]:
    """The calls of the main thread in a text of faulthandler, the innermost first.

    The main thread is the last one there: threads are listed from the newest to the oldest.
    """
    calls = re.split(r"^(?:Current thread|Thread) .*:$", text, flags=re.MULTILINE)[-1]
    return [line.strip() for line in calls.splitlines() if line.strip().startswith("File ")]


def _state(pid: int) -> str:
    """The letter of a process's state; empty if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""

"""Since when ranks show no progress: in their pages, as stopped processes, and by what they wait for at their start.

policy/hang.py decides; this remembers what was seen before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from .. import reporting
from ..io import heartbeat
from ..policy import hang
from ..policy.hang import ARRIVED, STOPPED, Limits, Signs, Silent, Stuck, Wait
from .stack_reader import READ_SECONDS, Reading, StackReader
from .watch import PAUSE_SECONDS, RankProcess, processor_seconds, signs, state, stuck

FRESH_SECONDS = READ_SECONDS + 1.0
"""A wait that was seen longer ago may be over."""


class Arrivals:
    """Which ranks wait for others before their runs are open. No call of a script shows that, so their stacks do, now
    and then. `pause_seconds`: how often they are read, by `reader`."""

    def __init__(self, pause_seconds: float, reader: StackReader) -> None:
        self._pause_seconds, self._reader = pause_seconds, reader
        self._next: float | None = None
        self._reading: Reading | None = None
        self._used = dict[int, float]()
        """rank -> the processor time of its main thread when the reading began"""
        self._waits = dict[int, Wait]()
        self._elsewhere, self._newest = Counter[int](), dict[int, Stuck]()
        """rank -> how many times in a row it was seen outside of calls that wait; how it looked last"""

    def since(self, rank: int, now: float) -> float | None:
        """Since when a rank counts as waiting before its run is open. `now`: it was not read yet, or not for
        FRESH_SECONDS. None: the last LATE_READINGS readings found it elsewhere."""
        if self._elsewhere[rank] >= hang.LATE_READINGS:  # guard: one-reading-makes-no-late-rank
            return None
        wait = self._waits.get(rank)
        if wait is None:
            return now
        fresh = now - wait.until < FRESH_SECONDS  # guard: wait-is-seen-at-its-limit
        return now - (wait.until - wait.since) if fresh else now

    def late(self) -> list[Stuck]:
        """The ranks that were seen elsewhere, as they looked last."""
        return [self._newest[rank] for rank, times in self._elsewhere.items() if times >= hang.LATE_READINGS]

    def forget(self) -> None:
        """Nothing is known any more of who waits: the job may have been suspended."""
        if self._reading is not None:
            self._reading.drop()
        self._reading = None
        self._waits.clear()

    def poll(self, ranks: Sequence[RankProcess], now: float) -> None:
        """Begin to read those ranks that have not opened their runs, if that is due, or note what was read."""
        starting = [one for one in ranks if one.shown.opened is None]
        for rank in self._elsewhere.keys() - {one.rank for one in starting}:
            del self._elsewhere[rank]
        if self._reading is not None:
            found = self._reading.poll(now)
            if found is None:
                return
            for one in found:
                rank = one.signs.rank
                wait = hang.waited(self._waits.pop(rank, None), one, self._reading.began, self._used[rank])
                if wait is not None:
                    self._waits[rank] = wait
                if one.stack:
                    self._newest[rank] = one
                    self._elsewhere[rank] = 0 if wait is not None else self._elsewhere[rank] + 1
            self._reading = None
        if self._next is None:
            self._next = now + self._pause_seconds
        if starting and now >= self._next:
            self._next = now + self._pause_seconds
            self._used = {one.rank: processor_seconds(one.pid) for one in starting}
            self._reading = self._reader.read(starting, now)


class ProgressWatch:
    """The progress of the ranks of one attempt. `limits`: how long they may show none. `world`: how many ranks there
    are, those of other nodes too. `reader`: of their stacks."""

    def __init__(self, limits: Limits, world: int, reader: StackReader) -> None:
        self._limits = limits
        due = world > 1 and limits.least_seconds > 0
        self._arrivals = Arrivals(hang.arrival_poll_seconds(limits), reader) if due else None
        self._open = dict[int, tuple[str, float]]()
        """rank -> the phase that was open when it was looked at last, and when it began"""
        self._completed = dict[str, float]()
        self._stopped = dict[int, float]()
        """rank -> since when its process is stopped by a signal"""
        self._looked_at: float | None = None
        self._resumed_at = 0.0
        """when this process went on after it had been stopped, and with it perhaps the whole job"""
        self._reported_late, self._arrived_at = set[int](), 0.0
        """the late ranks that were reported; when one was late last, from when on waits for others count again"""
        self._newest = list[Signs]()
        """what all ranks have shown, those of other nodes if it was known"""

    def silent(
        self, ranks: Sequence[RankProcess], now: float, ended: bool, others: Sequence[Signs] | None = ()
    ) -> Silent | None:
        """The rank that hangs; None if none does. `ranks`: those that have not ended. `ended`: whether another has.
        `others`: what ranks of other nodes show (default: there are none); None: it is not known yet."""
        if self._looked_at is not None and now - self._looked_at > PAUSE_SECONDS:  # guard: stopped-job-is-no-hang
            self._resumed_at = now
            if self._arrivals is not None:
                self._arrivals.forget()
        self._looked_at = now
        if self._arrivals is not None:
            self._arrivals.poll(ranks, now)
        found = [*(others or ())]
        for one in ranks:
            self._note_phase(one.rank, one.shown, now)
            found.append(self._stopped_too(one, self.shown(one, now, ended), now))
        self._newest = found = [self._counted(one) for one in found]
        return hang.silent(found, now, self._limits, self._completed, all_known=others is not None)

    def only_reports(self, silent: Silent) -> bool:
        """Report each late rank once, if it looks as if ranks waited for one that has not opened its run, and no limit
        was given for that. Returns whether that is all that follows."""
        if silent.where != ARRIVED or self._limits.ends_late:
            return False
        here = [] if self._arrivals is None else self._arrivals.late()
        late = here or [Stuck(one) for one in self._newest if hang.is_late(one)]
        if late:
            self._arrived_at = self._looked_at or 0.0
        if new := [one for one in late if one.signs.rank not in self._reported_late]:
            one = hang.behind(new)
            reporting.warning(f"rank {one.signs.rank} {hang.described(one, silent, ends=False)}")
            self._reported_late.add(one.signs.rank)
        return True

    def behind(self, ranks: Sequence[RankProcess], texts: dict[int, str], now: float) -> Stuck:
        """The rank for which the others wait. `ranks`: at least one, whose job hangs. `texts`: their stacks."""
        shown = {one.rank: self.shown(one, now) for one in ranks}
        return hang.behind([replace(one, signs=shown[one.signs.rank]) for one in stuck(ranks, texts)])

    def _counted(self, sign: Signs) -> Signs:
        """The same signs, with the time for which they count."""
        if sign.since is None:
            return sign
        arrived = sign.where == ARRIVED and not sign.stopped
        return replace(sign, since=max(sign.since, self._resumed_at, self._arrived_at if arrived else 0.0))

    def shown(self, one: RankProcess, now: float, ended: bool = False) -> Signs:
        """What a rank has shown, and since when it may wait for others before its run is open. As `signs`."""
        since = self._arrivals.since(one.rank, now) if self._arrivals is not None and one.shown.opened is None else None
        sign = signs(one.rank, one.shown, ended)
        return sign if since is None else replace(sign, since=since, where=ARRIVED)

    def _stopped_too(self, one: RankProcess, sign: Signs, now: float) -> Signs:
        """The same signs; those of a stopped process count from when it was first seen so. The others may wait for ever
        too: torch's timeouts are counted by its store."""
        if state(one.pid) != STOPPED:
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

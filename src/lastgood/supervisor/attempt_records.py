"""Writes the records of a supervisor's attempts into the run of its job: that each has begun, then how it has ended.

Before it writes the first one, it records the end of what earlier supervisors have left without one (attempt_log.py).
All is written in a thread, because a slow place must keep neither the ranks from being watched nor this node from
showing that it lives. A record that cannot be written is reported, and the job goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from .. import reporting
from ..errors import LastgoodError, NotARun
from ..io import os_errors
from ..io.heartbeat import Progress
from ..policy.recovery import Outcome
from ..ports import Tier
from ..run import advice, side_records
from ..run.advice import Advice
from . import attempt_log
from .attempt_log import Attempt, Begun
from .placement import TOUCH_SECONDS
from .watch import incarnation, restored_step

Result = TypeVar("Result")
GOES_ON = "The job goes on."


class AttemptRecords:
    """The records of one supervisor, of one attempt after another. Raises TierDown if there can be no thread."""

    def __init__(self) -> None:
        self.earlier = list[Attempt]()
        """the attempts of earlier supervisors of the run, oldest first; empty until this one has seen a rank open it"""
        self._thread = ThreadPoolExecutor(1, "lastgood-records")
        with os_errors.needed("the thread that writes the records of attempts cannot be started", ""):
            self._thread.submit(int)  # it lives from now on, so that no limit keeps it from being started later
        self._writes = list[Future[int]]()
        """each a record of the beginning of this attempt, and its number; 0: it could not be written"""
        self._begun: Begun | None = None
        self._closed = set[str]()
        """the runs in which the ends that were missing are recorded"""
        self._known = ""
        """the run, if it was known before this attempt: a rank of this job has opened it then"""
        self._run = ""
        """the run, once the beginning of this attempt is being recorded there"""

    @property
    def completed_before(self) -> int:
        """The newest step that the last attempt of an earlier supervisor is known to have completed; 0: none."""
        return self.earlier[-1].last_step if self.earlier else 0

    def begin(self, begun: Begun | None, run: str) -> None:
        """An attempt begins. `begun`: None: another node writes its records. `run`: if it is known; else empty."""
        self._begun, self._run, self._known = begun, "", run
        self._writes.clear()

    def shown(self, ranks: Sequence[Progress]) -> None:
        """Take note of what the ranks of this node show. Called often."""
        if self._begun is None:
            return
        if not self._run:
            self._run = self._known or next((one.run for one in ranks if one.run), "")
            if self._run:
                self._note(self._run, self._begun)
        if self._run and self._begun.restored_step is None and (step := restored_step(ranks)) is not None:
            self._begun = replace(self._begun, restored_step=step, incarnation=incarnation(ranks, step))
            self._note(self._run, self._begun)

    def done(self, work: Callable[[], Result], touch: Callable[[], None]) -> Result:
        """Do something that may take long, after what is being written. Returns what it returns; raises what it raises,
        and what `touch` raises, which is called meanwhile."""
        doing = self._thread.submit(work)
        try:
            while wait([doing], TOUCH_SECONDS).not_done:
                touch()
        finally:
            wait([doing])  # what was begun is whole before anything else is done
        return doing.result()

    def has_lost(self, run: str, outcomes: Sequence[Outcome], touch: Callable[[], None]) -> bool:
        """Whether a run of which these attempts have saved or restored a step is not in its place any more, in which
        this supervisor has recorded one: it was moved or deleted, or is not mounted. `touch`: as for `done`."""
        had = any(one.saved_step or one.restored_step for one in outcomes)
        return had and run in self._closed and self.done(partial(_is_missing, run), touch)

    def end(
        self,
        run: str,
        attempt: Attempt,
        advised: Callable[[Sequence[Advice]], Advice | None],
        touch: Callable[[], None],
    ) -> None:
        """Write the record of an attempt that has ended, and advice for the next restore.

        `run`: that the ranks have opened last; empty: it is not known. `advised`: this advice, from that which is in
        the run. `touch`: as for `done`.
        """
        if run:
            self.done(partial(self._end, run, attempt, advised), touch)

    def _end(self, run: str, attempt: Attempt, advised: Callable[[Sequence[Advice]], Advice | None]) -> None:
        # Not the newest: if nothing was written, that is of an attempt that is lost.
        begun = max((one.result() for one in self._writes), default=0)
        try:
            if self._run not in ("", run):  # guard: closed-run-has-the-end-too
                with os_errors.threads(self._run, GOES_ON), side_records.opened(self._run) as tier:
                    attempt_log.append(tier, attempt, begun)
                begun = 0
            with os_errors.threads(run, GOES_ON), side_records.opened(run) as tier:
                if self._begun is None:
                    begun = side_records.newest(tier, attempt_log.BEGUN)
                attempt_log.append(tier, attempt, begun)
                found = advised(advice.read(tier))
                if found is not None:
                    advice.append(tier, found)
        except LastgoodError as error:
            reporting.warning(f"the record of this attempt was not written to {run}: {error}")

    def _note(self, run: str, begun: Begun) -> None:
        self._writes.append(self._thread.submit(self._write, run, begun))

    def _write(self, run: str, begun: Begun) -> int:
        """Record a beginning, after the ends that are missing. Returns its number; 0 if that failed."""
        try:
            with os_errors.threads(run, GOES_ON), side_records.opened(run) as tier:
                if run not in self._closed:  # guard: lost-attempts-closed-first
                    self.earlier = _closed(tier, run, begun)
                    self._closed.add(run)
                return attempt_log.begin(tier, begun)
        except LastgoodError as error:
            reporting.warning(f"the beginning of this attempt was not recorded in {run}: {error}")
            return 0


def _is_missing(run: str) -> bool:
    try:
        side_records.of_run(run)
    except NotARun:
        return True
    except LastgoodError:
        return False  # a place that cannot be read does not show that
    return False


def _closed(tier: Tier, run: str, begun: Begun) -> list[Attempt]:
    """Record the end of each attempt that is lost. Returns all of other supervisors that have ended, oldest first.
    `tier`: the records beside the run. `begun`: the present attempt, which saves meanwhile."""
    found = attempt_log.history(tier, True, begun.began_at, run)  # guard: own-saves-of-no-lost-attempt
    lost = [replace(one, answer="restart: the job was started again") for one in found.lost]
    for one in lost:
        attempt_log.append(tier, one, one.begun)
    return [one for one in (*found.ended, *lost) if one.job != begun.job]

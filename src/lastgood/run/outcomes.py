"""Outcomes: what became of saves and of upkeep behind the training loop, and how it is reported.

Any thread puts an outcome; the training thread takes them in the order in which they happened. A row of failed saves is
reported at its 1st, 2nd, 4th, 8th, ... failure with the count, and ends with the next durable save. Problems of upkeep
repeat in the same way, by the class of the error; each damaged generation is reported. Torch-free.
"""

from __future__ import annotations

import os
import queue
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .. import reporting
from ..errors import Damaged, LastgoodError, NotFinite, NothingDurable, Overtaken, TornSnapshot, Unfit

TRACEBACK_ENTRIES = 3
"""the innermost calls, shown of an error that is a bug in this package"""


class Outcome(NamedTuple):
    """A save of `step` is durable (no error) or failed; without a step, an error of upkeep.

    `always`: it is reported however often its like was before. Neither step nor error: the newest generation is good.
    """

    step: int | None
    error: BaseException | None
    always: bool = False


class Outcomes:
    """What the training thread has yet to report, and the current row of failed saves.

    `durable` and `put` may be called from any thread, everything else on the training thread.
    """

    def __init__(self, place: str, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._place, self._now, self._process = place, monotonic_seconds, os.getpid()
        self._queue: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.completed: int | None = None
        """newest step that the loop has completed since the run was opened or restored"""
        self.was_closed = False
        """whether the run was closed, perhaps without an end: the closing did not wait for all of its work"""
        self._newest: int | None = None
        """newest durable step that this process knows of"""
        self.failures = 0
        """attempts to save that failed since the run was opened"""
        self._failed_steps: set[int] = set()
        self.overtaken_saves = 0
        """saves of the cadence that were given up because a newer one was committed first"""
        self.last_failure = ""
        """of a save: the error, in words"""
        self.row = 0
        """failed saves since the last durable one"""
        self.torn_row = 0
        """the same, of torn saves only"""
        self._repeated: Counter[str] = Counter()
        self._unsaved_since: float | None = None

    @property
    def failed_saves(self) -> int:
        """Steps that a save failed of. One that is tried again at the exit counts once."""
        return len(self._failed_steps)

    def durable(self, step: int) -> None:
        """A save of `step` is committed."""
        self._queue.put(Outcome(step, None))

    def put(self, error: BaseException, step: int | None = None) -> None:
        """A save of `step` failed; without a step, something else did."""
        self._queue.put(Outcome(step, error))

    def put_for_step(self, error: BaseException) -> None:
        """Something that was asked for by name failed, such as a milestone: it is reported each time."""
        self._queue.put(Outcome(None, error, always=True))

    def verified(self) -> None:
        """The newest generation was read again and is good: a row of unfit ones has ended."""
        self._queue.put(Outcome(None, None))

    # ---- on the training thread ----------------------------------------------------------------------------

    def report(self, raises: bool = False) -> BaseException | None:
        """Report everything put since the last call; with `raises` the first error is returned instead."""
        first: BaseException | None = None
        for step, error, always in self._taken():
            if error is None:
                if step is None:
                    del self._repeated[NotFinite.__name__]
                else:
                    self._end_row(step)
                continue
            if isinstance(error, Overtaken):
                self.overtaken_saves += 1
                continue  # guard: overtaken-is-no-failure
            if step is not None:
                self._count_failure(step, error)
            if raises and first is None:
                first = error
            elif step is not None:
                self._report_failure(step, error)
            else:
                self._report_problem(error, always)
        return first

    def restored(self, step: int | None) -> None:
        """The loop goes on from the generation of `step`, or (None) from the beginning."""
        self.completed, self._newest = None, step
        self._unsaved_since = None
        self._repeated.clear()

    def require_durable(self, step: int, within_seconds: float | None) -> None:
        """The loop has completed `step`. Raises NothingDurable when too much time has passed without a durable save."""
        now = self._now()
        if self._unsaved_since is None:
            self._unsaved_since = now
        passed = now - self._unsaved_since
        if within_seconds is not None and passed > within_seconds:
            why = f"; the last failure: {self.last_failure}" if self.row else ""
            raise NothingDurable(
                f"at step {step} nothing has become durable for {passed:.0f} s (durable_within_seconds="
                f"{within_seconds:g}){why}",
                safe="Every committed generation is untouched.",
                todo="Mend what keeps saves from the disk, or allow more time.",
            )

    def report_end(self, newest: int | None, last: int) -> None:
        """The closing line, where a save has no generation or the `last` step of the loop is not the `newest` durable.

        A failed save that was tried again at the exit counts as one, with the number of attempts beside it.
        """
        if not self.failures and not self.overtaken_saves and newest == last:
            return
        text = (
            f"newest durable step {newest} of {last}" if newest is not None else f"nothing is durable of {last} steps"
        )
        if self.overtaken_saves:
            text += f"; {_counted(self.overtaken_saves, 'save')} given up because a newer one was committed first"
        if self.failures:
            again = f" ({self.failures} attempts)" if self.failures > self.failed_saves else ""
            text += f"; {_counted(self.failed_saves, 'save')} failed{again}: {self.last_failure}"
        elif newest is not None and newest != last:
            text += "; the state after it was not saved"
        lost = newest is None or self.row
        level = reporting.threat if lost else reporting.warning if newest != last else reporting.info
        level(f"{self._place}: {text}")

    def report_unread(self) -> None:
        """At the end of a process that has never closed the run: what was not reported yet, and the closing line."""
        if self._process != os.getpid():
            return  # a fork: the process that opened the run reports
        left = list(self._taken())
        durable = max((one.step for one in left if one.step is not None and one.error is None), default=self._newest)
        failed = any(one.error is not None and not isinstance(one.error, Overtaken) for one in left)
        if not self.was_closed and (failed or self.completed not in (None, durable)):
            reporting.warning(f"{self._place} was never closed: close() it, or open it in a with statement")
        for one in left:
            self._queue.put(one)
        self.report()
        if self.completed is not None:
            self.report_end(self._newest, self.completed)

    # ---- steps ---------------------------------------------------------------------------------------------

    def _taken(self) -> Iterator[Outcome]:
        while not self._queue.empty():
            yield self._queue.get()

    def _end_row(self, step: int) -> None:
        if self.row:
            reporting.info(f"{self._place}: step {step} is durable, after {_counted(self.row, 'save')} that failed")
        self.row = self.torn_row = 0  # guard: durable-save-resets-counts
        self._unsaved_since = None
        self._newest = max(step, self._newest or 0)

    def _count_failure(self, step: int, error: BaseException) -> None:
        self.failures += 1
        self._failed_steps.add(step)
        self.row += 1
        self.torn_row = self.torn_row + 1 if isinstance(error, TornSnapshot) else 0
        self.last_failure = _first_line(error)

    def _report_failure(self, step: int, error: BaseException) -> None:
        if _is_power_of_two(self.row):  # guard: failure-reports-thin-out
            row = f" (failed save {self.row} in a row; the next report comes with failure {2 * self.row})"
            reporting.threat(f"{self._place}: step {step} was not saved{row if self.row > 1 else ''}: {_words(error)}")

    def _report_problem(self, error: BaseException, always: bool) -> None:
        self._repeated[type(error).__name__] += 1
        count = self._repeated[type(error).__name__]
        if always or isinstance(error, Damaged) or _is_power_of_two(count):
            again = f" (occurrence {count})" if count > 1 else ""
            expected = isinstance(error, LastgoodError) and not isinstance(error, (Damaged, Unfit))
            (reporting.warning if expected else reporting.threat)(f"{self._place}: {_words(error)}{again}")


def _is_power_of_two(count: int) -> bool:
    return count & (count - 1) == 0


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _first_line(error: BaseException) -> str:
    what = error.what if isinstance(error, LastgoodError) else str(error)
    return f"{type(error).__name__}: {what.strip().partition(chr(10))[0]}"


def _words(error: BaseException) -> str:
    """The error; of one that this package does not foresee, also where it was raised."""
    if isinstance(error, LastgoodError):
        return f"{type(error).__name__}: {error}"
    calls = "".join(traceback.format_tb(error.__traceback__)[-TRACEBACK_ENTRIES:])
    return (
        f"{type(error).__name__}: {error}\n{calls}Unless a device or the memory failed, this is a bug in "
        "lastgood: please report it. Training goes on."
    )

"""Outcomes of saves and of upkeep in the background, and how they are reported.

Any thread puts an outcome into a queue; the training thread reports them in the order in which they happened. Of
consecutive failed saves the 1st, 2nd, 4th, 8th, ... is reported, with the count, until a save is durable again. Of
errors of upkeep the 1st, 2nd, 4th, 8th, ... of each class, or of each cause that is given, is reported; every damaged
generation is reported.
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
from ..units import plural

TRACEBACK_ENTRIES = 3
"""The innermost calls that are shown with an error that is probably a bug in this package."""


class Outcome(NamedTuple):
    """One outcome. With a step: its save is committed (no error) or has failed. Without a step: upkeep has verified the
    newest generation (no error) or has failed.

    `always`: an error of upkeep that is reported in any case, however many of its class came before. `durable`: whether
    a generation now exists where it survives power loss. `is_copy`: a copy of the step was made, in a further place.
    `cause`: as for `Outcomes.put`.
    """

    step: int | None
    error: BaseException | None
    always: bool = False
    durable: bool = True
    is_copy: bool = False
    cause: str = ""


class Outcomes:
    """The outcomes that the training thread has still to report, and the counts of failed saves.

    `place`: the path of the run, for messages. `durable`, `put`, `put_always` and `verified` may be called from any
    thread, everything else by the training thread only (`report_unreported` also when the pipeline is finalized).
    """

    def __init__(self, place: str, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._place, self._now, self._process = place, monotonic_seconds, os.getpid()
        self._queue: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.completed: int | None = None
        """the newest step that the loop has completed since the run was opened or restored"""
        self.was_closed = False
        """whether `close` was called; it may have timed out before all work was done"""
        self.committed: Callable[[int], object] = lambda step: None
        """receives the step of each save that is committed, in the thread that has committed it"""
        self.newest: int | None = None
        """the newest durable step that this process knows of"""
        self.failures = 0
        """the attempts to save that failed since the run was opened"""
        self._failed_steps: set[int] = set()
        self.overtaken_saves = 0
        """the saves that were given up because a newer step was committed first"""
        self.last_failure = ""
        """the class and the first line of the error of the last failed save"""
        self.consecutive_failures = 0
        """the failed saves since the last durable one"""
        self.consecutive_torn = 0
        """the torn saves since the last save that was durable or failed otherwise"""
        self._repeated: Counter[str] = Counter()
        self._unsaved_since: float | None = None

    @property
    def failed_saves(self) -> int:
        """The number of steps of which a save failed. A step that is tried again at the exit counts once."""
        return len(self._failed_steps)

    def durable(self, step: int, in_memory: bool = False) -> None:
        """A save of `step` is committed. `in_memory` (default False): in a place that power loss clears."""
        self._queue.put(Outcome(step, None, durable=not in_memory))
        self.committed(step)

    def copied(self, step: int) -> None:
        """The generation of `step` was copied to a further place, which survives power loss."""
        self._queue.put(Outcome(step, None, is_copy=True))

    def put(self, error: BaseException, step: int | None = None, cause: str = "") -> None:
        """A save of `step` failed; without a step, upkeep did. `cause`: what counts as the same error of upkeep; empty:
        all errors of its class do."""
        self._queue.put(Outcome(step, error, cause=cause))

    def put_always(self, error: BaseException) -> None:
        """Something that the user asked for failed, such as a milestone. It is reported in any case."""
        self._queue.put(Outcome(None, error, always=True))

    def verified(self) -> None:
        """Upkeep has verified the newest generation. The next unfit one is then reported as the first."""
        self._queue.put(Outcome(None, None))

    # ---- on the training thread ----------------------------------------------------------------------------

    def report(self, raises: bool = False) -> BaseException | None:
        """Report every outcome since the last call.

        With `raises` the first error is not reported but returned, for the caller to raise.
        """
        first: BaseException | None = None
        for step, error, always, durable, is_copy, cause in self._drained():
            if error is None:
                if durable and step is not None:
                    self._unsaved_since = None
                if step is None:
                    del self._repeated[NotFinite.__name__]
                elif not is_copy:
                    self._reset_counts(step)
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
                self._report_problem(error, always, cause or type(error).__name__)
        return first

    def restored(self, step: int | None) -> None:
        """The loop continues from the generation of `step` (None: from the beginning)."""
        self.completed, self.newest = None, step
        self._unsaved_since = None
        self._repeated.clear()

    def require_durable(self, step: int, within_seconds: float | None) -> None:
        """Called when the loop has completed `step`. Raises NothingDurable if no save became durable for more than
        `within_seconds` (None: no limit), counted from the first completed step after the last durable save."""
        now = self._now()
        if self._unsaved_since is None:
            self._unsaved_since = now
        passed = now - self._unsaved_since
        if within_seconds is not None and passed > within_seconds:
            cause = f"; the last failure: {self.last_failure}" if self.consecutive_failures else ""
            raise NothingDurable(
                f"at step {step} nothing has become durable for {passed:.0f} s (durable_within_seconds="
                f"{within_seconds:g}){cause}",
                safe="Every committed generation is untouched.",
                todo="Remove the cause of the failures, or allow more time.",
            )

    def report_end(self, newest: int | None, last: int, lacks: str = "", in_memory: int | None = None) -> None:
        """Log the closing line, if a save failed or was overtaken, the `last` step of the loop is not durable, or the
        newest save lacks something.

        `newest`: the newest durable step. `lacks`: what the newest save lacks; empty: nothing. `in_memory`: the step of
        a newer save that is in memory only; None: there is none. A failed save that was
        tried again at the exit counts as one save, with the number of attempts beside it.
        """
        if not self.failures and not self.overtaken_saves and newest == last and not lacks:
            return
        text = (
            f"newest durable step {newest} of {last}" if newest is not None else f"nothing is durable of {last} steps"
        )
        if self.overtaken_saves:
            text += f"; {plural(self.overtaken_saves, 'save')} given up because a newer one was committed first"
        if self.failures:
            again = f" ({self.failures} attempts)" if self.failures > self.failed_saves else ""
            text += f"; {plural(self.failed_saves, 'save')} failed{again}: {self.last_failure}"
        elif newest is not None and newest != last and in_memory != last:
            text += "; the state after it was not saved"
        if in_memory is not None:
            text += f"; step {in_memory} is in memory, from which the agent or the next opening copies it"
        if lacks:
            text += f"; {lacks}"
        lost = newest is None or self.consecutive_failures
        level = reporting.threat if lost else reporting.warning if newest != last or lacks else reporting.info
        level(f"{self._place}: {text}")

    def report_unreported(self) -> None:
        """At the end of a process that has not closed the run, report the remaining outcomes and the closing line."""
        if self._process != os.getpid():
            return  # this is a fork, and the process that opened the run reports
        rest = list(self._drained())
        durable = max((one.step for one in rest if one.step is not None and one.error is None), default=self.newest)
        failed = any(one.error is not None and not isinstance(one.error, Overtaken) for one in rest)
        if not self.was_closed and (failed or self.completed not in (None, durable)):
            reporting.warning(f"{self._place} was never closed: close() it, or open it in a with statement")
        for one in rest:
            self._queue.put(one)
        self.report()
        if self.completed is not None:
            self.report_end(self.newest, self.completed)

    # ---- steps ---------------------------------------------------------------------------------------------

    def _drained(self) -> Iterator[Outcome]:
        while not self._queue.empty():
            yield self._queue.get()

    def _reset_counts(self, step: int) -> None:
        if self.consecutive_failures:
            failed = plural(self.consecutive_failures, "save")
            reporting.info(f"{self._place}: step {step} is saved, after {failed} that failed")
        self.consecutive_failures = self.consecutive_torn = 0  # guard: durable-save-resets-counts
        self.newest = max(step, self.newest or 0)

    def _count_failure(self, step: int, error: BaseException) -> None:
        self.failures += 1
        self._failed_steps.add(step)
        self.consecutive_failures += 1
        self.consecutive_torn = self.consecutive_torn + 1 if isinstance(error, TornSnapshot) else 0
        self.last_failure = first_line(error)

    def _report_failure(self, step: int, error: BaseException) -> None:
        if reporting.is_reported(self.consecutive_failures):  # guard: failure-reports-thin-out
            count, attempt = self.consecutive_failures, ""
            if count > 1:
                attempt = f" (failed save {count} in a row; the next report comes with failure {2 * count})"
            reporting.threat(f"{self._place}: step {step} was not saved{attempt}: {_described(error)}")

    def _report_problem(self, error: BaseException, always: bool, cause: str) -> None:
        self._repeated[cause] += 1
        count = self._repeated[cause]
        if always or isinstance(error, Damaged) or reporting.is_reported(count):
            again = f" (occurrence {count})" if count > 1 else ""
            expected = isinstance(error, LastgoodError) and not isinstance(error, (Damaged, Unfit))
            (reporting.warning if expected else reporting.threat)(f"{self._place}: {_described(error)}{again}")


def first_line(error: BaseException) -> str:
    """The class and the first line of an error."""
    what = error.what if isinstance(error, LastgoodError) else str(error)
    return f"{type(error).__name__}: {what.strip().partition(chr(10))[0]}"


def _described(error: BaseException) -> str:
    """The class and the text of the error; of an unexpected one also the innermost calls."""
    if isinstance(error, LastgoodError):
        return f"{type(error).__name__}: {error}"
    calls = "".join(traceback.format_tb(error.__traceback__)[-TRACEBACK_ENTRIES:])
    return (
        f"{type(error).__name__}: {error}\n{calls}Unless a device or the memory failed, this is a bug in "
        "lastgood: please report it. Training continues."
    )

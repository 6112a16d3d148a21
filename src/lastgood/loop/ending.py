"""The end of a training loop: the last save, after a signal or a normal end, and the closing lines.

Everything here runs on the training thread.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import NoReturn

from .. import reporting
from ..coordination.single_rank import AnyRanks
from ..errors import CommitUnknown, HeardLate, LastgoodError, NotRestored
from ..records import Generation
from ..run.follower import Follower
from ..run.pipeline import Pipeline
from ..run.save_handle import Save
from ..state.parameter_versions import version
from .load import LoadRequest
from .preemption import Asked, Preempted
from .saver import Saver


class Ending:
    """How one `Checkpointer` ends. `asked`: signals that ask for it, if any do."""

    def __init__(
        self, request: LoadRequest, pipeline: Pipeline, saver: Saver, ranks: AnyRanks, asked: Asked | None
    ) -> None:
        self._request, self._pipeline, self._saver, self._ranks, self._asked = request, pipeline, saver, ranks, asked
        self._version = version(request.state)
        self._inspected = False
        """whether a generation was restored: then a run that saves nothing is no mistake"""

    def note_restored(self, generation: Generation | None) -> None:
        """The state is that of this generation; None: nothing was restored."""
        self._inspected, self._version = generation is not None, version(self._request.state)

    @property
    def preempted(self) -> bool:
        """Whether a signal has asked for the end."""
        return self._asked is not None and self._asked.at is not None

    def left_seconds(self) -> float | None:
        """What is left of the grace after a signal; None where no signal came."""
        return self._asked.left_seconds if self._asked is not None and self.preempted else None

    def end_if_asked(self, n: int) -> None:
        """Raises Preempted, after a last save, where step `n` is the one to end at.

        Of several ranks, one that has received a signal asks rank 0 to name the step.
        """
        announced = self._saver.announcements
        if self._asked is None:
            return
        if announced is None:
            ends = self.preempted
        elif announced.end is None:
            return
        else:
            self._asked.ask()
            ends = n >= announced.end
        if ends:
            self._leave(n, self._asked)

    def _leave(self, n: int, asked: Asked) -> NoReturn:
        """The last save, where it can be durable in time, and the end of the run; `asked` has a timer for all of it."""
        problem: Exception | None = None
        for _ in range(2):  # one that was torn, or failed, is made once more: the state rests now
            try:
                last = self._saver.last
                if (last is None or last.step < n or last.failed()) and self._in_time(n, last, asked.left_seconds):
                    last = self._saver.save(n, False, {}, must=True, timeout_seconds=asked.left_seconds) or last
                if last is not None:
                    last.result(asked.left_seconds)
                problem = None
                break
            except Exception as error:  # noqa: BLE001 - reported; the end comes all the same
                problem = error
                if isinstance(error, HeardLate):  # a rank had passed the step: there is none that all could save
                    break
        with contextlib.suppress(LastgoodError):  # what is known without it is reported
            refresh(self._pipeline)
        newest = self._pipeline.run.known.newest_restorable()
        durable = f"step {newest.step} is durable" if newest else "nothing is durable"
        more = f" {type(problem).__name__}: {problem}" if problem else ""
        level = reporting.threat if newest is None or problem else reporting.warning
        level(f"asked to end at step {n}: {durable}, exit {asked.wish.exit_code}.{more}")
        raise Preempted(asked.wish.exit_code, newest.step if newest else None)

    def _in_time(self, n: int, last: Save | None, left_seconds: float) -> bool:
        """Whether a save can be durable in time, as the last one took; of several ranks, on all."""
        mine = (last.seconds if last is not None and last.durable() else 0.0) <= left_seconds
        announced = self._saver.announcements
        if announced is None or announced.end is None:
            return mine
        topic = self._ranks.step_topic("leave", announced.end)
        if self._saver.schedule.before >= announced.end:
            late = HeardLate(f"heard at step {n} only that the end is at step {announced.end}")
            topic.fail(late)
            raise late
        return bool(topic.agree(mine, all))

    def save_last(self, n: int) -> None:
        """Leaving normally: the newest step of the loop is saved, unless it is.

        Of several ranks each comes to the same decision by itself: it depends on the steps and on saves that succeed or
        fail on all of them.
        """
        self._pipeline.wait()
        last = self._saver.last
        if last is not None and last.step == n and isinstance(last.error(), CommitUnknown):
            return  # it may be there: the next opening finds out, and the closing line says what is known
        if last is None or last.step < n or last.failed():
            with contextlib.suppress(NotRestored):  # this state does not continue the run: the closing line says so
                save = self._saver.save(n, False, {}, must=True, timeout_seconds=threading.TIMEOUT_MAX)
                assert save is not None
                save.wait_ended()

    def report(self, called: bool, advanced: int, resumed: int) -> None:
        """The closing line. `called`: whether step() or save() was; the loop went from step `resumed` to `advanced`."""
        if not self._ranks.is_coordinator:
            return
        if not called:
            self._report_unused()
        elif advanced > resumed or self._pipeline.outcomes.failures:
            newest = self._pipeline.run.known.newest_restorable()
            self._pipeline.outcomes.report_end(newest.step if newest else None, advanced)

    def _report_unused(self) -> None:
        """Report that nothing was saved, but not on an exception, nor where a state was restored and only looked at."""
        changed = version(self._request.state) != self._version
        if sys.exc_info()[0] is None and (changed or not self._inspected):
            what = f"{self._pipeline.run.tier.place}: nothing was saved: step() and save() were never called"
            reporting.warning(f"{what}, and the parameters have changed" if changed else what)


def refresh(pipeline: Pipeline) -> None:
    """Learn what rank 0 has committed and verified since."""
    if isinstance(pipeline.run, Follower):
        pipeline.run.refresh()
        pipeline.upkeep.note_latest()

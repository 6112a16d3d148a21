"""Reports: what happened to saves, delivered to the training loop: events, reports of failures, and errors.

Other threads put events and outcomes into queues (run/pipeline.py, run/outcomes.py). Everything here runs on the
training thread, inside of the calls of a `Checkpointer`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from .. import reporting
from ..coordination.single_rank import AnyRanks
from ..errors import NotWritable, Unavailable
from ..events import Event, EventKind
from ..run.pipeline import Pipeline
from .options import Options
from .save_planner import SavePlanner
from .step_log import StepLog

TORN_LIMIT = 2
"""number of torn saves in a row after which the loop waits while its state is copied"""


class Reports:
    """Delivers the events and the failures of one `Checkpointer`, as its `on_event` and `on_error` say."""

    def __init__(self, options: Options, pipeline: Pipeline, planner: SavePlanner, ranks: AnyRanks) -> None:
        self._options, self._pipeline, self._planner, self._ranks = options, pipeline, planner, ranks
        self.log: StepLog | None = None
        """receives each event too; None: there is no log"""
        self.stepped = False
        """whether the loop has called step()"""
        self._saved, self._steps_saved = -1, 0
        """the step of the newest save() of a loop that has not called step(), and how many steps it has saved so"""

    def emit(self, kind: EventKind, step: int, detail: str = "", seconds: float = 0.0) -> None:
        """Add an event, which the next `deliver` hands to `on_event`. `seconds`: as in `Event`."""
        event = Event(kind=kind, step=step, at_seconds=time.monotonic(), seconds=seconds, bytes=0, detail=detail)
        self._pipeline.events.put(event)

    def enqueued(self, step: int, seconds: float) -> None:
        """The call that began the save of `step` is over. `seconds`: of it, without the wait for a place in flight."""
        if self.log is not None:
            self.log.enqueued(step, seconds)

    def fenced(self, step: int, seconds: float) -> None:
        """The loop has waited at the fence for the save of `step`, whose end may be among the events: so the log
        receives the wait before them."""
        if self.log is not None:
            self.log.fenced(step, seconds)
        self.emit("fenced", step, seconds=seconds)

    def deliver(self) -> None:
        """Call `on_event` with every event since the last call."""
        while not self._pipeline.events.empty():
            event = self._pipeline.events.get()
            if self.log is not None:
                self.log.note(event)
            if self._options.on_event is not None:
                self._options.on_event(event)

    def save_called(self, n: int) -> None:
        """save() was called for step `n`. Report once, where a loop saves its steps and never calls step(), which of
        its options have no effect."""
        if self.stepped or n == self._saved or not self._ranks.is_coordinator:
            return
        self._saved, self._steps_saved = n, self._steps_saved + 1
        names = ("sentinel", "durable_within_seconds")
        unheeded = [f"{name}=" for name in names if getattr(self._options, name) is not None]
        if self._steps_saved == 2 and unheeded:  # guard: options-without-step-reported
            reporting.threat(
                f"this loop calls save() and never step(), without which {', '.join(unheeded)} has no effect. Call "
                "step(n, metrics=...) after each step of the optimizer; save(n) may follow"
            )

    def surface(self) -> None:
        """Deliver events and report what failed behind the loop. Raises the first failure if `on_error` is "raise"."""
        self.deliver()
        outcomes = self._pipeline.outcomes
        error = outcomes.report(raises=self._options.on_error == "raise")
        if outcomes.consecutive_torn >= TORN_LIMIT and self._planner.stop_overlapping():  # guard: repeated-tears-block
            reporting.warning(
                f"{TORN_LIMIT} saves in a row were torn: from now on the state is copied while the loop waits"
            )
        if error is not None:
            raise error

    @contextlib.contextmanager
    def deferring_problems(self) -> Iterator[None]:
        """For writing marks, pointers and announcements, without which a run goes on: where that fails, `surface`
        reports it later."""
        try:
            yield
        except (Unavailable, NotWritable) as error:
            self._pipeline.outcomes.put(error)

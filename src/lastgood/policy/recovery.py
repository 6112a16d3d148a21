"""What a supervisor does when an attempt of a job has ended: go on, start again, or give up. Pure.

An attempt is one life of all ranks. Attempts count as without progress while each restores the same step: what was
trained in between was lost again. The number of those is bounded; that of attempts with progress is bounded only if the
user says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arguments import is_number, is_whole, require

PREEMPTED = 75
"""The exit code of a process that was asked to end and has saved (loop/preemption.py)."""
GAVE_UP = 9
"""The exit code of a job that was given up."""


@dataclass(frozen=True)
class Budget:
    """How often a job is started again.

    `restarts`: restarts in all; None: no bound (default). `without_progress`: attempts in a row that restore the same
    step, the first included (default 3). `pause_seconds`: before the first restart without progress (default 1.0), then
    doubled each time up to `longest_pause_seconds` (default 60.0). Raises Refused for values that cannot be meant.
    """

    restarts: int | None = None
    without_progress: int = 3
    pause_seconds: float = 1.0
    longest_pause_seconds: float = 60.0

    def __post_init__(self) -> None:
        require(
            self.restarts is None or is_whole(self.restarts, 0), f"restarts={self.restarts!r}", "Give a whole number."
        )
        require(
            is_whole(self.without_progress, 1),
            f"without_progress={self.without_progress!r}",
            "Give a whole number of at least 1.",
        )
        for name in ("pause_seconds", "longest_pause_seconds"):
            value = getattr(self, name)
            require(is_number(value) and value >= 0, f"{name}={value!r}", "Give a number of seconds.")


@dataclass(frozen=True)
class Outcome:
    """How one attempt has ended.

    `restored_step`: from which it went on; None: it failed before. `last_step`: the newest step that it completed.
    `code`: of the rank that failed first; 0: all ranks have ended regularly.
    """

    restored_step: int | None
    last_step: int
    code: int


@dataclass(frozen=True)
class Answer:
    """What follows. `restart`: whether the job is started again, after `pause_seconds`. `why`: for the log."""

    restart: bool
    why: str
    pause_seconds: float = 0.0


def answer(outcomes: Sequence[Outcome], budget: Budget, asked_to_end: bool = False) -> Answer:
    """What follows the last of these attempts. `outcomes`: all attempts so far, oldest first; at least one.

    `asked_to_end`: whether the supervisor was asked to end. Example: after one attempt with code 0 the job is done.
    """
    last = outcomes[-1]
    if last.code == 0:
        return Answer(False, "the job is done")
    if asked_to_end:
        return Answer(False, "the job was asked to end")
    if last.code == PREEMPTED:
        return Answer(False, "the ranks were asked to end")
    if budget.restarts is not None and len(outcomes) > budget.restarts:  # guard: restarts-bounded
        return Answer(False, f"{budget.restarts} restarts are allowed")
    same = without_progress(outcomes)
    if same >= budget.without_progress:  # guard: no-endless-restarts
        where = "before a state was restored" if last.restored_step is None else f"after step {last.restored_step}"
        return Answer(False, f"{same} attempts in a row failed {where}, and nothing newer was saved")
    pause = min(budget.pause_seconds * 2 ** (same - 2), budget.longest_pause_seconds) if same > 1 else 0.0
    return Answer(True, f"failure {same} of {budget.without_progress} without a newer saved step", pause)


def without_progress(outcomes: Sequence[Outcome]) -> int:
    """How many of the last attempts in a row went on from no newer step than the one before them; at least 1.

    One that failed before it had restored anything counts with those beside it.
    """
    count, step = 1, outcomes[-1].restored_step
    for one in reversed(outcomes[:-1]):
        if step is not None and one.restored_step is not None and one.restored_step < step:
            break
        step = one.restored_step if step is None else step
        count += 1
    return count

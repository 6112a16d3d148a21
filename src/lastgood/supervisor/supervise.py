"""The supervisor of a job: attempt after attempt, until the job is done, was asked to end, or is given up.

launch -> monitor -> recover -> launch ...          attempt.py starts and watches the ranks
                  -> terminate                      policy/recovery.py decides, attempt_log.py keeps what happened
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from .. import reporting
from ..errors import Cancelled, LastgoodError
from ..format import layout
from ..policy import hang
from ..policy.blame import Ended, first_cause
from ..policy.recovery import GAVE_UP, PREEMPTED, Answer, Outcome, answer
from . import attempt_log, signals
from .arguments import Job
from .attempt import Attempt, Lived, defaults
from .attempt_log import Cause
from .program import adopt_orphans
from .signals import Signals
from .zygote import Zygote


class Supervisor:
    """`job`: what is supervised. `command`: how, for the log. `report`: receives each line of the report."""

    def __init__(self, job: Job, command: Sequence[str], report: Callable[[str], object]) -> None:
        self._job, self._command, self._report = job, list(command), report
        self._id, self._host = secrets.token_hex(4), platform.node()
        self._outcomes = list[Outcome]()
        self._run = ""
        """the run of the job, once a rank has opened it"""

    def supervise(self) -> int:
        """Supervise the job until its end. Returns the exit code: 0, PREEMPTED, GAVE_UP, or 128 and the signal."""
        adopt_orphans()
        with signals.handled(self._job.signals) as received, self._folder() as folder:
            try:
                with contextlib.ExitStack() as held:
                    return self._attempts(folder, received, held)
            except Cancelled:
                if received.end is None:
                    raise
                return 128 + received.end

    # ---- steps ---------------------------------------------------------------------------------------------

    def _attempts(self, folder: Path, received: Signals, held: contextlib.ExitStack) -> int:
        zygote: Zygote | None = None
        while True:
            if not self._job.spawn and (zygote is None or not zygote.alive):
                zygote = Zygote(self._job.preload, defaults(self._job.ranks), received)
                held.callback(zygote.close)
                zygote.ready()
            number, began_at = len(self._outcomes), time.time()
            attempt = folder / f"attempt_{number}"
            attempt.mkdir()
            lived = Attempt(self._job, number, attempt, received, zygote).run()
            cause, follows = self._judged(lived, received.end is not None)
            self._note(lived, began_at, cause, follows)
            if follows.restart and follows.pause_seconds and received.end is None:
                select.select([received.descriptor], [], [], follows.pause_seconds)
            if not follows.restart or received.end is not None:
                return _exit_code(self._outcomes[-1], received.end)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """The folder of this supervisor. It is kept if output of ranks goes there."""
        if self._job.log_dir is not None:
            path = Path(self._job.log_dir).absolute() / f"{self._job.run_id}_{self._id}"
            path.mkdir(parents=True)
            yield path
        elif any(self._job.redirects.values()):
            path = Path(tempfile.mkdtemp(prefix="lastgood-run-"))
            self._report(f"the output of the ranks is in {path}")
            yield path
        else:
            with tempfile.TemporaryDirectory(prefix="lastgood-run-") as made:
                yield Path(made)

    def _judged(self, lived: Lived, asked: bool) -> tuple[Ended | None, Answer]:
        """What an attempt was, and what follows it."""
        cause = first_cause(lived.ended)
        steps = [one.restored_step for one in lived.progress if one.restored is not None]
        whole = len(steps) == len(lived.progress)
        outcome = Outcome(
            restored_step=min(steps) if whole and steps else None,
            last_step=max((one.step for one in lived.progress), default=0),
            code=_code(lived, cause),
        )
        self._outcomes.append(outcome)
        return cause, answer(self._outcomes, self._job.budget, asked)

    def _note(self, lived: Lived, began_at: float, cause: Ended | None, follows: Answer) -> None:
        """Report an attempt, and write its record into the run if that is known."""
        self._run = next((one.run for one in lived.progress if one.run), self._run)
        outcome, before = self._outcomes[-1], self._outcomes[-2] if len(self._outcomes) > 1 else None
        replayed = 0
        if before is not None and outcome.restored_step is not None:
            replayed = max(0, before.last_step - outcome.restored_step)
        record = attempt_log.Attempt(
            format=layout.FORMAT,
            number=len(self._outcomes),
            job=self._id,
            host=self._host,
            command=self._command,
            ranks=self._job.ranks,
            began_at=began_at,
            seconds=lived.over - lived.began,
            restored_step=outcome.restored_step,
            last_step=outcome.last_step,
            replayed_steps=replayed,
            phases=phases(lived),
            cause=_described(lived, cause),
            answer=f"{'restart' if follows.restart else 'end'}: {follows.why}",
        )
        if record.cause is not None or follows.restart:
            self._report(_sentence(record))
        if self._run:
            try:
                with attempt_log.opened(self._run) as tier:
                    last = max((one.number for one in attempt_log.read(tier)), default=0)
                    attempt_log.write(tier, msgspec.structs.replace(record, number=last + 1))
            except LastgoodError as error:
                reporting.warning(f"the record of this attempt was not written to {self._run}: {error}")


def phases(lived: Lived) -> dict[str, float]:
    """Phase -> seconds, of the rank that took longest. A phase that was not reached is left out."""
    found = {"start": lived.started - lived.began}

    def longest(name: str, times: Sequence[tuple[float | None, float | None]]) -> None:
        known = [end - begin for begin, end in times if begin is not None and end is not None]
        if known:
            found[name] = max(0.0, *known)

    ranks = lived.progress
    longest("program to run open", [(one.begun, one.opened) for one in ranks])
    longest("restore", [(one.opened, one.restored) for one in ranks])
    longest("first step", [(one.restored, one.first) for one in ranks])
    longest("training", [(one.first, one.beat) for one in ranks])
    if lived.failed is not None:
        last = max((one.beat for one in ranks if one.beat is not None), default=None)
        if last is not None:
            found["last step to failure noticed"] = max(0.0, lived.failed - last)
        found["tear down"] = lived.over - lived.failed
    return found


def _described(lived: Lived, cause: Ended | None) -> Cause | None:
    if lived.hang is not None:
        one, texts = lived.hang.behind, {str(rank): text for rank, text in lived.hang.stacks.items()}
        what = hang.described(one, lived.hang.silent)
        return Cause(kind="hang", rank=one.signs.rank, code=-signal.SIGKILL, what=what, stacks=texts)
    if cause is None:
        return None
    if cause.error:
        stack = lived.stacks.get(cause.rank, "")
        return Cause(kind="exception", rank=cause.rank, code=cause.code, what=cause.error, stack=stack)
    if cause.code < 0:
        return Cause(kind="signal", rank=cause.rank, code=cause.code, what=signal.Signals(-cause.code).name)
    return Cause(kind="exit", rank=cause.rank, code=cause.code, what=f"exit code {cause.code}")


def _sentence(one: attempt_log.Attempt) -> str:
    """One line about an attempt, for people."""
    cause = one.cause
    if cause is not None and cause.kind == "hang":
        return f"attempt {one.number}: rank {cause.rank} {cause.what}, after {one.seconds:.1f} s. {one.answer}."
    what = "ended" if cause is None else f"rank {cause.rank} failed first: {cause.what.splitlines()[0]}"
    since = "before a state was restored" if one.restored_step is None else f"at step {one.last_step}"
    return f"attempt {one.number}: {what}, {since}, after {one.seconds:.1f} s. {one.answer}."


def _code(lived: Lived, cause: Ended | None) -> int:
    """The code of the rank that failed first. If none has: SIGKILL where one was killed, else the highest."""
    if cause is not None:
        return cause.code
    return -signal.SIGKILL if lived.killed else max(one.code for one in lived.ended)  # guard: killed-rank-is-no-success


def _exit_code(last: Outcome, signal_number: int | None) -> int:
    if last.code in (0, PREEMPTED):
        return last.code
    return GAVE_UP if signal_number is None else 128 + signal_number

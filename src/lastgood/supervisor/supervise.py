"""The supervisor of a job: attempt after attempt, until the job is done, was asked to end, or is given up.

launch -> monitor -> recover -> launch ...          attempt.py starts and watches the ranks
                  -> terminate                      policy/recovery.py decides, attempt_log.py keeps what happened
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from .. import reporting
from ..errors import Cancelled, LastgoodError
from ..format import layout
from ..policy.recovery import GAVE_UP, PREEMPTED, Answer, Outcome, answer, replayed_steps
from ..run import advice, side_records
from . import attempt_log, leftovers, reported, signals
from .arguments import Job
from .attempt import Attempt, Lived, defaults
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
            follows = self._after(lived, began_at, received.end is not None)
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
            with leftovers.folder("lastgood-attempts-", tempfile.gettempdir()) as made:
                yield made

    def _after(self, lived: Lived, began_at: float, asked: bool) -> Answer:
        """Decide what follows an attempt, report it, and write the records about it into the run if that is known."""
        self._run = next((one.run for one in lived.progress if one.run), self._run)
        cause = reported.cause(lived)
        self._outcomes.append(reported.outcome(lived, cause))
        follows = answer(self._outcomes, self._job.budget, asked)
        self._outcomes[-1] = replace(self._outcomes[-1], followed=follows.act)
        record = attempt_log.Attempt(
            format=layout.FORMAT,
            number=0,
            job=self._id,
            host=self._host,
            command=self._command,
            ranks=self._job.ranks,
            began_at=began_at,
            seconds=lived.over - lived.began,
            restored_step=self._outcomes[-1].restored_step,
            last_step=self._outcomes[-1].last_step,
            replayed_steps=replayed_steps(self._outcomes),
            phases=reported.phases(lived),
            cause=cause,
            answer=f"{follows.act}: {follows.why}",
        )
        if cause is not None or follows.restart:
            self._report(reported.sentence(record, len(self._outcomes)))
        if self._run:
            try:
                with side_records.opened(self._run) as tier:
                    attempt_log.append(tier, record)
                    if (found := reported.advice(lived, record, follows)) is not None:
                        advice.append(tier, found)
            except LastgoodError as error:
                reporting.warning(f"the record of this attempt was not written to {self._run}: {error}")
        return follows


def _exit_code(last: Outcome, signal_number: int | None) -> int:
    if last.code in (0, PREEMPTED):
        return last.code
    return GAVE_UP if signal_number is None else 128 + signal_number

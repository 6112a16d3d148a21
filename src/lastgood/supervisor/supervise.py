"""The supervisor of a job: attempt after attempt, until the job is done, was asked to end, or is given up.

launch -> monitor -> recover -> launch ...          attempt.py starts and watches the ranks
                  -> terminate                      policy/recovery.py decides, attempt_records.py keeps what happened
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from ..errors import Cancelled, TierDown
from ..format import layout
from ..io import os_errors, processes
from ..io.machine import given_name
from ..policy import quarantine
from ..policy.health import described, leaves
from ..policy.membership import Bounds, Next
from ..policy.recovery import GAVE_UP, PREEMPTED, RUN_MISSING, STORE, Answer, Outcome, answer, replayed_steps
from . import attempt_log, job_summary, leftovers, merged, reported, reserve, signals, staging, survivors
from .arguments import Job
from .attempt import FULL, Attempt, Lived
from .attempt_records import AttemptRecords
from .error_files import printable
from .held_store import hold
from .host_signs import HostSigns, collectors
from .membership import Membership, Over, StoreLost
from .merged import Report, Verdict
from .nodes import SeveralNodes
from .placement import TOUCH_SECONDS, NodeInfo, Nodes, Notice, OneNode, Placement
from .rank_start import defaults
from .signals import Signals
from .stack_reader import StackReader, py_spy
from .watch import incarnation
from .zygote import Zygote


class Supervisor:
    """`job`: what is supervised. `command`: how, for the log. `report`: receives each line of the report."""

    def __init__(self, job: Job, command: Sequence[str], report: Callable[[str], object]) -> None:
        self._job, self._report = job, report
        self._command = [*map(printable, command)]
        self._id, self._host = secrets.token_hex(4), given_name() or platform.node()
        self._outcomes = list[Outcome]()
        self._records, self._reader = AttemptRecords(), StackReader(py_spy())
        self._run = ""
        """the run of the job, once a rank has opened it"""
        self._hold_staged: Callable[[], None] = lambda: None
        """keeps what is staged in the memory of this node until this supervisor ends"""
        self._undecided: tuple[int, Lived, float] | None = None
        """the last attempt that was lived here: its number, and when it began, by the clock of the day"""

    def supervise(self) -> int:
        """Supervise the job until its end. Returns the exit code: 0, PREEMPTED, GAVE_UP, or 128 and the signal."""
        if self._job.records is not None:
            job_summary.opened(self._job.records)  # raises what is wrong with it before anything is started
        processes.adopt_orphans()
        with (
            signals.handled(self._job.signals) as received,
            self._folder() as folder,
            staging.unneeded_removed(self._job.stage) as self._hold_staged,
        ):
            try:
                with contextlib.ExitStack() as held:
                    nodes = self._nodes(received)
                    held.callback(nodes.end)
                    health = HostSigns(collectors(self._job.health_file), self._job.health_seconds, self._host)
                    held.callback(health.close)
                    if leaves(health.poll(time.monotonic()), self._job.unhealthy):
                        self._report(f"this node ({self._host}) is not healthy: no rank was started")
                        return PREEMPTED
                    return self._attempts(folder, received, nodes, health, held)
            except Over:
                self._require_own_job()
                self._report("the job is over: this node is not needed")
                return 0
            except Cancelled:
                if received.end is None:
                    raise
                return 128 + received.end

    # ---- steps ---------------------------------------------------------------------------------------------

    def _require_own_job(self) -> None:
        """Raise TierDown if this node had no part in the job that is over, and was one of those that its own job needs:
        then it was another job, or has ended without this node."""
        own = self._job.rendezvous
        if own is None or own.node_rank is None or own.spares or self._outcomes or self._undecided:
            return
        if own.settings.least == own.settings.most:  # guard: other-job-is-no-own-end
            raise TierDown(
                f"the job at {own.settings.endpoint} is over, and had no place for this node, which has waited for one",
                safe="This start of the node has run no rank.",
                todo="If that was another job, give each its own --master-port. Otherwise look at what node 0 reports.",
            )

    def _attempts(
        self, folder: Path, received: Signals, nodes: Nodes, health: HostSigns, held: contextlib.ExitStack
    ) -> int:
        zygote: Zygote | None = None
        joins = True
        while True:
            if not self._job.spawn and (zygote is None or not zygote.alive):
                if zygote is not None:
                    zygote.close()  # it has died, and processes that it has forked may wait
                zygote = Zygote(self._job.preload, defaults(self._job.ranks), received)
                held.callback(zygote.close)
                zygote.ready(partial(_show_life, nodes))
            waits_since = time.monotonic()
            if joins:
                with reserve.staged(self._job.stage):
                    before = nodes.join(self._id)
                    self._hold_staged()
                self._id = nodes.job
                if before is not None:
                    self._follow(msgspec.json.decode(before, type=Verdict))
            number, began_at = len(self._outcomes), time.time()
            try:
                place = nodes.begin(number)
                if isinstance(place, Placement):
                    with os_errors.needed(f"attempt {number + 1} has no folder in {folder}", FULL):
                        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what cleans /tmp may have removed it
                        attempt = leftovers.of_attempt(folder, number)
                    rendezvous = time.monotonic() - waits_since if place.nodes > 1 else 0.0
                    self._records.begin(self._begun(place, began_at), self._run)
                    one = Attempt(self._job, number, attempt, received, zygote, place, nodes)
                    lived = one.run(health, self._records, self._reader)
                    lived.rendezvous = rendezvous
                    self._undecided = number, lived, began_at
                else:
                    lived, began_at = self._not_begun(number, place)
                verdict = self._agreed(nodes, lived, began_at, received.end is not None)
            except StoreLost:
                verdict = None  # the nodes decide about this attempt at the next store
            joins = verdict is None or verdict.next == "join"
            if verdict is None:
                if received.end is not None:
                    return 128 + received.end
                continue
            self._follow(verdict)
            nodes.left(verdict.left)
            ends = verdict.act == "end"
            left_out = bool(self._host) and self._outcomes[-1].left_out == self._host
            if ends or left_out or received.end is not None:
                nodes.leave(last=ends)
                if left_out:
                    self._report(f"this node ({self._host}) has left the job: {verdict.why}")
                    return GAVE_UP
                return self._exit_code(verdict, received.end)
            self._pause(verdict.pause_seconds, nodes, received)

    def _exit_code(self, verdict: Verdict, number: int | None) -> int:
        """The exit code of this node, whose last attempt has ended. `number`: the signal that it got; None: none."""
        if verdict.asked and number is None:  # guard: all-nodes-end-as-asked
            self._report("the job was asked to end, on another node")
            number = signal.SIGTERM
        last = self._outcomes[-1]
        if last.code == 0 or (last.code == PREEMPTED and verdict.saved):  # guard: leaving-node-has-saved
            return last.code
        if number is None:
            return GAVE_UP
        self._report(reported.without_save(last, number, others_go_on=verdict.act != "end"))
        return 128 + number

    def _pause(self, seconds: float, nodes: Nodes, received: Signals) -> None:
        """Wait before a restart, in short parts: the other nodes wait for signs of life."""
        until = time.monotonic() + seconds
        while received.end is None and (left := until - time.monotonic()) > 0:
            select.select([received.descriptor], [], [], min(left, TOUCH_SECONDS))
            received.drain()
            _show_life(nodes)

    def _not_begun(self, number: int, why: Notice) -> tuple[Lived, float]:
        """What an attempt was that was over before it began, or was lived before the store of the nodes moved; and when
        it began, by the clock of the day."""
        before = self._undecided
        if why.kind == "moved" and before is not None and before[0] == number:
            return before[1], before[2]
        now = time.monotonic()
        return Lived(began=now, started=now, failed=None if why.kind == "moved" else now, over=now), time.time()

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        """The folder of this supervisor. It is kept if output of ranks goes there."""
        if self._job.log_dir is not None:
            path = self._job.log_dir / f"{self._job.run_id}_{self._id}"
            with os_errors.needed(f"the job has no folder for the output of its ranks, {path}", FULL):
                path.mkdir(parents=True)
            yield path
        elif self._job.outputs.any_file:
            with os_errors.needed("the job has no folder for the output of its ranks", FULL):
                path = Path(tempfile.mkdtemp(prefix="lastgood-run-"))
            self._report(f"the output of the ranks is in {path}")
            yield path
        else:
            with leftovers.folder("lastgood-attempts-", None, "Free space there, or set TMPDIR.") as made:
                yield made

    def _nodes(self, received: Signals) -> Nodes:
        job = self._job
        node_rank = None if job.rendezvous is None else job.rendezvous.node_rank
        info = NodeInfo(host=self._host, ranks=job.ranks, node_rank=node_rank, address="")
        if job.rendezvous is None:
            return OneNode(info, job.master)
        settings, _, timeout_seconds, spares = job.rendezvous
        bounds = Bounds(settings.least, settings.most, spares)
        membership = Membership(settings, received, hold(settings.stores))
        return SeveralNodes(membership, bounds, info, timeout_seconds, received)

    def _begun(self, place: Placement, began_at: float) -> attempt_log.Begun | None:
        """The record that an attempt has begun; None: another node writes it. `began_at`: by the clock of the day."""
        if place.node != 0:
            return None
        return attempt_log.Begun(
            format=layout.FORMAT,
            job=self._id,
            process=processes.identity(),
            host=self._host,
            command=self._command,
            ranks=place.world,
            nodes=place.nodes,
            began_at=began_at,
        )

    # ---- after an attempt ----------------------------------------------------------------------------------

    def _agreed(self, nodes: Nodes, lived: Lived, began_at: float, asked: bool) -> Verdict | None:
        """What all nodes do now; None if the others have taken this node for lost, so that it joins anew."""
        report = merged.encoded(self._host, asked, lived)
        while not nodes.excluded:
            reports, mine = nodes.reports(report), None
            if reports is not None:
                found = {node: merged.decoded(text) for node, text in reports.items()}
                mine = msgspec.json.encode(self._decided(nodes, found, lived.began, began_at)).decode()
            verdict = nodes.verdict(mine)
            if verdict is not None:
                return msgspec.json.decode(verdict, type=Verdict)
        return None

    def _decided(self, nodes: Nodes, reports: Mapping[int, Report], began: float, began_at: float) -> Verdict:
        """Decide what follows an attempt, report it, and write the records about it into the run if that is known.

        `began`, `began_at`: when the attempt began, by the clock of this process, and of the day.
        """
        lived = merged.shifted(merged.merged(reports, nodes.lost_text()), began)
        run = next((one.run for one in lived.progress if one.run), self._run)
        self._records.done(partial(_save_just_in_time, lived, nodes.world, run), nodes.touch)
        leaving = [node for node, one in reports.items() if one.asked]
        follows_round = nodes.next_round(leaving)
        lived.asked = follows_round.act != "end" if leaving else lived.grows
        cause = reported.cause(lived)
        began_on = None if cause is None or cause.kind == STORE else nodes.of_rank(cause.rank)
        outcomes = [*self._outcomes, reported.outcome(lived, cause, "" if began_on is None else began_on.host)]
        follows, follows_round, left_out = self._answered(
            nodes, reports, outcomes, began_on, leaving, follows_round, lived.asked
        )
        missing = follows.restart and self._records.has_lost(run, outcomes, nodes.touch)
        follows = Answer("end", RUN_MISSING) if missing else follows  # guard: lost-run-not-begun-anew
        outcomes[-1] = replace(outcomes[-1], followed=follows.act, left_out=left_out)
        replayed = replayed_steps(outcomes, self._records.completed_before)
        record = attempt_log.Attempt(
            format=layout.FORMAT,
            number=0,
            job=self._id,
            host=self._host,
            command=self._command,
            ranks=nodes.world,
            nodes=len(reports),
            began_at=began_at,
            seconds=lived.over - lived.began,
            restored_step=outcomes[-1].restored_step,
            incarnation=incarnation(lived.progress, outcomes[-1].restored_step),
            saved_step=outcomes[-1].saved_step if outcomes[-1].saved_newer else 0,
            last_step=outcomes[-1].last_step,
            replayed_steps=replayed,
            phases=reported.phases(lived, replayed),
            cause=cause,
            answer=f"{follows.act}: {follows.why}",
            slow=lived.slow,
            findings=lived.findings,
            spares=nodes.spares,
        )
        if self._job.records is not None:
            written = partial(job_summary.add, self._job.records, record, follows.restart)
            self._records.done(written, nodes.touch)  # guard: slow-summary-keeps-no-node-silent
        self._report_end(record, outcomes, run, missing, bool(leaving))
        self._records.end("" if missing else run, record, partial(reported.advice, lived, record, follows), nodes.touch)
        return Verdict(
            outcomes=outcomes,
            act=follows.act,
            why=follows.why,
            pause_seconds=follows.pause_seconds,
            next=follows_round.act,
            run=run,
            asked=bool(leaving) and follows_round.act == "end" and outcomes[-1].code != 0,
            saved=any(one.code == PREEMPTED for one in lived.ended),
            left=tuple(node for node, one in reports.items() if one.asked or (left_out and one.host == left_out)),
        )

    def _report_end(
        self, record: attempt_log.Attempt, outcomes: Sequence[Outcome], run: str, missing: bool, asked: bool
    ) -> None:
        """Report how the last attempt has ended, and that the job is given up if it is. `asked`: whether a node was
        asked to end."""
        restarts = outcomes[-1].followed != "end"
        if record.cause is not None or restarts:
            self._report(reported.sentence(record, len(outcomes)) + ("" if run else reported.stack(record.cause)))
        if record.cause is not None and not restarts and not asked:
            self._report(reported.given_up(outcomes, run, missing))

    def _answered(
        self,
        nodes: Nodes,
        reports: Mapping[int, Report],
        outcomes: Sequence[Outcome],
        began_on: NodeInfo | None,
        leaving: Sequence[int],
        follows_round: Next,
        regroups: bool,
    ) -> tuple[Answer, Next, str]:
        """What follows an attempt, what the nodes do then, and the host that leaves the job because of it; empty: none.

        `began_on`: the node of the first cause. `leaving`: nodes that were asked to end. `follows_round`: what the
        nodes do without these, if no host is left out. `regroups`: whether the ranks were asked to end so that the
        job goes on, on other nodes.
        """
        left_out, note = "", ""
        suspect = quarantine.suspect(outcomes, self._job.quarantine_after)
        if suspect is not None and began_on is not None:
            its = [node for node, one in reports.items() if one.host == suspect.host]
            without = nodes.next_round([*leaving, *its])
            kept = quarantine.kept(without, began_on.holds_store)
            if its and not kept:
                follows_round, left_out = without, f"{suspect.host} is left out: {suspect.why}"
            else:
                note = f"; {suspect.why}{kept}"
        reasons = [described(one) for node in leaving for one in reports[node].lived.findings if one.fatal]
        note += f"; {', '.join(reasons)}" if reasons else ""
        asked = bool(leaving) and follows_round.act == "end"
        regrouped = follows_round.why or "the node that had waited is gone" if regroups else ""
        failed = attempt_log.unfinished(self._records.earlier)
        follows = answer(outcomes, self._job.budget, asked, regrouped, left_out, failed)
        host = suspect.host if suspect is not None and left_out and follows.restart else ""
        return replace(follows, why=follows.why + note), follows_round, host

    def _follow(self, verdict: Verdict) -> None:
        if len(verdict.outcomes) > len(self._outcomes):  # a node that was lost may not have published its last one
            self._outcomes, self._run = list(verdict.outcomes), verdict.run


def _show_life(nodes: Nodes) -> None:
    """Show the other nodes that this one lives. Raises TierDown; but StoreLost is raised by the next request."""
    with contextlib.suppress(StoreLost):
        nodes.touch()


def _save_just_in_time(lived: Lived, ranks: int, run: str) -> None:
    """Commit what the ranks that have survived another one have written, if that is all of a step."""
    if run and lived.hang is None:
        step = survivors.committed(lived.left, ranks, run, "" if lived.lost is None else lived.lost[1])
        if step is not None:
            lived.progress = [one._replace(saved_step=max(step, one.saved_step)) for one in lived.progress]

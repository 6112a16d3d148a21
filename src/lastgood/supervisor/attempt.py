"""One attempt of a job on this node: all ranks are started, watched, and ended together. Decides nothing.

    start     a folder, a page for signs of life, and a process for each rank
    watch     until every rank has ended, one has failed or hangs, or the job was asked to end
    end       SIGKILL to the process group of each rank that is left

Invariant: after `run` no process of the attempt is left.
"""

from __future__ import annotations

import math
import os
import select
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from .. import reporting
from ..errors import TierDown
from ..io import heartbeat, os_errors
from ..io.oom_kills import OomKills, oom_kills
from ..policy.blame import Ended, aborted, follows, timed_out
from ..policy.hang import Silent, Stuck, awaited, is_idle
from ..policy.health import Finding, leaves
from . import error_files, leftovers
from .arguments import Job
from .attempt_log import Slow
from .attempt_records import AttemptRecords
from .command_signals import CommandSignals
from .host_signs import HostSigns
from .membership import StoreLost
from .outputs import Console
from .placement import Kind, Nodes, Notice, Placement
from .progress_watch import ProgressWatch
from .rank_end import end_all, how_ended, reap_orphans
from .rank_start import RankStart
from .signals import PASSED_ON, Signals
from .slow_watch import SlowWatch
from .stack_reader import StackReader
from .survivors import Left, is_complete, left_by
from .watch import RankProcess, heeds, just_in_time_seconds, processor_seconds, stacks, stuck
from .zygote import Zygote

MEMORY = "/dev/shm"
FULL_MEMORY = "Free space there. A container has more memory there with --shm-size."
FULL = "Free space there, or give another --log-dir."
"""the remedies where they are full"""
FOLLOWERS_SECONDS = 1.0
"""How long other ranks have to report an error after one has ended that looks like a follower: one of them is the
cause, and takes longer to end."""
EXIT_SECONDS = 0.5
"""How long a rank has to end once its program has failed with an exception: for what it has registered with atexit."""
OUTPUT_BYTES = 4096
"""what is written after a failure to see whether there is room for output"""
POLL_SECONDS = 0.1
"""how often the pages of the ranks are read"""


@dataclass(frozen=True)
class Hang:
    """`behind`: the rank for which the others wait. `silent`: which rank was silent for too long; None: a rank has
    failed because it waited for too long. `stacks`: rank -> the stacks of its threads."""

    behind: Stuck
    silent: Silent | None
    stacks: dict[int, str]


@dataclass
class Lived:
    """What an attempt was. Times: seconds of the monotonic clock."""

    began: float
    started: float = 0.0
    """when all processes existed"""
    failed: float | None = None
    """when the first failure was noticed"""
    rendezvous: float = 0.0
    """how long this node has waited before that until all nodes had a place; 0.0: it is alone"""
    over: float = 0.0
    """when no process was left"""
    killed: bool = False
    """whether a rank did not end by itself"""
    ended: list[Ended] = field(default_factory=list)
    progress: list[heartbeat.Progress] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)
    """rank -> the stack of the exception that ended it"""
    hang: Hang | None = None
    """None: no rank was hung"""
    suspected: Hang | None = None
    """a rank that did nothing when others had ended like followers: it hangs if these had waited (merged.py)"""
    lost: tuple[int | None, str] | None = None
    """the first rank of the nodes that were lost, and a text about them; no rank: the store of the nodes was lost"""
    grows: bool = False
    """whether the ranks were asked to save and to end so that more nodes can join"""
    asked: bool = False
    """whether they were, for this or because a node leaves, and the job goes on"""
    asked_by: int = 0
    """the signal that has asked this job to end, before a rank had failed; 0: none"""
    slow: list[Slow] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    """signs that a host may fail"""
    out_of_memory: dict[int, str] = field(default_factory=dict)
    """rank that SIGKILL has ended -> where the kernel has killed a process for memory meanwhile"""
    left: Left = field(default_factory=Left)
    """what the ranks have left for a just-in-time save, if one may follow"""


class Attempt:
    """`folder`: of this attempt, an absolute path, which exists. `signals`: are passed on. `zygote`: forks the ranks;
    None: each is a new process. `place`: of this node among the `nodes` of the job.
    """

    def __init__(
        self,
        job: Job,
        number: int,
        folder: Path,
        signals: Signals,
        zygote: Zygote | None,
        place: Placement,
        nodes: Nodes,
    ) -> None:
        self._job, self._signals, self._place, self._nodes = job, signals, place, nodes
        self._folder, self._starts = folder, RankStart(job, number, folder, zygote, place)
        self._ranks = list[RankProcess]()
        self._live, self._poll = dict[int, RankProcess](), select.poll()
        """pidfd -> a rank that has not ended"""
        self._until, self._asked = math.inf, False
        """when the ranks that are left are ended; whether they were asked to end"""
        self._published: Kind | None = None
        """why the attempt is over, as this node or another one has published it"""
        self._unreachable = False
        """whether the store of the nodes has not answered"""
        with os_errors.needed(f"the output of the ranks cannot be kept in {folder}", FULL):
            self._console = Console(job.outputs, folder)
        self._unwarned = dict[int, list[RankProcess]]()
        """signal that others have been sent -> ranks that had no handler for it yet"""
        self._commands = CommandSignals()
        self._written = set[int]()
        """ranks that have written what they hold, after another one has failed"""
        self._seen = dict[int, tuple[float, heartbeat.Progress, float]]()
        """rank that went on after the first failure -> when that was, and its signs and processor time then"""

    def run(self, health: HostSigns, records: AttemptRecords, reader: StackReader) -> Lived:
        """Live the attempt. `health`: is asked while ranks run; `records`: see what they show; `reader`: of their
        stacks. Raises what `RankStart.start` and `leftovers.folder` raise."""
        lived, killed_before = Lived(time.monotonic()), oom_kills()
        # Pages of memory, not of a disk: a rank must not fail because a disk is full.
        memory = MEMORY if os.path.isdir(MEMORY) else None
        with leftovers.folder("lastgood-beat-", memory, FULL_MEMORY) as pages:
            try:
                self._start(pages)
                lived.started = time.monotonic()
                self._watch(lived, health, records, reader)
            except TierDown as error:
                self._unreachable = True
                if not isinstance(error, StoreLost):
                    raise
                lived.failed = lived.failed or time.monotonic()
            finally:
                reader.close()
                end_all(self._ranks, self._show_life)
                lived.killed = any(one.killed for one in self._ranks)
                lived.over = time.monotonic()
                self._console.close(self._show_life)
                self._report_full(lived)
                self._read(lived)
                _note_out_of_memory(lived, killed_before)
                for one in self._ranks:
                    one.close()
        return lived

    # ---- start ---------------------------------------------------------------------------------------------

    def _start(self, pages: Path) -> None:
        for local in range(self._job.ranks):
            one = self._starts.start(local, pages)
            self._ranks.append(one)
            with os_errors.needed(f"the output of rank {one.rank} in {one.folder} cannot be read", ""):
                self._console.add(local, one.rank, self._job.role)

    # ---- watch ---------------------------------------------------------------------------------------------

    def _watch(self, lived: Lived, health: HostSigns, records: AttemptRecords, reader: StackReader) -> None:
        watch, slow = ProgressWatch(self._job.limits, self._place.world, reader), SlowWatch(self._job.pace, reader)
        self._poll.register(self._signals.descriptor, select.POLLIN)
        for one in self._ranks:
            self._live[one.descriptor] = one
            self._poll.register(one.descriptor, select.POLLIN)
        while self._live and (now := time.monotonic()) < self._until:
            for descriptor, _ in self._poll.poll(int(1000 * min(POLL_SECONDS, self._until - now)) + 1):
                if descriptor in self._live:
                    one = self._live.pop(descriptor)
                    self._poll.unregister(descriptor)
                    one.ended = how_ended(one)
            self._console.copy()
            reap_orphans([*self._live.values()])
            had_failed = lived.failed is not None
            self._note_failures(lived)
            records.shown([one.shown for one in self._ranks])
            if all(one.shown.first is not None for one in self._ranks):
                self._starts.fork_ahead()
            findings = health.poll(time.monotonic())
            lived.findings += findings
            if leaves(findings, self._job.unhealthy):
                reporting.warning(
                    "this node leaves the job: its ranks are asked to save and to end (--unhealthy leave)"
                )
                self._signals.ask_to_end()
            self._pass_on_what_came(lived)
            self._commands.settle([*self._live.values()], time.monotonic())
            if self._signals.end is not None:
                lived.asked_by = lived.asked_by or (self._signals.end if lived.failed is None else 0)
                self._ask_to_end(had_failed)
            if self._hangs(lived, watch) or self._over_elsewhere(lived, watch):
                return
            if lived.failed is None and not self._asked:
                lived.slow += slow.poll([*self._live.values()], time.monotonic())
        if not self._asked:
            self._note_awaited(lived)

    def _note_failures(self, lived: Lived) -> None:
        for one in self._ranks:
            one.shown = one.read()
        for one in self._ranks:
            if not one.failed and _has_failed(one):
                one.failed = True
                self._note_failed(lived)
                if not self._asked:
                    kind = _kind(_as_ended(one))
                    wait = max(_grace_seconds(one, kind), just_in_time_seconds(self._ranks))
                    self._until = min(self._until, time.monotonic() + wait)
                    self._publish(kind)
        self._note_written(lived)

    def _note_failed(self, lived: Lived) -> None:
        """Note when the first failure was noticed, and what the others have done until then."""
        if lived.failed is None:
            lived.failed = now = time.monotonic()
            live = [one for one in self._live.values() if not one.failed]
            self._seen = {one.rank: (now, one.shown, processor_seconds(one.pid)) for one in live}

    def _note_written(self, lived: Lived) -> None:
        """End the attempt soon once survivors have written all of a step. Only the ranks of this node are known."""
        written = {one.rank for one in self._ranks if one.shown.written is not None}
        if lived.failed is None or written <= self._written:
            return
        self._written = written
        if self._place.nodes == 1 and is_complete(left_by(self._ranks), self._place.world):
            self._until = min(self._until, time.monotonic() + EXIT_SECONDS)

    def _ask_to_end(self, had_failed: bool) -> None:
        """From now on, the ranks have some time to end by themselves. `had_failed`: whether a rank failed before: not
        by this signal, then."""
        if not self._asked:
            self._asked, until = True, time.monotonic() + self._job.shutdown_seconds
            self._until = min(self._until, until) if had_failed else until  # guard: signal-extends-no-end

    def _hangs(self, lived: Lived, watch: ProgressWatch) -> bool:
        """Note if a rank hangs, also because of one of another node. Returns whether one does."""
        if lived.failed is not None or self._asked:
            return False
        live, now = [*self._live.values()], time.monotonic()
        ended = len(live) < len(self._ranks) or self._have_ended_elsewhere(live, now)
        silent = watch.silent(live, now, ended, () if self._place.nodes == 1 else None)
        if silent is not None and self._place.nodes > 1:
            silent = watch.silent(live, now, ended, self._nodes.others(now))
        if silent is None or watch.only_reports(silent):
            return False
        self._note_hang(lived, silent, watch)
        self._publish("hang")
        return True

    def _have_ended_elsewhere(self, live: Sequence[RankProcess], now: float) -> bool:
        """Whether a rank of another node has ended, as far as is known. That is asked once a rank here has closed its
        run: a node shows those of its ranks that live."""
        if self._place.nodes == 1 or all(one.shown.closed is None for one in live):
            return False
        return len(self._nodes.others(now)) < self._place.world - len(self._ranks)  # guard: end-on-other-nodes-counts

    def _note_hang(self, lived: Lived, silent: Silent | None, watch: ProgressWatch) -> None:
        live = [*self._live.values()]
        lived.failed, texts = time.monotonic(), stacks(live)
        lived.hang = Hang(watch.behind(live, texts, lived.failed), silent, texts)

    def _over_elsewhere(self, lived: Lived, watch: ProgressWatch) -> bool:
        """Follow what other nodes have published. Returns whether the attempt is over here, at once."""
        if self._published is not None:
            # Survivors may take longer than a node may be silent.
            self._nodes.touch()  # guard: waiting-node-shows-life
            return False
        now = time.monotonic()
        notice = self._nodes.notice(now, [watch.shown(one, now) for one in self._live.values()])
        if notice is None:
            return False
        if notice.kind == "grow":
            lived.grows = True
            self._pass_on(signal.SIGTERM, [*self._live.values()])
            self._ask_to_end(lived.failed is not None)
            return False
        self._published = notice.kind
        self._note_failed(lived)
        if notice.kind == "hang" and self._live and not self._asked:
            self._note_hang(lived, None, watch)
        # guard: survivors-of-a-node-awaited
        wait = max(_followers_seconds(notice.kind), just_in_time_seconds(self._ranks))
        self._until = min(self._until, time.monotonic() + wait)
        return notice.kind in ("hang", "lost")

    def _publish(self, kind: Kind) -> None:
        """Let the other nodes know, once, that the attempt is over."""
        if self._published is None:
            self._published = kind
            self._nodes.over(Notice(kind=kind))

    def _note_awaited(self, lived: Lived) -> None:
        """If a rank, of this node or another one, has waited for others until a timeout, note which of them it was."""
        failed = [_as_ended(one) for one in self._ranks if one.failed]
        live = [one for one in self._ranks if not one.failed and one.ended is None]
        if not all(map(follows, failed)):
            return
        if self._published == "timeout" or any(map(timed_out, failed)):  # guard: timeouts-name-who-hangs
            lived.hang = _awaited(live, live)
        elif self._published == "follower" and (self._place.nodes > 1 or any(map(aborted, failed))):
            lived.suspected = _awaited([one for one in live if self._has_done_nothing(one)], live)

    def _has_done_nothing(self, one: RankProcess) -> bool:
        """Whether a rank has shown no sign and used no processor since another one has failed, as far as is known."""
        if one.rank not in self._seen:
            return False
        at, shown, used_seconds = self._seen[one.rank]
        used_since = processor_seconds(one.pid) - used_seconds
        return one.shown == shown and is_idle(time.monotonic() - at, used_since)  # guard: busy-rank-not-awaited

    def _pass_on_what_came(self, lived: Lived) -> None:
        """Pass the signals on that have come. A warning would end a rank that starts, because it has no handler yet: it
        is passed on later, and if no rank has one, to the ranks of the next attempt if this one fails."""
        for number in self._signals.taken():
            if number not in PASSED_ON:
                self._pass_on(number, [*self._live.values()])
            elif warned := self._warned(number, [*self._live.values()], lived):
                self._unwarned[number] = [one for one in self._live.values() if one not in warned]
            else:
                self._signals.keep(number)
        for number, late in self._unwarned.items():  # guard: late-handler-gets-its-warning
            late[:] = [one for one in late if one.descriptor in self._live and one.shown.first is None]
            warned = self._warned(number, late, lived)
            late[:] = [one for one in late if one not in warned]

    def _warned(self, number: int, ranks: Sequence[RankProcess], lived: Lived) -> list[RankProcess]:
        """Pass a warning on to those of some ranks that have a handler for it; returns them. Of a command these are
        processes that it has started, which are searched for now and then."""
        if lived.failed is not None or not ranks:
            return []
        if self._job.program.kind != "command":
            ready = [one for one in ranks if heeds(one.pid, number)]  # guard: warning-ends-no-rank
            self._pass_on(number, ready)
            return ready
        return self._commands.warn(ranks, number)

    def _pass_on(self, number: int, to: Sequence[RankProcess]) -> None:
        """Send a signal to ranks that have not ended. A command may be a shell: what it has started gets it."""
        for one in to:
            if self._job.program.kind == "command":
                self._commands.send(one, number)
            else:
                signal.pidfd_send_signal(one.descriptor, number)

    def _show_life(self) -> None:
        """Show the other nodes that this one lives, while it ends its ranks. Raises nothing: the next request raises
        again that their store is lost."""
        if not self._unreachable:
            try:
                self._nodes.touch()
            except TierDown:
                self._unreachable = True  # a store that does not answer is not asked again: each time takes long

    def _report_full(self, lived: Lived) -> None:
        """Report that the output of the ranks has no room, if that is so: it may be why one has failed."""
        if lived.failed is None or not self._job.outputs.any_file:
            return
        try:
            with tempfile.TemporaryFile(dir=self._folder, buffering=0) as file:
                file.write(bytes(OUTPUT_BYTES))
        except OSError as error:
            reporting.warning(f"no more output of the ranks can be written to {self._folder}: {error.strerror}. {FULL}")

    def _read(self, lived: Lived) -> None:
        for one in self._ranks:
            lived.progress.append(one.read()._replace(rank=one.rank))
            assert one.ended is not None
            error, stack, at = error_files.left_by(one)
            lived.stacks[one.rank] = stack
            if one.killed and not error:
                continue
            lived.ended.append(Ended(one.rank, at or one.ended.at_seconds, one.ended.code, error))
        if lived.failed is not None and lived.hang is None:
            lived.left = left_by(self._ranks)


def _awaited(candidates: Sequence[RankProcess], live: Sequence[RankProcess]) -> Hang | None:
    """The one of some ranks for which others have waited; None: none of them. `live`: all that have not ended."""
    texts = stacks(live) if candidates else {}
    one = awaited(stuck(candidates, texts))
    return None if one is None else Hang(one, None, texts)


def _note_out_of_memory(lived: Lived, before: OomKills | None) -> None:
    """Note which ranks the kernel has killed for memory, if it has killed any. `before`: the count at the beginning."""
    now = oom_kills()
    if before is not None and now is not None and now.where == before.where and now.kills > before.kills:
        lived.out_of_memory = {one.rank: now.where for one in lived.ended if one.code == -signal.SIGKILL}


def _kind(one: Ended) -> Kind:
    """What the other nodes are to know of a rank that has failed."""
    if not follows(one):
        return "failure"
    return "timeout" if timed_out(one) else "follower"


def _has_failed(one: RankProcess) -> bool:
    if one.ended is not None:
        return one.ended.failed
    return one.shown.failed is not None


def _grace_seconds(one: RankProcess, kind: Kind) -> float:
    """How long ranks are waited for after this one has failed."""
    return max(_followers_seconds(kind), EXIT_SECONDS if one.ended is None else 0.0)


def _followers_seconds(kind: Kind) -> float:
    """How long a rank that is the cause has to end, after this kind of failure."""
    return FOLLOWERS_SECONDS if kind in ("follower", "timeout") else 0.0


def _as_ended(one: RankProcess) -> Ended:
    """How a rank has failed, with its error."""
    ended = one.ended or Ended(one.rank, time.monotonic(), 1)
    return replace(ended, error=error_files.left_by(one).text)

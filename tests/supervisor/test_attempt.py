"""One attempt of a job, with what forks its ranks passed in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lastgood.io import heartbeat
from lastgood.policy.hang import Signs
from lastgood.supervisor import arguments, merged, rank_end, reported, signals
from lastgood.supervisor.attempt import Attempt
from lastgood.supervisor.attempt_records import AttemptRecords
from lastgood.supervisor.host_signs import HostSigns
from lastgood.supervisor.placement import NodeInfo, Notice, OneNode, Placement
from lastgood.supervisor.stack_reader import StackReader
from lastgood.supervisor.watch import RankProcess
from lastgood.supervisor.zygote import Fork


class SlowFork:
    """Forks ranks that have no process group of their own yet: the first one fails, the others go on, and then make a
    file. `file`: its path."""

    def __init__(self, file: Path) -> None:
        self._programs = ["raise SystemExit(137)", f"import time; time.sleep(60); open({str(file)!r}, 'w')"]

    def fork(self, start: Fork, local: int, stdout: int, stderr: int) -> int:
        started = subprocess.Popen([sys.executable, "-S", "-c", self._programs.pop(0)])
        started.returncode = 0  # its end is learned by the attempt
        return started.pid


class Survivor:
    """Forks a rank that goes on for ever, and shows that it may save just in time."""

    seconds = 0.6

    def fork(self, start: Fork, local: int, stdout: int, stderr: int) -> int:
        heartbeat.Heartbeat(start.environment[heartbeat.VARIABLE]).can_save_just_in_time(self.seconds)
        command = [sys.executable, "-S", "-c", "import signal; signal.pause()"]
        started = subprocess.Popen(command, start_new_session=True)
        started.returncode = 0
        return started.pid


class FailedElsewhere(OneNode):
    """Two nodes, of which the other one has lost a rank."""

    touched = 0

    def notice(self, now: float, signs: Sequence[Signs]) -> Notice:  # type: ignore[override]
        return Notice(kind="failure")

    def touch(self) -> None:
        self.touched += 1


def test_a_node_whose_survivors_may_save_waits_and_shows_signs_of_life(tmp_path: Path) -> None:
    """The other nodes took it for lost, because survivors may take longer than a node may be silent."""
    job = arguments.parsed(["--nproc-per-node", "1", sys.executable], {})
    with signals.handled(job.signals) as received:
        nodes = FailedElsewhere(NodeInfo(host="", ranks=1, node_rank=None, address=""), job.master)
        place = Placement(1, 2, 1, 2, "127.0.0.1", 1)
        lived = Attempt(job, 0, tmp_path, received, Survivor(), place, nodes).run(  # type: ignore[arg-type]
            HostSigns([], 0.0, ""), AttemptRecords(), StackReader(None)
        )
    assert lived.failed is not None and lived.over - lived.failed >= Survivor.seconds
    assert nodes.touched > 1


class Stubborn(Survivor):
    """Forks a rank that ignores SIGTERM."""

    def fork(self, start: Fork, local: int, stdout: int, stderr: int) -> int:
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the rank inherits it
        try:
            heartbeat.Heartbeat(start.environment[heartbeat.VARIABLE]).can_save_just_in_time(self.seconds)
            started = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        finally:
            signal.signal(signal.SIGTERM, before)
        started.returncode = 0
        return started.pid


class AskedAfterFailure(FailedElsewhere):
    """The other node has lost a rank, and this one is asked to end while its ranks may save. `received`: its signal."""

    received: signals.Signals

    def touch(self) -> None:
        if self.received.end is None:
            self.received.ask_to_end()


def test_a_signal_after_a_failure_gives_the_ranks_no_more_time(tmp_path: Path) -> None:
    """Ranks that were to be ended at once, after a failure, had the 30 s of --shutdown-timeout once SIGTERM came."""
    job = arguments.parsed(["--nproc-per-node", "1", sys.executable], {})
    with signals.handled(job.signals) as received:
        nodes = AskedAfterFailure(NodeInfo(host="", ranks=1, node_rank=None, address=""), job.master)
        nodes.received = received
        place = Placement(1, 2, 1, 2, "127.0.0.1", 1)
        lived = Attempt(job, 0, tmp_path, received, Stubborn(), place, nodes).run(  # type: ignore[arg-type]
            HostSigns([], 0.0, ""), AttemptRecords(), StackReader(None)
        )
    assert received.end is not None and lived.killed
    assert lived.failed is not None and lived.over - lived.failed < job.shutdown_seconds / 2


def test_a_rank_that_was_just_forked_is_ended_with_the_others(tmp_path: Path) -> None:
    """A rank failed while the last one was being forked. That one had no process group yet, so it was not killed, and
    the job waited for half a minute until it had failed to find the others."""
    job = arguments.parsed(["--nproc-per-node", "2", sys.executable], {})
    with signals.handled(job.signals) as received:
        info = NodeInfo(host="", ranks=job.ranks, node_rank=None, address="")
        nodes, fork = OneNode(info, job.master), SlowFork(tmp_path / "went on")
        one = Attempt(job, 0, tmp_path, received, fork, nodes.begin(0), nodes)  # type: ignore[arg-type]
        lived = one.run(HostSigns([], 0.0, ""), AttemptRecords(), StackReader(None))
    assert [one.code for one in lived.ended] == [137]
    assert not (tmp_path / "went on").exists(), "the second rank was left until it ended by itself"


def test_a_node_whose_ranks_take_long_to_end_shows_signs_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free the memory of a large rank takes longer than a node may be silent: the others took it for lost, and after
    30 s its membership had ended."""
    monkeypatch.setattr(rank_end, "TOUCH_SECONDS", 0.01)
    lasting = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    lasting.returncode = 0  # its end is learned here
    rank, kills = a_rank(lasting.pid, tmp_path), list[int]()
    monkeypatch.setattr(signal, "pidfd_send_signal", lambda *_: None)  # as if its memory were being freed
    monkeypatch.setattr(os, "killpg", lambda pid, _: kills.append(pid))
    shown = list[float]()

    def touch() -> None:
        shown.append(time.monotonic())
        if len(shown) == 3:
            os.kill(lasting.pid, signal.SIGKILL)

    at_last = threading.Timer(10.0, os.kill, [lasting.pid, signal.SIGKILL])  # if it shows nothing
    at_last.start()
    rank_end.end_all([rank], touch)
    at_last.cancel()
    os.close(rank.descriptor)
    assert kills == [lasting.pid] and len(shown) == 3
    assert rank.killed and rank.ended is not None and rank.ended.code == -signal.SIGKILL


def a_rank(pid: int, folder: Path) -> RankProcess:
    """A process as rank 0."""
    heartbeat.create(str(folder / "page"))
    shown = heartbeat.read(str(folder / "page"))
    return RankProcess(0, pid, os.pidfd_open(pid), folder, folder / "page", shown)


REMOVES = """
import os, sys
from lastgood.io import heartbeat
path = os.environ[heartbeat.VARIABLE]
heartbeat.Heartbeat(path).begin()
os.unlink(path)
sys.exit(1)
"""


def test_the_page_of_a_rank_is_read_after_it_was_removed(tmp_path: Path) -> None:
    """systemd removes the files of a user in /dev/shm at the last logout (RemoveIPC). No hang was found any more then,
    and an exception after days of training counted as one before a state was restored, which ends the job."""
    (tmp_path / "script.py").write_text(REMOVES)
    job = arguments.parsed(["--spawn", "--nproc-per-node", "1", str(tmp_path / "script.py")], {})
    opened = os.listdir("/proc/self/fd")
    with signals.handled(job.signals) as received:
        nodes = OneNode(NodeInfo(host="", ranks=1, node_rank=None, address=""), ("[::1]", 29500))
        place = nodes.begin(0)
        one = Attempt(job, 0, tmp_path, received, None, place, nodes)  # type: ignore[arg-type]
        lived = one.run(HostSigns([], 0.0, ""), AttemptRecords(), StackReader(None))
    assert [one.code for one in lived.ended] == [1] and lived.progress[0].begun is not None
    assert not {*os.listdir("/proc/self/fd")} - {*opened}
    assert (place.address, place.port) == ("::1", 29500), "as torchrun takes it"


ABORTS = """
import os, resource, sys, time
rank, folder = os.environ["RANK"], sys.argv[1]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
open(os.path.join(folder, f"began {rank}"), "w").close()
while len(os.listdir(folder)) < 3:
    os.sched_yield()
if rank != "2":
    os.abort()
while sys.argv[2] == "computes":
    pass
time.sleep(1000)
"""


@pytest.mark.parametrize("rest", ["sleeps", "computes"])
def test_aborts_without_an_error_may_be_the_timeout_of_a_wait(tmp_path: Path, rest: str) -> None:
    """NCCL ends a rank that has waited until its timeout by SIGABRT, without a Python error. The earliest of those was
    named, and never the one that did not come. One that computes is healthy, so the aborts are what is known then."""
    script, began = tmp_path / "script.py", tmp_path / "began"
    script.write_text(ABORTS)
    began.mkdir()
    job = arguments.parsed(["--spawn", "--nproc-per-node", "3", str(script), str(began), rest], {})
    with signals.handled(job.signals) as received:
        nodes = OneNode(NodeInfo(host="", ranks=3, node_rank=None, address=""), job.master)
        one = Attempt(job, 0, tmp_path, received, None, nodes.begin(0), nodes)  # type: ignore[arg-type]
        lived = one.run(HostSigns([], 0.0, ""), AttemptRecords(), StackReader(None))
    cause = reported.cause(merged.merged({0: merged.decoded(merged.encoded("", False, lived))}, None))
    assert cause is not None
    if rest == "sleeps":
        assert (cause.kind, cause.rank) == ("hang", 2) and "others have waited for it" in cause.what
        assert "script.py" in cause.stacks["2"]
    else:
        assert cause.what == "SIGABRT" and cause.rank in (0, 1)

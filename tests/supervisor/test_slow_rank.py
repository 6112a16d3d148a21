"""A slow rank of a job is named: measured steps on a clock of the test, and real ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import pytest

from commands import Call
from lastgood.io import heartbeat
from lastgood.io.heartbeat import Position, Progress
from lastgood.policy.hang import START, Limits, Signs, Silent, Stuck
from lastgood.policy.recovery import GAVE_UP
from lastgood.policy.slow import LEAST_SAMPLES, SAMPLES_IN_WINDOW, Pace
from lastgood.run import access
from lastgood.supervisor import attempt_log
from lastgood.supervisor.attempt_log import Slow
from lastgood.supervisor.placement import free_port
from lastgood.supervisor.program import STACKS_FILE
from lastgood.supervisor.progress_watch import Arrivals, ProgressWatch
from lastgood.supervisor.slow_watch import SlowWatch
from lastgood.supervisor.stack_reader import Reading, StackReader
from lastgood.supervisor.watch import RankProcess, signs

LOOK_SECONDS = 0.5


class Ranks:
    """Two ranks whose pages a test moves. No process belongs to them. `reader`: of their stacks (default: py-spy is
    missing)."""

    def __init__(self, tmp_path: Path, reader: StackReader | None = None) -> None:
        shown = Progress(
            *(1.0, 1.0, 1.0, 0, "", 1.0, 1, 1.0, 0, "", 1.0, 0.1, "", None, None, None), position=Position(0, 0, 0)
        )
        self._ranks = [RankProcess(rank, 0, -1, tmp_path, tmp_path / "page", shown) for rank in (0, 1)]
        self._watch, self._now = SlowWatch(Pace(window_seconds=1.0), reader or StackReader(None)), 100.0
        (tmp_path / STACKS_FILE).touch()

    def train(self, steps: int, seconds: float, phase: bool = False) -> list[Slow]:
        """Look on while steps take so long. Returns what was reported. `phase`: one is open all that time."""
        found = list[Slow]()
        for _ in range(steps):
            for _ in range(int(seconds / LOOK_SECONDS)):
                self._now += LOOK_SECONDS
                for one in self._ranks:
                    one.shown = one.shown._replace(phase_began=self._now if phase else None)
                found += self._watch.poll(self._ranks, self._now)
            for one in self._ranks:
                one.shown = one.shown._replace(step=one.shown.step + 1)
        return found


class FirstIsApart(StackReader):
    """Finds at once that rank 0 reads data while rank 1 waits, if `apart`; else that both read. Counts the samples, of
    which every second one finds nothing if `torn`."""

    apart, torn, samples = False, False, 0

    def read(self, ranks: Sequence[RankProcess], now: float) -> Reading:
        self.samples += 1
        torn = self.torn and self.samples % 2
        waits = ['File "/torch/distributed/distributed_c10d.py", line 2 in all_reduce']
        data = ['File "/home/me/data.py", line 7 in load']
        stacks = [[] if torn else waits if self.apart and one.rank else data for one in ranks]
        found = [Stuck(signs(one.rank, one.shown), "S", calls) for one, calls in zip(ranks, stacks, strict=True)]

        class Found(Reading):
            def poll(self, now: float) -> list[Stuck]:
                return found

        return Found(self, [], now)


def test_steps_that_take_longer_are_reported_without_py_spy_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = Ranks(tmp_path)
    assert ranks.train(15, 1.0) == [] and ranks.train(2, 30.0) == [], "two long steps are no slow job"
    assert ranks.train(15, 1.0) == []
    (one,) = ranks.train(30, 3.0)
    assert (one.step_seconds, one.usual_step_seconds, one.ranks) == (3.0, 1.0, [])
    assert "it is not known whether one of them is slow" in one.what
    assert len(ranks.train(30, 9.0)) == 1, "slower than what has become usual"
    assert caplog.text.count("pip install 'lastgood[stacks]'") == 1


def test_one_long_stall_in_the_first_steps_is_no_slow_rank(tmp_path: Path) -> None:
    """A rank that had waited for data once, for 100 s, was named: nearly all samples were of that step."""
    reader = FirstIsApart("")
    ranks = Ranks(tmp_path, reader)
    assert ranks.train(3, 1.0) == []
    reader.apart = True
    assert ranks.train(1, 100.0) == []
    assert reader.samples <= 4 * SAMPLES_IN_WINDOW
    reader.apart = False
    assert ranks.train(30, 2.0) == []


def test_a_rank_apart_in_all_first_windows_is_slow_and_sampled_no_more(tmp_path: Path) -> None:
    reader = FirstIsApart("")
    reader.apart = True
    ranks = Ranks(tmp_path, reader)
    (one,) = ranks.train(40, 2.0)
    assert [rank.rank for rank in one.ranks] == [0] and one.usual_step_seconds == 0.0
    assert LEAST_SAMPLES <= reader.samples <= 10 * SAMPLES_IN_WINDOW


def test_a_rank_that_becomes_slow_is_named_once_until_it_is_fast(tmp_path: Path) -> None:
    reader = FirstIsApart("")
    ranks = Ranks(tmp_path, reader)
    assert ranks.train(30, 1.0) == []
    reader.apart = True
    (one,) = ranks.train(40, 3.0)
    assert [rank.rank for rank in one.ranks] == [0] and one.usual_step_seconds == 1.0
    assert ranks.train(15, 1.0) == [] and len(ranks.train(40, 3.0)) == 1


def test_a_slow_rank_is_named_although_half_of_the_samples_show_nothing(tmp_path: Path) -> None:
    """Five of twenty samples without a stack hid it, and the slow steps were usual from then on."""
    reader = FirstIsApart("")
    ranks = Ranks(tmp_path, reader)
    assert ranks.train(30, 1.0) == []
    reader.apart = reader.torn = True
    (one,) = ranks.train(80, 3.0)
    assert [rank.rank for rank in one.ranks] == [0] and one.usual_step_seconds == 1.0


def test_a_wait_counts_only_as_far_as_it_was_seen(tmp_path: Path) -> None:
    """A rank was taken for one that waits although nobody had looked at it for half a minute."""
    arrivals = Arrivals(30.0, AtTheStart())
    one = RankProcess(0, os.getpid(), -1, tmp_path, tmp_path / "page", heartbeat.read(str(tmp_path / "page")))
    for now in (100.0, 130.0, 130.1, 160.0, 160.1):
        arrivals.poll([one], now)
    assert arrivals.since(0, 160.2) == pytest.approx(130.2)
    assert arrivals.since(0, 180.0) == 180.0


class AtTheStart(StackReader):
    """Finds at once that ranks wait for a process group, but for those `elsewhere`."""

    def __init__(self, *elsewhere: int) -> None:
        super().__init__("")
        self.elsewhere = set(elsewhere)

    def read(self, ranks: Sequence[RankProcess], now: float) -> Reading:
        waits = ['File "/torch/distributed/rendezvous.py", line 199 in _create_c10d_store']
        data = ['File "/home/me/data.py", line 7 in download']
        calls = [data if one.rank in self.elsewhere else waits for one in ranks]

        class Found(Reading):
            def poll(self, now: float) -> list[Stuck]:
                pairs = zip(ranks, calls, strict=True)
                return [Stuck(signs(one.rank, one.shown), "S", stack) for one, stack in pairs]

        return Found(self, [], now)


def starting(folder: Path) -> list[RankProcess]:
    """Two ranks that have not opened their runs."""
    shown = heartbeat.read(str(folder / "page"))
    return [RankProcess(rank, os.getpid(), -1, folder, folder / "page", shown) for rank in (0, 1)]


def hangs(watch: ProgressWatch, ranks: list[RankProcess], since: float, until: float) -> list[Silent]:
    """Look on each second. Returns the hangs that end an attempt."""
    found = list[Silent]()
    for number in range(int(until - since)):
        one = watch.silent(ranks, since + number, False)
        if one is not None and not watch.only_reports(one):
            found.append(one)
    return found


def test_a_late_rank_is_only_reported_unless_a_limit_was_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job whose rank 0 had prepared for an hour, in parts with a barrier after each, was ended: the waits of the
    others looked like one."""
    ranks = starting(tmp_path)
    watch = ProgressWatch(Limits(long_seconds=100.0), 2, AtTheStart(0))
    assert hangs(watch, ranks, 1000.0, 2000.0) == []
    assert caplog.text.count("rank 0 has not opened its run") == 1 and "to end such a job" in caplog.text
    watch = ProgressWatch(Limits(long_seconds=100.0, ends_late=True), 2, AtTheStart(0))
    assert hangs(watch, ranks, 1000.0, 2000.0)[0].rank == 1


def test_a_second_late_rank_is_reported_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line an attempt named the first late rank, also for those that were late after it."""
    ranks, reader = starting(tmp_path), AtTheStart(0)
    watch = ProgressWatch(Limits(long_seconds=100.0), 2, reader)
    assert hangs(watch, ranks, 1000.0, 1300.0) == []
    reader.elsewhere = {1}
    assert hangs(watch, ranks, 1300.0, 1600.0) == []
    lines = [line.message.partition(" has not opened")[0] for line in caplog.records]
    assert [line for line in lines if line.startswith("rank")] == ["rank 0", "rank 1"]


def test_a_rank_that_was_seen_once_between_two_waits_is_not_late(tmp_path: Path) -> None:
    ranks, reader = starting(tmp_path), AtTheStart()
    watch = ProgressWatch(Limits(long_seconds=100.0, ends_late=True), 2, reader)
    assert hangs(watch, ranks, 1000.0, 1200.0) == [], "all wait"
    reader.elsewhere = {0}
    assert hangs(watch, ranks, 1200.0, 1201.0) == []
    reader.elsewhere = set()
    assert hangs(watch, ranks, 1201.0, 1400.0) == []


def test_the_time_of_a_suspension_is_no_wait(tmp_path: Path) -> None:
    ranks = starting(tmp_path)
    watch = ProgressWatch(Limits(long_seconds=100.0, ends_late=True), 2, AtTheStart(0))
    assert hangs(watch, ranks, 1000.0, 1050.0) == []
    assert hangs(watch, ranks, 1600.0, 1601.0) == [] and watch.shown(ranks[1], 1600.0).since == 1600.0
    assert hangs(watch, ranks, 1601.0, 1690.0) == [] and hangs(watch, ranks, 1690.0, 1720.0) != []


def test_a_late_rank_of_a_node_on_which_nobody_waits_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither node named it: on the one nobody was late, and on the other one nobody waited."""
    (rank, _), watch = starting(tmp_path), ProgressWatch(Limits(long_seconds=100.0), 2, AtTheStart())
    late = [Signs(1, since=None, where=START)]
    found = [watch.silent([rank], 1000.0 + number, False, late) for number in range(300)]
    assert [one for one in found if one is not None and not watch.only_reports(one)] == []
    assert "rank 1 has not opened its run (others have waited for " in caplog.text


def test_phases_do_not_make_a_job_slow(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for _ in range(8):
        assert ranks.train(3, 1.0) == [] and ranks.train(3, 20.0, phase=True) == []


@pytest.mark.slow
def test_a_rank_that_is_slow_from_its_first_step_on_is_named(tmp_path: Path, call: Call) -> None:
    """A job was compared with itself only, so that nothing was said of a rank that had always been slow. py-spy reads
    where these real ranks are."""
    script, run = tmp_path / "train.py", tmp_path / "run"
    text = """
        import sys, time
        import torch, torch.distributed as dist
        import lastgood

        dist.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))

        def load(n):
            time.sleep(0.1 if dist.get_rank() == 1 else 0.0)
            return torch.ones(2, 4)

        with lastgood.Checkpointer(sys.argv[1], {"model": model}, cadence=lastgood.Every(steps=1000)) as ckpt:
            for n in range(ckpt.restore().step + 1, 50):
                model(load(n)).sum().backward()
                ckpt.step(n)
    """
    script.write_text(textwrap.dedent(text))
    lastgood = str(Path(sys.executable).with_name("lastgood"))
    command = [lastgood, "run", "--nproc-per-node", "2", "--slow-window", "0.4", str(script), str(run)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (attempt,) = attempt_log.read(access.for_reading(str(run)))
    named = [(rank.rank, "train.py" in rank.at and "in load" in rank.at) for one in attempt.slow for rank in one.ranks]
    assert named == [(1, True)], done.stderr
    assert "has from the first ones on: rank 1 is slow" in done.stderr
    assert "rank 1 is slow" in " ".join(call("attempts", run)[1].split())


def late_script(folder: Path, text: str) -> Path:
    """A script that runs `text`, in which one of its ranks calls download(): that does not end."""
    prepare = """
        import os, time
        import torch.distributed as dist

        def download():
            time.sleep(1000)
    """
    script = folder / "train.py"
    script.write_text(textwrap.dedent(prepare) + textwrap.dedent(text))
    return script


@pytest.mark.slow
def test_a_rank_that_never_comes_to_the_others_is_named(tmp_path: Path) -> None:
    """Only torch's own timeouts ended such a job: after half an hour under gloo, and three times."""
    text = """
        dist.init_process_group("gloo")
        if os.environ["RANK"] == "0":
            download()
        dist.barrier()
    """
    script = late_script(tmp_path, text)
    command = [str(Path(sys.executable).with_name("lastgood")), "run", "--nproc-per-node", "2"]
    limits = ["--hang-timeout", "1", "--hang-long-timeout", "2", "--max-restarts", "0"]
    done = subprocess.run([*command, *limits, str(script)], capture_output=True, text=True)
    assert done.returncode == GAVE_UP, done.stderr
    report = done.stderr[done.stderr.index("lastgood: attempt 1") :].splitlines()
    assert "rank 0 has not opened its run, at " in report[0] and "in download (others have waited" in report[0]
    assert "in download" in report[1] and "train.py" in report[2], "the stack of the rank"


@pytest.mark.slow
@pytest.mark.long
def test_a_late_rank_of_another_node_is_named(tmp_path: Path) -> None:
    script = late_script(tmp_path, 'download() if os.environ["RANK"] == "1" else dist.init_process_group("gloo")')
    command = [str(Path(sys.executable).with_name("lastgood")), "run", "--nnodes", "2", "--master-addr", "127.0.0.1"]
    command += ["--master-port", str(free_port("127.0.0.1")), "--max-restarts", "0"]
    command += ["--hang-timeout", "1", "--hang-long-timeout", "8"]
    nodes = [[*command, "--node-rank", str(node), str(script)] for node in range(2)]
    started = [subprocess.Popen(one, stderr=subprocess.PIPE, text=True) for one in nodes]
    try:
        reports = [one.communicate(timeout=200)[1] for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [GAVE_UP, GAVE_UP], reports
    assert "attempt 1: rank 1 has not opened its run, at " in reports[0] and "in download" in reports[0]


def test_ranks_that_cannot_be_read_are_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / STACKS_FILE).touch()
    command = tmp_path / "py-spy"
    command.write_text("#!/bin/sh\necho 'Error: Permission denied' >&2\necho '  1: main' >&2\nexit 1\n")
    command.chmod(0o755)
    rank, reader = (
        RankProcess(0, os.getpid(), -1, tmp_path, tmp_path / "page", heartbeat.read("")),
        StackReader(str(command)),
    )
    for _ in range(3):
        reading = reader.read([rank], 100.0)
        assert reading is not None
        while (found := reading.poll(100.0)) is None:
            pass
        assert [one.stack for one in found] == [[]]
    assert reader.read([rank], 100.0) is None and not reader.usable
    reader.close()
    again = reader.read([rank], 100.0)
    assert again is not None, "the next attempt tries anew"
    again._dumps[0].process.wait()
    reader.close()
    assert caplog.text.count("Permission denied, so slow ranks") == 1 and "SYS_PTRACE" in caplog.text


def test_a_reading_that_nobody_takes_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """An attempt that ended while ranks were read, and a reading that came too late, left two for each rank."""
    (tmp_path / STACKS_FILE).touch()
    rank = RankProcess(0, os.getpid(), -1, tmp_path, tmp_path / "page", heartbeat.read(""))
    before, reader = os.listdir("/proc/self/fd"), StackReader("/bin/true")
    reading = reader.read([rank, rank], 100.0)
    reader.close()
    assert reading is not None
    for one in reading._dumps:
        one.process.wait()
    assert os.listdir("/proc/self/fd") == before

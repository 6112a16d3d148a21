"""Files of ranks that the supervisor cannot read, and processes that have ended: neither ends the job."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lastgood.io import heartbeat, processes
from lastgood.policy.hang import START, STEP, Signs
from lastgood.supervisor import outputs, watch
from lastgood.supervisor.attempt import Attempt
from lastgood.supervisor.program import STACKS_FILE
from lastgood.supervisor.progress_watch import ProgressWatch


def test_a_file_of_output_that_cannot_be_read_ends_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A log folder on NFS answered ESTALE once, and all healthy ranks were killed with a traceback."""

    def fails(*_: object) -> bytes:
        raise OSError(errno.ESTALE, "stale file handle")

    (tmp_path / "stdout.log").write_text("a line\n")
    tail = outputs._Tail(tmp_path / "stdout.log", 1, "")
    with caplog.at_level(logging.WARNING), contextlib.closing(tail):
        with monkeypatch.context() as there:
            there.setattr(os, "read", fails)
            assert tail.lines(last=False) == [] and not tail.ended
        assert tail.lines(last=False) == [] and not tail.ended
        assert tail.lines(last=True) == [] and tail.ended
    assert caplog.text.count("no longer copied") == 1


def test_stacks_that_cannot_be_read_end_no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> bytes:
        raise OSError(errno.EIO, "input/output error")

    (tmp_path / STACKS_FILE).touch()
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        try:
            monkeypatch.setattr(watch, "DUMP_SECONDS", 0.0)
            folders = tmp_path, tmp_path / "gone"
            ranks = [
                SimpleNamespace(rank=rank, pid=process.pid, folder=folder, descriptor=os.pidfd_open(process.pid))
                for rank, folder in enumerate(folders)
            ]
            monkeypatch.setattr(Path, "read_bytes", fails)
            assert watch.stacks(ranks) == {}  # type: ignore[arg-type]
        finally:
            process.kill()
            for one in ranks:
                os.close(one.descriptor)


def test_a_group_that_has_ended_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be that of another group by now."""
    process, signalled = subprocess.Popen(["true"], start_new_session=True), list[int]()
    process.wait()
    monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append(group))
    processes.end_group(process)
    assert signalled == []


def test_a_stopped_rank_in_a_long_step_hangs_as_soon_as_elsewhere() -> None:
    """A rank that was stopped before its second step was found after an hour, and with steps of a minute after 20."""
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as process:
        try:
            os.kill(process.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            rank, seen = SimpleNamespace(rank=1, pid=process.pid), SimpleNamespace(_stopped=dict[int, float]())
            in_step = Signs(1, 100.0, STEP, 7, longest_seconds=60.0)
            found = ProgressWatch._stopped_too(seen, rank, in_step, 101.0)  # type: ignore[arg-type]
            assert found.stopped and found.since == 101.0
        finally:
            process.kill()


@pytest.mark.parametrize(("others", "ended"), [(2, False), (1, True)])
def test_a_rank_that_has_ended_on_another_node_is_known_here(others: int, ended: bool, tmp_path: Path) -> None:
    """A rank that did not end after its run was closed was never found where no other one of its node had ended."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    open_rank = SimpleNamespace(shown=heartbeat.read(page))
    closed_rank = SimpleNamespace(shown=heartbeat.read(page)._replace(closed=5.0))
    alive = SimpleNamespace(others=lambda now: [Signs(rank, 1.0, STEP) for rank in range(others)])
    here = SimpleNamespace(_place=SimpleNamespace(nodes=2, world=3), _nodes=alive, _ranks=[closed_rank])
    assert Attempt._have_ended_elsewhere(here, [closed_rank], 9.0) == ended  # type: ignore[arg-type, list-item]
    assert not Attempt._have_ended_elsewhere(here, [open_rank], 9.0)  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize("others_end", [False, True])
def test_an_opening_that_failed_is_no_end_of_a_run(others_end: bool, tmp_path: Path) -> None:
    """Others may wait for a rank whose opening has failed, so it must not look like one that has closed its run."""
    environ = {heartbeat.VARIABLE: str(tmp_path / "page")}
    heartbeat.create(environ[heartbeat.VARIABLE])
    page = heartbeat.own(environ)
    assert page is not None
    page.released()
    assert watch.signs(1, heartbeat.read(environ[heartbeat.VARIABLE]), others_end).where == START

"""A job whose ranks cannot be started because a disk is full, or no more processes are there: one report, exit code 5.

Each of these ended `lastgood run` with a traceback of OSError and exit code 1, which means nothing in its table.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from harness import reports
from lastgood.cli import app
from lastgood.errors import TierDown
from lastgood.supervisor import attempt, held_store
from mounts import small_tmpfs

SLEEP = ("sleep", "1000")


@pytest.fixture
def ended(capsys: pytest.CaptureFixture[str]):
    """Supervise a job of commands, which need no torch, in this process. Returns the exit code and the report."""

    def found(*arguments: object, program: Sequence[str] = SLEEP) -> tuple[int, str]:
        before = children()
        code = app.main(["run", "--no-python", "--health-seconds", "0", *map(str, arguments), *program])
        assert children() == before, "a process is left"
        return code, capsys.readouterr().err

    return found


def children() -> set[int]:
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


@pytest.mark.parametrize(
    ("inodes", "what"),
    [
        (1, "--log-dir"),
        (2, "attempt 1 has no folder"),
        (3, "the output of the ranks cannot be kept"),
        (4, "rank 0 cannot be started"),
        (8, "rank 1 cannot be started"),
    ],
)
def test_a_full_log_folder_is_named_and_nothing_is_left(tmp_path: Path, ended, inodes: int, what: str) -> None:
    """`inodes`: of the mount; those that were there are used up before the job has made all of its files."""
    with small_tmpfs(tmp_path / "logs", f"1m,nr_inodes={inodes}") as logs:
        options = ["--log-dir", logs, "--redirects", "3", "--tee", "3", "--duplicate-stdout-filters", "loss"]
        code, report = ended("--nproc-per-node", 2, *options)
        assert code == 5 and what in report and str(logs) in report and "No space left on device" in report
        assert "Free space there" in report and "another" in report


def test_output_that_has_no_room_is_named(tmp_path: Path, ended) -> None:
    """A rank failed because its output could not be written, and the report was: exit code 1."""
    with small_tmpfs(tmp_path / "logs", "64k") as logs, reports() as texts:
        options = ["--log-dir", logs, "--redirects", "3", "--max-restarts", "0"]
        assert "rank 0 failed first: exit code 1" in ended(*options, program=["yes"])[1]
    (text,) = texts
    assert f"written to {logs}/" in text and "No space left on device. Free space there" in text


def test_full_shared_memory_is_named(tmp_path: Path, ended, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_tmpfs(tmp_path / "shm", "1m,nr_inodes=1") as memory:
        monkeypatch.setattr(attempt, "MEMORY", str(memory))
        code, report = ended()
        assert code == 5 and f"no folder can be made in {memory}" in report and "--shm-size" in report


def test_a_full_folder_for_temporary_files_is_named(tmp_path: Path, ended, monkeypatch: pytest.MonkeyPatch) -> None:
    with small_tmpfs(tmp_path / "tmp", "1m,nr_inodes=1") as full:
        monkeypatch.setattr("tempfile.tempdir", str(full))
        code, report = ended()
        assert code == 5 and str(full) in report and "TMPDIR" in report


def test_no_more_processes_end_the_job_as_they_do_with_a_zygote(
    tmp_path: Path, ended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--spawn` ended with a traceback of BlockingIOError where the process that forks ranks gave the report."""
    real, started = subprocess.Popen, list[subprocess.Popen[bytes]]()

    def popen(*arguments: object, **settings: object) -> subprocess.Popen[bytes]:
        if started:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        started.append(real(*arguments, **settings))  # type: ignore[call-overload]
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    code, report = ended("--nproc-per-node", 2)
    assert code == 5 and "rank 1 cannot be started" in report and "ulimit -u" in report


def test_a_limit_that_permits_no_thread_ends_the_job_before_ranks_start(ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that writes the records was started with the first record: a traceback of RuntimeError, exit code 1,
    and a job that had trained was over."""

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread)
    code, report = ended()
    assert code == 5 and "records of attempts" in report and "ulimit -u" in report


def test_a_store_that_cannot_be_held_is_no_taken_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit of processes was reported as `another process has the port`, and the job began with a store less."""
    with socket.create_server(("", 0)) as taken, reports() as texts:
        assert held_store.hold([f"localhost:{taken.getsockname()[1]}"]) is None
    assert len(texts) == 1 and "in use" in texts[0]

    def popen(*arguments: object, **settings: object) -> subprocess.Popen[bytes]:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(TierDown, match="ulimit -u"):
        held_store.hold(["localhost:0"])


def test_a_job_goes_on_when_nobody_reads_its_report(tmp_path: Path, ended, monkeypatch: pytest.MonkeyPatch) -> None:
    """`lastgood run ... | tee log`: the first line after the end of tee ended the job in place of the attempt."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as nobody, open(os.devnull, "w") as null:
        monkeypatch.setattr(sys, "stderr", nobody)
        again = f"if test -e {tmp_path}/began; then exit 0; fi; touch {tmp_path}/began; exit 1"
        assert ended(program=("sh", "-c", again))[0] == 0
        monkeypatch.undo()
        os.dup2(null.fileno(), writing)  # what is left to write ends there


def test_a_disk_that_is_full_at_a_later_attempt_ends_the_job(tmp_path: Path, ended) -> None:
    """The rank of the first attempt has used up what was free, and was killed."""
    with small_tmpfs(tmp_path / "logs", "1m,nr_inodes=10") as logs:
        fill = f"for i in 1 2 3 4 5 6 7 8 9; do mkdir {logs}/$i; done; kill -9 $$"
        code, report = ended("--log-dir", logs, program=["sh", "-c", fill])
    assert code == 5 and "attempt 1: rank 0 failed first: SIGKILL" in report
    assert "attempt 2 has no folder" in report and str(logs) in report

"""Files of ranks that the supervisor cannot read, and processes that have ended: neither ends the job."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from lastgood.io import processes
from lastgood.supervisor import outputs, watch
from lastgood.supervisor.program import STACKS_FILE


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

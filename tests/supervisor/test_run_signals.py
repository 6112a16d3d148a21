"""Signals to `lastgood run`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents import until
from lastgood.io import heartbeat
from lastgood.policy.recovery import PREEMPTED
from lastgood.supervisor import signals
from lastgood.supervisor.command_signals import CommandSignals
from lastgood.supervisor.watch import RankProcess


def test_a_job_under_nohup_outlives_its_terminal() -> None:
    """The end of the terminal ended the job all the same, as it ends one of torchrun."""
    ends = (signal.SIGTERM, signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals.handled(ends) as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received.end is None and received.taken() == []
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        with signals.handled(ends) as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received.end == signal.SIGHUP
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("trap", "text"),
    [("exit 0", "the ranks ended by themselves"), ("", "the ranks did not all end in time (--shutdown-timeout)")],
)
def test_a_job_that_ends_without_a_last_save_is_reported(tmp_path: Path, trap: str, text: str) -> None:
    """Its ranks ended with 0 after SIGTERM, and `lastgood run` with 143, without a line that says why; later with one
    that did not name the option with which they would have saved."""
    rank = f"trap '{trap}' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    command = [str(Path(sys.executable).with_name("lastgood")), "run", "--no-python", "--shutdown-timeout", "1"]
    with subprocess.Popen([*command, "sh", "-c", rank], stderr=subprocess.PIPE, text=True) as job:
        until((tmp_path / "ready").exists)
        job.send_signal(signal.SIGTERM)
        errors = job.communicate(timeout=60)[1]
    assert job.returncode == 128 + signal.SIGTERM
    assert f"asked to end by SIGTERM: {text}" in errors and "exit code 143" in errors
    assert "preemption=lastgood.Preemption()" in errors


TRAINS = f"""
import os, signal, subprocess, sys, time
from lastgood.io import heartbeat

page = heartbeat.Heartbeat(os.environ[heartbeat.VARIABLE])
page.begin()
assert page.taken()
page.opened("/run")
worker = subprocess.Popen(["sleep", "1000"])  # as one of a DataLoader


def save(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for _ in range(20):
        time.sleep(0.05)
    open("saved.new", "w").write(str(worker.poll()))
    os.rename("saved.new", "saved")
    worker.kill()
    sys.exit({PREEMPTED})


signal.signal(signal.SIGTERM, save)
open("ready", "w").close()
signal.pause()
"""


@pytest.mark.parametrize(
    ("line", "code"),
    [("{0} trains.py; exit $?", PREEMPTED), ("{0} trains.py; touch next; exec sleep 1000", 128 + signal.SIGTERM)],
)
def test_a_command_saves_before_its_shell_and_its_workers_end(tmp_path: Path, line: str, code: int) -> None:
    """The signal went to all processes of the command at once. Its shell ended, and so the rank: what it had started
    was killed while it made its last save. Without a shell the workers of the DataLoader ended, and the loop raised
    before that save. What follows in a script has the signal a second after the training has ended."""
    (tmp_path / "trains.py").write_text(TRAINS)
    command = [str(Path(sys.executable).with_name("lastgood")), "run", "--no-python", "sh", "-c"]
    with subprocess.Popen([*command, line.format(sys.executable)], cwd=tmp_path, stderr=subprocess.PIPE) as job:
        until((tmp_path / "ready").exists)
        job.send_signal(signal.SIGTERM)
        job.communicate(timeout=25)  # less than --shutdown-timeout
    assert (tmp_path / "saved").read_text() == "None" and job.returncode == code


def test_a_command_of_another_user_has_the_signal_in_its_group(tmp_path: Path, monkeypatch) -> None:
    """`sudo -u somebody python train.py`: its process cannot be signalled, and its `sudo` passes signals on."""
    page = tmp_path / "page"
    heartbeat.create(str(page))
    shown = heartbeat.Heartbeat(str(page))
    shown.begin()
    assert shown.taken()
    sent = list[tuple[int, int]]()

    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(signal, "pidfd_send_signal", denied)
    monkeypatch.setattr(os, "killpg", lambda pid, number: sent.append((pid, number)))
    rank = RankProcess(0, 12, -1, tmp_path, page, heartbeat.read(str(page)))
    assert rank.owner() is not None
    CommandSignals().send(rank, signal.SIGTERM)
    assert sent == [(12, signal.SIGTERM)]

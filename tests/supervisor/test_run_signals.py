"""Signals to `lastgood run`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents import until
from lastgood.supervisor import signals


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

"""The process from which ranks are forked, as the supervisor sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents import until
from lastgood.errors import TierDown
from lastgood.io import processes
from lastgood.supervisor import zygote
from lastgood.supervisor.program import Program
from lastgood.supervisor.signals import Signals
from several import FORKED


def test_a_node_shows_signs_of_life_while_its_ranks_are_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A zygote had died, and while the next one imported torch, the other nodes took this one for lost."""
    shown = tmp_path / "shown"
    (tmp_path / "slow.py").write_text(f"import os, time\nwhile not os.path.exists({str(shown)!r}): time.sleep(0.02)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(zygote, "PRELOAD", ())
    signals = Signals([])
    one = zygote.Zygote(["slow"], {}, signals)
    try:
        one.ready(shown.touch)
    finally:
        one.close()
        signals.close()


SLOW = """
import os, time
open("importing", "w").write(str(os.getpid()))
while not os.path.exists("over"):
    time.sleep(0.02)
"""
SHOWS = "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.getsignal(signal.SIGINT).__name__)"


def test_a_zygote_outlives_signals_to_all_processes(tmp_path: Path) -> None:
    """systemd sent SIGTERM to all processes of a job that imported torch. The job ended with 5, as if its process had
    failed, where it ends with 143 once its supervisor was asked to end."""
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "rank.py").write_text(SHOWS)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    command = [*FORKED, "--preload=slow", "rank.py"]
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) as job:
        try:
            until(lambda: (tmp_path / "importing").exists() and (tmp_path / "importing").read_text())
            for number in processes.JOB_ENDS:
                os.kill(int((tmp_path / "importing").read_text()), number)
        finally:
            (tmp_path / "over").touch()
        assert job.communicate(timeout=60)[0] == "default_int_handler\n", "its ranks receive these signals"
    assert job.returncode == 0


def test_collections_of_a_rank_skip_what_the_zygote_has_imported(tmp_path: Path) -> None:
    """At its end each rank passed over all objects of torch, and copied their pages: four ranks took five seconds."""
    program, shown = tmp_path / "train.py", tmp_path / "shown"
    program.write_text(f"import gc\nopen({str(shown)!r}, 'w').write(str(gc.get_freeze_count()))\n")
    subprocess.run([sys.executable, "-m", "lastgood", "run", "--nproc-per-node", "1", str(program)], check=True)
    assert int(shown.read_text()) > 100_000


def test_a_zygote_that_does_not_answer_holds_no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was stopped while it forked a process for the next attempt (--warm-ranks). The supervisor waited for it for
    ever, and saw neither that ranks failed nor a signal."""
    monkeypatch.setattr(zygote, "PRELOAD", ())
    monkeypatch.setattr(zygote, "FORK_SECONDS", 0.1)
    signals = Signals([])
    one = zygote.Zygote([], {}, signals)
    try:
        one.ready(lambda: None)
        os.kill(one._process.pid, signal.SIGSTOP)
        program = Program(kind="command", name="true", arguments=[])
        start = zygote.Fork(program=program, environment={}, supervisor=os.getpid(), waits=True)
        with pytest.raises(TierDown, match="it has not answered for 0 s"):
            one.fork_ahead(start, 0)
        assert not one.alive, "its answer would be taken for that of the next fork"
    finally:
        one.close()
        signals.close()

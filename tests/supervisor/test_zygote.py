"""The process from which ranks are forked, as the supervisor sees it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lastgood.errors import TierDown
from lastgood.supervisor import zygote
from lastgood.supervisor.program import Program
from lastgood.supervisor.signals import Signals


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

"""The process from which ranks are forked, as the supervisor sees it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from lastgood.supervisor import zygote
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

"""The process from which ranks are forked, as the supervisor sees it."""

from __future__ import annotations

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

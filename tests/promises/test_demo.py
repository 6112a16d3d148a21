"""A shortened demo: two epochs, two kills and both kinds of damage. The demo itself detects a difference."""

from __future__ import annotations

import importlib
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

pytestmark = pytest.mark.slow

sys.path.insert(0, str(Path(__file__).parents[2] / "demo"))
run = importlib.import_module("run")

BLOWS = (run.Blow(in_a_save=True, harm=run.flip_a_bit), run.Blow(in_a_save=False, harm=run.cut_the_end))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def outcome(out: Path):
    return run.demo(out, epochs=2, blows=BLOWS, seed=0, console=Console(quiet=True))


def test_a_killed_and_damaged_run_ends_like_an_undisturbed_one(outcome):
    assert [check for check in outcome.checks if not check.holds] == []
    assert any(attempt.half_a_save for attempt in outcome.attempts)
    damaged = [(before, after) for before, after in pairwise(outcome.attempts) if before.damage]
    assert [before.damage.kind for before, _ in damaged] == ["one bit flipped", "truncated"]
    for before, after in damaged:
        assert [step for step, _ in after.stepped_over] == [before.damage.step]
        assert 0 < after.resumed < before.damage.step
    assert outcome.picture.read_bytes().startswith(b"\x89PNG")


def test_the_demo_detects_a_run_that_is_one_save_behind(outcome, out):
    newest = max((out / "killed" / "gen").iterdir())
    shutil.move(newest, out / "taken-away")
    behind = run.Stored(out / "killed")
    checks = run.compare(run.Stored(out / "uninterrupted"), behind, outcome.peace, outcome.attempts, BLOWS)
    assert [check.claim for check in checks if check.holds] == [check.claim for check in outcome.checks[:3]]

"""Retention of a run that holds many more generations than it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lastgood
from harness import reports, save
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.io.files import PosixFiles
from lastgood.limits import DELETIONS_AHEAD
from lastgood.policy.retention import Keep
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk

pytestmark = pytest.mark.slow

MANY = 30


def run_of_many(root: Path) -> None:
    run = RunWriter(Disk(PosixFiles(), str(root)), Inline(), keep=Keep(last=999))
    run.begin(None)
    for step in range(1, MANY + 1):
        save(run, step, {"w": bytes(8)})
        run.verify(Arena(3 * 8192, 8192))


def test_a_large_backlog_is_deleted_after_the_save_and_not_before_it(tmp_path):
    """After 1,000 generations and a restart with Keep(last=3), the next save took 45 s, because all deletions were
    made first."""
    run_of_many(tmp_path)
    events: list[lastgood.Event] = []
    state = {"w": torch.zeros(8, dtype=torch.uint8)}
    with lastgood.Checkpointer(
        tmp_path, state, retention=Keep(last=3), exclude=["rng"], on_event=events.append
    ) as ckpt:
        ckpt.restore(strict=False)
        ckpt.save(MANY + 1)
        ckpt.wait()
    kinds = [one.kind for one in events if one.kind in ("durable", "deleted")]
    assert kinds.index("durable") == DELETIONS_AHEAD
    assert len([*(tmp_path / "gen").iterdir()]) == 3


def test_each_save_deletes_more_of_a_backlog_than_it_adds(tmp_path):
    """Otherwise a run that saves so often that upkeep never runs would never come down to the number of generations
    it keeps."""
    assert DELETIONS_AHEAD > 1
    run_of_many(tmp_path)
    run = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline(), keep=Keep(last=3))
    run.clean(most=DELETIONS_AHEAD)
    assert len(run.retirement.surplus()) == MANY - 3 - DELETIONS_AHEAD
    run.clean(stop=lambda: len(run.retirement.surplus()) == 5)
    assert len(run.retirement.surplus()) == 5


def test_a_large_backlog_is_reported_once_before_its_deletion(tmp_path):
    """The end of the `with` block waited 22 s for hundreds of deletions, and nothing was reported."""
    run_of_many(tmp_path)
    run = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline(), keep=Keep(last=3))
    with reports() as texts:
        run.clean(stop=lambda: len(run.retirement.surplus()) == 20)
        run.clean()
    assert texts == [f"{tmp_path}: deleting {MANY - 3} generations that retention does not keep"]
    assert len([*(tmp_path / "gen").iterdir()]) == 3

"""Labels: milestones and metrics that are added to a generation after its commit."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import continued
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import NoSpace, NoSuchStep
from lastgood.format import commit
from lastgood.io.files import PosixFiles
from lastgood.policy.retention import Keep
from lastgood.records import GenerationId
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood_lab.plain import load, save

CHUNK_BYTES = 8192


def opened(path: Path, keep: Keep) -> RunWriter:
    return continued(Disk(PosixFiles(), str(path)), keep)


def saved(run: RunWriter, *steps: int) -> list[GenerationId]:
    """A run in which each step was saved and verified, and nothing was deleted."""
    found = []
    for step in steps:
        found.append(save(run, step, {"w": bytes(100)}).id)
        run.verify(Arena(3 * CHUNK_BYTES, CHUNK_BYTES))
    return found


def steps(run: RunWriter) -> list[int]:
    return sorted(one.step for one in commit.survey(run.tier).generations)


def test_a_milestone_on_a_full_disk_never_deletes_its_own_generation(tmp_path: Path, monkeypatch) -> None:
    """On a full disk, the oldest generation was deleted to make room for the label that was to make it a milestone."""
    run, full, label = opened(tmp_path, Keep(last=3)), [True, True], commit.label
    oldest, _, _, _ = saved(run, 1, 2, 3, 4)

    def refused_twice(*args: object) -> object:
        if full:
            full.pop()
            raise NoSpace("the disk is full")
        return label(*args)

    monkeypatch.setattr(commit, "label", refused_twice)
    assert run.label(oldest, True, {}).commit.milestone
    assert steps(run) == [1, 4], "two generations were deleted, because one did not make enough room"
    full[:] = [True]
    with pytest.raises(NoSpace):
        run.label(oldest, False, {"loss": 1.0})
    assert steps(run) == [1, 4]


def test_a_generation_under_deletion_accepts_no_label(tmp_path: Path, monkeypatch) -> None:
    """One thread deleted a generation to make room on a full disk while another reported the same generation as a
    durable milestone."""
    run, retire, deleted = opened(tmp_path, Keep(last=1)), commit.retire, []
    saved(run, 1, 2)

    def labelled_meanwhile(tier: Disk, at: GenerationId) -> None:
        with pytest.raises(NoSuchStep, match="is being deleted"):
            run.label(at, True, {})
        deleted.append(at.step)
        retire(tier, at)

    monkeypatch.setattr(commit, "retire", labelled_meanwhile)
    run.clean()
    assert deleted == [1] and steps(run) == [2]


def test_a_label_added_after_the_deletion_plan_keeps_its_generation(tmp_path: Path, monkeypatch) -> None:
    """A milestone was reported as durable, and then deleted with the generations whose deletion had been planned
    before."""
    run, retire = opened(tmp_path, Keep(last=1)), commit.retire
    first, second, _ = saved(run, 1, 2, 3)

    def labelled_meanwhile(tier: Disk, at: GenerationId) -> None:
        if at == first:
            assert run.label(second, True, {}).commit.milestone
        retire(tier, at)

    monkeypatch.setattr(commit, "retire", labelled_meanwhile)
    run.clean()
    assert steps(run) == [2, 3]


def test_a_generation_with_an_unreadable_label_is_kept_and_loads(tmp_path: Path) -> None:
    """The label that made a generation a milestone was damaged: it was ignored, and the milestone was deleted."""
    run = opened(tmp_path, Keep(last=1))
    for at in saved(run, 1, 2):
        run.label(at, True, {})
    (label,) = tmp_path.glob("gen/*01-*/LABEL-1.json")
    label.write_bytes(label.read_bytes()[:-9])
    run = opened(tmp_path, Keep(last=1))
    saved(run, 3)
    run.clean()
    assert steps(run) == [1, 2, 3]
    assert [one.label_unread for one in run.lineage()] == [False, False, True]
    assert load(run.tier, 1, Inline())[1] == {"w": bytes(100)}

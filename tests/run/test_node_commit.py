"""The commit among agents, peers and a coordinator that may die: slices of the campaign that explores it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

import lastgood
from boards import Board
from lastgood.coordination.rounds import RankGroup
from lastgood.engine.inline_executor import Inline
from lastgood.errors import CommitUnknown, TierDown
from lastgood.io.files import PosixFiles
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood_lab.campaigns.node_commit import COPIES, IN_FLIGHT, LATE, PARITY, Subject, explore, without
from lastgood_lab.plain import save


def test_no_schedule_of_a_slice_breaks_a_rule() -> None:
    found = explore(range(36))
    assert not found.problems
    assert len(set(found.digests)) > 200, "most schedules differ"
    assert len(found.outcomes) > 1, "some nodes are lost with what was saved, most are not"


def test_no_schedule_with_parity_breaks_a_rule() -> None:
    """The shapes of the slice are all that the campaign has: "2+1" on three and four nodes, "2+2" on four."""
    found = explore(range(14, 18), PARITY)
    assert not found.problems
    assert len(set(found.digests)) > 30, "most schedules differ"


def test_no_schedule_of_late_commits_by_agents_breaks_a_rule() -> None:
    found = explore(range(40), LATE)
    assert not found.problems
    assert len(set(found.digests)) > 200, "most schedules differ"


def test_no_schedule_of_saves_committed_in_any_order_breaks_a_rule() -> None:
    """Copies of an older save that was committed late replaced those of a newer one: seed 16 shows it."""
    found = explore(range(24), IN_FLIGHT)
    assert not found.problems
    assert len(set(found.digests)) > 120, "most schedules differ"


@pytest.mark.parametrize(("subject", "seeds"), [(COPIES, range(7, 10)), (PARITY, range(1))], ids=["copies", "parity"])
def test_a_seed_gives_the_same_schedule_again(subject: Subject, seeds: range) -> None:
    assert explore(seeds, subject).digests == explore(seeds, subject).digests


def test_the_copies_of_a_generation_outlive_the_next_commit() -> None:
    """A node was lost between a commit and its copies: the generation before, which had copies, was deleted already.

    The seed is one whose schedule shows it: `node_commit --search` without the safeguard finds others.
    """
    assert not explore(range(8, 9)).problems


def test_agents_that_need_one_lock_try_again_at_different_moments() -> None:
    """Two agents paused for the same time after each failure. One copied for a moment that never ended the other's
    wait: each time the lock was taken. The seed is one whose schedule shows it."""
    assert not explore(range(6036511, 6036512)).problems


class _UnsureDisk(Disk):
    """Creates COMMIT, and does not know it."""

    def put_new(self, name: str, data: bytes) -> None:
        super().put_new(name, data)
        if name.endswith("COMMIT.json"):
            raise CommitUnknown("it may exist", safe="", todo="")


class _SilentBoard(Board):
    """A store that loses every verdict that is posted to it."""

    def set(self, values: Mapping[str, bytes]) -> None:
        if any(key.endswith("verdict") for key in values):
            raise TierDown("the store is gone")
        super().set(values)


def test_an_unknown_commit_stays_if_the_store_is_down_too(tmp_path: Path) -> None:
    """The coordinator did not know whether its COMMIT existed, could not post that, and deleted the generation."""
    writer = RunWriter(_UnsureDisk(PosixFiles(), str(tmp_path)), Inline(), ranks=RankGroup(0, 1, Board(), "run"))
    writer.begin(None)
    with pytest.raises(CommitUnknown):
        save(writer, 1, {"w": b"x" * 100}, topic=RankGroup(0, 1, _SilentBoard(), "run").step_topic("save", 1))
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guard", "subject"),
    [
        ("uncommit-before-delete", COPIES),
        ("commit-copied-after-all-parts", COPIES),
        ("stripes-carry-manifests", PARITY),
        ("manifest-beside-its-files", PARITY),
        ("lost-node-is-no-damage", PARITY),
    ],
)
def test_a_removed_safeguard_is_found(guard: str, subject: Subject) -> None:
    count, what = without(guard, schedules=3000, subject=subject)
    assert count > 0, what

"""The commit among agents, peers and a coordinator that may die: a slice of the campaign that explores it."""

from __future__ import annotations

import pytest

from lastgood_lab.campaigns.node_commit import explore, without


def test_no_schedule_of_a_slice_breaks_a_rule() -> None:
    found = explore(range(60))
    assert not found.problems
    assert len(set(found.digests)) > 250, "most schedules differ"
    assert len(found.outcomes) > 1, "some nodes are lost with what was saved, most are not"


def test_a_seed_gives_the_same_schedule_again() -> None:
    assert explore(range(7, 10)).digests == explore(range(7, 10)).digests


@pytest.mark.slow
@pytest.mark.parametrize("guard", ["finished-copy-not-replaced", "open-memory-not-removed"])
def test_a_removed_safeguard_is_found(guard: str) -> None:
    count, what = without(guard, schedules=3000)
    assert count > 0, what

"""A seeded slice of the soak of saves in memory (lab/src/lastgood_lab/campaigns/memory_soak.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood_lab.campaigns import memory_soak
from lastgood_lab.campaigns.memory_soak import Sample, Soak

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("nodes", [1, 2])
def test_saves_whose_agents_are_killed_are_all_committed(tmp_path: Path, memory: Path, nodes: int) -> None:
    found = memory_soak.soak(tmp_path, memory, 50, 1, seed=1, nodes=nodes)
    assert not found.problems
    assert found.saves >= 50 and found.killed == 1
    assert bool(found.copied) == (nodes == 2), "on two nodes each save is copied to the other one"
    assert all(found.samples.values())


def test_no_deletion_in_the_directory_stays_unfinished(tmp_path: Path, memory: Path) -> None:
    """The soak counted files in memory only, and passed while each deleted generation left two files at home."""
    soak = Soak(tmp_path / "run", memory, 1, steps_to_home=10)
    soak.run(60, 0)
    assert not soak.problems and soak.samples["directory"][-1].generations >= 1
    assert soak.half_deleted() == 0


def test_what_grows_is_reported(tmp_path: Path, memory: Path) -> None:
    soak = Soak(tmp_path / "run", memory, 1)
    soak.samples["agent"] = [Sample(100_000 + 1000 * number, 10, 50, 5) for number in range(100)]
    assert [(row.what, row.before, row.after) for row in soak.grown()] == [("memory_kb", 137_000, 187_000)]


def test_agents_are_compared_at_the_same_age() -> None:
    """Agents lived longer between two kills in the last quarter of a soak, and were reported as grown."""
    ages = [memory_soak.age_of(messages) for messages in range(1, memory_soak.OLD + 3)]
    assert ages.count("young") == 1, "once for each agent"
    assert ages.index("young") < ages.index("old") and ages[-2:] == ["old", "old"]
    assert ages.count("") == len(ages) - 3

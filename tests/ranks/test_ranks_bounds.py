"""The bound of each place, as several ranks know it before the first save. Each world consists of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood_lab.worlds import world
from ranked_bounds import known, on_nodes, outside_of_a_mesh

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("kind", "size"), [("ddp", 2), ("fsdp", 2), ("hsdp", 4), ("pipeline", 2)])
def test_several_ranks_know_each_bound_before_a_save(tmp_path: Path, kind: str, size: int) -> None:
    """With several ranks the bound was reported with the first save, which may come hours after the start, and that
    of the places below never. That of a pipeline was the part of rank 0, times the ranks."""
    for reported in world(size, known, kind, tmp_path)[0]:
        assert [*reported] == [str(tmp_path / "front"), str(tmp_path / "home")]
        for bound, taken in reported.values():
            assert taken <= bound < 1.5 * taken


def test_the_bound_of_memory_has_the_copies_that_nodes_make(tmp_path: Path, memory: Path) -> None:
    """With copies=2, two ranks of one node were told twice the memory that they take: there is no other node."""
    (alone, whole), _ = world(2, on_nodes, ["a", "a"], memory, tmp_path / "one")
    (both, home), _ = world(2, on_nodes, ["a", "b"], memory, tmp_path / "two")
    assert alone == whole and both == pytest.approx(home, rel=0.2)


def test_a_rank_outside_of_the_mesh_of_a_tensor_has_no_part_of_it(tmp_path: Path) -> None:
    """Its part was divided among no ranks: a ZeroDivisionError in the first step, on a job that had run before."""
    assert world(2, outside_of_a_mesh, tmp_path) == [1, 1]

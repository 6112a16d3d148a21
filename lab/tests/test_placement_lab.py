"""The simulation of placements: its formulas against counts over all failures, and a small run."""

from __future__ import annotations

from itertools import combinations
from math import comb
from random import Random

import pytest

from lastgood_lab import placement
from lastgood_lab.losses import lost_in_one_ring, lost_in_rings, survived_by_formula


def counted(found, names, failed):
    loses = placement.loss_of(found)
    return sum(loses(set(chosen)) for chosen in combinations(names, failed)) / comb(len(names), failed)


@pytest.mark.parametrize(("size", "k"), [(8, 2), (12, 3), (12, 2), (9, 3)])
def test_the_published_bound_is_the_exact_count_below_2k_failures(size, k):
    nodes = placement.cluster(size)
    found = placement.placed(nodes, f"k={k}", placement.NEIGHBOURS, Random(0))
    for failed in range(1, size):
        exact = counted(found, [node.name for node in nodes], failed)
        bound = 1 - survived_by_formula(size, k, failed)
        assert exact == pytest.approx(bound) if failed < 2 * k else exact <= bound + 1e-12


def test_the_published_examples_of_16_nodes_are_computed():
    """Two copies on 16 machines: 93.3 % of two failures and 80.0 % of three are survived."""
    assert survived_by_formula(16, 2, 2) == pytest.approx(0.933, abs=5e-4)
    assert survived_by_formula(16, 2, 3) == pytest.approx(0.800, abs=5e-4)
    assert survived_by_formula(16, 2, 2) == 1 - (16 / 2) / comb(16, 2)


@pytest.mark.parametrize(
    ("size", "scheme", "strategy"),
    [
        (8, "k=2", placement.RACKED),
        (9, "k=2", placement.NEIGHBOURS),
        (11, "k=3", placement.NEIGHBOURS),
        (8, "4+2", placement.NEIGHBOURS),
        (12, "4+2", placement.RACKED),
        (8, "k=2", placement.RING),
        (10, "k=3", placement.RING),
    ],
)
def test_exact_probabilities_are_those_of_all_sets_of_failures(size, scheme, strategy):
    nodes = placement.cluster(size)
    found = placement.placed(nodes, scheme, strategy, Random(0))
    k = int(scheme[2:]) if scheme[0] == "k" else 0
    for failed in range(1, size):
        exact = counted(found, [node.name for node in nodes], failed)
        if strategy == placement.RING:
            assert lost_in_one_ring(size, k, failed) == pytest.approx(exact)
        else:
            lengths = placement.ring_lengths(found)
            window, spare = (k, k - 1) if k else (6, 2)
            assert lost_in_rings(lengths, window, spare, failed) == pytest.approx(exact)


def test_one_lost_rack_loses_nothing_that_is_placed_over_racks(tmp_path):
    options = placement.Options(tmp_path, trials=40, jobs=1, sizes=(16, 64), changed_sizes=(64,))
    rows = placement.run(options, lambda _: None)
    racked = [row for row in rows if row.get("failure") == "1 rack" and "racks" in row["strategy"]]
    assert len(racked) == 2 * (2 * 2 + 1) and not any(row["lost"] for row in racked)
    ring = [row for row in rows if row.get("failure") == "1 rack" and row["strategy"] == placement.RING]
    assert all(row["lost"] == row["drawn"] == 40 for row in ring)
    text = placement.report(rows, options).markdown("lastgood lab placement", "2026-11-25")
    assert "| 64 | 1 rack | ring | 100.00 | 40 of 40 (91.2 to 100.0 %) | - | - |" in text
    assert placement.summary(rows)["unchanged"]["64 nodes, k=2, groups over racks, a node replaced"] == 1 - 2 / 64
    assert placement.run(options, pytest.fail) == rows, "nothing is left to do"


def test_a_lost_or_replaced_node_leaves_the_other_nodes_as_they_were():
    nodes = placement.cluster(16)
    for change, count in zip(placement.CHANGES, (16, 15, 17, 12, 16), strict=True):
        now = placement.changed_nodes(nodes, change, Random(1))
        assert len({node.name for node in now}) == count
        assert all(node in nodes or node.name.endswith("-new") for node in now)

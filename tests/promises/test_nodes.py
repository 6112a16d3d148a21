"""A seeded slice of the campaign with nodes that are lost (lab/src/lastgood_lab/campaigns/nodes.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from lastgood_lab import namespaces
from lastgood_lab.campaigns import nodes

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("mode", ["copies=2", "rack"])
def test_lost_nodes_lose_nothing_that_was_copied(tmp_path: Path, memory: Path, mode: str) -> None:
    if lacks := namespaces.missing():
        pytest.skip(lacks)
    with namespaces.Network(nodes.NODES + 1) as network:
        outcomes = nodes.series(network, tmp_path, memory, mode, seed=0, trials=2 if mode == "copies=2" else 1)
    assert [problem for one in outcomes for problem in one.problems] == []

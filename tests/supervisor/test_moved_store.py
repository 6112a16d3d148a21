"""A job whose store of the nodes moves: `--rdzv-endpoint` names several nodes, and the one that holds it is lost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from several import Nodes

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(tmp_path, request.param, stores=3)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("nodes", ["2:3"], indirect=True)
def test_without_the_node_of_the_store_the_others_go_on_at_the_next(nodes: Nodes) -> None:
    started = [nodes.start(name) for name in "abc"]
    assert {one["node"] for one in nodes.seen(0, 3)} == {"a", "b", "c"}
    nodes.lose("a")
    assert {one["node"] for one in nodes.seen(1, 2)} == {"b", "c"}
    nodes.touch("done")
    assert [one.wait(60) for one in started[1:]] == [0, 0]
    reports = nodes.log("b") + nodes.log("c")
    assert f"(a): lost, with the store of the nodes: the store of the nodes is at {nodes.endpoints[1]} now" in reports
    assert "frame #" not in reports

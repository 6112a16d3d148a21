"""A job whose store of the nodes moves: `--rdzv-endpoint` names several nodes, and the one that holds it is lost."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import until
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


@pytest.mark.parametrize("nodes", ["2:4"], indirect=True)
def test_the_store_moves_again_when_its_next_node_is_lost(nodes: Nodes) -> None:
    started = [nodes.start(name) for name in "abcd"]
    nodes.seen(0, 4)
    nodes.lose("a")
    assert {one["node"] for one in nodes.seen(1, 3)} == {"b", "c", "d"}
    nodes.lose("b")
    assert {one["node"] for one in nodes.seen(2, 2)} == {"c", "d"}
    nodes.touch("done")
    assert [one.wait(60) for one in started[2:]] == [0, 0]
    assert f"(b): lost, with the store of the nodes: the store of the nodes is at {nodes.endpoints[2]} now" in (
        nodes.log("c") + nodes.log("d")
    )


@pytest.mark.parametrize("nodes", ["3"], indirect=True)
def test_a_node_that_is_started_later_finds_the_store_that_moved(nodes: Nodes) -> None:
    """It holds a store in the place of the one that is lost, as a pod with the name of the lost one does."""
    started = [nodes.start(name) for name in "abc"]
    nodes.seen(0, 3)
    nodes.lose("a")
    for name in "bc":
        until(lambda name=name: f"joined the job at {nodes.endpoints[1]}" in nodes.log(name))
    started.append(nodes.start("d"))
    assert {one["node"] for one in nodes.seen(1, 3)} == {"b", "c", "d"}
    nodes.touch("done")
    assert [one.wait(60) for one in started[1:]] == [0] * 3


@pytest.mark.parametrize("nodes", ["3"], indirect=True)
def test_a_node_in_reserve_goes_to_the_next_store_with_the_others(nodes: Nodes) -> None:
    started = [nodes.start(name) for name in "abc"]
    nodes.seen(0, 3)
    started.append(nodes.start("d", "--spares", "1"))
    until(lambda: "joined the job at" in nodes.log("d"))
    nodes.lose("a")
    assert {one["node"] for one in nodes.seen(1, 3)} == {"b", "c", "d"}
    nodes.touch("done")
    assert [one.wait(60) for one in started[1:]] == [0] * 3


@pytest.mark.parametrize("nodes", ["1:3"], indirect=True)
def test_a_node_that_was_cut_off_begins_no_job_of_its_own(nodes: Nodes) -> None:
    started = [nodes.start(name) for name in "abc"]
    attempt = nodes.newest(3)
    nodes.send("a", signal.SIGSTOP)
    assert nodes.newest(2) == attempt + 1
    nodes.send("a", signal.SIGCONT)
    last = nodes.newest(3)
    for one in range(attempt + 1, last):
        assert {rank["node"] for rank in nodes.seen(one, 2)} == {"b", "c"}
    nodes.touch("done")
    assert [one.wait(60) for one in started] == [0] * 3


@pytest.mark.parametrize("nodes", ["1:2"], indirect=True)
def test_one_of_two_nodes_is_no_majority_and_ends(nodes: Nodes) -> None:
    nodes.start("a")
    second = nodes.start("b")
    nodes.seen(0, 2)
    nodes.lose("a")
    assert second.wait(60) == 5
    assert not (nodes.folder / "attempt-1-0").exists()

"""`lastgood run` on several nodes, each a process with ranks of its own. The ranks need no torch here."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import until
from lastgood.format import layout
from lastgood.policy.recovery import GAVE_UP, PREEMPTED
from lastgood.records import PlaceList
from lastgood.run import memory_place
from lastgood.supervisor.placement import free_port
from lastgood_lab import namespaces
from several import COMMAND, Nodes

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "ranks"


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(tmp_path, request.param)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("nodes", ["2"], indirect=True)
def test_a_failed_rank_restarts_all_nodes_and_a_lost_node_is_replaced(nodes: Nodes) -> None:
    nodes.touch("fail-0-2")
    first, second = nodes.start("a", "--nproc-per-node", "2"), nodes.start("b", "--nproc-per-node", "2")
    for attempt in (0, 1):
        seen = nodes.seen(attempt, 4)
        assert [(one["RANK"], one["LOCAL_RANK"], one["GROUP_RANK"]) for one in seen] == [
            ("0", "0", "0"),
            ("1", "1", "0"),
            ("2", "0", "1"),
            ("3", "1", "1"),
        ]
        assert all(one["WORLD_SIZE"] == "4" and one["GROUP_WORLD_SIZE"] == "2" for one in seen)
        assert len({one["MASTER_PORT"] for one in seen}) == 1
    assert seen[0]["MASTER_PORT"] != nodes.seen(0, 4)[0]["MASTER_PORT"]
    reserve = nodes.start("c", "--nproc-per-node", "2")
    os.kill(second.pid, signal.SIGKILL)
    assert {one["node"] for one in nodes.seen(2, 4)} == {"a", "c"}
    nodes.touch("done")
    assert first.wait(60) == reserve.wait(60) == 0
    reports = nodes.log("a") + nodes.log("b") + nodes.log("c")
    assert "attempt 1: rank 2 failed first: exit code 7" in reports
    assert "(b): no sign of life for 5 s" in reports


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["2"], indirect=True)
def test_expected_spare_nodes_are_counted_and_one_takes_over(nodes: Nodes, memory: Path) -> None:
    """The one that takes over has the newest generation in its memory before. What no start uses is removed."""
    home = shutil.copytree(GOLDEN, nodes.folder / "home")
    listed = PlaceList(format=layout.FORMAT, places=[memory_place.url_of(home), str(home)])
    (home / layout.PLACES).write_bytes(layout.encode(listed))
    spares = ["--spares", "1", "--records", "logs"]
    first, second = nodes.start("a", *spares), nodes.start("b", *spares)
    missing, complete = "0 of 1 expected; start 1 more node with the same command", "1 of 1 expected"
    until(lambda: nodes.reported() == [missing])
    third = nodes.start("c", *spares, "--stage", "home")
    until(lambda: nodes.reported() == [missing, complete])
    until(lambda: "step 4 is staged in the memory of this node" in nodes.log("c"))
    there = Path(memory_place.folder_of(home, {**os.environ, "LASTGOOD_NODE": "c"}))
    assert [one.parent.name[:12] for one in there.glob("gen/*/COMMIT.json")] == ["000000000004"]
    second.send_signal(signal.SIGTERM)
    nodes.touch("over-0")
    assert second.wait(60) == PREEMPTED
    assert {one["node"] for one in nodes.seen(1, 2)} == {"a", "c"}
    until(lambda: nodes.reported().count(missing) == 2)
    further = [nodes.start("d", *spares, "--stage", "home"), nodes.start("e", *spares)]
    until(lambda: "2 of 1 expected; 1 more than expected, also kept in reserve" in nodes.reported())
    until(lambda: "step 4 is staged in the memory of this node" in nodes.log("d"))
    assert there.exists()
    nodes.touch("done")
    assert [one.wait(60) for one in (first, third, *further)] == [0] * 4
    assert "the job is over: this node is not needed" in nodes.log("d")
    assert not [one for one in memory.glob("lastgood-*/*") if one.is_dir()]
    records = json.loads((nodes.folder / "logs/supervisor.json").read_text())["attempts"]
    assert [one["spares"] for one in records] == [{"waiting": 1, "expected": 1}, {"waiting": 2, "expected": 1}]
    assert all(one["phases"]["rendezvous"] > 0 for one in records)


@pytest.mark.long
@pytest.mark.parametrize("nodes", ["1:2"], indirect=True)
def test_a_node_may_come_later_and_may_leave_before_the_end(nodes: Nodes) -> None:
    first = nodes.start("a")
    assert nodes.seen(0, 1)[0]["WORLD_SIZE"] == "1"
    second = nodes.start("b")
    assert [one["WORLD_SIZE"] for one in nodes.seen(1, 2)] == ["2", "2"]
    second.send_signal(signal.SIGTERM)
    nodes.touch("over-1")
    assert second.wait(60) == PREEMPTED
    assert nodes.seen(2, 1)[0] == nodes.seen(2, 1)[0] | {"WORLD_SIZE": "1", "node": "a"}
    nodes.touch("done")
    assert first.wait(60) == 0
    assert "restart: one more node joins" in nodes.log("a")


@pytest.mark.parametrize("nodes", ["1:2"], indirect=True)
def test_a_node_on_which_failures_begin_is_left_out(nodes: Nodes) -> None:
    """By the name of the node: torch orders nodes by their process ids, which begin anew at times."""
    nodes.touch("fail-1-b", str(int(signal.SIGKILL)))
    nodes.touch("fail-2-b", str(int(signal.SIGBUS)))
    first = nodes.start("a", "--quarantine-after", "2")
    nodes.seen(0, 1)
    second = nodes.start("b", "--quarantine-after", "2")
    assert second.wait(60) == GAVE_UP
    assert nodes.seen(3, 1)[0]["node"] == "a"
    nodes.touch("done")
    assert first.wait(60) == 0
    why = "b is left out: the last 2 failures that point to a machine began on b (SIGKILL at step 0, SIGBUS at step 0)"
    assert f"this node (b) has left the job: {why}" in nodes.log("b")
    assert f"restart: {why}" in nodes.log("a") + nodes.log("b")


@pytest.mark.parametrize("nodes", ["2"], indirect=True)
def test_a_job_that_was_asked_to_end_on_one_node_is_given_up_on_none(nodes: Nodes) -> None:
    """The other node ended with 9, and without a word: a scheduler does not start a job again that was given up."""
    nodes.silent_seconds = 30
    nodes.touch("unsaved")
    first, second = nodes.start("a", "--nproc-per-node", "1"), nodes.start("b", "--nproc-per-node", "1")
    nodes.seen(0, 2)
    first.send_signal(signal.SIGTERM)
    nodes.touch("over-0")
    assert first.wait(60) == second.wait(60) == 128 + signal.SIGTERM
    assert "the job was asked to end, on another node" in nodes.log("b")


@pytest.mark.parametrize("nodes", ["2"], indirect=True)
def test_a_signal_to_all_processes_of_a_job_lets_it_save(nodes: Nodes) -> None:
    """systemd, and a machine that shuts down, send it to all of them. The membership of each node died of it at once,
    and the supervisor killed the ranks that were saving, as those of a job whose rendezvous is gone."""
    nodes.silent_seconds = 30
    started = [nodes.start(one, "--nproc-per-node", "1") for one in "ab"]
    nodes.seen(0, 2)
    for one in "ab":
        nodes.send(one, signal.SIGTERM)
    assert [one.wait(60) for one in started] == [PREEMPTED, PREEMPTED]


@pytest.mark.parametrize("nodes", ["1:2"], indirect=True)
def test_a_node_that_leaves_without_a_save_does_not_end_as_saved(nodes: Nodes) -> None:
    """It ended with 75, although its ranks had saved nothing; a job of one node ended with 143, and said so."""
    nodes.touch("unsaved", "0")
    first = nodes.start("a", "--health-seconds", "0")
    nodes.seen(0, 1)
    leaving = ["--unhealthy", "leave", "--health-file", "health", "--health-seconds", "0.1"]
    second = nodes.start("b", *leaving)
    nodes.seen(1, 2)
    nodes.touch("health", "a fan stands still\n")
    assert second.wait(60) == 128 + signal.SIGTERM
    log = nodes.log("b")
    assert "without exit code 75 of a last save" in log and "exit code 143. The other nodes go on" in log
    assert nodes.seen(2, 1)[0]["node"] == "a"
    nodes.touch("done")
    assert first.wait(60) == 0


@pytest.mark.parametrize("nodes", ["2"], indirect=True)
def test_without_the_node_of_the_store_the_others_end_with_one_report(nodes: Nodes) -> None:
    first, second = nodes.start("a"), nodes.start("b")
    nodes.seen(0, 2)
    first.kill()
    assert second.wait(60) == 5
    assert "the rendezvous of the nodes at 127.0.0.1" in nodes.log("b") and "frame #" not in nodes.log("b")


def test_a_job_that_too_few_nodes_join_is_no_store_that_is_silent(tmp_path: Path) -> None:
    """One node of two was started: "the rendezvous of the nodes does not answer", with the advice to start its node."""
    (tmp_path / "rank.py").touch()
    endpoint = f"127.0.0.1:{free_port('127.0.0.1')}"
    place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-conf", "is_host=true,join_timeout=1"]
    alone = [*COMMAND, "--nnodes", "2", *place, "rank.py"]
    done = subprocess.run(alone, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (
        done.returncode == 5
        and f"too few nodes have joined in time (join_timeout of --rdzv-conf) at {endpoint}" in (done.stderr)
    )
    assert "does not answer" not in done.stderr


def test_a_node_that_waited_in_the_job_of_others_has_not_succeeded(tmp_path: Path) -> None:
    """Two jobs had one --master-port. A node of the second one waited in the first, and ended with 0 when that did."""
    (tmp_path / "rank.py").write_text("import os, time\nwhile not os.path.exists('done'):\n    time.sleep(0.05)\n")
    port = free_port("127.0.0.1")

    def started(node_rank: str, name: str) -> subprocess.Popen[bytes]:
        arguments = ["--nnodes", "2", "--node-rank", node_rank, "--master-port", str(port), "rank.py"]
        environ = {**os.environ, "LASTGOOD_NODE": name}
        with open(tmp_path / f"{name}.log", "wb") as log:
            return subprocess.Popen([*COMMAND, *arguments], cwd=tmp_path, env=environ, stderr=log)

    def says(name: str, text: str) -> None:
        until(lambda: text in (tmp_path / f"{name}.log").read_text())

    processes = [started("0", "a"), started("1", "b")]
    try:
        says("a", "takes part, as one of 2 nodes")
        processes.append(started("1", "other"))
        says("other", "waits until 2 nodes have joined")
        second = started("0", "others-first")
        processes.append(second)
        assert second.wait(60) == 5
        says("others-first", "address already in use")
        (tmp_path / "done").touch()
        assert [one.wait(60) for one in processes[:3]] == [0, 0, 5]
        says("other", f"the job at 127.0.0.1:{port} is over, and had no place for this node")
    finally:
        for one in processes:
            one.kill()
            one.wait()


def test_a_node_that_names_itself_localhost_is_reached_by_the_others(tmp_path: Path) -> None:
    """Node 0 was started with --master-addr localhost, and each node with the name of node 0 beside it, as torchrun
    permits. All ranks had localhost as MASTER_ADDR, and those of the other nodes found nobody there."""
    if lacks := namespaces.missing():
        pytest.skip(lacks)
    with namespaces.Network(2) as network:
        nodes = Nodes(tmp_path, "2", network=network)
        seen_by_others = nodes.endpoints
        try:
            options = ["--nproc-per-node", "1", "--rdzv-backend", "static", "--node-rank"]
            nodes.endpoints = ["localhost:29400"]
            started = [nodes.start("a", *options, "0")]
            nodes.endpoints = seen_by_others
            started.append(nodes.start("b", *options, "1"))
            addresses = {one["node"]: one["MASTER_ADDR"] for one in nodes.seen(0, 2)}
            nodes.touch("done")
            assert [one.wait(60) for one in started] == [0, 0]
        finally:
            nodes.end()
        assert addresses == {"a": "127.0.0.1", "b": network.address(0)}


def test_two_nodes_with_one_number_are_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "rank.py").touch()
    port = free_port("127.0.0.1")
    arguments = ["--nnodes", "2", "--node-rank", "0", "--master-port", str(port), "rank.py"]
    hosts = {"a": "true", "b": "false"}  # as on another machine, which has that port too
    started = [
        subprocess.Popen(
            [*COMMAND, "--rdzv-conf", f"is_host={is_host}", *arguments],
            cwd=tmp_path,
            env={**os.environ, "LASTGOOD_NODE": name},
            stderr=subprocess.PIPE,
        )
        for name, is_host in hosts.items()
    ]
    for one in started:
        assert b"several nodes have --node-rank 0" in one.communicate(timeout=60)[1]
        assert one.returncode == 3

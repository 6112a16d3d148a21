"""`lastgood run` on several nodes, each a process with ranks of its own. The ranks need no torch here."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import until
from lastgood.format import layout
from lastgood.policy.recovery import GAVE_UP, PREEMPTED
from lastgood.records import PlaceList
from lastgood.run import memory_place
from lastgood.supervisor.placement import free_port

pytestmark = pytest.mark.slow

GOLDEN = Path(__file__).parents[1] / "golden" / "ranks"
COMMAND = [str(Path(sys.executable).with_name("lastgood")), "run", "--spawn"]
NAMES = ["RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT"]
RANK = f"""
import json, os, signal, sys, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
code = 1 if os.path.exists("unsaved") else {PREEMPTED}
signal.signal(signal.SIGTERM, lambda *_: sys.exit(code))
seen = {{name: os.environ[name] for name in {NAMES!r}}} | {{"node": os.environ["LASTGOOD_NODE"]}}
with open(f"attempt-{{attempt}}-{{rank}}.new", "w") as file:
    json.dump(seen, file)
os.rename(file.name, file.name.removesuffix(".new"))
if os.path.exists(f"fail-{{attempt}}-{{rank}}"):
    while not all(os.path.exists(f"attempt-{{attempt}}-{{one}}") for one in range(int(seen["WORLD_SIZE"]))):
        time.sleep(0.02)
    os.kill(os.getpid(), int(open(f"fail-{{attempt}}-{{rank}}").read() or 0))
    sys.exit(7)
while not os.path.exists("done"):
    time.sleep(0.02)
    if os.path.exists(f"over-{{attempt}}"):  # a signal of one node reaches the ranks of all, as a Checkpointer does it
        sys.exit(code)
"""


class Nodes:
    """The nodes of one job in a folder. They end with the block."""

    def __init__(self, folder: Path, nnodes: str) -> None:
        self.folder, self._port, self._nnodes = folder, free_port("127.0.0.1"), nnodes
        self._started = dict[str, subprocess.Popen[bytes]]()
        (folder / "rank.py").write_text(textwrap.dedent(RANK))

    def start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        first = "true" if not self._started else "false"
        conf = f"is_host={first},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5,join_timeout=60"
        place = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-conf", conf]
        with open(self.folder / f"{name}.log", "wb") as log:
            self._started[name] = subprocess.Popen(
                [*COMMAND, "--nnodes", self._nnodes, *place, *options, "rank.py"],
                cwd=self.folder,
                env={**os.environ, "LASTGOOD_NODE": name},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self._started[name]

    def seen(self, attempt: int, ranks: int) -> list[dict[str, str]]:
        """What the ranks of an attempt have seen, once all are there."""
        paths = [self.folder / f"attempt-{attempt}-{rank}" for rank in range(ranks)]
        until(lambda: all(path.exists() for path in paths))
        return [json.loads(path.read_text()) for path in paths]

    def touch(self, name: str, text: str = "") -> None:
        (self.folder / name).write_text(text)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def reported(self) -> list[str]:
        """What all nodes have reported about spare nodes."""
        return re.findall(r"spare nodes in reserve: (.*)", "".join(map(self.log, self._started)))

    def end(self) -> None:
        for one in self._started.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


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
    nodes.touch("fail-1-1", str(int(signal.SIGKILL)))
    nodes.touch("fail-2-1", str(int(signal.SIGBUS)))
    first = nodes.start("a", "--quarantine-after", "2")
    nodes.seen(0, 1)
    second = nodes.start("b", "--quarantine-after", "2")
    assert second.wait(60) == GAVE_UP
    assert nodes.seen(3, 1)[0]["node"] == "a"
    nodes.touch("done")
    assert first.wait(60) == 0
    why = "b is left out: the last 2 failures that point to a machine began on b (SIGKILL at step 0, SIGBUS at step 0)"
    assert f"this node (b) has left the job: {why}" in nodes.log("b")
    assert f"restart: {why}" in nodes.log("a")


@pytest.mark.parametrize("nodes", ["2"], indirect=True)
def test_a_job_that_was_asked_to_end_on_one_node_is_given_up_on_none(nodes: Nodes) -> None:
    """The other node ended with 9, and without a word: a scheduler does not start a job again that was given up."""
    nodes.touch("unsaved")
    first, second = nodes.start("a", "--nproc-per-node", "1"), nodes.start("b", "--nproc-per-node", "1")
    nodes.seen(0, 2)
    first.send_signal(signal.SIGTERM)
    nodes.touch("over-0")
    assert first.wait(60) == second.wait(60) == 128 + signal.SIGTERM
    assert "the job was asked to end, on another node" in nodes.log("b")


@pytest.mark.parametrize("nodes", ["2"], indirect=True)
def test_without_the_node_of_the_store_the_others_end_with_one_report(nodes: Nodes) -> None:
    first, second = nodes.start("a"), nodes.start("b")
    nodes.seen(0, 2)
    first.kill()
    assert second.wait(60) == 5
    assert "the rendezvous of the nodes at 127.0.0.1" in nodes.log("b") and "frame #" not in nodes.log("b")


def test_two_nodes_with_one_number_are_refused_with_their_names(tmp_path: Path) -> None:
    (tmp_path / "rank.py").touch()
    port = free_port("127.0.0.1")
    arguments = ["--nnodes", "2", "--node-rank", "0", "--master-port", str(port), "rank.py"]
    started = [
        subprocess.Popen(
            [*COMMAND, *arguments], cwd=tmp_path, env={**os.environ, "LASTGOOD_NODE": name}, stderr=subprocess.PIPE
        )
        for name in "ab"
    ]
    for one in started:
        assert b"--node-rank 0 was given on several nodes" in one.communicate(timeout=60)[1]
        assert one.returncode == 3

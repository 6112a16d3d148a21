"""Ranks on separate hosts, which are network namespaces of one machine whose connection the tests cut."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lastgood

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 3.0
PORT = 29411
HOST = Path(__file__).parents[1] / "support" / "host.py"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Cable:
    """Two network namespaces that stand for hosts, and the link between them."""

    def __init__(self) -> None:
        self.names = [f"lastgood-{os.getpid()}-{rank}" for rank in (0, 1)]
        self.ends = [f"lg{os.getpid() % 100_000}e{rank}" for rank in (0, 1)]

    def lay(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for rank, (name, end) in enumerate(zip(self.names, self.ends, strict=True)):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")

    def pull(self) -> None:
        ip("-n", self.names[1], "link", "set", self.ends[1], "down")

    def plug(self) -> None:
        ip("-n", self.names[1], "link", "set", self.ends[1], "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


class Rank:
    """A process on one of the hosts; it takes commands on its standard input."""

    def __init__(self, rank: int, cable: Cable, root: Path) -> None:
        # `ip netns exec` is avoided: it also makes a mount namespace, which keeps the mounts of other tests busy.
        command = ["nsenter", f"--net=/run/netns/{cable.names[rank]}", sys.executable, str(HOST)]
        self._process = subprocess.Popen(
            [*command, str(rank), "10.77.0.1", str(PORT), str(root), str(TIMEOUT_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": cable.ends[rank]},
        )

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answers_within(self, seconds: float) -> bool:
        return bool(select.select([self._process.stdout], [], [], seconds)[0])

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        return dict(json.loads(self._process.stdout.readline()))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def cable() -> Iterator[Cable]:
    if os.geteuid() != 0:
        pytest.skip("needs root, to make network namespaces")
    if not shutil.which("ip"):
        pytest.skip("needs ip: apt-get install iproute2")
    found = Cable()
    try:
        try:
            found.lay()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"needs the right to make network namespaces: {error.stderr.decode().strip()}")
        yield found
    finally:
        found.remove()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hosts") / "run"


@pytest.fixture(scope="module")
def ranks(cable: Cable, run: Path) -> Iterator[list[Rank]]:
    """Both ranks have the run open, and step 1 is durable. Each test leaves them connected."""
    found: list[Rank] = []
    try:
        found += [Rank(rank, cable, run) for rank in (0, 1)]
        assert [one.receive()["result"] for one in found] == ["ready", "ready"]
        assert both(found, "save 1") == ["done", "done"]
        yield found
    finally:
        for one in found:
            one.end()


def both(ranks: list[Rank], line: str) -> list[str]:
    for one in ranks:
        one.send(line)
    return [one.receive()["result"] for one in ranks]


def test_a_host_cut_off_in_a_save_fails_it_on_both_sides_in_bounded_time(cable, ranks, run):
    ranks[0].send("save 2")
    ranks[1].send("save 2 held")
    assert ranks[1].receive()["result"] == "held"
    cable.pull()
    ranks[1].send("on")
    near, far = (one.receive() for one in ranks)
    assert near["result"].startswith("TimedOut: rank 1: ") and near["seconds"] < 2 * TIMEOUT_SECONDS
    assert far["result"].partition(":")[0] in ("RankFailed", "TierDown") and far["seconds"] < 4 * TIMEOUT_SECONDS
    cable.plug()
    assert both(ranks, "save 3") == ["done", "done"]
    steps = [one.step for one in lastgood.open(run).generations()]
    assert {1, 3} <= {*steps} and 2 not in steps


def test_a_save_waits_for_a_slow_host(ranks):
    ranks[0].send("save 4")
    ranks[1].send("save 4 held")
    assert ranks[1].receive()["result"] == "held"
    assert not ranks[0].answers_within(0.3)
    ranks[1].send("on")
    assert [one.receive()["result"] for one in ranks] == ["done", "done"]


def test_a_host_cut_off_in_a_restore_half_loads_no_state(cable, ranks, run):
    ranks[0].send("restore")
    ranks[1].send("restore held")
    assert ranks[1].receive()["result"] == "held"
    cable.pull()
    ranks[1].send("on")
    for one in ranks:
        answer = one.receive()
        assert answer["result"] != "done" and answer["seconds"] < 4 * TIMEOUT_SECONDS
        assert one.receive() == {"result": "state", "first": -1.0, "alike": True}
    cable.plug()
    newest = float(lastgood.open(run).generation().step)
    assert both(ranks, "restore") == ["done", "done"]
    assert [one.receive()["first"] for one in ranks] == [newest, newest]

"""Network namespaces of this machine that stand for nodes: each has a link of its own to one bridge.

A node has its own address and its own counters of bytes. It shares the processors, the disks and the kernel with the
others, and reaches nothing outside. One more namespace is the hub, for what is no part of a node, such as the store of
a job. Needs root and `ip`; `missing` says what this machine lacks. What was made is removed at the end of the `with`
block.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

CLONE_NEWNET = 0x40000000
INTERFACE = "eth0"
"""of each node, in its namespace"""


def missing() -> str:
    """What this machine lacks to make network namespaces, with the remedy; empty if nothing."""
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    if not shutil.which("ip"):
        return "needs ip: apt-get install iproute2"
    try:
        with Network(1):
            return ""
    except subprocess.CalledProcessError as error:
        return f"needs the right to make network namespaces: {error.stderr.decode().strip()}"


class Network:
    """`count` nodes, numbered from 0, and the hub, whose number is `count`."""

    def __init__(self, count: int) -> None:
        self.hub, self._mark = count, os.getpid() % 100_000
        self._bridge = f"lgb{self._mark}"

    def __enter__(self) -> Network:
        try:
            _ip("link", "add", self._bridge, "type", "bridge")
            _ip("link", "set", self._bridge, "up")
            for node in range(self.hub + 1):
                self._add(node)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def name(self, node: int) -> str:
        """The namespace of a node."""
        return f"lastgood-{self._mark}-{node}"

    def address(self, node: int) -> str:
        return f"10.77.0.{node + 1}"

    def cut(self, node: int) -> None:
        """Take the link of a node down. No process of the node is notified: its connections receive nothing more."""
        _ip("link", "set", self._end(node), "down")

    def mend(self, node: int) -> None:
        """Bring the link of a node up again."""
        _ip("link", "set", self._end(node), "up")

    def slow_down(self, node: int, megabits: int) -> None:
        """Limit the link of a node to so many megabits a second, in each direction. Needs the command `tc`."""
        self._queue(node, "add", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "20ms")

    def speed_up(self, node: int) -> None:
        """End what `slow_down` has begun."""
        self._queue(node, "del")

    def processes(self, node: int) -> list[int]:
        """The processes that run in the namespace of a node."""
        listed = subprocess.run(["ip", "netns", "pids", self.name(node)], check=True, capture_output=True, text=True)
        return [int(one) for one in listed.stdout.split()]

    def kill(self, node: int) -> None:
        """Kill every process of a node. Those that this process has started are its to wait for."""
        for one in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)

    def sent_between_nodes(self) -> int:
        """The bytes that all nodes have sent to each other, by the counters of the interfaces."""
        return sum(map(self._sent, range(self.hub))) - self._received(self.hub)

    def received_among(self, nodes: Sequence[int]) -> int:
        """The bytes that these nodes have received from each other; what others send to the hub counts as sent to them.

        What they send to others does not count.
        """
        others = [one for one in range(self.hub + 1) if one not in nodes]
        return sum(map(self._received, nodes)) - sum(map(self._sent, others))

    def _sent(self, node: int) -> int:
        return _counter(self._end(node), "rx_bytes")  # a counter of the end at the bridge

    def _received(self, node: int) -> int:
        return _counter(self._end(node), "tx_bytes")

    def _end(self, node: int) -> str:
        return f"lg{self._mark}n{node}"

    def _queue(self, node: int, act: str, *arguments: str) -> None:
        """Change the queue of the packets that a node sends, and of those that it receives."""
        for where, device in ((["-n", self.name(node)], INTERFACE), ([], self._end(node))):
            command = ["tc", *where, "qdisc", act, "dev", device, "root", *arguments]
            subprocess.run(command, check=True, capture_output=True)

    def _add(self, node: int) -> None:
        name, end = self.name(node), self._end(node)
        _ip("netns", "add", name)
        _ip("link", "add", end, "type", "veth", "peer", "name", INTERFACE, "netns", name)
        _ip("link", "set", end, "master", self._bridge, "up")
        _ip("-n", name, "addr", "add", f"{self.address(node)}/24", "dev", INTERFACE)
        _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", name, "link", "set", INTERFACE, "up")

    def _remove(self) -> None:
        for node in range(self.hub + 1):
            subprocess.run(["ip", "netns", "del", self.name(node)], capture_output=True)
            subprocess.run(["ip", "link", "del", self._end(node)], capture_output=True)  # of a namespace still in use
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)


def enter(name: str) -> None:
    """Move the calling thread, and the threads and processes that it starts later, into a network namespace.

    `ip netns exec` is avoided: it also makes a mount namespace, which keeps the mounts of other tests busy.
    """
    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"the namespace {name} cannot be entered")


def _counter(interface: str, name: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/{name}").read_text())


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)

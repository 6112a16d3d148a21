"""The place of this node in an attempt, and what the supervisor needs of the nodes of its job; a job of one node.

SeveralNodes (nodes.py) is the other implementation. Decides nothing.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple, Protocol

import msgspec

from ..errors import Refused
from ..policy import membership as policy
from ..policy.hang import Signs
from ..records import Record

TOUCH_SECONDS = 1.0
"""how often this node shows that it lives while it waits for something of its own: others would take it for lost"""
Kind = Literal["failure", "follower", "timeout", "hang", "lost", "grow", "moved"]


class Placement(NamedTuple):
    """The place of this node in an attempt. `first_rank`: of its ranks. `world`: ranks of all nodes. `address`, `port`:
    where the ranks find each other; port 0: nobody has chosen one yet."""

    node: int
    nodes: int
    first_rank: int
    world: int
    address: str
    port: int


class Notice(Record, frozen=True, kw_only=True):
    """Why an attempt is over, or is to end. `lost`: numbers of the nodes that do not answer.

    "failure": a rank of another node has failed; "follower": so it seems, because of another one; "timeout": it has
    waited for other ranks for too long; "hang": ranks hang; "lost": a node is lost; "grow": more nodes wait, so the
    ranks are asked to save and to end; "moved": it was lived before the store of the nodes moved, and has no verdict.
    """

    kind: Kind
    lost: list[int] = msgspec.field(default_factory=list)


class NodeInfo(Record, frozen=True, kw_only=True):
    """A node of a round. `node_rank`: as --node-rank says; None: any. `address`, `holds_store`: as in Joined. `job`: an
    id of the job to which it has belonged so far, the same on all nodes of it. `past`: where the store can move."""

    host: str
    ranks: int
    node_rank: int | None
    address: str
    job: str = ""
    holds_store: bool = False
    past: policy.Past = policy.Past()


class Nodes(Protocol):
    """What the supervisor needs of the nodes of its job. The methods are those of SeveralNodes."""

    job: str

    @property
    def spares(self) -> policy.Spares | None: ...
    @property
    def world(self) -> int: ...
    def join(self, job: str) -> str | None: ...
    def touch(self) -> None: ...
    def begin(self, number: int) -> Placement | Notice: ...
    def notice(self, now: float, signs: Sequence[Signs]) -> Notice | None: ...
    def others(self, now: float) -> list[Signs]: ...
    def over(self, notice: Notice) -> None: ...
    def reports(self, mine: str) -> dict[int, str] | None: ...
    def verdict(self, mine: str | None) -> str | None: ...
    def next_round(self, leaving: Collection[int]) -> policy.Next: ...
    def lost_text(self) -> tuple[int | None, str] | None: ...
    def of_rank(self, rank: int) -> NodeInfo: ...
    def left(self, nodes: Sequence[int]) -> None: ...
    def leave(self, last: bool) -> None: ...
    def end(self) -> None: ...
    @property
    def excluded(self) -> bool: ...


class OneNode:
    """The only node of its job. `info`: this node. `master`: address and port; None: a new one each time."""

    def __init__(self, info: NodeInfo, master: tuple[str, int | None]) -> None:
        self._info, self._master, self.world, self.job = info, master, info.ranks, ""

    def join(self, job: str) -> None:
        """Nothing: no other node has published anything."""
        self.job = job

    def touch(self) -> None:
        """Nothing: no other node waits for a sign of life."""

    def begin(self, number: int) -> Placement:
        """The place in an attempt."""
        address, port = self._master
        address = address.removeprefix("[").removesuffix("]")  # as torchrun writes an IPv6 address
        return Placement(0, 1, 0, self.world, address, port or free_port(address))

    def notice(self, now: float, signs: Sequence[Signs]) -> None:
        """Nothing: there is no other node."""

    def others(self, now: float) -> list[Signs]:
        """Nothing: there are no other ranks."""
        return []

    def over(self, notice: Notice) -> None:
        """Nothing: nobody else has to know."""

    def reports(self, mine: str) -> dict[int, str]:
        """The reports of all nodes."""
        return {0: mine}

    def verdict(self, mine: str | None) -> str | None:
        """The decision."""
        return mine

    def next_round(self, leaving: Collection[int]) -> policy.Next:
        """The ranks start again here, unless this node is to end."""
        return policy.next_round(1, (), leaving, 0, policy.Bounds())

    def lost_text(self) -> None:
        """Nothing: no other node can be lost."""

    def of_rank(self, rank: int) -> NodeInfo:
        """This node."""
        return self._info

    excluded, spares = False, None

    def left(self, nodes: Sequence[int]) -> None:
        """Nothing: there is no other node."""

    def leave(self, last: bool) -> None:
        """Nobody waits for this node."""

    def end(self) -> None:
        """Nothing is held."""


def order(infos: Sequence[NodeInfo]) -> list[int]:
    """The nodes in the order of --node-rank where they have one. Raises Refused if two have the same."""
    claimed = [one.node_rank for one in infos if one.node_rank is not None]
    if len({*claimed}) != len(claimed):
        twice = next(one for one in claimed if claimed.count(one) > 1)
        hosts = ", ".join(one.host for one in infos if one.node_rank == twice)
        raise Refused(
            f"several nodes have --node-rank {twice}: {hosts}",
            safe="No rank was started.",
            todo="Give each node a number of its own, from 0 on (with --rdzv-backend static, the default, a node that "
            "is given none has 0), or use --rdzv-backend c10d, which needs none.",
        )
    return sorted(range(len(infos)), key=lambda one: (infos[one].node_rank is None, infos[one].node_rank or 0, one))


def reached(published: str, first: NodeInfo, endpoint: str) -> str:
    """The address at which this node reaches node 0, which has published one. `first`: node 0. `endpoint`: where this
    node finds the store. A node 0 that was started with --master-addr localhost knows no address for others: then it
    is the host of the endpoint, because it holds the store there."""
    if not first.holds_store or not is_loopback(published):
        return published
    host = endpoint.rpartition(":")[0].strip("[]") or endpoint
    return published if is_loopback(host) else host  # guard: master-is-reached-from-other-nodes


def is_loopback(host: str) -> bool:
    """Whether a name or an address means the machine that uses it, on every machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def free_port(address: str) -> int:
    """A port of this machine that nobody uses now."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as one:
            one.bind((address, 0))
            return int(one.getsockname()[1])
    except OSError as error:
        raise Refused(
            f"{address} is no address of this machine: {error}",
            safe="No rank was started.",
            todo="Correct --local-addr, or --master-addr where there is one node.",
        ) from error

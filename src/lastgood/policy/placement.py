"""Which nodes hold the copies of which node's part, and which nodes share parity. Pure.

Nodes form groups of k that hold each other's copies, as in Gemini (SOSP'23, section 4): of all ways to place k - 1
copies, this one has the fewest sets of k nodes whose common failure loses a part. Where the number of nodes is no
multiple of k, larger groups are rings, in which each node's copies lie on the next k - 1 nodes.

The nodes of a group lie in different failure domains. Where the domains do not allow this, in this order: a node is
attached to a group that holds its copies and that it holds none for, up to `limit`; then a part and its copies share
domains, as few as possible of them in one domain. `Placement.nodes_survived` and `Placement.domains_survived` are what
this leaves. With a `previous` placement, groups whose nodes are all there stay as they are, and a new node takes the
place of a lost one.

Every node computes the same result: it depends on names, domains and `previous`, not on the order of the nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .arguments import is_whole, require
from .rings import Division, divided


@dataclass(frozen=True)
class Node:
    """A machine that holds parts of a state.

    `name`: a text that no other node has. `domain` (default empty): the failure domain, such as a rack: nodes with the
    same text can fail at the same moment. A node with an empty text is a domain of its own.

    Raises Refused if the name is empty or one of both is no text. Example: `Node("node07", "rack2")`.
    """

    name: str
    domain: str = ""

    def __post_init__(self) -> None:
        require(
            isinstance(self.name, str) and self.name != "",
            f"Node(name={self.name!r})",
            "Give a text, not an empty one.",
        )
        require(isinstance(self.domain, str), f"Node(domain={self.domain!r})", 'Give a text, or "" for none.')


@dataclass(frozen=True)
class Placement:
    """Where copies are.

    `holders`: node -> the k - 1 other nodes that hold copies of its part. `nodes_survived`: the number of nodes that
    may fail, whichever they are, without the loss of a part: k - 1. `domains_survived`: the same number of whole
    domains.
    """

    holders: Mapping[str, tuple[str, ...]]
    nodes_survived: int
    domains_survived: int


@dataclass(frozen=True)
class ParityGroups:
    """Which nodes share parity.

    `groups`: the nodes of each group, in order. In a group of k + m nodes, each stripe has k cells of data and m cells
    of parity on its nodes. In a larger group a stripe begins at each node and lies on it and the next k + m - 1 nodes,
    where the last is followed by the first. `k`, `m`: cells of data and of parity in a stripe. `nodes_survived`: the
    number of nodes that may fail, whichever they are, without a loss: m. `domains_survived`: the same number of whole
    domains.
    """

    groups: tuple[tuple[str, ...], ...]
    k: int
    m: int
    nodes_survived: int
    domains_survived: int


def copies(nodes: Collection[Node], k: int, previous: Placement | None = None, limit: int | None = None) -> Placement:
    """Place k - 1 copies of each node's part on other nodes, in other failure domains wherever the domains allow it.

    `nodes`: all nodes, at least k, with different names. `k`: the number of nodes that have a part, its own node
    included; at least 1. `previous` (default None): an earlier placement, of which most stays when few nodes have
    changed. `limit` (default 2 * (k - 1)): the number of copies beyond the average of k - 1 that a node may hold so
    that copies lie in other domains; 0: each node holds exactly k - 1 copies.

    Raises Refused for values that cannot be meant. Example: with nodes a and b in one rack and c and d in another,
    `copies(nodes, 2).holders` is `{"a": ("c",), "c": ("a",), "b": ("d",), "d": ("b",)}`.
    """
    domains = _domains(nodes)
    _require_window(k, "k", len(domains), 1)
    require(limit is None or is_whole(limit, 0), f"limit={limit!r}", "Give a whole number of at least 0, or None.")
    extra = 2 * (k - 1) if limit is None else limit
    if k == 1:
        return Placement(dict.fromkeys(sorted(domains), ()), 0, 0)
    former = Division() if previous is None else _division(previous.holders)
    every = divided(domains, k, extra, former).windows(k)
    survived = min(_domains_survived(one, domains, k - 1) for one in every)
    return Placement({one[0]: one[1:] for one in every}, k - 1, survived)


def groups(nodes: Collection[Node], k: int, m: int, previous: ParityGroups | None = None) -> ParityGroups:
    """Divide the nodes into groups that share parity, with the nodes of a group in as many domains as possible.

    `nodes`: all nodes, at least k + m, with different names. `k`, `m`: the cells of data and of parity in a stripe; at
    least 1 each. `previous` (default None): earlier groups, of which most stay when few nodes have changed. If the
    number of nodes is no multiple of k + m, some groups are larger.

    Raises Refused for values that cannot be meant. Example: `groups(nodes, 4, 2).domains_survived` is 1 for 12 nodes
    in three racks of four, because each group of six has two nodes in each rack.
    """
    domains = _domains(nodes)
    for name, value in (("k", k), ("m", m)):
        require(is_whole(value, 1), f"{name}={value!r}", "Give a whole number of at least 1.")
    _require_window(k + m, "k + m", len(domains), 2)
    former = Division() if previous is None else Division([list(ring) for ring in previous.groups])
    found = divided(domains, k + m, 0, former)
    survived = min(_domains_survived(one, domains, m) for one in found.windows(k + m))
    return ParityGroups(tuple(map(tuple, found.rings)), k, m, m, survived)


def missing_copies(held: Mapping[str, Collection[int]], placement: Placement, k: int) -> list[tuple[str, str, int]]:
    """What is to be sent so that each part lies on k nodes: (the node that sends, the node that receives, the part).

    `held`: node -> the parts that it has now. `placement`: of these nodes, or of those among them that can send and
    receive. A part that lies on fewer than k nodes goes to the nodes that hold copies of its first holder, and if these
    have it already, to others. A part that no node of the placement has cannot be sent. Sorted.
    Example: `missing_copies({"a": {0}, "b": {1}}, copies(nodes, 2), 2)`.
    """
    orders = list[tuple[str, str, int]]()
    for part in sorted({part for parts in held.values() for part in parts}):
        have = sorted(name for name, parts in held.items() if part in parts)
        sender = next((name for name in have if name in placement.holders), None)
        if sender is None:  # guard: only-placed-nodes-send
            continue
        others = [*placement.holders[sender], *sorted(placement.holders)]
        wanted = [name for name in dict.fromkeys(others) if name not in have]
        orders += [(sender, name, part) for name in wanted[: max(k - len(have), 0)]]
    return orders


def _domains(nodes: Collection[Node]) -> dict[str, str]:
    """Node -> domain. A node without a domain gets a text that no other node can have."""
    listed: Any = nodes
    fits = isinstance(listed, Collection) and all(isinstance(one, Node) for one in listed)
    require(fits, f"nodes={nodes!r}", "Give a collection of Node.")
    again = sorted(name for name, count in Counter(one.name for one in nodes).items() if count > 1)
    # guard: node-names-differ
    require(not again, f"two nodes are named {', '.join(again)}", "Give each node a name of its own.")
    return {one.name: f"domain {one.domain}" if one.domain else f"node {one.name}" for one in nodes}


def _require_window(size: Any, name: str, count: int, least: int) -> None:
    require(is_whole(size, least), f"{name}={size!r}", f"Give a whole number of at least {least}.")
    few = f"there are {count} nodes, and {name} is {size}"
    require(count >= size, few, f"Give at least {size} nodes, or a smaller {name}.")


def _division(holders: Mapping[str, tuple[str, ...]]) -> Division:
    """The division that a placement was made of: the first holder of each node is the next one in its ring."""
    found, passed = Division(), set[str]()
    for first in sorted(holders):
        way: dict[str, None] = {}
        name = first
        while name in holders and holders[name] and name not in passed and name not in way:
            way[name] = None
            name = holders[name][0]
        if name in way:
            walked = list(way)
            found.rings.append(walked[walked.index(name) :])
        passed.update(way)
    in_rings = {name for ring in found.rings for name in ring}
    found.attached = {name: others for name, others in holders.items() if name not in in_rings}
    return found


def _domains_survived(names: Sequence[str], domains: Mapping[str, str], losses: int) -> int:
    """The number of domains that may fail, whichever they are, if at most `losses` of these nodes may."""
    survived = 0
    for _, count in Counter(domains[name] for name in names).most_common():
        losses -= count
        if losses < 0:
            break
        survived += 1
    return survived

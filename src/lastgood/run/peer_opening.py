"""How the nodes of a job find each other's agents: once, when the run is opened, through the store of the job.

    coordinator   a random id of the job and a key -> all ranks
    each leader   its agent listens with that key; its name, failure domain and address -> the coordinator -> all ranks
                  if it does not listen: why; and whether it has certificates

Every process that can read the store of the job can read the key. An address is that of the interface that leads to
MASTER_ADDR; LASTGOOD_ADDRESS names another one. LASTGOOD_WIRE=nixl chooses NIXL for the bytes; peer_security.py has the
variables of certificates.

A node whose agent does not listen is left out, and one without certificates where others have them: the others make
copies, or parity, among themselves. What it writes lies on that node only, so these copies make no save survive the
loss of a node (node_copies.place_of). The coordinator reports each node that is left out, with the reason. With fewer
than two nodes that listen there are no copies. The next opening of the run asks every agent again.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .. import reporting
from ..coordination.single_rank import AnyTopic
from ..errors import Refused
from ..format import parity_layout
from ..io.machine import machine
from ..wire.nixl import WIRES
from .agent_link import AgentLink
from .agent_messages import Serve
from .peer_security import VARIABLES, own_certificates
from .peers import PeerNode, PeerTable
from .planned_save import RunOptions

ADDRESS, WIRE = "LASTGOOD_ADDRESS", "LASTGOOD_WIRE"
SLURM_PATH, SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
"""The switches above a node and the node, joined by points; and which part of it is what: "switch.switch.node"."""
LOOPBACK = "127.0.0.1"
CERTIFIED = "certified"
"""Whether a node has certificates, beside the fields of its PeerNode."""


def agreed(agent: AgentLink | None, leader: int, options: RunOptions, topic: AnyTopic) -> PeerTable | None:
    """The nodes of the job whose agents listen; None if there are fewer than two.

    All ranks call it, and return the same. `agent`: at a leader, that of its node. `leader`: the leader of this node.
    With fewer nodes than copies, each node has one. Raises Refused where the failure domain of a node has no label.
    """
    spread = options.spread
    job, key = topic.agree(None, lambda _: [secrets.token_hex(8), secrets.token_hex(32)])
    mine: dict[str, object] | str | None = None
    if agent is not None:
        node, host = machine(), own_address()
        if spread and not label(spread):
            raise Refused(
                f"spread={spread!r}, and node {node} has no {variable(spread)}",
                safe="Nothing was touched.",
                todo=f"Set {variable(spread)} on every node to its {spread}, or leave spread= out.",
            )
        certificates = own_certificates()
        serve = Serve(job=job, key=key, node=node, host=host, port=0, wire=own_wire(), certificates=certificates)
        port, problem = agent.serve(serve)
        if port:
            listens = PeerNode(leader=leader, name=node, domain=label(spread), host=host, port=port)
            mine = {**msgspec.to_builtins(listens), CERTIFIED: certificates is not None}
        else:
            mine = f"the agent of node {node} does not listen at {host}: {problem.rstrip('.')}"
    posted = topic.agree(mine, _decided)
    nodes, left_out = msgspec.convert(posted, tuple[list[PeerNode], list[str]])
    if agent is not None and leader == 0:
        for text in _reports(len(nodes), left_out, options):
            reporting.warning(text)
    return PeerTable(job=job, key=key, nodes=nodes) if len(nodes) > 1 else None


def _decided(posts: Sequence[object]) -> tuple[list[object], list[str]]:
    """The nodes that listen, and for each other one why it does not, or why these would refuse its connections."""
    nodes = [one for one in posts if isinstance(one, dict)]
    left_out = [one for one in posts if isinstance(one, str)]
    certified = [one for one in nodes if one.get(CERTIFIED)]
    lacking = [one for one in nodes if one not in certified] if certified else []  # guard: certificates-on-all-nodes
    for one in lacking:
        variables = f"{', '.join(VARIABLES[:-1])} and {VARIABLES[-1]}"
        left_out.append(
            f"node {one['name']} lacks {variables}, which node {certified[0]['name']} has: set them on every node, or "
            "on none"
        )
    own = [one for one in nodes if one not in lacking]
    return [{name: value for name, value in one.items() if name != CERTIFIED} for one in own], left_out


def _reports(count: int, left_out: Sequence[str], options: RunOptions) -> list[str]:
    """What the nodes of the job cannot keep. `count`: of the nodes that listen. `left_out`: why the others do not."""
    why, copies = "; ".join(left_out), options.copies_among_nodes
    if count < 2:
        return [f"nothing is kept on other nodes: {why or 'there is one node only'}. The run goes on."]
    found = list[str]()
    if left_out:
        found.append(
            f"{why}. What is saved on such a node lies on that node only: until a place below has it, "
            f"no save survives the loss of that node. The other {count} nodes keep each other's files. The run goes "
            "on, and its next opening asks every node again."
        )
    there = f"{count} nodes listen" if left_out else f"there are {count} nodes"
    if options.node_parity is not None and options.code_among(count) is None:
        made, least = min(copies, count), sum(parity_layout.parsed(options.node_parity))
        found.append(
            f"parity={options.node_parity!r} needs {least} nodes, and {there}: {made} copies of each file are made "
            f"instead, which take {made} times the space."
        )
    elif count < copies:
        found.append(f"copies={copies}, and {there}: each of them has the files of all of these.")
    return found


def own_wire(environ: Mapping[str, str] = os.environ) -> str:
    """What carries bytes between this node and others: "sockets", or what LASTGOOD_WIRE names. Raises Refused."""
    wire = environ.get(WIRE) or "sockets"
    if wire not in WIRES:
        raise Refused(
            f"{WIRE}={wire!r} is not one of {', '.join(WIRES)}",
            safe="Nothing was touched.",
            todo="Correct it on every node, or leave it out.",
        )
    return wire


def own_address(environ: Mapping[str, str] = os.environ) -> str:
    """The address of this node at which other nodes reach it: that of the interface that leads to MASTER_ADDR."""
    if named := environ.get(ADDRESS):
        return named
    found = list[tuple[int, Any]]()
    with contextlib.suppress(OSError):
        listed = socket.getaddrinfo(environ.get("MASTER_ADDR") or LOOPBACK, 9, type=socket.SOCK_DGRAM)
        found = sorted(((one[0], one[4]) for one in listed), key=lambda one: one[0] != socket.AF_INET)
    for family, at in found:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(at)  # sends nothing
            return str(probe.getsockname()[0])
    return LOOPBACK


def label(spread: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The failure domain of this node: the value of LASTGOOD_RACK for spread="rack". Empty without `spread`.

    If that is not set, the switch that Slurm's topology plugin names for this node counts as its rack.
    """
    if not spread:
        return ""
    return environ.get(variable(spread)) or (_switch(environ) if spread == "rack" else "")


def _switch(environ: Mapping[str, str]) -> str:
    """The switches above this node, as Slurm names them: of "s0.s4.n17" it is "s0.s4". Empty if it names none."""
    if not environ.get(SLURM_PATTERN, "").endswith("switch.node"):
        return ""
    return environ.get(SLURM_PATH, "").rpartition(".")[0]


def variable(spread: str) -> str:
    """The environment variable with the label of a failure domain."""
    return f"LASTGOOD_{spread.upper()}"

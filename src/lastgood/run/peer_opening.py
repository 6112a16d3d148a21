"""How the nodes of a job find each other's agents: once, when the run is opened, through the store of the job.

    coordinator   a random id of the job and a key -> all ranks
    each leader   its agent listens with that key; its name, failure domain and address -> the coordinator -> all ranks

Every process that can read the store of the job can read the key. An address is that of the interface that leads to
MASTER_ADDR; LASTGOOD_ADDRESS names another one. LASTGOOD_WIRE=nixl chooses NIXL for the bytes; peer_security.py has the
variables of certificates. If an agent of any node does not listen, no copies are made, and that is reported.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Mapping, Sequence

import msgspec

from .. import reporting
from ..coordination.single_rank import AnyTopic
from ..errors import Refused
from ..format import parity_layout
from ..io.machine import machine
from .agent_link import AgentLink
from .agent_messages import Serve
from .peer_security import own_certificates
from .peers import PeerNode, PeerTable
from .planned_save import RunOptions

ADDRESS, WIRE = "LASTGOOD_ADDRESS", "LASTGOOD_WIRE"
SLURM_PATH, SLURM_PATTERN = "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"
"""The switches above a node and the node, joined by points; and which part of it is what: "switch.switch.node"."""
LOOPBACK = "127.0.0.1"


def agreed(agent: AgentLink | None, leader: int, options: RunOptions, topic: AnyTopic) -> PeerTable | None:
    """The nodes of the job with their agents; None if there is one node only, or if an agent does not listen.

    All ranks call it. `agent`: at a leader, that of its node. `leader`: the leader of this node. With fewer nodes than
    copies, each node has one. Raises Refused where the failure domain of a node has no label.
    """
    copies, spread = options.copies_among_nodes, options.spread
    job, key = topic.agree(None, lambda _: [secrets.token_hex(8), secrets.token_hex(32)])
    mine: PeerNode | str | None = None
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
        port = agent.serve(serve)
        if port:
            mine = PeerNode(leader=leader, name=node, domain=label(spread), host=host, port=port)
        else:
            mine = f"the agent of node {node} does not listen at {host}"
    posted = topic.agree(msgspec.to_builtins(mine), _decided)
    nodes, problem = msgspec.convert(posted, tuple[list[PeerNode], str])
    if agent is not None and leader == 0:
        if problem:
            reporting.warning(f"nothing is kept on other nodes: {problem}. The run goes on.")
        elif options.node_parity is not None and options.code_among(len(nodes)) is None:
            count, least = min(copies, len(nodes)), sum(parity_layout.parsed(options.node_parity))
            reporting.warning(
                f"parity={options.node_parity!r} needs {least} nodes, and there are {len(nodes)}: {count} copies of "
                f"each file are made instead, which take {count} times the space."
            )
        elif len(nodes) < copies:
            reporting.warning(f"copies={copies}, and there are {len(nodes)} nodes: each of them has every file.")
    return None if problem else PeerTable(job=job, key=key, nodes=nodes)


def _decided(posts: Sequence[object]) -> tuple[list[object], str]:
    """The nodes that listen, and why no copies are made, or ""."""
    problems = [str(one) for one in posts if isinstance(one, str)]
    nodes = [one for one in posts if one is not None and not isinstance(one, str)]
    if not problems and len(nodes) < 2:
        problems = ["there is one node only"]
    return nodes, "; ".join(problems)


def own_wire(environ: Mapping[str, str] = os.environ) -> str:
    """What carries bytes between this node and others: "sockets", or what LASTGOOD_WIRE names."""
    return environ.get(WIRE) or "sockets"


def own_address(environ: Mapping[str, str] = os.environ) -> str:
    """The address of this node at which other nodes reach it: that of the interface that leads to MASTER_ADDR."""
    if named := environ.get(ADDRESS):
        return named
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((environ.get("MASTER_ADDR") or LOOPBACK, 9))  # sends nothing
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

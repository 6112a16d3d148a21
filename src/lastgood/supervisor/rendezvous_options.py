"""The options of `lastgood run` about several nodes, which are those of torchrun, as settings of a rendezvous. Pure.

torch's backend c10d is the engine. "static", torchrun's default with --node-rank and --master-addr, is made of it too:
the node of that address holds the store, and the nodes keep the order that their ranks say.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import NamedTuple

from ..errors import Refused
from ..policy.membership import Bounds
from .membership import Settings
from .option_values import meant, whole

BACKENDS = ("static", "c10d")
CONFIGURATION = (
    "close_timeout",
    "heartbeat_timeout",
    "is_host",
    "join_timeout",
    "keep_alive_interval",
    "keep_alive_max_attempt",
    "last_call_timeout",
    "read_timeout",
    "timeout",
)
"""the keys of --rdzv-conf that c10d takes over TCP, and the one of torchrun's static"""
ADDRESS = "127.0.0.1"
"""torchrun's default of --master-addr"""
KEEP_ALIVE = {"keep_alive_interval": "2", "keep_alive_max_attempt": "5"}
"""A node is lost after ten seconds without a sign of life, and not after fifteen as for torchrun."""
SILENT_SECONDS, SILENT_TIMES = 30.0, 3
"""A membership ends if its supervisor is stopped or hangs for so long, and for so many times as nodes may be silent."""
ENDPOINT_PORT = 29400
"""torchrun's default of the port of --rdzv-endpoint"""
LAST_PORT = 65535
_ENDPOINT = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+(%[^\s\]]+)?\]|[^\s:\[\]]+)(:(?P<port>[0-9]+))?")
"""one of several endpoints: a name, an IPv4 address, or an IPv6 address in brackets, and perhaps a port"""
STATIC_PORT = 29500
"""torchrun's default of --master-port"""


class Rendezvous(NamedTuple):
    """`settings`: for torch. `node_rank`: of this node; None: any. `node_timeout_seconds`: without a sign of life,
    after which a node is lost. `spares`: nodes that are expected in reserve."""

    settings: Settings
    node_rank: int | None
    node_timeout_seconds: float
    spares: int = 0


class Options(NamedTuple):
    """What was given. `master`: address and port; None: not given."""

    nnodes: str
    backend: str
    endpoint: str
    run_id: str
    configuration: str
    node_rank: int
    master: tuple[str, int | None]
    local_address: str
    standalone: bool
    spares: int


def rendezvous(given: Options) -> Rendezvous | None:
    """The rendezvous of a job of several nodes; None: it has one. Raises Refused for what cannot be meant."""
    bounds = _bounds(given.nnodes)
    if given.standalone and bounds.most == 1 and not given.spares:
        return None  # what else is said of the rendezvous has no effect then, as under torchrun
    if given.backend not in BACKENDS:
        raise _refused(f"--rdzv-backend {given.backend} is not done", "Use c10d, or static with --node-rank.")
    if bounds.most == 1:
        if given.node_rank and given.backend == "static":
            raise _refused(f"--node-rank {given.node_rank} with one node", "Give --nnodes too.")
        if given.spares:
            what = f"--spares {given.spares} with one node"
            raise _refused(what, "Give --nnodes too: the nodes that train, without those in reserve.")
        _configuration(given.configuration)  # raises what is wrong with it: the policy file is that of several nodes
        return None
    if given.standalone:
        raise _refused(f"--standalone and --nnodes {given.nnodes} contradict each other", "Leave one of them out.")
    static = given.backend == "static"
    if static and not 0 <= given.node_rank < bounds.most + given.spares:
        and_spares = f" and {given.spares} in reserve" if given.spares else ""
        raise _refused(f"--node-rank {given.node_rank} of {bounds.most} nodes{and_spares}", "Count nodes from 0.")
    configuration = KEEP_ALIVE | _configuration(given.configuration)
    timeout = configuration.pop("timeout", None)
    if static and timeout is not None:
        configuration.setdefault("join_timeout", timeout)
    endpoint, stores = given.endpoint, _stores(given.endpoint, configuration)
    if static:
        address, port = given.master
        endpoint = endpoint or f"{address}:{port or STATIC_PORT}"
        if not stores:  # by its number, as torchrun does it: names and addresses of a node do not always show it
            configuration.setdefault("is_host", str(given.node_rank == 0).lower())  # guard: node-0-holds-static-store
    interval, attempts = (_whole(name, configuration[name]) for name in KEEP_ALIVE)
    settings = Settings(
        endpoint=stores[0] if stores else endpoint or f"localhost:{ENDPOINT_PORT}",
        run_id=given.run_id,
        least=bounds.least,
        most=bounds.most,
        local_address=given.local_address,
        configuration=configuration,
        silent_seconds=max(SILENT_SECONDS, SILENT_TIMES * interval * attempts),
        stores=stores,
    )
    return Rendezvous(settings, given.node_rank if static else None, float(interval * attempts), given.spares)


def without_effect(given: Options) -> list[str]:
    """A line about each option that is given and has no effect, as torchrun warns of some of them."""
    several, c10d, lines = _bounds(given.nnodes).most > 1, given.backend != "static", list[str]()
    if c10d and given.node_rank:
        lines.append(f"--node-rank {given.node_rank} has no effect with --rdzv-backend {given.backend}")
    if not several:
        if given.local_address:
            lines.append(f"--local-addr {given.local_address} has no effect with one node")
        if "," in given.endpoint:
            lines.append(f"--rdzv-endpoint {given.endpoint} has no effect with one node")
        return lines
    address, port = given.master
    instead = f"with --rdzv-backend {given.backend}" if c10d else f"beside --rdzv-endpoint {given.endpoint}"
    if address != ADDRESS and (c10d or given.endpoint):
        lines.append(f"--master-addr {address} has no effect {instead}" + (": --rdzv-endpoint has" if c10d else ""))
    if port is not None and (c10d or given.endpoint):
        lines.append(f"--master-port {port} has no effect {instead}")
    if c10d and "timeout" in _configuration(given.configuration):
        lines.append(f"--rdzv-conf timeout has no effect with --rdzv-backend {given.backend}: join_timeout has")
    return lines


def _bounds(text: str) -> Bounds:
    least, _, most = text.partition(":")
    try:
        return Bounds(int(least), int(most or least))
    except ValueError:
        raise _refused(f"--nnodes {text}", "Give a number of nodes, or the least and the most: 2:4.") from None


def _stores(endpoints: str, configuration: Mapping[str, str]) -> tuple[str, ...]:
    """The endpoints to which the store can move, each with its port; empty: one was given, or none."""
    found = [one.strip() for one in endpoints.split(",")]
    if len(found) == 1:
        return ()
    if "is_host" in configuration:
        raise _refused("--rdzv-conf is_host with several endpoints", "Leave it out.")
    stores = [_endpoint(one) for one in found]
    twice = [one for one in stores if stores.count(one) > 1]
    if twice:
        raise _refused(f"--rdzv-endpoint names {twice[0]} twice", "Give each node that can hold the store once.")
    return tuple(stores)


def _endpoint(text: str) -> str:
    """One of several endpoints, with its port."""
    found = _ENDPOINT.fullmatch(text)
    if found is None or not 0 < int(found["port"] or ENDPOINT_PORT) <= LAST_PORT:  # guard: endpoint-has-a-host
        todo = "Give HOST or HOST:PORT of each node that can hold the store, and an IPv6 address in brackets: [fd00::1]"
        raise _refused(f"--rdzv-endpoint: {text!r} is no endpoint", f"{todo}.")
    return f"{found['host']}:{int(found['port'] or ENDPOINT_PORT)}"


def _configuration(text: str) -> dict[str, str]:
    """The keys and values of --rdzv-conf."""
    found = dict[str, str]()
    for one in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = one.partition("=")
        if key not in CONFIGURATION or not equals:
            raise _refused(f"--rdzv-conf {one}", meant(key, CONFIGURATION) or f"It takes {', '.join(CONFIGURATION)}.")
        found[key] = str(_whole(key, value)) if key != "is_host" else value
    return found


def _whole(key: str, value: str) -> int:
    try:
        return whole(1)(value)
    except argparse.ArgumentTypeError:
        raise _refused(f"--rdzv-conf {key}={value}", "Give a whole number of at least 1.") from None


def _refused(what: str, todo: str) -> Refused:
    return Refused(what, safe="Nothing was started.", todo=todo)

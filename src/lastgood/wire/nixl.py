"""Windows over NIXL, the transfer library of NVIDIA, with UCX: remote memory access where the network has it.

Each connection has an agent of NIXL of its own, without threads of NIXL: it makes progress in the calls of the thread
that uses the connection, and everything of it ends with the connection. Only this file imports the package.

NIXL authenticates nobody. On a network with remote memory access its hardware lets a peer write the window only. Over
TCP, UCX writes where a peer says: whoever can connect to its ports can write all memory of this process. So the
transports of UCX have to be chosen by name.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import mmap
import os
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from .. import reporting
from ..errors import PeerDown, Refused
from ..extras import needed
from .messages import Offer
from .window import WINDOW_BYTES

TRANSPORTS = "UCX_TLS"
"""the environment variable in which UCX looks for the transports that it may use"""
VARIANTS = ("nixl_cu12", "nixl_cu13")
WIRES = ("sockets", "nixl")
LOG_LEVEL = "NIXL_LOG_LEVEL"
BACKEND, MEMORY, NOTHING_USED = "UCX", "DRAM", "Nothing that was received in part is used."


class Nixl:
    """Makes the windows of connections: the argument `windows` of `Channel` and `Server`.

    `environ`: the environment variables. Default: those of this process. Raises NotInstalled without the package, and
    Refused where the transports of UCX are not chosen, or cannot be used.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        with needed("nixl", "the wire nixl"):
            # The package `nixl` would import torch where that is built without CUDA, to choose between these two. Only
            # memory of the host is registered, so either will do.
            variants = (name for name in VARIANTS if importlib.util.find_spec(name))
            self._nixl: Any = importlib.import_module(next(variants, VARIANTS[0]))
        transports = chosen_transports(environ)
        if permits_tcp(transports):
            reporting.warning(
                f"{TRANSPORTS}={transports} permits TCP: whoever can connect to the ports of UCX on this machine can "
                "write all memory of this process. That is safe on a network with nobody else only."
            )
        if not environ.get(LOG_LEVEL):
            logging.getLogger("nixl").setLevel(logging.WARNING)  # it reports every agent on stdout
        try:
            self().close()
        except PeerDown as error:
            raise Refused(
                error.what,
                safe="Nothing was touched.",
                todo=f"{TRANSPORTS}={transports} has to name a transport of the network of this machine: rc,ud or tcp.",
            ) from error

    def __call__(self) -> NixlMemory:
        """A new window. Raises PeerDown."""
        return NixlMemory(self._nixl)


def chosen(wire: str) -> Nixl | None:
    """The windows of a wire that a user has named: "nixl"; "sockets" has none. Raises as `Nixl`, and Refused."""
    if wire not in WIRES:
        raise Refused(f"the wire {wire!r} is not one of {', '.join(WIRES)}", safe="Nothing was touched.")
    return Nixl() if wire == "nixl" else None


class NixlMemory:
    """See `window.Memory`."""

    def __init__(self, nixl: Any) -> None:
        self._map = mmap.mmap(-1, WINDOW_BYTES)
        self.view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._agent: Any = None
        self._transfer: Any = None
        self._state, self._peer, self._peer_address = "DONE", "", 0
        try:
            with _failing("no window can be made"):
                config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[BACKEND])
                self._agent = nixl.nixl_agent(secrets.token_hex(8), config)
                self._registered = self._agent.register_memory([(self._address, WINDOW_BYTES, 0, "")], MEMORY)
                self.offer = Offer(self._agent.get_agent_metadata(), self._address)
        except BaseException:
            self.close()
            raise

    def connect(self, offer: Offer) -> None:
        """See `window.Memory`."""
        with _failing("the other side cannot be reached"):
            self._peer = self._agent.add_remote_agent(offer.agent)
            self._peer_address = offer.address

    def write(self, start: int, length: int) -> None:
        """See `window.Memory`."""
        with _failing("a write failed"):
            # Both ranges have to lie in memory that was registered: that of the other side is in its offer.
            near, far = (
                self._agent.get_xfer_descs([(address + start, length, 0)], MEMORY)
                for address in (self._address, self._peer_address)
            )
            self._transfer = self._agent.initialize_xfer("WRITE", near, far, self._peer)
            self._state = self._agent.transfer(self._transfer)

    def written(self) -> bool:
        """See `window.Memory`."""
        with _failing("a write failed"):
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._transfer)
            if self._state == "ERR":
                raise RuntimeError("NIXL reports an error")
        return self._state == "DONE"

    def progress(self) -> None:
        """See `window.Memory`."""
        with _failing("receiving failed"):
            self._agent.get_new_notifs()

    def close(self) -> None:
        """See `window.Memory`."""
        self._transfer = self._agent = None  # the agent ends here, and with it all that it has registered
        self.view.release()
        self._map.close()


def chosen_transports(environ: Mapping[str, str]) -> str:
    """The transports that UCX may use. Raises Refused where none are named."""
    transports = environ.get(TRANSPORTS, "")
    if not transports:  # guard: nixl-transports-chosen
        raise Refused(
            f"the wire is NIXL, and {TRANSPORTS} is not set",
            safe="Nothing was touched.",
            todo=f"Set {TRANSPORTS} on every node: rc,ud on InfiniBand and RoCE, ^tcp for all but TCP. tcp is for "
            "networks with nobody else: whoever can connect could write all memory of this process.",
        )
    return transports


def permits_tcp(transports: str) -> bool:
    """Whether UCX may use TCP with this list of transports."""
    names = transports.removeprefix("^").split(",")
    return ("tcp" in names or "all" in names) != transports.startswith("^")


@contextlib.contextmanager
def _failing(what: str) -> Iterator[None]:
    """Errors of NIXL, which have no class in common, become PeerDown."""
    try:
        yield
    except Exception as error:
        raise PeerDown(
            f"NIXL: {what}: {error}",
            safe=NOTHING_USED,
            todo=f"Repeat the request. If this happens again, compare {TRANSPORTS} and UCX_NET_DEVICES of both nodes.",
        ) from error

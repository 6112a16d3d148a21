"""The store that this node holds for a job whose store can move (`--rdzv-endpoint` with several endpoints).

Each node whose address is in the list holds one from its beginning, in a process of its own (ranks/store_server.py).
It is used once the stores before it in the list are lost, and ends with the supervisor. Decides nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence

from .. import reporting
from ..io import os_errors, processes
from . import program

MODULE = "lastgood.ranks.store_server"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torch prints a page for each lost connection to a store; the supervisor reports it in one line."""


class HeldStore:
    """The process. `number`: of its endpoint in the list. `listening`: the socket on which it serves."""

    def __init__(self, number: int, listening: socket.socket) -> None:
        self.number = number
        with listening:
            self._process = subprocess.Popen(
                [*program.PYTHON, MODULE, str(listening.fileno()), str(os.getpid())],
                pass_fds=[listening.fileno()],
                env={**QUIET, **os.environ},
                start_new_session=True,
            )

    def end(self) -> None:
        """End the process."""
        processes.end_group(self._process)


def hold(endpoints: Sequence[str]) -> HeldStore | None:
    """Hold the store of the first endpoint that is of this machine, and whose port is free; None: there is none, which
    is reported if one is of this machine.

    Raises NoSpace or TierDown if the process cannot be started.
    """
    why = list[str]()
    for number, endpoint in enumerate(endpoints):
        host, port = parted(endpoint)
        if not _is_here(host):
            continue
        try:
            listening = _listening(port)
        except OSError as error:  # another node of this machine may hold it, as in tests
            why.append(f"{endpoint}: {error.strerror or error}")
            continue
        with os_errors.needed(f"the process of the store at {endpoint} cannot be started", ""):
            return HeldStore(number, listening)
    if why:
        reporting.warning(f"this node holds no store: it cannot listen at {'; '.join(why)}")
    return None


def parted(endpoint: str) -> tuple[str, int]:
    """Host and port of an endpoint, which has both."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def _is_here(host: str) -> bool:
    """Whether a name or address is one of this machine. Its own name may not be known to all others yet."""
    if host.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, *_, place in found:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as one:
            one.bind(place)
            return True
    return False


def _listening(port: int) -> socket.socket:
    """A socket that takes connections to all addresses of this machine. Raises OSError, as if the port is in use."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", port), backlog=512)

"""Ranks that are forked before they are needed: processes that have imported torch, and wait for the start of a rank.

    waiting process -> supervisor   READY, once it can become a rank at once
    supervisor -> waiting process   what the rank runs, with the descriptors of its stdout and stderr

Where there are CUDA devices each makes the context of its own one meanwhile, which a fork cannot pass on. Nothing of
the user's program runs before the start. A process that waits ends with its supervisor, as a rank does.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from .. import reporting
from . import framed

READY = b"1"
READY_SECONDS = 1.0
"""How long a process that is not ready yet is waited for: one that is forked now would have to get ready too."""
END_SECONDS = 5.0
"""How long the end of processes is waited for. One that waits for a device may never end; it has no other use."""


class _Waiting(NamedTuple):
    pid: int
    connection: socket.socket


class Ahead:
    """The processes that wait, as the supervisor sees them: its children, by the local rank that each becomes."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}

    def add(self, local: int, pid: int, connection: socket.socket) -> None:
        """A process waits for the start of this local rank. `connection`: to it, which is owned from now on."""
        self._waiting[local] = _Waiting(pid, connection)

    def start(self, local: int, message: bytes, descriptors: Sequence[int]) -> int:
        """Let the process that waits become a rank. Returns its process id; 0: there is none, or it cannot.

        If one is not ready in time, those for other ranks are ended too, so that nobody waits for a device again.
        """
        one = self._waiting.pop(local, None)
        if one is None:
            return 0
        in_time = bool(select.select([one.connection], [], [], READY_SECONDS)[0])
        with one.connection, contextlib.suppress(OSError):
            # guard: only-ready-process-becomes-rank
            if in_time and one.connection.recv(len(READY)) == READY:
                framed.send(one.connection, message, descriptors)
                return one.pid
        _end([one])
        if not in_time:
            self.close()
        return 0

    def close(self) -> None:
        """End the processes that wait."""
        waiting, self._waiting = [*self._waiting.values()], {}
        for one in waiting:
            one.connection.close()
        _end(waiting)  # guard: waiting-processes-ended


def _end(waiting: Sequence[_Waiting]) -> None:
    for one in waiting:
        os.kill(one.pid, signal.SIGKILL)  # nobody has waited for it yet, so the number is still its own
    until = time.monotonic() + END_SECONDS
    for one in waiting:
        with open(os.pidfd_open(one.pid), "rb") as process:
            if select.select([process], [], [], max(0.0, until - time.monotonic()))[0]:
                os.waitpid(one.pid, 0)


# ---- in the process that waits -----------------------------------------------------------------------------------


def awaited(local: int, connection: socket.socket) -> tuple[bytes, list[int]]:
    """Get ready to become a rank, and wait for the start. Returns its message and descriptors.

    Ends the process if that cannot be: then the rank is forked when it is needed. `local`: the local rank.
    """
    try:
        _make_context(local)
    except Exception as error:  # noqa: BLE001 - of torch or a driver: no memory is left on the device, as a rule
        reporting.warning(
            f"no process waits to become local rank {local} (--warm-ranks): {type(error).__name__}: {error}. "
            "The running ranks are not affected; it is started when it is needed"
        )
        os._exit(1)
    try:
        connection.sendall(READY)
        return framed.receive_with(connection, 2)
    except (OSError, EOFError):
        os._exit(0)  # the job is over


def _make_context(local: int) -> None:
    """Make the CUDA context of the device of a local rank, if there is one. The current device stays as it is."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and local < torch.cuda.device_count():
        torch.zeros(1, device=f"cuda:{local}")
        torch.cuda.empty_cache()

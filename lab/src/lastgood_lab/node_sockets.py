"""Sockets of a machine, as agents and training processes of a schedule use them: ordered, and ended with a process."""

from __future__ import annotations

import socket
from typing import Any, NamedTuple


class Socket:
    """One end of a connection. `process`: whose end it is."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.process = world.me()
        self.peer: Socket = self
        self.data = b""
        self._closed, self._blocks = False, True

    def gone(self) -> bool:
        return self._closed or not self.process.alive

    def readable(self) -> bool:
        return bool(self.data) or self.peer.gone()

    def send(self, data: bytes) -> int:
        self._world.scheduler.point()
        if self.peer.gone():
            raise BrokenPipeError
        self._world.scheduler.note("sends", len(data) > 1)
        self.peer.data += data
        return len(data)

    sendall = send

    def recv(self, count: int, flags: int = 0) -> bytes:
        self._world.scheduler.point()
        if self._blocks and not self._world.scheduler.wait(self.readable, 60.0):
            raise TimeoutError
        if not self.data:
            if self.peer.gone():
                return b""
            raise BlockingIOError
        found = self.data[:count]
        if not flags & socket.MSG_PEEK:
            self.data = self.data[count:]
        return found

    def setblocking(self, blocks: bool) -> None:
        self._blocks = blocks

    def settimeout(self, seconds: float) -> None:
        self._blocks = True

    def fileno(self) -> int:
        return -1

    def close(self) -> None:
        self._closed = True


def socketpair(world: Any) -> tuple[Socket, Socket]:
    one, other = Socket(world), Socket(world)
    one.peer, other.peer = other, one
    return one, other


class Listener:
    """The socket of an agent in the folder of its memory."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._process: Any = None
        self._waiting: list[Socket] = []

    def renewed(self) -> Listener:
        """The same name, with the present process at it."""
        self._process, self._waiting = self._world.me(), []
        return self

    def listens(self) -> bool:
        return self._process is not None and bool(self._process.alive)

    def connect(self) -> Socket:
        mine, theirs = socketpair(self._world)
        theirs.process = self._process
        self._waiting.append(theirs)
        return mine

    def readable(self) -> bool:
        return bool(self._waiting)

    def accept(self) -> tuple[Socket, str]:
        return self._waiting.pop(0), ""

    def close(self) -> None:
        if self._process is self._world.me():
            self._process = None


class Key(NamedTuple):
    fileobj: Any


class Selector:
    """Stands for selectors.DefaultSelector."""

    def __init__(self, world: Any) -> None:
        self._world, self._all = world, list[Any]()

    def register(self, one: Any, events: int) -> None:
        self._all.append(one)

    def unregister(self, one: Any) -> None:
        self._all.remove(one)

    def close(self) -> None:
        self._all.clear()

    def select(self, seconds: float | None = None) -> list[tuple[Key, int]]:
        self._world.scheduler.point()
        self._world.scheduler.wait(lambda: any(one.readable() for one in self._all), seconds)
        return [(Key(one), 1) for one in self._all if one.readable()]


class Poll:
    """Stands for select.poll of one connection."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._connection: Any = None

    def register(self, connection: Socket, events: int) -> None:
        self._connection = connection

    def poll(self, milliseconds: float) -> bool:
        # An answer comes in any case, or the end of the agent; to wake up in between would only be slow.
        return bool(self._world.scheduler.wait(self._connection.readable, max(milliseconds / 1000, 300.0)))

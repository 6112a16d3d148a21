"""Messages over a stream socket between the supervisor and its helper processes: a length, then so many bytes."""

from __future__ import annotations

import socket
from collections.abc import Sequence

LENGTH_BYTES = 4
"""of the length that precedes each message"""


def send(to: socket.socket, message: bytes, descriptors: Sequence[int] = ()) -> None:
    """Send a message. `descriptors`: travel with its length (default: none). Raises OSError."""
    socket.send_fds(to, [len(message).to_bytes(LENGTH_BYTES, "big")], descriptors)
    to.sendall(message)


def receive(by: socket.socket) -> bytes:
    """The next message. Raises OSError, and EOFError if the connection ends before it is whole."""
    return exactly(by, int.from_bytes(exactly(by, LENGTH_BYTES), "big"))


def receive_with(by: socket.socket, most: int) -> tuple[bytes, list[int]]:
    """The next message, and at most so many descriptors that travel with it. Raises as `receive`."""
    head, descriptors, _, _ = socket.recv_fds(by, LENGTH_BYTES, most)
    length = int.from_bytes(head + exactly(by, LENGTH_BYTES - len(head)), "big")
    return exactly(by, length), descriptors


def exactly(by: socket.socket, length: int) -> bytes:
    """So many bytes. Raises as `receive`."""
    data = b""
    while len(data) < length:
        part = by.recv(length - len(data))
        if not part:
            raise EOFError("the connection was closed")
        data += part
    return data

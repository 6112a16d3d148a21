"""One connection to an agent, and what it has asked for. Only a record: server.py reads and answers."""

from __future__ import annotations

import socket
from concurrent.futures import Future

from .works import Done


class Client:
    """`connection`: its socket, which does not block."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.data = connection, b""
        self.attached = self.waits = False
        """whether it is a training process; whether its request is answered once the copies have stopped"""
        self.ends = 0
        """After so many more failed attempts to copy everything its request "end" is answered; 0: it has made none."""
        self.sending: Future[str] | None = None
        """the end of the sending that it has asked for: why that failed; empty if it did not"""
        self.work: Future[Done] | None = None
        """the end of the work that it has asked for"""

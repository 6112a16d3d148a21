"""A relay to a node on this machine, whose connections are cut in the middle of a read: for a drill (drill_nodes.py).

The bytes pass unchanged, with handshake and all, until `cut_after` bytes of an answer. Then every connection is cut,
and no other one is accepted: as if the network to that node was gone.
"""

from __future__ import annotations

import contextlib
import socket
import threading

HOST = "127.0.0.1"
PART_BYTES, CONNECT_SECONDS = 1 << 16, 10.0


class Relay:
    """Relays to `target`, host and port, until it is cut or closed. Raises OSError where no port is free."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        """where it listens, at HOST"""
        self.is_cut, self.passed = False, 0
        """whether `cut_after` has come to its end; the bytes of answers that have passed"""
        self._left: int | None = None
        """so many bytes of answers still pass; None: all"""
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, name="lastgood-relay")]
        self._threads[0].start()

    def cut_after(self, count: int) -> None:
        """Let `count` more bytes of answers pass, and cut all connections then."""
        with self._lock:
            if self._left is None:
                self._left = count

    def close(self) -> None:
        """Cut all connections, and wait until its threads have ended."""
        self._cut()
        for one in [*self._threads]:
            one.join()
        for end in [self._listener, *self._sockets]:
            end.close()

    def _cut(self) -> None:
        with self._lock:
            self._left = 0
            ends = [self._listener, *self._sockets]
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the end: the listener was shut down
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(self._target, CONNECT_SECONDS)
                except OSError:  # who asks sees the end of the stream
                    near.close()
                    continue
                far.settimeout(None)
                pumps = [
                    threading.Thread(target=self._pump, args=ends) for ends in ((near, far, False), (far, near, True))
                ]
                with self._lock:
                    if self._left == 0:
                        near.close()
                        far.close()
                        break
                    self._sockets += [near, far]
                    self._threads += pumps
                    for one in pumps:
                        one.start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):  # one side has ended
            while data := source.recv(PART_BYTES):
                sink.sendall(self._passing(data) if answers else data)
                if self._left == 0:
                    break
        if self._left == 0:
            self._cut()
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _passing(self, data: bytes) -> bytes:
        """What still passes of these bytes of an answer."""
        with self._lock:
            passing = data[: self._left]
            if self._left is not None:
                self._left -= len(passing)
                self.is_cut |= self._left == 0
            self.passed += len(passing)
            return passing

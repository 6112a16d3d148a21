"""Nodes that talk over the wire in one process: services, certificates, and a proxy that makes the network fail."""

from __future__ import annotations

import contextlib
import random
import select
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from lastgood.errors import PeerDown
from lastgood.wire.channel import Channel
from lastgood.wire.frames import PUBLIC_KEY, FrameWriter
from lastgood.wire.messages import Offer
from lastgood.wire.port import Answer, Peer
from lastgood.wire.security import MutualTls, Plain, Security, SharedKey
from lastgood.wire.serving import Bounds, Server
from lastgood.wire.window import WINDOW_BYTES

RUN, SERVER, CLIENT = "run-1", "node-a", "node-b"
KEY = bytes(range(32))
MODES = [
    "shared key, xxh3_128",
    "shared key, blake3",
    "certificates, xxh3_128",
    "certificates, blake3",
    "certificates, encrypted, xxh3_128",
    "plain, xxh3_128",
]
HOST = "127.0.0.1"
SECONDS = 20.0
"""the timeout of a call that is expected to succeed: it is never reached"""


class Recorder:
    """A service that answers with what it was sent, and records the calls. Buffers are counted until they are used."""

    def __init__(self) -> None:
        self.handled: list[tuple[Peer, bytes, bytes]] = []
        self.abandoned: list[bytes] = []
        self.buffers = 0
        self.changed = threading.Condition()

    def buffer(self, peer: Peer, request: bytes, length: int) -> memoryview:
        self.buffers += 1
        return memoryview(bytearray(length))

    def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
        with self.changed:
            self.handled.append((peer, request, bytes(bulk)))
            self.changed.notify_all()
        return Answer(request[::-1], [bulk] if len(bulk) else [])

    def abandon(self, peer: Peer, request: bytes) -> None:
        with self.changed:
            self.abandoned.append(request)
            self.changed.notify_all()

    def unused(self) -> int:
        """Buffers that were neither handled nor abandoned."""
        return self.buffers - sum(bool(bulk) for _, _, bulk in self.handled) - len(self.abandoned)


# ---- certificates ----------------------------------------------------------------------------------------------


NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout")


class Authority:
    """An authority that signs certificates, with the command openssl."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder, self.name = folder, name
        self.file = self._path(name, "crt")
        new = [
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-keyout",
            self._path(name, "key"),
        ]
        self._openssl(
            "req",
            "-x509",
            *new,
            "-keyout",
            self._path(name, "key"),
            "-subj",
            f"/CN={name}",
            "-days",
            "30",
            "-out",
            self.file,
        )

    def certificate(self, node: str, days: int = 30, alternative: str = "") -> tuple[str, str]:
        """The files of a certificate and its key. `days`: how long it is valid; negative: it has expired."""
        stem = f"{self.name}-{node}-{days}-{alternative}"
        certificate, key, request = (self._path(stem, kind) for kind in ("crt", "key", "csr"))
        self._openssl("req", "-new", *NEW_KEY, key, "-subj", f"/CN={node}", "-out", request)
        extension = Path(self._path(stem, "ext"))
        extension.write_text(f"subjectAltName=DNS:{alternative}\n" if alternative else "")
        signer = ["-CA", self.file, "-CAkey", self._path(self.name, "key"), "-CAcreateserial", "-extfile", extension]
        self._openssl("x509", "-req", "-in", request, *signer, "-days", str(days), "-out", certificate)
        return certificate, key

    def tomorrow(self, node: str) -> tuple[str, str]:
        """The files of a certificate that is valid from tomorrow on, and of its key."""
        stem = f"{self.name}-{node}-tomorrow"
        certificate, key, request, ca = (self._path(stem, kind) for kind in ("crt", "key", "csr", "ca"))
        self._openssl("req", "-new", *NEW_KEY, key, "-subj", f"/CN={node}", "-out", request)
        issued = Path(self._path(stem, "issued"))
        issued.touch()
        Path(ca).write_text(
            f"[ca]\ndefault_ca=a\n[a]\ndatabase={issued}\nnew_certs_dir={self.folder}\npolicy=p\n"
            "default_md=sha256\nrand_serial=yes\n[p]\ncommonName=supplied\n"
        )
        start, end = (time.strftime("%Y%m%d%H%M%SZ", time.gmtime(time.time() + days * 86400)) for days in (1, 30))
        signer = ["-config", ca, "-cert", self.file, "-keyfile", self._path(self.name, "key")]
        dates = ["-startdate", start, "-enddate", end]
        self._openssl("ca", *signer, *dates, "-batch", "-notext", "-in", request, "-out", certificate)
        return certificate, key

    def node(self, node: str, digest: str = "xxh3_128", encrypt: bool = False, days: int = 30) -> MutualTls:
        """The mode of a node with a certificate of this authority."""
        return MutualTls(*self.certificate(node, days), self.file, digest, encrypt)

    def _path(self, stem: str, kind: str) -> str:
        return str(self.folder / f"{stem}.{kind}")

    @staticmethod
    def _openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def authority(folder: Path, name: str = "authority") -> Authority:
    """An authority; skips the test where there is no openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the Debian package openssl")
    return Authority(folder, name)


def security(mode: str, node: str, signer: Callable[[], Authority]) -> Security:
    """A node's security in one of MODES. `signer` makes the authority of the certificates."""
    digest = mode.rpartition(", ")[2]
    if mode.startswith("certificates"):
        return signer().node(node, digest, "encrypted" in mode)
    return SharedKey(KEY, digest) if mode.startswith("shared") else Plain(digest)


# ---- nodes -----------------------------------------------------------------------------------------------------


class LocalMemory:
    """A window of this process, whose other side is in this process too: see `window.Memory`."""

    all: ClassVar[dict[int, LocalMemory]] = {}

    def __init__(self) -> None:
        self.view = memoryview(bytearray(WINDOW_BYTES))
        self.key = id(self)
        self.offer, self.all[self.key] = Offer(b"local", self.key), self

    def connect(self, offer: Offer) -> None:
        if offer.address not in self.all:
            raise PeerDown("there is no such window", todo="Use another one.")
        self.peer = self.all[offer.address]

    def write(self, start: int, length: int) -> None:
        self.peer.view[start : start + length] = self.view[start : start + length]

    def written(self) -> bool:
        return True

    def progress(self) -> None: ...

    def close(self) -> None:
        self.all.pop(self.key, None)


WINDOWS: Callable[[], object] | None = None
"""makes the windows of both nodes; the fixture `either_wire` sets it"""


@contextlib.contextmanager
def serving(secure: Security, service: object, bounds: Bounds | None = None, **more: object) -> Iterator[Server]:
    """A server of the node SERVER on loopback."""
    windows = {"windows": None if secure.encrypt else WINDOWS}
    with Server((HOST, 0), Peer(RUN, SERVER), secure, service, bounds, **windows | more) as server:
        yield server


def channel(address: tuple[str, int], secure: Security, **more: object) -> Channel:
    """A channel of the node CLIENT to the node SERVER."""
    windows = {"windows": None if secure.encrypt else WINDOWS}
    return Channel(address, SERVER, Peer(RUN, CLIENT), secure, **windows | more)


class Stranger:
    """A client that speaks the protocol by hand."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=SECONDS)
        self._writer = FrameWriter(PUBLIC_KEY)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def send(self, message: object) -> None:
        self.socket.sendall(self._writer.encode(message))

    def received(self) -> bytes:
        """All that comes until the server closes the connection."""
        data = b""
        try:
            while got := self.socket.recv(1 << 16):
                data += got
        except ConnectionResetError:
            pass
        return data


def await_news(wire: Channel) -> None:
    """Wait until an idle connection has something to read: the end of the stream, most often."""
    poll = select.poll()
    poll.register(wire._idle[-1].session._control.raw, select.POLLIN)
    assert poll.poll(1000 * SECONDS)


# ---- a network that fails ----------------------------------------------------------------------------------------

TO_SERVER, TO_CLIENT = "to server", "to client"
Fault = Callable[[bytes], "bytes | None"]
"""the next bytes of a direction -> what is sent on; None: the connection is cut"""


class Network:
    """A proxy in front of a server. `fault(direction)` makes what happens to one direction of the next connections.

    `connections` counts the connections that were made through it.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server((HOST, 0))
        self.address = (HOST, self._listener.getsockname()[1])
        self.fault: Callable[[str], Fault] = lambda direction: lambda data: data
        self.connections = 0
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Network:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads[1:]:
            thread.join()
        for one in [self._listener, *self._sockets]:
            one.close()

    def cut(self) -> None:
        """Cut all connections."""
        for one in [*self._sockets]:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                far = socket.create_connection(self._target)
                self.connections += 1
                self._sockets += [near, far]
                for direction, source, sink in ((TO_SERVER, near, far), (TO_CLIENT, far, near)):
                    thread = threading.Thread(target=self._pump, args=(source, sink, self.fault(direction)))
                    self._threads.append(thread)
                    thread.start()

    @staticmethod
    def _pump(source: socket.socket, sink: socket.socket, fault: Fault) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = fault(data)
                if changed is None:
                    break
                sink.sendall(changed)
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def at_offset(offset: int, change: Callable[[bytes], bytes | None]) -> Fault:
    """A fault in the bytes that begin at this offset of a direction; nothing else of it is changed."""
    seen, done = 0, False

    def fault(data: bytes) -> bytes | None:
        nonlocal seen, done
        start, seen = seen, seen + len(data)
        if done or offset >= seen:
            return data
        done = True
        changed = change(data[offset - start :])
        return None if changed is None else data[: offset - start] + changed

    return fault


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 0x10]) + data[1:]


def repeated(data: bytes) -> bytes:
    return data[:40] + data


def reordered(data: bytes) -> bytes:
    return data[20:40] + data[:20] + data[40:]


def lost(data: bytes) -> bytes:
    return data[7:]


def cut(data: bytes) -> None:
    return None


FAULTS: dict[str, Callable[[bytes], bytes | None]] = {
    one.__name__: one for one in (flipped, repeated, reordered, lost, cut)
}


def pattern(length: int, seed: int = 0) -> bytearray:
    return bytearray(random.Random(seed).randbytes(length))

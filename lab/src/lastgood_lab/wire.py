"""`lastgood lab wire`: processor seconds of sender and receiver for each GB of bulk bytes, in every mode of the wire.

`nixl` is the shared key with bulk bytes over NIXL, where that is installed: UCX over TCP, unless UCX_TLS is set.

Sender and receiver are processes of their own, and each counts its processor time. The baseline sends the same chunks
over plain sockets and digests them on both sides with the same digest, without keys. `copies` is what agents do: the
file of a generation in memory becomes a file in the memory of another node. Its baseline is `files`: the same from a
file to a file, over plain sockets with the same digest. The contenders alternate in every round.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import multiprocessing
import os
import shutil
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lastgood.agent.peer_files import PeerFiles
from lastgood.engine.inline_executor import Inline
from lastgood.errors import NotInstalled
from lastgood.format import layout
from lastgood.io.memory_files import MemoryFiles
from lastgood.limits import CHUNK_BYTES
from lastgood.records import Generation
from lastgood.run import memory_place
from lastgood.run.peers import PeerNode, Peers
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood.wire.channel import Channel
from lastgood.wire.keys import hasher
from lastgood.wire.nixl import TRANSPORTS, VARIANTS, Nixl
from lastgood.wire.port import Answer, Peer
from lastgood.wire.security import MutualTls, Plain, Security, SharedKey
from lastgood.wire.serving import Server
from lastgood.wire.session import RECEIVE_BYTES

from .plain import save
from .report import Progress, Report, Table, spread
from .trials import Row

HOST, RUN, SERVER, CLIENT = "127.0.0.1", "bench", "receiver", "sender"
KEY = bytes(range(32))
SOCKETS, NIXL, FILES, COPIES = "sockets", "nixl", "files", "copies"
DIGESTS, MODES = ("xxh3_128", "blake3"), ("plain", "shared key", "certificates", "encrypted")
WAIT_SECONDS = 120.0


def contenders() -> list[tuple[str, str]]:
    """Modes and digests."""
    modes = [SOCKETS, *MODES, *([NIXL] if any(map(importlib.util.find_spec, VARIANTS)) else []), FILES, COPIES]
    return [(mode, digest) for mode in modes for digest in DIGESTS]


@dataclass(frozen=True)
class Options:
    out: Path
    rounds: int = 5
    mib: int = 256
    """bulk bytes of each measurement, in chunks of the default length"""


def run(options: Options, progress: Progress) -> list[Row]:
    rows: list[Row] = []
    all_contenders = contenders()
    os.environ.setdefault(TRANSPORTS, "tcp")
    context = multiprocessing.get_context("spawn")
    chunks = max(1, (options.mib << 20) // CHUNK_BYTES)
    with tempfile.TemporaryDirectory(prefix="lastgood-wire-") as folder:
        certificates(Path(folder))
        for number in range(options.rounds):
            progress(f"round {number + 1} of {options.rounds}")
            for mode, digest in (*all_contenders[number:], *all_contenders[:number]):
                here, there = context.Pipe()
                with tempfile.TemporaryDirectory(prefix="lastgood-wire-", dir=memory_place.DEFAULT) as memory:
                    receiver = context.Process(target=_receive, args=(there, mode, digest, folder, memory))
                    receiver.start()
                    try:
                        found = _measure(here, mode, digest, folder, Path(memory), chunks)
                    finally:
                        here.close()
                        receiver.join()
                rows.append({"mode": mode, "digest": digest, "round": number, **found})
    return rows


def certificates(folder: Path) -> None:
    """Certificates of both nodes, and the authority that signs them, made with the command openssl."""
    if shutil.which("openssl") is None:
        raise NotInstalled("`lastgood lab wire`", "openssl", "apt install openssl")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    signer = ["-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial"]
    commands = [["req", "-x509", *new, "-keyout", "ca.key", "-subj", "/CN=authority", "-out", "ca.crt"]]
    for node in (SERVER, CLIENT):
        commands += [
            ["req", "-new", *new, "-keyout", f"{node}.key", "-subj", f"/CN={node}", "-out", f"{node}.csr"],
            ["x509", "-req", "-in", f"{node}.csr", *signer, "-out", f"{node}.crt"],
        ]
    for command in commands:
        subprocess.run(["openssl", *command], cwd=folder, check=True, capture_output=True)


def security(mode: str, digest: str, node: str, folder: str) -> Security:
    if mode == "plain":
        return Plain(digest)
    if mode in ("shared key", NIXL, COPIES):
        return SharedKey(KEY, digest)
    certificate, key, authority = (f"{folder}/{name}" for name in (f"{node}.crt", f"{node}.key", "ca.crt"))
    return MutualTls(certificate, key, authority, digest, encrypt=mode == "encrypted")


# ---- the sender --------------------------------------------------------------------------------------------------


def _measure(receiver: Connection, mode: str, digest: str, folder: str, memory: Path, chunks: int) -> dict[str, float]:
    """Send chunks to a receiver, after one that is not counted."""
    address = receiver.recv()
    senders = {FILES: _file_sender, COPIES: _copy_sender}
    sender = (
        senders[mode](address, digest, memory, chunks) if mode in senders else _sender(address, mode, digest, folder)
    )
    with sender as send:
        send(1)
        receiver.send("begin")
        receiver.recv()
        begun, used = time.perf_counter(), time.process_time()
        send(chunks)
        used, wall = time.process_time() - used, time.perf_counter() - begun
        receiver.send("end")
        received = receiver.recv()
    gigabytes = chunks * CHUNK_BYTES / 1e9
    return {"sender": used / gigabytes, "receiver": received / gigabytes, "speed": gigabytes / wall}


def _chunk() -> memoryview:
    return memoryview(bytearray(range(256)) * (CHUNK_BYTES // 256))


@contextlib.contextmanager
def _sender(address: tuple[str, int], mode: str, digest: str, folder: str) -> Iterator[Callable[[int], None]]:
    """Yields what sends so many chunks."""
    data = _chunk()
    with contextlib.ExitStack() as opened:
        if mode == SOCKETS:
            send = opened.enter_context(_socket_sender(address, digest))
        else:
            secure, windows = security(mode, digest, CLIENT, folder), Nixl() if mode == NIXL else None
            wire = opened.enter_context(Channel(address, SERVER, Peer(RUN, CLIENT), secure, windows=windows))

            def send(data: memoryview) -> None:
                wire.call(b"put", outgoing=[data], timeout_seconds=WAIT_SECONDS)

        def sent(count: int) -> None:
            for _ in range(count):
                send(data)

        yield sent


@contextlib.contextmanager
def _socket_sender(address: tuple[str, int], digest: str) -> Iterator[Callable[[memoryview], None]]:
    """Yields what digests a chunk and sends it over a plain socket."""
    with socket.create_connection(address) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def send(data: memoryview) -> None:
            found = hasher(digest, KEY)
            found.update(data)
            sock.sendall(found.digest().ljust(32))
            sock.sendall(data)
            sock.recv(1)

        yield send


@contextlib.contextmanager
def _file_sender(address: tuple[str, int], digest: str, memory: Path, chunks: int) -> Iterator[Callable[[int], None]]:
    """As `_sender`, for chunks of a file in memory."""
    data = _chunk()
    with open(memory / "sent", "w+b", buffering=0) as file, _socket_sender(address, digest) as send:
        for _ in range(chunks):
            file.write(data)

        def sent(count: int) -> None:
            for number in range(count):
                os.preadv(file.fileno(), [data], number * CHUNK_BYTES)
                send(data)

        yield sent


@contextlib.contextmanager
def _copy_sender(address: tuple[str, int], digest: str, memory: Path, chunks: int) -> Iterator[Callable[[int], None]]:
    """As `_sender`, for generations in memory of one chunk and of all chunks, which an agent copies to another node."""
    root = memory / "sent"
    root.mkdir()
    disk = Disk(MemoryFiles(str(root)), str(root))
    writer = RunWriter(disk, Inline(), algorithm=digest)
    writer.begin(None)
    made = dict[int, Generation]()
    for step, count in ((1, 1), (2, chunks)):
        state = {"w": bytes(_chunk()) * count}
        made[count] = save(writer, step, state, chunk_bytes=CHUNK_BYTES)
        folder = Path(layout.folder(made[count].id))
        (memory / "received" / folder).mkdir(parents=True)
        shutil.copy(root / folder / layout.COMMIT, memory / "received" / folder)
    node = PeerNode(leader=0, name=SERVER, domain="", host=address[0], port=address[1])
    with contextlib.closing(Peers(RUN, SharedKey(KEY, digest), CLIENT)) as peers:

        def sent(count: int) -> None:
            (seal,) = made[count].commit.seals
            peers.send(disk, made[count], seal, node)

        yield sent


# ---- the receiver ------------------------------------------------------------------------------------------------


class _Sink:
    """A service with one buffer, which is used again and again."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(CHUNK_BYTES))

    def buffer(self, peer: Peer, request: bytes, length: int) -> memoryview:
        return self._buffer[:length]

    def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
        return Answer()

    def abandon(self, peer: Peer, request: bytes) -> None: ...


def _receive(sender: Connection, mode: str, digest: str, folder: str, memory: str) -> None:
    """A receiver, in a process of its own: reports the processor time between two messages of the sender."""
    with contextlib.ExitStack() as opened:
        if mode in (SOCKETS, FILES):
            file = opened.enter_context(open(f"{memory}/received", "wb", buffering=0)) if mode == FILES else None
            listener = opened.enter_context(socket.create_server((HOST, 0)))
            sender.send(listener.getsockname())
            sock = opened.enter_context(listener.accept()[0])
            receiving = threading.Thread(target=_receive_chunks, args=(sock, digest, file))
            receiving.start()
            opened.callback(receiving.join)
        else:
            secure, windows = security(mode, digest, SERVER, folder), Nixl() if mode == NIXL else None
            service: Any = _Sink()
            if mode == COPIES:
                root = f"{memory}/received"
                service = PeerFiles(lambda: Disk(MemoryFiles(root), root, shared=True))
                opened.callback(service.close)
            server = opened.enter_context(Server((HOST, 0), Peer(RUN, SERVER), secure, service, windows=windows))
            sender.send(server.address)
        sender.recv()
        used = time.process_time()
        sender.send("ready")
        sender.recv()
        sender.send(time.process_time() - used)


def _receive_chunks(sock: socket.socket, digest: str, file: io.FileIO | None) -> None:
    """Receive chunks over a plain socket until it ends, and compare the digest of each. They go to `file`, if any."""
    buffer = memoryview(bytearray(CHUNK_BYTES))
    while expected := sock.recv(32, socket.MSG_WAITALL):
        found, at = hasher(digest, KEY), 0
        while at < len(buffer):
            got = sock.recv_into(buffer[at : at + RECEIVE_BYTES], flags=socket.MSG_WAITALL)
            found.update(buffer[at : at + got])
            at += got
        assert found.digest().ljust(32) == expected
        if file is not None:
            file.write(buffer)
        sock.sendall(b"+")


def measured(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The contenders that were measured, those of one mode together."""
    found = {(row["mode"], row["digest"]) for row in rows}
    return [
        one for mode in (SOCKETS, *MODES, NIXL, FILES, COPIES) for digest in DIGESTS if (one := (mode, digest)) in found
    ]


def report(rows: Sequence[Row], options: Options) -> Report:
    def values(mode: str, digest: str, name: str) -> list[float]:
        return [row[name] for row in rows if (row["mode"], row["digest"]) == (mode, digest)]

    def both(mode: str, digest: str) -> float:
        return sum(statistics.median(values(mode, digest, name)) for name in ("sender", "receiver"))

    lines = [
        [
            mode,
            digest,
            *(spread(values(mode, digest, name), ".2f") for name in ("sender", "receiver", "speed")),
            f"{both(mode, digest) / both(SOCKETS, digest):.2f}x",
        ]
        for mode, digest in measured(rows)
    ]
    head = ["mode", "digest", "sender CPU s/GB", "receiver CPU s/GB", "GB/s", "CPU of both / sockets"]
    return Report(
        name="wire",
        title="Processor time of the wire between nodes",
        about=f"{options.mib} MiB in chunks of {CHUNK_BYTES >> 20} MiB over loopback, one connection, one request a "
        f"chunk, {options.rounds} rounds; median and range. The machine was shared with other work: compare inside "
        "of this table only.",
        tables=[Table("", head, lines)],
        rows=rows,
        notes=[
            *(
                f"copies / files, {digest}, CPU of both: {both(COPIES, digest) / both(FILES, digest):.2f}x"
                for digest in DIGESTS
            ),
            "`sockets`: the same chunks over plain sockets, with the same digest on both sides and nothing else.",
            "`certificates`: control through TLS 1.3, bulk bytes in the clear. `encrypted`: both through TLS.",
            "`copies`: what agents do, from a file in memory to a file in the memory of another node, by two "
            "connections. `files`: the same over one plain socket, with the same digest on both sides.",
            "`nixl`: the shared key, bulk bytes over NIXL through windows; UCX over TCP unless UCX_TLS is set.",
        ],
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json: medians of each contender."""
    return {
        "contenders": {
            f"{mode}, {digest}": {
                name: statistics.median(row[name] for row in rows if (row["mode"], row["digest"]) == (mode, digest))
                for name in ("sender", "receiver", "speed")
            }
            for mode, digest in measured(rows)
        }
    }

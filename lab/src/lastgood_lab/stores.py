"""The places where the policies of the benchmark store a state: slots of a file, a mapped file, a peer's memory.

All have the interface `Store`. A state occupies one slot, and `point` records which slot holds the newest complete
state. A state that `newest` returns survives loss of power in a file, and the death of the trainer in a peer process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from lastgood.io.files import PosixFiles, round_up, takes_direct
from lastgood.limits import DIRECT_IO_BYTES

ZEROES_BYTES = 4 << 20
_POINTER = struct.Struct("<QQQI")  # number, slot, step, crc of the three
_FRAME = struct.Struct("<cQQQQ")  # verb, slot, offset, length, step


class Newest(NamedTuple):
    """The newest complete state: the number of its pointer record, its slot and its step."""

    number: int
    slot: int
    step: int


class Store(Protocol):
    """Slots for states. `write` and `read` may be called by any thread.

    `view` is page-aligned and its length is a multiple of 4096 bytes.
    """

    def write(self, slot: int, view: memoryview, offset: int) -> None: ...
    def flush(self) -> None: ...
    def point(self, number: int, slot: int, step: int) -> None: ...
    def newest(self) -> Newest | None: ...
    def read(self, slot: int, view: memoryview, offset: int) -> None: ...
    def close(self) -> None: ...


class SlotFile:
    """Slots in one file, which is filled with zeroes when it is created, and then overwritten in place with direct I/O.

    Two pointer records precede the slots and are written alternately: if one is torn, the older one is still valid.
    """

    def __init__(self, path: Path, slots: int, slot_bytes: int) -> None:
        self.slot_bytes = round_up(slot_bytes)
        direct = getattr(os, "O_DIRECT", 0) if takes_direct(str(path.parent)) else 0
        fresh = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | direct, 0o644)
        self._page = mmap.mmap(-1, DIRECT_IO_BYTES)
        if fresh:
            _fill(self._fd, 2 * DIRECT_IO_BYTES + slots * self.slot_bytes)
            PosixFiles().sync_dir(str(path.parent))

    def write(self, slot: int, view: memoryview, offset: int) -> None:
        _write_all(self._fd, view, self._at(slot) + offset)

    def flush(self) -> None:
        os.fdatasync(self._fd)

    def point(self, number: int, slot: int, step: int) -> None:
        body = struct.pack("<QQQ", number, slot, step)
        self._page[: _POINTER.size] = body + struct.pack("<I", zlib.crc32(body))
        _write_all(self._fd, memoryview(self._page), number % 2 * DIRECT_IO_BYTES)
        self.flush()

    def newest(self) -> Newest | None:
        found = []
        for record in range(2):
            os.preadv(self._fd, [self._page], record * DIRECT_IO_BYTES)
            number, slot, step, crc = _POINTER.unpack_from(self._page)
            if number and crc == zlib.crc32(self._page[: _POINTER.size - 4]):
                found.append(Newest(number, slot, step))
        return max(found) if found else None

    def read(self, slot: int, view: memoryview, offset: int) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], self._at(slot) + offset + done)
            if count <= 0:
                raise OSError("the file ends early")
            done += count

    def close(self) -> None:
        os.close(self._fd)

    def _at(self, slot: int) -> int:
        return 2 * DIRECT_IO_BYTES + slot * self.slot_bytes


class MappedFile(SlotFile):
    """The same file, written through a memory mapping that is synced in parts, as GPM does."""

    def __init__(self, path: Path, slots: int, slot_bytes: int) -> None:
        super().__init__(path, slots, slot_bytes)
        length = self._at(slots)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(fd, length)
        finally:
            os.close(fd)
        self._view = memoryview(self._map)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._libc = ctypes.CDLL(None, use_errno=True)  # mmap.flush would hold the interpreter's lock while it waits

    def place(self, slot: int, offset: int, length: int) -> memoryview:
        """Return a view of the mapped memory itself."""
        at = self._at(slot) + offset
        return self._view[at : at + length]

    def sync(self, slot: int, offset: int, length: int) -> None:
        """Make a page-aligned part of the mapping durable."""
        at = ctypes.c_void_p(self._address + self._at(slot) + offset)
        if self._libc.msync(at, ctypes.c_size_t(length), 4) != 0:  # MS_SYNC
            raise OSError(ctypes.get_errno(), "msync failed")

    def close(self) -> None:
        super().close()  # the mapping is removed when its last view is garbage-collected


# ---- a peer's memory -----------------------------------------------------------------------------------------


class Peer:
    """Two slots in the memory of another process, reached by a Unix socket. Gemini uses the memory of another node.

    If no socket exists at `path`, this object starts the process, and `close` ends it. An existing process is used
    and left running.
    """

    def __init__(self, path: Path, slot_bytes: int) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        if not path.exists():
            self.process = start_peer(path, slot_bytes)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._path, self._one_at_a_time = path, threading.Lock()

    def write(self, slot: int, view: memoryview, offset: int) -> None:
        with self._one_at_a_time:
            self._socket.sendall(_FRAME.pack(b"w", slot, offset, len(view), 0))
            self._socket.sendall(view)

    def flush(self) -> None:
        with self._one_at_a_time:
            self._socket.sendall(_FRAME.pack(b"f", 0, 0, 0, 0))
            _receive(self._socket, memoryview(bytearray(_FRAME.size)))

    def point(self, number: int, slot: int, step: int) -> None:
        with self._one_at_a_time:
            self._socket.sendall(_FRAME.pack(b"p", slot, number, 0, step))
        self.flush()

    def newest(self) -> Newest | None:
        answer = bytearray(_FRAME.size)
        with self._one_at_a_time:
            self._socket.sendall(_FRAME.pack(b"n", 0, 0, 0, 0))
            _receive(self._socket, memoryview(answer))
        _, slot, number, _, step = _FRAME.unpack(answer)
        return Newest(number, slot, step) if number else None

    def read(self, slot: int, view: memoryview, offset: int) -> None:
        with self._one_at_a_time:
            self._socket.sendall(_FRAME.pack(b"r", slot, offset, len(view), 0))
            _receive(self._socket, view)

    def close(self) -> None:
        self._socket.close()
        if self.process is not None:
            end_peer(self.process)
            self._path.unlink()


def start_peer(path: Path, slot_bytes: int) -> subprocess.Popen[bytes]:
    """Start a process that holds two slots in its memory and listens on `path`; it is ready on return."""
    program = [sys.executable, "-m", "lastgood_lab.stores", str(path), str(round_up(slot_bytes))]
    process = subprocess.Popen(program, stdout=subprocess.PIPE)
    assert process.stdout is not None
    if process.stdout.readline() != b"ready\n":
        process.wait()
        raise OSError("the peer process did not start")
    return process


def end_peer(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def serve(path: str, slot_bytes: int) -> None:
    """Serve one trainer after the other until this process is terminated."""
    memory = mmap.mmap(-1, 2 * slot_bytes)
    for at in range(0, len(memory), DIRECT_IO_BYTES):
        memory[at] = 0  # fault in every page before any time is measured
    view, newest = memoryview(memory), (0, 0, 0)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(path)
    listening.listen()
    print("ready", flush=True)
    while True:
        trainer, _ = listening.accept()
        with trainer, contextlib.suppress(ConnectionError):  # the trainer died; its completed states stay
            for verb, slot, offset, length, step in _frames(trainer):
                at = slot * slot_bytes + offset
                if verb == b"w":
                    _receive(trainer, view[at : at + length])
                elif verb == b"r":
                    trainer.sendall(view[at : at + length])
                elif verb == b"p":
                    newest = (offset, slot, step)
                else:  # flush and newest
                    trainer.sendall(_FRAME.pack(verb, newest[1], newest[0], 0, newest[2]))


def _frames(trainer: socket.socket) -> Iterator[tuple[bytes, int, int, int, int]]:
    head = bytearray(_FRAME.size)
    while True:
        _receive(trainer, memoryview(head))
        yield _FRAME.unpack(head)


def _receive(connection: socket.socket, view: memoryview) -> None:
    done = 0
    while done < len(view):
        count = connection.recv_into(view[done:])
        if count == 0:
            raise ConnectionResetError("the other process closed the connection")
        done += count


# ---- files ---------------------------------------------------------------------------------------------------


def _fill(fd: int, length: int) -> None:
    """Write zeroes, so that no later write allocates blocks or converts unwritten extents."""
    os.posix_fallocate(fd, 0, length)
    zeroes = memoryview(mmap.mmap(-1, ZEROES_BYTES))
    for offset in range(0, length, ZEROES_BYTES):
        _write_all(fd, zeroes[: min(ZEROES_BYTES, length - offset)], offset)
    os.fsync(fd)


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset + done)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))

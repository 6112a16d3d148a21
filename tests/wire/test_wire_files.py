"""Parts of files that are sent as they are, to a caller that verifies them by a digest of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lastgood.errors import FrameInvalid, PeerDown, Refused, TimedOut
from lastgood.io.files import PosixFile, PosixFiles
from lastgood.wire.port import Answer, FilePart, Peer
from lastgood.wire.security import Plain, SharedKey
from lastgood.wire.session import RECEIVE_BYTES, Session
from lastgood.wire.sockets import Deadline, Stream
from wired import CLIENT, KEY, MODES, SECONDS, SERVER, Recorder, channel, pattern, security, serving

DATA = pattern(5 * RECEIVE_BYTES + 3, 1)
PART = (7, 4 * RECEIVE_BYTES + 1)
"""offset and length"""


class WatchedFile:
    """`port.OpenFile` that tells when it is closed."""

    def __init__(self, file: PosixFile) -> None:
        self._file, self.closed = file, threading.Event()

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        assert not self.closed.is_set(), "it is closed once"
        self._file.close()
        self.closed.set()


class Keeper(Recorder):
    """A service that answers "part" with PART of a file, and everything else as a Recorder does."""

    def __init__(self, path: Path, then: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._path, self._then = path, then
        self.opened: list[WatchedFile] = []
        path.write_bytes(DATA)

    def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
        if request != b"part":
            return super().handle(peer, request, bulk)
        self.opened.append(WatchedFile(PosixFiles().open(str(self._path), "read")))
        self._then()
        return Answer(b"a part", part=FilePart(self.opened[-1], *PART))


@pytest.mark.usefixtures("either_wire")
@pytest.mark.parametrize("mode", MODES)
def test_a_part_of_a_file_arrives_in_every_mode(tmp_path: Path, signer, mode: str) -> None:
    service, incoming = Keeper(tmp_path / "file"), memoryview(bytearray(PART[1] + 1))
    with (
        serving(security(mode, SERVER, signer), service) as server,
        channel(server.address, security(mode, CLIENT, signer)) as wire,
    ):
        for _ in range(2):
            answer = wire.call(b"part", incoming=incoming, timeout_seconds=SECONDS, caller_verifies=True)
            assert answer.record == b"a part" and bytes(answer.bulk[0]) == DATA[PART[0] :][: PART[1]]
            assert len(answer.bulk[0]) == PART[1] and incoming[-1] == 0
        assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip"
    assert len(service.opened) == 2 and all(one.closed.is_set() for one in service.opened)


def test_a_file_is_open_until_the_peer_has_received_it(tmp_path: Path) -> None:
    """The system sends its pages, so a file that is overwritten after it was handed over changes what arrives."""
    service, incoming = Keeper(tmp_path / "file"), memoryview(bytearray(PART[1]))
    with serving(Plain(), service) as server, channel(server.address, Plain()) as wire:
        wire.call(b"part", incoming=incoming, timeout_seconds=SECONDS, caller_verifies=True)
        (first,) = service.opened
        assert not first.closed.is_set(), "the server does not know yet that all has arrived"
        wire.call(b"ping", timeout_seconds=SECONDS)
        assert first.closed.is_set()
        wire.call(b"part", incoming=incoming, timeout_seconds=SECONDS, caller_verifies=True)
        wire.close()
        assert service.opened[1].closed.wait(SECONDS), "it ends with the connection"


def test_bytes_without_a_digest_are_refused_unless_asked_for(tmp_path: Path) -> None:
    service, incoming = Keeper(tmp_path / "file"), memoryview(bytearray(PART[1]))
    with serving(Plain(), service) as server, channel(server.address, Plain()) as wire:
        with pytest.raises(FrameInvalid) as error:
            wire.call(b"part", incoming=incoming, timeout_seconds=SECONDS)
        assert error.value.reason == "digest"


def test_a_keyed_digest_is_never_left_out(tmp_path: Path, monkeypatch) -> None:
    """Who has not got the key could send what he likes; the caller's own digest may find accidents only."""
    service, incoming, mode = Keeper(tmp_path / "file"), memoryview(bytearray(PART[1])), SharedKey(KEY, "blake3")
    sent = list[bytes]()
    whole = Session.digest
    monkeypatch.setattr(Session, "digest", lambda self, bulk: sent.append(whole(self, bulk)) or sent[-1])
    with serving(mode, service) as server, channel(server.address, mode) as wire:
        wire.call(b"part", incoming=incoming, timeout_seconds=SECONDS, caller_verifies=True)
        assert len(sent[-1]) == 32
        monkeypatch.setattr(Session, "sends_files", True)
        with pytest.raises(FrameInvalid, match="have no digest") as error:
            wire.call(b"part", incoming=incoming, timeout_seconds=SECONDS, caller_verifies=True)
        assert error.value.reason == "digest"


def test_a_part_larger_than_the_callers_buffer_is_not_sent(tmp_path: Path) -> None:
    service, incoming = Keeper(tmp_path / "file"), memoryview(bytearray(PART[1] - 1))
    with serving(Plain(), service) as server, channel(server.address, Plain()) as wire:
        with pytest.raises(Refused, match="more than the limit of"):
            wire.call(b"part", incoming=incoming, timeout_seconds=SECONDS, caller_verifies=True)
        assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip" and service.opened[0].closed.is_set()


def test_a_file_that_becomes_shorter_ends_the_connection(tmp_path: Path) -> None:
    path = tmp_path / "file"
    service, incoming = Keeper(path, lambda: path.write_bytes(DATA[:100])), memoryview(bytearray(PART[1]))
    with serving(Plain(), service) as server, channel(server.address, Plain()) as wire:
        with pytest.raises(PeerDown, match="closed by the other side"):
            wire.call(b"part", incoming=incoming, timeout_seconds=SECONDS, caller_verifies=True)
        assert service.opened[0].closed.wait(SECONDS)


def test_a_peer_that_reads_nothing_is_sent_no_file_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(64 << 20))
    here, there = socket.socketpair()
    with here, there, contextlib.closing(PosixFiles().open(str(path), "read")) as file:
        deadline = Deadline(time.monotonic, 0.05, "sending a part")
        with pytest.raises(TimedOut, match=r"sending a part: not done within 0\.05 s"):
            Stream(here, "there").send_part(FilePart(file, 0, 64 << 20), deadline)

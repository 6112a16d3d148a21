"""Bulk bytes through windows: what a peer may write, what is used of it, and who uses sockets instead."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lastgood.errors import FrameInvalid, NotInstalled, PeerDown, Refused, TimedOut
from lastgood.extras import PACKAGES
from lastgood.limits import WIRE_PIECE_BYTES
from lastgood.wire.channel import Channel
from lastgood.wire.messages import Offer, Placed
from lastgood.wire.nixl import Nixl, chosen_transports, permits_tcp
from lastgood.wire.security import Plain, SharedKey
from lastgood.wire.serving import Bounds
from lastgood.wire.sockets import Deadline
from lastgood.wire.window import pieces
from wired import CLIENT, KEY, SECONDS, SERVER, LocalMemory, Recorder, channel, pattern, security, serving

LONG = 5 * WIRE_PIECE_BYTES + 7
ENCRYPTED = "certificates, encrypted, xxh3_128"


@pytest.fixture(params=["windows", pytest.param("nixl", marks=pytest.mark.slow)])
def windows(request: pytest.FixtureRequest) -> Iterator[Callable[[], object]]:
    """Windows in the memory of this process, or over NIXL."""
    yield LocalMemory if request.param == "windows" else request.getfixturevalue("nixl")
    assert not LocalMemory.all, "every window ends with its connection"


def deadline() -> Deadline:
    return Deadline(time.monotonic, SECONDS, "a test")


def echoed(wire: Channel) -> bool:
    """Send many pieces, and receive the same."""
    data, incoming = memoryview(pattern(LONG)), memoryview(bytearray(LONG))
    return wire.call(b"echo", outgoing=[data], incoming=incoming, timeout_seconds=SECONDS).bulk[0] == data


def changed(make: Callable[[], object], change: Callable[[object, int, int], None]) -> Callable[[], object]:
    """Windows in which `change(memory, start, length)` is called before each write."""

    def made() -> object:
        memory = make()
        write = memory.write
        memory.write = lambda start, length: (change(memory, start, length), write(start, length))[1]
        return memory

    return made


def test_bulk_bytes_of_many_pieces_arrive_in_both_directions(windows):
    service = Recorder()
    with (
        serving(SharedKey(KEY), service, windows=windows) as server,
        channel(server.address, SharedKey(KEY), windows=windows) as wire,
    ):
        for size in (1, WIRE_PIECE_BYTES, WIRE_PIECE_BYTES + 1, LONG):
            data, incoming = pattern(size, size), bytearray(size)
            parts = [memoryview(data)[: size // 3], memoryview(data)[size // 3 :]]
            answer = wire.call(b"echo", outgoing=parts, incoming=memoryview(incoming), timeout_seconds=SECONDS)
            assert bytes(answer.bulk[0]) == data == incoming
        assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip" and len(wire._idle) == 1


@pytest.mark.parametrize("who", [CLIENT, SERVER])
def test_bytes_that_changed_in_a_window_are_found_and_dropped(windows, who):
    def flip(memory, start, length):
        memory.view[start + length // 2] ^= 1

    service, changing = Recorder(), changed(windows, flip)
    makers = {node: changing if node == who else windows for node in (CLIENT, SERVER)}
    data = memoryview(pattern(LONG))
    with (
        serving(Plain(), service, windows=makers[SERVER]) as server,
        channel(server.address, Plain(), windows=makers[CLIENT]) as wire,
        pytest.raises(FrameInvalid, match=r"bulk bytes from .* do not have the digest"),
    ):
        wire.call(b"store", outgoing=[data], incoming=memoryview(bytearray(LONG)), timeout_seconds=SECONDS)
    assert service.abandoned == ([b"store"] if who == CLIENT else []) and service.unused() == 0


def test_what_a_peer_writes_late_changes_nothing_that_is_used():
    """The window is written again while the service handles the request, and after that."""
    made, service = [], Recorder()

    def make() -> LocalMemory:
        made.append(LocalMemory())
        return made[-1]

    handle = service.handle

    def overwritten(peer, request, bulk):
        for memory in made:
            memory.view[:] = b"\xff" * len(memory.view)
        return handle(peer, request, bulk)

    service.handle = overwritten
    data, incoming = pattern(LONG), memoryview(bytearray(LONG))
    with serving(Plain(), service, windows=make) as server, channel(server.address, Plain(), windows=make) as wire:
        wire.call(b"echo", outgoing=[memoryview(data)], incoming=incoming, timeout_seconds=SECONDS)
        for memory in made:
            memory.view[:] = b"\xee" * len(memory.view)
    assert service.handled[0][2] == incoming == data and len(made) == 2


def test_a_sender_is_never_more_pieces_ahead_than_a_window_has():
    """The third piece was written over the first one, which the receiver had not copied yet."""
    service, third, count = Recorder(), threading.Event(), itertools.count(1)

    def note(memory, start, length):
        if next(count) == 3:
            third.set()

    early, buffer = [], service.buffer

    def slow(peer, request, length):
        early.append(third.wait(0.2))
        return buffer(peer, request, length)

    service.buffer = slow
    with (
        serving(Plain(), service, windows=LocalMemory) as server,
        channel(server.address, Plain(), windows=changed(LocalMemory, note)) as wire,
    ):
        assert echoed(wire)
    assert early == [False] and third.is_set()


@pytest.mark.parametrize("who", [CLIENT, SERVER])
def test_a_node_without_windows_is_reached_through_sockets(who, caplog):
    makers = {node: None if node == who else LocalMemory for node in (CLIENT, SERVER)}
    data = pattern(LONG)
    with (
        serving(Plain(), Recorder(), windows=makers[SERVER]) as server,
        channel(server.address, Plain(), windows=makers[CLIENT]) as wire,
        ThreadPoolExecutor(2) as pool,
    ):
        incoming = [memoryview(bytearray(LONG)) for _ in range(4)]
        calls = [
            pool.submit(wire.call, b"echo", outgoing=[memoryview(data)], incoming=one, timeout_seconds=SECONDS)
            for one in incoming
        ]
        assert all(bytes(one.result().bulk[0]) == data for one in calls)
    said = [one.message for one in caplog.records]
    assert said == ([f"bulk bytes to {SERVER} go through sockets, not NIXL: it uses sockets"] if who == SERVER else [])


def test_windows_are_refused_where_bulk_bytes_are_to_be_encrypted(signer):
    sides = security(ENCRYPTED, SERVER, signer), security(ENCRYPTED, CLIENT, signer)
    with pytest.raises(Refused, match="to be encrypted"), serving(sides[0], Recorder(), windows=LocalMemory):
        pass
    with pytest.raises(Refused, match="to be encrypted"):
        channel(("127.0.0.1", 1), sides[1], windows=LocalMemory)


@pytest.mark.parametrize("message", [Placed(WIRE_PIECE_BYTES + 1), Placed(0), Offer(b"", 0), Offer(b"a", -1)])
def test_lengths_and_addresses_beyond_their_bounds_are_no_messages(message):
    with serving(Plain(), Recorder(), windows=LocalMemory) as server, channel(server.address, Plain()) as wire:
        wire.call(b"ping", timeout_seconds=SECONDS)
        session = wire._idle[0].session
        session.send(message, (), deadline())
        assert session._control.raw.recv(1) == b"", "the server closes the connection"


def test_a_peer_offers_a_window_once():
    with (
        serving(Plain(), Recorder(), windows=LocalMemory) as server,
        channel(server.address, Plain(), windows=LocalMemory) as wire,
    ):
        wire.call(b"ping", timeout_seconds=SECONDS)
        session = wire._idle[0].session
        session.send(Offer(b"local", 0), (), deadline())
        assert session._control.raw.recv(1) == b"", "the server closes the connection"


@pytest.mark.slow
@pytest.mark.parametrize("offset", [-4096, 1 << 40])
def test_an_address_that_the_peer_has_not_registered_is_not_written(nixl, offset):
    def lying() -> object:
        memory = nixl()
        memory.offer = Offer(memory.offer.agent, memory.offer.address + offset)
        return memory

    with (
        serving(Plain(), Recorder(), windows=nixl) as server,
        channel(server.address, Plain(), windows=lying) as wire,
        pytest.raises(PeerDown),
    ):
        wire.call(
            b"echo",
            outgoing=[memoryview(b"abc")],
            incoming=memoryview(bytearray(3)),
            timeout_seconds=SECONDS,
        )


@pytest.mark.slow
@pytest.mark.parametrize("offer", [b"garbage", b"nixlSerDes|" + bytes(100)])
def test_a_peer_that_nixl_cannot_reach_is_served_through_sockets(nixl, offer, caplog):
    def lying() -> object:
        memory = nixl()
        memory.offer = Offer(offer, 0)
        return memory

    with (
        serving(Plain(), Recorder(), windows=nixl) as server,
        channel(server.address, Plain(), windows=lying) as wire,
    ):
        data, incoming = memoryview(b"abc"), memoryview(bytearray(3))
        assert wire.call(b"echo", outgoing=[data], incoming=incoming, timeout_seconds=SECONDS).bulk[0] == data
    assert "not NIXL: NIXL: the other side cannot be reached" in caplog.text


# ---- a peer that dies or stops ---------------------------------------------------------------------------------------

PEER = """
import sys
from lastgood.wire.nixl import Nixl
from lastgood.wire.security import Plain
from wired import Recorder, serving
with serving(Plain(), Recorder(), windows=Nixl()) as server:
    print(server.address[1], flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(nixl: Nixl) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server with NIXL in a process of its own, and its port."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ
    ) as process:
        try:
            yield process, int(process.stdout.readline())
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "error", "seconds"), [("SIGKILL", PeerDown, SECONDS), ("SIGSTOP", TimedOut, 1.0)])
def test_a_peer_that_dies_or_stops_ends_a_call_in_time(nixl, other, sent, error, seconds):
    """It happens while a piece is written. Nothing of the connection is left, and another peer is reached."""
    process, port = other
    count = itertools.count()

    def fail(memory, start, length):
        if next(count) == 2:
            process.send_signal(getattr(signal, sent))

    with channel(("127.0.0.1", port), Plain(), windows=changed(nixl, fail)) as wire:
        assert wire.call(b"ping", timeout_seconds=SECONDS)
        with pytest.raises(error):
            wire.call(b"store", outgoing=[memoryview(pattern(LONG))], timeout_seconds=seconds)
        assert not wire._idle
    with serving(Plain(), Recorder(), windows=nixl) as server, channel(server.address, Plain(), windows=nixl) as wire:
        assert echoed(wire)


class Stuck(LocalMemory):
    """A window that writes nothing."""

    def written(self) -> bool:
        return False


def test_a_write_that_does_not_end_ends_the_call_in_time():
    begun, bounds = time.monotonic(), Bounds(transfer_seconds=SECONDS)
    with (
        serving(Plain(), Recorder(), bounds, windows=LocalMemory) as server,
        channel(server.address, Plain(), windows=Stuck) as wire,
        pytest.raises(TimedOut),
    ):
        wire.call(b"store", outgoing=[memoryview(b"abc")], timeout_seconds=0.2)
    assert time.monotonic() - begun < SECONDS / 2 and not LocalMemory.all


def test_a_receiver_waits_for_a_piece_until_its_deadline():
    service = Recorder()
    with (
        serving(Plain(), service, Bounds(transfer_seconds=0.2), windows=LocalMemory) as server,
        channel(server.address, Plain(), windows=Stuck) as wire,
        pytest.raises(PeerDown),
    ):
        wire.call(b"store", outgoing=[memoryview(b"abc")], timeout_seconds=SECONDS)
    assert service.abandoned == [b"store"] and not LocalMemory.all


def test_a_server_that_cannot_be_reached_leaves_no_window():
    def unreachable() -> LocalMemory:
        memory = LocalMemory()
        memory.offer = Offer(b"local", 0)
        memory.connect = lambda offer: None
        return memory

    with (
        serving(Plain(), Recorder(), windows=unreachable) as server,
        channel(server.address, Plain(), windows=LocalMemory) as wire,
        pytest.raises(PeerDown),
    ):
        wire.call(b"ping", timeout_seconds=SECONDS)
    assert len(LocalMemory.all) == 0


# ---- settings --------------------------------------------------------------------------------------------------------


def test_a_missing_package_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr("lastgood.wire.nixl.VARIANTS", ("nixl_cu12_missing", "nixl_cu13_missing"))
    monkeypatch.setitem(PACKAGES, "nixl", ("nixl_cu12_missing",))
    with pytest.raises(
        NotInstalled, match=r"the wire nixl needs the package nixl_cu12.*pip install 'lastgood\[nixl\]'"
    ):
        Nixl({"UCX_TLS": "tcp"})


def test_the_transports_of_ucx_have_to_be_chosen():
    """Without a choice UCX opens ports at which everybody can write the memory of the process."""
    for environ in ({}, {"UCX_TLS": ""}):
        with pytest.raises(Refused, match="the wire is NIXL, and UCX_TLS is not set"):
            chosen_transports(environ)


@pytest.mark.slow
def test_transports_that_cannot_be_used_are_refused_at_once(nixl, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "self")
    with pytest.raises(Refused, match=r"no window can be made.*UCX_TLS=self has to name a transport of the network"):
        Nixl()


def test_tcp_of_ucx_is_recognized():
    assert [one for one in ("tcp", "rc,tcp", "all", "^ib", "rc,ud", "^tcp", "^ib,tcp") if permits_tcp(one)] == [
        "tcp",
        "rc,tcp",
        "all",
        "^ib",
    ]


def test_buffers_are_cut_into_pieces_of_a_length():
    buffers = [memoryview(b"abcde"), memoryview(b""), memoryview(b"f"), memoryview(b"ghijklmno")]
    assert [b"".join(one) for one in pieces(buffers, 4)] == [b"abcd", b"efgh", b"ijkl", b"mno"]
    assert [b"".join(one) for one in pieces([memoryview(b"abcd")], 4)] == [b"abcd"] and not list(pieces([], 4))

"""The server: how many it serves and for how long, and that nothing of it is left at the end."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from lastgood.errors import Cancelled, PeerDown
from lastgood.wire.frames import PUBLIC_KEY, FrameWriter
from lastgood.wire.messages import Hello
from lastgood.wire.port import Answer
from lastgood.wire.security import Plain, SharedKey
from lastgood.wire.serving import Bounds
from wired import CLIENT, KEY, MODES, RUN, SECONDS, SERVER, Recorder, Stranger, channel, security, serving

pytestmark = pytest.mark.usefixtures("either_wire")
LONG = 3 * SECONDS
"""longer than a test waits"""


@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_left_after_the_end_of_a_server(mode, signer):
    sides = security(mode, SERVER, signer), security(mode, CLIENT, signer)
    threads, files = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with serving(sides[0], Recorder()) as server, channel(server.address, sides[1]) as wire:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda _: wire.call(b"ping", timeout_seconds=SECONDS), range(8)))
        with Stranger(server.address):
            assert threading.active_count() > threads
    assert threading.active_count() == threads and len(os.listdir("/proc/self/fd")) == files


def test_a_server_ends_while_peers_and_strangers_are_connected():
    threads, service = threading.active_count(), Recorder()
    entered, left = threading.Event(), threading.Event()

    def slow(peer, request, bulk):
        entered.set()
        left.wait(SECONDS)
        return Answer(request)

    service.handle = slow
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as open_server:
        server = open_server.enter_context(serving(Plain(), service))
        with Stranger(server.address) as stranger, channel(server.address, Plain()) as wire:
            call = pool.submit(wire.call, b"ping", timeout_seconds=SECONDS)
            entered.wait(SECONDS)
            ending = pool.submit(open_server.close)
            with pytest.raises(PeerDown):
                call.result()
            assert stranger.received() == b""
            with pytest.raises(FutureTimeout):
                ending.result(0.2)  # the service still handles a request
            left.set()
            ending.result()
    assert threading.active_count() == threads


def test_a_server_ends_while_a_peer_opens_its_bulk_connection(signer, monkeypatch):
    """The end waited for the whole time of a handshake, for a connection that could not come any more."""
    joining = threading.Event()
    monkeypatch.setattr("lastgood.wire.session.Session.join", lambda *_: joining.set())
    secure = signer().node(SERVER)
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as open_server:
        server = open_server.enter_context(serving(secure, Recorder(), Bounds(handshake_seconds=LONG)))
        with channel(server.address, signer().node(CLIENT)) as wire:
            call = pool.submit(wire.call, b"ping", timeout_seconds=LONG)
            joining.wait(SECONDS)
            pool.submit(open_server.close).result(SECONDS)
            with pytest.raises(PeerDown):
                call.result()


def test_strangers_of_one_address_are_few():
    bounds = Bounds(strangers=8, strangers_of_address=2, handshake_seconds=LONG)
    with serving(SharedKey(KEY), Recorder(), bounds) as server, channel(server.address, SharedKey(KEY)) as wire:
        assert wire.call(b"ping", timeout_seconds=SECONDS), "a peer that has shown who it is is no stranger"
        with Stranger(server.address) as first, Stranger(server.address), Stranger(server.address) as third:
            assert third.received() == b"", "the newest one is closed"
            first.send(Hello(RUN, CLIENT, SharedKey(KEY).mode, b"n" * 32))
            assert first.socket.recv(1), "an older one goes on"
            assert wire.call(b"ping", timeout_seconds=SECONDS)


def test_strangers_and_connections_are_few_in_all():
    for bounds in (Bounds(strangers=1, handshake_seconds=LONG), Bounds(connections=1, handshake_seconds=LONG)):
        with (
            serving(SharedKey(KEY), Recorder(), bounds) as server,
            Stranger(server.address),
            Stranger(server.address) as second,
        ):
            assert second.received() == b""
            with channel(server.address, SharedKey(KEY)) as wire, pytest.raises(PeerDown):
                wire.call(b"ping", timeout_seconds=SECONDS)


def test_a_server_goes_on_when_there_is_no_thread_for_a_connection(monkeypatch):
    """`can't start new thread` ended the thread that accepts: no node could connect any more."""
    start = threading.Thread.start

    def fails(thread: threading.Thread) -> None:
        if thread.name == "wire-connection":
            raise RuntimeError("can't start new thread")
        start(thread)

    with serving(Plain(), Recorder(), Bounds(connections=1)) as server:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", fails)
            with Stranger(server.address) as stranger:
                assert stranger.received() == b""
        with channel(server.address, Plain()) as wire:
            assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip"


def test_a_place_is_free_again_when_its_connection_ends():
    with serving(Plain(), Recorder(), Bounds(connections=1)) as server:
        for _ in range(3):
            with channel(server.address, Plain()) as wire:
                while True:  # the thread of the connection before needs a moment to end
                    try:
                        assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip"
                        break
                    except PeerDown:
                        continue


@pytest.mark.parametrize("sent", [b"", b"LGW", FrameWriter(PUBLIC_KEY).encode(Hello(RUN, CLIENT, "?", b"n" * 32))[:-1]])
def test_a_stranger_that_sends_too_little_is_closed_in_time(sent):
    with (
        serving(SharedKey(KEY), Recorder(), Bounds(handshake_seconds=0.1)) as server,
        Stranger(server.address) as stranger,
    ):
        stranger.socket.sendall(sent)
        assert stranger.received() == b""


def test_a_stranger_that_sends_slowly_has_no_more_time():
    """Each byte began the timeout anew: a stranger that sent one now and then kept its connection for ever."""
    with (
        serving(SharedKey(KEY), Recorder(), Bounds(handshake_seconds=0.3)) as server,
        Stranger(server.address) as stranger,
    ):
        stranger.socket.settimeout(0.02)
        for byte in FrameWriter(PUBLIC_KEY).encode(Hello(RUN, CLIENT, "?", b"n" * 32)):
            try:
                stranger.socket.sendall(bytes([byte]))
                assert stranger.socket.recv(1) == b""
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("it could send for longer than a handshake may take")


def test_a_peer_without_requests_is_closed_after_a_while():
    with serving(Plain(), Recorder(), Bounds(idle_seconds=1.0)) as server, channel(server.address, Plain()) as wire:
        wire.call(b"ping", timeout_seconds=SECONDS)
        assert wire._idle[0].session._control.raw.recv(1) == b""
        assert wire.call(b"ping", timeout_seconds=SECONDS).record == b"gnip"


def test_closing_a_channel_ends_its_calls():
    service, entered, left = Recorder(), threading.Event(), threading.Event()

    def slow(peer, request, bulk):
        entered.set()
        left.wait(SECONDS)
        return Answer(request)

    service.handle = slow
    with serving(Plain(), service) as server, ThreadPoolExecutor(2) as pool:
        wire = channel(server.address, Plain(), connections=1)
        call, waiting = (pool.submit(wire.call, b"ping", timeout_seconds=SECONDS) for _ in range(2))
        entered.wait(SECONDS)
        wire.close()
        for one in (call, waiting):
            with pytest.raises(Cancelled, match="was closed by this one"):
                one.result()
        left.set()
        with pytest.raises(Cancelled):
            wire.call(b"ping", timeout_seconds=SECONDS)

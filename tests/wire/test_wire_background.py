"""Bytes of the background follow the delay of their path, and nothing else that is sent does."""

from __future__ import annotations

import contextlib
import errno
import math
import shutil
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lastgood.testing import Clock
from lastgood.wire.background import (
    LEAST_BYTES_PER_SECOND,
    LEAST_PART_BYTES,
    MEASUREMENTS,
    MOST_PART_BYTES,
    NO_RATE,
    QUEUE_SECONDS,
    SO_MAX_PACING_RATE,
    Background,
    Seen,
    background_of,
    next_rate,
)
from lastgood.wire.channel import Channel
from lastgood.wire.port import Answer, Peer
from lastgood.wire.security import SharedKey
from lastgood.wire.serving import Server
from lastgood_lab import namespaces
from wired import CLIENT, KEY, RUN, SECONDS, SERVER, Recorder, channel, serving

FREE = Seen(0.0001, 0.0001, 0, 0, 100e6)
"""a path on which nothing waits, and which delivers 100 MB/s"""
QUEUE = FREE._replace(round_trip_seconds=0.0002 + QUEUE_SECONDS)
MEGABITS = 80


def test_a_rate_grows_as_long_as_it_is_used_and_nothing_waits() -> None:
    assert next_rate(math.inf, FREE, FREE) == math.inf
    assert 100e6 < next_rate(100e6, FREE, FREE) < 120e6
    assert next_rate(201e6, FREE, FREE) == 201e6, "no rate is used that is twice what is delivered"


def test_a_rate_falls_below_what_is_delivered_once_packets_wait() -> None:
    assert next_rate(math.inf, FREE, QUEUE) == pytest.approx(70e6)
    assert next_rate(90e6, FREE, QUEUE) == pytest.approx(63e6)


def test_a_rate_falls_where_many_packets_are_lost() -> None:
    """Beside a busy machine a few packets are taken for lost that are not: copies over loopback took 0.12 GB/s in
    place of 0.86."""
    few, many = FREE._replace(sent=1000, sent_again=10), FREE._replace(sent=1000, sent_again=11)
    assert next_rate(math.inf, FREE, few) == math.inf
    assert next_rate(math.inf, FREE, many) == pytest.approx(70e6)
    assert next_rate(math.inf, many, many._replace(sent=2000)) == math.inf, "what was lost before was seen already"


def test_a_rate_falls_to_a_third_at_most_and_never_ends() -> None:
    """After a pause hardly anything was delivered, and the rate fell to its least although the path was free."""
    paused = QUEUE._replace(delivered=1e3)
    assert next_rate(90e6, FREE, paused) == pytest.approx(30e6)
    assert next_rate(math.inf, FREE, paused) == LEAST_BYTES_PER_SECOND == next_rate(1.1e6, FREE, paused)


def test_a_long_path_has_a_queue_once_its_round_trip_has_doubled() -> None:
    """Between two sites each packet takes some milliseconds more or less, and nothing waits."""
    far = FREE._replace(round_trip_seconds=0.055, quickest_seconds=0.03)
    assert next_rate(50e6, far, far) > 50e6
    assert next_rate(50e6, far, far._replace(round_trip_seconds=0.061)) < 50e6


@pytest.mark.parametrize(("delivered", "part"), [(0.0, LEAST_PART_BYTES), (40e6, 200_000), (4e9, MOST_PART_BYTES)])
def test_a_slow_path_is_looked_at_after_fewer_bytes(monkeypatch, delivered: float, part: int) -> None:
    monkeypatch.setattr("lastgood.wire.background._seen", lambda _: FREE._replace(delivered=delivered))
    with socket.socket() as sock:
        assert Background(sock).part_bytes() == part


def test_a_single_late_answer_slows_nothing(monkeypatch) -> None:
    """A receiver that another process had interrupted answered late once, and copies took a third of their speed."""
    rates, seen, clock = list[float](), [FREE], Clock()
    monkeypatch.setattr("lastgood.wire.background._seen", lambda _: seen[-1])
    monkeypatch.setattr(Background, "_keep", lambda _, rate: rates.append(rate))
    with socket.socket() as sock:
        background = Background(sock, clock)

        def measured(*paths: Seen) -> list[float]:
            rates.clear()
            for path in paths:
                clock.advance(1.0)
                seen.append(path)
                background.measure()
            return [*rates]

        assert measured(*[QUEUE] * (MEASUREMENTS - 1), FREE, *[QUEUE] * (MEASUREMENTS - 1)) == []
        assert measured(QUEUE) == pytest.approx([70e6])
        assert measured(*[QUEUE] * (MEASUREMENTS - 1)) == [], "the queue of the rate before is still there"
        assert measured(QUEUE) == pytest.approx([49e6])


def test_a_path_is_measured_once_in_a_round_trip(monkeypatch) -> None:
    """Many parts left before anything had come back, and each of them lowered the rate for the same old measurement: a
    free path of 1 Gbit/s was used with 1 MB/s."""
    rates, clock, round_trip = list[float](), Clock(), QUEUE._replace(round_trip_seconds=0.02)
    monkeypatch.setattr("lastgood.wire.background._seen", lambda _: round_trip)
    monkeypatch.setattr(Background, "_keep", lambda _, rate: rates.append(rate))
    with socket.socket() as sock:
        background = Background(sock, clock)
        for _ in range(MEASUREMENTS):
            for _ in range(40):
                background.measure()
            clock.advance(round_trip.round_trip_seconds)
    assert rates == pytest.approx([70e6])


@pytest.mark.parametrize("refused", ["setsockopt", "getsockopt"])
def test_copies_go_on_where_the_system_keeps_no_rate(monkeypatch, refused: str) -> None:
    """Every chunk failed in a sandbox whose system does not know the option, as if the network were down."""

    class Sandboxed(socket.socket):
        pass

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOPROTOOPT, "Protocol not available")

    setattr(Sandboxed, refused, refuse)
    with Sandboxed() as sock:
        assert background_of(sock) is None


def test_a_socket_without_a_network_has_no_rate() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert background_of(ours) is None


def test_only_what_is_sent_in_the_background_has_a_rate(monkeypatch) -> None:
    asked = list[str]()

    class Noted(Recorder):
        def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
            return Answer(request, [bulk], request == b"slow")

    def noted(sock: socket.socket) -> None:
        asked.append("asked" if sock.getpeername() == server.address else "answered")

    monkeypatch.setattr("lastgood.wire.sockets.background_of", noted)
    data, room = memoryview(b"x" * 100), memoryview(bytearray(100))
    with serving(SharedKey(KEY), Noted()) as server, channel(server.address, SharedKey(KEY)) as wire:
        for request, background, who in (
            (b"quick", False, []),
            (b"quick", True, ["asked"]),
            (b"slow", False, ["answered"]),
        ):
            asked.clear()
            wire.call(request, outgoing=[data], incoming=room, timeout_seconds=SECONDS, background=background)
            assert asked == who


@pytest.fixture
def slow() -> Iterator[namespaces.Network]:
    if lacks := namespaces.missing() or ("" if shutil.which("tc") else "needs tc: apt-get install iproute2"):
        pytest.skip(lacks)
    with namespaces.Network(2) as network:
        network.slow_down(1, MEGABITS)
        yield network


def test_a_slow_link_is_not_filled_by_the_background(slow: namespaces.Network) -> None:
    """Copies filled a link of 80 Mbit/s, and the messages of each save waited behind them: a loop took 2.2 times as
    long."""
    data = memoryview(bytes(3 << 20))
    with contextlib.ExitStack() as stack:
        there, here = (stack.enter_context(ThreadPoolExecutor(1)) for _ in range(2))
        there.submit(namespaces.enter, slow.name(1)).result()
        here.submit(namespaces.enter, slow.name(0)).result()
        # A socket belongs to the namespace of the thread that makes it.
        server = Server((slow.address(1), 0), Peer(RUN, SERVER), SharedKey(KEY), Recorder())
        there.submit(stack.enter_context, server).result()
        wire = stack.enter_context(Channel(server.address, SERVER, Peer(RUN, CLIENT), SharedKey(KEY)))

        def rate_after(background: bool) -> int:
            wire.call(
                b"keep",
                outgoing=[data],
                incoming=memoryview(bytearray(len(data))),
                timeout_seconds=SECONDS,
                background=background,
            )
            sock = wire._idle[-1].session._control.raw
            return struct.unpack("=Q", sock.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))[0]

        several = 4 * MEGABITS * 1e6 / 8
        for _ in range(2):
            assert here.submit(rate_after, False).result() == NO_RATE
            assert here.submit(rate_after, True).result() < several

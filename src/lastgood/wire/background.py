"""How fast a connection sends bytes of the background, so that others on the same path need not wait for them.

Copies between nodes would fill a slow link, and the messages of a save would wait behind them, or be lost. So bytes of
the background follow the delay of their path, as in RFC 6817 (LEDBAT): their rate falls once packets queue up or are
lost, and grows again while neither is seen. The kernel measures both, and keeps the rate. Before anything was seen
there is none. Knows no message. Where the kernel is not Linux, the rate is not limited.
"""

from __future__ import annotations

import math
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

QUEUE_SECONDS = 0.005
"""A path has a queue if its round trip is longer than the shortest one by more than this, and twice as long."""
LOST = 0.01
"""A path has a queue, too, if it loses more than this part of the packets. Some are lost without a queue."""
MEASUREMENTS = 4
"""So many in a row must show a queue. A receiver that waits for a processor shows one, too, but only once."""
LOWER, RAISE = 0.7, 1.1
"""What the rate is multiplied by at each measurement."""
LEAST_FALL = 1 / 3
"""The rate falls to this part of itself at most, whatever was delivered: a pause delivers nothing."""
LEAST_BYTES_PER_SECOND = 1e6
"""The rate is never lower, so that copies are made even where others fill the path."""
MEASURE_SECONDS = 0.005
LEAST_PART_BYTES, MOST_PART_BYTES = 64 << 10, 1 << 20
"""Between two measurements lie a round trip and MEASURE_SECONDS at least, and at most so many bytes each time."""
SO_MAX_PACING_RATE = 47
"""of Linux; Python has no name for it"""
NO_RATE = 2**64 - 1
_INFO = struct.Struct("=68xI28xI44xI4xIQ")
"""of `struct tcp_info`: tcpi_rtt, tcpi_total_retrans, tcpi_min_rtt, tcpi_data_segs_out, tcpi_delivery_rate"""


class Seen(NamedTuple):
    """What the kernel has measured on a connection."""

    round_trip_seconds: float
    """of the last packets; the shortest of the last MEASUREMENTS"""
    quickest_seconds: float
    """the shortest round trip of the last minutes"""
    sent: int
    """packets, since the connection was made"""
    sent_again: int
    """of them, those that were taken for lost"""
    delivered: float
    """bytes a second, of the last packets"""


def next_rate(rate: float, before: Seen, now: Seen) -> float:
    """The rate in bytes a second after a measurement. `rate`: the one so far; infinite: none. Pure."""
    waits = now.round_trip_seconds - now.quickest_seconds > max(QUEUE_SECONDS, now.quickest_seconds)
    if waits or now.sent_again - before.sent_again > LOST * (now.sent - before.sent):  # guard: few-losses-slow-nothing
        fallen = min(rate, now.delivered) * LOWER
        if math.isfinite(rate):
            fallen = max(fallen, rate * LEAST_FALL)
        return max(fallen, LEAST_BYTES_PER_SECOND)
    return rate * RAISE if rate < 2 * now.delivered else rate  # guard: unused-rate-does-not-grow


class Background:
    """The rate of one connection, for the thread that sends. `sock`: connected, over TCP. `clock`: in seconds. Raises
    OSError where the system refuses to measure."""

    def __init__(self, sock: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
        self._socket, self._clock, self._rate, self._kept = sock, clock, math.inf, False
        self._seen = _seen(sock)
        self._next_seconds = clock()
        """when the path is measured again: what was measured before says nothing of what is sent now"""
        self._round_trips = deque[float](maxlen=MEASUREMENTS)
        """in seconds, since the rate has last fallen"""

    def part_bytes(self) -> int:
        """How much is sent until the next measurement."""
        bytes_until_next = int(min(self._rate, self._seen.delivered) * MEASURE_SECONDS)
        return min(max(bytes_until_next, LEAST_PART_BYTES), MOST_PART_BYTES)

    def measure(self) -> None:
        """Fit the rate to what the path does."""
        if (time_seconds := self._clock()) < self._next_seconds:  # guard: one-measurement-a-round-trip
            return
        now = _seen(self._socket)
        self._next_seconds = time_seconds + max(MEASURE_SECONDS, now.round_trip_seconds)
        self._round_trips.append(now.round_trip_seconds)
        if len(self._round_trips) == MEASUREMENTS:
            now = now._replace(round_trip_seconds=min(self._round_trips))  # guard: one-late-answer-slows-nothing
            rate = next_rate(self._rate, self._seen, now)
            if rate < self._rate:
                self._round_trips.clear()
            if rate != self._rate:
                self._rate = rate
                self._keep(rate)
            self._seen = now

    def begin(self) -> None:
        """Send bytes of the background from now on."""
        if math.isfinite(self._rate) and not self._kept:
            self._keep(self._rate)

    def end(self) -> None:
        """Send other bytes from now on, as fast as the path takes them."""
        if self._kept:
            self._keep(math.inf)  # guard: only-background-is-slowed

    def _keep(self, rate: float) -> None:
        self._kept = math.isfinite(rate)
        bytes_per_second = int(rate) if self._kept else NO_RATE
        self._socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", bytes_per_second))


def background_of(sock: socket.socket) -> Background | None:
    """The rate of a connection; None where the system measures or keeps none: another one than Linux, or a sandbox."""
    if sys.platform != "linux" or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("=Q", NO_RATE))
        measures = len(_measured(sock)) >= _INFO.size and _seen(sock).quickest_seconds > 0
    except OSError:  # a connection that has ended fails where bytes are sent
        return None  # guard: copies-go-on-without-a-rate
    return Background(sock) if measures else None


def _seen(sock: socket.socket) -> Seen:
    round_trip, sent_again, quickest, sent, delivered = _INFO.unpack_from(_measured(sock))
    return Seen(round_trip / 1e6, quickest / 1e6, sent, sent_again, float(delivered))


def _measured(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)

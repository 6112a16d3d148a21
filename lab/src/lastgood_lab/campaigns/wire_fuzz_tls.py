"""What a server with certificates receives is changed, inside of TLS or on its way: does it accept a wrong byte?

The client is real TLS, so each session has other bytes. A trial changes either what the client sends inside of a whole
TLS session, with the changes of wire_fuzz.py, or the bytes of one of its flights on the wire: the first one, that with
its certificate, or that with the frames. After a changed flight it sends nothing more. The same is asked of the server
as there. Bulk bytes go through TLS; a second connection for bulk bytes in the clear is not made here.
Writes lab/reports/wire_fuzz_tls.*
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import random
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from lastgood.wire.security import MutualTls
from lastgood_lab import wire
from lastgood_lab.campaigns import wire_fuzz
from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.wire_fuzz import Change, Found, Judge, Script

ON_THE_WAY: tuple[Change, ...] = (
    wire_fuzz.flip,
    wire_fuzz.flip,
    wire_fuzz.splice,
    wire_fuzz.cut_off,
    wire_fuzz.repeat,
    wire_fuzz.leave_out,
    wire_fuzz.garbage,
)
FLIGHTS = "first flight", "certificate", "frames"
BATCH = 500


class Certificates(NamedTuple):
    """What a server and a client need to show who they are."""

    server: MutualTls
    client: ssl.SSLContext

    @classmethod
    def of(cls, folder: str) -> Certificates:
        """Those that `wire.certificates` has made in this folder."""
        mine, theirs, authority = f"{folder}/{wire.SERVER}", f"{folder}/{wire.CLIENT}", f"{folder}/ca.crt"
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        client.load_cert_chain(f"{theirs}.crt", f"{theirs}.key")
        client.load_verify_locations(authority)
        names = frozenset({wire.CLIENT})
        return cls(MutualTls(f"{mine}.crt", f"{mine}.key", authority, encrypt=True, names=names), client)


class Client:
    """A client through TLS on a socket. `change`: what happens to the bytes of the flight `changed`; None: of none."""

    def __init__(
        self, sock: socket.socket, context: ssl.SSLContext, changed: int | None, change: Callable[[bytes], bytes]
    ) -> None:
        self._socket, self._changed, self._change, self._flight = sock, changed, change, 0
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing)

    def run(self, sent: bytes) -> None:
        """Send these bytes through TLS, and then end the sending side. What the server refuses ends it too."""
        with contextlib.suppress(OSError, EndOfTrial):  # ssl.SSLError is one
            self._handshake()
            self._tls.write(sent)
            self._flush()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def _handshake(self) -> None:
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not (data := self._socket.recv(1 << 16)):
                    raise EndOfTrial from None
                self._incoming.write(data)
            else:
                self._flush()
                return

    def _flush(self) -> None:
        if not (data := self._outgoing.read()):
            return
        if self._flight == self._changed:
            self._socket.sendall(self._change(data))
            raise EndOfTrial
        self._socket.sendall(data)
        self._flight += 1


class EndOfTrial(Exception):
    """The client sends nothing more."""


def trial(seed: str, certificates: Certificates, script: Script, other: Script, found: Found) -> None:
    """One session with one change."""
    rng, judge = random.Random(seed), Judge()
    sent, changed = list(script.parts), rng.choice((None, 0, 1, 2))
    if changed is None:
        change = rng.choice(wire_fuzz.CHANGES)
        sent, name = list(change(rng, sent, other)), change.__name__
    else:
        change = rng.choice(ON_THE_WAY)
        name = f"{change.__name__}, {FLIGHTS[changed]}"
    begun = time.monotonic()
    end = session(certificates, judge, b"".join(sent), changed, lambda data: b"".join(change(rng, [data], script)))
    problems = wire_fuzz.problems_of(judge, end, time.monotonic() - begun)
    if judge.handled == len(wire_fuzz.REQUESTS) and not b"".join(sent).startswith(b"".join(script.parts)):
        problems.append("every request was accepted, and the bytes were others")
    found.trials[name] += 1
    found.ends[end] += 1
    found.problems += [f"{seed}, {name}: {one}" for one in problems]


def session(
    certificates: Certificates,
    judge: Judge,
    sent: bytes,
    changed: int | None = None,
    change: Callable[[bytes], bytes] = bytes,
) -> str:
    """Let the server's code serve a client that sends these bytes through TLS; returns how it ended."""
    near, far = socket.socketpair()
    with near, far:
        client = threading.Thread(target=Client(near, certificates.client, changed, change).run, args=(sent,))
        client.start()
        try:
            return wire_fuzz.served(certificates.server, judge, far)
        finally:
            far.close()
            client.join()


def batch(job: tuple[str, int, int, int]) -> Found:
    """The trials from `start` to `end` of a seed, and whether anything is left of them."""
    folder, seed, start, end = job
    certificates, found = Certificates.of(folder), Found()
    script, other = (
        wire_fuzz.recorded(certificates.server, nonce) for nonce in (wire_fuzz.CLIENT_RANDOM, wire_fuzz.OTHER_RANDOM)
    )
    judge = Judge()  # the campaign is worth nothing if the valid session is not accepted
    how = session(certificates, judge, b"".join(script.parts))
    if how != "PeerDown" or judge.handled != len(wire_fuzz.REQUESTS) or judge.problems:
        found.problems.append(f"the valid session was not accepted: {how}, {judge.problems}")
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for number in range(start, end):
        trial(f"{seed}-{number}", certificates, script, other, found)
    if (len(os.listdir("/proc/self/fd")), threading.active_count()) != before:
        found.problems.append(f"trials {start} to {end}: descriptors or threads are left")
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trials", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--jobs", type=int, default=2)
    args = options.parse_args()
    found, begun = Found(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        wire.certificates(Path(folder))
        jobs = [(folder, args.seed, at, min(at + BATCH, args.trials)) for at in range(0, args.trials, BATCH)]
        for one in pool.imap_unordered(batch, jobs):
            found.add(one)
            done = f"{sum(found.trials.values()):,} trials, {len(found.problems)} violations"
            print(f"{done}, {time.monotonic() - begun:.0f} s", flush=True)
    facts = {
        "trials": sum(found.trials.values()),
        "seed": args.seed,
        "seconds": round(time.monotonic() - begun),
        "violations": len(found.problems),
        "problems": found.problems[:100],
    }
    tables = [
        f"| {what} | trials |\n|---|---|\n" + "\n".join(f"| {name} | {count:,} |" for name, count in rows.most_common())
        for what, rows in (("change", found.trials), ("the server ended with", found.ends))
    ]
    report("wire_fuzz_tls", "Changed bytes to a server with certificates", facts, tables)
    print(*found.problems[:20], sep="\n")
    return 1 if found.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

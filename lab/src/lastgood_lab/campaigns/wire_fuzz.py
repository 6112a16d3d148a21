"""What a server of the wire receives is changed or made up: does it crash, hang, leak, or accept a wrong byte?

A valid session is recorded: a handshake, then requests with and without bulk bytes. The server's random bytes are
given, so the same bytes of the client are valid every time. Each trial changes them (bits, bytes, lengths, whole
frames repeated, left out, moved, taken from another session, cut off) or makes them up, sends them through a socket
pair to the server's own code, and closes the sending end. Whatever the server does has to end, with an error of the
package or the end of the stream; the service may have been given only a prefix of the valid requests, each with its
own bytes; and for every buffer that the service gave it was called once more, to handle or to abandon it.

In half of the trials bulk bytes go through windows, whose bytes are changed too: the server's window is ordinary
memory here, so no transport is tested. Sessions through TLS: wire_fuzz_tls.py.
"""

from __future__ import annotations

import argparse
import hmac
import mmap
import multiprocessing
import os
import random
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lastgood.errors import FrameInvalid, LastgoodError
from lastgood.limits import WIRE_PIECE_BYTES, WIRE_PIECES
from lastgood.wire.frames import HEADER, MAGIC, PUBLIC_KEY, VERSION, FrameWriter
from lastgood.wire.handshake import Side, keys_of
from lastgood.wire.keys import digest
from lastgood.wire.messages import Hello, Offer, Placed, Proof, Request, Taken, Welcome
from lastgood.wire.port import Answer, Peer
from lastgood.wire.security import Plain, Security, SharedKey
from lastgood.wire.serving import Bounds, Conversations
from lastgood.wire.sockets import Stream
from lastgood.wire.window import WINDOW_BYTES, MakeMemory
from lastgood_lab.campaigns.reports import report

SERVER, CLIENT = Peer("run", "node-a"), Peer("run", "node-b")
KEY = bytes(range(32))
MODES: tuple[Security, ...] = (SharedKey(KEY), SharedKey(KEY, "blake3"), Plain())
SERVER_RANDOM, CLIENT_RANDOM, OTHER_RANDOM = b"s" * 32, b"c" * 32, b"o" * 32
REQUESTS = ((b"ping", b""), (b"put 1", bytes(range(256)) * 3), (b"", b""), (b"put 2", b"x"), (b"get" * 40, b""))
ANSWER = b"answer" * 10
"""bulk bytes, to the last request"""
SECONDS_LIMIT = 5.0
"""A trial that takes longer counts as hung. All bytes are there when it begins, so nothing has to be waited for."""
BATCH = 2000


@dataclass(frozen=True)
class Script:
    """The bytes of a client in one session, in parts: frames, and bulk bytes after some of them."""

    parts: tuple[bytes, ...]
    pieces: tuple[bytes, ...] = ()
    """what it has written into the window of the server, each at its place; none: there are no windows"""


def recorded(security: Security, nonce: bytes, windows: bool = False) -> Script:
    """The valid session of a client whose random bytes are `nonce`."""
    hello = Hello(CLIENT.run, CLIENT.node, security.mode, nonce)
    keys = keys_of(security, hello, Welcome(SERVER.run, SERVER.node, SERVER_RANDOM))
    public, writer = FrameWriter(PUBLIC_KEY), FrameWriter(keys.frames_to_server)
    parts = [public.encode(hello), public.encode(Proof(keys.client_proof))]
    if windows:
        parts.append(writer.encode(Offer(b"the client's window", 0)))
    for record, bulk in REQUESTS:
        found = digest(security.digest, keys.bulk_to_server, [memoryview(bulk)]) if bulk else b""
        parts.append(writer.encode(Request(record, len(ANSWER), len(bulk), found)))
        if bulk:
            parts.append(writer.encode(Placed(len(bulk))) if windows else bulk)
    if windows:
        parts.append(writer.encode(Taken()))  # the bulk bytes of the last answer
    return Script(tuple(parts), tuple(bulk for _, bulk in REQUESTS if bulk) if windows else ())


class Written:
    """A window of the server into which a client has written before; the way to the client's leads nowhere."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        assert len(pieces) <= WIRE_PIECES
        self.offer, self.open = Offer(b"the server's window", 0), True
        self.view = memoryview(mmap.mmap(-1, WINDOW_BYTES))
        for number, piece in enumerate(pieces):
            self.view[number * WIRE_PIECE_BYTES :][: len(piece)] = piece

    def connect(self, offer: Offer) -> None: ...

    def write(self, start: int, length: int) -> None: ...

    def written(self) -> bool:
        return True

    def progress(self) -> None: ...

    def close(self) -> None:
        self.open = False


class Judge:
    """A service that accepts the valid requests in their order, and notes everything else."""

    def __init__(self) -> None:
        self.handled = 0
        self.waiting: bytes | None = None
        """the request whose buffer was given and not yet used"""
        self.problems: list[str] = []

    def buffer(self, peer: Peer, request: bytes, length: int) -> memoryview:
        if self.waiting is not None:
            self.problems.append(f"the buffer of {self.waiting!r} was forgotten")
        self.waiting = request
        return memoryview(bytearray(length))

    def handle(self, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
        self.waiting = None
        if peer != CLIENT or self.handled >= len(REQUESTS) or (request, bytes(bulk)) != REQUESTS[self.handled]:
            self.problems.append(f"{peer} was given {request!r} with {len(bulk)} bytes as request {self.handled}")
        self.handled += 1
        return Answer(b"ok", [memoryview(ANSWER)] if self.handled == len(REQUESTS) else ())

    def abandon(self, peer: Peer, request: bytes) -> None:
        if self.waiting != request:
            self.problems.append(f"{request!r} was abandoned, {self.waiting!r} waited")
        self.waiting = None


# ---- changes -----------------------------------------------------------------------------------------------------

Change = Callable[[random.Random, list[bytes], Script], Sequence[bytes]]


def flip(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """One to three bits of one part are flipped."""
    at = rng.randrange(len(parts))
    part = bytearray(parts[at])
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
    parts[at] = bytes(part)
    return parts


def header(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """A field of a frame's header has another value: magic, version, length or number."""
    at = rng.choice([index for index, part in enumerate(parts) if part.startswith(MAGIC)])
    fields = list(HEADER.unpack(parts[at][: HEADER.size]))
    which = rng.randrange(4)
    fields[which] = (
        rng.randbytes(4)
        if which == 0
        else rng.choice([0, 1, 2, 3, 255, 2**15, fields[which] + 1, rng.getrandbits((16, 16, 32, 64)[which])])
        % 2 ** (16, 16, 32, 64)[which]
    )
    parts[at] = HEADER.pack(*fields) + parts[at][HEADER.size :]
    return parts


def splice(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """Bytes are inserted, left out or replaced anywhere."""
    data = b"".join(parts)
    start = rng.randrange(len(data) + 1)
    end = min(len(data), start + rng.choice((0, 0, 1, 2, 7, 40, 400)))
    return [data[:start], rng.randbytes(rng.choice((0, 1, 2, 7, 40, 400))), data[end:]]


def cut_off(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """The stream ends anywhere."""
    data = b"".join(parts)
    return [data[: rng.randrange(len(data))]]


def repeat(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """A part is sent again, later on."""
    at = rng.randrange(len(parts))
    parts.insert(rng.randrange(at + 1, len(parts) + 1), parts[at])
    return parts


def leave_out(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """A part is lost."""
    del parts[rng.randrange(len(parts))]
    return parts


def reorder(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """Two parts change places."""
    one, two = rng.sample(range(len(parts)), 2)
    parts[one], parts[two] = parts[two], parts[one]
    return parts


def foreign(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """A part, or all parts from one on, are those of another session of the same client."""
    at = rng.randrange(1, len(parts))
    if rng.random() < 0.5:
        return [*parts[:at], other.parts[at], *parts[at + 1 :]]
    return [*parts[:at], *other.parts[at:]]


def garbage(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """Random bytes, after none, some or all of the handshake; some of them begin like a frame."""
    head = rng.choice((b"", b"", MAGIC, MAGIC + b"\0", HEADER.pack(MAGIC, VERSION, rng.randrange(5000), 0)))
    return [*parts[: rng.randrange(4)], head + rng.randbytes(rng.choice((0, 1, 17, 18, 50, 300, 3000)))]


def tagged_garbage(rng: random.Random, parts: list[bytes], other: Script) -> Sequence[bytes]:
    """A frame with a correct public tag and a random or nearly valid body, in the handshake."""
    at = rng.randrange(2)
    body = bytearray(parts[at][HEADER.size : -32])
    for _ in range(rng.randrange(1, 6)):
        body[rng.randrange(len(body))] = rng.choice((0x80, 0x90, 0xC0, 0xC4, 0xD9, 0xDD, 0xDF, rng.randrange(256)))
    body = body if rng.random() < 0.7 else bytearray(rng.randbytes(rng.randrange(200)))
    data = HEADER.pack(MAGIC, VERSION, len(body), at) + body
    parts[at] = data + hmac.digest(PUBLIC_KEY, data, "sha256")
    return parts


CHANGES: tuple[Change, ...] = (
    flip, flip, header, splice, cut_off, repeat, leave_out, reorder, foreign, garbage, tagged_garbage,
)  # fmt: skip


def overwrite(rng: random.Random, pieces: list[bytes], other: Script) -> Sequence[bytes]:
    """Bits or bytes in the window of the server are others."""
    at = rng.randrange(len(pieces))
    if rng.random() < 0.5:
        return flip(rng, pieces, other)
    pieces[at] = rng.randbytes(len(pieces[at]))
    return pieces


# ---- trials ------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What some trials have found."""

    trials: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def add(self, other: Found) -> None:
        self.trials += other.trials
        self.ends += other.ends
        self.problems += other.problems


def trial(seed: str, security: Security, script: Script, other: Script, found: Found, change: Change | None) -> None:
    """One session with one change; `change` None draws it."""
    rng = random.Random(seed)
    change = change or rng.choice((*CHANGES, *([overwrite] if script.pieces else [])))
    parts, pieces = list(script.parts), list(script.pieces)
    if change is overwrite:
        pieces = list(change(rng, pieces, other))
    else:
        parts = list(change(rng, parts, other))
    sent, judge = b"".join(parts), Judge()
    begun = time.monotonic()
    end = serve(security, judge, sent, pieces)
    problems = problems_of(judge, end, time.monotonic() - begun)
    needed = b"".join(script.parts[:-1] if script.pieces else script.parts)  # for the requests, without the last Taken
    if judge.handled == len(REQUESTS) and (not sent.startswith(needed) or tuple(pieces) != script.pieces):
        problems.append("every request was accepted, and the bytes were others")
    found.trials[change.__name__] += 1
    found.ends[end] += 1
    found.problems += [f"{security.mode}, {seed}, {change.__name__}: {one}" for one in problems]


def problems_of(judge: Judge, end: str, seconds: float) -> list[str]:
    """What is wrong with a session that has ended so, after so many seconds, whatever was sent."""
    problems = [*judge.problems]
    if seconds > SECONDS_LIMIT:
        problems.append("it took too long")
    if judge.waiting is not None:
        problems.append(f"the buffer of {judge.waiting!r} was forgotten")
    if end.startswith("crash"):
        problems.append(end)
    return problems


def serve(security: Security, judge: Judge, sent: bytes, pieces: Sequence[bytes] = ()) -> str:
    """Let the server's code receive these bytes, with windows if there are `pieces`; returns how it ended."""
    windows: list[Written] = []

    def make() -> Written:
        windows.append(Written(pieces))
        return windows[-1]

    near, far = socket.socketpair()
    with near, far:
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        end = served(security, judge, far, make if pieces else None)
    if any(one.open for one in windows):
        judge.problems.append("a window is left open")
    return end


def served(security: Security, judge: Judge, far: socket.socket, windows: MakeMemory | None = None) -> str:
    """Let the server's code serve this connection; returns how it ended."""
    side = Side(SERVER, security, lambda length: SERVER_RANDOM[:length])
    conversations = Conversations(side, judge, Bounds(handshake_seconds=SECONDS_LIMIT), time.monotonic, windows)
    try:
        conversations.serve(Stream(far, "the client"))
    except FrameInvalid as error:
        return f"FrameInvalid: {error.reason}"
    except LastgoodError as error:
        return type(error).__name__
    except BaseException as error:
        return f"crash: {type(error).__name__}: {error}"
    return "no error"


def batch(job: tuple[int, int, int]) -> Found:
    """The trials from `start` to `end` of a seed, and whether anything is left of them."""
    seed, start, end = job
    found = Found()
    scripts = [
        (one, recorded(one, CLIENT_RANDOM, windows), recorded(one, OTHER_RANDOM, windows))
        for one in MODES
        for windows in (False, True)
    ]
    for security, script, _ in scripts:  # the campaign is worth nothing if the valid session is not accepted
        judge = Judge()
        how = serve(security, judge, b"".join(script.parts), script.pieces)
        if how != "PeerDown" or judge.handled != len(REQUESTS) or judge.problems:
            found.problems.append(f"{security.mode}: the valid session was not accepted: {how}, {judge.problems}")
    before = (len(os.listdir("/proc/self/fd")), threading.active_count())
    for number in range(start, end):
        security, script, other = scripts[number % len(scripts)]
        trial(f"{seed}-{number}", security, script, other, found, None)
    if (len(os.listdir("/proc/self/fd")), threading.active_count()) != before:
        found.problems.append(f"trials {start} to {end}: descriptors or threads are left")
    return found


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--trials", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--jobs", type=int, default=2)
    args = options.parse_args()
    jobs = [(args.seed, at, min(at + BATCH, args.trials)) for at in range(0, args.trials, BATCH)]
    found, begun = Found(), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(args.jobs) as pool:
        for number, one in enumerate(pool.imap_unordered(batch, jobs), 1):
            found.add(one)
            if number % 25 == 0 or number == len(jobs):
                done = f"{sum(found.trials.values()):,} trials, {len(found.problems)} violations"
                print(f"{done}, {time.monotonic() - begun:.0f} s", flush=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    facts = {
        "trials": sum(found.trials.values()),
        "seed": args.seed,
        "seconds": round(time.monotonic() - begun),
        "most_memory_of_a_process_mb": round(peak / 1000),
        "violations": len(found.problems),
        "problems": found.problems[:100],
    }
    what = {change.__name__: (change.__doc__ or "").splitlines()[0] for change in (*CHANGES, overwrite)}
    tables = [
        "| change | what | trials |\n|---|---|---|\n"
        + "\n".join(f"| {name} | {text} | {found.trials[name]:,} |" for name, text in what.items()),
        "| the server ended with | trials |\n|---|---|\n"
        + "\n".join(f"| {name} | {count:,} |" for name, count in found.ends.most_common()),
    ]
    report("wire_fuzz", "Changed and made-up bytes to a server of the wire", facts, tables)
    print(*found.problems[:20], sep="\n")
    return 1 if found.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

"""The agent of one run on a node: waits until no training process is attached, then copies, lingers, and ends.

    attached  a training process has the run open: it makes the copies, and the agent waits
    draining  none is attached: what is missing in the places below is copied (drain.py), until nothing is missing
    lingering everything is copied, also if the run was deleted since: it waits for the next training process a while
    ended     memory is removed; what is on a disk stays

One thread serves the socket; another one copies. The agent ends early only after SIGTERM or SIGINT; nothing is removed
then, and the next opening of the run copies what is missing.

Invariants
  1. Memory is removed only if all places have, or had before they were deleted, what it holds, and no training process
     is attached or has the run open.
  2. An answer to "attach" comes after the copies have stopped, so agent and training process never copy at once.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Event

import msgspec

from .. import reporting
from ..errors import Cancelled, LastgoodError
from ..io.files import Lock, PosixFiles
from ..io.memory_files import MemoryFiles, still
from ..ports import Mendable
from ..records import prepare
from ..run import access, memory_place, memory_relief, paths
from ..run.agent_link import LINGER_SECONDS, LOCK, MESSAGE_LIMIT_BYTES, PROTOCOL, SPEC, listening, read_spec, user_of
from ..run.agent_messages import Answer, KnownPeers, Request
from ..run.late_commit import HELD, commit_in, commit_unless_held
from ..run.lower_place import PAUSES_SECONDS, pause_seconds
from ..run.packed import PackedTier
from ..storage.directory import Disk
from ..wire.serving import ACCEPT_PAUSE_MILLISECONDS
from . import late_copies
from .client import Client
from .drain import Drained, committed, drained, report_left
from .nodes import Nodes
from .works import Done, Works, text_of

FIRST_SECONDS, CHECK_SECONDS = 2.0, 2.0
"""How long a new agent waits for the process that has started it; how often one checks that its folder is there."""
FINDINGS_LIMIT = 200
"""So many findings, and names of files, fit into an answer that is sent at once."""
FAILURES_TO_END = 2
"""So many failures answer who has asked for the end: the first attempt may meet the locks of a killed process."""
CONNECTIONS_LIMIT = 256
"""So many processes may be connected at once; others are refused."""
NOTHING = Done()
"""what is answered to all requests but works"""


class Server:
    """The agent of a run at `place`: in memory, or in a directory on a disk of this node.

    `lock`: of the agent, in that folder. `listener`: its socket. `linger_seconds`, `first_seconds`: as the constants.
    """

    def __init__(
        self, place: paths.Place, lock: Lock, listener: socket.socket, linger_seconds: float, first_seconds: float
    ) -> None:
        self._folder, self._in_memory, self._lock = place.root, place.kind == "memory", lock
        self._listener, self._linger_seconds = listener, linger_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._wake_receiver.setblocking(False)
        self._wake_sender.setblocking(False)
        self._selector.register(self._wake_receiver, selectors.EVENT_READ)
        self._clients, self._stop = dict[socket.socket, Client](), Event()
        self._copies: Future[Drained] | None = None
        self._found = Drained([], [], [])
        """the result of the last attempt"""
        self._copied: list[str] = []
        """the generations that were committed here when everything was copied"""
        self._held = ""
        """why the last attempt could not commit what all ranks have sealed; "": it could, or there was nothing"""
        self._failures, self._signalled, self._ended = 0, False, False
        self._next_at: float | None = time.monotonic() + first_seconds
        """when to copy next, by the monotonic clock; None: everything is copied"""
        self._kept_until = 0.0
        """when the agent is to end, once everything is copied"""
        self._left_at = time.monotonic() + first_seconds
        """when the last training process left, or may have come at the latest"""
        self._given_up, self._below = list[str](), list[str]()
        """as in `Answer`; as `late_copies.committed_below`"""
        self._nodes = Nodes(self._tier, self._wake)
        self._works = Works(self._tier, self._wake, lambda: self._nodes.peers)

    def run(self) -> None:
        """Serve until everything is copied, and no training process has come for a while, or until a signal."""
        with (
            ThreadPoolExecutor(1, "lastgood-agent") as worker,
            self._nodes,
            self._works,
            self._signals(),
            self._relief(),
        ):
            while not self._ended and not self._signalled:
                self._serve_once()
                self._nodes.drills.end_idle()
                self._note_copies()
                self._note_late_commit()
                self._answer_senders()
                self._answer_workers()
                if not self._holds_its_folder():
                    break
                now = time.monotonic()
                if self._attached() or self._copies is not None or self._works.running():
                    continue
                if self._next_at is not None and now >= self._next_at:
                    self._stop.clear()
                    self._copies = worker.submit(self._copy)
                    self._copies.add_done_callback(lambda _: self._wake())
                elif self._is_over(now):
                    self._end()
            self._stop.set()
        self._answer_end("" if self._ended else "it was ended")
        if self._signalled and self._in_memory and not (self._ended or self._attached()):
            report_left(self._tier(), self._copied)  # guard: ended-agent-names-what-is-left
        for one in [*self._clients]:
            self._leave(one)
        self._selector.close()
        for end in (self._listener, self._wake_receiver, self._wake_sender):
            end.close()

    # ---- the socket ----------------------------------------------------------------------------------------

    def _serve_once(self) -> None:
        """Wait for the next event or time, and serve the connections that have something to read."""
        for key, _ in self._selector.select(self._timeout_seconds()):
            if key.fileobj is self._listener:
                self._accept()
            elif key.fileobj is self._wake_receiver:
                with contextlib.suppress(BlockingIOError):
                    self._wake_receiver.recv(64)
            else:
                assert isinstance(key.fileobj, socket.socket)
                self._receive(self._clients[key.fileobj])

    def _timeout_seconds(self) -> float | None:
        drill = self._nodes.drills.seconds_left()
        if self._attached():
            return CHECK_SECONDS if drill is None else min(drill, CHECK_SECONDS)  # guard: removed-folder-noticed
        if self._copies is not None or self._works.running():  # guard: agent-waits-for-work
            return drill
        left = max(0.0, (self._kept_until if self._next_at is None else self._next_at) - time.monotonic())
        return left if drill is None else min(left, drill)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has ended, or this process has too many files open
            time.sleep(ACCEPT_PAUSE_MILLISECONDS / 1000)
            return
        full = len(self._clients) >= CONNECTIONS_LIMIT
        if full or user_of(connection) != os.geteuid():  # guard: agent-serves-own-user
            connection.close()
            return
        connection.setblocking(False)
        self._clients[connection] = Client(connection)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, client: Client) -> None:
        try:
            part = client.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        client.data += part
        if not part or len(client.data) > MESSAGE_LIMIT_BYTES:
            self._leave(client.connection)
            return
        while b"\n" in client.data and client.connection in self._clients:
            line, _, client.data = client.data.partition(b"\n")
            self._serve(client, line)

    def _serve(self, client: Client, line: bytes) -> None:
        try:
            request = msgspec.json.decode(line, type=Request)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:  # the latter for text that is not UTF-8
            self._send(client, f"this is no request: {error}")
            self._leave(client.connection)
            return
        if request.protocol != PROTOCOL:
            self._send(client, f"this agent speaks version {PROTOCOL} of the protocol, and not {request.protocol}")
        elif request.call == "attach":
            client.attached = client.waits = True
            self._stop.set()
            self._answer_end("a training process has attached")
            self._answer_waiting()
        elif request.call == "serve" and request.serve is not None:
            self._send(client, self._nodes.serve(request.serve))
        elif request.call == "send" and request.send is not None:
            client.sending = self._nodes.send(request.send)
        elif request.call == "work" and request.work is not None and client.work is None:
            if request.work.task == "parity":
                self._nodes.parity = request.work.nodes
            client.work = self._works.begin(request.work, client.connection)
        elif request.call == "peers":
            self._send(client, peers=self._nodes.known())
        elif request.call == "end" and self._attached():
            self._send(client, "a training process is attached; end it first")
        elif request.call == "end":
            client.ends, self._next_at, self._failures = FAILURES_TO_END, 0.0, 0
        else:
            self._send(client)

    def _answer_waiting(self) -> None:
        if self._copies is None and not self._works.running():  # guard: attached-after-work-stopped
            for client in [one for one in self._clients.values() if one.waits]:
                client.waits = False
                self._send(client)

    def _answer_senders(self) -> None:
        """Answer those whose sending has ended."""
        for client in [one for one in self._clients.values() if one.sending is not None and one.sending.done()]:
            assert client.sending is not None
            ended, client.sending = client.sending, None
            problem = ended.exception()
            self._send(client, text_of(problem) if problem else ended.result())

    def _answer_workers(self) -> None:
        """Answer those whose work has ended, and those who wait until works that were abandoned have stopped."""
        for client in [one for one in self._clients.values() if one.work is not None and one.work.done()]:
            assert client.work is not None
            ended, client.work = client.work, None
            problem = ended.exception()
            self._send(client, done=Done(error=text_of(problem)) if problem else ended.result())
        self._answer_waiting()

    def _answer_end(self, error: str, failures: int = FAILURES_TO_END) -> None:
        """Count so many failures for each client that has asked for the end, and answer those whose number is used up.
        `error`: the answer; empty: everything was copied, and the agent ends."""
        for client in [one for one in self._clients.values() if one.ends]:
            client.ends = max(0, client.ends - failures)  # guard: end-tried-again
            if not client.ends:
                self._send(client, error)

    def _send(self, client: Client, error: str = "", done: Done = NOTHING, peers: KnownPeers | None = None) -> None:
        answer = Answer(
            protocol=PROTOCOL,
            process=os.getpid(),
            attached=self._attached(),
            copying=not self._attached() and (self._copies is not None or self._next_at is not None),
            missing=self._found.missing or [*filter(None, [self._held])],
            absent=self._found.absent,
            deleted=self._found.deleted,
            given_up=self._given_up,
            port=self._nodes.port,
            peers=peers,
            error=error or done.error,
            findings=[*done.findings[:FINDINGS_LIMIT]],
            written=[*done.written[:FINDINGS_LIMIT]],
        )
        with contextlib.suppress(OSError):  # a client that does not read its short answer gets none
            client.connection.send(msgspec.json.encode(answer) + b"\n")

    def _leave(self, connection: socket.socket) -> None:
        """Forget a connection. If it was the last training process, the copies begin."""
        self._selector.unregister(connection)
        client = self._clients.pop(connection)
        connection.close()
        if client.work is not None:
            self._works.abandon(client.work)
        if client.attached and not self._attached():
            self._next_at, self._failures, self._left_at = 0.0, 0, time.monotonic()

    def _note_late_commit(self) -> None:
        """If another node has committed a save late, copy this node's part of it."""
        # An attempt that runs may have begun before it.
        if self._copies is None and self._nodes.committed.is_set():  # guard: late-commit-outlasts-an-attempt
            self._nodes.committed.clear()
            self._next_at, self._failures = 0.0, 0  # guard: late-commit-is-copied

    def _is_over(self, now: float) -> bool:
        """Whether the agent is to end: nobody has come since all was copied, or, on a disk, since the last process."""
        if self._next_at is None:
            return now >= self._kept_until or self._asked_to_end()
        return not self._in_memory and now >= self._left_at + self._linger_seconds

    def _holds_its_folder(self) -> bool:
        """False once the folder was removed or moved: another agent may serve a new run there."""
        return self._lock.is_at(os.path.join(self._folder, LOCK))  # guard: agent-of-removed-folder-ends

    def _attached(self) -> int:
        return sum(one.attached for one in self._clients.values())

    def _asked_to_end(self) -> bool:
        return any(one.ends for one in self._clients.values())

    # ---- copies --------------------------------------------------------------------------------------------

    def _copy(self) -> Drained:
        """On the worker: one attempt. Raises Cancelled if a training process attaches meanwhile."""
        spec, tier, self._copied = read_spec(self._folder), self._tier(), []
        others = self._nodes.others(spec.nodes, self._stop.is_set) if spec is not None else None
        held = commit_unless_held(tier, self._folder, others) if self._in_memory else ""
        here = committed(tier)
        found = Drained([f"{SPEC} cannot be read, which names the places below"] if here else [], [], [])
        if spec is not None:
            found = drained(tier, spec, here, self._stop.is_set)
            if self._in_memory and others is None:  # what is committed comes first
                held = held or late_copies.completed(tier, spec, self._stop.is_set)
                self._below = late_copies.committed_below(tier, spec)
        # Nodes that are busy or cut off are waited for as long as the next training process, and once by "end".
        given_up = time.monotonic() >= self._left_at + self._linger_seconds or (self._failures and self._asked_to_end())
        self._held = "" if given_up and held != HELD else held  # guard: late-commit-given-up
        self._copied = [] if found.missing else here
        return found

    def _tier(self) -> Mendable:
        """The folder as a tier, which other processes change too."""
        if not self._in_memory:
            # Without direct I/O: what other nodes send lies at no page's boundary. An earlier run may have left packs.
            return PackedTier(Disk(PosixFiles(), self._folder, shared=True))
        return Disk(self._files(), self._folder, shared=True, place=f"{paths.MEMORY}{self._folder}")

    def _files(self) -> MemoryFiles:
        spill = spec.spill if (spec := read_spec(self._folder)) else None
        # What other nodes send comes in chunks.
        return MemoryFiles(self._folder, spill, buffered=False)  # guard: received-file-counts-once

    def _relief(self) -> contextlib.AbstractContextManager[None]:
        """Inside, files move from memory to a disk when memory is short."""
        if not self._in_memory:
            return contextlib.nullcontext()
        return memory_relief.watched(self._files, self._folder, memory_relief.AGENT_INTERVAL_SECONDS)

    def _note_copies(self) -> None:
        """Take the result of an attempt that has ended, and decide when the next one begins."""
        if self._copies is None or not self._copies.done():
            return
        copies, self._copies = self._copies, None
        try:
            self._found = copies.result()
        except Cancelled:
            self._answer_waiting()
            return
        except Exception as error:  # noqa: BLE001 - everything is kept, and the next attempt may succeed
            self._found = Drained([f"{type(error).__name__}: {error}"], [], [])
        now, missing = time.monotonic(), "; ".join(self._found.missing)
        if not missing and not self._held:  # guard: late-commit-tried-again
            self._next_at, self._failures, self._kept_until = None, 0, now + self._linger_seconds
        else:
            self._failures += 1
            # Agents of several nodes need the same lock. If all came at the same moments, one could fail each time.
            self._next_at = now + random.uniform(0.5, 1.0) * pause_seconds(self._failures)  # guard: agents-take-turns
            # The first attempt often comes before the system has released the locks of a killed process.
            if self._failures > 1 and reporting.is_reported(self._failures):
                reporting.warning(f"{self._folder}: attempt {self._failures}: {missing or self._held}")
            self._answer_end(f"not everything could be copied: {missing}" if missing else self._held, 1)
        self._answer_waiting()

    def _end(self) -> None:
        """Remove the memory, unless a process has the run open, or has saved to it since everything was copied."""
        if not self._in_memory:  # guard: only-memory-removed
            self._ended = True
            return
        try:
            lock = Lock(os.path.join(self._folder, access.LOCK), access.AGENTS_MARK)  # guard: open-memory-not-removed
        except FileNotFoundError:  # nothing was ever saved here, or somebody has removed it
            lock = None
        except OSError:
            self._answer_end(HELD, 1)
            self._next_at = time.monotonic() + PAUSES_SECONDS[0 if self._asked_to_end() else -1]
            return
        removed = self._folder + memory_place.REMOVED
        try:
            if lock is not None:  # a rank may have sealed since the last attempt
                with contextlib.suppress(LastgoodError):
                    commit_in(self._tier())
            if committed(self._tier()) != self._copied:  # guard: new-saves-not-removed
                self._next_at = 0.0
                return
            self._given_up = late_copies.given_up(self._tier(), self._below)  # guard: uncommitted-save-is-named
            spec = read_spec(self._folder)
            with contextlib.suppress(FileNotFoundError), still(self._folder):  # guard: no-move-into-removed-memory
                memory_place.set_aside(spec.spill if spec is not None else None)  # guard: spill-leaves-before-memory
                PosixFiles().rename(self._folder, removed)  # at once: a new opening makes a folder of its own
        finally:
            if lock is not None:
                lock.close()
        if spec is not None and spec.spill is not None:
            memory_place.remove_aside(spec.spill)
        shutil.rmtree(removed, ignore_errors=True)
        self._ended = True

    # ---- signals -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the agent. They are received by the loop, wherever they come."""

        def note(number: int, frame: object) -> None:
            self._signalled = True

        before = {one: signal.signal(one, note) for one in (signal.SIGTERM, signal.SIGINT)}
        wakeup = signal.set_wakeup_fd(self._wake_sender.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._wake_sender.send(b"\0")


def serve(
    url: str,
    linger_seconds: float = LINGER_SECONDS,
    first_seconds: float = FIRST_SECONDS,
    ready: Callable[[], None] = lambda: None,
) -> bool:
    """Be the agent of a run on this node until it ends. Returns False at once if there is an agent already.

    `url`: of the run in memory, or its directory on a disk of this node. `linger_seconds`, `first_seconds` (default:
    the constants of these names): how long it stays when all is copied, and how long it waits for a training process
    before it begins. `ready`: called once it listens, or is not needed.
    """
    place = paths.parsed(url)
    prepare()
    try:
        lock = Lock(os.path.join(place.root, LOCK))  # guard: one-agent-for-a-folder
    except BlockingIOError:
        ready()
        return False
    try:
        listener = listening(place.root)
        ready()
        Server(place, lock, listener, linger_seconds, first_seconds).run()
    finally:
        lock.close()
    return True

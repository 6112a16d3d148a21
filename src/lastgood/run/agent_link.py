"""The agent of a run on one node, as a training process sees it: found, started, attached to.

The folder is that of the run in the memory of the machine, or on a disk that the node has for itself.

    folder of the run           written by        content
    agent.lock                  the agent         its lock; there is one agent for each folder
    agent.sock                  the agent         its socket, of this user alone
    agent.log                   the agent         what it reports
    AGENT.json                  the trainer       the places to which generations are copied (AgentSpec)
    COPIED.json                 the agent         which places had all that was in memory (Copied)

A message is a record in JSON, ended by a newline. Attaching makes the agent stop its copies; it resumes them when the
connection ends, which it does with the process.

Invariants
  1. An agent may be killed at any instant: it holds no state that is not in files.
  2. Without an agent the run saves as ever; only what is in the folder when the training process ends is copied later,
     by the next opening of the run.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Generator, Iterator
from typing import TypeVar, cast

import msgspec

from .. import reporting
from ..errors import Cancelled, Damaged, LastgoodError, NoSpace, NotWritable, PeerDown, class_named
from ..format import layout
from ..io.files import regular_file
from ..ports import Mendable, Stop
from ..records import Record
from . import front_records, paths
from .agent_messages import AgentSpec, Answer, Copied, KnownPeers, Request, Send, Serve, Work, answer_of
from .agent_start import LOG, started

Kind = TypeVar("Kind", bound=Record)
Result = TypeVar("Result")
PROTOCOL = 13
"""The version of the messages. An agent of another version is ended, and a new one is started."""
SOCKET, LOCK, SPEC, COPIED = "agent.sock", "agent.lock", "AGENT.json", "COPIED.json"
MESSAGE_LIMIT_BYTES = 1 << 20
ATTACH_SECONDS = 10.0
"""How long an agent may take to stop a copy. After that it is killed."""
LIVED_SECONDS = 5.0
"""An agent that has lived longer is replaced at once. The sooner one ends after another, the less often it is tried."""
RETRY_SECONDS = 300.0
"""the longest time until one is tried again, from the next save on"""
POLL_SECONDS = 0.2
PING_SECONDS = 1.0
"""An agent that has not answered for so long is asked whether it lives."""
SEND_SECONDS = 600.0
"""How long an agent may take to send the files of one generation."""
LINGER_SECONDS = 600.0
"""How long an agent keeps memory in which everything is copied, for the next training process."""
ENDED = "it did not answer, and was ended; another one is started"


class AgentLink:
    """The connection of a training process to the agent of its node. Used by one thread at a time, but for `check`,
    `send` and `work`, which any thread may call.

    `url`: of the run in memory, or its directory on a disk of the node; it may not exist yet.
    """

    def __init__(self, url: str) -> None:
        self._url, self._folder = url, paths.parsed(url).root
        self._connection: socket.socket | None = None
        self._serve: Serve | None = None
        self._written: tuple[Mendable, AgentSpec] | None = None
        """where the agent's record lies, and what is in it; None: this process has written none"""
        self._records = dict[str, bytes]()
        """as `front_records.kept`, then"""
        self._missed = 0
        """how often this process has found no agent, since one has lived for LIVED_SECONDS"""
        self._retry_at = 0.0
        self._started = self._refused = 0
        self._foreign = False
        """whether the agent belongs to another user"""
        self._not_serving_because = ""
        """why the agent does not serve other nodes, if it was asked to"""
        self._attached_at = 0.0
        self._checks = threading.Lock()
        link = weakref.WeakMethod(self.close)  # what is registered there stays until the process ends
        os.register_at_fork(after_in_child=lambda: (close := link()) and close())  # guard: link-not-inherited-by-fork

    def attach(self) -> bool:
        """Attach to the agent, if there is one. Returns whether there is; one that does not answer is killed."""
        self._foreign = False
        try:
            connection = connected(self._folder)
        except OSError:
            return False
        except NotWritable as refused:
            self._foreign = True
            self._refused += 1
            if reporting.is_reported(self._refused):
                reporting.warning(f"{refused} The run goes on without an agent.")
            return False
        try:
            error = asked(connection, Request(protocol=PROTOCOL, call="attach")).error
        except (OSError, ValueError) as failure:
            error = str(failure) if type(failure) is ValueError else f"{type(failure).__name__}: {failure}"
        if not error:
            try:
                problem = self._served(self._serve) if self._serve is not None else ""
            except OSError:  # it has ended since: the next one is asked too
                connection.close()
                return False
            if problem:
                self._serve, self._not_serving_because = None, problem
                reporting.warning(f"the agent of {self._folder} does not serve other nodes: {problem}")
            connection.setblocking(False)  # with a timeout Python would wait for it in each call
            self._connection, self._attached_at = connection, time.monotonic()
            return True
        reporting.warning(f"the agent of {self._folder} is replaced: {error}")
        kill(connection)  # guard: silent-agent-killed
        connection.close()
        return False

    def start(self, disk: Mendable, spec: AgentSpec) -> None:
        """Write what the agent is to know, and start it unless it runs. Raises what writing raises."""
        self._written = disk, spec
        self._records = front_records.kept(self._folder)
        write_spec(disk, spec)
        self.check()

    def check(self) -> None:
        """Attach to the agent. If there is none, start one, unless that has failed often."""
        with self._checks:
            self._check()

    def _check(self) -> None:
        if self._connection is not None:
            if not has_ended(self._connection):
                return
            self.close()
            if time.monotonic() - self._attached_at > LIVED_SECONDS:
                self._missed = 0  # guard: lived-agent-replaced-at-once
        if self.attach() or self._foreign:
            return
        self._missed += 1
        # guard: short-lived-agent-retried
        if not reporting.is_reported(self._missed) and time.monotonic() < self._retry_at:
            return
        if self._written is not None and read_spec(self._folder) is None and os.path.isdir(self._folder):
            with contextlib.suppress(LastgoodError):  # then the agent keeps what it finds, and reports that
                front_records.write(self._written[0], self._folder, self._records)
                write_spec(*self._written)  # the folder was removed, and was made anew
        problem, self._started = started(self._url), self._started + 1
        self._retry_at = time.monotonic() + RETRY_SECONDS
        if (not problem and self.attach() and self._started == 1) or not reporting.is_reported(self._started):
            return
        if self._connection:
            what = "had ended, and was started again; no save is lost: what is in memory stays there"
        else:
            what = (
                f"does not run, and could not be started: {problem or 'it does not answer'}; the run goes on, and what "
                "is in memory only when its training processes end is copied by the next opening of the run"
            )
        reporting.warning(f"the agent of {self._folder} {what} (start {self._started}; {LOG} there may say why)")

    def serve(self, serve: Serve) -> tuple[int, str]:
        """Let the agent, which is started if there is none, serve other nodes.

        Returns its port and "", or 0 and why it does not listen. An agent that is started later in place of this one
        listens at the same port.
        """
        self._serve, self._not_serving_because = serve, f"no agent of {self._folder} answers"
        self.close()
        self.check()
        served = self._serve
        if served is None or self._connection is None:
            return 0, self._not_serving_because
        return served.port, ""

    def send(self, send: Send, stop: Stop) -> None:
        """Let the agent send files to other nodes, and wait for that.

        Raises PeerDown with what the agent says, and if there is none; Damaged, NoSpace; Cancelled once `stop()`.
        """
        self._require_done(Request(protocol=PROTOCOL, call="send", send=send), f"send {send.at}", stop)

    def work(self, work: Work, stop: Stop) -> None:
        """Let the agent write files of parity, or rebuild files. Otherwise as `send`."""
        self._require_done(Request(protocol=PROTOCOL, call="work", work=work), f"do its part of {work.at}", stop)

    def _require_done(self, request: Request, what: str, stop: Stop) -> None:
        try:
            error = answered(self._folder, request, stop).error
        except (OSError, ValueError, NotWritable) as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error:
            named = class_named(error.partition(":")[0], PeerDown)
            kind = named if issubclass(named, Damaged | NoSpace) else PeerDown  # guard: damage-is-no-outage
            raise kind(
                f"the agent of {self._folder} could not {what}: {error}", safe="It is kept here, and sent again later."
            )

    def _served(self, serve: Serve) -> str:
        """Ask the agent to serve other nodes. Returns why it does not, or "". Raises OSError if it has ended."""
        try:
            # A late answer on the connection of the training process would hide that the agent has ended.
            answer = _asked_if_any(self._folder, Request(protocol=PROTOCOL, call="serve", serve=serve))
        except (TimeoutError, ValueError, NotWritable) as failure:
            return f"{type(failure).__name__}: {failure}"
        if answer is None:
            raise ConnectionError("it has ended")
        if not answer.error:
            self._serve = msgspec.structs.replace(serve, port=answer.port)
        return answer.error

    def close(self) -> None:
        """End the connection: the agent then copies what is missing below, and removes memory after a while."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


# ---- messages ----------------------------------------------------------------------------------------------------


def asked(connection: socket.socket, request: Request) -> Answer:
    """Send a request and return the answer. Raises OSError, and ValueError for an answer that is none."""
    connection.sendall(msgspec.json.encode(request) + b"\n")
    return _answer(connection)


def answered(folder: str, request: Request, stop: Stop, ends_hung: bool = True) -> Answer:
    """As `answering`, to its end. Raises Cancelled once `stop()` is true, and what `answering` raises."""
    return waited_for(answering(folder, request, ends_hung), stop)


def waited_for(waiting: Generator[None, None, Result], stop: Stop) -> Result:
    """Run `answering`, or its user, to the end; returns the result. Raises Cancelled once `stop()` is true."""
    with contextlib.closing(waiting):
        while not stop():
            try:
                next(waiting)
            except StopIteration as end:
                return cast(Result, end.value)
    raise Cancelled("it was stopped")


def answering(
    folder: str, request: Request, ends_hung: bool = True, life_seconds: float | None = None
) -> Generator[None, None, Answer]:
    """Ask the agent of a folder for what takes long; yields each POLL_SECONDS, and at last returns the answer.

    While the generator is paused the agent goes on; `close()` stops it. An agent that does not say in `life_seconds`
    (None: ATTACH_SECONDS) that it lives is killed if `ends_hung` (default True), so that nobody waits again. Raises
    TimeoutError then, OSError if there is none or it ends, and ValueError for an answer that is none.
    """
    with contextlib.closing(connected(folder)) as connection:
        connection.sendall(msgspec.json.encode(request) + b"\n")
        came = select.poll()
        came.register(connection, select.POLLIN)
        ping_at = time.monotonic() + PING_SECONDS
        while not came.poll(POLL_SECONDS * 1000):
            yield
            if time.monotonic() > ping_at:  # guard: hung-agent-not-waited-for
                try:
                    status(folder, life_seconds)
                except OSError as error:
                    if ends_hung and isinstance(error, TimeoutError):
                        kill(connection)
                        raise TimeoutError(ENDED) from None
                    if not came.poll(0):  # else it has ended after its answer
                        raise
                ping_at = time.monotonic() + PING_SECONDS
        return _answer(connection)


def status(folder: str, life_seconds: float | None = None) -> Answer | None:
    """The state of the agent of a folder; None if none listens. Raises as `asked`."""
    return _asked_if_any(folder, Request(protocol=PROTOCOL, call="status"), life_seconds)


def peers_of(folder: str) -> KnownPeers | None:
    """The nodes that hold copies or parity of the files in a folder, as its agent knows them. None if there is no such
    agent or node. Raises OSError and ValueError if the agent does not answer, or does not know this call.
    """
    answer = _asked_if_any(folder, Request(protocol=PROTOCOL, call="peers"))
    if answer is not None and answer.error:
        raise ValueError(answer.error)
    return answer.peers if answer is not None else None


def _asked_if_any(folder: str, request: Request, life_seconds: float | None = None) -> Answer | None:
    """As `asked`, over a connection for this request; None if no agent listens. It may take `life_seconds`."""
    try:
        connection = connected(folder)
    except OSError:
        return None
    with contextlib.closing(connection):
        connection.settimeout(ATTACH_SECONDS if life_seconds is None else life_seconds)
        return asked(connection, request)


def _answer(connection: socket.socket) -> Answer:
    data = b""
    while not data.endswith(b"\n"):
        part = connection.recv(4096)
        if not part:
            raise ConnectionError("it has closed the connection")
        data += part
        if len(data) > MESSAGE_LIMIT_BYTES:
            raise ValueError("its answer is too long")
    return answer_of(data, PROTOCOL)


def connected(folder: str) -> socket.socket:
    """A connection to the agent of a folder. Raises OSError where none listens, NotWritable if another user's does."""
    with _short_path(folder) as path:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(ATTACH_SECONDS)
            _require_own(folder, os.stat(path).st_uid)  # guard: unreachable-agent-of-another-user-named
            connection.connect(path)
            _require_own(folder, user_of(connection))  # guard: agent-of-another-user-not-asked
        except BaseException:
            connection.close()
            raise
    return connection


def _require_own(folder: str, owner: int) -> None:
    if owner != os.geteuid():
        raise NotWritable(
            f"the agent of {folder} belongs to user {owner}, and this process to user {os.geteuid()}",
            safe="Nothing was asked of it.",
            todo="Train as one user, or give each user a folder of its own for the run.",
        )


def listening(folder: str) -> socket.socket:
    """The socket at which the agent of a folder listens. An earlier one is replaced: its agent has ended."""
    with _short_path(folder) as path:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        os.chmod(path, 0o600)
        listener.listen()
        listener.setblocking(False)
    return listener


def user_of(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    return _peer(connection)[1]


@contextlib.contextmanager
def _short_path(folder: str) -> Iterator[str]:
    """A path of the socket that fits into its address, which has 108 bytes, however long that of the folder is."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{SOCKET}"
    finally:
        os.close(fd)


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end; the process is 0 where it is in another namespace."""
    process, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user


def has_ended(connection: socket.socket) -> bool:
    """Whether either end has closed the connection, which does not block. Waits for nothing."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def process_of(folder: str) -> int | None:
    """The process id of the agent of a folder, also of one that does not answer. None if none listens.

    Raises NotWritable if it belongs to another user.
    """
    with contextlib.suppress(OSError), contextlib.closing(connected(folder)) as connection:
        return _peer(connection)[0] or None
    return None


def kill(connection: socket.socket) -> None:
    """Kill the process at the other end, and wait until it has ended. Raises nothing."""
    process, user = _peer(connection)
    if process <= 0 or user != os.geteuid():
        return
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(process)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            ended = select.poll()
            ended.register(pidfd, select.POLLIN)
            ended.poll(ATTACH_SECONDS * 1000)
        finally:
            os.close(pidfd)


def write_spec(disk: Mendable, spec: AgentSpec) -> None:
    """Write what the agent of a folder is to know. Raises what writing raises."""
    _write(disk, SPEC, spec)


def read_spec(folder: str) -> AgentSpec | None:
    """What a training process has written for the agent; None if there is nothing that can be read."""
    return _read(folder, SPEC, AgentSpec)


def write_copied(disk: Mendable, copied: Copied) -> None:
    """Write what the agent of a folder has found copied. Raises what writing raises."""
    _write(disk, COPIED, copied)


def read_copied(folder: str) -> Copied:
    """What agents of a folder have found copied: nothing, if there is nothing that can be read."""
    return _read(folder, COPIED, Copied) or Copied(format=layout.FORMAT, places={})


def _write(disk: Mendable, name: str, record: Record) -> None:
    disk.delete(f"{name}.new")
    disk.put_new(f"{name}.new", layout.encode(record))
    disk.replace(name, f"{name}.new")  # who reads it never finds none, or half of one


def _read(folder: str, name: str, kind: type[Kind]) -> Kind | None:
    try:
        with open(os.path.join(folder, name), "rb", opener=regular_file) as file:
            return layout.decode(file.read(), kind, name)
    except (OSError, LastgoodError):
        return None

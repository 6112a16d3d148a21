"""The process that holds this node's membership in a job of several nodes, as the supervisor sees it.

torch's elastic rendezvous is the engine: it decides which nodes belong to a round, and keeps the key-value store that
they share. It needs torch, waits in C, and may wait for long, so it runs in a process of its own
(ranks/membership.py), which the supervisor can end at any time.

    supervisor -> process   one request
    process -> supervisor   its answer; the next request follows it

Decides nothing.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

import msgspec

from .. import reporting
from ..errors import Cancelled, LastgoodError, Refused, TierDown
from ..records import Record
from . import framed, program
from .signals import Signals

ANSWER_SECONDS = 20.0
"""How long the shared store may take for one request."""
MODULE = "lastgood.ranks.membership"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""torch prints a page for each lost connection to a store; the supervisor reports it in one line."""


class Settings(Record, frozen=True, kw_only=True):
    """The parameters of the rendezvous, as torchrun takes them. `configuration`: of --rdzv-conf. `silent_seconds`:
    without a request, after which the process ends by itself."""

    endpoint: str
    run_id: str
    least: int
    most: int
    local_address: str
    configuration: dict[str, str]
    silent_seconds: float


class Join(Record, frozen=True, kw_only=True, tag="join"):
    """Join the next round. The answer comes when the round is complete. `waited`: whether this node has belonged to the
    job before, so that it may find it ended."""

    waited: bool


class Put(Record, frozen=True, kw_only=True, tag="put"):
    """Set keys. `job`: of the whole job, and not only of the current round."""

    values: dict[str, str]
    job: bool = False


class Read(Record, frozen=True, kw_only=True, tag="read"):
    """Read keys, without waiting for them."""

    keys: list[str]
    job: bool = False


class Claim(Record, frozen=True, kw_only=True, tag="claim"):
    """Set a key unless it is set. The answer is the value that it has then."""

    key: str
    value: str


class Waiting(Record, frozen=True, kw_only=True, tag="waiting"):
    """How many nodes wait."""


class Close(Record, frozen=True, kw_only=True, tag="close"):
    """The job is over: nodes that wait are to end."""


class Joined(Record, frozen=True, kw_only=True, tag="joined"):
    """`node`: number of this node in the round. `nodes`: how many there are. `address`: of this node, for others.
    `holds_store`: whether the job ends with this node, because it holds the store of the nodes."""

    node: int
    nodes: int
    address: str
    holds_store: bool = False


class Values(Record, frozen=True, kw_only=True, tag="values"):
    """The value of each key; None: it is not set."""

    values: list[str | None]


class Waiters(Record, frozen=True, kw_only=True, tag="waiters"):
    """Nodes that wait. `joining`: for the next round. `reserve`: because the round has the most nodes; None: this torch
    does not show them."""

    joining: int
    reserve: int | None

    @property
    def known(self) -> int:
        """How many wait, as far as it is known."""
        return self.joining + (self.reserve or 0)


class Failed(Record, frozen=True, kw_only=True, tag="failed"):
    """A request has failed. `kind`: "closed": the job is over; "ended": it was, before this
    node came; "refused": a parameter cannot be meant; "timeout": too few nodes came; "store": no answer."""

    kind: str
    what: str


Request = Join | Put | Read | Claim | Waiting | Close
Answer = Joined | Values | Waiters | Failed


class Over(LastgoodError):
    """The job is over: this node waited for a round that does not come."""


class Membership:
    """The process. It begins at once, and ends with the supervisor. `signals`: end a wait for a round."""

    def __init__(self, settings: Settings, signals: Signals) -> None:
        self._settings, self._signals, self._joined = settings, signals, False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [*program.PYTHON, MODULE, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                env={**QUIET, **os.environ},
                start_new_session=True,
            )
        framed.send(self._socket, msgspec.json.encode(settings))

    def join(self) -> Joined:
        """Join the next round, and wait until it is complete. Reports both, because it may take long.

        Raises Over if the job is over, TierDown if the store does not answer or too few nodes come, and Cancelled if
        this node is asked to end.
        """
        least, most = self._settings.least, self._settings.most
        wanted = f"{least} nodes" if least == most else f"{least} to {most} nodes"
        reporting.info(f"waits until {wanted} have joined the job at {self._settings.endpoint}")
        answer = self._asked(Join(waited=self._joined), math.inf)
        assert isinstance(answer, Joined)
        reporting.info(f"takes part, as one of {answer.nodes} nodes")
        self._joined = True
        return answer

    def put(self, values: Mapping[str, str], job: bool = False) -> None:
        """Set keys of the round, or of the whole job. Raises TierDown."""
        self._asked(Put(values=dict(values), job=job))

    def read(self, keys: Sequence[str], job: bool = False) -> list[str | None]:
        """The values of keys; None where a key is not set. Raises TierDown."""
        answer = self._asked(Read(keys=list(keys), job=job))
        assert isinstance(answer, Values)
        return answer.values

    def claim(self, key: str, value: str) -> str:
        """Set a key of the round unless it is set; returns the value that stands. Raises TierDown."""
        answer = self._asked(Claim(key=key, value=value))
        assert isinstance(answer, Values) and answer.values[0] is not None
        return answer.values[0]

    def waiting(self) -> Waiters:
        """The nodes that wait, to join or in reserve. Raises TierDown."""
        answer = self._asked(Waiting())
        assert isinstance(answer, Waiters)
        return answer

    def close(self) -> None:
        """End the rendezvous for all nodes. Raises TierDown."""
        self._asked(Close())

    def end(self) -> None:
        """End the process."""
        self._socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _asked(self, request: Request, seconds: float = ANSWER_SECONDS) -> Answer:
        """The answer to a request. `seconds`: how long it may take; infinite: until a signal asks for the end."""
        try:
            framed.send(self._socket, msgspec.json.encode(request))
            self._await(seconds)
            answer: Answer = msgspec.json.decode(framed.receive(self._socket), type=Answer)
        except (OSError, EOFError) as error:
            raise _unreachable(self._settings.endpoint, f"the process of the rendezvous has ended: {error}") from error
        if not isinstance(answer, Failed):
            return answer
        if answer.kind == "closed":
            raise Over("the job is over")
        if answer.kind == "ended":
            todo = "Give the new job another --rdzv-id."
            raise Refused(f"{answer.what} at {self._settings.endpoint}", safe="Nothing was started.", todo=todo)
        if answer.kind == "refused":
            raise Refused(answer.what, safe="Nothing was started.", todo="Correct --rdzv-conf or --rdzv-endpoint.")
        raise _unreachable(self._settings.endpoint, answer.what)

    def _await(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while True:
            if seconds == math.inf and self._signals.end is not None:
                raise Cancelled("the job was asked to end")
            left = None if seconds == math.inf else max(0.0, until - time.monotonic())
            watched = [self._socket.fileno(), *([self._signals.descriptor] if left is None else [])]
            ready = select.select(watched, [], [], left)[0]
            if self._socket.fileno() in ready:
                return
            if not ready:
                raise _unreachable(self._settings.endpoint, f"no answer in {seconds:.0f} s")
            self._signals.drain()


def _unreachable(endpoint: str, what: str) -> TierDown:
    return TierDown(
        f"the rendezvous of the nodes at {endpoint} does not answer: {what}",
        safe="What was saved is safe. The ranks of this node were ended.",
        todo="Start the job again on its nodes; the node of the endpoint first.",
    )

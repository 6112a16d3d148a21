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
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence

import msgspec

from .. import reporting
from ..errors import Cancelled, LastgoodError, Refused, TierDown
from ..io import os_errors, processes
from ..policy.membership import Past, Round
from ..records import Record
from . import framed, program
from .held_store import QUIET, HeldStore
from .signals import Signals

JOIN_SECONDS = 600.0
"""torch's default of join_timeout"""
MOST_MOVES = 3
"""So many times for each store of the list, a wait for a round goes on after a store is lost."""
ANSWER_SECONDS = 20.0
"""How long the shared store may take for one request."""
ACTIVE = "active"
"""the key of a job that says of which round the nodes are at this store: `active_text`"""
MODULE = "lastgood.ranks.membership"
SILENT = {"TORCH_CPP_LOG_LEVEL": "FATAL"}
"""It prints more for each store that does not answer."""


class Known(Record, frozen=True, kw_only=True):
    """What a node knows of a store that can move. `at`: number of the store that it has joined last. `id`: of this one;
    empty: it has joined none. `past`: what it brings to a round."""

    at: int = 0
    id: str = ""
    past: Past = Past()


class Settings(Record, frozen=True, kw_only=True):
    """The parameters of the rendezvous, as torchrun takes them. `configuration`: of --rdzv-conf. `silent_seconds`:
    without a request, after which the process ends by itself. `stores`: the endpoints to which the store can move, with
    the first one; empty: it cannot. `known`: of these."""

    endpoint: str
    run_id: str
    least: int
    most: int
    local_address: str
    configuration: dict[str, str]
    silent_seconds: float
    stores: tuple[str, ...] = ()
    known: Known = Known()


class Where(Record, frozen=True, kw_only=True, tag="where"):
    """Find the store of the job among those of the list."""


class Join(Record, frozen=True, kw_only=True, tag="join"):
    """Join the next round. The answer comes when the round is complete. `waited`: whether this node has belonged to the
    job before, so that it may find it ended. `past`: what it brings to the round, where the store can move."""

    waited: bool
    past: Past = Past()


class Put(Record, frozen=True, kw_only=True, tag="put"):
    """Set keys. `job`: of the whole job, and not only of the current round."""

    values: dict[str, str]
    job: bool = False


class Read(Record, frozen=True, kw_only=True, tag="read"):
    """Read keys, without waiting for them."""

    keys: list[str]
    job: bool = False


class Claim(Record, frozen=True, kw_only=True, tag="claim"):
    """Set a key if it has the value `before`; empty: unless it is set. The answer is the value that it has then."""

    key: str
    value: str
    job: bool = False
    before: str = ""


class Raise(Record, frozen=True, kw_only=True, tag="raise"):
    """Set a key of the job unless it has a later value, in the order of texts."""

    key: str
    value: str


class Drop(Record, frozen=True, kw_only=True, tag="drop"):
    """Delete keys of the round. One that is not set is passed over."""

    keys: list[str]


class Waiting(Record, frozen=True, kw_only=True, tag="waiting"):
    """How many nodes wait."""


class Close(Record, frozen=True, kw_only=True, tag="close"):
    """The job is over: nodes that wait are to end."""


class Joined(Record, frozen=True, kw_only=True, tag="joined"):
    """`node`: number of this node in the round. `nodes`: how many there are. `address`: of this node, for others.
    `order`: as in Round. `holds_store`: whether the job ends with this node, because it holds the store of the nodes.
    Where the store can move, `store` and `id` are as in Round, and `holds` as in Past."""

    node: int
    nodes: int
    address: str
    holds_store: bool = False
    store: int = 0
    id: str = ""
    order: int = 0
    holds: int | None = None


class Connected(Record, frozen=True, kw_only=True, tag="connected"):
    """The store that was found: its number in the list, and its id."""

    store: int
    id: str


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
    node came; "refused": a parameter cannot be meant; "timeout": too few nodes came; "store": no answer; "moved": this
    node is to wait at another store; "gone": no store of the list can be joined."""

    kind: str
    what: str


Request = Where | Join | Put | Read | Claim | Raise | Drop | Waiting | Close
Answer = Connected | Joined | Values | Waiters | Failed


def active_text(one: Round) -> str:
    """The value of ACTIVE that means a round. Values have the order of their rounds."""
    return f"{one.store:06d} {one.order:012d}"


def active_round(text: str) -> tuple[int, int]:
    """Store and order of the round that a value of ACTIVE means."""
    store, order = map(int, text.split())
    return store, order


class Over(LastgoodError):
    """The job is over: this node waited for a round that does not come."""


class StoreLost(TierDown):
    """The store does not answer, or this node is to join another one: `Membership.join` looks for it."""


class Membership:
    """The process. It begins at once, and ends with the supervisor. `signals`: end a wait for a round.

    Where the store can move, another process takes its place then; `held` is the store of this node (default: none).
    """

    def __init__(self, settings: Settings, signals: Signals, held: HeldStore | None = None) -> None:
        self._settings, self._signals, self._held = settings, signals, held
        self._joined, self._losses = False, 0
        self._begin()

    def _begin(self) -> None:
        self._connected = not self._settings.stores
        self._lost: TierDown | None = None
        """why nothing is asked any more: an answer that came later would be taken for that of the next request"""
        with os_errors.needed("the process of the rendezvous cannot be started", ""):
            self._socket, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(
                    [*program.PYTHON, MODULE, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    env={**(SILENT if self._settings.stores else QUIET), **os.environ},
                    start_new_session=True,
                )
            framed.send(self._socket, msgspec.json.encode(self._settings))

    @property
    def moves(self) -> bool:
        """Whether the store can move."""
        return bool(self._settings.stores)

    @property
    def stores(self) -> int:
        """How many stores are listed; 0: it cannot move."""
        return len(self._settings.stores)

    @property
    def endpoint(self) -> str:
        """Where the store is."""
        return self._settings.endpoint

    @property
    def join_seconds(self) -> float:
        """How long nodes are waited for."""
        return float(self._settings.configuration.get("join_timeout", JOIN_SECONDS))

    def join(self, past: Past, again: bool = False) -> Joined:
        """Join the next round, and wait until it is complete. Reports the wait, because it may take long.

        `past`: what this node brings to it, where the store can move. A store that is lost is replaced by another one.
        `again` (default: False): this node goes on to wait, and has reported it.

        Raises Over if the job is over, TierDown if no store answers or too few nodes come, and Cancelled if this node
        is asked to end.
        """
        while True:
            with contextlib.suppress(StoreLost):
                self._connect(past)
                return self._joined_round(past, again)

    def _connect(self, past: Past) -> None:
        """Find the store, if this node is connected to none."""
        if isinstance(self._lost, StoreLost):
            reporting.warning(f"{self._lost.what}; this node looks for the store of the job in --rdzv-endpoint")
            self._end_process()
            self._losses += 1
            known = msgspec.structs.replace(self._settings.known, past=past)
            self._settings = msgspec.structs.replace(self._settings, known=known)
            self._begin()
        if not self._connected:
            found = self._asked(Where(), math.inf)
            assert isinstance(found, Connected)
            known = Known(at=found.store, id=found.id, past=past)
            endpoint = self._settings.stores[found.store]
            self._settings = msgspec.structs.replace(self._settings, known=known, endpoint=endpoint)
            self._connected = True

    def _joined_round(self, past: Past, again: bool) -> Joined:
        least, most = self._settings.least, self._settings.most
        wanted = f"{least} nodes" if least == most else f"{least} to {most} nodes"
        if not again:
            reporting.info(f"waits until {wanted} have joined the job at {self._settings.endpoint}")
        answer = self._asked(Join(waited=self._joined, past=past), math.inf)
        assert isinstance(answer, Joined)
        self._joined, self._losses = True, 0
        if not self.moves:
            return answer
        known = self._settings.known
        holds = None if self._held is None else self._held.number
        last_one = holds == known.at == self.stores - 1
        return msgspec.structs.replace(answer, store=known.at, id=known.id, holds=holds, holds_store=last_one)

    def put(self, values: Mapping[str, str], job: bool = False) -> None:
        """Set keys of the round, or of the whole job. Raises TierDown."""
        self._asked(Put(values=dict(values), job=job))

    def read(self, keys: Sequence[str], job: bool = False) -> list[str | None]:
        """The values of keys; None where a key is not set. Raises TierDown."""
        answer = self._asked(Read(keys=list(keys), job=job))
        assert isinstance(answer, Values)
        return answer.values

    def claim(self, key: str, value: str, job: bool = False, before: str = "") -> str:
        """Set a key of the round, or of the whole job, if it has the value `before` (default: unless it is set);
        returns the value that stands.

        Raises TierDown.
        """
        answer = self._asked(Claim(key=key, value=value, job=job, before=before))
        assert isinstance(answer, Values) and answer.values[0] is not None
        return answer.values[0]

    def raise_to(self, key: str, value: str) -> None:
        """Set a key of the job unless it has a later value, in the order of texts. Raises TierDown."""
        self._asked(Raise(key=key, value=value))

    def drop(self, keys: Sequence[str]) -> None:
        """Delete keys of the round, where they are set. Raises TierDown."""
        self._asked(Drop(keys=list(keys)))

    def waiting(self) -> Waiters:
        """The nodes that wait, to join or in reserve. Raises TierDown."""
        answer = self._asked(Waiting())
        assert isinstance(answer, Waiters)
        return answer

    def close(self) -> None:
        """End the rendezvous for all nodes. Raises TierDown."""
        self._asked(Close())

    def end(self) -> None:
        """End the process, and the store that this node holds."""
        self._end_process()
        if self._held is not None:
            self._held.end()

    def _end_process(self) -> None:
        self._socket.close()
        processes.end_group(self._process)

    def _asked(self, request: Request, seconds: float = ANSWER_SECONDS) -> Answer:
        """The answer to a request. `seconds`: how long it may take; infinite: until a signal asks for the end."""
        if self._lost is not None:
            raise self._lost
        try:
            framed.send(self._socket, msgspec.json.encode(request))
            self._await(seconds)
            answer: Answer = msgspec.json.decode(framed.receive(self._socket), type=Answer)
        except (OSError, EOFError) as error:
            raise self._unreachable(f"the process of the rendezvous has ended: {error}") from error
        if not isinstance(answer, Failed):
            return answer
        if answer.kind == "closed":
            raise Over("the job is over")
        if answer.kind == "ended":
            todo = "Give the new job another --rdzv-id."
            raise Refused(f"{answer.what} at {self._settings.endpoint}", safe="Nothing was started.", todo=todo)
        if answer.kind == "refused":
            raise Refused(answer.what, safe="Nothing was started.", todo="Correct --rdzv-conf or --rdzv-endpoint.")
        raise self._unreachable(answer.what, answer.kind)

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
                self._lost = self._unreachable(f"no answer in {seconds:.0f} s")  # guard: late-answer-is-to-no-request
                raise self._lost
            self._signals.drain()

    def _unreachable(self, what: str, kind: str = "store") -> TierDown:
        """`kind`: as in Failed; another store may answer if it is "store" or "moved"."""
        if kind == "timeout":  # the store has answered
            return TierDown(
                f"{what} at {self._settings.endpoint}",
                safe="What was saved is safe. The ranks of this node were ended.",
                todo="Start the job on as many nodes as --nnodes says, with the same --rdzv-id and --rdzv-endpoint.",
            )
        text = f"the rendezvous of the nodes at {self._settings.endpoint} does not answer: {what}"
        if kind == "moved":
            text = f"the other nodes do not wait at {self._settings.endpoint}"
        if kind in ("store", "moved") and self._losses < MOST_MOVES * len(self._settings.stores):
            self._lost = StoreLost(text)
            return self._lost
        return TierDown(
            text,
            safe="What was saved is safe. The ranks of this node were ended.",
            todo="Start the job again on its nodes; the node of the endpoint first.",
        )

"""The agents of the other nodes of a job: files are sent to them, and theirs are received; drills of theirs have copies
here. Threads of the `with` block.

Nothing listens before a training process asks for it, with the key and the address of its job.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from ..errors import Cancelled, LastgoodError
from ..format import commit
from ..ports import Mendable, Stop
from ..records import Generation, GenerationId, Seal
from ..run.agent_messages import KnownPeers, Send, Serve
from ..run.peer_security import security
from ..run.peers import PeerNode, PeerOrder, Peers
from ..wire import nixl
from ..wire.port import Peer
from ..wire.serving import Server
from .drill_files import DrillFiles, WithDrills
from .peer_files import PeerFiles

Result = TypeVar("Result")
SENDERS = 2
"""So many generations are sent at the same time."""
ASKED_AT_ONCE = 32
"""So many nodes are asked at the same time."""


class Nodes:
    """`memory`: makes the tier of this node's memory. `wake`: called when a sending has ended."""

    def __init__(self, memory: Callable[[], Mendable], wake: Callable[[], None]) -> None:
        self._memory, self._wake = memory, wake
        self._serving = contextlib.ExitStack()
        self._senders = ThreadPoolExecutor(SENDERS, "lastgood-send")
        self.peers: Peers | None = None
        """the connections to other nodes; None: it does not serve them"""
        self._served: Serve | None = None
        self._receivers: dict[str, PeerNode] = {}
        """name -> the nodes to which files were to be sent"""
        self.parity: list[PeerNode] = []
        """the nodes that hold what this node's files can be computed from"""
        self.port = 0
        """where it listens; 0: it does not"""
        self.committed = threading.Event()
        """set once another node has committed a save late, on this node too"""
        self.drills = DrillFiles(memory, wake)

    def __enter__(self) -> Nodes:
        self.drills.clear()  # of an agent that was killed
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self.drills.close()
        self._senders.shutdown()

    def serve(self, serve: Serve) -> str:
        """Listen as `serve` says, instead of as before. Returns why that failed, or "".

        An agent that cannot listen still reads from the other nodes, to rebuild what is damaged here.
        """
        self._stop()
        files = PeerFiles(self._memory, self._note_commit)
        self._serving.callback(self.drills.clear)
        self._serving.callback(files.close)
        me, at = Peer(serve.job, serve.node), (serve.host, serve.port)
        try:
            windows, secured = nixl.chosen(serve.wire), security(serve.key, serve.certificates)
            self.peers = Peers(serve.job, secured, serve.node, windows)
            service = WithDrills(files, self.drills)
            server = self._serving.enter_context(Server(at, me, secured, service, windows=windows))
        except LastgoodError as error:
            return str(error)
        self._served, self.port = serve, server.address[1]
        return ""

    def send(self, send: Send) -> Future[str]:
        """Send files of a generation. The result is why that failed, or ""."""
        self._receivers |= {order.to.name: order.to for order in send.orders}
        job = self._senders.submit(self._sent, send, self.peers)
        job.add_done_callback(lambda _: self._wake())
        return job

    def known(self) -> KnownPeers | None:
        """The nodes that hold something of this one since it listens; None: none."""
        copies = [*self._receivers.values()]
        if self._served is None or not (copies or self.parity):
            return None
        job, key, certificates = self._served.job, self._served.key, self._served.certificates
        return KnownPeers(job=job, key=key, copies=copies, parity=self.parity, certificates=certificates)

    def others(self, nodes: Sequence[PeerNode], stop: Stop) -> OtherNodes | None:
        """The other ones of these nodes of the job; None: there are none, or this node does not serve them."""
        served = self._served
        others = [one for one in nodes if served is not None and one.name != served.node]
        return OtherNodes(served, others, stop) if served is not None and others else None

    def _note_commit(self) -> None:
        self.committed.set()
        self._wake()

    def _sent(self, send: Send, peers: Peers | None) -> str:
        if peers is None:
            return "it was not asked to serve other nodes"
        memory, receivers = self._memory(), dict[str, list[PeerOrder]]()
        try:
            generation = commit.read_generation(memory, send.at, None)
        except LastgoodError as error:
            return f"{type(error).__name__}: {error}"
        for order in send.orders:
            receivers.setdefault(order.to.name, []).append(order)
        # Each receiver has a thread: one that hangs answers no call for a minute.
        with ThreadPoolExecutor(len(receivers), "lastgood-send") as workers:  # guard: other-nodes-get-their-copies
            ended = [workers.submit(_sent_to, peers, memory, generation, one) for one in receivers.values()]
        return next((failed for one in ended if (failed := one.result())), "")

    def _stop(self) -> None:
        if self.peers is not None:
            self.peers.close()
        self._serving.close()
        self.peers, self._served, self.port = None, None, 0
        self._receivers.clear()
        self.parity = []


class OtherNodes:
    """`late_commit.Others` over the wire: the nodes of the job but this one, many asked at the same time.

    `served`: how this node serves them. `stop`: polled before each node; once it is true, Cancelled is raised. Each
    call has a connection of its own, so that thousands of nodes do not use up the descriptors.
    """

    def __init__(self, served: Serve, nodes: Sequence[PeerNode], stop: Stop) -> None:
        self._served, self._nodes, self._stop = served, nodes, stop

    def seals(self, at: GenerationId) -> list[Seal]:
        return [seal for found in self._on_all(at, lambda peers, node: peers.seals(node, at)) for seal in found]

    def commit(self, at: GenerationId, data: bytes) -> None:
        self._on_all(at, lambda peers, node: peers.commit(node, at, data))

    def _on_all(self, at: GenerationId, call: Callable[[Peers, PeerNode], Result]) -> list[Result]:
        """The answers of all nodes. Raises the first error once all have ended."""
        failed, me = threading.Event(), self._served
        secured = security(me.key, me.certificates)

        def asked(node: PeerNode) -> list[Result]:
            if self._stop():
                raise Cancelled("the late commit was interrupted")
            if failed.is_set():  # of thousands of nodes, those that are lost would take too long together
                return []
            try:
                with contextlib.closing(Peers(me.job, secured, me.node)) as peers:
                    return [call(peers, node)]
            except LastgoodError as error:
                failed.set()
                error.what = f"step {at.step} cannot be committed on node {node.name} now: {error.what}"
                raise

        with ThreadPoolExecutor(min(len(self._nodes), ASKED_AT_ONCE), "lastgood-late") as workers:
            ended = [workers.submit(asked, node) for node in self._nodes]
        return [answer for one in ended for answer in one.result()]


def _sent_to(peers: Peers, memory: Mendable, generation: Generation, orders: Sequence[PeerOrder]) -> str:
    """Send files to one node. Returns why that failed, or ""."""
    try:
        for order in orders:
            seal = next(one for one in generation.commit.seals if one.rank == order.rank)
            peers.send(memory, generation, seal, order.to)
    except LastgoodError as error:
        return f"{type(error).__name__}: {error}"
    return ""

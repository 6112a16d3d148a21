"""Files of a run in the memory of other nodes, over the wire between agents: sent there, and read from there.

    caller   call      what the agent of the other node does
    -------  --------  ----------------------------------------------------------------------------------
    agent    list      lists the folder of a generation (a drill too)
    agent    create    begins a file of a rank, with its length; an unfinished one of this name is dropped
    agent    write     bulk bytes at an offset of it
    agent    finish    the file is complete
    agent    put       creates a manifest; the file that it describes was finished before
    agent    abort     drops an unfinished file
    both     read      a range of a file, as bulk bytes of the answer (a drill too)
    agent    seals     the seals in the folder of a generation, for a late commit (late_commit.py)
    agent    commit    creates the COMMIT of a generation beside the seals of this node

Only files of ranks in folders of generations have such calls; files of parity are listed and read. A manifest shows
that the files beside it are complete. "seals" and "commit" are refused while a training process has the run open.

A drill has copies of these files made on the other node, in a folder of its own there (drill_copies.py). Its calls are
those above, with the name of that folder before each name, and three more:

    drill    open      makes the folder for copies of one generation, if there is room for `length` bytes
    drill    copy      as "write", with the bytes of the file of the same name that the node holds
    drill    remove    removes the folder
"""

from __future__ import annotations

import builtins
import contextlib
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

import msgspec

from ..errors import Cancelled, Damaged, LastgoodError, MissingBlob, Truncated
from ..format import layout, sealed, stripe_layout
from ..limits import CHUNK_BYTES
from ..ports import Tier
from ..records import Extent, Generation, GenerationId, Record, Seal
from ..wire.channel import Channel
from ..wire.port import Peer
from ..wire.security import Security
from ..wire.window import MakeMemory

CALL_SECONDS = 60.0
"""How long one call to another node may take."""
LATE_CALL_SECONDS = 3.0
"""How long a call of a late commit may take. Two of them end sooner than a training process waits for the agent."""
CHUNKS_AT_ONCE = 2
"""So many chunks of a file are on their way at a time: one is read and digested while another one is received."""
RANK_FILE = re.compile(r"gen/(\d+-[0-9a-f]+)/r\d{5,}(\.\d+)?\.(safetensors|manifest\.json)")
STRIPE_FILE = re.compile(rf"gen/(\d+-[0-9a-f]+)/{stripe_layout.NAME}")
"""A file of parity among nodes, which each node writes for itself (format/stripe_layout.py)."""
DRILL_FOLDER = re.compile(r"drill-[0-9a-f]{8}")
"""The name of the folder of a drill on another node."""
DRILLS = ".drill"
"""The folder, in that of an agent, with the copies of drills on other nodes."""


class FileCall(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One call. `name`: of the file, or of the folder of the generation for "list", "seals" and "commit"."""

    call: Literal[
        "list", "create", "write", "finish", "put", "abort", "read", "open", "copy", "remove", "seals", "commit"
    ]
    name: str
    sending: str = ""
    """a random text of one sending of the files of a rank: two that overlap never write to one file"""
    offset: int = 0
    length: int = 0
    background: bool = False
    """of "read": nobody waits for the bytes"""
    caller_verifies: bool = False
    """of "read": the caller compares the bytes with a digest that it has, so they need none on their way"""


class Reading(NamedTuple):
    """How files of another node are read: both as for `port.Wire.call`, at the other node."""

    background: bool = False
    caller_verifies: bool = False


READING = Reading()
BACKGROUND = Reading(background=True)
VERIFIED_BY_CALLER = Reading(caller_verifies=True)


class PeerNode(Record, frozen=True, kw_only=True):
    """A node of the job. `leader`: the rank that leads it. `host`, `port`: where its agent listens."""

    leader: int
    name: str
    domain: str
    host: str
    port: int


class PeerTable(Record, frozen=True, kw_only=True):
    """The nodes of a job whose agents listen; it may have further nodes. All ranks have the same table.

    `job`: a random id of this opening. `key`: that all nodes of the job have, in hexadecimal.
    """

    job: str
    key: str
    nodes: list[PeerNode]

    def node_of(self, leader: int) -> PeerNode:
        """The node of this leader, whose agent listens."""
        return next(one for one in self.nodes if one.leader == leader)

    def among(self, leaders: Iterable[int]) -> list[PeerNode]:
        """Those nodes of these leaders whose agents listen, in this order."""
        nodes = {one.leader: one for one in self.nodes}
        return [nodes[leader] for leader in leaders if leader in nodes]  # guard: only-listening-nodes-asked


class PeerOrder(Record, frozen=True, kw_only=True):
    """What one agent is to send. `rank`: the rank that wrote the files. `to`: the node that receives them."""

    rank: int
    to: PeerNode


class StripeMember(Record, frozen=True, kw_only=True):
    """A data node of a set of stripes (policy/stripes.py). `ranks`: those that wrote the files that are its part."""

    node: PeerNode
    first: int
    ranks: list[int]


class StripeOrder(Record, frozen=True, kw_only=True):
    """A file of parity that an agent is to write. `name`: of the file. `parity`: how many such files the set has."""

    name: str
    data: list[StripeMember]
    parity: int
    index: int


class Peers:
    """Connections of this node to others, made when they are needed.

    `job`: as in `PeerTable`. `name`: of this node. `security`: how nodes know each other (peer_security.py). `windows`:
    as for `Channel`. Default: sockets only.

    Every method may be called from any thread; `close` ends calls in progress with Cancelled.
    """

    def __init__(self, job: str, security: Security, name: str, windows: MakeMemory | None = None) -> None:
        self._windows = windows
        self._me, self._security = Peer(job, name), security
        self._lock = threading.Lock()
        self._channels: dict[tuple[str, int, str], Channel] = {}
        self._closed = False

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closed, channels = True, [*self._channels.values()]
        for one in channels:
            one.close()

    def read(self, node: PeerNode, extent: Extent, mv: memoryview, how: Reading = READING) -> None:
        """Fill mv[:extent.length] from a file of another node. Raises MissingBlob, and what `port.Wire` raises."""
        call = FileCall(
            call="read",
            name=extent.blob,
            offset=extent.offset,
            length=extent.length,
            background=how.background,
            caller_verifies=how.caller_verifies,
        )
        answer = self._channel(node).call(
            self._encoded(call),
            incoming=mv[: extent.length],
            timeout_seconds=CALL_SECONDS,
            caller_verifies=how.caller_verifies,
        )
        if sum(map(len, answer.bulk)) != extent.length:
            raise MissingBlob(f"{extent.blob} of node {node.name} ends early", blob=extent.blob)

    def list(self, node: PeerNode, folder: str) -> dict[str, int | None]:
        """The folder of a generation on another node, as `ports.Tier.list`. Raises what `port.Wire` raises."""
        return msgspec.json.decode(self._call(node, FileCall(call="list", name=folder)), type=dict[str, int | None])

    def seals(self, node: PeerNode, at: GenerationId) -> builtins.list[Seal]:
        """As `late_commit.Others.seals`, on one node."""
        asked = FileCall(call="seals", name=layout.folder(at))
        return msgspec.json.decode(self._call(node, asked, (), LATE_CALL_SECONDS), type=builtins.list[Seal])

    def commit(self, node: PeerNode, at: GenerationId, data: bytes) -> None:
        """As `late_commit.Others.commit`, on one node."""
        asked = FileCall(call="commit", name=layout.folder(at), length=len(data))
        self._call(node, asked, [memoryview(data)], LATE_CALL_SECONDS)

    def send(self, disk: Tier, generation: Generation, seal: Seal, node: PeerNode) -> int:
        """Send those files of one rank to a node that it lacks. Returns the bytes that were sent.

        `disk`: of this node, which has the files. Each chunk is compared with its digest by the wire. Raises what
        reading raises, and what `port.Wire` raises.
        """
        folder = layout.folder(generation.id)
        there = self.list(node, folder)
        is_new, blobs = seal.manifest not in there, sealed.sealed_record(disk, generation, seal).blobs
        missing = [one for one in blobs if is_new or one.name not in there]  # guard: copy-without-its-file-is-sent
        sending = secrets.token_hex(8)
        for blob in missing:
            self._send_file(disk, f"{folder}/{blob.name}", blob.length, node, sending)
        if is_new:
            data = sealed.record_bytes([disk], generation, seal)
            put = FileCall(call="put", name=f"{folder}/{seal.manifest}", length=len(data))
            self._call(node, put, [memoryview(data)])
        return sum(one.length for one in missing)

    def _send_file(self, disk: Tier, name: str, length: int, node: PeerNode, sending: str) -> None:
        file = FileCall(call="create", name=name, sending=sending, length=length)
        self._call(node, file)
        starts, failed = range(0, length, CHUNK_BYTES), threading.Event()
        try:
            if len(starts) <= 1:
                self._send_chunks(disk, file, node, starts, failed)
            else:
                with ThreadPoolExecutor(CHUNKS_AT_ONCE, "lastgood-send-chunk") as senders:
                    parts = [starts[at::CHUNKS_AT_ONCE] for at in range(CHUNKS_AT_ONCE)]
                    jobs = [senders.submit(self._send_chunks, disk, file, node, part, failed) for part in parts]
                for job in jobs:
                    job.result()
            self._call(node, FileCall(call="finish", name=name, sending=sending))
        except LastgoodError:
            with contextlib.suppress(LastgoodError):  # otherwise that node drops it, once its generation is deleted
                self._call(node, FileCall(call="abort", name=name, sending=sending))
            raise

    def _send_chunks(
        self, disk: Tier, file: FileCall, node: PeerNode, starts: Iterable[int], failed: threading.Event
    ) -> None:
        """Send the chunks of a file that begin at `starts`, until one of any thread has failed."""
        buffer = memoryview(bytearray(min(CHUNK_BYTES, file.length)))
        for start in starts:
            if failed.is_set():
                return
            length = min(CHUNK_BYTES, file.length - start)
            write = msgspec.structs.replace(file, call="write", offset=start, length=length)
            try:
                disk.read_into(Extent(blob=file.name, offset=start, length=length), buffer)
                self._call(node, write, [buffer[:length]])
            except BaseException:
                failed.set()
                raise

    def _call(
        self,
        node: PeerNode,
        call: FileCall,
        outgoing: Sequence[memoryview] = (),
        timeout_seconds: float = CALL_SECONDS,
    ) -> bytes:
        background = call.call == "write"  # guard: copies-sent-in-background
        answer = self._channel(node).call(
            self._encoded(call), outgoing=outgoing, timeout_seconds=timeout_seconds, background=background
        )
        return answer.record

    def _encoded(self, call: FileCall) -> bytes:
        return msgspec.json.encode(call)

    def _channel(self, node: PeerNode) -> Channel:
        at = (node.host, node.port, node.name)
        with self._lock:
            if self._closed:
                raise Cancelled("this node does not send or read any more")
            if at not in self._channels:
                self._channels[at] = Channel(
                    (node.host, node.port), node.name, self._me, self._security, windows=self._windows
                )
            return self._channels[at]


class PeerDisk:
    """`ports.Tier` for reading the memory of another node. `how`: as for `Peers.read`."""

    newest_only, reads_at_once = False, 2

    def __init__(self, peers: Peers, node: PeerNode, how: Reading = READING) -> None:
        self._peers, self._node, self._how = peers, node, how
        self.place = f"the memory of node {node.name}"

    def list(self, folder: str) -> Mapping[str, int | None]:
        return self._peers.list(self._node, folder)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        try:
            self._peers.read(self._node, extent, mv, self._how)
        except Damaged as error:  # of which only the texts come over the wire
            error.blob = extent.blob  # guard: remote-damage-names-its-file
            if isinstance(error, Truncated):
                folder, _, name = extent.blob.rpartition("/")
                error.offset = self.list(folder).get(name) or 0
            raise

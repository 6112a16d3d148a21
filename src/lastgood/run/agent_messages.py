"""What a training process and the agent of its node say to each other, and the record of what the agent is to know.

Only records: no socket, no file. agent_link.py has the version of the messages and sends them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ..policy.retention import Keep
from ..records import Finding, GenerationId, Record
from .peer_security import Certificates
from .peers import PeerNode, PeerOrder, StripeOrder


class CopyTo(Record, frozen=True, kw_only=True):
    """A place to which generations are copied. `keep`: which it keeps beside the newest."""

    url: str
    keep: Keep


class AgentSpec(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What an agent needs to know of a run. `order`: the highest claim that its trainers have made in object stores.

    `spill`: the folder of files that did not fit into memory; None: there is none. `nodes`: those of the job whose
    agents listen; empty if none do.
    """

    format: int
    places: list[CopyTo]
    order: int
    spill: str | None
    nodes: list[PeerNode] = msgspec.field(default_factory=list)


class Copied(Record, frozen=True, kw_only=True):
    """What an agent has found copied. `places`: the URL of each place -> the folders of the generations that were
    committed in memory when that place lacked none of what it is to have of them."""

    format: int
    places: dict[str, list[str]]


class Serve(Record, frozen=True, kw_only=True):
    """How an agent is to serve the other nodes of a job. `job`, `key`: as in `PeerTable`. `node`: name of this node.

    `host`: the address at which it listens. `port`: as before, or 0: a free one. `wire`: what carries the bytes.
    `certificates`: None: nodes know each other by the key.
    """

    job: str
    key: str
    node: str
    host: str
    port: int
    wire: str = "sockets"
    certificates: Certificates | None = None


class Send(Record, frozen=True, kw_only=True):
    """Files of a generation that an agent is to send to other nodes."""

    at: GenerationId
    orders: list[PeerOrder]


Task = Literal["read", "copy", "pack", "protect", "scrub", "repair", "parity", "rebuild"]


class Work(Record, frozen=True, kw_only=True):
    """Files of a generation that an agent is to read and verify, or to copy or pack to a place.

    `root`: of the generation, as the training process knows it. `place`: where it is done; "": in its folder. `of`: the
    ranks that wrote the files; None: all. "copy", "pack": from its folder, and from the places `sources`, the cheapest
    first. "protect": write the parity `code`, as "8+2", of files that are verified in `place`. "scrub": read all of a
    generation that may be in `place` alone, at most at `bytes_per_second` (None: no limit). "repair": rebuild damaged
    files in `place` from the parity that they have there. "parity": write the files of `stripes`; `nodes` are those
    that hold what this node's files can be computed from (policy/stripes.py: `neighbours`), which the agent notes for a
    drill. "rebuild": make the files of `of` whole here, from what the other `nodes` have. `order`: of the claim of the
    training process in `place`, for "protect" and "repair"; 0: it has none.
    """

    at: GenerationId
    root: str
    task: Task
    place: str
    of: list[int] | None
    stripes: list[StripeOrder] = msgspec.field(default_factory=list)
    nodes: list[PeerNode] = msgspec.field(default_factory=list)
    bytes_per_second: float | None = None
    code: str = ""
    sources: list[str] = msgspec.field(default_factory=list)
    order: int = 0


class Request(Record, frozen=True, kw_only=True):
    """What a process asks of an agent.

    "attach": until the connection ends, a training process has the run open. "status": nothing. "serve": listen for the
    agents of other nodes. "send": send files to them. "peers": which of them hold copies of this node's files, or
    parity. "work": a `Work`. "end": copy everything, remove the memory, and end.
    """

    protocol: int
    call: Literal["attach", "status", "serve", "send", "peers", "work", "end"]
    serve: Serve | None = None
    send: Send | None = None
    work: Work | None = None


class KnownPeers(Record, frozen=True, kw_only=True):
    """The other nodes of the job that hold what this node needs when it is lost. `job`, `key`: as in `PeerTable`,
    `certificates` as in `Serve`.

    `copies`: those to which files were to be sent. `parity`: `Work.nodes` of the last work of this task.
    """

    job: str
    key: str
    copies: list[PeerNode]
    parity: list[PeerNode]
    certificates: Certificates | None = None


class Answer(Record, frozen=True, kw_only=True):
    """The state of an agent; with `error`, why it does not do what was asked."""

    protocol: int
    process: int
    attached: int
    """connections of training processes"""
    missing: list[str]
    """what is here and not in a place below, after the last attempt to copy it"""
    absent: list[str] = msgspec.field(default_factory=list)
    """places where the run is not any more, and which may never have had all that is here"""
    deleted: list[str] = msgspec.field(default_factory=list)
    """places where the run is not any more, and which had all that is here"""
    given_up: list[str] = msgspec.field(default_factory=list)
    """after the call "end": the folders of saves without a COMMIT on this node, which were removed with the memory"""
    copying: bool = False
    """whether it copies, or is about to"""
    port: int = 0
    """where it listens for other nodes; 0: it does not"""
    peers: KnownPeers | None = None
    """after the call "peers": the nodes that hold something of this one, as far as it knows; None: none"""
    error: str = ""
    findings: list[Finding] = msgspec.field(default_factory=list)
    """of the files that it was asked to read"""
    written: list[str] = msgspec.field(default_factory=list)
    """the names of the files that it has repaired, copied or packed; not all of very many"""


class _Version(msgspec.Struct, frozen=True):
    """The part of an answer that every version has. Other fields are passed over."""

    protocol: int


def answer_of(data: bytes, protocol: int) -> Answer:
    """The answer of an agent. `protocol`: the version of this process. Raises ValueError for another one, whatever its
    fields are, and for what is no answer."""
    theirs = msgspec.json.decode(data, type=_Version).protocol  # msgspec's errors are ValueErrors
    if theirs != protocol:  # guard: version-compared-before-fields
        kind = "an older" if theirs < protocol else "a newer"
        raise ValueError(f"it speaks version {theirs} of the protocol, {kind} one; this is version {protocol}")
    try:
        return msgspec.json.decode(data, type=Answer)
    except msgspec.ValidationError as error:
        raise ValueError(f"it is of another version of lastgood: {error}") from error

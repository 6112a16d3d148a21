"""A place of a run that lies on the disks of several nodes: each has the files of its own ranks, and all records.

The coordinator asks the leaders of the other nodes (`FileRequest`), who serve it (`NodeFiles`); rank_requests.py has
the messages. In slots each rank is a node of its own.

Invariants
  1. A file of a rank (its tensors, its manifest) lies on the node of the rank that wrote it, and perhaps on others.
  2. Every other record (COMMIT, marks, labels, GOING) lies on every node: a call that writes or deletes one returns
     after it is durable on all of them. So a COMMIT is removed on every node before a file is removed on any.
  3. What the coordinator lists is what all nodes have together. A generation exists if any node has its COMMIT; the
     opening puts it on the nodes that lack it.
  4. Only leaders hold the lock of their directory, and only the coordinator asks for changes of records.
"""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from ..engine.read_file import reads_in_place
from ..errors import CommitUnknown, LastgoodError, MissingBlob, NameTaken, TierDown
from ..format import commit, intents, layout
from ..ports import Stop, Tier
from ..records import Commit, Extent, Generation, GenerationId, Manifest, Record, Seal
from ..storage.directory import Disk
from ..storage.slots import Slots
from .agent_link import AgentLink
from .packed import PackedTier
from .peers import Peers, PeerTable
from .rank_requests import Requests, RequestServer, ask_all

SUBJECT = "disks"
FOLDERS_AT_ONCE = 500
"""Folders whose listings are one answer: a message of the store of a job has a limit of a few MiB."""
READ_AT_ONCE = 4 << 20
"""Bytes of a file that are one answer."""

FETCHED = "fetched/chunks"
"""chunks of other nodes' files, while a restore reads them; the next opening removes what a killed process has left"""

Listing = dict[str, int | None]
Own = Disk | PackedTier | Slots
"""the disk of a node, or the slots of a rank"""


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job. A node is named by its leader, the lowest of its ranks."""

    leaders: tuple[int, ...]
    """the leader of each rank's node"""

    @property
    def others(self) -> list[int]:
        """The leaders of all nodes but that of the coordinator."""
        return sorted(set(self.leaders) - {0})


@dataclass
class NodeLinks:
    """What a rank has of its node and of others. `table`: the nodes whose agents serve each other; None: none do.

    At the leader of a node only, `agent`: of its folder; None: the front has none. `peers`: reads from other agents.
    """

    agent: AgentLink | None = None
    table: PeerTable | None = None
    peers: Peers | None = None


class FileRequest(Record, frozen=True, kw_only=True):
    """One call of the coordinator to the disks of all other nodes. The arguments are those of `ports.Tier`."""

    call: Literal["put_new", "agree", "point", "replace", "delete", "clear", "list", "tree", "read", "seals"]
    name: str = ""
    data: bytes = b""
    to: str = ""
    offset: int = 0
    length: int = 0
    fresh: bool = False


class NodeFiles:
    """The disk of one node, as its leader serves it (`rank_requests.Service`)."""

    def __init__(self, own: Own) -> None:
        self._own = own

    def served(self, request: Any, stop: Stop) -> Any:
        asked, own = msgspec.convert(request, FileRequest), self._own
        if asked.call == "put_new":
            _put(own, asked.name, asked.data)
        elif asked.call == "agree" and isinstance(own, Slots):
            own.agree(asked.name)
        elif asked.call == "point":
            own.point(asked.name, asked.data, asked.to)
        elif asked.call == "replace":
            _replace(own, asked.name, asked.to)
        elif asked.call == "delete":
            own.delete(asked.name)
        elif asked.call == "clear":
            commit.clear(own, asked.name)
        elif asked.call == "list":
            return dict(own.list(asked.name))
        elif asked.call == "tree":
            return _tree(own, asked.name, asked.to)
        elif asked.call == "read":
            return self._read(asked)
        elif asked.call == "seals" and (at := layout.parse_folder(asked.name)):
            return intents.seals_of(own, at)
        return None

    def _read(self, asked: FileRequest) -> bytes | None:
        """A range of a file; None if this node does not have it."""
        buffer = bytearray(asked.length)
        extent = Extent(blob=asked.name, offset=asked.offset, length=asked.length)
        try:
            self._own.read_into(extent, memoryview(buffer), fresh=asked.fresh)
        except MissingBlob:
            return None
        return bytes(buffer)


class Shown:
    """What a rank knows, during a restore, of one generation on the disks of other nodes.

    `own`: the disk of its node.
    """

    def __init__(self, own: Own) -> None:
        self._own = own
        self.folder = ""
        self.generation: Generation | None = None
        self.listing: Listing = {}
        self._records: Mapping[str, bytes] = {}
        self.fetched: Mapping[str, list[tuple[int, int, int]]] = {}
        """file -> offset and length of each of its chunks that lies in FETCHED, and its offset there"""

    def show(self, generation: Generation, listing: Listing, records: Mapping[str, bytes]) -> None:
        """Note what all nodes have of a generation, and the bytes of records of it."""
        self.folder = folder = layout.folder(generation.id)
        self.generation, self.listing, self.fetched = generation, listing, {}
        self._records = {f"{folder}/{name}": one for name, one in records.items()}

    def read_into(self, extent: Extent, mv: memoryview) -> bool:
        """Fill mv[:extent.length] from what was shown or fetched. Returns whether all of it was there."""
        folder, _, name = extent.blob.rpartition("/")
        if folder != self.folder:
            return False
        if (record := self._records.get(extent.blob)) is not None:
            mv[: extent.length] = record[extent.offset : extent.offset + extent.length]
            return True
        done, end = 0, extent.offset + extent.length
        for start, length, at in self.fetched.get(name, ()):
            begin, stop = max(start, extent.offset), min(start + length, end)
            if begin == extent.offset + done and begin < stop:
                part = Extent(blob=FETCHED, offset=at + begin - start, length=stop - begin)
                self._own.read_into(part, mv[done:])
                done += stop - begin
        return done == extent.length

    def forget(self) -> None:
        """Delete what was fetched. Called at the leader of a node, once no rank of it reads any more."""
        with contextlib.suppress(LastgoodError):  # the next opening removes it
            self._own.delete(FETCHED)
        self.fetched = {}


class NodeDisks:
    """`ports.Tier` over the disks of all nodes, at the coordinator. Files of ranks are written on its own node only.

    `own`: the disk of this node. `nodes`: all nodes. `requests`: to the leaders of the others; None: there are none.
    `links`: to the agent of this node, if the disk is memory, and to other nodes.
    """

    visible_is_durable = False

    def __init__(self, own: Own, nodes: Nodes, requests: Requests | None, links: NodeLinks | None = None) -> None:
        self.own, self.nodes, self._requests, self.links = own, nodes, requests, links or NodeLinks()
        self.place, self.leads, self.shown = own.place, True, Shown(own)
        self.newest_only, self.reads_at_once = own.newest_only, own.reads_at_once
        self._turn = threading.Lock()
        self.create = own.create

    # ---- writing -------------------------------------------------------------------------------------------

    def put_new(self, name: str, data: bytes) -> None:
        """Create a record on every node. Raises CommitUnknown where a COMMIT may exist on some nodes only."""
        try:
            self._on_all(FileRequest(call="put_new", name=name, data=data), lambda: _put(self.own, name, data))
        except LastgoodError as error:
            if not name.endswith(f"/{layout.COMMIT}") or not self.nodes.others or isinstance(error, CommitUnknown):
                raise
            raise CommitUnknown(  # guard: commit-on-some-nodes-is-unknown
                f"{name} may exist on some nodes: {error.what}",
                safe="Nothing was deleted.",
                todo="The next opening of the run completes it on all nodes, or removes what remains of it.",
            ) from error
        own, folder = self.own, name.removesuffix(f"/{layout.COMMIT}")
        if isinstance(own, Slots) and folder != name:
            with contextlib.suppress(LastgoodError):  # until the next commit that is agreed, more slots are kept
                # guard: slot-freed-after-all-agreed
                self._on_all(FileRequest(call="agree", name=folder), lambda: own.agree(folder))

    def point(self, name: str, data: bytes, to: str) -> None:
        self._on_all(FileRequest(call="point", name=name, data=data, to=to), lambda: self.own.point(name, data, to))

    def delete(self, name: str) -> None:
        self._on_all(FileRequest(call="delete", name=name), lambda: self.own.delete(name))

    def replace(self, name: str, by: str) -> None:
        """As `ports.Mendable.replace`, on each node that has `by`."""
        self._on_all(FileRequest(call="replace", name=name, to=by), lambda: _replace(self.own, name, by))

    def forget(self, folder: str) -> None:
        """As `ports.Shared.forget`."""
        self.own.forget(folder)

    def clear(self, folder: str) -> None:
        """Delete every file of a folder but GOING, on every node."""
        self._on_all(FileRequest(call="clear", name=folder), lambda: commit.clear(self.own, folder))

    # ---- reading -------------------------------------------------------------------------------------------

    def list(self, folder: str) -> Mapping[str, int | None]:
        found = Listing()
        for listing in self.listings(folder).values():
            found.update(listing)
        return found

    def listings(self, folder: str) -> dict[int, Listing]:
        """Leader of a node -> what the node has in a folder. That of this node comes last."""
        answers = self._ask(FileRequest(call="list", name=folder))
        return dict(zip(self.nodes.others, answers, strict=True)) | {0: dict(self.own.list(folder))}

    def seals(self, at: GenerationId) -> builtins.list[Seal]:
        """As `intents.seals_of`, on all nodes."""
        answers = self._ask(FileRequest(call="seals", name=layout.folder(at).partition("/")[2]))
        found = [msgspec.convert(one, Seal) for answer in answers for one in answer]
        return intents.seals_of(self.own, at) + found

    def held(self, generation: Generation) -> dict[int, set[int]]:
        """Leader of a node -> the ranks that wrote the generation whose files lie on the node."""
        listings = self.listings(layout.folder(generation.id))
        files = {name for listing in listings.values() for name in listing}
        return {
            # guard: copy-counts-with-its-manifest
            leader: {
                one.rank
                for one in generation.commit.seals
                if one.manifest in listing
                and (layout.blob_name(one.rank) in listing or layout.blob_name(one.rank) not in files)  # no tensors
            }
            for leader, listing in listings.items()
        }

    def tree(self, folder: str) -> Mapping[str, Listing]:
        """Folder below `folder` -> what all nodes have in it together."""
        found, after = dict[str, Listing](), ""
        while True:
            answers = [_tree(self.own, folder, after), *self._ask(FileRequest(call="tree", name=folder, to=after))]
            for answer in answers:
                for below, listing in answer.items():
                    found.setdefault(below, {}).update(listing)
            full = [max(answer) for answer in answers if len(answer) == FOLDERS_AT_ONCE]
            if not full:
                return found
            after = min(full)

    def reads_in_place(self, name: str) -> bool:
        """As `ports.Tier`."""
        return reads_in_place(self.own, name)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        try:
            self.own.read_into(extent, mv, fresh=fresh)
            return
        except MissingBlob:
            if not self.nodes.others:
                raise
        if self.shown.read_into(extent, mv):
            return
        for start in range(0, extent.length, READ_AT_ONCE):
            length = min(READ_AT_ONCE, extent.length - start)
            begin = extent.offset + start
            asked = FileRequest(call="read", name=extent.blob, offset=begin, length=length, fresh=fresh)
            data = next((one for one in self._ask(asked) if one is not None), None)
            if data is None:
                raise MissingBlob(f"missing on every node: {self.place}/{extent.blob}", blob=extent.blob)
            mv[start : start + length] = msgspec.convert(data, bytes)

    # ---- steps ---------------------------------------------------------------------------------------------

    def _ask(self, request: FileRequest) -> builtins.list[Any]:
        if self._requests is None:
            return []
        with self._turn:
            self._requests.ask(request)
            return self._requests.answers()

    def _on_all(self, request: FileRequest, here: Any) -> None:
        """Make a change on every node, at the same time. Raises the error of this node, or of the first that failed."""
        if self._requests is None:
            here()
            return
        with self._turn:
            ask_all(self._requests, request, here)


class NodeView:
    """`ports.Tier` over the disk of one node, at a rank other than the coordinator.

    It lists and reads what its node has, and what was shown to it of the others. `leads`: whether it leads its node.
    `links`: as for `NodeDisks`.
    """

    def __init__(self, own: Own, nodes: Nodes, leads: bool, links: NodeLinks | None = None) -> None:
        self.links = links or NodeLinks()
        self.own, self.nodes, self.place, self.leads, self.shown = own, nodes, own.place, leads, Shown(own)
        self.server: RequestServer | None = None
        """at the leader of a node: serves the coordinator"""
        self.newest_only, self.reads_at_once = own.newest_only, own.reads_at_once
        self.create = own.create
        self.put_new, self.point, self.delete = own.put_new, own.point, own.delete

    def replace(self, name: str, by: str) -> None:
        """As `ports.Mendable.replace`, on this node. Nothing is mended in slots."""
        assert not isinstance(self.own, Slots)
        self.own.replace(name, by)

    def forget(self, folder: str) -> None:
        """As `ports.Shared.forget`."""
        self.own.forget(folder)

    def list(self, folder: str) -> Mapping[str, int | None]:
        own = self.own.list(folder)
        return {**self.shown.listing, **own} if folder == self.shown.folder else own

    def reads_in_place(self, name: str) -> bool:
        """As `ports.Tier`."""
        return reads_in_place(self.own, name)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        try:
            self.own.read_into(extent, mv, fresh=fresh)
        except MissingBlob as error:
            folder, _, name = extent.blob.rpartition("/")
            if folder != self.shown.folder or name not in self.shown.listing:
                raise
            if not self.shown.read_into(extent, mv):
                raise TierDown(
                    f"{extent.blob} lies on the disk of another node, not in {self.place} of this one",
                    safe="Every committed generation is untouched.",
                ) from error


NodeTier = NodeDisks | NodeView


def own_disk(tier: Tier) -> Tier:
    """The part of a place that this process writes its files to: the disk of its node, or all of the place."""
    return tier.own if isinstance(tier, NodeTier) else tier


def _put(own: Own, name: str, data: bytes) -> None:
    """Create a record. A manifest is created only where its files lie, because it shows that they are complete. A
    COMMIT that is damaged on this node is replaced by that of the others."""
    if not _has_files_of(own, name, data):  # guard: manifest-beside-its-files
        return
    try:
        own.put_new(name, data)
    except NameTaken:
        folder, _, file = name.rpartition("/")
        if file != layout.COMMIT or commit.read_hint(own, name, own.list(folder).get(file), Commit) is not None:
            raise
        own.delete(name)  # guard: damaged-commit-replaced-on-node
        own.put_new(name, data)


def _has_files_of(own: Own, name: str, data: bytes) -> bool:
    """Whether the tensor files lie on this node that a record describes: a manifest has some, other records none."""
    if not layout.is_manifest(name.removesuffix(".tmp")):
        return True
    here = own.list(name.rpartition("/")[0])
    return all(blob.name in here for blob in layout.decode(data, Manifest, name).blobs)


def _replace(own: Own, name: str, by: str) -> None:
    """Rename `by` over `name` where it exists. Nothing is mended in slots."""
    if not isinstance(own, Slots) and by.rpartition("/")[2] in own.list(by.rpartition("/")[0]):
        own.replace(name, by)


def _tree(own: Own, root: str, after: str) -> dict[str, Listing]:
    """The next FOLDERS_AT_ONCE folders after the one named `after`, each with what lies in it."""
    names = sorted(name for name, length in own.list(root).items() if length is None and name > after)
    return {name: dict(own.list(f"{root}/{name}")) for name in names[:FOLDERS_AT_ONCE]}

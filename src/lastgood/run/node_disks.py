"""A place of a run that lies on the disks of several nodes: each has the files of its own ranks, and all records.

    opening     every rank names its directory -> ranks with the same one form a node, led by the lowest of them
                every leader locks its directory -> the coordinator settles all of them as one place
    afterwards  the coordinator asks the leaders of the other nodes (`FileRequest`), who serve it (`NodeFiles`)

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
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import msgspec

from ..coordination.rounds import RankGroup
from ..coordination.single_rank import AnyRanks
from ..errors import CommitUnknown, Damaged, LastgoodError, MissingBlob, Refused, TierDown
from ..format import commit, layout
from ..policy.parts import divided
from ..ports import Tier
from ..records import Extent, Finding, Generation, Record, RunHeader, Seal, judged
from ..storage.directory import Disk, WriteMode
from . import access
from .known import KnownRun
from .rank_requests import Requests, RequestServer
from .verify import Stop

SUBJECT = "disks"
FOLDERS_AT_ONCE = 500
"""Folders whose listings are one answer: a message of the store of a job has a limit of a few MiB."""
READ_AT_ONCE = 4 << 20
"""Bytes of a file that are one answer."""

FETCHED = "fetched.tmp"
"""chunks of other nodes' files, while a restore reads them; the next opening removes what a killed process has left"""

Listing = dict[str, int | None]


@dataclass(frozen=True)
class Nodes:
    """The nodes of a job. A node is named by its leader, the lowest of its ranks."""

    leaders: tuple[int, ...]
    """the leader of each rank's node"""

    @property
    def others(self) -> list[int]:
        """The leaders of all nodes but that of the coordinator."""
        return sorted(set(self.leaders) - {0})


class FileRequest(Record, frozen=True, kw_only=True):
    """One call of the coordinator to the disks of all other nodes. The arguments are those of `ports.Tier`."""

    call: Literal["put_new", "point", "delete", "clear", "list", "tree", "read"]
    name: str = ""
    data: bytes = b""
    to: str = ""
    offset: int = 0
    length: int = 0


class NodeFiles:
    """The disk of one node, as its leader serves it (`rank_requests.Service`)."""

    def __init__(self, own: Disk) -> None:
        self._own = own

    def served(self, request: Any, stop: Stop) -> Any:
        asked, own = msgspec.convert(request, FileRequest), self._own
        if asked.call == "put_new":
            own.put_new(asked.name, asked.data)
        elif asked.call == "point":
            own.point(asked.name, asked.data, asked.to)
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
        return None

    def _read(self, asked: FileRequest) -> bytes | None:
        """A range of a file; None if this node does not have it."""
        folder, _, name = asked.name.rpartition("/")
        if name not in self._own.list(folder):
            return None
        buffer = bytearray(asked.length)
        self._own.read_into(Extent(blob=asked.name, offset=asked.offset, length=asked.length), memoryview(buffer))
        return bytes(buffer)


class Shown:
    """What a rank knows, during a restore, of one generation on the disks of other nodes.

    `own`: the disk of its node.
    """

    def __init__(self, own: Disk) -> None:
        self._own = own
        self.folder = ""
        self.listing: Listing = {}
        self._records: Mapping[str, bytes] = {}
        self.fetched: Mapping[str, list[tuple[int, int, int]]] = {}
        """file -> offset and length of each of its chunks that lies in FETCHED, and its offset there"""

    def show(self, folder: str, listing: Listing, records: Mapping[str, bytes]) -> None:
        """Note what all nodes have in a folder, and the bytes of records there."""
        self.folder, self.listing, self.fetched = folder, listing, {}
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
                part = Extent(blob=f"{folder}/{FETCHED}", offset=at + begin - start, length=stop - begin)
                self._own.read_into(part, mv[done:])
                done += stop - begin
        return done == extent.length

    def forget(self) -> None:
        """Delete what was fetched. Called at the leader of a node, once no rank of it reads any more."""
        if self.fetched:
            with contextlib.suppress(LastgoodError):  # the next opening removes it
                self._own.delete(f"{self.folder}/{FETCHED}")
        self.fetched = {}


class NodeDisks:
    """`ports.Tier` over the disks of all nodes, at the coordinator. Files of ranks are written on its own node only.

    `own`: the disk of this node. `nodes`: all nodes. `requests`: to the leaders of the others; None: there are none.
    """

    newest_only: bool = False
    visible_is_durable = False

    def __init__(self, own: Disk, nodes: Nodes, requests: Requests | None) -> None:
        self.own, self.nodes, self._requests = own, nodes, requests
        self.place, self.leads, self.shown = own.place, True, Shown(own)
        self._turn = threading.Lock()
        self.create, self.replace, self.forget = own.create, own.replace, own.forget

    # ---- writing -------------------------------------------------------------------------------------------

    def put_new(self, name: str, data: bytes) -> None:
        """Create a record on every node. Raises CommitUnknown where a COMMIT may exist on some nodes only."""
        try:
            self._on_all(FileRequest(call="put_new", name=name, data=data), lambda: self.own.put_new(name, data))
        except LastgoodError as error:
            if not name.endswith(f"/{layout.COMMIT}") or not self.nodes.others or isinstance(error, CommitUnknown):
                raise
            raise CommitUnknown(  # guard: commit-on-some-nodes-is-unknown
                f"{name} may exist on some nodes: {error.what}",
                safe="Nothing was deleted.",
                todo="The next opening of the run completes it on all nodes, or removes what remains of it.",
            ) from error

    def point(self, name: str, data: bytes, to: str) -> None:
        self._on_all(FileRequest(call="point", name=name, data=data, to=to), lambda: self.own.point(name, data, to))

    def delete(self, name: str) -> None:
        self._on_all(FileRequest(call="delete", name=name), lambda: self.own.delete(name))

    def clear(self, folder: str) -> None:
        """Delete every file of a folder but GOING, on every node."""
        self._on_all(FileRequest(call="clear", name=folder), lambda: commit.clear(self.own, folder))

    # ---- reading -------------------------------------------------------------------------------------------

    def list(self, folder: str) -> Mapping[str, int | None]:
        found = Listing()
        for listing in self._listings(folder).values():
            found.update(listing)
        return found

    def held(self, generation: Generation) -> dict[int, set[int]]:
        """Leader of a node -> the ranks that wrote the generation whose files lie on the node."""
        listings = self._listings(layout.folder(generation.id))
        return {
            leader: {one.rank for one in generation.commit.seals if layout.blob_name(one.rank) in listing}
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

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        folder, _, name = extent.blob.rpartition("/")
        if not self.nodes.others or name in self.own.list(folder):
            self.own.read_into(extent, mv, fresh=fresh)
            return
        if self.shown.read_into(extent, mv):
            return
        for start in range(0, extent.length, READ_AT_ONCE):
            length = min(READ_AT_ONCE, extent.length - start)
            asked = FileRequest(call="read", name=extent.blob, offset=extent.offset + start, length=length)
            data = next((one for one in self._ask(asked) if one is not None), None)
            if data is None:
                raise MissingBlob(f"missing on every node: {self.place}/{extent.blob}", blob=extent.blob)
            mv[start : start + length] = msgspec.convert(data, bytes)

    # ---- steps ---------------------------------------------------------------------------------------------

    def _listings(self, folder: str) -> dict[int, Listing]:
        """Leader of a node -> what the node has in a folder. That of this node comes last."""
        answers = self._ask(FileRequest(call="list", name=folder))
        return dict(zip(self.nodes.others, answers, strict=True)) | {0: dict(self.own.list(folder))}

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
            self._requests.ask(request)
            try:
                here()
            finally:
                answers = _outcome(self._requests)
            if answers is not None:
                raise answers


def _outcome(requests: Requests) -> LastgoodError | None:
    """The error of the answers, which are waited for in any case, so that the next request meets idle servers."""
    try:
        requests.answers()
    except LastgoodError as error:
        return error
    return None


class NodeView:
    """`ports.Tier` over the disk of one node, at a rank other than the coordinator.

    It lists and reads what its node has, and what was shown to it of the others. `leads`: whether it leads its node.
    """

    newest_only: bool = False

    def __init__(self, own: Disk, nodes: Nodes, leads: bool) -> None:
        self.own, self.nodes, self.place, self.leads, self.shown = own, nodes, own.place, leads, Shown(own)
        self.server: RequestServer | None = None
        """at the leader of a node: serves the coordinator"""
        self.create, self.replace, self.forget = own.create, own.replace, own.forget
        self.put_new, self.point, self.delete = own.put_new, own.point, own.delete

    def list(self, folder: str) -> Mapping[str, int | None]:
        own = self.own.list(folder)
        return {**self.shown.listing, **own} if folder == self.shown.folder else own

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        folder, _, name = extent.blob.rpartition("/")
        if name not in self.list(folder) or name in self.own.list(folder):
            self.own.read_into(extent, mv, fresh=fresh)
        elif not self.shown.read_into(extent, mv):
            raise TierDown(
                f"{extent.blob} lies on the disk of another node, not in {self.place} of this one",
                safe="Every committed generation is untouched.",
            )


NodeTier = NodeDisks | NodeView


def own_disk(tier: Tier) -> Tier:
    """The part of a place that this process writes its files to: the disk of its node, or all of the place."""
    return tier.own if isinstance(tier, NodeTier) else tier


def _tree(own: Disk, root: str, after: str) -> dict[str, Listing]:
    """The next FOLDERS_AT_ONCE folders after the one named `after`, each with what lies in it."""
    names = sorted(name for name, length in own.list(root).items() if length is None and name > after)
    return {name: dict(own.list(f"{root}/{name}")) for name in names[:FOLDERS_AT_ONCE]}


# ---- opening -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], mode: WriteMode, ranks: AnyRanks) -> Iterator[NodeTier]:
    """Open the directory of this rank's node. All ranks call it. The leader of each node holds the lock of its own.

    Raises NotARun, NotWritable, RunLocked, NoSpace, TierDown, and Refused if two nodes hold different runs.
    """
    with contextlib.ExitStack() as storage:
        topic = ranks.topic("nodes")
        with topic.failing():
            here = access.identity(path)
            nodes = Nodes(tuple(topic.agree(here, lambda posts: [posts.index(one) for one in posts])))
            leads = nodes.leaders[ranks.rank] == ranks.rank
            if leads:
                own = storage.enter_context(access.for_writing(path, mode))
            topic.agree(None, lambda _: None)  # every node is locked
            if not leads:
                own = storage.enter_context(access.for_sharing(path, mode))
            disk = cast(Disk, own)
            topic.agree((nodes.leaders[ranks.rank], _run_of(disk)), _require_one_run)
        if not isinstance(ranks, RankGroup) or not nodes.others:
            yield NodeDisks(disk, nodes, None) if ranks.is_coordinator else NodeView(disk, nodes, leads)
        elif ranks.is_coordinator:
            requests = Requests(ranks, SUBJECT, nodes.others)
            storage.callback(requests.end)
            yield NodeDisks(disk, nodes, requests)
        else:
            view = NodeView(disk, nodes, leads)
            if leads:
                view.server = RequestServer(ranks, SUBJECT, NodeFiles(disk))
                storage.callback(view.server.close)
            yield view


def _run_of(disk: Disk) -> str | None:
    header = commit.read_hint(disk, layout.HEADER, disk.list("").get(layout.HEADER), RunHeader)
    return header.run if header else None


def _require_one_run(posts: Sequence[tuple[int, str | None]]) -> None:
    runs = {run: leader for leader, run in posts if run is not None}
    if len(runs) > 1:  # guard: nodes-of-one-run
        named = " and ".join(f"that of rank {leader} ({run})" for run, leader in sorted(runs.items()))
        raise Refused(
            f"the disks of these nodes hold different runs: {named}",
            safe="Nothing was touched.",
            todo="Empty the directory on the node whose run is not wanted, or give this run another one.",
        )


def complete_records(tier: NodeDisks, known: KnownRun) -> None:
    """Put the COMMIT of each generation on the nodes that lack it: those that were replaced."""
    for at in known.survey.generations if tier.nodes.others else ():
        commit.confirm(tier, at)  # guard: commit-put-on-every-node


def note_lost_parts(known: KnownRun) -> None:
    """Note which generations lack the files of a rank, because its node was replaced.

    Such a generation is mended from another place of the run, or passed over. No mark of it is written, because the
    node may come back.
    """
    if not isinstance(known.tier, NodeDisks):
        return
    for at, one in list(known.survey.generations.items()):
        listing = known.survey.listings[layout.folder(at).partition("/")[2]]
        missing = [seal for seal in one.commit.seals if _is_lost(known.tier, one, seal, listing)]
        if missing and not one.damaged:  # guard: lost-part-is-not-restorable
            ranks = ", ".join(str(seal.rank) for seal in missing)
            what = f"the files of rank {ranks} lie on no node of this job"
            lost = Finding(kind="MissingBlob", what=what, layer="structure", blob=missing[0].manifest)
            known.record(judged(one, [lost]))


def _is_lost(tier: Tier, generation: Generation, seal: Seal, listing: Mapping[str, int | None]) -> bool:
    """Whether no node has the files of a rank. A rank without tensors has a manifest only."""
    if seal.manifest not in listing:
        return True
    if layout.blob_name(seal.rank) in listing:
        return False
    try:
        return bool(commit.sealed_record(tier, generation, seal).blobs)
    except Damaged:
        return True


def parts(tier: Tier, ranks: AnyRanks, generation: Generation) -> list[list[int]]:
    """For each rank of the job, the ranks that wrote a generation whose files in `tier` are its part (policy/parts.py).

    Called at the coordinator, for a place on several nodes; anywhere else for a place that all ranks see.
    """
    written = [one.rank for one in generation.commit.seals]
    if isinstance(tier, NodeDisks):
        return divided(written, tier.nodes.leaders, tier.held(generation))
    return divided(written, [0] * ranks.size)

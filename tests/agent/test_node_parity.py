"""Parity among the memories of nodes: written from the chunks of others, and rebuilt from."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from test_peers import JOB, KEY, call

import lastgood
from boards import Board
from harness import flip
from lastgood import errors
from lastgood.agent import parity_files
from lastgood.agent.peer_files import PeerFiles
from lastgood.coordination.rounds import RankGroup
from lastgood.format import commit, layout, stripe_layout
from lastgood.io.checksum import digest
from lastgood.io.files import PosixFile
from lastgood.io.memory_files import MemoryFiles
from lastgood.limits import WORKERS
from lastgood.policy.placement import Node, groups
from lastgood.policy.stripes import stripe_sets
from lastgood.records import (
    Blob,
    Cell,
    Commit,
    Extent,
    Generation,
    GenerationId,
    Manifest,
    Piece,
    Seal,
    Stripe,
    StripeFile,
    World,
)
from lastgood.run import node_parity, paths
from lastgood.run.agent_link import AgentLink
from lastgood.run.node_copies import CopyMaker
from lastgood.run.node_disks import NodeDisks, NodeFiles, NodeLinks, Nodes, NodeView
from lastgood.run.node_parity import NodeRebuild, ParityMaker, rebuilder
from lastgood.run.node_transfer import Carrier, Transfer
from lastgood.run.peers import READING, FileCall, PeerNode, Peers, PeerTable, Reading, StripeMember, StripeOrder
from lastgood.run.planned_save import RunOptions
from lastgood.storage.directory import Disk
from lastgood.wire import nixl as nixl_wire
from lastgood.wire.nixl import Nixl
from lastgood.wire.port import Answer, Peer
from lastgood.wire.security import SharedKey
from lastgood.wire.serving import Server
from lastgood.wire.window import Window

NODES, PAGE = 4, 4096
LENGTHS = (5 * PAGE + 17, 8 * PAGE, 3 * PAGE, PAGE - 5)
"""of the file of each rank, in chunks of a page"""
AT = GenerationId(step=1, incarnation="0a0b0c0d")
OUTSIDE = Cell(blob="../../r00000.safetensors", offset=0, length=1, digest="0" * 32)


class Cluster:
    """The memories of four nodes, each served to the others: node r has the files of rank r."""

    def __init__(self, root: Path, stack: contextlib.ExitStack, wire: str = "sockets") -> None:
        self.root, self.nodes = root, list[PeerNode]()
        self.peers = Peers(JOB, SharedKey(bytes.fromhex(KEY)), "a", nixl_wire.chosen(wire))
        stack.callback(self.peers.close)
        for rank in range(NODES):
            files = PeerFiles(lambda rank=rank: self.disk(rank))
            stack.callback(files.close)
            security = SharedKey(bytes.fromhex(KEY))
            me, windows = Peer(JOB, str(rank)), nixl_wire.chosen(wire)
            server = stack.enter_context(Server(("127.0.0.1", 0), me, security, files, windows=windows))
            self.nodes.append(
                PeerNode(leader=rank, name=str(rank), domain="", host="127.0.0.1", port=server.address[1])
            )
        self.generation = saved([self.disk(rank) for rank in range(NODES)])

    def disk(self, rank: int) -> Disk:
        root = self.root / str(rank)
        root.mkdir(exist_ok=True)
        return Disk(MemoryFiles(str(root)), str(root), shared=True)

    def folder(self, rank: int) -> Path:
        return self.root / str(rank) / layout.folder(self.generation.id)

    def protect(self) -> None:
        for number, one in enumerate(stripe_sets(groups([Node(str(rank)) for rank in range(NODES)], 2, 2))):
            data = [
                StripeMember(node=self.nodes[int(at.node)], first=at.first, ranks=[int(at.node)]) for at in one.data
            ]
            for index, node in enumerate(one.parity):
                name = stripe_layout.file_name("0" * 8, number, index)
                order = StripeOrder(name=name, data=data, parity=2, index=index)
                parity_files.write(self.disk(int(node)), self.peers, self.generation, [order], lambda: False)

    def lose(self, rank: int) -> None:
        """The node is replaced by an empty one, on which the opening has put the COMMIT."""
        data = (self.folder(rank) / layout.COMMIT).read_bytes()
        shutil.rmtree(self.root / str(rank))
        self.folder(rank).mkdir(parents=True)
        (self.folder(rank) / layout.COMMIT).write_bytes(data)

    def rebuild(self, rank: int) -> None:
        others = [one for one in self.nodes if one.leader != rank]
        parity_files.rebuild(self.disk(rank), self.peers, self.generation, [rank], others, lambda: False)

    def files(self, rank: int) -> dict[str, bytes]:
        return {one.name: one.read_bytes() for one in self.folder(rank).glob(f"r{rank:05d}.*")}


def saved(disks: list[Disk]) -> Generation:
    """A generation of four ranks, each of which has a file with random bytes on its node."""
    seals = list[Seal]()
    for rank, (disk, length) in enumerate(zip(disks, LENGTHS, strict=True)):
        data, name = random.Random(rank).randbytes(length), layout.blob_name(rank)
        disk.put_new(f"{layout.folder(AT)}/{name}", data)
        digests = [digest("xxh3_128", data[start : start + PAGE]) for start in range(0, length, PAGE)]
        blob = Blob(name=name, length=length, chunk_bytes=PAGE, chunks=digests)
        whole = Piece(
            name=f"tensor {rank}",
            dtype="uint8",
            shape=[length - PAGE],
            extent=Extent(blob=name, offset=PAGE, length=length - PAGE),
            digest="0" * 32,
        )
        manifest = Manifest(
            format=layout.FORMAT,
            step=AT.step,
            incarnation=AT.incarnation,
            rank=rank,
            digest="xxh3_128",
            blobs=[blob],
            pieces=[whole] if length > PAGE else [],
            aliases={},
            values={},
        )
        seals.append(commit.seal(disk, manifest))
    record = Commit(
        format=layout.FORMAT,
        run="1a1b1c1d",
        step=AT.step,
        incarnation=AT.incarnation,
        order=1,
        world=World(ranks=NODES),
        continues=None,
        parent=None,
        seals=seals,
        created=0.0,
    )
    found = [commit.publish(disk, record, "xxh3_128") for disk in disks]
    return found[0]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path, stack)


@pytest.mark.parametrize("lost", [(0,), (0, 1), (0, 2), (1, 2), (2, 3)], ids=str)
def test_the_files_of_lost_nodes_are_rebuilt_bit_for_bit(cluster: Cluster, lost) -> None:
    cluster.protect()
    before = {rank: cluster.files(rank) for rank in lost}
    for rank in lost:
        cluster.lose(rank)
    for rank in lost:
        cluster.rebuild(rank)
        assert cluster.files(rank) == before[rank] and len(before[rank]) == 2


@pytest.mark.slow
def test_parity_is_written_and_files_are_rebuilt_over_nixl(tmp_path: Path, nixl: Nixl) -> None:
    with contextlib.ExitStack() as stack:
        cluster = Cluster(tmp_path, stack, "nixl")
        cluster.protect()
        before = cluster.files(1)
        cluster.lose(1)
        cluster.rebuild(1)
        assert cluster.files(1) == before and len(before) == 2
        idle = [session for channel in cluster.peers._channels.values() for session, _ in channel._idle]
        assert idle and all(isinstance(session._bulk, Window) for session in idle)


def test_parity_is_read_in_the_background_and_lost_files_are_not(cluster: Cluster, monkeypatch) -> None:
    """A job waits for files that are rebuilt, and for no parity."""
    asked, handle = list[bool](), PeerFiles.handle

    def recorded(self: PeerFiles, peer: Peer, request: bytes, bulk: memoryview) -> Answer:
        answer = handle(self, peer, request, bulk)
        asked.extend([answer.background] if answer.bulk else [])
        return answer

    monkeypatch.setattr(PeerFiles, "handle", recorded)
    cluster.protect()
    assert asked and all(asked)
    asked.clear()
    cluster.lose(0)
    cluster.rebuild(0)
    assert asked and not any(asked)


def test_more_losses_than_parity_cells_are_beyond_repair(cluster: Cluster, monkeypatch) -> None:
    """All that was left of a generation crossed the network before it was given up for an older one."""
    cluster.protect()
    for rank in (0, 1, 2):
        cluster.lose(rank)
    read, reads = Peers.read, list[bool]()

    def counted(self, node, extent, mv, how) -> None:
        of_parity = extent.length % PAGE == 0 and not extent.blob.endswith(".json")  # else the copy of a manifest
        reads.append(of_parity or extent.blob.endswith(".safetensors"))
        read(self, node, extent, mv, how)

    monkeypatch.setattr(Peers, "read", counted)
    with pytest.raises(errors.BeyondRepair):
        cluster.rebuild(0)
    assert not cluster.files(0), "nothing is left that could count as a file"
    assert reads and not any(reads)


@pytest.mark.parametrize(
    ("pattern", "at", "lost", "lost_later"),
    [("r00001.safetensors", (1,), 2, 0), ("s*.parity-?", (1, 3), 0, 2)],
    ids=["data", "parity"],
)
def test_a_damaged_cell_of_another_node_is_not_used(cluster: Cluster, pattern: str, at, lost, lost_later) -> None:
    """With one node lost there is a cell more than is needed, and with two there is not."""
    cluster.protect()
    before = cluster.files(lost)
    for one in (one for rank in at for one in cluster.folder(rank).glob(pattern)):
        flip(one, PAGE + 9)
    cluster.lose(lost)
    cluster.rebuild(lost)
    assert cluster.files(lost) == before
    cluster.lose(lost)
    cluster.lose(lost_later)
    with pytest.raises(errors.BeyondRepair):
        cluster.rebuild(lost)
    assert not cluster.files(lost)


def test_a_chunk_that_its_node_cannot_read_is_no_outage(cluster: Cluster, monkeypatch) -> None:
    """A bad sector beyond what parity makes good: each start ended with PeerDown, and waited for a node that was up."""
    cluster.protect()
    before, read, bad = cluster.files(2), PosixFile.read_into, str(cluster.folder(1) / "r00001.safetensors")

    def failing(self: PosixFile, mv: memoryview, offset: int) -> int:
        if self._path == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(self, mv, offset)

    monkeypatch.setattr(PosixFile, "read_into", failing)
    cluster.lose(2)
    cluster.rebuild(2)
    assert cluster.files(2) == before
    cluster.lose(2)
    cluster.lose(0)
    with pytest.raises(errors.BeyondRepair):
        cluster.rebuild(2)


def test_a_node_that_cannot_be_reached_has_lost_nothing(cluster: Cluster) -> None:
    """A generation was given up for an older one because an agent was being started again while files were rebuilt."""
    cluster.protect()
    before = cluster.files(0)
    cluster.lose(0)
    reachable = list(cluster.nodes)
    cluster.nodes[3] = msgspec.structs.replace(reachable[3], port=1)
    cluster.rebuild(0)
    assert cluster.files(0) == before, "two cells of each stripe are left"
    cluster.lose(0)
    cluster.nodes[2] = msgspec.structs.replace(reachable[2], port=1)
    for left in ({}, {"r00000.safetensors": before["r00000.safetensors"]}):  # the latter by a rebuild that was killed
        for name, data in left.items():
            (cluster.folder(0) / name).write_bytes(data)
        with pytest.raises(errors.PeerDown, match=r"the memory of node 3 cannot be read: .* refused"):
            cluster.rebuild(0)
    cluster.nodes = reachable
    cluster.rebuild(0)
    assert cluster.files(0) == before


def test_a_node_that_falls_silent_is_waited_for_once(cluster: Cluster, monkeypatch) -> None:
    """An agent hung while what a lost node had was computed. Each chunk asked it anew and waited a minute for it,
    though the other nodes had cells enough: hours for a part of some GB."""
    cluster.protect()
    before = cluster.files(0)
    cluster.lose(0)
    read, waited = Peers.read, set[str]()

    def silent(self: Peers, node: PeerNode, extent: Extent, mv: memoryview, how: Reading = READING) -> None:
        if node.name == "1" and not extent.blob.endswith(".json"):
            waited.add(f"{extent.blob} {extent.offset}")
            raise errors.TimedOut("a request to 1 took longer than 60 s")
        read(self, node, extent, mv, how)

    monkeypatch.setattr(Peers, "read", silent)
    cluster.rebuild(0)
    assert cluster.files(0) == before
    assert 0 < len(waited) <= WORKERS, "each thread waits for its first chunk at most"


def test_several_nodes_that_hang_cost_one_timeout(cluster: Cluster, monkeypatch) -> None:
    """Each agent that hung while files were rebuilt was listed for a minute, twice, one after the other."""
    cluster.protect()
    before = cluster.files(0)
    cluster.lose(0)
    listed, together = Peers.list, threading.Barrier(2)

    def silent(self: Peers, node: PeerNode, folder: str) -> dict[str, int | None]:
        if node.name in ("1", "2"):
            together.wait(60)
        if node.name == "1":
            raise errors.TimedOut("a request to 1 took longer than 60 s")
        return listed(self, node, folder)

    monkeypatch.setattr(Peers, "list", silent)
    cluster.rebuild(0)
    assert cluster.files(0) == before and not together.broken


def test_a_damaged_file_is_made_whole_where_it_lies(cluster: Cluster) -> None:
    cluster.protect()
    before = cluster.files(1)
    flip(cluster.folder(1) / "r00001.safetensors", PAGE + 9)
    flip(cluster.folder(1) / "r00001.manifest.json")
    cluster.rebuild(1)
    assert cluster.files(1) == before


def test_a_damaged_chunk_gets_no_parity(cluster: Cluster) -> None:
    flip(cluster.folder(0) / "r00000.safetensors", PAGE + 9)
    with pytest.raises(errors.SumMismatch):
        cluster.protect()
    assert not [one for rank in range(NODES) for one in cluster.folder(rank).glob("s00000000-00003.*")]


def test_parity_of_another_generation_is_not_used(cluster: Cluster) -> None:
    cluster.protect()
    for rank in range(NODES):
        for one in cluster.folder(rank).glob("s*.json"):
            record = layout.decode(one.read_bytes(), StripeFile, one.name)
            one.write_bytes(layout.encode(msgspec.structs.replace(record, root="0" * 32)))
    cluster.lose(0)
    with pytest.raises(errors.Damaged):
        cluster.rebuild(0)
    assert not cluster.files(0)


def test_no_node_writes_parity_on_another_one(cluster: Cluster) -> None:
    name = f"{layout.folder(cluster.generation.id)}/{stripe_layout.file_name('0' * 8, 0, 0)}"
    for request in (FileCall(call="create", name=name, length=1), FileCall(call="put", name=f"{name}.json", length=1)):
        with pytest.raises(errors.Refused):
            call(cluster.nodes[1], request, b"x" if request.call == "put" else b"")
    assert not [*cluster.folder(1).glob("s*")]


def test_a_damaged_copy_of_a_manifest_is_not_used(cluster: Cluster) -> None:
    cluster.protect()
    before = cluster.files(0)
    (copy,) = cluster.folder(2).glob("s00000000-00000.parity-?")
    flip(copy)
    cluster.lose(0)
    cluster.rebuild(0)
    assert cluster.files(0) == before


@pytest.mark.parametrize(
    "change",
    [
        {"data": 3},
        {"index": 2},
        {"digest": "crc"},
        {"manifests": {"../r00000.manifest.json": 1}},
        {"stripes": [Stripe(cells=[None, None], length=5, sum="0" * 32)]},
        {"stripes": [Stripe(cells=[None, None], length=1 << 40, sum="0" * 32)]},
        {"stripes": [Stripe(cells=[None, None], length=PAGE, sum="0")]},
        {"stripes": [Stripe(cells=[None, OUTSIDE], length=PAGE, sum="0" * 32)]},
    ],
    ids=str,
)
def test_a_record_of_parity_that_cannot_be_true_is_refused(change) -> None:
    good = StripeFile(
        format=1,
        root="0" * 32,
        data=2,
        parity=2,
        index=1,
        digest="xxh3_128",
        stripes=[Stripe(cells=[None, None], length=PAGE, sum="0" * 32)],
        manifests={"r00000.manifest.json": 1},
    )
    name = stripe_layout.record_name(stripe_layout.file_name("0" * 8, 0, 1))
    stripe_layout.validate(good, name)
    with pytest.raises(errors.ManifestInvalid):
        stripe_layout.validate(msgspec.structs.replace(good, **change), name)


class Asked:
    """Requests to the disks of other nodes (`NodeDisks`), answered at once."""

    def __init__(self, disks: list[Disk]) -> None:
        self._disks, self._answers = disks, list[object]()

    def ask(self, request: msgspec.Struct) -> None:
        self._answers = [NodeFiles(one).served(msgspec.to_builtins(request), lambda: False) for one in self._disks]

    def answers(self, least_seconds: float = 0.0) -> list[object]:
        return self._answers


def test_a_node_whose_agent_does_not_listen_has_no_part_in_parity(cluster: Cluster) -> None:
    """Nor does any save count as surviving the loss of a node: nobody else has what that one writes."""
    others = [cluster.disk(rank) for rank in range(1, NODES)]
    link = NodeLinks(AgentLink(f"memory://{cluster.root}/0"))
    disks = NodeDisks(cluster.disk(0), Nodes(tuple(range(NODES))), Asked(others), link)  # type: ignore[arg-type]
    whole, without = (PeerTable(job=JOB, key=KEY, nodes=cluster.nodes[first:]) for first in (0, 1))
    group = RankGroup(0, NODES, Board(), "run")
    every, some = (ParityMaker(disks, table, (2, 1), group) for table in (whole, without))
    assert [every.place, some.place] == ["peers://node", "peers://process"]
    assert paths.survived_by(every.place) == {"process", "node"} and paths.survived_by(some.place) == {"process"}
    copies = [CopyMaker(disks, table, 2, group) for table in (whole, without)]
    assert [one.place for one in copies] == [every.place, some.place]
    asked = some._missing(cluster.generation)
    assert {leader for members in asked.sets.values() for leader in (one.leader for one in members)} == {1, 2, 3}
    assert asked.files.keys() == {"1", "2", "3"} and "0" in every._missing(cluster.generation).files
    assert not any(one.outlives(cluster.generation) for one in (every, some, *copies)), "node 0 alone has its files"
    cluster.protect()
    assert some.outlives(cluster.generation), "node 0 listened when it wrote parity"
    assert not copies[1].outlives(cluster.generation)
    for name, data in cluster.files(0).items():
        cluster.disk(2).put_new(f"{layout.folder(AT)}/{name}", data)
    assert some.outlives(cluster.generation) and copies[1].outlives(cluster.generation)
    assert not every.outlives(cluster.generation) and not copies[0].outlives(cluster.generation)


def test_nothing_is_rebuilt_where_another_node_can_not_be(cluster: Cluster, monkeypatch) -> None:
    """Two nodes were lost while parity of the newest save was being written. One of them read all that its files were
    computed from over the network, the other one found that there was too little, and an older save was restored."""
    cluster.protect()
    for rank in (2, 3):
        cluster.lose(rank)
    (record,) = cluster.folder(1).glob("s*-00003.parity-*.json")
    record.unlink()  # node 3 needs it, and node 2 does not
    asked = list[object]()
    monkeypatch.setattr(node_parity, "ask_all", lambda requests, request, *_: asked.append(request))
    with pytest.raises(errors.BeyondRepair):
        rebuild_among(cluster, cluster.nodes).rebuild(cluster.generation, lambda: False)
    assert not asked


def rebuild_among(cluster: Cluster, nodes: list[PeerNode]) -> NodeRebuild:
    """At node 0. `nodes`: those whose agents listen."""
    table = PeerTable(job=JOB, key=KEY, nodes=nodes)
    links = NodeLinks(AgentLink("memory:///none"), table, cluster.peers)
    others = Asked([cluster.disk(rank) for rank in range(1, NODES)])
    disks = NodeDisks(cluster.disk(0), Nodes(tuple(range(NODES))), others, links)  # type: ignore[arg-type]
    return NodeRebuild(disks, table, RankGroup(0, NODES, Board(), "run"))


def test_what_a_node_that_is_left_out_has_is_not_lost(cluster: Cluster, monkeypatch) -> None:
    """Two nodes were replaced, and the agent of a third one did not listen when the job was started again. What could
    be computed only with its files was taken for lost, and an older save was restored."""
    cluster.protect()
    for rank in (1, 2):
        cluster.lose(rank)
    asked = list[object]()
    monkeypatch.setattr(node_parity, "ask_all", lambda requests, request, *_: asked.append(request))
    work = rebuild_among(cluster, cluster.nodes[:3])
    with pytest.raises(errors.PeerDown, match=r"too few cells .* the agent of the node of rank 3 does not listen"):
        work.rebuild(cluster.generation, lambda: False)
    for one in cluster.folder(0).glob("s*.json"):
        one.unlink()
    with pytest.raises(errors.BeyondRepair):  # what is lost with that node too
        work.rebuild(cluster.generation, lambda: False)
    assert not asked


def test_damage_that_a_node_left_out_may_mend_is_no_loss(cluster: Cluster, monkeypatch) -> None:
    """Cells of the nodes that listen turn out to be damaged while the agents read them."""
    cluster.protect()
    cluster.lose(1)

    def damaged(*_: object) -> None:
        raise errors.BeyondRepair("a cell is damaged")

    monkeypatch.setattr(node_parity, "ask_all", damaged)
    with pytest.raises(errors.PeerDown, match="a cell is damaged, and the agent of the node of rank 3 does not listen"):
        rebuild_among(cluster, cluster.nodes[:3]).rebuild(cluster.generation, lambda: False)
    with pytest.raises(errors.BeyondRepair):
        rebuild_among(cluster, cluster.nodes).rebuild(cluster.generation, lambda: False)


def test_chunks_for_a_node_wait_once_for_an_agent_that_is_silent(cluster: Cluster, monkeypatch) -> None:
    """Each chunk that several ranks of a node wanted asked an agent that hung anew, and waited a minute for it; also
    when no other node had the file, so that the restore had failed."""
    for name, data in cluster.files(1).items():
        cluster.disk(2).put_new(f"{layout.folder(AT)}/{name}", data)
    read, asked = Peers.read, list[str]()

    def silent(self: Peers, node: PeerNode, extent: Extent, mv: memoryview, how: Reading = READING) -> None:
        asked.append(node.name)
        if node.name == "1":
            raise errors.TimedOut("a request to 1 took longer than 60 s")
        read(self, node, extent, mv, how)

    monkeypatch.setattr(Peers, "read", silent)
    links = NodeLinks(table=PeerTable(job=JOB, key=KEY, nodes=cluster.nodes), peers=cluster.peers)
    view = NodeView(cluster.disk(0), Nodes(tuple(range(NODES))), True, links)
    records = {name: data for rank in range(NODES) for name, data in cluster.files(rank).items() if "manifest" in name}
    view.shown.show(cluster.generation, {name: len(data) for name, data in records.items()}, records)
    carrier, wanted = Carrier(view, [], RankGroup(0, NODES, Board(), "run")), {"0": {"r00001.safetensors": [*range(8)]}}

    def carry(*holders: int) -> dict[str, int]:
        named = {layout.blob_name(rank): [rank] for rank in range(NODES)} | {"r00001.safetensors": [*holders]}
        return carrier.carry(Transfer(number=0, at=AT, place=None, wanted=wanted, holders=named), lambda: False)

    assert carry(1, 2) == {"other nodes": LENGTHS[1]} and asked == ["1", *"2" * 8]
    asked.clear()
    with pytest.raises(errors.TierDown):
        carry(1)
    assert asked == ["1"]


def test_what_no_node_has_is_rebuilt_where_an_agent_listens() -> None:
    nodes = [PeerNode(leader=one, name=str(one), domain="", host="127.0.0.1", port=1) for one in (2, 4)]
    table, leaders = PeerTable(job=JOB, key=KEY, nodes=nodes), [0, 0, 2, 2, 4, 4]
    assert [rebuilder(rank, leaders, table) for rank in range(8)] == [2, 4, 2, 2, 4, 4, 2, 4]


def test_too_few_nodes_for_parity_make_copies_that_survive_the_same() -> None:
    options = RunOptions(node_parity="4+2")
    assert options.code_among(6) == (4, 2) and options.code_among(5) is None
    assert lastgood.Tier("memory://", parity="4+2", spread="rack").node_parity == "4+2"
    assert options.copies_among_nodes == 3 and RunOptions(copies=2).code_among(9) is None

"""Copies that a drill has made on another node: by its agent, from its own files, in a folder of the drill."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from agents import agent, until
from cli_runs import DATA, contents, writing
from lastgood import errors
from lastgood.agent import drill_files
from lastgood.agent.drill_files import DrillFiles, WithDrills
from lastgood.agent.nodes import Nodes
from lastgood.agent.peer_files import PeerFiles
from lastgood.format import layout
from lastgood.io.files import PosixFiles
from lastgood.records import Extent
from lastgood.run import agent_link, drill_scratch
from lastgood.run.agent_messages import Request, Serve
from lastgood.run.drill_copies import CopyPeers
from lastgood.run.peers import DRILLS, FileCall, PeerNode, Peers
from lastgood.storage.directory import Disk
from lastgood.testing import Clock
from lastgood.wire.port import Peer
from lastgood.wire.security import SharedKey
from lastgood.wire.serving import Server

JOB, KEY = "0" * 16, "ab" * 32
BY_KEY = SharedKey(bytes.fromhex(KEY))


class Node:
    """Node b, whose agent has step 1 of a run in `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.clock = root, Clock()
        (self.generation,) = writing(root, 1)
        self.folder = layout.folder(self.generation.id)
        self.files = {one.name: one.stat().st_size for one in sorted((root / self.folder).glob("r*"), reverse=True)}
        self.drills = DrillFiles(self.disk, clock=self.clock)
        self.before = contents(root)

    def disk(self) -> Disk:
        return Disk(PosixFiles(), str(self.root), shared=True)

    @property
    def copies(self) -> list[str]:
        """The files of drills."""
        return sorted(one.name for one in (self.root / DRILLS).rglob("*.*"))


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "b")


@contextlib.contextmanager
def served(node: Node, service: object = None) -> Iterator[PeerNode]:
    """The node while its agent serves others."""
    service = service or WithDrills(PeerFiles(node.disk), node.drills)
    with Server(("127.0.0.1", 0), Peer(JOB, "b"), BY_KEY, service) as server:
        yield PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=server.address[1])


@contextlib.contextmanager
def drill(name: str = "a") -> Iterator[CopyPeers]:
    """The connections of a drill on the node of this name."""
    with (
        contextlib.closing(Peers(JOB, BY_KEY, name)) as real,
        contextlib.closing(CopyPeers(JOB, BY_KEY, name, real)) as copies,
    ):
        yield copies


def test_a_drill_changes_a_copy_and_never_a_file(node: Node) -> None:
    with served(node) as peer, drill() as copies:
        byte = Extent(blob=f"{node.folder}/{DATA}", offset=700, length=1)
        copies.make(peer, node.folder, node.files, byte)
        assert copies.list(peer, node.folder).keys() == {layout.COMMIT, *node.files}
        length = node.files[DATA]
        data = memoryview(bytearray(length))
        copies.read(peer, Extent(blob=f"{node.folder}/{DATA}", offset=0, length=length), data)
        real = node.before[f"{node.folder}/{DATA}"]
        assert [at for at in range(length) if data[at] != real[at]] == [700]
        copies.remove(peer)
        assert copies.list(peer, node.folder) == {}, "as a node that was replaced"
        with pytest.raises(errors.Refused, match="were removed"):
            copies.read(peer, Extent(blob=f"{node.folder}/{DATA}", offset=0, length=1), data)
    assert contents(node.root) == node.before


def test_a_drill_gets_a_quarter_of_what_is_free_at_most(node: Node, monkeypatch) -> None:
    need = sum(node.files.values()) + (1 << 20)
    with served(node) as peer, drill() as copies:
        monkeypatch.setattr(drill_files.files, "free_bytes", lambda folder: 4 * need - 1)
        with pytest.raises(errors.NoSpace, match="a drill gets a quarter"):
            copies.make(peer, node.folder, node.files)
        assert contents(node.root) == node.before
        monkeypatch.setattr(drill_files.files, "free_bytes", lambda folder: 4 * need)
        copies.make(peer, node.folder, node.files)
    assert DATA in node.copies


def test_copies_are_removed_once_their_drill_makes_no_call(node: Node) -> None:
    with served(node) as peer, drill() as copies:
        copies.make(peer, node.folder, node.files)
        node.clock.advance(drill_files.IDLE_SECONDS - 1)
        copies.list(peer, node.folder)
        node.clock.advance(drill_files.IDLE_SECONDS - 1)
        node.drills.end_idle()
        assert DATA in node.copies and node.drills.seconds_left() == 1
        node.clock.advance(1)
        node.drills.end_idle()
        assert not node.copies and node.drills.seconds_left() is None
    assert contents(node.root) == node.before


@pytest.mark.parametrize("attached", [False, True])
def test_an_agent_removes_the_copies_of_a_killed_drill(memory: Path, attached: bool) -> None:
    """Also while a training process is attached, when the agent waits for nothing else."""
    root = memory / "lastgood-0" / "run-0123456789ab"
    root.mkdir(parents=True, mode=0o700)
    node = Node(root)
    prelude = "from lastgood.agent import drill_files; drill_files.IDLE_SECONDS = 0.5"
    with agent(root, prelude=prelude), drill() as copies, contextlib.closing(agent_link.connected(str(root))) as own:
        serve = Serve(job=JOB, key=KEY, node="b", host="127.0.0.1", port=0)
        port = agent_link.asked(own, Request(protocol=agent_link.PROTOCOL, call="serve", serve=serve)).port
        peer = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=port)
        if attached:
            agent_link.asked(own, Request(protocol=agent_link.PROTOCOL, call="attach"))
        copies.make(peer, node.folder, node.files)
        until(lambda: not (root / DRILLS).exists())


def test_a_drill_that_reads_one_node_for_long_keeps_its_copies_on_others(node: Node) -> None:
    """Node b gave back 100 GB of this node's files, and node c had removed its copies when its turn came."""
    with served(node) as peer, drill() as copies:
        copies.make(peer, node.folder, node.files)
        node.clock.advance(drill_files.IDLE_SECONDS - 1)
        copies.keep()
        node.clock.advance(drill_files.IDLE_SECONDS - 1)
        node.drills.end_idle()
        assert DATA in node.copies
        copies.remove(peer)
        copies.keep()
        assert not node.copies


@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_a_call_makes_after_its_drill_is_removed(node: Node, monkeypatch, again: bool) -> None:
    """Ctrl-C came during a "create": the agent removed the copies, and then that call made its file."""
    call = FileCall(call="remove", name="")

    def late(disk: Disk, name: str, length: int) -> object:
        with monkeypatch.context() as patch:
            patch.setattr(drill_files.shutil, "rmtree", lambda path, ignore_errors: None)  # has listed the folder
            copies._call(peer, call)
        made = create(disk, name, length)
        if again:
            copies.make(peer, node.folder, {})
        return made

    create = Disk.create
    with served(node) as peer, drill() as copies:
        copies.make(peer, node.folder, {})
        monkeypatch.setattr(Disk, "create", late)
        copies._call(peer, FileCall(call="create", name=f"{node.folder}/{DATA}", length=1))
        assert node.copies == [layout.COMMIT] * again
    node.drills.clear()
    assert contents(node.root) == node.before


def test_copies_of_a_killed_agent_are_removed_where_none_starts(node: Node) -> None:
    (node.root / DRILLS / "drill-00000000" / "gen").mkdir(parents=True)
    drill_scratch.clear_copies(str(node.root))
    assert contents(node.root) == node.before
    with contextlib.closing(agent_link.listening(str(node.root))):
        (node.root / DRILLS).mkdir()
        drill_scratch.clear_copies(str(node.root))
        assert (node.root / DRILLS).exists(), "an agent that lives has copies of a drill that goes on"


def test_one_drill_plays_on_a_node_at_a_time(node: Node) -> None:
    with served(node) as peer, drill() as copies, drill("c") as others:
        copies.make(peer, node.folder, node.files)
        with pytest.raises(errors.Refused, match="node a plays a drill here now"):
            others.make(peer, node.folder, node.files)
        with drill() as next_one:
            next_one.make(peer, node.folder, node.files)
            copies.remove(peer)
            assert next_one.list(peer, node.folder), "a drill removes its own copies only"
        node.clock.advance(drill_files.IDLE_SECONDS)
        others.make(peer, node.folder, node.files)


def test_an_agent_that_starts_removes_what_a_killed_one_has_left(node: Node) -> None:
    (node.root / DRILLS / "gen").mkdir(parents=True)
    with Nodes(node.disk, lambda: None):
        assert not (node.root / DRILLS).exists()


def test_a_job_that_is_opened_ends_a_drill_on_its_node(node: Node) -> None:
    serve = Serve(job=JOB, key=KEY, node="b", host="127.0.0.1", port=0)
    with Nodes(node.disk, lambda: None) as nodes, drill() as copies:
        assert nodes.serve(serve) == ""
        peer = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=nodes.port)
        copies.make(peer, node.folder, node.files)
        assert DATA in node.copies
        assert nodes.serve(serve) == "" and not node.copies


@pytest.mark.parametrize(
    "call",
    [
        FileCall(call="open", name="../b"),
        FileCall(call="open", name="gen/000000000001-00000000"),
        FileCall(call="create", name="gen/../COMMIT.json", length=1),
        FileCall(call="copy", name="agent.lock", length=1),
        FileCall(call="copy", name="gen/000000000001-00000000/COMMIT.json", length=1),
    ],
    ids=["no generation", "deleted generation", "other folder", "other file", "record"],
)
def test_a_drill_copies_files_of_generations_only(node: Node, call: FileCall) -> None:
    with served(node) as peer, drill() as copies:
        copies.make(peer, node.folder, {})
        with pytest.raises(errors.Refused):
            copies._call(peer, call)
    node.drills.clear()
    assert contents(node.root) == node.before


@pytest.mark.parametrize("call", ["open", "copy", "remove"])
def test_calls_of_a_drill_are_refused_for_the_files_themselves(node: Node, call: str) -> None:
    refused = pytest.raises(errors.Refused, match="is no call for a file of a rank")
    with served(node) as peer, contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers, refused:
        peers._call(peer, FileCall(call=call, name=f"{node.folder}/{DATA}"))  # type: ignore[arg-type]
    assert contents(node.root) == node.before


def test_an_older_agent_is_named_as_what_it_is(node: Node) -> None:
    class Older(PeerFiles):
        """As the agents that did not know the calls of drills."""

        def handle(self, peer, request, bulk):
            raise errors.Refused("this is no call of an agent: Invalid enum value 'open'", safe="Nothing was written.")

    refused = pytest.raises(errors.Refused, match="an older version of lastgood, which makes no copies for a drill")
    with served(node, Older(node.disk)) as peer, drill() as copies, refused:
        copies.make(peer, node.folder, node.files)

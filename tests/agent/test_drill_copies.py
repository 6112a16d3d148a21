"""Copies that a drill has made on another node: by its agent, from its own files, in a folder of the drill."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agents import agent, until
from cli_runs import DATA, at, contents, writing
from lastgood import errors
from lastgood.agent import drill_files
from lastgood.agent.drill_files import DrillFiles, WithDrills
from lastgood.agent.nodes import Nodes
from lastgood.agent.peer_files import PeerFiles
from lastgood.format import layout
from lastgood.io import memory_files
from lastgood.io.files import PosixFiles
from lastgood.limits import DRILL_IDLE_SECONDS
from lastgood.records import Extent
from lastgood.run import access, agent_link, drill_copies, drill_nodes, memory_place, paths
from lastgood.run.agent_messages import KnownPeers, Request, Serve
from lastgood.run.drill_acts import Act, Reading
from lastgood.run.drill_copies import CopyPeers
from lastgood.run.drill_nodes import NodeStage
from lastgood.run.drill_scratch import ScratchPlace, clear_copies
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
        node.clock.advance(DRILL_IDLE_SECONDS - 1)
        copies.list(peer, node.folder)
        node.clock.advance(DRILL_IDLE_SECONDS - 1)
        node.drills.end_idle()
        assert DATA in node.copies and node.drills.seconds_left() == 1
        node.clock.advance(1)
        node.drills.end_idle()
        assert node.drills.seconds_left() is None
        node.drills.close()
        assert not node.copies
    assert contents(node.root) == node.before


@pytest.mark.parametrize("attached", [False, True])
def test_an_agent_removes_the_copies_of_a_killed_drill(memory: Path, attached: bool) -> None:
    """Also while a training process is attached, when the agent waits for nothing else.

    The copies went after half a second once, before a busy machine had made the next call.
    """
    root = memory / "lastgood-0" / "run-0123456789ab"
    root.mkdir(parents=True, mode=0o700)
    node = Node(root)
    prelude = "from lastgood.agent import drill_files; drill_files.DRILL_IDLE_SECONDS = 3.0"
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
        node.clock.advance(DRILL_IDLE_SECONDS - 1)
        copies.keep()
        node.clock.advance(DRILL_IDLE_SECONDS - 1)
        node.drills.end_idle()
        assert DATA in node.copies
        copies.remove(peer)
        copies.keep()
        assert not node.copies


@pytest.mark.parametrize("again", [False, True])
def test_a_call_that_ends_after_its_drill_leaves_nothing(node: Node, monkeypatch, again: bool) -> None:
    """Ctrl-C came during a "create": the agent removed the copies, and then that call made its file."""

    def late(disk: Disk, name: str, length: int) -> object:
        if again:
            copies.remove(peer)
            return create(disk, name, length)
        made = create(disk, name, length)
        copies.remove(peer)
        return made

    create = Disk.create
    with served(node) as peer, drill() as copies:
        copies.make(peer, node.folder, {})
        with monkeypatch.context() as patch, contextlib.suppress(errors.TierDown):
            patch.setattr(Disk, "create", late)
            copies._call(peer, FileCall(call="create", name=f"{node.folder}/{DATA}", length=1))
        copies.make(peer, node.folder, {})
        assert node.copies == [layout.COMMIT]
        copies.remove(peer)
    assert contents(node.root) == node.before
    opened = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    assert not [one for one in opened if DRILLS in one]


def test_copies_of_a_killed_agent_are_removed_where_none_starts(node: Node) -> None:
    (node.root / DRILLS / "drill-00000000" / "gen").mkdir(parents=True)
    clear_copies(str(node.root))
    assert contents(node.root) == node.before
    with contextlib.closing(agent_link.listening(str(node.root))):
        (node.root / DRILLS).mkdir()
        clear_copies(str(node.root))
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
        node.clock.advance(DRILL_IDLE_SECONDS)
        others.make(peer, node.folder, node.files)


def test_an_agent_that_starts_removes_what_a_killed_one_has_left(node: Node) -> None:
    (node.root / DRILLS / "gen").mkdir(parents=True)
    (node.root / DRILLS / f"drill-00000000-00000000{memory_place.REMOVED}").mkdir()
    with Nodes(node.disk, lambda: None):
        pass
    assert not (node.root / DRILLS).exists()


def test_an_agent_waits_for_no_removal_of_copies(node: Node, monkeypatch) -> None:
    """A drill had 100 GB of copies on a node. Its agent removed them before it answered the job that was opened, for
    so long that the job left the node out."""
    serve, ends = Serve(job=JOB, key=KEY, node="b", host="127.0.0.1", port=0), threading.Event()
    rmtree = shutil.rmtree

    def slow(path: str, **how: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert ends.wait(60)
        rmtree(path, **how)

    with Nodes(node.disk, lambda: None) as nodes, drill() as copies:
        nodes.serve(serve)
        peer = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=nodes.port)
        copies.make(peer, node.folder, node.files)
        monkeypatch.setattr(shutil, "rmtree", slow)
        assert nodes.serve(serve) == "" and DATA in node.copies
        peer = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=nodes.port)
        assert copies.list(peer, node.folder) == {}, "the drill has ended at once"
        ends.set()
    assert contents(node.root) == node.before


def test_a_job_that_is_opened_ends_a_drill_on_its_node(node: Node) -> None:
    serve = Serve(job=JOB, key=KEY, node="b", host="127.0.0.1", port=0)
    with Nodes(node.disk, lambda: None) as nodes, drill() as copies:
        assert nodes.serve(serve) == ""
        peer = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=nodes.port)
        copies.make(peer, node.folder, node.files)
        assert DATA in node.copies
        assert nodes.serve(serve) == "" and nodes.drills.seconds_left() is None
    assert not node.copies


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
    node.drills.close()
    assert contents(node.root) == node.before


# ---- the acts with such copies, in one process -------------------------------------------------------------------


class Acts:
    """The acts of a drill of node a, which has steps 1 and 2, with nodes b and c, which have copies of both."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        writing(folder / "a", 1, 2)
        self.roots = [folder / name for name in "abc"]
        nodes = list[PeerNode]()
        for leader, root in enumerate(self.roots[1:], 1):
            shutil.copytree(self.roots[0], root)
            memory = partial(Disk, PosixFiles(), str(root), shared=True)
            drills = DrillFiles(memory)
            stack.callback(drills.close)
            service, peer = WithDrills(PeerFiles(memory), drills), Peer(JOB, root.name)
            server = stack.enter_context(Server(("127.0.0.1", 0), peer, BY_KEY, service))
            nodes.append(PeerNode(leader=leader, name=root.name, domain="", host="127.0.0.1", port=server.address[1]))
        real = stack.enter_context(contextlib.closing(Peers(JOB, BY_KEY, "a")))
        copies = stack.enter_context(contextlib.closing(CopyPeers(JOB, BY_KEY, "a", real)))
        self.place = ScratchPlace("the disk", str(folder / "scratch"), str(folder / "scratch"), "")
        own, reading = access.for_reading(self.roots[0]), Reading(stack.enter_context(ThreadPoolExecutor(2)))
        self.make = partial(NodeStage, "copies", nodes, real, copies, own, reading=reading)

    def played(self) -> list[Act]:
        return list(self.make(place=self.place).play())

    def delete(self, step: int) -> None:
        """As training does, on all nodes."""
        for root in self.roots:
            shutil.rmtree(at(root, step))


@pytest.fixture
def acts(tmp_path: Path) -> Iterator[Acts]:
    with contextlib.ExitStack() as stack:
        yield Acts(tmp_path, stack)


def test_acts_go_on_with_the_step_that_training_has_left(acts: Acts, monkeypatch) -> None:
    """Memory keeps one generation beside a job that saves often: the acts after the first one were not tried, because
    theirs was deleted; and node c, which had whole copies of that one, got none of the next."""
    lose = NodeStage._lose

    def then_delete(stage: NodeStage, *args: Any) -> Any:
        found = lose(stage, *args)
        acts.delete(2)
        return found

    monkeypatch.setattr(NodeStage, "_lose", then_delete)
    lost, damaged, cut = acts.played()
    assert lost.good and "step 2 came back" in lost.way_back
    assert damaged.good and damaged.way_back.startswith("found: step 1 came back from node b, node c;"), damaged
    assert cut.good and "step 1 came back" in cut.way_back


def test_a_step_that_is_deleted_while_it_is_copied_is_passed_over(acts: Acts, monkeypatch) -> None:
    make = CopyPeers.make

    def then_delete(copies: CopyPeers, node: PeerNode, *args: Any) -> None:
        make(copies, node, *args)
        if node.name == "b" and at_most(acts.roots[0]) == 2:
            acts.delete(2)

    monkeypatch.setattr(CopyPeers, "make", then_delete)
    assert [one.good for one in acts.played()] == [True] * 3


def at_most(root: Path) -> int:
    """The newest step of a run."""
    return max(int(one.name.partition("-")[0]) for one in root.glob("gen/*"))


def test_short_memory_here_is_not_the_failure_of_a_way_back(acts: Acts, memory: Path, monkeypatch) -> None:
    """What came back was written to memory past all limits, so that the system could kill the job for it."""
    root = memory / "lastgood-0" / "scratch"
    root.mkdir(parents=True, mode=0o700)
    acts.place = ScratchPlace("memory", str(root), f"{paths.MEMORY}{root}", "")
    bring_back = NodeStage._bring_back

    def when_short(*args: Any) -> Any:
        monkeypatch.setattr(memory_files, "available_bytes", lambda: 0)
        return bring_back(*args)

    monkeypatch.setattr(NodeStage, "_bring_back", when_short)
    found = acts.played()
    assert [one.good for one in found] == [None] * 3 and all("not enough memory" in one.why for one in found), found


def test_copies_are_removed_on_all_nodes_at_the_same_time(acts: Acts, monkeypatch) -> None:
    """Ctrl-C waited for each node that was cut off, one minute after another."""
    both, removed = threading.Barrier(2, timeout=60), list[str]()

    def remove(copies: CopyPeers, node: PeerNode, timeout_seconds: float) -> None:
        both.wait()
        removed.append(node.name)
        raise errors.PeerDown("cut off")

    monkeypatch.setattr(CopyPeers, "remove", remove)
    for root in acts.roots:
        shutil.rmtree(root / "gen")
    (act,) = acts.played()
    assert act.good is None and sorted(removed) == ["b", "c"]


def test_copies_are_kept_while_acts_are_played(acts: Acts, monkeypatch) -> None:
    kept = threading.Event()
    known = KnownPeers(job=JOB, key=KEY, copies=[PeerNode(leader=1, name="b", domain="", host="", port=0)], parity=[])
    monkeypatch.setattr(agent_link, "peers_of", lambda folder: known)
    monkeypatch.setattr(drill_copies, "DRILL_KEEP_SECONDS", 0.001)
    monkeypatch.setattr(CopyPeers, "keep", lambda copies: kept.set())
    monkeypatch.setattr(NodeStage, "play", lambda stage: iter([Act(what="", good=kept.wait(60))]))
    own = access.for_reading(acts.roots[0])
    (act,) = drill_nodes.play("", own, [], acts.place, acts.make.keywords["reading"])
    assert act.good


# ---- calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["open", "copy", "remove"])
def test_calls_of_a_drill_are_refused_for_the_files_themselves(node: Node, call: str) -> None:
    refused = pytest.raises(errors.Refused, match="is no call for a file of a rank")
    with served(node) as peer, contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers, refused:
        peers._call(peer, FileCall(call=call, name=f"{node.folder}/{DATA}"))  # type: ignore[arg-type]
    assert contents(node.root) == node.before

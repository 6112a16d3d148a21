"""Files of one node in the memory of another one, over the wire on loopback."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import pytest
from msgspec import structs

import lastgood
from agents import LIMIT_SECONDS, agent, ended, state, until
from lastgood import errors
from lastgood.agent import nodes
from lastgood.agent.peer_files import PeerFiles
from lastgood.agent.server import Server as AgentServer
from lastgood.coordination.single_rank import SingleRank
from lastgood.engine.inline_executor import Inline
from lastgood.format import commit, layout
from lastgood.io.files import Lock
from lastgood.io.memory_files import MemoryFiles
from lastgood.loop.restore import RestoringRun
from lastgood.policy.placement import Node, copies, missing_copies
from lastgood.records import Extent, Finding, Generation, GenerationId, World, judged
from lastgood.run import access
from lastgood.run.agent_link import PROTOCOL, AgentLink, asked, connected, listening, status, write_spec
from lastgood.run.agent_messages import AgentSpec, Request, Send, Serve, Work
from lastgood.run.known import Environment, Holds, KnownRun
from lastgood.run.node_copies import CopyRequest, CopySender, NodeCopies
from lastgood.run.node_disks import NodeDisks, NodeLinks, Nodes, NodeView
from lastgood.run.node_parity import ParityBuilder, ParityRequest
from lastgood.run.outcomes import Outcomes
from lastgood.run.paths import parsed
from lastgood.run.peer_opening import agreed, label, own_address, own_wire
from lastgood.run.peer_reads import PeerReads
from lastgood.run.peer_security import own_certificates
from lastgood.run.peers import (
    BACKGROUND,
    READING,
    VERIFIED_BY_CALLER,
    FileCall,
    PeerDisk,
    PeerNode,
    PeerOrder,
    Peers,
    PeerTable,
    Reading,
)
from lastgood.run.planned_save import RunOptions
from lastgood.run.rank_requests import ask_all
from lastgood.run.watched import Sources
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood.wire.channel import Channel
from lastgood.wire.nixl import Nixl
from lastgood.wire.port import Answer, Peer
from lastgood.wire.security import SharedKey
from lastgood.wire.serving import Server
from lastgood.wire.session import Session
from lastgood.wire.sockets import Deadline, Stream
from lastgood.wire.window import Window
from lastgood_lab.plain import save
from training import Training
from wired import authority

JOB, KEY = "0" * 16, "ab" * 32
NOT_HERE = "192.0.2.1"
"""an address for documentation, which no machine has"""
BY_KEY = SharedKey(bytes.fromhex(KEY))


@pytest.fixture
def generation(tmp_path: Path) -> Generation:
    training = Training()
    training.step()
    lastgood.save(tmp_path / "a", training.state, step=1)
    (at,) = commit.survey(Disk(MemoryFiles(str(tmp_path / "a")), str(tmp_path / "a"))).generations
    return commit.read_generation(disk(tmp_path / "a"), at, None)


def disk(root: Path) -> Disk:
    root.mkdir(exist_ok=True)
    return Disk(MemoryFiles(str(root)), str(root), shared=True)


@contextlib.contextmanager
def served(root: Path, key: str = KEY) -> Iterator[PeerNode]:
    """A node whose agent keeps files in `root`."""
    files = PeerFiles(lambda: disk(root))
    with Server(("127.0.0.1", 0), Peer(JOB, "b"), SharedKey(bytes.fromhex(key)), files) as server:
        yield PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=server.address[1])
    files.close()


def commit_on(root: Path, generation: Generation) -> None:
    """Let a node have the COMMIT of a generation, as it has before anything is copied to it."""
    name = f"{layout.folder(generation.id)}/COMMIT.json"
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes((root.parent / "a" / name).read_bytes())


def files_of(root: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in root.glob("gen/*/r*")}


def test_a_copy_on_another_node_has_the_same_bytes(tmp_path: Path, generation: Generation) -> None:
    commit_on(tmp_path / "b", generation)
    with served(tmp_path / "b") as node, contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers:
        (seal,) = generation.commit.seals
        sent = peers.send(disk(tmp_path / "a"), generation, seal, node)
        assert files_of(tmp_path / "b") == files_of(tmp_path / "a")
        assert sent == len(files_of(tmp_path / "a")["r00000.safetensors"])
        assert peers.send(disk(tmp_path / "a"), generation, seal, node) == 0, "the node has it already"
        buffer = bytearray(100)
        name = f"{layout.folder(generation.id)}/r00000.safetensors"
        peers.read(node, Extent(blob=name, offset=50, length=100), memoryview(buffer))
        assert bytes(buffer) == files_of(tmp_path / "a")["r00000.safetensors"][50:150]
        with pytest.raises(errors.MissingBlob):
            peers.read(node, Extent(blob=name.replace("r00000", "r00009"), offset=0, length=1), memoryview(buffer))


def test_a_node_that_hangs_keeps_no_other_from_its_copies(tmp_path: Path, generation: Generation) -> None:
    """With three copies, what a node was to send ended at the first receiver that did not answer, and later the next
    receiver waited until the calls to that one had timed out."""
    commit_on(tmp_path / "b", generation)
    with (
        socket.create_server(("127.0.0.1", 0)) as hung,
        served(tmp_path / "b") as node,
        nodes.Nodes(lambda: disk(tmp_path / "a"), lambda: None) as sender,
    ):
        assert not sender.serve(Serve(job=JOB, key=KEY, node="a", host="127.0.0.1", port=0))
        first = PeerNode(leader=2, name="c", domain="", host="127.0.0.1", port=hung.getsockname()[1])
        sent = sender.send(Send(at=generation.id, orders=[PeerOrder(rank=0, to=one) for one in (first, node)]))
        with hung.accept()[0] as connection:
            until(lambda: files_of(tmp_path / "b") == files_of(tmp_path / "a"))
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                while connection.recv(4096):
                    pass  # its greeting; at its end, the sender would have given this node up
        assert sent.result()


def test_a_rank_reads_from_a_node_that_answers_or_from_a_place_below(tmp_path: Path, generation: Generation) -> None:
    here, below, sources = disk(tmp_path / "here"), disk(tmp_path / "a"), Sources()
    name, data = f"{layout.folder(generation.id)}/r00000.safetensors", files_of(tmp_path / "a")["r00000.safetensors"]
    commit_on(tmp_path / "b", generation)
    buffer = memoryview(bytearray(100))
    with socket.create_server(("127.0.0.1", 0)) as closing, served(tmp_path / "b") as node:
        gone = PeerNode(leader=2, name="c", domain="", host="127.0.0.1", port=closing.getsockname()[1])
        closing.close()
        reads = PeerReads(here, sources, PeerTable(job=JOB, key=KEY, nodes=[node, gone]))
        with contextlib.closing(Peers(JOB, BY_KEY, "x")) as peers, contextlib.closing(reads):
            peers.send(below, generation, generation.commit.seals[0], node)
            reads.note({name: [2, 1]}, [below])
            for start in (0, 100):
                reads.read_into(Extent(blob=name, offset=start, length=100), buffer)
                assert bytes(buffer) == data[start : start + 100]
            assert {place: one.bytes for place, one in sources.found().items()} == {"other nodes": 200}
            assert reads._failed == {"the memory of node c"}, "a node that has failed is asked last"
            reads.note({name: [2]}, [below])
            reads.read_into(Extent(blob=name, offset=7, length=3), buffer)
            assert bytes(buffer[:3]) == data[7:10] and sources.found()[below.place].bytes == 3
            reads.note({name: [0, 1]}, [below])
            reads.read_into(Extent(blob=name, offset=9, length=2), buffer)
            assert bytes(buffer[:2]) == data[9:11], "node 0, whose agent does not listen, is not asked"
            assert sources.found()[below.place].bytes == 3
            reads.note({name: [2]}, [])
            with pytest.raises(errors.TierDown, match="the memory of node c: "):
                reads.read_into(Extent(blob=name, offset=0, length=1), buffer)


def test_a_node_whose_connection_broke_is_asked_once_more(tmp_path: Path, generation: Generation, monkeypatch) -> None:
    """It may be the only one that has a file, and the state is half loaded by then."""
    name, broke = f"{layout.folder(generation.id)}/r00000.safetensors", threading.Event()
    whole = Peers.read

    def read(self: Peers, node: PeerNode, extent: Extent, mv: memoryview, how: Reading) -> None:
        if not broke.is_set():
            broke.set()
            raise errors.PeerDown("the connection was reset")
        whole(self, node, extent, mv, how)

    monkeypatch.setattr(Peers, "read", read)
    with served(tmp_path / "a") as node:
        reads = PeerReads(disk(tmp_path / "here"), Sources(), PeerTable(job=JOB, key=KEY, nodes=[node]))
        with contextlib.closing(reads):
            reads.note({name: [1]}, [])
            buffer = memoryview(bytearray(10))
            reads.read_into(Extent(blob=name, offset=0, length=10), buffer)
    assert bytes(buffer) == files_of(tmp_path / "a")["r00000.safetensors"][:10] and broke.is_set()


@pytest.mark.slow
def test_copies_are_sent_over_nixl_where_that_is_chosen(tmp_path: Path, generation: Generation, nixl: Nixl) -> None:
    commit_on(tmp_path / "b", generation)
    serve = Serve(job=JOB, key=KEY, node="", host="127.0.0.1", port=0, wire="nixl")
    with (
        nodes.Nodes(lambda: disk(tmp_path / "a"), lambda: None) as near,
        nodes.Nodes(lambda: disk(tmp_path / "b"), lambda: None) as far,
    ):
        for one, name in ((near, "a"), (far, "b")):
            assert one.serve(msgspec.structs.replace(serve, node=name)) == ""
        to = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=far.port)
        assert near.send(Send(at=generation.id, orders=[PeerOrder(rank=0, to=to)])).result() == ""
        (channel,) = near.peers._channels.values()
        assert all(isinstance(session._bulk, Window) for session, _ in channel._idle) and channel._idle
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")


@pytest.mark.parametrize("days", [30, -1])
def test_nodes_know_each_other_by_the_certificates_that_are_named(
    tmp_path: Path, generation: Generation, days: int
) -> None:
    commit_on(tmp_path / "b", generation)
    signer = authority(tmp_path)
    serve = Serve(job=JOB, key=KEY, node="", host="127.0.0.1", port=0)
    with (
        nodes.Nodes(lambda: disk(tmp_path / "a"), lambda: None) as near,
        nodes.Nodes(lambda: disk(tmp_path / "b"), lambda: None) as far,
    ):
        for one, name, valid in ((near, "a", 30), (far, "b", days)):
            certificate, key = signer.certificate(name, valid)
            variables = {"CERTIFICATE": certificate, "KEY": key, "AUTHORITY": signer.file}
            named = own_certificates({f"LASTGOOD_TLS_{name}": value for name, value in variables.items()})
            assert one.serve(msgspec.structs.replace(serve, node=name, certificates=named)) == ""
        to = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=far.port)
        problem = near.send(Send(at=generation.id, orders=[PeerOrder(rank=0, to=to)])).result()
        with (
            pytest.raises((errors.Unavailable, errors.PeerRefused)),
            contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers,
        ):
            peers.list(to, "gen/000000000001-0a0b0c0d")
    if days > 0:
        assert problem == "" and files_of(tmp_path / "b") == files_of(tmp_path / "a")
    else:
        assert "PeerRefused" in problem and "certificate expired" in problem and "Renew the certificate" in problem


@pytest.mark.parametrize("lacks", ["KEY", "CERTIFICATE"])
def test_a_node_without_its_files_of_certificates_goes_on(
    tmp_path: Path, generation: Generation, monkeypatch, lacks: str
) -> None:
    """Its training process ended at the opening if the key was missing. Without the certificate its agent listened,
    and each copy for this node failed, where the others could have kept each other's files."""
    signer, below = authority(tmp_path), disk(tmp_path / "a")
    certificate, key = signer.certificate("a")
    files = {"CERTIFICATE": certificate, "KEY": key, "AUTHORITY": signer.file, lacks: str(tmp_path / "none")}
    for variable, path in files.items():
        monkeypatch.setenv(f"LASTGOOD_TLS_{variable}", path)
    with nodes.Nodes(lambda: below, lambda: None) as node:
        serve = Serve(job=JOB, key=KEY, node="a", host="127.0.0.1", port=0, certificates=own_certificates())
        assert "No such file" in node.serve(serve) and not node.port, "it is left out, with the reason"
    sources = Sources()
    with served(tmp_path / "b") as other:
        reads = PeerReads(disk(tmp_path / "here"), sources, PeerTable(job=JOB, key=KEY, nodes=[other]))
        name = f"{layout.folder(generation.id)}/r00000.safetensors"
        reads.note({name: [1]}, [below])
        reads.read_into(Extent(blob=name, offset=0, length=100), memoryview(bytearray(100)))
        reads.close()
    assert sources.found()[below.place].bytes == 100, "what others have is read from a place below"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"CERTIFICATE": "a", "KEY": "b"}, "LASTGOOD_TLS_AUTHORITY not"),
        ({"CERTIFICAT": "a"}, "no variable LASTGOOD_TLS_CERTIFICAT"),
        ({"CERTIFICATE": "a", "KEY": "b", "AUTHORITY": "c", "ENCRYPT": "yes"}, "LASTGOOD_TLS_ENCRYPT=yes"),
    ],
)
def test_variables_of_certificates_that_cannot_be_meant_are_refused(variables: dict[str, str], message: str) -> None:
    with pytest.raises(errors.Refused, match=message):
        own_certificates({f"LASTGOOD_TLS_{name}": value for name, value in variables.items()})
    assert own_certificates({}) is None


def test_a_wire_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    """The error did not name the variable with the mistyped value."""
    with nodes.Nodes(lambda: disk(tmp_path / "a"), lambda: None) as node:
        serve = Serve(job=JOB, key=KEY, node="a", host="127.0.0.1", port=0, wire="pigeons")
        assert "the wire 'pigeons' is not one of sockets, nixl" in node.serve(serve) and node.port == 0
    assert [own_wire({}), own_wire({"LASTGOOD_WIRE": ""}), own_wire({"LASTGOOD_WIRE": "nixl"})] == [
        "sockets",
        "sockets",
        "nixl",
    ]
    with pytest.raises(errors.Refused, match="LASTGOOD_WIRE='pigeons' is not one of sockets, nixl"):
        own_wire({"LASTGOOD_WIRE": "pigeons"})


def test_an_agent_that_cannot_listen_still_reaches_others(tmp_path: Path, generation: Generation) -> None:
    """What is damaged in its memory is rebuilt from what they have."""
    commit_on(tmp_path / "b", generation)
    with served(tmp_path / "b") as node, nodes.Nodes(lambda: disk(tmp_path / "a"), lambda: None) as left_out:
        why = left_out.serve(Serve(job=JOB, key=KEY, node="a", host=NOT_HERE, port=0))
        assert f"{NOT_HERE}:0 cannot be listened at" in why and left_out.port == 0 and left_out.known() is None
        assert left_out.peers is not None and "COMMIT.json" in left_out.peers.list(node, layout.folder(generation.id))


def test_a_copy_that_was_interrupted_is_begun_anew(tmp_path: Path, generation: Generation) -> None:
    folder = tmp_path / "b" / layout.folder(generation.id)
    commit_on(tmp_path / "b", generation)
    (folder / "r00000.safetensors").write_bytes(b"half")
    commit_on(tmp_path / "b", generation)
    with served(tmp_path / "b") as node, contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers:
        peers.send(disk(tmp_path / "a"), generation, generation.commit.seals[0], node)
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")


def test_a_copy_that_is_being_received_is_no_file_yet(tmp_path: Path, generation: Generation) -> None:
    """A good save was marked as damaged: its verification read the file of another rank on the node of rank 0, where
    it was just being received, and had the length of its reserved space."""
    folder = layout.folder(generation.id)
    name = f"{folder}/r00000.safetensors"
    commit_on(tmp_path / "b", generation)
    with served(tmp_path / "b") as node:
        call(node, FileCall(call="create", name=name, length=6))
        call(node, FileCall(call="write", name=name, length=3), b"abc")
        here = disk(tmp_path / "b")
        assert "r00000.safetensors" not in here.list(folder)
        with pytest.raises(errors.MissingBlob):
            here.read_into(Extent(blob=name, offset=0, length=3), memoryview(bytearray(3)))
        call(node, FileCall(call="write", name=name, offset=3, length=3), b"def")
        call(node, FileCall(call="finish", name=name))
        assert here.list(folder)["r00000.safetensors"] == 6


def test_a_file_that_was_not_finished_leaves_nothing(tmp_path: Path, generation: Generation) -> None:
    name = f"{layout.folder(generation.id)}/r00000.safetensors"
    commit_on(tmp_path / "b", generation)
    with served(tmp_path / "b") as node:
        call(node, FileCall(call="create", name=name, length=9))
        call(node, FileCall(call="write", name=name, length=3), b"abc")
    assert not files_of(tmp_path / "b")


def call(node: PeerNode, request: FileCall, bulk: bytes = b"", key: str = KEY) -> bytes:
    security = SharedKey(bytes.fromhex(key))
    with Channel((node.host, node.port), node.name, Peer(JOB, "a"), security) as channel:
        outgoing = [memoryview(bulk)] if bulk else []
        return channel.call(msgspec.json.encode(request), outgoing=outgoing, timeout_seconds=20).record


def test_two_sendings_of_a_file_do_not_mix(tmp_path: Path, generation: Generation) -> None:
    """The second half came from a sending that had been given up, and the file had a hole and its manifest."""
    name = f"{layout.folder(generation.id)}/r00000.safetensors"
    commit_on(tmp_path / "b", generation)
    with served(tmp_path / "b") as node:
        for sending in ("first", "second"):
            call(node, FileCall(call="create", name=name, sending=sending, length=6))
        with pytest.raises(errors.Refused, match="begun anew"):
            call(node, FileCall(call="write", name=name, sending="first", offset=3, length=3), b"def")
        call(node, FileCall(call="write", name=name, sending="second", length=3), b"abc")
        with pytest.raises(errors.Refused, match="lacks 3 bytes"):
            call(node, FileCall(call="finish", name=name, sending="second"))
        call(node, FileCall(call="abort", name=name, sending="second"))
    assert not files_of(tmp_path / "b")


def test_a_finished_copy_is_not_replaced(tmp_path: Path, generation: Generation) -> None:
    name = f"{layout.folder(generation.id)}/r00000.safetensors"
    commit_on(tmp_path / "b", generation)
    with served(tmp_path / "b") as node, contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers:
        peers.send(disk(tmp_path / "a"), generation, generation.commit.seals[0], node)
        with pytest.raises(errors.NameTaken):
            call(node, FileCall(call="create", name=name, length=9))
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")


def test_a_copy_that_has_lost_its_file_is_made_again(tmp_path: Path, generation: Generation) -> None:
    """It was sent again and again, and never made: for the sender its manifest was the copy, and so it was for the node
    that was to receive the file."""
    commit_on(tmp_path / "b", generation)
    with served(tmp_path / "b") as node, contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers:
        (seal,) = generation.commit.seals
        sent = peers.send(disk(tmp_path / "a"), generation, seal, node)
        (tmp_path / "b" / layout.folder(generation.id) / "r00000.safetensors").unlink()
        assert peers.send(disk(tmp_path / "a"), generation, seal, node) == sent > 0
    assert files_of(tmp_path / "b") == files_of(tmp_path / "a")


@pytest.mark.parametrize(
    "request_",
    [
        FileCall(call="create", name="lastgood.json", length=3),
        FileCall(call="create", name="gen/000000000001-0a0b0c0d/COMMIT.json", length=3),
        FileCall(call="put", name="gen/000000000001-0a0b0c0d/../../x.manifest.json", length=3),
        FileCall(call="read", name="gen/000000000001-0a0b0c0d/r00000.safetensors", offset=-1, length=3),
        FileCall(call="create", name="gen/000000000001-0a0b0c0d/r00000.safetensors", length=-3),
        FileCall(call="list", name="gen"),
        FileCall(call="list", name="gen/../.."),
        FileCall(call="finish", name="gen/000000000001-0a0b0c0d/r00000.safetensors"),
    ],
    ids=lambda one: f"{one.call} {one.name}",
)
def test_only_files_of_ranks_in_generations_are_touched(tmp_path: Path, request_: FileCall) -> None:
    with served(tmp_path / "b") as node, pytest.raises(errors.Refused):
        call(node, request_)
    assert not [*(tmp_path / "b").rglob("*.json")] and not files_of(tmp_path / "b")


def test_a_generation_that_was_deleted_meanwhile_gets_no_copies(tmp_path: Path, generation: Generation) -> None:
    """Copies that came after the deletion would have stayed in memory until the end of the run."""
    with (
        served(tmp_path / "b") as node,
        contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers,
        pytest.raises(errors.Refused, match="was deleted on this node"),
    ):
        peers.send(disk(tmp_path / "a"), generation, generation.commit.seals[0], node)
    assert not files_of(tmp_path / "b")


# ---- the late commit of another node -----------------------------------------------------------------------------


@pytest.fixture
def sealed(tmp_path: Path, generation: Generation) -> Path:
    """A node that has sealed its part of a generation, and has no COMMIT of it."""
    root = tmp_path / "b"
    shutil.copytree(tmp_path / "a", root, copy_function=shutil.copy)
    (root / layout.folder(generation.id) / "COMMIT.json").unlink()
    return root


def commit_of(generation: Generation, **changed: object) -> bytes:
    return layout.encode(structs.replace(generation.commit, **changed))


def test_a_node_commits_late_what_it_has_sealed(sealed: Path, generation: Generation) -> None:
    with served(sealed) as node, contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers:
        assert peers.seals(node, generation.id) == generation.commit.seals
        peers.commit(node, generation.id, commit_of(generation))
        peers.commit(node, generation.id, commit_of(generation))  # the first answer was lost
    assert commit.read_generation(disk(sealed), generation.id, generation.commit.run).id == generation.id


def test_no_node_commits_late_while_a_process_has_the_run_open(sealed: Path, generation: Generation) -> None:
    with (
        served(sealed) as node,
        contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers,
        contextlib.closing(Lock(str(sealed / access.LOCK))),
    ):
        with pytest.raises(errors.RunLocked, match="a process has the run open"):
            peers.seals(node, generation.id)
        with pytest.raises(errors.RunLocked):
            peers.commit(node, generation.id, commit_of(generation))
    assert not [*sealed.glob("gen/*/COMMIT*")]


@pytest.mark.parametrize("case", ["another seal", "no seal", "another generation", "torn"])
def test_a_late_commit_that_does_not_fit_is_refused(sealed: Path, generation: Generation, case: str) -> None:
    data, folder = commit_of(generation), sealed / layout.folder(generation.id)
    if case == "another seal":
        (seal,) = generation.commit.seals
        data = commit_of(generation, seals=[structs.replace(seal, digest="0" * 32)])
    elif case == "no seal":  # what the next job has removed
        (folder / "r00000.manifest.json").unlink()
    elif case == "another generation":
        data = commit_of(generation, step=generation.step + 1)
    else:
        data = data[:-5]
    with (
        served(sealed) as node,
        contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers,
        pytest.raises((errors.Refused, errors.Damaged)),
    ):
        peers.commit(node, generation.id, data)
    assert not [*sealed.glob("gen/*/COMMIT*")]


def test_the_copies_of_a_drill_are_never_committed_late(sealed: Path, generation: Generation) -> None:
    files = PeerFiles(lambda: disk(sealed), of_drill=True)
    asked = msgspec.json.encode(FileCall(call="seals", name=layout.folder(generation.id)))
    with pytest.raises(errors.Refused):
        files.handle(Peer(JOB, "a"), asked, memoryview(b""))


@pytest.mark.parametrize("linger_seconds", [2.0, 600.0], ids=["nobody comes", "asked to end"])
def test_an_agent_ends_although_a_node_that_has_sealed_stays_away(memory: Path, linger_seconds: float) -> None:
    """The save may be whole, and no agent can know it: it is given up. `lastgood agent stop` was refused for as long as
    the agent waits for the next process."""
    folder, away = memory / "run", PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=1)
    with access.for_writing(f"memory://{folder}", "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline())
        run.begin(None)
        one = save(run, 1, {"w": b"x" * 100})
    (folder / layout.folder(one.id) / layout.INTENT).write_bytes(
        layout.encode(structs.replace(one.commit, seals=[], world=World(ranks=2)))
    )
    (folder / layout.folder(one.id) / layout.COMMIT).unlink()
    write_spec(disk(folder), AgentSpec(format=1, places=[], order=0, spill=None, nodes=[away]))
    with agent(folder, linger_seconds) as process:
        with contextlib.closing(connected(str(folder))) as training:
            serve = Serve(job=JOB, key=KEY, node="a", host="127.0.0.1", port=0)
            assert not asked(training, Request(protocol=PROTOCOL, call="serve", serve=serve)).error
            assert not asked(training, Request(protocol=PROTOCOL, call="attach")).error
        until(lambda: "step 1 cannot be committed on node b now" in str(status(str(folder)).missing))
        if linger_seconds == 600.0:
            with contextlib.closing(connected(str(folder))) as stopping:
                assert not asked(stopping, Request(protocol=PROTOCOL, call="end")).error
        assert process.wait(LIMIT_SECONDS) == 0
    assert not folder.exists()


def test_a_late_commit_that_comes_during_an_attempt_begins_another_one(memory: Path) -> None:
    """The attempt that ran had looked before, and found nothing missing when it ended: the node copied its part when it
    was to end, ten minutes later."""
    (memory / "run").mkdir()
    lock = Lock(str(memory / "run" / "agent.lock"))
    one = AgentServer(parsed(f"memory://{memory / 'run'}"), lock, listening(str(memory / "run")), 600.0, 600.0)
    with contextlib.ExitStack() as closing:
        for each in (lock, one._listener, one._wake_receiver, one._wake_sender, one._selector):
            closing.callback(each.close)
        one._copies, one._next_at = Future(), None
        one._nodes.committed.set()
        one._note_late_commit()
        one._copies, one._next_at = None, None  # the attempt has ended, and everything is copied
        one._note_late_commit()
        assert one._next_at == 0.0


def test_a_generation_is_kept_until_every_place_has_it() -> None:
    """The first place that had its copy gave the generation free, and the second one lost it."""
    held, at = Holds(), GenerationId(step=1, incarnation="0a0b0c0d")
    held.add(at, "near")
    held.add(at, "far")
    held.add(at, "far")
    held.discard(at, "near")
    assert at in held
    held.discard(at, "far")
    held.discard(at, "far")
    assert at not in held


class Gate:
    """A `node_copies.Maker` that makes copies while `reached` is set; otherwise no other node can be reached."""

    place = "peers://node"

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.whole = set[int]()
        """the steps of generations that outlive later ones"""

    def make(self, generation: Generation, stop: object) -> None:
        if not self.reached.is_set():
            raise errors.PeerDown("no other node can be reached")

    def outlives(self, generation: Generation) -> bool:
        return generation.step in self.whole

    def end(self) -> None:
        """No other rank waits."""


class Slow(Gate):
    """A `node_copies.Maker` that takes as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go_on = queue.SimpleQueue[int](), queue.SimpleQueue[Exception | None]()

    def make(self, generation: Generation, stop: object) -> None:
        self.begun.put(generation.step)
        if (failed := self.go_on.get(timeout=20)) is not None:
            raise failed


def test_a_copied_generation_is_held_until_a_newer_one_is_copied(tmp_path: Path, generation: Generation) -> None:
    """A node was lost while the newest save waited for its copies. The save before, which had its copies, was deleted
    already, because the newest had been verified: the run went back to its directory."""
    known, gate = KnownRun(disk(tmp_path / "a"), Environment()), Gate()
    newer, newest = (
        structs.replace(generation, commit=structs.replace(generation.commit, step=step)) for step in (2, 3)
    )
    copies_ = NodeCopies(known, lambda _: gate, Outcomes(str(tmp_path)))
    try:
        assert generation.id in known.held, "it may have copies since an earlier opening"
        first = copies_.offer(newer)
        copies_.wait(20)
        assert generation.id in known.held and not first.done()
        gate.reached.set()
        copies_.wait(20)
        assert first.result(20) is None
        assert generation.id not in known.held and newer.id in known.held
        gate.reached.clear()
        copies_.offer(newest)
        copies_.wait(20)
        assert newer.id in known.held
    finally:
        copies_.close()


def test_copies_under_way_are_finished_though_a_newer_save_waits(tmp_path: Path, generation: Generation) -> None:
    """On a link on which copies took longer than the interval of the saves, each save was said to have none, although
    those of every few were made: a newer one had been committed meanwhile."""
    known, gate = KnownRun(disk(tmp_path / "a"), Environment()), Slow()
    older, newer, newest = (
        structs.replace(generation, commit=structs.replace(generation.commit, step=step)) for step in (2, 3, 4)
    )
    copies_ = NodeCopies(known, lambda _: gate, Outcomes(str(tmp_path)))
    try:
        under_way = copies_.offer(older)
        assert gate.begun.get(timeout=20) == 2
        waiting, last = copies_.offer(newer), copies_.offer(newest)
        assert copies_.offer(older) is under_way and copies_.offer(newest) is last
        assert isinstance(waiting.exception(20), errors.Overtaken), "its copies were not begun"
        assert not under_way.done() and older.id in known.held
        gate.go_on.put(None)
        assert under_way.result(20) is None
        assert gate.begun.get(timeout=20) == 4 and older.id in known.held
        gate.go_on.put(errors.PeerDown("no other node can be reached"))
        assert gate.begun.get(timeout=20) == 4, "it is tried again where no newer one waits"
        later = copies_.offer(structs.replace(generation, commit=structs.replace(generation.commit, step=5)))
        gate.go_on.put(errors.PeerDown("no other node can be reached"))
        assert isinstance(last.exception(20), errors.Overtaken), "a newer one is tried in its place"
        gate.go_on.put(None)
        copies_.wait(20)
        assert later.result(20) is None
    finally:
        copies_.close()


def test_copies_of_an_older_save_do_not_replace_those_of_a_newer_one(tmp_path: Path, generation: Generation) -> None:
    """A pinned save may be committed after a later one. Its copies were made in place of those of the later one, or the
    hold on the copies of the later one was given up for them: a lost node took the run back further than was said."""
    known, gate = KnownRun(disk(tmp_path / "a"), Environment()), Slow()
    two, three, four = (
        structs.replace(generation, commit=structs.replace(generation.commit, step=step)) for step in (2, 3, 4)
    )
    copies_ = NodeCopies(known, lambda _: gate, Outcomes(str(tmp_path)))
    try:
        copies_.offer(two)
        assert gate.begun.get(timeout=20) == 2
        newest = copies_.offer(four)
        assert isinstance(copies_.offer(three).exception(20), errors.Overtaken)
        for step in (2, 4):
            assert step == 2 or gate.begun.get(timeout=20) == step
            gate.go_on.put(None)
        assert newest.result(20) is None
        assert isinstance(copies_.offer(three).exception(20), errors.Overtaken)
        assert four.id in known.held and three.id not in known.held
        rewound = copies_.offer(two, restored=True)
        assert gate.begun.get(timeout=20) == 2
        gate.go_on.put(None)
        assert rewound.result(20) is None
    finally:
        copies_.close()


def test_copies_that_another_rank_has_left_are_tried_again(tmp_path: Path, generation: Generation) -> None:
    """A rank that left the job answered "cancelled", which was taken for the end of this process: nothing was tried any
    more, and closing the run waited for ever."""
    gate, newer = Slow(), structs.replace(generation, commit=structs.replace(generation.commit, step=2))
    copies_ = NodeCopies(KnownRun(disk(tmp_path / "a"), Environment()), lambda _: gate, Outcomes(str(tmp_path)))
    try:
        copied = copies_.offer(newer)
        for answer in (errors.Cancelled("the rank has left the job"), None):
            assert gate.begun.get(timeout=20) == 2
            gate.go_on.put(answer)
        assert copied.result(20) is None
    finally:
        copies_.close()


def test_whole_copies_stay_while_a_node_is_left_out_of_newer_ones(tmp_path: Path, generation: Generation) -> None:
    """The files of a node that is left out have no copies: if it is lost, the newest save that has all is needed."""
    known, below = (KnownRun(disk(tmp_path / name), Environment()) for name in ("a", "below"))
    gate = Gate()
    known.below, gate.whole = [below], {generation.step}
    gate.reached.set()
    later = [structs.replace(generation, commit=structs.replace(generation.commit, step=step)) for step in (2, 3, 4, 5)]
    copies_ = NodeCopies(known, lambda _: gate, Outcomes(str(tmp_path)))
    try:
        for one in later[:2]:
            known.record(one)
            assert copies_.offer(one).result(20) is None
        held = [one.step for one in (generation, *later) if one.id in known.held]
        assert held == [1, 3], "a newer one with copies of some nodes takes the place of one of its kind only"
        for one, verified, left in ((later[2], False, [1, 4]), (later[3], True, [5])):
            below.record(structs.replace(later[0], verified=verified))
            known.record(one)
            copies_.offer(one).result(20)
            held = [one.step for one in (generation, *later) if one.id in known.held]
            assert held == left, "it goes once a newer one was read back below"
    finally:
        copies_.close()
    assert later[3].id not in known.held


def test_a_generation_that_is_to_be_rebuilt_is_held_from_the_opening_on(tmp_path: Path, generation: Generation) -> None:
    """With parity 2+2 a node was lost, and what it had was rebuilt. The next save was verified before it had its
    parity, and the rebuilt generation was deleted. Then a second node was lost, and with it both."""
    known = KnownRun(disk(tmp_path / "a"), Environment())
    lost = Finding(kind="MissingBlob", what="on no node", layer="structure", blob="r00000.manifest.json")
    known.record(judged(generation, [lost]))
    known.lost.add(generation.id)
    copies_ = NodeCopies(known, lambda _: Gate(), Outcomes(str(tmp_path)))
    assert generation.id in known.held
    copies_.close()
    assert generation.id not in known.held


def test_only_copies_are_sent_in_the_background(tmp_path: Path, generation: Generation, monkeypatch) -> None:
    """What a call waits for is sent at once: the records of a save waited behind copies that filled the link."""
    commit_on(tmp_path / "b", generation)
    sent, whole = set[tuple[str, bool]](), Channel.call

    def recorded(self: Channel, request: bytes, *, background: bool = False, **more: object) -> Answer:
        sent.add((msgspec.json.decode(request)["call"], background))
        return whole(self, request, background=background, **more)

    monkeypatch.setattr(Channel, "call", recorded)
    with served(tmp_path / "b") as node, contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers:
        (seal,) = generation.commit.seals
        peers.send(disk(tmp_path / "a"), generation, seal, node)
    calls = {"list", "create", "finish", "put"}
    assert sent == {("write", True)} | {(call, False) for call in calls}


def test_files_go_without_a_digest_to_callers_that_verify(tmp_path: Path, generation: Generation, monkeypatch) -> None:
    """Those are the readers of a restore. Who writes on what it reads relies on the digest of the wire."""
    name, data = f"{layout.folder(generation.id)}/r00000.safetensors", files_of(tmp_path / "a")["r00000.safetensors"]
    unverified, whole = list[int](), Session.receive_unverified

    def received(self: Session, mv: memoryview, deadline: Deadline) -> None:
        unverified.append(len(mv))
        whole(self, mv, deadline)

    monkeypatch.setattr(Session, "receive_unverified", received)
    buffer, extent = memoryview(bytearray(100)), Extent(blob=name, offset=50, length=100)
    with served(tmp_path / "a") as node, contextlib.closing(Peers(JOB, BY_KEY, "a")) as peers:
        for how in (READING, BACKGROUND):
            PeerDisk(peers, node, how).read_into(extent, buffer)
            assert bytes(buffer) == data[50:150] and not unverified
        reads = PeerReads(disk(tmp_path / "here"), Sources(), PeerTable(job=JOB, key=KEY, nodes=[node]))
        with contextlib.closing(reads):
            reads.note({name: [1]}, [])
            reads.read_into(extent, buffer)
            assert bytes(buffer) == data[50:150] and unverified == [100] and reads.reads_in_place(name)
        beyond = Extent(blob=name, offset=len(data) - 50, length=100)
        with pytest.raises(errors.Truncated, match="ends at") as error:
            PeerDisk(peers, node, VERIFIED_BY_CALLER).read_into(beyond, buffer)
        assert error.value.offset == len(data) and error.value.blob == name


def test_after_a_failed_load_bytes_are_checked_on_their_way(
    tmp_path: Path, generation: Generation, monkeypatch
) -> None:
    """A node whose bytes are changed on their way was asked again and again, although another one had the file."""
    name, data = f"{layout.folder(generation.id)}/r00000.safetensors", files_of(tmp_path / "a")["r00000.safetensors"]
    with served(tmp_path / "a") as bad, served(tmp_path / "a") as good:
        received, changed = Stream.receive_into, bad.port

        def receive_into(self: Stream, mv: memoryview, deadline: Deadline) -> None:
            received(self, mv, deadline)
            if len(mv) == 500 and self.raw.getpeername()[1] == changed:
                mv[7] ^= 1

        monkeypatch.setattr(Stream, "receive_into", receive_into)
        table = PeerTable(job=JOB, key=KEY, nodes=[bad, structs.replace(good, leader=2)])
        links = NodeLinks(table=table)
        tier = NodeView(disk(tmp_path / "here"), Nodes((0, 1, 2)), True, links)
        places = SimpleNamespace(writer_of=lambda at: SimpleNamespace(tier=tier))
        pipeline = SimpleNamespace(places=places, run=SimpleNamespace(tier=tier), workers=Inline(), upkeep=MagicMock())
        run, buffer = RestoringRun(pipeline, None, SingleRank()), memoryview(bytearray(500))
        monkeypatch.setattr("lastgood.loop.restore.reader.read_all", lambda *_: [])
        for right in (False, True):
            reads = run.place_of(generation)
            reads.note({name: [1, 2]}, [])
            reads.read_into(Extent(blob=name, offset=0, length=500), buffer)
            assert (bytes(buffer) == data[:500]) == right
            run.examine(generation)
        run.release()


def test_a_node_without_the_key_of_the_job_is_refused(tmp_path: Path) -> None:
    with served(tmp_path / "b") as node, pytest.raises(errors.PeerRefused):
        call(node, FileCall(call="list", name="gen/000000000001-0a0b0c0d"), key="cd" * 32)


def test_half_of_a_copy_does_not_count(tmp_path: Path, generation: Generation) -> None:
    """A restore would have read from it, and the whole copy would never have been made."""
    own = disk(tmp_path / "a")
    place = NodeDisks(own, Nodes((0,)), None)
    assert place.held(generation) == {0: {0}}
    own.delete(f"{layout.folder(generation.id)}/r00000.manifest.json")
    assert place.held(generation) == {0: set()}


def test_what_an_agent_finds_beyond_repair_is_no_outage(tmp_path: Path, memory: Path, generation: Generation) -> None:
    """Whatever an agent could not do was reported as if its node had not been reached."""
    folder = memory / "run"
    shutil.copytree(tmp_path / "a", folder, symlinks=True)
    (folder / layout.folder(generation.id) / "r00000.safetensors").unlink()
    work = Work(at=generation.id, root=generation.root, task="rebuild", place="", of=[0])
    with contextlib.closing(AgentLink(f"memory://{folder}")) as link:
        with agent(folder):
            assert link.serve(Serve(job=JOB, key=KEY, node="a", host="127.0.0.1", port=0)) != 0
            with pytest.raises(errors.BeyondRepair, match="too few cells"):
                link.work(work, lambda: False)
        with pytest.raises(errors.PeerDown):
            link.work(work, lambda: False)


@pytest.mark.parametrize("kind", [CopySender, ParityBuilder])
def test_a_killed_agent_is_replaced_before_it_is_asked_again(memory: Path, generation: Generation, kind) -> None:
    """An agent that was killed while it sent the files of a save was started again after the next save only: the copies
    of this one were tried in vain until then, by its node and to it."""
    folder = memory / "run"
    folder.mkdir()
    at = {"at": generation.id, "root": generation.root}
    parity = ParityRequest(**at, sets={}, files={}, parity=1)
    request = CopyRequest(at=generation.id, orders=[]) if kind is CopySender else parity
    with contextlib.closing(AgentLink(f"memory://{folder}")) as link:
        port, _ = link.serve(Serve(job=JOB, key=KEY, node="a", host="127.0.0.1", port=0))
        ended(str(folder))
        kind(link, PeerTable(job=JOB, key=KEY, nodes=[]), 0).served(msgspec.to_builtins(request), lambda: False)
        after = state(folder)
        assert after is not None and port and after.port == port
    ended(str(folder))


def test_each_part_goes_to_as_many_nodes_as_lack_it() -> None:
    placement = copies([Node("0", "x"), Node("1", "x"), Node("2", "y"), Node("3", "y")], 2)
    assert placement.holders == {"0": ("2",), "2": ("0",), "1": ("3",), "3": ("1",)}
    everywhere = {"0": {0}, "1": {1}, "2": {2}, "3": {3}}
    assert missing_copies(everywhere, placement, 2) == [("0", "2", 0), ("1", "3", 1), ("2", "0", 2), ("3", "1", 3)]
    copied = {"0": {0, 2}, "1": {1, 3}, "2": {2, 0}, "3": {3, 1}}
    assert missing_copies(copied, placement, 2) == []
    replaced = {**copied, "2": set()}
    assert missing_copies(replaced, placement, 2) == [("0", "2", 0), ("0", "2", 2)], "a replaced node gets both again"
    assert missing_copies({**everywhere, "4": {4}, "5": {0}}, placement, 2) == [
        ("1", "3", 1),
        ("2", "0", 2),
        ("3", "1", 3),
    ], "nodes that are not placed neither send nor receive, and what they have counts"
    assert missing_copies({"0": {0, 1}, "2": {0}, "1": set(), "3": set()}, placement, 3) == [
        ("0", "1", 0),
        ("0", "2", 1),
        ("0", "1", 1),
    ]


def test_the_address_and_the_label_of_a_node_come_from_its_environment() -> None:
    assert own_address({"LASTGOOD_ADDRESS": "10.0.0.7"}) == "10.0.0.7"
    assert own_address({"MASTER_ADDR": "127.0.0.1"}) == "127.0.0.1" == own_address({})
    if os.path.exists("/proc/net/if_inet6") and "00000001 01" in Path("/proc/net/if_inet6").read_text():
        assert own_address({"MASTER_ADDR": "::1"}) == "::1", "each node said that it is at 127.0.0.1"
    assert label("rack", {"LASTGOOD_RACK": "r7"}) == "r7" and label(None, {"LASTGOOD_RACK": "r7"}) == ""
    slurm = {"SLURM_TOPOLOGY_ADDR": "s0.s4.n17", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
    assert label("rack", slurm) == "s0.s4" and label("rack", {**slurm, "LASTGOOD_RACK": "r7"}) == "r7"
    assert label("zone", slurm) == "" == label("rack", {**slurm, "SLURM_TOPOLOGY_ADDR_PATTERN": "node"})


class Listens:
    """An agent that listens, or does not."""

    def __init__(self, port: int) -> None:
        self._port = port

    def serve(self, serve: Serve) -> tuple[int, str]:
        return self._port, "" if self._port else "the port is taken"


class Alone:
    """A topic of one rank, to which other nodes have posted too."""

    def __init__(self, *others: object) -> None:
        self._others = others

    def agree(self, mine: object, decide) -> object:
        return decide([mine, *self._others])


OTHER = {"leader": 1, "name": "b", "domain": "", "host": "10.0.0.2", "port": 7}
CERTIFIED = {**OTHER, "certified": True}
DEAF = "the agent of node d does not listen at 10.0.0.4: it was killed"


@pytest.mark.parametrize(
    ("port", "others", "options", "message"),
    [
        (0, [OTHER], {"copies": 2}, "nothing is kept on other nodes: the agent of node .*: the port is taken[.] The"),
        (7, [DEAF], {"copies": 2}, "nothing is kept on other nodes: the agent of node d does not listen at 10.0.0.4"),
        (7, [], {"copies": 2}, "nothing is kept on other nodes: there is one node only"),
        (
            7,
            [CERTIFIED],
            {"copies": 2},
            "nodes: node .* lacks LASTGOOD_TLS_CERTIFICATE, .*, which node b has",
        ),
        (0, [CERTIFIED, OTHER], {"copies": 2}, "taken; node b lacks LASTGOOD_.*, which node b has"),
        (7, [OTHER], {"copies": 3}, "copies=3, and there are 2 nodes: each of them has the files of all"),
        (7, [OTHER], {"node_parity": "2+1"}, "parity='2[+]1' needs 3 nodes, and there are 2 nodes: 2 copies"),
        (7, [OTHER, DEAF], {"copies": 2}, "node d does not listen .* that node only: .* other 2 nodes keep each"),
        (7, [OTHER, DEAF], {"copies": 3}, "copies=3, and 2 nodes listen: each of them"),
        (7, [OTHER, DEAF], {"node_parity": "2+1"}, "needs 3 nodes, and 2 nodes listen: 2 copies"),
    ],
)
def test_a_job_reports_what_its_nodes_cannot_keep(
    caplog: pytest.LogCaptureFixture, port: int, others: list[object], options: dict[str, object], message: str
) -> None:
    """Of a node without certificates, where others had them, it said "Connection reset" at each copy."""
    table = agreed(Listens(port), 0, RunOptions(**options), Alone(*others))  # type: ignore[arg-type]
    assert re.search(message, caplog.text), caplog.text
    listening = [0] * (port > 0) + [1] * (OTHER in others)
    if CERTIFIED in others:
        listening = [1]
    assert [one.leader for one in table.nodes] == listening if table is not None else len(listening) < 2


def test_a_node_without_the_label_of_its_failure_domain_is_refused() -> None:
    with pytest.raises(errors.Refused, match="has no LASTGOOD_RACK") as raised:
        agreed(Listens(7), 0, RunOptions(copies=2, spread="rack"), Alone(OTHER))  # type: ignore[arg-type]
    assert "Set LASTGOOD_RACK on every node" in raised.value.todo


def test_why_copies_failed_here_comes_before_what_another_node_reports() -> None:
    """A certificate was not valid yet here. The other node reported "bad certificate", which hid that."""
    asked = list[object]()

    class Asked:
        def ask(self, request: object) -> None:
            asked.append(request)

        def answers(self, least_seconds: float) -> None:
            raise errors.PeerDown("the other node reports why")

    def here() -> None:
        raise errors.PeerRefused("the certificate is not valid yet")

    request = CopyRequest(at=GenerationId(step=1, incarnation="0" * 8), orders=[])
    with pytest.raises(errors.PeerRefused, match="not valid yet"):
        ask_all(Asked(), request, here)  # type: ignore[arg-type]
    with pytest.raises(errors.PeerDown, match="reports why"):
        ask_all(Asked(), request, lambda: None)  # type: ignore[arg-type]
    assert asked == [request, request], "answers are waited for in any case"

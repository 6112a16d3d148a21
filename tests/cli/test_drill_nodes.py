"""`lastgood drill` on other nodes: agents of real processes make copies of their files, which are lost and damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from test_drill import by_act, in_memory, left
from test_drill_peers import Nodes, asked

from agents import agent, until
from cli_runs import DATA, at, contents, writing
from harness import flip, save
from lastgood.engine.inline_executor import Inline
from lastgood.format import layout
from lastgood.io.machine import NODE
from lastgood.ports import Tier
from lastgood.records import Finding, GenerationId
from lastgood.run import access, drill_nodes, drill_scratch, paths
from lastgood.run.agent_messages import Send, Serve
from lastgood.run.drill_acts import Act, Reading
from lastgood.run.drill_peers import PeerRead, read_peers
from lastgood.run.peer_security import Certificates
from lastgood.run.peers import DRILLS, PeerNode, PeerOrder
from lastgood.run.writer import RunWriter
from wired import authority

pytestmark = pytest.mark.slow


class Copies:
    """Nodes with agents, this one a: the others have copies of step 2 of the run `home`.

    `prelude`: code that the processes of the agents run before. `certificate`: of a node. `folders`: of each node.
    """

    def __init__(
        self,
        home: Path,
        stack: contextlib.ExitStack,
        others: str,
        prelude: str = "",
        certificate: Callable[[str], Certificates | None] = lambda node: None,
    ) -> None:
        self.folders = {"a": in_memory(home)}
        self.folders |= {name: self.folders["a"].with_name(f"peer-{name * 12}") for name in others}
        generation = GenerationId(step=2, incarnation=at(home, 2).name.partition("-")[2])
        folder, self.agents, orders = Path(layout.folder(generation)), dict[str, subprocess.Popen[str]](), []
        for leader, (name, root) in enumerate(self.folders.items()):
            if name != "a":
                (root / folder).mkdir(parents=True)
                shutil.copy(home / folder / layout.COMMIT, root / folder)
            self.agents[name] = stack.enter_context(agent(root, prelude=prelude))
            certificates, host = certificate(name), "127.0.0.1"
            serve = Serve(job="0" * 16, key="ab" * 32, node=name, host=host, port=0, certificates=certificates)
            port = asked(root, call="serve", serve=serve).port
            if name != "a":
                node = PeerNode(leader=leader, name=name, domain="", host="127.0.0.1", port=port)
                orders.append(PeerOrder(rank=0, to=node))
        asked(self.folders["a"], call="send", send=Send(at=generation, orders=orders))

    def contents(self) -> dict[str, dict[str, bytes | None]]:
        """Every file of all nodes."""
        return {name: contents(folder) for name, folder in self.folders.items()}


@pytest.fixture
def home(tmp_path: Path, memory: Path) -> Path:
    """A run of two steps."""
    writing(tmp_path / "home", 1, 2)
    return tmp_path / "home"


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def played(home: Path, mine: Path) -> tuple[list[PeerRead], dict[str, Act]]:
    """What a drill of the run `home` finds on other nodes, and its acts there. `mine`: the folder of this node."""
    with ThreadPoolExecutor(2) as workers, drill_scratch.opened(str(home.parent), home.name) as scratch:
        own, reading = access.for_reading(f"{paths.MEMORY}{mine}"), Reading(workers)
        rows = read_peers(str(mine), own, reading.read_ranks)
        acts = drill_nodes.play(str(mine), own, rows, scratch.front, reading)
    return rows, {one.what: one for one in acts}


def on_nodes(document: dict) -> dict[str, dict]:
    """The acts on other nodes."""
    return {what: one for what, one in by_act(document).items() if what.startswith(("copies: ", "parity: "))}


@pytest.mark.parametrize("others", ["b", "bc"])
def test_files_come_back_from_copies_on_other_nodes(home, stack, call_json, others) -> None:
    nodes = Copies(home, stack, others)
    before = nodes.contents()
    code, document = call_json("drill", home)
    assert code == 0 and document["good"], document
    lost, damaged, cut = on_nodes(document).items()
    rest = {"b": "this node", "bc": "node c"}[others]
    names = {"b": "this node is lost", "bc": "this node and node b are lost"}[others]
    assert lost[0] == f"copies: {names}" and lost[1]["way_back"].startswith(f"step 2 came back from node {others[-1]};")
    assert damaged[0] == "copies: a byte on node b differs" and f"from node b, {rest};" in damaged[1]["way_back"]
    assert cut[0] == "copies: node b is cut off while it is read" and f"{rest};" in cut[1]["way_back"]
    for _, one in (lost, damaged, cut):
        assert one["good"] and one["seconds"] > 0 and one["network_bytes"] > 0
    assert nodes.contents() == before and left(home) == [nodes.folders[one].name for one in others]


def test_files_come_back_from_parity_on_other_nodes(tmp_path, memory, stack, call_json) -> None:
    nodes = Nodes(tmp_path / "home", stack)
    nodes.protect()
    before = {name: contents(folder) for name, folder in nodes.folders.items()}
    code, document = call_json("drill", tmp_path / "home")
    assert code == 0 and document["good"], document
    lost, damaged, cut = on_nodes(document).items()
    assert lost[0] == "parity: this node and node b are lost" and "computed from node c, node d;" in lost[1]["way_back"]
    assert damaged[0].startswith("parity: a byte on node ") and cut[0].endswith(" is cut off while it is read")
    assert all(one["good"] and one["network_bytes"] > 0 for _, one in (lost, damaged, cut))
    assert {name: contents(folder) for name, folder in nodes.folders.items()} == before


def test_certificates_hold_for_a_drill_too(home, tmp_path, stack, monkeypatch) -> None:
    signer = authority(tmp_path)

    def certificate(node: str) -> Certificates:
        own, key = signer.certificate(node)
        return Certificates(certificate=own, key=key, authority=signer.file, encrypt=True)

    monkeypatch.setenv(NODE, "a")
    nodes = Copies(home, stack, "b", certificate=certificate)
    _, acts = played(home, nodes.folders["a"])
    assert [one.good for one in acts.values()] == [True] * 3, acts


def test_a_node_without_room_is_not_tried(home, stack, call) -> None:
    nodes = Copies(home, stack, "b", prelude="from lastgood.agent import drill_files as of; of.DRILL_SHARE = 1 << 60")
    before = nodes.contents()
    ((what, act),) = played(home, nodes.folders["a"])[1].items()
    assert what == "copies: this node is lost" and act.good is None and "a drill gets a quarter" in act.why
    assert nodes.contents() == before
    code, out, _ = call("drill", home)
    assert code == 0 and "copies: this node is lost" in out and "not tried" in out


def test_a_copy_that_is_damaged_already_is_left_alone(home, stack) -> None:
    nodes = Copies(home, stack, "bc")
    (file,) = nodes.folders["b"].glob(f"gen/*/{DATA}")
    flip(file)
    before = nodes.contents()
    rows, acts = played(home, nodes.folders["a"])
    assert [row.good for row in rows] == [False, True]
    assert [*acts][:2] == ["copies: this node is lost", "copies: a byte on node c differs"]
    assert all(one.good for one in acts.values()) and nodes.contents() == before


def test_nodes_that_are_down_are_not_tried(home, stack) -> None:
    nodes = Copies(home, stack, "b")
    nodes.agents["b"].kill()
    nodes.agents["b"].wait()
    (act,) = played(home, nodes.folders["a"])[1].values()
    assert act.good is None and act.why.startswith("node b: PeerDown")


def test_parity_that_makes_one_loss_good_plays_one(tmp_path, memory, stack) -> None:
    nodes = Nodes(tmp_path / "home", stack, 3, 1)
    nodes.protect()
    lost, damaged, cut = played(tmp_path / "home", nodes.folders["a"])[1].values()
    assert lost.good and lost.what == "parity: this node is lost"
    assert damaged.good is None and "makes one loss good" in damaged.why and cut.why == damaged.why


def test_what_came_back_is_compared_with_what_was_there(home, stack, monkeypatch) -> None:
    nodes, read = Copies(home, stack, "b"), Reading.read

    def other_file(reading: Reading, tier: Tier, *args: Any) -> tuple[list[Finding], str]:
        findings, digest = read(reading, tier, *args)
        return findings, "0" * 32 if tier.place.endswith("/back") else digest

    monkeypatch.setattr(Reading, "read", other_file)
    acts = played(home, nodes.folders["a"])[1].values()
    assert {one.why for one in acts} == {"what came back is not what this node had"}


def test_what_happens_to_a_node_meanwhile_is_no_failure(home, stack, monkeypatch) -> None:
    """Its job was opened anew, for example, which goes first; or it went down."""
    nodes, happens = Copies(home, stack, "b"), iter(("removed", "", "killed"))
    bring_back = drill_nodes.NodeStage._bring_back

    def meanwhile(stage: drill_nodes.NodeStage, *args: Any) -> Any:
        if (one := next(happens)) == "removed":
            shutil.rmtree(nodes.folders["b"] / DRILLS)
        elif one:
            nodes.agents["b"].kill()
            nodes.agents["b"].wait()
        return bring_back(stage, *args)

    monkeypatch.setattr(drill_nodes.NodeStage, "_bring_back", meanwhile)
    lost, damaged, cut = played(home, nodes.folders["a"])[1].values()
    assert lost.good is None and lost.why.startswith("node b has removed the copies")
    assert damaged.good, "the copies are made again"
    assert cut.good is None and cut.why.startswith("node b cannot be read any more: ")


# ---- a drill that is interrupted -----------------------------------------------------------------------------------

PLAYS = """
import sys
from pathlib import Path
from test_drill_nodes import played
played(Path(sys.argv[1]), Path(sys.argv[2]))
"""


@pytest.fixture
def large(tmp_path: Path, memory: Path, stack) -> Copies:
    """Nodes a and b with a step whose files take a drill a while."""
    with access.for_writing(tmp_path / "home", "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline())
        run.begin(None)
        save(run, 2, {"w": bytes(48 << 20)})
    return Copies(tmp_path / "home", stack, "b")


def started(home: Path, nodes: Copies) -> subprocess.Popen[bytes]:
    """A drill in another process, which has copies on node b."""
    command, path = [sys.executable, "-c", PLAYS, home, nodes.folders["a"]], os.pathsep.join(sys.path)
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": path})
    until(lambda: process.poll() is not None or (nodes.folders["b"] / DRILLS).exists())
    return process


def test_an_interrupted_drill_leaves_nothing_on_nodes(tmp_path, large) -> None:
    process = started(tmp_path / "home", large)
    process.send_signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT
    assert not (large.folders["b"] / DRILLS).exists() and left(tmp_path / "home") == ["peer-bbbbbbbbbbbb"]


@pytest.mark.long
def test_the_next_drill_removes_what_a_killed_one_left_on_nodes(tmp_path, large) -> None:
    process = started(tmp_path / "home", large)
    process.kill()
    process.wait()
    assert process.returncode == -signal.SIGKILL and (large.folders["b"] / DRILLS).exists()
    assert all(one.good for one in played(tmp_path / "home", large.folders["a"])[1].values())
    assert not (large.folders["b"] / DRILLS).exists()

"""`lastgood drill` of a run with other nodes: what their agents hold is read over the wire, and nothing is written."""

from __future__ import annotations

import contextlib
import random
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from test_drill import in_memory

from agents import agent
from cli_runs import DATA, at, contents, writing
from harness import flip
from lastgood import errors
from lastgood.engine.inline_executor import Inline
from lastgood.format import layout, stripe_layout
from lastgood.limits import PAGE_BYTES
from lastgood.policy.placement import Node, groups
from lastgood.policy.stripes import neighbours, stripe_sets
from lastgood.records import Generation, GenerationId
from lastgood.run import access, agent_link, agent_messages, drill_acts, drill_peers, memory_place, paths
from lastgood.run.agent_messages import Request, Send, Serve, Work
from lastgood.run.drill_peers import PeerRead
from lastgood.run.peers import PeerDisk, PeerNode, PeerOrder, StripeMember, StripeOrder
from lastgood.run.writer import RunWriter
from lastgood_lab.plain import share

pytestmark = pytest.mark.slow

NAMES = "abcd"


def asked(folder: Path, **request: object) -> agent_messages.Answer:
    with contextlib.closing(agent_link.connected(str(folder))) as connection:
        answer = agent_link.asked(connection, Request(protocol=agent_link.PROTOCOL, **request))
    assert not answer.error
    return answer


def peers_read(folder: Path) -> list[PeerRead]:
    """What a drill of the run in this folder reads on other nodes."""
    with ThreadPoolExecutor(2) as workers:
        own, reading = access.for_reading(f"{paths.MEMORY}{folder}"), drill_acts.Reading(workers)
        return drill_peers.read_peers(str(folder), own, reading.read_ranks)


# ---- copies --------------------------------------------------------------------------------------------------------


def test_copies_on_another_node_are_read_and_verified(
    tmp_path: Path, memory: Path, call, call_json, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")  # the cells are compared as they are, not folded
    home = tmp_path / "home"
    writing(home, 1, 2)
    mine = in_memory(home)
    theirs = mine.with_name("peer-0123456789ab")
    generation = GenerationId(step=2, incarnation=at(home, 2).name.partition("-")[2])
    folder = Path(layout.folder(generation))
    (theirs / folder).mkdir(parents=True)
    shutil.copy(home / folder / layout.COMMIT, theirs / folder)
    job, key = "0" * 16, "ab" * 32
    with agent(mine):
        with agent(theirs) as other:
            serving = [Serve(job=job, key=key, node=one, host="127.0.0.1", port=0) for one in "ab"]
            asked(mine, call="serve", serve=serving[0])
            port = asked(theirs, call="serve", serve=serving[1]).port
            node = PeerNode(leader=1, name="b", domain="", host="127.0.0.1", port=port)
            assert agent_link.peers_of(str(mine)) is None, "nothing was sent yet"
            asked(mine, call="send", send=Send(at=generation, orders=[PeerOrder(rank=0, to=node)]))
            before = contents(theirs / "gen")
            code, document = call_json("drill", home)
            (row,) = document["peers"]
            assert code == 0 and row["good"] and (row["what"], row["node"], row["step"]) == ("copies", "b", 2)
            assert row["bytes"] == (home / folder / DATA).stat().st_size and row["bytes_per_second"] > 0
            assert contents(theirs / "gen") == before
            flip(theirs / folder / DATA)
            code, out, _ = call("drill", home)
            assert code == 4 and "copies on node b" in out and "differs from its digest" in out and "1 failed" in out
            other.kill()
            other.wait()
        (down,) = peers_read(mine)
        assert down.good is None and down.why.startswith("PeerDown"), "a node that is down is no damage"


# ---- parity --------------------------------------------------------------------------------------------------------


class Nodes:
    """Four nodes a to d with agents, which share parity. Each has the files of one rank in its folder.

    `data`, `parity` (default 2+2): cells of a stripe. `generations`: steps 1 and 2.
    """

    def __init__(self, home: Path, stack: contextlib.ExitStack, data: int = 2, parity: int = 2) -> None:
        self.code = data, parity
        mine = Path(memory_place.folder_of(home))
        memory_place.make(str(mine))
        self.folders = {"a": mine, **{name: mine.with_name(f"peer-{name * 12}") for name in NAMES[1:]}}
        self.generations = [of_four_ranks(home, step) for step in (1, 2)]
        self.agents, self.nodes = dict[str, subprocess.Popen[str]](), list[PeerNode]()
        for rank, (name, folder) in enumerate(self.folders.items()):
            shutil.copytree(home, folder, dirs_exist_ok=True)
            for file in folder.glob("gen/*/r0*"):
                if not file.name.startswith(f"r{rank:05d}"):
                    file.unlink()
            self.agents[name] = stack.enter_context(agent(folder))
            serve = Serve(job="0" * 16, key="ab" * 32, node=name, host="127.0.0.1", port=0)
            port = asked(folder, call="serve", serve=serve).port
            self.nodes.append(PeerNode(leader=rank, name=name, domain="", host="127.0.0.1", port=port))

    def files(self, name: str, pattern: str) -> list[Path]:
        """Those of step 2 on a node."""
        return sorted(at(self.folders[name], 2).glob(pattern))

    def protect(self, step: int = 2) -> None:
        """Let each agent write its files of parity, as the training processes ask it."""
        sets = stripe_sets(groups([Node(str(rank)) for rank in range(4)], *self.code))
        orders: dict[str, list[StripeOrder]] = {str(rank): [] for rank in range(4)}
        for number, of in enumerate(sets):
            data = [
                StripeMember(node=self.nodes[int(one.node)], first=one.first, ranks=[int(one.node)]) for one in of.data
            ]
            for index, leader in enumerate(of.parity):
                name = stripe_layout.file_name("0" * 8, number, index)
                orders[leader].append(StripeOrder(name=name, data=data, parity=self.code[1], index=index))
        one = self.generations[step - 1]
        for leader, stripes in orders.items():
            beside = [one for one in self.nodes if str(one.leader) in neighbours(sets, leader)]
            work = Work(at=one.id, root=one.root, task="parity", place="", of=None, stripes=stripes, nodes=beside)
            asked(self.folders[NAMES[int(leader)]], call="work", work=work)

    def kill(self, name: str) -> None:
        self.agents[name].kill()
        self.agents[name].wait()

    def read(self) -> PeerRead:
        """What a drill on node a reads."""
        (found,) = peers_read(self.folders["a"])
        return found


def of_four_ranks(home: Path, step: int) -> Generation:
    """A step of a run, of four ranks with files of several chunks."""
    with access.for_writing(home, "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline())
        chain = run.lineage()
        run.begin(chain[0].id if chain else None)
        states = [{f"w{rank}": random.Random(rank).randbytes(30_000 + 9_000 * rank)} for rank in range(4)]
        parts = [share(tier, run.admit(step), rank, state) for rank, state in enumerate(states)]
        return run.publish(run.admit(step), parts, False, False, {})


@pytest.fixture
def nodes(tmp_path: Path, memory: Path) -> Iterator[Nodes]:
    with contextlib.ExitStack() as stack:
        yield Nodes(tmp_path / "home", stack)


def test_files_are_computed_from_parity_on_other_nodes(nodes: Nodes, tmp_path: Path, call, call_json) -> None:
    assert "has sent nothing to other nodes since it was started" in nodes.read().why, "no parity was asked for yet"
    nodes.protect()
    before = {name: contents(folder) for name, folder in nodes.folders.items()}
    code, document = call_json("drill", tmp_path / "home")
    (row,) = document["peers"]
    assert code == 0 and row["good"] and (row["what"], row["node"], row["step"]) == ("parity", "b, c, d", 2)
    assert row["bytes"] == nodes.files("a", DATA)[0].stat().st_size and row["bytes_per_second"] > 0 and not row["why"]
    assert {name: contents(folder) for name, folder in nodes.folders.items()} == before
    flip(nodes.files("c", "s*-00000.parity-0")[0], 5000)
    code, out, _ = call("drill", tmp_path / "home")
    assert code == 4 and "parity on nodes b, c, d" in out and "1 failed" in out
    assert "the memory of node c: a chunk of s00000000-00000.parity-0" in " ".join(out.split())


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("b", "r00001.safetensors"), ("b", "s*-00003.parity-0"), ("c", "s*-00000.parity-0.json")],
    ids=["data", "parity", "record"],
)
def test_a_damaged_file_that_parity_needs_is_found(nodes: Nodes, name: str, pattern: str) -> None:
    """The cells of the other nodes are enough to compute the files all the same."""
    nodes.protect()
    (file,) = nodes.files(name, pattern)
    flip(file, 100)
    found = nodes.read()
    assert found.good is False and found.step == 2
    assert "can be computed without" in found.why and f"node {name}: " in found.why and file.name in found.why


def test_files_are_computed_without_a_node_that_is_down(nodes: Nodes) -> None:
    nodes.protect()
    nodes.kill("c")
    found = nodes.read()
    assert found.good and found.step == 2 and found.why.startswith("the memory of node c: ")


def test_too_few_nodes_for_parity_are_no_damage(nodes: Nodes, monkeypatch) -> None:
    """Whether they are down from the beginning, or are lost while their files are read."""
    nodes.protect()
    read = PeerDisk.read_into

    def broken(one: PeerDisk, extent, mv, *, fresh: bool = False) -> None:
        if extent.length % PAGE_BYTES == 0:  # a chunk or a cell, no record
            raise errors.PeerDown("the connection broke")
        read(one, extent, mv)

    with monkeypatch.context() as patched:
        patched.setattr(PeerDisk, "read_into", broken)
        lost = nodes.read()
    nodes.kill("c")
    nodes.kill("d")
    for found in (lost, nodes.read()):
        assert found.good is None and "node c: " in found.why and "node d: " in found.why


def test_a_step_without_parity_gives_way_to_the_one_before(nodes: Nodes) -> None:
    nodes.protect(1)
    found = nodes.read()
    assert found.good and found.step == 1
    for name in NAMES:
        for file in nodes.folders[name].glob("gen/*/s*.json"):
            file.unlink()
    found = nodes.read()
    assert found.good is None and found.why == "this node's files have no parity there yet"


def test_copies_that_no_agent_names_are_shown(tmp_path: Path, memory: Path) -> None:
    """They were passed over in silence, and the drill said that all ways back work."""
    of_four_ranks(tmp_path / "home", 1)
    mine = in_memory(tmp_path / "home")
    assert peers_read(mine) == [], "all files are here"
    for file in mine.glob("gen/*/r00001*"):
        file.unlink()
    (found,) = peers_read(mine)
    assert found.good is None and found.why.startswith(f"no agent of {mine} listens")


def test_an_agent_of_another_version_names_no_nodes(nodes: Nodes, monkeypatch) -> None:
    monkeypatch.setattr(agent_link, "PROTOCOL", agent_link.PROTOCOL - 1)
    found = nodes.read()
    assert found.good is None and "speaks version" in found.why

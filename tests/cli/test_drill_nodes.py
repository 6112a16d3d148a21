"""`lastgood drill` on other nodes: agents of real processes make copies of their files, which are lost and damaged."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_drill import by_act, in_memory, left
from test_drill_peers import Nodes, asked

from agents import agent, until
from cli_runs import at, contents, writing
from harness import flip
from lastgood.agent import drill_files
from lastgood.format import layout
from lastgood.records import GenerationId
from lastgood.run import drill_copies
from lastgood.run.agent_messages import Send, Serve
from lastgood.run.peers import PeerNode, PeerOrder

pytestmark = pytest.mark.slow


class Copies:
    """Nodes with agents, this one a: the others have copies of its files. `folders`: name -> its folder in memory."""

    def __init__(self, home: Path, stack: contextlib.ExitStack, others: str) -> None:
        writing(home, 1, 2)
        self.folders = {"a": in_memory(home)}
        self.folders |= {name: self.folders["a"].with_name(f"peer-{name * 12}") for name in others}
        generation = GenerationId(step=2, incarnation=at(home, 2).name.partition("-")[2])
        folder, self.agents, orders = Path(layout.folder(generation)), dict[str, subprocess.Popen[str]](), []
        for leader, (name, root) in enumerate(self.folders.items()):
            if name != "a":
                (root / folder).mkdir(parents=True)
                shutil.copy(home / folder / layout.COMMIT, root / folder)
            self.agents[name] = stack.enter_context(agent(root))
            serve = Serve(job="0" * 16, key="ab" * 32, node=name, host="127.0.0.1", port=0)
            port = asked(root, call="serve", serve=serve).port
            if name != "a":
                node = PeerNode(leader=leader, name=name, domain="", host="127.0.0.1", port=port)
                orders.append(PeerOrder(rank=0, to=node))
        asked(self.folders["a"], call="send", send=Send(at=generation, orders=orders))

    def contents(self) -> dict[str, dict[str, bytes | None]]:
        """Every file of all nodes."""
        return {name: contents(folder) for name, folder in self.folders.items()}


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def on_nodes(document: dict) -> dict[str, dict]:
    """The acts on other nodes."""
    return {what: one for what, one in by_act(document).items() if what.startswith(("copies: ", "parity: "))}


@pytest.mark.parametrize("others", ["b", "bc"])
def test_files_come_back_from_copies_on_other_nodes(tmp_path, memory, stack, call_json, others) -> None:
    nodes = Copies(tmp_path / "home", stack, others)
    before = nodes.contents()
    code, document = call_json("drill", tmp_path / "home")
    assert code == 0 and document["good"], document
    lost, damaged, cut = on_nodes(document).items()
    rest = {"b": "this node", "bc": "node c"}[others]
    names = {"b": "this node is lost", "bc": "this node and node b are lost"}[others]
    assert lost[0] == f"copies: {names}" and lost[1]["way_back"].startswith(f"step 2 came back from node {others[-1]};")
    assert damaged[0] == "copies: a byte on node b differs" and f"from node b, {rest};" in damaged[1]["way_back"]
    assert cut[0] == "copies: node b is cut off while it is read" and f"from {rest};" in cut[1]["way_back"]
    for _, one in (lost, damaged, cut):
        assert one["good"] and one["seconds"] > 0 and one["network_bytes"] > 0
    assert nodes.contents() == before and left(tmp_path / "home") == [nodes.folders[one].name for one in others]


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

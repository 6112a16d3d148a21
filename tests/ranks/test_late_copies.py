"""What all ranks of several nodes had sealed is committed in a place below, where their agents do not listen."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import one_place, steps
from lastgood.agent.late_copies import completed, given_up
from lastgood.format import layout
from lastgood.io.memory_files import MemoryFiles
from lastgood.run import agent_link, paths
from lastgood.run.verify import never
from lastgood.storage.directory import Disk
from lastgood_lab.worlds import world
from ranked_memory import died_before_commit, folder, trained


class Node:
    """The memory of a node whose ranks have died; its agent is the test."""

    def __init__(self, home: Path, name: str, memory: Path) -> None:
        self.folder = folder(home, name, memory)
        root = str(self.folder)
        self._tier = Disk(MemoryFiles(root), root, shared=True, place=f"{paths.MEMORY}{root}")
        self._spec = agent_link.read_spec(root)

    def attempt(self) -> str:
        return completed(self._tier, str(self.folder), self._spec, None, never)

    def given_up(self) -> list[str]:
        return given_up(self._tier, self._spec)

    def path(self, name: str, step: int = 5) -> Path:
        (found,) = self.folder.glob(f"gen/*{step}-*")
        return found / name


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def lost(home: Path, memory: Path, names: list[str]) -> list[Node]:
    """Ranks on nodes of these names have sealed step 5, and died before its COMMIT. Step 4 is at home."""
    world(2, died_before_commit, names, memory, home, 5, False, dies=(0, 1))
    return [Node(home, name, memory) for name in dict.fromkeys(names)]


def test_the_node_that_comes_last_commits_the_save_of_all(home: Path, memory: Path) -> None:
    """The save waited for the next opening, and was gone once the agents had given up their memory."""
    a, b = lost(home, memory, ["a", "b"])
    assert "step 5 lacks INTENT.json of another node" in b.attempt()
    assert "step 5 lacks the files of rank 1, which other nodes have" in a.attempt()
    assert steps(home) == [4] and a.given_up() == [a.path("").name]
    assert b.attempt() == a.attempt() == b.attempt() == ""
    assert steps(home) == [4, 5] and one_place(home).verify(5).good
    assert a.given_up() == b.given_up() == []
    (there,) = home.glob("gen/*5-*")
    assert not (there / layout.INTENT).exists()
    committed = (there / layout.COMMIT).read_bytes()
    found = world(2, trained, ["a", "b"], memory, home, 5)
    assert {one["step"] for one in found} == {5}
    assert a.path(layout.COMMIT).read_bytes() == committed, "the next opening commits the same in memory"


def test_a_save_of_some_ranks_is_committed_by_no_agent(home: Path, memory: Path) -> None:
    a, b = lost(home, memory, ["a", "b"])
    b.path("r00001.manifest.json").unlink()
    assert "lacks the files of rank 1" in a.attempt() and b.attempt() == ""
    assert "lacks the files of rank 1" in a.attempt()
    assert steps(home) == [4]


def test_a_run_that_went_on_elsewhere_gets_nothing_from_before(home: Path, memory: Path) -> None:
    a, b = lost(home, memory, ["a", "b"])
    world(2, trained, ["c", "d"], memory, home, 8)
    before = steps(home)
    assert before[-1] == 8
    assert b.attempt() == a.attempt() == b.attempt() == ""
    assert steps(home) == before


def test_half_a_save_of_one_node_is_copied_nowhere(home: Path, memory: Path) -> None:
    """No other node could complete it, and its files lay at home until the next opening."""
    (a,) = lost(home, memory, ["a", "a"])
    a.path("r00001.manifest.json").unlink()
    assert a.attempt() == ""
    assert len([*home.glob("gen/*")]) == 1

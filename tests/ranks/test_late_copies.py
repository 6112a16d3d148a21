"""What killed ranks of several nodes have left in memory comes into a place below, where their agents do not listen:
what is committed, and what all ranks had sealed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from agents import until
from harness import flip, one_place, steps
from lastgood.agent.drain import committed, drained
from lastgood.agent.late_copies import committed_below, completed, given_up
from lastgood.format import commit, layout
from lastgood.io.memory_files import MemoryFiles
from lastgood.ports import never
from lastgood.records import Finding
from lastgood.run import access, agent_link, paths
from lastgood.run.late_commit import HELD
from lastgood.storage.directory import Disk
from lastgood_lab.worlds import world
from ranked_memory import died_before_commit, folder, trained, trained_into_nan


class Node:
    """The memory of a node whose ranks have died; its agent is the test."""

    def __init__(self, home: Path, name: str, memory: Path) -> None:
        self.folder = folder(home, name, memory)
        root = str(self.folder)
        self._tier = Disk(MemoryFiles(root), root, shared=True, place=f"{paths.MEMORY}{root}")
        spec = agent_link.read_spec(root)
        assert spec is not None
        self.spec = spec

    def attempt(self, stop: Callable[[], bool] = never) -> str:
        return completed(self._tier, self.spec, stop)

    def drained(self) -> list[str]:
        """Copy what is committed. Returns what is missing then."""
        return drained(self._tier, self.spec, committed(self._tier), never).missing

    def given_up(self) -> list[str]:
        return given_up(self._tier, committed_below(self._tier, self.spec))

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


def killed(home: Path, memory: Path) -> list[Node]:
    """Ranks on the nodes a and b have committed step 6 in memory, and died. Step 4 is at home."""
    world(2, trained, ["a", "b"], memory, home, 6, True, False, dies=(0, 1))
    assert steps(home) == [4]
    return [Node(home, name, memory) for name in "ab"]


def test_no_part_of_an_abandoned_save_comes_to_a_run_that_went_on(home: Path, memory: Path) -> None:
    """The run had gone on from step 4 on other nodes, and the agents of the first ones brought their step 6 into it."""
    a, b = killed(home, memory)
    world(2, trained, ["c", "d"], memory, home, 5)
    before = steps(home)
    assert before[-1] == 5
    assert b.drained() == a.drained() == b.drained() == []
    assert steps(home) == before


def test_damage_at_home_is_mended_when_each_node_mends_its_part(home: Path, memory: Path) -> None:
    """Each agent read what its node had written. They mended the copy and left the mark of damage on it, counted it as
    made and removed the memory: no restore took that save any more."""
    a, b = killed(home, memory)
    b.drained()
    assert a.drained() == b.drained() == []
    (pack,) = home.glob("gen/*6-*/pack-00001")
    flip(pack, pack.stat().st_size // 2)
    with access.for_writing(home, "atomic_dirsync") as target:
        found = commit.survey(target).generations
        (one,) = (found[at] for at in found if at.step == 6)
        commit.mark(target, one, [Finding(kind="SumMismatch", what="a chunk is damaged", layer="digests")])
    assert "step 6" in (lacks := a.drained()[0]) and "does not read back" in lacks
    assert b.drained() == a.drained() == []
    assert one_place(home).generations()[-1].good and one_place(home).verify(6).good


def test_a_newest_save_with_nan_of_one_node_costs_none_before(home: Path, memory: Path) -> None:
    """Rank 1 had NaN in the newest save. The agent of rank 0 read its own part alone, committed that save as good, and
    was done; that of rank 1 found the NaN, and waited for ever for the part of rank 0 of the good save before."""
    world(2, trained_into_nan, ["a", "b"], memory, home, 6, dies=(0, 1))
    assert steps(home) == [4]
    for one in memory.glob("*/*/gen/*6-*/UNFIT.json"):  # as if the ranks had died before it was read
        one.unlink()
    a, b = (Node(home, name, memory) for name in "ab")
    assert b.drained()
    assert a.drained() == b.drained() == []
    assert steps(home)[-2:] == [5, 6] and one_place(home).verify(5).good and one_place(home).generation().step == 5


def test_half_a_save_of_one_node_is_copied_nowhere(home: Path, memory: Path) -> None:
    """No other node could complete it, and its files lay at home until the next opening."""
    (a,) = lost(home, memory, ["a", "a"])
    a.path("r00001.manifest.json").unlink()
    assert a.attempt() == ""
    assert len([*home.glob("gen/*")]) == 1


def test_a_damaged_part_of_another_node_is_copied_again_before_commit(home: Path, memory: Path) -> None:
    """The last node committed what another one had copied before, without reading it: the damaged copy was the only one
    once the memory was given up."""
    a, b = lost(home, memory, ["a", "b"])
    a.attempt()
    (there,) = home.glob("gen/*5-*")
    flip(there / "r00000.safetensors", -5)
    assert "lacks a whole copy of r00000.safetensors" in b.attempt()
    assert steps(home) == [4] and a.attempt() == ""
    assert one_place(home).verify(5).good


def test_a_late_copy_gives_way_to_a_job_that_opens_the_place(home: Path, memory: Path, monkeypatch) -> None:
    """A job that was started again on other nodes was refused, because the agent of a node copied its part."""
    a, b = lost(home, memory, ["a", "b"])
    with ThreadPoolExecutor(1) as jobs:
        asked, opened, wanted = list[Future[None]](), threading.Event(), access.Wanted(str(home))

        def job() -> None:
            with access.for_writing(home, "atomic_dirsync"):
                opened.set()

        def stop() -> bool:  # called while the agent has the place open
            if not asked:
                asked.append(jobs.submit(job))
                until(wanted)
            return False

        assert a.attempt(stop) == HELD
        asked[0].result(60)
    assert opened.is_set()
    b.attempt()
    assert a.attempt() == b.attempt() == "" and steps(home) == [4, 5]


def test_an_agent_asked_to_end_waits_for_its_turn_at_the_place(home: Path, memory: Path) -> None:
    """The agents of all nodes were asked to end at once. One copied its part, and the others took the lock of the place
    for a reason to give up theirs."""
    a, b = lost(home, memory, ["a", "b"])
    a.attempt()
    with access.for_writing(home, "atomic_dirsync", agent_order=0):
        assert b.attempt() == HELD
    assert b.attempt() == "" and steps(home) == [4, 5]


def test_a_place_that_cannot_be_used_keeps_no_save_out_of_the_others(home: Path, memory: Path, tmp_path: Path) -> None:
    a, b = lost(home, memory, ["a", "b"])
    (tmp_path / "file").touch()
    for node in (a, b):
        unusable = msgspec.structs.replace(node.spec.places[0], url=str(tmp_path / "file"))
        node.spec = msgspec.structs.replace(node.spec, places=[unusable, *node.spec.places])
    for node in (a, b):
        node.attempt()
    assert steps(home) == [4, 5]

"""Runs of several ranks whose first tier is memory: the ranks of a node share a folder."""

from __future__ import annotations

import contextlib
import functools
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from agents import agent, ended, until
from harness import flip, one_place, steps
from lastgood.cli import app
from lastgood.io.files import Lock
from lastgood.io.machine import NODE
from lastgood.run import access, drill_acts, drill_peers, memory_place
from lastgood_lab.campaigns.rank_jobs import PATIENCE
from lastgood_lab.worlds import world
from ranked_memory import (
    died_before_commit,
    died_beside_left_out,
    folder,
    found_beside_left_out,
    preempted,
    read_in_process,
    scrubbed,
    trained,
    uninterrupted,
)

pytestmark = pytest.mark.slow


@functools.cache
def losses(size: int) -> list[list[float]]:
    """The losses of each rank in nine steps that nothing disturbs."""
    return world(size, uninterrupted, 9)


def killed(nodes: list[str], memory: Path, home: Path, upto: int, with_agents: bool = False, *options: object) -> None:
    """Train until `upto`; then every rank is killed, and the agents first unless `with_agents`.

    `options`: further arguments of `trained`.
    """
    size = len(nodes)
    world(size, trained, nodes, memory, home, upto, True, with_agents, *options, dies=tuple(range(size)))


@pytest.mark.parametrize("nodes", [["a", "a"], ["a", "b"], ["a", "a", "b", "b"]], ids="".join)
def test_killed_ranks_go_on_exactly_from_the_memory_of_their_nodes(tmp_path: Path, memory: Path, nodes) -> None:
    size, home = len(nodes), tmp_path / "home"
    killed(nodes, memory, home, 6)
    assert steps(home) == [4], "the newest steps are in memory only"
    found = world(size, trained, nodes, memory, home, 9)
    for rank, node in enumerate(nodes):
        assert found[rank]["step"] == 6
        assert f"memory://{folder(home, node, memory)}" in found[rank]["sources"]
        assert found[rank]["losses"] == losses(size)[rank][6:]
    assert steps(home)[-1] == 9


def test_preempted_ranks_serve_rank_0_until_it_has_closed(tmp_path: Path, memory: Path) -> None:
    """At SIGTERM the other nodes left at once. Rank 0 still asked them for their files while it verified its last save
    in memory, and waited for the rest of the grace period, in which Slurm killed it."""
    for code, warnings in world(2, preempted, ["a", "b"], memory, tmp_path / "home"):
        assert code == 75
        assert not [one for one in warnings if "while leaving" in one or "has not done its part" in one]


@pytest.mark.parametrize("after", [["a"], ["a", "b", "a", "b"]], ids="".join)
def test_another_number_of_ranks_goes_on_from_memory(tmp_path: Path, memory: Path, after) -> None:
    killed(["a", "a"], memory, tmp_path / "home", 6)
    found = world(len(after), trained, after, memory, tmp_path / "home", 8)
    assert {one["step"] for one in found} == {6}


def test_damage_at_home_is_mended_from_the_memory_of_all_nodes(tmp_path: Path, memory: Path) -> None:
    """`scrub=` was refused with a tier in memory. The older copy is damaged too, and only the newest is in memory."""
    damaged, events = world(2, scrubbed, ["a", "b"], memory, tmp_path / "home")[0]
    assert damaged == [4] and "repaired 8" in events
    assert one_place(tmp_path / "home").verify(8).good


def test_every_rank_knows_what_a_save_survives(tmp_path: Path, memory: Path) -> None:
    """A rank other than 0 never learned that a save with added metrics was committed."""
    for found in world(2, trained, ["a", "b"], memory, tmp_path / "home", 6):
        assert found["survives"][0] and found["survives"][3], "it is in memory on every rank"


@pytest.mark.parametrize("nodes", [["a", "a"], ["a", "b"]], ids="".join)
def test_the_agents_of_all_nodes_complete_a_save_after_every_rank_died(tmp_path: Path, memory: Path, nodes) -> None:
    """On a busy machine the ranks died while step 4 was being copied, and agents copy the newest save only."""
    home = tmp_path / "home"
    killed(nodes, memory, home, 6, with_agents=True)
    until(lambda: 6 in steps(home))
    assert one_place(home).verify(6).good


@pytest.mark.parametrize("nodes", [["a", "a"], ["a", "b"]], ids="".join)
def test_what_all_ranks_have_sealed_is_committed_by_the_next_start(tmp_path: Path, memory: Path, nodes) -> None:
    """The ranks died between their seals and COMMIT, and the save was removed by the next opening."""
    home = tmp_path / "home"
    world(2, died_before_commit, nodes, memory, home, 6, False, dies=(0, 1))
    found = world(2, trained, nodes, memory, home, 9)
    for rank in range(2):
        assert found[rank]["step"] == 6 and found[rank]["losses"] == losses(2)[rank][6:]


def test_the_agent_commits_what_all_ranks_of_its_node_have_sealed(tmp_path: Path, memory: Path) -> None:
    """The lock of a killed rank was held for a moment longer than its connection; the agent did not try again."""
    home, node = tmp_path / "home", folder(tmp_path / "home", "a", memory)
    world(2, died_before_commit, ["a", "a"], memory, home, 6, False, dies=(0, 1))
    with contextlib.closing(Lock(str(node / access.LOCK))) as lock, agent(node):
        until(lambda: steps(home)[-1] == 5)  # what is committed in memory is copied meanwhile
        lock.close()
        until(lambda: steps(home)[-1:] == [6])
    assert one_place(home).verify(6).good


@pytest.mark.parametrize("copies", [1, 2])
def test_the_agents_commit_what_all_ranks_of_their_nodes_have_sealed(tmp_path: Path, memory: Path, copies: int) -> None:
    """Agents committed for a job on one node only: on several nodes the save waited for the next opening, and was lost
    with the memory of a node that did not come back."""
    nodes, home = ["a", "b"], tmp_path / "home"
    world(2, died_before_commit, nodes, memory, home, 5, True, copies, dies=(0, 1))
    until(lambda: steps(home)[-1:] == [5])  # step 4 was at home: the other node had nothing else to copy
    assert one_place(home).verify(5).good
    found = world(2, trained, nodes, memory, home, 9)
    assert [one["step"] for one in found] == [5, 5]
    assert [one["losses"] for one in found] == [one[5:] for one in losses(2)]


def test_what_one_rank_has_not_sealed_is_never_committed(tmp_path: Path, memory: Path) -> None:
    nodes, home = ["a", "b"], tmp_path / "home"
    world(2, died_before_commit, nodes, memory, home, 6, False, dies=(0, 1))
    (manifest,) = folder(home, "b", memory).glob("gen/*6-*/r00001.manifest.json")
    manifest.unlink()
    assert {one["step"] for one in world(2, trained, nodes, memory, home, 8)} == {5}


def test_the_agents_copy_what_killed_ranks_left_on_their_disks(tmp_path: Path, disks: Path) -> None:
    nodes, home = ["a", "b"], tmp_path / "home"
    killed(nodes, disks, home, 6, True, 2, None, True)
    until(lambda: steps(home) == [4, 6])
    assert one_place(home).verify(6).good
    assert steps(disks / "a")[-1] == steps(disks / "b")[-1] == 6, "what is on a disk stays"


def test_a_lost_node_takes_the_run_back_to_what_the_home_has(tmp_path: Path, memory: Path) -> None:
    home = tmp_path / "home"
    killed(["a", "b"], memory, home, 6)
    shutil.rmtree(folder(home, "b", memory))
    found = world(2, trained, ["a", "b"], memory, home, 8)
    assert {one["step"] for one in found} == {4} and steps(home)[-1] == 8


def test_a_node_in_reserve_that_was_staged_takes_the_place_of_a_lost_one(
    tmp_path: Path, memory: Path, monkeypatch
) -> None:
    home, options = tmp_path / "home", ["agent", "stage", str(tmp_path / "home"), "--ranks", "1"]
    world(2, trained, ["a", "b"], memory, home, 8)
    ended(str(folder(home, "b", memory)))
    shutil.rmtree(folder(home, "b", memory))
    monkeypatch.setenv(NODE, "c")
    assert steps(home)[-1] == 8 and app.main(options) == 0
    found = world(2, trained, ["a", "c"], memory, home, 9)
    assert {one["step"] for one in found} == {8}
    assert f"memory://{folder(home, 'c', memory)}" in found[1]["sources"]


# ---- copies on other nodes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [(2, None, False), (1, "2+2", False), (2, None, True)],
    ids=["copies", "too few nodes for parity", "copies on disks"],
)
def test_a_lost_node_loses_nothing_that_was_copied(tmp_path: Path, memory: Path, disks: Path, options) -> None:
    """On a real disk no copy was ever made: what an agent received lay at no page's boundary, for direct I/O."""
    nodes, home = ["a", "b"], tmp_path / "home"
    place = disks if options[-1] else memory
    killed(nodes, place, home, 6, False, *options)
    assert steps(home) == [4]
    shutil.rmtree(disks / "b" if options[-1] else folder(home, "b", memory))
    found = world(2, trained, nodes, place, home, 9, False, True, *options)
    assert [one["step"] for one in found] == [6, 6]
    assert [one["losses"] for one in found] == [one[6:] for one in losses(2)]
    assert "other nodes" in found[1]["sources"] and "other nodes" not in found[0]["sources"]
    assert all(one["survives"][2] for one in found), "every rank knows that the last save survives the loss of a node"
    assert all(one["closing_seconds"] < PATIENCE for one in found), "no rank waits for what nobody asks"


@pytest.mark.parametrize("options", [(2, None, False), (1, "2+1", False)], ids=["copies", "parity"])
def test_with_too_many_lost_nodes_the_run_goes_on_from_its_home(tmp_path: Path, memory: Path, options) -> None:
    nodes, home = ["a", "b", "c"], tmp_path / "home"
    killed(nodes, memory, home, 6, False, *options)
    for lost in ("a", "b"):
        shutil.rmtree(folder(home, lost, memory))
    found = world(3, trained, nodes, memory, home, 9, False, True, *options)
    assert [one["step"] for one in found] == [4, 4, 4] and steps(home)[-1] == 9
    assert [one["losses"] for one in found] == [one[4:] for one in losses(3)]


@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disks"])
def test_the_agents_read_what_the_ranks_have_saved(tmp_path: Path, memory: Path, disks: Path, on_disk: bool) -> None:
    """Files on disks of the nodes were read by the ranks, although each node had an agent."""
    place = disks if on_disk else memory
    assert world(2, read_in_process, ["a", "b"], place, tmp_path / "home", on_disk) == [[], []]
    assert one_place(tmp_path / "home").generations()[-1].verified


def test_a_node_whose_agent_does_not_listen_is_left_out_alone(tmp_path: Path, memory: Path) -> None:
    """Nobody made any copies then. The last save that has all its copies stays, for that node may be lost."""
    nodes, home, kept = ["a", "b", "c"], tmp_path / "home", tmp_path / "kept"

    def life(nodes: list[str], upto: int, left_out: str = "") -> list[dict[str, Any]]:
        world(3, died_beside_left_out, nodes, memory, home, upto, left_out, dies=(0, 1, 2))
        return found_beside_left_out(home, 3)

    def holders(step: int) -> list[str]:
        """For each rank, the nodes that have its files."""
        name = f"gen/{step:012d}-*/r0000{{}}.manifest.json"
        return [
            "".join(one for one in nodes if [*folder(home, one, memory).glob(name.format(rank))]) for rank in range(3)
        ]

    whole = life(nodes, 5)
    assert [one["survives"] for one in whole] == [["process", "node"]] * 3, "every rank knows it"
    assert all(len(one) == 2 for one in holders(5))
    before = life(nodes, 7, "a")
    assert before[0]["step"] == 5 and before[0]["survives"] == ["process"], "the files of a lie on a only"
    assert holders(7) == ["a", "bc", "bc"]
    (text,) = (one for one in before[0]["texts"] if "keep each other's files" in one)
    assert text.startswith("the agent of node a does not listen at 192.0.2.1: ") and "cannot be listened at" in text
    for source in (memory, home):
        shutil.copytree(source, kept / source.name, symlinks=True, ignore=shutil.ignore_patterns("agent.*"))

    shutil.rmtree(folder(home, "b", memory))
    after = life(["b", "c", "a"], 8, "a")  # other ranks than before, on every node
    assert [one["step"] for one in after] == [7] * 3 and after[0]["survives"] == ["process"]
    assert all("other nodes" in one["sources"] for one in after), "also what only the node left out has"

    for source in (memory, home):
        shutil.rmtree(source)
        shutil.copytree(kept / source.name, source, symlinks=True)
    shutil.rmtree(folder(home, "a", memory))
    again = life(nodes, 8)
    assert [one["step"] for one in again] == [5] * 3 and again[0]["survives"] == ["process", "node"]
    assert [one["losses"] for one in again] == [
        one["losses"] + other["losses"] for one, other in zip(before, after, strict=True)
    ]
    assert all(len(one) == 2 for one in holders(8)), "the next opening asks that agent again"


def test_copies_from_before_stay_where_one_agent_of_two_listens(tmp_path: Path, memory: Path) -> None:
    """The last save that lay on both nodes was deleted for one that did not, and with the node both were lost."""
    nodes, home = ["a", "b"], tmp_path / "home"

    def life(upto: int, left_out: str = "") -> list[int]:
        world(2, died_beside_left_out, nodes, memory, home, upto, left_out, dies=(0, 1))
        return [one["step"] for one in found_beside_left_out(home, 2)]

    life(6)
    assert life(7, "b") == [6, 6] and steps(home) == [4]
    shutil.rmtree(folder(home, "b", memory))
    assert life(8) == [6, 6]
    assert steps(folder(home, "a", memory))[-1] == 8 and 6 not in steps(folder(home, "a", memory))


@pytest.mark.parametrize("which", [0, pytest.param(-1, marks=pytest.mark.long)], ids=["first", "last"])
def test_a_damaged_copy_is_mended_from_another_node(tmp_path: Path, memory: Path, which: int) -> None:
    """Of four nodes with three copies. A rank asked for a mark that only other nodes have, and all ranks were left half
    loaded; then they went back two steps, although two good copies were left."""
    nodes, home = ["a", "b", "c", "d"], tmp_path / "home"
    killed(nodes, memory, home, 6, False, 3)
    copies = [next(folder(home, one, memory).glob("gen/000000000006-*/r00002.*s"), None) for one in ("a", "b", "d")]
    shutil.rmtree(folder(home, "c", memory))
    flip([one for one in copies if one is not None][which], -5)
    found = world(4, trained, nodes, memory, home, 7, False, True, 3)
    assert [one["step"] for one in found] == [6] * 4


# ---- parity among nodes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lost", "damaged", "step", "on_disk"),
    [
        (["b", "d"], "", 6, False),
        (["b"], "c", 6, True),
        pytest.param(["a", "b", "c"], "", 4, False, marks=pytest.mark.long),
    ],
    ids=["two", "one and a damaged file, on disks", "three"],
)
def test_two_nodes_lost_at_once_lose_nothing_with_parity(
    tmp_path: Path, memory: Path, disks: Path, lost, damaged, step, on_disk
) -> None:
    """Of four nodes with parity="2+2". Three lost nodes take the run back to what the home has.

    Each rank waited at its close for the end of requests about copies, which nobody makes here, and so did those of a
    run with copies for the end of requests about parity.
    """
    nodes, home = ["a", "b", "c", "d"], tmp_path / "home"
    place = disks if on_disk else memory
    killed(nodes, place, home, 6, False, 1, "2+2", on_disk)
    assert steps(home) == [4]
    folders = {node: disks / node if on_disk else folder(home, node, memory) for node in nodes}
    for node in lost:
        shutil.rmtree(folders[node])
    if damaged:
        flip(next(folders[damaged].glob("gen/000000000006-*/*.safetensors")), -5)
    found = world(4, trained, nodes, place, home, 7, False, True, 1, "2+2", on_disk)
    assert [one["step"] for one in found] == [step] * 4
    assert [one["losses"] for one in found] == [one[step:7] for one in losses(4)]
    assert all(one["survives"][2] for one in found), "every rank knows that the last save survives the loss of a node"
    assert all(one["closing_seconds"] < PATIENCE for one in found), "no rank waits for what nobody asks"


def test_a_drill_computes_the_files_of_each_node_from_the_others(tmp_path: Path, memory: Path, monkeypatch) -> None:
    nodes, home = ["a", "b", "c", "d"], tmp_path / "home"
    killed(nodes, memory, home, 6, True, 1, "2+2")
    for node in nodes:
        monkeypatch.setenv(NODE, node)
        own = access.for_reading(memory_place.url_of(home))
        with ThreadPoolExecutor(2) as workers:
            read = drill_acts.Reading(workers).read_ranks
            (found,) = drill_peers.read_peers(str(folder(home, node, memory)), own, read)
        assert found.good and (found.what, found.step, found.why) == ("parity", 6, "")
        assert found.node == ", ".join(one for one in nodes if one != node) and found.bytes > 0

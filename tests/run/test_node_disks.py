"""A place on the disks of several nodes, with the disks in one process."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from lastgood import errors
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.events import Event
from lastgood.format import commit, layout
from lastgood.io.files import PosixFiles
from lastgood.limits import CHUNK_BYTES
from lastgood.policy.placement import Node, copies, missing_copies
from lastgood.ports import Stop
from lastgood.records import Finding, Generation, judged
from lastgood.run import copying
from lastgood.run.known import Environment, KnownRun
from lastgood.run.node_disks import FileRequest, NodeDisks, NodeFiles, Nodes
from lastgood.run.rank_requests import Requests
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood_lab.plain import save


class Answering:
    """Stands for `Requests`: the disks of the other nodes answer at once."""

    def __init__(self, disks: Sequence[Disk]) -> None:
        self._files = [NodeFiles(one) for one in disks]
        self._request = FileRequest(call="list")

    def ask(self, request: FileRequest) -> None:
        self._request = request

    def answers(self, least_seconds: float = 0.0) -> list[object]:
        return [one.served(self._request, lambda: False) for one in self._files]


def disk(root: Path) -> Disk:
    root.mkdir(exist_ok=True)
    return Disk(PosixFiles(), str(root), shared=True)


def test_a_node_has_the_manifest_of_no_file_that_it_lacks(tmp_path: Path) -> None:
    """A generation that lost nodes had was copied from a directory to the nodes of the next job. Each of them got all
    manifests, so each seemed to have the files of all ranks: no copies were sent, and they were reported as made."""
    save(RunWriter(disk(tmp_path / "below"), Inline()), 1, {"w": b"x" * 100})
    below, nodes = disk(tmp_path / "below"), [disk(tmp_path / name) for name in "ab"]
    place = NodeDisks(nodes[0], Nodes((0, 1)), cast(Requests, Answering(nodes[1:])))
    (generation,) = commit.survey(below).generations.values()
    how = copying.Copying(Arena(4 * CHUNK_BYTES, CHUNK_BYTES), Inline())
    for _ in range(2):
        copying.complete(place, [below], generation, how)
        assert {"r00000.manifest.json", layout.COMMIT} <= nodes[0].list(layout.folder(generation.id)).keys()
        here = nodes[1].list(layout.folder(generation.id))
        assert layout.COMMIT in here and "r00000.manifest.json" not in here
        (tmp_path / "a" / layout.folder(generation.id) / "r00000.manifest.json").write_bytes(b"damaged")
    held = {str(leader): parts for leader, parts in place.held(generation).items()}
    assert missing_copies(held, copies([Node("0"), Node("1")], 2), 2) == [("0", "1", 0)]


class Flaky:
    """Rebuilds a file by moving it back, once a node was down for so many attempts."""

    def __init__(self, aside: Path, file: Path, outages: int) -> None:
        self._aside, self._file, self._outages = aside, file, outages

    def rebuild(self, generation: Generation, stop: Stop) -> list[str]:
        self._outages -= 1
        if self._outages >= 0:
            raise errors.PeerDown("the memory of node b cannot be read")
        self._aside.rename(self._file)
        return [self._file.name]

    def end(self) -> None:
        """Nobody waits."""


class Full(Flaky):
    """Has no room for what it is to rebuild."""

    def rebuild(self, generation: Generation, stop: Stop) -> list[str]:
        raise errors.NoSpace("not enough memory on node b")


def test_a_rebuild_without_room_is_no_loss(tmp_path: Path) -> None:
    """A full memory, and a full disk below it, were reported as damage that nothing can repair."""
    run = RunWriter(disk(tmp_path / "run"), Inline())
    save(run, 1, {"w": b"x" * 100})
    (one,) = run.survey.generations.values()
    (tmp_path / "run" / layout.folder(one.id) / "r00000.safetensors").unlink()
    run.mender.nodes = Full(tmp_path, tmp_path, 0)
    with pytest.raises(errors.NoSpace, match="not enough memory on node b"):
        run.mender.mend(one.id, Arena(4 * CHUNK_BYTES, CHUNK_BYTES))


def without_newest_file(tmp_path: Path, environment: Environment) -> tuple[RunWriter, Path]:
    """A run with the steps 1 and 2, of which the latter has lost its file; also the path of that. A copy of the run
    from before is in `below`."""
    run = RunWriter(disk(tmp_path / "run"), Inline(), environment=environment)
    for step in (1, 2):
        save(run, step, {"w": b"x" * 100})
    shutil.copytree(tmp_path / "run", tmp_path / "below")
    newest = max(run.survey.generations.values(), key=lambda one: one.step)
    file = tmp_path / "run" / layout.folder(newest.id) / "r00000.safetensors"
    file.rename(tmp_path / "aside")
    lost = Finding(kind="MissingBlob", what="it lies on no node", layer="structure", blob="r00000.manifest.json")
    run.known.record(judged(newest, [lost]))
    return run, file


@pytest.mark.parametrize("below", [False, True], ids=["nowhere else", "also below"])
def test_a_node_without_room_makes_no_step_older(tmp_path: Path, below: bool) -> None:
    """The memory of a node was too full for what was to be rebuilt there. The job went on from an older step, and the
    newest one, of which nothing was lost, was given up."""
    events = list[Event]()
    environment = Environment(emit=events.append)
    run, file = without_newest_file(tmp_path, environment)
    run.mender.nodes = Full(tmp_path / "aside", file, 0)
    if below:
        run.known.below = [KnownRun(disk(tmp_path / "below"), environment)]
    with contextlib.nullcontext() if below else pytest.raises(errors.NoSpace):
        run.mender.mend_known(None, Arena(4 * CHUNK_BYTES, CHUNK_BYTES))
    assert [one.kind for one in events if one.kind == "not_repaired"] == ["not_repaired"] * below
    assert run.known.everywhere.generations[max(run.survey.generations)].restorable is below


@pytest.mark.parametrize("outages", [2, 3])
def test_a_node_that_cannot_be_read_makes_no_step_older(tmp_path: Path, outages: int) -> None:
    """The agent of a node was killed while what a lost node had was rebuilt. The job went on from an older step, and
    the newest one, of which nothing was lost, was given up."""
    pauses, events = list[float](), list[Event]()
    run, file = without_newest_file(tmp_path, Environment(pause=pauses.append, emit=events.append))
    run.mender.nodes = Flaky(tmp_path / "aside", file, outages)
    with pytest.raises(errors.PeerDown) if outages == 3 else contextlib.nullcontext():
        run.mender.mend_known(None, Arena(4 * CHUNK_BYTES, CHUNK_BYTES))
    assert pauses == [1.0, 5.0] and "not_repaired" not in [one.kind for one in events]
    assert [one.restorable for one in run.lineage()] == [outages == 2, True]

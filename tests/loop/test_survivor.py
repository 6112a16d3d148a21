"""The just-in-time save of a survivor: what it may save, what it refuses, and what a failure leaves.

Two ranks are played by one process: each has a page, and notes its steps; the second one has ended.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import lastgood
from lastgood.errors import NoSpace, Refused
from lastgood.format import commit
from lastgood.io import heartbeat, rank_notes
from lastgood.io.machine import NODE
from lastgood.loop.beat import Beat
from lastgood.loop.just_in_time import JustInTime, Seat, _ended_processes
from lastgood.loop.options import Options, Ranks
from lastgood.records import GenerationId, Incarnation
from lastgood.run import access, memory_place, paths
from lastgood.run.known import Environment
from lastgood.run.survivor_save import HeldWriter, Origin
from lastgood.run.writer import RunWriter
from lastgood.supervisor.survivors import Left, committed, left_by
from lastgood_lab.plain import save

CLOSED = RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:4242")


@dataclass
class Job:
    """A job of two ranks with equal parameters, each with a batch norm of its own."""

    folder: Path
    tiers: Sequence[lastgood.Tier] = ()
    path: str = ""
    states: list[dict[str, Any]] = field(default_factory=list)
    ranks: list[JustInTime] = field(default_factory=list)
    pages: list[Path] = field(default_factory=list)

    def __post_init__(self) -> None:
        for rank in range(2):
            torch.manual_seed(0)
            model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            page = self.folder / str(rank)
            heartbeat.create(str(page))
            self.pages.append(page)
            self.states.append({"model": model, "optimizer": optimizer, "rank": rank})
            self.ranks.append(self._rank(rank, page))
            model(torch.ones(4, 3) * torch.arange(4).reshape(4, 1) * (rank + 1))
        self.train()

    def _rank(self, rank: int, page: Path) -> JustInTime:
        known = SimpleNamespace(incarnation=None, environment=Environment())
        pipeline: Any = SimpleNamespace(releasing=None, run=SimpleNamespace(known=known))
        planner: Any = SimpleNamespace(must_be_finite=lambda *_: frozenset())
        group: Any = SimpleNamespace(rank=rank, size=2, name="job/0")
        progress: Any = None
        beat = Beat(heartbeat.Heartbeat(str(page)), progress)
        options = Options(ranks=Ranks(just_in_time_seconds=20), tiers=self.tiers)
        seat = Seat(str(page), 0, True)
        return JustInTime(self.states[rank], self.run, seat, options, pipeline, planner, group, beat)

    @property
    def run(self) -> str:
        return self.path or str(self.folder / "run")

    def train(self, ranks: Sequence[int] = (0, 1)) -> None:
        """The same update on each of these ranks."""
        for rank in ranks:
            for one in self.states[rank]["model"].parameters():
                one.grad = torch.ones_like(one)
            self.states[rank]["optimizer"].step()

    def note(self, step: int, ranks: Sequence[int] = (0, 1)) -> None:
        for rank in ranks:
            self.ranks[rank].note(step)

    def open_again(self) -> None:
        """Another opening of the run, which saves nothing."""
        with access.for_writing(self.run, "atomic_dirsync") as tier, ThreadPoolExecutor(1) as workers:
            RunWriter(tier, workers)

    @property
    def left(self) -> Left:
        """What the ranks have left, as their supervisor reads it."""
        return left_by([cast(Any, SimpleNamespace(rank=rank, page=page)) for rank, page in enumerate(self.pages)])

    def saved(self) -> bool:
        """Rank 0 has survived the other one: whether a step is saved then."""
        return self.ranks[0].save() and committed(self.left, 2, self.run) is not None


@pytest.fixture
def job(tmp_path: Path) -> Job:
    made = Job(tmp_path)
    made.open_again()
    return made


def test_buffers_values_and_random_numbers_are_those_of_the_boundary(job: Job) -> None:
    """Forward of the next step has changed a batch norm and drawn random numbers by the time the rank's death shows."""
    job.note(7)
    mean, drawn = job.states[1]["model"][1].running_mean.clone(), torch.get_rng_state()
    for state in job.states:
        state["model"](torch.randn(4, 3))
        state["rank"] = "changed"
    assert job.saved() and heartbeat.read(str(job.pages[0])).written is not None
    for rank in range(2):
        manifest = commit.read_manifest(access.for_reading(job.run), newest(job.run), rank)
        assert manifest.values["rank"] == rank
    found = lastgood.load(job.run)
    assert found.restored.step == 7 and torch.equal(found["rng"]["torch"], drawn)
    own = [one for one in manifest.pieces if one.own]
    assert {"model.1.running_mean", "rng.torch"} <= {one.name for one in own}
    data = (Path(job.run) / "gen").glob(f"*/{own[0].extent.blob}")
    assert mean.numpy().tobytes() in next(data).read_bytes()


def newest(run: str) -> Any:
    return max(commit.survey(access.for_reading(run)).generations.values(), key=lambda one: one.step)


@pytest.mark.parametrize("how", ["optimizer", "data", "replaced"])
def test_a_state_that_an_update_has_changed_is_not_saved(job: Job, how: str, caplog: pytest.LogCaptureFixture) -> None:
    job.note(7)
    parameter = job.states[0]["model"][0].weight
    if how == "optimizer":
        job.train([0])
    elif how == "data":  # unseen by version counters
        parameter.data.numpy()[:] += 1
    else:
        parameter.data = parameter.data + 1
    saved = job.saved()
    if how == "replaced":  # the memory of the boundary is still there, and is what is saved
        assert saved and not torch.equal(lastgood.load(job.run)["model"]["0.weight"], parameter)
    else:
        assert (
            not saved and "model.0.weight" in caplog.text and not commit.survey(access.for_reading(job.run)).generations
        )


def test_ranks_that_hold_different_parameters_are_not_saved(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.train([1])
    job.note(7)
    assert not job.saved() and "ranks 0 and 1 are no replicas" in caplog.text


def test_a_failed_write_leaves_the_generations_that_exist(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    lastgood.save(job.run, {"x": torch.ones(2)}, step=5)
    before, generation = sorted(Path(job.run).rglob("*")), newest(job.run)
    incarnation = generation.commit.incarnation
    job.ranks[0]._pipeline.run.known.incarnation = Incarnation(format=1, order=1, id=incarnation, parent=None)
    job.note(7)
    seal = commit.seal

    def full(tier: Any, manifest: Any) -> Any:
        if manifest.rank == 1:
            raise NoSpace("the disk is full")
        return seal(tier, manifest)

    monkeypatch.setattr(commit, "seal", full)
    assert not job.saved() and sorted(Path(job.run).rglob("*")) == before
    monkeypatch.undo()
    assert job.saved() and newest(job.run).commit.continues == generation.id
    files = sorted(Path(job.run).rglob("*"))
    assert committed(job.left, 2, job.run) == 7 and sorted(Path(job.run).rglob("*")) == files


def test_what_another_opening_has_removed_is_not_committed(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """A supervisor was stopped meanwhile, and the job was started again."""
    job.note(7)
    assert job.ranks[0].save()
    left = job.left
    job.open_again()
    assert committed(left, 2, job.run) is None and "was removed before it was committed" in caplog.text
    lastgood.save(job.run, {"x": torch.ones(2)}, step=2)
    assert committed(left, 2, job.run) is None and newest(job.run).step == 2


def test_a_step_that_the_attempt_has_saved_itself_is_not_saved_again(job: Job) -> None:
    """The save of the step was in flight when a rank died, and was committed after all."""
    lastgood.save(job.run, {"x": torch.ones(2)}, step=7)
    incarnation = newest(job.run).commit.incarnation
    job.ranks[0]._pipeline.run.known.incarnation = Incarnation(format=1, order=1, id=incarnation, parent=None)
    job.note(7)
    assert job.ranks[0].save()
    generations = commit.survey(access.for_reading(job.run)).generations
    assert committed(job.left, 2, job.run) is None
    assert commit.survey(access.for_reading(job.run)).generations == generations


def test_what_the_first_place_holds_is_not_saved_again_below(tmp_path: Path) -> None:
    """The attempt has saved step 7 on the disk of the node, from which it was not copied yet."""
    first = str(tmp_path / "first")
    job = Job(tmp_path, [lastgood.Tier(first, shared=False)])
    job.open_again()
    lastgood.save(first, {"x": torch.ones(2)}, step=7)
    incarnation = newest(first).commit.incarnation
    job.ranks[0]._pipeline.run.known.incarnation = Incarnation(format=1, order=4, id=incarnation, parent=None)
    job.note(7)
    assert not job.saved()
    job.train()
    job.note(8)
    assert job.saved()
    made = newest(job.run)
    assert made.step == 8 and made.commit.continues == newest(first).id, "it continues what only the first place has"
    assert made.commit.order > 4, "the attempt's order: the run below has seen none of its generations"


def test_it_continues_what_only_a_bucket_has(tmp_path: Path, bucket: str) -> None:
    """The first directory was new; the attempt, restored from the bucket, had saved nothing yet: no save was made."""
    first = str(tmp_path / "first")
    job = Job(tmp_path, [lastgood.Tier(first)], path=bucket)
    with access.for_writing(first, "atomic_dirsync") as tier, ThreadPoolExecutor(1) as workers:
        RunWriter(tier, workers)
    lastgood.save(bucket, {"x": torch.ones(2)}, step=3)
    parent = newest(bucket).id
    job.ranks[0]._pipeline.run.known.incarnation = Incarnation(format=1, order=4, id="0000aaaa", parent=parent)
    job.note(7)
    assert job.saved() and newest(first).step == 7 and newest(first).commit.continues == parent


def test_it_continues_what_the_memory_of_the_committing_node_has(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The survivor was on another node than the supervisor, which looked into the memory of that node, found nothing,
    and committed a save that continued none."""
    monkeypatch.setenv(NODE, "b")
    job = Job(tmp_path, [lastgood.Tier("memory://")])
    job.open_again()
    monkeypatch.setenv(NODE, "a")
    own = memory_place.url_of(job.run)
    memory_place.make(paths.parsed(own).root)
    with access.for_writing(own, "atomic_dirsync") as tier, ThreadPoolExecutor(1) as workers:
        save(RunWriter(tier, workers), 5, {"x": b"x" * 100})
    parent = newest(own).id
    incarnation = Incarnation(format=1, order=4, id=parent.incarnation, parent=None)
    job.ranks[0]._pipeline.run.known.incarnation = incarnation
    job.note(7)
    assert job.saved() and newest(job.run).commit.continues == parent


def test_notes_that_are_lost_with_their_node_are_the_reason(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.note(7)
    assert job.ranks[0].save()
    left = Left({0: job.left.notes[0]}, job.left.written)
    assert committed(left, 2, job.run, "node 1 (b): no sign of life for 10 s") is None
    assert "rank 1 did not complete step 7, or what was noted there is lost (node 1 (b)" in caplog.text


def test_of_two_survivors_the_first_one_writes_what_both_hold(job: Job) -> None:
    job.note(7)
    assert job.ranks[1].save() and job.ranks[0].save() and len(job.left.written) == 1
    assert committed(job.left, 2, job.run) == 7
    assert torch.equal(lastgood.load(job.run)["model"]["0.weight"], job.states[0]["model"][0].weight)


def test_nothing_is_saved_while_no_other_rank_has_ended(job: Job) -> None:
    job.note(7)
    assert not job.ranks[0].wanted(CLOSED)
    heartbeat.Heartbeat(str(job.pages[1])).failed()
    assert job.ranks[0].wanted(CLOSED) and not job.ranks[0].wanted(KeyboardInterrupt())
    assert not job.ranks[0].wanted(lastgood.errors.TrainingDiverged("loss nan"))
    job.ranks[0].restart()
    assert not job.ranks[0].wanted(CLOSED), "the state is being replaced"


def test_an_exception_of_the_program_itself_saves_nothing(job: Job) -> None:
    """All ranks had raised the same one, and none was dead: a state was saved for which nobody had asked."""
    job.note(7)
    heartbeat.Heartbeat(str(job.pages[1])).failed()
    assert not job.ranks[0].wanted(ValueError("the loss has exploded"))
    wrapped = RuntimeError("step 8 has failed")
    wrapped.__cause__ = CLOSED
    assert job.ranks[0].wanted(wrapped)


def test_a_changed_state_leaves_saves_in_flight_their_time(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """They were cancelled after half a second, and nothing was saved in their place."""
    job.note(7)
    job.train()
    heartbeat.Heartbeat(str(job.pages[1])).failed()
    assert not job.ranks[0].wanted(CLOSED) and "changed after step 7" in caplog.text


def test_another_tensor_in_the_same_memory_is_watched_anew(job: Job) -> None:
    """It counts its versions apart: a change of a row that no sample meets was saved as the state of the step."""
    for state in job.states:
        state["model"] = torch.nn.Embedding(1000, 16)
        torch.nn.init.zeros_(state["model"].weight)
        state["optimizer"] = torch.optim.SGD(state["model"].parameters(), lr=0.1)
    job.note(8)
    for state in job.states:
        state["model"].weight = torch.nn.Parameter(state["model"].weight.data)
        state["optimizer"].param_groups[0]["params"] = [state["model"].weight]
    job.note(9)
    with torch.no_grad():
        job.states[0]["model"].weight[9] += 1
    assert not job.saved()


def test_a_change_during_the_copy_saves_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.note(7)
    write = HeldWriter.write

    def changing(self: HeldWriter, *arguments: Any) -> Any:
        job.train([0])
        return write(self, *arguments)

    monkeypatch.setattr(HeldWriter, "write", changing)
    assert not job.saved()


def test_what_an_earlier_opening_or_another_version_has_left_is_ignored(job: Job) -> None:
    job.note(7)
    assert job.ranks[0].save()
    for rank, page in enumerate(job.pages):
        job.ranks[rank] = job._rank(rank, page)
    assert not job.left.notes and not job.left.written
    job.note(8)
    rank_notes.RankNotes(str(job.pages[1])).write(b"of another version")
    heartbeat.Heartbeat(str(job.pages[1])).failed()
    assert job.ranks[0].wanted(CLOSED) and not job.saved()


def test_a_directory_that_is_not_seen_is_not_made_anew(job: Job) -> None:
    job.note(7)
    assert job.ranks[0].save()
    shutil.rmtree(job.run)
    assert committed(job.left, 2, job.run) is None and not Path(job.run).exists()


def test_a_process_that_has_ended_is_seen_before_it_is_reaped() -> None:
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert _ended_processes({3: process.pid, 4: os.getpid()}) == {3}
    assert _ended_processes({3: process.pid}) == {3}


def test_too_much_beside_the_parameters_ends_the_notes(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.note(7)
    assert heartbeat.read(str(job.pages[0])).just_in_time_seconds == 20
    job.states[0]["big"] = torch.zeros(5 << 20)
    job.note(8, [0])
    shown = caplog.text
    assert "rank 0 makes no just-in-time saves" in shown and "big first" in shown
    assert heartbeat.read(str(job.pages[0])).just_in_time_seconds == 0
    assert not job.ranks[0].wanted(CLOSED) and not job.left.notes.get(0), "what it has noted does not take memory"


def test_long_lists_of_numbers_end_the_notes_too(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    job.states[0]["losses"] = [0.1234567] * (2 << 20)
    job.note(7, [0])
    assert "numbers and texts first" in caplog.text


def test_shards_are_refused_because_no_other_rank_has_them(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = torch.nn.Module()
        model.w = torch.nn.Parameter(distribute_tensor(torch.ones(4), mesh, [Shard(0)]))
        job.states[0] |= {"sharded": model, "its": torch.optim.SGD(model.parameters())}
        job.note(7)
        assert "sharded.w is sharded: what a dead rank held" in caplog.text and not job.ranks[0].wanted(CLOSED)
    finally:
        torch.distributed.destroy_process_group()


def test_a_torn_note_is_not_read_and_the_one_before_it_is(tmp_path: Path) -> None:
    notes = rank_notes.RankNotes(str(tmp_path / "0"))
    for data in (b"one" * 100, b"two", b"three"):
        notes.write(data)
    assert set(rank_notes.read(str(tmp_path / "0"))) == {b"two", b"three"}
    with open(tmp_path / "0.note-0", "r+b") as file:
        file.truncate(18)
    assert list(rank_notes.read(str(tmp_path / "0"))) == [b"two"]


def generation(step: int, incarnation: str, order: int) -> Any:
    commit_record = SimpleNamespace(order=order)
    return SimpleNamespace(step=step, id=GenerationId(step=step, incarnation=incarnation), commit=commit_record)


@pytest.mark.parametrize(
    ("generations", "superseded", "parent"),
    [
        ([], False, "older@3"),
        ([generation(9, "older", 1)], False, "older@3"),  # abandoned by a rewind to step 3
        ([generation(5, "mine", 2)], False, "mine@5"),
        ([generation(7, "mine", 2)], True, None),
        ([generation(5, "mine", 2), generation(7, "later", 3)], True, None),  # another survivor was faster
    ],
)
def test_the_save_continues_what_its_attempt_has_saved(
    generations: list[Any], superseded: bool, parent: str | None
) -> None:
    before = GenerationId(step=3, incarnation="older")
    origin = Origin(step=7, incarnation=Incarnation(format=1, order=2, id="mine", parent=before))
    assert origin.is_superseded(generations) is superseded
    if parent is not None:
        found = origin.parent(generations)
        assert found is not None and f"{found.incarnation}@{found.step}" == parent


@pytest.mark.parametrize(
    ("path", "tiers", "reason"),
    [
        ("slots:///nowhere/run", [], "no directory"),
        ("s3://bucket/run", [], "no directory"),
        ("s3://bucket/run", [lastgood.Tier("/nowhere/nvme", shared=False)], "no directory"),
        ("/nowhere/run", [lastgood.Tier("slots:///nowhere/nvme")], "for a run in slots"),
    ],
)
def test_it_is_refused_where_a_survivor_could_not_save(path: str, tiers: list[lastgood.Tier], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        lastgood.Checkpointer(path, {"x": torch.ones(1)}, just_in_time_seconds=20, tiers=tiers)


def test_it_is_refused_with_options_that_contradict_it() -> None:
    with pytest.raises(Refused, match="torn_check"):
        lastgood.Checkpointer("/nowhere/run", {}, just_in_time_seconds=20, torn_check="full")
    with pytest.raises(Refused, match="just_in_time_seconds=0"):
        lastgood.Ranks(just_in_time_seconds=0)

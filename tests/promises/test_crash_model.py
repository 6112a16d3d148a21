"""Promises 1 to 3 in every crash state: a part of the crash model, and the bugs that it has found.

`python -m lastgood_lab.campaigns.crash_model` runs the same model for hours.
"""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial

import pytest

from lastgood.engine.inline_executor import Inline
from lastgood.errors import StepTaken
from lastgood.format import commit, layout
from lastgood.format.commit import survey
from lastgood.policy.retention import Keep
from lastgood.run import copying
from lastgood.run.agent_work import AgentWork
from lastgood.storage.directory import Disk
from lastgood_lab import crashmodel
from lastgood_lab.crashmodel import World
from lastgood_lab.hostile import ROOT, HostileDisk, Inode
from lastgood_lab.judge import Judge
from lastgood_lab.ledger import Ledger, Violation
from lastgood_lab.place_scenarios import copies_and_retention, damaged_copies
from lastgood_lab.plain import load, share
from lastgood_lab.scenarios import SCENARIOS, Scenario, play, rewind_in_place, saves_and_retention

pytestmark = pytest.mark.slow

INLINE = Inline()


# ---- the promises --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["atomic_nodirsync", "unsafe"])
def test_weaker_modes_lose_acknowledged_saves_but_never_load_wrong_values(mode):
    judge = Judge(random.Random(0))
    for life in (saves_and_retention, rewind_in_place):
        play(Scenario(life), judge, mode)
    assert judge.lost > 0


def begun(links: bool = True, verified: bool = True) -> World:
    """A run that keeps one generation: step 1, verified or not, and step 2 after it. Only kills are modelled."""
    world = World(HostileDisk(links=links), Ledger(keep=Keep(last=1)), Judge(random.Random(0), samples=0, carry_on=0))
    world.open()
    world.save(1)
    if verified:
        world.upkeep()
    world.save(2)
    return world


class Killed(BaseException):
    """Raised in place of SIGKILL."""


def killed_after(world: World, call: str, name: str, do: Callable[[], object]) -> World:
    """The world that the next process finds when this process dies right after a call of this kind on a path with
    this suffix."""
    reached: list[str] = []

    def watch(operation: str, path: str) -> None:
        if reached:
            raise Killed
        world._watch(operation, path)
        if operation == call and path.endswith(name):
            reached.append(path)

    world.disk.watch = watch
    with pytest.raises(Killed):
        do()
    return World(world.disk.copied(), world.ledger.copied(), world.judge)


def disk_with_synced_data_only(world: World) -> HostileDisk:
    return world.disk.crashed(lambda kind, ways: ways - 1)


def steps_on(disk: HostileDisk) -> list[int]:
    return [at.step for at in map(layout.parse_folder, sorted(disk.root.names["gen"].names)) if at]


@pytest.mark.parametrize(("links", "call"), [(True, "link"), (False, "sync")])
def test_a_commit_of_a_killed_process_is_durable_before_it_is_continued(links, call):
    """A process died between the link of COMMIT and the sync of its folder. The next process could see the
    generation, continued it and named it as its parent; then the power failed, and a generation was lost for ever."""
    world = killed_after(before := begun(links), call, layout.COMMIT, lambda: before.save(3))
    world.start()
    found, _ = load(world.tier, workers=INLINE)
    assert found.generation and found.generation.step == 3
    world.begin(found.generation.id)
    after, _ = load(Disk(disk_with_synced_data_only(world), ROOT), workers=INLINE)
    assert after == found


@pytest.mark.parametrize("verified", [True, False])  # otherwise the mark is deleted first, which does no harm
def test_an_interrupted_deletion_resumes_after_the_commit_is_deleted(verified):
    """A process died between the removal of COMMIT and the sync of its folder. The next process found no COMMIT and
    removed the tensors; then the power failed, and COMMIT was back without its files, with its mark of verification."""
    before = begun(verified=verified)
    before.run.verify(before.arena)
    before._note_verified()
    world = killed_after(before, "remove", f"1-00000002/{layout.COMMIT}", before.run.clean)
    world.judge = Judge(random.Random(0), samples=64, carry_on=0)
    world.start()
    assert steps_on(world.disk) == [2]


def test_without_hard_links_an_interrupted_deletion_is_repeated():
    """GOING was created in place, and the process died before its bytes were written. Every later deletion found the
    name taken by other bytes and was refused; the disk filled up."""
    before = begun(links=False)
    before.run.verify(before.arena)
    before._note_verified()
    world = killed_after(before, "open", layout.GOING, before.run.clean)
    world.open()
    world.steps(3)
    assert steps_on(world.disk) == [3]


def test_the_empty_folder_of_a_deleted_generation_is_not_a_loss():
    """A process died between the removal of the last file and the removal of the folder. A later generation named
    this one as its parent, so its empty folder was reported as a lost COMMIT at every restore, and stayed."""
    before = begun()
    before.run.verify(before.arena)
    before._note_verified()
    world = killed_after(before, "remove", f"1-00000002/{layout.GOING}", before.run.clean)
    assert load(world.tier, workers=INLINE)[0].stepped_over == []
    world.start()
    assert steps_on(world.disk) == [2]


class Job(Future):
    """A job in a thread of its own, which continues by one disk call at a time."""

    def __init__(self, jobs: InTurns, do: Callable[[], object]) -> None:
        super().__init__()
        self._jobs, self._do = jobs, do
        self._going, self._resting = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)  # a test that fails does not wait for it
        self.thread.start()

    def _run(self) -> None:
        self._going.wait()
        try:
            self.set_result(self._do())
        except BaseException as error:
            self.set_exception(error)
        self._resting.set()

    def wait_for_turn(self) -> None:
        self._going.clear()
        self._resting.set()
        self._going.wait()

    def go_on(self) -> None:
        self._resting.clear()
        self._going.set()
        self._resting.wait()

    def result(self, timeout: float | None = None) -> object:
        while not self.done():
            self._jobs.one_round()
        return super().result(timeout)


class InTurns(Executor):
    """Runs its jobs concurrently and in a deterministic order: while a result is waited for, each job makes one disk
    call in turn."""

    def __init__(self, disk: HostileDisk) -> None:
        self._jobs: list[Job] = []
        self.most, watch = 0, disk.watch

        def wait_after(call: str, path: str) -> None:
            watch(call, path)
            for job in self._jobs:
                if job.thread is threading.current_thread():
                    job.wait_for_turn()

        disk.watch = wait_after

    def submit(self, fn: Callable[..., object], /, *args: object) -> Job:
        self._jobs.append(job := Job(self, partial(fn, *args)))
        return job

    def one_round(self) -> None:
        self._jobs = [one for one in self._jobs if not one.done()]
        self.most = max(self.most, len(self._jobs))
        for one in list(self._jobs):
            one.go_on()


def test_concurrent_deletions_leave_no_partial_generation():
    """Each deletion waited for the disk separately: 400 of them took 22 s."""
    judge = Judge(random.Random(0), samples=8)
    world = World(HostileDisk(), Ledger(keep=Keep(last=6)), judge)
    world.open()
    world.steps(1, 2, 3, 4, 5, 6)
    world.ledger.keep, before = Keep(last=1), len(judge.states)
    world.open()
    world.run.retirement._workers = jobs = InTurns(world.disk)
    world.run.clean()
    assert jobs.most == 3 and len(judge.states) - before > 100
    assert steps_on(world.disk) == [6]


@pytest.mark.parametrize(("links", "call"), [(True, "link"), (False, "sync")])
def test_a_label_of_a_killed_process_is_durable_after_the_next_opening(links, call):
    """A process died between the link of a label and the sync of its folder. The next process read the label and
    reported the same milestone as durable without writing it; then the power failed, and the milestone was lost."""
    before = begun(links)
    world = killed_after(before, call, layout.label_name(1), lambda: before.label(1, 0.5, milestone=True))
    world.start()
    assert world.label(1, 0.5, milestone=True)
    generations = survey(Disk(disk_with_synced_data_only(world), ROOT)).generations
    assert {at.step: one.commit.milestone for at, one in generations.items()} == {1: True, 2: False}


@pytest.mark.parametrize("name", [layout.blob_name(0), layout.manifest_name(0), layout.COMMIT])
def test_verification_reads_the_medium_and_not_the_page_cache(name):
    """Tensors were read past the page cache, but the manifest through it, and COMMIT not at all; a generation with a
    bit flipped in one of those was marked as verified, and retention deleted the generation before it."""
    world = begun()
    world.rot(2, name, 60)
    world.upkeep()
    assert world.run.known.newest_verified().step == 1
    assert steps_on(world.disk) == [1, 2]


def test_a_save_of_unknown_outcome_is_neither_repeated_nor_deleted():
    world = begun()

    def watch(call: str, path: str) -> None:
        if call == "link" and path.endswith(layout.COMMIT):
            world.fault(0, errno.EIO)

    world.disk.watch = watch
    assert not world.save(3)
    with pytest.raises(StepTaken):
        world.run.admit(3)
    assert not world.disk.root.names["gen"].names["000000000003-00000002"].names.keys() & {layout.COMMIT}
    crashed = world.disk.crashed(lambda kind, ways: ways - 1 if kind == "data" else 0)
    assert load(Disk(crashed, ROOT), workers=INLINE)[0].generation.step == 2
    crashed.root.names["gen"].names["000000000003-00000002"].put(layout.COMMIT, _staged(crashed, 3))
    found, state = load(Disk(crashed, ROOT), workers=INLINE)
    assert found.generation.step == 3 and state == world.ledger.given[found.generation.id]


def _staged(disk: HostileDisk, step: int) -> Inode:
    names = disk.root.names["gen"].names[f"{step:012d}-00000002"].names
    return next(node for name, node in names.items() if name.startswith(f"{layout.COMMIT}."))


# ---- the model of the disk -----------------------------------------------------------------------------------------


def test_the_simulated_disk_keeps_exactly_what_was_synced():
    disk = HostileDisk()
    for name in ("both", "content", "name", "none"):
        file = disk.open(f"{ROOT}/{name}", "new")
        file.write_at(memoryview(name.encode()), 0)
        if name in ("both", "content"):
            file.sync()
        if name == "both":
            disk.sync_dir(ROOT)
    disk.root.was.pop("name")
    contents: dict[str, set[bytes | None]] = {name: set() for name in ("both", "content", "name", "none")}
    for state in disk.crashes(random.Random(0), 4000):
        for name, found in contents.items():
            node = state.root.names.get(name)
            found.add(None if node is None else bytes(node.data))
    assert contents["both"] == {b"both"}
    assert contents["content"] == {b"content", None}
    assert {b"", b"name", bytes(4)} <= contents["name"] and None not in contents["name"]
    assert {None, b"", b"none"} <= contents["none"]


def test_the_model_finds_a_rank_whose_file_names_are_not_durable(monkeypatch):
    """Each rank makes its own part durable before it seals; rank 0 cannot make up for a rank that does not."""

    def weak(tier, *arguments, **options):
        return share(Disk(tier._files, ROOT, mode="atomic_nodirsync"), *arguments, **options)

    monkeypatch.setattr(crashmodel, "share", weak)
    with pytest.raises(Violation, match=r"has a COMMIT, and its r0000[12]"):
        play(Scenario(saves_and_retention, ranks=3), Judge(random.Random(0)))


def test_the_model_finds_a_copy_that_is_not_read_back(monkeypatch):
    monkeypatch.setattr(AgentWork, "read_all", lambda *arguments, **options: [])
    with pytest.raises(Violation, match="is damaged, but marked as verified"):
        play(Scenario(damaged_copies, places=2), Judge(random.Random(0), samples=4, carry_on=0))


def test_the_model_finds_a_copy_that_is_committed_before_its_files(monkeypatch):
    def records_first(target, sources, generation, of, how):
        commit.copy_records(sources, target, generation)
        return copy_files(target, sources, generation, of, how)

    copy_files = copying.copy_files
    monkeypatch.setattr(copying, "copy_files", records_first)
    with pytest.raises(Violation, match=r"has a COMMIT, and its r00000\.safetensors is missing"):
        play(Scenario(copies_and_retention, places=2), Judge(random.Random(0), samples=4, carry_on=0))


# ---- all scenarios ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.name)
def test_promises_1_to_3_hold_in_every_crash_state(scenario):
    # The states of slots, of several ranks or of two places take long to judge; the campaign plays all of them.
    slow = scenario.in_flight or scenario.ranks > 1 or scenario.places > 1
    judge = Judge(random.Random(f"{scenario.name} 0"), samples=4 if slow else 16)
    if scenario.places > 1:
        judge.samples, judge.carry_on = 2, 0.003
    play(scenario, judge)
    assert len(judge.states) > 100

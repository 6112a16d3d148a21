"""A save in memory that every rank had sealed when the job was lost is committed by the next opening."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from harness import reported
from histories import at, generation
from lastgood.agent.drain import uncommitted
from lastgood.agent.late_copies import given_up
from lastgood.coordination.single_rank import SingleTopic
from lastgood.engine.inline_executor import Inline
from lastgood.errors import CommitUnknown, LastgoodError, NoSpace, PeerDown, RunLocked, TierDown
from lastgood.format import commit, layout
from lastgood.format.commit import Survey
from lastgood.format.intents import seals_of
from lastgood.io.files import PosixFiles
from lastgood.policy.restore import under_way
from lastgood.ports import Tier
from lastgood.records import Commit, Generation, GenerationId, Incarnation, Seal
from lastgood.run import access, memory_place, paths
from lastgood.run.late_commit import commit_unless_held
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood_lab.plain import load, save


class Lost(BaseException):
    """Stands for the end of a process: nothing that a save does after an error happens."""


class Run:
    """A run in memory, one writer after another."""

    def __init__(self, home: Path) -> None:
        self.folder = Path(memory_place.folder_of(home))
        memory_place.make(str(self.folder))

    @contextlib.contextmanager
    def opened(self, parent: GenerationId | None = None) -> Iterator[RunWriter]:
        with access.for_writing(f"{paths.MEMORY}{self.folder}", "atomic_dirsync") as tier:
            run = RunWriter(tier, Inline())
            run.begin(parent)
            yield run

    def sealed(self, monkeypatch: pytest.MonkeyPatch, *steps: int, parent: GenerationId | None = None) -> GenerationId:
        """Save these steps; the process ends just before the COMMIT of the last one, of which this is the id."""
        with self.opened(parent) as run:
            for step in steps[:-1]:
                save(run, step, {"w": bytes([step]) * 100})
            with monkeypatch.context() as patch, pytest.raises(Lost):
                patch.setattr(commit, "publish", _lost)
                patch.setattr(run, "withdraw", lambda at: None)
                patch.setattr(run, "clear", lambda at: None)
                save(run, steps[-1], {"w": bytes([steps[-1]]) * 100})
            return run.admit(steps[-1])

    def loaded(self) -> tuple[int, bytes]:
        found, state = load(access.for_reading(f"{paths.MEMORY}{self.folder}"))
        return found.generation.step, state["w"]


def at_of(folder: Path) -> GenerationId:
    at = layout.parse_folder(folder.name)
    assert at is not None
    return at


def _lost(*arguments: object) -> None:
    raise Lost


def _full(*arguments: object) -> None:
    raise NoSpace("no space left", safe="", todo="")


@pytest.fixture
def run(tmp_path: Path, memory: Path) -> Run:
    return Run(tmp_path / "home")


@pytest.mark.parametrize("steps", [(7,), (5, 7)], ids=["the first save", "a later save"])
def test_a_sealed_save_is_committed_by_the_next_opening(run: Run, monkeypatch, steps: tuple[int, ...]) -> None:
    run.sealed(monkeypatch, *steps)
    with reported("step 7 had been saved by all ranks when the job was lost", logging.INFO), run.opened():
        pass
    assert run.loaded() == (7, bytes([7]) * 100)
    with run.opened() as again:
        newest, *older = sorted(again.survey.generations.values(), key=lambda one: -one.step)
        assert [one.step for one in older] == [*steps[:-1]]
        assert newest.commit.parent == (older[0].id if older else None)


def test_a_late_commit_of_unknown_outcome_is_not_deleted(run: Run, monkeypatch) -> None:
    """The opening said that nothing was deleted, and then removed the folder, COMMIT included: found by schedules with
    several saves in flight."""
    run.sealed(monkeypatch, 5, 7)
    publish = commit.publish

    def unsure(*arguments: Any) -> None:
        publish(*arguments)
        raise CommitUnknown("COMMIT may exist", safe="Nothing was deleted.", todo="")

    with monkeypatch.context() as patch:
        patch.setattr(commit, "publish", unsure)
        with reported("whether it is committed now is not known"), run.opened():
            pass
    assert run.loaded()[0] == 7


def test_agents_see_a_sealed_save_of_the_branch_after_a_rewind(run: Run, monkeypatch) -> None:
    """Its step is lower than the newest that was committed before the rewind. Agents neither committed it below nor
    named it when they removed the memory."""
    with run.opened() as writer:
        first = save(writer, 50, {"w": b"first"})
        save(writer, 100, {"w": b"left behind"})
    folder = layout.folder(run.sealed(monkeypatch, 60, 70, parent=first.id))
    memory = access.for_reading(f"{paths.MEMORY}{run.folder}")
    assert uncommitted(memory) == [folder.partition("/")[2]] == given_up(memory, [])
    (run.folder / folder / layout.INTENT).unlink()  # as on the nodes other than that of the coordinator
    assert uncommitted(memory) == [folder.partition("/")[2]]


def test_a_save_of_which_a_file_is_missing_is_removed(run: Run, monkeypatch) -> None:
    folder = run.folder / layout.folder(run.sealed(monkeypatch, 5, 7))
    (folder / layout.blob_name(0)).unlink()
    with run.opened():
        assert not folder.exists()
    assert run.loaded()[0] == 5


def test_the_intent_of_another_folder_commits_nothing(run: Run, monkeypatch) -> None:
    folder = run.folder / layout.folder(run.sealed(monkeypatch, 7))
    record = layout.decode((folder / layout.INTENT).read_bytes(), Commit, layout.INTENT)
    (folder / layout.INTENT).write_bytes(layout.encode(msgspec.structs.replace(record, step=8)))
    with run.opened():
        assert not [*run.folder.glob("gen/*")]


def test_a_rewind_leaves_an_unknown_commit_behind(run: Run, monkeypatch) -> None:
    """Step 50 was of unknown outcome, the run went back to 10, and its next save was not committed in time. Step 50
    came back, because it was the highest."""
    older = run.folder / layout.folder(run.sealed(monkeypatch, 10, 50))
    older.rename(run.folder / older.name)
    run.sealed(monkeypatch, 11)
    (run.folder / older.name).rename(older)
    with run.opened():
        pass
    assert run.loaded()[0] == 11


def test_memory_that_is_full_is_opened_all_the_same(run: Run, monkeypatch) -> None:
    """There was no room for the COMMIT, and no new job could be started."""
    folder = run.folder / layout.folder(run.sealed(monkeypatch, 5, 7))

    with monkeypatch.context() as patch:
        patch.setattr(commit, "publish", _full)
        with reported("step 7 had been saved by all ranks .* given up: no space left"), run.opened():
            pass
    assert not folder.exists() and run.loaded()[0] == 5


class Refused(SingleTopic):
    """Notes which intents there are when a decision has failed, as other ranks learn of it then."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.found = folder, list[Path]()

    def agree(self, mine: Any, decide: Callable[[list[Any]], Any]) -> Any:
        try:
            return decide([mine])
        except BaseException:
            self.found += self.folder.glob(f"gen/*/{layout.INTENT}")
            raise


def test_the_intent_goes_before_ranks_learn_that_the_commit_failed(run: Run, monkeypatch) -> None:
    topic = Refused(run.folder)
    with run.opened() as writer:
        monkeypatch.setattr(commit, "publish", _lost)
        with pytest.raises(Lost):
            save(writer, 7, {"w": b"x"}, topic=topic)
    assert not topic.found


def test_a_step_that_is_saved_again_is_not_committed_late(run: Run, monkeypatch) -> None:
    """A rank that was late sealed its part of the first attempt after that had failed. The second one found the name
    taken; then its files and those of the first one were committed together."""
    seen: list[Path] = []

    def refused(*arguments: object) -> None:
        seen.extend(run.folder.glob(f"gen/*/{layout.INTENT}"))
        raise TierDown("no answer", safe="", todo="")

    with run.opened() as writer:
        monkeypatch.setattr(commit, "publish", refused)
        for first in (True, False):
            with pytest.raises(TierDown):
                save(writer, 7, {"w": b"x"})
            assert len(seen) == 1, "the intent of the first attempt" if first else "none of the second one"


def test_a_commit_is_what_was_intended_and_takes_the_intent_along(run: Run, monkeypatch) -> None:
    """Who commits the save late writes the same bytes: some nodes may have the COMMIT of the process that was lost."""
    intended: list[Commit] = []
    publish = commit.publish

    def published(tier: Tier, record: Commit, algorithm: str) -> Generation:
        data = (run.folder / layout.folder(record.id) / layout.INTENT).read_bytes()
        intended.append(layout.decode(data, Commit, layout.INTENT))
        return publish(tier, record, algorithm)

    monkeypatch.setattr(commit, "publish", published)
    with run.opened() as writer:
        found = save(writer, 7, {"w": b"x"}, milestone=True, metrics={"loss": 2.0}).commit
    assert msgspec.structs.replace(found, seals=[]) == intended[0] and found.seals
    assert not [*run.folder.rglob(layout.INTENT)]


def test_a_deleted_generation_has_no_intent_at_any_moment(run: Run, monkeypatch) -> None:
    """Without a GOING, as on a full disk, a kill in the middle of the deletion left what looked like a sealed save."""
    with run.opened() as writer:
        for step in (5, 7):
            save(writer, step, {"w": bytes([step]) * 100})
        (folder,) = run.folder.glob("gen/*7-*")
        (folder / layout.INTENT).write_bytes((folder / layout.COMMIT).read_bytes())
        monkeypatch.setattr(commit, "clear", _lost)
        with pytest.raises(Lost):
            commit.retire(writer.tier, at_of(folder))
    assert not (folder / layout.COMMIT).exists() and not (folder / layout.INTENT).exists()


def test_a_disk_gets_no_intent(tmp_path: Path) -> None:
    with access.for_writing(tmp_path / "run", "atomic_dirsync") as tier:
        save(RunWriter(tier, Inline()), 1, {"w": b"x"})
    assert not [*(tmp_path / "run").rglob(layout.INTENT)]


# ---- by the agent of one of several nodes ---------------------------------------------------------------------------


class OtherNode:
    """Stands for the agents of the other nodes: of one node, with the files of the rank that is missing here.

    `failing`: what the next calls raise; None: nothing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.committed = folder, dict[GenerationId, bytes]()
        self.failing = list[LastgoodError | None]()

    def seals(self, at: GenerationId) -> list[Seal]:
        if self.failing and (error := self.failing.pop(0)) is not None:
            raise error
        return seals_of(Disk(PosixFiles(), str(self.folder)), at)

    def commit(self, at: GenerationId, data: bytes) -> None:
        self.seals(at)
        self.committed[at] = data


def divided(run: Run, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> GenerationId:
    """A save that is sealed, whose files lie on another node: this one has the intent."""
    at = run.sealed(monkeypatch, 5, 7)
    there = elsewhere / layout.folder(at)
    there.mkdir(parents=True)
    for one in (run.folder / layout.folder(at)).glob("r0*"):
        shutil.move(one, there / one.name)
    return at


def attempt(run: Run, others: OtherNode) -> str:
    """One attempt of the agent to commit: why it is to be tried again."""
    return commit_unless_held(access.for_reading(f"{paths.MEMORY}{run.folder}"), str(run.folder), others)


def test_what_all_nodes_have_sealed_is_committed_on_each_of_them(run: Run, monkeypatch, tmp_path: Path) -> None:
    at = divided(run, tmp_path / "b", monkeypatch)
    other, record = OtherNode(tmp_path / "b"), run.folder / layout.folder(at) / layout.COMMIT
    assert attempt(run, other) == ""
    assert other.committed == {at: record.read_bytes()}
    assert not [*run.folder.rglob(layout.INTENT)]


@pytest.mark.parametrize("error", [RunLocked("a process has it open"), PeerDown("it cannot be reached")], ids=str)
@pytest.mark.parametrize("calls", [0, 1], ids=["seals", "commit"])
def test_a_node_that_does_not_commit_now_is_asked_again(run: Run, monkeypatch, tmp_path: Path, error, calls) -> None:
    """Without COMMIT the other nodes would never copy their parts."""
    at = divided(run, tmp_path / "b", monkeypatch)
    other, record = OtherNode(tmp_path / "b"), run.folder / layout.folder(at) / layout.COMMIT
    other.failing += [None] * calls + [error]
    assert attempt(run, other) == error.what and record.exists() == bool(calls)
    assert attempt(run, other) == "" and record.exists() and other.committed
    assert not [*run.folder.rglob(layout.INTENT)], "all nodes have it"


def test_memory_without_room_for_a_late_commit_commits_on_no_node(run: Run, monkeypatch, tmp_path: Path) -> None:
    """The other node had COMMIT already, and waited for ever for the part of this one, which was removed."""
    divided(run, tmp_path / "b", monkeypatch)
    other = OtherNode(tmp_path / "b")
    monkeypatch.setattr(commit, "publish", _full)
    with reported("given up: no space left"):
        assert attempt(run, other) == ""
    assert not other.committed


def test_an_older_commit_that_cannot_be_completed_delays_no_newer_one(run: Run, monkeypatch, tmp_path: Path) -> None:
    at = divided(run, tmp_path / "b", monkeypatch)
    (older,) = run.folder.glob("gen/*5-*")
    (older / layout.INTENT).write_bytes((older / layout.COMMIT).read_bytes())
    other = OtherNode(tmp_path / "b")
    other.failing.append(PeerDown("it cannot be reached"))
    assert attempt(run, other) == "it cannot be reached" and [*other.committed] == [at]


def test_a_commit_of_this_node_alone_is_put_on_the_others(run: Run, monkeypatch, tmp_path: Path) -> None:
    """The coordinator was lost while it created COMMIT: the other nodes did not have it, and copied nothing."""
    at = divided(run, tmp_path / "b", monkeypatch)
    other, folder = OtherNode(tmp_path / "b"), run.folder / layout.folder(at)
    intent = (folder / layout.INTENT).read_bytes()
    assert attempt(run, OtherNode(tmp_path / "b")) == ""
    (folder / layout.INTENT).write_bytes(intent)
    assert attempt(run, other) == ""
    assert other.committed == {at: (folder / layout.COMMIT).read_bytes()}
    assert not [*run.folder.rglob(layout.INTENT)], "all nodes have it"


# ---- which save is meant -----------------------------------------------------------------------------------------


def intents(*found: GenerationId, order: int = 1) -> dict[GenerationId, Commit]:
    return {one: generation(one.step, one.incarnation, order).commit for one in found}


def test_the_newest_save_comes_first_and_none_is_older_than_a_commit() -> None:
    survey = Survey(order=1, incomplete={at(20), at(30), at(40)}, generations={at(25): generation(25)})
    survey.incarnations["a"] = Incarnation(format=1, order=1, id="a", parent=None)
    assert under_way(survey, intents(at(20), at(30), at(40))) == [at(40), at(30)]
    assert under_way(survey, intents(at(30))) == [at(30)], "the other has no intent"
    survey.broken[at(35)] = TierDown("", safe="", todo="")
    assert under_way(survey, intents(at(30), at(40))) == [at(40)], "a COMMIT that cannot be read counts too"


def test_a_save_that_another_incarnation_has_left_behind_is_out() -> None:
    survey = Survey(order=2, incomplete={at(40)}, generations={at(10, "b"): generation(10, "b", 2)})
    survey.incarnations["b"] = Incarnation(format=1, order=2, id="b", parent=None)
    assert under_way(survey, intents(at(40))) == []
    assert under_way(survey, intents(at(40), order=2)) == [], "of two that do not know of each other none is newer"
    assert under_way(survey, intents(at(40), order=3)) == [at(40)]
    survey.incomplete.add(at(11, "c"))
    assert under_way(survey, intents(at(40), order=3) | intents(at(11, "c"), order=4)) == [at(11, "c")]


def test_a_generation_whose_commit_was_lost_is_no_save_under_way() -> None:
    survey = Survey(order=1, incomplete={at(40)}, witnessed={at(40)})
    assert under_way(survey, intents(at(40))) == []

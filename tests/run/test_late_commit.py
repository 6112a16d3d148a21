"""A save in memory that every rank had sealed when the job was lost is committed by the next opening."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import reported
from histories import at, generation
from lastgood.coordination.single_rank import SingleTopic
from lastgood.engine.inline_executor import Inline
from lastgood.errors import TierDown
from lastgood.format import commit, layout
from lastgood.format.commit import Survey
from lastgood.policy.restore import under_way
from lastgood.records import GenerationId
from lastgood.run import access, memory_place, paths
from lastgood.run.writer import RunWriter
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

    def sealed(self, monkeypatch: pytest.MonkeyPatch, *steps: int) -> GenerationId:
        """Save these steps; the process ends just before the COMMIT of the last one, of which this is the id."""
        with self.opened() as run:
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


def _lost(*arguments: object) -> None:
    raise Lost


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


def test_a_save_of_which_a_file_is_missing_is_removed(run: Run, monkeypatch) -> None:
    folder = run.folder / layout.folder(run.sealed(monkeypatch, 5, 7))
    (folder / layout.blob_name(0)).unlink()
    with run.opened():
        assert not folder.exists()
    assert run.loaded()[0] == 5


def test_the_intent_of_another_folder_commits_nothing(run: Run, monkeypatch) -> None:
    folder = run.folder / layout.folder(run.sealed(monkeypatch, 5, 7))
    (other,) = run.folder.glob(f"gen/*5-*/{layout.INTENT}")
    (folder / layout.INTENT).write_bytes(other.read_bytes())
    with run.opened():
        assert not folder.exists()


def test_the_intent_of_a_failed_save_goes_before_ranks_know(run: Run, monkeypatch) -> None:
    """They go on then. If the process that commits is lost, nobody may commit the save."""

    class Topic(SingleTopic):
        def fail(self, error: BaseException) -> None:
            found.extend(run.folder.glob(f"gen/*/{layout.INTENT}"))

    found: list[Path] = []
    with run.opened() as writer:
        monkeypatch.setattr(commit, "publish", _lost)
        with pytest.raises(Lost):
            save(writer, 7, {"w": b"x"}, topic=Topic())
    assert not found


def test_a_disk_gets_no_intent(tmp_path: Path) -> None:
    with access.for_writing(tmp_path / "run", "atomic_dirsync") as tier:
        save(RunWriter(tier, Inline()), 1, {"w": b"x"})
    assert not [*(tmp_path / "run").rglob(layout.INTENT)]


# ---- which save is meant -----------------------------------------------------------------------------------------


def intents(*found: GenerationId, order: int = 1) -> dict[GenerationId, commit.Commit]:
    return {one: generation(one.step, one.incarnation, order).commit for one in found}


def test_the_newest_save_comes_first_and_none_is_older_than_a_commit() -> None:
    survey = Survey(order=1, incomplete={at(20), at(30), at(40)}, generations={at(25): generation(25)})
    assert under_way(survey, intents(at(20), at(30), at(40))) == [at(40), at(30)]
    assert under_way(survey, intents(at(30))) == [at(30)], "the other has no intent"
    survey.broken[at(35)] = TierDown("", safe="", todo="")
    assert under_way(survey, intents(at(30), at(40))) == [at(40)], "a COMMIT that cannot be read counts too"


def test_a_save_that_a_rewind_has_left_behind_stays_uncommitted() -> None:
    survey = Survey(order=2, incomplete={at(40)}, generations={at(10, "b"): generation(10, "b", 2)})
    assert under_way(survey, intents(at(40))) == []
    assert under_way(survey, intents(at(40), order=2)) == [at(40)]


def test_a_generation_whose_commit_was_lost_is_no_save_under_way() -> None:
    survey = Survey(order=1, incomplete={at(40)}, witnessed={at(40)})
    assert under_way(survey, intents(at(40))) == []

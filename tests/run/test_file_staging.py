"""Saves in memory: the state is copied into the file itself, in the memory of a deleted one, and only once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lastgood
from agents import until
from harness import reported, steps
from lastgood.engine.arena import FileMemory
from lastgood.io.reused_files import FOLDER, LentFile, ReusedFiles
from lastgood.run import memory_place
from lastgood.run.flight import Flight
from lastgood.snapshot import staging

WEIGHTS = 3_000_000
"""more than one chunk, and not a multiple of pages"""


class Run:
    """A run in memory, with a state of several chunks, each step of which changes all of it."""

    def __init__(self, home: Path) -> None:
        self.home, self.memory = home, Path(memory_place.folder_of(home))
        self.weights = torch.nn.Parameter(torch.zeros(WEIGHTS))
        self.optimizer = torch.optim.SGD([self.weights], lr=1.0)

    def opened(self, **options: Any) -> lastgood.Checkpointer:
        tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1), retention=lastgood.Keep(last=1))]
        state = {"weights": self.weights, "optimizer": self.optimizer}
        tuning = {"staging": "overlap", "chunk": 1 << 20, **options}
        return lastgood.Checkpointer(self.home, state, cadence=lastgood.Every(steps=1000), tiers=tiers, **tuning)

    def update(self) -> None:
        self.weights.grad = torch.full((WEIGHTS,), -1.0)
        self.optimizer.step()

    def train(self, ckpt: lastgood.Checkpointer, *numbers: int) -> None:
        """Save these steps one after another; the weights of step n are all n."""
        for n in numbers:
            self.update()
            ckpt.step(n)
            ckpt.wait()

    def holds(self, step: int) -> bool:
        """Whether the newest save in memory is this step, with its weights."""
        found = lastgood.open(self.memory)
        return steps(self.memory)[-1] == step and bool((found.tensor("weights", step) == step).all())

    def descriptors(self) -> list[str]:
        """The paths of the files in memory that this process has open. Others may be closed at any time, as those of
        objects of earlier tests."""
        found = list[str]()
        for one in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(os.readlink(one))
        return [one for one in found if one.startswith(f"{self.memory}/")]


@pytest.fixture
def run(tmp_path: Path, memory: Path) -> Run:
    return Run(tmp_path / "home")


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What the copies of the saves filled, one after another."""
    found: list[object] = []
    fill = staging.Snapshot.fill

    def seen(self: staging.Snapshot, stop: Callable[[], bool], into: object) -> Iterator[Any]:
        found.append(into)
        yield from fill(self, stop, into)  # type: ignore[arg-type]

    monkeypatch.setattr(staging.Snapshot, "fill", seen)
    return found


@pytest.mark.parametrize("how", ["overlap", "blocking"])
def test_the_state_is_copied_into_the_memory_of_a_deleted_save(run: Run, filled: list[object], how: str) -> None:
    with run.opened(staging=how) as ckpt:
        ckpt.restore()
        run.train(ckpt, 1, 2, 3, 4)
        before = len(run.descriptors())
        for n in range(5, 11):
            run.train(ckpt, n)
            assert run.holds(n)
        assert all(isinstance(one, FileMemory) for one in filled[4:])
        assert len(run.descriptors()) == before
    assert steps(run.home) == [10]


def test_a_state_on_a_disk_is_copied_through_the_arena(tmp_path: Path, filled: list[object]) -> None:
    run = Run(tmp_path)
    state = {"weights": run.weights, "optimizer": run.optimizer}
    with lastgood.Checkpointer(tmp_path, state, cadence=lastgood.Every(steps=1), staging="overlap") as ckpt:
        ckpt.restore()
        run.train(ckpt, *range(1, 7))
    assert not any(isinstance(one, FileMemory) for one in filled)


def test_a_failed_save_keeps_its_file_until_its_copy_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lane gives up while the copier is in the middle: the file goes back to the deleted ones, still locked."""
    with run.opened() as ckpt:
        ckpt.restore()
        run.train(ckpt, 1, 2, 3, 4)
        middle, goes_on, fill = threading.Event(), threading.Event(), staging.Snapshot.fill

        def slow(self: staging.Snapshot, stop: Callable[[], bool], into: object) -> Iterator[Any]:
            chunks = fill(self, stop, into)  # type: ignore[arg-type]
            yield next(chunks)
            middle.set()
            assert goes_on.wait(60)
            yield from chunks

        def fails(self: object, *arguments: object) -> None:
            assert middle.wait(60)
            failed.set()
            raise OSError(5, "Input/output error")

        failed = threading.Event()
        monkeypatch.setattr(staging.Snapshot, "fill", slow)
        monkeypatch.setattr("lastgood.io.reused_files.ReusedFile.write_at", fails)
        run.update()
        with reported("step 5 was not saved"):
            ckpt.save(5)
            assert failed.wait(60)
            deleted = run.memory / FOLDER
            until(lambda: any(one.startswith(f"{5:012}-") for one in os.listdir(deleted)))
            names = os.listdir(deleted)
            lent = ReusedFiles(str(run.memory)).lend("another", os.stat(deleted / names[0]).st_size)
            assert lent is None, "the copier of the failed save still writes"
            goes_on.set()
            ckpt.wait()
        monkeypatch.undo()
        run.train(ckpt, 6, 7)
        assert run.holds(7)


def test_an_interrupted_save_keeps_its_file_until_its_copy_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C came after the copier had begun: the save ended at once and released the file, another process took and
    filled it, and the copier wrote the rest of its chunk there."""
    with run.opened() as ckpt:
        ckpt.restore()
        run.train(ckpt, 1, 2, 3, 4)
        copying, ending, released_while_copying = threading.Event(), threading.Event(), list[bool]()
        copy, end, close, submit = staging.Snapshot._copy, Flight.end, LentFile.close, ckpt._pipeline._copier.submit

        def slow(*arguments: Any) -> Any:
            copying.set()
            assert ending.wait(60)
            try:
                return copy(*arguments)
            finally:
                copying.clear()

        def ends(self: Flight) -> None:
            ending.set()
            end(self)

        def released(self: LentFile) -> None:
            released_while_copying.append(copying.is_set())
            close(self)

        def interrupted(*job: Any) -> None:
            submit(*job)
            assert copying.wait(60)
            raise KeyboardInterrupt

        monkeypatch.setattr(staging.Snapshot, "_copy", slow)
        monkeypatch.setattr(Flight, "end", ends)
        monkeypatch.setattr(LentFile, "close", released)
        monkeypatch.setattr(ckpt._pipeline._copier, "submit", interrupted)
        run.update()
        with reported("step 5 was not saved"):
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(5)
            ckpt.wait()
        assert released_while_copying == [False]
        monkeypatch.undo()
        run.train(ckpt, 6, 7)
        assert run.holds(7)

"""What a training loop shows to `lastgood run`, and the warning of one that does not restore."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

import lastgood
from lastgood.errors import Refused
from lastgood.io import heartbeat
from lastgood.policy.hang import RESTORE


@pytest.mark.parametrize("restores", [True, False])
def test_a_supervised_loop_that_does_not_restore_is_warned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, restores: bool
) -> None:
    """A script without restore() trained under `lastgood run` until a rank died, and each start after that failed."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    with caplog.at_level(logging.WARNING), lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1)}) as ckpt:
        if restores:
            ckpt.restore()
        ckpt.step(1)
        ckpt.step(2)
    assert caplog.text.count("without restore()") == (0 if restores else 1)


@pytest.mark.parametrize("first", [0, 1, 100])
def test_a_loop_without_restore_goes_on_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A script called restore() only if the run existed. A NameError of its first life, after two saves, was one from
    before a restore, which comes again each time: the job was given up. A loop may count from 0, and any first step."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1)}) as ckpt:
        ckpt.step(first)
        shown = heartbeat.read(page)
    assert shown.restored is not None and (shown.restored_step, shown.step) == (0, first)


@pytest.mark.parametrize("name", ["", "lastgood: step", 3])
def test_a_phase_has_a_name_of_its_own(tmp_path: Path, name: object) -> None:
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1)}) as ckpt, pytest.raises(Refused, match="phase"):
        ckpt.phase(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("fails", [True, False])
def test_after_the_end_of_the_loop_no_next_batches_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """An export after the training that failed each time had the batches after the last step left out, for good."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    sampler = lastgood.ResumableSampler(8, global_batch=2, seed=0)
    with (
        contextlib.suppress(ZeroDivisionError),
        lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1), "sampler": sampler}) as ckpt,
    ):
        ckpt.restore()
        ckpt.step(1)
        if fails:
            raise ZeroDivisionError
    assert heartbeat.read(page).position.windows == (1 if fails else 0)


def test_a_fork_that_leaves_the_loop_changes_nothing_that_its_parent_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that a script had forked in an evaluation, and that left the `with`, ended the evaluation for the
    supervisor, and the batches of the next step were not known any more."""
    page = str(tmp_path / "page")
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    sampler = lastgood.ResumableSampler(8, global_batch=2, seed=0)
    parent = os.getpid()
    try:
        with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1), "sampler": sampler}) as ckpt:
            ckpt.step(ckpt.restore().step + 1)
            with ckpt.phase("eval"):
                if child := os.fork():
                    os.waitpid(child, 0)
                    shown = heartbeat.read(page)
    finally:
        if os.getpid() != parent:
            os._exit(0)
    assert shown.position.windows == 1 and shown.phase == "eval"


def test_a_restore_is_shown_from_its_first_wait_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three minutes of uploads before a restore counted as a step that hung, and the job was ended."""
    page, phases = str(tmp_path / "page"), list[str]()
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1)}) as ckpt:
        ckpt.restore()
        ckpt.save(1).result()
        wait = ckpt._pipeline.wait

        def watched(*arguments: float | None, **options: bool) -> None:
            phases.append(heartbeat.read(page).phase)
            wait(*arguments, **options)

        monkeypatch.setattr(ckpt._pipeline, "wait", watched)
        ckpt.restore()
    assert phases[:1] == [RESTORE]


def test_a_loop_in_another_thread_than_the_opening_shows_its_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations of a loop that a thread runs counted as hung steps, also with the name that the report asks for."""
    page, phases = str(tmp_path / "page"), list[str]()
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1)}) as ckpt:

        def loop() -> None:
            ckpt.step(ckpt.restore().step + 1)
            with ckpt.phase("eval"):
                phases.append(heartbeat.read(page).phase)

        thread = threading.Thread(target=loop)
        thread.start()
        thread.join()
        ckpt.step(2)
        with ckpt.phase("test"):
            phases.append(heartbeat.read(page).phase)
    assert phases == ["eval", "test"], "the loop is where the newest step was"


def test_an_opening_that_fails_late_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without memory for a look at all parameters: the run stayed open, and a retry found it locked."""

    def ends(*_: object) -> None:
        """A handler of the script's own."""

    page, earlier = str(tmp_path / "page"), signal.signal(signal.SIGTERM, ends)
    heartbeat.create(page)
    monkeypatch.setenv(heartbeat.VARIABLE, page)
    options = {"preemption": lastgood.Preemption(grace_seconds=30)}

    def fails(*_: object) -> None:
        raise MemoryError

    for late in ("loop.save_planner.SavePlanner.exempt", "loop.beat.Beat.opened"):
        with monkeypatch.context() as there, pytest.raises(MemoryError):
            there.setattr(f"lastgood.{late}", fails)
            lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1)}, **options)
        assert signal.getsignal(signal.SIGTERM) is ends
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1)}, **options) as ckpt:
        ckpt.restore()
        ckpt.step(1)
    signal.signal(signal.SIGTERM, earlier)
    assert heartbeat.read(page).step == 1

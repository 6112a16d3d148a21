"""What a training process shows of its progress."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lastgood.errors import Refused
from lastgood.io import heartbeat, processes


def test_what_a_rank_shows_is_read_by_another_process(tmp_path: Path) -> None:
    path = str(tmp_path / "page")
    heartbeat.create(path)
    page = heartbeat.own({heartbeat.VARIABLE: path})
    assert page is not None
    empty = heartbeat.read(path)
    assert empty.begun is empty.restored is empty.beat is None and empty.run == ""
    page.begin()
    page.opened("/runs/gpt")
    page.restored(10)
    assert heartbeat.read(path).step == 10 and heartbeat.read(path).first is None
    page.beat(11)
    page.beat(12)
    shown = heartbeat.read(path)
    assert (shown.run, shown.restored_step, shown.step) == ("/runs/gpt", 10, 12)
    times = [shown.begun, shown.opened, shown.restored, shown.first, shown.beat]
    assert None not in times and times == sorted(times, key=float)  # type: ignore[arg-type]


def test_only_one_open_run_of_the_supervised_process_writes_its_page(tmp_path: Path) -> None:
    """A second run in the process, such as that of a teacher, made a job look as if it made no progress."""
    environ = {heartbeat.VARIABLE: str(tmp_path / "page")}
    heartbeat.create(environ[heartbeat.VARIABLE])
    heartbeat.begin(environ)
    first = heartbeat.own(environ)
    assert first is not None and heartbeat.own(environ) is None
    first.restored(10)
    first.restored(5)
    shown = heartbeat.read(environ[heartbeat.VARIABLE])
    assert (shown.restored_step, shown.step) == (10, 5), "a rewind is no start from an older step"
    first.released()
    assert heartbeat.own(environ) is not None, "a run that is opened after it"


def test_a_child_of_the_supervised_process_does_not_write_its_page(tmp_path: Path) -> None:
    environ = {heartbeat.VARIABLE: str(tmp_path / "page")}
    heartbeat.create(environ[heartbeat.VARIABLE])
    heartbeat.begin(environ)
    child = os.fork()
    if child == 0:
        os._exit(heartbeat.own(environ) is not None)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("closes", [True, False])
def test_the_page_of_a_process_that_has_ended_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    """Of a command that runs one program after the other the supervisor saw the first one only: the second one saved
    newer steps, and the job was given up."""
    environ = {heartbeat.VARIABLE: str(tmp_path / "page")}
    heartbeat.create(environ[heartbeat.VARIABLE])
    child = os.fork()
    if child == 0:
        first = heartbeat.own(environ)
        if first is not None and closes:
            first.released()
        os._exit(first is None)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it is a zombie, as that of a shell may be
    # A container that shares the memory does not see the processes of another one.
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(processes, "namespace", lambda: 7)
        assert heartbeat.own(environ) is None
    assert heartbeat.own(environ) is not None
    assert os.waitpid(child, 0)[1] == 0


def test_a_page_that_was_removed_shows_nothing(tmp_path: Path) -> None:
    assert heartbeat.read(str(tmp_path / "gone")).step == 0


def test_a_process_that_nobody_supervises_has_no_page(tmp_path: Path) -> None:
    assert heartbeat.own({}) is None
    assert heartbeat.own({heartbeat.VARIABLE: str(tmp_path / "gone")}) is None
    (tmp_path / "short").write_bytes(b"x")
    assert heartbeat.own({heartbeat.VARIABLE: str(tmp_path / "short")}) is None, "it is no page"


def test_a_run_that_is_opened_after_another_begins_without_its_signs(tmp_path: Path) -> None:
    """A second run of a process was taken for hung at once, because the last step of the first was long ago."""
    environ = {heartbeat.VARIABLE: str(tmp_path / "page")}
    heartbeat.create(environ[heartbeat.VARIABLE])
    first = heartbeat.own(environ)
    assert first is not None
    first.restored(0)
    first.beat(1)
    first.beat(2)
    first.released()
    assert heartbeat.read(environ[heartbeat.VARIABLE]).closed is not None
    assert heartbeat.own(environ) is not None
    shown = heartbeat.read(environ[heartbeat.VARIABLE])
    assert shown.closed is shown.sign is None and shown.longest_seconds == 0.0


def test_a_run_that_is_opened_after_another_does_not_show_its_steps(tmp_path: Path) -> None:
    """A script that trains two runs one after the other: its job was given up although the second run saved newer
    steps in each attempt, because they were compared with the last step of the first run; where the first run was
    short, and the second one never saved anything, the job was started again for ever."""
    environ = {heartbeat.VARIABLE: str(tmp_path / "page")}
    heartbeat.create(environ[heartbeat.VARIABLE])
    first = heartbeat.own(environ)
    assert first is not None
    first.opened("/runs/pretrain")
    first.restored(50, "b742ae1a", heartbeat.Position(1, 2, 3))
    first.beat(51)
    first.saved(51)
    first.released()
    second = heartbeat.own(environ)
    assert second is not None
    shown = heartbeat.read(environ[heartbeat.VARIABLE])
    assert shown.opened is None, "it is not open yet"
    second.opened("/runs/finetune")
    shown = heartbeat.read(environ[heartbeat.VARIABLE])
    assert (shown.restored_step, shown.saved_step) == (50, 51), "so far this attempt has come, until the next restore"
    second.restored(4)
    shown = heartbeat.read(environ[heartbeat.VARIABLE])
    assert (shown.restored_step, shown.saved_step, shown.step, shown.incarnation) == (4, 0, 4, "")
    assert shown.first is shown.beat is None


@pytest.mark.parametrize("runs_before", [0, 1])
def test_the_longest_step_is_measured_from_the_second_one_on(tmp_path: Path, runs_before: int) -> None:
    """A save after the first step set the limit: a second step that was compiled was taken for hung after a minute. In
    a second run of a process it was the time since the machine was started, so that no hang was ever noticed."""
    environ = {heartbeat.VARIABLE: str(tmp_path / "page")}
    heartbeat.create(environ[heartbeat.VARIABLE])

    def longest_seconds() -> float:
        return heartbeat.read(environ[heartbeat.VARIABLE]).longest_seconds

    for _ in range(runs_before + 1):
        page = heartbeat.own(environ)
        assert page is not None
        for name in ("lastgood: restore", ""):
            page.phase(name)
        page.beat(1)
        for name in ("lastgood: save", ""):
            page.phase(name)
        assert longest_seconds() == 0.0
        page.beat(2)
        assert 0.0 < longest_seconds() < 60.0
        page.restored(1)
        assert longest_seconds() == 0.0, "the second step after a restore has an hour, in the same process too"
        page.beat(2)
        assert longest_seconds() == 0.0
        page.beat(3)
        assert longest_seconds() > 0.0
        page.released()


def test_a_run_whose_path_is_no_text_is_refused_by_name(tmp_path: Path) -> None:
    """`LANG=C lastgood run train.py runs/\xe9`: a raw UnicodeEncodeError, in three attempts."""
    path = str(tmp_path / "page")
    heartbeat.create(path)
    with pytest.raises(Refused, match="no text under this locale"):
        heartbeat.Heartbeat(path).opened("/runs/\udcc3")
    assert heartbeat.read(path).opened is None

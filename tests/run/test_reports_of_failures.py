"""Failures in the background are reported at growing intervals, whatever warning filters the script sets."""

from __future__ import annotations

import errno
import logging
import warnings
from pathlib import Path

import pytest
import torch

import lastgood
from harness import reported, reports
from lastgood import errors
from lastgood.errors import Cancelled, Damaged, NoSpace, NothingDurable, Overtaken, TierDown, TornSnapshot
from lastgood.run.outcomes import Outcomes
from lastgood.run.writer import RunWriter
from lastgood.testing import Clock, Fault

FULL = Fault("reserve", errno=errno.ENOSPC)


def test_29_failed_saves_give_five_reports_and_a_closing_summary(tmp_path: Path, faulty_files, capfd) -> None:
    """With warnings filtered, 29 failed saves in a row printed nothing, and the exit code was 0."""
    with warnings.catch_warnings(), reports(logging.ERROR) as threats:
        warnings.simplefilter("ignore")
        with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, cadence=lastgood.Every(steps=1)) as ckpt:
            for n in range(1, 31):
                ckpt.step(n)
                ckpt.wait()
                faulty_files.inject(FULL)
    *saves, closing = threats
    assert [one.split("step ")[1].split(" ")[0] for one in saves] == ["2", "3", "5", "9", "17"]
    assert "failed save 16 in a row" in saves[-1] and "NoSpace" in saves[-1]
    assert "newest durable step 1 of 30; 29 saves failed (30 attempts): NoSpace: no space left" in closing
    stderr = capfd.readouterr().err
    assert all(one in stderr for one in threats)


def test_overtaken_saves_are_counted_in_the_closing_summary() -> None:
    """They appeared in on_event only: a run of 30 steps with 20 generations did not report the reason."""
    outcomes = Outcomes("run")
    for step in (1, 2):
        outcomes.put(Overtaken(f"step 3 was committed before step {step}"), step)
    outcomes.durable(3)
    with reports(logging.WARNING) as warnings, reports() as texts:
        assert outcomes.report(raises=True) is None
        outcomes.report_end(3, 3)
    assert not warnings, "an overtaken save loses nothing"
    assert texts == ["run: newest durable step 3 of 3; 2 saves given up because a newer one was committed first"]


def test_a_series_of_failures_ends_with_the_next_durable_save() -> None:
    """The report called the save durable, also one in memory, of which `durable()` is false."""
    outcomes = Outcomes("run")
    with reports() as texts:
        outcomes.put(NoSpace("full"), 1)
        outcomes.put(NoSpace("full"), 2)
        outcomes.durable(3)
        outcomes.put(NoSpace("full"), 4)
        outcomes.report()
    assert ["not saved" in one for one in texts] == [True, True, False, True]
    assert texts[2] == "run: step 3 is saved, after 2 saves that failed"
    assert "in a row" in texts[1] and "in a row" not in texts[3]


def test_failures_before_a_durable_save_do_not_count_after_it() -> None:
    outcomes = Outcomes("run")
    for step in (1, 2):
        outcomes.put(TornSnapshot("changed"), step)
    outcomes.report()
    assert (outcomes.consecutive_failures, outcomes.consecutive_torn) == (2, 2)
    outcomes.put(NoSpace("full"), 3)
    outcomes.report()
    assert (outcomes.consecutive_failures, outcomes.consecutive_torn) == (3, 0)
    outcomes.durable(4)
    outcomes.report()
    assert (outcomes.consecutive_failures, outcomes.failed_saves) == (0, 3)


def test_failed_upkeep_is_reported_at_growing_intervals_damage_each_time() -> None:
    """A pointer that could not be written caused two warnings per save: 77 in 41 saves."""
    outcomes = Outcomes("run")
    with reports() as texts:
        for _ in range(20):
            outcomes.put(TierDown("the pointer"))
            outcomes.report()
    assert len(texts) == 5 and "occurrence 16" in texts[-1]
    with reports(logging.ERROR) as threats:
        for step in range(5):
            outcomes.put(Damaged(f"step {step}"))
        outcomes.report()
    assert len(threats) == 5


def test_a_bug_in_a_background_thread_does_not_end_training(tmp_path: Path, monkeypatch) -> None:
    """An unexpected error in a background thread was raised in the loop, although on_error was "warn"."""

    def verify(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(RunWriter, "verify", verify)
    with (
        reported(r"(?s)KeyError.*in verify.*a bug in lastgood", logging.ERROR),
        lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt,
    ):
        ckpt.save(1)
        ckpt.wait()
        ckpt.save(2).result()
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [1, 2]


def test_a_bug_in_a_background_thread_is_raised_on_request(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(RunWriter, "verify", lambda *_: {}["a bug"])
    with (
        pytest.raises(KeyError, match="a bug"),
        lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}, on_error="raise") as ckpt,
    ):
        ckpt.save(1)
        ckpt.wait()


def test_training_ends_when_no_save_is_durable_within_the_stated_time(tmp_path: Path, faulty_files) -> None:
    """With on_error="warn", a run could continue for weeks without a single durable save."""
    clock, cadence = Clock(1000.0), lastgood.Every(steps=1)
    state = {"w": torch.zeros(3)}
    options = {"cadence": cadence, "durable_within_seconds": 3600, "save_on_exit": False}
    with lastgood.Checkpointer(tmp_path, state, **options) as ckpt:
        ckpt._pipeline.outcomes._now = clock
        for n in (1, 2):  # a durable save restarts the time limit
            clock.advance(3000)
            ckpt.step(n)
            ckpt.wait()
        faulty_files.inject(FULL)
        ckpt.step(3)
        ckpt.wait()
        clock.advance(3599)
        ckpt.step(4)
        ckpt.wait()
        clock.advance(2)
        with pytest.raises(NothingDurable, match=r"(?s)step 5 .* 3601 s .*NoSpace.*untouched") as raised:
            ckpt.step(5)
        assert raised.value.retry and "more time" in raised.value.todo
    assert lastgood.open(tmp_path).generations()[-1].step == 2


@pytest.mark.parametrize("seconds", [0, -1, "60", True, float("nan"), 300])
def test_an_impossible_time_limit_without_a_save_is_refused(tmp_path: Path, seconds: object) -> None:
    """300 s is the default cadence: every wait for the next save would raise."""
    with pytest.raises(errors.Refused, match="durable_within_seconds"):
        lastgood.Checkpointer(tmp_path / "run", {}, durable_within_seconds=seconds)


def test_the_disk_bound_is_reported_through_the_logger(tmp_path: Path, capfd) -> None:
    """Every run printed it, and nothing could silence it."""
    before = logging.getLogger("lastgood").level
    logging.getLogger("lastgood").setLevel(logging.WARNING)
    try:
        lastgood.Checkpointer(tmp_path / "silent", {"w": torch.zeros(3)}).save(1).result()
    finally:
        logging.getLogger("lastgood").setLevel(before)
    assert capfd.readouterr().err == ""
    with reported("takes at most", logging.INFO), lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(3)}) as c:
        c.save(1)


def test_an_error_outside_of_a_save_leaves_the_count_of_failed_saves() -> None:
    outcomes = Outcomes("run")
    with reports(logging.WARNING) as texts:
        outcomes.put(Cancelled("a reading gave way"))
        outcomes.report()
    assert texts == ["run: Cancelled: a reading gave way."] and outcomes.failed_saves == 0


def test_a_second_divergence_is_reported_again() -> None:
    """Four unfit saves in one week suppressed the reports of unfit saves in the next week."""
    outcomes = Outcomes("run")
    unfit = errors.NotFinite("step 1 is intact, and not good")
    with reports() as texts:
        for _ in range(4):
            outcomes.put(unfit)
        outcomes.verified()
        outcomes.put(unfit)
        outcomes.report()
    assert len(texts) == 4, "the 1st, 2nd and 4th of the first series, the 1st of the second"


def test_a_milestone_that_fails_is_reported_each_time() -> None:
    outcomes = Outcomes("run")
    with reports() as texts:
        for _ in range(5):
            outcomes.put_always(TierDown("the milestone was not written"))
        outcomes.report()
    assert len(texts) == 5


def test_an_unclosed_run_with_only_durable_saves_reports_nothing() -> None:
    outcomes = Outcomes("run")
    outcomes.durable(1)
    with reports() as texts:
        outcomes.report_unreported()
    assert texts == []

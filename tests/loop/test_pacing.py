"""With cadence="auto" the interval follows the measurements of the loop. Time is passed in; no test waits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lastgood
from lastgood.cli.app import main
from lastgood.errors import Refused
from lastgood.loop.adaptive_interval import Pace
from lastgood.loop.options import Options
from lastgood.policy.failures import Failures, Known
from lastgood.policy.interval import Rule
from lastgood.policy.tune import Auto
from lastgood.run import side_records
from lastgood.supervisor import attempt_log


class Flown:
    """A save whose end is set by a test."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.seconds, self.stall_seconds, self.good, self.over = 0.0, 0.0, True, False

    def ended(self) -> bool:
        return self.over

    def is_committed(self) -> bool:
        return self.over and self.good


class Loop:
    """A simulated loop with steps of `t` seconds. A save takes `tw` seconds, and slows the steps beside it by `c`
    seconds in total."""

    def __init__(
        self, t: float, tw: float, c: float, overhead: float | None = 0.1, failures: Failures | None = None
    ) -> None:
        self.t, self.tw, self.c, self.now, self.n, self.last = t, tw, c, 0.0, 0, 0
        self.pace, self.flying, self.reasons = Pace(Auto(Rule(failures or Failures(), overhead))), [], []
        self.saved: list[int] = []

    def run(self, steps: int, good: bool = True) -> None:
        for _ in range(steps):
            self.n += 1
            self.now += self.t
            for save, until in self.flying:
                if not save.over:
                    self.now += self.c * min(self.t / self.tw, 1.0)
                if self.now >= until:
                    save.over, save.seconds, save.good = True, self.tw, good
            self.flying = [(save, until) for save, until in self.flying if not save.over]
            if why := self.pace.passed(self.n, self.now):
                self.reasons.append(why)
            if not self.flying and self.pace.auto.due(self.n, self.last):
                save = Flown(self.n)
                self.pace.begun(save, self.now, 0.0)
                self.flying.append((save, self.now + self.tw))
                self.last = self.n
                self.saved.append(self.n)


def test_the_interval_converges_to_what_the_copy_budget_allows():
    loop = Loop(t=1.0, tw=2.0, c=0.5, overhead=0.01)
    loop.run(1000)
    assert 40 <= loop.pace.auto.interval_steps <= 70, "0.5 s per save, 1 % of 1 s per step: 50 steps"
    assert loop.reasons and "lost to copying" in loop.reasons[-1]


def test_the_interval_follows_a_disk_that_slows_down_and_recovers():
    loop = Loop(t=1.0, tw=1.0, c=0.0)
    loop.run(100)
    short = loop.pace.auto.interval_steps
    loop.tw = 40.0
    loop.run(1000)
    slow = loop.pace.auto.interval_steps
    assert slow >= 36 > 3 * short
    loop.tw = 1.0
    loop.run(1000)
    assert loop.pace.auto.interval_steps <= short


def test_steps_of_varying_duration_do_not_hide_that_the_loop_stood_still():
    """On a busy machine the steps beside a save were often no slower than others, so a save seemed to cost nothing, and
    every step was saved."""
    pace, now = Pace(Auto(Rule(Failures(mtbf=8100.0)), interval_steps=50)), 0.0
    for n in range(1, 301):
        now += 2.0 if n % 50 else 1.0
        pace.passed(n, now)
        if n % 50 == 0:
            save = Flown(n)
            save.seconds, save.stall_seconds, save.over = 0.1, 3.0, True
            pace.begun(save, now, waited_seconds=1.0)
    assert pace.auto.interval_steps == 90, "2 s for each save: sqrt(2 * 2 * 8100) = 180 s"


def test_a_restore_is_not_measured_as_the_cost_of_a_save():
    """A Sentinel's save was under way when the loop restored an older step: ten minutes counted as its cost."""
    pace, save = Pace(Auto(Rule(Failures(mtbf=8100.0)), interval_steps=50)), Flown(50)
    for n in range(1, 51):
        pace.passed(n, float(n))
    pace.begun(save, 50.0, waited_seconds=0.0)
    pace.restored()
    save.seconds, save.over = 1.0, True
    assert pace.passed(41, 650.0) == "" and pace.passed(42, 651.0) == "" and pace.auto.interval_steps == 50


def test_a_failed_save_does_not_count_as_a_measurement():
    loop = Loop(t=1.0, tw=30.0, c=0.0)
    before = loop.pace.auto
    loop.run(200, good=False)
    assert loop.pace.auto == before and len(loop.saved) > 3


def test_training_adapts_its_interval_and_reports_the_reason(tmp_path):
    events: list[lastgood.Event] = []
    state = {"w": torch.zeros(100_000)}
    with lastgood.Checkpointer(tmp_path, state, cadence="auto", overhead=0.05, on_event=events.append) as ckpt:
        ckpt.restore()
        for n in range(1, 200):
            state["w"] @ state["w"]
            ckpt.step(n)
        ckpt.wait()
    tuned = [one for one in events if one.kind == "tuned"]
    assert tuned and all("a save every" in one.detail and "allowed" in one.detail for one in tuned)


def attempted(run: Path, seconds: float, last_step: int, signal: str) -> None:
    """Record an attempt of one rank in a run, as `lastgood run` does."""
    cause = attempt_log.Cause(kind="signal", rank=0, code=-9, what=signal) if signal else None
    record = attempt_log.Attempt(
        format=1,
        number=0,
        job="x",
        host="x",
        command=[],
        ranks=1,
        began_at=0.0,
        seconds=seconds,
        restored_step=0,
        last_step=last_step,
        replayed_steps=0,
        phases={},
        cause=cause,
        answer="",
    )
    with side_records.opened(str(run)) as tier:
        attempt_log.append(tier, record)


def test_the_plan_and_the_running_loop_choose_the_same_interval(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = tmp_path / "run"
    lastgood.save(run, {"w": torch.zeros(1)}, step=1)
    attempted(run, 12_500, 70, "SIGKILL")
    attempted(run, 7_500, 0, "")
    cost = ["--stall-seconds=0.5", "--write-seconds=2", "--step-seconds=1"]
    assert main(["plan", "--run", str(run), "--mtbf-seconds=12000", *cost]) == 0
    printed = capsys.readouterr().out
    for part in ("1 in 20,000 s (5.6 h) that", "one in 12,000 s (3.3 h)", "16,000 s (4.4 h)", ", 127 steps:"):
        assert part in printed
    assert main(["plan", "--json", "--run", str(run), "--mtbf-seconds=12000", *cost]) == 0
    planned = json.loads(capsys.readouterr().out)
    loop = Loop(t=1.0, tw=2.0, c=0.5, overhead=None, failures=Failures(12_000, seconds=20_000, count=1))
    loop.run(2000)
    lost = Rule(Failures(12_000, seconds=20_000)).interval(0.5, 2.0, 1)
    assert planned["auto_below_seconds"] == lost.seconds > planned["auto_seconds"], "the process died, and no node"
    assert planned["mtbf_seconds"] == 16_000 and loop.pace.auto.interval_steps == planned["auto_steps"] == 127
    assert "a failure every 4.4 h (3.3 h expected, 1 seen in 5.6 h); the least time is lost so" in loop.reasons[-1]


@pytest.mark.parametrize(
    ("flags", "options", "costs"),
    [
        ([], {"tuning": lastgood.Tuning(mtbf=3600.0)}, (0.01, 90.0)),
        (["--overhead=0.01"], {"tuning": lastgood.Tuning(mtbf=3600.0, overhead=0.01)}, (0.5, 2.0)),
        (
            ["--durable-within-seconds=20"],
            {"tuning": lastgood.Tuning(mtbf=3600.0), "durable_within_seconds": 20.0},
            (0.5, 2.0),
        ),
    ],
)
def test_the_plan_knows_the_bounds_of_a_job(flags, options, costs, capsys):
    """It had no such options, and another number of saves in flight than a job by default."""
    stall, write = costs
    command = ["plan", "--json", "--mtbf-seconds=3600", f"--stall-seconds={stall}", f"--write-seconds={write}", *flags]
    assert main(command) == 0
    job = Options(cadence="auto", **options)
    wanted = job.rule(Known(Failures(3600), Failures(3600))).interval(stall, write, job.tuning.in_flight)
    planned = json.loads(capsys.readouterr().out)
    assert planned["auto_seconds"] == wanted.seconds and planned["auto_why"] == wanted.why
    assert not any(one["too_short"] for one in planned["intervals"] if one["interval_seconds"] == wanted.seconds)


@pytest.mark.parametrize("options", [{"mtbf": 3600.0}, {}])
def test_failures_that_the_supervisor_has_seen_count_in_the_next_attempt(tmp_path, options):
    lastgood.save(tmp_path, {"w": torch.zeros(1)}, step=1)
    attempted(tmp_path, 1800, 70, "SIGKILL")
    attempted(tmp_path, 1800, 90, "SIGKILL")
    events: list[lastgood.Event] = []
    state = {"w": torch.zeros(1000)}
    with lastgood.Checkpointer(tmp_path, state, cadence="auto", on_event=events.append, **options) as ckpt:
        ckpt.restore(step=0)
        for n in range(1, 100):
            ckpt.step(n)
    tuned = [one.detail for one in events if one.kind == "tuned"]
    assert tuned and all("2 seen in 60 min" in one and ("expected" in one) == bool(options) for one in tuned)


def test_a_time_limit_for_durable_saves_bounds_the_interval():
    """With a longer interval `step()` would raise NothingDurable although no save has failed."""
    assert Options(cadence="auto", durable_within_seconds=600.0).rule(Known()).longest_seconds == 300


def test_attempts_that_cannot_be_read_are_reported_and_saving_goes_on(tmp_path, caplog):
    lastgood.save(tmp_path, {"w": torch.zeros(9)}, step=1)
    (tmp_path / "attempts").write_text("a file in place of the folder")
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(9)}, cadence="auto", mtbf=3600.0) as ckpt:
        ckpt.restore()
        ckpt.save(2).result()
    assert "attempts: Not a directory" in caplog.text


def test_an_mtbf_lets_memory_adapt_while_its_home_keeps_its_own_cadence(tmp_path):
    front = lastgood.Tier(tmp_path / "front", cadence="auto", retention=lastgood.Keep(last=40))
    options = {"tiers": [front], "cadence": lastgood.Every(steps=40), "mtbf": 3600.0}
    with lastgood.Checkpointer(tmp_path / "home", {"w": torch.zeros(9)}, **options, save_on_exit=False) as ckpt:
        ckpt.restore()
        for n in range(1, 41):
            save = ckpt.step(n)
            if save is not None:
                save.result()
    steps = {name: [one.step for one in lastgood.open(tmp_path / name).generations()] for name in ("front", "home")}
    assert steps["home"] == [40] and {10, 40} <= {*steps["front"]}


@pytest.mark.parametrize(
    "options",
    [
        {"cadence": "always"},
        {"overhead": 0.1},
        {"cadence": "auto", "overhead": 0.0},
        {"mtbf": 3600.0},
        {"cadence": "auto", "mtbf": 0.5},
        {"cadence": "auto", "mtbf": "1h"},
        {"cadence": "auto", "mtbf": True},
        {"cadence": "auto", "mtbf": float("inf")},
    ],
)
def test_an_invalid_cadence_is_refused_before_anything_is_changed(tmp_path, options):
    with pytest.raises(Refused):
        lastgood.Checkpointer(tmp_path / "run", {}, **options)
    assert not (tmp_path / "run").exists()

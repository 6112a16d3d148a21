"""Copies to a lower place with cadence="auto" follow what they cost. Time is passed in; no test waits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lastgood
from lastgood.loop import copy_pace
from lastgood.loop.adaptive_interval import Pace
from lastgood.loop.copy_pace import CopyPace
from lastgood.loop.options import Options
from lastgood.policy.failures import Failures, Known
from lastgood.policy.interval import Rule
from lastgood.policy.tune import Auto

HOME = "/home/run"


class Saved:
    """A save that is durable above at once, and whose copy ends at `ends_at`."""

    def __init__(self, step: int, good: bool, ends_at: float) -> None:
        self.step, self.good, self.ends_at, self.now = step, good, ends_at, 0.0

    def ended(self) -> bool:
        return True

    def copying(self, place: str) -> bool:
        return place == HOME and self.now < self.ends_at

    def where(self) -> list[str]:
        return ["/front", HOME] if self.good and not self.copying(HOME) else ["/front"]


class Loop:
    """Steps of a second, each saved above. A copy takes `tw` seconds, in which training is slower by `slower`. Step
    numbers increase by `gap`."""

    def __init__(self, rule: Rule, tw: float, slower: float, good: bool = True, gap: int = 1) -> None:
        self.tw, self.slower, self.good, self.gap = tw, slower, good, gap
        self.events, self.copied = [], []
        self.pace, self.now, self.saves, self.n = CopyPace(Auto(rule), HOME, self), 0.0, [], 0

    def emit(self, kind: str, step: int, detail: str) -> None:
        self.events.append((kind, step, detail))

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.n += self.gap
            left = max([one.ends_at - self.now for one in self.saves], default=0.0)
            self.now += 1.0 + self.slower * min(max(left, 0.0), 1.0)
            for one in self.saves:
                one.now = self.now
            assert not self.pace.due(self.n, self.now), "it asks for no save of its own"
            save = Saved(self.n, self.good, self.now + self.tw if self.pace.is_due else 0.0)
            if self.pace.is_due:
                self.copied.append(self.n)
            self.saves = [one for one in [*self.saves, save] if one.ends_at > self.now]
            self.pace.begun(save, self.pace.is_due, self.now)


@pytest.mark.parametrize("tw", [0.5, 0.9, 1.5, 2.5, 4.0])
def test_copies_are_as_rare_as_their_cost_demands(tw):
    """Copies of less than two steps seemed to cost nothing, and were made all the time."""
    loop = Loop(Rule(overhead=0.01), tw=tw, slower=0.5)
    loop.run(3000)
    wanted = 0.5 * tw / 0.01
    assert 0.6 * wanted <= loop.pace.auto.interval_steps <= 1.6 * wanted + 2
    assert loop.events[-1][0] == "tuned" and loop.events[-1][2].startswith(f"{HOME}: a save every ")


def test_step_numbers_with_gaps_are_measured_too():
    """No step had a duration, and the interval doubled without end."""
    loop = Loop(Rule(overhead=0.01), tw=1.0, slower=0.5, gap=256)
    loop.run(3000)
    assert 30 * 256 <= loop.pace.auto.interval_steps <= 80 * 256
    pace = Pace(Auto(Rule(overhead=0.01)))
    for n in range(256, 256 * 100, 256):
        pace.passed(n, n / 256)
    assert {*pace._free} == {1 / 256}


def test_what_was_copied_before_a_rewind_counts_no_more():
    loop = Loop(Rule(overhead=0.01), tw=1.0, slower=0.5)
    loop.run(25)
    loop.pace.restored(5, loop.now)
    assert not loop.pace.due(6, loop.now + 1) and not loop.pace.is_due
    assert not loop.pace.due(999, loop.now + 2) and loop.pace.is_due


def test_saves_without_steps_are_not_kept():
    loop = Loop(Rule(overhead=0.01), tw=1.0, slower=0.0)
    for n in range(1, 31):
        loop.pace.begun(Saved(n, True, 0.0), True, float(n))
    assert len(loop.pace._copies) == 1


def test_copies_never_queue_up():
    loop = Loop(Rule(Failures(mtbf=60.0)), tw=25.0, slower=0.0)
    loop.run(500)
    assert loop.pace.auto.interval_steps >= 25 and loop.copied[-1] - loop.copied[-2] >= 25


def test_a_copy_that_failed_is_no_measurement():
    loop = Loop(Rule(overhead=0.01), tw=4.0, slower=0.2, good=False)
    loop.run(200)
    assert not loop.events and len(loop.copied) > 10


SEEN = Known(Failures(900.0, seconds=9000.0, count=9), Failures(900.0, seconds=9000.0, count=2))


@pytest.mark.parametrize(
    ("tiers", "count"),
    [
        ([lastgood.Tier("memory://")], 2),
        ([lastgood.Tier("memory://", copies=2)], 0),
        ([lastgood.Tier("s3://bucket/run")], 0),
        ([lastgood.Tier("/nvme/run")], 2),
    ],
)
def test_only_failures_count_that_the_places_above_do_not_survive(tiers, count):
    rule = Options(cadence="auto", tiers=tiers, tuning=lastgood.Tuning(mtbf=900.0)).rule_below(0, SEEN)
    assert (rule.failures.count, rule.failures.seconds, rule.failures.mtbf) == (count, 9000.0, 900.0)


def test_a_time_limit_for_durable_saves_bounds_copies_below_memory():
    def longest(url: str) -> float:
        options = Options(cadence="auto", tiers=[lastgood.Tier(url)], durable_within_seconds=60.0)
        return options.rule_below(0, Known()).longest_seconds

    assert longest("memory://") == 30.0 and longest("/nvme/run") == float("inf")


def test_a_home_adapts_below_a_tier_that_saves_at_every_step(tmp_path, monkeypatch):
    """What is decided depends on how fast the machine is, and on a slow one nothing was changed: decided here."""

    def doubled(auto: Auto, *_: object, **__: object) -> Auto:
        return replace(auto, interval_steps=20, reason="a save every 20 steps")

    monkeypatch.setattr(copy_pace, "adapt", doubled)
    events: list[lastgood.Event] = []
    front = lastgood.Tier(tmp_path / "front", cadence=lastgood.Every(steps=1))
    state, home = {"w": torch.zeros(100_000)}, tmp_path / "home"
    options = {"tiers": [front], "cadence": "auto", "retention": lastgood.Keep(last=99), "overhead": 0.05}
    with lastgood.Checkpointer(home, state, **options, on_event=events.append, save_on_exit=False) as ckpt:
        ckpt.restore()
        for n in range(1, 61):
            ckpt.step(n)
            ckpt.wait()
    copied = [one.step for one in lastgood.open(home).generations()]
    assert copied == [10, 30, 50]
    assert [one.detail for one in events if one.kind == "tuned"] == [f"{home}: a save every 20 steps"]

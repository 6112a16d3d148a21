"""With cadence="auto" the interval follows the measurements of the loop. Time is passed in; no test waits."""

from __future__ import annotations

import pytest
import torch

import lastgood
from lastgood.errors import Refused
from lastgood.loop.adaptive_interval import Pace
from lastgood.policy.tune import Auto


class Flown:
    """A save whose end is set by a test."""

    def __init__(self) -> None:
        self.seconds, self.good, self.over = 0.0, True, False

    def ended(self) -> bool:
        return self.over

    def is_committed(self) -> bool:
        return self.over and self.good


class Loop:
    """A simulated loop with steps of `t` seconds. A save takes `tw` seconds, and slows the steps beside it by `c`
    seconds in total."""

    def __init__(self, t: float, tw: float, c: float, overhead: float = 0.1) -> None:
        self.t, self.tw, self.c, self.now, self.n, self.last = t, tw, c, 0.0, 0, 0
        self.pace, self.flying, self.reasons = Pace(Auto(overhead=overhead)), [], []
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
                save = Flown()
                self.pace.begun(save, self.n, self.now, 0.0)
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


@pytest.mark.parametrize("options", [{"cadence": "always"}, {"overhead": 0.1}, {"cadence": "auto", "overhead": 0.0}])
def test_an_invalid_cadence_is_refused_before_anything_is_changed(tmp_path, options):
    with pytest.raises(Refused):
        lastgood.Checkpointer(tmp_path / "run", {}, **options)
    assert not (tmp_path / "run").exists()

"""The tuner: formulas against the paper and each other, an interval that does not oscillate, and small real
measurements."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lastgood.cli import app, tuning
from lastgood.errors import LastgoodError, NoSpace, NotARun, NotWritable, Refused, TierDown
from lastgood.policy import tune
from lastgood.policy.interval import Rule
from lastgood.policy.tune import Auto, Measured, Setting, adapt, choose, interval_steps
from lastgood.run import access, measure, scratch
from lastgood.run.trial_saves import TrainingLoad, TrialSaves
from lastgood.storage.directory import Disk
from lastgood.storage.disk_upload import DiskUpload

pytestmark = pytest.mark.slow

SECONDS = st.floats(1e-4, 1e4)
OVERHEADS = st.floats(0.001, 1.0)
IN_FLIGHT = st.integers(1, 8)
MiB = 1 << 20


# ---- the interval ------------------------------------------------------------------------------------------------


def test_the_example_of_the_paper_saves_every_18_steps() -> None:
    """PCcheck, OPT-1.3B: Tw 37 s, 2 s per step, one save in flight, 3 %. With q = 0.03 in place of 1.03 the result
    would be 617."""
    assert interval_steps(write_seconds=37, in_flight=1, overhead=0.03, step_seconds=2) == 18
    assert interval_steps(37, 2, 0.03, 2) == 9


def test_only_copying_beyond_the_budget_lengthens_the_interval() -> None:
    """0.5 s lost per save at 3 % of 2 s per step allows 9 steps, so writing decides (18); 3 s lost per save require
    50."""
    assert interval_steps(37, 1, 0.03, 2, contention_seconds=0.5) == 18
    assert interval_steps(37, 1, 0.03, 2, contention_seconds=3.0) == 50


def test_a_whole_number_of_steps_is_not_rounded_up_by_a_rounding_error() -> None:
    assert interval_steps(4.017, 1, 0.03, 0.3) == 13  # 4.017 / 0.309 is 13.000000000000002
    assert interval_steps(1e-9, 1, 0.03, 1.0) == 1


@given(SECONDS, IN_FLIGHT, OVERHEADS, SECONDS, st.floats(0, 1e4))
def test_the_interval_is_the_shortest_within_the_budget(tw: float, n: int, overhead: float, t: float, c: float) -> None:
    steps = interval_steps(tw, n, overhead, t, c)
    assert tune.expected_overhead(steps, tw, n, t, c) <= overhead * (1 + 1e-9) + 1e-9
    if steps > 1:
        assert tune.expected_overhead(steps - 1, tw, n, t, c) >= overhead * (1 - 1e-9)


@given(SECONDS, IN_FLIGHT, OVERHEADS, SECONDS, st.floats(0, 1e4), st.floats(1, 10))
def test_the_interval_grows_with_the_cost_and_shrinks_with_the_budget(
    tw: float, n: int, overhead: float, t: float, c: float, more: float
) -> None:
    steps = interval_steps(tw, n, overhead, t, c)
    assert interval_steps(tw * more, n, overhead, t, c) >= steps
    assert interval_steps(tw, n, overhead, t, c * more) >= steps
    assert interval_steps(tw, n + 1, overhead, t, c) <= steps
    assert interval_steps(tw, n, overhead * more, t, c) <= steps
    assert interval_steps(tw, n, overhead, t * more, c) <= steps


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["write_seconds", "in_flight", "overhead", "step_seconds", "contention_seconds"])
def test_senseless_numbers_are_refused(name: str, bad: float) -> None:
    numbers = {"write_seconds": 1.0, "in_flight": 1, "overhead": 0.03, "step_seconds": 1.0, "contention_seconds": 1.0}
    if name == "contention_seconds" and bad == 0.0:
        return
    with pytest.raises(Refused, match=name):
        interval_steps(**{**numbers, name: bad})  # type: ignore[arg-type]


def test_an_infinite_interval_is_refused() -> None:
    with pytest.raises(Refused, match="no interval"):
        interval_steps(1e308, 1, 1e-300, 1e-300, 1e308)


# ---- the time that a crash costs ---------------------------------------------------------------------------------


@given(st.floats(0, 1e3), st.integers(1, 1000), SECONDS, IN_FLIGHT, SECONDS)
def test_the_recovery_bound_equals_the_papers_and_lies_between_older_ones(
    load: float, f: int, t: float, n: int, tw: float
) -> None:
    bound = tune.recovery_bound_seconds(load, f, t, n, tw)
    assert bound == pytest.approx(load + f * t + t * min(n * f, tw / t))
    assert bound >= tune.stop_and_write_bound_seconds(load, f, t) == pytest.approx(load + f * t)
    assert tune.recovery_bound_seconds(load, f, t, 1, tw) <= tune.one_in_flight_bound_seconds(load, f, t) * (1 + 1e-9)


def test_one_save_lasting_until_the_next_gives_the_bound_of_checkfreq() -> None:
    assert (
        tune.recovery_bound_seconds(5, 10, 2, 1, write_seconds=100) == 45 == tune.one_in_flight_bound_seconds(5, 10, 2)
    )
    assert tune.recovery_bound_seconds(5, 10, 2, 3, write_seconds=4) == 29  # the data written in 4 s, not 3 intervals
    with pytest.raises(Refused):
        tune.recovery_bound_seconds(-1, 10, 2, 1, 4)


# ---- candidates and the choice among them ------------------------------------------------------------------------


@given(st.integers(1 << 20, 1 << 40), st.integers(1, 1 << 40), st.integers(1, 1 << 36))
def test_every_candidate_fits_the_memory_and_the_disk(memory: int, disk: int, state: int) -> None:
    if disk // state < 3:
        with pytest.raises(Refused, match="times"):
            tune.candidates(memory, disk, state)
        return
    found = tune.candidates(memory, disk, state)
    assert {one.in_flight for one in found} >= {1}
    for one in found:
        assert (one.in_flight + 2) * state <= disk and one.in_flight <= tune.MOST_IN_FLIGHT
        assert one.least_bytes <= memory and one.chunk_bytes % 4096 == 0 < one.chunk_bytes


def test_the_range_of_n_in_the_paper_is_s_over_m_less_two() -> None:
    found = tune.candidates(3 * 10**9, 9 * 10**9, 15 * 10**8)
    assert {one.in_flight for one in found} == {1, 2, 3, 4}
    assert {one.chunk_bytes for one in found} == {4 * MiB, 8 * MiB, 16 * MiB}
    with pytest.raises(Refused, match="four pages"):
        tune.candidates(1000, 9 * 10**9, 15 * 10**8)


def measured(n: int, tw: float, p: int = 2, b: int = 8 * MiB) -> Measured:
    return Measured(Setting(n, p, b), tw)


def test_n_minimises_tw_over_n_and_noise_adds_no_memory() -> None:
    assert choose([measured(1, 1.0), measured(2, 1.2), measured(3, 2.4)]).setting.in_flight == 2
    assert choose([measured(1, 1.0), measured(2, 1.9), measured(3, 2.75)]).setting.in_flight == 1
    assert choose([measured(1, 1.00, 4), measured(1, 1.05, 2), measured(1, 1.2, 1)]).setting.writers == 2
    assert choose([measured(1, 1.0, 2, 16 * MiB), measured(1, 1.05, 2, 4 * MiB)]).setting.chunk_bytes == 4 * MiB
    with pytest.raises(Refused):
        choose([])


def test_saves_in_flight_beyond_one_save_per_step_gain_nothing() -> None:
    found = [measured(1, 0.024), measured(2, 0.016), measured(4, 0.019)]
    assert choose(found).setting.in_flight == 4
    assert choose(found, enough_seconds=0.8).setting.in_flight == 1


@given(st.lists(st.builds(measured, IN_FLIGHT, SECONDS, st.integers(1, 4)), min_size=1))
def test_the_choice_is_never_much_slower_than_the_best_candidate(found: list[Measured]) -> None:
    assert choose(found).seconds_per_save <= min(one.seconds_per_save for one in found) * 1.1**2 * (1 + 1e-9)


def searched(allowed: list[Setting], seconds: Callable[[Setting], float], enough: float = 0.0) -> list[Setting]:
    found: list[Measured] = []
    while setting := tune.next_setting(allowed, found, enough):
        assert setting in allowed and setting not in [one.setting for one in found]
        found.append(Measured(setting, seconds(setting)))
    return [one.setting for one in found]


def test_the_search_goes_one_coordinate_at_a_time_and_n_comes_last() -> None:
    allowed = tune.candidates(1 << 34, 1 << 40, 1 << 30)
    tried = searched(allowed, lambda one: 1.0 if one.writers == 3 and one.chunk_bytes == 4 * MiB else 1.5)
    assert [(one.in_flight, one.writers) for one in tried[:4]] == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert len(tried) == 6 + tune.MOST_IN_FLIGHT - 1 < len(allowed)
    assert tried[6:] == [Setting(n, 1, 4 * MiB) for n in range(2, 9)]


def test_the_search_ends_when_more_saves_in_flight_gain_nothing() -> None:
    allowed = tune.candidates(1 << 34, 1 << 40, 1 << 30)
    assert max(one.in_flight for one in searched(allowed, lambda one: float(max(one.in_flight, 2)))) == 4
    assert max(one.in_flight for one in searched(allowed, lambda _: 1.0, enough=1.0)) == 1
    assert max(one.in_flight for one in searched(allowed, lambda _: 1.0, enough=0.4)) == 3


@given(st.integers(1 << 20, 1 << 34), st.integers(3, 20), st.randoms(use_true_random=False))
def test_the_search_terminates_for_any_measurements(memory: int, times: int, random: Any) -> None:
    allowed = tune.candidates(memory, times * (1 << 30), 1 << 30)
    assert len(searched(allowed, lambda _: random.uniform(1, 2))) <= 6 + tune.MOST_IN_FLIGHT


# ---- during training ---------------------------------------------------------------------------------------------

EDGES = st.sampled_from([0.9, 1.1]) | st.floats(0.9, 1.1)


def played(auto: Auto, rounds: list[tuple[float, float, float]]) -> list[int]:
    """The interval after each round, without repetitions."""
    intervals = [auto.interval_steps]
    for t, tw, c in rounds:
        auto = adapt(auto, t, tw, c)
        if auto.interval_steps != intervals[-1]:
            intervals.append(auto.interval_steps)
    return intervals


@given(
    st.floats(0.01, 10),
    st.floats(0.3, 8) | st.floats(8, 1000),
    st.floats(0.0, 1.5),
    IN_FLIGHT,
    st.integers(1, 8) | st.integers(8, 2000),
    st.lists(st.tuples(EDGES, EDGES, EDGES), min_size=1, max_size=20),
)
@example(1.0, 1.02, 0.0, 1, 1, [(0.9, 1.1, 1.0)] + [(1.1, 0.9, 1.0)] * 5)
def test_noise_of_ten_percent_never_makes_the_interval_oscillate(
    t: float, wanted: float, copying: float, n: int, first: int, noise: list[tuple[float, float, float]]
) -> None:
    """In any order of the noise, an interval that has risen does not fall again, and it settles. This holds for small
    intervals too: between 1 and 2 steps, a factor alone gives no hysteresis."""
    tw, c = wanted * 1.03 * t * n, wanted * copying * 0.03 * t
    intervals = played(Auto(Rule(overhead=0.03), n, first), [(t * x, tw * y, c * z) for x, y, z in noise])
    rises = [b > a for a, b in itertools.pairwise(intervals)]
    assert False not in rises[1:], intervals  # after the first change the interval only rises, so no value repeats
    assert len(set(intervals)) == len(intervals)


@given(st.floats(0.01, 10), st.floats(0.01, 1000), st.floats(0, 10), IN_FLIGHT, st.integers(1, 10000))
def test_the_interval_converges_within_ten_percent_of_the_budget(
    t: float, tw: float, c: float, n: int, first: int
) -> None:
    auto = Auto(Rule(overhead=0.03), n, first)
    for _ in range(40):
        auto = adapt(auto, t, tw, c)
    wanted = interval_steps(tw, n, 0.03, t, c)
    assert wanted / 1.1 - 1 <= auto.interval_steps <= 1.5 * wanted + 1


def test_two_stalls_of_the_disk_change_nothing_after_enough_measurements() -> None:
    auto = Auto(interval_steps=18)
    for tw in (37.0, 37.0, 37.0, 3700.0, 3700.0, 37.0):
        auto = adapt(auto, 2.0, tw, 0.0)
    assert auto.interval_steps == 18 and auto.reason == ""


def test_a_first_save_that_stalls_a_minute_only_doubles_the_interval() -> None:
    auto = adapt(Auto(interval_steps=10), 0.1, 60.0, 0.0)
    assert auto.interval_steps == 20 and "every 20 steps instead of 10" in auto.reason and "Tw 60 s" in auto.reason


def test_the_interval_follows_a_disk_ten_times_slower_and_back() -> None:
    assert played(Auto(interval_steps=18), [(2.0, 37.0, 0.0)] * 5 + [(2.0, 370.0, 0.0)] * 9) == [18, 36, 72, 144, 180]
    assert played(Auto(interval_steps=180), [(2.0, 37.0, 0.0)] * 3) == [180, 18]


def test_the_interval_grows_until_some_step_has_no_save_in_flight() -> None:
    """With an interval of 1, a save was in flight at every step, so the step time was never measured and the
    interval would never have changed."""
    auto = adapt(Auto(interval_steps=1), None, 37.0, None)
    assert auto.interval_steps == 2 and "free of a save" in auto.reason
    auto = adapt(auto, 2.0, 37.0, None)
    assert auto.interval_steps == 4
    assert adapt(auto, None, 37.0, 0.0).interval_steps == 8  # the earlier step time still counts


def test_the_first_save_is_in_time_where_saves_must_be_durable() -> None:
    """The first interval was ten steps. Where these took longer than the time, `NothingDurable` ended each attempt of a
    healthy training before any save was begun."""
    assert Auto.first(Rule()).interval_steps == tune.FIRST_STEPS
    assert Auto.first(Rule(longest_seconds=300.0)).interval_steps == 1


def test_an_interval_beyond_its_bound_falls_at_once() -> None:
    """Ten steps of ten seconds were kept where 60 s were allowed: the band that keeps an interval still allows more."""
    auto = Auto(Rule(longest_seconds=60.0), interval_steps=10)
    assert adapt(auto, 10.0, 25.0, 5.0).interval_steps == 6
    unknown = adapt(Auto(Rule(longest_seconds=60.0), interval_steps=2), None, 51.0, None, busy_seconds=20.0)
    assert unknown.interval_steps == 2, "no step was free of a save, and four of them may take 80 s"
    kept = Auto(Rule(longest_seconds=60.0), interval_steps=9)
    assert adapt(kept, 10.0, 90.0, 5.0).interval_steps == 9, "no shorter, or saves would queue up"


def test_a_shorter_interval_makes_a_save_due_at_once() -> None:
    auto = adapt(Auto(interval_steps=100), 1.0, 1.0, 0.0, step=30)
    assert auto.interval_steps == 1 and auto.due(31, 30) and not auto.due(30, 30)


@pytest.mark.parametrize("bad", [math.nan, -1.0, math.inf])
def test_senseless_measurements_are_refused(bad: float) -> None:
    for numbers in ((bad, 1.0, 0.0), (1.0, bad, 0.0), (1.0, 1.0, bad)):
        with pytest.raises(Refused):
            adapt(Auto(), *numbers)
    for wrong in ({"in_flight": 0}, {"interval_steps": 0}):
        with pytest.raises(Refused):
            replace(Auto(), **wrong)
    with pytest.raises(Refused):
        Rule(overhead=bad)


# ---- the command -------------------------------------------------------------------------------------------------

EFFORT = measure.Effort(sample_bytes=1 << 20, repeats=1, limit_seconds=20.0)
SMALL = ("--state-bytes", "2MB", "--step-seconds", "0.01", "--memory", "16MiB", "--disk", "8MB", "--quick")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run `lastgood tune` in this process with one measurement per figure; returns exit code, stdout and stderr."""
    monkeypatch.setattr(measure, "QUICK", EFFORT)

    def run_it(*args: object) -> tuple[int, str, str]:
        code = app.main(["tune", *map(str, args)])
        return code, *capsys.readouterr()

    return run_it


def test_tune_measures_chooses_and_deletes_its_files(tmp_path: Path, call: Any) -> None:
    code, out, err = call(tmp_path / "not" / "yet" / "run", *SMALL, "--json")
    report = json.loads(out)
    assert code == 0 and os.listdir(tmp_path) == [] and "at most" in err
    assert {one["in_flight"] for one in report["measured"]} <= {1, 2}  # S / m - 2
    (chosen,) = [one for one in report["measured"] if one["chosen"]]
    for name in ("in_flight", "writers", "chunk_bytes"):
        assert report[name] == chosen[name]
    tw, c, n = report["write_seconds"], report["contention_seconds"], report["in_flight"]
    assert report["interval_steps"] == interval_steps(tw, n, 0.03, 0.01, c)
    assert 0 <= report["expected_overhead"] <= 0.03 and min(tw, report["load_seconds"], report["fixed_seconds"]) > 0
    assert report["recovery_bound_seconds"] == tune.recovery_bound_seconds(
        report["load_seconds"], report["interval_steps"], 0.01, n, tw
    )


def test_the_line_to_paste_is_python_with_the_chosen_options(tmp_path: Path, call: Any) -> None:
    """Directory names may contain quotes, backslashes and letters of any script."""
    run = tmp_path / 'a "b" \\ ü 𝛼'
    report = json.loads(call(run, *SMALL, "--json")[1])
    pasted: dict[str, Any] = {}

    class Face:
        Every = staticmethod(lambda steps: ("every", steps))
        Keep = staticmethod(lambda last: ("keep", last))
        Checkpointer = staticmethod(lambda path, state, **options: pasted.update(path=path, **options))

    eval(report["line"], {"lastgood": Face, "state": {}})
    assert pasted["path"] == str(run) and pasted["cadence"] == ("every", report["interval_steps"])
    assert [pasted[name] for name in ("in_flight", "writers", "chunk", "memory")] == [
        report["in_flight"], report["writers"], report["chunk_bytes"], 16 * MiB,
    ]  # fmt: skip
    # Generations: those that fit on the disk, without those in flight and the two that stay.
    most = 4 - report["in_flight"] - 2
    assert pasted.get("retention") == (("keep", most) if most else None) and report["notes"]


def test_tune_prints_for_people_without_colour_in_a_pipe(tmp_path: Path, call: Any) -> None:
    code, out, err = call(tmp_path / "run", *SMALL)
    assert code == 0 and "\x1b" not in out + err
    for phrase in ("chosen", "save every", "expected overhead", "after a crash at most", "lastgood.Checkpointer("):
        assert phrase in out


def test_tune_refuses_a_disk_too_small_for_a_save_before_it_writes(tmp_path: Path, call: Any) -> None:
    code, out, err = call(tmp_path / "run", "--state-bytes", "2MB", "--step-seconds", 1, "--disk", "5MB")
    assert code == 3 and out == "" and "6,000,000" in err and os.listdir(tmp_path) == []


def test_tune_refuses_a_disk_too_small_for_its_samples_before_it_writes(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = tuning.shutil.disk_usage(tmp_path)._replace(free=3_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    monkeypatch.setattr(access, "for_writing", None)
    code, out, err = call(tmp_path / "run", *SMALL)
    assert code == 5 and out == "" and "free are 3,000,000" in err and os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "wrong",
    [
        ("--state-bytes", "nan"), ("--state-bytes", "0"), ("--state-bytes", "-1GB"), ("--state-bytes", "1e30"),
        ("--state-bytes", "1XB"), ("--step-seconds", "0"), ("--step-seconds", "nan"), ("--step-seconds", "soon"),
        ("--overhead", "-0.1"), ("--overhead", "inf"), ("--memory", "lots"), ("--disk", ""),
    ],
)  # fmt: skip
def test_a_wrong_number_is_a_wrong_command_line(tmp_path: Path, call: Any, wrong: tuple[str, str]) -> None:
    code, out, err = call(tmp_path / "run", *SMALL, *wrong)
    assert code == 2 and out == "" and "Traceback" not in err and os.listdir(tmp_path) == []
    assert json.loads(call(tmp_path / "run", *SMALL, *wrong, "--json")[1])["error"] == "Usage"


@pytest.mark.parametrize(
    ("text", "count"),
    [("1.5GB", 15 * 10**8), ("512MiB", 512 * MiB), ("1e9", 10**9), ("7", 7), ("2 kB", 2000), (".5gib", 1 << 29),
     ("3T", 3 * 10**12), ("12B", 12), ("1e3MB", 10**9)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text: str, count: int) -> None:
    assert tuning.bytes_of(text) == count


# ---- what a measurement must not do ------------------------------------------------------------------------------


def figures(
    run: Path,
    count_bytes: Callable[[int], object] = lambda _: None,
    state: int = 2_000_000,
    effort: measure.Effort = EFFORT,
) -> measure.Figures:
    return measure.figures(
        str(run), tune.candidates(1 << 25, 5 * state, state), state, 1 << 25, effort, count_bytes=count_bytes
    )


def test_a_sample_of_one_page_stands_for_a_state_a_thousand_times_larger(
    tmp_path: Path,
) -> None:
    """The cost of one page was subtracted; where noise made that the whole figure, 1 GiB came out as fast as 1 MiB."""
    with scratch.opened(str(tmp_path / "run")) as tier:
        trials = TrialSaves(tier, 1 << 30, 1 << 25, lambda _: None, time.monotonic)
        trials.set_sample(1 << 20)
        assert trials.extrapolated_seconds(0.02, fixed_seconds=0.03) == pytest.approx(0.02 + 1023 * 0.01)
        assert trials.extrapolated_seconds(0.12, fixed_seconds=0.02) == pytest.approx(0.02 + 1024 * 0.10)
        trials.set_sample(1 << 30)
        assert trials.extrapolated_seconds(0.12, fixed_seconds=0.02) == 0.12


def test_tune_writes_no_more_than_it_announced(tmp_path: Path) -> None:
    counted, most = [0], [0]

    def count_bytes(count: int) -> None:
        counted[0] += count
        held = 0
        for path in tmp_path.rglob("*"):
            with contextlib.suppress(FileNotFoundError):  # other threads rename and delete files meanwhile
                held += path.stat().st_size if path.is_file() else 0
        most[0] = max(most[0], held)

    bounds = measure.bounds(tune.candidates(1 << 25, 10_000_000, 2_000_000), 2_000_000, EFFORT)
    figures(tmp_path / "run", count_bytes)
    assert 0 < counted[0] <= bounds.written_bytes and 0 < most[0] <= bounds.at_once_bytes


def test_a_search_out_of_time_chooses_from_its_measurements_and_reports_it(
    tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "QUICK", replace(EFFORT, limit_seconds=0.0))
    report = json.loads(call(tmp_path / "run", *SMALL, "--json")[1])
    assert len(report["measured"]) == 1 and "the time was up" in report["notes"][0]


def test_scattered_measurements_are_reported(tmp_path: Path, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a machine load of ten, three runs in a row chose 131, 6 and 54 steps and did not report the scatter."""
    found = figures(tmp_path / "run")
    for slowest, expected in ((1.4, False), (1.6, True)):
        scattered = replace(found, write_seconds_range=(1.0, slowest))
        monkeypatch.setattr(measure, "figures", lambda *_, found=scattered: found)
        assert ("something else" in call(tmp_path / "run", *SMALL)[1]) is expected


@pytest.mark.parametrize("at", [1, 8, 20])
def test_an_interrupt_leaves_nothing_behind(tmp_path: Path, at: int) -> None:
    calls = [0]

    def count_bytes(_: int) -> None:
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        figures(tmp_path / "run", count_bytes)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [NoSpace("full"), TierDown("gone")])
@pytest.mark.parametrize("after", [0, 7, 30])
def test_a_disk_that_fails_ends_the_measurement_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: LastgoodError, after: int
) -> None:
    """The copying thread waits for chunks that the failed save will never release, and must be woken."""
    writes, real = [0], DiskUpload.write_at

    def write_at(self: DiskUpload, mv: memoryview, offset: int) -> None:
        writes[0] += 1
        if writes[0] > after:
            raise error
        real(self, mv, offset)

    monkeypatch.setattr(DiskUpload, "write_at", write_at)
    monkeypatch.setattr(tune, "CHUNK_CHOICES", (65536, 131072))
    with pytest.raises(type(error)):
        figures(tmp_path / "run")
    assert os.listdir(tmp_path) == []


def test_a_save_waiting_for_chunks_ends_with_the_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load test ran until all saves were durable; the second save, copied by half, never became durable."""
    rounds, copied = iter(range(1_000_000)), [0]
    create, write_at = Disk.create, DiskUpload.write_at
    second_begun, loading = threading.Event(), threading.Event()

    def count_bytes(count: int) -> None:
        copied[0] += count
        if copied[0] > 2_500_000:
            second_begun.set()

    def refused_late(self: Disk, name: str, length: int) -> DiskUpload:
        if "000000000001-" in name:
            assert second_begun.wait(30)
            raise NoSpace("full")
        return create(self, name, length)

    def written_late(self: DiskUpload, mv: memoryview, offset: int) -> None:
        assert loading.wait(30)
        write_at(self, mv, offset)

    def until(done: Callable[[], bool]) -> None:
        loading.set()
        while not done():
            next(rounds)

    monkeypatch.setattr(Disk, "create", refused_late)
    monkeypatch.setattr(DiskUpload, "write_at", written_late)
    load = TrainingLoad(time.monotonic)
    monkeypatch.setattr(load, "run_until", until)
    with scratch.opened(str(tmp_path / "run")) as tier:
        trials = TrialSaves(tier, 2_000_000, 1 << 25, count_bytes, time.monotonic)
        trials.set_sample(2_000_000)
        trials.make_arena(Setting(2, 1, 65536), 3_000_000)
        with pytest.raises(NoSpace):
            trials.save(Setting(2, 1, 65536), trials.image, load)


def test_the_next_tune_deletes_the_scratch_directory_of_a_killed_one(tmp_path: Path, call: Any) -> None:
    code = f"""
import os, pathlib, signal
from lastgood.policy import tune
from lastgood.run import measure
def count_bytes(_):
    if any(pathlib.Path({str(tmp_path)!r}).rglob("*.safetensors")):
        os.kill(os.getpid(), signal.SIGKILL)
allowed = tune.candidates(1 << 25, 10_000_000, 2_000_000)
measure.figures({str(tmp_path / "run")!r}, allowed, 2_000_000, 1 << 25, measure.QUICK, count_bytes=count_bytes)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False, timeout=60).returncode == -9
    (remnant,) = os.listdir(tmp_path)
    assert remnant.startswith("run.tune-") and any((tmp_path / remnant).rglob("*.safetensors"))
    (tmp_path / "running.tune-00000000").mkdir()  # the scratch directory of another run
    code, out, _ = call(tmp_path / "run", *SMALL)
    assert code == 0 and os.listdir(tmp_path) == ["running.tune-00000000"] and f"removed {remnant}" in out


def test_tune_beside_a_folder_that_may_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in a PermissionError with its traceback."""

    def refuse(path: str) -> list[str]:  # the user of the tests may be root, who can read everything
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    for place in (tmp_path / "run", tmp_path):  # beside it, and the folder itself
        with pytest.raises(NotWritable, match="Permission denied"):
            scratch.clear(str(place))


def test_tune_keeps_locked_scratch_and_folders_that_only_resemble_it(tmp_path: Path, call: Any) -> None:
    for name, inside in (("run.tune-0123abcd", "photo.jpg"), ("run.tune-0123abce", "lastgood.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).write_bytes(b"x")
    generation = tmp_path / "run.tune-0123abcf" / "gen" / "000000000001-9f3ac21b"
    generation.mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.tune-01234567").symlink_to(tmp_path / "empty")
    with access.for_writing(tmp_path / "run.tune-11111111", "atomic_dirsync"):
        before = sorted(tmp_path.rglob("*"))
        assert scratch.clear(str(tmp_path / "run")) == [] and sorted(tmp_path.rglob("*")) == before
    assert scratch.clear(str(tmp_path / "run")) == ["run.tune-11111111"]


def test_tune_does_not_change_an_existing_run(tmp_path: Path, call: Any) -> None:
    run = tmp_path / "run"
    with access.for_writing(run, "atomic_dirsync") as tier:
        tier.put_new("lastgood.json", b"{}")
        before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
        assert call(run, *SMALL)[0] == 0  # beside a trainer that has the run open
        assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before and os.listdir(tmp_path) == ["run"]


def test_tune_refuses_an_impossible_path_and_leaves_it_unchanged(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"x")
    for place in ("photos", "photos/one.jpg", "photos/one.jpg/run"):
        with pytest.raises(NotARun):
            figures(tmp_path / place)
    assert os.listdir(tmp_path) == ["photos"] and os.listdir(tmp_path / "photos") == ["one.jpg"]
    (tmp_path / "empty").mkdir()
    assert scratch.parent_folder(str(tmp_path / "empty")) == str(tmp_path)


def test_a_run_on_its_own_mount_is_measured_on_that_mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        found = real(path, **options)
        return os.stat_result([*found[:2], 77 if str(path).endswith("mounted") else 76, *found[3:]])

    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(Refused, match="disk of its own"):
        scratch.parent_folder(str(tmp_path / "mounted"))
    assert scratch.parent_folder(str(tmp_path / "mounted" / "run")) == str(tmp_path / "mounted")


def test_tune_needs_no_torch(tmp_path: Path) -> None:
    code = f"""
import sys
from lastgood.cli.app import main
print(main(["tune", {str(tmp_path / "run")!r}, *{SMALL!r}]), "torch" in sys.modules)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=False, timeout=60, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "0 False"

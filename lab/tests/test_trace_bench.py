"""`lastgood bench trace`: what the notes of a killed training are counted as, and a replay of real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lastgood_lab import trace_bench, trace_cluster
from lastgood_lab.trace_account import account


def note(what: str, at: float, step: int, seconds: float = 1.0) -> dict[str, Any]:
    return {"what": what, "at": at, "step": step, "seconds": seconds}


FIRST = [note("step", float(at), at) for at in range(1, 10)]
AGAIN = [note("restored", 13.0, 6, 0.5), *(note("step", 14.0 + at, 7 + at) for at in range(6))]


def test_a_failure_costs_the_time_until_a_step_begins_and_lost_steps() -> None:
    """Killed at 9.5 s after step 9; step 6 is restored, and the next step ends at 14 s after one second."""
    found = account([*FIRST, *AGAIN], [9.5], 1.0, 19.5, 185.0, plain=0.9)
    assert (found.steps, found.redone, found.down) == (11, [3], [3.5])
    assert found.step_seconds == 1.0 and found.goodput == pytest.approx(11 * 0.9 / 18.5)
    assert found.of_ideal == pytest.approx(11 * 0.9 / 15.0)
    assert found.uncompressed == pytest.approx((1 - 6.5 / 185.0) * 0.9)


def test_the_step_with_whose_end_the_time_begins_does_not_count() -> None:
    """Nine steps of a second each, without saves and failures, had a goodput of 1.125 in the eight seconds between."""
    assert account(FIRST, [], 1.0, 9.0, 80.0, plain=1.0).goodput == 1.0


def test_a_failure_after_which_nothing_came_back_costs_all_that_follows() -> None:
    found = account([*FIRST, note("restored", 13.0, 6)], [9.5], 1.0, 19.5, 185.0, plain=1.0)
    assert (found.steps, found.redone, found.down) == (5, [0], [10.0])


def test_steps_are_lost_once_if_a_failure_comes_before_a_new_step() -> None:
    early = [note("restored", 10.0, 3)]
    found = account([*FIRST, *early, *AGAIN], [9.5, 11.0], 1.0, 19.5, 185.0, plain=1.0)
    assert found.redone == [0, 3] and found.down == [1.5, 2.0]


def test_what_was_saved_counts_where_nothing_came_back() -> None:
    found = account([*FIRST, note("saved", 8.5, 8)], [9.5], 1.0, 19.5, 185.0, plain=1.0)
    assert found.steps == 7


def test_a_step_of_a_rank_that_was_not_killed_belongs_to_the_life_before() -> None:
    found = account([*FIRST, note("step", 9.8, 10), *AGAIN], [9.5], 1.0, 19.5, 185.0, plain=1.0)
    assert found.redone == [4] and found.down == [3.5]


def test_the_calculation_has_all_drops_of_the_replayed_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a trace that was compressed by ten it took those of the first tenth: 0.970 where 0.841 was right. A trace
    that had been edited took the rows of the one before."""
    accounts = [account([*FIRST, *AGAIN], [9.5], 1.0, 19.5, 185.0, plain=1.0)]
    monkeypatch.setattr(trace_bench, "CONTENDERS", ("PCcheck",))
    monkeypatch.setattr(trace_bench, "_plain", lambda *_: 1.0)
    monkeypatch.setattr(trace_bench, "_replayed", lambda *_: accounts.pop())
    options = trace_bench.Options(tmp_path, tmp_path / "trace.csv")
    text = ",Time,GPUs\n0,0,8\n1,90,7\n2,185,7\n"
    options.trace.write_text(text)
    found = trace_bench.report(trace_bench.run(options, print), options)
    assert "185 s with 1 drops, divided by 10" in found.about
    assert float(found.tables[1].rows[0][1]) < 0.8, "a restart of 3.5 s in 18.5"
    assert len(trace_bench.run(options, print)) == 1, "known"
    options.trace.write_text(text.replace("90", "91"))
    with pytest.raises(IndexError):
        trace_bench.run(options, print)


@pytest.mark.long
@pytest.mark.slow
def test_a_trace_is_replayed_through_real_processes(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One machine is lost; its replacement has the disk at once."""
    monkeypatch.setattr(trace_bench, "CONTENDERS", ("PCcheck",))
    monkeypatch.setattr(trace_bench, "CALM_SECONDS", 0.5)
    monkeypatch.setattr(trace_cluster, "ATTACH_SECONDS", 0.0)
    monkeypatch.setattr(trace_cluster, "DETECT_SECONDS", 0.5)
    trace = tmp_path / "trace.csv"
    trace.write_text(",Time,GPUs\n0,0,8\n1,20,7\n2,90,7\n")
    code, text, err = bench("trace", "--out", tmp_path, "--trace", trace, "--compress", 10, "--device-seconds", 0.01)
    assert code == 0, err
    assert "one machine is killed at each drop" in text.lower() and "| PCcheck |" in text

"""The lab: its shares, its trials, and a seeded slice of each experiment. The campaigns: `lastgood lab NAME`."""

from __future__ import annotations

import csv
import json

import pytest

from lastgood.lab import corrupt, crash, trials
from lastgood.lab.journal import Journal
from lastgood.lab.trials import Share


@pytest.mark.parametrize(
    ("hits", "total", "low", "high"),
    [
        (0, 430, 0.0, 0.00885),
        (400, 400, 0.99049, 1.0),
        (1, 2, 0.09453, 0.90547),
        (0, 0, 0.0, 1.0),
        (10, 10, 0.72247, 1),
    ],
)
def test_intervals_are_wilsons(hits, total, low, high):
    assert Share(hits, total).interval == pytest.approx((low, high), abs=1e-5)


def double(key: trials.Row) -> trials.Row:
    return {"twice": 2 * key["number"]}


def test_trials_that_were_done_are_not_done_again(tmp_path):
    keys = [{"number": number} for number in range(5)]
    journal = Journal(tmp_path / "trials.jsonl")
    journal.put({"twice": -1}, number=3)
    told: list[str] = []
    rows = trials.run(keys, double, journal, 1, told.append)
    assert [row["twice"] for row in rows] == [0, 2, 4, -1, 8] and told == ["5 of 5 trials"]
    assert trials.run(keys, pytest.fail, Journal(tmp_path / "trials.jsonl"), 1, told.append) == rows


def test_corruption_is_found_by_the_layers_that_are_there_for_it_and_never_loaded(tmp_path):
    corrupt.begin(tmp_path)
    expected = {
        "none": set(),
        "bitflip": {"digests"},
        "truncate": {"structure", "contents", "digests"},
        "stale version": {"contents", "digests"},
        "lost file": {"structure"},
        "appended tail": {"structure", "digests"},
        "lost commit": {"structure"},
        "bitflip in commit": {"digests"},
        "bitflip in pointer": {"pointer"},
    }
    for kind in corrupt.KINDS:
        for parity in corrupt.PARITIES:
            row = corrupt.one({"kind": kind, "parity": parity, "trial": 0, "seed": 0})
            assert not row["wrong"] and row["detected"] == row["changed"] == (kind != "none"), kind
            assert {layer for layer in (*corrupt.LAYERS, "pointer") if row[layer]} >= expected.get(kind, set()), kind
            untouched = kind in ("none", "bitflip in pointer")
            assert (row["restored"] == corrupt.NEWER) >= untouched
            if parity == "10+2" and kind in ("bitflip", "lost manifest", "lost commit", "bitflip in commit"):
                assert row["restored"] == corrupt.NEWER and row["whole"], kind


def test_a_killed_save_leaves_the_group_whole_or_absent_and_the_run_usable(tmp_path):
    for mode in crash.MODES:
        for name, call, half in crash.points(mode)[:4] + crash.points(mode)[30:60:6]:
            row = crash.one({"mode": mode, "point": name, "call": call, "half": half, "trial": 0, "seed": 0})
            assert row["killed"] and row["usable"], (mode, name)
            assert row["group"] != "torn" or mode == "unsafe"
    for point in crash.MAIN:
        row = crash.one({"mode": crash.IN_PLACE, "point": point, "call": -1, "half": False, "trial": 0, "seed": 0})
        assert row["killed"] and row["group"] == "torn", "written in place, nothing survives"


def test_an_experiment_leaves_its_trials_its_summary_and_its_figures(tmp_path):
    key = {"mode": "unsafe", "point": "after_model", "call": 3, "half": False, "trial": 0, "seed": 0}
    found = {"killed": True, "acknowledged": False, "group": "absent", "usable": True, "restored": 10, "why": ""}
    rows = [{**key, **found}]
    options = trials.Options(tmp_path)
    files = trials.write(crash.report(rows, options), crash.summary(rows), tmp_path, "lastgood lab crash", "2026-11-21")
    assert {path.name for path in files} == {"report.md", "trials.csv", "summary.json", "usable.png", "usable.svg"}
    with (tmp_path / "trials.csv").open() as file:
        assert [row["group"] for row in csv.DictReader(file)] == ["absent"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["usable"]["unsafe"] == {"hits": 1, "total": 1, "wilson_low": 0.206549, "wilson_high": 1.0}
    assert "1 of 1 (20.7 to 100.0 %)" in (tmp_path / "report.md").read_text()

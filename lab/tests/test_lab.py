"""Experiments: their statistics, their trials, and a few seeded trials of each. `lastgood lab NAME` runs all trials."""

from __future__ import annotations

import csv
import json
import os
import shutil

import pytest
import torch

from lastgood.cli import app
from lastgood.errors import Refused
from lastgood_lab import corrupt, crash, guard, latency, peers, powerloss, ranks, scale, script, timeline, trials, wire
from lastgood_lab.journal import Journal
from lastgood_lab.trials import Share

pytestmark = pytest.mark.slow


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
def test_confidence_intervals_are_those_of_wilson(hits, total, low, high):
    assert Share(hits, total).interval == pytest.approx((low, high), abs=1e-5)


def test_the_command_of_the_package_runs_its_experiments(monkeypatch, capsys):
    """The plan of the study calls it `lastgood-lab recovery`, which no shell found."""
    monkeypatch.setattr("sys.argv", ["lastgood-lab", "recovery", "--suites", "none", "--out", "/nowhere"])
    assert script.main() == 3 and "none" in capsys.readouterr().err


@pytest.mark.parametrize("below", ["", "deep/er"])
@pytest.mark.parametrize(
    "command",
    [
        ["lab", "recovery", "--out"],
        ["lab", "corrupt", "--out"],
        ["lab", "latency", "--out", "new", "--place"],
        ["bench", "durable", "--out"],
        ["bench", "trace", "--trace", "any.csv", "--out"],
    ],
)
def test_a_file_in_the_place_of_a_directory_is_refused(command, below, tmp_path, monkeypatch, capsys):
    """It ended in the traceback of a NotADirectoryError."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("kept")
    assert app.main([*command, str(tmp_path / "file" / below)]) == 3
    assert f"{tmp_path / 'file'} is no directory" in capsys.readouterr().err
    assert [*tmp_path.iterdir()] == [tmp_path / "file"] and (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    "command",
    [
        ["lab", "corrupt", "--out"],
        ["lab", "latency", "--out", "new", "--place"],
        ["lab", "recovery", "--out", "new", "--cifar"],
        ["bench", "durable", "--out"],
        ["bench", "trace", "--out", "new", "--trace"],
        ["bench", "goodput", "--out", "new", "--trace"],
        ["bench", "goodput", "--out", "new", "--trace", "any.csv", "--journal"],
    ],
)
def test_no_path_of_the_lab_is_taken_from_a_url(command, tmp_path, monkeypatch, capsys):
    """`--out s3://bucket/b` and `--out=~/b` made folders named `s3:` and `~` beside the script."""
    monkeypatch.chdir(tmp_path)
    assert app.main([*command, "s3://bucket/b"]) == 3
    assert f"{command[-1]}='s3:/bucket/b' is a URL" in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("command", [["lab", "corrupt", "--out"], ["bench", "durable", "--out"]])
def test_a_folder_that_cannot_be_made_is_refused(command, tmp_path, monkeypatch, capsys):
    """`--out /proc/x` ended in a traceback, with exit code 1. A tilde is the home directory, here a file."""
    assert app.main([*command, "/proc/x"]) == 3
    assert "/proc/x: No such file or directory" in capsys.readouterr().err
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    assert app.main([*command, "~/b"]) == 3
    assert f"{tmp_path / 'file'} is no directory" in capsys.readouterr().err


def double(key: trials.Row) -> trials.Row:
    return {"twice": 2 * key["number"]}


def test_finished_trials_are_not_repeated(tmp_path):
    keys = [{"number": number} for number in range(5)]
    journal = Journal(tmp_path / "trials.jsonl")
    journal.put({"twice": -1}, number=3)
    progress: list[str] = []
    rows = trials.run(keys, double, journal, 1, progress.append)
    assert [row["twice"] for row in rows] == [0, 2, 4, -1, 8] and progress == ["5 of 5 trials"]
    assert trials.run(keys, pytest.fail, Journal(tmp_path / "trials.jsonl"), 1, progress.append) == rows


def test_corruption_is_found_by_its_layer_and_never_loaded(tmp_path):
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


def test_a_killed_save_leaves_its_group_complete_or_absent(tmp_path):
    for mode in crash.MODES:
        for name, call, half in crash.points(mode)[:4] + crash.points(mode)[30:60:6]:
            row = crash.one({"mode": mode, "point": name, "call": call, "half": half, "trial": 0, "seed": 0})
            assert row["killed"] and row["usable"], (mode, name)
            assert row["group"] != "torn" or mode == "unsafe"
    for point in crash.MAIN:
        row = crash.one({"mode": crash.IN_PLACE, "point": point, "call": -1, "half": False, "trial": 0, "seed": 0})
        assert row["killed"] and row["group"] == "torn", "a group that is written in place is torn"


def test_an_experiment_writes_its_trials_summary_and_figures(tmp_path):
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


def test_latency_times_every_mode_and_size_and_resumes(tmp_path):
    options = latency.Options(tmp_path, trials=1, sizes=(latency.GROUP_BYTES, 1_000_000))
    rows = latency.run(options, lambda _: None)
    assert len(rows) == 2 * len(latency.MODES) * latency.LEAST and all(row["seconds"] > 0 for row in rows)
    assert latency.run(options, pytest.fail) == rows, "nothing is left to do"
    summary, files = latency.summary(rows), latency.report(rows, options).draw(tmp_path)
    assert set(summary["seconds"]) == {f"{size} bytes, {mode}" for size in options.sizes for mode in latency.MODES}
    assert {path.name for path in files} == {"cdf.png", "cdf.svg", "sizes.png", "sizes.svg"}


def test_a_timeline_aligns_disk_and_events_and_exports_a_standard_trace(tmp_path):
    options = timeline.Options(tmp_path, seconds=1.0, width=64, every=2)
    try:
        rows = timeline.run(options, lambda _: None)
    except Refused as error:
        pytest.skip(f"{error}")  # the folder of the tests is not on a disk
    assert {"disk", "staged", "written", "durable"} <= {row["kind"] for row in rows}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    saved = [one["name"] for one in events if one.get("cat") == "durable"]
    *periodic, _at_the_end = sorted(int(name.removeprefix("step ")) for name in saved)
    assert periodic and all(step % 2 == 0 for step in periodic), "only the save at the end may have any step"
    assert all(one["dur"] > 0 for one in events if one["ph"] == "X")
    assert timeline.summary(rows)["events"]["durable"] == len(saved)


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs /dev/shm")
def test_a_timeline_of_no_disk_is_refused(tmp_path):
    with pytest.raises(Refused, match="block device"):
        timeline.run(timeline.Options(tmp_path, place="/dev/shm"), lambda _: None)


@pytest.fixture
def one_thread():
    """Limits torch to one thread, because its other compute threads do not exist in a forked process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("trouble", ["bitflip", "lost file", "killed", "a file that may not grow"])
def test_under_equal_faults_lastgood_loads_no_wrong_value_and_hides_none(trouble):
    for name in peers.CONTENDERS:
        row = peers.one({"contender": name, "trouble": trouble, "trial": 0, "seed": 0})
        assert row["outcome"] in peers.OUTCOMES
        if name == "lastgood":
            assert row["outcome"] == ("right" if trouble not in peers.DAMAGE else "older")
            assert not row["acknowledged"] or row["found"] == peers.STEPS[2]


def test_record_costs_are_measured_with_the_waiting_time_of_their_calls(tmp_path):
    options = scale.Options(tmp_path, ranks=(2, 8), pieces=(4, 16))
    rows = scale.run(options, lambda _: None)
    assert [(row["ranks"], row["pieces"]) for row in rows] == [(0, 0), (2, 4), (2, 16), (8, 16)]
    for row in rows[1:]:
        assert row["parts"] == 2 * (row["pieces"] // row["ranks"]), (
            "one of half as many ranks reads two parts of each tensor"
        )
        assert row["read_calls"] == row["ranks"] and row["delete_calls"] >= 2 * row["ranks"] + 1
    text = scale.report(rows, options).markdown("lastgood lab scale", "2026-11-22")
    assert "| 8 | 16 |" in text and "The coordinator needs at most" in text
    assert scale.summary(rows)["sizes"] == 3
    assert scale.run(options, pytest.fail) == rows, "nothing is left to do"


PACKAGES = {"ext4": "e2fsprogs", "xfs": "xfsprogs", "btrfs": "btrfs-progs"}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """The folder of a mounted xfs, which can clone files."""
    folder = tmp_path_factory.mktemp("powerloss")
    try:
        powerloss.here()
        powerloss.make("xfs", folder / "holder.img", 1024)
        with powerloss.mounted(folder / "holder.img", folder / "images") as at:
            yield at
    except Refused as error:
        pytest.skip(f"{error}")


def test_the_model_counts_crash_states_by_the_next_system_call(tmp_path, monkeypatch):
    chosen = [one for one in powerloss.SCENARIOS if one.name in ("first_save", "first_save_on_slots")]
    monkeypatch.setattr(powerloss, "SCENARIOS", chosen)
    monkeypatch.setattr(powerloss, "here", lambda: (_ for _ in ()).throw(Refused("no root")))
    progress: list[str] = []
    options = powerloss.Options(tmp_path, plays=1, jobs=1)
    rows = powerloss.run(options, progress.append)
    assert {(row["scenario"], row["mode"]) for row in rows} == {
        ("first_save_on_slots", "atomic_dirsync"),
        *(("first_save", mode) for mode in powerloss.MODES),
    }
    steps = {row["step"] for row in rows if row["states"]}
    assert {"sync gen/*/COMMIT.json", "sync_dir gen/*", "write slots/table", "at the end"} <= steps, steps
    assert not any(row["violations"] for row in rows) and progress[-1] == "real file systems are left out: no root."
    text = powerloss.report(rows, options).markdown("lastgood lab powerloss", "2026-11-22")
    assert f"| all | {sum(row['states'] for row in rows if row['mode'] == 'atomic_dirsync'):,} | 0 |" in text
    assert powerloss.summary(rows)["model_states"] == sum(row["states"] for row in rows)


@pytest.mark.parametrize("trouble", powerloss.TROUBLES)
@pytest.mark.parametrize("kind", powerloss.KINDS)
def test_durable_saves_survive_faults_on_a_real_file_system(images, kind, trouble):
    if not shutil.which(f"mkfs.{kind}"):
        pytest.skip(f"needs mkfs.{kind}: apt-get install {PACKAGES[kind]}")
    row = powerloss.one({"fs": kind, "mode": "atomic_dirsync", "trouble": trouble, "trial": 0, "seed": 0}, images)
    assert row["kept"] and row["goes_on"] and not row["why"], row


def test_the_bench_of_ranks_alternates_with_dcp_and_reports_bytes(tmp_path):
    options = ranks.Options(tmp_path, mib=24, ranks=(2,), rounds=1)
    rows = ranks.run(options, lambda _: None)
    speed, replicas, agreeing, planning = rows
    assert all(len(speed[f"{name} {verb}"]) == 1 for name in (ranks.OURS, ranks.THEIRS) for verb in ("save", "load"))
    assert replicas["written"] == replicas["unique"] == sum(replicas["by_rank"])
    assert len(agreeing["seconds"]) == len(planning["seconds"]) == ranks.AGREEMENTS
    text = ranks.report(rows, options).markdown("lastgood bench ranks", "2026-11-22")
    assert "| 2 | save |" in text and "2 ranks of DDP: 1.0000 bytes written" in text
    assert ranks.run(options, pytest.fail) == rows, "nothing is left to do"


def test_the_bench_of_the_guard_measures_checks_and_parity(tmp_path):
    options = guard.Options(tmp_path, mib=8, rounds=1)
    rows = guard.run(options, lambda _: None)
    assert [row["contender"] for row in rows] == list(guard.NAMES)
    text = guard.report(rows, options).markdown("lastgood bench guard", "2026-11-21")
    assert f"{guard.VERIFY} / {guard.FILE}, round by round" in text and "Parity takes 0.2" in text
    assert guard.run(options, pytest.fail) == rows, "nothing is left to do"


def test_the_wire_is_measured_in_every_mode(tmp_path):
    options = wire.Options(tmp_path, rounds=1, mib=8)
    if shutil.which("openssl") is None:
        pytest.skip("needs the Debian package openssl")
    rows = wire.run(options, lambda _: None)
    assert [(row["mode"], row["digest"]) for row in rows] == wire.contenders()
    assert len(wire.summary(rows)["contenders"]) == len(wire.report(rows, options).tables[0].rows) == len(rows)
    assert all(row[name] > 0 for row in rows for name in ("sender", "receiver", "speed"))

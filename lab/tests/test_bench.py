"""Benchmarks: computations agree with cases done by hand, runs resume where they stopped, and each command runs."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lastgood.cli import app
from lastgood.errors import Refused
from lastgood.run import memory_place
from lastgood_lab import goodput, journal
from lastgood_lab.journal import Journal, entries
from lastgood_lab.models import MODELS, Workload
from lastgood_lab.policies import POLICIES, bound_seconds
from lastgood_lab.policy import Settings
from lastgood_lab.replay import Costs, Trace, artifact_count, ideal, parse, published, replay, without_teardown
from lastgood_lab.report import Report, Table, command_line, percent, quantile, spread
from lastgood_lab.stores import SlotFile

pytestmark = pytest.mark.slow

TINY = {"scale": 0.002, "work": 0.03}


# ---- replay ----------------------------------------------------------------------------------------------------


def costs(policy: str = "PCcheck", **changed: Any) -> Costs:
    given = {"interval": 10, "step_seconds": 1.0, "stall_seconds": 0.0, "save_seconds": 0.0, "load_seconds": 0.0}
    return Costs(policy, **{**given, **changed})


def test_without_failures_only_the_stalls_are_lost() -> None:
    assert replay([], 100.0, costs()).steps == 100
    assert replay([], 105.0, costs(stall_seconds=10.0)).steps == 55  # 10, 4 times (10 of stall, 10), 10 of stall, 5
    assert replay([], 100.0, costs(stall_seconds=10.0)).goodput == 0.5


def test_a_failure_returns_to_the_newest_step_durable_at_that_time() -> None:
    found = replay([25.0], 100.0, costs())
    assert (found.steps, found.redone, found.failures) == (20 + 75, 5, 1)
    late = replay([25.0], 100.0, costs(save_seconds=6.0))  # the save of step 20 would be durable at 26
    assert (late.steps, late.redone) == (10 + 75, 15)
    assert replay([26.0], 100.0, costs(save_seconds=6.0)).redone == 6


def test_a_failure_before_anything_was_durable_starts_over() -> None:
    assert replay([9.0], 100.0, costs()).steps == 91
    assert replay([9.0], 100.0, costs()).redone == 9


def test_restart_and_load_are_lost_time_and_restart_after_a_failure() -> None:
    slow = costs(restart_seconds=3.0, load_seconds=2.0)
    assert replay([20.0], 100.0, slow).steps == 20 + 75
    again = replay([20.0, 24.0], 100.0, slow)
    assert (again.steps, again.redone, again.failures) == (20 + 71, 0, 2)


def test_failures_outside_the_trace_do_not_count() -> None:
    assert replay([0.0, 100.0, 200.0], 100.0, costs()).failures == 0


def test_no_policy_beats_the_ideal_at_any_event() -> None:
    for save, stall, every in itertools.product((0.0, 7.0, 40.0), (0.0, 2.0), (1, 10, 30)):
        one = costs(interval=every, save_seconds=save, stall_seconds=stall, load_seconds=2.0)
        times = [13.0, 55.5, 200.0, 201.0, 390.0]
        assert replay(times, 500.0, one).steps <= replay(times, 500.0, ideal(one)).steps


def test_the_published_formula_gives_its_worked_values() -> None:
    stops = costs("GPM", load_seconds=2.0, stall_seconds=10.0)  # redo 2 + 5; half of the time is stall
    assert published(4, 100.0, stops) == pytest.approx((100 - 4 * 7) / 100 / 2)
    assert published(4, 100.0, costs("CheckFreq", load_seconds=2.0)) == pytest.approx((100 - 4 * 12) / 100)
    many = costs("PCcheck", load_seconds=2.0, save_seconds=6.0, in_flight=2)  # 2 + 5 + min(6, 20) / 2
    assert published(4, 100.0, many) == pytest.approx((100 - 4 * 10) / 100)
    assert published(40, 100.0, many) == 0.0


def test_recovery_bounds_give_their_worked_values() -> None:
    given = {"interval": 10, "step_seconds": 2.0, "save_seconds": 37.0, "load_seconds": 3.0, "in_flight": 1}
    assert bound_seconds("traditional", **given) == bound_seconds("GPM", **given) == 3 + 20
    assert bound_seconds("CheckFreq", **given) == bound_seconds("Gemini", **given) == 3 + 40
    assert bound_seconds("PCcheck", **given) == 3 + 20 + 2 * min(10, 18.5)
    assert bound_seconds("lastgood", **{**given, "in_flight": 4}) == 3 + 20 + 37


# ---- traces ----------------------------------------------------------------------------------------------------


def test_samples_are_read_without_their_tear_down() -> None:
    alive = [8, 8, 4, 6, 6, 6, 2, 0, 0]
    text = ",Time,GPUs\n" + "".join(f"1,{100 + 60 * at}.5,{one}\n" for at, one in enumerate(alive))
    trace = parse(text)
    assert trace == Trace([0, 60, 120, 180, 240, 300], [8, 8, 4, 6, 6, 6], 300)
    assert (trace.drops(), trace.changes()) == ([120], [120, 180])
    assert artifact_count(alive) == 2 + 1 + 0 + 1 + 0  # the start 0 -> 8, 8 -> 4, 4 -> 6, 6 -> 2, 2 -> 0


def test_a_drop_just_before_the_end_is_no_tear_down_unless_it_ends_at_zero() -> None:
    assert without_teardown([(0, 4), (1, 4), (2, 3)]).drops() == [2]
    assert without_teardown([(0, 4), (1, 4), (2, 3), (3, 3), (4, 0)]).drops() == [2]
    assert without_teardown([(0, 4), (1, 4), (2, 3), (3, 0)]).drops() == []


def test_events_of_one_moment_are_one_change() -> None:
    trace = parse("0,add,a\n0,add,b\n1000,remove,a\n1000,add,c\n2000,remove,b\n2000,remove,c\n5000,add,d\n")
    assert (trace.times, trace.alive, trace.seconds) == ([0, 1, 2, 5], [2, 2, 0, 1], 5)
    assert (trace.drops(), trace.changes()) == ([2], [2, 5])


def test_a_malformed_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    with pytest.raises(Refused, match="is no trace"):
        goodput.read(tmp_path / "x.csv")


# ---- journal, report -------------------------------------------------------------------------------------------


def test_a_journal_returns_measurements_of_equal_parameters_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "j.jsonl"
    Journal(path, {"hardware": "2core"}).put({"seconds": 1.5}, size=1, policy="GPM")
    again = Journal(path, {"hardware": "2core"})
    assert again.get(policy="GPM", size=1) == {"seconds": 1.5}
    assert again.get(policy="GPM", size=2) is None
    assert Journal(path, {"hardware": "4core"}).get(policy="GPM", size=1) is None


def test_a_journal_returns_no_measurement_of_other_code(tmp_path: Path, monkeypatch) -> None:
    """A bench that went on after a change of the code put the row of the former one into a table of this commit."""
    Journal(tmp_path / "j.jsonl").put({"seconds": 1.5}, size=1)
    monkeypatch.setattr(journal, "commit", lambda: "1234567")
    assert Journal(tmp_path / "j.jsonl").get(size=1) is None


def test_a_line_truncated_by_a_kill_loses_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    Journal(path).put({"n": 1}, at=1)
    Journal(path).put({"n": 2}, at=2)
    path.write_bytes(path.read_bytes()[:-5])
    journal = Journal(path)
    assert (journal.get(at=1), journal.get(at=2)) == ({"n": 1}, None)
    journal.put({"n": 3}, at=3)
    assert [one["found"] for one in entries(path)] == [{"n": 1}, {"n": 3}]


def test_a_report_names_machine_date_and_command_and_no_path(tmp_path: Path) -> None:
    table = Table("Seconds", ["name", "s"], [["a", "1"], ["b", "2"]])
    report = Report("kind", "Title", "About.", [table], [{"a": 1}], notes=["a note"])
    text, data = report.write(tmp_path, "lastgood bench kind", "2026-01-02")
    assert text.name.startswith("kind-2026-01-02-") and text.name.endswith("core.md")
    assert "| a | 1 |\n| b | 2 |" in text.read_text() and "- a note" in text.read_text()
    assert "2026-01-02" in text.read_text() and "`lastgood bench kind`" in text.read_text()
    record = json.loads(data.read_text())
    assert record["rows"] == [{"a": 1}] and record["command"] == "lastgood bench kind" and "cores" in record["machine"]
    command = command_line(
        ["/usr/bin/lastgood", "bench", "x", "--out", "/home/me/out/", "--place=/mnt/disk", "--scale", "0.5"]
    )
    assert command == "lastgood bench x --out out --place=disk --scale 0.5"


def test_numbers_are_printed_with_their_spread() -> None:
    assert spread([3.0, 1.0, 2.0], ".1f") == "2.0 (1.0-3.0)"
    assert spread([2.0], ".1f") == "2.0" and spread([]) == "-"
    assert percent([0.01, -0.02, 0.03]) == "1.0 % (-2.0 to 3.0)"
    assert quantile([5.0], 0.99) == 5.0


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_a_quantile_is_interpolated_like_in_the_study(values: list[float], share: float) -> None:
    """The latency tables used the nearest rank, but the study's figures, next to them, were interpolated by NumPy."""
    assert quantile(values, share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-6)


# ---- models, policies ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2-124m", 124_439_808),
        ("opt-125m", 125_239_296),
        ("bert-base", 109_482_240),
        ("vgg16", 138_357_544),
        ("resnet50", 25_557_032),
    ],
)
def test_the_networks_have_the_published_parameter_counts(name: str, parameters: int) -> None:
    with torch.device("meta"):
        network = MODELS[name].build(1.0)
    assert sum(one.numel() for one in network.parameters()) == parameters


@pytest.mark.parametrize("name", list(MODELS))
def test_every_network_trains_when_it_is_small(name: str) -> None:
    workload = Workload(name, **TINY)
    before = workload.tensors()["model." + next(iter(dict(workload.module.named_parameters())))].clone()
    workload.step(lambda: None)
    after = workload.tensors()["model." + next(iter(dict(workload.module.named_parameters())))]
    assert not torch.equal(before, after)


def _train(workload: Workload, policy: Any, steps: int, every: int) -> dict[int, dict[str, torch.Tensor]]:
    """Train and save; returns the state right after each saved step."""
    states = {}
    for step in range(1, steps + 1):
        workload.step(policy.fence)
        if step % every == 0:
            states[step] = {name: one.clone() for name, one in workload.tensors().items()}
            policy.save(step)
    return states


def _same(workload: Workload, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one, state[name]) for name, one in workload.tensors().items())


@pytest.mark.parametrize("model", ["gpt2-124m", "resnet50"])
@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_restores_the_state_after_the_step_it_saved(name: str, model: str, tmp_path: Path) -> None:
    """The copy runs during training, but the saved state must be that at the call, with its batch-norm buffers."""
    settings = Settings(chunk_bytes=64 << 10, in_flight=3)
    place = tmp_path / "place"
    place.mkdir()
    workload = Workload(model, **TINY)
    policy = POLICIES[name](workload, place, settings, None)
    assert policy.load() == 0
    states = _train(workload, policy, steps=9, every=2)
    workload.step(policy.fence)
    policy.wait()
    assert policy.saved[-1].step == 8
    if name == "Gemini":
        step = policy.load()  # the peer process ends with the policy that started it
        policy.close()
    else:
        policy.close()
        workload = Workload(model, **TINY)
        policy = POLICIES[name](workload, place, settings, None)
        step = policy.load()
        policy.close()
    assert step == 8
    assert _same(workload, states[8])


@pytest.mark.parametrize("name", [name for name in POLICIES if not name.startswith("lastgood")])
def test_a_later_process_continues_where_the_earlier_one_ended(name: str, tmp_path: Path) -> None:
    """Each process once numbered its pointer records from 1, so that the third one loaded a state of the first."""
    workload, last = Workload("resnet50", **TINY), 0
    for saves in (5, 1, 2):
        policy = POLICIES[name](workload, tmp_path, Settings(), None)
        assert policy.load() == (last if name != "Gemini" else 0)  # its peer process ended with the earlier policy
        for _ in range(saves):
            last += 1
            policy.save(last)
            policy.fence()
            policy.wait()
        policy.close()


def test_a_torn_pointer_record_of_the_slots_leaves_the_older_one(tmp_path: Path) -> None:
    slots = SlotFile(tmp_path / "slots", 2, 4096)
    assert slots.newest() is None
    slots.point(1, 0, 10)
    slots.point(2, 1, 20)
    assert slots.newest() == (2, 1, 20)
    slots.close()
    with open(tmp_path / "slots", "r+b") as file:
        file.seek(8)  # the record of number 2
        file.write(b"\xff")
    again = SlotFile(tmp_path / "slots", 2, 4096)
    assert again.newest() == (1, 0, 10)
    again.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_saves_and_restores_a_state_on_the_gpu(name: str, tmp_path: Path) -> None:
    workload = Workload("resnet50", 0.05, 0.1, "cuda")
    policy = POLICIES[name](workload, tmp_path, Settings(), None)
    policy.load()
    states = _train(workload, policy, steps=5, every=2)
    policy.wait()
    step = policy.load()
    policy.close()
    assert step == 4 and _same(workload, states[4])


# ---- commands --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_bench_interval_measures_resumes_and_feeds_goodput(bench: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = ["interval", "--out", out, "--scale", 0.002, "--work", 0.03, "--rounds", 1, "--intervals", 2]
    args += ["--least-steps", 2, "--kills", 1, "--policies", "lastgood,PCcheck", "--models", "resnet50"]
    code, text, err = bench(*args)
    assert code == 0, err
    assert "| PCcheck |" in text and "recovery after a kill" in text and "[3/3]" in err
    figures = sorted(one.name.split("core-")[1] for one in out.glob("*.png"))
    assert figures == ["recovery.png", "throughput.png"] and len(list(out.glob("*.svg"))) == 2
    lines = (out / "interval.journal.jsonl").read_text()
    for entry in entries(out / "interval.journal.jsonl"):
        if entry["key"]["kind"] == "recovery":
            found = entry["found"]
            assert found["killed_after"] - found["resumed_from"] >= 0 and found["load_seconds"] > 0
    code, _, err = bench(*args)
    assert code == 0 and "every" not in err, "all measurements were in the journal"
    assert (out / "interval.journal.jsonl").read_text() == lines

    trace = tmp_path / "spot.csv"
    trace.write_text(",Time,GPUs\n" + "".join(f"1,{60 * at},{one}\n" for at, one in enumerate([8, 8, 4, 8, 8])))
    code, text, err = bench("goodput", "--out", out, "--trace", trace, "--model", "resnet50")
    assert code == 0, err
    assert "spot: drops only, 1 failures in 240 s" in text and "spot: drops and rises, 2 failures" in text
    lines = (out / "interval.journal.jsonl").read_text()
    (out / "both.jsonl").write_text(lines + lines.replace('"scale": 0.002', '"scale": 0.5'))
    both = ("goodput", "--out", out, "--trace", trace, "--model", "resnet50", "--journal", out / "both.jsonl")
    assert bench(*both)[0] == 3
    (out / "later.jsonl").write_text(lines + lines.replace('"commit": "', '"commit": "later than '))
    later = bench("goodput", "--out", out, "--trace", trace, "--model", "resnet50", "--journal", out / "later.jsonl")
    assert later[0] == 0 and "of later.jsonl, made of later than" in later[1]
    assert bench(*both, "--scale", 0.5)[0] == 0
    assert "sum(|change| // 4) from 0, with the tear-down: 4" in text and "| ideal |" in text


def test_bench_goodput_takes_given_costs_and_refuses_none(bench: Any, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("0,add,a\n0,add,b\n50000,remove,a\n100000,add,a\n")
    code, text, err = bench(
        "goodput",
        "--out",
        tmp_path,
        "--trace",
        trace,
        "--policy",
        "GPM",
        "--intervals",
        10,
        "--step-seconds",
        1,
        "--json",
    )
    assert code == 0, err
    rows = {(row["policy"], row["count"]): row for row in json.loads(text)["rows"]}
    assert rows["GPM", "drops only"]["goodput"] == 1.0  # at 50 s the save of step 50 is durable at once
    assert rows["GPM", "drops only"]["published"] == pytest.approx(0.95)
    code, _, err = bench("goodput", "--out", tmp_path / "empty", "--trace", trace)
    assert code == 3 and "no costs to replay with" in err


def test_bench_durable_runs_small(bench: Any, tmp_path: Path) -> None:
    args = ["durable", "--out", tmp_path, "--scale", 0.002, "--rounds", 1]
    for name in ("raw direct write", "lastgood", "torch.save", "DCP, 4 threads", "DCP async, thread"):
        args += ["--only", name]
    code, text, err = bench(*args, "--json")
    assert code == 0, err
    answer = json.loads(text)
    for row in answer["rows"]:
        assert 0 < row["waits"] <= row["done"] <= row["durable"], row
    assert {Path(one).suffix for one in answer["files"]} == {".md", ".json", ".png", ".svg"}
    assert not list(tmp_path.glob("bench-*")), "the saves are deleted"


def test_bench_size_runs_small(bench: Any, tmp_path: Path) -> None:
    code, text, err = bench(
        "size", "--out", tmp_path, "--sizes-mib", "1,2", "--knob-mib", 2, "--burst", 2, "--rounds", 1, "--json"
    )
    assert code == 0, err
    rows = json.loads(text)["rows"]
    assert {row["knob"] for row in rows if row["kind"] == "knob"} == {"in_flight", "writers", "chunk", "memory"}
    assert all(row["durable"] > 0 for row in rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests a machine without CUDA")
def test_bench_restore_runs_small(bench: Any, tmp_path: Path) -> None:
    code, text, err = bench("restore", "--out", tmp_path, "--scale", 0.002, "--rounds", 1, "--json")
    assert code == 0, err
    rows = json.loads(text)["rows"]
    assert len(rows) == 11 and all(row["seconds"] > 0 for row in rows)
    assert not list(tmp_path.glob("bench-*")), "the saves are deleted"


def test_bench_memory_runs_small(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="lastgood-bench-", dir="/dev/shm") as memory:
        monkeypatch.setenv(memory_place.VARIABLE, memory)
        code, text, err = bench("memory", "--out", tmp_path, "--scale", 0.002, "--rounds", 1, "--json")
        assert code == 0, err
        rows = json.loads(text)["rows"]
        assert len(rows) == 8 and all(row["seconds"] > 0 and row["bytes"] > 0 for row in rows)
        assert not list(tmp_path.glob("bench-*")) and not any(one.is_dir() for one in Path(memory).glob("*/*")), (
            "the agent has ended"
        )


def test_bench_tensors_runs_small(bench: Any, tmp_path: Path) -> None:
    code, text, err = bench("tensors", "--out", tmp_path, "--counts", "10,100", "--rounds", 1, "--json")
    assert code == 0, err
    few, many = json.loads(text)["rows"]
    # 2 and 25 parameters with three tensors of the optimizer each, and those of the random number generators.
    assert (few["stored_tensors"], many["stored_tensors"]) == (8 + 2, 100 + 2)
    assert many["manifest_bytes"] > few["manifest_bytes"]


def test_bench_gpu_without_a_gpu_is_a_clear_error(bench: Any, tmp_path: Path) -> None:
    code, _, err = bench("gpu", "--out", tmp_path)
    assert code == 3 and "torch.cuda.is_available() is false here" in err


def test_unknown_options_are_refused_before_any_measurement(bench: Any, tmp_path: Path) -> None:
    assert bench("interval", "--out", tmp_path, "--policies", "magic")[0] == app.USAGE
    assert bench("interval", "--out", tmp_path, "--intervals", "0")[0] == app.USAGE
    assert bench("durable", "--out", tmp_path, "--only", "magic")[0] == app.USAGE
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["durable", "interval", "size"])
def test_a_device_that_torch_does_not_have_is_refused(
    bench: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--device gpuu`, and `cuda` on a machine without it, ended in a traceback of torch."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("gpuu", "cuda", "cuda:0"):
        code, _, err = bench(command, "--out", tmp_path / "out", "--device", device)
        assert code == 3 and f"--device {device}: torch has cpu here" in err
    assert not (tmp_path / "out").exists()


def test_the_command_imports_quickly() -> None:
    """Every command of lastgood, such as `lastgood ls`, imports the module to list its commands in the help."""
    import subprocess
    import sys

    program = "import sys, lastgood_lab.command; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)

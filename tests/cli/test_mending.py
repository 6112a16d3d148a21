"""`lastgood scrub` and `lastgood repair`: their output, their exit codes, and the files they leave unchanged."""

from __future__ import annotations

from cli_runs import DATA, at, contents
from harness import flip, save
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.format import layout
from lastgood.policy.retention import Keep
from lastgood.run import access
from lastgood.run.writer import RunWriter
from lastgood.testing import Fault

NAN = b"\x00\x00\xc0\x7f"


def test_scrub_reads_every_generation_rebuilds_damage_and_reports_it(run, call_json):
    before = contents(run)
    flip(at(run, 2) / DATA, 9000)
    (at(run, 1) / DATA).unlink()
    code, document = call_json("scrub", run)
    states = {row["step"]: (row["state"], row["repaired"]) for row in document["generations"]}
    assert code == 4 and not document["intact"]
    assert states == {1: ("damaged", []), 2: ("repaired", [DATA]), 3: ("good", []), 4: ("not good", [])}
    after = contents(run)
    mine = [name for name in before if "000000000002-" in name]
    assert {name: after.get(name) for name in mine} == {name: before[name] for name in mine}
    assert (at(run, 1) / layout.DAMAGED).exists() and (at(run, 4) / layout.UNFIT).exists()


def test_scrub_deletes_nothing_under_any_retention_policy(run, call_json):
    """The scrub once deleted generations by the default of Keep, which is not the retention of the trainer."""
    with access.for_writing(run, "atomic_dirsync") as tier:
        writer = RunWriter(tier, Inline(), keep=Keep(last=99))
        writer.begin(max(writer.survey.generations))
        for step in (5, 6, 7, 8):
            save(writer, step, {"weight": b"more"}, chunk_bytes=8192)
            writer.verify(Arena(1 << 16, 8192))
    assert call_json("scrub", run)[0] == 8
    assert len(list(run.glob("gen/*/COMMIT.json"))) == 8


def test_scrub_and_verify_exit_with_their_own_code_for_unfit_generations(run, call):
    code, out, _ = call("scrub", run)
    assert code == 8 and "NOT GOOD" in out and "weight holds NaN or infinity" in out
    assert call("verify", run, 4)[0] == 8 and call("verify", run, 4, "--without", "finite")[0] == 0
    assert call("verify", run, 4, "--without", "finesse")[0] == 2


def test_repair_rebuilds_marked_generations_and_the_requested_step(run, call_json):
    before = contents(run)
    flip(at(run, 3) / layout.COMMIT, 100)
    code, document = call_json("repair", run)
    assert code == 0 and [(row["step"], row["repaired"]) for row in document["generations"]] == [(3, [layout.COMMIT])]
    flip(at(run, 2) / DATA, 9000)  # damage that no mark records yet
    assert call_json("repair", run, "--known")[1]["generations"] == []
    assert call_json("repair", run, 2)[1]["generations"][0]["repaired"] == [DATA]
    assert contents(run) == before


def test_repair_takes_back_a_mark_of_damage_that_is_not_there(run, call_json):
    """A generation whose bytes were right again was reported as good, and restores went on stepping over it."""
    data, aside = at(run, 1) / DATA, run.with_name("aside")
    data.rename(aside)
    assert call_json("scrub", run)[0] == 4 and (at(run, 1) / layout.DAMAGED).exists()
    aside.rename(data)
    assert call_json("repair", run)[0] == 0 and not (at(run, 1) / layout.DAMAGED).exists()


def test_gc_calls_a_newest_save_with_nan_not_good_and_not_damaged(run, call_json, call):
    """It said DAMAGED, with the exit code of damage."""
    code, document = call_json("gc", run, "--keep-last", 3)
    assert code == 8 and document["damaged"] == [] and [one["step"] for one in document["not_good"]] == [4]
    assert (at(run, 4) / layout.UNFIT).exists()


def test_repair_refuses_an_empty_step(run, call):
    """`lastgood repair RUN "$STEP"` with STEP unset read and mended every generation."""
    assert call("repair", run, "")[0] == 2


def test_repair_of_all_separates_a_failing_disk_from_too_much_damage(run, call, faulty_files):
    """Files that could not be written back were listed as BEYOND REPAIR, with exit code 4."""
    flip(at(run, 2) / DATA, 9000)
    faulty_files.inject(Fault("sync", f"*{layout.blob_name(0)}*"))
    code, out, _ = call("repair", run)
    assert code == 5 and "NOT REPAIRED" in out and "BEYOND REPAIR" not in out


def test_repair_reports_irreparable_damage_and_leaves_it_unchanged(run, call_json, call):
    (at(run, 2) / DATA).unlink()
    before = contents(run)
    code, document = call_json("repair", run, 2)
    assert code == 4 and document["error"] == "BeyondRepair" and "too many" in document["message"]
    after, marks = contents(run), (layout.VERIFIED, layout.DAMAGED)
    assert all(after.get(name) == data for name, data in before.items() if not name.endswith(marks))
    assert (at(run, 2) / layout.DAMAGED).exists()
    call("scrub", run)
    code, out, _ = call("repair", run)
    assert code == 4 and "BEYOND REPAIR" in out

"""`lastgood repair` finds damage by itself, missing parity is reported, and exported folders can be imported again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from cli_runs import DATA, at, writing
from harness import flip
from lastgood.cli import completion
from lastgood.format import layout
from lastgood.run import access
from lastgood.run.reader import RunReader


def test_repair_rebuilds_the_damage_that_verify_reports(run, call_json):
    """`verify` found damage, but `repair` right after it printed "nothing is known to be damaged" and exited with 0."""
    flip(at(run, 2) / DATA, 9000)
    flip(at(run, 3) / DATA, 9000)
    assert call_json("verify", run, "--all")[0] == 4
    code, found = call_json("repair", run)
    assert code == 0 and {row["step"]: row["repaired"] for row in found["generations"]} == {2: [DATA], 3: [DATA]}
    assert found["whole"] == 2 and found["looked"]
    assert call_json("verify", run, "--all")[0] == 8, "step 4 contains NaN, and is intact"


def test_repair_of_an_undamaged_run_prints_what_it_examined(run, call):
    code, out, _ = call("repair", run)
    assert code == 0 and "4 generations read: nothing is damaged" in out


def test_repair_without_parity_marks_damage_and_exits_with_its_code(tmp_path, call_json):
    writing(tmp_path / "run", 1, 2)
    flip(at(tmp_path / "run", 2) / DATA, 9000)
    code, found = call_json("repair", tmp_path / "run")
    assert code == 4 and "no parity" in found["generations"][0]["why"]
    assert (at(tmp_path / "run", 2) / layout.DAMAGED).exists()
    assert call_json("ls", tmp_path / "run")[1]["restores"]["step"] == 1
    assert call_json("repair", tmp_path / "run", 1)[0] == 0, "no generation of that run is damaged"


def test_ls_verify_and_scrub_report_a_generation_that_lacks_parity(run, call_json, call):
    for path in at(run, 2).glob("*.parity-*"):
        path.unlink()
    (at(run, 1) / "r00000.parity-1").unlink()
    for command in (["ls", run], ["verify", run, "--all"], ["scrub", run]):
        lacking = {row["step"]: row["unprotected"] for row in call_json(*command)[1]["generations"]}
        assert "has no parity" in lacking[2] and lacking[3] == lacking[4] == "", command
        assert command[0] == "scrub" or "has 1 of 2 parity files" in lacking[1], command
        assert "has no parity" in call(*command)[1], command


def test_ls_reports_no_missing_parity_in_a_run_without_parity(tmp_path, call_json):
    writing(tmp_path / "run", 1, 2)
    assert all(not row["unprotected"] for row in call_json("ls", tmp_path / "run")[1]["generations"])


def test_export_lists_the_generations_it_skipped_on_stderr(run, call, call_json):
    """The newest generation was marked as damaged, an older one was exported, and nothing was reported."""
    flip(at(run, 3) / DATA, 9000)
    places_of_parity = [*at(run, 3).glob("*.parity-*")]
    for path in places_of_parity:
        path.unlink()
    assert call("scrub", run)[0] == 4
    code, out, err = call("export", run, "--to", run.parent / "model.safetensors")
    assert code == 0 and "step 2" in out and "stepped over step 3" in err and "stepped over step 4" in err
    data = call_json("export", run, "--to", run.parent / "again.safetensors")[1]
    assert [one["step"] for one in data["stepped_over"]] == [4, 3]
    assert call_json("export", run, 2, "--to", run.parent / "third.safetensors")[1]["stepped_over"] == []


# ---- folders of Hugging Face -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", ["1GB", "4kB"], ids=["one file", "shards"])
def test_import_reads_the_folder_that_export_wrote(tmp_path, call_json, shard):
    """The import was refused: "give a name that ends in .safetensors"."""
    writing(tmp_path / "run", 1)
    assert call_json("export", tmp_path / "run", "--to", f"{tmp_path}/hf/", "--shard", shard)[0] == 0
    code, found = call_json("import", tmp_path / "hf", tmp_path / "back", "--step", 7)
    assert (code, found["step"], found["verified"]) == (0, 7, True)
    before, after = (RunReader(access.for_reading(tmp_path / name)).content() for name in ("run", "back"))
    assert {name: after.tensor(name)[1] for name in after.names()} == {
        name: before.tensor(name)[1] for name in before.names()
    }


@pytest.mark.parametrize(
    "wrong",
    [{"weight_map": {"w": "../run/other.safetensors"}}, {"weight_map": {}}, {"weight_map": [1]}, [], {"w": 1}],
    ids=["outside", "empty", "list", "no object", "no map"],
)
def test_import_refuses_a_malformed_shard_index(tmp_path, call_json, wrong):
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors.index.json").write_text(json.dumps(wrong))
    code, found = call_json("import", tmp_path / "hf", tmp_path / "run")
    assert (code, found["error"]) == (4, "ManifestInvalid") and not (tmp_path / "run").exists()


def test_import_refuses_an_index_that_contradicts_its_shards(tmp_path, call_json):
    writing(tmp_path / "run", 1)
    call_json("export", tmp_path / "run", "--to", f"{tmp_path}/hf/", "--shard", "4kB")
    path = tmp_path / "hf" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["nobody"] = index["weight_map"].pop("counter")
    path.write_text(json.dumps(index))
    code, found = call_json("import", tmp_path / "hf", tmp_path / "back")
    assert (code, found["error"]) == (4, "ManifestInvalid") and "counter" in found["message"]


# ---- completion ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shell_completion_offers_commands_and_steps(tmp_path):
    writing(tmp_path / "run", 100, 120, 300)
    code = "import sys; from lastgood.cli.app import main; sys.exit(main())"

    def completed(*arguments: str) -> list[str]:
        line = {"COMP_WORDS": " ".join(("lastgood", *arguments)), "COMP_CWORD": str(len(arguments))}
        environment = {**os.environ, **line, "_LASTGOOD_COMPLETE": "complete_bash"}
        found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        return found.stdout.split()

    assert "repair" in completed("re")
    assert completed("show", f"{tmp_path}/run", "1") == ["120", "100"]


def test_shell_completion_offers_no_steps_for_a_path_that_is_no_run(tmp_path):
    assert completion.steps(SimpleNamespace(params={"run": str(tmp_path)}), "1") == []

"""The command line on small runs: its output, its exit codes, and the files that it leaves unchanged."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli_runs import STATE, contents, writing
from commands import Call
from harness import flip
from lastgood.cli import compare, sweep
from lastgood.convert import exporting, importing
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Cancelled, MissingBlob
from lastgood.format import layout
from lastgood.records import Generation
from lastgood.run import access
from lastgood.run.reader import RunReader
from lastgood.run.writer import RunWriter
from lastgood.state import tensors


def typed(root: Path, step: int, arrays: Mapping[str, tuple[str, np.ndarray]], **options: Any) -> None:
    """Save arrays under the dtypes that are given with them."""
    source = importing.Foreign(lambda name, start, mv: _copy(arrays[name][1], start, mv))
    for name, (dtype, array) in arrays.items():
        source.add(name, dtype, (array.nbytes * 8 // layout.DTYPES[dtype][0],))
    source.values |= options.get("values", {})
    source.aliases |= options.get("aliases", {})
    importing.bring(source, str(root), step, lambda _: None)


def _copy(array: np.ndarray, start: int, mv: memoryview) -> None:
    mv[:] = array.tobytes()[start : start + len(mv)]


def folder(root: Path, one: Generation) -> Path:
    return root / layout.folder(one.id)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three verified generations."""
    writing(tmp_path / "run", 10, 20, 30)
    return tmp_path / "run"


@pytest.fixture
def troubled(tmp_path: Path) -> Path:
    """A rewind to 20 abandoned 30 and 40; then follow 25 (damaged COMMIT), 26 (lost), 27 (unfinished) and 28
    (unverified)."""
    root = tmp_path / "troubled"
    writing(root, 10, 20, 30, 40, milestone=True, metrics={"loss": 0.5})
    broken, lost = writing(root, 25, 26, after=20)
    writing(root, 28, after=26, verified=False)
    (folder(root, lost) / layout.COMMIT).unlink()
    flip(folder(root, broken) / layout.COMMIT, 100)
    unfinished = root / "gen" / f"{27:012d}-{broken.id.incarnation}"
    unfinished.mkdir()
    (unfinished / "r00000.safetensors").write_bytes(b"half")
    return root


# ---- ls ----------------------------------------------------------------------------------------------------------


def test_ls_lists_every_generation_with_its_state_newest_first(troubled: Path, call_json: Any) -> None:
    code, document = call_json("ls", troubled)
    assert code == 0
    assert [(row["step"], row["state"]) for row in document["generations"]] == [
        (28, "committed"), (27, "incomplete"), (26, "lost"), (25, "damaged"),
        (40, "abandoned"), (30, "abandoned"), (20, "verified"), (10, "verified"),
    ]  # fmt: skip
    assert [row["step"] for row in document["generations"] if row["restores"]] == [28]
    assert document["generations"][-1]["metrics"] == {"loss": 0.5} and document["generations"][-1]["milestone"]


def test_ls_prints_reasons_below_a_table_of_at_most_eighty_columns(
    troubled: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = call("ls", troubled)
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "DAMAGED" in out and "LOST" in out and "differs from its own digest" in " ".join(out.split())
    assert "a restore takes step 28" in out and "milestone, loss 0.5" in out


def test_ls_marks_the_generation_that_the_lastgood_pointer_names(run: Path, call_json: Any) -> None:
    _, document = call_json("ls", run)
    assert document["lastgood"]["step"] == 30
    assert [row["step"] for row in document["generations"] if row["lastgood"]] == [30]


def test_ls_shows_the_evidence_of_a_generation_that_is_marked_damaged(run: Path, call_json: Any) -> None:
    newest = RunReader(access.for_reading(run)).generation()
    flip(folder(run, newest) / "r00000.safetensors", 5000)
    with access.for_writing(run, "atomic_dirsync") as tier:
        writer = RunWriter(tier, Inline())
        writer.conclude(newest, RunReader(tier).verify(30).findings)
    row = call_json("ls", run)[1]["generations"][0]
    assert row["state"] == "damaged" and "chunk 0" in row["why"] and not row["restores"]


@pytest.mark.parametrize(("command", "code"), [("ls", 0), ("show", 3), ("verify", 3), ("gc", 0)])
def test_commands_that_need_no_generation_accept_an_empty_run(
    tmp_path: Path, call: Call, command: str, code: int
) -> None:
    writing(tmp_path / "empty")
    found, out, err = call(command, tmp_path / "empty")
    assert found == code and ("nothing has been committed" in out + err or command == "gc")


@pytest.mark.parametrize("args", ["ls", "show", "verify", "diff 1 2", "gc", "gc --dry-run", "export 1 --to x.pt"])
def test_commands_refuse_a_directory_that_is_no_run_and_leave_it_unchanged(
    tmp_path: Path, call_json: Any, args: str
) -> None:
    (tmp_path / "photos").mkdir()
    command, *arguments = args.split()
    code, document = call_json(command, tmp_path / "photos", *arguments)
    assert (code, document["error"]) == (3, "NotARun") and not list((tmp_path / "photos").iterdir())


# ---- show --------------------------------------------------------------------------------------------------------


def test_show_groups_names_by_their_parts_with_totals_aliases_and_values(tmp_path: Path, call: Call) -> None:
    values = {"sched": {"!object": {"last_epoch": 7, "lrs": [0.1, 0.2]}}, "seen": {"!tuple": [{"!float": "inf"}]}}
    values |= {"model": {"!module": {}}, "opt": {"m": {"!tensor": "optimizer.exp_avg"}}}
    writing(tmp_path, 5, aliases={"head.weight": "model.h.0.weight"}, values=values)
    code, out, _ = call("show", tmp_path)
    lines = [" ".join(line.strip("│├└─ ").split()) for line in out.splitlines()]
    assert code == 0 and lines[0].startswith("step 5 (") and "verified" in lines[0]
    for line in (
        "4 tensors, 1 alias, 18 kB", "model.h 2 tensors, 9 kB", "0.weight uint8 6000 6 kB", "sched",
        "head.weight = model.h.0.weight", "optimizer.exp_avg uint8 9000 9 kB", "last_epoch = 7", "0 = inf",
    ):  # fmt: skip
        assert line in lines
    assert "values" in lines and not any(line.startswith(("opt ", "m ")) for line in lines[lines.index("values") :])


def test_show_with_depth_counts_the_names_below_that_depth(run: Path, call: Call) -> None:
    out = call("show", run, 10, "--depth", 1)[1]
    assert "model.h  2 tensors, 9 kB" in out and "weight" not in out


def test_show_json_lists_every_tensor_in_full(run: Path, call_json: Any) -> None:
    code, document = call_json("show", run, 20)
    assert code == 0 and document["step"] == 20
    assert {"name": "model.h.0.weight", "dtype": "uint8", "shape": [6000], "bytes": 6000}.items() <= document[
        "tensors"
    ][1].items()


def test_control_characters_in_names_never_reach_the_terminal(tmp_path: Path, call: Call) -> None:
    writing(tmp_path, 1, aliases={"a\x1b[2Jb\r": "counter"}, values={"[bold]x": "\x1b]0;title\x07"})
    out = call("show", tmp_path)[1]
    assert "\x1b" not in out and "\r" not in out and "\x07" not in out and "[bold]x" in out


def test_a_step_means_the_current_lineage_unless_an_incarnation_is_named(run: Path, call_json: Any) -> None:
    (abandoned,) = [one for one in RunReader(access.for_reading(run)).generations() if one.step == 30]
    (newer,) = writing(run, 30, after=20)
    assert call_json("show", run, 30)[1]["incarnation"] == newer.id.incarnation
    _, document = call_json("show", run, f"30-{abandoned.id.incarnation}")
    assert (document["incarnation"], document["state"]) == (abandoned.id.incarnation, "abandoned")


def test_a_missing_step_is_refused_with_the_list_of_existing_steps(run: Path, call: Call, troubled: Path) -> None:
    code, out, err = call("show", run, 31)
    assert code == 3 and out == "" and "10, 20, 30" in err
    assert call("show", troubled, 26)[0] == 4  # the COMMIT is lost
    assert call("show", troubled, 25)[0] == 4  # the COMMIT is damaged


# ---- verify ------------------------------------------------------------------------------------------------------


def test_verify_names_the_tensor_of_a_flipped_bit_and_writes_no_mark(run: Path, call_json: Any) -> None:
    newest = RunReader(access.for_reading(run)).generation()
    flip(folder(run, newest) / "r00000.safetensors", 20000)
    before = contents(run)
    code, document = call_json("verify", run)
    finding, content = sorted(document["generations"][0]["findings"], key=lambda one: one["layer"], reverse=True)
    assert (finding["layer"], content["layer"], content["tensor"]) == ("digests", "contents", "optimizer.exp_avg")
    assert code == 4 and not document["good"] and contents(run) == before
    assert (finding["kind"], finding["chunk"], finding["offset"]) == ("SumMismatch", 2, 16384)
    assert finding["tensor"] == "optimizer.exp_avg" and finding["blob"] == "r00000.safetensors"


def test_verify_of_a_good_run_exits_zero_and_all_reads_every_generation(run: Path, call_json: Any) -> None:
    writing(run, 15, after=10)
    assert call_json("verify", run)[0] == 0
    code, document = call_json("verify", run, "--all")
    assert code == 0 and [one["step"] for one in document["generations"]] == [15, 30, 20, 10]


def test_verify_fails_when_the_newest_generation_is_damaged(run: Path, call_json: Any) -> None:
    newest = RunReader(access.for_reading(run)).generation()
    flip(folder(run, newest) / layout.COMMIT, 100)
    code, document = call_json("verify", run)
    assert code == 4
    assert [(one["step"], bool(one["findings"])) for one in document["generations"]] == [(30, True), (20, False)]
    assert call_json("verify", run, 20)[0] == 0


def test_verify_all_counts_a_generation_with_missing_files_as_damage(troubled: Path, call_json: Any) -> None:
    code, document = call_json("verify", troubled, "--all")
    assert code == 4
    assert {one["step"] for one in document["generations"] if one["findings"]} == {25, 26}


def test_verify_does_not_report_a_generation_deleted_meanwhile_as_damage(run: Path) -> None:
    """Nor as good, as it did."""
    tier = access.for_reading(run)
    one = RunReader(tier).generation()

    class Deleting:
        place, list, create, put_new, point, delete = run, tier.list, None, None, None, None
        reads_at_once = 1

        def read_into(self, extent: Any, mv: memoryview, *, fresh: bool = False) -> None:
            if extent.blob.endswith(".safetensors"):
                shutil.rmtree(folder(run, one), ignore_errors=True)
                raise MissingBlob("gone")
            tier.read_into(extent, mv, fresh=fresh)

    with ThreadPoolExecutor(2) as workers, pytest.raises(Cancelled, match="was deleted while it was read"):
        sweep.damage(Deleting(), one, workers)  # type: ignore[arg-type]


# ---- diff --------------------------------------------------------------------------------------------------------


def test_diff_counts_different_elements_and_prints_the_largest_distance(tmp_path: Path, call_json: Any) -> None:
    a, b = np.array([3, 4, 0, 1], "f4"), np.array([3, 4, 0, 1.5], "f4")
    half = {"w": ("bfloat16", np.array([0x3F80, 0x4000], "u2"))}  # 1, 2
    other = {"w": ("bfloat16", np.array([0x3F80, 0x4040], "u2"))}  # 1, 3
    typed(tmp_path, 1, {"same": ("float32", a), "x": ("float32", a), **half, "old": ("uint8", np.zeros(3, "u1"))})
    changed = {"x": ("float32", b), **other, "old": ("int8", np.zeros(3, "i1")), "new": ("uint8", np.zeros(1, "u1"))}
    typed(tmp_path, 2, {"same": ("float32", a), **changed}, values={"lr": {"!tuple": [0.5, {"!float": "inf"}]}})
    code, document = call_json("diff", tmp_path, 1, 2)
    rows = {row["name"]: row for row in document["tensors"]}
    assert code == 7 and not document["same"]
    assert {name: row["status"] for name, row in rows.items()} == {
        "same": "same", "x": "differs", "w": "differs", "old": "other type or shape", "new": "only in the second",
    }  # fmt: skip
    assert (rows["x"]["differing"], rows["x"]["elements"], rows["x"]["max_abs"]) == (1, 4, 0.5)
    assert rows["x"]["relative_l2"] == pytest.approx(0.5 / np.sqrt(26))
    assert (rows["w"]["differing"], rows["w"]["max_abs"]) == (1, 1.0)
    assert document["values"] == [{"path": "lr.0", "second": 0.5}, {"path": "lr.1", "second": {"!float": "inf"}}]


def test_diff_of_equal_generations_reads_no_tensor(run: Path, call: Call) -> None:
    """Tensors with equal content digests are equal: a step compares as equal to itself even where its bytes are
    damaged."""
    newest = RunReader(access.for_reading(run)).generation()
    flip(folder(run, newest) / "r00000.safetensors", 5000)
    assert call("diff", run, 30, 30)[0] == 0
    code, out, _ = call("diff", run, 20, 30)
    assert code == 7 and "4 tensors: 3 same, 1 differ" in out


def test_diff_reports_damaged_bytes_as_damage_and_not_as_a_difference(run: Path, call_json: Any) -> None:
    newest = RunReader(access.for_reading(run)).generation()
    flip(folder(run, newest) / "r00000.safetensors", 4096)
    code, document = call_json("diff", run, 20, 30)
    assert code == 4 and document["error"] == "SumMismatch" and "counter" in document["message"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_dtypes_that_numpy_lacks_decode_to_the_same_numbers_as_torch(dtype: str) -> None:
    import torch

    codes = np.arange(1 << (16 if dtype == "bfloat16" else 8), dtype="u2" if dtype == "bfloat16" else "u1")
    theirs = torch.from_numpy(codes.view("i2") if dtype == "bfloat16" else codes).view(getattr(torch, dtype)).double()
    ours = compare._decoded(codes.view("u1"), dtype)
    assert ours is not None
    np.testing.assert_array_equal(ours, theirs.numpy().astype(ours.dtype))


def test_diff_of_integers_is_exact_and_diff_of_nan_is_named(tmp_path: Path) -> None:
    low, high = np.array([-(2**63), 2**53], "i8"), np.array([2**63 - 1, 2**53 + 1], "i8")
    assert compare.differences(bytearray(low), bytearray(high), "int64")["max_abs"] == float(2**64 - 1)
    assert compare.differences(bytearray(low[1:]), bytearray(high[1:]), "int64")["max_abs"] == 1.0
    nan, one = np.array([np.nan, 1], "f4"), np.array([np.nan, 2], "f4")
    assert compare.differences(bytearray(nan), bytearray(one), "float32")["max_abs"] == 1.0
    assert compare.differences(bytearray(one), bytearray(nan[::-1].copy()), "float32")["max_abs"] == "nan"
    raw = compare.differences(bytearray(b"\1\2\3"), bytearray(b"\1\2\4"), "float8_e8m0fnu")
    assert raw == {"elements": 3, "differing": 1}


# ---- gc ----------------------------------------------------------------------------------------------------------


def steps(root: Path) -> list[int]:
    return [one.step for one in RunReader(access.for_reading(root)).generations()]


def test_gc_deletes_litter_and_half_deleted_folders_but_no_generation(troubled: Path, call_json: Any) -> None:
    going = troubled / "gen" / f"{5:012d}-{'0' * 8}"
    going.mkdir()
    (going / layout.GOING).write_bytes(b"{}")
    for name in ("LASTGOOD.json.tmp", "incarnations/000009-00000000.json.tmp", ".probe-77"):
        (troubled / name).write_bytes(b"half")
    lines, before = steps(troubled), contents(troubled)
    dry = call_json("gc", troubled, "--dry-run")
    assert contents(troubled) == before
    code, document = call_json("gc", troubled)
    assert code == 0 and {**dry[1], "dry_run": False} == document
    assert [(one["step"], one["why"]) for one in document["deleted"]] == [
        (5, "an unfinished deletion"),
        (27, "never committed"),
    ]
    deleted_paths = before.keys() - contents(troubled).keys()
    assert {
        "LASTGOOD.json.tmp",
        "incarnations/000009-00000000.json.tmp",
        ".probe-77",
        str(going.relative_to(troubled)),
    } < deleted_paths
    assert all(
        "000000000027-" in name or "000000000005-" in name or "tmp" in name or "probe" in name for name in deleted_paths
    )
    assert steps(troubled) == lines


def test_gc_follows_the_retention_policy_and_its_dry_run_lists_the_same(tmp_path: Path, call_json: Any) -> None:
    writing(tmp_path, 10, 20, 30, 40, 50)
    options = ("--keep-last", 2, "--keep-every", 20)
    would = call_json("gc", tmp_path, *options, "--dry-run")[1]["deleted"]
    assert steps(tmp_path) == [10, 20, 30, 40, 50]
    _, document = call_json("gc", tmp_path, *options)
    assert document["deleted"] == would and [one["step"] for one in would] == [10, 30]
    assert steps(tmp_path) == [20, 40, 50]


def test_gc_keeps_the_first_step_after_each_multiple(tmp_path: Path, call_json: Any) -> None:
    """On a run that was saved by time, `gc --keep-every 10` deleted everything but the newest generation."""
    writing(tmp_path, 4, 13, 14, 26, 39, 48)
    _, document = call_json("gc", tmp_path, "--keep-last", 1, "--keep-every", 10)
    assert [one["step"] for one in document["deleted"]] == [4, 14]
    assert steps(tmp_path) == [13, 26, 39, 48]


@pytest.mark.parametrize("dry", [True, False])
def test_gc_verifies_the_newest_generation_before_it_relies_on_it(run: Path, call_json: Any, dry: bool) -> None:
    """Retention kept only the newest generation: if the damaged 40 had counted, no good generation would have been
    left."""
    (bad,) = writing(run, 40, verified=False)
    flip(folder(run, bad) / "r00000.safetensors", 5000)
    code, document = call_json("gc", run, "--keep-last", 1, *["--dry-run"] * dry)
    assert code == 4 and [one["step"] for one in document["damaged"]] == [40]
    assert [one["step"] for one in document["deleted"]] == [10, 20]
    assert steps(run) == ([10, 20, 30, 40] if dry else [30, 40])
    assert (folder(run, bad) / layout.DAMAGED).exists() is not dry


def test_gc_deletes_damaged_generations_only_on_request_and_never_all(
    run: Path, call_json: Any, troubled: Path
) -> None:
    code, document = call_json("gc", troubled, "--damaged")
    assert code == 0 and {(one["step"], one["why"]) for one in document["deleted"]} >= {(26, "lost"), (25, "damaged")}
    assert [row["state"] for row in call_json("ls", troubled)[1]["generations"]] == [
        "verified",
        *["abandoned"] * 2,
        *["verified"] * 2,
    ]
    for one in RunReader(access.for_reading(run)).generations():
        flip(folder(run, one) / layout.COMMIT, 100)
    code, document = call_json("gc", run, "--damaged")
    assert (code, document["error"]) == (4, "NothingGood") and len(list((run / "gen").iterdir())) == 3


def test_gc_is_refused_while_a_writer_holds_the_run(run: Path, call_json: Any) -> None:
    with access.for_writing(run, "atomic_dirsync"):
        code, document = call_json("gc", run)
        assert (code, document["error"]) == (3, "RunLocked")
        assert call_json("gc", run, "--dry-run")[0] == 0


# ---- export ------------------------------------------------------------------------------------------------------


def test_safetensors_reads_an_export_with_the_prefix_removed(tmp_path: Path, call_json: Any) -> None:
    from safetensors.numpy import load_file

    arrays = {
        "model.w": ("float32", np.arange(5, dtype="f4")),
        "model.n": ("int64", np.arange(3)),
        "opt.m": ("uint8", np.ones(2, "u1")),
    }
    typed(tmp_path / "run", 1, arrays, aliases={"model.tied": "model.w"})
    code, document = call_json("export", tmp_path / "run", 1, "--to", tmp_path / "m.safetensors", "--only", "model")
    found = load_file(tmp_path / "m.safetensors")
    assert code == 0 and document["tensors"] == 3 and document["as_bytes"] == {}
    assert {name: found[name].tolist() for name in found} == {
        "w": [0, 1, 2, 3, 4],
        "tied": [0, 1, 2, 3, 4],
        "n": [0, 1, 2],
    }
    assert sorted(os.listdir(tmp_path)) == ["m.safetensors", "run"]


def test_an_export_to_pt_keeps_types_and_ties_and_loads_without_code(tmp_path: Path, call: Call) -> None:
    import torch

    arrays = {
        "a": ("complex128", np.array([1 + 2j])),
        "b": ("bfloat16", np.array([0x3F80], "u2")),
        "none": ("float32", np.zeros(0, "f4")),
    }
    typed(tmp_path / "run", 1, arrays, aliases={"tied": "a"})
    assert call("export", tmp_path / "run", "--to", tmp_path / "m.pt")[0] == 0
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert found["a"].tolist() == [1 + 2j] and found["b"].tolist() == [1.0] and found["none"].numel() == 0
    assert found["tied"].data_ptr() == found["a"].data_ptr()
    code, out, _ = call("export", tmp_path / "run", "--to", tmp_path / "m.safetensors")
    assert code == 0 and "a: complex128, written as its bytes (U8)" in out


def test_a_sharded_export_has_the_layout_of_hugging_face(tmp_path: Path, call_json: Any) -> None:
    from safetensors.numpy import load_file

    arrays = {f"layer.{n}.w": ("float32", np.full(100, n, "f4")) for n in range(5)}
    typed(tmp_path / "run", 1, arrays)
    assert call_json("export", tmp_path / "run", "--to", f"{tmp_path}/hf/", "--shard", "800")[0] == 0
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert sorted(os.listdir(tmp_path / "hf")) == [*sorted(set(index["weight_map"].values())), exporting.HF_INDEX]
    assert set(index["weight_map"].values()) == {f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)}
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / "hf" / file)[name], arrays[name][1])
    assert call_json("export", tmp_path / "run", "--to", f"{tmp_path}/small/")[0] == 0
    assert os.listdir(tmp_path / "small") == ["model.safetensors"], "tensors that fit into one file need no index"
    code, document = call_json("export", tmp_path / "run", "--to", f"{tmp_path}/hf/", "--force")
    assert (code, document["error"]) == (3, "Refused") and len(os.listdir(tmp_path / "hf")) == 4


def test_a_failed_export_of_damaged_bytes_leaves_no_file(run: Path, call_json: Any, tmp_path: Path) -> None:
    """Only the error for `.safetensors` said what to do."""
    newest = RunReader(access.for_reading(run)).generation()
    flip(folder(run, newest) / "r00000.safetensors", 5000)
    for name in ("m.safetensors", "m.pt", "m.dcp", "m/"):
        code, document = call_json("export", run, 30, "--to", f"{tmp_path}/{name}")
        assert (code, document["error"]) == (4, "SumMismatch") and os.listdir(tmp_path) == ["run"]
        assert document["safe"] == "Nothing was written." and f"verify RUN {newest.id}" in document["todo"]


def test_export_takes_the_whole_name_of_a_tensor(run: Path, call: Call, call_json: Any, tmp_path: Path) -> None:
    """It had "no tensor under" a name that `show` prints, and the empty name was a step that "has no tensor"."""
    from safetensors.torch import load_file

    code, data = call_json("export", run, 30, "--to", tmp_path / "m.safetensors", "--only", "model.h.0.weight")
    assert (code, data["tensors"]) == (0, 1)
    assert list(load_file(tmp_path / "m.safetensors")) == ["weight"]
    code, _, err = call("export", run, 30, "--to", tmp_path / "n.safetensors", "--only", "")
    assert code == 2 and "leave it out" in err


@pytest.mark.slow
def test_an_export_onto_a_full_disk_is_an_error_and_leaves_no_file(run: Path, tmp_path: Path) -> None:
    """torch.save replaced the disk's error by its own error about the archive that it could not close."""
    (tmp_path / "full").mkdir()
    code = f"""
import resource, signal, sys
from lastgood.cli.app import main
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
sys.dont_write_bytecode = True  # under the limit Python would leave a module's bytecode cut short
resource.setrlimit(resource.RLIMIT_FSIZE, (8000, 8000))
for name in ("m.safetensors", "m.pt", "m.dcp", "m/"):
    print(main(["export", {str(run)!r}, "--to", {str(tmp_path / "full")!r} + "/" + name]))
"""
    done = python("-c", code, capture_output=True)
    assert done.stdout.split() == ["5"] * 4 and done.stderr.count("File too large") == 4, done.stderr
    assert os.listdir(tmp_path / "full") == []


def test_an_export_replaces_an_existing_file_only_with_force(run: Path, call_json: Any, tmp_path: Path) -> None:
    target = tmp_path / "m.safetensors"
    target.write_bytes(b"mine")
    code, document = call_json("export", run, 10, "--to", target)
    assert (code, document["error"]) == (3, "Refused") and target.read_bytes() == b"mine"
    assert call_json("export", run, 10, "--to", target, "--force")[0] == 0
    assert target.stat().st_size > 18000


@pytest.mark.parametrize(
    ("options", "code"),
    [(["--to", "x.zip"], 2), (["--to", "no/such/x.pt"], 3), (["--to", "x.pt", "--only", "mod"], 3), ([], 2)],
)
def test_an_impossible_export_is_refused_before_anything_is_written(
    run: Path, call: Call, tmp_path: Path, options: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("export", run, 10, *options)[0] == code and os.listdir(tmp_path) == ["run"]


# ---- import ------------------------------------------------------------------------------------------------------


def test_an_imported_generation_is_verified_and_equal_to_the_file(run: Path, call_json: Any, tmp_path: Path) -> None:
    file, link = tmp_path / "m.safetensors", tmp_path / "link.safetensors"
    call_json("export", run, 20, "--to", file, "--only", "model")
    link.symlink_to(file)  # model caches hold files as symbolic links
    code, document = call_json("import", link, tmp_path / "new", "--under", "model", "--step", 7)
    assert code == 0 and document["verified"] and (document["step"], document["tensors"]) == (7, 2)
    reader = RunReader(access.for_reading(tmp_path / "new"))
    assert reader.generation().verified and reader.bytes_of("model.h.0.weight")[1] == STATE["model.h.0.weight"]
    assert call_json("verify", tmp_path / "new")[0] == 0


def test_an_import_into_slots_is_refused_before_anything_is_made(run: Path, call_json: Any, tmp_path: Path) -> None:
    """The generation was committed, and then the command said that nothing was touched."""
    file = tmp_path / "model.safetensors"
    call_json("export", run, 30, "--to", file)
    code, document = call_json("import", file, f"slots://{tmp_path / 'slots'}", "--step", 1)
    assert code == 3 and "only a Checkpointer writes slots" in document["message"]
    assert not (tmp_path / "slots").exists()


def test_an_import_never_hides_a_newer_state(run: Path, call_json: Any, tmp_path: Path) -> None:
    """The import was step 0 of a newer incarnation, so a restore would have loaded it in place of step 30."""
    call_json("export", run, 20, "--to", tmp_path / "m.safetensors")
    code, document = call_json("import", tmp_path / "m.safetensors", run)
    assert (code, document["error"]) == (3, "StepTaken") and "--step 31" in document["todo"]
    assert call_json("import", tmp_path / "m.safetensors", run, "--step", 31)[0] == 0
    assert [row["step"] for row in call_json("ls", run)[1]["generations"]] == [31, 30, 20, 10]


def test_imported_weights_load_into_a_module(tmp_path: Path, call_json: Any) -> None:
    import torch
    from safetensors.torch import save_file

    import lastgood

    source, module = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save_file(source.state_dict(), tmp_path / "m.safetensors")
    assert call_json("import", tmp_path / "m.safetensors", tmp_path / "new", "--under", "model")[0] == 0
    lastgood.load(tmp_path / "new", {"model": module})
    assert torch.equal(module.weight, source.weight) and torch.equal(module.bias, source.bias)


def test_a_pt_with_a_value_named_rng_is_refused_with_the_remedy(tmp_path: Path, call_json: Any) -> None:
    """The error named "the key 'rng' of the state" and said "Use another key", although the user had only a file."""
    import torch

    torch.save({"model": {"w": torch.ones(2)}, "rng": {"python": [1, 2]}}, tmp_path / "a.pt")
    code, document = call_json("import", tmp_path / "a.pt", tmp_path / "new")
    assert (
        code == 3
        and "'rng'" in document["message"]
        and "--under" in document["todo"]
        and not (tmp_path / "new").exists()
    )
    assert call_json("import", tmp_path / "a.pt", tmp_path / "new", "--under", "old")[1]["values"] == 2


@pytest.mark.parametrize("same", [{1: 5, "1": 6}, {"1": 6, 1: "a tensor"}])
def test_names_of_a_pt_that_become_equal_are_refused(tmp_path: Path, call_json: Any, same: dict[Any, Any]) -> None:
    """A .pt had {1: 5, "1": 6} among its values: the import kept one of them, and did not report the other."""
    import torch

    part = {key: torch.ones(1) if value == "a tensor" else value for key, value in same.items()}
    torch.save({"w": torch.ones(2), "part": part | {"t": torch.ones(2)}}, tmp_path / "a.pt")
    code, document = call_json("import", tmp_path / "a.pt", tmp_path / "new")
    assert code == 3 and document["message"].endswith("'part.1' occurs twice") and not (tmp_path / "new").exists()


def test_a_pt_with_a_container_inside_itself_is_refused(tmp_path: Path, call_json: Any) -> None:
    """The import ended in a RecursionError with its traceback."""
    import torch

    part: list[Any] = [torch.ones(1)]
    part.append(part)
    torch.save({"part": part}, tmp_path / "a.pt")
    code, document = call_json("import", tmp_path / "a.pt", tmp_path / "new")
    assert code == 3 and "contains itself" in document["message"] and not (tmp_path / "new").exists()


def test_import_names_what_a_folder_lacks(tmp_path: Path, call_json: Any) -> None:
    """For a folder of no known format, the error was "give a name that ends in .safetensors"."""
    code, document = call_json("import", tmp_path, tmp_path / "new")
    assert code == 2 and ".metadata" in document["message"] and "model.safetensors" in document["message"]
    code, document = call_json("import", tmp_path / "hf", tmp_path / "new")
    assert code == 2 and "there is nothing at" in document["message"]


@pytest.mark.parametrize("command", [["show", 1], ["verify", 1], ["diff", 1, 2], ["copy", "other", 1]])
def test_a_run_in_the_place_of_a_step_is_named(run: Path, call_json: Any, command: list[Any]) -> None:
    """`show 150 RUN` said that there is nothing at 150."""
    code, document = call_json(*command, run)
    assert code == 2 and document["message"].endswith("RUN comes first.")


def test_copy_names_a_run_in_the_place_of_its_target(run: Path, tmp_path: Path, call_json: Any) -> None:
    """`copy TARGET RUN` said that there is nothing at TARGET."""
    code, document = call_json("copy", tmp_path / "other", run)
    assert code == 3 and document["todo"].startswith("RUN comes first, then TARGET.")
    code, document = call_json("copy", tmp_path / "other", tmp_path / "new")
    assert code == 3 and "first" not in document["todo"]


def test_import_names_arguments_in_the_wrong_order(run: Path, tmp_path: Path, call_json: Any) -> None:
    """`import RUN model.safetensors` said that RUN is a folder of no known format."""
    for args in ([run, tmp_path / "new"], [tmp_path / "new", tmp_path / "a.safetensors"]):
        code, document = call_json("import", *args)
        assert code == 2 and document["message"].endswith("SOURCE comes first, then RUN.")


def header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


def entry(dtype: str = "U8", shape: str = "[2]", span: str = "[0,2]") -> str:
    return f'{{"dtype":"{dtype}","shape":{shape},"data_offsets":{span}}}'


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\x01", id="shorter than a length"),
        pytest.param((1 << 62).to_bytes(8, "little") + b"{}", id="a huge header"),
        pytest.param(header("[]"), id="no object"),
        pytest.param(header("{"), id="no JSON"),
        pytest.param(header("[" * 100000), id="nested without end"),
        pytest.param(header(f'{{"a":{entry()},"a":{entry()}}}', b"12"), id="a name twice"),
        pytest.param(header(f'{{"a":{entry("U9")}}}', b"12"), id="an unknown type"),
        pytest.param(header(f'{{"a":{entry(shape="[-2]")}}}', b"12"), id="a negative size"),
        pytest.param(header(f'{{"a":{entry(shape="[true,2]")}}}', b"12"), id="a size that is no number"),
        pytest.param(header(f'{{"a":{entry(shape="[3]")}}}', b"12"), id="a shape of another length"),
        pytest.param(header(f'{{"a":{entry(span="[1,3]")}}}', b"123"), id="a hole"),
        pytest.param(header(f'{{"a":{entry()},"b":{entry()}}}', b"12"), id="an overlap"),
        pytest.param(header(f'{{"a":{entry()}}}', b"1"), id="cut off"),
        pytest.param(header(f'{{"a":{entry()}}}', b"123"), id="more than it says"),
        pytest.param(header(f'{{"":{entry()}}}', b"12"), id="no name"),
    ],
)
def test_import_refuses_a_malformed_file_before_it_creates_a_run(tmp_path: Path, call_json: Any, data: bytes) -> None:
    (tmp_path / "m.safetensors").write_bytes(data)
    code, document = call_json("import", tmp_path / "m.safetensors", tmp_path / "new")
    assert code in (3, 4) and document["error"] in ("ManifestInvalid", "Unstorable") and not (tmp_path / "new").exists()


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["EVIL"],)


def test_importing_a_pt_file_runs_no_code_and_flattens_its_dicts(
    tmp_path: Path, call_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("EVIL", str(tmp_path / "ran"))
    torch.save({"w": torch.zeros(2), "x": Evil()}, tmp_path / "evil.pt")
    code, document = call_json("import", tmp_path / "evil.pt", tmp_path / "new")
    assert (code, document["error"]) == (3, "Unstorable") and os.listdir(tmp_path) == ["evil.pt"]

    weight = torch.arange(6.0).reshape(2, 3)
    tree = {
        "model": {"h.0.weight": weight.T, "tied": weight, "again": weight},
        "epoch": 3,
        "opt": {"groups": [{"lr": 0.1}]},
    }
    for name, options in (("zip.pt", {}), ("legacy.pth", {"_use_new_zipfile_serialization": False})):
        torch.save(tree, tmp_path / name, **options)
        assert call_json("import", tmp_path / name, tmp_path / name[:3])[0] == 0
        document = call_json("show", tmp_path / name[:3])[1]
        assert [(row["name"], row["shape"]) for row in document["tensors"]] == [
            ("model.h.0.weight", [3, 2]),
            ("model.tied", [2, 3]),
        ]
        assert document["aliases"] == {"model.again": "model.tied"}
        assert document["values"] == {"rng": {}, "epoch": 3, "opt": {"groups": [{"lr": 0.1}]}}
        stored = RunReader(access.for_reading(tmp_path / name[:3])).bytes_of("model.h.0.weight")[1]
        assert np.frombuffer(stored, "f4").tolist() == weight.T.flatten().tolist()


def test_a_file_that_is_no_pt_archive_is_refused(tmp_path: Path, call_json: Any) -> None:
    (tmp_path / "m.pt").write_bytes(b"hello")
    assert call_json("import", tmp_path / "m.pt", tmp_path / "new")[0] in (3, 4)
    assert call_json("import", tmp_path / "absent.pt", tmp_path / "new")[0] == 3
    assert not (tmp_path / "new").exists()


# ---- the terminal, pipes and exit codes ----------------------------------------------------------------------------


def python(*args: object, **options: Any) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)} | options.pop("env", {})
    return subprocess.run([sys.executable, *map(str, args)], env=env, text=True, check=False, timeout=60, **options)


def test_only_commands_on_pt_files_import_torch(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    commands = [
        ["ls", run], ["show", run], ["verify", run, "--all"], ["diff", run, 10, 20], ["gc", run, "--keep-last", 3],
        ["export", run, 10, "--to", file], ["import", file, tmp_path / "new"],
    ]  # fmt: skip
    code = f"""
import sys
from lastgood.cli.app import main
codes = [main(args) for args in {[[str(one) for one in command] for command in commands]!r}]
print(codes, "torch" in sys.modules)
"""
    assert python("-c", code, capture_output=True).stdout.splitlines()[-1] == "[0, 0, 0, 7, 0, 0, 0] False"


def test_the_package_runs_as_the_command_with_its_exit_codes(tmp_path: Path) -> None:
    """`python -m lastgood`, for users whose PATH lacks the command, failed with "No module named lastgood.__main__"."""
    done = python("-m", "lastgood", "ls", tmp_path, capture_output=True)
    assert done.returncode == 3 and done.stderr.startswith("lastgood: ") and "is not a run" in done.stderr


@pytest.mark.slow
def test_a_closed_output_pipe_ends_the_command_without_a_traceback(run: Path) -> None:
    """As in `lastgood show RUN | head -1`."""
    for command in (["show", run], ["ls", run, "--json"]):
        near, far = os.pipe()
        os.close(near)
        done = python("-m", "lastgood", *command, stdout=far, stderr=subprocess.PIPE)
        os.close(far)
        assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_output_that_cannot_be_written_is_one_error_without_a_traceback(run: Path) -> None:
    """On a full disk, and where stdout was closed (`>&-`), each command ended in a traceback, with exit code 1.

    Later help and `--version` still did.
    """
    for command in (["show", run], ["ls", run, "--json"], ["--help"], ["ls", "--help"], ["--version"]):
        with open("/dev/full", "w") as full:
            done = python("-m", "lastgood", *command, stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 5 and done.stderr.startswith("lastgood: the output cannot be written: No space")
        assert len(done.stderr.splitlines()) == 2
    line = f"{sys.executable} -m lastgood show {run} >&-"
    closed = subprocess.run(["sh", "-c", line], stderr=subprocess.PIPE, text=True)
    assert (closed.returncode, closed.stderr) == (0, "")


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    yield monkeypatch


def test_colour_is_used_only_on_terminals_that_support_it(run: Path, call: Call, terminal: pytest.MonkeyPatch) -> None:
    assert "\x1b[" not in call("ls", run)[1]  # the output is a pipe
    terminal.setenv("FORCE_COLOR", "1")  # the output is treated as a terminal
    assert "\x1b[" in call("ls", run)[1]
    terminal.setenv("NO_COLOR", "1")
    assert "\x1b[" not in call("ls", run)[1]


def test_output_into_a_pipe_is_not_wrapped(tmp_path: Path, call: Call, terminal: pytest.MonkeyPatch) -> None:
    writing(tmp_path, 1, aliases={"x" * 300: "counter"})
    assert "x" * 300 in call("show", tmp_path)[1]


def test_a_table_on_a_narrow_terminal_cuts_no_cell(run: Path, call: Call, terminal: pytest.MonkeyPatch) -> None:
    """With 40 columns `diff` named no tensor at all, and `ls` showed three characters of an incarnation."""
    terminal.setenv("COLUMNS", "20")
    assert "counter  uint8" in call("diff", run, 10, 20)[1]
    written = call("ls", run)[1]
    assert "verified" in written and "\N{HORIZONTAL ELLIPSIS}" not in written


def test_a_progress_bar_is_drawn_on_a_terminal_only_and_on_stderr(
    run: Path, call: Call, terminal: pytest.MonkeyPatch
) -> None:
    terminal.setattr("lastgood.cli.terminal.QUIET_SECONDS", -1.0)
    assert call("verify", run)[2] == ""
    terminal.setenv("FORCE_COLOR", "1")
    _, out, err = call("verify", run)
    assert "reading" in err and "reading" not in out


@pytest.mark.parametrize(
    "args",
    [
        ["ls"],
        ["frobnicate"],
        ["gc", "x", "--keep-last", "0"],
        ["verify", "{run}", "1", "--all"],
        ["show", "{run}", "x"],
    ],
)
def test_a_usage_error_exits_with_two_and_prints_json_when_asked(
    run: Path, call: Call, call_json: Any, args: list[str]
) -> None:
    args = [one.format(run=run) for one in args]
    code, out, err = call(*args)
    assert code == 2 and out == "" and "Traceback" not in err and err
    code, document = call_json(*args)
    assert code == 2 and document["error"] == "Usage" and document["message"]


def test_an_error_prints_one_message_with_what_is_safe_and_what_to_do(run: Path, call: Call, call_json: Any) -> None:
    with access.for_writing(run, "atomic_dirsync"):
        code, out, err = call("gc", run)
        assert code == 3 and out == "" and len(err.splitlines()) == 3 and err.startswith("lastgood: ")
        assert call_json("gc", run)[1].keys() == {"error", "message", "safe", "todo"}


def test_names_that_the_terminal_cannot_encode_are_escaped(tmp_path: Path) -> None:
    writing(tmp_path, 1, aliases={"größe": "counter"})
    done = python("-m", "lastgood.cli.app", "show", tmp_path, capture_output=True, env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and "gr\\xf6\\xdfe" in done.stdout


def test_an_unexpected_exception_prints_a_traceback_and_exits_with_one(run: Path) -> None:
    code = "import sys; from lastgood.cli import app, listing; listing.commit = None; app.main(['ls', sys.argv[1]])"
    done = python("-c", code, run, capture_output=True)
    assert done.returncode == 1 and "Traceback" in done.stderr


def test_version_and_help_exit_with_zero(call: Call) -> None:
    assert call("--version")[0] == 0 and call("--help")[0] == 0 and call("gc", "-h")[0] == 0


@pytest.mark.parametrize(("inside", "what"), [("", "is the run itself"), ("sub", "is a folder in the run")])
def test_copy_into_the_run_itself_is_refused(run: Path, call_json: Any, inside: str, what: str) -> None:
    """It claimed that copies had been made and verified, or made a run inside of a run."""
    before = contents(run)
    code, data = call_json("copy", str(run), str(run / inside))
    assert code == 3 and what in data["message"]
    assert contents(run) == before


def test_export_to_a_dcp_folder_with_a_slash_has_the_layout_of_dcp(run: Path, tmp_path: Path, call_json: Any) -> None:
    """The completion of a shell adds the slash: the folder had the layout of Hugging Face."""
    assert call_json("export", str(run), "--to", f"{tmp_path}/new.dcp/")[0] == 0
    assert (tmp_path / "new.dcp" / ".metadata").exists()


def test_a_transposed_tensor_is_arranged_once(tmp_path: Path, call_json: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import of one such tensor in a .pt file arranged all of it for each chunk."""
    torch.save({"w": torch.zeros(3000, 1500).t()}, tmp_path / "one.pt")
    arranged, real = list[int](), tensors.as_bytes
    monkeypatch.setattr(tensors, "as_bytes", lambda one: arranged.append(1) or real(one))
    assert call_json("import", str(tmp_path / "one.pt"), str(tmp_path / "run"))[0] == 0
    assert len(arranged) == 1


def test_json_of_the_program_of_the_user_does_not_change_the_output(run: Path, call: Call) -> None:
    code, out, err = call("replay", str(run), "--in", str(run / "nothing"), "--", "python", "-c", "", "--json")
    assert code == 3 and not out and err.startswith("lastgood: ")

"""`lastgood import` of files and folders of other programs: dtypes, names, and what is missing or unreadable."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lastgood


def tensor_file(path: Path, entry: dict[str, Any], data: bytes) -> Path:
    """Write a `.safetensors` file with one tensor, as its entry in the header describes it."""
    header = json.dumps({"w": entry}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float4_e2m1fn_x2"])
def test_dtypes_that_torch_has_are_imported(tmp_path: Path, call_json: Any, dtype: str) -> None:
    """The newer dtypes of safetensors were called unknown, although torch and the runs have them."""
    if not hasattr(torch, dtype):
        pytest.skip("this version of torch lacks the dtype")
    weight = torch.arange(12, dtype=torch.uint8).reshape(2, 6).view(getattr(torch, dtype))
    save_file({"w": weight}, tmp_path / "m.safetensors")
    assert call_json("import", tmp_path / "m.safetensors", tmp_path / "run")[0] == 0
    read = lastgood.load(tmp_path / "run")["w"]
    assert read.dtype == weight.dtype and torch.equal(read.view(torch.uint8), weight.view(torch.uint8))


@pytest.mark.parametrize("dtype", ["F6_E2M3", ["F32"], "F4"])
def test_a_dtype_that_cannot_be_imported_is_named(tmp_path: Path, call_json: Any, dtype: Any) -> None:
    """A list in place of a dtype ended in a traceback. Three numbers of four bits are no whole bytes."""
    file = tensor_file(tmp_path / "m.safetensors", {"dtype": dtype, "shape": [3], "data_offsets": [0, 2]}, b"ab")
    code, document = call_json("import", file, tmp_path / "run")
    assert code in (3, 4) and "'w'" in document["message"] and str(dtype) in document["message"]
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "state", [{"\udc80": torch.ones(2)}, {"w": torch.ones(2), "\udc80": 1}], ids=("tensor", "value")
)
def test_a_name_that_is_no_text_is_refused(tmp_path: Path, call_json: Any, state: dict[str, Any]) -> None:
    """Half of a surrogate pair in a name of a .pt file ended in a UnicodeEncodeError with its traceback."""
    torch.save(state, tmp_path / "a.pt")
    code, document = call_json("import", tmp_path / "a.pt", tmp_path / "run")
    assert (code, document["error"]) == (3, "Unstorable") and "no valid Unicode" in document["message"]


def test_odd_names_of_a_pt_file_are_imported_as_they_are(tmp_path: Path, call_json: Any) -> None:
    names = ("a/b", "../x", "a\nb", " ", "größe", "a\0b")
    torch.save({**{name: torch.ones(2) for name in names}, 1: torch.ones(2), None: torch.ones(2)}, tmp_path / "a.pt")
    assert call_json("import", tmp_path / "a.pt", tmp_path / "run")[0] == 0
    assert {row["name"] for row in call_json("show", tmp_path / "run")[1]["tensors"]} == {*names, "1", "None"}


def test_a_missing_shard_of_a_folder_is_named(tmp_path: Path, call_json: Any) -> None:
    """The error named the folder only: "No such file or directory", of a folder that exists."""
    folder = tmp_path / "hf"
    folder.mkdir()
    save_file({"a": torch.ones(2)}, folder / "one.safetensors")
    where = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(where))
    code, document = call_json("import", folder, tmp_path / "run")
    assert code == 3 and str(folder / "two.safetensors") in document["message"] and not (tmp_path / "run").exists()


def test_a_folder_that_may_not_be_read_is_no_wrong_command_line(
    tmp_path: Path, call_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import called it "a folder of neither" format, with exit code 2, and did not say why."""

    def refuse(path: str) -> list[str]:  # the user of the tests may be root, who can read everything
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    code, document = call_json("import", tmp_path, tmp_path / "run")
    assert (code, document["error"]) == (3, "NotWritable") and "Permission denied" in document["message"]

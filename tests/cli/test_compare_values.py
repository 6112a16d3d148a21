"""`lastgood diff` on values that Python takes as equal, and that are stored differently."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lastgood
from lastgood.cli.compare import compared_view


@pytest.mark.parametrize(
    ("first", "second"), [(1, True), (1, 1.0), (True, 1.0), (0.0, -0.0), ({}, []), ([1, 0.0], [True, -0.0])]
)
def test_diff_finds_values_that_python_calls_equal(tmp_path: Path, call_json: Any, first: Any, second: Any) -> None:
    """The stored JSON was compared by `==`: 1 and True, 0.0 and -0.0 were called the same, with exit code 0, by `diff`
    and by `replay`."""
    for step, value in enumerate((first, second)):
        lastgood.save(tmp_path / "run", {"n": value, "same": [1, {}]}, step=step)
    code, document = call_json("diff", tmp_path / "run", 0, 1)
    assert (code, [one["path"] for one in document["values"]]) == (7, ["n"])
    assert call_json("diff", tmp_path / "run", 1, 1)[0] == 0


def test_diff_finds_that_an_empty_dict_was_removed(tmp_path: Path, call_json: Any) -> None:
    """An empty dict counted as the place of a tensor, so that a lost one was no difference."""
    lastgood.save(tmp_path / "run", {"n": 1, "d": {}}, step=0)
    lastgood.save(tmp_path / "run", {"n": 1}, step=1)
    code, document = call_json("diff", tmp_path / "run", 0, 1)
    assert (code, document["values"]) == (7, [{"path": "d", "first": {}}])


def test_a_tensor_that_differs_on_a_rank_is_counted_once() -> None:
    """Each rank's row counted as a tensor more: "3 tensors: 1 same, 2 differ" of a run that has two."""
    base = {"dtype": "uint8", "shape": [4], "elements": 4, "differing": 1}
    rows = [
        {"name": "a", "status": "same"},
        {"name": "rng", "status": "same"},
        *({"name": "rng", "ranks": [rank], "status": "differs", **base} for rank in (1, 2)),
    ]
    out = Console(file=io.StringIO(), width=200)
    out.print(compared_view({"same": False, "tensors": rows, "values": []}))
    assert "2 tensors: 1 same, 1 differ;" in out.file.getvalue()

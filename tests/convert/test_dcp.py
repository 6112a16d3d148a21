"""The DCP storage (lastgood.dcp): the usage patterns that torch.distributed.checkpoint documents, on this storage."""

from __future__ import annotations

import inspect
import os
import pathlib
import pickle
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import lastgood
from dcp_calls import load, save
from lastgood import errors
from lastgood.cli import app
from lastgood_lab.worlds import world
from ranked import dcp_loaded, dcp_of_torch, dcp_saved

pytestmark = pytest.mark.slow


def test_nested_states_round_trip_and_each_save_is_a_generation(tmp_path):
    weight = torch.arange(12.0).reshape(3, 4)
    for step in range(3):
        save(
            {"model": {"w": weight + step, "deep": [torch.tensor(step), {"x": 1.5}]}, "lr": 0.1, "step": step}, tmp_path
        )
    state = {"model": {"w": torch.zeros(3, 4), "deep": [torch.tensor(-1), {"x": 0.0}]}, "lr": 0.0, "step": -1}
    load(state, tmp_path)
    assert torch.equal(state["model"]["w"], weight + 2) and state["model"]["deep"][0] == 2
    assert (state["model"]["deep"][1], state["lr"], state["step"]) == ({"x": 1.5}, 0.1, 2)
    assert [one.step for one in lastgood.open(tmp_path).lineage()] == [2, 1, 0]
    assert lastgood.open(tmp_path).verify(2).good
    load(state, tmp_path, checkpoint_id="step-1")
    assert state["step"] == 1


class Counter:
    """A Stateful object in torch's sense."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "seen": torch.full((4,), float(self.count))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert torch.equal(state["seen"], torch.full((4,), float(self.count)))


def test_stateful_objects_save_and_load_themselves(tmp_path):
    save({"counter": Counter(7)}, tmp_path)
    fresh = Counter(0)
    load({"counter": fresh}, tmp_path)
    assert fresh.count == 7


def test_a_part_is_loaded_alone_and_missing_keys_are_named(tmp_path):
    save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path)
    state = {"b": torch.zeros(2)}
    load(state, tmp_path)
    assert torch.equal(state["b"], torch.ones(2))
    with pytest.raises(CheckpointException, match="Missing key"):
        load({"c": torch.zeros(2)}, tmp_path)
    allowed = {"b": torch.zeros(2), "c": torch.zeros(2)}
    load(allowed, tmp_path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    assert torch.equal(allowed["b"], torch.ones(2)) and torch.equal(allowed["c"], torch.zeros(2))


class Renaming(dcp.DefaultSavePlanner):
    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({f"old.{key}": one for key, one in state_dict.items()}, storage_meta, is_coordinator)


def test_a_custom_planner_is_used(tmp_path):
    save({"w": torch.ones(3)}, tmp_path, planner=Renaming())
    assert torch.equal(lastgood.open(tmp_path).tensor("old.w"), torch.ones(3))


def change_during_an_asynchronous_save(root: Path, **options: Any) -> None:
    state = {"w": torch.ones(1000)}
    done = dcp.async_save(state, storage_writer=lastgood.dcp.Writer(root), **options)
    state["w"].zero_()
    done.result()
    fresh = {"w": torch.zeros(1000)}
    load(fresh, root)
    assert torch.equal(fresh["w"], torch.ones(1000))


@pytest.mark.skipif(
    "no_dist" not in inspect.signature(dcp.async_save).parameters,
    reason="this version of torch saves asynchronously in a process group only",
)
def test_an_asynchronous_save_is_the_state_at_the_call(tmp_path):
    change_during_an_asynchronous_save(tmp_path, no_dist=True)


def test_an_asynchronous_save_in_a_process_group_is_the_state_at_the_call(tmp_path, process_group):
    change_during_an_asynchronous_save(tmp_path)


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_an_unstorable_value_is_refused_by_name_and_the_old_save_stays(tmp_path, capsys):
    save({"w": torch.ones(3)}, tmp_path)
    with pytest.raises(CheckpointException, match=r"odd is a test_dcp\.Evil, which cannot be stored"):
        save({"w": torch.zeros(3), "odd": Evil()}, tmp_path)
    assert "run" not in capsys.readouterr().out
    state = {"w": torch.zeros(3)}
    load(state, tmp_path)
    assert torch.equal(state["w"], torch.ones(3))
    save({"w": torch.zeros(3)}, tmp_path)
    assert [one.step for one in lastgood.open(tmp_path).lineage()] == [1, 0], "the next save succeeds"


def test_damage_is_never_loaded(tmp_path):
    save({"w": torch.arange(5000.0)}, tmp_path)
    (path,) = tmp_path.glob("gen/*/r00000.safetensors")
    data = bytearray(path.read_bytes())
    data[9000] ^= 1
    path.write_bytes(data)
    state = {"w": torch.zeros(5000)}
    with pytest.raises(CheckpointException, match="differs from its digest"):
        load(state, tmp_path)
    assert torch.equal(state["w"], torch.zeros(5000))


@pytest.mark.parametrize("wrong", ["latest", "2026-11-28", "2026-11-28T12:00:05", "20261128120005"])
def test_an_id_that_names_no_step_is_refused(tmp_path, wrong):
    """Of a date the day, or the second, was the step; a number with too many digits "cannot follow nothing"."""
    with pytest.raises(errors.Refused, match="names no step"):
        save({"w": torch.ones(1)}, tmp_path, checkpoint_id=wrong)


def test_a_run_of_a_checkpointer_is_read_by_its_names(tmp_path):
    net = nn.Linear(4, 2)
    lastgood.save(tmp_path, {"net": net})
    state = {"net.weight": torch.zeros(2, 4)}
    load(state, tmp_path)
    assert torch.equal(state["net.weight"], net.weight)


@pytest.mark.parametrize(
    ("saver", "loader"), [(("fsdp", 2), ("fsdp", 3)), (("fsdp_tp", 4), ("ddp", 2)), (("ddp", 2), ("tp", 2))]
)
def test_states_of_the_torch_helpers_load_in_any_world_size(tmp_path, saver, loader):
    world(saver[1], dcp_saved, saver[0], tmp_path, [1, 2])
    same = world(saver[1], dcp_loaded, saver[0], tmp_path)
    other = world(loader[1], dcp_loaded, loader[0], tmp_path)
    assert all(one == same[0] for one in [*same, *other])
    assert same[0]["step"] == 2 and same[0]["name"] == "gpt"
    assert lastgood.open(tmp_path).verify(2).good


# ---- folders that torch's own writer has written ----------------------------------------------------------------


NESTED = {
    "model": {"w": torch.arange(12.0).reshape(3, 4), "deep": [torch.tensor(7, dtype=torch.bfloat16), {"x": 1.5}]},
    "none": torch.zeros(0, 3),
    "step": 4,
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def zeros(one: Any) -> Any:
    if isinstance(one, dict):
        return {key: zeros(item) for key, item in one.items()}
    return [zeros(item) for item in one] if isinstance(one, list) else one * 0


def test_a_dcp_folder_converts_into_a_run_and_back_unchanged(tmp_path):
    dcp.save(NESTED, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    assert app.main(["import", str(tmp_path / "theirs"), str(tmp_path / "run"), "--step", "4"]) == 0
    state = zeros(NESTED)
    load(state, tmp_path / "run")
    assert same(state, NESTED)
    assert app.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "back.dcp")]) == 0
    state = zeros(NESTED)
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "back.dcp"), no_dist=True)
    assert same(state, NESTED)
    ours, theirs = (dcp.FileSystemReader(tmp_path / one).read_metadata().planner_data for one in ("back.dcp", "theirs"))
    assert ours == theirs, "the paths in nested dicts are kept as well"


def test_a_dcp_folder_of_several_ranks_is_merged(tmp_path):
    whole = world(2, dcp_of_torch, "fsdp", tmp_path / "theirs")[0]
    assert app.main(["import", str(tmp_path / "theirs"), str(tmp_path / "run"), "--under", "old"]) == 0
    state = {f"old.{name}": torch.zeros(torch.tensor(value).shape) for name, value in whole.items()}
    load(state, tmp_path / "run")
    assert {name.removeprefix("old."): one.tolist() for name, one in state.items()} == whole


def test_a_checkpointer_run_converts_to_dcp_under_its_names(tmp_path):
    net = nn.Linear(4, 2)
    lastgood.save(tmp_path / "run", {"net": net})
    assert app.main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "net.dcp"), "--only", "net"]) == 0
    state = {"weight": torch.zeros(2, 4), "bias": torch.zeros(2)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "net.dcp"), no_dist=True)
    assert torch.equal(state["weight"], net.weight) and torch.equal(state["bias"], net.bias)


def _evil_metadata(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))


def _evil_value(folder: Path) -> None:
    shutil.rmtree(folder)
    dcp.save({"w": torch.ones(2), "odd": Evil()}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def _outside(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for one in metadata.storage_data.values():
        one.relative_path = "../" + one.relative_path
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _a_link(folder: Path) -> None:
    (one,) = folder.glob("*.distcp")
    one.rename(folder.parent / "elsewhere")
    one.symlink_to(folder.parent / "elsewhere")


def _a_class_changed(folder: Path) -> None:
    change = pickle.PROTO + b"\x02" + pickle.GLOBAL + b"pathlib\nPurePosixPath\n" + pickle.NONE + pickle.EMPTY_DICT
    change += pickle.BINUNICODE + (5).to_bytes(4, "little") + b"parts" + pickle.EMPTY_TUPLE + pickle.SETITEM
    (folder / ".metadata").write_bytes(change + pickle.TUPLE2 + pickle.BUILD + pickle.STOP)


class _AttributeOfAFunction:
    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (torch.serialization._get_layout, "__globals__")


def _attribute_of_a_function(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = _AttributeOfAFunction()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _odd_names(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata = {1: metadata.state_dict_metadata["w"]}
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _a_hole(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].size = torch.Size([6])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def _short(folder: Path) -> None:
    (one,) = folder.glob("*.distcp")
    os.truncate(one, one.stat().st_size - 500)


def _no_pickle(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"garbage")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_evil_metadata, "no class of metadata"),
        (_attribute_of_a_function, "no member of torch's enum"),
        (_evil_value, "odd is no plain value"),
        (_outside, "outside of the folder"),
        (_a_link, "outside of the folder"),
        (_a_class_changed, "would change a class"),
        (_odd_names, "is not valid"),
        (_a_hole, r"the parts of w do not make a tensor of shape \[6\]"),
        (_short, "cannot be read"),
        (_no_pickle, "cannot be read"),
    ],
)
def test_a_malformed_dcp_folder_is_refused_and_runs_no_code(tmp_path, capsys, spoil, message):
    dcp.save({"w": torch.ones(5), "n": 1}, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    spoil(tmp_path / "theirs")
    capsys.readouterr()
    assert app.main(["import", str(tmp_path / "theirs"), str(tmp_path / "run")]) in (3, 4)
    out, err = capsys.readouterr()
    assert re.search(message, err) and "run\n" not in out
    assert not (tmp_path / "run").exists() or not lastgood.open(tmp_path / "run").generations()


def test_metadata_written_by_an_older_python_is_read(tmp_path, monkeypatch):
    """The Python of Debian 12, 3.11.2, writes the enum in it as a call of `getattr`: each such folder was refused."""
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", lambda one, _: (getattr, (type(one), one.name)))
    dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), no_dist=True)
    assert app.main(["import", str(tmp_path / "theirs"), str(tmp_path / "run"), "--step", "4"]) == 0


def test_metadata_written_by_a_newer_python_is_read(tmp_path, monkeypatch):
    """Python 3.13 has its paths in another module: each folder that it had written was refused, there and elsewhere."""
    theirs = tmp_path / "theirs"
    with monkeypatch.context() as newer:
        newer.setitem(sys.modules, "pathlib._local", pathlib)
        newer.setattr(pathlib.PosixPath, "__module__", "pathlib._local")
        dcp.save({"w": torch.ones(3)}, storage_writer=dcp.FileSystemWriter(theirs), no_dist=True)
    assert b"pathlib._local" in (theirs / ".metadata").read_bytes()
    assert app.main(["import", str(theirs), str(tmp_path / "run"), "--step", "4"]) == 0

"""States, plans and values that torch's own storage accepts, and that the DCP storage once refused or lost."""

from __future__ import annotations

import inspect
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException

import lastgood
from dcp_calls import load, save
from lastgood.cli import app
from lastgood.convert import dcp_values
from lastgood.errors import ManifestInvalid, Refused
from lastgood_lab.worlds import world
from ranked_dcp import little, uneven_through_a_checkpointer, uneven_through_dcp, with_kept_plans

pytestmark = pytest.mark.slow

# ---- ranks and states without tensors ------------------------------------------------------------------------------


def test_a_state_without_tensors_is_saved_and_restored(tmp_path):
    """A state without tensors, with exclude=["rng"], raised ValueError at the first save."""
    state: dict[str, Any] = {"n": 7, "empty": torch.zeros(0, 3)}
    for root, kept in ((tmp_path / "none", {"n": 7}), (tmp_path / "empty", state)):
        with lastgood.Checkpointer(root, dict(kept), exclude=["rng"]) as ckpt:
            ckpt.restore()
            ckpt.save(1).result()
        fresh = dict(kept) | {"n": 0}
        with lastgood.Checkpointer(root, fresh, exclude=["rng"]) as ckpt:
            assert ckpt.restore().step == 1
        assert fresh["n"] == 7 and lastgood.open(root).verify(1).good
    save({"n": 7}, tmp_path / "dcp")
    loaded = {"n": 0}
    load(loaded, tmp_path / "dcp")
    assert loaded == {"n": 7}
    save({}, tmp_path / "nothing")
    load({}, tmp_path / "nothing")


def test_a_rank_with_nothing_to_write_does_not_fail_a_save(tmp_path):
    """dcp.save({"n": 1}) on two ranks, and DDP of one tensor with exclude=["rng"], raised ValueError."""
    found = world(3, little, tmp_path)
    values, tensor = "{'n': 1}", "{'w': tensor([1., 1., 1.]), 'n': 1}"
    assert found == [[values, values, tensor, tensor]] * 3


# ---- shards without elements ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [uneven_through_dcp, uneven_through_a_checkpointer])
def test_a_shard_without_elements_is_saved_and_loaded(tmp_path, way):
    """With five rows over four ranks, as FSDP2 shards them, every commit failed: a rank's shard "is no part of" the
    tensor."""
    rows = {"rows": [[1.0, 2.0], [3.0, 4.0]], "none": (0, 6), "no rows": (0, 6), "no copies": (3, 0), "n": 1}
    assert world(3, way, tmp_path) == [rows] * 3
    assert lastgood.open(tmp_path).verify(lastgood.open(tmp_path).generations()[0].step).good


# ---- plans that torch caches ---------------------------------------------------------------------------------------


def test_plans_cached_by_torch_serve_every_save_of_two_runs(tmp_path):
    """With enable_plan_caching, only the first save worked, and a second run ended in a bare AssertionError."""
    a = [[2, 20.0, 2.0, "a"], [1, 10.0, 1.0, "a"], [0, 0.0, 0.0, "a"]]
    b = [[10, 20.0, 2.0, "b"], [5, 10.0, 1.0, "b"], [0, 0.0, 0.0, "b"]]
    assert world(2, with_kept_plans, tmp_path) == [{"differs": ["StepDiffers"], "a": a, "b": b}] * 2


def test_a_plan_cached_for_another_storage_is_refused_by_name(tmp_path):
    """torch caches plans by the class of the planner, even across storages; such a plan names no generation of this
    storage."""

    class Planner(dcp.DefaultSavePlanner):
        pass

    state, planner = {"w": torch.ones(2)}, Planner(enable_plan_caching=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "theirs"), planner=planner, no_dist=True)
    with pytest.raises(CheckpointException, match="reuses this plan from a save to another storage"):
        save(state, tmp_path / "run", planner=planner)
    save(state, tmp_path / "run")
    assert [one.step for one in lastgood.open(tmp_path / "run").generations()] == [0], "the next save succeeds"


class Forgetful(dcp.DefaultSavePlanner):
    """A planner that plans an entry, and then gives the storage a plan without it."""

    def finish_plan(self, new_plan: Any) -> Any:
        new_plan.items.pop()
        return super().finish_plan(new_plan)


def test_an_entry_that_was_planned_and_not_written_is_never_committed(tmp_path):
    """An entry that a rank's plan omitted was committed as if it were complete, and was missing at the first load."""
    with pytest.raises(CheckpointException, match="n is in the plan of this save, but no rank has written it"):
        save({"w": torch.ones(2), "n": 1}, tmp_path, planner=Forgetful())
    assert lastgood.open(tmp_path).generations() == []


@pytest.mark.skipif(
    "use_collectives" not in inspect.signature(dcp.save).parameters, reason="this version of torch has no such save"
)
def test_a_save_without_collectives_is_refused(tmp_path):
    """The save was accepted, and every rank began a generation of its own, because torch does not pass the option to
    the storage."""
    with pytest.raises(Refused, match="without collectives"):
        save({"w": torch.ones(2)}, tmp_path, use_collectives=False)
    assert list(tmp_path.iterdir()) == []


# ---- values --------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A comparable form of a value: its type and everything in it."""
    if isinstance(value, io.BytesIO):
        return type(value), value.getvalue(), value.tell()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return type(value), value.dtype, value.shape, value.tolist()
    if isinstance(value, (tuple, list)):
        return type(value), [plain(one) for one in value]
    return type(value), value


def blob() -> io.BytesIO:
    found = io.BytesIO(b"tokenizer")
    found.seek(3)
    return found


VALUES: dict[str, Any] = {
    "BytesIO": blob(),
    "array": np.arange(6.0).reshape(2, 3),
    "dates": np.array(["2026-11-22", "NaT"], "datetime64[D]"),
    "empty array": np.zeros((0, 4), np.int16),
    "scalar": np.float32(0.1),
    "size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "tensor in a tuple": (torch.tensor([1.5, -0.0], dtype=torch.bfloat16), torch.zeros(0, 2), 1),
}


class Casting(dcp.DefaultSavePlanner):
    """A planner that serialises by itself: the storage receives bytes and no objects."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, object)


def test_values_accepted_by_the_torch_writer_round_trip(tmp_path):
    """A trainer's io.BytesIO, numpy arrays, torch.Size and torch.dtype were refused, although DCP's own writer
    accepts them."""
    save(VALUES | {"w": torch.ones(2)}, tmp_path)
    state = dict.fromkeys(VALUES)
    load(state, tmp_path)
    assert {name: plain(one) for name, one in state.items()} == {name: plain(one) for name, one in VALUES.items()}
    assert app.main(["show", str(tmp_path)]) == 0
    assert app.main(["export", str(tmp_path), "--to", str(tmp_path / "theirs.dcp")]) == 0
    theirs: dict[str, Any] = dict.fromkeys(VALUES)
    dcp.load(theirs, storage_reader=dcp.FileSystemReader(tmp_path / "theirs.dcp"), no_dist=True)
    assert plain(theirs["BytesIO"]) == plain(VALUES["BytesIO"])


def test_custom_planner_bytes_are_read_by_the_restricted_unpickler(tmp_path):
    save({"size": torch.Size([2]), "lr": 0.1}, tmp_path, planner=Casting())
    state = {"size": None, "lr": 0.0}
    load(state, tmp_path)
    assert state == {"size": torch.Size([2]), "lr": 0.1}
    with pytest.raises(CheckpointException, match="path is no plain value"):
        save({"path": Path("x")}, tmp_path, planner=Casting())


@pytest.mark.parametrize(
    "tree",
    [
        {"!io.BytesIO": ["not base64!", 0]},
        {"!io.BytesIO": ["", -1]},
        {"!array": ["<f8", [3], ""]},
        {"!array": ["|O", [1], ""]},
        {"!bare_tensor": ["float32", [2], "AAAA"]},
        {"!bare_tensor": ["object", [1], ""]},
        {"!torch.Size": 5},
        {"!torch.dtype": "float99"},
        {"!torch.device": "nowhere"},
        {"!torch.dtype": ["float32", 1]},
    ],
)
def test_a_malformed_value_is_damage_and_nothing_else(tree):
    with pytest.raises(ManifestInvalid, match="a stored value is malformed"):
        dcp_values.decoded(tree)


# ---- metadata of a save and of a load ------------------------------------------------------------------------------


def test_a_load_reports_the_ids_of_the_save_and_its_own(tmp_path):
    """storage_meta was present after a save and missing after a load, where torch's reader provides it."""
    writer, reader = lastgood.dcp.Writer(tmp_path), lastgood.dcp.Reader(tmp_path)
    saved = [dcp.save({"n": n}, storage_writer=writer, no_dist=True).storage_meta for n in range(2)]
    assert saved[0].save_id != saved[1].save_id == writer.save_id
    metadata = reader.read_metadata()
    theirs = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # from torch 2.9 on
    assert metadata.version == theirs, "torch's own reader returns the same version"
    found = metadata.storage_meta
    assert (
        (found.checkpoint_id, found.save_id)
        == (saved[1].checkpoint_id, saved[1].save_id)
        == (
            str(tmp_path),
            lastgood.open(tmp_path).lineage()[0].id.incarnation,
        )
    )
    assert found.load_id == reader.load_id
    reader.reset("step-0")
    older = reader.read_metadata().storage_meta
    assert (older.checkpoint_id, older.save_id) == ("step-0", saved[0].save_id) and older.load_id != found.load_id

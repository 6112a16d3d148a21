"""The drop-in: torch.distributed.checkpoint's own usage patterns, with this storage under them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

import lastgood
from lastgood import errors
from ranked import dcp_loaded, dcp_saved, world


def save(state: dict[str, Any], root: Path, **options: Any) -> None:
    dcp.save(state, storage_writer=lastgood.dcp.Writer(root), no_dist=True, **options)


def load(state: dict[str, Any], root: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=lastgood.dcp.Reader(root), no_dist=True, **options)


def test_nested_states_come_back_with_their_values_and_each_save_is_a_generation(tmp_path):
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
    """Stateful, as torch knows it."""

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


def test_a_part_is_loaded_alone_and_what_is_missing_is_said(tmp_path):
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


def test_a_planner_of_ones_own_plans(tmp_path):
    save({"w": torch.ones(3)}, tmp_path, planner=Renaming())
    assert torch.equal(lastgood.open(tmp_path).tensor("old.w"), torch.ones(3))


def test_an_asynchronous_save_is_the_state_at_the_call(tmp_path, monkeypatch):
    state = {"w": torch.ones(1000)}
    done = dcp.async_save(state, storage_writer=lastgood.dcp.Writer(tmp_path), no_dist=True)
    state["w"].zero_()
    done.result()
    fresh = {"w": torch.zeros(1000)}
    load(fresh, tmp_path)
    assert torch.equal(fresh["w"], torch.ones(1000))


class Evil:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_what_is_no_plain_value_is_refused_by_name_and_the_old_one_stays(tmp_path, capsys):
    save({"w": torch.ones(3)}, tmp_path)
    with pytest.raises(CheckpointException, match="odd is no plain value"):
        save({"w": torch.zeros(3), "odd": Evil()}, tmp_path)
    assert "run" not in capsys.readouterr().out
    state = {"w": torch.zeros(3)}
    load(state, tmp_path)
    assert torch.equal(state["w"], torch.ones(3))
    save({"w": torch.zeros(3)}, tmp_path)
    assert [one.step for one in lastgood.open(tmp_path).lineage()] == [1, 0], "and the next save works"


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


def test_an_id_that_names_no_step_is_refused(tmp_path):
    with pytest.raises(errors.Refused, match="names no step"):
        save({"w": torch.ones(1)}, tmp_path, checkpoint_id="latest")


def test_a_run_of_a_checkpointer_is_read_by_its_names(tmp_path):
    net = nn.Linear(4, 2)
    lastgood.save(tmp_path, {"net": net})
    state = {"net.weight": torch.zeros(2, 4)}
    load(state, tmp_path)
    assert torch.equal(state["net.weight"], net.weight)


@pytest.mark.parametrize(
    ("saver", "loader"), [(("fsdp", 2), ("fsdp", 3)), (("fsdp_tp", 4), ("ddp", 2)), (("ddp", 2), ("tp", 2))]
)
def test_states_of_torchs_helpers_go_from_any_world_to_any(tmp_path, saver, loader):
    world(saver[1], dcp_saved, saver[0], tmp_path, [1, 2])
    same = world(saver[1], dcp_loaded, saver[0], tmp_path)
    other = world(loader[1], dcp_loaded, loader[0], tmp_path)
    assert all(one == same[0] for one in [*same, *other])
    assert same[0]["step"] == 2 and same[0]["name"] == "gpt"
    assert lastgood.open(tmp_path).verify(2).good

"""Reading a run from Python: the model alone, everything as a plain dict, patterns in load and save."""

from __future__ import annotations

import collections
import dataclasses
import random
import re
import typing
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn, optim

import lastgood
from lastgood import errors
from lastgood.cli import app
from lastgood_lab.campaigns.rank_jobs import made
from lastgood_lab.worlds import world
from ranked import trained

Tree = dict[str, object]


def equal(one: object, other: object) -> bool:
    """Whether two values are equal bit for bit, and of equal types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(item, other[key]) for key, item in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def build(seed: int = 0) -> Tree:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[3].weight = model[2].weight  # a tied weight
    groups = [{"params": [model[3].bias, model[2].weight], "lr": 0.2}, {"params": model[:2].parameters()}]
    optimizer = optim.AdamW(groups, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    return {
        "model": model,
        "optimizer": optimizer,
        "nested": {"schedule": [optim.lr_scheduler.StepLR(optimizer, 2)], "a.b": nn.Linear(2, 2)},
        "scaler": scaler,
        "w%.x": torch.arange(3.0, requires_grad=True),
        "array": np.arange(4, dtype=">i2"),
        "losses": [0.5, 0.25],
        "epoch": 7,
    }


def train(state: Tree, steps: int = 3) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.randn(5, 3)).square().mean().backward()
        state["optimizer"].step()
        state["nested"]["schedule"][0].step()


@pytest.fixture
def run(tmp_path: Path) -> tuple[Path, Tree]:
    state = build()
    train(state)
    with lastgood.Checkpointer(tmp_path / "run", state) as ckpt:
        ckpt.save(3)
    return tmp_path / "run", state


def test_load_once_reads_only_the_model_of_a_training_run(run) -> None:
    """The load was refused because the optimizer was not requested, with the advice to pass strict=False, which
    hides missing entries."""
    path, state = run
    model = build(seed=1)["model"]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert lastgood.load(path, {"model": model}).step == 3
    assert equal(dict(model.state_dict()), dict(state["model"].state_dict()))
    assert equal((torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()), generators)


def test_a_partial_load_still_refuses_missing_and_misspelt_entries(run) -> None:
    path, _ = run
    longer, shorter = build()["model"].append(nn.Linear(4, 4)), build()["model"][:2]
    with pytest.raises(errors.StateMismatch) as caught:
        lastgood.load(path, {"model": longer})
    assert caught.value.missing == ["model.4.weight", "model.4.bias"] and caught.value.unexpected == []
    with pytest.raises(errors.StateMismatch) as caught:
        lastgood.load(path, {"model": shorter})
    assert sorted(caught.value.unexpected) == ["model.2.bias", "model.2.weight", "model.3.bias", "model.3.weight"]
    with pytest.raises(errors.StateMismatch) as caught:
        lastgood.load(path, {"modle": build()["model"]})
    assert caught.value.missing == ["modle"] and "model" in caught.value.unexpected
    with lastgood.Checkpointer(path, {"model": build()["model"]}) as ckpt, pytest.raises(errors.StateMismatch):
        ckpt.restore()


def test_load_once_reads_part_of_a_renamed_module(run) -> None:
    path, state = run
    head = nn.Linear(4, 4)
    lastgood.load(path, {"head": head}, rename={"model.2.": "head."})
    assert torch.equal(head.weight, state["model"][2].weight)


def test_loading_the_whole_state_restores_the_random_generators(run) -> None:
    path, _ = run
    before = torch.get_rng_state()
    fresh = build(seed=1)
    lastgood.load(path, fresh)
    assert torch.equal(torch.get_rng_state(), before)


def test_load_without_a_state_returns_the_contents_of_state_dicts(run) -> None:
    path, state = run
    before = torch.get_rng_state()
    torch.rand(1)
    moved = torch.get_rng_state()
    found = lastgood.load(path)
    assert isinstance(found, dict) and found.restored.step == 3
    assert equal(torch.get_rng_state(), moved) and equal(found["rng"]["torch"], before)
    assert found.keys() == {*state, "rng"}
    assert equal(found["model"], dict(state["model"].state_dict()))
    assert found["model"]["3.weight"] is found["model"]["2.weight"]
    assert equal(found["optimizer"], state["optimizer"].state_dict())
    assert equal(found["nested"]["schedule"], [state["nested"]["schedule"][0].state_dict()])
    assert equal(found["nested"]["a.b"], dict(state["nested"]["a.b"].state_dict()))
    assert equal(found["scaler"], state["scaler"].state_dict())
    assert equal(found["w%.x"], state["w%.x"].detach()) and not found["w%.x"].requires_grad
    assert equal(
        {key: found[key] for key in ("array", "losses", "epoch")},
        {key: state[key] for key in ("array", "losses", "epoch")},
    )


def test_torch_objects_load_the_returned_dict_and_continue_exactly(run) -> None:
    path, state = run
    found, fresh = lastgood.load(path), build(seed=1)
    fresh["model"].load_state_dict(found["model"])
    fresh["optimizer"].load_state_dict(found["optimizer"])
    fresh["nested"]["schedule"][0].load_state_dict(found["nested"]["schedule"][0])
    fresh["scaler"].load_state_dict(found["scaler"])
    for one in (state, fresh):
        torch.manual_seed(11)
        train(one)
    assert equal(dict(fresh["model"].state_dict()), dict(state["model"].state_dict()))


def test_patterns_select_the_entries_of_the_returned_dict(run) -> None:
    path, state = run
    found = lastgood.load(path, include=["model.0", "nested.schedule", "epoch"], step=3)
    assert found.keys() == {"model", "nested", "epoch"} and found["nested"].keys() == {"schedule"}
    assert equal(found["model"], dict(state["model"][0].state_dict(prefix="0.")))
    assert lastgood.load(path, exclude=["optimizer.state", "rng"])["optimizer"]["state"] == {}
    assert set(lastgood.load(path, include=["*.weight", "rng.python"])) == {"model", "nested", "optimizer", "rng"}


def test_patterns_select_the_entries_loaded_into_a_live_state(run) -> None:
    path, state = run
    fresh = build(seed=1)
    before, bias = torch.get_rng_state(), fresh["model"][0].bias.clone()
    lastgood.load(path, fresh, include=["model.*.weight", "epoch"])
    assert torch.equal(fresh["model"][0].weight, state["model"][0].weight)
    assert torch.equal(fresh["model"][0].bias, bias) and not fresh["optimizer"].state
    assert torch.equal(torch.get_rng_state(), before)
    lastgood.load(path, fresh, exclude=["optimizer", "nested.schedule.0.last_epoch"])
    assert torch.equal(fresh["model"][0].bias, state["model"][0].bias) and not fresh["optimizer"].state


@pytest.mark.parametrize("live", [True, False])
def test_a_pattern_that_matches_nothing_is_refused_by_load_and_save(run, tmp_path: Path, live: bool) -> None:
    path, state = run
    target = {"model": state["model"]} if live else None
    for options, near in (
        ({"include": ["3.weight"]}, r"'\*3\.weight\*'"),
        ({"exclude": ["nested.schedule.0.lastepoch"]}, "'nested.schedule.0.last_epoch'"),
    ):
        with pytest.raises(errors.Refused, match=near):
            lastgood.load(path, target, **options)
    with pytest.raises(errors.Refused, match="modle"):
        lastgood.save(tmp_path / "new", state, exclude=["modle"])
    assert not (tmp_path / "new").exists()


def test_save_once_accepts_patterns(run, tmp_path: Path) -> None:
    _, state = run
    lastgood.save(tmp_path / "new", state, include=["model"], exclude=["model.1", "rng"])
    assert equal(
        sorted(lastgood.load(tmp_path / "new")["model"]),
        sorted(name for name in state["model"].state_dict() if not name.startswith("1.")),
    )


def test_loading_a_dict_skips_damaged_generations(run, caplog) -> None:
    path, state = run
    lastgood.save(path, state | {"epoch": 8}, step=4)
    blob = max((path / "gen").iterdir()) / "r00000.safetensors"
    data = bytearray(blob.read_bytes())
    data[-5] ^= 1
    blob.write_bytes(data)
    found = lastgood.load(path)
    assert "stepping over" in caplog.text
    assert (found.restored.step, found["epoch"]) == (3, 7)
    with pytest.raises(errors.Damaged):
        lastgood.load(path, step=4)


@dataclasses.dataclass
class Holder:
    net: nn.Module


class Pair(typing.NamedTuple):
    net: nn.Module
    number: int


def test_modules_in_deques_and_instances_are_in_the_dict_once(tmp_path: Path) -> None:
    """Their tensors appeared twice: at their place, and as further entries under their dotted names."""
    nets = [nn.Linear(1, 1) for _ in range(3)]
    lastgood.save(tmp_path, {"d": collections.deque([nets[0]]), "h": Holder(nets[1]), "p": Pair(nets[2], 1)})
    found = lastgood.load(tmp_path)
    assert set(found) == {"d", "h", "p", "rng"}
    entries = [found["d"][0], found["h"]["net"], found["p"]["net"]]
    assert all(equal(dict(net.state_dict()), one) for net, one in zip(nets, entries, strict=True))


def test_an_empty_state_is_refused_and_not_loaded_with_nothing(run) -> None:
    """`lastgood.load(path, {})` reported success, and nothing had been loaded."""
    with pytest.raises(errors.Refused, match="the state is empty"):
        lastgood.load(run[0], {})


def test_an_empty_run_loads_as_an_empty_dict_and_bad_arguments_are_refused(tmp_path: Path) -> None:
    lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(1)}).close()
    assert lastgood.load(tmp_path / "run") == {}
    for options in ({"strict": False}, {"rename": {"a": "b"}}):
        with pytest.raises(errors.Refused, match="live state"):
            lastgood.load(tmp_path / "run", **options)


def test_a_run_in_slots_loads_as_a_dict(tmp_path: Path) -> None:
    path = f"slots://{tmp_path}/newest"
    with lastgood.Checkpointer(path, build()) as ckpt:
        ckpt.save(1)
    assert lastgood.load(path)["epoch"] == 7


def test_tensors_without_an_owner_are_in_the_dict_by_name(tmp_path: Path) -> None:
    """The dict was empty for an imported file, and for a state that torch.distributed.checkpoint wrote."""
    weights = {"model.0.weight": torch.arange(4.0), "model.0.bias": torch.ones(2), "alone": torch.zeros(1)}
    safetensors.torch.save_file(weights, tmp_path / "x.safetensors")
    assert app.main(["import", str(tmp_path / "x.safetensors"), str(tmp_path / "imported")]) == 0
    found = lastgood.load(tmp_path / "imported")
    own = {"0.weight": weights["model.0.weight"], "0.bias": weights["model.0.bias"]}
    assert equal(found["model"], own) and equal(found["alone"], weights["alone"])
    dcp.save(
        {"model": own, "n": 3, "w": torch.ones(2)}, storage_writer=lastgood.dcp.Writer(tmp_path / "d"), no_dist=True
    )
    found = lastgood.load(tmp_path / "d", exclude=["model.0.bias"])
    assert equal(found["model"], {"0.weight": own["0.weight"]}) and equal(found["w"], torch.ones(2))


def test_a_tensor_named_as_the_first_part_of_another_is_kept(tmp_path: Path) -> None:
    """bitsandbytes names "weight" and "weight.absmax": whichever came first was dropped from the dict in silence."""
    weights = {"weight": torch.ones(2), "weight.absmax": torch.zeros(3), "h.w": torch.ones(1), "h.w.b": torch.ones(4)}
    safetensors.torch.save_file(weights, tmp_path / "x.safetensors")
    assert app.main(["import", str(tmp_path / "x.safetensors"), str(tmp_path / "imported")]) == 0
    dcp.save(weights, storage_writer=lastgood.dcp.Writer(tmp_path / "dcp"), no_dist=True)
    for run in ("imported", "dcp"):
        found = lastgood.load(tmp_path / run)
        assert all(equal(found[name], weights[name]) for name in ("weight", "weight.absmax")), run
        assert equal(found["h"], {"w": weights["h.w"], "w.b": weights["h.w.b"]}), run


@pytest.mark.slow
def test_the_dict_holds_the_whole_state_of_several_ranks(tmp_path: Path) -> None:
    world(2, trained, "fsdp", tmp_path / "run", 2)
    found = lastgood.load(tmp_path / "run")
    loop = made("plain", 1)
    loop.net.load_state_dict(found["net"])
    loop.optimizer.load_state_dict(found["optimizer"])
    state = loop.optimizer.state_dict()["state"]
    assert all(equal(state[index]["exp_avg"], one["exp_avg"]) for index, one in found["optimizer"]["state"].items())
    assert len(state) == len(list(loop.net.parameters()))


def test_every_line_of_the_reading_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = build()
    train(state)
    lastgood.save("runs/gpt", state, step=4000)
    page = Path(__file__).resolve().parents[2] / "docs" / "reading-runs.md"
    names = {"lastgood": lastgood, **build(seed=1)}
    lines = "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    exec(compile(lines, str(page), "exec"), names)
    assert names["weights"].keys() == {"model"} and names["verdict"].good
    assert equal(lastgood.load("runs/finished", step=4000)["model"], dict(state["model"].state_dict()))
    assert "model.0.weight" in names["common"] - {*names["differ"]}


def test_the_result_of_restore_serves_as_an_integer_step(tmp_path: Path) -> None:
    """`range(ckpt.restore(), total)` raised TypeError."""
    lastgood.save(tmp_path, {"w": torch.zeros(1)}, step=4)
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(1)}) as ckpt:
        assert list(range(ckpt.restore(), 7)) == [4, 5, 6]

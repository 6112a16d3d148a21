"""Loops and states that do not belong together: other objects are trained, or other names and classes are stored."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, IterableDataset

import lastgood
from harness import reported, reports
from lastgood.errors import StateMismatch


def made() -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    return model, optim.SGD(model.parameters(), lr=1e-3)


def train(model: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def reported_in_three_steps(
    run: Path, state: dict[str, Any], train_step: Callable[[], object], **options: Any
) -> list[str]:
    """What is reported while three steps are trained, each with a save."""
    with reports() as texts, lastgood.Checkpointer(run, state, cadence=lastgood.Every(steps=1), **options) as ckpt:
        ckpt.restore()
        for step in range(1, 4):
            train_step()
            ckpt.step(step)
    return texts


@pytest.mark.parametrize("again", [False, True])
def test_a_loop_that_trains_other_objects_is_reported(tmp_path: Path, again: bool) -> None:
    """A cell of a notebook made model and optimizer again, and its new Checkpointer was refused, because the run was
    open. The next cells trained the new model with the earlier Checkpointer, which saved the one from before, without a
    word: 40 steps were lost."""
    model, optimizer = made()
    state = {"model": model, "optimizer": optimizer}
    with reports() as texts, lastgood.Checkpointer(tmp_path, state, cadence=lastgood.Every(steps=5)) as ckpt:
        ckpt.restore()
        if again:
            model, optimizer = made()
        for step in range(1, 41):
            train(model, optimizer)
            ckpt.step(step)
    assert sum("does the loop train other objects" in one for one in texts) == again


def test_a_model_that_another_way_than_optimizers_trains_is_not_reported(tmp_path: Path) -> None:
    """A CUDA graph that is replayed, or `.data`, counts no version of a tensor."""
    model, _ = made()
    with reports() as texts, lastgood.Checkpointer(tmp_path, {"model": model}, cadence=lastgood.Every(steps=5)) as ckpt:
        ckpt.restore()
        for step in range(1, 41):
            for one in model.parameters():
                one.data.mul_(0.99)
            ckpt.step(step)
    assert not any("other objects" in one for one in texts)


class Trainer:
    """An object of a user that saves the optimizer with its own names."""

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self.parts = [optimizer]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.parts[0].state_dict()}

    def load_state_dict(self, data: dict[str, Any]) -> None:
        self.parts[0].load_state_dict(data["optimizer"])


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("model", "AdamW"),
        ("model optimizer", "StepLR"),
        ("model optimizer schedule", ""),
        ("model trainer schedule", ""),
        ("head optimizer schedule", ""),
    ],
)
def test_a_forgotten_optimizer_or_schedule_is_reported(tmp_path: Path, given: str, missing: str) -> None:
    """After each restart its moments were zero again, and the learning rate that of the first epoch, without a word."""
    model = made()[0]
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    schedule = optim.lr_scheduler.StepLR(optimizer, 5)
    names = {"model": model, "head": model[1], "optimizer": optimizer, "schedule": schedule}
    state = {name: names.get(name) or Trainer(optimizer) for name in given.split()}
    texts = reported_in_three_steps(tmp_path, state, lambda: (train(model, optimizer), schedule.step()))
    named = [one.split("the state lacks ")[1].split(",")[0] for one in texts if "the state lacks" in one]
    assert named == missing.split()


@pytest.mark.parametrize(
    ("kind", "given", "missing"),
    [
        ("second", False, "LinearLR"),
        ("held", True, ""),
        ("plateau", False, "ReduceLROnPlateau"),
        ("plateau", True, ""),
        ("average", False, "AveragedModel"),
        ("average", True, ""),
    ],
)
def test_a_second_schedule_and_an_average_are_reported(tmp_path: Path, kind: str, given: bool, missing: str) -> None:
    """A warm-up beside the schedule of the state, a ReduceLROnPlateau and an AveragedModel began anew after each
    restart, without a word: the state had a schedule, or the optimizer had no sign of one."""
    model = made()[0]
    optimizer = optim.AdamW(model.parameters(), lr=1e-3)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    beside: Any
    if kind == "average":
        beside = optim.swa_utils.AveragedModel(model)
        state |= {"average": beside} if given else {}
    elif kind == "plateau":
        beside = optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        state |= {"schedule": beside} if given else {}
    else:
        beside, first = optim.lr_scheduler.LinearLR(optimizer), optim.lr_scheduler.StepLR(optimizer, 5)
        state["schedule"] = optim.lr_scheduler.SequentialLR(optimizer, [beside, first], [2]) if given else first

    def train_step() -> None:
        train(model, optimizer)
        if kind == "average":
            beside.update_parameters(model)
        elif kind == "plateau":
            beside.step(1.0)
        else:
            beside.step()

    texts = reported_in_three_steps(tmp_path, state, train_step)
    named = [one.split("the state lacks ")[1].split(",")[0] for one in texts if "the state lacks" in one]
    assert named == missing.split()


class Numbers(IterableDataset[torch.Tensor]):
    """Counts what was read from it."""

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            self.count += 1
            yield torch.ones(4)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, data: dict[str, int]) -> None:
        self.count = data["count"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_worker_processes_advance_is_reported(tmp_path: Path, workers: int) -> None:
    """They advance their copies of it: each save had its position before the first batch, and a restart trained the
    first batches again, without a word."""
    (model, optimizer), numbers = made(), Numbers()
    loader = DataLoader(numbers, 2, num_workers=workers)
    state = {"model": model, "optimizer": optimizer, "numbers": numbers}
    texts = reported_in_three_steps(tmp_path, state, lambda: train(model, optimizer))
    assert loader.num_workers == sum("numbers, which a DataLoader reads in worker" in one for one in texts)


def test_few_calls_with_large_numbers_are_not_reported(tmp_path: Path) -> None:
    """A loop that counts samples was told after three steps that no parameter had changed: a scaler may still be
    looking for its scale."""
    model, optimizer = made()
    state = {"model": model, "optimizer": optimizer}
    with lastgood.Checkpointer(tmp_path, state, cadence=lastgood.Every(steps=64)) as ckpt:
        ckpt.restore()
        with reports() as texts:
            for call in range(1, 20):
                ckpt.step(64 * call)
        assert not any("no parameter of the state" in one for one in texts)
        with reported("no parameter of the state has changed from step 0 to step 1280"):
            ckpt.step(64 * 20)


@pytest.mark.parametrize("own", [False, True])
def test_a_tensor_that_grows_is_reported(tmp_path: Path, own: bool) -> None:
    """Each restart was refused (StateMismatch), because the state begins with an empty tensor: nobody learnt of it
    before the first crash. An object that loads its state itself takes any length."""

    class Record:
        def __init__(self) -> None:
            self.losses = torch.zeros(1)

        def state_dict(self) -> dict[str, torch.Tensor]:
            return {"losses": self.losses}

        def load_state_dict(self, data: dict[str, torch.Tensor]) -> None:
            self.losses = data["losses"]

    model, optimizer = made()
    record, state = Record(), {"model": model, "optimizer": optimizer, "losses": torch.zeros(1)}
    if own:
        state["losses"] = record

    def train_step() -> None:
        train(model, optimizer)
        longer = torch.zeros(len(record.losses) + 1)
        record.losses = longer
        if not own:
            state["losses"] = longer

    texts = reported_in_three_steps(tmp_path, state, train_step)
    found = [one for one in texts if "another shape" in one]
    assert len(found) == (not own)
    assert all("another shape than in the save before: losses [2], now [3]." in one for one in found)


class Perturbed(optim.Optimizer):
    """An optimizer around another one, as SAM is. `saves`: whether its state has that of the inner one."""

    def __init__(self, parameters: Iterable[nn.Parameter], saves: bool) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.inner, self._saves = optim.SGD(self.param_groups, lr=1e-3, momentum=0.9), saves

    def step(self, closure: Any = None) -> None:
        self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | ({"inner": self.inner.state_dict()} if self._saves else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self._saves:
            self.inner.load_state_dict(state_dict.pop("inner"))
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("saves", [False, True])
def test_an_optimizer_inside_of_another_one_that_is_not_saved_is_reported(tmp_path: Path, saves: bool) -> None:
    """SAM, as it was published, does not save its inner optimizer: the momentum was zero again, without a word."""
    model = made()[0]
    optimizer = Perturbed(model.parameters(), saves)
    state = {"model": model, "optimizer": optimizer}
    texts = reported_in_three_steps(tmp_path, state, lambda: train(model, optimizer))
    assert any("the state lacks SGD" in one for one in texts) != saves


class Grouped(nn.Linear):
    """A module with a method of the name that groups of optimizers have."""

    def param_groups(self) -> list[nn.Parameter]:
        return [*self.parameters()]


def test_a_module_with_groups_of_its_own_and_a_schedule_without_optimizer(tmp_path: Path) -> None:
    model = Grouped(4, 1)
    optimizer, other = (
        optim.AdamW(model.parameters()),
        optim.lr_scheduler.LRScheduler.__new__(optim.lr_scheduler.StepLR),
    )
    optimizer.param_groups[0]["initial_lr"] = 1e-3
    state = {"model": model, "optimizer": optimizer}
    with reports() as texts, lastgood.Checkpointer(tmp_path, state, cadence=lastgood.Every(steps=1)) as ckpt:
        ckpt.restore()
        train(model, optimizer)
        ckpt.step(1)
    assert not any("the state lacks" in one for one in texts) and other is not None


def test_an_optimizer_that_keeps_nothing_is_not_reported(tmp_path: Path) -> None:
    model, optimizer = made()
    texts = reported_in_three_steps(tmp_path, {"model": model}, lambda: train(model, optimizer))
    assert not any("the state lacks" in one for one in texts)


def test_an_optimizer_that_is_excluded_is_not_reported(tmp_path: Path) -> None:
    model, _ = made()
    optimizer = optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    texts = reported_in_three_steps(tmp_path, state, lambda: train(model, optimizer), exclude=["optimizer"])
    assert not any("the state lacks" in one for one in texts)


class Around(nn.Module):
    """A module whose `state_dict()` has the tensors of another one, too, that it does not own."""

    def __init__(self, model: nn.Module, other: nn.Module) -> None:
        super().__init__()
        self.model, self.others = model, [other]

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {**super().state_dict(), **self.others[0].state_dict(prefix="other.")}


@dataclass
class Parts:
    tensors: list[torch.Tensor]


def with_head(how: str, model: nn.Module, head: nn.Module) -> dict[str, Any]:
    """A state for a loop that trains a model and its head: what it has of them."""
    tensors = [*model.parameters(), *head.parameters()]
    copies = {name: one.clone() for name, one in model.state_dict().items()}
    return {
        "no head": {"model": model},
        "no model but a copy": {"model": copies, "head": head},
        "both": {"model": model, "head": head},
        "both, and a copy": {"model": model, "head": head, "first": copies},
        "tensors": {"tensors": tensors},
        "their memory": {"tensors": Parts([one.data for one in tensors])},
        "an object": {"model": model, "holder": Trainer(head)},
        "a module with more": {"model": Around(model, head)},
    }[how]


@pytest.mark.parametrize(
    ("how", "lacking", "options"),
    [
        ("no head", "2 parameters ([3, 1], [3])", {}),
        ("no model but a copy", "4 parameters ([4, 4], [4], [1, 4] and 1 more)", {}),
        ("both", "", {}),
        ("both", "", {"include": ["head", "optimizer"]}),
        ("both", "", {"exclude": ["head"]}),
        ("both, and a copy", "", {}),
        ("tensors", "", {}),
        ("their memory", "", {}),
        ("an object", "", {}),
        ("a module with more", "", {}),
    ],
)
def test_trained_parameters_that_the_state_lacks_are_reported(tmp_path: Path, how: str, lacking: str, options) -> None:
    """A head for the loss began anew after each restore, beside the moments of what it had been; and each save of a
    model that was given as a copy of its tensors had its first weights. Nothing was said about either."""
    model, head = made()[0], nn.Linear(1, 3)
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = optim.AdamW([*model.parameters(), *head.parameters(), frozen])
    state = {**with_head(how, model, head), "optimizer": optimizer}
    texts = reported_in_three_steps(tmp_path, state, lambda: train(nn.Sequential(model, head), optimizer), **options)
    named = [one.split(" trains ")[1].split(" that no entry")[0] for one in texts if "no entry of the state" in one]
    assert named == ([lacking] if lacking else [])


def test_a_layer_that_was_taken_out_of_a_model_is_not_reported(tmp_path: Path) -> None:
    """Its parameters stay in the optimizer, and nothing trains them."""
    model = nn.Sequential(made()[0], nn.Linear(3, 3))
    optimizer = optim.AdamW(model.parameters())
    model = model[:1]
    state = {"model": model, "optimizer": optimizer}
    texts = reported_in_three_steps(tmp_path, state, lambda: train(model, optimizer))
    assert not any("no entry of the state" in one for one in texts)


@pytest.mark.parametrize("flat", [False, True])
def test_copies_that_an_optimizer_trains_are_not_reported(tmp_path: Path, flat: bool) -> None:
    """Of weights in half precision an optimizer trains copies in single precision, which the next steps begin from."""
    model = made()[0].bfloat16()
    copies = [one.detach().float() for one in model.parameters()]
    copies = [torch.cat([one.reshape(-1) for one in copies])] if flat else copies
    optimizer = optim.AdamW([one.requires_grad_() for one in copies])
    state = {"model": model, "optimizer": optimizer}

    def train_copies() -> None:
        for one in copies:
            one.grad = torch.ones_like(one)
        optimizer.step()

    texts = reported_in_three_steps(tmp_path, state, train_copies)
    assert not any("no entry of the state" in one or "the state lacks" in one for one in texts)


@pytest.mark.parametrize(
    ("made_as", "given", "missing"), [("used", False, 1), ("used", True, 0), ("unused", False, 0), ("off", False, 0)]
)
def test_a_forgotten_scaler_is_reported(tmp_path: Path, made_as: str, given: bool, missing: int) -> None:
    """After each restore its scale was that of the first step, and the next steps were left out, without a word."""
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", enabled=made_as != "off")
    if made_as == "used":
        scaler.scale(torch.ones(1))
    state = {"model": model, "optimizer": optimizer, **({"scaler": scaler} if given else {})}
    texts = reported_in_three_steps(tmp_path, state, lambda: train(model, optimizer))
    assert sum("the state lacks GradScaler" in one for one in texts) == missing


def test_a_scaler_that_is_garbage_is_not_reported(tmp_path: Path) -> None:
    """One of an earlier training in the same process is in use no more, though it may not be collected yet."""
    model, optimizer = made()
    gc.disable()
    circle: list[Any] = [torch.amp.GradScaler("cpu")]
    circle[0].scale(torch.ones(1))
    circle.append(circle)
    del circle
    state = {"model": model, "optimizer": optimizer}
    try:
        with reports() as texts, lastgood.Checkpointer(tmp_path, state, cadence=lastgood.Every(steps=1)) as ckpt:
            ckpt.restore()
            train(model, optimizer)
            ckpt.step(1)
    finally:
        gc.enable()
    assert not any("the state lacks" in one for one in texts)


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)


def test_a_rename_that_names_nothing_is_explained(tmp_path: Path) -> None:
    """Without its dot a prefix renamed nothing, and the error was the same as without `rename`, whose advice it was."""
    lastgood.save(tmp_path, {"model": made()[0]}, step=1)
    rules = {"model.0": "model.first", "model.1.": "model.second.", "model.2.": "model.third."}
    with pytest.raises(StateMismatch) as caught:
        lastgood.load(tmp_path, {"model": Renamed()}, rename=rules)
    assert "'model.0.' renames all below it" in str(caught.value)
    assert "rename 'model.2.': nothing in the generation has this name" in str(caught.value)
    assert "rename 'model.1.'" not in str(caught.value)


def test_another_schedule_is_refused(tmp_path: Path) -> None:
    """It took the attributes of the stored one beside its own, and training went on."""
    optimizer = made()[1]
    lastgood.save(tmp_path, {"schedule": optim.lr_scheduler.StepLR(optimizer, 5)}, step=1)
    other = optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    with pytest.raises(StateMismatch, match=r"schedule: a schedule with gamma, step_size .* T_max, eta_min here"):
        lastgood.load(tmp_path, {"schedule": other})


def test_what_a_restore_leaves_out_is_reported(tmp_path: Path) -> None:
    """The moments of parameters of another dtype were loaded beside what the script had made, and the next step of the
    optimizer failed."""

    def state(dtype: torch.dtype) -> dict[str, Any]:
        model = made()[0].to(dtype)
        return {"model": model, "optimizer": optim.AdamW(model.parameters())}

    stored, other = state(torch.float32), state(torch.bfloat16)
    train(**stored)
    lastgood.save(tmp_path, stored, step=1)
    with reports() as texts:
        lastgood.load(tmp_path, other, strict=False)
    (text,) = [one for one in texts if "does not fit" in one]
    assert "model.0.weight" in text and "5 more" in text
    assert not other["optimizer"].state


def test_an_object_whose_state_cannot_be_read_yet_is_restored(tmp_path: Path) -> None:
    """Its state_dict() is read before it is loaded, to see whether it holds shards. Each restart ended with a bare
    ZeroDivisionError, as soon as torch.distributed.tensor was imported."""
    import torch.distributed.tensor  # noqa: F401

    class Mean:
        def __init__(self) -> None:
            self.sum, self.count = 0.0, 0

        def state_dict(self) -> dict[str, float]:
            return {"mean": self.sum / self.count}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.sum, self.count = state["mean"], 1

    kept, fresh = Mean(), Mean()
    kept.sum, kept.count = 6.0, 2
    lastgood.save(tmp_path, {"mean": kept}, step=1)
    lastgood.load(tmp_path, {"mean": fresh})
    assert (fresh.sum, fresh.count) == (3.0, 1)

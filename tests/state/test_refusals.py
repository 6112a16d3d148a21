"""Mistakes that are refused or reported before training time is lost: snapshots, patterns, forgotten restores."""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import types
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import lastgood
from harness import reports
from lastgood import errors
from lastgood.state import instances, live_check, objects
from lastgood.state.patterns import CHECKS
from lastgood.state.storable import LISTED
from lastgood_lab.worlds import world

EACH_STEP = lastgood.Every(steps=1)
LATER = lastgood.Every(steps=500)


class Adapted(nn.Module):
    """A frozen layer with an adapter, with the names that PEFT gives them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(3, 3)
        self.lora_A = nn.Linear(3, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_A(x).sum()


def build(kind: type[optim.Optimizer] = optim.AdamW) -> dict[str, object]:
    model = Adapted()
    optimizer = kind(model.parameters(), lr=0.1)
    return {"model": model, "optimizer": optimizer}


def train(state: dict, steps: int = 1) -> None:
    for _ in range(steps):
        state["optimizer"].zero_grad()
        state["model"](torch.ones(2, 3)).square().sum().backward()
        state["optimizer"].step()


# ---- snapshots -----------------------------------------------------------------------------------------------


def schedulers(optimizer: optim.Optimizer) -> list[object]:
    of = optim.lr_scheduler
    constant = [of.ConstantLR(optimizer), of.ConstantLR(optimizer)]
    return [
        of.StepLR(optimizer, 1),
        of.ReduceLROnPlateau(optimizer),
        of.SequentialLR(optimizer, constant, [2]),
        of.ChainedScheduler(constant),
        optim.swa_utils.SWALR(optimizer, 0.1),
    ]


def test_state_dicts_in_the_state_are_refused_before_the_run_exists(tmp_path: Path) -> None:
    """A state_dict() was passed, as is usual with torch.save: every save stored the optimizer and schedule of step
    0."""
    state = build()
    model, optimizer = state["model"], state["optimizer"]
    sampler = lastgood.ResumableSampler(8, 4, seed=1)
    given = {
        "model": model.state_dict(),
        "train": {"optimizers": [optimizer.state_dict()]},
        "schedulers": tuple(one.state_dict() for one in schedulers(optimizer)),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "sampler": sampler.state_dict(),
        "fine": {"state": 1, "param_groups": [], "last_epoch": 3, "scale": 2.0},
    }
    with pytest.raises(errors.Refused) as caught:
        lastgood.Checkpointer(tmp_path / "run", given)
    named = [line.split(":")[0].strip() for line in str(caught.value).splitlines() if line.startswith("  ")]
    assert named == [
        "model",
        "train.optimizers.0",
        *(f"schedulers.{index}" for index in range(5)),
        "scaler",
        "sampler",
    ]
    assert "Give the object itself" in caught.value.todo
    assert not (tmp_path / "run").exists()


def test_the_state_dict_of_a_stateful_loader_is_refused(tmp_path: Path) -> None:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(range(4))
    for workers in (0, 1):
        loader = type(loader)(range(4), num_workers=workers)
        next(iter(loader))
        with pytest.raises(errors.Refused, match="data: the state_dict\\(\\) of a StatefulDataLoader"):
            lastgood.Checkpointer(tmp_path / "run", {"data": loader.state_dict()})


def test_intentionally_copied_weights_and_one_off_saves_are_accepted(tmp_path: Path) -> None:
    state = build()
    best = {name: one.clone() for name, one in state["model"].state_dict().items()}
    with lastgood.Checkpointer(tmp_path / "run", state | {"best": best}) as ckpt:
        ckpt.save(1)
    train(state)
    snapshot = copy.deepcopy({"model": state["model"].state_dict(), "optimizer": state["optimizer"].state_dict()})
    lastgood.save(tmp_path / "once", snapshot)
    assert lastgood.load(tmp_path / "once")["optimizer"]["state"][0]["step"] == 1


def test_a_number_that_never_changes_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `{"epoch": epoch}`, the loop was in epoch 3 while every save held 0, and nothing reported it."""
    state = build() | {"epoch": 0, "done": 0, "config": {"width": 64}, "resumed": False, "name": "x", "left_out": 1}
    reports = []
    with lastgood.Checkpointer(tmp_path, state, cadence=EACH_STEP, exclude=["left_out"]) as ckpt:
        for n in range(1, 9):
            state["done"] = min(n, 2)
            ckpt.step(n)
            ckpt.wait()
            reports.append([one.getMessage() for one in caplog.records if "holds a number" in one.getMessage()])
    assert [len(one) for one in reports] == [0, 0, 1, 1, 1, 1, 1, 1]
    assert "(steps 1 to 3): 'epoch' = 0. " in reports[-1][0] and "state['epoch'] = ..." in reports[-1][0]


def test_a_nested_counter_that_never_changes_is_reported(tmp_path: Path) -> None:
    """`{"progress": {"epoch": 0}}` was not checked: only numbers directly in the state were."""
    config = {"epochs": 10, "lr": 0.1, "seed": 1, "batch_size": 8, "model": {"depth": 4}}
    log = [{"epoch": 0, "loss": 1.0}]
    state = build() | {"progress": {"epoch": 0, "step": 0}, "config": config, "log": log, "out": {"epoch": 0}}
    with reports() as texts, lastgood.Checkpointer(tmp_path, state, cadence=EACH_STEP, exclude=["out"]) as ckpt:
        for n in range(1, 6):
            state["progress"]["step"] = n
            ckpt.step(n)
            ckpt.wait()
    (text,) = [one for one in texts if "holds a number" in one]
    assert "(steps 1 to 3): 'progress.epoch' = 0. " in text and "assign state['progress']['epoch'] = ..." in text


# ---- patterns ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["lora"]}, "include=['lora'] matches no name. Similar: '*lora*'"),
        ({"include": ["Model.*lora_*"]}, "Similar: 'model'"),
        ({"include": ["model.base.weigth"]}, "Similar: 'model.base.weight'"),
        ({"exclude": ["modle.*"]}, "exclude=['modle.*'] matches no name. Similar: 'model'"),
        ({"exclude": ["zzz"]}, "The state has: model, optimizer, rng"),
        ({"finite_also": ["model.mask"]}, "finite_also=['model.mask'] matches no name"),
        ({"finite_except": ["model.mask"]}, "finite_except=['model.mask'] matches no name"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_at_the_first_step(tmp_path: Path, options, message) -> None:
    """With PEFT and include=["lora"], every save held random numbers only, was verified as good, and restored
    nothing."""
    state = build()
    with lastgood.Checkpointer(tmp_path, state, cadence=LATER, on_error="warn", **options) as ckpt:
        assert ckpt.restore().step == 0
        train(state)
        with pytest.raises(errors.Refused) as caught:
            ckpt.step(1)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"include": ["*lora*"]},
        {"include": ["model", "optimizer.param_groups"], "exclude": ["optimizer.state.*"]},
        {"exclude": ["model.base", "model.base.weight", "rng.cuda", "rng.python"]},
        {"exclude": ["*.exp_avg_sq"], "finite_except": ["optimizer.state.*.exp_avg"], "finite_also": ["model"]},
    ],
)
def test_patterns_that_match_a_name_or_its_children_are_accepted(tmp_path: Path, options) -> None:
    state = build()
    with lastgood.Checkpointer(tmp_path, state, cadence=EACH_STEP, **options) as ckpt:
        ckpt.save(0)  # before the optimizer's first step it has no state
        for n in range(1, 1 + CHECKS):
            train(state)
            ckpt.step(n)


@pytest.mark.parametrize("argument", ["include", "exclude", "finite_also", "finite_except"])
def test_a_string_in_place_of_a_list_of_patterns_is_refused(tmp_path: Path, argument: str) -> None:
    """finite_except="model.mask" was taken for ten patterns of one letter each, or was refused only at the first
    save."""
    with pytest.raises(errors.Refused, match=rf"{argument}='model.mask'.*Give {argument}=\['model.mask'\]"):
        lastgood.Checkpointer(tmp_path / "run", build(), **{argument: "model.mask"})
    assert not (tmp_path / "run").exists()


def test_a_pattern_for_state_that_an_optimizer_never_makes_is_reported(tmp_path: Path, caplog) -> None:
    """SGD without momentum keeps no state: the check of a misspelt "*lorra*" would have been postponed for ever.

    It is reported when it is known, and no save is refused for it: a run must not end at step 500 because of a
    pattern.
    """
    state = build(optim.SGD)
    options = {"cadence": EACH_STEP, "in_flight": 1, "include": ["*lorra*"]}
    with lastgood.Checkpointer(tmp_path / "a", state, **options) as ckpt:
        for n in range(1, 6):
            ckpt.step(n)
    assert caplog.text.count("include=['*lorra*'] matches no name") == 1
    with lastgood.Checkpointer(tmp_path / "b", state, cadence=EACH_STEP, exclude=["optimizer.state.*"]) as ckpt:
        for n in range(1, 9):
            ckpt.step(n)


@pytest.mark.parametrize(
    "options",
    [{"include": ["model.*"], "exclude": ["model.*"]}, {"finite_also": ["m", "model"], "finite_except": ["model"]}],
)
def test_contradictory_patterns_are_refused_at_construction(tmp_path: Path, options: dict) -> None:
    """A name in both include and exclude was left out, and every save held the random numbers alone."""
    one, other = options
    with pytest.raises(errors.Refused, match=f"{one} and {other} both have 'model"):
        lastgood.Checkpointer(tmp_path / "run", build(), **options)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "options",
    [
        {"include": ["model.base.*"], "exclude": ["model"]},
        {"exclude": ["*"]},
        {"exclude": ["model", "optimizer"]},
        {"include": ["*lora*"], "exclude": ["model.*", "optimizer"]},
    ],
)
def test_patterns_that_exclude_everything_are_refused_by_name(tmp_path: Path, options: dict) -> None:
    """Such a run saved for hours, and every generation held the random numbers at most."""
    state = build()
    train(state)
    with (
        lastgood.Checkpointer(tmp_path / "run", state, cadence=LATER, **options) as ckpt,
        pytest.raises(errors.Refused, match=r"include=|exclude=") as refused,
    ):
        ckpt.step(1)
    assert "nothing of the state" in str(refused.value)
    with pytest.raises(errors.Refused, match="nothing of the state"):
        lastgood.save(tmp_path / "once", state, **options)
    lastgood.save(tmp_path / "all", state)
    with pytest.raises(errors.Refused, match="nothing of the state"):
        lastgood.load(tmp_path / "all", **options)


def test_patterns_that_leave_something_are_accepted(tmp_path: Path) -> None:
    """An optimizer has no state before its first step, and a pattern may select the random numbers alone."""
    for at, options in enumerate([{"include": ["optimizer.state.*"]}, {"include": ["rng"]}, {"exclude": ["rng"]}]):
        with lastgood.Checkpointer(tmp_path / str(at), build(), **options) as ckpt:
            ckpt.step(1)
    with lastgood.Checkpointer(tmp_path / "empty", {}, exclude=["rng"]) as ckpt:
        ckpt.step(1)


def test_a_restore_accepts_a_pattern_that_matches_only_the_generation(tmp_path: Path) -> None:
    lastgood.save(tmp_path, build() | {"more": {"a": 1}})
    with lastgood.Checkpointer(tmp_path, build(), exclude=["more.a", "more"]) as ckpt:
        ckpt.restore()
        ckpt.save(1)


def test_a_restore_refuses_a_misspelt_pattern_before_loading_anything(tmp_path: Path) -> None:
    state = build()
    train(state)
    lastgood.save(tmp_path, state)
    fresh = build()
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with (
        lastgood.Checkpointer(tmp_path, fresh, include=["lora"]) as ckpt,
        pytest.raises(errors.Refused, match=r"\*lora\*"),
    ):
        ckpt.restore()
    assert torch.equal(torch.get_rng_state(), before) and not fresh["optimizer"].state


def stages(rank: int, size: int, root: Path, patterns: list[str]) -> str:
    """The error of one save by ranks that each hold another pipeline stage."""
    stage = nn.Linear(3, 3)
    with lastgood.Checkpointer(root, {f"stage{rank}": stage}, cadence=EACH_STEP, include=patterns) as ckpt:
        ckpt.restore()
        try:
            ckpt.step(1)
        except errors.Refused as error:
            return str(error)
        ckpt.wait()
    return ""


@pytest.mark.slow
def test_a_pattern_is_refused_only_if_no_rank_has_a_match(tmp_path: Path) -> None:
    """The stages of a pipeline have different names: "stage1.*" matches nothing on rank 0, and is right."""
    assert world(2, stages, tmp_path / "right", ["stage0.*", "stage1.weight"]) == ["", ""]
    assert "stage1.weight" in lastgood.open(tmp_path / "right").content(1).tensors()
    for refusal in world(2, stages, tmp_path / "wrong", ["stage0.*", "stage1.wieght"]):
        assert "include=['stage1.wieght'] matches no name" in refusal and "stage0.*" not in refusal


# ---- errors that the first step can detect -------------------------------------------------------------------


def test_a_forgotten_restore_raises_at_the_first_step(tmp_path: Path) -> None:
    """With a save every 500 steps, the error was raised after 500 steps, whose work was lost."""
    lastgood.save(tmp_path, build(), step=4)
    with lastgood.Checkpointer(tmp_path, build(), cadence=LATER, on_error="warn") as ckpt:
        for n in (1, 2):
            with pytest.raises(errors.NotRestored, match=r"restore\(\) before the first step"):
                ckpt.step(n)
        ckpt.restore()
        ckpt.step(5)


class Keeping(optim.SGD):
    """An optimizer that keeps something that cannot be stored, from its first step on."""

    def step(self, closure=None):
        super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["hook"] = print


def test_the_first_step_lists_every_unstorable_value(tmp_path: Path) -> None:
    """They were found one entry at a time: each at the first save that was due, and each ended the training."""
    state = build(Keeping) | {
        "fn": lambda: 1,
        "nested": {"a": [0, object()], "[b]": object()},
        "loader": torch.utils.data.DataLoader([1]),
        "batches": lastgood.ResumableSampler(8, 4, seed=1).loader([0] * 8),
    }
    with lastgood.Checkpointer(tmp_path / "run", state, cadence=LATER, on_error="warn") as ckpt:
        train(state)
        with pytest.raises(errors.Unstorable) as caught:
            ckpt.step(1)
    text = str(caught.value)
    assert caught.value.names == (
        "optimizer.state.base.weight.hook",
        "fn",
        "nested.a.1",
        "nested.[b]",
        "loader",
        "batches",
    )
    assert (
        "6 entries of the state cannot be stored" in text
        and 'exclude=["nested.a.1"]' in text
        and 'exclude=["nested.[[]b]"]' in text
    )
    assert "batches is the loader of a ResumableSampler" in text and 'state={"sampler": sampler}' in text
    assert "ResumableSampler, or the StatefulDataLoader of torchdata" in text
    assert not (tmp_path / "run" / "gen").exists()
    with pytest.raises(errors.Unstorable, match="6 entries"):
        lastgood.save(tmp_path / "once", state)


@pytest.mark.parametrize("kind", [argparse.Namespace, types.SimpleNamespace])
def test_an_argparse_namespace_is_refused_with_vars_as_the_remedy(tmp_path: Path, kind: type) -> None:
    """`"args": args` was refused with the advice to give the namespace a state_dict()."""
    args = kind(lr=0.1, model="vit")
    with pytest.raises(errors.Unstorable, match=r"args is a .*amespace.*vars\(args\)"):
        lastgood.save(tmp_path, {"args": args})
    lastgood.save(tmp_path, {"args": vars(args)})


def test_the_list_of_unstorable_values_is_bounded(tmp_path: Path) -> None:
    with (
        lastgood.Checkpointer(tmp_path, {"many": [print] * 50}) as ckpt,
        pytest.raises(errors.Unstorable, match=f"{LISTED} entries at least"),
    ):
        ckpt.step(1)


def test_a_stale_optimizer_entry_is_named_with_its_own_remedy(tmp_path: Path) -> None:
    """The error advised exclude=["optimizer.state"], which drops the state of all other parameters too."""
    state = build() | {"fn": print}
    train(state)
    state["model"].lora_A.weight = nn.Parameter(torch.zeros(4, 3))
    optimizer, old = state["optimizer"], state["optimizer"].param_groups[0]["params"][2]
    optimizer.param_groups[0]["params"][2] = state["model"].lora_A.weight
    with lastgood.Checkpointer(tmp_path, state) as ckpt, pytest.raises(errors.Unstorable) as caught:
        ckpt.step(1)
    listed = str(caught.value).splitlines()
    assert "optimizer.state" in listed[1] and "[2, 3]" in listed[1] and "exclude" not in listed[1]
    assert "del optimizer.state[old]" in listed[1] and listed[2].startswith("  fn is ")
    del optimizer.state[old], state["fn"]
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1)


def test_the_check_at_the_first_step_changes_and_copies_nothing(tmp_path: Path) -> None:
    """The check at the first step leaves the random generators, the sampler and the weights unchanged."""
    sampler = lastgood.ResumableSampler(8, 4, seed=1)
    state = build() | {"sampler": sampler}
    next(iter(sampler))
    train(state)
    before = torch.get_rng_state(), copy.deepcopy(state["model"].state_dict())
    with lastgood.Checkpointer(tmp_path, state, cadence=LATER, save_on_exit=False) as ckpt:
        ckpt.step(1)
        assert sampler.position == (0, 1)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert all(torch.equal(one, before[1][name]) for name, one in state["model"].state_dict().items())
    assert not (tmp_path / "gen").exists()


@dataclass
class Node:
    """Of a tree, with a link to the node above."""

    above: object = None
    below: list[object] = field(default_factory=list)


@pytest.mark.parametrize("excluded", [True, False])
def test_a_tree_with_links_to_its_root_is_refused_at_once(tmp_path: Path, monkeypatch, excluded: bool) -> None:
    """Each branch was entered from each link to the root again: the run was never open, also if it was excluded."""
    calls, before = itertools.count(), instances.parts_of

    def counted(obj: object) -> dict[str, object]:
        assert next(calls) < 10_000, "the same nodes are entered again and again"
        return before(obj)

    for module in (live_check, objects):
        monkeypatch.setattr(module, "parts_of", counted)
    root = Node()
    root.below = [Node(root), Node(root)]
    state = {"w": torch.zeros(2), "tree": root}
    refused = contextlib.nullcontext() if excluded else pytest.raises(errors.Unstorable, match="contains itself")
    exclude = ["tree"] if excluded else []
    with lastgood.Checkpointer(tmp_path, state, exclude=exclude, save_on_exit=False) as ckpt, refused:
        ckpt.save(1)


def test_a_state_that_contains_itself_twice_is_refused(tmp_path: Path) -> None:
    """The opening of the run never ended: each search of the state took 2**100 steps."""
    progress: dict = {"epoch": 0}
    progress |= {"history": [progress], "best": progress}
    for call in (lastgood.Checkpointer, lastgood.save):
        with pytest.raises(errors.Refused, match=r"state\.progress\.history\.0 is a container that holds itself"):
            call(tmp_path, {"progress": progress})
    shared = ["a"]
    lastgood.save(tmp_path, {"one": shared, "two": [shared, shared]})


@dataclass
class Kept:
    optimizer: object


@pytest.mark.parametrize("container", [Kept, lambda one: deque([one])])
def test_a_state_dict_in_a_dataclass_or_deque_is_refused(tmp_path: Path, container) -> None:
    """The state_dict() of an optimizer in a dataclass or a deque was accepted, and every save stored the first one."""
    state = {"kept": container(optim.Adam(nn.Linear(2, 1).parameters()).state_dict())}
    with pytest.raises(errors.Refused, match=r"kept\.\w+: the state_dict\(\) of an optimizer"):
        lastgood.Checkpointer(tmp_path, state)

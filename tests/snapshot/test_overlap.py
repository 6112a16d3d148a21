"""A save that is copied during the next forward and backward holds the state of its step, or is dropped with a
report.

No test waits for time to pass: the copy is held at its start until the event that it must survive has happened.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import lastgood
from harness import reported, reports
from lastgood import errors
from lastgood.errors import NoSpace
from lastgood.loop import save_planner
from lastgood.snapshot import staging
from lastgood.storage.slots import Slots


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16, max_norm=1.0)
        self.one, self.norm, self.two = nn.Linear(16, 300), nn.BatchNorm1d(300), nn.Linear(300, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.two(self.drop(self.norm(self.one(self.embed(index))).relu()))


class Loop:
    """A small training loop that keeps a copy of its state after each step."""

    def __init__(self, make: Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]) -> None:
        torch.manual_seed(7)
        self.net = Net()
        self.optimizers = make(list(self.net.parameters()))
        self.state: dict[str, Any] = {"net": self.net, **{f"opt{n}": one for n, one in enumerate(self.optimizers)}}

    def backward(self) -> None:
        self.net(torch.randint(0, 50, (32,))).square().mean().backward()

    def update(self) -> None:
        for one in self.optimizers:
            one.step()
            one.zero_grad()

    def picture(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in lastgood.state.rules.capture(self.state).tensors.items()}


def adamw(**options: Any) -> Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]:
    return lambda parameters: [torch.optim.AdamW(parameters, lr=0.01, **options)]


def same(run: Path, step: int, picture: dict[str, torch.Tensor]) -> bool:
    opened = lastgood.open(run)
    return all(torch.equal(opened.tensor(name, step), one) for name, one in picture.items())


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Copies begin only once this event is set. The fence sets it too, so that a wait there ends."""
    monkeypatch.setattr(save_planner, "SMALL_BYTES", 0)
    opened = threading.Event()
    fill, wait = staging.Snapshot.fill, staging.Snapshot.wait_for_copies

    def delayed_fill(self: staging.Snapshot, *arguments: Any) -> Iterator[Any]:
        assert opened.wait(60)
        yield from fill(self, *arguments)

    def arrived(self: staging.Snapshot) -> None:
        opened.set()
        wait(self)

    monkeypatch.setattr(staging.Snapshot, "fill", delayed_fill)
    monkeypatch.setattr(staging.Snapshot, "wait_for_copies", arrived)
    yield opened
    opened.set()


OPTIMIZERS = {
    "foreach": adamw(foreach=True),
    "fused": adamw(fused=True),
    "for-loop": adamw(foreach=False),
    "sgd momentum": lambda ps: [torch.optim.SGD(ps, lr=0.01, momentum=0.9, fused=True)],
    "two": lambda ps: [torch.optim.AdamW(ps[:3], lr=0.01), torch.optim.SGD(ps[3:], lr=0.01, momentum=0.9)],
    "groups": lambda ps: [torch.optim.Adam([{"params": ps[:2], "lr": 0.1}, {"params": ps[2:]}], lr=0.01)],
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_save_copied_after_the_next_backward_holds_its_own_step(tmp_path, gate, kind):
    """The copy begins only when the next update already waits at the fence. By then, forward has changed the buffers
    and the random numbers; max_norm is off, because it would change the weight without notice."""
    loop = Loop(OPTIMIZERS[kind])
    loop.net.embed.max_norm = None
    pictures = {}
    with lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt:
        for n in range(1, 6):
            gate.clear()
            loop.backward()
            loop.update()
            pictures[n] = loop.picture()
            save = ckpt.save(n)
            assert not save.staged()
            loop.backward()
            assert not save.staged(), "only an update waits for the copy"
            loop.update()
            ckpt.wait()
    for step in (3, 4, 5):
        assert same(tmp_path, step, pictures[step])


def test_an_explicit_fence_protects_updates_outside_of_the_optimizer(tmp_path, gate):
    loop = Loop(adamw())
    with lastgood.Checkpointer(tmp_path, loop.state) as ckpt:
        loop.update()
        before = loop.picture()
        ckpt.save(1)
        ckpt.fence()
        with torch.no_grad():
            loop.net.one.weight.mul_(2)
    assert same(tmp_path, 1, before)


@pytest.mark.parametrize("memory", [1 << 20, None])
@pytest.mark.slow
def test_with_a_small_arena_the_update_waits_until_all_state_is_read(tmp_path, memory):
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Linear(300, 300) for _ in range(8)))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    pictures = {}
    with lastgood.Checkpointer(tmp_path, {"net": net, "opt": optimizer}, memory=memory, in_flight=2) as ckpt:
        for n in range(1, 9):
            net(torch.randn(4, 300)).square().mean().backward()
            optimizer.step()
            pictures[n] = {f"net.{name}": one.detach().clone() for name, one in net.named_parameters()}
            ckpt.save(n, milestone=True)
    assert all(same(tmp_path, step, picture) for step, picture in pictures.items())


def test_a_scaler_and_accumulated_gradients_change_nothing(tmp_path, gate):
    loop = Loop(adamw(fused=True))
    loop.net.embed.max_norm = None
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    loop.state["scaler"] = scaler
    with lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt:
        for n in (1, 2):
            gate.clear()
            for _ in range(3):
                scaler.scale(loop.net(torch.randint(0, 50, (8,))).square().mean()).backward()
            scaler.step(loop.optimizers[0])
            scaler.update()
            picture = loop.picture()
            ckpt.save(n)
    assert same(tmp_path, 2, picture)


@pytest.mark.slow
def test_a_compiled_model_is_copied_behind_the_fence_too(tmp_path, gate):
    loop = Loop(adamw())
    loop.net.embed.max_norm = None
    compiled = torch.compile(loop.net, backend="eager")
    loop.state["net"] = compiled
    compiled(torch.randint(0, 50, (32,))).square().mean().backward()
    loop.update()
    picture = loop.picture()
    with lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt:
        save = ckpt.save(1)
        compiled(torch.randint(0, 50, (32,))).square().mean().backward()
        assert not save.staged()
        loop.update()
    assert same(tmp_path, 1, picture)


# ---- torn snapshots --------------------------------------------------------------------------------------------


def in_place(loop: Loop) -> None:
    with torch.no_grad():
        loop.net.two.weight.add_(1)


def in_place_unseen_by_versions(loop: Loop) -> None:
    loop.net.two.weight.data.add_(1)


def a_fused_step_that_no_hook_sees(loop: Loop) -> None:
    loop.backward()
    torch.optim.AdamW(loop.net.parameters(), lr=0.5, fused=True).step()


def data_swapped(loop: Loop) -> None:
    loop.net.two.weight.data = loop.net.two.weight.data.clone()


def another_parameter(loop: Loop) -> None:
    loop.net.two.weight = nn.Parameter(loop.net.two.weight.detach().clone())


def swapped_tensors(loop: Loop) -> None:
    torch.utils.swap_tensors(loop.net.two.weight, nn.Parameter(torch.zeros_like(loop.net.two.weight)))


def optimizer_state_replaced(loop: Loop) -> None:
    entry = loop.optimizers[0].state[loop.net.two.weight]
    entry["exp_avg"] = entry["exp_avg"].clone()


def optimizer_state_in_place(loop: Loop) -> None:
    loop.optimizers[0].state[loop.net.two.weight]["exp_avg_sq"].data.mul_(3)


def rows_by_max_norm(loop: Loop) -> None:
    with torch.no_grad():
        loop.net.embed.max_norm = 1e-3
        loop.net.embed(torch.arange(3))


def loaded_from_elsewhere(loop: Loop) -> None:
    loop.net.load_state_dict({name: one + 1 for name, one in loop.net.state_dict().items()})


TEARING = [
    in_place,
    in_place_unseen_by_versions,
    a_fused_step_that_no_hook_sees,
    data_swapped,
    another_parameter,
    swapped_tensors,
    optimizer_state_replaced,
    optimizer_state_in_place,
    rows_by_max_norm,
    loaded_from_elsewhere,
]


@pytest.mark.parametrize("tear", TEARING, ids=lambda tear: tear.__name__)
def test_a_state_that_changed_behind_the_fence_is_dropped_and_reported(tmp_path, gate, tear):
    loop = Loop(adamw(fused=True))
    loop.backward()
    loop.update()
    events: list[lastgood.Event] = []
    with lastgood.Checkpointer(tmp_path, loop.state, staging="overlap", on_event=events.append) as ckpt:
        save = ckpt.save(1)
        tear(loop)
        gate.set()
        with pytest.raises(errors.TornSnapshot, match=r"changed while it was copied: .*(net|opt0)\."):
            save.result(60)
        assert save.dropped() and not save.durable()
        with reported("TornSnapshot"):
            ckpt.wait()
        ckpt.save(2).result(60)
        ckpt.wait()
    assert [(one.kind, one.step) for one in events if one.kind in ("dropped", "durable")] == [
        ("dropped", 1),
        ("durable", 2),
    ]
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [2], "no file of the torn save remains"


def test_weights_swapped_during_the_copy_and_swapped_back_are_detected(tmp_path, monkeypatch):
    """The weights are the same before and after the copy; only the copied bytes show the change."""
    loop = Loop(adamw())
    loop.backward()
    loop.update()
    fill = staging.Snapshot.fill
    data = loop.net.two.weight.data

    def swapped(self: staging.Snapshot, *arguments: Any) -> Iterator[Any]:
        before = data.clone()
        data.zero_()
        chunks = fill(self, *arguments)
        first = next(chunks)
        data.copy_(before)
        yield first
        yield from chunks

    monkeypatch.setattr(staging.Snapshot, "fill", swapped)
    with (
        reported(r"TornSnapshot.*net\.two\.weight"),
        lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt,
    ):
        ckpt.save(1)
    assert lastgood.open(tmp_path).generations() == []


def test_a_change_after_the_copy_and_before_the_last_check_is_reported(tmp_path, monkeypatch):
    """The code that wrote this change may have changed other state during the copy."""
    loop = Loop(adamw())
    loop.backward()
    loop.update()
    weight, observe_again = loop.net.two.weight, staging.Snapshot._observe_again

    def late(self: staging.Snapshot) -> set[str]:
        weight.data.view(-1)[0] += 1
        return observe_again(self)

    monkeypatch.setattr(staging.Snapshot, "_observe_again", late)
    with (
        reported("TornSnapshot: .*two.weight"),
        lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt,
    ):
        ckpt.save(1)
    assert lastgood.open(tmp_path).generations() == []


def test_state_replaced_only_during_the_copy_is_detected(tmp_path, gate, monkeypatch):
    """The state during the copy differs in one element, which is not among the samples."""
    loop = Loop(adamw())
    loop.backward()
    loop.update()
    moment = loop.optimizers[0].state[loop.net.two.weight]["exp_avg"]
    live_data, observe_again = moment.data, staging.Snapshot._observe_again

    def back(self: staging.Snapshot) -> set[str]:
        moment.data = live_data
        return observe_again(self)

    monkeypatch.setattr(staging.Snapshot, "_observe_again", back)
    gate.clear()
    with lastgood.Checkpointer(tmp_path, loop.state, save_on_exit=False) as ckpt:
        ckpt.save(1)
        moment.data = live_data.clone()
        moment.data.view(-1)[1] += 1
        gate.set()
        with reported("TornSnapshot: .*two.weight.exp_avg"):
            ckpt.wait()
    assert lastgood.open(tmp_path).generations() == []


def test_after_two_torn_saves_the_loop_waits_for_the_copy(tmp_path, gate):
    loop = Loop(adamw())
    loop.backward()
    loop.update()
    with lastgood.Checkpointer(tmp_path, loop.state) as ckpt:
        for n in (1, 2):
            gate.clear()
            save = ckpt.save(n)
            in_place(loop)
            gate.set()
            with pytest.raises(errors.TornSnapshot):
                save.result(60)
        with reports() as texts:
            ckpt.wait()
        assert any("from now on the state is copied while the loop waits" in one for one in texts)
        save = ckpt.save(3)
        assert save.staged(), "when the call returns, the state may change again"
        picture = loop.picture()
        in_place(loop)
    assert same(tmp_path, 3, {name: one for name, one in picture.items() if name.startswith("net.two")})


def test_one_torn_save_between_good_ones_changes_nothing(tmp_path, gate):
    loop = Loop(adamw())
    loop.backward()
    loop.update()
    with lastgood.Checkpointer(tmp_path, loop.state) as ckpt:
        for n in range(1, 7):
            gate.clear()
            save = ckpt.save(n)
            assert not save.staged()
            if n % 2:
                in_place(loop)
            gate.set()
            ckpt.wait()
    assert sorted(one.step for one in lastgood.open(tmp_path).generations()) == [2, 4, 6]


def test_only_the_full_check_detects_changes_between_two_samples(tmp_path, gate):
    """The limit of the sampled check, as documented: a writer that increments no version counter and misses every
    sample."""
    for check, kept in (("sampled", [1]), ("full", [])):
        loop = Loop(adamw())
        loop.backward()
        loop.update()
        gate.clear()
        options = {"torn_check": check, "save_on_exit": False}
        with lastgood.Checkpointer(tmp_path / check, loop.state, **options) as ckpt:
            ckpt.save(1)
            loop.net.two.weight.data.view(-1)[1] += 1
            gate.set()
        assert [one.step for one in lastgood.open(tmp_path / check).generations()] == kept


def test_the_version_counter_detects_an_in_place_change_between_samples(tmp_path, gate):
    loop = Loop(adamw())
    loop.backward()
    loop.update()
    gate.clear()
    with lastgood.Checkpointer(tmp_path, loop.state, save_on_exit=False) as ckpt:
        ckpt.save(1)
        with torch.no_grad():
            loop.net.two.weight.view(-1)[1] += 1
        gate.set()
        with reported("TornSnapshot: .*two.weight"):
            ckpt.wait()
    assert lastgood.open(tmp_path).generations() == []


# ---- tensors that cannot wait at the fence ---------------------------------------------------------------------


def test_a_manual_weight_average_is_copied_at_once(tmp_path, gate):
    loop = Loop(adamw())
    loop.state["average"] = average = copy.deepcopy(loop.net)
    loop.update()
    picture = loop.picture()
    with lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt:
        ckpt.save(1)
        with torch.no_grad():
            for mine, live in zip(average.parameters(), loop.net.parameters(), strict=True):
                mine.lerp_(live, 0.5).add_(1)
        gate.set()
    assert same(tmp_path, 1, picture)


def test_a_parameter_that_is_also_a_plain_tensor_is_copied_at_once(tmp_path, gate):
    """User code may change a plain tensor at any time."""
    loop = Loop(adamw())
    loop.state["bias"] = loop.net.two.bias.data
    loop.update()
    picture = loop.picture()
    with lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt:
        ckpt.save(1)
        loop.state["bias"].add_(1)
        gate.set()
    assert same(tmp_path, 1, picture)


def test_a_large_average_that_changes_is_torn_and_then_waited_for(tmp_path, gate, monkeypatch):
    monkeypatch.setattr(staging, "SIDE_BYTES", 20_000)
    loop = Loop(adamw())
    loop.state["average"] = average = copy.deepcopy(loop.net)
    with lastgood.Checkpointer(tmp_path, loop.state) as ckpt:
        for n in range(1, 4):
            gate.clear()
            if n == 3:
                gate.set()
            ckpt.save(n)
            average.one.weight.data.add_(1)
            gate.set()
            ckpt.wait()
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [3]


class OwnOptimizer:
    """An optimizer whose step cannot be hooked."""

    def __init__(self, net: nn.Module) -> None:
        self.param_groups = [{"params": list(net.parameters())}]

    def step(self) -> None:
        for one in self.param_groups[0]["params"]:
            one.data.add_(1)

    def state_dict(self) -> dict[str, Any]:
        return {"kind": "own"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


@pytest.mark.parametrize(
    "obstacle",
    [
        "no optimizer",
        "an optimizer of one's own",
        "a large buffer",
        "a small state",
        "a large parameter that is kept twice",
    ],
)
def test_without_a_hookable_optimizer_the_loop_waits_for_the_copy(tmp_path, gate, monkeypatch, obstacle):
    loop = Loop(adamw())
    if obstacle == "no optimizer":
        del loop.state["opt0"]
    elif obstacle == "a large buffer":
        monkeypatch.setattr(staging, "SIDE_BYTES", 1000)
    elif obstacle == "a small state":
        monkeypatch.setattr(save_planner, "SMALL_BYTES", 1 << 20)
    elif obstacle == "a large parameter that is kept twice":
        monkeypatch.setattr(staging, "SIDE_BYTES", 20_000)
        loop.state["weight"] = loop.net.one.weight.data  # user code may change it at any time
    else:
        loop.state["own"] = OwnOptimizer(loop.net)
    gate.set()
    monkeypatch.setattr(
        save_planner.SavePlanner, "hold_updates", lambda *_: pytest.fail("the copy was left to the fence")
    )
    with lastgood.Checkpointer(tmp_path, loop.state) as ckpt:
        assert ckpt.save(1).staged()


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`:UserWarning")
@pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``:UserWarning")
def test_fsdp1_falls_back_to_waiting_for_the_copy_and_reports_it(tmp_path, gate, process_group):
    model = FullyShardedDataParallel(nn.Linear(8, 8), device_id=torch.device("cpu"))
    model(torch.randn(4, 8)).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    gate.set()
    with lastgood.Checkpointer(tmp_path, {"model": model, "optimizer": optimizer}) as ckpt:
        with reported("FullyShardedDataParallel moves its weights", logging.INFO):
            assert ckpt.save(1).staged()
        with reports() as texts:
            ckpt.save(2).result(60)
        assert not texts


def test_removing_the_hooks_waits_for_an_older_copy(tmp_path, gate):
    """An optimizer that is replaced in the state loses its hook. A save that was still being copied lost its hook too:
    the next step overwrote the memory that was being read."""
    loop = Loop(adamw())
    loop.backward()
    loop.update()
    with lastgood.Checkpointer(tmp_path, loop.state) as ckpt:
        picture = loop.picture()
        first = ckpt.save(1, milestone=True)  # a milestone, so that the second save does not overtake it
        loop.state["opt0"] = torch.optim.AdamW(loop.net.parameters())
        loop.state["opt0"].load_state_dict(loop.optimizers[0].state_dict())
        ckpt.save(2)
        loop.backward()
        loop.update()
        first.result(60)
    assert same(tmp_path, 1, picture)


def test_a_forked_process_does_not_wait_for_the_copy_of_its_parent(tmp_path, gate):
    loop = Loop(adamw(foreach=False))
    loop.backward()
    with lastgood.Checkpointer(tmp_path, loop.state) as ckpt:
        save = ckpt.save(1)
        child = os.fork()
        if not child:
            ckpt.fence()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        gate.set()
        save.result(60)


def test_an_error_at_close_is_reported_and_the_hooks_are_removed(tmp_path, monkeypatch):
    loop = Loop(adamw())
    close = Slots.close

    def full(self: Slots) -> None:
        close(self)
        raise NoSpace("no space left for the pointer")

    monkeypatch.setattr(Slots, "close", full)
    ckpt = lastgood.Checkpointer(f"slots://{tmp_path}", loop.state, staging="overlap")
    ckpt.save(1).result(60)
    with reported("no space left for the pointer"):
        ckpt.close()
    assert not loop.optimizers[0]._optimizer_step_pre_hooks


def test_an_optimizer_removed_from_the_state_is_no_longer_fenced(tmp_path, gate):
    loop = Loop(OPTIMIZERS["two"])
    gate.set()
    with lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt:
        ckpt.save(1)
        assert all(one._optimizer_step_pre_hooks for one in loop.optimizers)
        del loop.state["opt1"]
        ckpt.save(2)
        assert [bool(one._optimizer_step_pre_hooks) for one in loop.optimizers] == [True, False]


def test_closing_the_checkpointer_removes_its_hooks(tmp_path):
    loop = Loop(adamw())
    with lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt:
        ckpt.save(1)
        assert len(loop.optimizers[0]._optimizer_step_pre_hooks) == 1
        ckpt.save(2)
        assert len(loop.optimizers[0]._optimizer_step_pre_hooks) == 1
    assert not loop.optimizers[0]._optimizer_step_pre_hooks


@pytest.mark.parametrize("how", ["overlap", "blocking"])
def test_a_failed_copy_is_reported_and_blocks_no_update(tmp_path, monkeypatch, how):
    """Neither the fence, nor the next save, nor the exit hangs."""
    loop = Loop(adamw())
    take = staging.Snapshot._copy

    def broken(self: staging.Snapshot, *parts: Any) -> Any:
        raise RuntimeError("the device is gone")

    with lastgood.Checkpointer(tmp_path, loop.state, staging=how) as ckpt:
        monkeypatch.setattr(staging.Snapshot, "_copy", broken)
        save = ckpt.save(1)
        loop.backward()
        loop.update()
        with pytest.raises(RuntimeError, match="the device is gone"):
            save.result(60)
        with reported("RuntimeError: the device is gone", logging.ERROR):
            ckpt.wait()
        monkeypatch.setattr(staging.Snapshot, "_copy", take)
        ckpt.save(1).result(60)


def test_an_interrupt_while_the_loop_waits_for_a_copy_is_raised_there(tmp_path, monkeypatch):
    loop = Loop(adamw())
    take = staging.Snapshot._copy

    def interrupted(self: staging.Snapshot, *parts: Any) -> Any:
        raise KeyboardInterrupt

    with lastgood.Checkpointer(tmp_path, loop.state, staging="blocking") as ckpt:
        monkeypatch.setattr(staging.Snapshot, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1)
        with reported("interrupted"):
            ckpt.wait(60)
        monkeypatch.setattr(staging.Snapshot, "_copy", take)
        ckpt.save(1).result(60)


def test_a_capture_plan_is_never_older_than_the_state(tmp_path):
    """Weights that were moved, retyped or replaced between two saves are contained in the next save."""
    loop = Loop(adamw())
    changes: list[Callable[[], object]] = [
        lambda: setattr(loop.net.two.weight, "data", torch.randn(16, 300)),
        lambda: setattr(loop.net, "two", nn.Linear(300, 16)),
        lambda: setattr(loop.net.one, "bias", None),
        lambda: loop.net.double(),
    ]
    with lastgood.Checkpointer(tmp_path, loop.state, staging="overlap") as ckpt:
        for n, change in enumerate([lambda: None, *changes], 1):
            change()
            ckpt.save(n).result(60)
            assert same(tmp_path, n, {name: one for name, one in loop.picture().items() if name.startswith("net.")})

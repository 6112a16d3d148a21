"""The wrappers that Accelerate and Fabric put around an optimizer do not change what a run stores."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lastgood
from harness import reports
from lastgood.errors import StateMismatch
from lastgood.snapshot import overlap
from lastgood.state.capture import Capture
from lastgood.state.rules import Stored, capture
from lastgood.state.wrappers import Wrappers
from matching import Fed, match


class Accelerated(torch.optim.Optimizer):
    """A wrapper like accelerate.optimizer.AcceleratedOptimizer: it delegates everything to the inner optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)

    def step(self, closure=None):
        self.optimizer.step(closure)


class _Fabric:
    """A wrapper like lightning.fabric.wrappers._FabricOptimizer: an instance of both classes, with a copied
    __dict__."""

    def __init__(self, optimizer):
        self.__dict__ = {key: one for key, one in optimizer.__dict__.items() if key not in ("state_dict", "step")}
        self.__class__ = type(f"Fabric{type(optimizer).__name__}", (type(self), type(optimizer)), {})
        self._optimizer = optimizer

    optimizer = property(lambda self: self._optimizer)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)
        changed = {key: one for key, one in self.optimizer.__dict__.items() if key not in ("state_dict", "step")}
        self.__dict__.update(changed)

    def step(self, closure=None):
        return self.optimizer.step(closure)


class Lightning:
    """A wrapper like lightning.pytorch's LightningOptimizer: it delegates missing attributes to the inner optimizer."""

    def __init__(self, optimizer):
        self._optimizer = optimizer
        self.__class__ = type(f"Lightning{type(optimizer).__name__}", (type(self), type(optimizer)), {})

    optimizer = property(lambda self: self._optimizer)

    def __getattr__(self, name):
        return getattr(self._optimizer, name)

    def step(self, closure=None):
        return self._optimizer.step(closure)


class Lookahead(Accelerated):
    """A wrapper with state of its own."""

    def state_dict(self):
        return super().state_dict() | {"slow": 5}

    def load_state_dict(self, state):
        self.slow = state.pop("slow")
        super().load_state_dict(state)


def bare(optimizer):
    return optimizer


WRAPPERS = {
    "accelerate": Accelerated,
    "fabric": _Fabric,
    "lightning": Lightning,
    "twice": lambda one: Accelerated(Accelerated(one)),
}


def state(seed, wrap):
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    return {"model": model, "optimizer": wrap(torch.optim.AdamW(model.parameters(), 0.01 * (seed + 1)))}


def trained(state, steps, seed):
    torch.manual_seed(seed)
    for _ in range(steps):
        state["model"].zero_grad()
        state["model"](torch.randn(4, 3)).square().mean().backward()
        state["optimizer"].step()
    return [one.tolist() for one in state["model"].parameters()]


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("was_wrapped", [True, False])
def test_wrapped_and_bare_optimizers_load_each_others_state(wrap, was_wrapped, tmp_path):
    """A run that was trained with Accelerate could not be loaded without it: 'object in the generation, AdamW here'."""
    before, after = (wrap, bare) if was_wrapped else (bare, wrap)
    saved, live = state(0, before), state(1, after)
    trained(saved, 3, 0)
    optimizer = live["optimizer"]
    lastgood.save(tmp_path, saved, 3)
    lastgood.load(tmp_path, live)
    assert live["optimizer"] is optimizer and optimizer.param_groups[0]["lr"] == 0.01
    assert trained(live, 3, 1) == trained(saved, 3, 1)


@pytest.mark.parametrize("wrap", [Accelerated, _Fabric], ids=["accelerate", "fabric"])
def test_wrapper_state_of_earlier_versions_loads_into_a_wrapper(wrap):
    saved, live = state(0, wrap), state(1, wrap)
    trained(saved, 3, 0)
    as_object = capture({"optimizer": ByItself(saved["optimizer"])}, exclude=["rng"])
    assert "!object" in as_object.values["optimizer"]
    tensors = {name: (str(one.dtype)[6:], tuple(one.shape)) for name, one in as_object.tensors.items()}
    stored = Stored(1, tensors, as_object.aliases, as_object.values)
    with pytest.raises(StateMismatch, match="object in the generation, AdamW here"):
        match(state(1, bare), stored, exclude=["rng", "model"])

    def feed(sink):
        for name, one in as_object.tensors.items():
            sink.put(name, 0, memoryview(one.clone().numpy().tobytes()))
            sink.done(name)

    match(live, stored, exclude=["rng", "model"]).apply(Fed(feed), None)
    live["model"].load_state_dict(saved["model"].state_dict())
    assert trained(live, 3, 1) == trained(saved, 3, 1)


class ByItself:
    """An object that is no optimizer, with the attributes of one."""

    def __init__(self, optimizer):
        self.state_dict, self.load_state_dict = optimizer.state_dict, optimizer.load_state_dict


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
def test_a_wrapped_optimizer_overlaps_like_a_bare_one(wrap):
    """With Accelerate the loop waited for every copy, because the wrapper's step cannot be hooked."""
    one = state(0, wrap)
    trained(one, 1, 0)
    captured = capture(one, exclude=["rng"])
    (found,) = captured.optimizers
    assert type(found) is torch.optim.AdamW and captured.hookable
    stepped = []
    found.register_step_pre_hook(lambda *_: stepped.append(1))
    one["optimizer"].step()
    assert stepped
    assert overlap.find(one, captured).beside_trained_bytes == 0


def test_a_wrapper_with_its_own_data_is_stored_as_an_object(tmp_path):
    saved, live = state(0, Lookahead), state(1, Lookahead)
    assert not capture(saved).hookable
    lastgood.save(tmp_path, saved, 1)
    lastgood.load(tmp_path, live)
    assert live["optimizer"].slow == 5


class Synced(Accelerated):
    """Lookahead in its widespread form: its slow weights exist only after its first synchronisation."""

    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.slow, self.steps = None, 0

    def state_dict(self):
        return super().state_dict() | ({} if self.slow is None else {"slow": self.slow, "steps": self.steps})

    def load_state_dict(self, state):
        state = dict(state)
        self.slow, self.steps = state.pop("slow", None), state.pop("steps", 0)
        super().load_state_dict(state)

    def step(self, closure=None):
        super().step()
        self.steps += 1
        parameters = [one for group in self.param_groups for one in group["params"]]
        if self.slow is None and self.steps == 2:
            self.slow = [torch.zeros_like(one) for one in parameters]
        if self.steps % 2 == 0:
            for slow, one in zip(self.slow, parameters, strict=True):
                slow += 0.5 * (one.detach() - slow)
                one.data.copy_(slow)


class LateSynced(Accelerated):
    """Like Synced, but without any state of its own before the first synchronisation."""

    steps = 0

    def state_dict(self):
        return super().state_dict() | ({"slow": self.slow} if hasattr(self, "slow") else {})

    def load_state_dict(self, state):
        state = dict(state)
        if "slow" in state:
            self.slow = state.pop("slow")
        super().load_state_dict(state)

    def step(self, closure=None):
        super().step()
        if not hasattr(self, "slow"):
            self.slow = torch.zeros(1)
        self.slow += 1
        for group in self.param_groups:
            for one in group["params"]:
                one.data.mul_(1 - 1 / (1 + self.slow.item()))


@pytest.mark.parametrize("wrap", [Synced, LateSynced])
def test_an_optimizer_that_creates_its_state_late_keeps_it(wrap, tmp_path):
    """A Lookahead without state at the start was treated as a mere wrapper for ever: a resumed run diverged."""
    saved, live = state(0, wrap), state(1, wrap)
    with lastgood.Checkpointer(tmp_path, saved) as run:
        run.restore()
        run.save(0).result()
        trained(saved, 3, 0)
        run.save(3).result()
    lastgood.load(tmp_path, live)
    assert trained(live, 3, 1) == trained(saved, 3, 1)


def test_the_state_of_an_optimizer_around_another_is_stored():
    """The slow weights that a Lookahead keeps in a `state` of its own, with torch's state_dict, were not stored."""

    class Around(torch.optim.Optimizer):
        def __init__(self, optimizer):
            super().__init__(optimizer.param_groups, optimizer.defaults)
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    one = state(0, Around)
    recurring = Capture(exclude=["rng"])
    recurring.take(one)
    one["optimizer"].state[one["model"].weight]["slow"] = torch.ones(2, 3)
    found = recurring.take(one)
    assert "optimizer.state.weight.slow" in found.tensors


def test_a_scheduler_on_a_wrapper_does_not_hide_the_wrapped_optimizer():
    wrapper = state(0, Accelerated)["optimizer"]
    torch.optim.lr_scheduler.StepLR(wrapper, 2)
    wrapper.step()
    assert Wrappers().unwrapped(wrapper) is wrapper.optimizer


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("given", [False, True])
def test_a_forgotten_schedule_of_a_wrapped_optimizer_is_reported(wrap, given, tmp_path):
    """A schedule that was made before prepare() or setup() has the inner optimizer, and was not reported: each resume
    began with the learning rate of the first epoch."""
    one = state(0, bare)
    schedule = torch.optim.lr_scheduler.StepLR(one["optimizer"], 5)
    one |= {"optimizer": wrap(one["optimizer"]), **({"schedule": schedule} if given else {})}
    with reports() as texts, lastgood.Checkpointer(tmp_path, one, cadence=lastgood.Every(steps=1)) as run:
        run.restore()
        for step in (1, 2):
            trained(one, 1, step)
            schedule.step()
            run.step(step)
    assert any("the state lacks StepLR" in text for text in texts) != given
    assert not any("no entry of the state" in text for text in texts)


def test_a_capture_calls_the_state_dict_of_a_wrapper_once():
    calls = []

    class Counting(Accelerated):
        def state_dict(self):
            calls.append(1)
            return super().state_dict()

    wrapper, wrappers = state(0, Counting)["optimizer"], Wrappers()
    assert wrappers.unwrapped(wrapper) is wrappers.unwrapped(wrapper) is wrapper.optimizer
    assert calls == [1]


def test_a_run_prepared_by_accelerate_loads_without_it(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install accelerate")
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    saved = {"model": model, "optimizer": optimizer, "schedule": schedule}
    trained(saved, 3, 0)
    schedule.step()
    assert len(capture(saved).optimizers) == 1
    lastgood.save(tmp_path, saved, 3)
    live = state(1, bare)
    live["schedule"] = torch.optim.lr_scheduler.StepLR(live["optimizer"], 2)
    lastgood.load(tmp_path, live)
    assert live["schedule"].last_epoch == schedule.scheduler.last_epoch
    assert trained(live, 3, 1) == trained(saved, 3, 1)

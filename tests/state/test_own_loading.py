"""Custom loading: modules that resize themselves on load, and the errors when user code fails in a restore."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lastgood
from lastgood import errors
from lastgood.errors import HalfLoaded, LoadFailed, StateMismatch


class Cloud(nn.Module):
    """Points whose number grows in training, as in 3D Gaussian splatting; its own loading accepts any number of
    points."""

    def __init__(self, points):
        super().__init__()
        self.xyz = nn.Parameter(torch.randn(points, 3))
        self.register_buffer("opacity", torch.rand(points))
        self.loaded = 0

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        for name in ("xyz", "opacity"):
            getattr(self, name).data = torch.empty_like(state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, *rest)
        self.loaded += 1


class Scene(nn.Module):
    def __init__(self, points):
        super().__init__()
        self.cloud, self.head = Cloud(points), nn.Linear(3, 1)

    def forward(self):
        return (self.head(self.cloud.xyz).squeeze(1) * self.cloud.opacity).square().mean()


def scene(points, seed):
    torch.manual_seed(seed)
    model = Scene(points)
    return {"optimizer": torch.optim.Adam(model.parameters(), 0.01), "model": model}


def trained(state, steps):
    losses = []
    for _ in range(steps):
        state["optimizer"].zero_grad()
        loss = state["model"]()
        loss.backward()
        state["optimizer"].step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("points", [5, 9], ids=["grown", "of the same size"])
def test_a_module_that_resizes_itself_on_load_continues_exactly(points, tmp_path):
    """A point cloud that had grown since its construction raised StateMismatch, although torch's load_state_dict
    accepts it."""
    saved, live = scene(9, 0), scene(points, 1)
    trained(saved, 3)
    parameter = live["model"].cloud.xyz
    lastgood.save(tmp_path, saved, 3)
    lastgood.load(tmp_path, live)
    assert live["model"].cloud.xyz is parameter and live["model"].cloud.loaded == 1
    assert trained(live, 3) == trained(saved, 3)


def test_plain_modules_beside_it_are_compared_before_any_change(tmp_path):
    live = scene(5, 1)
    live["model"].head = nn.Linear(4, 1)
    before = copy.deepcopy(live["model"].state_dict())
    lastgood.save(tmp_path, {"model": scene(9, 0)["model"]}, 3)
    with pytest.raises(StateMismatch, match=r"in its stored shape, restore, then resize it") as caught:
        lastgood.load(tmp_path, {"model": live["model"]})
    assert caught.value.mismatched == ["model.head.weight: float32 [1, 3] in the generation, float32 [1, 4] here"]
    assert all(torch.equal(one, before[name]) for name, one in live["model"].state_dict().items())


def test_a_different_dtype_is_a_mismatch_for_custom_loading_too(tmp_path):
    lastgood.save(tmp_path, {"model": Cloud(3).double()})
    with pytest.raises(StateMismatch, match=r"model\.xyz: float64 \[3, 3\] in the generation, float32 \[5, 3\] here"):
        lastgood.load(tmp_path, {"model": Cloud(5)})


def test_a_renaming_pre_hook_does_not_hide_a_shape_mismatch(tmp_path):
    """With one pre-hook for old names in a submodule, its size mismatch was raised after the body had been
    overwritten."""

    class Renaming(nn.Linear):
        def __init__(self, outputs):
            super().__init__(3, outputs)
            self.register_load_state_dict_pre_hook(lambda module, state_dict, *_: state_dict.pop("old", None))

    live = {"model": nn.Sequential(nn.Linear(3, 3), Renaming(7))}
    before = copy.deepcopy(live["model"].state_dict())
    lastgood.save(tmp_path, {"model": nn.Sequential(nn.Linear(3, 3), Renaming(4))})
    with pytest.raises(StateMismatch, match=r"model\.1\.weight: float32 \[4, 3\] in the generation, .* \[7, 3\] here"):
        lastgood.load(tmp_path, live)
    assert all(torch.equal(one, before[name]) for name, one in live["model"].state_dict().items())


def test_a_load_state_dict_that_drops_entries_is_an_error(tmp_path):
    """With a new head of another size, the strict load reported success although the head still had its random
    weights."""

    class FineTuned(nn.Module):
        def __init__(self, classes):
            super().__init__()
            self.body, self.head = nn.Linear(3, 3), nn.Linear(3, classes)

        def load_state_dict(self, state_dict, strict=True, assign=False):
            own = self.state_dict()
            fitting = {name: one for name, one in state_dict.items() if one.shape == own[name].shape}
            return super().load_state_dict(fitting, strict=False)

    lastgood.save(tmp_path, {"model": FineTuned(4)})
    with pytest.raises(LoadFailed, match=r"model \(.*FineTuned\) left out .*: head\.weight \[4, 3\], head\.bias \[4\]"):
        lastgood.load(tmp_path, {"model": FineTuned(7)})


def test_a_lazy_module_gets_its_shape_from_the_generation(tmp_path):
    """Uninitialised lazy modules were refused, although torch initialises them from a checkpoint."""
    saved, live = (
        nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()),
        nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()),
    )
    x = torch.randn(4, 5)
    saved(x)
    lastgood.save(tmp_path, {"model": saved})
    lastgood.load(tmp_path, {"model": live})
    assert torch.equal(live.eval()(x), saved.eval()(x))


def test_an_optimizer_of_a_shapeless_parameter_is_refused_with_the_remedy(tmp_path):
    saved = {"model": nn.Linear(2, 3)}
    saved["optimizer"] = torch.optim.SGD(saved["model"].parameters(), 0.1)
    live = {"model": nn.LazyLinear(3)}
    live["optimizer"] = torch.optim.SGD(live["model"].parameters(), 0.1)
    lastgood.save(tmp_path, saved)
    with pytest.raises(StateMismatch, match=r"optimizer\.state\.weight: of a lazy parameter .* one forward pass first"):
        lastgood.load(tmp_path, live)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max:UserWarning")
@pytest.mark.parametrize("per_channel", [False, True])
def test_a_quantization_aware_model_that_saw_data_is_restored(per_channel, tmp_path):
    """A model with observers raised StateMismatch, where torch reports 'All keys matched successfully'."""
    from torch.ao import quantization

    def prepared(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(quantization.QuantStub(), nn.Linear(3, 4), nn.ReLU(), quantization.DeQuantStub()).train()
        kind = quantization.PerChannelMinMaxObserver if per_channel else quantization.MinMaxObserver
        scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_affine
        weight = quantization.FakeQuantize.with_args(
            observer=kind, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=scheme
        )
        model.qconfig = quantization.QConfig(activation=quantization.default_fake_quant, weight=weight)
        return quantization.prepare_qat(model)

    saved, live = prepared(0), prepared(1)
    x = torch.randn(8, 3)
    saved(x)
    lastgood.save(tmp_path, {"model": saved})
    lastgood.load(tmp_path, {"model": live})
    assert torch.equal(live.eval()(x), saved.eval()(x))


# ---- user code that fails ----------------------------------------------------------------------------------------


class Failing:
    def __init__(self):
        self.calls = 0

    def state_dict(self):
        return {"at": torch.ones(1)}

    def load_state_dict(self, state):
        self.calls += 1
        raise RuntimeError("no such shard")


class FailingModule(Cloud):
    def _load_from_state_dict(self, *_):
        raise KeyError("opacity")


@pytest.mark.parametrize(
    ("make", "cause", "named"),
    [(Failing, RuntimeError, r"data \(Failing\)"), (lambda: FailingModule(2), KeyError, r"data \(FailingModule\)")],
    ids=["object", "module"],
)
def test_a_failing_load_state_dict_is_a_named_half_load(make, cause, named, tmp_path):
    """restore() raised the plain RuntimeError although the model was already overwritten, and that was not reported."""
    state = {"model": nn.Linear(2, 2), "data": make()}
    for step in (1, 2):
        lastgood.save(tmp_path, state, step)
    live = {"model": nn.Linear(2, 2), "data": make()}
    with pytest.raises(LoadFailed, match=rf"(?s)loading step 2 .*{named}.*live state is part of that step") as caught:
        lastgood.load(tmp_path, live)
    assert isinstance(caught.value, HalfLoaded) and type(caught.value.__cause__) is cause
    assert getattr(live["data"], "calls", 1) == 1
    assert torch.equal(live["model"].weight, state["model"].weight)


class Unwilling(dict):
    """A mapping whose entries cannot be replaced."""

    def __setitem__(self, key, value):
        raise errors.Refused("this mapping is read-only")


class RefusingModule(Cloud):
    """A module that raises an error of this package after it has loaded."""

    def __init__(self, points):
        super().__init__(points)
        self.register_load_state_dict_post_hook(self._loaded)

    def _loaded(self, *_):
        raise errors.NoSuchTensor("opacity")


class Forgetful(Cloud):
    """A module that loads a state and then fails in state_dict()."""

    def state_dict(self, *arguments, **options):
        if self.loaded:
            raise AttributeError("opacity")
        return super().state_dict(*arguments, **options)


@pytest.mark.parametrize(
    ("saved", "live"),
    [
        ({"n": 1}, Unwilling(n=2)),
        ({"data": Cloud(2)}, {"data": RefusingModule(2)}),
        ({"data": Cloud(4)}, {"data": Forgetful(2)}),
    ],
    ids=["mapping", "hook", "state_dict"],
)
def test_any_user_code_that_raises_during_a_load_is_a_half_load(saved, live, tmp_path):
    """A caller that catches HalfLoaded must not train on a partly loaded state, whatever the error was."""
    lastgood.save(tmp_path, {"model": nn.Linear(2, 2), **saved})
    state = type(live)(model=nn.Linear(2, 2), **live)
    with pytest.raises(HalfLoaded, match="live state is part of that step"):
        lastgood.load(tmp_path, state)


def test_any_other_error_during_a_load_is_a_half_load(tmp_path, monkeypatch):
    """The restore raised a plain error of torch, and a caller that handled only HalfLoaded trained on the state."""

    def failing(_):
        raise RuntimeError("RNG state must be a torch.ByteTensor")

    lastgood.save(tmp_path, {"model": nn.Linear(2, 2)}, 3)
    monkeypatch.setattr(torch, "set_rng_state", failing)
    with pytest.raises(LoadFailed, match=r"(?s)loading step 3 had begun .*RuntimeError: RNG state") as caught:
        lastgood.load(tmp_path, {"model": nn.Linear(2, 2)})
    assert type(caught.value.__cause__) is RuntimeError


def test_nothing_is_saved_after_a_failed_load_state_dict(tmp_path):
    with lastgood.Checkpointer(tmp_path, {"data": Failing()}) as run:
        run.restore()
        run.save(1).result()
    with lastgood.Checkpointer(tmp_path, {"data": Failing()}) as run:
        with pytest.raises(LoadFailed):
            run.restore()
        with pytest.raises(lastgood.errors.Refused):
            run.save(2)


def test_a_replaced_parameter_gets_no_optimizer_state_of_another_shape(tmp_path):
    class Replacing(Cloud):
        def _load_from_state_dict(self, state_dict, prefix, *rest):
            self.xyz = nn.Parameter(state_dict[prefix + "xyz"].clone())
            self.opacity = state_dict[prefix + "opacity"].clone()

    def state(points):
        model = Replacing(points)
        optimizer = torch.optim.Adam([model.xyz], 0.1)
        model.xyz.sum().backward()
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    lastgood.save(tmp_path, state(4))
    with pytest.raises(LoadFailed, match=r"optimizer\.state\.xyz .* shape \[4, 3\].* or has replaced it"):
        lastgood.load(tmp_path, state(2))

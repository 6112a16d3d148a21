"""A tensor subclass that consists of other tensors, such as a quantized one, is stored as its inner tensors and
restored."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing

import lastgood
from lastgood.errors import ManifestInvalid, StateMismatch, Unstorable
from lastgood.snapshot import overlap
from lastgood.state.rules import Stored, capture
from matching import match


class Scaled(torch.Tensor):
    """An int8 tensor and a scale, with torch's flatten protocol and a context of plain data."""

    @staticmethod
    def __new__(cls, codes, scale, kind):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes, scale, kind):
        self.codes, self.scale, self.kind = codes, scale, kind

    @classmethod
    def of(cls, plain, kind="int8"):
        scale = plain.abs().amax() / 127 + 1e-8
        return cls((plain / scale).round().to(torch.int8), scale, kind)

    def plain(self):
        return self.codes.float() * self.scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"kind": self.kind, "dtype": self.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["codes"], inner["scale"], context["kind"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            (one,) = args
            return return_and_correct_aliasing(
                func, args, kwargs, cls(one.codes.detach(), one.scale.detach(), one.kind)
            )
        if func is torch.ops.aten.copy_.default:
            raise AssertionError("a restore writes the inner tensors, and never through the subclass")
        args = torch.utils._pytree.tree_map_only(cls, cls.plain, args)
        return func(*args, **(kwargs or {}))


class Other(Scaled):
    pass


class Opaque(Scaled):
    """A subclass that implements only its copy, like quantized tensors that implement only the operators of their
    layers."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is not torch.ops.aten.detach.default:
            raise NotImplementedError(func)
        return super().__torch_dispatch__(func, types, args, kwargs)


class Small(torch.optim.Optimizer):
    """An optimizer that keeps its momentum in eight bits, as torchao's AdamW8bit does."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                entry = self.state[one]
                if "moment" not in entry:
                    entry["moment"] = Scaled.of(torch.zeros_like(one))
                fresh = Scaled.of(entry["moment"].plain() * 0.9 + one.grad)
                entry["moment"].codes.copy_(fresh.codes)
                entry["moment"].scale.copy_(fresh.scale)
                one -= group["lr"] * fresh.plain()


def state(seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    return {"model": model, "optimizer": Small(model.parameters())}


def trained(state, steps, seed):
    torch.manual_seed(seed)
    losses = []
    for _ in range(steps):
        loss = state["model"](torch.randn(5, 4)).square().mean()
        loss.backward()
        state["optimizer"].step()
        state["optimizer"].zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("stepped", [0, 2])
def test_an_optimizer_with_subclass_tensors_continues_exactly(stepped, tmp_path):
    """With torchao's AdamW8bit, every save was refused with 'is a tensor subclass (OptimState8bit)'."""
    saved, live = state(0), state(1)
    trained(saved, 3, 0)
    trained(live, stepped, 1)
    before = [entry["moment"] for entry in live["optimizer"].state.values()]
    lastgood.save(tmp_path, saved, 3)
    lastgood.load(tmp_path, live)
    after = [entry["moment"] for entry in live["optimizer"].state.values()]
    assert all(one is other for one, other in zip(before, after, strict=bool(stepped)))
    assert trained(live, 4, 2) == trained(saved, 4, 2)
    assert torch.equal(live["model"].weight, saved["model"].weight)


def test_inner_tensors_are_named_below_their_tensor_and_readable_alone(tmp_path):
    saved = state(0)
    trained(saved, 1, 0)
    lastgood.save(tmp_path, saved, 1)
    codes = lastgood.open(tmp_path).tensor("optimizer.state.weight.moment.codes")
    assert torch.equal(codes, saved["optimizer"].state[saved["model"].weight]["moment"].codes)


def test_a_weight_that_is_a_subclass_is_written_in_place(tmp_path):
    """Int8 weights of torchao in a model were neither saved nor restored."""

    def model(seed):
        torch.manual_seed(seed)
        made = nn.Linear(4, 3)
        made.weight = nn.Parameter(Scaled.of(made.weight.detach()))
        made.register_buffer("table", Scaled.of(torch.randn(2, 2)))
        return made

    saved, live = model(0), model(1)
    inner = live.weight.codes, live.weight.scale, live.table.codes
    lastgood.save(tmp_path, {"model": saved})
    lastgood.load(tmp_path, {"model": live})
    assert torch.equal(live.weight.plain(), saved.weight.plain())
    assert torch.equal(live.table.plain(), saved.table.plain())
    after = live.weight.codes, live.weight.scale, live.table.codes
    assert all(one is other for one, other in zip(inner, after, strict=True))


def test_a_frozen_weight_without_compute_ops_is_saved_and_restored(tmp_path):
    """For LoRA over an int8 base of torchao, the Checkpointer could not be constructed: "unimplemented operator:
    aten.sum"."""

    def model(scale):
        made = nn.Linear(4, 3)
        made.weight = nn.Parameter(Opaque.of(torch.ones(3, 4)), requires_grad=False)
        made.weight.scale.fill_(scale)
        return made

    with lastgood.Checkpointer(tmp_path, {"model": model(float("inf"))}) as ckpt:
        ckpt.restore()
        assert ckpt.save(1).result().step == 1
    assert [one.good for one in lastgood.open(tmp_path).generations()] == [True]  # the weight does not train
    live = model(1.0)
    with lastgood.Checkpointer(tmp_path, {"model": live}) as ckpt:
        assert ckpt.restore().step == 1
    assert live.weight.scale.isinf()


def test_a_subclass_parameter_without_a_live_one_is_rebuilt(tmp_path):
    lastgood.save(tmp_path, {"x": [nn.Parameter(Scaled.of(torch.ones(2)), requires_grad=True)]})
    live = {"x": []}
    lastgood.load(tmp_path, live)
    (found,) = live["x"]
    assert type(found) is Scaled and isinstance(found, nn.Parameter) and found.requires_grad
    assert torch.equal(found.plain(), Scaled.of(torch.ones(2)).plain())


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(2), "Scaled .* in the generation, Tensor"),
        (lambda: Scaled.of(torch.ones(3)), r"Scaled .*\[2\] in the generation, Scaled \[3\] here"),
        (lambda: Scaled.of(torch.ones(2), "int4"), "Scaled"),
        (lambda: Other.of(torch.ones(2)), "Scaled .* in the generation, Other"),
    ],
    ids=["plain", "shape", "context", "class"],
)
def test_a_tensor_of_another_class_shape_or_context_is_a_mismatch(make, why):
    values = capture({"x": Scaled.of(torch.ones(2))}, exclude=["rng"])
    stored = Stored(1, {"x.codes": ("int8", (2,)), "x.scale": ("float32", ())}, {}, values.values)
    for live in ({"x": make()}, {"x": [make()]}):
        tree = values.values if type(live["x"]) is not list else {"x": [values.values["x"]]}
        with pytest.raises(StateMismatch, match=why):
            match(live, Stored(1, stored.tensors, {}, tree), exclude=["rng"])


def test_a_plain_tensor_is_not_loaded_into_a_live_subclass():
    live = nn.Linear(2, 2, bias=False)
    live.weight = nn.Parameter(Scaled.of(torch.ones(2, 2)))
    stored = Stored(1, {"model.weight": ("float32", (2, 2))}, {}, {"model": {"!module": {}}})
    with pytest.raises(StateMismatch, match=r"model\.weight: a plain tensor in the generation, Scaled here"):
        match({"model": live}, stored, exclude=["rng"])


class TensorContext(Scaled):
    def __tensor_flatten__(self):
        return ["codes"], {"scale": self.scale}


class Bare(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: TensorContext.of(torch.ones(2)), "context holds a tensor"),
        (lambda: torch.ones(2).as_subclass(Bare), "is a tensor subclass"),
        (lambda: type("Local", (Scaled,), {}).of(torch.ones(2)), "is a tensor subclass"),
        (lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "nested"),
    ],
)
def test_a_subclass_that_cannot_be_flattened_is_refused_by_name(make, why):
    with pytest.raises(Unstorable, match=why) as caught:
        capture({"x": [make()]})
    assert caught.value.what.startswith("x.0 ")


def test_subclass_state_is_copied_during_the_next_forward_and_backward():
    trained_state = state(0)
    trained(trained_state, 1, 0)
    captured = capture(trained_state, exclude=["rng"])
    found = overlap.find(trained_state, captured)
    inner = [f"optimizer.state.{name}.moment.{part}" for name in ("weight", "bias") for part in ("codes", "scale")]
    assert set(inner) <= set(found.trained) and found.beside_trained_bytes == 0


@pytest.mark.parametrize(
    "change",
    [
        {"class": "os:system"},
        {"class": "torch:Tensor"},
        {"class": f"{__name__}:Small"},
        {"class": "torchvision.tv_tensors:Image"},
    ],
    ids=repr,
)
def test_a_forged_subclass_is_a_mismatch_and_calls_nothing(change):
    body = capture({"x": Scaled.of(torch.ones(2))}).values["x"]["!flattened"]
    tensors = {"x.codes": ("int8", (2,)), "x.scale": ("float32", ())}
    with pytest.raises(StateMismatch, match="x: a tensor of class"):
        match({"x": None}, Stored(1, tensors, {}, {"x": {"!flattened": body | change}}), exclude=["rng"])


@pytest.mark.parametrize("size", [None, [7, 7]], ids=["it raises", "its shape is forged"])
def test_a_subclass_that_cannot_be_built_is_a_mismatch_before_any_change(size, tmp_path, monkeypatch):
    """A KeyError of another version of torchao was raised by the restore after the model had been overwritten."""

    def newer(inner, *_):
        raise KeyError("zero_point")

    captured = capture({"model": nn.Linear(2, 2), "x": [Scaled.of(torch.ones(2))]}, exclude=["rng"])
    tensors = {name: (str(one.dtype)[6:], tuple(one.shape)) for name, one in captured.tensors.items()}
    if size is None:
        monkeypatch.setattr(Scaled, "__tensor_unflatten__", newer)
    else:
        captured.values["x"][0]["!flattened"] |= {"size": size, "stride": [7, 1]}
    with pytest.raises(
        StateMismatch, match=r"x\.0: .*Scaled cannot be made here: its __tensor_unflatten__ (raised|made)"
    ):
        match({"model": nn.Linear(2, 2), "x": []}, Stored(1, tensors, {}, captured.values), exclude=["rng"])


@dataclasses.dataclass(eq=False)
class Imported:
    command: str = ""

    def __eq__(self, other):
        raise AssertionError("a file has chosen the class whose code runs")


def test_a_forged_context_runs_no_comparison_of_its_class():
    captured = capture({"x": Scaled.of(torch.ones(2))}, exclude=["rng"])
    name = f"{__name__}:Imported"
    for forged in (
        {"!dataclass": {"class": name, "parts": {"command": "rm"}}},
        {"kind": {"!dataclass": {"class": name, "parts": {"command": "rm"}}}, "dtype": {"!torch.dtype": "float32"}},
    ):
        captured.values["x"]["!flattened"]["context"] = forged
        stored = Stored(1, {"x.codes": ("int8", (2,)), "x.scale": ("float32", ())}, {}, captured.values)
        with pytest.raises(StateMismatch, match="x: "):
            match({"x": Scaled.of(torch.ones(2))}, stored, exclude=["rng"])


@pytest.mark.parametrize(
    "change",
    [
        {"parts": {"codes": 5}},
        {"parts": {"codes": {"!tensor": "nowhere"}}},
        {"context": {"!tensor": "x.codes"}},
        {"size": [-1]},
        {"stride": []},
        {"parameter": 1},
        {"more": 1},
    ],
    ids=repr,
)
def test_a_malformed_subclass_is_refused(change):
    body = capture({"x": Scaled.of(torch.ones(2))}).values["x"]["!flattened"]
    tensors = {"x.codes": ("int8", (2,)), "x.scale": ("float32", ())}
    with pytest.raises(ManifestInvalid):
        match({"x": None}, Stored(1, tensors, {}, {"x": {"!flattened": body | change}}), exclude=["rng"])


def test_adamw8bit_of_torchao_continues_exactly(tmp_path):
    low_bit = pytest.importorskip("torchao.optim", reason="needs torchao: pip install torchao")

    def made(seed):
        torch.manual_seed(seed)
        model = nn.Linear(64, 64, bias=False)
        optimizer = low_bit.AdamW8bit(model.parameters(), 1e-2)
        model.weight.grad = torch.randn(64, 64)
        return {"model": model, "optimizer": optimizer}

    saved, live = made(0), made(1)
    with torch.compiler.set_stance("force_eager"):
        saved["optimizer"].step()
        lastgood.save(tmp_path, saved, 1)
        lastgood.load(tmp_path, live)
        live["model"].weight.grad = saved["model"].weight.grad.clone()
        for one in (saved, live):
            one["optimizer"].step()
    assert type(live["optimizer"].state[live["model"].weight]["exp_avg"]).__name__ == "OptimState8bit"
    assert torch.equal(live["model"].weight, saved["model"].weight)

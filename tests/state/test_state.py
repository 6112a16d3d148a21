"""Everything that a training run consists of is captured without side effects, and restored exactly or not at all."""

from __future__ import annotations

import contextlib
import copy
import functools
import random
from collections import Counter, OrderedDict

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import lr_scheduler
from torchdata.stateful_dataloader import StatefulDataLoader

from generated import examples
from lastgood.errors import ManifestInvalid, Refused, StateMismatch, Unstorable
from lastgood.format.layout import DTYPES
from lastgood.state.rules import Stored, as_bytes, capture, dtype_name, from_bytes
from lastgood.state.tensors import TORCH_DTYPES
from matching import Fed, match

pytestmark = pytest.mark.usefixtures("one_thread")
writer = msgspec.json.Encoder(order="deterministic")


class Generation:
    """A generation in memory: the result of `capture`, with its tensors copied and its values encoded as JSON and
    decoded."""

    def __init__(self, state, **patterns):
        captured = capture(state, **patterns)
        tensors = {name: (dtype_name(one.dtype), tuple(one.shape)) for name, one in captured.tensors.items()}
        tensors |= {alias: tensors[name] for alias, name in captured.aliases.items()}
        self.bytes = {name: as_bytes(one).clone() for name, one in captured.tensors.items()}
        self.stored = Stored(7, tensors, captured.aliases, msgspec.json.decode(writer.encode(captured.values)))
        self.values = self.stored.values

    def load(self, state, **options):
        """Match and apply the tensors in parts, the last part first, from memory that is overwritten after each
        part."""
        found = match(state, self.stored, **options)
        memory = memoryview(bytearray(max(map(len, self.bytes.values()), default=0)))

        def feed(sink):
            for name, data in self.bytes.items():
                half = len(data) // 2
                for start, part in ((half, data[half:]), (0, data[:half])):
                    if len(part):
                        memory[: len(part)] = part.numpy()
                        sink.put(name, start, memory[: len(part)])
                        memory[:] = b"\xee" * len(memory)
                sink.done(name)

        found.apply(Fed(feed), None)
        return found

    def __eq__(self, other):
        return (
            self.stored == other.stored
            and self.bytes.keys() == other.bytes.keys()
            and all(torch.equal(one, other.bytes[name]) for name, one in self.bytes.items())
        )


def seed(number):
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


class Net(nn.Module):
    """Two layers, batch norm (buffers, one of them 0-dim), and an odd shape."""

    def __init__(self, number=0, norm=True):
        super().__init__()
        torch.manual_seed(number)
        self.first = nn.Linear(3, 5)
        self.norm = nn.BatchNorm1d(5) if norm else nn.Identity()
        self.last = nn.Linear(5, 2, bias=False)

    def forward(self, x):
        return self.last(torch.nn.functional.dropout(self.norm(self.first(x)), 0.2))


def bare(state):
    """A state without the random number generators, for tests in which they do not matter."""
    return Generation(state, exclude=["rng"])


# ---- tensors -----------------------------------------------------------------------------------------------------


def tensor_of(dtype, shape, generator):
    bits = DTYPES[dtype][0]
    count = int(np.prod(shape)) * bits // 8
    high = 2 if dtype == "bool" else 256
    return from_bytes(torch.randint(0, high, (count,), dtype=torch.uint8, generator=generator), dtype, shape)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_every_torch_dtype_restores_exactly_in_every_form(dtype):
    generator = torch.Generator().manual_seed(1)
    make = functools.partial(tensor_of, dtype, generator=generator)

    def forms():
        return {
            "plain": make((3, 4)),
            "scalar": make(()),
            "empty": make((2, 0, 3)),
            "transposed": make((3, 4)).t(),
            "strided": make((4, 6))[::2, 1::3],
            "expanded": make((1, 4)).expand(3, 4),
        }

    state = {"t": forms(), "new": {}}
    saved = Generation(state)
    live = {"t": forms(), "new": {}}
    before = dict(live["t"])
    saved.load(live)
    assert Generation(live) == saved
    assert all(live["t"][form] is before[form] for form in before)
    fresh = {"t": {}, "new": {}}
    saved.load(fresh)
    assert Generation(fresh) == saved


def test_every_torch_dtype_is_known_or_quantized():
    dtypes = {one for one in vars(torch).values() if isinstance(one, torch.dtype)}
    unknown = {str(one).removeprefix("torch.") for one in dtypes} - DTYPES.keys()
    assert all(name.startswith(("qint", "quint")) for name in unknown)


def test_contiguous_tensors_give_a_view_and_others_row_major_copies():
    plain = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    assert as_bytes(plain).data_ptr() == plain.data_ptr()
    assert as_bytes(plain.t()).view(torch.int16).tolist() == [0, 3, 1, 4, 2, 5]
    again = from_bytes(as_bytes(plain), "int16", (2, 3))
    assert again.data_ptr() == plain.data_ptr() and torch.equal(again, plain)


def test_conjugate_and_negative_views_are_stored_by_visible_value():
    """Only a flag distinguishes a conjugate view from its base, with which it shares memory: stored as an alias, it
    would be restored as its base."""
    base = torch.tensor([1 + 2j, 3 - 4j])
    state = {"base": base, "conj": base.conj(), "imag": base.conj().imag}
    assert state["conj"].is_conj() and state["imag"].is_neg()
    saved = bare(state)
    assert not saved.stored.aliases
    fresh = {"base": torch.zeros(2, dtype=base.dtype), "conj": torch.zeros(2, dtype=base.dtype).conj(), "imag": None}
    saved.load(fresh, exclude=["rng"])
    assert [one.tolist() for one in fresh.values()] == [[1 + 2j, 3 - 4j], [1 - 2j, 3 + 4j], [-2, 4]]


def test_capture_refers_to_the_live_memory_and_copies_nothing():
    net = Net()
    captured = capture({"model": net, "array": np.ones(3)})
    assert captured.tensors["model.first.weight"].data_ptr() == net.first.weight.data_ptr()
    assert not captured.tensors["model.first.weight"].requires_grad


def test_a_tensor_in_inference_mode_is_restored_in_place():
    with torch.inference_mode():
        live = {"ema": torch.ones(3)}
    bare({"ema": torch.arange(3.0)}).load(live, exclude=["rng"])
    assert live["ema"].tolist() == [0, 1, 2]


def test_an_expanded_tensor_refuses_values_that_differ_along_it():
    saved = bare({"first": torch.ones(3), "wide": torch.arange(4.0).reshape(2, 2)})
    live = {"first": torch.zeros(3), "wide": torch.zeros(1, 2).expand(2, 2)}
    with pytest.raises(StateMismatch, match="wide: expanded here"):
        saved.load(live, exclude=["rng"])
    assert live["first"].tolist() == [0, 0, 0] and live["wide"].tolist() == [[0, 0], [0, 0]]


def test_a_tensor_without_a_live_one_keeps_its_class_and_requires_grad():
    saved = bare(
        {"d": {"p": nn.Parameter(torch.ones(2)), "f": nn.Parameter(torch.ones(1), False)}, "t": [torch.ones(2)]}
    )
    saved.values["t"][0] = {"!tensor": ["t.0", "cuda:77", False, True]}
    live = {"d": {}, "t": []}
    saved.load(live, exclude=["rng"])
    assert isinstance(live["d"]["p"], nn.Parameter) and live["d"]["p"].requires_grad
    assert isinstance(live["d"]["f"], nn.Parameter) and not live["d"]["f"].requires_grad
    assert live["t"][0].requires_grad and live["t"][0].is_leaf and live["t"][0].device.type == "cpu"


class Subclass(torch.Tensor):
    pass


def fake():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(2)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated:UserWarning")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo"),
        (lambda: torch.eye(2).to_sparse_csr(), "torch.sparse_csr"),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), "quantized"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (lambda: torch.ones(2, device="meta"), "meta device"),
        (lambda: torch.ones(2).as_subclass(Subclass), "Subclass"),
        (fake, "FakeTensor"),
    ],
)
def test_a_tensor_without_plain_memory_is_refused_with_the_remedy(make, message):
    net = nn.Module()
    net.register_buffer("odd", make())
    for state, name in (({"x": {"y": [make()]}}, "x.y.0"), ({"model": net}, "model.odd")):
        with pytest.raises(Unstorable, match=message) as caught:
            capture(state)
        assert caught.value.what.startswith(f"{name} ")
        assert "Store" in caught.value.todo or "Give it memory" in caught.value.todo


def test_a_lazy_parameter_is_refused_by_name():
    with pytest.raises(Unstorable, match=r"model\.weight is a lazy parameter"):
        capture({"model": nn.LazyLinear(3)})


def test_restoring_into_a_model_on_the_meta_device_is_refused():
    """copy_ into a meta tensor silently does nothing: the run would continue with weights that were never loaded."""
    saved = bare({"model": nn.Linear(2, 2)})
    with pytest.raises(Unstorable, match=r"model\.weight is on the meta device.*to_empty"):
        match({"model": nn.Linear(2, 2, device="meta")}, saved.stored, exclude=["rng"])


# ---- arrays and plain data ---------------------------------------------------------------------------------------

ARRAYS = {
    "f8": np.arange(6.0).reshape(2, 3),
    "f2": np.arange(3, dtype=np.float16),
    "u2": np.arange(3, dtype=np.uint16),
    "c16": np.arange(3) * 1j,
    "scalar": np.array(5),
    "empty": np.zeros((0, 3), "<U2"),
    "big": np.arange(3, dtype=">i4"),
    "dates": np.array(["2020-01-01", "NaT"], "M8[D]"),
    "text": np.array([["ab", "c"]]),
    "long": np.arange(2, dtype=np.longdouble),
    "reversed": np.arange(4)[::-1],
    "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "frozen": np.broadcast_to(np.arange(2), (2, 2)),
}


def test_numpy_arrays_restore_in_place_or_as_new_ones():
    saved = bare({"a": ARRAYS})
    fresh = {"a": {}}
    live = {"a": {name: np.zeros_like(one, subok=False) for name, one in ARRAYS.items()}}
    before = dict(live["a"])
    for state in (fresh, live):
        saved.load(state, exclude=["rng"])
        for name, one in ARRAYS.items():
            got = state["a"][name]
            assert (got.dtype, got.shape, got.tobytes()) == (one.dtype, one.shape, one.tobytes())
    assert all(live["a"][name] is one for name, one in before.items())


def test_a_read_only_array_is_replaced():
    live = {"x": np.zeros(2)}
    live["x"].flags.writeable = False
    bare({"x": np.ones(2)}).load(live, exclude=["rng"])
    assert live["x"].tolist() == [1, 1]


def test_an_array_of_objects_or_of_another_shape_is_refused_by_name():
    for array in (np.array([object()]), np.zeros(2, [("a", "O")]), np.zeros(2, [("a", "i4")]).view(np.recarray)):
        with pytest.raises(Unstorable, match=r"d\.x is a numpy"):
            capture({"d": {"x": array}})
    with pytest.raises(StateMismatch, match=r"x: array float64 \[2\] in the generation, float64 \[3\] here"):
        match({"x": np.ones(3)}, bare({"x": np.ones(2)}).stored, exclude=["rng"])


def test_containers_are_refilled_in_place_and_constants_replaced():
    saved_state = {
        "epoch": 3,
        "best": None,
        "name": "b",
        "pair": (1, [2]),
        "log": {"z": [1, {"q": 2}], "a": {1: "one", "!x": 2}, "new": {"deep": [torch.ones(1)]}},
        "seen": {1, 2},
        "counts": Counter("aab"),
        "order": OrderedDict(b=1, a=2),
        "bytes": bytearray(b"xy"),
    }
    saved = bare(saved_state)
    live = {
        "epoch": 0,
        "best": torch.ones(1),
        "name": "a",
        "pair": (0, [0]),
        "log": {"a": {}, "z": [0, {"gone": 1}, 3], "gone": 5},
        "seen": {9},
        "counts": Counter("z"),
        "order": OrderedDict(a=0),
        "bytes": bytearray(b"longer"),
    }
    kept = [live[key] for key in ("log", "seen", "counts", "order", "bytes")]
    kept += [live["log"]["a"], live["log"]["z"], live["log"]["z"][1], live["pair"][1]]
    saved.load(live, exclude=["rng"])
    found = [live[key] for key in ("log", "seen", "counts", "order", "bytes")]
    found += [live["log"]["a"], live["log"]["z"], live["log"]["z"][1], live["pair"][1]]
    assert all(one is other for one, other in zip(kept, found, strict=True))
    assert live == saved_state
    assert list(live["log"]) == list(saved_state["log"]) and list(live["order"]) == ["b", "a"]


def test_a_long_list_of_numbers_is_refilled_in_place():
    numbers, live = list(range(10_000)), {"order": [1, 2]}
    before = live["order"]
    bare({"order": numbers}).load(live, exclude=["rng"])
    assert live["order"] is before and before == numbers


def test_torch_constants_are_restored():
    values = {"dtype": torch.bfloat16, "device": torch.device("cuda:3"), "size": torch.Size([2, 3])}
    live = {"d": {}}
    bare({"d": values}).load(live, exclude=["rng"])
    assert live["d"] == values and type(live["d"]["size"]) is torch.Size


# ---- modules -----------------------------------------------------------------------------------------------------


def test_a_model_is_written_in_place_with_its_buffers():
    source, target = Net(0), Net(1)
    source(torch.randn(8, 3))
    before = {name: one.data_ptr() for name, one in target.state_dict().items()}
    saved = bare({"model": source})
    assert set(saved.stored.tensors) == {f"model.{name}" for name in source.state_dict()}
    saved.load({"model": target}, exclude=["rng"])
    assert bare({"model": target}) == saved
    assert {name: one.data_ptr() for name, one in target.state_dict().items()} == before
    assert target.norm.num_batches_tracked == 1 and target.first.weight.requires_grad


def test_the_next_capture_sees_a_replaced_attribute():
    """NeMo-RL#3312: a plan cached at the first save re-saved the first weights for ever."""
    state = {"model": Net(0)}
    first = bare(state)
    state["model"].last = nn.Linear(5, 2, bias=False)
    assert bare(state).bytes["model.last.weight"].ne(first.bytes["model.last.weight"]).any()
    state["model"] = Net(3)
    assert bare(state).bytes["model.first.weight"].ne(first.bytes["model.first.weight"]).any()


class Tied(nn.Module):
    def __init__(self, tied=True):
        super().__init__()
        self.embed, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_tied_weights_are_stored_once_and_fill_both():
    source = Tied()
    saved = bare({"model": source, "same": [source.embed.weight]})
    assert list(saved.bytes) == ["model.embed.weight"]
    assert saved.stored.aliases == {"model.head.weight": "model.embed.weight", "same.0": "model.embed.weight"}
    tied, untied = Tied(), Tied(tied=False)
    for target in (tied, untied):
        saved.load({"model": target, "same": [torch.zeros(4, 3)]}, exclude=["rng"])
        assert torch.equal(target.head.weight, source.embed.weight)
        assert torch.equal(target.embed.weight, source.embed.weight)


def test_a_tied_weight_refuses_two_stored_tensors():
    """One of the two would silently overwrite the other."""
    saved = bare({"model": Tied(tied=False)})
    with pytest.raises(StateMismatch) as caught:
        match({"model": Tied()}, saved.stored, exclude=["rng"])
    assert caught.value.mismatched == [
        "model.head.weight: one tensor with model.embed.weight here, two in the generation"
    ]


def test_a_tied_weight_may_be_stored_under_one_of_its_names_only():
    """A folder of Hugging Face has one of two tied names. The other one was missing for a load after its import."""
    source = Tied()
    saved = bare({"model": source})
    saved.stored.aliases.clear()
    del saved.stored.tensors["model.head.weight"]
    tied = Tied()
    saved.load({"model": tied}, exclude=["rng"])
    assert torch.equal(tied.head.weight, source.embed.weight)
    with pytest.raises(StateMismatch) as caught:
        match({"model": Tied(tied=False)}, saved.stored, exclude=["rng"])
    assert caught.value.missing == ["model.head.weight"]


def test_empty_tensors_never_count_as_aliases():
    saved = bare({"a": torch.empty(0), "b": torch.empty(0)})
    assert saved.stored.aliases == {}


def test_plain_compiled_and_wrapped_models_load_each_others_state(process_group):
    ways = {
        "plain": lambda net: net,
        "compiled": torch.compile,
        "ddp": nn.parallel.DistributedDataParallel,
        "checkpointed": checkpoint_wrapper,
        "both": lambda net: nn.parallel.DistributedDataParallel(torch.compile(net)),
    }

    def state(way, number):
        model = ways[way](Net(number))
        return {"model": model, "optimizer": optim.AdamW(model.parameters())}

    source = state("plain", 0)
    step(source)
    saved = bare(source)
    assert "optimizer.state.first.weight.exp_avg" in saved.bytes
    for way in ways:
        target = state(way, 1)
        saved.load(target, exclude=["rng"])
        assert bare(target) == saved
        back = state("plain", 2)
        bare(target).load(back, exclude=["rng"])
        assert bare(back) == saved


def test_names_that_collide_after_stripping_are_refused():
    net = nn.Module()
    net.register_module("module", nn.Linear(1, 1))
    net.weight = nn.Parameter(torch.ones(1))
    with pytest.raises(Unstorable, match=r"model\.weight would name both .*'_orig_mod\.' are stripped"):
        capture({"model": net})


class Extra(nn.Module):
    """A weight, with extra state of both kinds."""

    def __init__(self, value):
        super().__init__()
        self.inner = nn.Linear(1, 1)
        self.value = value

    def get_extra_state(self):
        return self.value

    def set_extra_state(self, state):
        self.value = state


@pytest.mark.parametrize("value", [{"amax": [1.5], "t": torch.arange(3)}, None, torch.arange(5), (1, "x")])
def test_extra_state_goes_through_set_extra_state(value):
    source = nn.Sequential(Extra(value), Extra(7))
    target = nn.Sequential(Extra(torch.empty(0) if isinstance(value, torch.Tensor) else 0), Extra(0))
    saved = bare({"model": source})
    saved.load({"model": target}, exclude=["rng"])
    assert str(target[0].value) == str(value) and target[1].value == 7
    assert torch.equal(target[0].inner.weight, source[0].inner.weight)


class Computed(nn.Module):
    """A module whose state_dict holds half of its tensors, and one tensor that it computes."""

    def __init__(self, value):
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), value))
        self.packed = [int(value)]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "packed"] = torch.tensor(self.packed)

    def _load_from_state_dict(self, state, prefix, *rest):
        self.packed = state.pop(prefix + "packed").tolist()
        super()._load_from_state_dict(state, prefix, *rest)


def test_a_computed_tensor_is_restored_through_load_state_dict():
    """Writing the tensor in place would write into a temporary copy."""
    source, target = nn.Sequential(Computed(3.0), nn.Linear(1, 1)), nn.Sequential(Computed(1.0), nn.Linear(1, 1))
    saved = bare({"model": source})
    saved.load({"model": target}, exclude=["rng"])
    assert target[0].packed == [3] and bare({"model": target}) == saved


def test_load_state_dict_post_hooks_run_after_the_weights_are_loaded():
    target, sums = nn.Linear(2, 2), []
    target.register_load_state_dict_post_hook(lambda module, keys: sums.append(module.weight.sum().item()))
    source = nn.Linear(2, 2)
    bare({"model": source}).load({"model": target}, exclude=["rng"])
    assert sums == [source.weight.sum().item()]


def test_modules_and_objects_in_containers_are_restored():
    def state(number):
        nets = {"a.b": Net(number), "list": [Net(number + 1), 5]}
        optimizer = optim.SGD([*nets["a.b"].parameters(), *nets["list"][0].parameters()], 0.1, momentum=0.9)
        return {"nets": nets, "many": (optimizer, {"sched": lr_scheduler.StepLR(optimizer, 2)}, number)}

    source, target = state(0), state(10)
    for net in (source["nets"]["a.b"], source["nets"]["list"][0]):
        net(torch.randn(4, 3)).sum().backward()
    source["many"][0].step()
    source["many"][1]["sched"].step()
    kept = [target["nets"], target["nets"]["a.b"], target["nets"]["list"], target["many"][0], target["many"][1]]
    saved = bare(source)
    assert "nets.a%2Eb.first.weight" in saved.bytes
    assert "many.0.state.nets.list.0.first.weight.momentum_buffer" in saved.bytes
    saved.load(target, exclude=["rng"])
    assert bare(target) == saved
    found = [target["nets"], target["nets"]["a.b"], target["nets"]["list"], target["many"][0], target["many"][1]]
    assert all(one is other for one, other in zip(kept, found, strict=True))


# ---- optimizers --------------------------------------------------------------------------------------------------


def step(state, count=1, sparse=False):
    """Training steps whose data come from the global generator."""
    optimizer = state["optimizer"]

    def closure():
        optimizer.zero_grad()
        x = torch.randint(0, 4, (6,)) if sparse else torch.randn(6, 3)
        loss = state["model"](x).square().mean()
        loss.backward()
        return loss

    for _ in range(count):
        loss = optimizer.step(closure)
        if "scheduler" in state:
            takes_loss = isinstance(state["scheduler"], lr_scheduler.ReduceLROnPlateau)
            state["scheduler"].step(*[loss.detach()] if takes_loss else [])
    return state


class OneTensor(optim.Optimizer):
    """An optimizer with state that is no dict, state without a parameter, and a nested option."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "nested": {"warm": [1, 2]}})

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            loss = closure()
        self.state["steps"] = self.state.get("steps", 0) + 1
        for group in self.param_groups:
            group["nested"]["warm"].append(self.state["steps"])
            for p in group["params"]:
                self.state[p] = 0.9 * self.state[p] + p.grad if p in self.state else p.grad.clone()
                p.sub_(self.state[p], alpha=group["lr"])
        return loss


class OwnDict(optim.SGD):
    """An optimizer with a state_dict of its own is treated like any other object."""

    def state_dict(self):
        return {"own": super().state_dict()}

    def load_state_dict(self, state):
        super().load_state_dict(state["own"])


OPTIMIZERS = {
    "sgd": lambda p: optim.SGD(p, 0.1),
    "momentum": lambda p: optim.SGD(p, 0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda p: optim.Adam(p, 0.1, amsgrad=True),
    "adam_tensor_lr": lambda p: optim.Adam(p, torch.tensor(0.1), foreach=False),
    "adamw": lambda p: optim.AdamW(p, 0.1),
    "adamw_fused": lambda p: optim.AdamW(p, 0.1, fused=True),
    "adamw_foreach": lambda p: optim.AdamW(p, 0.1, foreach=True, maximize=True),
    "adagrad": lambda p: optim.Adagrad(p, 0.1, lr_decay=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, 0.1, momentum=0.9, centered=True),
    "adadelta": lambda p: optim.Adadelta(p, 0.1),
    "adamax": lambda p: optim.Adamax(p, 0.1),
    "nadam": lambda p: optim.NAdam(p, 0.1),
    "radam": lambda p: optim.RAdam(p, 0.1),
    "rprop": lambda p: optim.Rprop(p, 0.1),
    "asgd": lambda p: optim.ASGD(p, 0.1, t0=1),
    "lbfgs": lambda p: optim.LBFGS(p, 0.1, max_iter=3, history_size=2),
    "adafactor": lambda p: optim.Adafactor(p, 0.1),
    "one_tensor": OneTensor,
    "own_dict": lambda p: OwnDict(p, 0.1, momentum=0.9),
}
if hasattr(optim, "Muon"):  # from torch 2.9 on
    OPTIMIZERS["muon"] = lambda p: optim.Muon([one for one in p if one.dim() == 2], 0.1)


def test_the_cases_cover_every_torch_optimizer():
    tried = {type(make(list(nn.Linear(1, 1).parameters()))) for make in OPTIMIZERS.values()} | {optim.SparseAdam}
    kinds = {one for one in vars(optim).values() if isinstance(one, type) and issubclass(one, optim.Optimizer)}
    assert kinds - tried == {optim.Optimizer}


@pytest.mark.parametrize("stepped", [0, 3], ids=["fresh", "stepped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_continues_exactly(name, stepped):
    def state(number):
        model = Net(number)
        return {"model": model, "optimizer": OPTIMIZERS[name](list(model.parameters()))}

    seed(0)
    straight = step(state(0), 3)
    saved = Generation(straight)
    step(straight, 3)
    resumed = step(state(1), stepped)
    saved.load(resumed)
    assert Generation(resumed) == saved
    step(resumed, 3)
    assert Generation(resumed) == Generation(straight)


def test_sparse_adam_continues_exactly():
    def state(number):
        torch.manual_seed(number)
        model = nn.Embedding(4, 3, sparse=True)
        return {"model": model, "optimizer": optim.SparseAdam(model.parameters())}

    straight = step(state(0), 3, sparse=True)
    saved = Generation(straight)
    step(straight, 2, sparse=True)
    resumed = state(1)
    saved.load(resumed)
    assert Generation(step(resumed, 2, sparse=True)) == Generation(straight)


def test_moments_keep_their_dtype_when_parameters_are_narrower():
    """Optimizer.load_state_dict casts floating-point state to the dtype of the parameter (measured with torch 2.13):
    fp32 moments of a bf16 model would lose 16 bits at each restart."""

    def state():
        model = nn.Linear(2, 2).to(torch.bfloat16)
        optimizer = optim.Adam(model.parameters())
        return {"model": model, "optimizer": optimizer}

    source, target = state(), state()
    for p in source["model"].parameters():
        source["optimizer"].state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.randn_like(p, dtype=torch.float32)}
    saved = bare(source)
    saved.load(target, exclude=["rng"])
    assert saved.stored.tensors["optimizer.state.weight.exp_avg"] == ("float32", (2, 2))
    assert bare(target) == saved


def test_optimizer_state_is_written_in_place_and_absent_state_cleared():
    def state():
        model = Net(0)
        return {"model": model, "optimizer": optim.AdamW(model.parameters())}

    source, target = state(), step(state())
    fresh = bare(source)
    stepped = bare(step(source))
    moments = {p: dict(entry) for p, entry in target["optimizer"].state.items()}
    params = [list(group["params"]) for group in target["optimizer"].param_groups]
    stepped.load(target, exclude=["rng"])
    for p, entry in moments.items():
        assert all(target["optimizer"].state[p][key] is one for key, one in entry.items())
    fresh.load(target, exclude=["rng"])
    assert not target["optimizer"].state
    for group, before in zip(target["optimizer"].param_groups, params, strict=True):
        assert all(one is other for one, other in zip(group["params"], before, strict=True))


def test_tied_optimizer_state_is_separated_if_stored_as_two_tensors():
    def state(a, b):
        p = nn.Parameter(torch.ones(1))
        optimizer = optim.SGD([p], 1)
        optimizer.state[p] = {"a": a, "b": b}
        return {"opt": optimizer}

    one, two = torch.ones(2), torch.zeros(2)
    apart, tied = bare(state(one, two)), bare(state(one, one))
    for saved, live in ((apart, state(one, one)), (tied, state(one, two))):
        saved.load(live, exclude=["rng"])
        (entry,) = live["opt"].state.values()
        assert entry["a"].tolist() == [1, 1]
        assert entry["b"].tolist() == ([0, 0] if saved is apart else [1, 1])


def test_capture_neither_steps_a_fresh_optimizer_nor_creates_its_state():
    """torch's get_optimizer_state_dict steps a fresh optimizer with zero gradients (measured)."""
    model = Net()
    optimizer = optim.AdamW(model.parameters(), weight_decay=0.5)
    before = [p.clone() for p in model.parameters()]
    capture({"model": model, "optimizer": optimizer})
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_learning_rate_that_is_a_tensor_is_written_in_place():
    """A compiled or graph-captured step keeps a reference to that tensor."""

    def state(rate):
        model = nn.Linear(1, 1)
        return {"model": model, "optimizer": optim.Adam(model.parameters(), torch.tensor(rate))}

    target = state(0.5)
    rate = target["optimizer"].param_groups[0]["lr"]
    bare(state(0.25)).load(target, exclude=["rng"])
    assert target["optimizer"].param_groups[0]["lr"] is rate and rate.item() == 0.25


def test_parameters_are_named_by_owning_module_or_by_position():
    one, two, loose = nn.Linear(1, 1), nn.Linear(1, 1), nn.Parameter(torch.ones(1))

    def names(optimizer, **modules):
        for group in optimizer.param_groups:
            for p in group["params"]:
                optimizer.state[p] = {"m.x": torch.ones(1)}
        found = bare({**modules, "opt": optimizer}).bytes
        return sorted(name.removeprefix("opt.state.") for name in found if name.startswith("opt.state."))

    ours = [*one.parameters()]
    assert names(optim.SGD(ours, 1), b=one, other=two) == ["bias.m%2Ex", "weight.m%2Ex"]
    assert names(optim.SGD(ours, 1), other=two) == ["0.m%2Ex", "1.m%2Ex"]
    assert names(optim.SGD([*ours, loose], 1), b=one) == ["2.m%2Ex", "bias.m%2Ex", "weight.m%2Ex"]
    both = optim.SGD([{"params": ours}, {"params": [two.bias]}], 1)
    assert names(both, b=one, a=two) == ["a.bias.m%2Ex", "b.bias.m%2Ex", "b.weight.m%2Ex"]
    assert names(both, z=nn.ModuleDict({"b": one, "a": two}), b=one) == [
        "a.bias.m%2Ex",
        "b.bias.m%2Ex",
        "b.weight.m%2Ex",
    ]


def test_parameters_that_would_share_a_name_are_refused():
    listed = nn.ParameterList([nn.Parameter(torch.ones(1))])
    optimizer = optim.SGD([nn.Parameter(torch.ones(1)), *listed], 1)
    with pytest.raises(Unstorable, match=r"opt\.state\.0 is the name of two parameters"):
        capture({"model": listed, "opt": optimizer})


def test_reordered_parameters_keep_their_own_state_except_for_lbfgs():
    def state(kind, turned):
        model = nn.Linear(1, 2)
        params = [model.weight, model.bias]
        optimizer = kind(params[::-1] if turned else params)
        return {"model": model, "optimizer": optimizer}

    source, target = state(optim.Adam, False), state(optim.Adam, True)
    source["model"](torch.ones(1)).square().sum().backward()
    source["optimizer"].step()
    bare(source).load(target, exclude=["rng"])
    for one, other in zip(source["model"].parameters(), target["model"].parameters(), strict=True):
        assert torch.equal(source["optimizer"].state[one]["exp_avg"], target["optimizer"].state[other]["exp_avg"])
    with pytest.raises(StateMismatch, match="another order"):
        match(state(optim.LBFGS, True), bare(state(optim.LBFGS, False)).stored, exclude=["rng"])


def test_a_mismatched_optimizer_lists_every_difference():
    def state(kind=optim.AdamW, groups=1, width=2):
        model = nn.Linear(width, 2)
        params = list(model.parameters())
        return {"opt": kind([{"params": params}] if groups == 1 else [{"params": [p]} for p in params]), "m": model}

    saved = bare(state())
    for live, message in (
        (state(optim.SGD), "opt: AdamW in the generation, SGD here"),
        (state(groups=2), "opt: 1 parameter groups in the generation, 2 here"),
    ):
        with pytest.raises(StateMismatch) as caught:
            match(live, saved.stored, exclude=["rng"])
        assert caught.value.mismatched == [message]
    other = {"opt": optim.AdamW([nn.Parameter(torch.ones(1))]), "m": nn.Linear(2, 2)}
    with pytest.raises(StateMismatch) as caught:
        match(other, saved.stored, exclude=["rng"])
    assert caught.value.missing == ["opt.param_groups.0: 0"]
    assert caught.value.unexpected == ["opt.param_groups.0: m.weight", "opt.param_groups.0: m.bias"]


def test_state_of_an_unowned_parameter_of_another_shape_is_a_mismatch():
    """No other check would detect it: the moments are new tensors, and broadcasting would hide the mismatch for a
    while."""

    def state(size):
        p = nn.Parameter(torch.ones(size))
        p.grad = torch.ones(size)
        optimizer = optim.Adam([p])
        optimizer.step()
        return {"opt": optimizer}

    with pytest.raises(
        StateMismatch, match=r"opt\.state\.0: of a parameter of shape \[2\] in the generation, \[3\] here"
    ):
        match(state(3), bare(state(2)).stored, exclude=["rng"])


def test_state_of_a_tensor_in_no_group_is_refused():
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], 1)
    optimizer.state[nn.Parameter(torch.ones(1))] = {"m": torch.ones(1)}
    with pytest.raises(Unstorable, match=r"opt\.state holds the state of a tensor that is in none of its groups"):
        capture({"opt": optimizer})


def test_a_generation_from_a_gpu_continues_on_the_cpu():
    def state(number):
        model = Net(number)
        return {"model": model, "optimizer": optim.NAdam(model.parameters())}

    straight = step(state(0), 3)
    saved = Generation(straight)
    for entries in saved.values["optimizer"]["!optimizer"]["state"].values():
        for pair in entries["!dict"]:
            if pair[0] != "step":
                pair[1] = {"!tensor": [pair[1]["!tensor"], "cuda:0", False, False]}
    step(straight, 2)
    resumed = state(1)
    saved.load(resumed)
    assert Generation(step(resumed, 2)) == Generation(straight)


# ---- schedulers, scalers, loaders --------------------------------------------------------------------------------


class Warmup:
    """A callable object: its attributes are the schedule's state."""

    def __init__(self, slope):
        self.slope = slope

    def __call__(self, epoch):
        return min(1.0, self.slope * (epoch + 1))


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, [lambda epoch: 0.9**epoch]),
    "callable": lambda o: lr_scheduler.LambdaLR(o, Warmup(0.1)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 4]),
    "constant": lambda o: lr_scheduler.ConstantLR(o),
    "linear": lambda o: lr_scheduler.LinearLR(o),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [4]
    ),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 7),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3),
    "cyclic_own": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Warmup(0.2)),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2, 2),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=12),
}
if "anneal_func" not in optim.swa_utils.SWALR(optim.SGD([nn.Parameter(torch.ones(1))]), 0.05).state_dict():
    # Up to torch 2.9 its state_dict() contains a function, which is refused by name.
    SCHEDULERS["swa"] = lambda o: optim.swa_utils.SWALR(o, 0.05)


def test_the_cases_cover_every_torch_scheduler():
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], 0.1, momentum=0.9)
    tried = {type(make(optimizer)) for make in SCHEDULERS.values()}
    kinds = {
        one
        for one in vars(lr_scheduler).values()
        if isinstance(one, type) and issubclass(one, lr_scheduler.LRScheduler)
    }
    assert kinds - tried == {lr_scheduler.LRScheduler, lr_scheduler._LRScheduler}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_continues_exactly(name):
    def state(number):
        model = Net(number)
        optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
        return {"scheduler": SCHEDULERS[name](optimizer), "model": model, "optimizer": optimizer}

    seed(0)
    straight = step(state(0), 3)
    saved = Generation(straight)
    step(straight, 5)
    resumed = step(state(1), 1)
    saved.load(resumed)
    step(resumed, 5)
    assert Generation(resumed) == Generation(straight)


def test_a_function_in_scheduler_state_is_refused_and_can_be_excluded():
    schedule = Warmup(0.1)
    schedule.log = print
    optimizer = optim.SGD([nn.Parameter(torch.ones(1))], 0.1)
    state = {"scheduler": lr_scheduler.LambdaLR(optimizer, schedule)}
    with pytest.raises(Unstorable, match=r"scheduler\.lr_lambdas\.0\.log is a builtin_function_or_method") as caught:
        capture(state)
    assert 'exclude=["scheduler.lr_lambdas.0.log"]' in caught.value.todo
    patterns = ["scheduler.lr_lambdas.0.log", "rng"]
    Generation(state, exclude=patterns).load(state, exclude=patterns)
    assert schedule.log is print and schedule.slope == 0.1


def test_a_loss_scale_restores_with_its_growth_tracker():
    def state(used):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        p = nn.Parameter(torch.ones(1))
        optimizer = optim.SGD([p], 0.1)
        for _ in range(used):
            scaler.scale(p.sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return {"scaler": scaler}

    source = state(4)
    saved = bare(source)
    assert saved.stored.tensors["scaler.scale"] == ("float32", ())
    for used in (0, 1):
        target = state(used)
        saved.load(target, exclude=["rng"])
        assert target["scaler"].state_dict() == source["scaler"].state_dict()
        assert target["scaler"].get_scale() == 2048.0
    assert bare(state(0)).bytes == {}
    bare(state(0)).load(source, exclude=["rng"])
    assert source["scaler"].get_scale() == 1024.0


def test_a_disabled_scaler_is_empty_and_refuses_the_state_of_an_enabled():
    off, on = ({"scaler": torch.amp.GradScaler("cpu", enabled=one)} for one in (False, True))
    assert bare(off).values["scaler"] == {"!scaler": {}}
    bare(off).load(off, exclude=["rng"])
    for saved, live in ((off, on), (on, off)):
        with pytest.raises(StateMismatch, match=r"scaler: \w+abled in the generation, \w+abled here"):
            match(live, bare(saved).stored, exclude=["rng"])


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return index * index


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_loader_continues_in_the_middle_of_an_epoch(workers):
    def state(number):
        generator = torch.Generator().manual_seed(number)
        loader = StatefulDataLoader(Squares(), batch_size=4, shuffle=True, num_workers=workers, generator=generator)
        return {"loader": loader, "generator": generator}

    source = state(0)
    batches = iter(source["loader"])
    for _ in range(2):
        next(batches)
    saved = Generation(source)
    rest = [batch.tolist() for batch in batches]
    target = state(1)
    saved.load(target)
    assert [batch.tolist() for batch in target["loader"]] == rest and len(rest) == 4


class Counting:
    """An object with state_dict() and load_state_dict(), whose state holds tensors, arrays and tuples."""

    def __init__(self):
        self.state = {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_object_receives_its_own_tensors_and_arrays():
    source, target = Counting(), Counting()
    shared = torch.arange(3)
    source.state = {"t": shared, "again": shared, "n": (np.arange(2), 1), 3: [torch.ones(1)], "z": {"a": 1.5}}
    bare({"x": source}).load({"x": target}, exclude=["rng"])
    found = target.state
    assert torch.equal(found["t"], shared) and found["t"] is not shared and found["again"] is found["t"]
    assert found["n"][0].tolist() == [0, 1] and found[3][0].item() == 1 and found["z"] == {"a": 1.5}
    assert list(found) == list(source.state)


@pytest.mark.parametrize("inside", [nn.Linear(1, 1), Counting(), torch.Generator(), np.random.default_rng(0)])
def test_an_object_inside_the_state_of_another_object_is_refused(inside):
    outer = Counting()
    outer.state = {"inner": [inside]}
    with pytest.raises(Unstorable, match=r"x\.inner\.0 is a \w+ inside of another object's state"):
        capture({"x": outer})


# ---- random numbers ----------------------------------------------------------------------------------------------


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()


def test_all_global_generators_are_captured_by_default_and_continue():
    seed(5)
    draws()
    saved = Generation({})
    assert {"rng.torch", "rng.numpy.state.key"} <= saved.bytes.keys()
    expected = [draws(), draws()]
    seed(6)
    saved.load({})
    assert [draws(), draws()] == expected


class Drawing(Counting):
    def load_state_dict(self, state):
        draws()


def test_generators_are_restored_after_everything_that_may_draw():
    seed(5)
    saved = Generation({"x": Drawing()})
    expected = draws()
    saved.load({"x": Drawing()})
    assert draws() == expected


def test_user_generators_continue_in_place():
    def state(number):
        bits = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
        return {
            "torch": torch.Generator().manual_seed(number),
            "numpy": [np.random.Generator(one(number)) for one in bits],
            "old": np.random.RandomState(number),
            "python": random.Random(number),
        }

    def drawn(state):
        numpy = [(one.random(), one.integers(100, dtype=np.uint32)) for one in state["numpy"]]
        return (
            torch.rand(2, generator=state["torch"]).tolist(),
            numpy,
            state["old"].randn(3).tolist(),
            state["python"].random(),
        )

    source, target = state(1), state(2)
    drawn(source)
    kept = [target["torch"], *target["numpy"], target["old"], target["python"]]
    bare(source).load(target, exclude=["rng"])
    assert drawn(target) == drawn(source)
    found = [target["torch"], *target["numpy"], target["old"], target["python"]]
    assert all(one is other for one, other in zip(kept, found, strict=True))


def test_another_bit_generator_is_a_mismatch():
    saved = bare({"g": np.random.Generator(np.random.PCG64(0))})
    with pytest.raises(StateMismatch, match="g: PCG64 in the generation, PCG64DXSM here"):
        match({"g": np.random.Generator(np.random.PCG64DXSM(0))}, saved.stored, exclude=["rng"])


def test_cuda_generators_of_missing_devices_are_skipped():
    saved = Generation({})
    state = torch.arange(16, dtype=torch.uint8)
    rng = saved.values["rng"]
    rng = dict(rng["!dict"]) if "!dict" in rng else rng
    device_count = torch.cuda.device_count()
    rng["cuda"] = [None] * device_count + [{"!tensor": "rng.cuda.9"}]
    saved.values["rng"] = dict(sorted(rng.items()))
    saved.bytes["rng.cuda.9"], saved.stored.tensors["rng.cuda.9"] = state, ("uint8", (16,))
    saved.load({})


def test_the_random_generators_can_be_excluded():
    saved = Generation({"x": 1})
    seed(9)
    expected = torch.get_rng_state()
    saved.load({"x": 0}, exclude=["rng"])
    assert torch.equal(torch.get_rng_state(), expected)
    with pytest.raises(StateMismatch, match="missing in the generation: rng"):
        match({"x": 0}, bare({"x": 1}).stored)


# ---- capture leaves no trace -------------------------------------------------------------------------------------


def full_state(number=0):
    seed(number)
    model = Net(number)
    optimizer = optim.AdamW(model.parameters(), 0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30),
        "scaler": torch.amp.GradScaler("cpu"),
        "log": {"loss": [1.5], "best": (0, 1.5)},
        "ema": [torch.ones(3)],
        "array": np.ones(2),
        "generator": torch.Generator().manual_seed(number),
        "numpy": np.random.default_rng(number),
        "epoch": number,
    }


def test_capture_changes_nothing_and_draws_nothing():
    state = step(full_state(), 2)
    twin = copy.deepcopy({key: state[key] for key in ("log", "epoch")})
    versions = {name: one._version for name, one in state["model"].state_dict().items()}
    rng = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    first = Generation(state)
    assert Generation(state) == first
    assert rng == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert {name: one._version for name, one in state["model"].state_dict().items()} == versions
    assert {key: state[key] for key in twin} == twin


def test_a_whole_training_continues_exactly():
    straight = step(full_state(), 3)
    saved = Generation(straight)
    step(straight, 4)
    resumed = step(full_state(8), 2)
    saved.load(resumed)
    assert Generation(resumed) == saved
    assert Generation(step(resumed, 4)) == Generation(straight)


# ---- states that do not fit --------------------------------------------------------------------------------------


class Other(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 6)
        self.fresh = nn.Linear(1, 1, bias=False)
        self.last = nn.Linear(5, 2, bias=False, dtype=torch.float64)


def test_every_difference_is_listed_at_once_and_nothing_is_changed():
    saved = Generation(
        {"model": Net(norm=False), "t": torch.ones(2), "gone": 1, "x": Counting(), "d": {"m": nn.ReLU()}}
    )
    live = {"model": Other(), "t": torch.zeros(3), "more": nn.Linear(1, 1), "x": 5, "d": {"n": nn.ReLU(), "v": [1]}}
    before, inside = Generation(live), dict(live)
    with pytest.raises(StateMismatch) as caught:
        match(live, saved.stored)
    assert caught.value.missing == ["model.fresh.weight", "more", "d.n"]
    assert caught.value.unexpected == ["d.m", "gone"]
    assert caught.value.mismatched == [
        "model.first.weight: float32 [5, 3] in the generation, float32 [6, 3] here",
        "model.first.bias: float32 [5] in the generation, float32 [6] here",
        "model.last.weight: float32 [2, 5] in the generation, float64 [2, 5] here",
        "t: float32 [2] in the generation, float32 [3] here",
        "x: object in the generation, int here",
    ]
    assert str(caught.value).startswith("step 7 does not fit this state:")
    assert Generation(live) == before and live == inside


def test_matching_changes_nothing():
    saved, live = Generation(step(full_state(), 2)), step(full_state(3))
    before = Generation(live)
    match(live, saved.stored)
    assert Generation(live) == before


def test_strict_false_loads_what_matches_and_lists_and_keeps_the_rest():
    source = {"model": Net(0), "t": torch.ones(2), "gone": 1, "x": Counting(), "e": 4}
    live = {"model": Other(), "t": torch.zeros(3), "more": nn.Linear(1, 1), "x": 5, "e": 0}
    live["model"].last.float()
    before = live["model"].first.weight.clone()
    found = bare(source).load(live, strict=False, exclude=["rng"])
    assert torch.equal(live["model"].last.weight, source["model"].last.weight)
    assert torch.equal(live["model"].first.weight, before) and live["x"] == 5 and live["t"].tolist() == [0, 0, 0]
    assert live["e"] == 4 and "gone" not in live
    assert "model.fresh.weight: missing in the generation" in found.skipped
    assert "model.norm.weight: unexpected in the generation" in found.skipped
    assert "model.first.bias: float32 [5] in the generation, float32 [6] here" in found.skipped
    assert {"gone: unexpected in the generation", "more: missing in the generation"} <= set(found.skipped)


def test_strict_false_loads_the_matching_parameters_of_an_optimizer():
    def state(width):
        model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, width)})
        optimizer = optim.Adam(model.parameters())
        model["head"](model["body"](torch.ones(1, 2))).sum().backward()
        return {"model": model, "optimizer": optimizer}

    source, live = state(3), state(4)
    source["optimizer"].step()
    found = bare(source).load(live, strict=False, exclude=["rng"])
    moments, body, head = live["optimizer"].state, live["model"]["body"], live["model"]["head"]
    assert body.weight in moments and head.weight not in moments
    assert "optimizer.state.head.weight: of a parameter of shape [3, 2] in the generation, [4, 2] here" in found.skipped


def test_an_object_refuses_the_state_of_another_kind():
    kinds = {
        "module": nn.ReLU(),
        "optimizer": optim.SGD([nn.Parameter(torch.ones(1))], 1),
        "object": Counting(),
        "scaler": torch.amp.GradScaler("cpu"),
        "torch": torch.Generator(),
        "python": random.Random(),
        "data": {"a": [1]},
        "tensor": torch.ones(1),
        "array": np.ones(1),
    }
    objects = [*kinds][:6]
    for name, one in kinds.items():
        for other, live in kinds.items():
            if name != other and (name in objects or other in objects):
                with pytest.raises(StateMismatch, match="in the generation"):
                    match({"x": live}, bare({"x": one}).stored, exclude=["rng"])


@pytest.mark.parametrize("key", ["rng", "__metadata__", 3, ("a",)])
def test_a_key_that_cannot_be_a_name_is_refused(key):
    for use in (capture, lambda state: match(state, bare({}).stored)):
        with pytest.raises(Refused, match="key"):
            use({key: 1})


def test_two_tensors_of_one_name_are_refused():
    extra = Extra({"x": torch.ones(1)})
    extra.register_module("_extra_state", nn.Module())
    extra._extra_state.x = nn.Parameter(torch.ones(1))
    with pytest.raises(Unstorable, match=r"model\._extra_state\.x is the name of two tensors"):
        capture({"model": extra})


def test_a_state_that_cannot_be_written_to_is_refused():
    from types import MappingProxyType

    with pytest.raises(Refused, match="cannot be written to"):
        match(MappingProxyType({"epoch": 1}), bare({"epoch": 2}).stored)


@pytest.mark.parametrize(
    "tree",
    [
        {"!tensor": "nowhere"},
        {"!tensor": ["x", "cpu"]},
        {"!tensor": ["x", "no such", False, False]},
        {"!tensor": ["x", "floppy", False, False]},
        {"!ndarray": ["x", "<f8"]},
        {"!ndarray": ["x", "|O"]},
        {"!ndarray": ["x", "<U4"]},
        {"!torch.dtype": "Tensor"},
        {"!torch.device": 1},
        {"!torch.Size": [-1]},
        {"!module": []},
        {"!optimizer": {}},
        {
            "!optimizer": {
                "class": "SGD",
                "groups": [{"params": [["a", "b"]], "options": {}}],
                "state": {},
                "common": {},
            }
        },
        {"!optimizer": {"class": "SGD", "groups": [{"params": [], "options": []}], "state": {}, "common": {}}},
        {"!optimizer": {"class": "SGD", "groups": [], "state": [], "common": {}}},
        {"!builtins.eval": "1"},
    ],
    ids=repr,
)
def test_malformed_values_are_refused_before_anything_is_changed(tree):
    stored = Stored(1, {"x": ("float32", (2,))}, {}, {"x": tree})
    with pytest.raises(ManifestInvalid):
        match({"x": torch.zeros(2)}, stored, exclude=["rng"])


NAMES = """x y cpu cuda:0 <f4 <f8 |V4 float32 params options device state PCG64 python numpy torch cuda scale class
parts member enum:Enum builtins:eval collections:OrderedDict os:system numpy.ma:MaskedArray torch:Tensor"""
TAGS = """tensor ndarray torch.dtype torch.device torch.Size module optimizer object scaler torch.Generator np.Generator
np.RandomState random.Random tuple dict excluded deque defaultdict datetime Enum namedtuple dataclass subclass np.ma
flattened"""
names = st.sampled_from(NAMES.split())
json = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 5) | names,
    lambda one: st.one_of(
        st.lists(one, max_size=4),
        st.dictionaries(names, one, max_size=4),
        st.tuples(st.sampled_from([f"!{tag}" for tag in TAGS.split()]), one).map(lambda pair: dict([pair])),
        st.fixed_dictionaries(
            {
                "class": st.just("SGD"),
                "groups": st.lists(
                    st.fixed_dictionaries({"params": st.just([["0", [1]]]), "options": one}), max_size=2
                ),
                "state": st.dictionaries(st.just("0") | names, one),
                "common": one,
            }
        ).map(lambda body: {"!optimizer": body}),
        st.tuples(
            st.sampled_from(["!Enum", "!namedtuple", "!dataclass", "!subclass", "!np.ma"]),
            st.fixed_dictionaries({"class": names, "parts": st.dictionaries(names, one, max_size=3)}),
        ).map(lambda pair: dict([pair])),
    ),
    max_leaves=10,
)
lives = st.sampled_from(
    [
        lambda: 1,
        lambda: torch.ones(2),
        lambda: np.ones(2),
        lambda: {"x": [torch.ones(2)]},
        lambda: (torch.ones(2), 1),
        lambda: nn.Linear(1, 1),
        lambda: optim.SGD([nn.Parameter(torch.ones(1))], 1),
        Counting,
        lambda: torch.amp.GradScaler("cpu"),
        torch.Generator,
        lambda: np.random.default_rng(0),
        lambda: np.random.RandomState(0),
        random.Random,
    ]
)


@given(tree=json, rng=json, live=lives, strict=st.booleans())
@examples(150)
def test_arbitrary_values_match_or_are_refused(tree, rng, live, strict):
    tensors = {"x": ("float32", (2,)), "y": ("uint8", (3, 4))}
    with contextlib.suppress(ManifestInvalid, StateMismatch):
        match({"x": live()}, Stored(1, tensors, {}, {"x": tree, "rng": rng}), strict=strict)


# ---- rename, include, exclude ------------------------------------------------------------------------------------


def test_renamed_modules_load_their_weights_and_optimizer_state():
    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head, self.scale = nn.Linear(3, 3), nn.Linear(3, 1), nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.head(self.encoder(x)) * self.scale

    class New(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc, self.head, self.gain = nn.Linear(3, 3), nn.Linear(3, 1), nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return self.head(self.enc(x)) * self.gain

    def state(key, model):
        return {key: model, "optimizer": optim.AdamW(model.parameters())}

    old, new = state("model", Old()), state("net", New())
    old["optimizer"].zero_grad()
    old["model"](torch.ones(3)).backward()
    old["optimizer"].step()
    rename = {"model.": "net.", "model.encoder.": "net.enc.", "model.scale": "net.gain"}
    bare(old).load(new, rename=rename, exclude=["rng"])
    for one, other in zip(old["model"].parameters(), new["net"].parameters(), strict=True):
        assert torch.equal(one, other)
        mine, theirs = old["optimizer"].state[one], new["optimizer"].state[other]
        assert all(torch.equal(mine[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_part_of_a_model_can_be_loaded_as_a_model():
    whole = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    live = {"body": nn.Linear(2, 2), "head": nn.Linear(2, 2), "epoch": 0}
    saved = bare({"model": whole, "count": 3})
    saved.load(
        live, rename={"model.body.": "body.", "model.head.": "head.", "count": "epoch"}, exclude=["rng"], strict=False
    )
    assert torch.equal(live["head"].weight, whole["head"].weight) and live["epoch"] == 3


@pytest.mark.parametrize("rename", [{"a": "b"}, {"a.": "b"}, {"m.weight": "m.bias"}])
def test_an_invalid_rename_is_refused(rename):
    live = {"a": 1, "b": 2, "m": nn.Linear(1, 1)}
    with pytest.raises(Refused, match="rename"):
        match(live, bare(live).stored, rename=rename, exclude=["rng"])


def test_adapters_alone_are_saved_and_loaded_beside_frozen_weights():
    class Adapted(nn.Module):
        def __init__(self, number):
            super().__init__()
            torch.manual_seed(number)
            self.base, self.lora_a = nn.Linear(3, 3), nn.Linear(3, 3)

    def state(number):
        model = Adapted(number)
        return {
            "model": model,
            "optimizer": optim.SGD(model.lora_a.parameters(), 0.1),
            "loader": object(),
            "epoch": number,
        }

    source, live = state(0), state(1)
    patterns = {"include": ["model.*lora*", "optimizer", "epoch"]}
    saved = Generation(source, **patterns)
    assert {name for name in saved.bytes if not name.startswith("rng")} == {"model.lora_a.weight", "model.lora_a.bias"}
    frozen = live["model"].base.weight.clone()
    saved.load(live, **patterns)
    assert torch.equal(live["model"].lora_a.weight, source["model"].lora_a.weight)
    assert torch.equal(live["model"].base.weight, frozen) and live["epoch"] == 0


def test_excluded_names_are_not_read_not_required_and_keep_their_values():
    class Untouchable(Counting):
        def state_dict(self):
            raise AssertionError("read")

    def state(number):
        return {"loader": Untouchable(), "log": {"keep": number, "mine": [number]}, "model": Net(number)}

    patterns = {"exclude": ["loader", "log.mine", "model.last*"]}
    source, live = state(1), state(2)
    last = live["model"].last.weight.clone()
    Generation(source, **patterns).load(live, **patterns)
    assert live["log"] == {"keep": 1, "mine": [2]} and torch.equal(live["model"].last.weight, last)
    with pytest.raises(StateMismatch) as caught:
        match(live, Generation(source, **patterns).stored)
    assert caught.value.missing == ["loader", "model.last.weight"]


def test_hyperparameters_can_keep_their_live_values():
    def state(rate):
        model = nn.Linear(1, 1)
        return step_once({"model": model, "optimizer": optim.Adam(model.parameters(), rate)})

    def step_once(state):
        state["model"](torch.ones(1)).backward()
        state["optimizer"].step()
        return state

    source, live = state(0.1), state(0.5)
    bare(source).load(live, exclude=["optimizer.param_groups", "rng"])
    assert live["optimizer"].param_groups[0]["lr"] == 0.5
    moments = [one["optimizer"].state[one["model"].weight]["exp_avg"] for one in (source, live)]
    assert torch.equal(*moments)


def test_an_excluded_list_element_keeps_its_live_value():
    patterns = {"exclude": ["nets.1", "rng"]}
    source, live = ({"nets": [number, object(), number]} for number in (1, 2))
    mine = live["nets"][1]
    Generation(source, **patterns).load(live, **patterns)
    assert live["nets"] == [1, mine, 1]

"""A restored tensor has the strides that it had when it was saved, so that training continues bit for bit.

A tensor's strides decide which elements a fused kernel pairs, and in which order a matrix product adds. `torch.save`
keeps them, and so does a generation (docs/format.md, section 4).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

import lastgood
from lastgood.cli.app import main
from lastgood.errors import ManifestInvalid
from lastgood.policy.merge_values import merged
from lastgood.records import Manifest
from lastgood.state.rules import Capture, Stored, as_bytes, capture, dtype_name
from lastgood.state.tensor_sink import Place
from lastgood.state.tensors import TORCH_DTYPES, from_buffer, order, strides, write
from matching import Fed, match

State = dict[str, Any]


pytestmark = pytest.mark.usefixtures("one_thread")


class Convolutions(nn.Module):
    """Weights that `memory_format=torch.channels_last` permutes; the kernel of one of them has a single element."""

    shape = (2, 3, 5, 5)

    def __init__(self, layout: torch.memory_format = torch.channels_last) -> None:
        super().__init__()
        self.wide, self.point, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1), nn.Linear(18, 2)
        self.to(memory_format=layout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.point(self.wide(x).relu()).flatten(1))


class Transposed(nn.Module):
    """Parameters that are transposed or permuted views."""

    shape = (4, 5)

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 5).t())
        self.cube = nn.Parameter(torch.randn(3, 2, 6).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bi,ijk->bjk", (x @ self.matrix).tanh(), self.cube)


MODELS = {"channels_last": Convolutions, "transposed": Transposed}
FUSED = {optim.Adam, optim.AdamW, optim.SGD, optim.Adagrad}
MUON = getattr(optim, "Muon", None)  # from torch 2.9 on
ONE_KIND = {MUON, optim.Adafactor}
"""optimizers that take no `foreach`, or whose `foreach` does not exist on the CPU"""
NOT_TRIED = {optim.Optimizer, optim.SparseAdam, optim.LBFGS}
"""the base class; what takes only sparse gradients; what itself raises for gradients that are not contiguous"""
OPTIMIZERS = sorted(
    (one for one in vars(optim).values() if isinstance(one, type) and issubclass(one, optim.Optimizer)),
    key=lambda one: one.__name__,
)
OPTIONS: dict[type, dict[str, Any]] = {
    optim.SGD: {"lr": 0.05, "momentum": 0.9},
    optim.RMSprop: {"momentum": 0.9, "centered": True},
    optim.ASGD: {"t0": 1},
    optim.Adam: {"amsgrad": True},
}


def cases() -> Iterator[Any]:
    for layout, kind in itertools.product(MODELS, OPTIMIZERS):
        if kind in NOT_TRIED:
            continue
        options = [{}] if kind in ONE_KIND else [{"foreach": False}, {"foreach": True}]
        for option in [*options, *([{"fused": True}] if kind in FUSED else [])]:
            form = next((name if on else "plain" for name, on in option.items()), "plain")
            yield pytest.param(layout, kind, OPTIONS.get(kind, {}) | option, id=f"{layout}-{kind.__name__}-{form}")


def made(layout: str, kind: Callable[..., optim.Optimizer], options: dict[str, Any], seed: int) -> State:
    torch.manual_seed(seed)
    model = MODELS[layout]()
    parameters = [one for one in model.parameters() if kind is not MUON or one.dim() == 2]
    return {"model": model, "optimizer": kind(parameters, **options)}


def train(state: State, first: int, last: int) -> list[float]:
    """Train these steps, each on a batch of its own; returns the losses."""
    losses = []
    model, optimizer = state["model"], state["optimizer"]
    for step in range(first, last + 1):
        batch = torch.randn(model.shape, generator=torch.Generator().manual_seed(step))

        def loss(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            found = model(batch).square().mean()
            found.backward()
            return found

        losses.append(optimizer.step(loss).item())
    return losses


def save(path: Path, state: State, step: int = 3) -> None:
    with lastgood.Checkpointer(path, state) as ckpt:
        ckpt.save(step).result()


def restore(path: Path, state: State) -> State:
    with lastgood.Checkpointer(path, state) as ckpt:
        ckpt.restore()
    return state


def contents(state: State) -> tuple[Any, ...]:
    """Bytes and strides of every tensor, and all values."""
    captured = capture(state, exclude=["rng"])
    found = {name: (one.stride(), as_bytes(one).numpy().tobytes()) for name, one in captured.tensors.items()}
    return found, captured.values, captured.aliases


@pytest.mark.parametrize(("layout", "kind", "options"), [*cases()])
@pytest.mark.slow
def test_an_optimizer_resumes_exactly_in_every_memory_layout(
    tmp_path: Path, layout: str, kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    """With a channels_last model and `AdamW(fused=True)`, the second loss after a restore was 0.0183 in place of
    0.0153."""
    straight = made(layout, kind, options, seed=1)
    train(straight, 1, 3)
    save(tmp_path, straight)
    resumed = restore(tmp_path, made(layout, kind, options, seed=2))
    assert contents(resumed) == contents(straight)
    assert train(resumed, 4, 6) == train(straight, 4, 6)
    assert contents(resumed) == contents(straight)


class Rotated(optim.Optimizer):
    """An optimizer that keeps the result of `torch.linalg`: column-major matrices, and at every second step a
    row-major copy of them."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for one in self.param_groups[0]["params"]:
                state, flat = self.state[one], one.grad.flatten(1)
                state["step"] = state.get("step", 0) + 1
                basis = torch.linalg.eigh(flat @ flat.T + 0.1 * state.get("basis", torch.eye(len(flat)))).eigenvectors
                state["basis"] = basis if state["step"] % 2 else basis.contiguous()
                state["factors"] = [*torch.linalg.qr(basis + 0.1)]
                one.sub_((state["basis"] @ flat).sign().reshape(one.shape), alpha=0.01)
        return loss


def rotated(seed: int) -> State:
    torch.manual_seed(seed)
    model = Transposed()
    return {"model": model, "optimizer": Rotated([model.matrix])}


def test_column_major_optimizer_state_resumes_exactly(tmp_path: Path) -> None:
    """LoRA-RITE and SPlus keep eigenvectors: products of row-major copies of them differed in the last bit."""
    straight = rotated(seed=1)
    train(straight, 1, 3)
    assert order(straight["optimizer"].state[straight["model"].matrix]["basis"]) == (1, 0)
    save(tmp_path, straight)
    resumed = restore(tmp_path, rotated(seed=2))
    assert contents(resumed) == contents(straight)
    assert train(resumed, 4, 9) == train(straight, 4, 9)
    assert contents(resumed) == contents(straight)


@pytest.mark.parametrize("make", [rotated, lambda seed: made("channels_last", optim.AdamW, {"fused": True}, seed)])
def test_a_rollback_in_the_same_session_restores_the_strides(tmp_path: Path, make: Callable[[int], State]) -> None:
    """The live optimizer tensors had other strides by then, and were written in place with those strides."""
    state = make(1)
    train(state, 1, 3)
    before = contents(state)
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(3).result()
        losses = train(state, 4, 7)
        train(state, 8, 8)
        ckpt.restore()
    assert contents(state) == before
    assert train(state, 4, 7) == losses


@pytest.mark.parametrize("saved_as", [torch.contiguous_format, torch.channels_last], ids=["plain", "channels_last"])
def test_optimizer_state_follows_the_new_layout_of_its_parameter(tmp_path: Path, saved_as: torch.memory_format) -> None:
    """Otherwise a fused kernel would pair each weight with the moment of a different weight."""
    live_format = torch.channels_last if saved_as is torch.contiguous_format else torch.contiguous_format

    def build(layout: torch.memory_format, seed: int) -> State:
        torch.manual_seed(seed)
        model = Convolutions(layout)
        return {"model": model, "optimizer": optim.AdamW(model.parameters(), fused=True)}

    straight, resumed = build(saved_as, 1), build(live_format, 2)
    train(straight, 1, 3)
    save(tmp_path, straight)
    restore(tmp_path, resumed)
    moments = [(one, state["exp_avg"]) for one, state in resumed["optimizer"].state.items()]
    assert len(moments) == 6 and all(one.stride() == moment.stride() for one, moment in moments)
    assert {one[1] for one in contents(resumed)[0].values()} == {one[1] for one in contents(straight)[0].values()}
    for state in (straight, resumed):
        for one in state["model"].parameters():
            one.grad = torch.ones_like(one)
        state["optimizer"].step()
    for one, other in zip(resumed["model"].parameters(), straight["model"].parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_optimizer_state_unlike_its_parameter_keeps_its_own_layout(tmp_path: Path) -> None:
    def build() -> State:
        weight = nn.Parameter(torch.randn(4, 6).t())
        return {"optimizer": optim.SGD([weight], 0.1, momentum=0.9)}

    state = build()
    state["optimizer"].state[state["optimizer"].param_groups[0]["params"][0]] = {
        "momentum_buffer": torch.randn(6, 4),
        "other": torch.randn(5, 4).t(),
    }
    save(tmp_path, state)
    resumed = restore(tmp_path, build())
    assert contents(resumed) == contents(state)
    assert resumed["optimizer"].state_dict()["state"][0]["momentum_buffer"].is_contiguous()


class Holder:
    """An object that keeps the tensors that it receives."""

    def __init__(self, basis: torch.Tensor) -> None:
        self.basis = basis

    def state_dict(self) -> State:
        return {"basis": self.basis}

    def load_state_dict(self, data: State) -> None:
        self.basis = data["basis"]


def test_new_tensors_get_stored_strides_and_live_ones_keep_theirs(tmp_path: Path) -> None:
    """New tensors get the saved strides. Existing tensors are written in place and keep their layout."""
    basis, fortran = torch.arange(6.0).reshape(2, 3).t(), np.asfortranarray(np.arange(6.0).reshape(2, 3))
    half = torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).t()
    save(tmp_path, {"of": Holder(basis), "new": [basis.clone(), half, fortran], "live": [basis.clone(), fortran]})
    live = [torch.zeros(3, 2), np.zeros((2, 3))]
    state = restore(tmp_path, {"of": Holder(torch.zeros(3, 2)), "new": [], "live": live})
    tensor, narrow, array = state["new"]
    assert state["of"].basis.stride() == tensor.stride() == narrow.stride() == (1, 3)
    assert array.flags.f_contiguous and not array.flags.c_contiguous
    for one in (state["of"].basis, tensor, narrow, live[0]):
        assert one.tolist() == basis.tolist()
    assert array.tolist() == live[1].tolist() == fortran.tolist()
    assert state["live"][0] is live[0] and live[0].stride() == (2, 1) and live[1].flags.c_contiguous


def test_a_module_keeps_its_live_layout_and_loads_the_values(tmp_path: Path) -> None:
    saved, live = Convolutions(torch.contiguous_format), Convolutions(torch.channels_last)
    before = {name: one.stride() for name, one in live.named_parameters()}
    save(tmp_path, {"model": saved})
    restore(tmp_path, {"model": live})
    assert {name: one.stride() for name, one in live.named_parameters()} == before
    assert all(map(torch.equal, live.parameters(), saved.parameters()))


def test_a_row_major_state_stores_no_layout() -> None:
    """The files are then the same as those of every earlier version: for slices, expanded, single-element and
    overlapping views too."""
    whole = torch.randn(6, 8)
    state = made("transposed", optim.AdamW, {}, 1)
    state["model"].matrix = nn.Parameter(torch.randn(5, 6))
    state["model"].cube = nn.Parameter(torch.randn(6, 3, 2))
    state["optimizer"] = optim.AdamW(state["model"].parameters())
    train(state, 1, 1)
    state["views"] = [whole[2:3], whole[:, 3:5], whole[1], whole[:1, 3], whole[:, 1].expand(3, 6), whole[None, ::2]]
    state["wide"], state["array"] = whole[:, :1].expand(6, 4), np.ones((3, 4))[:, None, 1:]
    assert "!permuted" not in str(capture(state).values)
    assert all(len(one) == 2 for one in capture(state).values["optimizer"]["!optimizer"]["groups"][0]["params"])


def test_diff_names_a_tensor_that_differs_only_in_memory_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training continues differently from each of the two, so they are not equal."""
    basis, rng = torch.arange(6.0).reshape(2, 3), torch.Generator()
    for step, form in ((1, basis.clone()), (2, basis.t().contiguous().t())):
        with lastgood.Checkpointer(tmp_path, {"basis": [form], "rng2": rng}, exclude=["rng"]) as ckpt:
            ckpt.restore(strict=False)
            ckpt.save(step).result()
    capsys.readouterr()
    assert main(["diff", str(tmp_path), "1", "2", "--json"]) == 7
    found = json.loads(capsys.readouterr().out)
    assert {one["status"] for one in found["tensors"]} == {"same"}
    assert found["values"] == [{"path": "basis.0.memory_order", "second": [1, 0]}]


def test_changed_strides_invalidate_a_cached_plan() -> None:
    """A `Capture` must not reuse the memory layout that a tensor had in the previous save."""
    state = made("transposed", optim.Adam, {}, 1)
    state["container"] = {"one": torch.randn(3, 3)}
    train(state, 1, 1)
    plan = Capture()
    plan.take(state)
    weight, moments = next(iter(state["optimizer"].state.items()))

    def change(*tensors: torch.Tensor) -> None:
        for one in tensors:
            one.data = one.data.t().contiguous().t() if order(one) == () else one.data.contiguous()
        assert plan.take(state).values == capture(state).values

    change(moments["exp_avg"])
    change(weight)
    change(state["container"]["one"])
    assert plan.take(state).values["container"] == {"one": {"!permuted": [[1, 0], {"!tensor": "container.one"}]}}


def test_a_sharded_moment_has_the_layout_of_its_part(process_group: None) -> None:
    """Each process restores its part of a DTensor with the strides that it had."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))

    def build(seed: int) -> State:
        torch.manual_seed(seed)
        weight = nn.Parameter(distribute_tensor(torch.randn(3, 4), mesh))
        return {"optimizer": optim.SGD([weight], 0.1)}

    state = build(1)
    (weight,) = state["optimizer"].param_groups[0]["params"]
    basis = torch.randn(4, 3).t()
    state["optimizer"].state[weight]["basis"] = DTensor.from_local(basis, mesh, weight.placements)
    captured, resumed = capture(state), build(2)
    found = match(resumed, stored_of(captured))

    def feed(sink: Any) -> None:
        for name, one in captured.tensors.items():
            for at in [name, f"{name} (0, 0) (3, 4)"]:
                sink.put(at, 0, memoryview(as_bytes(one).numpy()))
                sink.done(at)

    found.apply(Fed(feed), None)
    (found_basis,) = (entry["basis"] for entry in resumed["optimizer"].state.values())
    assert found_basis.stride() == found_basis.to_local().stride() == (1, 3)
    assert torch.equal(found_basis.to_local(), basis)


def of_rank(rank: int, values: dict[str, Any]) -> Manifest:
    """The manifest of a rank that has saved these values, and no tensors."""
    empty: dict[str, Any] = {"blobs": [], "pieces": [], "aliases": {}}
    return Manifest(format=1, step=1, incarnation="00000000", rank=rank, digest="xxh3_128", values=values, **empty)


@pytest.mark.parametrize(
    "inside",
    [
        lambda one: one,
        lambda one: [3, one],
        lambda one: {"!tuple": [one, [one]]},
        lambda one: {"!dataclass": {"class": "State", "fields": {"optimizer": one}}},
    ],
)
def test_parameters_of_all_ranks_keep_their_memory_order_when_merged(inside: Callable[[Any], Any]) -> None:
    """`inside`: of what the optimizer is a part. One in a list was not completed: a restore of two stages on one
    process raised StateMismatch."""

    def optimizer(*parameters: list[Any]) -> dict[str, Any]:
        groups = [{"params": [*parameters], "options": {}}]
        return {"!optimizer": {"class": "SGD", "groups": groups, "state": {}, "common": {}}}

    parameters = [["m.a", [2, 3], [1, 0]], ["m.b", [4]]]
    found = merged([of_rank(rank, {"o": inside(optimizer(one))}) for rank, one in enumerate(parameters)], 0, 2)
    assert found["o"] == inside(optimizer(*parameters))


@pytest.mark.parametrize("tag", ["!dict", "!OrderedDict", "!set", "lastgood.audit"])
def test_what_ranks_keep_in_other_order_is_not_merged_by_its_place(tag: str) -> None:
    trees = [{tag: [["a", {"!module": {"x": 1}}]]}, {tag: [["b", {"!module": {"y": 2}}]]}]
    assert merged([of_rank(rank, {"o": tree}) for rank, tree in enumerate(trees)], 0, 2)["o"] == trees[0]


def stored_of(captured: Any) -> Stored:
    shapes = {name: (str(one.dtype)[6:], tuple(one.shape)) for name, one in captured.tensors.items()}
    return Stored(1, shapes, captured.aliases, captured.values)


@pytest.mark.parametrize(
    "body",
    [
        None,
        [],
        [[1, 0]],
        [[1, 0], {}],
        [[1, 0], {"!tensor": "x"}, 1],
        [[0, 1], {"!tensor": "x"}],
        [[1, 1], {"!tensor": "x"}],
        [[0], {"!tensor": "x"}],
        [[-1, 0], {"!tensor": "x"}],
        [[True, 0], {"!tensor": "x"}],
        [["1", 0], {"!tensor": "x"}],
        [[[1], 0], {"!tensor": "x"}],
        [[1, 0], {"!tensor": "x", "!ndarray": ["x", "<f4"]}],
        [[1, 0], {"!permuted": [[1, 0], {"!tensor": "x"}]}],
        [[1, 0], {"!int": "0x1"}],
        [[1, 0], {"!ndarray": ["dates", "<M8[s]"]}],
    ],
)
def test_a_malformed_memory_order_is_refused_before_any_change(body: Any) -> None:
    shapes = {"x": ("float32", (2, 3)), "dates": ("uint8", (2, 8))}
    with pytest.raises(ManifestInvalid):
        match({"x": torch.zeros(2, 3)}, Stored(1, shapes, {}, {"x": {"!permuted": body}, "rng": {}}))


# ---- single elements, and all other strides ----------------------------------------------------------------------


def test_views_of_one_element_are_restored(tmp_path: Path) -> None:
    """`x[:, 3]` of one row and `x[::10]` of ten were saved, but their restore ended in a RuntimeError of `view`."""
    pair = torch.tensor([[1 + 2j, 3 - 4j]])

    def build(scale: int) -> State:
        row, column = torch.arange(8.0).reshape(1, 8) * scale, torch.arange(10) * scale
        array = np.arange(8.0).reshape(1, 8) * scale
        imaginary = (pair[:, :1] * scale).conj().imag
        return {"row": row[:, 3], "column": column[::10] + 1, "imaginary": imaginary, "array": array[:, 3]}

    strided = build(1) | {"column": torch.arange(1, 11)[::10]}
    assert strided["row"].stride() == (8,) and strided["column"].stride() == (10,)
    save(tmp_path, strided)
    live = build(7)
    fresh = restore(tmp_path, {"row": torch.zeros(1), **{key: live[key] for key in ("column", "imaginary", "array")}})
    again = restore(tmp_path, live)
    for state in (fresh, again):
        found = [state[key].reshape(-1).tolist() for key in ("row", "column", "imaginary", "array")]
        assert found == [[3.0], [1], [-2.0], [3.0]]


@st.composite
def strided_tensors(draw: st.DrawFn) -> tuple[torch.Tensor, bytes, bool]:
    """A view with arbitrary strides, its content in row-major order, and whether no two of its elements overlap in
    memory."""
    dtype = TORCH_DTYPES[draw(st.sampled_from(sorted(TORCH_DTYPES)))]
    shape = draw(st.lists(st.integers(0, 3), max_size=4))
    stride = draw(st.lists(st.integers(0, 11), min_size=len(shape), max_size=len(shape)))
    start = draw(st.integers(0, 3))
    places = [start + int(np.dot(at, stride)) for at in itertools.product(*map(range, shape))]
    raw = np.random.default_rng(start).integers(0, 256, (max(places, default=start) + 1, dtype.itemsize), np.uint8)
    raw &= 1 if dtype is torch.bool else 255
    view = torch.empty(0, dtype=dtype).set_(torch.from_numpy(raw).untyped_storage(), start, shape, stride)
    return view, raw[places].tobytes(), len(set(places)) == len(places)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@given(strided_tensors())
def test_every_strided_tensor_is_read_and_written_in_row_major_order(case: tuple[torch.Tensor, bytes, bool]) -> None:
    view, content, apart = case
    assert as_bytes(view).numpy().tobytes() == content
    if apart:
        other = bytearray(one ^ 1 for one in content)
        if place := Place.of(view):
            place.put(0, memoryview(other))
        else:
            write(view, from_buffer(other, dtype_name(view.dtype), view.shape))
        assert as_bytes(view).numpy().tobytes() == other


@given(
    st.sampled_from([np.complex64, np.complex128]),
    st.lists(st.integers(0, 3), min_size=1, max_size=3),
    st.integers(1, 4),
    st.sampled_from(["conj", "imag", "conj.imag", "conj.real"]),
)
def test_conjugate_and_negative_views_yield_their_visible_values(
    dtype: Any, shape: list[int], gap: int, view: str
) -> None:
    numbers = np.arange(1, 1 + 2 * int(np.prod(shape)) * gap).astype(np.float64).view(np.complex128).astype(dtype)
    array = numbers[::gap].reshape(shape)
    tensor = torch.from_numpy(numbers)[::gap].reshape(shape)
    for name in view.split("."):
        tensor = tensor.conj() if name == "conj" else getattr(tensor, name)
        array = array.conj() if name == "conj" else getattr(array, name)
    assert as_bytes(tensor).numpy().tobytes() == array.tobytes()


def permuted(shape: list[int]) -> st.SearchStrategy[tuple[list[int], list[int]]]:
    return st.tuples(st.just(shape), st.permutations(range(len(shape))))


@given(st.lists(st.integers(0, 3), max_size=5).flatmap(permuted))
def test_the_memory_order_of_a_dense_tensor_gives_its_strides(case: tuple[list[int], list[int]]) -> None:
    shape, permutation = case
    tensor = torch.empty_strided(shape, strides(shape, tuple(permutation)))
    if tensor.numel() > 1:
        assert strides(shape, order(tensor)) == tensor.stride()
    else:
        assert order(tensor) == ()

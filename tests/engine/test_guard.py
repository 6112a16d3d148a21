"""The guard: each layer finds its kind of damage, names the place, and works without the other layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import lastgood
from harness import State, load, reported, reports, save
from lastgood.engine.arena import Arena
from lastgood.engine.finite import not_finite
from lastgood.engine.inline_executor import Inline
from lastgood.errors import NotFinite, NothingGood
from lastgood.format import layout
from lastgood.io.files import PosixFiles
from lastgood.limits import CHUNK_BYTES
from lastgood.policy.retention import Keep
from lastgood.records import LAYERS
from lastgood.run.reader import RunReader
from lastgood.run.writer import RunWriter
from lastgood.state.tensors import TORCH_DTYPES
from lastgood.storage.directory import Disk

CHUNK = 4096
STATE: State = {"bias": b"four", "weight": bytes(range(250)) * 40}
OTHER: State = {"bias": b"four", "heights": bytes(range(249, -1, -1)) * 40}
DATA = "r00000.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline())
    save(run, 10, OTHER, chunk_bytes=CHUNK)
    save(run, 20, STATE, chunk_bytes=CHUNK)
    (path,) = tmp_path.glob("gen/*20-*")
    return path


def put(data: bytes, at: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        with open(folder / DATA, "r+b") as file:
            file.seek(at)
            file.write(data)

    return damage


def older(folder: Path) -> None:
    (before,) = folder.parent.glob("*10-*")
    (folder / DATA).write_bytes((before / DATA).read_bytes())


def record(name: str, at: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[at] ^= 1
        (folder / name).write_bytes(data)

    return damage


def resized(by: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        data = (folder / DATA).read_bytes()
        (folder / DATA).write_bytes(data[:by] if by < 0 else data + bytes(by))

    return damage


FOUND = {
    "a bit of a tensor": (put(b"\xff", 9000), {"contents", "digests"}, "weight"),
    "a bit of the header's length": (put(b"\x01", 3), {"structure", "agreement", "digests"}, ""),
    "a name in the header": (put(b"W", 8 + 60), {"agreement", "digests"}, ""),
    "an older version of the file": (older, {"agreement", "contents", "digests"}, "weight"),
    "a cut tail": (resized(-100), {"structure", "contents", "digests"}, "weight"),
    "an appended tail": (resized(5), {"structure", "digests"}, ""),
    "a lost file": (lambda folder: (folder / DATA).unlink(), {"structure"}, ""),
    "a digit of the manifest's digests": (record("r00000.manifest.json", 150), {"digests"}, ""),
    "the form of the manifest": (record("r00000.manifest.json", -3), {"structure", "digests"}, ""),
    "a lost manifest": (lambda folder: (folder / "r00000.manifest.json").unlink(), {"structure"}, ""),
}


@pytest.mark.parametrize(("damage", "layers", "tensor"), FOUND.values(), ids=FOUND.keys())
def test_each_layer_finds_its_damage_alone_and_names_the_tensor(folder, tmp_path, damage, layers, tensor):
    damage(folder)
    reader = RunReader(Disk(PosixFiles(), str(tmp_path)))
    verdict = reader.verify(20)
    assert not verdict.intact and {one.layer for one in verdict.findings} >= layers
    assert {one.tensor for one in verdict.findings if one.tensor} == ({tensor} if tensor else set())
    for layer in LAYERS:
        alone = {one.layer for one in reader.verify(20, layers=[layer]).findings}
        assert alone == ({layer} & {one.layer for one in verdict.findings})


def test_a_good_generation_has_no_findings(folder, tmp_path):
    verdict = RunReader(Disk(PosixFiles(), str(tmp_path))).verify(20)
    assert verdict.good and verdict.intact and verdict.layers == list(LAYERS)


def test_memory_corruption_is_distinguished_from_disk_corruption(folder, tmp_path):
    """Only the content digest, which is computed during staging, detects it: the file holds exactly the bytes that
    were written."""
    reader = RunReader(Disk(PosixFiles(), str(tmp_path)))
    put(b"\xff", 9000)(folder)
    assert not any("memory changed it" in one.what for one in reader.verify(20).findings)


FLOATS = {name for name, one in TORCH_DTYPES.items() if one.is_floating_point or one.is_complex}


# ---- numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", sorted(FLOATS))
def test_nonfinite_values_are_found_in_every_dtype_at_every_position(name):
    dtype = TORCH_DTYPES[name]
    if name == "float4_e2m1fn_x2":
        assert not not_finite(name, memoryview(bytes(range(256))))  # the bytes contain neither
        return
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.uint8)
    if dtype.itemsize == 1:
        patterns = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    elif dtype.itemsize == 2:
        patterns = bits
    else:  # the upper half of a real number decides, except for the last bit of a NaN
        half = torch.zeros(1 << 16, dtype.itemsize // (2 if dtype.is_complex else 1) // 2, dtype=torch.int32)
        half[:, -1] = torch.arange(1 << 16)
        patterns = half.to(torch.uint16).view(torch.uint8)
        patterns = torch.cat([torch.zeros_like(patterns), patterns], 1) if dtype.is_complex else patterns
    values = patterns.reshape(-1).contiguous().view(dtype)
    wide = values.to(torch.complex128 if dtype.is_complex else torch.float64)
    finite = torch.isfinite(wide)
    size = dtype.itemsize
    data = memoryview(values.view(torch.uint8).numpy())
    for at in range(0, len(values), max(1, len(values) // 4096)):
        assert not_finite(name, data[at * size : (at + 1) * size]) == (not finite[at]), wide[at]
    good = values[finite].contiguous()
    assert not not_finite(name, memoryview(good.view(torch.uint8).numpy()))
    if not finite.all():
        bad = torch.cat([good.view(torch.uint8), values[~finite][:1].view(torch.uint8)])
        assert not_finite(name, memoryview(bad.numpy()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((4,), float("-inf")))


def trained(root: Path, poison: Callable[[nn.Module, torch.optim.Optimizer], object], **options: object) -> list[str]:
    """Save two good steps and one that is poisoned; returns the texts of the reports."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    with (
        reports(logging.WARNING) as texts,
        lastgood.Checkpointer(root, {"net": net, "optimizer": optimizer}, **options) as ckpt,
    ):
        ckpt.restore()
        for step in (1, 2, 3):
            net.layer(torch.ones(4)).sum().backward()
            optimizer.step()
            if step == 3:
                with torch.no_grad():
                    poison(net, optimizer)
            ckpt.save(step)
            ckpt.wait()
    return texts


POISON = {
    "net.layer.weight": lambda net, _: net.layer.weight[0].fill_(float("nan")),
    "net.layer.bias": lambda net, _: net.layer.bias[3].fill_(float("inf")),
    "optimizer.state.layer.weight.exp_avg_sq": lambda net, optimizer: optimizer.state[net.layer.weight]["exp_avg_sq"][
        1, 1
    ].fill_(float("nan")),
}


@pytest.mark.parametrize("name", POISON)
def test_a_nonfinite_state_is_intact_and_unfit(tmp_path, name):
    warnings = trained(tmp_path, POISON[name])
    assert any("step 3 is intact, and not good" in one and name in one for one in warnings)
    run = lastgood.open(tmp_path)
    verdict = run.verify(3)
    assert verdict.intact and not verdict.good and [one.tensor for one in verdict.findings] == [name]
    newest = run.generations()[-1]
    assert newest.unfit and not newest.verified and not newest.damaged
    assert (tmp_path / "latest_ok").resolve().name.startswith("000000000002-")
    with lastgood.Checkpointer(tmp_path, {"net": Net()}, include=["net"]) as ckpt:
        with reported("intact, and not good"):
            assert ckpt.restore(strict=False).step == 2
        found = ckpt.restore(step=3, strict=False)  # it was requested by number
        assert found.step == 3 and found.unfit == [name]
    assert lastgood.open(tmp_path).generations()[-1].unfit, "the restored step is still not good"
    assert (tmp_path / "latest_ok").resolve().name.startswith("000000000002-")


@pytest.mark.parametrize("element", [0, 300_000, 750_000, 799_999])
def test_one_nonfinite_value_is_found_at_every_position_of_a_file(tmp_path, element):
    weights = torch.zeros(800_000)
    weights[element] = float("nan")
    state: State = {"weight": weights.numpy().tobytes()}
    run = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline())
    save(run, 10, state, tensors=[layout.Tensor("weight", "float32", (800_000,), True)], chunk_bytes=CHUNK_BYTES)
    (found,) = RunReader(run.tier).verify(10).findings
    assert (found.layer, found.tensor) == ("finite", "weight")


def test_a_mask_of_minus_infinity_is_good_unless_required_to_be_finite(tmp_path):
    assert trained(tmp_path / "plain", lambda *_: None) == []
    warnings = trained(tmp_path / "named", lambda *_: None, finite_also=["net.mask"])
    assert any("net.mask" in one for one in warnings)


def test_a_tensor_that_is_allowed_to_be_infinite_is_good(tmp_path):
    assert trained(tmp_path, POISON["net.layer.bias"], finite_except=["net.layer.bias"]) == []
    assert lastgood.open(tmp_path).verify(3).good


def test_an_unverified_nonfinite_state_is_not_restored(tmp_path):
    """The process died before it verified its last save, and that save contains NaN."""
    trained(tmp_path, POISON["net.layer.weight"])
    (mark,) = tmp_path.glob(f"gen/*/{layout.UNFIT}")
    mark.unlink()
    net = Net()
    with (
        lastgood.Checkpointer(tmp_path, {"net": net}, include=["net"]) as ckpt,
        reported("NaN or infinity"),
    ):
        assert ckpt.restore(strict=False).step == 2
    assert torch.isfinite(net.layer.weight).all()


def test_without_a_finite_generation_the_error_names_each_and_the_remedy(tmp_path):
    net = Net()
    with torch.no_grad():
        net.layer.weight.fill_(float("nan"))
    with pytest.raises(NotFinite):
        lastgood.save(tmp_path / "run", {"net": net}, 5)
    with pytest.raises(NothingGood, match="intact, and not good"):
        lastgood.load(tmp_path / "run", {"net": Net()})
    assert lastgood.load(tmp_path / "run", {"net": Net()}, step=5).step == 5


def test_unfit_generations_do_not_count_in_retention(tmp_path):
    run = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline(), keep=Keep(last=2))
    nan = b"\x00\x00\xc0\x7f"
    for step in range(1, 8):
        weight = layout.Tensor("weight", "float32", (1,), finite=True)
        save(run, step, {"weight": nan if step > 3 else bytes(4)}, tensors=[weight], chunk_bytes=CHUNK)
        try:
            run.verify(Arena(3 * CHUNK, CHUNK))
        except NotFinite:
            assert step > 3
        run.clean()
    assert [one.step for one in RunReader(run.tier).generations()] == [2, 3, 7]
    assert load(run.tier)[0].generation.step == 3

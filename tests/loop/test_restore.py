"""A restore applies only verified bytes, in place; a partly restored state is never used as a state.

The state `w` here is 16 chunks of 256 KiB. `bare` makes a generation look as if its save had crashed before it was
verified.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch

import harness
import lastgood
from harness import reported
from lastgood import errors
from lastgood.coordination.single_rank import SingleRank
from lastgood.engine import read_file
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.format import commit, layout
from lastgood.format.layout import Image
from lastgood.io.files import PosixFile, PosixFiles
from lastgood.loop.load import LoadRequest, load
from lastgood.records import Generation
from lastgood.run.candidates import ReadOnlyRun
from lastgood.run.packed import PackedTier
from lastgood.run.save import ReadyChunks, SaveRequest
from lastgood.run.writer import RunWriter
from lastgood.state.tensor_sink import Place, TensorSink
from lastgood.storage.directory import Disk
from lastgood.testing import Call, FaultyFiles

CHUNK_BYTES = 1 << 18
COUNT = 16 * CHUNK_BYTES // 4


def of_step(step: int) -> dict[str, object]:
    """A state in which every element of `w` holds its step."""
    return {"w": torch.full((COUNT,), float(step)), "epoch": step}


def blank() -> dict[str, object]:
    return of_step(0)


def saved(path: Path, *steps: int, **options: object) -> None:
    state = of_step(0)
    with lastgood.Checkpointer(path, state, memory=1 << 20, retention=lastgood.Keep(last=9), **options) as ckpt:
        for step in steps:
            state.update(of_step(step))
            ckpt.save(step).result()
            ckpt.wait()


def blob(path: Path, step: int) -> Path:
    return next(path.glob(f"gen/{step:012d}-*")) / "r00000.safetensors"


def flip(path: Path, step: int, chunk: int = 12) -> None:
    data = bytearray(blob(path, step).read_bytes())
    data[chunk * CHUNK_BYTES + 99] ^= 1
    blob(path, step).write_bytes(data)


def bare(path: Path, *steps: int) -> None:
    for step in steps:
        (blob(path, step).parent / "VERIFIED.json").unlink()


def restore(path: Path, state: dict, **options: object) -> lastgood.Restored:
    with lastgood.Checkpointer(path, state, memory=1 << 20) as ckpt:
        return ckpt.restore(**options)


def untouched(state: dict) -> bool:
    return bool(state["w"].eq(0).all()) and state["epoch"] == 0


def is_of(state: dict, step: int) -> bool:
    return bool(state["w"].eq(step).all()) and state["epoch"] == step


# ---- a part of a generation ------------------------------------------------------------------------------------


def of_two(step: int) -> dict[str, object]:
    """A state of which `v` is a small part."""
    return of_step(step) | {"v": torch.full((1000,), float(step))}


def test_a_load_of_one_tensor_reads_little_more_than_its_bytes(tmp_path: Path, monkeypatch) -> None:
    """A generation of one rank was read from start to end, whatever was wanted of it."""
    with lastgood.Checkpointer(tmp_path, of_two(5), memory=1 << 20) as ckpt:
        ckpt.save(5).result()
    real, lengths = PosixFile.read_into, list[int]()

    def counted(self: PosixFile, mv: memoryview, offset: int) -> int:
        if "safetensors" in self._path:
            lengths.append(len(mv))
        return real(self, mv, offset)

    monkeypatch.setattr(PosixFile, "read_into", counted)
    assert lastgood.load(tmp_path, include=["v"])["v"].eq(5).all()
    state = {"v": torch.zeros(1000)}
    lastgood.load(tmp_path, state)
    assert state["v"].eq(5).all() and 0 < sum(lengths) <= 2 * 3 * CHUNK_BYTES


def test_a_part_of_an_unverified_damaged_generation_is_not_loaded(tmp_path: Path) -> None:
    with lastgood.Checkpointer(tmp_path, of_two(3), memory=1 << 20) as ckpt:
        ckpt.save(3).result()
        ckpt.save(6).result()
        ckpt.wait()
    flip(tmp_path, 6)
    bare(tmp_path, 6)
    with reported("step 6"):
        assert lastgood.load(tmp_path, include=["v"]).restored.step == 3


# ---- no byte that is not verified reaches the state ------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_damaged_chunk_is_never_copied_and_all_others_are_exact(tmp_path: Path, chunk: int) -> None:
    saved(tmp_path, 5)
    flip(tmp_path, 5, chunk)
    state = blank()
    with pytest.raises(errors.HalfLoaded):
        restore(tmp_path, state)
    bits = state["w"].view(torch.int32).unique()
    assert set(bits.tolist()) <= {0, int(torch.tensor(5.0).view(torch.int32))}
    run = lastgood.open(tmp_path)
    (offset,) = (one.extent.offset for one in run.manifest(run.generation(5)).pieces if one.name == "w")
    first = (chunk * CHUNK_BYTES - offset) // 4
    assert state["w"][first : first + CHUNK_BYTES // 4].eq(0).all() and state["w"].eq(5).any()
    assert state["epoch"] == 0


def test_the_content_digest_finds_a_bit_flip_in_memory_after_the_read(tmp_path: Path, monkeypatch) -> None:
    """Memory that changes between the content digest and the chunk digest leaves every chunk digest right."""
    real = read_file.Contents.see

    def flipping(self: read_file.Contents, buffer: memoryview) -> None:
        real(self, buffer)
        if len(buffer) > 5000:
            buffer[5000] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(read_file.Contents, "see", flipping)
        with reported("memory changed it"):
            saved(tmp_path, 5)
    state = blank()
    with pytest.raises(errors.NothingGood, match="memory changed it"):
        restore(tmp_path, state)
    assert untouched(state)
    (blob(tmp_path, 5).parent / "DAMAGED.json").unlink()
    with pytest.raises(errors.NothingGood, match="memory changed it"):
        restore(tmp_path, state)
    assert untouched(state)


def test_nothing_writes_into_the_state_after_a_restore_has_raised(tmp_path: Path) -> None:
    """A reader that is late must not overwrite what the next attempt has loaded with its chunk."""
    disk = Disk(PosixFiles(), str(tmp_path))
    run = RunWriter(disk, Inline())
    run.begin(None)
    generation = harness.save(run, 1, {"a": bytes(40_000)}, chunk_bytes=4096)
    path = blob(tmp_path, 1)
    data = bytearray(path.read_bytes())
    data[4096] ^= 1
    path.write_bytes(data)
    continued = threading.Event()
    begun, ended = [], []

    class Late:
        def put(self, name: str, start: int, data: memoryview) -> None:
            begun.append(start)
            continued.wait(30)
            ended.append(start)

        def done(self, name: str) -> None:
            raise AssertionError

    class ReleasingFuture(Future):
        """A future whose first call of exception() lets the delayed jobs continue."""

        def exception(self, timeout: float | None = None) -> BaseException | None:
            continued.set()
            return super().exception(timeout)

    class Pool(Executor):
        def submit(self, job: Callable, /, *args: object) -> Future:
            future = ReleasingFuture()

            def run() -> None:
                try:
                    future.set_result(job(*args))
                except BaseException as error:
                    future.set_exception(error)

            threads.submit(run)
            return future

    manifest = commit.read_manifest(disk, generation)
    try:
        with ThreadPoolExecutor(4) as threads:
            with pytest.raises(errors.SumMismatch):
                files = read_file.RankFiles(disk, layout.folder(generation.id), manifest)
                with read_file.borrowed(Arena(4 * 4096, 4096), 4096) as buffers:
                    read_file.stream(files, buffers, Pool(), Late())
            assert continued.is_set() and sorted(begun) == sorted(ended)
    finally:
        continued.set()


def test_a_contradictory_header_is_found_before_a_byte_is_applied(tmp_path: Path) -> None:
    """The chunk digests and the content digests are right; only the header describes other tensors."""
    disk = Disk(PosixFiles(), str(tmp_path))
    run = RunWriter(disk, Inline())
    run.begin(None)
    (image,) = layout.images([layout.Tensor("w", "float32", (COUNT,))])
    lying = Image(image.blob, image.header.replace(b"F32", b"I32"), image.tensors, image.length)
    arena = Arena(4 * CHUNK_BYTES, CHUNK_BYTES)
    content = {"w": torch.ones(COUNT).numpy().tobytes()}
    generation = run.save(
        SaveRequest(
            at=run.admit(1),
            images=[lying],
            chunks=ReadyChunks(harness.filled(lying, content, arena)),
            chunk_bytes=CHUNK_BYTES,
            values={"w": {"!tensor": "w"}},
        )
    )
    run.conclude(generation, [])  # marked as verified without a verification
    state = {"w": torch.zeros(COUNT)}
    with pytest.raises(errors.NothingGood, match="header does not agree"):
        loaded(disk, state)
    assert state["w"].eq(0).all()


def loaded(
    disk: Disk, state: dict, arenas: list[tuple[int, int]] | None = None, **options: object
) -> lastgood.Restored:
    with ThreadPoolExecutor(3) as workers:

        class Lending(ReadOnlyRun):
            def arena(self, total_bytes: int, chunk_bytes: int) -> Arena:
                if arenas is not None:
                    arenas.append((total_bytes, chunk_bytes))
                return super().arena(total_bytes, chunk_bytes)

        request = LoadRequest(state, exclude=("rng",), **options)
        return load(request, Lending(disk, commit.survey(disk), workers), SingleRank())


# ---- a fault in the middle of a restore ------------------------------------------------------------------------


def test_a_half_applied_generation_is_overwritten_by_the_next_older_one(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6)
    flip(tmp_path, 6)
    bare(tmp_path, 6)
    state = blank()
    with reported("step 6: .*chunk 12"):
        assert restore(tmp_path, state).step == 3
    assert is_of(state, 3)
    assert (blob(tmp_path, 6).parent / "DAMAGED.json").exists()


def test_a_half_loaded_state_without_a_good_generation_is_never_saved(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6)
    state = blank()
    with lastgood.Checkpointer(tmp_path, state, memory=1 << 20) as ckpt:
        ckpt.restore()
        for step in (3, 6):
            flip(tmp_path, step)
        with pytest.raises(errors.HalfLoaded, match=r"(?s)step 6: .*chunk 12.*step 3: .*chunk 12.*do not train on it"):
            ckpt.restore()
        with pytest.raises(errors.Refused, match="half of another step"):
            ckpt.save(7)
        for step in (3, 6):
            flip(tmp_path, step)  # the bit is flipped back
            (blob(tmp_path, step).parent / "DAMAGED.json").unlink()
    with lastgood.Checkpointer(tmp_path, state, memory=1 << 20) as ckpt:
        assert ckpt.restore().step == 6
        ckpt.save(7).result()


def test_without_a_fallback_all_is_verified_before_a_byte_is_applied(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    flip(tmp_path, 5)
    bare(tmp_path, 5)
    state = blank()
    with pytest.raises(errors.NothingGood, match=r"step 5: .*chunk 12"):
        restore(tmp_path, state)
    assert untouched(state)


def test_a_requested_step_is_verified_once_before_a_byte_is_applied(tmp_path: Path) -> None:
    saved(tmp_path, 3, 6)
    flip(tmp_path, 6)
    state = blank()
    with pytest.raises(errors.HalfLoaded, match=r"step 6 had begun.*chunk 12"):
        lastgood.load(tmp_path, state, step=6)
    bare(tmp_path, 6)
    state = blank()
    with pytest.raises(errors.SumMismatch, match="chunk 12"):
        lastgood.load(tmp_path, state, step=6)
    assert untouched(state)
    assert lastgood.load(tmp_path, state, step=3).step == 3 and is_of(state, 3)


def test_damage_in_the_first_chunks_leaves_the_state_unchanged(tmp_path: Path) -> None:
    """A state of one chunk is applied as a whole or not at all, however it is read."""
    state = {"w": torch.ones(100)}
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        ckpt.save(1).result()
    data = bytearray(blob(tmp_path, 1).read_bytes())
    data[-1] ^= 1
    blob(tmp_path, 1).write_bytes(data)
    state["w"].zero_()
    with pytest.raises(errors.NothingGood):
        lastgood.load(tmp_path, state)
    assert state["w"].eq(0).all()


def test_with_strict_false_all_is_verified_before_a_byte_is_applied(tmp_path: Path) -> None:
    """An entry that the older generation lacks would keep the value that the damaged generation has left in it."""
    saved(tmp_path, 3, 6)
    flip(tmp_path, 6)
    state = blank() | {"more": torch.zeros(3)}
    with reported("step 6"):
        assert lastgood.load(tmp_path, state, strict=False).step == 3
    assert is_of(state, 3)


def test_with_strict_false_new_optimizer_state_is_verified_first(tmp_path: Path) -> None:
    """The first of two readings left out tensors that the live state did not have yet, such as the moments of an
    optimizer before its first step, so damage in them was found only when the model had been overwritten."""
    model = torch.nn.Linear(64, 64)

    def fresh() -> dict[str, object]:
        torch.manual_seed(1)
        model.reset_parameters()
        return {"model": model, "opt": torch.optim.Adam(model.parameters())}

    state = fresh()
    with lastgood.Checkpointer(tmp_path, state, chunk=4096) as ckpt:
        for step in (3, 6):
            model(torch.ones(64)).sum().backward()
            state["opt"].step()
            ckpt.save(step).result()
        ckpt.wait()
    with safetensors.safe_open(blob(tmp_path, 6), "pt") as file:
        moments = file.get_tensor("opt.state.weight.exp_avg").numpy().tobytes()
    data = bytearray(blob(tmp_path, 6).read_bytes())
    data[data.index(moments) + 9000] ^= 1
    blob(tmp_path, 6).write_bytes(data)
    with reported("step 6"):
        assert lastgood.load(tmp_path, fresh(), strict=False).step == 3


def test_damage_between_verification_and_load_is_a_half_load(tmp_path: Path, monkeypatch) -> None:
    saved(tmp_path, 3, 6)
    real, reads = PosixFile.read_into, iter(range(10**6))

    def breaking(self: PosixFile, mv: memoryview, offset: int) -> int:
        count = real(self, mv, offset)
        if "000000000006" in self._path and offset == 12 * CHUNK_BYTES and next(reads):
            mv[99] ^= 1
        return count

    monkeypatch.setattr(PosixFile, "read_into", breaking)
    state = blank()
    with pytest.raises(errors.HalfLoaded, match=r"step 6 had begun.*chunk 12"):
        restore(tmp_path, state, strict=False)
    assert state["epoch"] == 0


def test_a_bit_flip_in_a_single_read_during_a_load_is_not_damage(tmp_path: Path, monkeypatch) -> None:
    saved(tmp_path, 3, 6)
    real, faults = PosixFile.read_into, iter([True])

    def flipping(self: PosixFile, mv: memoryview, offset: int) -> int:
        count = real(self, mv, offset)
        if "000000000006" in self._path and offset == 12 * CHUNK_BYTES and next(faults, False):
            mv[99] ^= 1
        return count

    monkeypatch.setattr(PosixFile, "read_into", flipping)
    state = blank()
    assert restore(tmp_path, state).step == 6 and is_of(state, 6)
    assert not list(tmp_path.glob("gen/*/DAMAGED.json"))


def test_a_disk_error_during_a_load_is_made_good_by_the_next_restore(tmp_path: Path, faulty_files: FaultyFiles) -> None:
    saved(tmp_path, 3, 6)

    def fail(call: Call) -> None:
        if call.operation == "read" and call.offset == 12 * CHUNK_BYTES:
            raise OSError(errno.ENXIO, "No such device or address")

    state = blank()
    with lastgood.Checkpointer(tmp_path, state, memory=1 << 20) as ckpt:
        ckpt.restore()
        faulty_files.before = fail
        with pytest.raises(errors.HalfLoaded, match="No such device"):
            ckpt.restore()
        with pytest.raises(errors.Refused, match="half of another step"):
            ckpt.save(7)
        faulty_files.before = None
        assert ckpt.restore().step == 6 and is_of(state, 6)


def test_a_fallback_that_does_not_fit_is_a_half_load_with_both_errors(tmp_path: Path) -> None:
    """A plain StateMismatch would state that the live state is unchanged."""
    state = {"v": torch.zeros(3)}
    with lastgood.Checkpointer(tmp_path, state, memory=1 << 20) as ckpt:
        ckpt.save(3).result()
        ckpt.wait()
        state.clear()
        state.update(of_step(6))
        ckpt.save(6).result()
        ckpt.wait()
    flip(tmp_path, 6)
    with pytest.raises(errors.HalfLoaded, match=r"(?s)loading step 6 had begun.*step 3 does not fit"):
        restore(tmp_path, blank())


def test_an_interrupted_restore_is_never_saved(tmp_path: Path, monkeypatch) -> None:
    """In a notebook, the next cell would have continued with a partly loaded state and saved it as a good one."""
    saved(tmp_path, 3)
    state = blank() | {"w": torch.zeros(COUNT)}
    with lastgood.Checkpointer(tmp_path, state, memory=1 << 20) as ckpt:
        ckpt.restore()

        def interrupted(self: TensorSink, name: str) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(TensorSink, "done", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.restore()
        with pytest.raises(errors.Refused, match="half of another step"):
            ckpt.save(4)
        monkeypatch.undo()
        assert ckpt.restore().step == 3


def test_generators_and_values_are_applied_after_the_last_tensor(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    flip(tmp_path, 5, 16)
    state = blank()
    torch.manual_seed(77)
    before = torch.get_rng_state()
    with pytest.raises(errors.HalfLoaded):
        restore(tmp_path, state)
    assert torch.equal(torch.get_rng_state(), before) and state["epoch"] == 0


def test_a_bad_expanded_tensor_is_refused_before_a_byte_is_applied(tmp_path: Path) -> None:
    """Only the content shows the mismatch, so all of it is read before the first byte is applied, whether the
    generation is verified or not."""
    state = {"a": torch.ones(COUNT), "b": torch.arange(3.0).reshape(3, 1) * torch.ones(1, 4)}
    with lastgood.Checkpointer(tmp_path, state, memory=1 << 20) as ckpt:
        ckpt.save(1).result()
    live = {"a": torch.zeros(COUNT), "b": torch.zeros(1, 4).expand(3, 4)}
    with pytest.raises(errors.StateMismatch, match=r"b: expanded here"):
        lastgood.load(tmp_path, live)
    assert live["a"].eq(0).all() and live["b"].eq(0).all()


@pytest.mark.parametrize(
    ("held", "part"),
    [(lambda all_: all_, lambda all_: all_[:1]), (lambda all_: all_[:, :2], lambda all_: all_[:, 1:])],
)
def test_live_tensors_that_share_memory_in_part_need_the_same_bytes(tmp_path: Path, held, part) -> None:
    """Of two views that overlap the one that was written last changed the other, and the load succeeded."""
    live = torch.zeros(3, 3)
    state = {"a": held(live), "b": part(live), "apart": torch.zeros(2)}
    for step in (1, 2):
        ones = torch.ones(3, 3)
        lastgood.save(
            tmp_path / str(step), {"a": held(ones), "b": part(ones) * step, "apart": torch.ones(2)}, step=step
        )
    lastgood.load(tmp_path / "1", state)
    assert held(live).eq(1).all() and part(live).eq(1).all()
    with pytest.raises(errors.LoadFailed, match=r"step 2 does not fit in [ab]: another live tensor shares"):
        lastgood.load(tmp_path / "2", state)


# ---- tensors of every form -------------------------------------------------------------------------------------


def forms(fill: Callable[[int], torch.Tensor]) -> dict[str, object]:
    """Tensors of all forms, each longer than several chunks; `fill(count)` makes the content."""
    many = 300_000
    with torch.inference_mode():
        inference = fill(many)
    tied = fill(many)
    return {
        "run": fill(many).reshape(300, 1000),
        "strided": fill(2 * many)[::2],
        "transposed": fill(many).reshape(300, 1000).T,
        "conj": torch.complex(fill(many), fill(many)).conj(),
        "half": fill(many).to(torch.bfloat16),
        "bool": fill(many) > 0.5,
        "leaf": fill(many).requires_grad_(),
        "inference": inference,
        "scalar": fill(1).reshape(()),
        "empty": fill(0).reshape(0, 4),
        "tied": [tied, tied],
        "expanded": fill(1000).reshape(1, 1000).expand(300, 1000),
        "array": fill(many).numpy(),
        "reversed": fill(many).numpy()[::-1],
    }


def content(one: torch.Tensor | np.ndarray) -> torch.Tensor:
    return torch.from_numpy(one.copy()) if isinstance(one, np.ndarray) else one


def test_tensors_of_every_form_restore_exactly_across_chunks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = forms(torch.rand)
    lastgood.Checkpointer(tmp_path, state, memory=1 << 20).save(1).result()
    fresh = forms(torch.zeros)
    kept = {key: one for key, one in fresh.items() if isinstance(one, torch.Tensor | np.ndarray)}
    lastgood.load(tmp_path, fresh)
    for key, one in state.items():
        pairs = zip(fresh[key], one, strict=True) if key == "tied" else [(fresh[key], one)]
        assert all(torch.equal(content(a), content(b)) for a, b in pairs), key
    assert all(fresh[key] is one for key, one in kept.items())
    assert fresh["tied"][0].data_ptr() == fresh["tied"][1].data_ptr()


def test_new_tensors_are_read_directly_into_their_own_memory(tmp_path: Path) -> None:
    def trained(steps: int) -> dict:
        torch.manual_seed(1)
        model = torch.nn.Linear(600, 600)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            model(torch.randn(2, 600)).square().mean().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    state, fresh = trained(3), trained(0)
    with lastgood.Checkpointer(tmp_path, state, memory=1 << 20) as ckpt:
        ckpt.save(1).result()
    lastgood.load(tmp_path, fresh)
    both = zip(state["optimizer"].state.values(), fresh["optimizer"].state.values(), strict=True)
    assert all(torch.equal(a[key], b[key]) for a, b in both for key in ("step", "exp_avg", "exp_avg_sq"))
    assert len(fresh["optimizer"].state) == 2


def test_a_restore_increments_the_version_counters_of_autograd(tmp_path: Path) -> None:
    """Bytes that are copied without torch's knowledge would let a backward pass continue with weights of another
    step."""
    weight = torch.ones(5, requires_grad=True)
    lastgood.save(tmp_path, {"w": weight})
    loss = weight.square().sum()
    lastgood.load(tmp_path, {"w": weight})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_memory_that_numpy_cannot_write_is_written_through_torch() -> None:
    live = torch.zeros(5)
    place = Place(live)
    place._array = None  # as on a device other than the CPU
    place.put(4, memoryview(bytearray(torch.tensor([3.0, 4.0]).numpy().tobytes())))
    place.done()
    assert live.tolist() == [0, 3, 4, 0, 0]


# ---- memory ----------------------------------------------------------------------------------------------------


class NodeCopies:
    """Stands for the copies on other nodes. Notes the steps that are offered."""

    place = "other nodes"

    def __init__(self) -> None:
        self.offered = list[int]()

    def offer(self, generation: Generation, restored: bool = False) -> Future[None]:
        self.offered.append(generation.step)
        return Future()

    def wait(self, timeout_seconds: float | None) -> None:
        raise AssertionError("a restore that is tried again waits for copies on other nodes")

    def close(self) -> None:
        """There is no thread."""


def test_what_is_restored_gets_its_copies_and_a_failed_restore_too(tmp_path: Path) -> None:
    """After a rewind the copies of the abandoned generation were made; and after a failed restore none at all, so that
    a job that fails again and again never got them back."""
    saved(tmp_path, 1, 2, 3)
    with lastgood.Checkpointer(tmp_path, blank()) as ckpt:
        copies = ckpt._pipeline.places.copies = NodeCopies()
        ckpt.restore()
        ckpt.restore(step=1)
        assert copies.offered == [3, 1]
        ckpt._pipeline.places.copies = None
    with lastgood.Checkpointer(tmp_path, blank()) as ckpt:
        copies = ckpt._pipeline.places.copies = NodeCopies()
        ckpt.restore(step=0)
        assert copies.offered == []
        ckpt._pipeline.places.copies = None
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3), "epoch": 0}) as ckpt:
        copies = ckpt._pipeline.places.copies = NodeCopies()
        with pytest.raises(errors.StateMismatch):
            ckpt.restore()
        assert copies.offered == [3]
        ckpt._pipeline.places.copies = None


def test_a_restore_of_a_single_rank_encodes_no_survey(tmp_path: Path, monkeypatch) -> None:
    """A world of one encoded all records of its run, although no other rank receives them."""
    lastgood.save(tmp_path, {"w": torch.ones(3)}, step=1)
    monkeypatch.setattr(RunWriter, "shared_survey", lambda _: pytest.fail("no other rank receives it"))
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(3)}) as ckpt:
        assert ckpt.restore().step == 1


def test_a_restore_allocates_only_its_buffers(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    arenas: list[tuple[int, int]] = []
    state = blank()
    loaded(Disk(PosixFiles(), str(tmp_path)), state, arenas)
    assert arenas == [(read_file.BUFFERS * CHUNK_BYTES, CHUNK_BYTES)] and is_of(state, 3)


def test_only_noncontiguous_tensors_are_gathered_and_one_at_a_time() -> None:
    shape = {name: ("float32", (1000,)) for name in "abc"}
    live = {name: torch.zeros(2000)[::2] for name in "ab"} | {"c": torch.zeros(1000)}
    assert [Place.of(one) is None for one in live.values()] == [True, True, False]
    sink = TensorSink(shape, {"c": [Place(live["c"])]}, {name: [live[name].copy_] for name in "ab"}, {})
    gathered_bytes = []
    for name in "abc":
        data = torch.full((1000,), 7.0).numpy().tobytes()
        for start in (2000, 0):
            sink.put(name, start, memoryview(data)[start : start + 2000])
        gathered_bytes.append(sum(one.nbytes for one in sink._gathered.values()))
        sink.done(name)
    assert gathered_bytes == [4000, 4000, 0]
    assert all(one.eq(7)[:500].all() for one in live.values())


# ---- records ---------------------------------------------------------------------------------------------------


def test_a_manifest_of_exactly_whole_pages_can_be_read(tmp_path: Path) -> None:
    """One generation in 4096 could not be read: its record was read with direct I/O into memory that is not aligned."""
    state = {"w": torch.zeros(3), "note": ""}
    lengths = []
    for step in (1, 2):
        lastgood.save(tmp_path, state, step)
        (manifest,) = tmp_path.glob(f"gen/{step:012d}-*/r00000.manifest.json")
        lengths.append(manifest.stat().st_size)
        state["note"] = "x" * (-lengths[0] % 4096)
    assert lengths[1] % 4096 == 0
    assert lastgood.load(tmp_path, state).step == 2


def test_a_result_of_a_restore_is_printed_in_one_line(tmp_path: Path) -> None:
    """`print(ckpt.restore())` showed 1,000 characters: every field of every record in it."""
    with lastgood.Checkpointer(tmp_path, blank()) as ckpt:
        assert repr(ckpt.restore()) == "<Restored: step 0, nothing to restore>"
    saved(tmp_path, 5, 6)
    flip(tmp_path, 6)
    with lastgood.Checkpointer(tmp_path, blank()) as ckpt:
        found = ckpt.restore()
    assert str(found) == f"<Restored: {found.generation.id}, good, from {tmp_path}, stepped_over: 1>"


@pytest.mark.parametrize("most", [True, False])
def test_tensors_that_share_memory_are_not_read_in_place(tmp_path: Path, monkeypatch, most: bool) -> None:
    """Each would be compared with its digest while the other one is read into the same memory. Where a load wants less
    than most of a generation (`most`), its bytes take another way, and did not ask."""
    windows, whole = list[memoryview | None](), TensorSink.window

    def window(self: TensorSink, name: str, start: int, length: int) -> memoryview | None:
        windows.append(whole(self, name, start, length))
        return windows[-1]

    monkeypatch.setattr(TensorSink, "window", window)
    monkeypatch.setattr(PackedTier, "reads_in_place", lambda self, name: True, raising=False)
    state = {"a": torch.rand(COUNT), "b": torch.rand(COUNT)}
    with lastgood.Checkpointer(
        tmp_path, state | ({} if most else {"c": torch.rand(3 * COUNT)}), memory=1 << 20
    ) as ckpt:
        ckpt.save(1).result()
    apart = {"a": torch.zeros(COUNT), "b": torch.zeros(COUNT)}
    with lastgood.Checkpointer(tmp_path, apart) as ckpt:
        ckpt.restore(strict=most)
    assert torch.equal(apart["a"], state["a"]) and torch.equal(apart["b"], state["b"]) and any(windows)
    windows.clear()
    live = torch.zeros(COUNT + 1000)
    with (
        lastgood.Checkpointer(tmp_path, {"a": live[:COUNT], "b": live[1000:]}) as ckpt,
        pytest.raises(errors.LoadFailed, match="another live tensor shares"),
    ):
        ckpt.restore(strict=most)
    assert windows and not any(windows)

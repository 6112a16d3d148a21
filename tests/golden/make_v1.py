"""The script that made tests/golden/v1, a golden run of format version 1 as then released. It is never run again.

    PYTHONPATH=src:tests/support python tests/golden/make_v1.py tests/golden/v1

Two incarnations: the second went back from step 20 to step 10, so that step 20 of the first is abandoned.
"""

from __future__ import annotations

import sys
from collections import OrderedDict

from harness import Inline, filled
from lastgood.engine.arena import Arena
from lastgood.format import layout, values
from lastgood.io.files import PosixFiles
from lastgood.records import Generation, GenerationId
from lastgood.run.known import Environment
from lastgood.run.save import ReadyChunks, SaveRequest
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk

TENSORS = {  # name -> dtype, shape, bytes; the last byte of each is the step
    "model.weight": ("float32", (2, 3), bytes(range(23))),
    "model.bias": ("bfloat16", (3,), bytes.fromhex("803f0040 40")),
    "model.half": ("float16", (2,), bytes.fromhex("003c00")),
    "model.scale": ("float8_e4m3fn", (2,), bytes.fromhex("38")),
    "model.wave": ("complex64", (1,), bytes.fromhex("0000803f 000000")),
    "model.wide wave": ("complex128", (1,), bytes.fromhex("000000000000f03f 00000000000000")),
    "model.packed": ("float4_e2m1fn_x2", (3,), bytes.fromhex("1234")),
    "optimizer.step": ("float64", (), bytes(7)),
    "optimizer.größe": ("int64", (1,), bytes(7)),
    "optimizer.seen": ("bool", (4,), b"\1\0\1"),
    "sampler.order": ("int32", (100,), bytes(range(250)) + bytes(149)),
    "rng.torch": ("uint8", (5000,), bytes(range(250)) * 19 + bytes(249)),
    "nothing": ("float32", (0, 4), b""),
}
VALUES = {
    "epoch": 3,
    "lr": 0.1,
    "loss": float("inf"),
    "big": 2**70,
    "betas": (0.9, 0.999),
    "note": "naïve ✓",
    "raw": b"\x00\xff",
    "none": None,
    "flags": [True, False],
    "by number": {1: "one", 2: "two"},
    "ordered": OrderedDict(b=1, a=2),
    "set": {7},
}


def save(writer: RunWriter, step: int, **options: object) -> Generation:
    tensors = {
        name: (dtype, shape, data and data + bytes([1 if dtype == "bool" else step]))
        for name, (dtype, shape, data) in TENSORS.items()
    }
    images = layout.images(layout.Tensor(name, dtype, shape) for name, (dtype, shape, _) in tensors.items())
    arena = Arena(16384, 4096)
    state = {name: data for name, (_, _, data) in tensors.items()}
    chunks = (lease for image in images for lease in filled(image, state, arena))
    stored = {"run": values.encode({**VALUES, "step": step}, "run")}
    return writer.save(
        SaveRequest(
            at=writer.admit(step),
            images=images,
            chunks=ReadyChunks(chunks),
            chunk_bytes=4096,
            aliases={"model.tied": "model.weight"},
            values=stored,
            **options,
        )
    )


def main(root: str) -> None:
    ids = iter(["5a3b0001", "9f3ac21b", "0d15ea5e"])
    tier, reading = Disk(PosixFiles(), root), Arena(3 * 4096, 4096)
    writer = RunWriter(
        tier, Inline(), environment=Environment(new_id=lambda: next(ids), wall_seconds=lambda: 1_795_000_000.0)
    )
    writer.begin(None)
    save(writer, 10, milestone=True, metrics={"loss": 2.5})
    writer.verify(reading)
    save(writer, 20, metrics={"loss": 1.25})
    writer.verify(reading)
    writer.begin(GenerationId(step=10, incarnation="9f3ac21b"))
    save(writer, 20, metrics={"loss": 0.5})
    writer.verify(reading)
    save(writer, 30)


if __name__ == "__main__":
    main(sys.argv[1])

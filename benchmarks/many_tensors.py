"""Cost of a save as the number of tensors grows, 10 to 100,000: what the loop waits for, what runs behind it, memory.

    python benchmarks/many_tensors.py [--rounds 5] [--most 100000] [--dir DIR]

Tensors of 16 numbers: parameters and their AdamW state, so that hardly anything is copied and the overhead stays. The
plan of the capture is warm. Each part is measured alone, in the thread's own processor time (other programs do not
count); then whole saves by the clock. Writes a JSON and a markdown table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lastgood
from lastgood.engine.contents import Contents
from lastgood.format import layout
from lastgood.records import Blob, GenerationId, Manifest
from lastgood.train import staging
from lastgood.train.state import Capture

WIDTH = 16
HELD_SAVES = 4
"""whose metadata is held at once to measure it"""


def build(tensors: int) -> dict[str, Any]:
    """A model of modules with ten parameters each, and an optimizer with three tensors for each of them."""
    parameters = max(1, tensors // 4)
    model = nn.ModuleList(
        nn.ParameterList([nn.Parameter(torch.randn(WIDTH)) for _ in range(min(10, parameters - start))])
        for start in range(0, parameters, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for one in model.parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def parts_of(state: dict[str, Any], rounds: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of each part of a save, and bytes of metadata for each tensor of one save in flight."""
    seconds: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        begun = time.thread_time()
        found = work()
        seconds.setdefault(name, []).append(time.thread_time() - begun)
        return found

    plan, chunk_bytes, kept = Capture(), layout.CHUNK_BYTES, []
    timed("first capture", lambda: plan.take(state))
    tensors = plan.take(state).tensors
    images = timed("first layout", lambda: staging.lay_out(tensors))
    timed("first segments", lambda: list(layout.segments(images[0], chunk_bytes)))
    memory = memoryview(bytearray(images[0].length))
    before = 0

    def digests(image: layout.Image) -> Contents:
        found = Contents(image, "xxh3_128")
        for at in range(0, image.length, chunk_bytes):
            found.see(memory[at : min(at + chunk_bytes, image.length)])
        return found

    for number in range(rounds + HELD_SAVES):
        if number == rounds:
            kept, before = [], resident_bytes()
        captured = timed("capture", lambda: plan.take(state))
        contents = timed("digests", lambda: digests(images[0]))
        pieces = timed("pieces", contents.pieces)
        sums = ["0" * 32] * -(-images[0].length // chunk_bytes)
        blob = Blob(name=images[0].blob, length=images[0].length, chunk_bytes=chunk_bytes, chunks=sums)
        manifest = Manifest(
            format=layout.FORMAT,
            step=1,
            incarnation="00000000",
            rank=0,
            digest="xxh3_128",
            blobs=[blob],
            pieces=pieces,
            aliases=captured.aliases,
            values=captured.values,
        )
        data = timed("encode", lambda manifest=manifest: layout.encode(manifest))
        if number == 0:
            at = GenerationId(step=1, incarnation="00000000")
            layout.validate_manifest(layout.decode(data, Manifest, "it"), at, 0)
        if number >= rounds:
            kept.append((captured, manifest, data))
    held = (resident_bytes() - before) / HELD_SAVES / len(captured.tensors)
    assert plan.walks == 2 and captured.key == 1
    return {name: values[:rounds] for name, values in seconds.items()}, held


def whole(state: dict[str, Any], work: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds by the clock of whole saves: until the loop goes on, and until durable."""
    found: dict[str, list[float]] = {"save waits": [], "save durable": []}
    with lastgood.Checkpointer(work / "run", state, retention=lastgood.Keep(last=1)) as ckpt:
        ckpt.restore()
        for step in range(1, rounds + 3):
            begun = time.perf_counter()
            save = ckpt.save(step)
            waited = time.perf_counter() - begun
            save.result()
            if step > 2:  # the first walks, lays out, and touches the arena for the first time
                found["save waits"].append(waited)
                found["save durable"].append(time.perf_counter() - begun)
            ckpt.wait()
    shutil.rmtree(work / "run")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=int, default=100_000)
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: beside this script)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    work = Path(tempfile.mkdtemp(prefix="bench-", dir=options.dir or Path(__file__).parent))
    results: dict[int, dict[str, Any]] = {}
    try:
        for tensors in (size for size in (10, 100, 1000, 10_000, 100_000) if size <= options.most):
            state = build(tensors)
            parts, held = parts_of(state, options.rounds)
            results[tensors] = {**parts, **whole(state, work, options.rounds), "metadata bytes for each tensor": held}
            print(f"{tensors:,} tensors done", flush=True)
    finally:
        shutil.rmtree(work)

    names = [name for name in next(iter(results.values())) if not name.startswith("metadata")]
    warm = ("capture", "digests", "pieces", "encode")
    date = datetime.date.today().isoformat()
    machine = f"{os.cpu_count()} cores {platform.machine()}, Linux {platform.release().split('-')[0]}"
    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    lines = [
        "# Cost of a save by the number of tensors",
        "",
        f"{date}, {machine}, torch {torch.__version__}; `{command}`; medians of {options.rounds}, in ms.",
        "",
        "| tensors | " + " | ".join(names) + " | capture to encode | metadata, bytes for each tensor |",
        "|---" * (len(names) + 3) + "|",
    ]
    for tensors, found in results.items():
        middle = {name: 1000 * statistics.median(found[name]) for name in names}
        cells = [f"{middle[name]:.2f}" for name in names]
        total, held = sum(middle[name] for name in warm), found["metadata bytes for each tensor"]
        lines.append(f"| {tensors:,} | " + " | ".join(cells) + f" | {total:.2f} | {held:.0f} |")
    lines += [
        "",
        "Parts in processor time of their thread; the capture is the loop's, what comes after it runs behind. What is",
        "first can be kept for as long as names, dtypes and shapes stay. Aims: capture to encode <= 500 ms for 100,000",
        "tensors, growth no worse than linear; metadata <= 1,024 bytes for each tensor of a save in flight.",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"many-tensors-{date}-{os.cpu_count()}core"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    record = {"date": date, "machine": machine, "command": command, "seconds": results}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

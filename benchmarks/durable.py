"""Durable write of a GPT-2-size AdamW state: this package, torch.save, DCP and a raw direct write, in one run.

    python benchmarks/durable.py [--rounds 5] [--dir DIR] [--scale 1.0]

Each round does every contender once, in an order that rotates, so that a drift of the machine meets all of them.
"Caller waits" is the time until the training loop may go on; "durable" ends when the bytes and names are fsynced, with
the syncs that a contender leaves out added by this script. Writes a JSON and a markdown table to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import datetime
import json
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import lastgood

CHUNK_BYTES = 8 << 20
Timing = tuple[float, float]  # caller waits, durable


class Gpt2(nn.Module):
    """The parameters of GPT-2 124M by name and shape; nothing is ever computed with them."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        width = int(768 * scale**0.5) // 2 * 2
        self.wte = nn.Embedding(int(50257 * scale**0.5), width)
        self.wpe = nn.Embedding(1024, width)
        self.h = nn.ModuleList(
            nn.ModuleDict(
                {
                    "ln_1": nn.LayerNorm(width),
                    "c_attn": nn.Linear(width, 3 * width),
                    "c_proj": nn.Linear(width, width),
                    "ln_2": nn.LayerNorm(width),
                    "c_fc": nn.Linear(width, 4 * width),
                    "mlp_proj": nn.Linear(4 * width, width),
                }
            )
            for _ in range(12)
        )
        self.ln_f = nn.LayerNorm(width)


def build(scale: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Gpt2(scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def sync_tree(root: Path) -> None:
    """fsync every file and directory below root, and the directory above it."""
    for folder, _, files in os.walk(root):
        for name in [*(os.path.join(folder, one) for one in files), folder]:
            fd = os.open(name, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    fd = os.open(root.parent, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def raw_direct(work: Path, buffer: mmap.mmap, size: int, threads: int) -> Timing:
    """The same number of bytes from warm, aligned memory: O_DIRECT into a preallocated file, then fsync."""
    path = work / "raw"
    view = memoryview(buffer)
    begun = time.perf_counter()
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    os.posix_fallocate(fd, 0, size)

    def put(offset: int) -> None:
        at = offset % len(buffer)
        os.pwrite(fd, view[at : at + CHUNK_BYTES], offset)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(put, range(0, size, CHUNK_BYTES)))
    os.fsync(fd)
    os.close(fd)
    seconds = time.perf_counter() - begun
    path.unlink()
    return seconds, seconds


def torch_save(work: Path, state: dict[str, object]) -> Timing:
    """torch.save to a temporary name, fsync, rename, fsync of the directory."""
    path = work / "state.pt"
    begun = time.perf_counter()
    with open(path.with_suffix(".tmp"), "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path.with_suffix(".tmp"), path)
    fd = os.open(work, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    seconds = time.perf_counter() - begun
    path.unlink()
    return seconds, seconds


def dcp_save(work: Path, state: dict[str, object], threads: int) -> Timing:
    """dcp.save with its default sync_files=True, then the syncs it leaves out (metadata, directory)."""
    path = work / "dcp"
    begun = time.perf_counter()
    writer = dcp.FileSystemWriter(str(path), thread_count=threads, single_file_per_rank=False)
    dcp.save(state, storage_writer=writer, no_dist=True)
    waited = time.perf_counter() - begun
    sync_tree(path)
    seconds = time.perf_counter() - begun
    shutil.rmtree(path)
    return waited, seconds


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of parameters, for a quick look")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: beside this script)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    model, optimizer = build(options.scale)
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    work = Path(tempfile.mkdtemp(prefix="bench-", dir=options.dir or Path(__file__).parent))
    step = 0
    try:
        run = work / "run"
        state: dict[str, object] = {"model": model, "optimizer": optimizer}
        with lastgood.Checkpointer(run, state, retention=lastgood.Keep(last=1)) as ckpt:
            ckpt.restore()
            step += 1
            size = ckpt.save(step).result().bytes  # the first save touches the arena's memory for the first time
            ckpt.wait()
            buffer = mmap.mmap(-1, 64 << 20, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)

            def ours() -> Timing:
                nonlocal step
                step += 1
                begun = time.perf_counter()
                save = ckpt.save(step)
                waited = time.perf_counter() - begun
                save.result()
                seconds = time.perf_counter() - begun
                ckpt.wait()  # verification and deletion are not this contender's neighbours' burden
                return waited, seconds

            contenders: dict[str, Callable[[], Timing]] = {
                "raw direct write, 3 threads": lambda: raw_direct(work, buffer, size, 3),
                "lastgood (xxh3-128 digests, commit)": ours,
                "torch.save + fsync + rename + dirsync": lambda: torch_save(work, plain),
                "DCP, 1 thread, + missing fsyncs": lambda: dcp_save(work, plain, 1),
                "DCP, 4 threads, + missing fsyncs": lambda: dcp_save(work, plain, 4),
            }
            names = list(contenders)
            timings: dict[str, list[Timing]] = {name: [] for name in names}
            for number in range(options.rounds):
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    os.sync()
                    timings[name].append(contenders[name]())
                    waited, durable = timings[name][-1]
                    print(f"round {number + 1}  {name:40s} waits {waited:6.3f} s  durable {durable:6.3f} s", flush=True)
    finally:
        shutil.rmtree(work)

    raw, best = names[0], min(names[3:], key=lambda name: statistics.median(one[1] for one in timings[name]))
    ours_name = names[1]

    def ratio(other: str) -> list[float]:
        return [theirs[1] / mine[1] for theirs, mine in zip(timings[other], timings[ours_name], strict=True)]

    date = datetime.date.today().isoformat()
    machine = f"{os.cpu_count()} cores {platform.machine()}, Linux {platform.release().split('-')[0]}"
    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    lines = [
        f"# Durable write, {size / 1e9:.2f} GB GPT-2-size AdamW state",
        "",
        f"{date}, {machine}, torch {torch.__version__}; `{command}`; medians of {options.rounds}, (min-max).",
        "",
        "| contender | caller waits, s | durable, s | durable GB/s |",
        "|---|---|---|---|",
    ]
    for name in names:
        waits, durable = ([one[at] for one in timings[name]] for at in (0, 1))
        speed = size / 1e9 / statistics.median(durable)
        lines.append(f"| {name} | {spread(waits)} | {spread(durable)} | {speed:.2f} |")
    lines += [
        "",
        f"- speed against raw, round by round: {spread(ratio(raw))} (aim >= 0.7)",
        f"- speed against the best of DCP ({best}), round by round: {spread(ratio(best))} (aim >= 1.5)",
        f"- speed against torch.save, round by round: {spread(ratio(names[2]))}",
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"durable-{date}-{os.cpu_count()}core"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    record = {"date": date, "machine": machine, "command": command, "bytes": size, "seconds": timings}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

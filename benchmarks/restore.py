"""Restore of a GPT-2-size AdamW state: this package, torch.load, DCP and a raw direct read of it, in one run.

    python benchmarks/restore.py [--rounds 5] [--dir DIR] [--scale 1.0]

Each round does every contender once, in an order that rotates, so that a drift of the machine meets all of them; before
each, everything is synced and dropped from the page cache. "Raw" reads the tensor file with O_DIRECT into one reused
buffer (huge pages, touched before) for each thread and looks at nothing. Every other contender ends with the state in
the live tensors, but for the plain torch.load. Writes a JSON and a markdown table to benchmarks/results/.
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
from lastgood.lab.durable import CHUNK_BYTES
from lastgood.lab.models import MODELS

RAW_THREADS = (1, 2, 3, 4)


def build(scale: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = MODELS["gpt2-124m"].build(scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model, optimizer


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def drop_from_cache(root: Path) -> None:
    os.sync()
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def reused_buffer(length: int) -> mmap.mmap:
    """In huge pages: direct I/O into small ones is slower, and raw is to be as fast as it can be."""
    buffer = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer[:] = bytes(length)
    return buffer


def raw_direct(path: Path, buffer: mmap.mmap, threads: int) -> float:
    size = path.stat().st_size
    view = memoryview(buffer)
    begun = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def get(thread: int) -> None:
        mine = view[thread * CHUNK_BYTES :][:CHUNK_BYTES]
        for offset in range(thread * CHUNK_BYTES, size, threads * CHUNK_BYTES):
            assert os.preadv(fd, [mine], offset) == min(CHUNK_BYTES, size - offset)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(get, range(threads)))
    os.close(fd)
    return time.perf_counter() - begun


def ours(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """A new Checkpointer each time, whose buffers are new too; the restore alone is timed."""
    with lastgood.Checkpointer(run, {"model": model, "optimizer": optimizer}) as ckpt:
        begun = time.perf_counter()
        assert ckpt.restore().step == 1
        return time.perf_counter() - begun


def tensors_of(state: object) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [one for part in inner for one in tensors_of(part)]


def torch_load(path: Path, live: dict[str, object] | None, **options: bool) -> float:
    begun = time.perf_counter()
    found = torch.load(path, weights_only=True, **options)
    if live is not None:
        with torch.no_grad():
            for mine, theirs in zip(tensors_of(live), tensors_of(found), strict=True):
                mine.copy_(theirs)
    return time.perf_counter() - begun


def dcp_load(path: Path, live: dict[str, object]) -> float:
    begun = time.perf_counter()
    dcp.load(live, storage_reader=dcp.FileSystemReader(str(path)), no_dist=True)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of parameters, for a quick look")
    parser.add_argument("--dir", type=Path, default=None, help="where to write (default: beside this script)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    warnings.simplefilter("ignore")

    model, optimizer = build(options.scale)
    live = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    work = Path(tempfile.mkdtemp(prefix="bench-", dir=options.dir or Path(__file__).parent))
    try:
        with lastgood.Checkpointer(work / "run", {"model": model, "optimizer": optimizer}) as ckpt:
            size = ckpt.save(1).result().bytes
        (blob,) = work.glob("run/gen/*/*.safetensors")
        torch.save(live, work / "state.pt")
        dcp.save(live, storage_writer=dcp.FileSystemWriter(str(work / "dcp")), no_dist=True)
        buffer = reused_buffer(max(RAW_THREADS) * CHUNK_BYTES)

        def into_new_optimizer() -> float:
            return ours(work / "run", model, torch.optim.AdamW(model.parameters()))

        contenders: dict[str, Callable[[], float]] = {
            **{
                f"raw direct read, {count} thread{'s'[: count - 1]}": lambda count=count: raw_direct(
                    blob, buffer, count
                )
                for count in RAW_THREADS
            },
            "lastgood, verified, in place": lambda: ours(work / "run", model, optimizer),
            "lastgood, verified, optimizer state new": into_new_optimizer,
            "torch.load": lambda: torch_load(work / "state.pt", None),
            "torch.load + copy in place": lambda: torch_load(work / "state.pt", live),
            "torch.load(mmap=True) + copy in place": lambda: torch_load(work / "state.pt", live, mmap=True),
            "dcp.load, in place": lambda: dcp_load(work / "dcp", live),
        }
        names = list(contenders)
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for number in range(options.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                drop_from_cache(work)
                seconds[name].append(contenders[name]())
                print(f"round {number + 1}  {name:40s} {seconds[name][-1]:6.3f} s", flush=True)
    finally:
        shutil.rmtree(work)

    raw = min(names[: len(RAW_THREADS)], key=lambda name: statistics.median(seconds[name]))
    mine, fresh = names[len(RAW_THREADS) : len(RAW_THREADS) + 2]

    def ratio(other: str, one: str = mine) -> str:
        return spread([theirs / ours for theirs, ours in zip(seconds[other], seconds[one], strict=True)])

    date = datetime.date.today().isoformat()
    machine = f"{os.cpu_count()} cores {platform.machine()}, Linux {platform.release().split('-')[0]}"
    command = "python benchmarks/" + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    lines = [
        f"# Restore, {size / 1e9:.2f} GB GPT-2-size AdamW state",
        "",
        f"{date}, {machine}, torch {torch.__version__}; `{command}`; medians of {options.rounds}, (min-max); "
        "page cache dropped before each.",
        "",
        "| contender | s | GB/s |",
        "|---|---|---|",
        *(
            f"| {name} | {spread(seconds[name])} | {size / 1e9 / statistics.median(seconds[name]):.2f} |"
            for name in names
        ),
        "",
        f"- speed of lastgood in place against the best raw ({raw}), round by round: {ratio(raw)} (aim >= 0.85)",
        f"- the same where a third of the memory is there and two thirds are new: {ratio(raw, fresh)}",
        *(f"- speed of lastgood in place against {name}: {ratio(name)}" for name in names[len(RAW_THREADS) + 2 :]),
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    stem = options.out / f"restore-{date}-{os.cpu_count()}core"
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n")
    record = {"date": date, "machine": machine, "command": command, "bytes": size, "seconds": seconds}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()

"""Small runs on disk for tests of the command line: written, and read back file by file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness import save
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.format import layout
from lastgood.records import Generation
from lastgood.run import access
from lastgood.run.writer import RunWriter

STATE = {"model.h.0.weight": b"a" * 6000, "model.h.1.weight": b"b" * 3000, "optimizer.exp_avg": b"c" * 9000}
DATA = layout.blob_name(0)


def writing(
    root: Path, *steps: int, after: int | None = None, verified: bool = True, **options: Any
) -> list[Generation]:
    """Save these steps in a new incarnation that continues step `after` (default: the newest generation)."""
    made = []
    with access.for_writing(root, "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline())
        chain = [one for one in run.lineage() if after in (None, one.step)]
        run.begin(chain[0].id if chain else None)
        for step in steps:
            made.append(save(run, step, {**STATE, "counter": b"%d" % step}, **options))
            if verified:
                run.verify(Arena(1 << 16, 8192))
    return made


def contents(root: Path) -> dict[str, bytes | None]:
    """Every path below `root` with its bytes, except the lock file that opening for writing leaves."""
    return {
        str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in root.rglob("*") if p.name != ".lock"
    }


def at(root: Path, step: int) -> Path:
    (path,) = root.glob(f"gen/{step:012d}-*")
    return path

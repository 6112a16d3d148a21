"""What several campaigns share: how a victim is started, a folder in memory, and the line of progress."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lastgood
import lastgood_lab

VICTIM = [sys.executable, "-S", "-m", "lastgood_lab.campaigns.victim"]


def environment(at: Path) -> dict[str, str]:
    """Environment of a victim: the sources, and a folder for compiled modules, so that each start is fast and equal."""
    sources = [str(Path(one.__path__[0]).resolve().parent) for one in (lastgood, lastgood_lab)]
    paths = [*sources, *filter(None, sys.path)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ours = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONPYCACHEPREFIX": str(at / "pyc"), "PYTHONHASHSEED": "0"}
    return {**kept, **ours}


@contextlib.contextmanager
def in_memory() -> Iterator[Path]:
    """A temporary folder in memory if the system has one; kills and injected errors need no real disk."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as folder:
        yield Path(folder)


def progress(total: int) -> Callable[[int, int], None]:
    """A function that prints the progress of `total` trials, given those done and those with a violation."""
    begun = time.monotonic()

    def show(done: int, wrong: int) -> None:
        if done % 20 == 0 or done == total:
            print(
                f"\r{done:,} of {total:,} trials, {wrong} with violations, {time.monotonic() - begun:.0f} s",
                end="",
                flush=True,
            )
            print(end="\n" if done == total else "")

    return show

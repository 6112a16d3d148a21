"""Where the runs of the study are saved: on the disk, in an object store, or in memory, each real. Trains nothing.

Whatever the storage is, a run is a directory when its unit has ended, so that checkpoints are compared there.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

from lastgood.run import memory_place

from ..object_server import ObjectServer, make_bucket
from ..trace_cluster import kill_all
from .unit import Unit

URL = "s3://study/"


@dataclass(frozen=True)
class Storage:
    """`url`: of the run. `environment`: of the processes of the job, beside that of this process. `memory`: folder in
    memory, in which each node has one of its own."""

    url: str
    memory: Path
    environment: dict[str, str] = field(default_factory=dict)


@contextlib.contextmanager
def opened(unit: Unit, run: Path) -> Iterator[Storage]:
    """The storage of a unit. `run`: the directory in which the run is at the end of the block."""
    with contextlib.ExitStack() as held:
        memory = held.enter_context(_memory())
        if unit.storage == "objects":
            folder = Path(held.enter_context(tempfile.TemporaryDirectory(dir=run.parent)))
            environment = held.enter_context(ObjectServer(folder / "server")).environment()
            held.enter_context(mock.patch.dict(os.environ, environment))
            make_bucket(url := URL + run.name)
            yield Storage(url, memory, environment)
            subprocess.run(
                [sys.executable, "-m", "lastgood", "copy", url, str(run), "--json"],
                check=False,
                stdout=subprocess.DEVNULL,
            )
        else:
            yield Storage(str(run), memory)


@contextlib.contextmanager
def _memory() -> Iterator[Path]:
    """A folder in memory. What its nodes have started, such as their agents, has ended at the end of the block."""
    memory = Path(tempfile.mkdtemp(prefix="study-", dir=memory_place.DEFAULT))
    try:
        yield memory
    finally:
        for home in memory.iterdir():
            kill_all(str(home))
        shutil.rmtree(memory)

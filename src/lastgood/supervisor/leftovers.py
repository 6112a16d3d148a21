"""Folders that a supervisor uses while it runs, and removal of those that a killed one has left.

Invariant: a folder is removed only by who holds its lock, which the kernel releases at the end of its process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

LOCK = ".lock"


@contextlib.contextmanager
def folder(prefix: str, parent: str) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end of the block. Those of ended processes are removed first.

    `prefix`: of its name. Raises OSError.
    """
    remove_left(prefix, parent)
    path = tempfile.mkdtemp(prefix=prefix, dir=parent)
    try:
        with open(os.path.join(path, LOCK), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_left(prefix: str, parent: str) -> None:
    """Remove the folders of this name that no process uses. What belongs to another user stays. Raises nothing."""
    with contextlib.suppress(OSError):
        for one in os.scandir(parent):
            if one.name.startswith(prefix) and one.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError), open(os.path.join(one.path, LOCK)) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: folder-in-use-not-removed
                    shutil.rmtree(one.path, ignore_errors=True)

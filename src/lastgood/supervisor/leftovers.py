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
        with open(os.path.join(path, f"{LOCK}.new"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(lock.name, os.path.join(path, LOCK))  # nobody finds it before it is locked
            yield Path(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def remove_left(prefix: str, parent: str) -> None:
    """Remove the folders of this name that no process uses. What belongs to another user stays. Raises nothing."""
    with contextlib.suppress(OSError):
        for one in os.scandir(parent):
            if one.name.startswith(prefix) and one.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    _remove_unless_used(one.path)


def _remove_unless_used(path: str) -> None:
    if os.lstat(path).st_uid != os.geteuid():
        return
    # Without waiting: another user may have put a pipe there, where the parent is open to all.
    lock = os.open(os.path.join(path, LOCK), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: folder-in-use-not-removed
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(lock)

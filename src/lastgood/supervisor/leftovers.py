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

from ..io import os_errors

LOCK = ".lock"


@contextlib.contextmanager
def folder(prefix: str, parent: str | None, full: str) -> Iterator[Path]:
    """A new folder in `parent`, removed at the end of the block. Those of ended processes are removed first.

    `prefix`: of its name. `parent`: None: the folder for temporary files. `full`: what can be done if that is full.
    Raises NoSpace or TierDown.
    """
    path, lock = "", None
    try:
        with os_errors.needed(f"no folder can be made in {parent or 'the folder for temporary files'}", full):
            parent = parent or tempfile.gettempdir()
            remove_left(prefix, parent)
            path = tempfile.mkdtemp(prefix=prefix, dir=parent)
            lock = os.open(os.path.join(path, f"{LOCK}.new"), os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.rename(os.path.join(path, f"{LOCK}.new"), os.path.join(path, LOCK))  # found only once it is locked
        yield Path(path)
    finally:
        if path:
            shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def of_attempt(folder: Path, number: int) -> Path:
    """Make the folder of an attempt: `attempt_7`, or `attempt_7.2` where all nodes have left the first one without a
    verdict, and live it anew. What the first one has left stays. Raises OSError."""
    path, again = folder / f"attempt_{number}", 1
    while path.exists():  # guard: attempt-may-be-lived-anew
        again += 1
        path = folder / f"attempt_{number}.{again}"
    path.mkdir()
    return path


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

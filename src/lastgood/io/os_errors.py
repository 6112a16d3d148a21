"""OSError -> the package's errors: one table for what lies inside a run, and one for paths that a person gave.

Each row groups the errno values that mean the same: which error class they become, what is still safe, and what to do.
The first row that lists the errno counts. An errno in no row becomes TierDown, which may be retried.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import Damaged, LastgoodError, MissingBlob, NoSpace, NotWritable, Refused, TierDown

USED_UP = frozenset({errno.ENOSPC, errno.EDQUOT})
"""the disk or the quota is used up"""
FULL = USED_UP | {errno.EFBIG}
"""as USED_UP, or the file is longer than it may be"""
NOT_PERMITTED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
NOT_A_FILE = frozenset({errno.ELOOP, errno.EISDIR, errno.ESPIPE})
"""a symbolic link, a folder or a pipe stands where a regular file is expected"""
WRONG_PATH = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.EINVAL})
NOT_SUPPORTED = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS})
"""this file system lacks the operation, for example locks on some network mounts"""
UNREADABLE = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""the medium cannot return the bytes of a read, or the file system has found them to be corrupt"""


class NoMemory(OSError):
    """ENOSPC for a file in memory. `what`: what is full. `todo`: the remedy, which is not that of a full disk."""

    def __init__(self, what: str, path: str, todo: str) -> None:
        super().__init__(errno.ENOSPC, what, path)
        self.todo = todo


class Row(NamedTuple):
    """What a group of errno values means."""

    errnos: frozenset[int]
    error: type[LastgoodError]
    what: str
    """the beginning of the message; the path and the system's own words follow"""
    safe: str = ""
    todo: str = ""


NO_SPACE = "no space left for"
_COMMITTED = "Every committed generation is untouched"
_SHORTER = (
    "Raise the limit on the length of files (ulimit -f unlimited; LimitFSIZE= in a unit of systemd), or save to a file "
    "system, or an object store, that takes files of this length."
)
IN_A_RUN = (
    Row(frozenset({errno.EFBIG}), NoSpace, "longer than a file may be:", f"{_COMMITTED}.", _SHORTER),
    Row(
        USED_UP,
        NoSpace,
        NO_SPACE,
        f"{_COMMITTED}, and training can go on.",
        "Free space on this disk, or keep fewer generations (retention=Keep(...)).",
    ),
    Row(frozenset({errno.ENOENT}), MissingBlob, "missing:"),
    Row(NOT_A_FILE, MissingBlob, "a link, folder or pipe where a file was committed:"),
    Row(NOT_PERMITTED, NotWritable, "not permitted:", "Nothing was changed.", "Check the owner and the mount."),
)
_AT_ANY_OTHER = Row(frozenset(), TierDown, "the disk failed:")
_NO_THREAD = "can't start new thread"
"""what Python says where the limit permits no further thread; such a limit is one of processes, too"""
_MORE_PROCESSES = "Raise the limit of processes: ulimit -u, pids.max of the cgroup."
TO_START = (
    Row(USED_UP, NoSpace, ""),
    Row(frozenset({errno.EAGAIN}), TierDown, "", "", _MORE_PROCESSES),
    Row(frozenset({errno.EMFILE, errno.ENFILE}), TierDown, "", "", "Raise the limit of open files: ulimit -n."),
    Row(frozenset({errno.ENOMEM}), TierDown, "", "", "Free memory on this machine, or give the container more."),
)
"""for what a job needs before its ranks run; `needed` is given the remedy of a full place"""
AT_A_PATH = (
    Row(frozenset({errno.EFBIG}), NoSpace, "longer than a file may be:", "", _SHORTER),
    Row(USED_UP, NoSpace, NO_SPACE, "", "Free space on this disk, or give another place."),
    Row(WRONG_PATH, Refused, "", "", "Check the path."),
    Row(
        NOT_PERMITTED | NOT_SUPPORTED | {errno.ELOOP},  # a symbolic link where none is followed
        NotWritable,
        "",
        "",
        "Check the owner, the permissions and the mount; to read a run only, use lastgood.open or lastgood.load.",
    ),
)


def in_run(error: OSError, place: str, blob: str) -> LastgoodError:
    """The error for a call on the file `blob` of the run at `place`."""
    row = _row(IN_A_RUN, error)
    what = f"{row.what} {os.path.join(place, blob)}: {error.strerror or error}"
    if issubclass(row.error, Damaged):
        return row.error(what, blob=blob)
    todo = error.todo if isinstance(error, NoMemory) else row.todo
    return row.error(what, safe=row.safe or f"{_COMMITTED}.", todo=todo)


def at_path(error: OSError, path: str) -> LastgoodError:
    """The error for a call on a path that a person gave. If such a call fails, it has changed nothing."""
    row = _row(AT_A_PATH, error)
    what = f"{row.what} {path}: {error.strerror or error}".strip()
    return row.error(what, safe="Nothing was changed.", todo=row.todo)


@contextlib.contextmanager
def translated(path: str) -> Iterator[None]:
    """Raise each OSError of the block as the error of `at_path`."""
    try:
        yield
    except OSError as error:
        raise at_path(error, path) from error


@contextlib.contextmanager
def needed(what: str, full: str) -> Iterator[None]:
    """Raise each OSError of the block, which makes what a job needs before its ranks run, as NoSpace or TierDown; and
    that it can start no thread, as `threads` does.

    `what`: what cannot be then, with the place. `full`: the remedy if that place is full.
    """
    safe = "No rank of this attempt is left, and every committed generation is untouched."
    try:
        with threads(what, safe):
            yield
    except OSError as error:
        row = _row(TO_START, error)
        at = f": {error.filename}" if error.filename is not None and os.fspath(error.filename) not in what else ""
        raise row.error(
            f"{what}: {error.strerror or error}{at}",
            safe=safe,
            todo=row.todo or (full if row.error is NoSpace else "Mend that, and start the job again."),
        ) from error


@contextlib.contextmanager
def threads(what: str, safe: str) -> Iterator[None]:
    """Raise as TierDown that the block can start no thread, because there may be no more: Python raises a RuntimeError.

    `what`: what cannot be then. `safe`: what is safe then.
    """
    try:
        yield
    except RuntimeError as error:
        if str(error) != _NO_THREAD:
            raise
        raise TierDown(f"{what}: {error}", safe=safe, todo=_MORE_PROCESSES) from error


def _row(table: tuple[Row, ...], error: OSError) -> Row:
    return next((row for row in table if error.errno in row.errnos), _AT_ANY_OTHER)

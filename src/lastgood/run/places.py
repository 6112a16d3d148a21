"""Opening a place for a run: is it ours, may we, is somebody else at it. Touches nothing before that is known."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from ..errors import NotARun, NotWritable, RunLocked
from ..format import layout
from ..rawio.files import Lock, PosixFiles, takes_direct
from ..tiers.disk import Disk, WriteMode

LOCK = ".lock"
_OURS = {layout.HEADER, layout.POINTER, LOCK, "gen", "incarnations", "latest_ok"}


def for_reading(path: str | os.PathLike[str]) -> Disk:
    """The tier of an existing run. Raises NotARun, NotWritable (also for what may not be read)."""
    root = os.path.abspath(os.fspath(path))
    if not os.path.lexists(root):
        raise NotARun(f"there is nothing at {root}", todo="Check the path.")
    names = _look(root)
    if not names & {layout.HEADER, "gen"}:
        raise NotARun(f"{root} is not a run of lastgood: it has no {layout.HEADER}", safe="It is untouched.")
    return Disk(PosixFiles(), root, direct=_direct(root))


@contextlib.contextmanager
def for_writing(path: str | os.PathLike[str], mode: WriteMode) -> Iterator[Disk]:
    """The tier of a run, made if need be, locked until the end. Raises NotARun, NotWritable, RunLocked."""
    root = os.path.abspath(os.fspath(path))
    if os.path.lexists(root):
        names = _look(root)
        foreign = sorted(name for name in names - _OURS if not name.endswith(".tmp") and not name.startswith(".probe-"))
        if foreign and layout.HEADER not in names and "gen" not in names:
            raise NotARun(
                f"{root} holds other files ({', '.join(foreign[:3])}) and no {layout.HEADER}",
                safe="It is untouched.",
                todo="Give a new or empty directory.",
            )
    try:
        _make(root)
        lock = Lock(os.path.join(root, LOCK))
    except BlockingIOError as error:
        raise RunLocked(
            f"{root} is open for writing in another process",
            safe="Nothing was touched.",
            todo="End that process, or give this run another path. The lock goes with its process.",
        ) from error
    except OSError as error:
        raise _not_permitted(root, error) from error
    try:
        yield Disk(PosixFiles(), root, mode=mode, direct=_direct(root))
    finally:
        lock.close()


def _look(root: str) -> set[str]:
    if not os.path.isdir(root):
        raise NotARun(f"{root} is a file, not the directory of a run", safe="It is untouched.")
    try:
        found = PosixFiles().list(root)
    except OSError as error:
        raise _not_permitted(root, error) from error
    for name in ("gen", "incarnations"):
        if found.get(name, None) is not None:
            raise NotARun(f"{os.path.join(root, name)} is not a directory of its own", todo="Put the real one there.")
    return set(found)


def _make(root: str) -> None:
    """Make a directory and every missing one above it, durably."""
    if os.path.isdir(root):
        return
    above = os.path.dirname(root)
    _make(above)
    with contextlib.suppress(FileExistsError):
        PosixFiles().make_dir(root)
    PosixFiles().sync_dir(above)


def _direct(root: str) -> bool:
    if not os.access(root, os.W_OK):
        return False
    try:
        return takes_direct(root)
    except OSError:
        return False  # a disk that is full or failing says so at the first write, by name


def _not_permitted(root: str, error: OSError) -> NotWritable:
    return NotWritable(
        f"{root}: {error.strerror or error}",
        safe="Nothing was touched.",
        todo="Check the owner, the rights and the mount; to read only, use lastgood.open or lastgood.load.",
    )

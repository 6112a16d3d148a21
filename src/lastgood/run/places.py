"""Opening a place for a run: is it ours, may we, is somebody else at it. Touches nothing before that is known."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ..errors import LastgoodError, NoSpace, NotARun, NotWritable, RunLocked, TierDown
from ..format import layout
from ..rawio.files import Lock, PosixFiles, takes_direct
from ..tiers.disk import Disk, WriteMode

LOCK = ".lock"
_OURS = {layout.HEADER, layout.POINTER, LOCK, "gen", "incarnations", "latest_ok"}


def for_reading(path: str | os.PathLike[str]) -> Disk:
    """The tier of an existing run. Raises NotARun, NotWritable (also for what may not be read), TierDown."""
    root = os.path.abspath(os.fspath(path))
    names = _look(root)
    if names is None:
        raise NotARun(f"there is nothing at {root}", todo="Check the path.")
    if not names & {layout.HEADER, "gen"}:
        raise NotARun(f"{root} is not a run of lastgood: it has no {layout.HEADER}", safe="It is untouched.")
    return Disk(PosixFiles(), root)  # not direct: to find out would take a write


@contextlib.contextmanager
def for_writing(path: str | os.PathLike[str], mode: WriteMode) -> Iterator[Disk]:
    """The tier of a run, made if need be, locked until the end.

    Raises NotARun, NotWritable, RunLocked, NoSpace, TierDown.
    """
    root = os.path.abspath(os.fspath(path))
    names = _look(root)
    if names is not None:
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
        raise _refused(root, error) from error
    try:
        yield Disk(PosixFiles(), root, mode=mode, direct=_direct(root))
    finally:
        lock.close()


def _look(root: str) -> set[str] | None:
    """The names at a place that may be a run; None where there is nothing."""
    try:
        os.lstat(root)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise _refused(root, error) from error
    try:
        found = PosixFiles().list(root)
    except (FileNotFoundError, NotADirectoryError):
        raise NotARun(f"{root} is a file, not the directory of a run", safe="It is untouched.") from None
    except OSError as error:
        raise _refused(root, error) from error
    for name in ("gen", "incarnations"):
        if found.get(name, None) is not None:
            raise NotARun(f"{os.path.join(root, name)} is not a directory of its own", todo="Put the real one there.")
    return set(found)


def _make(root: str) -> None:
    """Make a directory and every missing one above it, durably."""
    above = os.path.dirname(root)
    try:
        PosixFiles().make_dir(root)
    except FileExistsError:
        # Whoever made it may have died before its name was durable; a folder that we may not open is not of our making.
        with contextlib.suppress(PermissionError):
            PosixFiles().sync_dir(above)
        return
    except FileNotFoundError:
        _make(above)
        with contextlib.suppress(FileExistsError):
            PosixFiles().make_dir(root)
    PosixFiles().sync_dir(above)


def _direct(root: str) -> bool:
    try:
        return takes_direct(root)
    except OSError:
        return False  # a disk that is full or failing says so at the first write, by name


def _refused(root: str, error: OSError) -> LastgoodError:
    what = f"{root}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(f"no space left for {what}", safe="Nothing was touched.", todo="Free space on this disk.")
    if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN):
        return TierDown(f"the disk failed: {what}", safe="Nothing was touched.")
    return NotWritable(
        what,
        safe="Nothing was touched.",
        todo="Check the owner, the rights and the mount; to read only, use lastgood.open or lastgood.load.",
    )

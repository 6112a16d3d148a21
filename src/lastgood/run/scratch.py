"""Scratch runs: temporary directories in which `lastgood tune` measures the disk of a run.

Invariants
  1. A scratch run of RUN is a directory `<RUN>.tune-<8 hex>` next to it. `opened` removes it at the end of its block,
     also after an error or Ctrl-C.
  2. A process that is killed leaves its scratch run behind. `clear` removes it. It removes no directory that is locked,
     and none that holds a file which a scratch run never holds.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator

from ..errors import NotARun, NotWritable, Refused, RunLocked, TierDown
from ..io import os_errors
from ..ports import Tier
from . import access

INCARNATION = "0" * 8
"""The incarnation of every save in a scratch run. The random id of a real incarnation is practically never this one."""
_NAME = re.compile(r"\.tune-[0-9a-f]{8}")


def parent_folder(run: str) -> str:
    """The directory in which scratch runs of `run` are created: its parent, or the nearest ancestor that exists.

    Raises NotARun for a path at which no run can be opened, NotWritable for one that may not be read, Refused if `run`
    is the mount point of another disk.
    """
    path = os.path.realpath(run)
    with os_errors.translated(path):
        is_free = not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path))
    if not is_free:
        access.for_reading(path)
    above = os.path.dirname(path)
    while not os.path.lexists(above):
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        raise NotARun(
            f"{above} is a file, so {path} cannot be a run", safe="Nothing was touched.", todo="Give another path."
        )
    if os.path.isdir(path) and os.stat(path).st_dev != os.stat(above).st_dev:
        raise Refused(
            f"{path} is a disk of its own, and the directory beside it is on another disk",
            safe="Nothing was touched.",
            todo=f"Give a path on the disk that is to be measured: {os.path.join(path, 'new')}.",
        )
    return above


def clear(run: str) -> list[str]:
    """Remove the scratch runs of `run` that killed processes left behind. Returns their names.

    Raises NotARun and Refused as `parent_folder` does, and the errors of `access.for_writing` except RunLocked.
    """
    folder, name = parent_folder(run), os.path.basename(os.path.realpath(run))
    cleared = []
    with os_errors.translated(folder):
        others = sorted(os.listdir(folder))
    for other in others:
        path = os.path.join(folder, other)
        if not other.startswith(name) or not _NAME.fullmatch(other, len(name)):
            continue
        if os.path.islink(path) or not os.path.isdir(path) or not _is_scratch(path):
            continue
        with contextlib.suppress(RunLocked), access.for_writing(path, "atomic_dirsync"):
            remove(path)
            cleared.append(other)
    return cleared


@contextlib.contextmanager
def opened(run: str) -> Iterator[Tier]:
    """Yield the tier of a new scratch run of `run`, which is removed at the end of the block."""
    path = os.path.join(parent_folder(run), f"{os.path.basename(os.path.realpath(run))}.tune-{os.urandom(4).hex()}")
    try:
        with access.for_writing(path, "atomic_dirsync") as tier:
            yield tier
    finally:
        remove(path)


def remove(path: str) -> None:
    """Remove a scratch directory, if it is there. Raises NotWritable, TierDown."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        kind = NotWritable if isinstance(error, PermissionError) else TierDown
        raise kind(
            f"{path} could not be removed: {error.strerror or error}",
            safe="It holds only scratch data.",
            todo="Remove it.",
        ) from error


def _is_scratch(path: str) -> bool:
    """Whether a directory holds only files of a scratch run. A real run also holds a header or an incarnation."""
    names = {name for name in os.listdir(path) if not name.startswith(".probe-")}
    inside = os.listdir(os.path.join(path, "gen")) if "gen" in names else []
    return names <= {access.LOCK, "gen"} and all(name.endswith("-" + INCARNATION) for name in inside)

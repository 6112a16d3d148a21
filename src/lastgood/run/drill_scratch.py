"""The scratch folder of a drill: copies of a run that one drill makes, and removes. It never holds anything else.

    <NAME>.drill-<8 hex>          beside the run
        .lock                     held while the drill runs
        run                       the copy on the disk
        away                      the same copy while it is "gone"
    memory folder of that `run`   the copy in memory, with its agent (memory_place.py)

Invariants
  1. `opened` ends the agent and removes both folders at the end of its block, also after an error or Ctrl-C.
  2. A drill that is killed leaves them behind. `clear`, which the next drill calls, removes them. It removes no folder
     that is locked, and none that holds any other file.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import NotARun, Refused
from ..io import os_errors
from ..io.files import Lock
from . import access, agent_link, memory_place, paths, scratch

_NAME = re.compile(r"\.drill-[0-9a-f]{8}")
_RUN, _AWAY = "run", "away"


@dataclass(frozen=True)
class ScratchPlace:
    """One place of the copies. `name`: in texts. `away`: where it is while it is "gone"."""

    name: str
    root: str
    url: str
    away: str

    @property
    def exists(self) -> bool:
        return os.path.isdir(self.root)


@dataclass(frozen=True)
class ScratchPlaces:
    """The places of one drill. Neither exists at first."""

    disk: ScratchPlace
    memory: ScratchPlace


def parent_folder(run: str, given: str | None) -> str:
    """The directory in which a drill makes its folder: `given`, or if that is None the one beside the run.

    Raises NotARun if `given` is no directory; Refused if the directory beside the run is on another disk, or if there
    is none, because the run is in an object store.
    """
    place = paths.parsed(run)
    todo = "Name a directory for the copies: --in DIR."
    if given is not None:
        folder = os.path.realpath(paths.local(given, "--in"))
        if not os.path.isdir(folder):
            raise NotARun(f"{folder} is no directory", safe="Nothing was touched.", todo=todo)
        return folder
    if place.kind not in ("directory", "slots"):
        raise Refused(f"{place.url} has no directory beside it", safe="Nothing was touched.", todo=todo)
    root = os.path.realpath(place.root)
    folder = os.path.dirname(root)
    if os.stat(root).st_dev != os.stat(folder).st_dev:
        raise Refused(f"{root} is a disk of its own, and {folder} is not on it", safe="Nothing was touched.", todo=todo)
    return folder


def name_of(run: str) -> str:
    """With what the names of the folders of drills of `run` begin."""
    return os.path.basename(paths.parsed(run).root.rstrip("/")) or "run"


def clear(parent: str, name: str) -> list[str]:
    """Remove what killed drills have left in `parent`. Returns the names. Raises NotWritable, TierDown."""
    cleared = []
    for other in sorted(os.listdir(parent)):
        folder = os.path.join(parent, other)
        if not other.startswith(name) or not _NAME.fullmatch(other, len(name)):
            continue
        if os.path.islink(folder) or not os.path.isdir(folder):
            continue
        if not set(os.listdir(folder)) <= {access.LOCK, _RUN, _AWAY}:  # guard: drill-clears-only-scratch
            continue
        with contextlib.suppress(BlockingIOError), contextlib.closing(Lock(os.path.join(folder, access.LOCK))):
            _remove(folder)
            cleared.append(other)
    return cleared


@contextlib.contextmanager
def opened(parent: str, name: str) -> Iterator[ScratchPlaces]:
    """Yield the places of a new drill, which are removed at the end of the block. Raises NotWritable, NoSpace."""
    folder = os.path.join(parent, f"{name}.drill-{os.urandom(4).hex()}")
    try:
        os.mkdir(folder, 0o700)
        lock = Lock(os.path.join(folder, access.LOCK))
    except OSError as error:
        raise os_errors.at_path(error, folder) from error
    with contextlib.closing(lock):
        try:
            disk = os.path.join(folder, _RUN)
            memory = memory_place.folder_of(disk)
            yield ScratchPlaces(
                ScratchPlace("the disk", disk, disk, os.path.join(folder, _AWAY)),
                ScratchPlace("memory", memory, f"{paths.MEMORY}{memory}", memory + memory_place.REMOVED),
            )
        finally:
            _remove(folder)


def _remove(folder: str) -> None:
    memory = memory_place.folder_of(os.path.join(folder, _RUN))
    with contextlib.suppress(OSError), contextlib.closing(agent_link.connected(memory)) as connection:
        agent_link.kill(connection)
    for one in (memory, memory + memory_place.REMOVED):
        shutil.rmtree(one, ignore_errors=True)
    scratch.remove(folder)

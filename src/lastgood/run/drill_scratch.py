"""The scratch folders of a drill: copies of a run that one drill makes, and removes. They never hold anything else.

    <NAME>.drill-<8 hex>          beside the run, and beside its directory on a disk that this node has for itself
        .lock                     held while the drill runs
        run                       the copy on that disk
        away                      the same copy while it is "gone"
    memory folder of that `run`   the copy in memory, with its agent (memory_place.py)

Invariants
  1. `opened` ends the agent and removes all of them at the end of its block, also after an error or Ctrl-C.
  2. A drill that is killed leaves them behind. `clear`, which the next drill calls, removes them. It removes no folder
     that is locked, none of another user, and none that holds any other file, or a link.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import NotARun, NotWritable, Refused
from ..io import os_errors
from ..io.files import Lock
from . import access, agent_link, memory_place, paths, scratch
from .peers import DRILLS

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

    @property
    def in_memory(self) -> bool:
        return paths.in_memory(self.url)

    @property
    def where(self) -> str:
        """As in "a file is missing, on the disk"."""
        return "in memory" if self.in_memory else f"on {self.name}"

    @property
    def subject(self) -> str:
        """As in "the disk is gone"."""
        return "the memory" if self.in_memory else self.name


@dataclass(frozen=True)
class ScratchPlaces:
    """The places of one drill. None exists at first. `front`: in memory, or on a disk that this node has for itself."""

    disk: ScratchPlace
    front: ScratchPlace


def parent_folder(run: str, given: str | None) -> str:
    """The directory in which a drill makes its folder: `given`, or if that is None the one beside the run.

    Raises NotARun if `given` is no directory; Refused if it is empty, if the directory beside the run is on another
    disk, or if there is none, because the run is in an object store.
    """
    place = paths.parsed(run)
    todo = "Name a directory for the copies: --in DIR."
    if given == "":
        raise Refused("--in names no directory", safe="Nothing was touched.", todo=todo)
    if given is not None:
        folder = os.path.realpath(paths.absolute(given, "--in"))
        if not os.path.isdir(folder):
            raise NotARun(f"{folder} is no directory", safe="Nothing was touched.", todo=todo)
        return folder
    if place.kind not in ("directory", "slots"):
        raise Refused(f"{place.url} has no directory beside it", safe="Nothing was touched.", todo=todo)
    root = os.path.realpath(place.root)
    folder = os.path.dirname(root)
    with os_errors.translated(root):
        devices = os.stat(root).st_dev, os.stat(folder).st_dev
    if devices[0] != devices[1]:
        raise Refused(f"{root} is a disk of its own, and {folder} is not on it", safe="Nothing was touched.", todo=todo)
    return folder


def name_of(run: str) -> str:
    """With what the names of the folders of drills of `run` begin: the same through a link as without it."""
    place = paths.parsed(run)
    root = place.root if place.kind == "objects" else os.path.realpath(place.root)  # guard: one-drill-name-for-a-run
    return os.path.basename(root.rstrip("/")) or "run"


def clear(parent: str, name: str) -> list[str]:
    """Remove what killed drills of this user have left in `parent`. Returns the names. Raises what
    `os_errors.at_path` returns, NotWritable and TierDown."""
    cleared = []
    with os_errors.translated(parent):
        others = sorted(os.listdir(parent))
    for other in others:
        folder = os.path.join(parent, other)
        if not other.startswith(name) or not _NAME.fullmatch(other, len(name)):
            continue
        with os_errors.translated(folder):
            if not _is_scratch(folder):
                continue
            try:
                lock = Lock(os.path.join(folder, access.LOCK))
            except BlockingIOError:
                continue
        with contextlib.closing(lock):
            _remove(folder)
            cleared.append(other)
    return cleared


def _is_scratch(folder: str) -> bool:
    """Whether a folder of this user holds nothing but what a drill makes. Raises OSError."""
    try:
        found = os.lstat(folder)
        # guard: drill-clears-own-folders
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        names = os.listdir(folder)
    except FileNotFoundError:  # its drill has ended now
        return False
    # A link may lead to a run, whose agent would be killed and whose memory would be removed.
    linked = any(os.path.islink(os.path.join(folder, one)) for one in (_RUN, _AWAY))
    return not linked and set(names) <= {access.LOCK, _RUN, _AWAY}  # guard: drill-clears-only-scratch


def clear_copies(folder: str) -> None:
    """Remove the copies of drills on other nodes that an agent has left in its `folder`, which was killed. Raises
    nothing.

    An agent that lives removes them itself (agent/drill_files.py).
    """
    with contextlib.suppress(NotWritable, OSError):  # it is the agent of another user, or one that is stalled
        try:
            agent_link.connected(folder).close()
        except (FileNotFoundError, ConnectionRefusedError):
            shutil.rmtree(os.path.join(folder, DRILLS), ignore_errors=True)  # guard: copies-of-killed-agent-removed


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Inside, no other drill plays with the run that has `folder` as its front on this node. Raises Refused if one
    does, and what `os_errors.at_path` returns: each would end the copies of the other on other nodes."""
    path = os.path.join(folder, "gen")
    with os_errors.translated(path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with os_errors.translated(path):
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: one-drill-of-a-node
            except BlockingIOError:
                raise Refused(
                    f"another drill of this run plays on this node, with {folder}",
                    safe="Nothing was copied, and the other one goes on.",
                    todo="Run the drill again once the other one has ended.",
                ) from None
        yield
    finally:
        os.close(fd)


@contextlib.contextmanager
def opened(parent: str, name: str, beside: str | None = None) -> Iterator[ScratchPlaces]:
    """Yield the places of a new drill, which are removed at the end of the block. Raises NotWritable, NoSpace.

    `beside` (default None): the directory of the run on a disk that this node has for itself. None: the front is in
    memory.
    """
    with _folder(parent, name) as folder, contextlib.ExitStack() as stack:
        disk = _on_disk("the disk", folder)
        if beside is None:
            memory = memory_place.folder_of(disk.root)
            url, away = f"{paths.MEMORY}{memory}", memory + memory_place.REMOVED
            front = ScratchPlace("memory", memory, url, away)
        else:
            other = stack.enter_context(_folder(parent_folder(beside, None), name_of(beside)))
            front = _on_disk("the disk of this node", other)
        yield ScratchPlaces(disk, front)


def _on_disk(name: str, folder: str) -> ScratchPlace:
    root = os.path.join(folder, _RUN)
    return ScratchPlace(name, root, root, os.path.join(folder, _AWAY))


@contextlib.contextmanager
def _folder(parent: str, name: str) -> Iterator[str]:
    """A new folder of a drill, locked, which is removed at the end of the block."""
    folder = os.path.join(parent, f"{name}.drill-{os.urandom(4).hex()}")
    with os_errors.translated(folder):
        os.mkdir(folder, 0o700)
        try:
            lock = Lock(os.path.join(folder, access.LOCK))
        except OSError:
            scratch.remove(folder)
            raise
    with contextlib.closing(lock):
        try:
            yield folder
        finally:
            _remove(folder)


def _remove(folder: str) -> None:
    run = os.path.join(folder, _RUN)
    memory = memory_place.folder_of(run)
    for one in (memory, run):
        with contextlib.suppress(OSError), contextlib.closing(agent_link.connected(one)) as connection:
            agent_link.kill(connection)
    for one in (memory, memory + memory_place.REMOVED):
        shutil.rmtree(one, ignore_errors=True)
    scratch.remove(folder)

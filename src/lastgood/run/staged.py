"""What supervisors of nodes in reserve have put into memory: noted, held, and removed once no start can need it.

    .staged     in the folder of a run in memory: a line for each generation that was put there, and for the folder
                itself if it was made for that

A supervisor holds a shared lock on this file from the beginning of a copy to its own end. The file is deleted when a
training process opens the memory (access.py), and when somebody stages by hand: what is there is not removed then.

Invariants
  1. Only what the file names is removed, never what was there before.
  2. It is removed under the exclusive lock of the file, the lock of the agent and that of the run: no other supervisor
     may need it, no agent serves it, and no process has it open.
  3. A start waits for no removal: the folder is renamed at once, and its memory is freed after the locks.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence

from .. import reporting
from ..errors import LastgoodError
from ..format import commit, layout
from ..io import os_errors
from ..io.files import Lock, PosixFiles, close_unlocked
from ..io.reused_files import ReusedFiles
from ..records import GenerationId
from . import access, agent_link, memory_place, paths

_FOLDER = "folder"
"""the line for the folder itself"""


class Held:
    """The hold of one supervisor on what is staged in `folder`, that of a run in memory. There is none at first."""

    def __init__(self, folder: str) -> None:
        self._path = os.path.join(folder, memory_place.STAGED)
        self._fd: int | None = None

    def hold(self) -> None:
        """Keep what is staged there, if anything is, until `close` or the end of this process. Raises nothing."""
        with contextlib.suppress(OSError):  # there is nothing, or it is being removed: a start reads elsewhere then
            self._fd = self._open(os.O_RDWR, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def note(self, new: Sequence[GenerationId], made: bool) -> set[GenerationId]:
        """Note what is about to be put there, and hold it as `hold` does. The caller holds the lock of the run.

        `new`: generations that are not there yet. `made`: whether the folder was made for them. Returns all generations
        that supervisors have put there. Raises NoSpace, NotWritable, TierDown.
        """
        with os_errors.translated(self._path):
            self._fd = self._open(os.O_RDWR | os.O_CREAT, fcntl.LOCK_SH)
            lines = [_FOLDER] * made + [layout.folder(at).rpartition("/")[2] for at in new]
            # A killed process may have left half a line.
            os.write(self._fd, "".join(f"\n{one}\n" for one in lines).encode())
            return _noted(self._fd)[0]

    def close(self) -> None:
        """Hold nothing any more."""
        fd, self._fd = self._fd, None
        if fd is not None:
            close_unlocked(fd)

    def _open(self, flags: int, lock: int) -> int:
        self.close()  # the file may be another one since
        return _locked(self._path, flags | os.O_APPEND, lock)


def forget(folder: str) -> None:
    """Let what is staged in a folder stay there. The caller holds the lock of the run."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(folder, memory_place.STAGED))


def remove_unneeded(but: str = "") -> list[str]:
    """Remove what is staged in the memory of this user, where no supervisor holds it and nobody uses that memory.

    `but`: a folder that is left out; default "": none. Returns the folders from which something was removed. Raises
    nothing: what could not be removed is reported, and tried again by the next supervisor.
    """
    found = list[str]()
    for folder in memory_place.folders():
        try:
            if folder == but or os.lstat(folder).st_uid != os.geteuid():
                continue
            if folder.endswith(memory_place.REMOVED):  # who removed it was killed
                shutil.rmtree(folder, ignore_errors=True)
            elif _remove(folder):
                found.append(folder)
        except FileNotFoundError:  # somebody else has removed it
            continue
        except (LastgoodError, OSError) as error:
            reporting.warning(f"what was staged in {folder} is still there: {error} To free it: rm -r {folder}")
    return found


def _remove(folder: str) -> bool:
    """Remove what is staged in a folder, unless it is needed. Returns whether anything was."""
    removed = folder + memory_place.REMOVED
    with _owned(folder) as fd:
        if fd is None:
            return False
        noted, made = _noted(fd)
        tier = access.directory_tier(paths.Place(folder, "memory"), "atomic_dirsync")
        there = set(map(layout.parse_folder, tier.list("gen")))
        whole = made and there <= noted  # guard: only-staged-folder-is-removed
        if whole:
            shutil.rmtree(removed, ignore_errors=True)
            PosixFiles().rename(folder, removed)
        else:
            for at in noted & there:
                commit.retire(tier, at)
            forget(folder)
    if whole:
        shutil.rmtree(removed, ignore_errors=True)
    else:
        ReusedFiles(folder).drop()
    return True


@contextlib.contextmanager
def _owned(folder: str) -> Iterator[int | None]:
    """Hold all locks of a folder. Yields the descriptor of its file; None if it has no such file, or is needed."""
    path = os.path.join(folder, memory_place.STAGED)
    with contextlib.ExitStack() as locks:
        try:
            fd = _locked(path, os.O_RDWR, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: held-memory-is-not-removed
            locks.callback(close_unlocked, fd)
            # guard: used-memory-is-not-removed
            for name, content in ((agent_link.LOCK, b""), (access.LOCK, access.AGENTS_MARK)):
                locks.callback(Lock(os.path.join(folder, name), content).close)
            if not os.path.samestat(os.fstat(fd), os.lstat(path)):  # a start has used the memory since
                raise FileNotFoundError(path)
        except (FileNotFoundError, BlockingIOError):
            yield None
            return
        yield fd


def _noted(fd: int) -> tuple[set[GenerationId], bool]:
    """The generations that a file names, and whether the folder was made for them."""
    lines = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace").split("\n")
    return {at for at in map(layout.parse_folder, lines) if at is not None}, _FOLDER in lines


def _locked(path: str, flags: int, lock: int) -> int:
    """A descriptor of the file, with this lock. Raises BlockingIOError if another process has one that excludes it."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, lock)
    except BaseException:
        os.close(fd)
        raise
    return fd

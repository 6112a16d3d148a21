"""Gives memory back to the processes of the job: when it is short, files of generations move to the spill folder.

looks at the limits -> while memory is short (io/memory_limits.py): frees the memory of deleted files, and removes the
copies of drills -> moves whole files of committed generations (io/memory_moves.py), the oldest generation first

The training process does it while it has a run in memory open, and so does the agent as long as it lives: the one sees
the control groups of the job, the other one goes on without a training process.

Invariants
  1. One process of this user moves files at a time: each would see the same shortage, and move as much once more.
  2. No file of the run is deleted or lost: what cannot be moved stays in memory, which is reported.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from .. import reporting
from ..format import layout
from ..io.files import close_unlocked
from ..io.memory_files import SMALLER, MemoryFiles, lacking_bytes
from ..io.memory_moves import moved, staged_in
from ..io.os_errors import NoMemory
from ..io.reused_files import LEAST_BYTES
from ..ports import Stop, never
from ..storage.directory import Disk
from ..units import size
from . import memory_place, paths
from .peers import DRILLS
from .thread_pools import interpreter_is_ending

INTERVAL_SECONDS = 0.5
"""How often a training process reads the limits: a job that takes a gigabyte in a second is answered in time."""
AGENT_INTERVAL_SECONDS = 2.0
"""How often an agent does: later, so that the training process moves files first, and its log has the warning."""
RETRY_SECONDS = 60.0
"""How long no further move is tried after one that failed."""
LOCK = ".relieving.lock"
"""The lock of who moves files, beside the folders of all runs of this user."""
_KEPT = (".json", ".tmp")
"""The ends of the names of files that stay: records, and files that are not finished."""


class Relief:
    """Gives back what one run has in memory.

    `files`: makes the files of the run; None: it has none now. `root`: its folder in memory. `lacking` (default
    `lacking_bytes`): how many bytes its files are to give back. `stop()` is polled while a file is copied.
    """

    def __init__(
        self,
        files: Callable[[], MemoryFiles | None],
        root: str,
        stop: Stop = never,
        lacking: Callable[[str], int] = lacking_bytes,
    ) -> None:
        self._make, self._root, self._stop, self._lacking = files, root, stop, lacking
        self._moved = self._moved_bytes = self._failed = 0
        self._next_at = 0.0
        """when to try again after a failure, by the monotonic clock"""

    def give_back(self) -> int:
        """Give back what is lacking now, if anything is. Returns the bytes of the files that were moved.

        Errors are reported and not raised: the next call tries again, not at once.
        """
        try:
            files = self._make()
            if files is None:
                return 0
            files.reused.release()
            if not self._lacking(self._root):
                return 0
            files.reused.drop()  # guard: deleted-files-freed-before-moves
            # guard: drill-copies-freed-before-moves
            shutil.rmtree(os.path.join(self._root, DRILLS), ignore_errors=True)
            files.reused.release()
            if not self._lacking(self._root) or time.monotonic() < self._next_at:
                return 0
            with self._alone() as alone:
                return self._move(files) if alone else 0
        except FileNotFoundError:
            return 0  # nothing was saved yet, or the memory was removed
        except OSError as error:
            self._next_at = time.monotonic() + RETRY_SECONDS
            self._failed += 1
            if reporting.is_reported(self._failed):
                reporting.warning(
                    f"memory is short for the processes of this job, and {error.filename or self._root} was not moved "
                    f"to a disk: {error.strerror or error}. It is untouched, but the system may kill a process for its "
                    f"memory (attempt {self._failed}). {error.todo if isinstance(error, NoMemory) else SMALLER}"
                )
            return 0

    def clear(self) -> None:
        """Remove what a process has left on the disk that was killed while it copied, or removed the memory of this
        run. Raises nothing."""
        with contextlib.suppress(OSError):
            files = self._make()
            if files is not None and files.spill_folder is not None:
                with self._alone() as alone:
                    if alone:
                        memory_place.remove_aside(files.spill_folder)
                        os.unlink(staged_in(files))  # guard: half-a-copy-removed

    def _move(self, files: MemoryFiles) -> int:
        lacking = left = self._lacking(self._root)
        done = 0
        for path in self._candidates():
            if done >= lacking or self._stop():  # guard: only-what-lacks-is-moved
                break
            if count := moved(
                files, path, self._stop, partial(memory_place.is_spill_of, self._root, files.spill_folder)
            ):
                done += count
                files.reused.release()  # a mapping holds the memory of a removed file
                self._report(files, path, count)
                before, left = left, self._lacking(self._root)
                if left >= before:
                    # A forked worker may still map the file, or the job takes memory as fast as this gives it back.
                    self._next_at = time.monotonic() + RETRY_SECONDS
                    break
        return done

    def _candidates(self) -> Iterator[str]:
        """The files of committed generations in memory, those of the oldest one first."""
        above = os.path.join(self._root, "gen")
        for generation in sorted(os.listdir(above)):  # guard: newest-generation-moved-last
            folder = os.path.join(above, generation)
            if layout.parse_folder(generation) is None or not os.path.exists(os.path.join(folder, layout.COMMIT)):
                continue  # guard: only-committed-files-moved
            with contextlib.suppress(FileNotFoundError):
                for one in sorted(os.scandir(folder), key=lambda one: one.name):
                    if not one.name.endswith(_KEPT) and one.stat(follow_symlinks=False).st_size >= LEAST_BYTES:
                        yield one.path

    @contextlib.contextmanager
    def _alone(self) -> Iterator[bool]:
        """Hold the lock of who moves files. Yields False if another process or thread holds it."""
        path = os.path.join(os.path.dirname(self._root), LOCK)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: one-process-moves-files
        except BlockingIOError:
            os.close(fd)
            yield False
            return
        try:
            yield True
        finally:
            close_unlocked(fd)

    def _report(self, files: MemoryFiles, path: str, count: int) -> None:
        self._moved, self._moved_bytes = self._moved + 1, self._moved_bytes + count
        if reporting.is_reported(self._moved):
            reporting.warning(
                f"memory is short for the processes of this job: {os.path.relpath(path, self._root)} was moved from "
                f"memory to {files.spill_folder}, where it is read from now on (moved file {self._moved}, "
                f"{size(self._moved_bytes)} in all). {SMALLER}"
            )


@contextlib.contextmanager
def watched(
    files: Callable[[], MemoryFiles | None], root: str, interval_seconds: float = INTERVAL_SECONDS
) -> Iterator[None]:
    """Inside, a thread reads the limits each `interval_seconds`, and gives memory back. `files`, `root`: as `Relief`.

    Where the system allows no further thread, nothing is given back, which is reported.
    """
    ended = threading.Event()

    def stop() -> bool:
        return ended.is_set() or interpreter_is_ending()

    def watch() -> None:
        relief = Relief(files, root, stop)
        relief.clear()
        while not (ended.wait(interval_seconds) or stop()):
            try:
                relief.give_back()
            except Exception as error:  # noqa: BLE001 - too little memory, above all; the next look may succeed
                reporting.warning(f"{root} could not give memory back: {type(error).__name__}: {error}")

    thread = threading.Thread(target=watch, name="lastgood-memory")
    try:
        thread.start()
    except RuntimeError as error:
        reporting.warning(f"{root} gives no memory back when it becomes short: {error}. Raise the limit of threads.")
        yield
        return
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def tier(place: paths.Place, spill: str | None, shared: bool, copies: bool) -> Iterator[Disk]:
    """The tier over the memory of a run; inside, memory is given back when it becomes short.

    `spill`, `copies`: as for `memory_place.files_of`. `shared`: other processes write to it too.
    """
    files = memory_place.files_of(place.root, spill, copies)
    with watched(lambda: files, place.root):
        yield Disk(files, place.root, shared=shared, place=place.url)

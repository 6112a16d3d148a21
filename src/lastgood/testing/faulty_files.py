"""A file system that fails on request, with errors, short transfers or a full disk, and records its calls."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar
from unittest import mock

from ..io.files import PosixFiles
from ..ports import File, Files, OpenMode
from ..run import access

Operation = Literal[
    "open new",
    "open read",
    "open write",
    "list",
    "make_dir",
    "link",
    "rename",
    "symlink",
    "remove",
    "sync_dir",
    "read",
    "write",
    "reserve",
    "resize",
    "sync",
]
READING = frozenset({"open read", "open write", "list", "read"})
"""the operations that change nothing on the disk; "open write" opens an existing file and does not truncate it"""

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call to the file system.

    `path`: as it was passed to the call; of a link and of a rename, the new name. `offset` and `length`: in bytes, as
    the caller asked for them, of a read or a write; reserve and resize have a length only, the other calls neither.
    """

    operation: Operation
    path: str
    offset: int | None = None
    length: int | None = None

    @property
    def name(self) -> str:
        """The last component of the path."""
        return os.path.basename(self.path)

    @property
    def changes(self) -> bool:
        """Whether the call changes something on the disk."""
        return self.operation not in READING


@dataclass(frozen=True)
class Fault:
    """An OSError that calls of one kind raise, in place of being made or after it.

    `operation`: which calls fail; "change" stands for all but those in `READING`.
    `path`: a shell pattern that the whole path matches, as `"*.safetensors"`; `*` matches `/` too. Default: all paths.
    `errno`: the number of the error. Default EIO.
    `nth`: only the n-th call that matches fails, counted from 1 since the fault was injected. Default None: each.
    `after`: the call is made first, and the error is raised if it succeeds, as when a network file system loses a
    reply. Default False.
    """

    operation: Operation | Literal["change"]
    path: str = "*"
    errno: int = errno.EIO
    nth: int | None = None
    after: bool = False

    def matches(self, call: Call) -> bool:
        """Whether operation and path of a call match, whatever `nth` is."""
        of_kind = call.changes if self.operation == "change" else call.operation == self.operation
        return of_kind and fnmatch.fnmatchcase(call.path, self.path)


class FaultyFiles:
    """A `ports.Files` that passes its calls on to another one, makes them fail as asked, and records them.

    `faults`: what fails; `inject` adds to them, `clear` removes them all.
    `capacity_bytes`: the largest sum of the lengths of all files that are written through this object. A write, reserve
    or resize that would go beyond it raises ENOSPC and does nothing; removing and shortening files give space back.
    Default None: unlimited.
    `most_bytes`: a read or write transfers at most so many bytes (>= 1), as POSIX allows, so its caller must go on
    with the rest. Files that are opened meanwhile do not use direct I/O, which takes whole blocks only. Default None.
    `before`: called with each `Call` before it is made, in the thread that makes it; if it raises, the call raises that
    instead. Default None.
    `files`: the file system below. Default: the operating system's.
    `calls`: every call so far of a kind in `Operation`, in order, the failed ones included.

    The attributes `most_bytes` and `before` may be set between calls. Calls may come from several threads.

        files = FaultyFiles(Fault("write", "*.safetensors", errno.ENOSPC, nth=3))
        with files.installed(), lastgood.Checkpointer("runs/test", {"net": net}) as ckpt:
            ...  # the third write to a tensor file finds the disk full
    """

    def __init__(
        self,
        *faults: Fault,
        capacity_bytes: int | None = None,
        most_bytes: int | None = None,
        before: Callable[[Call], None] | None = None,
        files: Files | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.most_bytes, self.before = most_bytes, before
        self._files = files or PosixFiles()
        self._capacity_bytes = capacity_bytes
        self._lengths: dict[
            str, int
        ] = {}  # path -> length in bytes, of the files that were written through this object
        self._faults: list[tuple[Fault, Iterator[int]]] = []
        self._lock = threading.Lock()
        self.inject(*faults)

    def inject(self, *faults: Fault) -> None:
        """Add faults. Of several that are due for one call, the one that was injected first is raised."""
        with self._lock:
            self._faults += [(fault, itertools.count(1)) for fault in faults]

    def clear(self) -> None:
        """Remove all faults. `capacity_bytes`, `most_bytes` and `before` stay."""
        with self._lock:
            self._faults.clear()

    def changes(self) -> list[tuple[Operation, str]]:
        """Operation and path of the calls so far that are not in `READING`, the failed ones included."""
        return [(call.operation, call.path) for call in self.calls if call.changes]

    @contextlib.contextmanager
    def installed(self) -> Iterator[FaultyFiles]:
        """Each run that is opened inside the block, in any thread of this process, uses these files until it is closed.

        Writes to slots with `persist="mmap"` are not among the calls: they are made by storing to mapped memory.
        """
        with mock.patch.object(access, "PosixFiles", lambda: self):
            yield self

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> File:
        direct = direct and self.most_bytes is None
        operation: Operation = "open new" if mode == "new" else "open read" if mode == "read" else "open write"
        below = self._files
        return self.perform(
            Call(operation, path), lambda: _FaultyFile(self, path, below.open(path, mode, direct=direct, fresh=fresh))
        )

    def list(self, path: str) -> Mapping[str, int | None]:
        return self.perform(Call("list", path), lambda: self._files.list(path))

    def make_dir(self, path: str) -> None:
        self.perform(Call("make_dir", path), lambda: self._files.make_dir(path))

    def link(self, old: str, new: str) -> None:
        def link() -> None:
            self._files.link(old, new)
            self._move_length(old, new)  # the bytes of both names count once, under the newest name

        self.perform(Call("link", new), link)

    def rename(self, old: str, new: str) -> None:
        def rename() -> None:
            self._files.rename(old, new)
            self._move_length(old, new)

        self.perform(Call("rename", new), rename)

    def _move_length(self, old: str, new: str) -> None:
        with self._lock:
            if old in self._lengths:
                self._lengths[new] = self._lengths.pop(old)

    def symlink(self, target: str, path: str) -> None:
        self.perform(Call("symlink", path), lambda: self._files.symlink(target, path))

    def remove(self, path: str) -> None:
        def remove() -> None:
            self._files.remove(path)
            with self._lock:
                self._lengths.pop(path, None)

        self.perform(Call("remove", path), remove)

    def sync_dir(self, path: str) -> None:
        self.perform(Call("sync_dir", path), lambda: self._files.sync_dir(path))

    def perform(self, call: Call, act: Callable[[], T]) -> T:
        """Record a call, pass it to `before`, and make it, unless a fault is due for it. For this module only."""
        with self._lock:
            self.calls.append(call)
            matching = [(fault, next(count)) for fault, count in self._faults if fault.matches(call)]
        if before := self.before:
            before(call)
        fault = next((fault for fault, number in matching if fault.nth in (None, number)), None)
        if fault and not fault.after:
            raise OSError(fault.errno, os.strerror(fault.errno), call.path)
        result = act()
        if fault:
            if isinstance(result, _FaultyFile):
                result.close()
            raise OSError(fault.errno, os.strerror(fault.errno), call.path)
        return result

    def charge(self, path: str, length: int, *, exactly: bool = False) -> None:
        """Record that a file is at least `length` bytes long now, or `exactly` so many. For this module only.

        Raises OSError with ENOSPC, and records nothing, if the file grows and all files together exceed the capacity.
        """
        if self._capacity_bytes is None:
            return
        with self._lock:
            present = self._lengths.get(path, 0)
            length = length if exactly else max(length, present)
            if length > present and sum(self._lengths.values()) - present + length > self._capacity_bytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
            self._lengths[path] = length


class _FaultyFile:
    """`ports.File` of a `FaultyFiles`."""

    def __init__(self, files: FaultyFiles, path: str, file: File) -> None:
        self._files, self._path, self._file = files, path, file
        self.size, self.close = file.size, file.close

    def read_into(self, mv: memoryview, offset: int) -> int:
        part = mv[: self._files.most_bytes]
        return self._perform("read", lambda: self._file.read_into(part, offset), offset, len(mv))

    def write_at(self, mv: memoryview, offset: int) -> int:
        def write() -> int:
            part = mv[: self._files.most_bytes]
            self._files.charge(self._path, offset + len(part))
            return self._file.write_at(part, offset)

        return self._perform("write", write, offset, len(mv))

    def reserve(self, length: int) -> None:
        def reserve() -> None:
            self._files.charge(self._path, length)
            self._file.reserve(length)

        self._perform("reserve", reserve, length=length)

    def resize(self, length: int) -> None:
        def resize() -> None:
            self._files.charge(self._path, length, exactly=True)
            self._file.resize(length)

        self._perform("resize", resize, length=length)

    def sync(self) -> None:
        self._perform("sync", self._file.sync)

    def _perform(
        self, operation: Operation, act: Callable[[], T], offset: int | None = None, length: int | None = None
    ) -> T:
        return self._files.perform(Call(operation, self._path, offset, length), act)

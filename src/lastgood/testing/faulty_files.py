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
"""the operations that change nothing on the disk"""

T = TypeVar("T")


@dataclass(frozen=True)
class Call:
    """One call to the file system.

    `path`: absolute; of a link and of a rename, the new name. `offset` and `length`: in bytes, of a read or a write; of
    reserve and resize the length alone.
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
    """An OSError that is raised in place of a call.

    `operation`: which calls fail; "change" stands for all that change something on the disk.
    `path`: a shell pattern for the whole path ("*": all paths; `*` matches `/` as well), as in `"*.safetensors"`.
    `errno`: the error (EIO).
    `nth`: only the n-th call that matches fails, counted from 1 since the fault was injected (None: each of them).
    `after`: the call is made first, and then the error is raised, as when a network file system loses a reply (False).
    """

    operation: Operation | Literal["change"]
    path: str = "*"
    errno: int = errno.EIO
    nth: int | None = None
    after: bool = False

    def matches(self, call: Call) -> bool:
        """Whether this fault is about such a call."""
        of_kind = call.changes if self.operation == "change" else call.operation == self.operation
        return of_kind and fnmatch.fnmatchcase(call.path, self.path)


class FaultyFiles:
    """`ports.Files` over another one, with faults; without any it behaves like that one, and records its calls.

    `faults`: what fails; `inject` adds to them, `clear` removes them all.
    `capacity_bytes`: what the files that are made through this object may hold together; what goes beyond it raises
    ENOSPC (None: unlimited).
    `most_bytes`: a read or write transfers no more than so many bytes, and its caller has to go on with the rest (None:
    unlimited). Files are then opened without direct I/O, which takes whole blocks only.
    `before`: receives each call before it is made; what it raises, the call raises (None).
    `files`: the file system below (the operating system's).
    `calls`: every call so far, in order, the failed ones included.

    The attributes `most_bytes` and `before` may be set at any time. Calls may come from several threads.

        files = FaultyFiles(Fault("write", "*.safetensors", errno.ENOSPC, nth=3))
        with files.installed(), lastgood.Checkpointer("runs/test", state) as ckpt:
            ...
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
        self._lengths: dict[str, int] = {}  # of the files that were made through this object
        self._faults: list[tuple[Fault, Iterator[int]]] = []
        self._lock = threading.Lock()
        self.inject(*faults)

    def inject(self, *faults: Fault) -> None:
        """Add faults; of several that match a call the first is raised."""
        with self._lock:
            self._faults += [(fault, itertools.count(1)) for fault in faults]

    def clear(self) -> None:
        """Remove all faults: the disk works again."""
        with self._lock:
            self._faults.clear()

    def changes(self) -> list[tuple[Operation, str]]:
        """Operation and path of the calls so far that change something on the disk."""
        return [(call.operation, call.path) for call in self.calls if call.changes]

    @contextlib.contextmanager
    def installed(self) -> Iterator[FaultyFiles]:
        """Each run that is opened inside the block, in any thread of this process, uses these files.

        Slots with `persist="mmap"` do not: they are written through memory, and not through calls.
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
        self.perform(Call("link", new), lambda: self._files.link(old, new))
        self._move_length(old, new)  # the bytes of both names count once, under the newest name

    def rename(self, old: str, new: str) -> None:
        self.perform(Call("rename", new), lambda: self._files.rename(old, new))
        self._move_length(old, new)

    def _move_length(self, old: str, new: str) -> None:
        with self._lock:
            if old in self._lengths:
                self._lengths[new] = self._lengths.pop(old)

    def symlink(self, target: str, path: str) -> None:
        self.perform(Call("symlink", path), lambda: self._files.symlink(target, path))

    def remove(self, path: str) -> None:
        self.perform(Call("remove", path), lambda: self._files.remove(path))
        with self._lock:
            self._lengths.pop(path, None)

    def sync_dir(self, path: str) -> None:
        self.perform(Call("sync_dir", path), lambda: self._files.sync_dir(path))

    def perform(self, call: Call, act: Callable[[], T]) -> T:
        """Record a call and make it, unless it is to fail."""
        with self._lock:
            self.calls.append(call)
            matching = [(fault, next(count)) for fault, count in self._faults if fault.matches(call)]
        if self.before:
            self.before(call)
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
        """Count a file as at least, or exactly, `length` bytes long. Raises ENOSPC when the disk holds no more."""
        if self._capacity_bytes is None:
            return
        with self._lock:
            others = sum(self._lengths.values()) - self._lengths.get(path, 0)
            length = length if exactly else max(length, self._lengths.get(path, 0))
            if length > self._lengths.get(path, 0) and others + length > self._capacity_bytes:
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

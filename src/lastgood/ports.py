"""What this package needs from outside, as contracts. They hold no behaviour, but for `never`.

Tests pass in their own implementations: a disk that loses, tears and reorders what was not synced, a tier that is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from .records import Extent

OpenMode = Literal["new", "read", "write"]
Stop = Callable[[], bool]
"""Polled by work that may end early. Once it returns True, the work ends as its function documents: most raise
Cancelled."""


def never() -> bool:
    """A `Stop` that lets work go on to its end."""
    return False


class File(Protocol):
    """An open file. Every call may raise OSError.

    =====================  ==========================================================================
    call                   required behaviour
    =====================  ==========================================================================
    size()                 returns the current length in bytes
    read_into(mv, offset)  reads up to len(mv) bytes and returns their number, which is 0 only at the
                           end of the file; may be called from several threads at once
    write_at(mv, offset)   writes up to len(mv) bytes and returns their number (>= 1); may be called from
                           several threads at once, for ranges that do not overlap
    reserve(length)        allocates the space: raises ENOSPC here rather than in a later write; the
                           length becomes at least `length`
    resize(length)         cuts or extends the file
    sync()                 content and length survive power loss on return; its first error is final:
                           every later call raises too
    close()                reports no error that sync did not report; nothing may be called afterwards
    =====================  ==========================================================================

    `reserve`, `resize`, `sync` and `close` are called by one thread, while no write is under way.
    A file that was opened with `direct` takes buffers, offsets and lengths that are multiples of
    limits.DIRECT_IO_BYTES.
    """

    def size(self) -> int: ...
    def read_into(self, mv: memoryview, offset: int) -> int: ...
    def write_at(self, mv: memoryview, offset: int) -> int: ...
    def reserve(self, length: int) -> None: ...
    def resize(self, length: int) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Files(Protocol):
    """A POSIX file system. Paths are absolute strings. Errors are OSError. Every call may be made from any thread.

    ==========================  =====================================================================
    call                        required behaviour
    ==========================  =====================================================================
    open(path, "new")           creates a file and returns it; FileExistsError if the name is taken
    open(path, "write")         returns an existing file, to be overwritten in place
    open(path, "read")          returns an existing file; with `fresh`, reads show the medium rather
                                than the page cache, as far as the system allows it
    list(path)                  name -> length of a regular file in bytes, None for a directory, -1 for
                                anything else
    make_dir(path)              creates a directory; FileExistsError if the name is taken
    link(old, new)              gives a file a further name, atomically; FileExistsError if it is taken
    rename(old, new)            `new` names either the old or the new file at every instant
    symlink(target, path)       creates a symbolic link; FileExistsError if the name is taken
    remove(path)                removes a file, a symbolic link or an empty directory
    sync_dir(path)              the names in the directory survive power loss on return
    ==========================  =====================================================================

    `open` never follows a symbolic link in the last component of the path. Where a path does not exist, a call raises
    FileNotFoundError.
    """

    def open(self, path: str, mode: OpenMode, *, direct: bool = False, fresh: bool = False) -> File: ...
    def list(self, path: str) -> Mapping[str, int | None]: ...
    def make_dir(self, path: str) -> None: ...
    def link(self, old: str, new: str) -> None: ...
    def rename(self, old: str, new: str) -> None: ...
    def symlink(self, target: str, path: str) -> None: ...
    def remove(self, path: str) -> None: ...
    def sync_dir(self, path: str) -> None: ...


class Store(Protocol):
    """A key-value store that all ranks of a job share. Every call may be made from any thread and raises TierDown
    where the store cannot be reached.

    =====================================  =============================================================
    call                                   required behaviour
    =====================================  =============================================================
    set(values)                            stores these values; every `get` and `has` that begins after the
                                           return, on any rank, sees them
    has(keys)                              returns whether all of these keys exist now; does not wait
    get(keys, timeout_seconds, cancelled)  waits up to `timeout_seconds` until every key exists and returns
                                           the values in the order of the keys; raises TimedOut after that.
                                           `cancelled()` is polled in the calling thread, every
                                           `poll_seconds` (None: with growing pauses); once it is true,
                                           TimedOut is raised
    delete(keys)                           removes these keys; a key that does not exist is ignored
    =====================================  =============================================================
    """

    def set(self, values: Mapping[str, bytes]) -> None: ...
    def has(self, keys: Sequence[str]) -> bool: ...
    def get(
        self,
        keys: Sequence[str],
        timeout_seconds: float,
        cancelled: Callable[[], bool] = ...,
        poll_seconds: float | None = ...,
    ) -> list[bytes]: ...
    def delete(self, keys: Sequence[str]) -> None: ...


class Upload(Protocol):
    """A blob that is being written. It has no meaning until `finish` has returned.

    ====================  ===========================================================================
    call                  required behaviour
    ====================  ===========================================================================
    write_at(mv, offset)  writes all of `mv` or raises; may be called from several threads at once; each
                          range of the blob is written once
    finish()              the blob is complete on return, and durable once a later put_new in its folder
                          has returned; called by one thread, after every write_at
    abort()               removes the blob as far as possible; does not raise where it was removed before;
                          called by one thread, while no write_at is under way
    ====================  ===========================================================================

    `write_at` takes page-aligned buffers and offsets. Past the end of the blob `mv` may be padded up to the next page.
    `write_at` and `finish` raise NoSpace, NotWritable or TierDown.
    """

    def write_at(self, mv: memoryview, offset: int) -> None: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...


class Tier(Protocol):
    """A storage backend: immutable blobs by name. Every call may be made from any thread.

    ========================  ====================  =================================================
    call                      the name exists       required behaviour
    ========================  ====================  =================================================
    create(name, length)      no                    returns an upload whose space is reserved; otherwise raises
                                                    NoSpace
    create(name, length)      yes                   raises NameTaken; the old blob is untouched
    put_new(name, data)       no                    the blob exists whole or not at all; it is durable on return,
                                                    and so is every blob of its folder that was finished before
    put_new(name, data)       with the same bytes   changes nothing; the blob is durable on return
    put_new(name, data)       with other bytes      raises NameTaken; the old blob is untouched
    put_new(name, data)       outcome not known     raises CommitUnknown; nothing is deleted
    point(name, data, to)     yes or no             replaces the pointer: a reader finds the old or the new bytes
    read_into(extent, mv)     yes                   fills mv[:extent.length]
    read_into(extent, mv)     yes, but shorter      raises Truncated; the content of mv is undefined
    read_into(extent, mv)     no                    raises MissingBlob
    list(folder)              yes                   name -> length in bytes, None for a folder, -1 for anything else
    list(folder)              no                    returns an empty mapping
    delete(name)              yes                   removes the blob; durable on return
    delete(name)              no                    changes nothing; durable on return
    ========================  ====================  =================================================

    Two rules make the table: a name never changes its meaning (except for pointers), and a reader of a blob whose
    put_new returned never sees half of it.

    `place` is the path or URL, for messages. `fresh=True` reads the medium, past all caches. `mv` may be longer than
    the extent, for alignment. `newest_only`: each commit deletes all generations but itself and the newest verified one
    before it, without being asked. `reads_at_once`: how many chunks of a blob are worth reading at the same time.
    A tier may have `reads_in_place(name)`: whether it reads this blob into any memory as well as into buffers that are
    page-aligned and as long as pages.
    Errors belong to the tree in errors.py: Damaged where bytes are lost, Unavailable where they cannot be reached now,
    NotWritable where this user has no permission.
    """

    place: str
    newest_only: bool
    reads_at_once: int

    def create(self, name: str, length: int) -> Upload: ...
    def put_new(self, name: str, data: bytes) -> None: ...
    def point(self, name: str, data: bytes, to: str) -> None: ...
    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None: ...
    def list(self, folder: str) -> Mapping[str, int | None]: ...
    def delete(self, name: str) -> None: ...


class Shared(Tier, Protocol):
    """A tier that other processes write to as well.

    ========================  =============================================================================
    call                      required behaviour
    ========================  =============================================================================
    forget(folder)            drops what is cached about the folder, because another process may have removed it;
                              raises nothing
    ========================  =============================================================================
    """

    def forget(self, folder: str) -> None: ...


class Mendable(Tier, Protocol):
    """A tier whose files can be replaced by rebuilt ones.

    ========================  =============================================================================
    call                      required behaviour
    ========================  =============================================================================
    replace(name, by)         gives the finished blob `by` the name `name`, which is the old or the new file at
                              every instant; durable on return, and the name `by` no longer exists; raises
                              MissingBlob, NoSpace, NotWritable or TierDown
    ========================  =============================================================================
    """

    def replace(self, name: str, by: str) -> None: ...

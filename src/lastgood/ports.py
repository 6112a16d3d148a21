"""What this package needs from outside, as contracts. They hold no behaviour.

Tests pass in their own: a disk that loses, tears and reorders what was not synced, a tier that is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from .records import Extent

OpenMode = Literal["new", "read", "write"]


class File(Protocol):
    """An open file.

    =====================  ==========================================================================
    call                   required behaviour
    =====================  ==========================================================================
    size()                 length in bytes now
    read_into(mv, offset)  reads up to len(mv) bytes, returns how many; 0 only at the end
    write_at(mv, offset)   writes up to len(mv) bytes, returns how many (>= 1); from any thread
    reserve(length)        raises ENOSPC now rather than later; the length becomes at least `length`
    resize(length)         cuts or extends
    sync()                 content and length survive power loss on return; its first error is final
    close()                never reports what sync did not
    =====================  ==========================================================================

    A file opened `direct` takes buffers, offsets and lengths that are multiples of 4096.
    """

    def size(self) -> int: ...
    def read_into(self, mv: memoryview, offset: int) -> int: ...
    def write_at(self, mv: memoryview, offset: int) -> int: ...
    def reserve(self, length: int) -> None: ...
    def resize(self, length: int) -> None: ...
    def sync(self) -> None: ...
    def close(self) -> None: ...


class Files(Protocol):
    """A POSIX file system. Errors are OSError. Paths are absolute strings.

    ==========================  =====================================================================
    call                        required behaviour
    ==========================  =====================================================================
    open(path, "new")           creates; FileExistsError when the name is taken
    open(path, "write")         a file that is there, to be overwritten in place; no links, as for "read"
    open(path, "read")          never follows a symbolic link at the last component;
                                `fresh`: what the medium has, as far as that can be had
    list(path)                  name -> length of a regular file, None for a directory, -1 otherwise
    make_dir(path)              FileExistsError when the name is taken
    link(old, new)              a further name for a file, atomically; FileExistsError when taken
    rename(old, new)            `new` names the old or the new file at every instant
    symlink(target, path)       FileExistsError when the name is taken
    remove(path)                a file, a symbolic link or an empty directory
    sync_dir(path)              the names in it survive power loss on return
    ==========================  =====================================================================
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
    """What the ranks of a job share: small values by name, seen by all of them.

    ======================  ====================================================================
    call                    required behaviour
    ======================  ====================================================================
    set(posts)              each seen by whoever asks from now on
    get(keys, s, no_use)    waits s seconds at most until all are there; asks now and then whether it is of
                            no use any more; raises TimedOut, or TierDown when gone
    has(keys)               whether all of them are there now
    delete(keys)            no-op for what is not there
    ======================  ====================================================================
    """

    def set(self, posts: Mapping[str, bytes]) -> None: ...
    def has(self, keys: Sequence[str]) -> bool: ...
    def get(self, keys: Sequence[str], seconds: float, no_use: Callable[[], bool] = ...) -> list[bytes]: ...
    def delete(self, keys: Sequence[str]) -> None: ...


class Upload(Protocol):
    """A blob that is being written; it has no meaning until `finish` returned.

    ====================  ===========================================================================
    call                  required behaviour
    ====================  ===========================================================================
    write_at(mv, offset)  all of it, or an error; from several threads, each range once
    finish()              whole on return; durable once a later put_new in its folder has returned
    abort()               removed as far as possible; never raises for what is already gone
    ====================  ===========================================================================

    `write_at` takes page-aligned buffers and offsets; `mv` may be padded up to the next page past the blob's end.
    """

    def write_at(self, mv: memoryview, offset: int) -> None: ...
    def finish(self) -> None: ...
    def abort(self) -> None: ...


class Tier(Protocol):
    """Immutable blobs by name.

    ========================  ====================  =================================================
    call                      name already there    required behaviour
    ========================  ====================  =================================================
    create(name, length)      no                    space is reserved before it returns, else NoSpace
    create(name, length)      yes                   raise NameTaken; the old blob is untouched
    put_new(name, data)       no                    whole or not at all; durable on return, and with it every blob
                                                    of its folder that was finished before
    put_new(name, data)       same bytes            no-op, durable on return
    put_new(name, data)       other bytes           raise NameTaken; the old blob is untouched
    put_new(name, data)       outcome not known     raise CommitUnknown; nothing is deleted
    point(name, data, to)     yes or no             replaced: a reader finds the old or the new bytes
    read_into(extent, mv)     shorter               raise Truncated; the content of mv is undefined
    read_into(extent, mv)     no                    raise MissingBlob
    list(folder)              no                    empty
    delete(name)              no                    no-op; durable on return
    ========================  ====================  =================================================

    Two rules make the table: a name never changes meaning (but for pointers); a reader of a blob whose put
    returned never sees half of it.
    `fresh=True` reads what the medium has, past caches. `mv` may be longer than the extent, for alignment.
    `newest_only`: each commit lets go of all but itself and the newest verified one before it, by itself.
    Errors are of the tree in errors.py: Damaged where bytes are gone, Unavailable where they cannot be reached now.
    """

    place: str
    newest_only: bool

    def create(self, name: str, length: int) -> Upload: ...
    def put_new(self, name: str, data: bytes) -> None: ...
    def point(self, name: str, data: bytes, to: str) -> None: ...
    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None: ...
    def list(self, folder: str) -> Mapping[str, int | None]: ...
    def delete(self, name: str) -> None: ...


class Shared(Tier, Protocol):
    """A tier that other processes write too.

    ========================  =============================================================================
    forget(folder)            what is known of it: another process may have removed it
    ========================  =============================================================================
    """

    def forget(self, folder: str) -> None: ...


class Mendable(Tier, Protocol):
    """A tier whose files can be put back as they were committed.

    ========================  =============================================================================
    replace(name, by)         `name` is the old or the new file at every instant; durable on return; the name
                              `by` is gone
    ========================  =============================================================================
    """

    def replace(self, name: str, by: str) -> None: ...

"""A directory on any POSIX file system, as a tier. Knows names and bytes; never what they mean.

Invariants (write mode `atomic_dirsync`)
  1. What `put_new` and `delete` returned from survives power loss: content, length, every name on its path, and so does
     every blob that was finished in the same folder before: one sync of the folder serves them all.
  2. `put_new` names complete, durable bytes in one atomic step (link), or fails; it never replaces.
  3. After a failed or unknown link or directory sync nothing is deleted: the outcome is read, never guessed.
The two other modes leave steps out, so that their cost and their failures can be measured:
`atomic_nodirsync` syncs no directory; `unsafe` syncs nothing and creates records in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Literal

from .. import reporting
from ..errors import (
    CommitUnknown,
    LastgoodError,
    MissingBlob,
    NameTaken,
    NoSpace,
    NotWritable,
    TierDown,
    Truncated,
    Unreadable,
)
from ..io.files import BLOCK_BYTES, round_up
from ..ports import File, Files
from ..records import Extent

WriteMode = Literal["atomic_dirsync", "atomic_nodirsync", "unsafe"]
LINK = "latest_ok"
"""symbolic link that leads people and scripts to what the pointer record names"""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NOT_OURS = (errno.EACCES, errno.EPERM, errno.EROFS)
_NO_FILE = (errno.ELOOP, errno.EISDIR, errno.ESPIPE)
_ROTTEN = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Disk:
    """`ports.Tier` over a directory. `direct`: whether the file system takes direct I/O (io.files.takes_direct).

    `shared`: another process, which writes into the same folders, makes them go: none goes with its last file.
    """

    newest_only: bool = False

    def __init__(
        self,
        files: Files,
        root: str,
        *,
        mode: WriteMode = "atomic_dirsync",
        direct: bool = False,
        shared: bool = False,
    ) -> None:
        self.place = root
        self._files, self._direct, self._shared = files, direct, shared
        self._syncs_files = mode != "unsafe"
        self._syncs_names = mode == "atomic_dirsync"
        self._atomic = mode != "unsafe"
        self._settled: set[str] = set()  # folders whose own name is known to be durable

    # ---- writing -------------------------------------------------------------------------------------------

    def create(self, name: str, length: int) -> DiskUpload:
        """Open a new blob of `length` bytes, its space reserved. Raises NameTaken, NoSpace, NotWritable, TierDown."""
        path = self._path(name)
        with self._telling(name), self._still_there(name):
            self._make_folder(_folder(name))
            try:
                file = self._files.open(path, "new", direct=self._direct)  # gap: after_folder
            except FileExistsError:
                raise NameTaken(f"{path} exists already", safe="It is untouched.") from None
            upload = DiskUpload(self, file, name, length)
            try:
                file.reserve(round_up(length))  # guard: blob-space-reserved
            except OSError:
                upload.abort()  # guard: failed-reserve-aborted
                raise
            return upload

    def put_new(self, name: str, data: bytes) -> None:
        """Create a small blob: whole, durable, never replacing one. The commit primitive."""
        path = self._path(name)
        # Of this thread alone: what is linked below must not be what somebody else is still writing.
        staged = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
        with self._telling(name), self._still_there(name):
            self._make_folder(_folder(name))
            if os.path.basename(path) in self._files.list(os.path.dirname(path)):  # so no space is needed to confirm it
                self._read_back(path, data, FileExistsError(errno.EEXIST, "it exists"))
                self._sync_folder(_folder(name))  # guard: existing-record-name-synced
                return
            if not self._atomic:  # guard: record-staged-before-link
                self._create_in_place(path, data)
                return
            self._write_staged(staged, data)
            try:
                self._files.link(staged, path)  # guard: link-never-overwrites  # gap: before_commit_link
            except OSError as error:
                if isinstance(error, FileExistsError) or error.errno in _FULL or error.errno in _NO_LINKS:
                    self._drop(staged)  # the outcome is known: it was not linked
                if error.errno in _FULL:
                    raise
                if error.errno in _NO_LINKS:
                    self._create_in_place(path, data)
                else:
                    self._read_back(path, data, error)  # guard: unknown-link-read-back
            try:
                self._sync_folder(_folder(name))  # guard: record-name-synced
            except OSError as error:  # guard: unsynced-name-is-unknown
                raise _unknown(path, error) from error
            self._drop(staged)  # guard: staged-record-removed

    def point(self, name: str, data: bytes, to: str) -> None:
        """Replace the pointer record `name`, and the symbolic link `latest_ok` beside it, whatever stands there."""
        path, link = self._path(name), self._path(LINK)
        with self._telling(name):
            self._write_staged(path + ".tmp", data)
            self._rename_over(path + ".tmp", path)  # guard: pointer-replaced-by-rename
        with self._telling(LINK):
            self._remove_if_there(link + ".tmp")  # guard: stale-link-removed
            try:
                self._files.symlink(to, link + ".tmp")
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
            else:
                self._rename_over(link + ".tmp", link)
            self._sync_folder("")  # guard: pointer-name-synced

    def replace(self, name: str, by: str) -> None:
        """Put a finished blob in the place of another of its folder, durably."""
        with self._telling(name):
            self._sync_folder(_folder(by))  # its own name first: it is all that a crash may leave of the two
            self._files.rename(self._path(by), self._path(name))
            self._sync_folder(_folder(name))

    def forget(self, folder: str) -> None:
        self._settled.discard(folder)

    def delete(self, name: str) -> None:
        """Remove a blob, durably, and its folder when that is empty."""
        with self._telling(name):
            self._remove_if_there(self._path(name))
            folder = _folder(name)
            try:
                # guard: removed-name-synced
                self._sync_folder(folder)  # also when it was gone: whoever removed it may have died before this
            except FileNotFoundError:
                return
            if "/" not in folder:
                return
            try:
                self._files.remove(self._path(folder))
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return
            self._settled.discard(folder)  # guard: deleted-folder-forgotten
            self._sync_folder(_folder(folder))  # guard: removed-folder-name-synced

    # ---- reading -------------------------------------------------------------------------------------------

    def list(self, folder: str) -> Mapping[str, int | None]:
        """Names in a folder: length of a file, None for a folder, -1 for anything else. Empty when it is not there."""
        with self._telling(folder):
            try:
                return self._files.list(self._path(folder))
            except FileNotFoundError:
                return {}

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        """Fill mv[:extent.length]. `fresh` reads past the page cache when mv is a page-aligned, padded buffer."""
        direct = fresh and self._direct and extent.offset % BLOCK_BYTES == 0 and _takes_direct(mv, extent.length)
        want = round_up(extent.length) if direct else extent.length
        with self._telling(extent.blob):
            file = self._files.open(self._path(extent.blob), "read", direct=direct, fresh=fresh)
            try:
                got = 0
                while got < extent.length:
                    try:
                        end = got + file.read_into(mv[got:want], extent.offset + got)
                    except OSError as error:
                        if error.errno not in _ROTTEN:
                            raise
                        what = f"{self._path(extent.blob)} cannot be read at {extent.offset + got:,}: {error.strerror}"
                        raise Unreadable(what, blob=extent.blob, offset=extent.offset + got) from error
                    # Direct I/O goes on from a block boundary; less than a block is had only at the end of the file.
                    whole = end - end % BLOCK_BYTES if direct and end < extent.length else end
                    if whole <= got:  # guard: early-end-is-damage
                        raise Truncated(
                            f"{self._path(extent.blob)} ends at {extent.offset + end:,} bytes, "
                            f"before {extent.offset + extent.length:,}",
                            blob=extent.blob,
                            offset=extent.offset + end,
                        )
                    got = whole  # guard: short-read-loop
            finally:
                file.close()

    # ---- steps ---------------------------------------------------------------------------------------------

    def _path(self, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):  # guard: name-inside-run
            raise MissingBlob(f"{name!r} is no name inside a run", blob=name)
        return os.path.join(self.place, name) if name else self.place

    def _make_folder(self, folder: str) -> None:
        if not folder or folder in self._settled:
            return
        self._make_folder(_folder(folder))
        with contextlib.suppress(FileExistsError):  # guard: existing-folder-synced
            self._files.make_dir(self._path(folder))
        # Also when it was there: whoever made it may have died before its name was durable.
        self._sync_folder(_folder(folder))  # guard: new-folder-name-synced
        self._settled.add(folder)

    def _sync_folder(self, folder: str) -> None:
        if self._syncs_names:
            self._files.sync_dir(self._path(folder))

    def _write_staged(self, staged: str, data: bytes) -> None:
        self._remove_if_there(staged)  # guard: stale-staged-record-removed
        try:
            self._write_whole(staged, data)
        except OSError:
            self._drop(staged)  # guard: failed-staging-removed
            raise

    def _create_in_place(self, path: str, data: bytes) -> None:
        """Without links: O_EXCL, and readers demand the record's own digest, so half of it is never taken for it."""
        try:
            self._write_whole(path, data)
        except FileExistsError as error:
            self._read_back(path, data, error)
        except OSError as error:
            if error.errno in _FULL:
                self._drop(path)
                raise
            raise _unknown(path, error) from error  # guard: failed-creation-is-unknown

    def _write_whole(self, path: str, data: bytes) -> None:
        file = self._files.open(path, "new")
        try:
            _write_all(file, memoryview(data), 0)
            if self._syncs_files:  # guard: record-content-synced
                file.sync()
        finally:
            file.close()

    def _read_back(self, path: str, data: bytes, error: OSError) -> None:
        """Accept what lies at `path` if it is `data`; else say what is known. Deletes nothing."""
        same = False
        with contextlib.suppress(OSError):
            file = self._files.open(path, "read")
            try:
                found, buffer = 0, memoryview(bytearray(len(data) + 1))  # guard: read-back-past-end
                while (count := file.read_into(buffer[found:], found)) > 0:  # guard: read-back-loop
                    found += count
                if buffer[:found] == data:  # guard: read-back-compares
                    if self._syncs_files:  # guard: found-record-synced
                        file.sync()  # whoever created it in place may have died before this
                    same = True
            finally:
                file.close()
        if same:
            return
        if isinstance(error, FileExistsError):
            raise NameTaken(f"{path} exists already with other bytes", safe="It is untouched.") from error
        raise _unknown(path, error) from error  # guard: unknown-outcome-deletes-nothing

    def _rename_over(self, staged: str, path: str) -> None:
        """Give `staged` the name `path`. A folder that stands there is renamed, never deleted: it may be the only copy.

        A run that was copied with symbolic links followed has a folder of copied files in the place of `latest_ok`.
        """
        try:
            self._files.rename(staged, path)
        except IsADirectoryError:
            there = self._files.list(os.path.dirname(path))
            names = (f"{os.path.basename(path)}.copy-{number}" for number in itertools.count(1))
            aside = os.path.join(os.path.dirname(path), next(name for name in names if name not in there))
            self._files.rename(path, aside)
            self._files.rename(staged, path)
            reporting.warning(
                f"{path} was a folder, as it is after a copy that followed symbolic links. It is renamed to {aside}, "
                "and nothing in it is used. Delete it to free its space."
            )

    def _remove_if_there(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(path)

    def _drop(self, staged: str) -> None:
        # The caller's outcome is settled; what cannot be removed is litter that the next opening takes away.
        with contextlib.suppress(OSError):
            self._files.remove(staged)

    @contextlib.contextmanager
    def _still_there(self, name: str) -> Iterator[None]:
        """Say what has happened where a folder of the run is missing while it is written. None is made anew.

        A folder that was moved holds the generations: a new one in its place would be a second run, without them.
        """
        try:
            yield
        except FileNotFoundError as error:
            folder = _folder(name)
            lost = [folder.partition("/")[0], folder] if folder else []
            missing = next((one for one in ["", *lost] if not self._is_folder(one)), None)
            if missing is None:
                raise
            raise TierDown(
                f"{self._path(missing)} is gone: the run was moved or deleted while it was open, and {name} cannot be "
                "written",
                safe="Nothing was made anew, and whatever was moved is as it was.",
                todo="Move it back, and the next save works. Or stop, and start again with the path where it is now.",
            ) from error

    def _is_folder(self, folder: str) -> bool:
        try:
            self._files.list(self._path(folder))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    @contextlib.contextmanager
    def _telling(self, name: str) -> Iterator[None]:
        """Turn an OSError into the tree's word for it."""
        try:
            yield
        except LastgoodError:
            raise
        except OSError as error:
            where = f"{os.path.join(self.place, name)}: {error.strerror or error}"
            if error.errno in _FULL:
                raise NoSpace(
                    f"no space left for {where}",
                    safe="Every committed generation is untouched, and training can go on.",
                    todo="Free space on this disk, or keep fewer generations (retention=Keep(...)).",
                ) from error
            if isinstance(error, FileNotFoundError):
                raise MissingBlob(f"missing: {where}", blob=name) from error
            if error.errno in _NO_FILE:
                raise MissingBlob(f"a link, folder or pipe where a file was committed: {where}", blob=name) from error
            if error.errno in _NOT_OURS:
                raise NotWritable(
                    f"not permitted: {where}", safe="Nothing was changed.", todo="Check the owner and the mount."
                ) from error
            raise TierDown(f"the disk failed: {where}", safe="Every committed generation is untouched.") from error


class DiskUpload:
    """`ports.Upload`: a file that nobody knows yet."""

    def __init__(self, disk: Disk, file: File, name: str, length: int) -> None:
        self._disk, self._file, self._name, self._length = disk, file, name, length
        self._open = True

    def write_at(self, mv: memoryview, offset: int) -> None:
        with self._disk._telling(self._name):
            _write_all(self._file, mv, offset)

    def finish(self) -> None:
        """Cut the padded tail, then make content and length durable; the name follows with the folder's next record."""
        with self._disk._telling(self._name):
            self._file.resize(self._length)  # guard: padded-tail-cut
            if self._disk._syncs_files:  # guard: blob-content-synced
                self._file.sync()
            self._close()

    def abort(self) -> None:
        self._close()
        self._disk._drop(self._disk._path(self._name))  # guard: abort-removes-blob
        folder = _folder(self._name)
        if "/" in folder and not self._disk._shared:  # it goes too when this was all it held
            self._disk._drop(self._disk._path(folder))  # guard: abort-removes-folder
            self._disk._settled.discard(folder)  # guard: aborted-folder-forgotten

    def _close(self) -> None:
        if self._open:
            self._open = False
            self._file.close()


def _write_all(file: File, mv: memoryview, offset: int) -> None:
    """Write every byte: a write may take fewer than it was given."""
    done = 0
    while done < len(mv):  # guard: short-write-loop
        count = file.write_at(mv[done:], offset + done)
        # Direct I/O goes on from a block boundary; the last, partial block of what was taken is written again.
        # guard: short-write-keeps-alignment
        whole = count if count == len(mv) - done else count - count % BLOCK_BYTES or count
        if whole <= 0:  # guard: zero-write-is-error
            raise OSError(errno.EIO, "the file takes no more bytes")
        done += whole  # guard: short-write-counted


def _takes_direct(mv: memoryview, length: int) -> bool:
    # guard: direct-io-needs-alignment
    return len(mv) >= round_up(length) > 0 and ctypes.addressof(ctypes.c_char.from_buffer(mv)) % BLOCK_BYTES == 0


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _unknown(path: str, error: OSError) -> CommitUnknown:
    return CommitUnknown(
        f"{path}: {error.strerror or error}; it may or may not have become durable",
        safe="Nothing was deleted.",
        todo="The next opening of the run reads it and knows.",
    )

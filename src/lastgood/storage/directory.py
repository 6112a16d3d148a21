"""A tier in a directory on any POSIX file system.

Invariants (write mode `atomic_dirsync`)
  1. The effect of a `put_new` or `delete` that has returned survives power loss: content, length, and every name on the
     path. So does every blob that was finished in the same folder before: one sync of the folder covers all of them.
  2. `put_new` gives complete, durable bytes their name in one atomic step (link), or fails. It never replaces a file.
     On a file system without hard links it creates the file under its name; readers refuse a partial record.
  3. A record whose link or directory sync has an unknown outcome is not deleted. After a link it is read back; after a
     directory sync CommitUnknown is raised.
The two other modes leave steps out, so that the cost of these steps, and the failures without them, can be measured:
`atomic_nodirsync` syncs no directory; `unsafe` syncs nothing and creates records in place.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Literal

from .. import reporting
from ..errors import CommitUnknown, MissingBlob, NameTaken, TierDown, Truncated, Unreadable
from ..io import os_errors
from ..io.files import DISK_READS, PosixFile, is_aligned, round_up, write_all
from ..io.memory_files import MemoryFiles
from ..io.os_errors import FULL, UNREADABLE
from ..io.reused_files import LentFile
from ..limits import DIRECT_IO_BYTES
from ..ports import Files
from ..records import Extent
from .disk_upload import DiskUpload

WriteMode = Literal["atomic_dirsync", "atomic_nodirsync", "unsafe"]
LINK = "latest_ok"
"""symbolic link, for people and scripts, to the folder that the pointer record names"""

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Disk:
    """`ports.Tier` over the directory `root`, an absolute path. `place` (default None: `root`) names it in messages.

    `direct` (default False): use direct I/O, which the file system must support (io.files.takes_direct). `shared`
    (default False): other processes write into the same folders and remove them, so an aborted upload leaves its empty
    folder in place.
    """

    newest_only: bool = False  # nothing is deleted unless it is asked for (ports.Tier)
    reads_at_once: int = DISK_READS

    def __init__(
        self,
        files: Files,
        root: str,
        *,
        mode: WriteMode = "atomic_dirsync",
        direct: bool = False,
        shared: bool = False,
        place: str | None = None,
    ) -> None:
        self.root, self.place = root, place or root
        self._files, self._direct, self._shared = files, direct, shared
        self._syncs_files = mode != "unsafe"
        self._syncs_names = mode == "atomic_dirsync"
        self._atomic = mode != "unsafe"
        self._durable_folders: set[str] = set()  # folders whose names are known to be durable

    # ---- writing -------------------------------------------------------------------------------------------

    def create(self, name: str, length: int) -> DiskUpload:
        """A new blob of `length` bytes, whose space is reserved. Raises NameTaken, NoSpace, NotWritable, TierDown."""
        path = self._path(name)
        with self._translated(name), self._reporting_missing_folders(name):
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

    def lend(self, name: str, length: int) -> LentFile | None:
        """As `ReusedFiles.lend`, for the blob `name` that is created next; None on a medium other than memory."""
        return self._files.reused.lend(self._path(name), length) if isinstance(self._files, MemoryFiles) else None

    def put_new(self, name: str, data: bytes) -> None:
        """Create a small blob atomically and durably; an existing one is never replaced. Commits rest on this method.

        Raises NameTaken, CommitUnknown, NoSpace, NotWritable, TierDown.
        """
        path = self._path(name)
        # The name is unique to this thread: no other thread may be writing the file that is linked below.
        staged = f"{path}.{os.getpid()}-{threading.get_ident()}.tmp"
        with self._translated(name), self._reporting_missing_folders(name):
            self._make_folder(_folder(name))
            # An existing record is confirmed without writing anything, which also works on a full disk.
            if os.path.basename(path) in self._files.list(os.path.dirname(path)):
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
                if isinstance(error, FileExistsError) or error.errno in FULL or error.errno in _NO_LINKS:
                    self._drop(staged)  # the outcome is known: there is no link
                if error.errno in FULL:
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
        """Replace the pointer record `name` and the symbolic link `latest_ok`, which will lead to the folder `to`.

        A directory that stands in the place of either is renamed and kept. Raises NoSpace, NotWritable, TierDown.
        """
        path, link = self._path(name), self._path(LINK)
        with self._translated(name):
            self._write_staged(path + ".tmp", data)
            self._rename_over(path + ".tmp", path)  # guard: pointer-replaced-by-rename
        with self._translated(LINK):
            self._remove_if_present(link + ".tmp")  # guard: stale-link-removed
            try:
                self._files.symlink(to, link + ".tmp")
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
            else:
                self._rename_over(link + ".tmp", link)
            self._sync_folder("")  # guard: pointer-name-synced

    def replace(self, name: str, by: str) -> None:
        """Rename the finished blob `by` over the blob `name` of the same folder, durably."""
        with self._translated(name):
            self._sync_folder(_folder(by))  # first: the name `by` may be the only one that a crash leaves
            self._files.rename(self._path(by), self._path(name))
            self._sync_folder(_folder(name))

    def name_finished(self, name: str, by: str) -> None:
        """Rename the finished blob `by` to `name` of the same folder, durably, unless that name is taken.

        Raises NameTaken, NotWritable, TierDown.
        """
        path, staged = self._path(name), self._path(by)
        with self._translated(name):
            try:
                self._files.link(staged, path)  # guard: finished-file-never-overwrites
            except FileExistsError:
                raise NameTaken(f"{path} exists already", safe="It is untouched.") from None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._files.rename(staged, path)
            else:
                self._drop(staged)
            self._sync_folder(_folder(name))  # guard: finished-name-synced  # the next record may be COMMIT

    def forget(self, folder: str) -> None:
        """Drop what is cached about a folder that another process may have removed (ports.Shared)."""
        self._durable_folders.discard(folder)

    def delete(self, name: str) -> None:
        """Remove a blob durably, and its folder if that is empty afterwards. Raises NotWritable, TierDown."""
        with self._translated(name):
            self._remove_if_present(self._path(name))
            folder = _folder(name)
            try:
                # guard: removed-name-synced
                self._sync_folder(folder)  # also if it did not exist: who removed it may have crashed before this sync
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
            self._durable_folders.discard(folder)  # guard: deleted-folder-forgotten
            self._sync_folder(_folder(folder))  # guard: removed-folder-name-synced

    # ---- reading -------------------------------------------------------------------------------------------

    def list(self, folder: str) -> Mapping[str, int | None]:
        """Name -> length of a file in bytes, None for a folder, -1 for anything else. Empty if there is no folder."""
        with self._translated(folder):
            try:
                return self._files.list(self._path(folder))
            except FileNotFoundError:
                return {}

    def versions(self, folder: str) -> Mapping[str, tuple[int | None, str]]:
        """As `list`, with an empty text: nothing tells for certain that a file was written again (Objects.versions)."""
        return {name: (length, "") for name, length in self.list(folder).items()}

    def reads_in_place(self, name: str) -> bool:
        """As `ports.Tier`: files in memory need no direct I/O."""
        return isinstance(self._files, MemoryFiles)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        """Fill mv[:extent.length]. Raises Truncated, MissingBlob, Unreadable, NotWritable, TierDown.

        With `fresh` the read bypasses the page cache: by direct I/O if `mv` is page-aligned and at least as long as the
        extent rounded up to pages, otherwise by dropping clean pages from the cache before.
        """
        direct = fresh and self._direct and extent.offset % DIRECT_IO_BYTES == 0 and is_aligned(mv, extent.length)
        want = round_up(extent.length) if direct else extent.length
        with self._translated(extent.blob):
            file = self._files.open(self._path(extent.blob), "read", direct=direct, fresh=fresh)
            try:
                got = 0
                while got < extent.length:
                    try:
                        end = got + file.read_into(mv[got:want], extent.offset + got)
                    except OSError as error:
                        if error.errno not in UNREADABLE:
                            raise
                        what = f"{self._path(extent.blob)} cannot be read at {extent.offset + got:,}: {error.strerror}"
                        raise Unreadable(what, blob=extent.blob, offset=extent.offset + got) from error
                    # Direct I/O continues at a block boundary; only the end of the file yields less than a block.
                    whole = end - end % DIRECT_IO_BYTES if direct and end < extent.length else end
                    if whole <= got:  # guard: early-end-is-damage
                        raise self._truncated(extent, extent.offset + end)
                    got = whole  # guard: short-read-loop
            finally:
                file.close()

    def opened(self, extent: Extent) -> PosixFile:
        """Open the blob of `extent`, all of which it has. The caller closes it.

        Raises Truncated, MissingBlob, NotWritable, TierDown.
        """
        with self._translated(extent.blob):
            file = self._files.open(self._path(extent.blob), "read")
            assert isinstance(file, PosixFile), "no other kind of file has a descriptor"
            try:
                if (size := file.size()) < extent.offset + extent.length:  # guard: early-end-is-damage-when-sent
                    raise self._truncated(extent, size)
            except BaseException:
                file.close()
                raise
            return file

    # ---- steps ---------------------------------------------------------------------------------------------

    def _truncated(self, extent: Extent, end: int) -> Truncated:
        what = f"{self._path(extent.blob)} ends at {end:,} bytes, before {extent.offset + extent.length:,}"
        return Truncated(what, blob=extent.blob, offset=end)

    def _path(self, name: str) -> str:
        if name.startswith("/") or ".." in name.split("/"):  # guard: name-inside-run
            raise MissingBlob(f"{name!r} is not a name inside a run", blob=name)
        return os.path.join(self.root, name) if name else self.root

    def _make_folder(self, folder: str) -> None:
        if not folder or folder in self._durable_folders:
            return
        self._make_folder(_folder(folder))
        with contextlib.suppress(FileExistsError):  # guard: existing-folder-synced
            self._files.make_dir(self._path(folder))
        # Also if the folder existed: the process that made it may have crashed before the name was durable.
        self._sync_folder(_folder(folder))  # guard: new-folder-name-synced
        self._durable_folders.add(folder)

    def _sync_folder(self, folder: str) -> None:
        if self._syncs_names:
            self._files.sync_dir(self._path(folder))

    def _write_staged(self, staged: str, data: bytes) -> None:
        self._remove_if_present(staged)  # guard: stale-staged-record-removed
        try:
            self._write_whole(staged, data)
        except OSError:
            self._drop(staged)  # guard: failed-staging-removed
            raise

    def _create_in_place(self, path: str, data: bytes) -> None:
        """Create a record under its final name, with O_EXCL: without hard links, or in the mode `unsafe`.

        Readers demand the digest in the record, so that a partial record is never accepted.
        """
        try:
            self._write_whole(path, data)
        except FileExistsError as error:
            self._read_back(path, data, error)
        except OSError as error:
            if error.errno in FULL:
                self._drop(path)
                raise
            raise _unknown(path, error) from error  # guard: failed-creation-is-unknown

    def _write_whole(self, path: str, data: bytes) -> None:
        file = self._files.open(path, "new")
        try:
            write_all(file, memoryview(data), 0)
            if self._syncs_files:  # guard: record-content-synced
                file.sync()
        finally:
            file.close()

    def _read_back(self, path: str, data: bytes, error: OSError) -> None:
        """Return if the file at `path` holds `data`; otherwise raise what `error` then means. Deletes nothing."""
        same = False
        with contextlib.suppress(OSError):
            file = self._files.open(path, "read")
            try:
                found, buffer = 0, memoryview(bytearray(len(data) + 1))  # guard: read-back-past-end
                while (count := file.read_into(buffer[found:], found)) > 0:  # guard: read-back-loop
                    found += count
                if buffer[:found] == data:  # guard: read-back-compares
                    if self._syncs_files:  # guard: found-record-synced
                        file.sync()  # the process that created it in place may have crashed before its sync
                    same = True
            finally:
                file.close()
        if same:
            return
        if isinstance(error, FileExistsError):
            raise NameTaken(f"{path} exists already with other bytes", safe="It is untouched.") from error
        raise _unknown(path, error) from error  # guard: unknown-outcome-deletes-nothing

    def _rename_over(self, staged: str, path: str) -> None:
        """Rename `staged` to `path`. A folder at `path` is renamed, never deleted: it may be the only copy.

        Copying a run with a tool that follows symbolic links makes a folder of copied files in place of `latest_ok`.
        """
        try:
            self._files.rename(staged, path)
        except IsADirectoryError:
            existing = self._files.list(os.path.dirname(path))
            names = (f"{os.path.basename(path)}.copy-{number}" for number in itertools.count(1))
            aside = os.path.join(os.path.dirname(path), next(name for name in names if name not in existing))
            self._files.rename(path, aside)
            self._files.rename(staged, path)
            reporting.warning(
                f"{path} was a folder, as it is after a copy that followed symbolic links. It is renamed to {aside}, "
                "and nothing in it is used. Delete it to free its space."
            )

    def _remove_if_present(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.remove(path)

    def _drop(self, staged: str) -> None:
        # The outcome of the caller does not depend on it, and the next opening of the run removes what remains.
        with contextlib.suppress(OSError):
            self._files.remove(staged)

    @contextlib.contextmanager
    def _reporting_missing_folders(self, name: str) -> Iterator[None]:
        """Name the missing folder where a write fails because a folder of the run does not exist any more.

        The folder is not created again: if the run was moved, a new folder in its place would be a second run without
        the generations of the first.
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
                f"{self._path(missing)} does not exist any more: the run was moved or deleted while it was open, and "
                f"{name} cannot be written",
                safe="Nothing was created in its place, and what was moved is unchanged.",
                todo="Move it back, and the next save succeeds; or stop the job and start it with the new path.",
            ) from error

    def _is_folder(self, folder: str) -> bool:
        try:
            self._files.list(self._path(folder))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    @contextlib.contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Raise each OSError of the block as the package's error for a call on `name`."""
        try:
            yield
        except OSError as error:
            raise os_errors.in_run(error, self.place, name) from error


def _folder(name: str) -> str:
    return name.rpartition("/")[0]


def _unknown(path: str, error: OSError) -> CommitUnknown:
    return CommitUnknown(
        f"{path}: {error.strerror or error}; the record may or may not be durable",
        safe="Nothing was deleted.",
        todo="The next opening of the run reads the record and decides by it.",
    )

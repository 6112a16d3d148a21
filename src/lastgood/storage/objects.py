"""A tier in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage.

Keys equal the names of files in a directory run. A folder exists as long as an object has its name as a prefix.

Invariants
  1. `put_new` creates with a condition that the store checks (If-None-Match), and never replaces an object.
  2. After any error of a creation but a clear refusal, the name is read: the same bytes are success, other bytes are
     NameTaken. An object that is absent may still appear, because a request may be under way, so the creation of the
     same bytes is repeated; CommitUnknown is raised when that fails too. Nothing is deleted on a guess.
  3. Every request has a deadline, and is repeated a bounded number of times.
The store is assumed to show a completed write to every later read and listing, and to keep what it has acknowledged.
S3, Google and Azure promise both.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

from ..errors import CommitUnknown, LastgoodError, MissingBlob, NameTaken, NotWritable, TierDown, Truncated
from ..limits import STORE_READS
from ..records import Extent
from . import unfinished_uploads
from .object_errors import is_past_the_end, translated, was_never_sent
from .object_store import DEADLINES, Deadlines
from .object_upload import PART_BYTES, ShortUpload, StreamedUpload

if TYPE_CHECKING:
    from obstore.store import ObjectStore

READ_PART_BYTES = 8 << 20
"""A longer read is divided into requests of this length, several at the same time. It is the length of a part of an
upload, so that a request for a chunk asks for one part: stores read parts as a whole."""
LISTED_AT_ONCE = 1000
"""Objects of one reply to a listing: the most that S3 returns."""
READS_AT_ONCE = 8
"""Requests of one read that are under way at the same time."""
CREATION_PAUSES_SECONDS = (0.1, 0.5, 2.0, 8.0)
"""The pauses before a creation whose outcome is not known is repeated."""
COPY_LIMIT_BYTES = 5 << 30
"""S3 copies objects up to this length by itself; a longer one is read and written again."""

ERRORS = (BaseError, OSError)
"""What obstore raises: its own errors, and FileNotFoundError and PermissionError."""
REFUSALS = (AlreadyExistsError, PreconditionError)
"""The condition of a creation does not hold: an object of this name exists, or a request about it is under way."""


class Objects:
    """`ports.Tier` over a folder in an object store.

    `store`: the client of that folder (object_store.opened). `place`: its URL. `deadlines`: of `store`. `pause`: waits
    for a number of seconds.
    """

    newest_only: bool = False  # nothing is deleted unless it is asked for (ports.Tier)
    reads_at_once: int = STORE_READS  # while a reply is awaited, no processor and no disk is busy

    def __init__(
        self,
        store: ObjectStore,
        place: str,
        deadlines: Deadlines = DEADLINES,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self.store, self.place = store, place
        self._deadlines, self._pause = deadlines, pause

    # ---- writing -------------------------------------------------------------------------------------------

    def create(self, name: str, length: int) -> ShortUpload | StreamedUpload:
        """A new blob of `length` bytes. Raises NameTaken, NotWritable, TierDown. No space is reserved."""
        if self.length_of(name) is not None:
            raise NameTaken(f"{self.place}/{name} exists already", safe="It is untouched.")
        if length <= PART_BYTES:
            return ShortUpload(self, name, length)
        return StreamedUpload(self, name, length, self._deadlines)

    def put_new(self, name: str, data: bytes) -> None:
        """Create a small object, or confirm that it has these bytes. Commits rest on this method.

        Raises NameTaken, CommitUnknown, NoSpace, NotWritable, TierDown.
        """
        key, unknown = self.key(name), False
        for pause_seconds in (0.0, *CREATION_PAUSES_SECONDS):
            if pause_seconds:
                self._pause(pause_seconds)
            try:
                # guard: object-created-if-absent
                obstore.put(self.store, key, data, mode="create", use_multipart=False)
                return
            except ERRORS as error:
                last = error
            meaning, refused = translated(last, self.place, name), isinstance(last, REFUSALS)
            if not (refused or unknown or isinstance(meaning, TierDown)):
                raise meaning from last
            unknown |= not refused and not was_never_sent(last)
            if unknown or refused:
                with contextlib.suppress(TierDown, NotWritable):  # whether the name exists is not known either
                    if self._holds(name, data):  # guard: lost-reply-read-back
                        return
        if not unknown:
            raise meaning from last
        raise CommitUnknown(  # guard: unknown-creation-deletes-nothing
            f"{meaning.what}; the object may or may not exist",
            safe="Nothing was deleted.",
            todo="The next opening of the run reads it and decides by it.",
        ) from last

    def point(self, name: str, data: bytes, to: str) -> None:
        """Replace the pointer record `name`. An object store has no symbolic links. Raises as `put`."""
        self.put(name, data)

    def put(self, name: str, data: bytes) -> None:
        """Write a whole object in one request, over an older one. Raises NoSpace, NotWritable, TierDown."""
        with self._translated(name):
            obstore.put(self.store, self.key(name), data, use_multipart=False)

    def replace(self, name: str, by: str) -> None:
        """Copy the finished blob `by` over `name`, then delete `by`. Readers find the old or the new object."""
        length = self.length_of(by)
        if length is None:
            raise MissingBlob(f"missing: {self.place}/{by}", blob=by)
        if length <= COPY_LIMIT_BYTES:
            with self._translated(name):
                obstore.copy(self.store, self.key(by), self.key(name))
        else:
            self._copy_in_parts(by, name, length)
        self.delete(by)  # guard: replacing-blob-copied-first

    def delete(self, name: str) -> None:
        """Remove an object. Raises NotWritable, TierDown."""
        with self._translated(name), contextlib.suppress(FileNotFoundError):
            obstore.delete(self.store, self.key(name))

    def discard(self, name: str) -> None:
        """Remove an object that no record names, as far as possible. Raises nothing."""
        with contextlib.suppress(LastgoodError):
            self.delete(name)

    def forget(self, folder: str) -> None:
        """Nothing is cached about folders (ports.Shared)."""

    # ---- reading -------------------------------------------------------------------------------------------

    def list(self, folder: str) -> Mapping[str, int | None]:
        """Name -> length of an object in bytes, None for a folder. Raises NotWritable, NotARun, TierDown."""
        return {name: length for name, (length, _) in self.versions(folder).items()}

    def versions(self, folder: str) -> Mapping[str, tuple[int | None, str]]:
        """As `list`, and with each length a text that changes when the object is written again."""
        with self._translated(folder):
            found = obstore.list_with_delimiter(self.store, self.key(folder) or None)
        names: dict[str, tuple[int | None, str]] = {
            one.rpartition("/")[2]: (None, "") for one in found["common_prefixes"]
        }
        # Some stores list an empty folder as an object of no bytes with the name of the folder.
        objects = [one for one in found["objects"] if one["path"].rstrip("/") != folder]
        return names | {
            one["path"].rpartition("/")[2]: (one["size"], one["e_tag"] or one["last_modified"].isoformat())
            for one in objects
        }

    def tree(self, folder: str) -> Mapping[str, Mapping[str, int]]:
        """Folder below `folder` -> name -> length of each object directly in it: one request for a thousand objects.

        Raises NotWritable, NotARun, TierDown.
        """
        found: dict[str, dict[str, int]] = {}
        prefix = self.key(folder) + "/"
        with self._translated(folder):
            for batch in obstore.list(self.store, prefix, chunk_size=LISTED_AT_ONCE):
                for one in batch:
                    below, _, name = one["path"].removeprefix(prefix).partition("/")
                    if name and "/" not in name:
                        found.setdefault(below, {})[name] = one["size"]
        return found

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        """Fill mv[:extent.length]. Raises Truncated, MissingBlob, NotWritable, TierDown. No read is cached."""
        key, end = self.key(extent.blob), extent.offset + extent.length
        starts, into = range(extent.offset, end, READ_PART_BYTES), np.frombuffer(mv, np.uint8)

        def read(start: int) -> int:
            """Read one range into its place; returns its length. numpy copies without the GIL."""
            part = obstore.get_range(self.store, key, start=start, length=min(READ_PART_BYTES, end - start))
            at = start - extent.offset
            np.copyto(into[at : at + len(part)], np.frombuffer(memoryview(part), np.uint8))
            return len(part)

        found = 0
        try:
            with self._translated(extent.blob):
                found = sum(self._each(read, starts))
        except TierDown as error:
            if error.__cause__ is None or not is_past_the_end(error.__cause__):
                raise
        if found < extent.length or not starts:
            self._require_length(extent)

    def length_of(self, name: str) -> int | None:
        """The length of an object in bytes; None if there is none. Raises NotWritable, TierDown."""
        try:
            with self._translated(name):
                return obstore.head(self.store, self.key(name))["size"]
        except MissingBlob:
            return None

    def remove_unfinished_uploads(self) -> int:
        """Remove what ended processes have uploaded in part, and return how many uploads these were.

        Only for the holder of the newest claim. Raises NotWritable, TierDown; the run does not depend on it.
        """
        return unfinished_uploads.remove(self.place, self._deadlines)

    def key(self, name: str) -> str:
        """The key of a name, below the prefix of the run. Raises MissingBlob for a name outside of the run."""
        if name.startswith("/") or ".." in name.split("/"):  # guard: object-name-inside-run
            raise MissingBlob(f"{name!r} is not a name inside a run", blob=name)
        return name

    # ---- steps ---------------------------------------------------------------------------------------------

    def _holds(self, name: str, data: bytes) -> bool:
        """Whether an object of this name holds these bytes. Raises NameTaken if it holds others; TierDown."""
        try:
            with self._translated(name):
                found = obstore.get(self.store, self.key(name)).bytes()
        except MissingBlob:
            return False
        if found == data:
            return True
        raise NameTaken(f"{self.place}/{name} exists already with other bytes", safe="It is untouched.")

    def _each(self, read: Callable[[int], int], starts: Sequence[int]) -> Iterable[int]:
        """Call `read` for each range, several at the same time (obstore.get_ranges joins ranges that meet)."""
        if len(starts) <= 1:
            return [read(start) for start in starts]
        with ThreadPoolExecutor(min(len(starts), READS_AT_ONCE), "lastgood-get") as readers:
            return list(readers.map(read, starts))

    def _require_length(self, extent: Extent) -> None:
        """Raise for an object that is missing, or that ends before the extent does."""
        length = self.length_of(extent.blob)
        if length is None:
            raise MissingBlob(f"missing: {self.place}/{extent.blob}", blob=extent.blob)
        if length < extent.offset + extent.length:  # guard: short-object-is-damage
            raise Truncated(
                f"{self.place}/{extent.blob} ends at {length:,} bytes, before {extent.offset + extent.length:,}",
                blob=extent.blob,
                offset=length,
            )
        if extent.length:
            raise TierDown(f"{self.place}/{extent.blob}: the store returned fewer bytes than it has")

    def _copy_in_parts(self, name: str, to: str, length: int) -> None:
        buffer = memoryview(bytearray(PART_BYTES))
        upload = StreamedUpload(self, to, length, self._deadlines)
        try:
            for start in range(0, length, PART_BYTES):
                part = min(PART_BYTES, length - start)
                self.read_into(Extent(blob=name, offset=start, length=part), buffer)
                upload.write_at(buffer[:part], start)
        except BaseException:
            upload.abort()
            raise
        upload.finish()

    @contextlib.contextmanager
    def _translated(self, name: str) -> Iterator[None]:
        """Raise each error of the client as the package's error for a request on `name`."""
        try:
            yield
        except ERRORS as error:
            raise translated(error, self.place, name) from error

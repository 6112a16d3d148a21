"""A tier in a few preallocated files (slots) that saves overwrite in turn, and one table of their contents.

A save with one record beside its commit costs two flushes, and one more for each further record. A folder under `gen/`
is stored in one slot: its blobs one after the other, then its records, each from a page boundary on. Its commit, and
records that are added after the commit, are stored in the table itself. All other names are files of a `Disk`.

Invariants
  1. Nothing in a slot has a meaning before a durable record of the table names it. So what a crash leaves in a slot
     that no record names is unreachable, and need not be cleared.
  2. Flush 1 makes the slot durable, then flush 2 makes the record durable that names it.
  3. A slot is free only if no upload holds it and no table names it that may be found after a crash
     (`TableFile.possible`). The table's file holds two records. Once the newer one is durable, no crash makes a reader
     find the older one, so the slots that only the older one names are free. If the medium loses the newer record, the
     older one is found, and slots that it names may have been overwritten; the digests show this. A commit keeps a
     good generation of the table before it, where there is one. So such a loss costs the newest generation at most.
  4. Before a slot is overwritten for the first time, the table that was found is durable (`TableFile.take_over`).
Assumes one writer (the lock of the run). A commit keeps one older generation, the newest verified one (else the newest
without a bad mark), and deletes all others, so limits.SLOTS_BESIDE slots beside those in flight are enough. Verifying
the newest generation deletes nothing: no save needs the slot yet, and the medium may still damage what was verified. Of
several ranks each has slots of its own, and keeps what all have committed last until all have committed a newer one.
"""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping

from ..errors import CommitUnknown, Damaged, MissingBlob, NameTaken, NoSpace, Refused, TierDown, Truncated
from ..io.files import DISK_READS, round_up
from ..limits import SLOT_LIMIT, SLOTS_BESIDE, SLOTS_UNTIL_AGREED
from ..ports import File, Files, Upload
from ..records import Extent
from .directory import Disk
from .slot_draft import Draft
from .slot_file import TABLE_LOST, TableFile, aligned
from .slot_pool import Pool
from .slot_table import NO_SLOT, Kept, Pointer, Table, beside_new_commit
from .slot_upload import SlotUpload

FOLDER = "slots"
TABLE = f"{FOLDER}/table"
TAIL_SHARE = 32
"""a slot is longer than its first blob by one part in this many, for the records that follow the blob"""


class Slots:
    """`ports.Tier` over slots: for one writer with up to `in_flight` (default 1) uploads at once, or for readers.

    `root` is an absolute path. `commit` is the name of the file that commits a folder, `verified` that of the mark of a
    good one, `bad` those of the marks of damaged and unfit ones; no other name has a meaning here. `direct` (default
    False): use direct I/O, which the file system must support (io.files.takes_direct). `several` (default False):
    whether other ranks commit the same folders in slots of their own (`agree`). Raises Refused for an `in_flight` for
    which there are not enough slots.
    """

    newest_only: bool = True  # a commit deletes older generations (`slot_table.beside_new_commit`)
    reads_at_once: int = DISK_READS

    def __init__(
        self,
        files: Files,
        root: str,
        *,
        commit: str,
        verified: str,
        bad: Collection[str],
        in_flight: int = 1,
        direct: bool = False,
        several: bool = False,
    ) -> None:
        self._several, self.beside = several, SLOTS_BESIDE + (SLOTS_UNTIL_AGREED if several else 0)
        if not 1 <= in_flight <= SLOT_LIMIT - self.beside:
            raise Refused(f"{in_flight} saves in flight", todo=f"Give a number from 1 to {SLOT_LIMIT - self.beside}.")
        self.place = f"slots://{root}"
        self._disk = Disk(files, root, direct=direct)
        self._pool = Pool(files, f"{root}/{FOLDER}", direct=direct)
        self._tables = TableFile(files, self._disk, TABLE, direct=direct)
        self._commit, self._verified, self._bad = commit, verified, frozenset(bad)
        self._in_flight = in_flight
        self._lock = threading.RLock()
        self._taken_over = False
        self._last_read: Table | None = None  # the table that this object read last, if it is a reader
        self._drafts: dict[str, Draft] = {}
        self._pointers: dict[str, Pointer] = {}
        self._agreed = ""  # the folder that every rank has committed last

    # ---- writing -------------------------------------------------------------------------------------------

    def create(self, name: str, length: int) -> Upload:
        """A new blob of `length` bytes in its folder's slot. Raises NameTaken, NoSpace, NotWritable, TierDown."""
        place = self._split(name)
        if place is None:
            return self._disk.create(name, length)
        folder, file = place
        with self._disk._translated(name), self._lock:
            kept, draft = self._take_over().find(folder), self._drafts.get(folder)
            if kept is not None or (draft and file in draft.extents):  # guard: draft-name-unique
                raise NameTaken(
                    f"{self.place}/{name} exists already, or its folder is committed", safe="It is untouched."
                )
            spare_bytes = round_up(length // TAIL_SHARE + 1)
            draft = draft or self._assign_slot(folder, round_up(length) + spare_bytes)
            slot, start = self._extend(folder, draft, file, length, spare_bytes)
            return SlotUpload(self, folder, draft, file, slot, start)

    def put_new(self, name: str, data: bytes) -> None:
        """Create a small blob durably: in its folder's slot, or in the table once the folder is committed.

        Raises NameTaken, CommitUnknown, NoSpace, NotWritable, TierDown; MissingBlob for a mark of an uncommitted
        folder.
        """
        place = self._split(name)
        if place is None:
            self._disk.put_new(name, data)
            return
        folder, file = place
        with self._disk._translated(name):
            with self._lock:
                kept, draft = self._take_over().find(folder), self._drafts.get(folder)
                if kept is not None:
                    self._put_beside(kept, file, data)
                    return
                if file == self._commit:
                    self._publish(folder, draft, data)
                    return
                if file == self._verified or file in self._bad:
                    raise MissingBlob(f"{self.place}/gen/{folder} is not committed, so it cannot be marked", blob=name)
                draft = draft or self._assign_slot(folder, round_up(len(data)))
            with draft.turn:
                self._append(folder, draft, file, data)

    def agree(self, folder: str) -> None:
        """Note that every rank has committed this folder. What all have committed last is not deleted by a commit."""
        with self._lock:
            self._agreed = folder.partition("/")[2]

    def point(self, name: str, data: bytes, to: str) -> None:
        """Replace the pointer, which is a hint: readers see it with the next record, or when this writer closes."""
        with self._disk._translated(name), self._lock:
            self._take_over()
            self._pointers[name] = Pointer(data, to)

    def doubt(self, folder: str) -> None:
        """Note that the commit of a folder failed on some rank. If it is not in the table here, its slot is free."""
        with self._lock:
            if draft := self._drafts.get(folder.partition("/")[2]):
                draft.doubtful = True  # guard: refused-commit-frees-slot

    def forget(self, folder: str) -> None:
        """Nothing is cached about folders that another process may remove (ports.Shared)."""

    def delete(self, name: str) -> None:
        """Remove a blob durably; if it is the commit, remove its whole folder in one step.

        Nothing is written if the blob does not exist.
        """
        place = self._split(name)
        if place is None:
            self._disk.delete(name)
            return
        folder, file = place
        with self._disk._translated(name), self._lock:
            table = self._take_over()
            kept, draft = table.find(folder), self._drafts.get(folder)
            if draft is not None:
                # Deleting the commit gives the folder up: its slot may be reused even if the other deletions fail.
                # guard: uncleared-commit-is-doubtful
                draft.doubtful |= file == self._commit
                self._forget(folder, draft, file)
            if kept is not None and (file in kept.extents or file in kept.records):
                rest = kept.without(file)
                ended = file == self._commit or not (rest.extents or rest.records)
                # guard: deleted-commit-gone-at-once
                self._record_no_commit(
                    tuple(rest if one is kept else one for one in table.kept if one is not kept or not ended)
                )
            elif len(self._tables.possible) > 1:
                self._record_no_commit(table.kept)

    def close(self) -> None:
        """Close the files, and store the pointer if it has changed. Raises NoSpace, NotWritable, TierDown."""
        with self._disk._translated(TABLE), self._lock:
            for folder in [*self._drafts]:
                self._drop(folder)
            if self._taken_over and self._pointed() != self._tables.newest.pointers:  # guard: pointers-written-at-close
                self._record_no_commit(self._tables.newest.kept)

    # ---- reading -------------------------------------------------------------------------------------------

    def list(self, folder: str) -> Mapping[str, int | None]:
        """Names in a folder that is committed or being written by this object -> length in bytes, None for a folder."""
        with self._disk._translated(folder), self._lock:
            if folder == "gen":
                return dict.fromkeys([*(one.folder for one in self._current_table().kept), *self._drafts])
            if folder.startswith("gen/"):
                return self._list_folder(folder.removeprefix("gen/"))
            found = dict(self._disk.list(folder))
            if not folder:
                found.pop(FOLDER, None)
                found |= dict.fromkeys(["gen"] if self._current_table().kept or self._drafts else [])
                found |= {name: len(one.data) for name, one in self._hints().items()}
            return found

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        """Fill mv[:extent.length].

        `fresh` is as in `Disk.read_into`. Raises Truncated, MissingBlob, Unreadable, TierDown.
        """
        with self._disk._translated(extent.blob), self._lock:
            found = self._find(extent.blob)
        if found is None:
            self._disk.read_into(extent, mv, fresh=fresh)
            return
        length = len(found) if isinstance(found, bytes) else found[2]
        if extent.offset + extent.length > length:  # guard: read-within-file-length
            raise Truncated(
                f"{self.place}/{extent.blob} ends at {length:,} bytes, before {extent.offset + extent.length:,}",
                blob=extent.blob,
                offset=length,
            )
        if isinstance(found, bytes):
            mv[: extent.length] = found[extent.offset : extent.offset + extent.length]
            return
        slot, start, _ = found
        in_slot = Extent(blob=f"{FOLDER}/{slot:02d}", offset=start + extent.offset, length=extent.length)
        try:
            self._disk.read_into(in_slot, mv, fresh=fresh)
        except Damaged as error:
            error.blob, error.offset = extent.blob, max(error.offset - start, 0)
            raise

    # ---- names ---------------------------------------------------------------------------------------------

    def _split(self, name: str) -> tuple[str, str] | None:
        """The folder under gen/ and the file; None if the name is that of a file of the disk. Raises MissingBlob."""
        self._disk._path(name)
        parts = name.split("/")
        if parts[0] == FOLDER or (parts[0] == "gen" and len(parts) != 3):
            raise MissingBlob(f"{name!r} is not a name in a run that is stored in slots", blob=name)
        return (parts[1], parts[2]) if parts[0] == "gen" else None

    def _list_folder(self, folder: str) -> dict[str, int | None]:
        draft, kept = self._drafts.get(folder), self._current_table().find(folder)
        if kept is None:
            return {file: length for file, (_, length) in draft.extents.items()} if draft else {}
        found: dict[str, int | None] = {file: len(data) for file, data in kept.records.items()}
        slot_bytes = self._pool.lengths().get(kept.slot)
        if slot_bytes is not None:  # a slot that was cut off makes its files shorter
            # guard: truncated-slot-shortens-file
            found |= {file: max(0, min(length, slot_bytes - start)) for file, (start, length) in kept.extents.items()}
        return found

    def _find(self, name: str) -> bytes | tuple[int, int, int] | None:
        """The bytes of a record in the table; or slot, offset and length; None for a file of the disk.

        Raises MissingBlob.
        """
        place = self._split(name)
        if place is None:
            hint = None if "/" in name else self._hints().get(name)
            return hint.data if hint else None
        folder, file = place
        kept = self._known_table().find(folder) or self._current_table().find(folder)
        if kept and file in kept.records:
            return kept.records[file]
        holder = kept or self._drafts.get(folder)
        if holder is None or file not in holder.extents:
            raise MissingBlob(f"missing: {self.place}/{name}", blob=name)
        return holder.slot, *holder.extents[file]

    def _current_table(self) -> Table:
        """The newest table: a writer has it in memory, a reader reads the file again."""
        if not self._taken_over:
            self._last_read = self._read_table()
        return self._known_table()

    def _known_table(self) -> Table:
        """The table as this object knows it, without reading the file."""
        return self._tables.newest if self._taken_over else self._last_read or Table()

    def _read_table(self) -> Table:
        table = self._tables.read()
        if table is None and self._pool.lengths():  # guard: missing-table-is-damage
            what = f"{self.place}/{TABLE} is missing, so the contents of the slots are unknown"
            raise MissingBlob(what, blob=TABLE, **TABLE_LOST)
        return table or Table()

    def _hints(self) -> Mapping[str, Pointer]:
        return self._pointers if self._taken_over else (self._last_read or self._current_table()).pointers

    # ---- the table -----------------------------------------------------------------------------------------

    def _take_over(self) -> Table:
        """The newest durable table. The first call makes this object the writer and makes the found table durable."""
        if not self._taken_over:
            self._disk._make_folder(FOLDER)
            self._read_table()
            with _commit_not_in_doubt():
                self._tables.take_over()
            self._pointers = dict(self._tables.newest.pointers)
            self._taken_over = True
        return self._tables.newest

    def _record(self, kept: tuple[Kept, ...]) -> None:
        """Write a table of these folders. Raises OSError, CommitUnknown."""
        table = Table(kept, self._pointed(kept))
        self._tables.write(table)
        self._pointers = dict(table.pointers)

    def _record_no_commit(self, kept: tuple[Kept, ...]) -> None:
        """Write a table that commits nothing new. Afterwards only this table may be found after a crash."""
        with _commit_not_in_doubt():
            self._record(kept)

    def _pointed(self, kept: tuple[Kept, ...] | None = None) -> dict[str, Pointer]:
        """The pointers whose target exists: a pointer is deleted with its target."""
        targets = {f"gen/{one.folder}" for one in (self._tables.newest.kept if kept is None else kept)}
        # guard: pointer-deleted-with-target
        return {name: one for name, one in self._pointers.items() if one.to in targets}

    def _publish(self, folder: str, draft: Draft | None, data: bytes) -> None:
        """Commit a folder by naming its slot in the table (flush 2)."""
        if draft and draft.dirty:  # guard: content-synced-before-table
            self._flush(draft)
        slot, extents = (draft.slot, draft.extents) if draft else (NO_SLOT, {})
        one = Kept(folder, slot, dict(extents), {self._commit: data})
        agreed = self._agreed if self._several else None
        beside = beside_new_commit(self._tables.newest.kept, self._verified, self._bad, agreed)
        try:
            self._record((*beside, one))  # <- it exists after this line
        except (CommitUnknown, OSError):
            if draft:
                draft.doubtful = True  # guard: failed-commit-keeps-slot
            raise
        if draft:
            self._drop(folder)

    def _put_beside(self, kept: Kept, file: str, data: bytes) -> None:
        """Add a small file to a committed folder."""
        table, name = self._tables.newest, f"gen/{kept.folder}/{file}"
        if file in kept.records or file in kept.extents:
            self._need_same(name, data)
            if len(self._tables.possible) > 1:
                self._record_no_commit(table.kept)
            return
        # guard: verified-mark-written-at-once
        self._record(tuple(one.with_record(file, data) if one is kept else one for one in table.kept))

    # ---- folders that are not committed --------------------------------------------------------------------

    def _assign_slot(self, folder: str, need_bytes: int) -> Draft:
        """Assign a free slot of at least `need_bytes` to a new folder. Raises NoSpace if there is none."""
        free = self._free()
        if not free:
            # A slot whose commit failed or is being deleted is free once it is certain that the commit does not exist.
            if len(self._tables.possible) > 1:  # guard: doubt-settled-when-full
                self._record_no_commit(self._tables.newest.kept)
            for one in [name for name, draft in self._drafts.items() if draft.doubtful]:  # guard: doubtful-slot-freed
                self._drop(one)
            if self._several:
                kept = self._tables.newest.kept
                stay = beside_new_commit(kept[:-1], self._verified, self._bad, self._agreed)
                if len(stay) < len(kept[:-1]):  # commits that another rank has refused were never acknowledged
                    self._record_no_commit((*stay, *kept[-1:]))
            free = self._free()
        if not free:
            raise NoSpace(
                f"{self.place} has no free slot: {len(self._drafts)} saves are in flight, and it was opened for "
                f"{self._in_flight}",
                safe="Every committed generation is untouched.",
                todo="Wait until one of them has ended, or open the run with a larger in_flight.",
            )
        slot_bytes = self._pool.prepare(free, need_bytes)
        draft = self._drafts[folder] = Draft(free[0], slot_bytes, [self._pool.open(free[0])])
        return draft

    def _free(self) -> builtins.list[int]:
        """The slots that may be overwritten."""
        taken = {one.slot for table in self._tables.possible for one in table.kept}  # guard: possible-tables-hold-slots
        taken |= {draft.slot for draft in self._drafts.values()}  # guard: drafts-hold-slots
        return [slot for slot in range(self._in_flight + self.beside) if slot not in taken]

    def _extend(self, folder: str, draft: Draft, file: str, length: int, spare_bytes: int) -> tuple[File, int]:
        """Reserve space for one more file in a slot; returns the open slot and the offset of the file."""
        start = draft.end
        try:
            if start + round_up(length) > draft.slot_bytes:
                self._pool.need_sound(draft.slot)
                free = [draft.slot, *self._free()]
                draft.slot_bytes = self._pool.prepare(free, start + round_up(length) + spare_bytes)
                draft.files.append(self._pool.open(draft.slot))
        except OSError:
            self._forget(folder, draft, file)
            raise
        draft.extents[file] = start, length
        draft.dirty = True
        return draft.files[-1], start

    def _append(self, folder: str, draft: Draft, file: str, data: bytes) -> None:
        """Write a record into the slot, and make the whole slot durable (flush 1)."""
        with self._lock:
            if file in draft.extents:
                self._need_same(f"gen/{folder}/{file}", data)
                return
            slot, start = self._extend(folder, draft, file, len(data), 0)
        try:
            self._pool.write(draft.slot, slot, aligned(data)[: round_up(len(data))], start)
            self._flush(draft)  # guard: slot-record-synced
        except OSError:
            with self._lock:  # guard: failed-record-forgotten
                self._forget(folder, draft, file)
            raise

    def _flush(self, draft: Draft) -> None:
        self._pool.need_sound(draft.slot)  # guard: spoiled-slot-not-synced
        self._pool.sync(draft.slot, draft.files[-1])
        draft.dirty = False

    def _forget(self, folder: str, draft: Draft, file: str) -> None:
        """Drop a file of a draft, and the draft with its last file."""
        draft.extents.pop(file, None)
        if not draft.extents and self._drafts.get(folder) is draft:
            self._drop(folder)

    def _drop(self, folder: str) -> None:
        for file in self._drafts.pop(folder).files:
            file.close()

    def _need_same(self, name: str, data: bytes) -> None:
        """Raise NameTaken unless the existing file holds `data`."""
        found = self._find(name)
        length = len(found) if isinstance(found, bytes) else found[2] if found else -1
        if length == len(data):
            stored = bytearray(length)
            self.read_into(Extent(blob=name, offset=0, length=length), memoryview(stored))
            if stored == data:  # guard: same-name-same-bytes
                return
        raise NameTaken(f"{self.place}/{name} exists already with other bytes", safe="It is untouched.")


@contextlib.contextmanager
def _commit_not_in_doubt() -> Iterator[None]:
    """Raise CommitUnknown as TierDown, around writes of the table that commit nothing."""
    try:
        yield
    except CommitUnknown as error:
        raise TierDown(error.what, safe="Every committed generation is untouched.") from error

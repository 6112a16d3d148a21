"""A few preallocated files that are overwritten in place, and one table that says what they hold. Two flushes a save.

A folder under `gen/` lives in one slot: its blobs one after the other, then its records, each from a page boundary on.
Its commit, and what is put beside that later, stand in the table itself. All other names are files of a `Disk`.

Invariants
  1. Nothing in a slot has a meaning before a durable record of the table names it. So whatever a crash leaves in a slot
     that no record names needs no clearing, and nobody reaches it.
  2. Flush 1 makes the slot durable, then flush 2 the record that names it.
  3. A slot is free only when no upload holds it and no table names it that a crash may bring up (`TableFile.possible`).
     The older of two whole records is none of those: once the newer is durable, no crash brings the older back. Loss of
     the newer one on the medium may. What it names may be overwritten by then, and digests tell; two records in a row
     always have a generation in common, so that costs the newest one at most.
  4. Before a slot is overwritten for the first time, the table that was found is durable (`TableFile.own`).
Assumes one writer (the lock of the run), and that nobody wants more than the newest commit and the newest verified one
before it. Each commit lets go of all others, so those two and N uploads are all there is: N + 2 slots are enough.
Nothing goes when a commit is verified, for no upload needs the room, and the medium may yet lose what it had.
"""

from __future__ import annotations

import builtins
import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from ..errors import CommitUnknown, Damaged, MissingBlob, NameTaken, NoSpace, Refused, TierDown, Truncated
from ..io.files import round_up
from ..ports import File, Files, Upload
from ..records import Extent
from .directory import Disk
from .slot_file import TableFile, aligned
from .slot_pool import Pool
from .slot_table import NO_SLOT, SLOT_LIMIT, Kept, Pointer, Table

HOME = "slots"
TABLE = f"{HOME}/table"
TAIL_SHARE = 32
"""a slot is made longer than its first blob by this part of it, for the records behind"""


@dataclass
class _Draft:
    """A folder that is not committed, and its slot."""

    slot: int
    slot_bytes: int
    files: list[File]
    """the slot, open; the last one knows all of its length"""
    extents: dict[str, tuple[int, int]] = field(default_factory=dict)
    dirty: bool = True
    """something in it may not be durable"""
    doubtful: bool = False
    """its commit failed, or nobody knows; or it is being cleared away"""
    turn: threading.Lock = field(default_factory=threading.Lock)
    """held while a record is written into the slot"""

    @property
    def end(self) -> int:
        return max((start + round_up(length) for start, length in self.extents.values()), default=0)


class Slots:
    """`ports.Tier` over slots: one writer with `in_flight` uploads under way, or any number of readers.

    `commit`, `verified` and those in `bad` are names of files that mean so; no other has a meaning here. `direct`:
    whether the file system takes direct I/O (io.files.takes_direct).
    """

    newest_only: bool = True

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
    ) -> None:
        if not 1 <= in_flight <= SLOT_LIMIT - 2:
            raise Refused(f"{in_flight} saves in flight", todo=f"Give a number from 1 to {SLOT_LIMIT - 2}.")
        self.place = f"slots://{root}"
        self._disk = Disk(files, root, direct=direct)
        self._pool = Pool(files, f"{root}/{HOME}", direct=direct)
        self._tables = TableFile(files, self._disk, TABLE, direct=direct)
        self._commit, self._verified, self._bad = commit, verified, frozenset(bad)
        self._in_flight = in_flight
        self._lock = threading.RLock()
        self._owned = False
        self._seen: Table | None = None  # by a reader, when it last looked
        self._drafts: dict[str, _Draft] = {}
        self._pointers: dict[str, Pointer] = {}

    # ---- writing -------------------------------------------------------------------------------------------

    def create(self, name: str, length: int) -> Upload:
        """Open a new blob of `length` bytes in its folder's slot. Raises NameTaken, NoSpace, NotWritable, TierDown."""
        place = self._split(name)
        if place is None:
            return self._disk.create(name, length)
        folder, file = place
        with self._disk._telling(name), self._lock:
            kept, draft = self._own().find(folder), self._drafts.get(folder)
            if kept is not None or (draft and file in draft.extents):  # guard: draft-name-unique
                raise NameTaken(
                    f"{self.place}/{name} exists already, or its folder is committed", safe="It is untouched."
                )
            spare_bytes = round_up(length // TAIL_SHARE + 1)
            draft = draft or self._take(folder, round_up(length) + spare_bytes)
            slot, start = self._extend(folder, draft, file, length, spare_bytes)
            return SlotUpload(self, folder, draft, file, slot, start)

    def put_new(self, name: str, data: bytes) -> None:
        """A small blob: into its folder's slot, or, once that is committed, into the table. The commit primitive."""
        place = self._split(name)
        if place is None:
            self._disk.put_new(name, data)
            return
        folder, file = place
        with self._disk._telling(name):
            with self._lock:
                kept, draft = self._own().find(folder), self._drafts.get(folder)
                if kept is not None:
                    self._put_beside(kept, file, data)
                    return
                if file == self._commit:
                    self._publish(folder, draft, data)
                    return
                if file == self._verified or file in self._bad:
                    raise MissingBlob(f"{self.place}/gen/{folder} is not there: nothing is noted beside it", blob=name)
                draft = draft or self._take(folder, round_up(len(data)))
            with draft.turn:
                self._append(folder, draft, file, data)

    def point(self, name: str, data: bytes, to: str) -> None:
        """Replace a pointer. It is a hint: others see it with the next record, or when this writer closes."""
        with self._disk._telling(name), self._lock:
            self._own()
            self._pointers[name] = Pointer(data, to)

    def delete(self, name: str) -> None:
        """Remove a blob, durably; of a commit, all of its folder in one step. Costs nothing where it is gone."""
        place = self._split(name)
        if place is None:
            self._disk.delete(name)
            return
        folder, file = place
        with self._disk._telling(name), self._lock:
            table = self._own()
            kept, draft = table.find(folder), self._drafts.get(folder)
            if draft is not None:
                # guard: uncleared-commit-is-doubtful
                draft.doubtful |= file == self._commit  # it is given up, and should the rest of that fail
                self._forget(folder, draft, file)
            if kept is not None and (file in kept.extents or file in kept.records):
                rest = kept.without(file)
                gone = file == self._commit or not (rest.extents or rest.records)
                # guard: deleted-commit-gone-at-once
                self._settle(tuple(rest if one is kept else one for one in table.kept if one is not kept or not gone))
            elif len(self._tables.possible) > 1:
                self._settle(table.kept)

    def close(self) -> None:
        """Let go of the files, and write down what only this process knows: the pointers. Raises NoSpace, TierDown."""
        with self._disk._telling(TABLE), self._lock:
            for folder in [*self._drafts]:
                self._drop(folder)
            if self._owned and self._pointed() != self._tables.newest.pointers:  # guard: pointers-written-at-close
                self._settle(self._tables.newest.kept)

    # ---- reading -------------------------------------------------------------------------------------------

    def list(self, folder: str) -> Mapping[str, int | None]:
        """Names in a folder, committed or under way in this object: length of a file, None for a folder."""
        with self._disk._telling(folder), self._lock:
            if folder == "gen":
                return dict.fromkeys([*(one.folder for one in self._look().kept), *self._drafts])
            if folder.startswith("gen/"):
                return self._list_folder(folder.removeprefix("gen/"))
            found = dict(self._disk.list(folder))
            if not folder:
                found.pop(HOME, None)
                found |= dict.fromkeys(["gen"] if self._look().kept or self._drafts else [])
                found |= {name: len(one.data) for name, one in self._hints().items()}
            return found

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        """Fill mv[:extent.length]. `fresh` reads past the page cache when mv is a page-aligned, padded buffer."""
        with self._disk._telling(extent.blob), self._lock:
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
        there = Extent(blob=f"{HOME}/{slot:02d}", offset=start + extent.offset, length=extent.length)
        try:
            self._disk.read_into(there, mv, fresh=fresh)
        except Damaged as error:
            error.blob, error.offset = extent.blob, max(error.offset - start, 0)
            raise

    # ---- names ---------------------------------------------------------------------------------------------

    def _split(self, name: str) -> tuple[str, str] | None:
        """The folder under gen/ and the file; None for what is a file of the disk. Raises MissingBlob."""
        self._disk._path(name)
        parts = name.split("/")
        if parts[0] == HOME or (parts[0] == "gen" and len(parts) != 3):
            raise MissingBlob(f"{name!r} is no name in a run that lives in slots", blob=name)
        return (parts[1], parts[2]) if parts[0] == "gen" else None

    def _list_folder(self, folder: str) -> dict[str, int | None]:
        draft, kept = self._drafts.get(folder), self._look().find(folder)
        if kept is None:
            return {file: length for file, (_, length) in draft.extents.items()} if draft else {}
        found: dict[str, int | None] = {file: len(data) for file, data in kept.records.items()}
        there = self._pool.lengths().get(kept.slot)
        if there is not None:  # what is cut off of a slot is missed by its length, as in any file
            # guard: truncated-slot-shortens-file
            found |= {file: max(0, min(length, there - start)) for file, (start, length) in kept.extents.items()}
        return found

    def _find(self, name: str) -> bytes | tuple[int, int, int] | None:
        """Small bytes; or slot, start and length; None for a file of the disk. Raises MissingBlob."""
        place = self._split(name)
        if place is None:
            hint = None if "/" in name else self._hints().get(name)
            return hint.data if hint else None
        folder, file = place
        kept = self._known().find(folder) or self._look().find(folder)
        if kept and file in kept.records:
            return kept.records[file]
        holder = kept or self._drafts.get(folder)
        if holder is None or file not in holder.extents:
            raise MissingBlob(f"missing: {self.place}/{name}", blob=name)
        return holder.slot, *holder.extents[file]

    def _look(self) -> Table:
        """What is committed now: a writer knows, a reader looks."""
        if not self._owned:
            self._seen = self._found()
        return self._known()

    def _known(self) -> Table:
        return self._tables.newest if self._owned else self._seen or Table()

    def _found(self) -> Table:
        table = self._tables.look()
        if table is None and self._pool.lengths():  # guard: missing-table-is-damage
            raise MissingBlob(f"{self.place}/{TABLE} is gone: what the slots hold is not known any more", blob=TABLE)
        return table or Table()

    def _hints(self) -> Mapping[str, Pointer]:
        return self._pointers if self._owned else (self._seen or self._look()).pointers

    # ---- the table -----------------------------------------------------------------------------------------

    def _own(self) -> Table:
        """The newest durable table, of which this is the only writer."""
        if not self._owned:
            self._disk._make_folder(HOME)
            self._found()
            with _known_not_to_be():
                self._tables.own()
            self._pointers = dict(self._tables.newest.pointers)
            self._owned = True
        return self._tables.newest

    def _record(self, kept: tuple[Kept, ...]) -> None:
        table = Table(kept, self._pointed(kept))
        self._tables.write(table)
        self._pointers = dict(table.pointers)

    def _settle(self, kept: tuple[Kept, ...]) -> None:
        with _known_not_to_be():
            self._record(kept)

    def _pointed(self, kept: tuple[Kept, ...] | None = None) -> dict[str, Pointer]:
        """Pointers to what is there: they go with it."""
        there = {f"gen/{one.folder}" for one in (self._tables.newest.kept if kept is None else kept)}
        # guard: pointer-deleted-with-target
        return {name: one for name, one in self._pointers.items() if one.to in there}

    def _publish(self, folder: str, draft: _Draft | None, data: bytes) -> None:
        """Name a folder's slot in the table: flush 2."""
        if draft and draft.dirty:  # guard: content-synced-before-table
            self._flush(draft)
        slot, extents = (draft.slot, draft.extents) if draft else (NO_SLOT, {})
        one = Kept(folder, slot, dict(extents), {self._commit: data})
        try:
            self._record((*self._spare(self._tables.newest.kept), one))  # <- it exists after this line
        except (CommitUnknown, OSError):
            if draft:
                draft.doubtful = True  # guard: failed-commit-keeps-slot
            raise
        if draft:
            self._drop(folder)

    def _put_beside(self, kept: Kept, file: str, data: bytes) -> None:
        """Into the table, beside a commit."""
        table, name = self._tables.newest, f"gen/{kept.folder}/{file}"
        if file in kept.records or file in kept.extents:
            self._need_same(name, data)
            if len(self._tables.possible) > 1:
                self._settle(table.kept)
            return
        # guard: verified-mark-written-at-once
        self._record(tuple(one.with_record(file, data) if one is kept else one for one in table.kept))

    def _spare(self, kept: tuple[Kept, ...]) -> tuple[Kept, ...]:
        """What stays beside a new commit: the newest verified one; while none is, the newest that may yet be good."""
        good = [one for one in kept if self._bad.isdisjoint(one.records)]  # guard: undamaged-slot-kept
        # guard: newest-verified-slot-kept
        return tuple([one for one in good if self._verified in one.records][-1:] or good[-1:])

    # ---- folders that are not committed --------------------------------------------------------------------

    def _take(self, folder: str, need_bytes: int) -> _Draft:
        """A free slot of at least so many bytes, for a new folder."""
        free = self._free()
        if not free:
            # A slot whose commit failed waits for nobody: once that commit surely is not, the slot is free.
            if len(self._tables.possible) > 1:  # guard: doubt-settled-when-full
                self._settle(self._tables.newest.kept)
            for one in [name for name, draft in self._drafts.items() if draft.doubtful]:  # guard: doubtful-slot-freed
                self._drop(one)
            free = self._free()
        if not free:
            raise NoSpace(
                f"{self.place} has no free slot: {len(self._drafts)} saves under way, announced {self._in_flight}",
                safe="Every committed generation is untouched.",
                todo="Wait until one of them has ended, or open the run with a larger in_flight.",
            )
        slot_bytes = self._pool.prepare(free, need_bytes)
        draft = self._drafts[folder] = _Draft(free[0], slot_bytes, [self._pool.open(free[0])])
        return draft

    def _free(self) -> builtins.list[int]:
        taken = {one.slot for table in self._tables.possible for one in table.kept}  # guard: possible-tables-hold-slots
        taken |= {draft.slot for draft in self._drafts.values()}  # guard: drafts-hold-slots
        return [slot for slot in range(self._in_flight + 2) if slot not in taken]

    def _extend(self, folder: str, draft: _Draft, file: str, length: int, spare_bytes: int) -> tuple[File, int]:
        """Room for one more file in a slot: where it is open, and where the file starts."""
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

    def _append(self, folder: str, draft: _Draft, file: str, data: bytes) -> None:
        """A record into the slot, and all of that durable: flush 1."""
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

    def _flush(self, draft: _Draft) -> None:
        self._pool.need_sound(draft.slot)  # guard: spoiled-slot-not-synced
        self._pool.sync(draft.slot, draft.files[-1])
        draft.dirty = False

    def _forget(self, folder: str, draft: _Draft, file: str) -> None:
        draft.extents.pop(file, None)
        if not draft.extents and self._drafts.get(folder) is draft:
            self._drop(folder)

    def _drop(self, folder: str) -> None:
        for file in self._drafts.pop(folder).files:
            file.close()

    def _need_same(self, name: str, data: bytes) -> None:
        found = self._find(name)
        length = len(found) if isinstance(found, bytes) else found[2] if found else -1
        if length == len(data):
            there = bytearray(length)
            self.read_into(Extent(blob=name, offset=0, length=length), memoryview(there))
            if there == data:  # guard: same-name-same-bytes
                return
        raise NameTaken(f"{self.place}/{name} exists already with other bytes", safe="It is untouched.")


class SlotUpload:
    """`ports.Upload`: a part of a slot that no record names."""

    def __init__(self, slots: Slots, folder: str, draft: _Draft, file: str, slot: File, start: int) -> None:
        self._slots, self._folder, self._draft, self._file = slots, folder, draft, file
        self._slot, self._start = slot, start
        self._extent = draft.extents[file]

    def write_at(self, mv: memoryview, offset: int) -> None:
        assert offset + len(mv) <= round_up(self._extent[1]), "past the end of the blob"
        with self._slots._disk._telling(f"gen/{self._folder}/{self._file}"):
            self._slots._pool.write(self._draft.slot, self._slot, mv, self._start + offset)

    def finish(self) -> None:
        """Nothing to do: the folder's next record makes the slot durable."""

    def abort(self) -> None:
        with self._slots._lock:
            if self._draft.extents.get(self._file) == self._extent:
                self._slots._forget(self._folder, self._draft, self._file)  # guard: aborted-file-forgotten


@contextlib.contextmanager
def _known_not_to_be() -> Iterator[None]:
    """For what is no commit, and so is not said to be one."""
    try:
        yield
    except CommitUnknown as error:
        raise TierDown(error.what, safe="Every committed generation is untouched.") from error

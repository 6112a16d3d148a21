"""Parity: writes the redundancy of a verified generation, and rebuilds what was damaged from it. Decides nothing.

Invariants
  1. Parity is never the truth: what is rebuilt is put in place only when every digest of the manifest agrees with it.
  2. A damaged file stays as it is until its replacement is durable, read back and found good; then one rename.
  3. A parity file counts from the moment its record is there, which is after its cells are durable.
Budget: a row may lose as many cells as there are parity cells; a record, all copies but one (docs/format.md, "Parity").
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor, Future
from typing import NamedTuple

import msgspec

from ..errors import BeyondRepair, Cancelled, Damaged, MissingBlob, SumMismatch
from ..format import commit, layout
from ..format import parity_layout as striping
from ..format.parity_layout import Stripes
from ..io.checksum import ALGORITHMS, digest
from ..io.files import round_up
from ..io.reed_solomon import Code
from ..ports import Mendable, Tier, Upload
from ..records import Blob, Commit, Extent, Generation, GenerationId, Manifest, Parity
from . import read_file
from .arena import Arena

REBUILT = ".rebuilt.tmp"
"""end of the name of a file that is to replace a damaged one: litter, should nobody get that far"""


class Cells:
    """Digests of the cells of tensor files, from their bytes in order, whatever their number."""

    def __init__(self, cut: Stripes, algorithm: str) -> None:
        self._lengths = iter([cell.length for cell in cut.cells])
        self._new = ALGORITHMS[algorithm]
        self._open, self._missing = self._new(), 0
        self.digests: list[str] = []

    def see(self, data: memoryview) -> None:
        while data:
            self._missing = self._missing or next(self._lengths)
            part = data[: self._missing]
            self._open.update(part)
            self._missing -= len(part)
            if not self._missing:
                self.digests.append(self._open.hexdigest())
                self._open = self._new()
            data = data[len(part) :]


# ---- writing ---------------------------------------------------------------------------------------------------


def protect(
    tier: Tier,
    generation: Generation,
    manifest: Manifest,
    code: Code,
    cells: list[str],
    readers: Executor,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Write the parity of a generation whose cells have these digests; returns its bytes. Durable on return.

    Raises SumMismatch when a cell does not read back so, Cancelled when `stop()`, NoSpace, TierDown; nothing of it is
    left then.
    """
    home, algorithm = layout.folder(generation.id), manifest.digest
    clear(tier, home)  # guard: old-parity-cleared-first
    cut = striping.stripes(manifest.blobs, code.data, code.parity)
    seal = generation.commit.seals[0]
    copy = read_file.some(tier, f"{home}/{seal.manifest}", seal.length)
    told = read_file.some(tier, f"{home}/{layout.COMMIT}", tier.list(home).get(layout.COMMIT) or 0)
    sums: list[list[str]] = [[] for _ in range(code.parity)]
    size = cut.file_bytes + len(copy)
    spare = Arena(cut.cell_bytes, cut.cell_bytes).whole()  # what is written must be page-aligned
    with contextlib.ExitStack() as undo:
        uploads: list[Upload] = []
        for index in range(code.parity):
            uploads.append(tier.create(f"{home}/{striping.parity_name(0, index)}", size))
            undo.callback(uploads[index].abort)  # guard: failed-parity-aborted
        with contextlib.closing(_rows(tier, home, cut, algorithm, cells, readers)) as rows:
            for row, there in rows:
                if stop():  # guard: parity-can-be-cancelled
                    raise Cancelled("parity was given up")
                whole = [one for one in there if one is not None]
                if len(whole) < len(there):
                    raise SumMismatch(f"{home} does not read back as it did a moment ago")
                for upload, digests, cell in zip(uploads, sums, code.encode(whole), strict=True):
                    digests.append(digest(algorithm, cell))  # guard: parity-cell-digests
                    spare[:] = cell
                    upload.write_at(spare, row * cut.cell_bytes)
        tail = Arena(len(copy), len(copy)).whole()
        tail[: len(copy)] = copy  # guard: parity-carries-manifest-copy
        for upload in uploads:
            upload.write_at(tail, cut.file_bytes)
            upload.finish()  # guard: parity-durable
        for index, digests in enumerate(sums):
            record = Parity(
                format=layout.FORMAT,
                root=generation.root,
                data=code.data,
                parity=code.parity,
                index=index,
                cell_bytes=cut.cell_bytes,
                digest=algorithm,
                cells=cells,
                sums=digests,
                manifest_bytes=len(copy),
                commit=told.decode(),
            )
            tier.put_new(f"{home}/{striping.record_name(0, index)}", layout.encode(record, algorithm))
        undo.pop_all()
    return size * code.parity


def clear(tier: Tier, home: str) -> None:
    """Remove the parity of a generation, its records first."""
    # guard: parity-records-deleted-first
    for name in sorted(tier.list(home), key=lambda one: not one.endswith(".json")):
        if striping.is_parity(name):
            tier.delete(f"{home}/{name}")


def whole(
    tier: Tier, generation: Generation, manifest: Manifest, code: Code, stop: Callable[[], bool] = lambda: False
) -> bool:
    """Whether all of the parity is there and reads back as it was written. Raises Cancelled when `stop()`."""
    home, seal, spare = layout.folder(generation.id), generation.commit.seals[0], find(tier, generation.id)
    kept = spare.records if spare is not None and spare.generation.root == generation.root else []
    if [(one.index, one.data, one.parity) for one in kept] != [(n, code.data, code.parity) for n in range(code.parity)]:
        return False
    for record in kept:
        name = striping.parity_name(0, record.index)
        copy = _stored(tier, home, name, record.manifest_bytes, len(record.sums) * record.cell_bytes)
        if digest(manifest.digest, copy) != seal.digest:
            return False
        for row in range(len(record.sums)):
            if stop():
                raise Cancelled("reading was given up")
            if _parity_cell(tier, home, record, row) is None:
                return False
    return True


# ---- rebuilding ------------------------------------------------------------------------------------------------


class Spare(NamedTuple):
    """What the parity beside a generation has to say of it."""

    generation: Generation
    """as its copies of the commit have it"""
    commit: bytes
    records: list[Parity]
    """that can be believed, by index, and agree on this commit"""

    @property
    def code(self) -> Code:
        """The code that they are of. Raises Refused where no library for it is installed."""
        return Code(self.records[0].data, self.records[0].parity)


def find(tier: Tier, at: GenerationId) -> Spare | None:
    """The parity records of a generation; None where there are none that can be believed.

    A commit that is there and can be read says which they are; copies of it count where it is gone or damaged.
    """
    home = layout.folder(at)
    found: dict[str, list[Parity]] = {}
    for name, length in sorted(tier.list(home).items()):
        if not striping.is_record(name) or length is None or not 0 <= length <= layout.RECORD_LIMIT_BYTES:
            continue
        with contextlib.suppress(Damaged):
            record = layout.decode(bytes(read_file.some(tier, f"{home}/{name}", length)), Parity, name)
            striping.validate(record, name)
            text = record.commit.encode()
            layout.validate_commit(layout.decode(text, Commit, name), at, None)
            if layout.root_of(text) == record.root:  # guard: parity-record-of-this-generation
                found.setdefault(record.root, []).append(record)
    with contextlib.suppress(Damaged):
        root = commit.read_generation(tier, at, None).root
        found = {root: found[root]} if root in found else {}  # guard: existing-commit-preferred
    if not found:
        return None
    first, *others = max(found.values(), key=len)
    text = first.commit.encode()
    told = layout.decode(text, Commit, home)
    if len(told.seals) != 1 or told.seals[0].length != first.manifest_bytes:  # guard: seal-matches-manifest-copy
        return None
    records = [first, *(one for one in others if one.alike(first))]  # guard: only-agreeing-parity-records
    return Spare(Generation(commit=told, root=first.root), text, sorted(records, key=lambda one: one.index))


def rebuild(tier: Mendable, spare: Spare, readers: Executor, stop: Callable[[], bool] = lambda: False) -> list[str]:
    """Put back every file of a generation that is not what was committed; returns their names, none if all are.

    The tensor files first, the commit last: until then nobody takes it for more than it is. Raises BeyondRepair, which
    says how far beyond; Cancelled when `stop()` while it looks; NoSpace, TierDown, SumMismatch where what was rebuilt
    does not read back. What could not be put back whole is as it was.
    """
    generation, home = spare.generation, layout.folder(spare.generation.id)
    seal = generation.commit.seals[0]
    records = {seal.manifest: _manifest(tier, spare), layout.COMMIT: spare.commit}  # guard: repair-writes-commit-last
    manifest = layout.decode(records[seal.manifest], Manifest, f"{home}/{seal.manifest}")
    layout.validate_manifest(manifest, generation.id, 0)
    lost = _lost(tier, generation, manifest, spare, readers, stop)
    done = _write(tier, generation, manifest, lost, readers) if lost is not None else []
    for name, data in records.items():
        if tier.list(home).get(name) != len(data) or _stored(tier, home, name, len(data)) != data:
            _put_back(tier, home, name, data)  # guard: repair-restores-records
            done.append(name)
    return done


def _manifest(tier: Tier, spare: Spare) -> bytes:
    """The manifest that was sealed: its file, or a copy."""
    home, seal = layout.folder(spare.generation.id), spare.generation.commit.seals[0]
    places = [(seal.manifest, 0)]
    # guard: manifest-copies-in-parity
    places += [(striping.parity_name(0, one.index), len(one.sums) * one.cell_bytes) for one in spare.records]
    for name, offset in places:
        data = _stored(tier, home, name, seal.length, offset)
        if digest(spare.records[0].digest, data) == seal.digest:  # guard: repaired-manifest-matches-seal
            return data
    raise BeyondRepair(
        f"{home}/{seal.manifest} and all {len(spare.records)} copies of it are damaged", safe="Nothing was changed."
    )


class _Lost(NamedTuple):
    """What is damaged, and what is left to stand in for it."""

    cut: Stripes
    code: Code
    cells: list[str]
    blobs: list[Blob]
    """files that are to be written anew"""
    rows: dict[int, list[int]]
    """row -> its data cells that are lost"""
    records: list[Parity]


def _lost(
    tier: Tier,
    generation: Generation,
    manifest: Manifest,
    spare: Spare,
    readers: Executor,
    stop: Callable[[], bool],
) -> _Lost | None:
    """Go through every cell; None where nothing is lost. Raises BeyondRepair, Cancelled."""
    home, first = layout.folder(generation.id), spare.records[0]
    cut, records = striping.fitting(first, manifest.blobs, home), spare.records
    rows: dict[int, list[int]] = {}
    with contextlib.closing(_rows(tier, home, cut, manifest.digest, first.cells, readers)) as all_rows:
        for row, there in all_rows:
            if stop():  # guard: repair-scan-can-be-cancelled
                raise Cancelled("repair was given up")
            missing = [number for number, cell in zip(cut.row(row), there, strict=True) if cell is None]
            if missing:
                rows[row] = missing
    lengths = tier.list(home)
    damaged = {cut.cells[number].blob for missing in rows.values() for number in missing}
    # guard: wrong-length-files-rebuilt
    blobs = [one for one in manifest.blobs if one.name in damaged or lengths.get(one.name) != one.length]
    if not blobs:
        return None
    short: dict[int, int] = {}
    for row, missing in rows.items():
        left = sum(1 for record in records if _parity_cell(tier, home, record, row) is not None)
        if left < len(missing):  # guard: damage-beyond-parity-refused
            short[row] = len(missing) - left
    if short:
        worst = max(short, key=short.__getitem__)
        raise BeyondRepair(
            f"{home}: {len(short):,} of {cut.rows:,} rows have lost more than parity can stand in for; the worst, row "
            f"{worst}, lost {len(rows[worst])} of {cut.data} cells and has {len(rows[worst]) - short[worst]} of "
            f"{cut.parity} parity cells left: {short[worst]} too many",
            safe="Nothing was changed.",
            todo="Restore goes back to an older generation; `lastgood gc --damaged` clears this one.",
        )
    return _Lost(cut, spare.code, first.cells, blobs, rows, records)


def _write(tier: Mendable, generation: Generation, manifest: Manifest, lost: _Lost, readers: Executor) -> list[str]:
    """Write the damaged files anew, read them back, and put them in place."""
    home, cut = layout.folder(generation.id), lost.cut
    with contextlib.ExitStack() as undo:
        uploads: dict[str, Upload] = {}
        for blob in lost.blobs:
            # guard: stale-rebuild-removed
            tier.delete(f"{home}/{blob.name}{REBUILT}")  # somebody may have died over it
            uploads[blob.name] = tier.create(f"{home}/{blob.name}{REBUILT}", blob.length)
            undo.callback(uploads[blob.name].abort)  # guard: failed-rebuild-aborted
        spare = Arena(cut.cell_bytes, cut.cell_bytes).whole()
        with contextlib.closing(_rows(tier, home, cut, manifest.digest, lost.cells, readers)) as rows:
            for row, there in rows:
                for number, cell in zip(cut.row(row), _whole(tier, home, lost, row, there), strict=True):
                    if number < len(cut.cells) and cut.cells[number].blob in uploads:
                        extent = cut.cells[number]
                        spare[:] = cell
                        uploads[extent.blob].write_at(spare[: round_up(extent.length)], extent.offset)
        for upload in uploads.values():  # guard: rebuild-durable-before-replace
            upload.finish()
        for blob in lost.blobs:
            _need_good(tier, home, manifest, blob, readers)  # guard: rebuild-read-back
        undo.pop_all()
    for blob in lost.blobs:
        tier.replace(f"{home}/{blob.name}", f"{home}/{blob.name}{REBUILT}")  # guard: rebuild-replaces-damaged
    return [blob.name for blob in lost.blobs]


def _whole(tier: Tier, home: str, lost: _Lost, row: int, there: Sequence[memoryview | None]) -> Sequence[memoryview]:
    """All data cells of a row."""
    known = {number: cell for number, cell in enumerate(there) if cell is not None}
    if len(known) == len(there):
        return list(known.values())
    for record in lost.records:
        cell = _parity_cell(tier, home, record, row)
        if cell is not None:
            known[lost.cut.data + record.index] = memoryview(cell)
    if len(known) < lost.cut.data:
        raise BeyondRepair(f"{home}: row {row} has lost more cells since it was looked at")
    return lost.code.decode(known)


def _need_good(tier: Tier, home: str, manifest: Manifest, blob: Blob, readers: Executor) -> None:
    """What was rebuilt must agree with every digest of the manifest. Raises SumMismatch."""
    copy = msgspec.structs.replace(blob, name=blob.name + REBUILT)
    size = read_file.buffer_bytes([blob])
    memory = Arena(2 * size, size).whole()
    rebuilt = read_file.VerifiedChunks(read_file.RankFiles(tier, home, manifest), copy)
    with contextlib.closing(read_file.in_order(rebuilt, [memory[:size], memory[size:]], readers)) as chunks:
        for _, error in chunks:
            if error is not None:
                raise error


# ---- cells -----------------------------------------------------------------------------------------------------


def _rows(
    tier: Tier,
    home: str,
    cut: Stripes,
    algorithm: str,
    digests: Sequence[str],
    readers: Executor,
) -> Generator[tuple[int, list[memoryview | None]], None, None]:
    """Row by row its data cells, None for one that is not what it was; valid until the next is asked for.

    While one row is worked on, the next is read.
    """
    size = cut.cell_bytes
    memory = Arena(2 * cut.data * size, size).whole()

    def begin(row: int) -> list[Future[memoryview | None]]:
        first = row % 2 * cut.data
        return [
            readers.submit(_cell, tier, home, cut, algorithm, digests, number, memory[at * size : (at + 1) * size])
            for at, number in enumerate(cut.row(row), first)
        ]

    flying = begin(0)
    ahead: list[Future[memoryview | None]] = []
    try:
        for row in range(cut.rows):
            ahead = begin(row + 1) if row + 1 < cut.rows else []
            yield row, [job.result() for job in flying]
            flying, ahead = ahead, []
    finally:
        for job in (*flying, *ahead):
            job.exception()  # nobody writes into the memory after this


def _cell(
    tier: Tier, home: str, cut: Stripes, algorithm: str, digests: Sequence[str], number: int, view: memoryview
) -> memoryview | None:
    if number >= len(cut.cells):
        view[:] = bytes(len(view))  # guard: absent-cells-are-zero
        return view
    extent = cut.cells[number]
    place = Extent(blob=f"{home}/{extent.blob}", offset=extent.offset, length=extent.length)
    try:
        tier.read_into(place, view, fresh=True)
    except Damaged:
        return None
    view[extent.length :] = bytes(len(view) - extent.length)  # guard: cell-padding-is-zero
    # guard: only-verified-cells-used
    return view if digest(algorithm, view[: extent.length]) == digests[number] else None


def _parity_cell(tier: Tier, home: str, record: Parity, row: int) -> bytes | None:
    name = striping.parity_name(0, record.index)
    data = _stored(tier, home, name, record.cell_bytes, row * record.cell_bytes)
    return data if data and digest(record.digest, data) == record.sums[row] else None  # guard: damaged-parity-unused


def _stored(tier: Tier, home: str, name: str, length: int, offset: int = 0) -> bytes:
    """What a file holds there; nothing where that cannot be read. Memory is taken only for what is there."""
    if (tier.list(home).get(name) or 0) < offset + length:
        return b""
    try:
        return bytes(read_file.some(tier, f"{home}/{name}", length, offset))
    except Damaged:
        return b""


def _put_back(tier: Mendable, home: str, name: str, data: bytes) -> None:
    """A record in place of what is there: durable under another name first."""
    tier.delete(f"{home}/{name}{REBUILT}")  # guard: stale-record-rebuild-removed
    upload = tier.create(f"{home}/{name}{REBUILT}", len(data))
    try:
        page = Arena(len(data), len(data)).whole()
        page[: len(data)] = data
        upload.write_at(page, 0)
        upload.finish()
        if read_file.some(tier, f"{home}/{name}{REBUILT}", len(data)) != data:  # guard: repaired-record-read-back
            raise MissingBlob(f"{home}/{name}{REBUILT} does not read back", blob=name)
    except BaseException:
        upload.abort()  # guard: failed-record-rebuild-aborted
        raise
    tier.replace(f"{home}/{name}", f"{home}/{name}{REBUILT}")

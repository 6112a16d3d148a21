"""Parity: writes the redundancy of a verified generation, and rebuilds damaged files from it.

The files of each rank have parity of their own, which that rank writes; a function here works on those of one rank.

Invariants
  1. Parity is never the truth: a rebuilt file is put in place only if the manifest's digests of all its chunks agree.
  2. A damaged file is not changed until its replacement is durable, read back and found good; then it is renamed over.
  3. A parity file counts only once its record exists, which is written after its cells are durable.
Limits: a row may lose as many cells as it has parity cells; of manifest and commit, one copy must be left
(docs/format.md, "Parity").
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import NamedTuple

import msgspec

from ..errors import BeyondRepair, Cancelled, Damaged, MissingBlob, SumMismatch
from ..format import commit, layout, parity_layout, validation
from ..format.parity_layout import Grid
from ..io.checksum import ALGORITHMS, digest
from ..io.files import round_up
from ..io.reed_solomon import Code
from ..limits import PARITY_RECORD_LIMIT_BYTES
from ..ports import Mendable, Stop, Tier, Upload, never
from ..records import Blob, Commit, Generation, GenerationId, Manifest, Parity
from . import read_file
from .arena import Arena
from .parity_cells import Rows, read_rows

REBUILT = ".rebuilt.tmp"
"""the end of the name of a rebuilt file before it replaces the damaged one; the next opening removes what a crash
leaves
"""


class CellDigests:
    """Computes the digests of the cells of tensor files from their bytes, which are passed in order."""

    def __init__(self, grid: Grid, algorithm: str) -> None:
        self._lengths = iter([cell.length for cell in grid.cells])
        self._new = ALGORITHMS[algorithm]
        self._open, self._missing = self._new(), 0
        self.digests: list[str] = []

    def see(self, data: memoryview) -> None:
        """Process the next bytes of the files, of any length."""
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
    stop: Stop = never,
) -> int:
    """Write the parity of one rank's files durably; returns its length in bytes.

    `manifest`: of that rank. `cells`: the digests of the data cells, from its verification. `readers` read the cells.
    `stop()` is polled once per row. Raises SumMismatch if a cell does not agree with its digest, Cancelled after
    `stop()`, NoSpace, NotWritable, TierDown; then no parity file is left.
    """
    folder, algorithm, rank = layout.folder(generation.id), manifest.digest, manifest.rank
    clear(tier, folder, rank)  # guard: old-parity-cleared-first
    grid = parity_layout.grid(manifest.blobs, code.data, code.parity)
    seal = generation.commit.seals[rank]
    copy = read_file.some(tier, f"{folder}/{seal.manifest}", seal.length)
    commit_bytes = read_file.some(tier, f"{folder}/{layout.COMMIT}", tier.list(folder).get(layout.COMMIT) or 0)
    size = grid.file_bytes + len(copy)
    with contextlib.ExitStack() as undo:
        uploads: list[Upload] = []
        for index in range(code.parity):
            uploads.append(tier.create(f"{folder}/{parity_layout.parity_name(rank, index)}", size))
            undo.callback(uploads[index].abort)  # guard: failed-parity-aborted
        with contextlib.closing(read_rows(tier, folder, grid, algorithm, cells, readers)) as rows:
            sums = _write_cells(folder, rows, code, grid.cell_bytes, algorithm, uploads, stop)
        tail = Arena(len(copy), len(copy)).memory()
        tail[: len(copy)] = copy  # guard: parity-carries-manifest-copy
        for upload in uploads:
            upload.write_at(tail, grid.file_bytes)
            upload.finish()  # guard: parity-durable
        for index, digests in enumerate(sums):
            record = Parity(
                format=layout.FORMAT,
                root=generation.root,
                data=code.data,
                parity=code.parity,
                index=index,
                cell_bytes=grid.cell_bytes,
                digest=algorithm,
                cells=cells,
                sums=digests,
                manifest_bytes=len(copy),
                commit=commit_bytes.decode(),
            )
            tier.put_new(f"{folder}/{parity_layout.record_name(rank, index)}", layout.encode(record, algorithm))
        undo.pop_all()
    return size * code.parity


def _write_cells(
    folder: str,
    rows: Rows,
    code: Code,
    cell_bytes: int,
    algorithm: str,
    uploads: Sequence[Upload],
    stop: Stop,
) -> list[list[str]]:
    """Compute and write the parity cells of every row, one to each upload; returns their digests for each upload."""
    sums: list[list[str]] = [[] for _ in uploads]
    page = Arena(cell_bytes, cell_bytes).memory()  # writes need page-aligned memory
    for row, found in rows:
        if stop():  # guard: parity-can-be-cancelled
            raise Cancelled("writing parity was cancelled")
        intact = [one for one in found if one is not None]
        if len(intact) < len(found):
            raise SumMismatch(
                f"{folder}: a cell of the tensor files does not agree with the digest of its earlier reading"
            )
        for upload, digests, cell in zip(uploads, sums, code.encode(intact), strict=True):
            digests.append(digest(algorithm, cell))  # guard: parity-cell-digests
            page[:] = cell
            upload.write_at(page, row * cell_bytes)
    return sums


def clear(tier: Tier, folder: str, rank: int = 0) -> None:
    """Delete the parity of one rank's files, the records first."""
    # guard: parity-records-deleted-first
    for name in sorted(tier.list(folder), key=lambda one: not one.endswith(".json")):
        if parity_layout.rank_of(name) == rank:
            tier.delete(f"{folder}/{name}")


def complete(tier: Tier, generation: Generation, manifest: Manifest, code: Code, stop: Stop = never) -> bool:
    """Whether the parity of the rank of `manifest` is complete and agrees with its digests.

    Raises Cancelled after `stop()`.
    """
    folder, rank = layout.folder(generation.id), manifest.rank
    seal, usable = generation.commit.seals[rank], find(tier, generation.id, rank)
    kept = usable.records if usable is not None and usable.generation.root == generation.root else []
    if [(one.index, one.data, one.parity) for one in kept] != [(n, code.data, code.parity) for n in range(code.parity)]:
        return False
    for record in kept:
        name = parity_layout.parity_name(rank, record.index)
        copy = _stored(tier, folder, name, record.manifest_bytes, len(record.sums) * record.cell_bytes)
        if digest(manifest.digest, copy) != seal.digest:
            return False
        for row in range(len(record.sums)):
            if stop():
                raise Cancelled("reading parity was cancelled")
            if _parity_cell(tier, folder, rank, record, row) is None:
                return False
    return True


# ---- rebuilding ------------------------------------------------------------------------------------------------


class UsableParity(NamedTuple):
    """The usable parity of one rank's files of a generation."""

    rank: int
    generation: Generation
    """the generation as the copies of its commit in the parity records state it"""
    commit: bytes
    """the commit record"""
    records: list[Parity]
    """the valid parity records that agree on this commit, by index"""

    @property
    def code(self) -> Code:
        """The code of the parity. Raises Refused if no library for it is installed."""
        return Code(self.records[0].data, self.records[0].parity)


def find_all(tier: Tier, at: GenerationId) -> list[UsableParity]:
    """The usable parity of each rank that has any, all of the same commit. Raises Unavailable."""
    ranks = {rank for name in tier.list(layout.folder(at)) if (rank := parity_layout.rank_of(name)) is not None}
    found = [one for rank in sorted(ranks) if (one := find(tier, at, rank)) is not None]
    return [one for one in found if one.generation.root == found[0].generation.root]


def find(tier: Tier, at: GenerationId, rank: int = 0) -> UsableParity | None:
    """The usable parity of the files of one rank; None if there is no valid record.

    If the commit can be read, only records with this commit are used. If it is lost or damaged, its copies in the
    records are. Raises Unavailable.
    """
    folder = layout.folder(at)
    found: dict[str, list[Parity]] = {}
    for name, length in sorted(tier.list(folder).items()):
        mine = parity_layout.is_record(name) and parity_layout.rank_of(name) == rank
        if not mine or length is None or not 0 <= length <= PARITY_RECORD_LIMIT_BYTES:
            continue
        with contextlib.suppress(Damaged):
            record = layout.decode(bytes(read_file.some(tier, f"{folder}/{name}", length)), Parity, name)
            parity_layout.validate(record, name, rank)
            text = record.commit.encode()
            validation.validate_commit(layout.decode(text, Commit, name), at, None)
            if layout.root_of(text) == record.root:  # guard: parity-record-of-this-generation
                found.setdefault(record.root, []).append(record)
    with contextlib.suppress(Damaged):
        root = commit.read_generation(tier, at, None).root
        found = {root: found[root]} if root in found else {}  # guard: existing-commit-preferred
    if not found:
        return None
    first, *others = max(found.values(), key=len)
    text = first.commit.encode()
    copy = layout.decode(text, Commit, folder)
    # guard: seal-matches-manifest-copy
    if rank >= len(copy.seals) or copy.seals[rank].length != first.manifest_bytes:
        return None
    records = [first, *(one for one in others if one.alike(first))]  # guard: only-agreeing-parity-records
    return UsableParity(
        rank, Generation(commit=copy, root=first.root), text, sorted(records, key=lambda one: one.index)
    )


def rebuild(tier: Mendable, usable: Sequence[UsableParity], readers: Executor, stop: Stop = never) -> list[str]:
    """Replace every file of these ranks that is not as committed; returns the names of these files.

    `usable`: the parity of each rank, at least one. The tensor files are replaced first and the commit last, so that no
    reader takes the generation for complete before it is. Raises BeyondRepair, which states how much more was lost than
    parity can replace; Cancelled after `stop()`, which is polled while the damage is determined; SumMismatch, Truncated
    or MissingBlob if a rebuilt file does not read back; NoSpace, NotWritable, TierDown. A file that could not be
    rebuilt is unchanged.
    """
    done: list[str] = []
    folder = layout.folder(usable[0].generation.id)
    records = dict[str, bytes]()
    for one in usable:
        seal = one.generation.commit.seals[one.rank]
        records[seal.manifest] = data = _manifest(tier, one)
        manifest = layout.decode(data, Manifest, f"{folder}/{seal.manifest}")
        validation.validate_manifest(manifest, one.generation.id, one.rank, one.generation.commit.world.ranks)
        lost = _lost(tier, one, manifest, readers, stop)
        done += _write(tier, one.generation, manifest, lost, readers) if lost is not None else []
    records[layout.COMMIT] = usable[0].commit  # guard: repair-writes-commit-last
    for name, data in records.items():
        if tier.list(folder).get(name) != len(data) or _stored(tier, folder, name, len(data)) != data:
            _put_back(tier, folder, name, data)  # guard: repair-restores-records
            done.append(name)
    return done


def _manifest(tier: Tier, usable: UsableParity) -> bytes:
    """The manifest that was sealed, from its file or from a copy in a parity file. Raises BeyondRepair."""
    folder, seal = layout.folder(usable.generation.id), usable.generation.commit.seals[usable.rank]
    places = [(seal.manifest, 0)]
    # guard: manifest-copies-in-parity
    places += [
        (parity_layout.parity_name(usable.rank, one.index), len(one.sums) * one.cell_bytes) for one in usable.records
    ]
    for name, offset in places:
        data = _stored(tier, folder, name, seal.length, offset)
        if digest(usable.records[0].digest, data) == seal.digest:  # guard: repaired-manifest-matches-seal
            return data
    raise BeyondRepair(
        f"{folder}/{seal.manifest} and all {len(usable.records)} copies of it are damaged", safe="Nothing was changed."
    )


class _Lost(NamedTuple):
    """What is damaged, and the parity to rebuild it from."""

    grid: Grid
    code: Code
    cells: list[str]
    """digests of the data cells"""
    blobs: list[Blob]
    """the files to rebuild"""
    rows: dict[int, list[int]]
    """row -> the numbers of its damaged data cells"""
    rank: int
    records: list[Parity]
    """those of the parity of this rank"""


def _lost(tier: Tier, usable: UsableParity, manifest: Manifest, readers: Executor, stop: Stop) -> _Lost | None:
    """Read every cell; returns what is damaged, or None. Raises BeyondRepair, Cancelled."""
    folder, first = layout.folder(usable.generation.id), usable.records[0]
    grid, records = parity_layout.grid_of(first, manifest.blobs, folder), usable.records
    rows: dict[int, list[int]] = {}
    with contextlib.closing(read_rows(tier, folder, grid, manifest.digest, first.cells, readers)) as all_rows:
        for row, found in all_rows:
            if stop():  # guard: repair-scan-can-be-cancelled
                raise Cancelled("repair was cancelled")
            missing = [number for number, cell in zip(grid.row(row), found, strict=True) if cell is None]
            if missing:
                rows[row] = missing
    lengths = tier.list(folder)
    damaged = {grid.cells[number].blob for missing in rows.values() for number in missing}
    # guard: wrong-length-files-rebuilt
    blobs = [one for one in manifest.blobs if one.name in damaged or lengths.get(one.name) != one.length]
    if not blobs:
        return None
    short: dict[int, int] = {}
    for row, missing in rows.items():
        left = sum(1 for record in records if _parity_cell(tier, folder, usable.rank, record, row) is not None)
        if left < len(missing):  # guard: damage-beyond-parity-refused
            short[row] = len(missing) - left
    if short:
        worst = max(short, key=short.__getitem__)
        raise BeyondRepair(
            f"{folder}: {len(short):,} of {grid.rows:,} rows have lost more than parity can replace; the worst, row "
            f"{worst}, lost {len(rows[worst])} of {grid.data} cells and has {len(rows[worst]) - short[worst]} of "
            f"{grid.parity} parity cells left: {short[worst]} too many",
            safe="Nothing was changed.",
            todo="A restore uses an older generation; `lastgood gc --damaged` deletes this one.",
        )
    return _Lost(grid, usable.code, first.cells, blobs, rows, usable.rank, records)


def _write(tier: Mendable, generation: Generation, manifest: Manifest, lost: _Lost, readers: Executor) -> list[str]:
    """Rebuild the damaged files, read them back, and rename them over the damaged ones; returns their names."""
    folder, grid = layout.folder(generation.id), lost.grid
    with contextlib.ExitStack() as undo:
        uploads: dict[str, Upload] = {}
        for blob in lost.blobs:
            # guard: stale-rebuild-removed
            tier.delete(f"{folder}/{blob.name}{REBUILT}")  # an earlier repair may have crashed
            uploads[blob.name] = tier.create(f"{folder}/{blob.name}{REBUILT}", blob.length)
            undo.callback(uploads[blob.name].abort)  # guard: failed-rebuild-aborted
        page = Arena(grid.cell_bytes, grid.cell_bytes).memory()
        with contextlib.closing(read_rows(tier, folder, grid, manifest.digest, lost.cells, readers)) as rows:
            for row, found in rows:
                for number, cell in zip(grid.row(row), _all_cells(tier, folder, lost, row, found), strict=True):
                    if number < len(grid.cells) and grid.cells[number].blob in uploads:
                        extent = grid.cells[number]
                        page[:] = cell
                        uploads[extent.blob].write_at(page[: round_up(extent.length)], extent.offset)
        for upload in uploads.values():  # guard: rebuild-durable-before-replace
            upload.finish()
        for blob in lost.blobs:
            _need_good(tier, folder, manifest, blob, readers)  # guard: rebuild-read-back
        undo.pop_all()
    for blob in lost.blobs:
        tier.replace(f"{folder}/{blob.name}", f"{folder}/{blob.name}{REBUILT}")  # guard: rebuild-replaces-damaged
    return [blob.name for blob in lost.blobs]


def _all_cells(
    tier: Tier, folder: str, lost: _Lost, row: int, found: Sequence[memoryview | None]
) -> Sequence[memoryview]:
    """All data cells of a row, the damaged ones rebuilt. Raises BeyondRepair."""
    known = {number: cell for number, cell in enumerate(found) if cell is not None}
    if len(known) == len(found):
        return list(known.values())
    for record in lost.records:
        cell = _parity_cell(tier, folder, lost.rank, record, row)
        if cell is not None:
            known[lost.grid.data + record.index] = memoryview(cell)
    if len(known) < lost.grid.data:
        raise BeyondRepair(f"{folder}: row {row} has lost more cells since the damage was determined")
    return lost.code.decode(known)


def _need_good(tier: Tier, folder: str, manifest: Manifest, blob: Blob, readers: Executor) -> None:
    """Compare each chunk of a rebuilt file with its digest. Raises SumMismatch, Truncated, MissingBlob."""
    copy = msgspec.structs.replace(blob, name=blob.name + REBUILT)
    size = read_file.buffer_bytes([blob])
    memory = Arena(2 * size, size).memory()
    rebuilt = read_file.VerifiedChunks(read_file.RankFiles(tier, folder, manifest), copy)
    with contextlib.closing(read_file.in_order(rebuilt, [memory[:size], memory[size:]], readers)) as chunks:
        for _, error in chunks:
            if error is not None:
                raise error


# ---- cells -----------------------------------------------------------------------------------------------------


def _parity_cell(tier: Tier, folder: str, rank: int, record: Parity, row: int) -> bytes | None:
    """The parity cell of a row; None if it is damaged."""
    name = parity_layout.parity_name(rank, record.index)
    data = _stored(tier, folder, name, record.cell_bytes, row * record.cell_bytes)
    return data if data and digest(record.digest, data) == record.sums[row] else None  # guard: damaged-parity-unused


def _stored(tier: Tier, folder: str, name: str, length: int, offset: int = 0) -> bytes:
    """The bytes of a range of a file; empty if it is damaged.

    Memory is allocated only for a file that is long enough.
    """
    if (tier.list(folder).get(name) or 0) < offset + length:
        return b""
    try:
        return bytes(read_file.some(tier, f"{folder}/{name}", length, offset))
    except Damaged:
        return b""


def _put_back(tier: Mendable, folder: str, name: str, data: bytes) -> None:
    """Replace a record: the new one is durable under another name before it is renamed."""
    tier.delete(f"{folder}/{name}{REBUILT}")  # guard: stale-record-rebuild-removed
    upload = tier.create(f"{folder}/{name}{REBUILT}", len(data))
    try:
        page = Arena(len(data), len(data)).memory()
        page[: len(data)] = data
        upload.write_at(page, 0)
        upload.finish()
        if read_file.some(tier, f"{folder}/{name}{REBUILT}", len(data)) != data:  # guard: repaired-record-read-back
            raise MissingBlob(f"{folder}/{name}{REBUILT} does not read back", blob=name)
    except BaseException:
        upload.abort()  # guard: failed-record-rebuild-aborted
        raise
    tier.replace(f"{folder}/{name}", f"{folder}/{name}{REBUILT}")

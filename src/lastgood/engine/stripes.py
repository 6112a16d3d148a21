"""Parity among nodes: files of it are written, and chunks that no node has any more are computed from it.

Invariants
  1. Every cell that is used, of data or of parity, agrees with its digest; another one counts as lost.
  2. A file of parity counts only with its record, which is written after the file is complete.
  3. What is computed counts only if it agrees with the digest of its chunk, and with the manifest where it becomes a
     file again (run/copying.py).
  4. A node that cannot be read now has not lost its cells: what cannot be computed without them is no damage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import msgspec

from ..errors import (
    BeyondRepair,
    Cancelled,
    Damaged,
    LastgoodError,
    PeerDown,
    PeerRefused,
    SumMismatch,
    Unavailable,
    Unreadable,
)
from ..format import layout, sealed, stripe_layout
from ..io.checksum import digest
from ..io.files import round_up
from ..io.reed_solomon import Code
from ..ports import Stop, Tier, never
from ..records import Blob, Cell, Extent, Generation, Manifest, Stripe, StripeFile
from . import read_file
from .arena import Arena

LISTED_AT_ONCE = 32
"""So many places are listed at the same time: one that hangs costs a timeout, and several together cost one."""


def cells_of(blobs: Sequence[Blob]) -> list[Cell]:
    """The chunks of tensor files as data cells, the longest first: cells of about equal length share a stripe."""
    extents = [(blob, number, layout.extent_of(blob, number)) for blob in blobs for number in range(len(blob.chunks))]
    cells = [
        Cell(blob=blob.name, offset=at.offset, length=at.length, digest=blob.chunks[number])
        for blob, number, at in extents
        if at.length
    ]
    return sorted(cells, key=lambda one: -one.length)


def stripe_of(cells: Sequence[Cell | None]) -> Stripe:
    """A stripe of these cells, whose parity is not computed yet."""
    return Stripe(cells=list(cells), length=round_up(max(one.length for one in cells if one is not None)))


def write(
    own: Tier,
    folder: str,
    name: str,
    record: StripeFile,
    sources: Sequence[Tier],
    manifests: Sequence[bytes],
    readers: Executor,
    stop: Stop = never,
) -> int:
    """Write a file of parity and its record. Returns the length of the file.

    `record`: without the digests of parity cells. `sources`: for each data cell of a stripe, what has its chunks.
    `manifests`: those that the record names. `readers`: threads. `stop()` is polled once for each stripe. Raises
    SumMismatch for a chunk that is damaged, Cancelled, the errors of reading and of writing; then there is no file.
    """
    code, offsets, tail = Code(record.data, record.parity), stripe_layout.cell_offsets(record), b"".join(manifests)
    path, longest = f"{folder}/{name}", max((stripe.length for stripe in record.stripes), default=0)
    own.delete(path)  # of an attempt that was interrupted
    size, most = offsets[-1] + len(tail), round_up(max(longest, len(tail), 1))
    page, done = Arena(most, most).memory(), list[Stripe]()
    upload = own.create(path, size) if size else None
    try:
        for stripe, offset in zip(record.stripes, offsets, strict=False):
            if stop():
                raise Cancelled("writing parity was cancelled")
            jobs = [
                readers.submit(read_cell, source, folder, cell, stripe.length, record.digest)
                for source, cell in zip(sources, stripe.cells, strict=True)
            ]
            cell = code.encode(_results(jobs))[record.index]
            done.append(msgspec.structs.replace(stripe, sum=digest(record.digest, cell)))
            page[: stripe.length] = cell
            assert upload is not None
            upload.write_at(page[: stripe.length], offset)
        if upload is not None:
            page[: len(tail)] = tail
            upload.write_at(page[: round_up(len(tail))], offsets[-1])  # guard: stripes-carry-manifests
            upload.finish()
    except BaseException:
        if upload is not None:
            upload.abort()
        raise
    record = msgspec.structs.replace(record, stripes=done)
    own.put_new(f"{folder}/{stripe_layout.record_name(name)}", layout.encode(record, record.digest))
    return size


def read_cell(tier: Tier, folder: str, cell: Cell | None, length: int, algorithm: str) -> memoryview:
    """A data cell of a stripe, continued with zeros to `length`. Raises SumMismatch, and what reading raises."""
    data = memoryview(bytearray(length))
    if cell is not None:
        tier.read_into(Extent(blob=f"{folder}/{cell.blob}", offset=cell.offset, length=cell.length), data)
        _require(algorithm, data[: cell.length], cell.digest, cell.blob)
    return data


def _require(algorithm: str, data: memoryview | bytearray, expected: str, name: str) -> None:
    if digest(algorithm, data) != expected:  # guard: stripe-cell-verified
        raise SumMismatch(f"a chunk of {name} does not agree with its digest", blob=name)


def _results(jobs: Sequence[Future[memoryview]]) -> list[memoryview]:
    """The results of all of these. Waits for all of them, also if one raises."""
    wait(jobs)
    return [one.result() for one in jobs]


# ---- computing what was lost -------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A valid record of a file of parity, and what has the file."""

    tier: Tier
    name: str
    record: StripeFile


class _Source(NamedTuple):
    """A place that has a cell of a stripe, the number of the cell, its file, and what reads it."""

    tier: Tier
    cell: int
    file: str
    read: Callable[[], memoryview]


class Rebuilt:
    """`ports.Tier` for reading one generation: its chunks and manifests as parity among nodes gives them.

    `places`: the memory of each node that is left. It is done without what is damaged or unreadable in it, and without
    nodes that cannot be reached; `passed_over` has them. Where too few cells are left, PeerDown is raised if a node
    cannot be reached now, else BeyondRepair.
    """

    newest_only, reads_at_once = False, 2

    def __init__(self, places: Sequence[Tier], generation: Generation) -> None:
        self.place = "parity among nodes"
        self._generation, self._folder = generation, layout.folder(generation.id)
        self.passed_over = dict[tuple[str, str], LastgoodError]()
        """place and file (\"\": its listing) -> the first reason why it was not used"""
        self._outage = ""
        """which node could not be reached, and why"""
        self._unread = set[str]()
        """the places that could not be read; for each chunk they are asked last: one that hangs costs a timeout"""
        self._holders = dict[str, list[Tier]]()
        self._sets = dict[str, list[_Found]]()
        """part of their names that the files of a set share -> its files"""
        # guard: nodes-listed-together
        with ThreadPoolExecutor(min(len(places), LISTED_AT_ONCE) or 1, "lastgood-list") as asking:
            listings = [asking.submit(tier.list, self._folder) for tier in places]
        for tier, listing in zip(places, listings, strict=True):
            with self._passing_over(tier, ""):
                self._note(tier, listing.result())
        self._stripes = dict[tuple[str, int], list[tuple[str, int]]]()
        """file and offset of a chunk -> its stripes: set and number in it"""
        for name, found in self._sets.items():
            for number, stripe in enumerate(found[0].record.stripes):
                for cell in stripe.cells:
                    if cell is not None:
                        self._stripes.setdefault((cell.blob, cell.offset), []).append((name, number))

    @contextlib.contextmanager
    def _passing_over(self, tier: Tier, name: str) -> Iterator[None]:
        """Do without a file that is damaged, or whose node cannot be read."""
        try:
            yield
        except (Damaged, Unavailable, PeerRefused) as error:  # the last: a node of another job has its address now
            self.passed_over.setdefault((tier.place, name), error)
            # What one file cannot give, because its medium fails, may be lost for ever: no start waits for it.
            if isinstance(error, Unavailable | PeerRefused):  # guard: unreadable-is-no-outage
                self._outage = f"{tier.place} cannot be read: {error.what}"
                self._unread.add(tier.place)  # guard: silent-node-asked-last

    def _note(self, tier: Tier, listing: Mapping[str, int | None]) -> None:
        for name, length in listing.items():
            self._holders.setdefault(name, []).append(tier)
            if not stripe_layout.is_record(name):
                continue
            with self._passing_over(tier, name):
                data = sealed.read(tier, f"{self._folder}/{name}", length)
                record = layout.decode(data, StripeFile, name)
                stripe_layout.validate(record, name)
                if record.root != self._generation.root:  # guard: stripes-of-this-generation
                    continue
                others = self._sets.setdefault(stripe_layout.set_of(name), [])
                if not others or _shape(others[0].record) == _shape(record):
                    others.append(_Found(tier, name.removesuffix(".json"), record))

    def require(self, manifest: Manifest) -> None:
        """Raise BeyondRepair or PeerDown unless cells enough are left for each chunk of a rank's files. Reads none."""
        for blob in manifest.blobs:
            for offset in range(0, blob.length, blob.chunk_bytes):
                stripes = self._stripes.get((blob.name, offset), [])
                if not any(self._has_enough(*one, blob.name, offset) for one in stripes):
                    raise self._lost(_chunk(blob.name, offset))

    def _has_enough(self, stripes: str, number: int, name: str, offset: int) -> bool:
        found = self._sets[stripes]
        others = [
            one
            for one in found[0].record.stripes[number].cells
            if one is None or ((one.blob, one.offset) != (name, offset) and one.blob in self._holders)
        ]
        return len(others) + len({one.record.index for one in found}) >= found[0].record.data

    def holders(self, name: str) -> Sequence[Tier]:
        """The places that have a file, in their order."""
        return self._holders.get(name, [])

    def list(self, folder: str) -> Mapping[str, int | None]:
        return {}

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        """Fill mv[:extent.length] with a whole chunk of a tensor file, or a whole manifest.

        Raises BeyondRepair, PeerDown.
        """
        name = extent.blob.rpartition("/")[2]
        if layout.is_manifest(name):
            mv[: extent.length] = self._manifest(name)
            return
        for stripes, number in self._stripes.get((name, extent.offset), []):
            with contextlib.suppress(BeyondRepair):
                mv[: extent.length] = self._computed(self._sets[stripes], number, name, extent)
                return
        raise self._lost(_chunk(name, extent.offset))

    def _lost(self, what: str) -> LastgoodError:
        """The error for what cannot be computed."""
        if self._outage:  # guard: lost-node-is-no-damage
            return PeerDown(f"{what}, and {self._outage}", safe="Nothing was changed.")
        return BeyondRepair(what, safe="Nothing was changed.")

    def _manifest(self, name: str) -> bytes:
        """A manifest as it was sealed: from a node that has it, else a copy in a file of parity."""
        seal = next(one for one in self._generation.commit.seals if one.manifest == name)
        for tier in self._holders.get(name, []):
            with self._passing_over(tier, name):
                return sealed.record_bytes([tier], self._generation, seal)
        for one in (one for found in self._sets.values() for one in found if name in one.record.manifests):
            with self._passing_over(one.tier, one.name):
                offset = stripe_layout.manifest_offset(one.record, name)
                data = read_file.some(one.tier, f"{self._folder}/{one.name}", seal.length, offset)
                _require(one.record.digest, data, seal.digest, one.name)  # guard: rebuilt-manifest-matches-seal
                return bytes(data)
        raise self._lost(f"no copy of {name} is left")

    def _computed(self, found: Sequence[_Found], number: int, name: str, extent: Extent) -> memoryview:
        """A chunk from the other cells of one of its stripes. Raises BeyondRepair."""
        record, stripe, cells = found[0].record, found[0].record.stripes[number], dict[int, memoryview]()
        wanted = next(
            at for at, one in enumerate(stripe.cells) if one and (one.blob, one.offset) == (name, extent.offset)
        )
        for one in sorted(self._sources(found, number), key=lambda one: one.tier.place in self._unread):
            if one.cell != wanted and one.cell not in cells and len(cells) < record.data:
                with self._passing_over(one.tier, one.file):
                    cells[one.cell] = one.read()
        lost, data = stripe.cells[wanted], Code(record.data, record.parity).decode(cells)[wanted][: extent.length]
        if lost is None or digest(record.digest, data) != lost.digest:
            raise BeyondRepair(f"{name} at {extent.offset:,} is not what was lost", safe="Nothing was changed.")
        return data

    def _sources(self, found: Sequence[_Found], number: int) -> Sequence[_Source]:
        """What has the cells of a stripe, each place by itself."""
        record, stripe = found[0].record, found[0].record.stripes[number]
        read = partial(read_cell, folder=self._folder, length=stripe.length, algorithm=record.digest)
        data = [
            _Source(tier, at, cell.blob if cell else "", partial(read, tier, cell=cell))
            for at, cell in enumerate(stripe.cells)
            for tier in (self._holders.get(cell.blob, []) if cell else [found[0].tier])
        ]
        parity = [
            _Source(one.tier, record.data + one.record.index, one.name, partial(self._parity_cell, one, number))
            for one in found
        ]
        return [*data, *parity]

    def _parity_cell(self, one: _Found, number: int) -> memoryview:
        stripe, offset = one.record.stripes[number], stripe_layout.cell_offsets(one.record)[number]
        data = memoryview(bytearray(stripe.length))
        one.tier.read_into(Extent(blob=f"{self._folder}/{one.name}", offset=offset, length=stripe.length), data)
        _require(one.record.digest, data, stripe.sum, one.name)
        return data


def is_damage(error: LastgoodError) -> bool:
    """Whether stored bytes are bad; else they could not be read now."""
    return isinstance(error, Damaged) and not isinstance(error, Unreadable)


def _chunk(name: str, offset: int) -> str:
    return f"too few cells are left to compute {name} at {offset:,}"


def _shape(record: StripeFile) -> object:
    """What the records of all files of a set have in common."""
    return record.data, record.parity, record.digest, [(one.cells, one.length) for one in record.stripes]

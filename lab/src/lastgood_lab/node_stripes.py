"""What parity among nodes can give back, by the files that lie in the memory of the nodes of a schedule.

It is computed from what each rank has sealed, and shares no code with what rebuilds (engine/stripes.py) but the code
of a stripe and the format of a record. A cell counts if its file has every byte that belongs there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lastgood.errors import LastgoodError
from lastgood.format import layout, stripe_layout
from lastgood.io.checksum import digest
from lastgood.io.reed_solomon import Code
from lastgood.records import Cell, Manifest, Stripe, StripeFile

from .shared_files import Content

Names = Mapping[str, Content | None]
"""what a node has in the folder of a generation"""


class _Parity(NamedTuple):
    """A file of parity that is complete: its record, and its name without its index."""

    set: str
    record: StripeFile


class SealedFiles:
    """The files of one generation as its ranks have sealed them: name -> bytes."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self._files = files
        self._complete: dict[tuple[str, bytes, bytes], StripeFile | None] = {}
        self._chunks = dict[str, list[tuple[str, int]]]()

    def can_be_rebuilt(self, manifest: str, nodes: Collection[Names]) -> bool:
        """Whether the files of a rank can be computed from what these nodes have. Without any parity they cannot."""
        parity = self._parity(nodes)
        whole = {name for there in nodes for name in there if name in self._files and self._is_whole(name, there)}
        if not parity or not (manifest in whole or any(manifest in one.record.manifests for one in parity)):
            return False
        return all(blob in whole or _has_enough(parity, whole, blob, at) for blob, at in self._chunks_of(manifest))

    def _is_whole(self, name: str, there: Names) -> bool:
        content = there[name]
        return content is not None and content.data == self._files[name]

    def _chunks_of(self, manifest: str) -> list[tuple[str, int]]:
        """File and offset of each chunk of a rank."""
        if manifest not in self._chunks:
            blobs = layout.decode(self._files[manifest], Manifest, manifest).blobs
            self._chunks[manifest] = [
                (one.name, offset) for one in blobs for offset in range(0, one.length, one.chunk_bytes)
            ]
        return self._chunks[manifest]

    def _parity(self, nodes: Collection[Names]) -> list[_Parity]:
        found = list[_Parity]()
        for there in nodes:
            for name in filter(stripe_layout.is_record, there):
                file, record = there.get(name.removesuffix(".json")), there[name]
                if file is None or record is None:
                    continue
                key = name, bytes(record.data), bytes(file.data)
                if key not in self._complete:
                    self._complete[key] = self._complete_record(*key)
                if (complete := self._complete[key]) is not None:
                    found.append(_Parity(stripe_layout.set_of(name), complete))
        return found

    def _complete_record(self, name: str, record: bytes, file: bytes) -> StripeFile | None:
        """The record of a file of parity that has all bytes that belong there; None if it has not."""
        try:
            found = layout.decode(record, StripeFile, name)
            stripe_layout.validate(found, name)
        except LastgoodError:
            return None
        cells = [self._parity_cell(found, one) for one in found.stripes]
        sums = [digest(found.digest, cell) for cell in cells]
        manifests = [self._files.get(one, b"") for one in found.manifests]
        same = sums == [one.sum for one in found.stripes] and file == b"".join([*cells, *manifests])
        return found if same and [*map(len, manifests)] == [*found.manifests.values()] else None

    def _parity_cell(self, record: StripeFile, stripe: Stripe) -> bytes:
        data = [memoryview(self._cell(one).ljust(stripe.length, b"\0")) for one in stripe.cells]
        return bytes(Code(record.data, record.parity).encode(data)[record.index])

    def _cell(self, one: Cell | None) -> bytes:
        return b"" if one is None else self._files.get(one.blob, b"")[one.offset : one.offset + one.length]


def _has_enough(parity: Sequence[_Parity], whole: Collection[str], blob: str, offset: int) -> bool:
    """Whether k cells are left of a stripe with this chunk."""
    indexes = dict[tuple[str, int, int, tuple[Cell | None, ...]], set[int]]()
    for one in parity:
        for number, stripe in enumerate(one.record.stripes):
            if any(cell is not None and (cell.blob, cell.offset) == (blob, offset) for cell in stripe.cells):
                stripe_of = one.set, number, one.record.data, tuple(stripe.cells)
                indexes.setdefault(stripe_of, set()).add(one.record.index)
    return any(
        sum(one is None or one.blob in whole for one in cells) + len(found) >= least
        for (_, _, least, cells), found in indexes.items()
    )

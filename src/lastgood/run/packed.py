"""A tier in an object store or a directory in which files of a generation may rest in packs (format/pack_layout.py).

Readers find such files under their own names. Only this module knows in which object they are; pack_copies.py writes
packs. In a directory an object is a file.

Invariants
  1. A file that is an object of its own counts before one of the same name in a pack, so that one file can be mended
     without writing the pack again.
  2. A pack whose index cannot be used names no file. Its files are missing, and a reading of one raises the cause.
  3. What is known of a folder comes from its newest listing. An index is read again when its pack was written again; in
     a directory, where nothing tells that, at each listing. A manifest that was fetched with an index is handed out
     once, and not after a later listing.
Nothing here is trusted: manifests and chunks are compared with their digests by those who read them.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple, cast

from ..errors import Damaged, ManifestInvalid, MissingBlob, NameTaken, Truncated
from ..format import pack_layout
from ..format.pack_layout import PackFiles, PackIndex, Places, is_manifest, is_pack, may_be_packed
from ..limits import PACK_END_LIMIT_BYTES, PACK_TAIL_BYTES
from ..ports import Upload
from ..records import Extent

if TYPE_CHECKING:
    from ..storage.directory import Disk
    from ..storage.objects import Objects
    from .claims import ClaimedTier

FOLDERS_KNOWN = 64
"""So many folders are remembered as they were listed last."""
TAILS_KNOWN = 2
"""So many folders' manifests are kept between the reading of an index and that of the manifests."""


class _Place(NamedTuple):
    """Where a file rests in a pack."""

    pack: str
    offset: int
    length: int


@dataclass
class _Folder:
    """A folder as it was listed last."""

    objects: dict[str, tuple[int | None, str]]
    """name -> length and version, as `Objects.versions`"""
    indices: dict[str, PackIndex] = field(default_factory=dict)
    places: dict[str, _Place] = field(default_factory=dict)
    """each file in a pack; some may also be objects of their own"""
    unusable: dict[str, Damaged] = field(default_factory=dict)
    """pack -> why its index cannot be used"""

    def place(self, name: str) -> _Place | None:
        """Where a file rests in a pack; None if it is an object of its own, or in no pack."""
        place = self.places.get(name)
        # guard: own-object-before-pack
        return place if place and name not in self.objects and place.pack in self.objects else None

    def length_of(self, pack: str) -> int:
        return self.objects[pack][0] or 0

    def listing(self) -> dict[str, int | None]:
        """Name -> length; -1 for a pack, whose files are listed instead."""
        found = {name: place.length for name in self.places if (place := self.place(name))}
        return found | {name: -1 if is_pack(name) else length for name, (length, _) in self.objects.items()}


@dataclass
class _Tail:
    """Manifests that were fetched together, each of which is handed out once."""

    pack: str
    start: int
    """the first byte of `data` in the pack"""
    data: bytearray
    left: set[str]


class PackedTier:
    """`ports.Tier` over another one, with the files in packs under their own names.

    `inner`: the tier that holds the objects or files. Raises as it does. A listing has -1 as the length of a pack.
    """

    newest_only: bool = False

    def __init__(self, inner: Objects | ClaimedTier | Disk) -> None:
        self._inner = inner
        self.place, self.reads_at_once, self.point = inner.place, inner.reads_at_once, inner.point
        self.in_object_store = hasattr(inner, "tree")
        if tree := getattr(inner, "tree", None):  # only places that list all files at once have it
            self.tree = tree
        self.next_order = getattr(inner, "next_order", None)  # only a tier that is claimed has it
        self._lock = threading.Lock()
        self._folders = OrderedDict[str, _Folder]()
        self._tails = OrderedDict[str, _Tail]()

    @property
    def order(self) -> int:
        """The order of the claim that is held, which each new incarnation may raise; 0: there is none."""
        return getattr(self._inner, "order", 0)

    # ---- writing -------------------------------------------------------------------------------------------

    def create(self, name: str, length: int) -> Upload:
        """As `ports.Tier`. A name in a pack is taken, once its folder was listed."""
        if self._known_place(name) is not None:
            raise NameTaken(f"{self.place}/{name} exists already, in a pack", safe="It is untouched.")
        return self._inner.create(name, length)

    def put_new(self, name: str, data: bytes) -> None:
        """As `ports.Tier`. A name in a pack is taken, once its folder was listed."""
        place = self._known_place(name)
        if place is None:
            self._inner.put_new(name, data)
            return
        found = bytearray(place.length)
        try:
            self.read_into(Extent(blob=name, offset=0, length=place.length), memoryview(found), fresh=True)
        except Damaged as error:
            raise NameTaken(f"{self.place}/{name} exists already and cannot be read: {error.what}") from error
        if found != data:
            raise NameTaken(f"{self.place}/{name} exists already with other bytes, in a pack", safe="It is untouched.")

    def replace(self, name: str, by: str) -> None:
        """As `ports.Mendable`. A file in a pack becomes an object of its own."""
        self._inner.replace(name, by)
        self.forget(name.rpartition("/")[0])

    def name_finished(self, name: str, by: str) -> None:
        """As `Disk.name_finished`, in a directory."""
        cast("Disk", self._inner).name_finished(name, by)

    def delete(self, name: str) -> None:
        """As `ports.Tier`, for objects. What is only in a pack goes with the pack."""
        folder, _, own = name.rpartition("/")
        self._inner.delete(name)  # also a name that the newest listing lacks: it may have been created since
        with self._lock:
            if (known := self._folders.get(folder)) is not None:
                left = {other: one for other, one in known.objects.items() if other != own}
                self._folders[folder] = replace(known, objects=left)

    def forget(self, folder: str) -> None:
        """Drop what is known of a folder, because another process may have changed it."""
        with self._lock:
            self._folders.pop(folder, None)
            self._tails.pop(folder, None)
        if forget := getattr(self._inner, "forget", None):  # only tiers that cache something have it
            forget(folder)

    # ---- reading -------------------------------------------------------------------------------------------

    def list(self, folder: str) -> Mapping[str, int | None]:
        """As `ports.Tier`, with the files in packs; the length of a pack is -1."""
        return self._listed(folder).listing() if _is_generation(folder) else self._inner.list(folder)

    def list_files(self, folder: str) -> Mapping[str, int | None]:
        """As `list`, of what lies in the folder itself: packs, and not the files in them. Reads no pack."""
        return self._inner.list(folder)

    def packs(self, folder: str) -> dict[str, PackFiles]:
        """The packs in a folder whose index can be used, with the files in them. Lists the folder."""
        known, found = self._listed(folder), dict[str, PackFiles]()
        for name, place in known.places.items():
            if place.pack in known.objects:
                of = found.setdefault(place.pack, PackFiles(length=known.length_of(place.pack), files={}))
                of.files[name] = place.offset, place.length
        return found

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        """As `ports.Tier`. Raises what keeps the index of a pack from being used, if a name is found nowhere."""
        folder, _, name = extent.blob.rpartition("/")
        if not _is_generation(folder) or not may_be_packed(name):
            self._inner.read_into(extent, mv, fresh=fresh)
            return
        with self._lock:
            known = self._folders.get(folder)
        known = known or self._listed(folder)
        if known.place(name) is None:
            try:
                self._inner.read_into(extent, mv, fresh=fresh)
                return
            except MissingBlob:
                known = self._listed(folder)  # another process may have written a pack since
                if known.place(name) is None:
                    for error in known.unusable.values():
                        raise ManifestInvalid(f"{extent.blob}: {error.what}", blob=extent.blob) from error
                    raise
        self._read_packed(folder, name, known, extent, mv, fresh)

    # ---- steps ---------------------------------------------------------------------------------------------

    def _known_place(self, name: str) -> _Place | None:
        """Where a file rests in a pack, as far as its folder was listed."""
        folder, _, own = name.rpartition("/")
        with self._lock:
            known = self._folders.get(folder)
        return known.place(own) if known else None

    def _listed(self, folder: str) -> _Folder:
        """List a folder, and read the index of each pack that is new or was written again since the last listing."""
        with self._lock:
            before = self._folders.get(folder)
            self._tails.pop(folder, None)  # guard: fetched-manifests-dropped-at-listing
        found = _Folder(dict(self._inner.versions(folder)))
        packs = sorted(filter(is_pack, found.objects))
        holds = dict[str, Places]()
        for pack in packs[-1:] + packs[:-1]:  # the last one most often names the files of all
            if pack in holds:
                continue
            try:
                if before and pack in before.indices and _is_same(before.objects.get(pack), found.objects[pack]):
                    index = before.indices[pack]
                else:
                    index = self._read_index(folder, pack, found.length_of(pack))
            except Damaged as error:
                found.unusable[pack] = error  # guard: unusable-pack-names-nothing
                continue
            found.indices[pack] = index
            holds[pack] = index.files
            for other, of in index.others.items():
                # guard: rewritten-pack-read-itself
                if other in found.objects and found.length_of(other) == of.length:
                    holds.setdefault(other, of.files)
        for pack in sorted(holds):
            for name, (offset, length) in holds[pack].items():
                found.places.setdefault(name, _Place(pack, offset, length))
        with self._lock:
            self._folders[folder] = found
            self._folders.move_to_end(folder)
            while len(self._folders) > FOLDERS_KNOWN:
                self._folders.popitem(last=False)
        return found

    def _read_index(self, folder: str, pack: str, length: int) -> PackIndex:
        """Read the end of a pack: its index, and most often all manifests. Raises Damaged, Unavailable."""
        name = f"{folder}/{pack}"
        start = max(0, length - PACK_TAIL_BYTES)
        data = self._read(name, start, length)
        at = pack_layout.decode_footer(data, length, name)
        wanted = at.records if length - at.records <= PACK_END_LIMIT_BYTES else at.start
        if wanted < start:
            data, start = self._read(name, wanted, start) + data, wanted
        index = pack_layout.decode_index(data[at.start - start : at.start - start + at.length], at, name)
        self._keep(folder, _Tail(pack, start, data, _manifests(index, start)))
        return index

    def _read_packed(self, folder: str, name: str, known: _Folder, extent: Extent, mv: memoryview, fresh: bool) -> None:
        place = known.place(name)
        assert place is not None
        if extent.offset + extent.length > place.length:
            raise Truncated(
                f"{extent.blob} has {place.length:,} bytes in {place.pack}", blob=extent.blob, offset=place.length
            )
        if is_manifest(name) and self._hand_out(folder, name, known, place, extent, mv):
            return
        at = Extent(blob=f"{folder}/{place.pack}", offset=place.offset + extent.offset, length=extent.length)
        try:
            self._inner.read_into(at, mv, fresh=fresh)
        except (MissingBlob, Truncated) as error:
            raise type(error)(f"{extent.blob}: {error.what}", blob=extent.blob, offset=error.offset) from error

    def _hand_out(self, folder: str, name: str, known: _Folder, place: _Place, extent: Extent, mv: memoryview) -> bool:
        """Fill `mv` from the manifests of a pack, which are fetched together. Returns whether they were."""
        tail = self._take(folder, name, place.pack)
        if tail is None:
            index, length = known.indices.get(place.pack), known.length_of(place.pack)
            if index is None:
                return False
            wanted = [one for other, one in index.files.items() if is_manifest(other)]
            start, end = min(offset for offset, _ in wanted), max(offset + size for offset, size in wanted)
            if end - start > PACK_END_LIMIT_BYTES or end > length:
                return False
            tail = _Tail(place.pack, start, self._read(f"{folder}/{place.pack}", start, end), _manifests(index, start))
            tail.left.discard(name)
            self._keep(folder, tail)
        begin = place.offset - tail.start + extent.offset
        mv[: extent.length] = tail.data[begin : begin + extent.length]
        return True

    def _take(self, folder: str, name: str, pack: str) -> _Tail | None:
        """The manifests that were fetched from a pack, if this one was not handed out yet."""
        with self._lock:
            tail = self._tails.get(folder)
            if tail is None or tail.pack != pack or name not in tail.left:
                return None
            tail.left.discard(name)
            if not tail.left:
                del self._tails[folder]
            return tail

    def _keep(self, folder: str, tail: _Tail) -> None:
        if not tail.left:
            return
        with self._lock:
            self._tails[folder] = tail
            self._tails.move_to_end(folder)
            while len(self._tails) > TAILS_KNOWN:
                self._tails.popitem(last=False)

    def _read(self, name: str, start: int, end: int) -> bytearray:
        data = bytearray(end - start)
        self._inner.read_into(Extent(blob=name, offset=start, length=end - start), memoryview(data), fresh=True)
        return data


def _is_same(before: tuple[int | None, str] | None, now: tuple[int | None, str]) -> bool:
    """Whether a pack was not written again, by its length and version. Without a version nobody knows."""
    return before == now and bool(now[1])


def _is_generation(folder: str) -> bool:
    return folder.startswith("gen/")


def _manifests(index: PackIndex, start: int) -> set[str]:
    """The manifests of a pack that begin at `start` or later."""
    return {name for name, (offset, _) in index.files.items() if is_manifest(name) and offset >= start}

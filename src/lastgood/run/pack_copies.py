"""Writes packs (format/pack_layout.py): the files of a copied generation that are missing at a place, in one object.

Invariants
  1. A pack is one upload: readers find all of it or nothing of it.
  2. The pack that holds the manifests is the last one, because its index names the files of the others too. It is
     complete before COMMIT is written (copying.complete).
  3. A pack whose index is damaged is replaced by a whole one, and not deleted before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

from ..engine.read_file import RankFiles
from ..errors import Cancelled
from ..format import layout, pack_layout, sealed
from ..io.files import round_up
from ..policy.places import is_packed
from ..ports import Tier
from ..records import Blob, Generation, Manifest, Seal
from .file_copies import Copying, write
from .packed import PackedTier


def wanted(target: Tier, sources: Sequence[Tier], generation: Generation) -> bool:
    """Whether the files of a generation that are missing at the target are put into packs. Raises Damaged."""
    if not isinstance(target, PackedTier):
        return False
    seals, listing = generation.commit.seals, target.list(layout.folder(generation.id))
    files = len(seals)
    if files == 1:
        files = len(sealed.first_sealed([*sources, target], generation, seals[0]).blobs)
    return is_packed(files, layout.COMMIT in listing, any(map(pack_layout.is_pack, listing)))


@contextlib.contextmanager
def packing(
    target: PackedTier,
    sources: Sequence[Tier],
    generation: Generation,
    files: Sequence[tuple[Manifest, Blob]],
    seals: Sequence[Seal],
    elsewhere: Collection[str],
    copying: Copying,
) -> Iterator[None]:
    """Upload these files and manifests in one pack. It exists at the target once the block has ended.

    `files`: the tensor files, each with the manifest that names it. `seals`: of the manifests. `elsewhere`: the tensor
    files that other packs may hold by the end of the block. Nothing is written if there is nothing to write, or if the
    block raises. Raises as `file_copies.write`.
    """
    if not files and not seals:
        yield
        return
    folder = layout.folder(generation.id)
    number = min([one.rank for one, _ in files] + [one.rank for one in seals])
    usable = target.packs(folder)
    while (pack := pack_layout.pack_name(number)) in usable:  # guard: usable-pack-kept
        number += 1
    lengths = [(blob.name, blob.length) for _, blob in files] + [(one.manifest, one.length) for one in seals]
    places, end = pack_layout.placed(lengths)
    there = pack in target.list(folder)
    name = f"{folder}/{pack}.tmp" if there else f"{folder}/{pack}"
    if there:
        target.delete(name)
    reserved = pack_layout.end_bytes(places, elsewhere)
    upload = target.create(name, end + reserved)
    try:
        for manifest, blob in files:
            write(upload, places[blob.name][0], [RankFiles(one, folder, manifest) for one in sources], blob, copying)
        for seal in seals:
            if copying.stop():
                raise Cancelled(f"the copy of {seal.manifest} was interrupted")
            data = sealed.record_bytes(sources, generation, seal)
            upload.write_at(memoryview(data.ljust(round_up(len(data)), b"\0")), places[seal.manifest][0])
        yield
        others = {other: found for other, found in target.packs(folder).items() if other != pack} if seals else {}
        upload.write_at(memoryview(pack_layout.encode_end(places, others, end, reserved)), end)
        upload.finish()
    except BaseException:
        upload.abort()
        raise
    if there:
        target.replace(f"{folder}/{pack}", name)  # guard: damaged-pack-replaced-whole

"""Writes packs (format/pack_layout.py): the files of a copied generation that are missing at a place, in one file.

The tensor files of the ranks of a node come into one pack, the manifests of all ranks into another one after that.

Invariants
  1. A pack gets its name once it is whole: readers find all of it or nothing of it.
  2. The pack of manifests is written after those of tensor files, and its index names the files of these too. It is
     complete before COMMIT is written (copying.complete).
  3. A pack that can be used is never replaced: another process may have written it for other files. One whose index is
     damaged is replaced by a whole one, and not deleted before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from typing import TypeGuard

from ..engine.read_file import RankFiles
from ..errors import Cancelled, MissingBlob, NameTaken, TierDown
from ..format import commit, layout, pack_layout, sealed
from ..policy.places import is_packed
from ..ports import Tier, Upload
from ..records import Blob, Generation, Manifest, Seal
from ..storage.slot_file import aligned
from . import paths
from .file_copies import Copying, write
from .packed import PackedTier


def wanted(target: Tier, sources: Sequence[Tier], generation: Generation, copying: Copying) -> TypeGuard[PackedTier]:
    """Whether the files of a generation that are missing at the target are put into packs. Raises Damaged.

    In an object store they are; in a directory if they come from memory, where the copies are the work of an agent, and
    unless `copying` asks for plain files.
    """
    if not isinstance(target, PackedTier):
        return False
    if not (target.in_object_store or (paths.in_memory(sources[0].place) and not copying.plain)):
        return False
    seals, listing = generation.commit.seals, target.list(layout.folder(generation.id))
    files = len(seals)
    if files == 1:
        files = len(sealed.first_sealed([*sources, target], generation, seals[0]).blobs)
    return is_packed(files, layout.COMMIT in listing, any(map(pack_layout.is_pack, listing)))


def pack_tensors(
    target: PackedTier,
    sources: Sequence[Tier],
    generation: Generation,
    files: Sequence[tuple[Manifest, Blob]],
    copying: Copying,
) -> list[str]:
    """Put these tensor files, each with the manifest that names it, into one pack. Returns their names.

    Raises as `file_copies.write`.
    """
    if not files:
        return []
    folder, lengths = layout.folder(generation.id), [(blob.name, blob.length) for _, blob in files]

    def fill(upload: Upload, places: pack_layout.Places) -> None:
        for manifest, blob in files:
            write(upload, places[blob.name][0], [RankFiles(one, folder, manifest) for one in sources], blob, copying)

    _written(target, folder, min(one.rank for one, _ in files), lengths, fill)
    return [name for name, _ in lengths]


def pack_manifests(
    target: PackedTier, sources: Sequence[Tier], generation: Generation, seals: Sequence[Seal], copying: Copying
) -> list[str]:
    """Put the manifests of these seals that are missing at the target into one pack. Returns their names.

    Called once the packs of tensor files are complete. Raises as `pack_tensors`.
    """
    folder = layout.folder(generation.id)
    listing = target.list(folder)
    missing = [one for one in seals if one.manifest not in listing]
    if not missing:
        return []
    lengths = [(one.manifest, one.length) for one in missing]

    def fill(upload: Upload, places: pack_layout.Places) -> None:
        for seal in missing:
            if copying.stop():
                raise Cancelled(f"the copy of {seal.manifest} was interrupted")
            upload.write_at(aligned(sealed.record_bytes(sources, generation, seal)), places[seal.manifest][0])

    # After all packs of tensor files: readers look into the one of the highest number first.
    _written(target, folder, 1 + generation.commit.seals[-1].rank, lengths, fill, names_others=True)
    return [name for name, _ in lengths]


def remove_unfinished(target: PackedTier, generation: Generation) -> None:
    """Remove packs that a killed process has left unfinished. Called once the generation is whole at the target."""
    folder = layout.folder(generation.id)
    for name in target.list_files(folder):
        if name.startswith("pack-") and name.endswith(".tmp"):
            target.delete(f"{folder}/{name}")  # guard: unfinished-packs-removed


def _written(
    target: PackedTier,
    folder: str,
    number: int,
    lengths: Sequence[tuple[str, int]],
    fill: Callable[[Upload, pack_layout.Places], None],
    names_others: bool = False,
) -> None:
    """Write a pack under the first number, from `number` on, of no pack that can be used.

    `lengths`: of its files. `fill`: writes them to their places. `names_others`: whether its index names the
    files of the packs that are there too.
    """
    usable = target.packs(folder)
    while (pack := pack_layout.pack_name(number)) in usable:  # guard: usable-pack-kept
        number += 1
    name, listing = f"{folder}/{pack}", target.list_files(folder)
    damaged = pack in listing
    staged = damaged or not commit.visible_is_durable(target)
    by = f"{name}.{os.getpid()}-{threading.get_ident()}.tmp" if staged else name
    if by.rpartition("/")[2] in listing:  # of a process that has ended, whose number this one has
        target.delete(by)
    places, end = pack_layout.placed(lengths)
    last = pack_layout.encode_end(places, usable if names_others else {}, end)
    upload = target.create(by, end + len(last))
    try:
        fill(upload, places)
        upload.write_at(aligned(last), end)
        upload.finish()
        if damaged:
            target.replace(name, by)  # guard: damaged-pack-replaced-whole
        elif staged:
            _name(target, folder, number, by)
    except BaseException:
        upload.abort()
        raise


def _name(target: PackedTier, folder: str, number: int, by: str) -> None:
    """Give a whole pack the first name that is free. Another process may have taken one since, for other files."""
    while True:
        try:
            target.name_finished(f"{folder}/{pack_layout.pack_name(number)}", by)
            return
        except NameTaken:
            number += 1
        except MissingBlob as error:
            raise TierDown(f"{by} was removed: another process has made {folder} whole meanwhile") from error

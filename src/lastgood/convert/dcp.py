"""A StorageWriter and a StorageReader for torch.distributed.checkpoint. The planners are torch's or the user's.

    dcp.save(state_dict, storage_writer=lastgood.dcp.Writer("runs/gpt"))
    dcp.load(state_dict, storage_reader=lastgood.dcp.Reader("runs/gpt"))

Each save is a generation of the run: every rank writes and seals its own files, and the coordinator commits after torch
has gathered that all ranks have done so. Until then readers find the older generations. `checkpoint_id` is a step: a
number, or a text; then its last number counts. Without it, a save takes the next step, and a load takes the newest
generation that is not known to be damaged or unfit.

torch may reuse a plan in later saves (`enable_plan_caching`), so the generation that the coordinator sends with a plan
is used only once. A rank with a reused plan reads the generation from the run, where the coordinator records the
incarnation that it begins for each save.

Values that torch would pickle are stored as typed values (convert/dcp_values.py). No pickle is stored, so none that
comes from a file is read.
"""

from __future__ import annotations

import io
import os
import re
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from ..engine.arena import Arena
from ..errors import ManifestInvalid, MissingBlob, NotARun, Refused, StepDiffers, TimedOut
from ..format import commit, layout
from ..format.boxes import Box, StoredPiece
from ..format.layout import Tensor
from ..limits import CHUNK_BYTES, STEP_DIGITS, WORKERS
from ..policy import reshard
from ..ports import Tier
from ..records import GenerationId, Incarnation, Seal
from ..run import access
from ..run.content import Content
from ..run.left_behind import order_beside
from ..run.reader import RunReader
from ..run.save import RankPart, RankWriter, ReadyChunks, SaveRequest, write_part
from ..run.writer import RunWriter
from ..snapshot import staging
from ..state import tensors
from . import dcp_values

VALUES, PATHS = "dcp", "dcp.paths"
"""entries of a manifest's values: name -> value that torch would pickle; name -> path in nested dicts and lists"""
DCP_VERSION: str | None = getattr(filesystem, "CURRENT_DCP_VERSION", None)
"""version of the metadata, as torch's own writer sets it; older versions of torch have none"""
_SEAL = "lastgood.seal"
RECORD_SECONDS = 90.0
"""how long a rank with a reused plan waits for the coordinator's record; NFS clients cache listings for up to 60 s"""
POLL_SECONDS = 0.05


@dataclass
class _Place:
    """Where a rank writes. torch may reuse the plan that holds this record, but `at` is valid for one save only."""

    at: GenerationId | None
    rank: int
    ranks: int

    def take(self) -> GenerationId | None:
        """The generation at the first call; None at later calls, when torch reuses the plan."""
        at, self.at = self.at, None  # guard: plan-generation-used-once
        return at


class Writer(StorageWriter):
    """Writes each save of torch.distributed.checkpoint as a generation of a run.

    `path`: directory of the run; all ranks must see the same one. `digest` (default "xxh3_128"): the algorithm of the
    digests of chunks and tensors. Raises Refused for slots.
    """

    def __init__(self, path: str | os.PathLike[str], *, digest: str = "xxh3_128") -> None:
        self.path, self._digest = access.many_files(path), digest
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self.save_id: str | None = None
        """id of the last save: the incarnation that it began; a load of this generation reports the same id"""
        self._at: GenerationId | None = None
        """at the coordinator only: the generation of the current save"""
        self._order = 0
        """`order` of the newest incarnation when this save began"""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        _step(checkpoint_id)
        self.checkpoint_id, self.save_id = checkpoint_id, None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("use_collectives") is False:
            raise Refused(
                "use_collectives=False: without collectives no rank commits the save",
                safe="Nothing was touched.",
                todo="Leave use_collectives out.",
            )
        self._at = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        newest = _newest_incarnation(self.path)
        self._order = newest.order if newest else 0  # guard: cached-plan-awaits-this-save
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """At the coordinator: choose the generation of this save, record its incarnation, and send it to all ranks."""
        with _opened(self.path, self._digest) as run:
            newest = run.newest()
            run.begin(newest.id if newest else None, order_beside((), [run.known.tier]))
            wanted = _step(self.checkpoint_id)
            self._at = run.admit(wanted if wanted is not None else newest.step + 1 if newest else 0)
            run.record_incarnation()  # `finish` opens the run again, and continues this incarnation
        return [replace(plan, storage_data=_Place(self._at, rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        place = plan.storage_data
        if not isinstance(place, _Place):
            raise Refused(
                "torch reuses this plan from a save to another storage",
                safe="Nothing was committed; every committed generation is untouched.",
                todo="torch caches plans by the class of the planner: use a subclass of the planner for this storage.",
            )
        sent = place.take()
        at = self._at or sent or self._recorded()
        self.save_id = at.incarnation
        items: dict[str, tuple[WriteItem, Tensor, torch.Tensor]] = {}
        stored: dict[str, Any] = {}
        results: list[WriteResult] = []
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                stored[item.index.fqn] = dcp_values.of_item(item, planner)
                results.append(WriteResult(item.index, 0, None))
                continue
            live = planner.resolve_data(item)
            assert isinstance(live, torch.Tensor)
            tensor = _tensor(item, live, place.ranks)
            if tensor is not None:
                items[tensor.key] = item, tensor, live.detach()
            results.append(WriteResult(item.index, tensor.length if tensor else 0, None))
        part = self._written(at, place.rank, items, stored, plan.planner_data)
        results.append(WriteResult(dcp.MetadataIndex(_SEAL), part.bytes, (at, part)))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _written(
        self,
        at: GenerationId,
        rank: int,
        items: dict[str, tuple[WriteItem, Tensor, torch.Tensor]],
        stored: dict[str, Any],
        paths: Any,
    ) -> RankPart:
        """Write this rank's files and its manifest. They are durable and sealed at the end."""
        images = layout.images((tensor for _, tensor, _ in items.values()), rank)
        content = {key: live for key, (_, _, live) in items.items()}
        arena = Arena(2 * WORKERS * CHUNK_BYTES, CHUNK_BYTES)
        with (
            ThreadPoolExecutor(WORKERS, "lastgood-write") as writers,
            access.for_sharing(self.path, "atomic_dirsync") as tier,
        ):
            snapshot = staging.copy_all(images, content, arena)
            request = SaveRequest(
                at=at,
                images=images,
                chunks=ReadyChunks(snapshot.fill()),
                chunk_bytes=arena.chunk_bytes,
                values={VALUES: stored, PATHS: dcp_values.of_paths(paths)},
            )
            return write_part(request, RankWriter(tier, rank, self._digest, writers))

    def _recorded(self) -> GenerationId:
        """The generation of this save, read from the record that the coordinator wrote. Raises TimedOut."""
        until = time.monotonic() + RECORD_SECONDS
        newest = _newest_incarnation(self.path)
        while newest is None or newest.order <= self._order:
            if time.monotonic() > until:
                raise TimedOut(
                    f"{self.path}: this rank does not see the record that the coordinator wrote {RECORD_SECONDS:.0f} "
                    "seconds ago",
                    safe="Nothing was committed; every committed generation is untouched.",
                    todo="Mount the same directory on all ranks, or save without enable_plan_caching.",
                )
            time.sleep(POLL_SECONDS)
            newest = _newest_incarnation(self.path)
        step = _step(self.checkpoint_id)
        if step is None:
            step = newest.parent.step + 1 if newest.parent else 0
        return GenerationId(step=step, incarnation=newest.id)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """At the coordinator, after every rank has sealed: check that the generation is complete, and commit it."""
        assert self._at is not None
        sealed: list[tuple[GenerationId, RankPart]] = [of_rank[-1].storage_data for of_rank in results]
        others = sorted({str(at) for at, _ in sealed if at != self._at})
        if others:  # guard: commit-after-all-ranks-wrote
            raise StepDiffers(
                f"ranks have written {', '.join(others)}, but {self._at} is saved",
                safe="Nothing was committed; every committed generation is untouched.",
                todo="Give every rank the same path and the same checkpoint_id.",
            )
        parts = [part for _, part in sealed]
        with _opened(self.path, self._digest, under_way=self._at) as run:
            _require_whole(run.tier, self._at, [part.seal for part in parts], metadata)
            run.publish(self._at, parts, pinned=True, milestone=False, metrics={})
        metadata.storage_meta, metadata.version = self.storage_meta(), DCP_VERSION

    def storage_meta(self) -> dcp.StorageMeta:
        """The ids of this save. Without a `checkpoint_id` it is the path of the run."""
        return dcp.StorageMeta(self.checkpoint_id or self.path, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _DIGITS.search(os.fspath(checkpoint_id)) is not None


class Reader(StorageReader):
    """Loads generations of a run with torch.distributed.checkpoint, also those that a Checkpointer has saved.

    `path`: directory of the run. Raises Refused for slots.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = access.many_files(path)
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self.load_id = uuid.uuid4().hex
        self._content: _Content | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        _step(checkpoint_id)
        self.checkpoint_id, self._content = checkpoint_id, None
        self.load_id = uuid.uuid4().hex

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        """torch's metadata of the generation; its `storage_meta` holds the ids of the save and of this load."""
        self._content = _Content(access.for_reading(self.path), _step(self.checkpoint_id))
        found = self._content.metadata()
        save_id = self._content.content.generation.id.incarnation
        found.storage_meta = dcp.StorageMeta(self.checkpoint_id or self.path, save_id, self.load_id)
        found.version = DCP_VERSION
        return found

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: `read_metadata` has read everything."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        assert self._content is not None
        root = self._content.content.generation.root
        return [replace(plan, storage_data=root) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        assert self._content is not None
        if plan.storage_data != self._content.content.generation.root:
            raise StepDiffers(
                "a newer generation was committed while the ranks read which one is the newest",
                safe="Nothing was loaded.",
                todo="Load again, or name the step: checkpoint_id=...",
            )
        self._content.read(plan.items, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _DIGITS.search(os.fspath(checkpoint_id)) is not None


class _Content:
    """A generation in the terms of torch.distributed.checkpoint."""

    def __init__(self, tier: Tier, step: int | None) -> None:
        self.content = RunReader(tier).content(step)
        self._tensors = self.content.names()
        self._values, self._paths = kept_values(self.content)

    def metadata(self) -> dcp.Metadata:
        entries: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            chunks = [
                dcp.ChunkStorageMetadata(torch.Size(one.box.offsets), torch.Size(one.box.shape))
                for one in tensor.stored
            ]
            properties = dcp.TensorProperties(dtype=tensors.dtype_of(tensor.dtype))
            entries[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        entries |= {name: dcp.BytesStorageMetadata() for name in self._values}
        return dcp.Metadata(entries, planner_data=self._paths or {name: (name,) for name in entries})

    def read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        wanted: dict[tuple[int, str], tuple[StoredPiece, list[ReadItem]]] = {}
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._bytes(item.storage_index.fqn))
                continue
            one = self._stored(item.storage_index)
            wanted.setdefault((one.rank, one.piece.key), (one, []))[1].append(item)
        with ThreadPoolExecutor(WORKERS, "lastgood-read") as readers:
            pieces = list(wanted.values())
            for (one, of_piece), data in zip(
                pieces, readers.map(self.content.piece, [one for one, _ in pieces]), strict=True
            ):
                for item in of_piece:
                    _fill(planner, item, one, data)

    def _stored(self, index: dcp.MetadataIndex) -> StoredPiece:
        stored = self._tensors[index.fqn].stored
        offset = tuple(index.offset) if index.offset is not None else stored[0].box.offsets
        return next(one for one in stored if one.box.offsets == offset)

    def _bytes(self, name: str) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(self._values[name], file)
        file.seek(0)
        return file


def kept_values(content: Content) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Of all ranks: name -> value that torch would have pickled; name -> path in nested dicts and lists."""
    kept: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for rank in range(content.generation.commit.world.ranks):
        of_rank = content.values(rank)
        kept |= {name: dcp_values.decoded(tree) for name, tree in of_rank.get(VALUES, {}).items()}
        paths |= {name: dcp_values.decoded(tree) for name, tree in of_rank.get(PATHS, {}).items()}
    return kept, paths


def _fill(planner: LoadPlanner, item: ReadItem, one: StoredPiece, data: bytearray) -> None:
    """Copy the part of a stored piece that `item` asks for into the planner's tensor."""
    source = tensors.from_buffer(data, one.piece.dtype, one.piece.shape)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        source = source.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    tensors.write(target, source.to(target.dtype))
    planner.commit_tensor(item, target)


_DIGITS = re.compile(r"(\d+)\D*$")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
"""its last number is no step: it falls at the end of each month"""


def _step(checkpoint_id: str | os.PathLike[str] | None) -> int | None:
    """The step that a `checkpoint_id` names; None for None. Raises Refused."""
    if checkpoint_id is None:
        return None
    text = str(checkpoint_id)
    found = _DIGITS.search(text)
    if found is None or _DATE.search(text) or len(found[1].lstrip("0")) > STEP_DIGITS:
        raise Refused(
            f"checkpoint_id={checkpoint_id!r} names no step",
            safe="Nothing was touched.",
            todo=f"Give a number of up to {STEP_DIGITS} digits, or text whose last number is one and no date: "
            "'step-100'. The run's directory goes to Writer and Reader.",
        )
    return int(found[1])


@contextmanager
def _opened(path: str, digest: str, under_way: GenerationId | None = None) -> Iterator[RunWriter]:
    """The run, open for writing. The files of the save `under_way` are not deleted as those of an interrupted save."""
    with (
        access.for_writing(path, "atomic_dirsync") as tier,
        ThreadPoolExecutor(WORKERS, "lastgood-write") as workers,
    ):
        yield RunWriter(tier, workers, algorithm=digest, resumes=under_way)


def _newest_incarnation(path: str) -> Incarnation | None:
    """The newest incarnation that is recorded in the run; None if there is no run."""
    try:
        return commit.newest_incarnation(access.for_reading(path))
    except NotARun:
        return None


def _require_whole(tier: Tier, at: GenerationId, seals: list[Seal], metadata: dcp.Metadata) -> None:
    """Check that every sealed manifest exists, and that all entries of torch's plan were written and are complete.

    Raises MissingBlob, ManifestInvalid.
    """
    files = tier.list(layout.folder(at))
    missing = [seal.manifest for seal in seals if files.get(seal.manifest) != seal.length]
    if missing:
        raise MissingBlob(
            f"{layout.folder(at)} lacks {', '.join(missing[:3])}, which a rank has sealed",
            safe="Nothing was committed; every committed generation is untouched.",
            todo="All ranks must see the same directory, and no other job may write this run at the same time.",
        )
    manifests = [commit.sealed_manifest(tier, at, seal, len(seals), files) for seal in seals]
    written = set(reshard.tensors(manifests)).union(*(one.values[VALUES] for one in manifests))
    lacking = sorted(metadata.state_dict_metadata.keys() - written)
    if lacking:  # guard: all-planned-items-written
        raise ManifestInvalid(
            f"{', '.join(lacking[:3])} is in the plan of this save, but no rank has written it",
            safe="Nothing was committed; every committed generation is untouched.",
            todo="Give every rank the same plan: a planner that caches plans must cache them on all ranks.",
        )


def _tensor(item: WriteItem, live: torch.Tensor, ranks: int) -> Tensor | None:
    """The piece to store for a write item; None for a part without elements, but for the first of a tensor without any.

    Raises Unstorable, ManifestInvalid, Refused.
    """
    data = item.tensor_data
    assert data is not None
    tensors.require_storable(live, item.index.fqn)
    whole, box = tuple(data.size), Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if tuple(live.shape) != box.shape:
        raise ManifestInvalid(
            f"{item.index.fqn}: the planner planned a part of shape {box.shape} and gave one of {tuple(live.shape)}",
            safe="Nothing was committed.",
            todo="The tensor, or the planner, must not change between the plan and the write.",
        )
    if not box.elements and (0 not in whole or any(box.offsets)):  # guard: empty-shard-not-stored
        return None
    some = box.shape != whole and 0 not in whole
    if some and ranks == 1:
        raise Refused(
            f"{item.index.fqn} is a part of a tensor, and no other rank saves the rest of it",
            safe="Nothing was committed.",
            todo="Save in the process group, not with no_dist.",
        )
    place = (box.offsets, whole) if some else ((), ())
    return Tensor(item.index.fqn, tensors.dtype_name(live.dtype), box.shape if some else whole, False, *place)

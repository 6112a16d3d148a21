"""torch.distributed.checkpoint with this storage under it: a StorageWriter and a StorageReader. torch's planners plan.

    dcp.save(state_dict, storage_writer=lastgood.dcp.Writer("runs/gpt"))
    dcp.load(state_dict, storage_reader=lastgood.dcp.Reader("runs/gpt"))

Each save is a generation of the run: every rank writes and seals its own files, the coordinator commits when torch has
gathered that all have. Until then the older generations are what a reader finds. `checkpoint_id` is a step: a number,
or text that ends in one; without it a save takes the next step, and a load the newest that is not known to be damaged.

What torch would pickle is stored as typed values: it is read by torch's own restricted unpickler, and refused by name
where that does not take it. Nobody unpickles on load.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch
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
from ..errors import ManifestInvalid, MissingBlob, Refused, StepDiffers
from ..format import commit, layout, values
from ..format.boxes import Box, Stored
from ..format.layout import Tensor
from ..plan import reshard
from ..ports import Tier
from ..records import GenerationId, Seal
from ..run import places, sharing
from ..run.content import Content
from ..run.reader import WORKERS, RunReader
from ..run.sharing import Share
from ..run.writer import RunWriter
from ..train import staging, tensors

VALUES, PATHS = "dcp", "dcp.paths"
"""entries of a manifest's values: by name what torch would pickle; by name its place in nested dicts"""
_SEAL = "lastgood.seal"


class Writer(StorageWriter):
    """Saves of torch.distributed.checkpoint as generations of the run at `path`, which all ranks must see."""

    def __init__(self, path: str | os.PathLike[str], *, digest: str = "xxh3_128") -> None:
        self.path, self._digest = places.directory(path), digest
        self.checkpoint_id: str | os.PathLike[str] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        _step(checkpoint_id)
        self.checkpoint_id = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **options: Any) -> None:
        if options.get("use_collectives") is False:
            raise Refused("a save without collectives, which nobody commits", todo="Leave use_collectives alone.")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """At the coordinator: the run is opened, and where this save will be is known to all."""
        with _opened(self.path, self._digest) as run:
            chain = run.lineage()
            run.begin(chain[0].id if chain else None)
            wanted = _step(self.checkpoint_id)
            at = run.admit(wanted if wanted is not None else chain[0].step + 1 if chain else 0)
            run.record_incarnation()  # the opening that commits finds it there
        told = msgspec.to_builtins(at)
        return [replace(plan, storage_data=(told, rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        told, rank, ranks = plan.storage_data
        at = msgspec.convert(told, GenerationId)
        items: dict[str, tuple[WriteItem, Tensor, torch.Tensor]] = {}
        stored: dict[str, Any] = {}
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                stored[item.index.fqn] = typed_value(item.index.fqn, planner.resolve_data(item))
                continue
            live = planner.resolve_data(item)
            assert isinstance(live, torch.Tensor)
            tensor = _tensor(item, live, ranks)
            items[tensor.key] = item, tensor, live.detach()
        images = layout.images((tensor for _, tensor, _ in items.values()), rank)
        content = {key: live for key, (_, _, live) in items.items()}
        arena = Arena(2 * WORKERS * layout.CHUNK_BYTES, layout.CHUNK_BYTES)
        with (
            ThreadPoolExecutor(WORKERS, "lastgood-write") as writers,
            places.for_sharing(self.path, "atomic_dirsync") as tier,
        ):
            snapshot = staging.Snapshot(
                staging.in_chunks(images, arena.chunk_bytes), content, staging.devices(content), arena
            )
            share = sharing.share(
                tier,
                at,
                rank,
                images,
                snapshot.fill(),
                chunk_bytes=arena.chunk_bytes,
                algorithm=self._digest,
                aliases={},
                values={VALUES: stored, PATHS: encoded_paths(plan.planner_data)},
                writers=writers,
            )
        results = [WriteResult(item.index, tensor.length, None) for item, tensor, _ in items.values()]
        results += [WriteResult(dcp.MetadataIndex(name), 0, None) for name in stored]
        results.append(WriteResult(dcp.MetadataIndex(_SEAL), share.bytes, (told, msgspec.to_builtins(share))))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        """At the coordinator: every rank has sealed. Raises what keeps the generation from being committed."""
        sealed = [of_rank[-1].storage_data for of_rank in results]
        at = msgspec.convert(sealed[0][0], GenerationId)
        shares = [msgspec.convert(share, Share) for _, share in sealed]
        with _opened(self.path, self._digest, under_way=at) as run:
            _require_whole(run.tier, at, [share.seal for share in shares])
            run.publish(at, shares, True, False, None)

    def storage_meta(self) -> dcp.StorageMeta | None:
        return dcp.StorageMeta(self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return _DIGITS.search(os.fspath(checkpoint_id)) is not None


class Reader(StorageReader):
    """Loads of torch.distributed.checkpoint from the run at `path`, whoever wrote it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = places.directory(path)
        self.checkpoint_id: str | os.PathLike[str] | None = None
        self._content: _Content | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        _step(checkpoint_id)
        self.checkpoint_id, self._content = checkpoint_id, None

    def read_metadata(self, *args: Any, **options: Any) -> dcp.Metadata:
        self._content = _Content(places.for_reading(self.path), _step(self.checkpoint_id))
        return self._content.metadata()

    def set_up_storage_reader(self, metadata: dcp.Metadata, is_coordinator: bool, *args: Any, **options: Any) -> None:
        """Everything is known from `read_metadata`."""

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
                "a newer generation was committed while the ranks looked for the newest",
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
    """A generation, in torch's words."""

    def __init__(self, tier: Tier, step: int | None) -> None:
        self.content = RunReader(tier).content(step)
        self._tensors = self.content.names()
        self._values, self._paths = kept_values(self.content)

    def metadata(self) -> dcp.Metadata:
        told: dict[str, Any] = {}
        for name, tensor in self._tensors.items():
            chunks = [
                dcp.ChunkStorageMetadata(torch.Size(one.box.offsets), torch.Size(one.box.shape))
                for one in tensor.stored
            ]
            properties = dcp.TensorProperties(dtype=tensors.dtype_of(tensor.dtype))
            told[name] = dcp.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        told |= {name: dcp.BytesStorageMetadata() for name in self._values}
        return dcp.Metadata(told, planner_data=self._paths or {name: (name,) for name in told})

    def read(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        wanted: dict[tuple[int, str], tuple[Stored, list[ReadItem]]] = {}
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

    def _stored(self, index: dcp.MetadataIndex) -> Stored:
        stored = self._tensors[index.fqn].stored
        offset = tuple(index.offset) if index.offset is not None else stored[0].box.offsets
        return next(one for one in stored if one.box.offsets == offset)

    def _bytes(self, name: str) -> io.BytesIO:
        file = io.BytesIO()
        torch.save(self._values[name], file)
        file.seek(0)
        return file


def kept_values(content: Content) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """By name what torch would have pickled, and by name its place in nested dicts, of all ranks."""
    kept: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for rank in range(content.generation.commit.world.ranks):
        kept |= {name: values.decode(tree) for name, tree in content.values(rank).get(VALUES, {}).items()}
        paths |= {name: values.decode(tree) for name, tree in content.values(rank).get(PATHS, {}).items()}
    return kept, paths


def _fill(planner: LoadPlanner, item: ReadItem, one: Stored, data: bytearray) -> None:
    source = tensors.from_buffer(data, one.piece.dtype, one.piece.shape)
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
        source = source.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    tensors.write(target, source.to(target.dtype))
    planner.commit_tensor(item, target)


_DIGITS = re.compile(r"(\d+)\D*$")


def _step(checkpoint_id: str | os.PathLike[str] | None) -> int | None:
    """The step that an id means. Raises Refused."""
    if checkpoint_id is None:
        return None
    found = _DIGITS.search(str(checkpoint_id))
    if found is None:
        raise Refused(
            f"checkpoint_id={checkpoint_id!r} names no step",
            safe="Nothing was touched.",
            todo="Give a number, or text that ends in one: 'step-100'. The run's directory goes to Writer and Reader.",
        )
    return int(found[1])


@contextmanager
def _opened(path: str, digest: str, under_way: GenerationId | None = None) -> Iterator[RunWriter]:
    """The run, open for writing; what is `under_way` is not taken for what a crash left."""
    with (
        places.for_writing(path, "atomic_dirsync") as tier,
        ThreadPoolExecutor(WORKERS, "lastgood-write") as workers,
    ):
        yield RunWriter(tier, workers, algorithm=digest, resumes=under_way)


def _require_whole(tier: Tier, at: GenerationId, seals: list[Seal]) -> None:
    """What is to be committed must be there, and make whole tensors. Raises MissingBlob, ManifestInvalid."""
    there = tier.list(layout.folder(at))
    gone = [seal.manifest for seal in seals if there.get(seal.manifest) != seal.length]
    if gone:
        raise MissingBlob(
            f"{layout.folder(at)} lacks {', '.join(gone[:3])}, which a rank had sealed",
            safe="Nothing was committed; every committed generation is untouched.",
            todo="All ranks must see the same directory, and nobody else may write this run meanwhile.",
        )
    reshard.tensors([commit.sealed_manifest(tier, at, seal, len(seals), there) for seal in seals])


def _tensor(item: WriteItem, live: torch.Tensor, ranks: int) -> Tensor:
    data = item.tensor_data
    assert data is not None
    tensors.require_storable(live, item.index.fqn)
    whole, box = tuple(data.size), Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if tuple(live.shape) != box.shape:
        raise ManifestInvalid(f"{item.index.fqn}: the planner speaks of {box.shape} and gave {tuple(live.shape)}")
    some = box.shape != whole
    if some and ranks == 1:
        raise Refused(
            f"{item.index.fqn} is a part of a tensor, and nobody else saves the rest",
            safe="Nothing was committed.",
            todo="Save in the process group, not with no_dist.",
        )
    place = (box.offsets, whole) if some else ((), ())
    return Tensor(item.index.fqn, tensors.dtype_name(live.dtype), box.shape, False, *place)


def typed_value(name: str, raw: Any) -> Any:
    """What torch has pickled, as typed values. Raises Unstorable, by name."""
    try:
        raw.seek(0)
        loaded = torch.load(raw, weights_only=True)
    except Exception as error:
        raise values.refusal(name, "is no plain value: torch's restricted unpickler refuses it") from error
    return values.encode(loaded, name)


def encoded_paths(mappings: Any) -> dict[str, Any]:
    """By name its place in nested dicts, as typed values."""
    return {name: values.encode(tuple(path), name) for name, path in (mappings or {}).items()}

"""`lastgood lab scale`: the cost of the records with up to 16,384 ranks and a million pieces. No tensor is written.

The records are real, and so is the key-value store through which the ranks agree: a TCPStore on loopback, into which
this process posts the messages of all ranks. The tier is a table in memory that counts its calls. The time that these
calls would wait for a disk is reported beside the processor time, and computed from latencies of a real directory.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch.distributed as dist

from lastgood.coordination.rendezvous import join
from lastgood.coordination.rounds import MessageStore, RankGroup
from lastgood.errors import MissingBlob, NameTaken
from lastgood.format import commit, layout
from lastgood.format.boxes import Box
from lastgood.format.layout import Tensor
from lastgood.io.checksum import digest
from lastgood.io.files import PosixFiles
from lastgood.limits import CHUNK_BYTES
from lastgood.policy import reshard
from lastgood.ports import Tier, Upload
from lastgood.ranks.replica_check import compare
from lastgood.ranks.torch_store import Clients, GroupStore
from lastgood.records import Blob, Commit, Extent, Generation, GenerationId, Manifest, Piece, World
from lastgood.run.save import RankPart
from lastgood.storage.directory import Disk
from lastgood.units import size as size_text

from .journal import Journal
from .report import Progress, Report, Table
from .trials import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RANKS = (16, 128, 1024, 4096, 16_384)
PIECES = (1_000, 10_000, 100_000, 1_000_000)
COLUMNS = 1024
"""Elements of one rank's piece of a tensor, which is one row."""
AT = GenerationId(step=100, incarnation="5ca1ab1e")
ALGORITHM = "xxh3_128"
PROBES = 30
ROUNDS = 4
"""Saves through which the ranks agree; only the last one is timed."""
STEPS = ("seal", "commit", "list", "read", "plan", "delete")


@dataclass(frozen=True)
class Options:
    out: Path
    ranks: tuple[int, ...] = RANKS
    pieces: tuple[int, ...] = PIECES
    place: Path | None = None
    """folder on the disk whose latencies are measured (default: `out`)"""


def run(options: Options, progress: Progress) -> list[Row]:
    journal = Journal(options.out / "trials.jsonl")
    place = options.place or options.out
    if journal.get(ranks=0, pieces=0) is None:
        journal.put(latencies(place), ranks=0, pieces=0)
    keys = [{"ranks": ranks, "pieces": count} for ranks in options.ranks for count in options.pieces if count >= ranks]
    for key in keys:
        if journal.get(**key) is None:
            journal.put(measured(**key), **key)
            progress(f"{key['ranks']:,} ranks, {key['pieces']:,} pieces")
    return [{**key, **(journal.get(**key) or {})} for key in [{"ranks": 0, "pieces": 0}, *keys]]


# ---- one size ------------------------------------------------------------------------------------------------


def measured(ranks: int, pieces: int) -> Row:
    """Processor seconds, calls and bytes of every step from the seals of one generation to its deletion."""
    tier = _Table()
    manifests = [manifest_of(rank, ranks, pieces // ranks) for rank in range(ranks)]
    for one in manifests:
        tier.folder(one)
    seals, seal_seconds = [], []
    for one in manifests:
        begun = time.perf_counter()
        seals.append(commit.seal(tier, one))
        seal_seconds.append(time.perf_counter() - begun)
    parts_of_ranks = [RankPart(seal=seal, bytes=seal.length) for seal in seals]
    row: Row = {"seal": statistics.median(seal_seconds), "manifest_bytes": statistics.median(s.length for s in seals)}
    row["met"] = rendezvous_seconds(ranks)
    row["commit"], generation = committed(tier, parts_of_ranks)
    row["commit_bytes"] = tier.list(layout.folder(AT))[layout.COMMIT]
    row["list"], _ = timed(lambda: commit.survey(tier))
    tier.calls.clear()
    row["read"], read = timed(lambda: commit.read_manifests(tier, generation))
    row["read_bytes"], row["read_calls"] = sum(seal.length for seal in seals), tier.calls["read"]
    assert read == manifests
    row["plan"], parts = timed(lambda: planned(read, ranks))
    row["parts"] = parts
    tier.calls.clear()
    row["delete"], _ = timed(lambda: commit.retire(tier, AT))
    row["delete_calls"] = tier.calls["delete"]
    return row


def manifest_of(rank: int, ranks: int, tensors: int) -> Manifest:
    """The manifest of a rank that holds one row of each of `tensors` tensors."""
    mine = (
        Tensor(f"model.layers.{n}.weight", "float32", (1, COLUMNS), True, (rank, 0), (ranks, COLUMNS))
        for n in range(tensors)
    )
    blobs, pieces = [], []
    for image in layout.images(mine, rank):
        chunks = [digest(ALGORITHM, b"%d" % at) for at in range(0, image.length, CHUNK_BYTES)]
        blobs.append(Blob(name=image.blob, length=image.length, chunk_bytes=CHUNK_BYTES, chunks=chunks))
        for tensor, offset in image.tensors:
            pieces.append(
                Piece(
                    name=tensor.name,
                    dtype=tensor.dtype,
                    shape=list(tensor.shape),
                    extent=Extent(blob=image.blob, offset=offset, length=tensor.length),
                    digest=digest(ALGORITHM, tensor.key.encode()),
                    finite=True,
                    offsets=list(tensor.offsets),
                    whole=list(tensor.whole),
                )
            )
    return Manifest(
        format=layout.FORMAT,
        step=AT.step,
        incarnation=AT.incarnation,
        rank=rank,
        digest=ALGORITHM,
        blobs=blobs,
        pieces=pieces,
        aliases={},
        values={},
    )


def rendezvous_seconds(ranks: int) -> float:
    """Seconds of the coordinator's rendezvous when a run is opened and all other ranks have posted their nonces."""
    master: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store, others = MessageStore(GroupStore(Clients(master.clone), 60.0)), range(1, ranks)
    store.post_all({f"run/joining/{rank}": f"nonce{rank}" for rank in others})

    def acknowledge() -> None:
        name = store.receive([f"run/named/nonce{rank}" for rank in others], 60.0)[0]
        store.post_all({f"run/received/{name}/{rank}": "node" for rank in others})

    with ThreadPoolExecutor(1) as pool:
        acknowledging = pool.submit(acknowledge)
        seconds, _ = timed(lambda: join(store, "run", 0, ranks, 60.0))
        acknowledging.result()
    return seconds


def committed(tier: Tier, parts: Sequence[RankPart]) -> tuple[float, Generation]:
    """Seconds of the coordinator's work for one save after all other ranks have posted; and the generation.

    The coordinator receives every answer of the replica check and publishes its verdict, receives every seal, commits
    and publishes that, and deletes the older keys, which the earlier rounds have left in the store.
    """
    master: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    coordinator = RankGroup(0, len(parts), GroupStore(Clients(master.clone), 60.0), "run")
    mine, *others = (msgspec.to_builtins(part) for part in parts)
    alike = {
        "structure": "0" * 64,
        "holders": "",
        "sums": {f"{'0' * 32} {len(parts)}": ["0" * 64, "0" * 64]},
    }  # the same answer from every rank, as under DDP
    found: list[Generation] = []

    def decide(answers: list[Any]) -> None:
        seals = [msgspec.convert(one, RankPart).seal for one in answers]
        record = Commit(
            format=layout.FORMAT,
            run="0" * 32,
            step=AT.step,
            incarnation=AT.incarnation,
            order=1,
            world=World(ranks=len(seals)),
            continues=None,
            parent=None,
            seals=seals,
            created=time.time(),
            milestone=False,
            metrics={},
        )
        found.append(commit.publish(tier, record, ALGORITHM))

    seconds = 0.0
    for number in range(1, ROUNDS + 1):
        topic, at = coordinator.step_topic("save", number), f"run/0/save/{number}/1"
        _post(coordinator, f"{at}/0", [alike] * len(others))
        seconds, verdict = timed(lambda: topic.agree(alike, partial(compare, ())))  # noqa: B023 - called at once
        assert verdict == "same", verdict
        if number == ROUNDS:
            _post(coordinator, f"{at}/1", others)
            seconds += timed(lambda: topic.agree(mine, decide))[0]  # noqa: B023
    return seconds, found[0]


def _post(store: MessageStore, at: str, answers: Sequence[Any]) -> None:
    store.post_all({f"{at}/{rank}": {"answer": one} for rank, one in enumerate(answers, 1)})


def planned(manifests: Sequence[Manifest], ranks: int) -> int:
    """Plan the reads of one rank when half as many ranks restore; returns the number of parts."""
    target = Box((0, 0), (2, COLUMNS))
    tensors = reshard.tensors(manifests)
    return sum(len(reshard.parts(one, target, 0)) for one in tensors.values())


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    begun = time.perf_counter()
    found = act()
    return time.perf_counter() - begun, found


class _Table(Tier):
    """A tier in memory that holds only records, and counts reads and deletions."""

    place, newest_only, reads_at_once = "memory", False, 1

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._folders: dict[str, dict[str, bytes | int]] = {"gen": {}}

    def folder(self, manifest: Manifest) -> None:
        """List the tensor files of this manifest as if they existed."""
        folder = layout.folder(GenerationId(step=manifest.step, incarnation=manifest.incarnation))
        self._folders["gen"].setdefault(folder.partition("/")[2], -1)
        self._folders.setdefault(folder, {}).update({blob.name: blob.length for blob in manifest.blobs})

    def list(self, folder: str) -> Mapping[str, int | None]:
        found = self._folders.get(folder, {})
        return {name: len(one) if isinstance(one, bytes) else one if one >= 0 else None for name, one in found.items()}

    def put_new(self, name: str, data: bytes) -> None:
        folder, _, last = name.rpartition("/")
        if self._folders.setdefault(folder, {}).setdefault(last, bytes(data)) != data:
            raise NameTaken(name)

    def read_into(self, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        self.calls["read"] += 1
        folder, _, last = extent.blob.rpartition("/")
        data = self._folders.get(folder, {}).get(last)
        if not isinstance(data, bytes):
            raise MissingBlob(extent.blob)
        mv[: extent.length] = data[extent.offset : extent.offset + extent.length]

    def create(self, name: str, length: int) -> Upload:
        raise AssertionError("no tensor is written")

    def point(self, name: str, data: bytes, to: str) -> None:
        raise AssertionError("no pointer is written")

    def delete(self, name: str) -> None:
        self.calls["delete"] += 1
        folder, _, last = name.rpartition("/")
        self._folders.get(folder, {}).pop(last, None)


# ---- latencies -----------------------------------------------------------------------------------------------


def latencies(place: Path) -> Row:
    """Median seconds to create, read and delete a record in a real directory, and seconds to list one name."""
    place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lastgood-scale-", dir=place) as folder:
        tier = Disk(PosixFiles(), folder)
        data, names = os.urandom(4096), [f"gen/{AT.step:012d}-{AT.incarnation}/{n:05d}.json" for n in range(PROBES)]

        def read(name: str) -> None:
            tier.read_into(Extent(blob=name, offset=0, length=len(data)), memoryview(bytearray(len(data))), fresh=True)

        def each(act: Callable[[str], object]) -> float:
            return statistics.median(timed(lambda: act(name))[0] for name in names)  # noqa: B023 - called at once

        put, got = each(lambda name: tier.put_new(name, data)), each(read)
        listed, _ = timed(lambda: tier.list(layout.folder(AT)))
        return {"put": put, "get": got, "name": listed / PROBES, "removed": each(tier.delete)}


# ---- the report ----------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    probe, sizes = rows[0], rows[1:]
    lines = [
        [
            f"{row['ranks']:,}",
            f"{row['pieces']:,}",
            size_text(int(row["manifest_bytes"])),
            f"{1000 * row['seal']:.1f}",
            f"{row['commit']:.3f}",
            size_text(row["commit_bytes"]),
            f"{1000 * row['list']:.1f}",
            size_text(row["read_bytes"]),
            f"{row['read']:.2f} + {_waits(row, probe)['read']:.2f}",
            f"{row['plan']:.2f}",
            f"{row['delete']:.2f} + {_waits(row, probe)['delete']:.1f}",
        ]
        for row in sizes
    ]
    head = ["ranks", "pieces", "manifest of a rank", "its seal, ms", "coordinator, s", "COMMIT", "list, ms"]
    head += ["records read by a rank", "reading them, s", "plan of a rank, s", "deletion, s"]
    most = max(row["commit"] for row in sizes)
    return Report(
        name="scale",
        title="Cost of the records with many ranks and many pieces",
        about="One generation: each rank seals; the coordinator receives every seal through a TCPStore on loopback, "
        "commits, publishes the verdict and deletes older keys; a restore on half as many ranks reads every record; "
        "the generation is deleted. Seconds are those of one processor; the number after a plus is the time that the "
        "calls would wait for this directory, one after the other.",
        tables=[Table("", head, lines)],
        rows=rows,
        notes=[
            f"The coordinator needs at most {most:.2f} s for one save, and {max(row['met'] for row in sizes):.2f} s "
            "once for the rendezvous, when the run is opened.",
            f"Medians of one call here: creating a record {1000 * probe['put']:.2f} ms, reading it "
            f"{1000 * probe['get']:.3f} ms, deleting it {1000 * probe['removed']:.2f} ms, listing one name "
            f"{1e6 * probe['name']:.1f} us.",
            "Every rank that restores reads the records of all ranks: in total that grows with pieces times ranks.",
        ],
        figures={"growth": lambda: _figure(sizes)},
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json."""
    sizes = rows[1:]
    return {
        "sizes": len(sizes),
        "coordinator_seconds": {f"{row['ranks']} ranks, {row['pieces']} pieces": row["commit"] for row in sizes},
    }


def _waits(row: Row, probe: Row) -> dict[str, float]:
    """The seconds that the calls of a step would wait for the directory."""
    return {"read": row["read_calls"] * probe["get"], "delete": row["delete_calls"] * probe["removed"]}


def _figure(sizes: Sequence[Row]) -> Figure:
    from .figures import panels

    figure, (by_ranks, by_pieces) = panels(2, columns=2, wide=4.2, high=3.6)
    many_pieces, many_ranks = _most_measured(sizes, "pieces"), _most_measured(sizes, "ranks")
    for axes, what, other, fixed in (
        (by_ranks, "ranks", "pieces", many_pieces),
        (by_pieces, "pieces", "ranks", many_ranks),
    ):
        mine = [row for row in sizes if row[other] == fixed]
        for step in STEPS:
            axes.plot([row[what] for row in mine], [row[step] for row in mine], marker="o", label=step)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(f"{what} ({other}: {fixed:,})")
        axes.set_ylabel("s of one processor")
    figure.legend(*by_ranks.get_legend_handles_labels(), loc="outside lower center", ncols=len(STEPS), frameon=False)
    return figure


def _most_measured(sizes: Sequence[Row], what: str) -> int:
    """The value of `what` with which the most sizes were measured; of several such values, the largest."""
    count = Counter(row[what] for row in sizes)
    return max(value for value, times in count.items() if times == max(count.values()))

"""`lastgood bench guard`: the cost of verification and of parity, in warm memory, so that no disk is measured.

Verification is compared with one core that reads memory, which limits the speed of any check that reads every byte.
Parity is measured for rows of cells with the library alone on one core, and then for a whole generation, whose parity
is made and used for a repair.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lastgood.engine import parity
from lastgood.engine.arena import Arena
from lastgood.errors import Refused
from lastgood.format import commit, layout, parity_layout
from lastgood.io.files import PosixFiles
from lastgood.io.reed_solomon import Code
from lastgood.limits import CHUNK_BYTES, WORKERS
from lastgood.policy.retention import Keep
from lastgood.records import LAYERS, Extent, Generation
from lastgood.run.reader import read_all
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk

from . import trials
from .journal import Journal
from .plain import save
from .report import Progress, Report, Table, hardware, spread

Row = Mapping[str, Any]
CODE = "10+2"
MEMORY, FILE, VERIFY = "memory, read by one core", "the same file, read by one core", "verify, all layers"
ENCODE, DECODE = f"encode {CODE}, one core", f"decode {CODE}, two lost, one core"
PROTECT, REPAIR = f"make parity {CODE}", f"repair, a tenth lost ({CODE})"
TENSOR_BYTES = 16 << 20


@dataclass(frozen=True)
class Options:
    """`mib` is the size of the state in MiB."""

    out: Path
    mib: int = 1024
    rounds: int = 5


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "guard.journal.jsonl", {"hardware": hardware(), "mib": options.mib})
    rows: list[Row] = []
    if (memory := trials.memory()) is None:
        raise Refused("there is no writable /dev/shm", safe="Nothing was measured.")
    with tempfile.TemporaryDirectory(prefix="lastgood-guard-", dir=memory) as folder:
        contenders: dict[str, Callable[[], dict[str, Any]]] | None = None
        for number in range(options.rounds):
            for name in NAMES:
                found = journal.get(contender=name, round=number)
                if found is None:
                    contenders = contenders or _Bench(Path(folder), options.mib << 20).contenders()
                    found = journal.put(contenders[name](), contender=name, round=number)
                    speed = f"{found['bytes'] / found['seconds'] / 1e9:.2f} GB/s"
                    progress(f"round {number + 1}/{options.rounds}  {name:34} {found['seconds']:.3f} s, {speed}")
                rows.append({"contender": name, "round": number, **found})
    return rows


WITHOUT = {layer: f"verify, without {layer}" for layer in ("contents", "finite")}
NAMES = (MEMORY, FILE, VERIFY, *WITHOUT.values(), ENCODE, DECODE, PROTECT, REPAIR)


class _Bench:
    """One verified generation in memory, and one row of cells of its bytes, on which each method measures once."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._values = np.random.default_rng(0).standard_normal(size // 4, dtype=np.float32)
        self._tier = Disk(PosixFiles(), str(folder / "run"))
        (folder / "run").mkdir()
        self._workers = ThreadPoolExecutor(WORKERS)
        self._arena = Arena(3 * CHUNK_BYTES, CHUNK_BYTES)
        self._generation = _saved(RunWriter(self._tier, self._workers, keep=Keep(last=1)), self._values)
        self._manifest = commit.read_manifest(self._tier, self._generation)
        self._code = Code(*parity_layout.parsed(CODE))
        data = memoryview(self._values.view(np.uint8).data)
        self._cells = [data[at << 18 : at + 1 << 18] for at in range(self._code.data)]
        self._survivors = dict(
            enumerate([*self._cells, *(memoryview(cell) for cell in self._code.encode(self._cells))])
        )
        del self._survivors[0], self._survivors[1]
        self._rounds = max(1, size // (self._code.data * len(self._cells[0])) // 4)
        self._bytes_in_cells = self._rounds * self._code.data * len(self._cells[0])
        digests = parity.CellDigests(
            parity_layout.grid(self._manifest.blobs, self._code.data, self._code.parity), self._manifest.digest
        )
        read_all(self._tier, self._generation, self._arena, self._workers, also=digests.see)
        self._digests = digests.digests

    def contenders(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """Contender -> the function that measures it once."""
        size, cells = self._size, self._bytes_in_cells
        without = {name: [one for one in LAYERS if one != layer] for layer, name in WITHOUT.items()}
        return {
            MEMORY: lambda: _timed(lambda: np.bitwise_or.reduce(self._values.view(np.uint64)), size),
            FILE: lambda: _timed(self._read, size),
            VERIFY: self._verifying(LAYERS),
            **{name: self._verifying(layers) for name, layers in without.items()},
            ENCODE: lambda: _timed(lambda: [self._code.encode(self._cells) for _ in range(self._rounds)], cells),
            DECODE: lambda: _timed(lambda: [self._code.decode(self._survivors) for _ in range(self._rounds)], cells),
            PROTECT: self._make_parity,
            REPAIR: self._repair,
        }

    def _verifying(self, layers: Sequence[str]) -> Callable[[], dict[str, Any]]:
        def verify() -> None:
            if read_all(self._tier, self._generation, self._arena, self._workers, layers=tuple(layers)):
                raise AssertionError("findings in a generation that was just written")

        return lambda: _timed(verify, self._size)

    def _read(self) -> None:
        folder, page = layout.folder(self._generation.id), self._arena.memory()
        for blob in self._manifest.blobs:
            for one in (layout.extent_of(blob, index) for index in range(len(blob.chunks))):
                where = Extent(blob=f"{folder}/{one.blob}", offset=one.offset, length=one.length)
                self._tier.read_into(where, page, fresh=True)

    def _protect(self) -> int:
        """Write the parity of the generation; returns its bytes."""
        return parity.protect(self._tier, self._generation, self._manifest, self._code, self._digests, self._workers)

    def _make_parity(self) -> dict[str, Any]:
        written: list[int] = []
        timing = _timed(lambda: written.append(self._protect()), self._size)
        return {**timing, "parity_bytes": written[0]}

    def _repair(self) -> dict[str, Any]:
        usable = parity.find(self._tier, self._generation.id)
        if usable is None:
            self._protect()
            usable = parity.find(self._tier, self._generation.id)
        assert usable is not None
        path = self._folder / "run" / layout.folder(self._generation.id) / layout.blob_name(0)
        with path.open("r+b") as file:
            file.seek(self._size // 2)
            file.write(bytes(self._size // 10))
        return _timed(lambda: parity.rebuild(self._tier, [usable], self._workers), self._size)


def _timed(work: Callable[[], object], count: int) -> dict[str, Any]:
    begun = time.perf_counter()
    work()
    return {"seconds": time.perf_counter() - begun, "bytes": count}


def _saved(writer: RunWriter, values: np.ndarray) -> Generation:
    """Save a generation of float32 tensors that must be finite."""
    data = memoryview(values.view(np.uint8).data)
    count = -(-len(data) // TENSOR_BYTES)
    lengths = [min(TENSOR_BYTES, len(data) - at * TENSOR_BYTES) for at in range(count)]
    state = {f"w{at:05d}": data[at * TENSOR_BYTES :][:length] for at, length in enumerate(lengths)}
    tensors = [layout.Tensor(name, "float32", (len(part) // 4,), finite=True) for name, part in state.items()]
    return save(writer, 1, state, tensors=tensors, chunk_bytes=CHUNK_BYTES)


# ---- the report ----------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    lines = []
    for name in NAMES:
        mine = [row for row in rows if row["contender"] == name]
        rates = [row["bytes"] / row["seconds"] / 1e9 for row in mine]
        lines.append([name, spread([row["seconds"] for row in mine]), spread(rates, ".2f")])

    def against(other: str) -> str:
        pairs = zip(_of(rows, other), _of(rows, VERIFY), strict=True)
        return f"{VERIFY} / {other}, round by round: {spread([a['seconds'] / b['seconds'] for a, b in pairs], '.2f')}"

    made = _of(rows, PROTECT)[0]
    return Report(
        name="guard",
        title="Cost of verification and of parity",
        about=f"A state of {options.mib:,} MiB in /dev/shm, warm; medians of {options.rounds} rounds, (least-most).",
        tables=[Table("", ["what", "seconds", "GB/s"], lines)],
        rows=rows,
        notes=[
            against(MEMORY),
            against(FILE),
            f"Parity takes {made['parity_bytes'] / made['bytes']:.4f} of the state, copies of the manifest included.",
        ],
    )


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["contender"] == name]

"""`lastgood bench guard`: what looking costs, and what parity costs. Warm, in memory, so that no disk is measured.

Verification against the reading of memory by one core: the ceiling of whatever looks at every byte. Parity: rows of
cells through the library alone, on one core; then making and using that of a whole generation, in bytes and seconds.
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
from .report import Report, Say, Table, hardware, spread

Row = Mapping[str, Any]
CODE = "10+2"
MEMORY, FILE, VERIFY = "memory, read by one core", "the same file, read by one core", "verify, all layers"
ENCODE, DECODE = f"encode {CODE}, one core", f"decode {CODE}, two lost, one core"
PROTECT, REPAIR = f"make parity {CODE}", f"repair, a tenth lost ({CODE})"
TENSOR_BYTES = 16 << 20


@dataclass(frozen=True)
class Options:
    """What to measure. `mib`: of the state."""

    out: Path
    mib: int = 1024
    rounds: int = 5


def run(options: Options, say: Say) -> list[Row]:
    """Every measurement, those of an earlier run included; the journal in `out` keeps them."""
    journal = Journal(options.out / "guard.journal.jsonl", {"hardware": hardware(), "mib": options.mib})
    rows: list[Row] = []
    if (memory := trials.memory()) is None:
        raise Refused("there is no /dev/shm to work in", safe="Nothing was measured.")
    with tempfile.TemporaryDirectory(prefix="lastgood-guard-", dir=memory) as folder:
        contenders: dict[str, Callable[[], dict[str, Any]]] | None = None
        for number in range(options.rounds):
            for name in NAMES:
                found = journal.get(contender=name, round=number)
                if found is None:
                    contenders = contenders or _contenders(Path(folder), options.mib << 20)
                    found = journal.put(contenders[name](), contender=name, round=number)
                    told = f"{found['bytes'] / found['seconds'] / 1e9:.2f} GB/s"
                    say(f"round {number + 1}/{options.rounds}  {name:34} {found['seconds']:.3f} s, {told}")
                rows.append({"contender": name, "round": number, **found})
    return rows


WITHOUT = {layer: f"verify, without {layer}" for layer in ("contents", "finite")}
NAMES = (MEMORY, FILE, VERIFY, *WITHOUT.values(), ENCODE, DECODE, PROTECT, REPAIR)


def _contenders(folder: Path, size: int) -> dict[str, Callable[[], dict[str, Any]]]:
    words = np.random.default_rng(0).standard_normal(size // 4, dtype=np.float32)
    tier = Disk(PosixFiles(), str(folder / "run"))
    (folder / "run").mkdir()
    workers = ThreadPoolExecutor(WORKERS)
    arena = Arena(3 * CHUNK_BYTES, CHUNK_BYTES)
    writer = RunWriter(tier, workers, keep=Keep(last=1))
    generation = _saved(writer, words)
    manifest = commit.read_manifest(tier, generation)
    code = Code(*parity_layout.parsed(CODE))
    data = memoryview(words.view(np.uint8).data)
    cells = [data[at << 18 : at + 1 << 18] for at in range(code.data)]
    lost = dict(enumerate([*cells, *(memoryview(cell) for cell in code.encode(cells))]))
    del lost[0], lost[1]
    rounds = max(1, size // (code.data * len(cells[0])) // 4)

    def timed(work: Callable[[], object], count: int, **more: Any) -> dict[str, Any]:
        begun = time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - begun, "bytes": count, **more}

    def verify(*layers: str) -> Callable[[], dict[str, Any]]:
        def look() -> None:
            if read_all(tier, generation, arena, workers, layers=layers):
                raise AssertionError("what was just written is not good")

        return lambda: timed(look, size)

    def digests() -> list[str]:
        found = parity.CellDigests(parity_layout.grid(manifest.blobs, code.data, code.parity), manifest.digest)
        read_all(tier, generation, arena, workers, also=found.see)
        return found.digests

    known = digests()

    def read() -> None:
        home, page = layout.folder(generation.id), arena.whole()
        for blob in manifest.blobs:
            for one in (layout.extent_of(blob, index) for index in range(len(blob.chunks))):
                where = Extent(blob=f"{home}/{one.blob}", offset=one.offset, length=one.length)
                tier.read_into(where, page, fresh=True)

    def protect() -> dict[str, Any]:
        made: list[int] = []
        told = timed(lambda: made.append(parity.protect(tier, generation, manifest, code, known, workers)), size)
        return {**told, "parity_bytes": made[0]}

    def repair() -> dict[str, Any]:
        spare = parity.find(tier, generation.id)
        if spare is None:
            parity.protect(tier, generation, manifest, code, known, workers)
            spare = parity.find(tier, generation.id)
        assert spare is not None
        path = folder / "run" / layout.folder(generation.id) / layout.blob_name(0)
        with path.open("r+b") as file:
            file.seek(size // 2)
            file.write(bytes(size // 10))
        return timed(lambda: parity.rebuild(tier, spare, workers), size)

    in_cells = rounds * code.data * len(cells[0])
    return {
        MEMORY: lambda: timed(lambda: np.bitwise_or.reduce(words.view(np.uint64)), size),
        FILE: lambda: timed(read, size),
        VERIFY: verify(*LAYERS),
        **{name: verify(*(one for one in LAYERS if one != layer)) for layer, name in WITHOUT.items()},
        ENCODE: lambda: timed(lambda: [code.encode(cells) for _ in range(rounds)], in_cells),
        DECODE: lambda: timed(lambda: [code.decode(lost) for _ in range(rounds)], in_cells),
        PROTECT: protect,
        REPAIR: repair,
    }


def _saved(writer: RunWriter, words: np.ndarray) -> Generation:
    """A generation of float32 tensors that must be finite."""
    data = memoryview(words.view(np.uint8).data)
    count = -(-len(data) // TENSOR_BYTES)
    lengths = [min(TENSOR_BYTES, len(data) - at * TENSOR_BYTES) for at in range(count)]
    state = {f"w{at:05d}": data[at * TENSOR_BYTES :][:length] for at, length in enumerate(lengths)}
    tensors = [layout.Tensor(name, "float32", (len(part) // 4,), finite=True) for name, part in state.items()]
    return save(writer, 1, state, tensors=tensors, chunk_bytes=CHUNK_BYTES)


# ---- the report ------------------------------------------------------------------------------------------------


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
        title="What looking costs, and what parity costs",
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

"""Parity rebuilds damage within its budget exactly; damage beyond the budget is refused, and nothing is changed."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from harness import State, load, save
from lastgood.engine import parity
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import BeyondRepair, Cancelled, LastgoodError, Refused, SumMismatch, TierDown, Unreadable
from lastgood.events import Event
from lastgood.format import layout, parity_layout
from lastgood.format.commit import read_manifest
from lastgood.io import isal
from lastgood.io.checksum import digest
from lastgood.io.files import PosixFiles
from lastgood.io.reed_solomon import Code
from lastgood.records import Blob, Commit, Finding, Generation, GenerationId, Parity
from lastgood.run.candidates import Candidates, ReadOnlyRun
from lastgood.run.known import Environment
from lastgood.run.reader import RunReader, read_all
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk

CHUNK = 8192
UPKEEP = Arena(3 * CHUNK, CHUNK)
CELL = 4096
"""of the run below: 30 cells of its tensor file in 10 columns, 3 rows"""
STATE: State = {"weight": random.Random(1).randbytes(29 * CELL - 4), "bias": b"four"}
DATA, MANIFEST, COMMIT = "r00000.safetensors", "r00000.manifest.json", layout.COMMIT


def opened(root: Path, parity: str | None = "10+2") -> RunWriter:
    return RunWriter(Disk(PosixFiles(), str(root)), Inline(), parity=parity)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    run = opened(root)
    save(run, 10, {"weight": b"older", "bias": b"good"}, chunk_bytes=CHUNK)
    run.verify(UPKEEP)
    save(run, 20, STATE, chunk_bytes=CHUNK)
    run.verify(UPKEEP)
    return root


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "run", symlinks=True))


def generation_folder(root: Path, step: int = 20) -> Path:
    (path,) = root.glob(f"gen/{step:012d}-*")
    return path


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def changed(name: str, how: Callable[[bytearray], object]) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        how(data)
        (folder / name).write_bytes(data)

    return damage


def zeros(start: int, length: int) -> Callable[[bytearray], object]:
    def write(data: bytearray) -> None:
        data[start : start + length] = bytes(len(data[start : start + length]))

    return write


def flip(at: int) -> Callable[[bytearray], object]:
    def write(data: bytearray) -> None:
        data[at] ^= 4

    return write


def swap(data: bytearray) -> None:
    one, two = slice(5000, 6000), slice(9000, 10000)
    data[one], data[two] = data[two], data[one]


def deleting(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


WITHIN: dict[str, Callable[[Path], object]] = {
    "a flipped bit in the header": changed(DATA, flip(20)),
    "a flipped bit in a tensor": changed(DATA, flip(70_000)),
    "a flipped bit in the last byte": changed(DATA, flip(-1)),
    "zeros over two columns": changed(DATA, zeros(3 * CELL, 6 * CELL)),
    "zeros that begin and end within cells": changed(DATA, zeros(4 * CELL + 1, 5 * CELL)),
    "a cut tail": changed(DATA, lambda data: data.__delitem__(slice(25 * CELL, None))),
    "an appended tail": changed(DATA, lambda data: data.extend(b"more")),
    "swapped blocks": changed(DATA, swap),
    "a flipped bit in the manifest": changed(MANIFEST, flip(200)),
    "a lost manifest": deleting(MANIFEST),
    "an empty manifest": changed(MANIFEST, lambda data: data.clear()),
    "a flipped bit in the commit": changed(COMMIT, flip(100)),
    "a lost commit": deleting(COMMIT),
    "everything but the tensor file": deleting(MANIFEST, COMMIT, "r00000.parity-0", "r00000.parity-0.json"),
    "a parity file, and one cell": lambda folder: (
        deleting("r00000.parity-1", "r00000.parity-1.json")(folder),
        changed(DATA, flip(5))(folder),
    ),
    "a parity record, and one cell": lambda folder: (
        changed("r00000.parity-0.json", flip(300))(folder),
        changed(DATA, flip(5))(folder),
    ),
}


@pytest.mark.parametrize("damage", WITHIN.values(), ids=WITHIN.keys())
def test_damage_within_the_budget_is_rebuilt_exactly_and_verified(root, damage):
    before = contents(generation_folder(root))
    damage(generation_folder(root))
    run = opened(root, parity=None)  # the code is read from the run's records
    (at,) = (one for one in (*run.survey.generations, *run.survey.broken, *run.survey.incomplete) if one.step == 20)
    run.mend(at, UPKEEP)
    assert contents(generation_folder(root)) == before
    found, state = load(run.tier)
    assert found.generation is not None and found.generation.step == 20 and state == STATE


BEYOND: dict[str, Callable[[Path], object]] = {
    "three cells of one row": changed(DATA, lambda data: [flip(row * 3 * CELL)(data) for row in (1, 4, 7)]),
    "a lost tensor file": deleting(DATA),
    "two cells, and a cell of parity": lambda folder: (
        changed(DATA, lambda data: [flip(row * 3 * CELL)(data) for row in (1, 4)])(folder),
        changed("r00000.parity-0", flip(0))(folder),
    ),
    "every copy of the manifest": lambda folder: [
        changed(name, flip(-5))(folder) for name in (MANIFEST, "r00000.parity-0", "r00000.parity-1")
    ],
    "all of the parity": lambda folder: (
        changed(DATA, flip(5))(folder),
        deleting("r00000.parity-0.json", "r00000.parity-1.json")(folder),
    ),
}


def failed_mend(root: Path, kind: type[LastgoodError]) -> tuple[RunWriter, dict[str, bytes], dict[str, bytes]]:
    """Mend the newest generation, which must fail with this error; returns the run, and the folder's content before
    and after."""
    run = opened(root, parity=None)
    (at,) = (one for one in run.survey.generations if one.step == 20)
    before = contents(generation_folder(root))
    with pytest.raises(kind):
        run.mend(at, UPKEEP)
    return run, before, contents(generation_folder(root))


@pytest.mark.parametrize("damage", BEYOND.values(), ids=BEYOND.keys())
def test_damage_beyond_the_budget_is_refused_and_nothing_is_changed(root, damage):
    damage(generation_folder(root))
    _, before, after = failed_mend(root, BeyondRepair)
    if any(parity_layout.is_record(name) for name in before):  # otherwise no parity was read
        assert layout.VERIFIED not in after and layout.DAMAGED in after, (
            "the generation is marked as damaged and no longer as verified"
        )
    marks = (layout.VERIFIED, layout.DAMAGED)
    assert all(after.get(name) == data for name, data in before.items() if name not in marks)


def test_the_refusal_states_how_far_the_budget_is_exceeded(root):
    BEYOND["three cells of one row"](generation_folder(root))
    run = opened(root)
    with pytest.raises(BeyondRepair, match=r"1 of 3 rows .* row 0, lost 3 of 10 cells .* 2 of 2 .* left: 1 too many"):
        run.mend(max(run.survey.generations), UPKEEP)


@pytest.mark.parametrize(
    "length", [29 * CELL - 100, 27 * CELL], ids=["its last cell is short", "it has two cells less"]
)
def test_the_rest_of_a_short_row_is_zeros_and_not_stale_memory(tmp_path, length):
    """The memory behind a short row held other bytes when the parity was made than when it was used."""
    run = opened(tmp_path)
    save(run, 20, {"weight": random.Random(1).randbytes(length)}, chunk_bytes=CHUNK)
    run.verify(UPKEEP)
    before = contents(generation_folder(tmp_path))
    # In the first row, at the place where the short cell of the last row is read.
    changed(DATA, flip(28 * CELL - 1))(generation_folder(tmp_path))
    changed(DATA, flip(2 * CELL))(generation_folder(tmp_path))  # in the last row
    run.mend(next(iter(run.survey.generations)), UPKEEP)
    assert contents(generation_folder(tmp_path)) == before


def test_a_lost_tensor_file_is_rebuilt_from_as_much_parity_as_data(tmp_path):
    run = opened(tmp_path, "2+2")
    save(run, 20, STATE, chunk_bytes=CHUNK)
    run.verify(UPKEEP)
    before = contents(generation_folder(tmp_path))
    deleting(DATA)(generation_folder(tmp_path))
    assert run.mend(max(run.survey.generations), UPKEEP) == [DATA] and contents(generation_folder(tmp_path)) == before


def test_an_older_version_of_the_file_is_damage_like_any_other(root):
    shutil.copy(generation_folder(root, 10) / DATA, generation_folder(root) / DATA)
    run = opened(root)
    with pytest.raises(BeyondRepair):
        run.mend(max(run.survey.generations), UPKEEP)
    assert not RunReader(run.tier).verify(20).intact


def test_zeroing_a_range_that_was_zero_is_not_damage(tmp_path):
    """The study counted one zeroed range of 400 as missed, but the bytes there had been zero before, so nothing was
    damaged."""
    run = opened(tmp_path)
    save(run, 20, {"weight": bytes(4 * CELL) + STATE["weight"]}, chunk_bytes=CHUNK)
    run.verify(UPKEEP)
    before = contents(generation_folder(tmp_path))
    changed(DATA, zeros(2 * CELL, CELL))(generation_folder(tmp_path))
    assert contents(generation_folder(tmp_path)) == before and RunReader(run.tier).verify(20).good


def test_parity_without_its_record_is_deleted_and_blocks_nothing(root):
    deleting("r00000.parity-0.json", "r00000.parity-1.json")(generation_folder(root))
    run = opened(root)
    assert not [name for name in contents(generation_folder(root)) if parity_layout.is_parity(name)]
    newest = max(run.survey.generations.values(), key=lambda one: one.step)
    run.mender.read_again(newest, UPKEEP, run.mender.reading(newest, UPKEEP))
    assert len([name for name in contents(generation_folder(root)) if parity_layout.is_parity(name)]) == 4


def the_newest(run: RunWriter) -> GenerationId:
    return next(one for one in (*run.survey.generations, *run.survey.broken, *run.survey.incomplete) if one.step == 20)


def test_a_failed_repair_deletes_what_it_wrote(root, monkeypatch):
    changed(DATA, flip(5))(generation_folder(root))
    before, run = contents(generation_folder(root)), opened(root, parity=None)

    def failing(*_: object) -> None:
        raise SumMismatch("it does not read back")

    monkeypatch.setattr(parity, "_need_good", failing)
    with pytest.raises(SumMismatch):
        run.mend(the_newest(run), UPKEEP)
    assert contents(generation_folder(root)) == before


def test_a_restore_loads_the_generation_it_has_repaired(root):
    changed(COMMIT, flip(100))(generation_folder(root))
    run = opened(root)
    (at,) = run.survey.broken
    run.mend(at, UPKEEP)
    assert next(iter(Candidates(run.survey))).step == 20


def test_an_impossible_repair_is_reported_with_its_reason(root):
    deleting(DATA)(generation_folder(root))
    events: list[Event] = []
    run = RunWriter(Disk(PosixFiles(), str(root)), Inline(), environment=Environment(emit=events.append))
    assert not run.mender.try_to_mend(next(at for at in run.survey.generations if at.step == 20), UPKEEP)
    assert [(one.kind, one.step, one.detail.partition(":")[0]) for one in events] == [
        ("not_repaired", 20, "BeyondRepair")
    ]


def test_a_restore_repairs_nothing_older_than_the_loaded_generation(root):
    run = opened(root)
    older = next(one for one in run.survey.generations.values() if one.step == 10)
    changed(DATA, flip(-1))(generation_folder(root, 10))
    run.conclude(older, read_all(run.tier, older, UPKEEP, Inline()))
    before = contents(generation_folder(root, 10))
    run.mender.mend_known(None, UPKEEP)
    assert contents(generation_folder(root, 10)) == before
    run.mender.mend_known(10, UPKEEP)
    assert contents(generation_folder(root, 10)) != before


def test_a_restore_that_repairs_the_newest_repairs_no_older_one(root):
    """Every damaged generation in memory was rebuilt from other nodes before a restore, which loads one of them."""
    run = opened(root)
    for step in (10, 20):
        one = next(one for one in run.survey.generations.values() if one.step == step)
        changed(DATA, flip(-1))(generation_folder(root, step))
        run.conclude(one, read_all(run.tier, one, UPKEEP, Inline()))
    run.mender.mend_known(None, UPKEEP)
    assert [at.step for at in run.mender.mended] == [20]


def test_a_rebuilt_commit_restores_the_incarnation_that_only_it_records(root):
    run = opened(root)
    run.begin(next(at for at in run.survey.generations if at.step == 20))
    save(run, 30, STATE, chunk_bytes=CHUNK)
    run.verify(UPKEEP)
    (record,) = (root / "incarnations").glob("000002-*")
    record.unlink()
    changed(COMMIT, flip(100))(generation_folder(root, 30))
    run = opened(root)
    run.mender.mend_known(None, UPKEEP)
    assert [one.step for one in run.lineage()] == [30, 20, 10]


def test_an_unreadable_file_is_rebuilt_and_loaded(root):
    class Mending(ReadOnlyRun):
        def examine(self, generation: Generation, topic: object = None) -> list[Finding]:
            raise Unreadable("the medium does not answer")

        def mend(self, generation: Generation) -> bool:
            return True

    run = opened(root)
    candidates = Candidates(run.survey, None, Mending(run.tier, run.survey, Inline()))
    tried = iter(candidates)
    assert next(tried).step == 20
    candidates.failed(SumMismatch("differs"))
    assert next(tried).step == 20


def test_the_remains_of_an_interrupted_repair_block_nothing(root):
    before = contents(generation_folder(root))
    changed(DATA, flip(5))(generation_folder(root))
    deleting(MANIFEST)(generation_folder(root))
    run = opened(root)
    # Written after the opening, which clears them too: they stand for a failed repair of this process.
    for name in (DATA, MANIFEST):
        (generation_folder(root) / f"{name}{parity.REBUILT}").write_bytes(b"half")
    run.mend(next(at for at in run.survey.generations if at.step == 20), UPKEEP)
    assert contents(generation_folder(root)) == before


def test_a_repair_cancelled_while_it_examines_changes_nothing(root):
    changed(DATA, flip(5))(generation_folder(root))
    before = contents(generation_folder(root))
    run = opened(root)
    with pytest.raises(Cancelled):
        run.mend(next(at for at in run.survey.generations if at.step == 20), UPKEEP, stop=lambda: True)
    assert contents(generation_folder(root)) == before


def test_a_repair_cancelled_while_it_writes_parity_anew_raises_cancelled(root):
    """The cancellation was reported as parity that could not be written, and the repair continued with the next
    generation."""
    changed(DATA, flip(5))(generation_folder(root))
    deleting("r00000.parity-1", "r00000.parity-1.json")(generation_folder(root))
    run = opened(root, parity=None)
    at = next(at for at in run.survey.generations if at.step == 20)
    with pytest.raises(Cancelled):
        run.mend(at, UPKEEP, stop=lambda: at in run.mender.mended)
    assert run.mender.mended[at] == [DATA]


def test_a_repair_writes_the_commit_last(root, monkeypatch):
    deleting(MANIFEST, COMMIT)(generation_folder(root))
    run, put_back = opened(root, parity=None), parity._put_back

    def failing(tier: Disk, folder: str, name: str, data: bytes) -> None:
        if name == MANIFEST:
            raise TierDown("the disk failed")
        put_back(tier, folder, name, data)

    monkeypatch.setattr(parity, "_put_back", failing)
    with pytest.raises(TierDown):
        run.mend(the_newest(run), UPKEEP)
    assert not (generation_folder(root) / COMMIT).exists()


def test_a_rebuilt_record_that_reads_back_wrong_is_not_installed(root, monkeypatch):
    deleting(MANIFEST)(generation_folder(root))
    run, some = opened(root, parity=None), parity.read_file.some

    def misread(tier: Disk, name: str, *rest: int) -> bytearray:
        return bytearray(b"other") if name.endswith(MANIFEST + parity.REBUILT) else some(tier, name, *rest)

    monkeypatch.setattr(parity.read_file, "some", misread)
    with pytest.raises(LastgoodError, match="does not read back"):
        run.mend(the_newest(run), UPKEEP)
    assert not [name for name in contents(generation_folder(root)) if name.startswith(MANIFEST)]


def test_parity_records_are_deleted_before_their_cells(root, monkeypatch):
    run, deleted, delete = opened(root), list[str](), Disk.delete
    monkeypatch.setattr(Disk, "delete", lambda self, name: (deleted.append(name), delete(self, name))[1])
    parity.clear(run.tier, f"gen/{generation_folder(root).name}")
    records = [name.endswith(".json") for name in deleted]
    assert records == [True, True, False, False]


def test_cancelled_parity_leaves_no_file(root):
    run = opened(root)
    generation = run.survey.generations[the_newest(run)]
    spare = parity.find(run.tier, generation.id)
    assert spare is not None
    manifest, cells = read_manifest(run.tier, generation), spare.records[0].cells
    parity.clear(run.tier, layout.folder(generation.id))
    with pytest.raises(Cancelled):
        parity.protect(run.tier, generation, manifest, spare.code, cells, Inline(), lambda: True)
    assert not [name for name in contents(generation_folder(root)) if parity_layout.is_parity(name)]


# ---- malicious records -------------------------------------------------------------------------------------------


def forged(folder: Path, fields: Callable[[Parity], dict[str, object]], *indices: int) -> None:
    for index in indices:
        path = folder / parity_layout.record_name(0, index)
        record = layout.decode(path.read_bytes(), Parity, path.name)
        path.write_bytes(layout.encode(structs.replace(record, **fields(record)), record.digest))


FORGED: dict[str, Callable[[Parity], dict[str, object]]] = {
    "no data": lambda one: {"data": 0},
    "more columns than a code has": lambda one: {"data": 300},
    "negative parity": lambda one: {"parity": -1},
    "a code that is not theirs": lambda one: {"data": 9},
    "the index of the other": lambda one: {"index": 1 - one.index},
    "an index beyond all": lambda one: {"index": 7},
    "an unknown digest": lambda one: {"digest": "md5"},
    "cells of no whole page": lambda one: {"cell_bytes": 100},
    "cells of no bytes": lambda one: {"cell_bytes": 0},
    "cells larger than any memory": lambda one: {"cell_bytes": 1 << 50},
    "cells of another size": lambda one: {"cell_bytes": 2 * CELL},
    "a cell too few": lambda one: {"cells": one.cells[:-1]},
    "a row too many": lambda one: {"cells": one.cells * 2, "sums": one.sums * 2},
    "no cells": lambda one: {"cells": [], "sums": []},
    "a sum too few": lambda one: {"sums": one.sums[:-1]},
    "digests of no length": lambda one: {"cells": [""] * len(one.cells)},
    "a manifest longer than any memory": lambda one: {"manifest_bytes": 1 << 50},
    "a manifest of negative length": lambda one: {"manifest_bytes": -1},
    "a manifest of another length": lambda one: {"manifest_bytes": one.manifest_bytes + 1},
    "no commit": lambda one: {"commit": ""},
    "another commit": lambda one: {"commit": one.commit.replace('"step":20', '"step":10')},
    "the root of another": lambda one: {"root": "0" * 32},
}


@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED.keys())
def test_forged_parity_repairs_nothing_and_verifies_nothing(root, fields):
    changed(DATA, flip(5))(generation_folder(root))
    forged(generation_folder(root), fields, 0, 1)
    refused(root)


def test_parity_computed_over_damage_repairs_and_verifies_nothing(root):
    changed(DATA, flip(5))(generation_folder(root))
    data = (generation_folder(root) / DATA).read_bytes()

    def cells(record: Parity) -> dict[str, object]:
        return {"cells": [digest(record.digest, data[at : at + CELL]) for at in range(0, len(data), CELL)]}

    forged(generation_folder(root), cells, 0, 1)
    refused(root)


def refused(root: Path) -> None:
    """Require that mending fails with an error, that no file is changed, and that a restore loads the older
    generation."""
    run, before, after = failed_mend(root, LastgoodError)
    for content in (before, after):
        for mark in (layout.VERIFIED, layout.DAMAGED):
            content.pop(mark, None)
    assert after == before
    found, _ = load(run.tier)
    assert found.generation is not None and found.generation.step == 10


@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED.keys())
def test_beside_a_forged_record_only_the_valid_one_repairs(root, fields):
    whole = (generation_folder(root) / DATA).read_bytes()
    changed(DATA, flip(5))(generation_folder(root))
    damaged = (generation_folder(root) / DATA).read_bytes()
    forged(generation_folder(root), fields, 0)
    run = opened(root, parity=None)
    (at,) = (one for one in run.survey.generations if one.step == 20)
    try:
        run.mend(at, UPKEEP)
    except LastgoodError:
        assert (generation_folder(root) / DATA).read_bytes() == damaged
    else:
        assert (generation_folder(root) / DATA).read_bytes() == whole


def test_a_record_naming_another_commit_rebuilds_no_lost_commit(root):
    forged(generation_folder(root), FORGED["the root of another"], 0, 1)
    deleting(COMMIT)(generation_folder(root))
    run = opened(root, parity=None)
    with pytest.raises(BeyondRepair, match="no parity that can be read"):
        run.mend(next(at for at in run.survey.incomplete if at.step == 20), UPKEEP)


def test_an_existing_commit_decides_which_parity_is_valid(root):
    before = contents(generation_folder(root))
    changed(DATA, flip(5))(generation_folder(root))

    def of_another(record: Parity) -> dict[str, object]:
        original = layout.decode(record.commit.encode(), Commit, "")
        text = layout.encode(structs.replace(original, created=original.created + 1), "xxh3_128")
        return {"commit": text.decode(), "root": layout.root_of(text)}

    forged(generation_folder(root), of_another, 0)
    run = opened(root)
    run.mend(next(at for at in run.survey.generations if at.step == 20), UPKEEP)
    assert contents(generation_folder(root)) == before


def test_parity_of_another_code_is_ignored(root, tmp_path):
    other = Path(shutil.copytree(root, tmp_path / "other", symlinks=True))
    run = opened(other, parity="5+2")
    newest = next(one for one in run.survey.generations.values() if one.step == 20)
    run.mender.read_again(newest, UPKEEP, run.mender.reading(newest, UPKEEP))
    for name in ("r00000.parity-1", "r00000.parity-1.json"):
        shutil.copy(generation_folder(other) / name, generation_folder(root) / name)
    changed(DATA, lambda data: [flip(row * 3 * CELL)(data) for row in (1, 4)])(generation_folder(root))
    run = opened(root, parity=None)
    with pytest.raises(BeyondRepair, match="1 too many"):
        run.mend(newest.id, UPKEEP)


def test_complete_parity_is_not_written_again(root):
    inodes = {path.name: path.stat().st_ino for path in generation_folder(root).iterdir()}
    run = opened(root)
    newest = next(one for one in run.survey.generations.values() if one.step == 20)
    run.mender.read_again(newest, UPKEEP, run.mender.reading(newest, UPKEEP))
    assert {path.name: path.stat().st_ino for path in generation_folder(root).iterdir()} == inodes


@pytest.fixture(params=["isal", "zfec"])
def engine(request, monkeypatch):
    """Each of the two libraries that compute parity."""
    if request.param == "zfec":
        monkeypatch.setattr(isal, "library", lambda: None)
    elif isal.library() is None:
        pytest.skip('ISA-L is not installed: pip install pyeclib, or "apt-get install libisal2"')


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (2, 2), (4, 2), (10, 2), (16, 4), (250, 6)])
def test_isal_and_zfec_compute_the_same_parity(data, parity, monkeypatch):
    """Parity that one machine wrote with zfec must repair on another that has ISA-L, and vice versa."""
    if isal.library() is None:
        pytest.skip('ISA-L is not installed: pip install pyeclib, or "apt-get install libisal2"')
    cells = [memoryview(random.Random(number).randbytes(1000)) for number in range(data)]
    fast = Code(data, parity).encode(cells)
    monkeypatch.setattr(isal, "library", lambda: None)
    assert list(map(bytes, fast)) == list(map(bytes, Code(data, parity).encode(cells)))


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (2, 2), (10, 2), (5, 3)])
def test_any_set_of_cells_as_large_as_the_parity_can_be_lost(data, parity, engine):
    chance, code = random.Random(data), Code(data, parity)
    cells = [chance.randbytes(64) for _ in range(data)]
    code_word = [*cells, *code.encode([memoryview(cell) for cell in cells])]
    for missing in itertools.combinations(range(data + parity), parity):
        remaining = {number: memoryview(cell) for number, cell in enumerate(code_word) if number not in missing}
        assert list(map(bytes, code.decode(remaining))) == cells, missing


def test_decoding_from_too_few_cells_is_refused_by_their_number(engine):
    """The decoder ended with a bare StopIteration, which ended the surrounding generator as if it were complete."""
    code, cells = Code(3, 2), {number: memoryview(bytes(64)) for number in (0, 4)}
    with pytest.raises(BeyondRepair, match="2 cells of a code word are left, and 3 are needed"):
        code.decode(cells)


@pytest.mark.parametrize(
    ("count", "short"),
    [pytest.param(3, 0, id="too few"), pytest.param(11, 0, id="too many"), pytest.param(10, 1, id="one is short")],
)
def test_cells_that_do_not_fit_the_code_are_refused(count, short):
    """ISA-L read past the end of a short cell, and 3 cells for a code of 10 crashed the process."""
    if isal.library() is None:
        pytest.skip('ISA-L is not installed: pip install pyeclib, or "apt-get install libisal2"')
    code, cells = Code(10, 2), [memoryview(bytes(64))] * count
    cells[-1] = cells[-1][short:]
    with pytest.raises(ValueError, match=f"needs 10 cells of one length below .* given {count} cells"):
        code.encode(cells)


def test_a_cell_longer_than_isal_can_count_is_refused(monkeypatch):
    """ISA-L takes the length as a signed 32-bit int: the length of a cell of 2 GiB became negative."""
    if isal.library() is None:
        pytest.skip('ISA-L is not installed: pip install pyeclib, or "apt-get install libisal2"')
    monkeypatch.setattr(isal, "ISAL_CELL_LIMIT_BYTES", 64)
    with pytest.raises(ValueError, match="of one length below 64 bytes"):
        Code(1, 1).encode([memoryview(bytes(64))])


def test_every_byte_is_in_one_cell_and_neighbours_are_in_different_rows():
    for length in (
        4096,
        40960,
        10 * parity_layout.CELL_BYTES,
        10 * parity_layout.CELL_BYTES + 1,
        77 * parity_layout.CELL_BYTES - 4095,
    ):
        blobs = [
            Blob(name=name, length=size, chunk_bytes=CHUNK, chunks=[]) for name, size in (("a", length), ("b", 4096))
        ]
        cut = parity_layout.grid(blobs, 10, 2)
        for blob in blobs:
            mine = [cell for cell in cut.cells if cell.blob == blob.name]
            ends = [cell.offset + cell.length for cell in mine]
            assert [cell.offset for cell in mine] == [0, *ends[:-1]] and ends[-1] == blob.length
        rows = [cut.row(row) for row in range(cut.rows)]
        assert sorted(number for row in rows for number in row) == list(range(10 * cut.rows))
        assert 10 * cut.rows >= len(cut.cells) > 10 * (cut.rows - 1)
        assert cut.rows == 1 or all(number + 1 not in row for row in rows for number in row)


@pytest.mark.parametrize("text", ["", "10", "0+2", "10+0", "200+57", "10+2+1", "a+b", "-1+3"])
def test_invalid_parity_options_are_refused(text, tmp_path):
    with pytest.raises(Refused, match="parity="):
        opened(tmp_path, text or " ")

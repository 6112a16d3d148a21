"""A small run with every byte changed, every file truncated at every length, and every file deleted: nothing wrong
is loaded, and the run is never lost. Of the older generation, which the restore does not need, every fourth byte and
length.

Damage in the newest generation loses at most that generation. Damage in a hint loses nothing.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import State, load, save
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Damaged, LastgoodError
from lastgood.format.commit import survey
from lastgood.io.files import PosixFiles
from lastgood.policy.retention import Keep
from lastgood.run.known import Environment
from lastgood.run.reader import read_all
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk

pytestmark = pytest.mark.slow

SEED = 20261121
WORKERS = Inline()
OLD: State = {"weight": bytes(range(200)), "bias": b"older", "empty": b""}
NEW: State = {"weight": bytes(range(255, 55, -1)), "bias": b"newer", "empty": b""}
NEWEST = "gen/000000000020-00000020"
FATAL = [f"{NEWEST}/{name}" for name in ("COMMIT.json", "r00000.manifest.json", "r00000.safetensors")]
"""what the newest generation consists of; everything else is a hint, or older"""


class Run:
    """A run of two incarnations with one generation each, both verified; its files can be changed and restored."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        self.root, self.tier = root, Disk(PosixFiles(), str(root))
        for step, state in ((10, OLD), (20, NEW)):
            ids = iter(f"{step // 10 * 16 + n:08x}" for n in range(9))
            writer = RunWriter(
                self.tier, WORKERS, environment=Environment(new_id=lambda ids=ids: next(ids), wall_seconds=lambda: 0.0)
            )
            newest = writer.known.newest_verified()
            writer.begin(newest.id if newest else None)
            save(writer, step, state, chunk_bytes=4096, values={"epoch": step})
            writer.verify(Arena(3 * 4096, 4096))
        self.files = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    def write(self, name: str, data: bytes | None) -> None:
        """Write the file, or delete it if `data` is None."""
        path = self.root / name
        if data is None:
            path.unlink()
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    def check(self, name: str, data: bytes | None, change: str) -> None:
        """Replace a file, and require that the run loads the right generation."""
        self.write(name, data)
        try:
            found, state = load(self.tier, workers=WORKERS)
        except LastgoodError as error:
            raise AssertionError(f"{change}: the run is lost: {error}") from error
        finally:
            self.write(name, self.files[name])
        step, expected = (10, OLD) if name in FATAL else (20, NEW)
        assert state == expected, f"{change}: a wrong state was loaded"
        assert found.generation is not None and found.generation.step == step, change
        assert (20 in dict(found.stepped_over)) == (name in FATAL), change


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="lastgood-flips-", dir=memory) as root:
        yield Run(Path(root))


def test_the_damaged_run_contains_every_kind_of_file(run):
    assert sorted(run.files) == [
        "POINTER.json",
        *(
            f"gen/{at}/{name}"
            for at in ("000000000010-00000011", "000000000020-00000020")
            for name in ("COMMIT.json", "VERIFIED.json", "r00000.manifest.json", "r00000.safetensors")
        ),
        "incarnations/000001-00000011.json",
        "incarnations/000002-00000020-after-000000000010-00000011.json",
        "lastgood.json",
    ]
    found, state = load(run.tier, workers=WORKERS)
    assert state == NEW and found.stepped_over == []
    assert load(run.tier, 10, WORKERS)[1] == OLD


def masks(name: str, chance: random.Random) -> list[int]:
    """The bits to flip in a byte: two single bits in the records that a restore trusts, and random bits elsewhere."""
    if name.endswith(".json") and "00000011" not in name:
        return [1 << bit for bit in chance.sample(range(8), 2)]
    return [chance.randrange(1, 256)]


def places(name: str, length: int) -> range:
    """The bytes of a file that are changed, and the lengths to which it is truncated."""
    return range(0, length, 4 if name.startswith("gen/000000000010") else 1)


def test_no_flipped_byte_anywhere_is_ever_loaded_or_loses_the_run(run):
    chance = random.Random(SEED)
    for name, good in run.files.items():
        for at in places(name, len(good)):
            for mask in masks(name, chance):
                bad = good[:at] + bytes([good[at] ^ mask]) + good[at + 1 :]
                run.check(name, bad, f"{name} byte {at} ^ {mask:#04x}")


def test_no_truncation_of_any_file_is_ever_loaded_or_loses_the_run(run):
    for name, good in run.files.items():
        for length in places(name, len(good)):
            run.check(name, good[:length], f"{name} cut to {length}")


def test_nothing_appended_to_a_file_is_ever_loaded_or_loses_the_run(run):
    for name, good in run.files.items():
        for tail in (b"\0", b"\n", b" ", b"}\n", bytes(4096), good):
            run.check(name, good + tail, f"{name} with {tail[:4]!r} after it")


def test_no_zeroed_or_misplaced_sector_is_ever_loaded_or_loses_the_run(run):
    for name, good in run.files.items():
        for at in range(0, len(good), 512):
            sector = good[at : at + 512]
            for bad in (bytes(len(sector)), b"\xff" * len(sector), good[:512][: len(sector)], sector[::-1]):
                if bad != sector:
                    run.check(name, good[:at] + bad + good[at + 512 :], f"{name} sector at {at}")


def test_a_missing_or_exchanged_file_is_never_loaded_or_loses_the_run(run):
    for name, good in run.files.items():
        for replacement in (None, *run.files.values()):
            if replacement != good:
                run.check(name, replacement, f"{name} replaced")


def test_a_damaged_requested_step_is_named_and_no_other_is_loaded(run):
    for name in FATAL:
        run.write(name, run.files[name][:-1])
        with pytest.raises(Damaged, match="000000000020"):
            load(run.tier, 20, WORKERS)
        run.write(name, run.files[name])


def test_continuing_a_damaged_run_loses_no_good_generation(tmp_path):
    """The next writer opens the damaged run, continues the generation that loads, verifies, and deletes what
    retention does not keep."""
    chance = random.Random(SEED)
    names = Run(tmp_path / "names").files
    for turn, name in enumerate(sorted(names)):
        run = Run(tmp_path / str(turn))
        good = run.files[name]
        at = chance.randrange(len(good))
        run.write(name, chance.choice([None, good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]]))
        found, state = load(run.tier, workers=WORKERS)
        writer = RunWriter(run.tier, WORKERS, keep=Keep(last=2), environment=Environment(new_id=lambda: "00000030"))
        assert found.generation is not None
        for generation in list(writer.survey.generations.values()):
            findings = read_all(run.tier, generation, Arena(3 * 4096, 4096), WORKERS)
            writer.conclude(generation, findings)
        writer.begin(found.generation.id)
        save(writer, 30, {"weight": b"after"}, chunk_bytes=4096)
        writer.verify(Arena(3 * 4096, 4096))
        writer.clean()
        assert load(run.tier, workers=WORKERS)[1] == {"weight": b"after"}, name
        assert load(run.tier, found.generation.step, WORKERS)[1] == state, name


def test_a_rewind_before_its_first_save_survives_damage_to_its_record(tmp_path):
    """The record was once the only evidence of a rewind: after a flip of one bit in it, the abandoned step was
    loaded again."""
    run = Run(tmp_path)
    old = next(at for at in survey(run.tier).generations if at.step == 10)
    writer = RunWriter(run.tier, WORKERS, environment=Environment(new_id=lambda: "00000030"))
    writer.begin(old)
    writer.record_incarnation()  # as earlier versions did in begin()
    record = next((tmp_path / "incarnations").glob("*-00000030-*"))
    good = record.read_bytes()
    flipped = (good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good)))
    for bad in (b"", good[:1], good[:-1], bytes(len(good)), *flipped):
        record.write_bytes(bad)
        assert load(run.tier, workers=WORKERS)[1] == OLD, bad

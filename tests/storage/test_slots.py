"""Runs in slots: properties beyond the contract of every tier (test_tiers.py) and the crash model."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import lastgood
from harness import State, flip, load, save
from lastgood.cli.app import main
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import (
    CommitUnknown,
    ManifestInvalid,
    MissingBlob,
    NoSpace,
    NotARun,
    NothingGood,
    Refused,
    SumMismatch,
    TierDown,
    Truncated,
    UnknownFormat,
)
from lastgood.format import layout
from lastgood.format.commit import survey
from lastgood.io import files as posix_files
from lastgood.io import mapped
from lastgood.io.files import PosixFiles, takes_direct
from lastgood.io.mapped import MappedFiles
from lastgood.limits import TABLE_AREA_BYTES
from lastgood.policy.retention import Keep
from lastgood.records import Extent, Finding
from lastgood.run import access
from lastgood.run.known import Environment
from lastgood.run.reader import RunReader
from lastgood.run.writer import RunWriter
from lastgood.storage import slot_table as tables
from lastgood.storage.slot_file import aligned
from lastgood.storage.slot_table import Table
from lastgood.storage.slots import Slots
from lastgood.testing import Call, Fault, FaultyFiles
from lastgood_lab.campaigns.victim import live
from lastgood_lab.campaigns.victim_ledger import Ledger, litter
from lastgood_lab.hostile import ROOT, HostileDisk

UPKEEP = Arena(3 * 8192, 8192)
BLOB, MANIFEST = layout.blob_name(0), layout.manifest_name(0)


def state(step: int, weight_bytes: int = 30_000) -> State:
    return {"w": bytes([step]) * weight_bytes, "b": b"bias"}


def calls(files: FaultyFiles) -> list[tuple[str, str]]:
    """The operations that changed the disk, each with the name of its file."""
    return [(operation, os.path.basename(path)) for operation, path in files.changes()]


class Trainer:
    """One opening of a run in slots for writing."""

    def __init__(self, root: Path, files: PosixFiles | None = None, in_flight: int = 1, **options) -> None:
        self.tier = access.slots(files or PosixFiles(), str(root), in_flight=in_flight, **options)
        ids = (f"{number:08x}" for number in range(len(list(root.glob("incarnations/*"))) * 2 + 1, 1000))
        self.run = RunWriter(
            self.tier,
            Inline(),
            keep=Keep(last=2),
            environment=Environment(new_id=lambda: next(ids), wall_seconds=lambda: 0.0),
        )
        found, _ = load(self.tier, workers=Inline())
        self.run.begin(found.generation.id if found.generation else None)

    def save(self, step: int, weight_bytes: int = 30_000, meanwhile: Callable[[], object] = lambda: None) -> None:
        save(self.run, step, state(step, weight_bytes), meanwhile=meanwhile)

    def steps(self, *steps: int) -> None:
        for step in steps:
            self.save(step)
            self.run.verify(UPKEEP)

    def slot_of(self, step: int) -> int:
        return next(slot for found, slot in slots_named(self.tier).items() if found == step)


def slots_named(tier: Slots) -> dict[int, int]:
    return {int(one.folder[:12]): one.slot for one in tier._current_table().kept}


def lengths(root: Path) -> dict[str, int]:
    return {one.name: one.stat().st_size for one in (root / "slots").glob("*")}


def restored(root: Path) -> tuple[int | None, list[int]]:
    """The state that the next process loads, checked bit for bit, and the generations that it skips."""
    found, loaded = load(access.slots(PosixFiles(), str(root)), workers=Inline())
    if found.generation is None:
        return None, []
    assert loaded == state(found.generation.step, len(loaded["w"]))
    return found.generation.step, [step for step, _ in found.stepped_over]


# ---- the cost of a save -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 3])
def test_a_save_costs_two_flushes_and_allocates_nothing(tmp_path, in_flight):
    trainer = Trainer(tmp_path, files := FaultyFiles(), in_flight)
    trainer.steps(1)
    for step in range(2, 9):
        files.calls.clear()
        trainer.save(step)
        slot = f"{trainer.slot_of(step):02d}"
        assert [one for one in calls(files) if one[0] != "write"] == [("sync", slot), ("sync", "table")]
        assert {name for call, name in calls(files) if call == "write"} == {slot, "table"}
        trainer.run.verify(UPKEEP)


def test_manifests_that_outgrow_a_slot_extend_all_slots_at_the_first_save(tmp_path):
    """The room behind the blob is an estimate: with many small tensors, the manifest is longer than the tensors
    themselves."""
    trainer = Trainer(tmp_path, files := FaultyFiles())
    many = {f"t{number:04d}": bytes([number % 256]) for number in range(300)}
    save(trainer.run, 1, many)
    assert {len(set(lengths(tmp_path).values()) - {2 * TABLE_AREA_BYTES})} == {1}, "all slots have the same length"
    for step in (2, 3, 4):
        files.calls.clear()
        save(trainer.run, step, many)
        assert {call for call, _ in calls(files)} == {"write", "sync"}


def test_slots_are_filled_with_zeros_before_they_are_used(tmp_path):
    """A block that is only reserved reads as zeros too, but the first write to it requires a journal transaction."""
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.save(1)
    used = trainer.slot_of(1)
    done = [one for one in calls(files) if one[1].isdecimal() or one[1] == "slots"]
    filled = done[: done.index(("sync_dir", "slots"), 2)]
    assert filled[-6:] == [(call, f"{slot:02d}") for slot in (0, 1, 2) for call in ("write", "sync")]
    for slot in {0, 1, 2} - {used}:
        path = tmp_path / f"slots/{slot:02d}"
        assert path.stat().st_blocks * 512 >= path.stat().st_size > 30_000, "all blocks of the slot are allocated"
        assert not any(path.read_bytes())


def test_a_pointer_costs_no_write_and_is_durable_after_close(tmp_path):
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.steps(1, 2)
    files.calls.clear()
    trainer.run.survey.pointer = None
    trainer.run.marks.point()
    assert calls(files) == []
    assert pointed(tmp_path) == 1, "other processes see the slot with the next record of the table"
    trainer.tier.close()
    assert pointed(tmp_path) == 2
    trainer.tier.close()
    assert [call for call, _ in calls(files)] == ["write", "sync"], "the table is written once"


def pointed(root: Path) -> int | None:
    found = survey(access.slots(PosixFiles(), str(root))).pointer
    return found.step if found else None


def test_retiring_an_overwritten_generation_costs_no_write(tmp_path):
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.steps(1, 2, 3, 4)
    assert slots_named(trainer.tier).keys() == {3, 4}
    files.calls.clear()
    trainer.run.clean()
    assert calls(files) == [] and len(trainer.run.survey.generations) == 2


# ---- the number of slots ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_n_saves_in_flight_use_exactly_n_plus_two_slots(tmp_path, in_flight):
    trainer = Trainer(tmp_path, in_flight=in_flight)
    trainer.steps(1, 2)

    def nested(step: int, deep: int) -> None:
        trainer.save(step, meanwhile=lambda: deep > 1 and nested(step - 1, deep - 1))

    for last in range(10, 100, 10):
        nested(last, in_flight)
        trainer.run.verify(UPKEEP)
        assert restored(tmp_path) == (last, [])
    assert lengths(tmp_path).keys() == {"table", *(f"{slot:02d}" for slot in range(in_flight + 2))}


def test_saves_beyond_the_configured_number_are_refused_without_harm(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.steps(1, 2)
    upload = trainer.tier.create("gen/000000000008-0000000a/x", 100)
    with pytest.raises(NoSpace, match="in_flight"):
        trainer.save(3)
    assert restored(tmp_path) == (2, [])
    upload.abort()
    trainer.save(4)
    assert restored(tmp_path) == (4, [])
    with pytest.raises(Refused):
        access.slots(PosixFiles(), str(tmp_path), in_flight=99)


def test_a_slot_that_a_restore_may_need_is_never_written(tmp_path):
    """In any mix of verified, damaged, begun and overtaken saves, no byte is written to a slot that the table on the
    disk names."""
    trainer = Trainer(tmp_path, files := FaultyFiles(), in_flight=2)

    def unnamed(call: Call) -> None:
        if call.operation == "write" and call.name.isdecimal():
            named = slots_named(access.slots(PosixFiles(), str(tmp_path)))
            assert int(call.name) not in named.values()

    files.before = unnamed
    for step in range(2, 40, 2):
        if step % 3:
            trainer.save(step)
        else:
            trainer.save(step + 1, meanwhile=lambda: trainer.save(step))  # noqa: B023
        if step % 4 == 0:
            trainer.run.verify(UPKEEP)
        if step == 20:
            findings = [Finding(kind="SumMismatch", what="a bit")]
            trainer.run.conclude(trainer.run.lineage()[0], findings)
            trainer = Trainer(tmp_path, files, in_flight=2)


# ---- failures ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write", "sync"])
def test_an_unknown_commit_keeps_its_slot_until_a_later_record_is_durable(tmp_path, call):
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.steps(1, 2)
    files.inject(Fault(call, "*/table"))
    with pytest.raises(CommitUnknown, match="Nothing was deleted"):
        trainer.save(3)
    doubtful = ({0, 1, 2} - set(slots_named(trainer.tier).values())).pop()
    written = (tmp_path / f"slots/{doubtful:02d}").read_bytes()
    files.clear()
    files.inject(Fault("change", "*/table.tmp"))
    with pytest.raises(TierDown):
        trainer.save(4)
    assert (tmp_path / f"slots/{doubtful:02d}").read_bytes() == written
    files.clear()
    files.calls.clear()
    trainer.save(5)
    order = [one for one in calls(files) if one[1] in ("table", "table.tmp", f"{doubtful:02d}")]
    assert order.index(("rename", "table")) < order.index(("write", f"{doubtful:02d}"))
    assert restored(tmp_path) == (5, [])


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_slot_in_a_record_of_unknown_outcome_is_not_reused(tmp_path, number):
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.steps(1, 2)
    folder = "gen/000000000009-0000000a"
    upload = trainer.tier.create(f"{folder}/x", 10)
    slot = trainer.tier._drafts["000000000009-0000000a"].slot
    files.inject(Fault("write", "*/table", number))
    with pytest.raises((CommitUnknown, NoSpace)):
        trainer.tier.put_new(f"{folder}/COMMIT.json", b"x")
    files.clear()
    upload.abort()
    files.calls.clear()
    trainer.save(3)
    assert calls(files).index(("rename", "table")) < calls(files).index(("write", f"{slot:02d}"))
    assert restored(tmp_path) == (3, [])


def test_a_record_written_before_the_disk_was_full_is_not_denied(tmp_path):
    """A short write had written all of the record; only the padding of its page did not fit on the disk."""
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.steps(1, 2)

    def full(call: Call) -> None:
        if call.changes and calls(files)[-2:] == [("write", "table")] * 2:
            raise OSError(errno.ENOSPC, "full")

    files.before, files.most_bytes = full, 3584
    with pytest.raises(CommitUnknown):
        trainer.save(3)
    assert restored(tmp_path) == (3, [])


def test_a_table_that_temporarily_had_no_space_loses_no_slot(tmp_path):
    """The save was refused, and its draft could not be cleared either: its slot was occupied for ever."""
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.steps(1, 2)
    files.inject(Fault("change", "*/table*", errno.ENOSPC))
    with pytest.raises(NoSpace):
        trainer.save(3)
    files.clear()
    trainer.steps(4, 5)
    assert restored(tmp_path) == (5, [])


def test_an_unfilled_new_slot_has_a_durable_name_before_it_is_used(tmp_path):
    """The new file could not even be removed again. The next save used it without zeroing it, and a power loss
    brought the old file back under the name in the table."""
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.steps(1, 2)
    free = f"{({0, 1, 2} - set(slots_named(trainer.tier).values())).pop():02d}"
    files.inject(Fault("write", f"*/{free}", errno.ENOSPC))
    with pytest.raises(NoSpace):
        trainer.save(3)
    files.calls.clear()

    def full(call: Call) -> None:
        if call.name == free and call.operation in ("write", "remove") and ("open new", free) in calls(files):
            raise OSError(errno.ENOSPC, "full")

    files.clear()
    files.before = full
    with pytest.raises(NoSpace):
        trainer.save(4)
    files.before = None
    files.calls.clear()
    trainer.save(5)
    assert calls(files).index(("sync_dir", "slots")) < calls(files).index(("write", "table"))


def test_a_save_that_could_not_be_cleaned_up_loses_no_slot(tmp_path):
    """While the outcome of a commit is unknown, no slot can be cleared unless the table can be written: the next
    save failed too, and held its slot until the process ended."""
    trainer = Trainer(tmp_path, files := FaultyFiles(), in_flight=2)
    trainer.steps(1, 2)
    files.inject(Fault("sync", "*/table"))
    with pytest.raises(CommitUnknown):
        trainer.save(3)
    files.clear()
    files.inject(Fault("sync"), Fault("change", "*/table*"))
    with pytest.raises(TierDown):
        trainer.save(4)
    files.clear()
    saves = {step: trainer.tier.create(f"gen/{step:012d}-0000000a/x", 10) for step in (5, 6)}
    assert len(trainer.tier._drafts) == len(saves) == 2


@pytest.mark.parametrize("call", ["rename", "sync_dir"])
def test_a_commit_in_a_table_that_may_have_its_name_has_unknown_outcome(tmp_path, call):
    """After a failed sync the table is a new file; its name may be durable although the call failed."""
    trainer = Trainer(tmp_path, files := FaultyFiles(), in_flight=2)
    trainer.steps(1)
    files.inject(Fault("sync", "*/table"))
    with pytest.raises(CommitUnknown):
        trainer.save(2)
    files.clear()
    files.inject(Fault(call, "*/table" if call == "rename" else "*/slots"))
    with pytest.raises(CommitUnknown, match="Nothing was deleted"):
        trainer.save(3)


def test_a_retried_commit_names_the_generation_it_was_created_for(tmp_path):
    trainer = Trainer(tmp_path, files := FaultyFiles())
    folder, data = "gen/000000000007-00000007", aligned(b"what was saved")
    upload = trainer.tier.create(f"{folder}/{BLOB}", 14)
    upload.write_at(data, 0)
    upload.finish()
    trainer.tier.put_new(f"{folder}/r00000.manifest.json", b"manifest")
    files.inject(Fault("sync", "*/table"))
    with pytest.raises(CommitUnknown):
        trainer.tier.put_new(f"{folder}/COMMIT.json", b"commit")
    files.clear()
    trainer.tier.put_new(f"{folder}/COMMIT.json", b"commit")
    found = memoryview(bytearray(14))
    access.slots(PosixFiles(), str(tmp_path)).read_into(Extent(blob=f"{folder}/{BLOB}", offset=0, length=14), found)
    assert found == b"what was saved"


def test_a_commit_whose_sync_failed_is_retried_in_a_new_file(tmp_path):
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.steps(1)
    files.inject(Fault("sync", "*/table"))
    with pytest.raises(CommitUnknown):
        trainer.tier.put_new("gen/000000000009-0000000a/COMMIT.json", b"x")
    files.clear()
    before = (tmp_path / "slots/table").stat().st_ino
    trainer.tier.put_new("gen/000000000009-0000000a/COMMIT.json", b"x")
    assert (tmp_path / "slots/table").stat().st_ino != before
    assert "000000000009-0000000a" in access.slots(PosixFiles(), str(tmp_path)).list("gen")


@pytest.mark.parametrize("call", ["sync", "write"])
def test_a_slot_whose_sync_failed_is_recreated_before_it_is_reused(tmp_path, call):
    """A second fsync of the file would report success although the data is lost. In a mapping, each write is a sync."""
    trainer = Trainer(tmp_path, files := FaultyFiles())
    trainer.steps(1, 2)
    free = ({0, 1, 2} - set(slots_named(trainer.tier).values())).pop()
    path = tmp_path / f"slots/{free:02d}"
    before = path.stat().st_ino, path.stat().st_size
    os.link(path, tmp_path / "kept")  # so that no new file gets its inode number
    files.inject(Fault(call, f"*/{free:02d}"))
    for step in (3, 4):
        with pytest.raises(TierDown):
            trainer.save(step)
    files.clear()
    trainer.save(5)
    assert trainer.slot_of(5) == free and path.stat().st_ino != before[0]
    assert restored(tmp_path) == (5, [])


def test_a_record_whose_sync_failed_is_not_committed_by_a_later_one(tmp_path):
    trainer = Trainer(tmp_path, files := FaultyFiles())
    folder = "gen/000000000009-0000000a"
    trainer.tier.create(f"{folder}/x", 10).finish()
    files.inject(Fault("sync", "*/00"))
    with pytest.raises(TierDown):
        trainer.tier.put_new(f"{folder}/manifest", b"record")
    files.clear()
    for again in (
        lambda: trainer.tier.create(f"{folder}/y", 50_000),  # the slot would have to grow
        lambda: trainer.tier.put_new(f"{folder}/manifest", b"record"),
        lambda: trainer.tier.put_new(f"{folder}/COMMIT.json", b"record"),
    ):
        with pytest.raises(TierDown, match="earlier write or sync"):
            again()


@pytest.mark.parametrize(("number", "error"), [(errno.EIO, TierDown), (errno.ENOSPC, NoSpace)])
def test_a_slot_whose_write_failed_is_not_written_again(tmp_path, number, error):
    """After a failed msync, the other writers of the save continued, and each called msync on the same file."""
    trainer = Trainer(tmp_path, files := FaultyFiles())
    upload = trainer.tier.create("gen/000000000009-0000000a/x", 8192)
    files.inject(Fault("write", "*/00", errno=number))
    with pytest.raises(error):
        upload.write_at(memoryview(bytes(4096)), 0)
    files.clear()
    files.calls.clear()
    with pytest.raises(error, match="earlier write or sync"):
        upload.write_at(memoryview(bytes(4096)), 4096)
    assert not [one for one in files.calls if one.operation == "write"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("again", [False, True], ids=["first", "growing"])
def test_every_slot_has_its_space_before_the_first_byte_is_written(tmp_path, number, again):
    trainer = Trainer(tmp_path, files := FaultyFiles())
    if again:
        trainer.steps(1, 2)
    before = lengths(tmp_path)
    files.calls.clear()
    files.inject(Fault("reserve", "*/02", number))
    with pytest.raises(NoSpace, match="Free space"):
        trainer.save(3, 90_000)
    assert "write" not in {call for call, name in calls(files) if name.isdecimal()}
    assert {**lengths(tmp_path), "table": 0} == {**before, "table": 0}, "no reserved space is kept"
    files.clear()
    trainer.save(4, 90_000)
    assert restored(tmp_path) == (4, [])


def test_a_growing_state_extends_the_slots_before_it_is_written(tmp_path):
    trainer = Trainer(tmp_path)
    for step in range(1, 9):
        trainer.save(step, 20_000 * step)
        trainer.run.verify(UPKEEP)
        assert restored(tmp_path) == (step, [])
    assert len(lengths(tmp_path)) == 4


def test_a_damaged_newest_generation_is_skipped_for_the_verified_one(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.steps(1, 2)
    trainer.save(3)
    flip(tmp_path / f"slots/{trainer.slot_of(3):02d}", 8000)
    assert restored(tmp_path) == (2, [3])


def test_damage_after_verification_leaves_an_older_generation(tmp_path):
    """As soon as a commit was verified, the slot of the previous one was released; then the medium lost the newer
    one."""
    trainer = Trainer(tmp_path)
    trainer.steps(1, 2, 3)
    flip(tmp_path / f"slots/{trainer.slot_of(3):02d}", 8000)
    assert restored(tmp_path) == (2, [3])


def test_without_a_verified_generation_the_newest_two_commits_stay(tmp_path):
    trainer = Trainer(tmp_path)
    for step in (1, 2, 3):
        trainer.save(step)
    assert slots_named(trainer.tier).keys() == {2, 3}
    flip(tmp_path / f"slots/{trainer.slot_of(3):02d}", 8000)
    assert restored(tmp_path) == (2, [3])


def test_a_generation_marked_damaged_does_not_count_as_a_spare(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.save(1)
    trainer.save(2)
    trainer.run.conclude(trainer.run.lineage()[0], [Finding(kind="SumMismatch", what="a bit")])
    trainer.save(3)
    assert slots_named(trainer.tier).keys() == {1, 3}


def test_a_pointer_is_deleted_with_the_generation_it_names(tmp_path):
    tier = access.slots(PosixFiles(), str(tmp_path))
    folder = "gen/000000000009-0000000a"
    tier.put_new(f"{folder}/COMMIT.json", b"x")
    tier.point("LASTGOOD.json", b"pointer", folder)
    assert dict(tier.list("")) == {"gen": None, "LASTGOOD.json": 7}
    tier.delete(f"{folder}/COMMIT.json")
    assert dict(tier.list("")) == {} == dict(access.slots(PosixFiles(), str(tmp_path)).list(""))


def test_the_table_is_read_past_the_page_cache(tmp_path):
    """Read through the page cache, a record looks complete although the disk never received it or has lost it."""
    disk = HostileDisk()
    run = RunWriter(access.slots(disk, ROOT), Inline())
    for step in (1, 2):
        save(run, step, state(step))
    sequences = [tables.whole(_area(disk, at)).sequence for at in (0, TABLE_AREA_BYTES)]
    disk.rot(f"{ROOT}/slots/table", (TABLE_AREA_BYTES if sequences[1] > sequences[0] else 0) + 60)
    found, _ = load(access.slots(disk, ROOT), workers=Inline())
    assert found.generation.step == 1


def _area(disk: HostileDisk, at: int) -> bytes:
    data = bytes(disk._find(f"{ROOT}/slots/table").data)[at : at + TABLE_AREA_BYTES]
    return data[: 48 + tables.body_bytes(data, TABLE_AREA_BYTES)]


def test_an_overwritten_file_is_flushed_without_the_journal(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(4096))
    flushed: list[str] = []
    monkeypatch.setattr(posix_files.os, "fdatasync", lambda fd: flushed.append("content"))
    monkeypatch.setattr(posix_files.os, "fsync", lambda fd: flushed.append("all"))
    for name, mode in (("x", "write"), ("y", "new")):
        file = PosixFiles().open(str(tmp_path / name), mode)
        file.sync()
        file.close()
    assert flushed == (["content", "all"] if posix_files._FULLFSYNC is None else [])


def test_a_truncated_or_missing_slot_is_reported_as_damage(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.steps(1)
    path = tmp_path / f"slots/{trainer.slot_of(1):02d}"
    os.truncate(path, 5000)
    with pytest.raises(NothingGood, match=r"has (5,000|0) bytes"):
        restored(tmp_path)
    path.unlink()
    with pytest.raises(NothingGood, match=r"missing: .*slots/00"):
        restored(tmp_path)


def test_an_overwritten_generation_gets_no_mark(tmp_path):
    """A slow verification may end after its generation was overwritten; its mark must not occupy a slot."""
    trainer = Trainer(tmp_path)
    trainer.steps(1, 2, 3)
    with pytest.raises(MissingBlob, match="it cannot be marked"):
        trainer.tier.put_new("gen/000000000001-00000002/DAMAGED.json", b"x")
    assert not trainer.tier._drafts


# ---- the table of slots -----------------------------------------------------------------------------------------


def newest_area(root: Path) -> int:
    data = (root / "slots/table").read_bytes()
    half = len(data) // 2
    found = {at: tables.whole(data[at : at + 48 + length])
             for at in (0, half) if (length := tables.body_bytes(data[at:], half)) is not None}  # fmt: skip
    return max((at for at, one in found.items() if one), key=lambda at: found[at].sequence)


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 4096, random.Random(0).randbytes(4096), b"LGSLOTS\n" + b"\xff" * 100],
    ids=["zeros", "noise", "magic"],
)
def test_a_torn_pointer_record_never_loses_the_newest_commit(tmp_path, garbage):
    trainer = Trainer(tmp_path)
    trainer.steps(1, 2)
    trainer.save(3)
    data = bytearray((tmp_path / "slots/table").read_bytes())
    older = len(data) // 2 - newest_area(tmp_path)
    data[older : older + len(garbage)] = garbage
    (tmp_path / "slots/table").write_bytes(data)
    assert restored(tmp_path) == (3, [])
    Trainer(tmp_path).save(4)
    assert restored(tmp_path) == (4, [])


def test_a_lost_newest_record_loses_only_the_newest_commit(tmp_path):
    for verified in (False, True):
        root = tmp_path / str(verified)
        root.mkdir()
        trainer = Trainer(root)
        trainer.steps(1, 2)
        trainer.save(3)
        if verified:
            trainer.run.verify(UPKEEP)
        flip(root / "slots/table", newest_area(root) + 60)
        assert restored(root) == ((3, []) if verified else (2, []))


def test_record_numbers_continue_across_openings(tmp_path):
    """A reader that reads one area before the change of the file and the other one after it takes the newer of the
    two."""
    last = 0
    for step in (1, 2, 3):
        Trainer(tmp_path).steps(step)
        data, at = (tmp_path / "slots/table").read_bytes(), newest_area(tmp_path)
        found = tables.whole(data[at : at + 48 + (tables.body_bytes(data[at:], len(data)) or 0)])
        assert found is not None and found.sequence > last + 1
        last = found.sequence


def test_a_table_without_a_valid_record_is_refused_and_left_unchanged(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.steps(1, 2)
    path = tmp_path / "slots/table"
    for damage in (lambda: [flip(path, 70), flip(path, TABLE_AREA_BYTES + 70)], lambda: os.truncate(path, 100)):
        damage()
        before = path.read_bytes()
        with pytest.raises(SumMismatch, match="both records"):
            restored(tmp_path)
        with pytest.raises(SumMismatch, match="both records"):
            Trainer(tmp_path)
        assert path.read_bytes() == before
    path.unlink()
    for opening in (restored, Trainer):
        with pytest.raises(MissingBlob, match="is missing"):
            opening(tmp_path)


def test_a_record_longer_than_its_area_extends_the_table(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.steps(1)
    trainer.save(2)
    findings = [Finding(kind="SumMismatch", what="x" * 200, blob=BLOB, chunk=number) for number in range(900)]
    trainer.run.conclude(trainer.run.lineage()[0], findings)
    assert lengths(tmp_path)["table"] > 2 * TABLE_AREA_BYTES
    assert restored(tmp_path) == (1, [2])
    trainer.save(3)
    assert restored(tmp_path) == (3, [])
    assert len(RunReader(access.slots(PosixFiles(), str(tmp_path))).generations()) == 2


def forged(root: Path, body: object, version: int = 1, sequence: int = 1 << 40) -> None:
    """Write a record with a correct digest over the first area."""
    data = bytearray(tables.encode(Table(), sequence))
    text = msgspec.msgpack.encode(body)
    head = struct.pack("<8sIIQQ", tables.MAGIC, version, 0, sequence, len(text))
    digest = bytes.fromhex(tables.digest("xxh3_128", head, text))
    data = (root / "slots/table").read_bytes()
    record = head + digest + text
    (root / "slots/table").write_bytes(record + data[len(record) :])


def kept(**changed: object) -> dict[str, object]:
    one = {"folder": "000000000009-0000000a", "slot": 0, "extents": {"x": [0, 10]}, "records": {"COMMIT.json": b"x"}}
    return {"kept": [{**one, **changed}], "pointers": {}}


@pytest.mark.parametrize(
    "body",
    [
        kept(slot=100),
        kept(slot=-1),
        kept(slot=-2),
        kept(slot=1 << 62),
        kept(extents={"x": [-4096, 10]}),
        kept(extents={"x": [0, -1]}),
        kept(extents={"x": [1, 10]}),
        kept(extents={"x": [(1 << 63) - 4096, 1 << 62]}),
        kept(extents={"COMMIT.json": [0, 1]}),
        kept(surprise=1),
        {"kept": kept()["kept"] * 2, "pointers": {}},
        {"kept": [*kept()["kept"], *kept(folder="000000000010-0000000a")["kept"]], "pointers": {}},
        {"kept": [*kept()["kept"], *kept(slot=1)["kept"]], "pointers": {}},
        {"kept": 7},
        [],
    ],
    ids=repr,
)
def test_a_hostile_table_is_refused_as_invalid(tmp_path, body):
    Trainer(tmp_path).steps(1)
    forged(tmp_path, body)
    with pytest.raises(ManifestInvalid):
        restored(tmp_path)


def test_lengths_claimed_by_a_table_are_checked_against_the_slot(tmp_path):
    Trainer(tmp_path).steps(1)
    forged(tmp_path, kept(extents={"x": [1 << 40, 1 << 50], "y": [4096, 1 << 50]}))
    tier = access.slots(PosixFiles(), str(tmp_path))
    folder, slot_bytes = "gen/000000000009-0000000a", lengths(tmp_path)["00"]
    assert tier.list(folder) == {"COMMIT.json": 1, "x": 0, "y": slot_bytes - 4096}
    for name in ("x", "y"):
        with pytest.raises(Truncated):
            tier.read_into(Extent(blob=f"{folder}/{name}", offset=0, length=1 << 20), memoryview(bytearray(1 << 20)))


def test_names_in_a_table_never_reach_the_file_system(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    run = tmp_path / "run"
    Trainer(run).steps(1)
    forged(run, kept(folder="../../../secret", extents={"../x": [0, 10], "/etc/passwd": [4096, 10]}))
    tier = access.slots(PosixFiles(), str(run))
    assert [*tier.list("gen")] == ["../../../secret"]
    assert RunReader(tier).generations() == [], "not the name of a generation's folder"
    for name in ("gen/../../../secret", "../secret", "gen/000000000009-0000000a/../x", "slots/00", "gen/x"):
        with pytest.raises(MissingBlob):
            tier.read_into(Extent(blob=name, offset=0, length=1), memoryview(bytearray(1)))
    assert {one.name for one in tmp_path.rglob("*") if one.is_file()} >= {"secret"}


def test_a_table_of_a_newer_version_is_refused_and_never_skipped(tmp_path):
    Trainer(tmp_path).steps(1)
    before = (tmp_path / "slots/table").read_bytes()
    forged(tmp_path, {"anything": 1}, version=2)
    with pytest.raises(UnknownFormat, match="newer lastgood"):
        restored(tmp_path)
    with pytest.raises(UnknownFormat):
        Trainer(tmp_path)
    (tmp_path / "slots/table").write_bytes(before)
    assert restored(tmp_path) == (1, [])


def test_a_reader_beside_a_writer_gets_the_saved_bytes_or_an_error(tmp_path):
    """The slot that a reader has found may be overwritten before it is read."""
    trainer = Trainer(tmp_path)
    trainer.steps(1, 2)
    tier = access.slots(PosixFiles(), str(tmp_path))
    reader = RunReader(tier)
    old = reader.generation(2)
    trainer.steps(3, 4, 5)
    with pytest.raises((MissingBlob, SumMismatch)):
        reader.manifest(old)
    assert reader.generation().step == 5
    assert bytes(reader.bytes_of("w")[1]) == state(5)["w"]


# ---- through a mapping ------------------------------------------------------------------------------------------


def written(root: Path, files: PosixFiles, direct: bool = False) -> dict[str, bytes]:
    root.mkdir()
    trainer = Trainer(root, files, direct=direct)
    for step in (1, 2, 3, 4):
        trainer.save(step, 20_000 * step)
        trainer.run.verify(UPKEEP)
    trainer.tier.close()
    assert restored(root) == (4, [])
    return {one.name: one.read_bytes() for one in (root / "slots").iterdir()}


def test_a_mapping_leaves_the_same_bytes_as_direct_and_buffered_writes(tmp_path):
    buffered = written(tmp_path / "buffered", PosixFiles())
    assert written(tmp_path / "mapped", MappedFiles(str(tmp_path))) == buffered
    if takes_direct(str(tmp_path)):
        assert written(tmp_path / "direct", PosixFiles(), direct=True) == buffered


def test_every_chunk_through_a_mapping_is_synced_before_its_write_returns(tmp_path, monkeypatch):
    synced: list[tuple[int, int]] = []
    real = mapped._LIBC.msync
    monkeypatch.setattr(
        mapped._LIBC, "msync", lambda at, length, how: synced.append((at, length)) or real(at, length, how)
    )
    (tmp_path / "x").write_bytes(bytes(3 * 8192))
    file = MappedFiles(str(tmp_path)).open(str(tmp_path / "x"), "write")
    for offset in (0, 8192, 20_000):
        assert file.write_at(memoryview(bytearray(b"m" * 4000)), offset) == 4000
    assert [length for _, length in synced] == [4000, 4000, 4000 + 20_000 % 4096]
    assert not any(at % 4096 for at, _ in synced)
    with pytest.raises(OSError) as caught:
        file.write_at(memoryview(bytearray(8192)), 20_000)
    assert caught.value.errno == errno.EFBIG, "the process must not end by a bus error"
    file.reserve(40_960)
    file.write_at(memoryview(bytearray(8192)), 20_000)
    file.close()


def test_an_msync_that_failed_is_final_for_its_file(tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(bytes(8192))
    file = MappedFiles(str(tmp_path)).open(str(tmp_path / "x"), "write")

    def msync(*_: object) -> int:
        ctypes.set_errno(errno.EIO)
        return -1

    monkeypatch.setattr(mapped._LIBC, "msync", msync)
    with pytest.raises(OSError, match="msync failed"):
        file.write_at(memoryview(bytearray(4096)), 0)
    monkeypatch.undo()
    with pytest.raises(OSError, match="earlier"):
        file.sync()
    file.close()


def test_non_temporal_stores_are_fenced_by_their_own_thread(tmp_path):
    """A fence orders only the stores of its own core: a single fence by another thread at the end would not order
    them."""
    done: list[tuple[str, int]] = []

    class Library:
        def copy(self, target: int, source: int, length: int) -> None:
            ctypes.memmove(target, source, length)
            done.append(("copy", threading.get_ident()))

        def drain(self) -> None:
            done.append(("drain", threading.get_ident()))

    (tmp_path / "x").write_bytes(bytes(8192))
    file = mapped.MappedFile(PosixFiles().open(str(tmp_path / "x"), "write"), Library(), False)
    writers = [
        threading.Thread(target=file.write_at, args=[memoryview(bytearray(b"x" * 4096)), at]) for at in (0, 4096)
    ]
    for writer in writers:
        writer.start()
        writer.join()
    file.close()
    assert [call for call, _ in done] == ["copy", "drain"] * 2
    assert done[0][1] == done[1][1] and done[2][1] == done[3][1]
    assert (tmp_path / "x").read_bytes() == b"x" * 8192


def test_persistent_memory_without_libpmem_is_refused_with_the_package(tmp_path, monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(mapped.ctypes, "CDLL", missing)
    monkeypatch.setattr(mapped, "on_pmem", lambda _: True)
    with pytest.raises(Refused, match="apt-get install libpmem1"):
        MappedFiles(str(tmp_path))


@pytest.fixture(scope="module")
def libpmem() -> None:
    try:
        ctypes.CDLL("libpmem.so.1")
    except OSError:
        pytest.skip("needs libpmem: apt-get install libpmem1")


@pytest.fixture
def in_memory() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"lastgood-test-{os.getpid()}"
    if not os.access(folder.parent, os.W_OK):
        pytest.skip("needs a tmpfs at /dev/shm")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@pytest.mark.root
def test_non_temporal_stores_write_the_same_bytes(libpmem, in_memory, monkeypatch):
    monkeypatch.setenv("PMEM_IS_PMEM_FORCE", "1")
    buffered = written(in_memory / "buffered", PosixFiles())
    assert written(in_memory / "stores", MappedFiles(str(in_memory), pmem=True)) == buffered


# ---- opening a run in slots -------------------------------------------------------------------------------------


@pytest.mark.parametrize("persist", ["direct", "mmap"])
def test_a_run_in_slots_is_opened_by_its_path(tmp_path, persist):
    path = f"slots://{tmp_path}/run"
    with access.for_writing(path, "atomic_dirsync", in_flight=2, persist=persist) as tier:
        run = RunWriter(tier, Inline())
        save(run, 1, state(1))
        run.verify(UPKEEP)
        run.clean()
    reader = RunReader(access.for_reading(path))
    assert reader.generation().verified and reader.verify().good and reader.tier.place == path
    assert bytes(reader.bytes_of("w")[1]) == state(1)["w"]
    assert lengths(tmp_path / "run").keys() == {"table", "00", "01", "02", "03"}


def test_the_command_line_accepts_a_run_in_slots(tmp_path, capsys):
    path = f"slots://{tmp_path}/run"
    with access.for_writing(path, "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline())
        for step in (1, 2):
            save(run, step, state(step))
            run.verify(UPKEEP)
            run.clean()
    for command in (["ls", path], ["show", path], ["verify", path, "--all"], ["gc", path], ["ls", path]):
        assert main(command) == 0
        assert "2" in (output := capsys.readouterr().out) or "deleted 0" in output
    assert main(["diff", path, "1", "2"]) == 7


def test_a_run_in_slots_and_a_run_in_directories_are_never_confused(tmp_path):
    in_slots, in_directories = tmp_path / "slots", tmp_path / "directories"
    for path, root in ((f"slots://{in_slots}", in_slots), (str(in_directories), in_directories)):
        with access.for_writing(path, "atomic_dirsync") as tier:
            save(RunWriter(tier, Inline()), 1, state(1))
        assert root.is_dir()
    for path, right in ((str(in_slots), "slots://"), (f"slots://{in_directories}", "directories")):
        with pytest.raises(NotARun, match=f"Open it as .*{right}"):
            access.for_reading(path)
        with pytest.raises(NotARun, match=f"Open it as .*{right}"), access.for_writing(path, "atomic_dirsync"):
            pass


def test_a_failed_write_at_close_is_reported_and_the_lock_released(tmp_path):
    """Failed writes of pointers in close() were once not reported."""
    path = f"slots://{tmp_path}"
    with pytest.raises(TierDown, match="injected"), access.for_writing(path, "atomic_dirsync") as tier:
        run = RunWriter(tier, Inline())
        save(run, 1, state(1))
        run.verify(UPKEEP)

        def write(*_: object) -> None:
            raise OSError(errno.EIO, "injected")

        tier._tables._overwrite = write
    with pytest.raises(KeyError), access.for_writing(path, "atomic_dirsync") as tier:
        tier.point("LASTGOOD.json", b"x", f"gen/{next(iter(tier.list('gen')))}")
        tier._tables._overwrite = write
        raise KeyError("the error that ended the loop")
    assert restored(tmp_path) == (1, [])


def test_options_for_directories_are_refused_for_slots(tmp_path):
    with pytest.raises(Refused, match="write_mode"), access.for_writing(f"slots://{tmp_path}", "unsafe"):
        pass
    with pytest.raises(Refused, match="persist"), access.for_writing(tmp_path, "atomic_dirsync", persist="mmap"):
        pass
    with pytest.raises(NotARun, match="absolute"):
        access.for_reading("slots://runs/here")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("how", ["--short", "--buffered", "--threads=2"])
def test_random_sequences_of_saves_on_slots_keep_the_promises(tmp_path, how):
    run, ledger = tmp_path / "run", Ledger(tier="slots")
    for seed in (1, 2, 3):
        lines: list[str] = []
        code = live([str(run), "--tier=slots", f"--seed={seed}", how], lines.append)
        ledger.read(lines)
        ledger.judge(str(run))
        assert (code, ledger.problems, litter(str(run))) == (0, [], [])
    assert len(ledger.verified) == 9


# ---- through the public functions ------------------------------------------------------------------------------


def training(root: Path, steps: range, **options: Any) -> tuple[dict[str, Any], list[float]]:
    """Train the steps that are left. Returns the state, and the loss of each step."""
    losses = []
    torch.manual_seed(0)
    net = torch.nn.Linear(50, 50)
    state = {"net": net, "opt": torch.optim.AdamW(net.parameters(), lr=0.1)}
    with lastgood.Checkpointer(f"slots://{root}", state, cadence=lastgood.Every(steps=1), **options) as ckpt:
        assert ckpt.restore().step == steps.start
        for n in steps:
            loss = net(torch.randn(4, 50)).square().mean()
            loss.backward()
            losses.append(loss.item())
            state["opt"].step()
            state["opt"].zero_grad()
            ckpt.step(n + 1)
    return state, losses


@pytest.mark.parametrize("persist", ["direct", "mmap"])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_training_in_slots_continues_bit_for_bit(tmp_path: Path, persist: str, in_flight: int) -> None:
    whole, losses = training(tmp_path / "whole", range(20), persist=persist, in_flight=in_flight)
    _, before = training(tmp_path / "cut", range(9), persist=persist, in_flight=in_flight)
    cut, after = training(tmp_path / "cut", range(9, 20), persist=persist, in_flight=in_flight)
    assert before + after == losses
    assert torch.equal(whole["net"].weight, cut["net"].weight)
    run = lastgood.open(f"slots://{tmp_path / 'cut'}")
    assert run.generations()[-1].step == 20 and run.verify(20).good
    assert len(list((tmp_path / "cut" / "slots").iterdir())) == in_flight + 2 + 1, "the slots and the table"


def test_retention_beyond_the_newest_is_refused_for_slots(tmp_path: Path) -> None:
    for keep in (lastgood.Keep(every=10), lastgood.Keep(milestones=(1,)), lastgood.Keep(best=("loss", "min", 1))):
        with pytest.raises(Refused, match=r"keep the newest only.*into a directory"):
            lastgood.Checkpointer(f"slots://{tmp_path / 'run'}", {}, retention=keep)
    assert not (tmp_path / "run").exists()
    with lastgood.Checkpointer(f"slots://{tmp_path / 'run'}", {"n": 1}) as ckpt:
        with pytest.raises(Refused, match="keep the newest only"):
            ckpt.save(1, milestone=True)
        ckpt.save(1)
    with pytest.raises(Refused, match="slots"):
        lastgood.Checkpointer(tmp_path / "other", {}, persist="mmap")

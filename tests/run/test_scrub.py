"""The scrub reads old generations again, the most suspect first, within a bandwidth, and mends them where possible."""

from __future__ import annotations

import errno
import itertools
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import lastgood
from harness import State, load, reported, reports, save
from histories import at, generation
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import Cancelled, Refused, Unreadable
from lastgood.format import commit, layout
from lastgood.io import isal
from lastgood.io.files import PosixFiles
from lastgood.policy.retention import Keep
from lastgood.policy.scrub import Scrub, next_to_read
from lastgood.ports import Files
from lastgood.records import Finding
from lastgood.run.reader import RunReader
from lastgood.run.scrubber import Scrubber
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood.testing import Call, Clock, Fault, FaultyFiles

CHUNK = 8192
DATA = "r00000.safetensors"


def state(step: int) -> State:
    return {"weight": bytes([step]) * 40_000}


def run_of(root: Path, steps: int, parity: str | None = None, files: Files | None = None) -> RunWriter:
    run = RunWriter(Disk(files or PosixFiles(), str(root)), Inline(), keep=Keep(last=99), parity=parity)
    for step in range(1, steps + 1):
        save(run, step, state(step), chunk_bytes=CHUNK)
        run.verify(Arena(3 * CHUNK, CHUNK))
    return run


def scrubber(run: RunWriter, clock: Clock, rate: float = float("inf")) -> Scrubber:
    arena = Arena(3 * CHUNK, CHUNK)
    return Scrubber(
        run.known, run.mender, lambda: arena, bytes_per_second=rate, pause=clock.advance, monotonic_seconds=clock
    )


def hit(root: Path, step: int, name: str = DATA) -> None:
    (path,) = root.glob(f"gen/{step:012d}-*/{name}")
    data = bytearray(path.read_bytes())
    data[5000 % len(data)] ^= 1
    path.write_bytes(data)


def test_the_scrub_reads_the_generation_unread_for_longest_next():
    generations = [generation(step, verified=True) for step in (10, 20, 30)]
    assert next_to_read(generations, {at(10): 5.0, at(20): 3.0, at(30): 4.0}, ()) == generations[1]
    assert next_to_read(generations, {at(10): 5.0, at(20): 3.0}, ()) == generations[2], (
        "one that this process has never read comes first"
    )
    assert next_to_read([], {}, ()) is None


def test_the_neighbours_of_a_damaged_generation_are_scrubbed_first():
    generations = [generation(step, verified=True) for step in (10, 20, 40, 50, 90)]
    read_at = {one.id: float(one.step) for one in generations}
    assert next_to_read(generations, read_at, {at(45)}) == generations[2]
    order, remaining = [], list(generations)
    while (one := next_to_read(remaining, read_at, {at(30), at(100)})) is not None:
        order.append(one.step)
        remaining.remove(one)
    assert order == [20, 40, 90, 10, 50]


def test_a_scrub_round_reads_each_generation_once_then_those_near_damage(tmp_path):
    run, clock = run_of(tmp_path, 6), Clock()
    hit(tmp_path, 1)
    hit(tmp_path, 5)
    rounds = scrubber(run, clock)
    reads = [(one.generation.step, one.whole) for one in iter(rounds.scrub_next, None)]
    assert reads == [(1, False), (2, True), (3, True), (4, True), (5, False), (6, True)]
    assert [one.step for one in run.survey.generations.values() if one.damaged] == [1, 5]
    assert len(list(tmp_path.glob(f"gen/*/{layout.DAMAGED}"))) == 2
    second_round = [one.generation.step for one in iter(rounds.scrub_next, None)]
    assert second_round == [1, 2, 3, 4, 5, 6], (
        "a new round reads damaged generations again, and known damage no longer changes the order"
    )


def test_damage_moves_the_scrub_order_towards_it(tmp_path):
    run, clock = run_of(tmp_path, 6), Clock()
    rounds = scrubber(run, clock)
    list(iter(rounds.scrub_next, None))
    rounds._read_at = {one: 0.0 if one.step == 4 else 9.0 - abs(one.step - 4) for one in run.survey.generations}
    hit(tmp_path, 4)
    assert [one.generation.step for one in iter(rounds.scrub_next, None)][:3] == [4, 3, 5]


def test_the_scrub_keeps_to_its_bandwidth(tmp_path):
    run, clock = run_of(tmp_path, 2), Clock()
    rounds = scrubber(run, clock, rate=10_000.0)
    total = sum(path.stat().st_size for path in tmp_path.glob(f"gen/*/{DATA}"))
    for _ in iter(rounds.scrub_next, None):
        pass
    assert clock() == pytest.approx(total / 10_000.0)


def test_a_cancelled_scrub_of_a_generation_is_scheduled_again(tmp_path):
    run, clock = run_of(tmp_path, 2), Clock()
    rounds = scrubber(run, clock)
    with pytest.raises(Cancelled):
        rounds.scrub_next(stop=lambda: True)
    assert [one.generation.step for one in iter(rounds.scrub_next, None)] == [1, 2]


def test_a_paused_scrub_resumes_where_it_stopped(tmp_path, monkeypatch):
    """Beside frequent saves, the scrub of a large generation was restarted each time, and never reached its end."""
    run, polls, read = run_of(tmp_path, 1), itertools.count(), []
    read_into = run.tier.read_into

    def noted(extent, mv, **options):
        if extent.blob.endswith(DATA):
            read.append(extent.offset)
        read_into(extent, mv, **options)

    monkeypatch.setattr(run.tier, "read_into", noted)
    rounds, gave_way, one = scrubber(run, Clock()), 0, None
    while one is None:
        try:
            one = rounds.scrub_next(stop=lambda: next(polls) % 2 == 1)
        except Cancelled:
            gave_way += 1
    assert one.generation.step == 1 and one.whole and gave_way >= len(read) > 2
    assert read == sorted(set(read)), "no chunk is read twice"


def test_a_paused_scrub_restarts_if_its_generation_was_judged_meanwhile(tmp_path):
    run, polls, clock = run_of(tmp_path, 3), itertools.count(), Clock(5.0)
    rounds = scrubber(run, clock)
    with pytest.raises(Cancelled):
        rounds.scrub_next(stop=lambda: next(polls) == 2)
    first = run.survey.generations[min(run.survey.generations)]
    run.conclude(first, [Finding(kind="SumMismatch", what="on purpose", layer="digests")])
    reads = [(one.generation.step, one.whole) for one in iter(rounds.scrub_next, None)]
    assert reads == [(1, True), (2, True), (3, True)]
    assert not run.survey.generations[first.id].damaged, "the mark is removed"


def test_a_paused_scrub_of_a_deleted_generation_is_dropped_with_its_memory(tmp_path):
    run, polls = run_of(tmp_path, 3), itertools.count()
    arena = Arena(3 * CHUNK, CHUNK)
    rounds = Scrubber(run.known, run.mender, lambda: arena)
    with pytest.raises(Cancelled):
        rounds.scrub_next(stop=lambda: next(polls) == 2)
    assert not arena.idle
    commit.retire(run.tier, run.survey.generations.pop(min(run.survey.generations)).id)
    assert [one.generation.step for one in iter(rounds.scrub_next, None)] == [2, 3] and arena.idle
    polls = itertools.count()
    with pytest.raises(Cancelled):
        rounds.scrub_next(stop=lambda: next(polls) == 2)
    rounds.close()
    assert arena.idle


def test_the_scrub_rebuilds_damage_from_parity_and_damaged_parity_itself(tmp_path):
    run, clock = run_of(tmp_path, 3, parity="4+2"), Clock()
    before = {path: path.read_bytes() for path in tmp_path.glob("gen/*/*")}
    hit(tmp_path, 1)
    hit(tmp_path, 2, "r00000.parity-1")
    hit(tmp_path, 3, "r00000.parity-0.json")
    done = list(iter(scrubber(run, clock).scrub_next, None))
    assert [(one.whole, one.repaired) for one in done] == [(True, True), (True, False), (True, False)]
    assert {path: path.read_bytes() for path in tmp_path.glob("gen/*/*")} == before


def test_training_scrubs_old_generations_beside_its_saves(tmp_path):
    events: list[lastgood.Event] = []
    scrub = Scrub(seconds=0.0, bytes_per_second=1e12)
    warnings = looped(tmp_path, scrub, parity="10+2", on_event=events.append)
    assert any(event.kind == "repaired" and event.step == 1 for event in events)
    assert lastgood.open(tmp_path).verify(1).good
    assert not warnings


def looped(root: Path, scrub: Scrub, **options: object) -> list[str]:
    """Make eight saves and damage the first after the second; returns the texts of the warnings."""
    net = nn.Linear(100, 100)
    with (
        reports(logging.WARNING) as texts,
        lastgood.Checkpointer(root, {"net": net}, retention=Keep(last=9), scrub=scrub, **options) as ckpt,
    ):
        ckpt.restore()
        for step in range(1, 9):
            ckpt.save(step).result()
            ckpt._pipeline._upkeep_thread.submit(int).result()  # upkeep has ended
            ckpt._pipeline._upkeep_thread.submit(int).result()  # so has the job that it submitted
            if step == 2:
                hit(root, 1)
    return texts


def test_damage_found_by_the_scrub_is_reported_in_the_training_loop(tmp_path):
    warnings = looped(tmp_path, Scrub(seconds=0.0, bytes_per_second=1e12))
    assert warnings and all("step 1 was good and does not read back any more" in one for one in warnings)


def test_the_scrub_reads_no_generation_before_its_interval_has_passed(tmp_path):
    assert looped(tmp_path, Scrub(seconds=1e9, bytes_per_second=1e12)) == []
    assert not lastgood.open(tmp_path).verify(1).good


def test_the_scrub_pauses_during_saves_and_while_the_run_closes(tmp_path):
    with lastgood.Checkpointer(tmp_path, {"net": nn.Linear(2, 2)}, scrub=Scrub(seconds=0.0)) as ckpt:
        ckpt.save(1)
        ckpt.wait()
        pipeline, upkeep = ckpt._pipeline, ckpt._pipeline.upkeep
        pipeline._scrubbing, after_save = None, upkeep.after_save

        def beside_a_save(*args: object) -> bool:
            done = after_save(*args)
            pipeline._flights.append(None)
            return done

        upkeep.after_save = beside_a_save
        pipeline._after_save()
        assert pipeline._scrubbing is None
        pipeline._flights.clear()
        upkeep.after_save, pipeline._closing = after_save, 1
        pipeline._after_save()
        assert pipeline._scrubbing is None
        pipeline._closing = 0
        pipeline._after_save()
        assert pipeline._scrubbing is not None


def test_a_restore_rebuilds_the_newest_generation_and_reports_it(tmp_path):
    net = nn.Linear(100, 100)
    with lastgood.Checkpointer(tmp_path, {"net": net}, parity="10+2") as ckpt:
        ckpt.restore()
        for step in (1, 2):
            ckpt.save(step)
            ckpt.wait()
    hit(tmp_path, 2)
    hit(tmp_path, 2, "r00000.manifest.json")
    (commit,) = tmp_path.glob(f"gen/*2-*/{layout.COMMIT}")
    commit.unlink()
    other = nn.Linear(100, 100)
    with lastgood.Checkpointer(tmp_path, {"net": other}) as ckpt, reported("was rebuilt"):
        found = ckpt.restore()
    assert found.step == 2 and found.stepped_over == [] and [step for step, _ in found.repaired] == [2]
    assert torch.equal(net.weight, other.weight)


def test_senseless_scrub_options_are_refused(tmp_path):
    for bad in ({"seconds": -1.0}, {"bytes_per_second": 0.0}):
        with pytest.raises(Refused):
            Scrub(**bad)
    with pytest.raises(Refused, match="slots"):
        lastgood.Checkpointer(f"slots://{tmp_path}", {"net": nn.Linear(2, 2)}, parity="10+2")


def test_an_unreadable_generation_does_not_stop_the_scrub_of_the_others(tmp_path):
    """One unreadable sector kept the scrub at the same generation for ever."""
    files, clock = FaultyFiles(), Clock()
    run = run_of(tmp_path, 3, files=files)
    files.inject(Fault("read", f"*/000000000002-*/{DATA}"))
    rounds, reads = scrubber(run, clock), []
    for _ in range(3):
        try:
            one = rounds.scrub_next()
            reads.append(one.generation.step if one else None)
        except Unreadable:
            reads.append("unreadable")
    assert reads == [1, "unreadable", 3]


def test_an_unreadable_sector_is_rebuilt_from_parity(tmp_path):
    files, clock = FaultyFiles(), Clock()
    run = run_of(tmp_path, 1, parity="4+2", files=files)
    (path,) = tmp_path.glob(f"gen/*/{DATA}")
    bad = path.stat().st_ino

    def fail(call: Call) -> None:
        if call.operation == "read" and os.stat(call.path).st_ino == bad:
            assert call.offset is not None and call.length is not None
            if call.offset <= 8192 < call.offset + call.length:
                raise OSError(errno.EIO, "bad sector")

    files.before = fail
    done = scrubber(run, clock).scrub_next()
    assert done is not None and done.repaired and path.stat().st_ino != bad
    assert RunReader(run.tier).verify(1).good


def test_a_damaged_run_with_parity_is_restored_without_a_parity_library(tmp_path, monkeypatch):
    run_of(tmp_path, 2, parity="4+2")
    hit(tmp_path, 2)
    monkeypatch.setattr(isal, "library", lambda: None)
    monkeypatch.setitem(sys.modules, "zfec", None)
    run = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline())
    run.mender.mend_known(None, Arena(3 * CHUNK, CHUNK))
    assert not run.mender.try_to_mend(max(run.survey.generations), Arena(3 * CHUNK, CHUNK))
    found, loaded = load(run.tier, workers=Inline())
    assert found.generation is not None and found.generation.step == 1 and loaded == state(1)


def test_a_generation_without_its_commit_is_kept_while_records_name_it(tmp_path):
    """No commit, incarnation or pointer names an abandoned generation that lost its COMMIT: the next opening deleted
    it together with its parity."""
    run = run_of(tmp_path, 3, parity="4+2")
    run.begin(min(run.survey.generations))
    save(run, 2, state(9), chunk_bytes=CHUNK)
    (path,) = tmp_path.glob(f"gen/{3:012d}-*/{layout.COMMIT}")
    before = path.read_bytes()
    path.unlink()
    reopened = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline())
    (at_three,) = (one for one in reopened.survey.witnessed if one.step == 3)
    assert reopened.mend(at_three, Arena(3 * CHUNK, CHUNK)) == [layout.COMMIT] and path.read_bytes() == before


def test_upkeep_adds_parity_to_a_newest_generation_verified_without_it(tmp_path):
    run_of(tmp_path, 2)
    run = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline(), parity="4+2")
    run.verify(Arena(3 * CHUNK, CHUNK))
    assert [len(list(folder.glob("*parity*"))) for folder in sorted(tmp_path.glob("gen/*"))] == [0, 4]

"""A disk with less space than retention needs: saves continue, and older verified generations are deleted."""

from __future__ import annotations

import contextlib
import errno
import mmap
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import lastgood
from harness import save, steps
from histories import at, generation
from lastgood.engine.arena import Arena
from lastgood.engine.inline_executor import Inline
from lastgood.errors import NoSpace
from lastgood.format import commit, layout
from lastgood.io.files import PosixFiles
from lastgood.policy.retention import Keep, under_pressure
from lastgood.run import access, disk_space
from lastgood.run.known import Environment
from lastgood.run.writer import RunWriter
from lastgood.storage.directory import Disk
from lastgood.testing import Fault, FaultyFiles
from mounts import small_tmpfs

STATE_BYTES = 20_000
MB = 1_000_000
PAGE_BYTES = mmap.PAGESIZE


def opened(root: Path, keep: Keep, states: float) -> RunWriter:
    files = FaultyFiles(capacity_bytes=int(states * (STATE_BYTES + 4096)))
    run = RunWriter(Disk(files, str(root)), Inline(), keep=keep)
    run.begin(None)
    return run


def saved(run: RunWriter, step: int, *, verify: bool = True, **options: object) -> None:
    save(run, step, {"w": bytes([step]) * STATE_BYTES}, **options)
    if verify:
        run.verify(Arena(3 * 8192, 8192))
        run.clean()


def steps_in(run: RunWriter) -> list[int]:
    return sorted(one.step for one in commit.survey(run.tier).generations)


# ---- generations that a full disk may cost -------------------------------------------------------------------------


def test_a_full_disk_deletes_everything_older_than_the_newest_verified():
    row = [generation(50), generation(40, verified=True), generation(30, verified=True), generation(20), generation(10)]
    assert under_pressure(Keep(last=3), row, []) == [at(10), at(20), at(30)]


def test_a_full_disk_deletes_nothing_while_nothing_is_verified():
    assert under_pressure(Keep(last=3), [generation(20), generation(10)], []) == []


def test_a_full_disk_deletes_no_milestone_or_best_generation():
    row = [
        generation(50, verified=True),
        generation(40, verified=True, milestone=True),
        generation(30, verified=True, metrics={"loss": 1.0}),
        generation(20, verified=True),
        generation(10, verified=True),
    ]
    assert under_pressure(Keep(last=9, every=20, best=("loss", "min", 1)), row, []) == [at(10)]


# ---- a save that finds the disk full -----------------------------------------------------------------------------


def test_keep_three_on_a_disk_for_two_states_saves_every_step(tmp_path, caplog):
    """Two of ten saves were durable, one warning was printed, and no later save succeeded."""
    run = opened(tmp_path, Keep(last=3), states=2.5)
    for step in range(1, 11):
        saved(run, step)
    assert steps_in(run) == [9, 10]
    assert caplog.text.count("is full: step 1") == 1 and caplog.text.count("is full") == 1


def test_a_deletion_for_a_full_disk_emits_an_event(tmp_path):
    events: list[lastgood.Event] = []
    files = FaultyFiles(capacity_bytes=int(2.5 * (STATE_BYTES + 4096)))
    run = RunWriter(
        Disk(files, str(tmp_path)),
        Inline(),
        keep=Keep(last=3),
        environment=Environment(emit=events.append),
    )
    run.begin(None)
    for step in (1, 2, 3):
        saved(run, step)
    assert [(one.step, one.detail) for one in events if one.kind == "deleted"] == [(1, "the disk is full")]


def test_a_full_disk_never_deletes_the_newest_verified_generation(tmp_path):
    run = opened(tmp_path, Keep(last=3), states=1.5)
    saved(run, 1)
    with pytest.raises(NoSpace):
        saved(run, 2)
    assert steps_in(run) == [1]


def test_an_unverified_generation_replaces_no_older_verified_one(tmp_path):
    run = opened(tmp_path, Keep(last=3), states=2.5)
    saved(run, 1)
    saved(run, 2, verify=False)
    with pytest.raises(NoSpace):
        saved(run, 3)
    assert steps_in(run) == [1, 2]


def test_a_full_disk_never_deletes_a_milestone(tmp_path):
    run = opened(tmp_path, Keep(last=1), states=2.5)
    saved(run, 1, milestone=True)
    saved(run, 2)
    with pytest.raises(NoSpace):
        saved(run, 3)
    assert steps_in(run) == [1, 2]


def test_a_full_disk_deletes_only_as_much_as_the_save_needs(tmp_path):
    run = opened(tmp_path, Keep(last=9), states=4.5)
    for step in (1, 2, 3, 4, 5):
        saved(run, step)
    assert steps_in(run) == [2, 3, 4, 5]


def test_a_full_disk_without_room_for_the_commit_makes_room(tmp_path):
    """Tensors and manifest took the last blocks, and COMMIT found none: every save was refused, although an older
    generation could be deleted."""
    files = FaultyFiles()
    run = RunWriter(Disk(files, str(tmp_path)), Inline(), keep=Keep(last=3))
    run.begin(None)
    for step in (1, 2):
        saved(run, step)
    files.inject(Fault("write", f"*/{layout.COMMIT}.*", errno.ENOSPC, nth=1))
    saved(run, 3)
    assert steps_in(run) == [2, 3]


@pytest.mark.parametrize("record", [layout.COMMIT, layout.VERIFIED])
def test_a_limit_on_the_length_of_files_deletes_nothing(tmp_path, record):
    """What is deleted for a file that is longer than the limit permits makes it no shorter."""
    files = FaultyFiles()
    run = RunWriter(Disk(files, str(tmp_path)), Inline(), keep=Keep(last=3))
    run.begin(None)
    for step in (1, 2):
        saved(run, step)
    files.inject(Fault("write", f"*/{record}.*", errno.EFBIG))
    with pytest.raises(NoSpace):
        saved(run, 3)
    assert {1, 2} <= {*steps_in(run)}
    assert (tmp_path / layout.POINTER).exists() and (tmp_path / layout.LINK).is_symlink()


class OtherRankIsFull:
    """The `Topic` of a save in which another rank finds no space for its part."""

    is_retry, failing = False, staticmethod(contextlib.nullcontext)

    def agree(self, *_: object) -> object:
        raise NoSpace("rank 1 found no space")

    def fail(self, error: BaseException) -> None:
        """Do nothing: no other rank waits."""


def test_a_full_disk_on_another_rank_frees_space_for_the_next_save(tmp_path):
    run = opened(tmp_path, Keep(last=9), states=9)
    for step in (1, 2, 3):
        saved(run, step)
    with pytest.raises(NoSpace):
        saved(run, 4, topic=OtherRankIsFull())
    assert steps_in(run) == [2, 3]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 12 MB."""
    mount = tmp_path / "mounted"
    mount.mkdir()
    try:
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(mount)], check=True, capture_output=True)
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("needs root and the right to mount a tmpfs")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_training_on_a_disk_for_two_states_continues_and_reports_it(small_disk, caplog):
    state = {"w": torch.zeros(1_250_000)}  # 5 MB
    with lastgood.Checkpointer(small_disk / "run", state, on_error="raise", exclude=["rng"]) as ckpt:
        ckpt.restore()
        for step in range(1, 7):
            state["w"].fill_(step)
            ckpt.save(step).result(60)
            ckpt.wait()
    assert lastgood.load(small_disk / "run", state, strict=False).step == 6
    assert "has room for 2 states" in caplog.text and "retention=Keep(last=...)" in caplog.text


@pytest.mark.parametrize("pages", [0, 1], ids=["for no mark", "for the mark alone"])
def test_a_disk_without_a_free_page_saves_every_step(tmp_path, caplog, pages):
    """A save filled the disk to the last page. Its mark could not be written, or POINTER.json not be replaced, and the
    generation that the pointer named was kept: no later save succeeded, although that one was needed no more."""
    state = {"w": torch.zeros(272_500)}
    with small_tmpfs(tmp_path / "mounted", "4m") as disk:
        run = disk / "run"
        with lastgood.Checkpointer(run, state, on_error="raise", exclude=["rng"]) as ckpt:
            ckpt.restore()
            ckpt.save(1).result(60)
            ckpt.wait()
            files = [one for one in run.glob("gen/*/*") if one.name != layout.VERIFIED]
            left = sum(one.stat().st_blocks * 512 for one in files) + pages * PAGE_BYTES
            (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - left))
            for step in range(2, 6):
                ckpt.save(step).result(60)
                ckpt.wait()
        survey = commit.survey(access.for_reading(run))
        assert max(survey.generations).step == 5
        assert survey.pointer is None or survey.pointer.step in {one.step for one in survey.generations}
    (reported,) = [one for one in caplog.messages if f"{layout.POINTER} and {layout.LINK} were deleted" in one]
    assert reported.startswith(f"the disk of {run} is full (no space left for {run}/")


# ---- reports before the disk is full -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "free", "level", "text"),
    [
        (0, 70 * MB, None, ""),
        (60 * MB, 10 * MB, None, ""),
        (0, 69 * MB, "WARNING", "room for 6 states of 10 MB"),
        (20 * MB, 5 * MB, "WARNING", "Free 45 MB"),
        (0, 19 * MB, "ERROR", "none can succeed there once it has one. Free 1 MB"),
        (10 * MB, 0, "ERROR", "none can succeed there once it has one. Free 10 MB"),
        (0, 9 * MB, "ERROR", "0 B held), so no save can succeed there. Free 11 MB"),
    ],
)
def test_the_disk_bound_is_compared_with_the_free_space(caplog, bound, free, level, text):
    """ "takes at most 35.1 MB" was printed with 12 MB of free space, and the two were never compared. Of a disk for no
    state it was said that no save after the first can succeed, also where the run had its first one."""
    disk_space.compare("/run", 10 * MB, 7, bound, free)
    assert [one.levelname for one in caplog.records] == ([level] if level else [])
    assert text in caplog.text


def test_the_first_step_compares_the_disk_bound_with_the_free_space(tmp_path, monkeypatch, caplog) -> None:
    """A disk that was too small was reported only at the first save, five minutes or hours after the start."""
    monkeypatch.setattr(disk_space, "room_bytes", lambda _: 70_000)
    state = {"w": torch.zeros(2_500)}  # 10 kB, and five blocks for header and records
    with lastgood.Checkpointer(tmp_path, state, exclude=["rng"], save_on_exit=False) as ckpt:
        ckpt.step(1)
        assert "takes at most (3 kept + 2 in flight + 2) x" in caplog.text and "has room for 2 states" in caplog.text
        ckpt.save(2)
        ckpt.step(3)
    assert caplog.text.count("takes at most") == caplog.text.count("has room for") == 1


def test_the_bound_covers_what_so_many_generations_take(tmp_path: Path, caplog) -> None:
    """Only tensors were counted: 509 kB was printed, and seven generations of a small state took 617 kB."""
    caplog.set_level("INFO")
    layers = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
    state = {"model": layers, "texts": ["a value that is no tensor"] * 500}
    with lastgood.Checkpointer(tmp_path, state) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step).result()
        ckpt.wait()
    assert steps(tmp_path) == [1, 2, 3]
    bound = re.findall(r"\+ 2\) x ([\d.]+) kB", caplog.text)[0]
    taken = sum(one.lstat().st_blocks * 512 for one in (tmp_path / "gen").rglob("*"))
    assert taken <= 3 * float(bound) * 1000 <= 1.25 * taken


def test_the_first_step_compares_the_bounds_of_places_below(tmp_path: Path, monkeypatch, caplog) -> None:
    """Saves went to a disk with room, and were copied to one without: nobody had compared that, and no line named it
    before its copies failed."""
    below = tmp_path / "below"
    monkeypatch.setattr(disk_space, "room_bytes", lambda place: 70_000 if place == str(below) else 1 << 30)
    tiers = [lastgood.Tier(tmp_path / "front"), lastgood.Tier(below, retention=lastgood.Keep(last=2))]
    with lastgood.Checkpointer(tmp_path / "home", {"w": torch.zeros(2_500)}, tiers=tiers) as ckpt:
        ckpt.step(1)
    lines = [one for one in caplog.messages if " takes " in one or "has room" in one]
    assert lines[0].startswith(f"{tmp_path}/front takes ")
    assert ", and 3 more while copies wait for a slow place below" in lines[0]
    bound, room = (one for one in lines if one.startswith(f"{below} "))
    assert "takes at most (2 kept + 2 copied) x" in bound and "has room for 1 state" in room
    assert sum(one.startswith(f"{tmp_path}/home takes ") for one in lines) == 1


def test_a_hung_place_below_holds_no_save_for_its_bound(tmp_path: Path, monkeypatch) -> None:
    """`statvfs` of a network file system below hung, and with it the report of the bounds, in which the first save
    waited."""
    below, saved_above, answered = tmp_path / "below", threading.Event(), list[bool]()

    def room_bytes(place: str) -> int:
        if place == str(below):
            answered.append(saved_above.wait(20))
        return 1 << 30

    monkeypatch.setattr(disk_space, "room_bytes", room_bytes)
    with lastgood.Checkpointer(below, {"w": torch.zeros(9)}, tiers=[lastgood.Tier(tmp_path / "front")]) as ckpt:
        ckpt.save(1).committed(60)
        saved_above.set()
    assert answered == [True] and steps(below) == [1]


def test_a_short_run_reports_the_bound_of_a_place_below(tmp_path: Path) -> None:
    """A place below may be closed before its thread has begun the report."""
    reported = list[str]()
    with lastgood.Checkpointer(tmp_path / "below", {}, tiers=[lastgood.Tier(tmp_path / "front")]) as ckpt:
        place = ckpt._pipeline.places.below[0]
        with place._changed:
            place._closing = True
            place.report_first(lambda: reported.append("the bound"))
    assert reported == ["the bound"]


def test_a_save_that_can_never_fit_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a state that had grown beyond the disk, all older generations were deleted, and the save was refused all
    the same."""
    run = opened(tmp_path, Keep(last=5), 10)
    for step in range(1, 6):
        saved(run, step)
    monkeypatch.setattr(disk_space, "room_bytes", lambda _: 0)
    assert not run.retirement.relieve(100 * STATE_BYTES)
    assert sorted(one.step for one in run.survey.generations) == [1, 2, 3, 4, 5]
    assert run.retirement.relieve(STATE_BYTES), "room is made for a save that may fit"


def test_a_milestone_on_a_full_disk_makes_room_without_holding_the_run(tmp_path: Path, monkeypatch) -> None:
    """Room was made under the lock of the run, while a verifying save acquires the two locks in the opposite order."""
    full, label, free = [True], commit.label, []

    def one_refused(*args: object) -> object:
        if full:
            full.clear()
            raise NoSpace("the disk is full")
        return label(*args)

    def is_free() -> bool:
        if taken := run.known.lock.acquire(blocking=False):
            run.known.lock.release()
        return taken

    def make_room(_: int) -> bool:
        with ThreadPoolExecutor(1) as other:
            free.append(other.submit(is_free).result())
        return True

    run = RunWriter(Disk(PosixFiles(), str(tmp_path)), Inline(), environment=Environment(make_room=make_room))
    generation = save(run, 1, {"w": bytes(STATE_BYTES)})
    monkeypatch.setattr(commit, "label", one_refused)
    assert run.label(generation.id, True, {}).commit.milestone and free == [True]

"""Several saves in flight: they may end in any order, the newest commit wins, waits are reported, nothing hangs."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import pytest
import torch

import lastgood
from harness import reported, reports
from lastgood import errors
from lastgood.coordination.single_rank import SingleTopic
from lastgood.format import commit
from lastgood.io.files import PosixFile, PosixFiles
from lastgood.loop import save_planner, saver
from lastgood.loop.save_planner import SavePlanner
from lastgood.loop.saver import Saver
from lastgood.run.chunk_queue import ChunkQueue
from lastgood.run.pipeline import Pipeline
from lastgood.run.save_handle import Save
from lastgood.snapshot import staging
from lastgood.snapshot.staging import Snapshot
from lastgood.testing import Fault

EACH = lastgood.Every(steps=1)


def build() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(50_000.0)}


def kinds(events: list[lastgood.Event], *wanted: str) -> list[tuple[str, int]]:
    return [(one.kind, one.step) for one in events if one.kind in wanted]


@pytest.fixture
def doors(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., threading.Event]]:
    """`doors(step)` is an event that delays that step until it is set: the sync of its blob, or, by the second
    argument, of its manifest, or the reservation of its blob."""
    found: dict[tuple[int, str], threading.Event] = {}
    sync, reserve = PosixFile.sync, PosixFile.reserve

    def door(step: int, suffix: str = ".safetensors") -> threading.Event:
        return found.setdefault((step, suffix), threading.Event())

    def pass_through(path: str, kinds: Sequence[str]) -> None:
        for (step, suffix), event in list(found.items()):
            if f"{step:012d}-" in path and suffix in kinds:
                assert event.wait(60)

    def delayed_sync(self: PosixFile) -> None:
        pass_through(self._path, [suffix for suffix in (".safetensors", ".manifest.json") if suffix in self._path])
        sync(self)

    def delayed_reserve(self: PosixFile, length: int) -> None:
        pass_through(self._path, ["reserve"])
        reserve(self, length)

    monkeypatch.setattr(PosixFile, "sync", delayed_sync)
    monkeypatch.setattr(PosixFile, "reserve", delayed_reserve)
    yield door
    for one in found.values():
        one.set()


def test_an_overtaken_save_is_dropped_and_its_space_is_freed(tmp_path, doors, monkeypatch):
    state, events = build(), []
    doors(1)
    opened: list[str] = []
    open_file = PosixFiles.open
    monkeypatch.setattr(PosixFiles, "open", lambda *a, **k: opened.append(a[1]) or open_file(*a, **k))
    with lastgood.Checkpointer(tmp_path, state, cadence=EACH, in_flight=2, on_event=events.append) as ckpt:
        older = ckpt.step(1)
        newer = ckpt.step(2)
        newer.result(60)
        assert not older.durable()
        doors(1).set()
        with pytest.raises(errors.Overtaken, match="step 2 was committed before step 1"):
            older.result(60)
        assert older.dropped() and older.failed() and newer.durable() and newer.written() and newer.staged()
        ckpt.wait()
    assert kinds(events, "dropped", "durable") == [("durable", 2), ("dropped", 1)]
    assert [path.name[:12] for path in (tmp_path / "gen").iterdir()] == ["000000000002"]
    assert not any("000000000001-" in path and "manifest" in path for path in opened), (
        "the overtaken save writes nothing more"
    )
    assert lastgood.load(tmp_path, build()).step == 2


def test_a_save_overtaken_just_before_its_commit_is_not_committed(tmp_path, doors):
    doors(1, ".manifest.json")
    with (
        reported("newest durable step 2 of 2; 1 save given up because a newer one", logging.INFO),
        lastgood.Checkpointer(tmp_path, build(), cadence=EACH, in_flight=2) as ckpt,
    ):
        older = ckpt.step(1)
        ckpt.step(2).result(60)
        doors(1, ".manifest.json").set()
        with pytest.raises(errors.Overtaken):
            older.result(60)
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [2]


def test_an_older_commit_does_not_overtake_the_newer_save(tmp_path, doors):
    doors(2)
    with lastgood.Checkpointer(tmp_path, build(), cadence=EACH, in_flight=2) as ckpt:
        older, newer = ckpt.step(1), ckpt.step(2)
        older.result(60)
        ckpt._pipeline._lanes.submit(int).result(60)  # the lane has finished the older save
        doors(2).set()
        assert newer.result(60).step == 2


def test_a_failed_save_stops_its_copy(tmp_path, faulty_files):
    """The copy of the failed save continued without a purpose, and the next update waited for it."""
    events: list[lastgood.Event] = []
    faulty_files.inject(Fault("reserve", "*/000000000001-*.safetensors", errno.ENOSPC))
    state = {"w": torch.zeros(1 << 20)}  # four times the arena: the copy cannot end before its save has failed
    options = {"memory": 1 << 20, "chunk": 1 << 16, "on_event": events.append}
    with lastgood.Checkpointer(tmp_path, state, **options) as ckpt, reported("NoSpace"):
        failed = ckpt.save(1)
        with pytest.raises(errors.NoSpace):
            failed.result(60)
        assert failed.staged(), "the state may change again"
        ckpt.save(2).result(60)
    assert kinds(events, "staged", "refused", "durable") == [("refused", 1), ("staged", 2), ("durable", 2)]


def test_a_copy_waiting_for_memory_ends_with_its_save_if_the_writer_hangs(tmp_path, doors, monkeypatch):
    monkeypatch.setattr(save_planner, "SMALL_BYTES", 0)
    model = torch.nn.Linear(1024, 1024)
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters())}
    door, waits = doors(1, "reserve"), threading.Event()
    wait = threading.Condition.wait

    def recording_wait(self: threading.Condition, timeout: float | None = None) -> bool:
        if self is getattr(ckpt._planner._arena, "_changed", None):
            waits.set()
        return wait(self, timeout)

    with lastgood.Checkpointer(tmp_path, state, memory=1 << 20, chunk=1 << 16) as ckpt:
        monkeypatch.setattr(threading.Condition, "wait", recording_wait)
        save = ckpt.save(1)
        assert waits.wait(60)
        (flight,) = ckpt._pipeline._flights
        flight.cancel(errors.Cancelled("by hand"))
        assert save._staged.wait(30)
        door.set()
        with reported("by hand"):
            ckpt.wait()


def test_upkeep_pauses_while_a_save_is_in_flight(tmp_path, doors):
    doors(1)
    events: list[lastgood.Event] = []
    with lastgood.Checkpointer(tmp_path, build(), in_flight=2, on_event=events.append) as ckpt:
        ckpt.save(1)
        ckpt.save(2).result(60)
        ckpt._pipeline._lanes.submit(int).result(60)  # the lane of step 2 has requested upkeep
        ckpt._pipeline._upkeep_thread.submit(int).result(60)  # and that upkeep has ended
        assert ckpt.latest() is None
        doors(1).set()
    assert kinds(events, "verified") == [("verified", 2)]


def test_surplus_is_deleted_before_the_next_save_reserves_space(tmp_path, monkeypatch):
    """After a failed deletion, or with a smaller Keep, surplus generations may be what fills the disk."""
    with lastgood.Checkpointer(tmp_path, build(), retention=lastgood.Keep(last=3)) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step)
            ckpt.wait()
    listings: list[list[str]] = []
    reserve = PosixFile.reserve

    def recording_reserve(self: PosixFile, length: int) -> None:
        listings.append(sorted(path.name[:12] for path in (tmp_path / "gen").iterdir()))
        reserve(self, length)

    monkeypatch.setattr(PosixFile, "reserve", recording_reserve)
    with lastgood.Checkpointer(tmp_path, build(), retention=lastgood.Keep(last=1)) as ckpt:
        ckpt.restore()
        ckpt.save(4).result(60)
    assert listings == [["000000000003", "000000000004"]]


@pytest.mark.parametrize("last", [1, 3])
def test_continuous_saves_verify_and_delete_so_disk_use_stays_bounded(tmp_path, doors, last):
    """Upkeep pauses while a save is in flight; here a save is always in flight."""
    doors(1)
    counts = []
    with lastgood.Checkpointer(tmp_path, build(), retention=lastgood.Keep(last=last), in_flight=2) as ckpt:
        ckpt.save(1)
        for step in range(2, 16):
            ckpt.save(step).result(60)
            counts.append(len(list((tmp_path / "gen").iterdir())))
        doors(1).set()
    assert max(counts) <= last + 2 + 2, "those kept, one in flight, and two more"


@pytest.mark.parametrize("why", ["milestone", "every", "best"])
def test_a_save_that_retention_keeps_is_committed_after_a_newer_one(tmp_path, doors, why):
    keep = lastgood.Keep(
        last=2, every=10 if why == "every" else None, best=("loss", "min", 1) if why == "best" else None
    )
    doors(10)
    with lastgood.Checkpointer(tmp_path, build(), retention=keep, in_flight=2) as ckpt:
        older = ckpt.save(10, milestone=why == "milestone", metrics={"loss": 1.0} if why == "best" else None)
        ckpt.save(11).result(60)
        doors(10).set()
        assert older.result(60).step == 10
        ckpt.wait()
    assert [one.step for one in lastgood.open(tmp_path).generations()] == [10, 11]
    found = lastgood.open(tmp_path).generation(10)
    assert found.commit.parent is None and lastgood.open(tmp_path).generation(11).commit.parent is None
    assert lastgood.load(tmp_path, build()).step == 11


def test_a_due_save_that_passes_a_multiple_is_not_overtaken(tmp_path, doors):
    """Only a save whose own step is a multiple was completed after a newer one; with others the multiple was lost."""
    keep, cadence = lastgood.Keep(last=2, every=9), lastgood.Every(steps=1)
    doors(10)
    with lastgood.Checkpointer(tmp_path, build(), retention=keep, cadence=cadence, in_flight=2) as ckpt:
        older = ckpt.step(10)
        ckpt.save(11).result(60)
        doors(10).set()
        assert older.result(60).step == 10


def test_waiting_for_a_free_lane_reports_the_seconds_waited(tmp_path, doors):
    events: list[lastgood.Event] = []
    doors(1)
    with lastgood.Checkpointer(tmp_path, build(), in_flight=1, on_event=events.append) as ckpt:
        ckpt.save(1)
        second = threading.Thread(target=lambda: (ckpt.save(2), ckpt.save(3)))
        second.start()
        doors(1).set()
        second.join(60)
        ckpt.wait()
        ckpt.step(3)
    assert ("waited", 2) in kinds(events, "waited")
    assert sorted(one.step for one in lastgood.open(tmp_path).generations()) == [1, 2, 3]


def test_when_full_skip_skips_due_saves_but_not_explicit_ones(tmp_path, doors):
    events: list[lastgood.Event] = []
    doors(1)
    every = lastgood.Every(steps=1)
    with lastgood.Checkpointer(
        tmp_path, build(), cadence=every, in_flight=1, when_full="skip", on_event=events.append
    ) as ckpt:
        first = ckpt.step(1)
        assert first is not None
        assert ckpt.step(2) is None
        doors(1).set()
        assert ckpt.save(3).result(60).step == 3
    assert kinds(events, "skipped") == [("skipped", 2)]


def test_when_full_raise_raises_and_training_may_continue(tmp_path, doors):
    doors(1)
    doors(2)
    with lastgood.Checkpointer(tmp_path, build(), in_flight=2, when_full="raise") as ckpt:
        ckpt.save(1)
        ckpt.save(2)
        with pytest.raises(errors.InFlightFull, match="step 3 was not saved: 2 saves are in flight"):
            ckpt.save(3)
        doors(1).set()
        doors(2).set()
        ckpt.wait()
        assert ckpt.save(3).result(60).step == 3


def test_a_save_with_a_known_outcome_has_freed_its_lane(tmp_path, monkeypatch):
    """The place of a save became free a moment after its result: `save(1).result(); save(2)` sometimes raised
    InFlightFull."""
    order: list[str] = []
    end, note = Pipeline._end, Save.note_outcome
    monkeypatch.setattr(Pipeline, "_end", lambda *given: (end(*given), order.append("place")))
    monkeypatch.setattr(Save, "note_outcome", lambda *given: (order.append("outcome"), note(*given)))
    with lastgood.Checkpointer(tmp_path, build(), in_flight=1, when_full="raise") as ckpt:
        ckpt.save(1).result(60)
        ckpt.save(2).result(60)
    assert order == ["place", "outcome"] * 2


def test_an_interrupted_step_is_saved_again_only_after_its_cleanup(tmp_path, monkeypatch):
    """The cleanup of the interrupted save was still running, and deleted the generation of the second one, which had
    been reported as durable."""
    begun_anew, second_waited = threading.Event(), list[bool]()
    wait_ended, retire, copy = Save.wait_ended, commit.retire, Snapshot._copy

    def waited(self: Save) -> None:
        begun_anew.set()
        wait_ended(self)

    def slow(*given: object) -> None:
        second_waited.append(begun_anew.wait(10))
        retire(*given)

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Save, "wait_ended", waited)
    monkeypatch.setattr(commit, "retire", slow)
    monkeypatch.setattr(Snapshot, "_copy", interrupted)
    # Otherwise the next save waits for the memory of this one.
    monkeypatch.setattr(SavePlanner, "interrupted", lambda self: None)
    with lastgood.Checkpointer(tmp_path, build(), staging="blocking") as ckpt:
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1)
        monkeypatch.setattr(Snapshot, "_copy", copy)
        with reported("interrupted"):
            ckpt.save(1).result(60)
            ckpt.wait()
    assert second_waited and all(second_waited)
    assert lastgood.load(tmp_path, build()).step == 1


def test_a_failure_to_start_threads_opens_nothing_and_releases_the_lock(tmp_path, monkeypatch):
    """A pool starts its threads on first use. Beside many loader workers no thread could be started, and the next
    optimizer step waited for ever for a copy that never began."""
    start, started = threading.Thread.start, []

    def scarce(self: threading.Thread) -> None:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", scarce)
    with pytest.raises(errors.Refused, match="not all threads could be started: can't start new thread"):
        lastgood.Checkpointer(tmp_path, build())
    assert not any(one.is_alive() for one in started)
    monkeypatch.setattr(threading.Thread, "start", start)
    with lastgood.Checkpointer(tmp_path, build()) as ckpt:
        monkeypatch.setattr(threading.Thread, "start", scarce)
        assert ckpt.save(1).result(60).step == 1, "no thread is started after the opening"


def test_every_end_of_a_save_frees_its_lane(tmp_path, monkeypatch):
    """A place that is not released would block the loop for ever at the next save."""
    state: dict[str, object] = dict(build())
    with lastgood.Checkpointer(tmp_path, state, in_flight=1, when_full="raise") as ckpt:
        state["bad"] = object()
        with pytest.raises(errors.Unstorable):
            ckpt.save(1)
        del state["bad"]
        ckpt.save(1).result(60)
        ckpt.wait()
        copy = staging.Snapshot._copy
        monkeypatch.setattr(staging.Snapshot, "_copy", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ckpt.save(2).result(60)
        monkeypatch.setattr(staging.Snapshot, "_copy", copy)
        with reported("ZeroDivisionError"):
            ckpt.wait()
        ckpt.save(2).result(60)


class CtrlC:
    """Raises KeyboardInterrupt before the line numbered `line` (0, 1, ...) that is executed in `functions`."""

    def __init__(self, line: int, *functions: Callable[..., object]) -> None:
        self._left, self._codes, self._before = line, {one.__code__ for one in functions}, sys.gettrace()
        self.raised = False

    def __enter__(self) -> CtrlC:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, kind: str, _: object) -> Any:
        if frame.f_code not in self._codes:
            return None
        if kind == "line" and not self.raised:
            self._left -= 1
            if self._left < 0:
                self.raised = True
                raise KeyboardInterrupt
        return self._trace


def test_an_interrupted_save_is_cancelled_although_its_copy_ends() -> None:
    """Ctrl-C came after the copier had begun; the copy then ended well. StopIteration was reported, as a bug."""
    chunks = ChunkQueue(Save(1))
    chunks.close(errors.Cancelled("the save was interrupted"))
    chunks.close(None)
    with pytest.raises(errors.Cancelled):
        next(chunks)


@pytest.mark.parametrize("staging", ["blocking", "overlap"])
def test_ctrl_c_at_any_line_of_a_save_leaves_its_place_free(tmp_path, staging):
    """Ctrl-C between the acquisition of a place and the block that releases it left the place taken, and in_flight=1
    never saved again.

    This happens when Ctrl-C is pressed in a notebook, where the run stays open.
    """
    functions = Saver.save, Saver._wait_for_a_place, Saver._planned, Pipeline.acquire_place
    with lastgood.Checkpointer(tmp_path, build(), in_flight=1, when_full="raise", staging=staging) as ckpt:
        ckpt.save(1).result(60)
        for line in itertools.count():
            with contextlib.suppress(KeyboardInterrupt), CtrlC(line, *functions) as ctrl_c:
                ckpt.save(line + 2)
            with reports():  # of the interrupted save, if it had begun
                ckpt.wait(60)
            assert ckpt._pipeline.acquire_place(0.0), f"line {line}"
            ckpt._pipeline.release_place(0, SingleTopic(), errors.Cancelled("not started"))
            if not ctrl_c.raised:
                break
        assert line > 30, "too few lines of a save were traced"
        ckpt.save(1000).result(60)


def test_a_full_disk_is_reported_first_and_then_at_growing_intervals(tmp_path, faulty_files):
    events: list[lastgood.Event] = []
    reported_steps: list[int] = []
    with lastgood.Checkpointer(tmp_path, build(), on_event=events.append) as ckpt:
        ckpt.save(1)
        ckpt.wait()
        for n in range(2, 12):
            faulty_files.clear()
            if n != 7:
                faulty_files.inject(Fault("reserve", errno=errno.ENOSPC))
            with reports() as texts:
                ckpt.save(n)
                ckpt.wait()
            reported_steps += [n] * sum("NoSpace" in one for one in texts)
        faulty_files.clear()
    assert reported_steps == [2, 3, 5, 8, 9, 11], "the 1st, 2nd and 4th failure in a row"
    assert kinds(events, "refused") == [("refused", n) for n in range(2, 12) if n != 7]
    assert sorted(path.name[:12] for path in (tmp_path / "gen").iterdir()) == [
        "000000000007",  # step 1 was deleted to make room
        "000000000011",
    ]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize(("in_flight", "memory"), [(1, None), (2, None), (4, 1 << 20), (8, 1 << 20)])
def test_each_save_in_flight_commits_its_own_state_or_is_dropped(tmp_path, in_flight, memory):
    state = {"w": torch.zeros(200_000), "n": 0}
    keep = lastgood.Keep(last=3, every=5)
    saves = {}
    with lastgood.Checkpointer(tmp_path, state, retention=keep, in_flight=in_flight, memory=memory) as ckpt:
        for n in range(1, 41):
            state["w"].fill_(n)
            state["n"] = n
            saves[n] = ckpt.save(n)
        ckpt.wait()
        assert ckpt.latest() == 40
    run = lastgood.open(tmp_path)
    kept_steps = [one.step for one in run.generations()]
    assert kept_steps[-1] == 40 and {n for n in range(5, 41, 5)} <= set(kept_steps)
    for step in kept_steps:
        assert saves[step].durable() and bool((run.tensor("w", step) == step).all())
        assert run.verify(step).good
    assert all(one.durable() or one.dropped() for one in saves.values())


def test_threads_and_descriptors_stay_within_the_configured_bounds(tmp_path):
    threads_before = threading.active_count()
    with lastgood.Checkpointer(tmp_path, build(), in_flight=3, writers=2) as ckpt:
        for n in range(1, 30):
            ckpt.save(n)
        assert threading.active_count() - threads_before <= 3 * (1 + 2) + 1 + 1 + 3
    assert threading.active_count() == threads_before


def test_the_duration_of_a_save_starts_when_it_is_planned(tmp_path, monkeypatch):
    """Planning may wait for other ranks. A rank that had received a request to end took that wait for a slow disk,
    and did not save."""
    order, plan = list[str](), SavePlanner.plan
    monkeypatch.setattr(SavePlanner, "plan", lambda *given: (plan(*given), order.append("planned"))[0])
    monkeypatch.setattr(saver, "Save", lambda step: (order.append("begun"), Save(step))[1])
    with lastgood.Checkpointer(tmp_path, {"w": torch.zeros(2)}) as ckpt:
        ckpt.save(1).result()
    assert order == ["planned", "begun"]

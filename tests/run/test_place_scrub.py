"""While a job runs, the places below are read again: damage is found, mended or reported, and nothing waits for it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

import lastgood
from agents import ended, state, until
from harness import one_place, reported, reports, steps
from lastgood.agent import works
from lastgood.errors import Damaged, Refused, RunReplaced, Unavailable
from lastgood.format import commit, layout
from lastgood.policy.scrub import EMPTY_SECONDS, FAILED_SECONDS, Scrub, pause_seconds
from lastgood.ports import never
from lastgood.records import Extent, Finding, Generation
from lastgood.run import access, agent_link, agent_work, copying, memory_place, mend, place_scrub, reader
from lastgood.run.agent_messages import Work
from lastgood.run.agent_work import AgentWork
from lastgood.run.lower_place import LowerPlace
from lastgood.run.place_scrub import PlaceScrub, Scrubbing
from lastgood.testing import Clock
from training import Training

pytestmark = pytest.mark.slow
NEVER = Scrub(seconds=1e9, bytes_per_second=1e12)
"""A scrub that begins only when a test asks for it."""
ALWAYS = Scrub(seconds=0.0, bytes_per_second=1e12)
DATA = "r00000.safetensors"


class Home:
    """The last place of a run, in a directory or a bucket, whose bytes can be changed behind the run's back."""

    def __init__(self, url: str) -> None:
        self.url, self._in_bucket = url, "://" in url

    def at(self, step: int) -> Generation:
        return next(one for one in one_place(self.url).generations() if one.step == step)

    def flip(self, step: int, name: str = DATA) -> None:
        """Flip a bit in the middle of a file, at once: a scrub that reads meanwhile may not see a shorter file."""
        name = f"{layout.folder(self.at(step).id)}/{name}"
        data = bytearray(self._read(name))
        middle = len(data) // 2
        data[middle] ^= 1
        if self._in_bucket:
            access._objects(self.url).put(name, bytes(data))
        else:
            with Path(self.url, name).open("r+b") as file:
                os.pwrite(file.fileno(), data[middle : middle + 1], middle)

    def files(self, step: int) -> dict[str, bytes]:
        folder = layout.folder(self.at(step).id)
        return {name: self._read(f"{folder}/{name}") for name in access.for_reading(self.url).list(folder)}

    def whole(self, step: int) -> bool:
        return one_place(self.url).verify(step).good and not self.at(step).damaged

    def _read(self, name: str) -> bytes:
        if not self._in_bucket:
            return Path(self.url, name).read_bytes()
        tier = access._objects(self.url)
        data = bytearray(tier.length_of(name) or 0)
        tier.read_into(Extent(blob=name, offset=0, length=len(data)), memoryview(data))
        return bytes(data)


class Job:
    """A job that saves to memory, and with `save` in all places."""

    def __init__(self, home: Home) -> None:
        self.home, self.training, self.events = home, Training(), list[lastgood.Event]()
        self.memory = Path(memory_place.folder_of(home.url))

    def opened(self, scrub: Scrub = NEVER, **options: object) -> lastgood.Checkpointer:
        wanted = {
            "cadence": lastgood.Every(steps=1000),
            "tiers": [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1))],
            "retention": lastgood.Keep(last=9),
            "on_event": self.events.append,
            **options,
        }
        ckpt = lastgood.Checkpointer(self.home.url, self.training.state, scrub=scrub, **wanted)
        ckpt.restore()
        return ckpt

    def save(self, ckpt: lastgood.Checkpointer, *upto: int) -> None:
        for step in upto:
            self.training.step()
            ckpt.save(step).result()
        ckpt.wait()


@pytest.fixture(params=["directory", "bucket"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Home:
    return Home(request.getfixturevalue("bucket") if request.param == "bucket" else str(tmp_path / "home"))


@pytest.fixture
def job(home: Home, memory: Path) -> Job:
    return Job(home)


@pytest.fixture
def local(tmp_path: Path, memory: Path) -> Job:
    """A job whose home is a directory, for what does not depend on the kind of the home."""
    return Job(Home(str(tmp_path / "home")))


def below(ckpt: lastgood.Checkpointer) -> LowerPlace:
    return ckpt._pipeline.places.below[0]


def read_again(ckpt: lastgood.Checkpointer, count: int) -> None:
    """Read so many generations of the place below again, as its thread does. While a save is in flight it would not."""
    ckpt.wait()
    scrub = below(ckpt)._scrub
    assert scrub is not None
    for _ in range(count):
        scrub.scrub_one(never, never)


def unused(*_: object, **__: object) -> None:
    raise AssertionError("the training process reads the files itself")


# ---- damage ----------------------------------------------------------------------------------------------------


def test_damage_at_home_is_mended_from_memory_while_the_job_runs(job):
    """`scrub=` was refused with a tier in memory, and `lastgood scrub` could not open what the job had open."""
    with job.opened(ALWAYS) as ckpt:
        job.save(ckpt, 1, 2)
        before = job.home.files(2)
        job.home.flip(2)
        until(lambda: job.home.whole(2))
        assert job.home.files(2) == before
        ckpt.step(3)
    assert [(one.step, DATA in one.detail) for one in job.events if one.kind == "repaired"] == [(2, True)]


def test_damage_of_an_old_generation_at_home_is_mended_from_parity(job):
    with job.opened(ALWAYS, parity="4+2") as ckpt:
        job.save(ckpt, 1, 2, 3)
        assert steps(job.memory) == [3]
        before = job.home.files(1)
        job.home.flip(1)
        job.home.flip(2, "r00000.parity-1")
        until(lambda: job.home.whole(1) and job.home.files(1) == before)


def test_damage_in_one_place_below_is_mended_from_the_other_one(local, tmp_path):
    far = Home(str(tmp_path / "far"))
    tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1)), lastgood.Tier(far.url)]
    with local.opened(ALWAYS, tiers=tiers) as ckpt:
        local.save(ckpt, 1, 2, 3)
        assert steps(local.memory) == [3] and 1 in steps(far.url)
        far.flip(1)
        local.home.flip(2)
        until(lambda: far.whole(1) and local.home.whole(2))


def test_damage_that_nothing_can_mend_is_marked_and_raised_in_the_loop(job):
    with job.opened(ALWAYS, on_error="raise") as ckpt:
        job.save(ckpt, 1, 2, 3)
        job.home.flip(1)
        later = itertools.count(4)
        with pytest.raises(Damaged, match="step 1 was good and does not read back any more in "):
            until(lambda: ckpt.step(next(later)) and False)
        assert job.home.at(1).damaged and not job.home.at(2).damaged and not job.home.at(3).damaged


def test_damage_that_is_known_is_not_reported_again(local):
    with reports(logging.WARNING) as texts, local.opened() as ckpt:
        local.save(ckpt, 1, 2)
        local.home.flip(1)
        read_again(ckpt, 6)
    assert len([one for one in texts if "step 1 was good" in one]) == 1


@pytest.mark.parametrize("name", [layout.COMMIT, "r00000.manifest.json"])
def test_a_damaged_record_at_home_is_mended_from_memory(job, name):
    with job.opened() as ckpt:
        job.save(ckpt, 1, 2)
        before = job.home.files(2)
        job.home.flip(2, name)
        read_again(ckpt, 2)
        assert job.home.files(2) == before


def test_a_home_without_damage_is_left_as_it_is(job):
    with job.opened(parity="4+2") as ckpt:
        job.save(ckpt, 1, 2)
        before = [job.home.files(step) for step in (1, 2)]
        with reports(logging.WARNING) as texts:
            read_again(ckpt, 5)
        assert [job.home.files(step) for step in (1, 2)] == before
    assert not texts and not {one.kind for one in job.events} & {"repaired", "damaged", "not_repaired"}


# ---- who reads, and when -----------------------------------------------------------------------------------------


def test_the_agent_reads_the_home_and_this_process_does_not(job, monkeypatch):
    with job.opened() as ckpt:
        job.save(ckpt, 1, 2)
        until(lambda: state(job.memory))
        monkeypatch.setattr(mend.reader, "reading", unused)
        job.home.flip(1)
        read_again(ckpt, 3)
        assert job.home.at(1).damaged, "the agent has found it"


def test_the_agent_repairs_the_home_from_its_parity(job, monkeypatch):
    """The training process read the rest, computed what was lost, wrote it, and read everything again."""
    with job.opened(parity="4+2") as ckpt:
        job.save(ckpt, 1, 2)
        assert steps(job.memory) == [2]
        before = job.home.files(1)
        job.home.flip(1)
        with monkeypatch.context() as change:
            for module, name in ((mend.parity, "rebuild"), (mend, "read_all"), (mend.reader, "reading")):
                change.setattr(module, name, unused)
            read_again(ckpt, 3)
        assert job.home.files(1) == before and job.home.whole(1)
    assert [(one.step, DATA in one.detail) for one in job.events if one.kind == "repaired"] == [(1, True)]


def test_the_agent_copies_from_another_place_what_is_damaged_at_home(local, tmp_path, monkeypatch):
    """Memory had no such generation any more, and the training process copied it."""
    tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1)), lastgood.Tier(str(tmp_path / "far"))]
    with local.opened(tiers=tiers) as ckpt:
        local.save(ckpt, 1, 2)
        assert steps(local.memory) == [2]
        before = local.home.files(1)
        (home,) = [one for one in ckpt._pipeline.places.below if one.tier.place == local.home.url]
        monkeypatch.setattr(copying, "_complete_blob", unused)
        local.home.flip(1)
        ckpt.wait()
        for _ in range(3):
            home._scrub.scrub_one(never, never)
        assert local.home.files(1) == before and local.home.whole(1)


@pytest.mark.parametrize("name", [layout.COMMIT, DATA])
def test_a_repair_by_the_agent_names_only_what_was_damaged(local, tmp_path, monkeypatch, name):
    """The event named all files of the generation. The training process read them again, as memory had none of them."""
    tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1)), lastgood.Tier(str(tmp_path / "far"))]
    with local.opened(tiers=tiers) as ckpt:
        local.save(ckpt, 1, 2)
        (home,) = [one for one in ckpt._pipeline.places.below if one.tier.place == local.home.url]
        at = local.home.at(1).id
        local.home.flip(1, name)
        with monkeypatch.context() as change:
            change.setattr(reader, "reading", unused)
            assert home.writer.mender.mend(at, ckpt._pipeline.upkeep.arena()) == [name]
        assert local.home.whole(1)
    assert [one.detail for one in local.events if one.kind == "repaired"] == [f"{local.home.url}: {name}"]


def test_damage_in_all_places_is_no_failure_of_the_agent(local, tmp_path):
    """A warning said in each round that the agent could not copy, and that this process did it instead."""
    tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1)), lastgood.Tier(str(tmp_path / "far"))]
    with reports(logging.WARNING) as texts, local.opened(tiers=tiers) as ckpt:
        local.save(ckpt, 1, 2)
        Home(str(tmp_path / "far")).flip(1)
        local.home.flip(1)
        (home,) = [one for one in ckpt._pipeline.places.below if one.tier.place == local.home.url]
        ckpt.wait()
        for _ in range(3):
            home._scrub.scrub_one(never, never)
        assert local.home.at(1).damaged
    assert not [one for one in texts if "could not copy" in one]
    assert [one for one in local.events if one.kind == "not_repaired"]


def test_the_agent_of_a_replaced_process_repairs_nothing(bucket, memory):
    """It replaced files in a bucket that another process had opened since, and could have put back a COMMIT there."""
    job = Job(Home(bucket))
    ckpt = job.opened(parity="4+2")
    try:
        job.save(ckpt, 1, 2)
        with access.for_writing(bucket, "atomic_dirsync"):
            at = job.home.at(1).id
            job.home.flip(1)
            damaged = job.home.files(1)
            with pytest.raises(RunReplaced):
                below(ckpt).writer.mender.mend(at, ckpt._pipeline.upkeep.arena())
            assert job.home.files(1) == damaged
    finally:
        with contextlib.suppress(RunReplaced):
            ckpt.close()


def test_a_repair_of_a_process_that_rewinds_names_no_other_one(bucket, memory, monkeypatch):
    """Its own agent repaired under the order before, and the warning said that another process has opened the run."""
    job, asked = Job(Home(bucket)), agent_link.answering

    def after_a_rewind(*arguments):
        place = below(ckpt).writer.tier
        place.next_order(place.order + 1)
        return asked(*arguments)

    with reports(logging.WARNING) as texts, job.opened(parity="4+2") as ckpt:
        job.save(ckpt, 1, 2)
        job.home.flip(1)
        with monkeypatch.context() as patch:
            patch.setattr(agent_link, "answering", after_a_rewind)
            below(ckpt).writer.mender.mend(job.home.at(1).id, ckpt._pipeline.upkeep.arena())
        assert job.home.whole(1)
    assert not [one for one in texts if "another process" in one]


def test_what_parity_cannot_repair_is_read_by_the_agent_alone(local, monkeypatch):
    with reports(logging.WARNING) as texts, local.opened(parity="2+1") as ckpt:
        local.save(ckpt, 1, 2)
        for name in ("r00000.parity-0", DATA):
            local.home.flip(1, name)
        monkeypatch.setattr(mend.parity, "rebuild", unused)
        read_again(ckpt, 3)
        assert local.home.at(1).damaged and not local.home.at(2).damaged
    assert not [one for one in texts if "this process does it instead" in one]
    failed = [one.detail for one in local.events if one.kind == "not_repaired"]
    assert failed and all("BeyondRepair: " in one for one in failed)


def test_without_an_agent_this_process_reads_the_home(local):
    with local.opened() as ckpt:
        local.save(ckpt, 1, 2)
        ended(str(local.memory))
        local.home.flip(1)
        read_again(ckpt, 2)
        assert local.home.at(1).damaged and not local.home.at(2).damaged


def test_an_agent_that_dies_while_it_reads_is_replaced_by_this_process(local):
    with local.opened(Scrub(seconds=1e9, bytes_per_second=1.0)) as ckpt:
        local.save(ckpt, 1)
        local.home.flip(1)
        scrub, stops = below(ckpt)._scrub, itertools.count()
        scrub.scrub_one(lambda: next(stops) > 1, never)
        assert scrub.scrubber.reading, "the agent reads one byte a second"
        ended(str(local.memory))
        scrub.scrubber._pace._bytes_per_second = 1e12
        scrub.scrub_one(never, never)
        assert local.home.whole(1), "memory has it too"


@pytest.mark.parametrize("with_agent", [True, False], ids=["agent", "no agent"])
def test_a_slow_scrub_holds_neither_saves_nor_copies_nor_the_end(job, with_agent, monkeypatch):
    if not with_agent:
        monkeypatch.setattr(AgentWork, "reading", lambda self, tier, generation, rate, here: here())
    with job.opened(Scrub(seconds=0.0, bytes_per_second=1.0)) as ckpt:
        job.save(ckpt, 1)
        until(lambda: below(ckpt)._scrub.scrubber.reading)
        job.save(ckpt, 2, 3, 4)
        assert steps(job.home.url) == [1, 2, 3, 4]
        assert below(ckpt)._scrub.scrubber.reading, "it is the same reading still"
        ckpt.restore()


UNCLOSED = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
import lastgood
from agents import until
from training import Training
front = [lastgood.Tier("slots://" + sys.argv[2] + "/front", cadence=lastgood.Every(steps=1))]
tiers = [] if sys.argv[3] == "first" else front
scrub = lastgood.Scrub(seconds=0.0, bytes_per_second=1.0)
ckpt = lastgood.Checkpointer(sys.argv[2] + "/home", Training().state, tiers=tiers, scrub=scrub)
ckpt.restore()
ckpt.save(1).result()
pipeline = ckpt._pipeline
until(lambda: (pipeline.places.below[0]._scrub.scrubber if tiers else pipeline.upkeep._scrubber).reading)
"""


@pytest.mark.parametrize("place", ["first", "below"])
def test_a_process_that_closes_nothing_ends_beside_a_slow_scrub(tmp_path, place):
    """Beside a scrub of the first place it ended when the whole generation was read."""
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    ended_by_itself = subprocess.run([sys.executable, "-c", UNCLOSED, path, str(tmp_path), place], timeout=60)
    assert ended_by_itself.returncode == 0


def test_a_scrub_goes_on_with_its_reading_after_a_copy(local, monkeypatch):
    """The agent reads on meanwhile. Read from its beginning after each copy, a large generation would never be done."""
    begun = []
    read = agent_work.AgentWork.reading

    def noted(self, tier, generation, rate, here):
        begun.append(generation.step)
        return read(self, tier, generation, rate, here)

    monkeypatch.setattr(agent_work.AgentWork, "reading", noted)
    with local.opened(Scrub(seconds=0.0, bytes_per_second=1.0)) as ckpt:
        local.save(ckpt, 1)
        until(lambda: below(ckpt)._scrub.scrubber.reading)
        local.save(ckpt, 2, 3)
        assert begun == [1]


def test_a_generation_deleted_while_it_is_read_is_no_damage(local):
    with local.opened(Scrub(seconds=0.0, bytes_per_second=1.0), retention=lastgood.Keep(last=1)) as ckpt:
        local.save(ckpt, 1)
        until(lambda: below(ckpt)._scrub.scrubber.reading)
        with reports(logging.WARNING) as texts:
            local.save(ckpt, 2, 3)
            until(lambda: steps(local.home.url) == [3])
    assert not texts and not {one.kind for one in local.events} & {"repaired", "damaged"}


def test_a_repair_does_not_give_way_to_copies_and_saves(local, monkeypatch):
    """Cancelled by each save, it would never end: a tier in memory is saved to every few steps."""
    with local.opened() as ckpt:
        local.save(ckpt, 1)
        local.home.flip(1)
        scrub, conclude = below(ckpt)._scrub, below(ckpt).writer.marks.conclude
        busy = []
        monkeypatch.setattr(scrub, "_saving", lambda: bool(busy))
        monkeypatch.setattr(below(ckpt).writer.marks, "conclude", lambda *args: (busy.append(1), conclude(*args)))
        scrub.scrub_one(never, lambda: bool(busy))
        assert busy and local.home.whole(1)
        busy[:] = [1]
        local.home.flip(1)
        scrub.scrub_one(never, never)
        monkeypatch.setattr(scrub, "_due_at", 0.0)
        assert scrub.scrubber.reading and not scrub.is_due(), "nothing is read while a save is in flight"


def test_a_place_is_read_when_its_interval_is_over(local, monkeypatch):
    now = Clock(100.0)
    monkeypatch.setattr(place_scrub.time, "monotonic", now)
    with local.opened() as ckpt:
        writer, options = below(ckpt).writer, Scrubbing(Scrub(seconds=5.0), lambda: False)
        scrub = PlaceScrub(writer, options, AgentWork(None), ckpt._pipeline.outcomes, now.advance)
        assert not scrub.is_due()
        now.advance(5.0)
        assert scrub.is_due()
        scrub.scrub_one(never, never)
        assert not scrub.is_due()


def test_a_place_that_cannot_be_read_is_left_alone_for_a_while():
    assert pause_seconds(Scrub(seconds=0.0), True, False) == 0.0
    assert pause_seconds(Scrub(seconds=0.0), False, False) == EMPTY_SECONDS
    assert pause_seconds(Scrub(seconds=0.0), False, True) == FAILED_SECONDS
    for found, failed in ((True, False), (False, False), (False, True)):
        assert pause_seconds(Scrub(seconds=3600.0), found, failed) == 3600.0


def test_a_place_that_is_down_is_reported_and_read_later(local, monkeypatch):
    with local.opened() as ckpt:
        local.save(ckpt, 1)
        scrub = below(ckpt)._scrub

        def down(*_: object, **__: object) -> None:
            raise Unavailable("the place is down")

        with reported("the place is down"), monkeypatch.context() as change:
            change.setattr(scrub.scrubber, "_begin", down)
            scrub.scrub_one(never, never)
            ckpt.step(2)
        local.home.flip(1)
        read_again(ckpt, 2)
        assert local.home.at(1).damaged or local.home.whole(1)


# ---- the agent ---------------------------------------------------------------------------------------------------


def test_slow_scrubs_of_an_agent_hold_up_no_other_work(local, monkeypatch):
    """What was repaired in one place was read again only after the slow scrub of another, and `close` waited too."""
    with local.opened() as ckpt:
        local.save(ckpt, 1)
        (generation,) = commit.survey(ckpt._pipeline.run.tier).generations.values()
        own, begun, ends = ckpt._pipeline.run.tier.own, threading.Event(), threading.Event()

        def slow(_: object, work: Work, stopped: threading.Event) -> list[Finding]:
            if work.bytes_per_second is not None:
                begun.set()
                while not (ends.is_set() or stopped.is_set()):
                    stopped.wait(0.01)
            return []

        monkeypatch.setattr(works, "_scrubbed", slow)
        repaired = Work(at=generation.id, root=generation.root, task="scrub", place=local.home.url, of=None)
        scrub = msgspec.structs.replace(repaired, bytes_per_second=1.0)
        read = msgspec.structs.replace(repaired, task="read", place="")
        with socket.socket() as asker, works.Works(lambda: own, lambda: None) as agent:
            scrubs = [agent.begin(scrub, asker) for _ in range(works.AT_ONCE)]
            assert begun.wait(60)
            for work in (read, repaired):
                assert not agent.begin(work, asker).result(20).error
            ends.set()
            assert not any(one.result(60).error for one in scrubs)


def test_an_agent_reads_at_the_pace_that_it_is_given(local):
    with local.opened() as ckpt:
        local.save(ckpt, 1)
        generation, stopped = local.home.at(1), Stopped()
        work = Work(at=generation.id, root=generation.root, task="scrub", place="", of=None, bytes_per_second=1000.0)
        assert works._scrubbed(access.for_reading(local.home.url), work, stopped) == []
        size = sum(len(data) for name, data in local.home.files(1).items() if name == DATA)
        assert sum(stopped.waited) >= 0.9 * size / 1000.0


class Stopped(threading.Event):
    """An event that is never set, and notes how long it was waited for, without waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        self.waited.append(timeout or 0.0)
        return False


# ---- options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("front", ["disk of the node", "slots", "shared disk"])
def test_damage_below_every_kind_of_front_is_mended(tmp_path, front, disks):
    url = {"slots": f"slots://{tmp_path}/front"}.get(front, str(disks / "front"))
    tier = lastgood.Tier(url, cadence=lastgood.Every(steps=1), shared=front != "disk of the node")
    job = Job(Home(str(tmp_path / "home")))
    with job.opened(ALWAYS, tiers=[tier]) as ckpt:
        job.save(ckpt, 1, 2)
        job.home.flip(2)
        until(lambda: job.home.whole(2))


def test_slots_alone_cannot_be_scrubbed(tmp_path):
    with pytest.raises(Refused, match="slots"):
        lastgood.Checkpointer(f"slots://{tmp_path}/run", Training().state, scrub=NEVER)


@pytest.mark.parametrize("command", ["scrub", "repair", "gc"])
def test_a_command_on_a_run_that_is_open_names_what_a_job_does(local, command, call):
    """The remedy of `scrub=` was `lastgood scrub`, which a run that is open refuses."""
    with local.opened() as ckpt:
        local.save(ckpt, 1)
        code, _, err = call(command, local.home.url)
        assert code == 3 and ("retention=" if command == "gc" else "scrub=lastgood.Scrub()") in err
        assert call("verify", local.home.url, "--all")[0] == 0

"""The agent reads and copies for the training process; what it cannot do, the training process does itself."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

import lastgood
from agents import state, until
from cli_runs import writing
from harness import flip, one_place, reported, steps
from lastgood.agent import works
from lastgood.agent.server import Server
from lastgood.errors import Cancelled
from lastgood.format import commit, layout
from lastgood.io.files import Lock
from lastgood.io.reed_solomon import Code
from lastgood.ports import Tier, Upload, never
from lastgood.records import Extent, Generation
from lastgood.run import access, agent_link, memory_place, reader, verify
from lastgood.run.agent_link import PROTOCOL
from lastgood.run.agent_messages import Request, Work
from lastgood.run.agent_work import AgentWork
from lastgood.run.copying import Copying
from lastgood.run.packed import PackedTier
from lastgood.run.paths import Place
from training import Training

pytestmark = pytest.mark.slow
Ends = tuple[socket.socket, socket.socket]


class Job:
    """A run that saves every step to memory, and every tenth step at home."""

    def __init__(self, home: Path) -> None:
        self.home, self.memory, self.training = home, Path(memory_place.folder_of(home)), Training()

    def opened(self, parity: str | None = None) -> lastgood.Checkpointer:
        options = {"tiers": [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1))], "parity": parity}
        ckpt = lastgood.Checkpointer(self.home, self.training.state, cadence=lastgood.Every(steps=10), **options)
        ckpt.restore()
        return ckpt

    def save(self, ckpt: lastgood.Checkpointer, step: int) -> None:
        self.training.step()
        ckpt.save(step).committed()


@pytest.fixture
def job(tmp_path: Path, memory: Path) -> Job:
    return Job(tmp_path / "home")


@pytest.fixture
def ends_of() -> Iterator[Ends]:
    """The ends of a connection: of the agent, and of a training process."""
    agents, trainers = socket.socketpair()
    agents.setblocking(False)
    with agents, trainers:
        yield agents, trainers


def unused(*_: object, **__: object) -> None:
    raise AssertionError("the training process reads the files itself")


def test_the_training_process_reads_nothing_that_it_has_saved(job: Job, monkeypatch) -> None:
    with job.opened() as ckpt:
        for place in (verify, reader):
            monkeypatch.setattr(place, "read_all", unused)
        job.save(ckpt, 10)
        ckpt.wait()
        assert steps(job.home) == [10] and one_place(job.home).generations()[0].verified
        assert lastgood.open(f"memory://{job.memory}").generations()[-1].verified


def test_the_agent_finds_the_damage_that_this_process_finds(job: Job, monkeypatch) -> None:
    with job.opened() as ckpt:
        job.save(ckpt, 1)
        ckpt.wait()
        run = ckpt._pipeline.run
        flip(next(job.memory.glob("gen/*/*.safetensors")), -5)
        generation, arena = run.lineage()[0], ckpt._pipeline.upkeep.arena()
        expected = reader.read_all(run.tier, generation, arena, ckpt._pipeline.workers)
        monkeypatch.setattr(reader, "read_all", unused)
        found = run.known.agent.read_all(run.tier, generation, arena, ckpt._pipeline.workers, never)
        assert found and found == expected


def test_the_agent_writes_the_parity_of_what_it_has_copied(job: Job, monkeypatch) -> None:
    with job.opened(parity="2+1") as ckpt:
        monkeypatch.setattr(verify.parity, "protect", unused)
        job.save(ckpt, 10)
        ckpt.wait()
        assert [*job.home.glob("gen/*10-*/*parity*")]
        monkeypatch.undo()
    (packed,) = job.home.glob("gen/*10-*/*.safetensors")
    flip(packed, -5)
    assert not one_place(job.home).verify(10).good
    lastgood.Checkpointer(job.home, Training().state).restore(step=10)
    assert one_place(job.home).verify(10).good, "it is rebuilt from its parity"


def test_without_an_agent_the_training_process_reads_and_copies(job: Job) -> None:
    with job.opened(parity="2+1") as ckpt:
        process = state(job.memory).process
        os.kill(process, signal.SIGKILL)
        until(lambda: not os.path.exists(f"/proc/{process}/exe"))
        job.save(ckpt, 10)
        ckpt.wait()
        assert steps(job.home) == [10] and one_place(job.home).generations()[0].verified


def test_an_agent_that_hangs_is_not_waited_for(job: Job, monkeypatch) -> None:
    monkeypatch.setattr(agent_link, "ATTACH_SECONDS", 0.3)
    with job.opened() as ckpt:
        process = state(job.memory).process
        os.kill(process, signal.SIGSTOP)
        try:
            job.save(ckpt, 10)
            ckpt.wait()
            assert steps(job.home) == [10] and one_place(job.home).generations()[0].verified
        finally:
            os.kill(process, signal.SIGCONT)


def test_a_silent_agent_is_not_asked_again_at_once(job: Job, monkeypatch) -> None:
    """Each reading waited for it, and a save for the reading."""
    asked = []

    def silent(folder: str, request: Request, *_: object) -> Iterator[None]:
        asked.append(request.work.task)
        raise TimeoutError("it is silent")
        yield

    with job.opened() as ckpt:
        job.save(ckpt, 1)
        ckpt.wait()
        monkeypatch.setattr(agent_link, "answering", silent)
        run = ckpt._pipeline.run
        agent, arena = AgentWork(run.tier.own), ckpt._pipeline.upkeep.arena()
        for _ in range(2):
            assert agent.read_all(run.tier, run.lineage()[0], arena, ckpt._pipeline.workers, lambda: False) == []
    assert asked[0] == "read" and asked.count("read") == 1


@pytest.mark.parametrize("hangs", [False, True], ids=["slow", "hangs"])
def test_a_silent_agent_is_killed_only_if_it_hangs(job: Job, monkeypatch, hangs: bool) -> None:
    """Two readings without a sign of life in time were enough, on a machine with much else to do."""
    with job.opened() as ckpt:
        process, agent = state(job.memory).process, AgentWork(ckpt._pipeline.run.tier.own)
        agent._may_hang, agent._silent_until = True, time.monotonic() + 60.0
        if hangs:
            monkeypatch.setattr(agent_link, "ATTACH_SECONDS", 0.3)
            os.kill(process, signal.SIGSTOP)
        with reported("it did not answer, and was ended") if hangs else contextlib.nullcontext():
            agent.end_hung()
        monkeypatch.undo()
        assert hangs or (agent._silent_until == 0.0 and state(job.memory).process == process)
        if hangs:
            until(lambda: not os.path.exists(f"/proc/{process}/exe"))


def test_work_stops_when_its_training_process_ends(job: Job, ends_of: Ends, monkeypatch) -> None:
    """Until it has stopped, the next training process is not told that it is attached."""
    with job.opened() as ckpt:
        job.save(ckpt, 1)
        ckpt.wait()
        generation = commit.survey(ckpt._pipeline.run.tier).generations[ckpt._pipeline.run.lineage()[0].id]
    begun, noticed, ends = threading.Event(), threading.Event(), threading.Event()

    def slow(*arguments: object, **_: object) -> list[object]:
        begun.set()
        stop = arguments[4]
        while not stop():  # type: ignore[operator]
            noticed.wait(0.01)
        noticed.set()
        ends.wait(60)
        raise Cancelled("it was stopped")

    monkeypatch.setattr(works, "read_all", slow)
    woken = threading.Event()
    with works.Works(lambda: ckpt._pipeline.run.tier.own, woken.set) as agent:
        job_ = agent.begin(Work(at=generation.id, root=generation.root, task="read", place="", of=None), ends_of[0])
        assert begun.wait(60) and not agent.running()
        agent.abandon(job_)
        assert noticed.wait(60) and agent.running()
        ends.set()
        assert job_.result().error == "it was stopped" and not agent.running() and woken.wait(60)


def test_a_stalled_agent_changes_nothing_of_who_took_over(tmp_path: Path, ends_of: Ends, monkeypatch) -> None:
    """It was stopped while it wrote parity. The training process wrote it instead, and the agent removed that file when
    it went on: the generation had a record of parity, and no parity."""
    (generation,) = writing(tmp_path / "home", 1)
    name, taken = f"{layout.folder(generation.id)}/r00000.parity0", b"of the training process"

    def stalled(target: Tier, generation: Generation, rank: int, code: Code, how: Copying) -> None:
        upload = target.create(name, 1)
        ends_of[1].close()
        with access.for_sharing(tmp_path / "home", "atomic_dirsync") as other:
            other.delete(name)
            other.put_new(name, taken)
        changes = [
            lambda: target.create(f"{name}.new", 1),
            lambda: target.put_new(f"{name}.json", b""),
            lambda: target.replace(f"{layout.folder(generation.id)}/r00000.safetensors", name),
        ]
        for change in changes:
            with pytest.raises(Cancelled):
                change()
        upload.abort()
        target.delete(name)

    monkeypatch.setattr(works, "protect_part", stalled)
    place, root = str(tmp_path / "home"), generation.root
    work = Work(at=generation.id, root=root, task="protect", place=place, of=[0], code="2+1")
    with works.Works(lambda: unused(), lambda: None) as agent:
        assert agent.begin(work, ends_of[0]).result().error == "it was stopped"
    assert (tmp_path / "home" / name).read_bytes() == taken and len([*tmp_path.rglob("*parity*")]) == 1


def test_a_repair_that_nobody_waits_for_ends(job: Job, ends_of: Ends, monkeypatch) -> None:
    """The agent computed all that was lost, for minutes, and copied nothing meanwhile. The next process killed it."""
    with job.opened(parity="2+1") as ckpt:
        job.save(ckpt, 10)
        ckpt.wait()
    (packed,) = job.home.glob("gen/*10-*/*.safetensors")
    flip(packed, -5)
    (generation,) = one_place(job.home).generations()
    create, read_into, read = PackedTier.create, PackedTier.read_into, list[str]()

    def left(self: PackedTier, name: str, length: int) -> Upload:
        upload = create(self, name, length)
        ends_of[1].close()
        return upload

    def noted(self: PackedTier, extent: Extent, mv: memoryview, *, fresh: bool = False) -> None:
        if ends_of[1].fileno() < 0:
            read.append(extent.blob)
        read_into(self, extent, mv, fresh=fresh)

    monkeypatch.setattr(PackedTier, "create", left)
    monkeypatch.setattr(PackedTier, "read_into", noted)
    work = Work(at=generation.id, root=generation.root, task="repair", place=str(job.home), of=None)
    with works.Works(lambda: unused(), lambda: None) as agent:
        assert agent.begin(work, ends_of[0]).result() == works.Done(error="it was stopped")
    assert ends_of[1].fileno() < 0 and not read


def test_an_agent_waits_for_the_end_of_work_without_polling(memory: Path, monkeypatch) -> None:
    """While a work that nobody waited for any more read from a node that hung, its agent kept a processor busy."""
    folder, timeouts = str(memory / "run"), list[float | None]()
    os.mkdir(folder)
    lock = Lock(os.path.join(folder, agent_link.LOCK))
    server = Server(Place(folder, "memory"), lock, agent_link.listening(folder), 0.0, 0.0)
    work, stopped = Future[works.Done](), threading.Event()
    server._works._unfinished[work] = stopped
    stopped.set()
    select = server._selector.select

    def selected(timeout: float | None = None) -> object:
        timeouts.append(timeout)
        if len(timeouts) == 1:
            work.set_result(works.Done(error="it was stopped"))
            server._wake()
        return select(timeout)

    monkeypatch.setattr(server._selector, "select", selected)
    server.run()
    lock.close()
    assert timeouts[0] is None and not os.path.exists(folder), "then it has ended as usual"


def test_a_training_process_may_end_between_a_work_and_its_answer(job: Job, ends_of: Ends) -> None:
    """The agent ended with a KeyError then. Found by the exploring scheduler."""
    with job.opened() as ckpt:
        job.save(ckpt, 1)
        ckpt.wait()
        (generation,) = commit.survey(ckpt._pipeline.run.tier).generations.values()
    with works.Works(lambda: ckpt._pipeline.run.tier.own, lambda: None) as agent:
        ended = agent.begin(Work(at=generation.id, root=generation.root, task="read", place="", of=None), ends_of[0])
        ended.result()
        assert not agent.running()
        agent.abandon(ended)
        assert not agent.running()


def test_copies_to_slow_places_hold_up_no_reading(job: Job, ends_of: Ends, monkeypatch) -> None:
    """Copies to places below, and parity among nodes, took all threads of the agent: no save was verified meanwhile,
    for which the loop waits."""
    with job.opened() as ckpt:
        job.save(ckpt, 1)
        ckpt.wait()
        (generation,) = commit.survey(ckpt._pipeline.run.tier).generations.values()
    begun, ends = threading.Semaphore(0), threading.Event()

    def slow(*_: object) -> list[str]:
        begun.release()
        ends.wait(60)
        return []

    monkeypatch.setattr(works.copying, "pack_files", slow)
    pack = Work(at=generation.id, root=generation.root, task="pack", place="", of=None)
    with works.Works(lambda: ckpt._pipeline.run.tier.own, lambda: None) as agent:
        copies = [agent.begin(pack, ends_of[0]) for _ in range(works.AT_ONCE)]
        assert all(begun.acquire(timeout=60) for _ in copies)
        try:
            assert not agent.begin(msgspec.structs.replace(pack, task="read"), ends_of[0]).result(20).error
        finally:
            ends.set()
        assert not any(one.result(60).error for one in copies)


def test_another_generation_of_the_same_step_is_refused(job: Job) -> None:
    with job.opened() as ckpt:
        job.save(ckpt, 1)
        ckpt.wait()
        at = ckpt._pipeline.run.lineage()[0].id
        work = Work(at=at, root="0" * 32, task="read", place="", of=None)
        with contextlib.closing(agent_link.connected(str(job.memory))) as connection:
            answer = agent_link.asked(connection, Request(protocol=PROTOCOL, call="work", work=work))
        assert "another COMMIT" in answer.error and not answer.findings

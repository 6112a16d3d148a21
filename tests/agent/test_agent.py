"""The agent of a run in memory: real processes, which are killed, stopped and replaced."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

import lastgood
from agents import LIMIT_SECONDS, agent, answers, ended, state, until
from harness import flip, one_place, reported, steps
from lastgood import limits
from lastgood.cli import agent as agent_cli
from lastgood.format import layout
from lastgood.io.files import Lock
from lastgood.run import access, agent_link, agent_messages, agent_start, agent_work, lower_place, memory_place
from lastgood_lab.worlds import CONTEXT
from training import Training

pytestmark = pytest.mark.slow

EVERY = lastgood.Every(steps=1)


class Run:
    """A run that saves every step to memory, and at home at its end only."""

    def __init__(self, home: Path) -> None:
        self.home, self.training = home, Training()
        self.memory = Path(memory_place.folder_of(home))

    def opened(self, **options: object) -> lastgood.Checkpointer:
        self.training = Training()
        tiers = [lastgood.Tier("memory://", cadence=EVERY)]
        settings = {"cadence": lastgood.Every(steps=100), "tiers": tiers, **options}
        return lastgood.Checkpointer(self.home, self.training.state, **settings)

    def step(self, ckpt: lastgood.Checkpointer, n: int) -> None:
        self.training.step()
        ckpt.save(n).committed()

    def killed_at(self, last: int, fills: float | None = None, attached: bool = False) -> None:
        """Train until step `last` in another process, which is then killed. The newest step is in memory only.

        `fills`: a number that all weights have in the newest step. `attached`: whether it has an agent.
        """
        memory = os.environ[memory_place.VARIABLE]
        process = CONTEXT.Process(target=train_and_die, args=(self.home, memory, last, fills, attached))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL


def train_and_die(home: Path, memory: str, last: int, fills: float | None, attached: bool) -> None:
    os.environ[memory_place.VARIABLE] = memory
    if not attached:
        agent_link.AgentLink.check = lambda self: None
    lower_place.LowerPlace.copy_next = lambda self: None
    run = Run(home)
    ckpt = run.opened()
    for n in range(ckpt.restore().step + 1, last + 1):
        if n == last and fills is not None:
            ckpt._pipeline._upkeep_thread.submit(str).result()  # the one before is verified
            run.training.model.weight.data.fill_(fills)
        run.step(ckpt, n)
    ckpt._pipeline._work[0].result()  # the agent has its record
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def run(tmp_path: Path, memory: Path) -> Run:
    return Run(tmp_path / "home")


def newest(home: Path) -> int | None:
    with contextlib.suppress(lastgood.errors.LastgoodError):
        return one_place(home).verify().generation.step
    return None


# ---- after the training process --------------------------------------------------------------------------------


def test_the_agent_copies_what_a_killed_process_left_in_memory(run: Run) -> None:
    run.killed_at(4, attached=True)
    until(lambda: steps(run.home) == [4])
    until(lambda: state(run.memory) and not state(run.memory).missing)
    assert one_place(run.home).verify(4).good
    with run.opened() as ckpt:
        found = ckpt.restore()
    assert found.step == 4 and list(found.sources) == [f"memory://{run.memory}"]


def test_a_newest_save_that_holds_nan_does_not_cost_the_one_before(run: Run) -> None:
    """The newest save was copied, found unfit at home, and the good one before it was removed with the memory."""
    run.killed_at(3, fills=float("nan"))
    with agent(run.memory, linger_seconds=0.1) as process:
        assert process.wait(60) == 0
    assert 2 in steps(run.home)
    with run.opened() as ckpt:
        assert ckpt.restore().step == 2


def test_a_damaged_newest_save_does_not_keep_the_one_before_from_its_copy(run: Run) -> None:
    run.killed_at(3)
    (newest,) = run.memory.glob("gen/*3-*/r00000.safetensors")
    flip(newest)
    with agent(run.memory, linger_seconds=0.0):
        until(lambda: state(run.memory).missing)
        assert 2 in steps(run.home) and steps(run.memory)[-1] == 3, "memory is kept"


def test_memory_without_a_record_of_its_places_is_kept(run: Run) -> None:
    """The record was deleted before the new one was written, and the agent took that for a run without places."""
    run.killed_at(3)
    (run.memory / agent_link.SPEC).unlink()
    with agent(run.memory, linger_seconds=0.0):
        until(lambda: state(run.memory).missing)
        assert "cannot be read" in state(run.memory).missing[0]
    assert steps(run.memory)[-1] == 3


def test_a_removal_that_was_interrupted_is_finished_by_the_next_opening(run: Run) -> None:
    left = run.memory.with_name(run.memory.name + memory_place.REMOVED)
    left.mkdir(parents=True)
    left.parent.chmod(0o700)
    (left / "r00000.safetensors").write_bytes(b"1")
    with run.opened() as ckpt:
        ckpt.restore()
        run.step(ckpt, 1)
    assert not left.exists() and steps(run.home) == [1]


def test_a_job_that_opens_its_home_waits_until_an_agent_gives_way(run: Run) -> None:
    """An agent of a node that the job had left held the lock of its home, and the job did not start."""
    run.home.mkdir()
    lock = Lock(str(run.home / access.LOCK), access.AGENTS_MARK)

    wanted = access.Wanted(str(run.home))

    def gives_way() -> None:
        until(wanted)
        lock.close()

    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(gives_way)
        with run.opened() as ckpt:
            ckpt.restore()
        waiting.result()
    assert not (run.home / (access.LOCK + access.WANTED)).exists()


def test_a_start_waits_for_an_agent_that_has_not_marked_its_lock_yet(tmp_path: Path, monkeypatch) -> None:
    """Nodes were lost, and the agent of another one had just locked the home to copy to it: the new job read the empty
    lock file, took the agent for a job, and failed with RunLocked."""
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / access.LOCK
    lock = Lock(str(path))
    left = iter([lambda: path.write_bytes(access.AGENTS_MARK), lock.close])

    def waited(seconds: float) -> None:
        next(left)()

    monkeypatch.setattr(access, "lock_holder", lambda _: 1)
    monkeypatch.setattr(access.time, "sleep", waited)
    with access.for_writing(tmp_path / "run", "atomic_dirsync"):
        assert next(left, None) is None


def test_a_request_to_give_way_counts_whatever_the_clocks_show(tmp_path: Path) -> None:
    """One whose time was in the future, left by a killed process, kept an agent from the run for an hour; one of a file
    server whose clock was behind did not count at all."""
    request = tmp_path / (access.LOCK + access.WANTED)
    for hours in (-1, 1):
        request.touch()
        os.utime(request, times=(0, time.time() + 3600 * hours))
        wanted = access.Wanted(str(tmp_path))
        assert not wanted(), "nobody has renewed it since"
        os.utime(request, times=(0, time.time() + 3600 * hours + 1))
        assert wanted()
    request.unlink()
    assert not access.Wanted(str(tmp_path))()


def test_memory_is_removed_once_it_is_copied_and_no_process_comes(run: Run) -> None:
    run.killed_at(3)
    with agent(run.memory, linger_seconds=0.1) as process:
        assert process.wait(60) == 0
    assert steps(run.home) == [3] and not run.memory.exists()
    with run.opened() as ckpt:
        assert ckpt.restore().step == 3


@pytest.mark.parametrize("came", ["", "/COMMIT.json"], ids=["a save", "a commit"])
def test_a_save_that_came_while_the_agent_waited_is_copied_too(run: Run, came: str) -> None:
    """A training process that could not attach, for example in another container, had saved and was killed. Where its
    files were there before, and only its commit came, the memory was removed with it."""
    run.killed_at(3)
    (saved,) = run.memory.glob(f"gen/*3-*{came}")
    aside = run.memory.parent / saved.name
    saved.rename(aside)
    with agent(run.memory, linger_seconds=1.0) as process:
        until(lambda: state(run.memory) and 2 in steps(run.home))
        aside.rename(saved)
        assert process.wait(60) == 0
    assert steps(run.home) == [2, 3] and not run.memory.exists()


def test_files_that_did_not_fit_into_memory_are_removed_with_it(run: Run) -> None:
    run.killed_at(3)
    spilled = Path(memory_place.spill_folder(str(run.home)))
    (folder,) = run.memory.glob("gen/*3-*")
    (spilled / "gen" / folder.name).mkdir(parents=True)
    shutil.move(folder / "r00000.safetensors", spilled / "gen" / folder.name / "r00000.safetensors")
    with agent(run.memory, linger_seconds=0.1) as process:
        assert process.wait(60) == 0
    assert steps(run.home) == [3] and not spilled.exists() and not run.memory.exists()


def test_a_home_that_was_moved_is_not_made_anew_and_memory_waits(run: Run) -> None:
    run.killed_at(3)
    run.home.rename(run.home.with_name("moved"))
    with agent(run.memory, linger_seconds=0.1) as process:
        until(lambda: state(run.memory).missing)
        assert "there is nothing at" in state(run.memory).missing[0]
        assert not run.home.exists() and process.poll() is None
        run.home.with_name("moved").rename(run.home)
        assert process.wait(60) == 0
    assert steps(run.home) == [3]


def test_memory_of_a_run_whose_home_is_another_run_now_is_kept(run: Run) -> None:
    run.killed_at(3)
    shutil.rmtree(run.home)
    lastgood.save(run.home, {"n": 1})
    with agent(run.memory, linger_seconds=0.0):
        until(lambda: state(run.memory).missing)
        assert "holds another run" in state(run.memory).missing[0]
    assert steps(run.memory)[-1] == 3 and lastgood.load(run.home)["n"] == 1


def copied_by_an_agent(run: Run) -> None:
    """Let an agent copy all that is in memory. It is killed then, and the memory stays."""
    with agent(run.memory):
        until(lambda: state(run.memory) and not state(run.memory).copying)


@pytest.mark.parametrize("another", [False, True], ids=["deleted", "made anew"])
def test_the_memory_of_a_deleted_run_that_had_all_of_it_goes(run: Run, another: bool) -> None:
    """It stayed until the machine was restarted, with an agent that tried to copy it every minute."""
    run.killed_at(3)
    copied_by_an_agent(run)
    shutil.rmtree(run.home)
    if another:
        lastgood.save(run.home, {"n": 1})
    with agent(run.memory, linger_seconds=0.1) as process:
        assert process.wait(60) == 0
    assert not run.memory.exists() and (steps(run.home) == [0] if another else not run.home.exists())


def test_status_and_stop_of_a_deleted_run_that_had_all_of_it(run: Run, call, call_json) -> None:
    run.killed_at(2)
    copied_by_an_agent(run)
    shutil.rmtree(run.home)
    with agent(run.memory):
        until(lambda: state(run.memory).deleted)
        (row,) = call_json("agent", "status")[1]["runs"]
        assert (row["agent"], row["missing"], row["deleted"]) == ("waiting", [], [str(run.home)])
        assert f"at once: lastgood agent stop {run.memory}" in " ".join(call("agent", "status")[1].split())
        code, data = call_json("agent", "stop", str(run.home))
        assert code == 0 and data["removed"] and data["deleted"] == [str(run.home)] and not run.memory.exists()


def test_a_save_that_a_deleted_run_never_had_keeps_the_memory(run: Run, call, call_json) -> None:
    run.killed_at(2)
    copied_by_an_agent(run)
    run.killed_at(3)
    shutil.rmtree(run.home)
    with agent(run.memory, linger_seconds=0.0) as process:
        until(lambda: state(run.memory).absent)
        (row,) = call_json("agent", "status")[1]["runs"]
        assert row["absent"] == [str(run.home)] and row["deleted"] == []
        assert f"rm -r {run.memory} frees the memory" in " ".join(call("agent", "status")[1].split())
        code, data = call_json("agent", "stop", str(run.home))
        assert code == 5 and f"rm -r {run.memory} frees the memory" in data["todo"]
        assert steps(run.memory)[-1] == 3
        assert call_json("copy", f"memory://{run.memory}", str(run.home.with_name("kept")))[0] == 0
        shutil.rmtree(run.memory)
        assert process.wait(60) == 0
    assert steps(run.home.with_name("kept"))[-1] == 3


def test_memory_of_a_moved_run_is_not_promised_a_copy(run: Run, call) -> None:
    """`lastgood agent status` said that the next opening copies it; there was no run to open."""
    run.killed_at(2, attached=True)
    ended(str(run.memory))
    run.home.rename(run.home.with_name("moved"))
    text = " ".join(call("agent", "status")[1].split())
    assert f"it has no agent, and {run.home} is not there" in text and "Move the run back" in text
    assert "The next opening" not in text


def test_a_folder_for_memory_that_others_can_write_is_named(call, memory: Path) -> None:
    """The command said that no run has memory there, and training refused the folder."""
    folder = Path(memory_place.folder_of_user())
    assert "no run has memory in" in call("agent", "status")[1]
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert f"{folder} is not of this user alone" in " ".join(call("agent", "status")[1].split())


def test_a_folder_that_cannot_be_seen_now_counts_as_being_there(tmp_path: Path, monkeypatch) -> None:
    """An agent on a disk of NFS would end, and its work with it, because of one stale handle."""
    with contextlib.closing(Lock(str(tmp_path / "lock"))) as lock:
        assert lock.is_at(str(tmp_path / "lock")) and not lock.is_at(str(tmp_path / "other"))

        def stale(path: str) -> os.stat_result:
            raise OSError(errno.ESTALE, "Stale file handle", path)

        with monkeypatch.context() as patched:
            patched.setattr(os, "lstat", stale)
            assert lock.is_at(str(tmp_path / "lock"))


def test_memory_of_another_node_name_is_shown_for_its_run(run: Run, call_json, monkeypatch) -> None:
    """Without LASTGOOD_NODE the command denied memory that lay beside the folder in which it had looked."""
    run.killed_at(2, attached=True)
    monkeypatch.setenv("LASTGOOD_NODE", "another")
    (row,) = call_json("agent", "status", str(run.home))[1]["runs"]
    assert row["folder"] == str(run.memory) and row["bytes"] > 0


def test_memory_removed_under_a_job_has_its_agent_and_records_again(run: Run) -> None:
    """systemd removes what a user has in /dev/shm when he logs out. The old agent waited on, connected to the job, and
    the folder that the next save made had no records: once the job was killed nobody copied, `lastgood agent status`
    advised to remove the memory, and `lastgood ls` said that nothing was committed yet."""
    with run.opened() as ckpt:
        ckpt.restore()
        run.step(ckpt, 1)
        until(lambda: state(run.memory) is not None)
        process = state(run.memory).process
        ckpt.wait()
        ckpt._pipeline._upkeep_thread.submit(str).result()  # it is verified
        shutil.rmtree(run.memory)
        n = 1
        while (found := state(run.memory)) is None or found.process == process:
            n += 1
            assert n < 1000, "no other agent has come"
            run.step(ckpt, n)
            ckpt.wait()
        assert found.attached == 1
        assert {layout.HEADER, layout.PLACES, agent_link.SPEC} <= {one.name for one in run.memory.glob("*.json")}
    until(lambda: not os.path.exists(f"/proc/{process}"))


def test_a_save_that_a_deleted_run_had_lost_before_keeps_the_memory(run: Run) -> None:
    """The disk at home went back to an older snapshot after an agent had found everything there. What was noted before
    still counted when it was not mounted any more: the memory went, with the only copy of the newest save."""
    run.killed_at(3)
    copied_by_an_agent(run)
    (copy,) = run.home.glob("gen/*3-*")
    shutil.rmtree(copy)
    with contextlib.closing(Lock(str(run.home / access.LOCK))), agent(run.memory):
        until(lambda: state(run.memory).missing)
    run.home.rename(run.home.with_name("unmounted"))
    with agent(run.memory, linger_seconds=0.0) as process:
        until(lambda: process.poll() is not None or state(run.memory).absent)
        assert process.poll() is None and steps(run.memory)[-1] == 3


def test_a_home_that_another_process_writes_to_is_left_alone(run: Run) -> None:
    run.killed_at(3)
    lock = Lock(str(run.home / access.LOCK))
    with agent(run.memory, linger_seconds=0.1) as process:
        until(lambda: state(run.memory).missing)
        assert "is open for writing" in state(run.memory).missing[0]
        lock.close()
        assert process.wait(60) == 0
    assert steps(run.home) == [3]


OPENED_SINCE = "from lastgood.agent import server; server.commit_unless_held = lambda *_: ''"
"""An agent whose attempts do not see that a process has the run open, as if it had opened it since."""


@pytest.mark.parametrize("prelude", ["", OPENED_SINCE], ids=["open", "opened since"])
def test_a_run_that_is_open_keeps_its_memory_though_nobody_is_attached(run: Run, prelude: str) -> None:
    run.killed_at(3)
    lock = Lock(str(run.memory / access.LOCK))
    with agent(run.memory, linger_seconds=0.0, prelude=prelude):
        until(lambda: steps(run.home) == [3])
        with contextlib.closing(agent_link.connected(str(run.memory))) as connection:
            asked = agent_link.asked(connection, agent_messages.Request(protocol=agent_link.PROTOCOL, call="end"))
            assert asked.error == "a process has the run open"
        assert steps(run.memory)[-1] == 3
    lock.close()


def test_a_signal_ends_the_agent_and_the_memory_stays(run: Run) -> None:
    run.killed_at(3)
    with agent(run.memory) as process:
        process.terminate()
        assert process.wait(60) == 0
    assert steps(run.memory)[-1] == 3


def test_an_agent_that_a_signal_ends_names_what_only_memory_has(run: Run, tmp_path: Path) -> None:
    """A stop of its unit, or of the machine, ended it without a line, and what was in memory was lost later."""
    run.killed_at(3)
    shutil.move(run.home, tmp_path / "away")
    with agent(run.memory) as process:
        until(lambda: (now := state(run.memory)) and now.missing)
        process.terminate()
        assert process.wait(LIMIT_SECONDS) == 0 and process.stdout is not None
        printed = process.stdout.read()
    assert "has found step 3" in printed and str(run.memory) in printed


def test_a_bucket_that_another_process_opened_since_is_left_to_it(bucket: str) -> None:
    """The agent of a lost node woke up, and the job that ran elsewhere by then could not commit any more."""
    opening = access.for_writing(bucket, "atomic_dirsync")
    held = opening.__enter__()  # it ends without closing the run
    with (
        pytest.raises(lastgood.errors.RunLocked),
        access.for_writing(bucket, "atomic_dirsync", take_over=False, agent_order=held.order - 1),
    ):
        pass
    with access.for_writing(bucket, "atomic_dirsync", take_over=False, agent_order=held.order) as tier:
        assert tier.order == held.order + 1
    with pytest.raises(lastgood.errors.RunReplaced):
        opening.__exit__(None, None, None)
        held.delete("x")


# ---- beside the training process -------------------------------------------------------------------------------


def test_an_agent_that_is_killed_is_replaced_and_the_run_goes_on(run: Run) -> None:
    with run.opened() as ckpt:
        ckpt.restore()
        run.step(ckpt, 1)
        ckpt.wait()
        first = state(run.memory).process
        ended(str(run.memory))
        assert not answers(run.memory)
        with reported(r"had ended, and was started again; no save is lost.*start 2"):
            run.step(ckpt, 2)
            ckpt.wait()
        after = state(run.memory)
        assert after.attached == 1 and after.process != first
    assert steps(run.home)[-1] == 2


@pytest.mark.parametrize(("constant", "value"), [("LIVED_SECONDS", -1.0), ("RETRY_SECONDS", 0.0)])
def test_an_agent_is_replaced_each_time_it_dies(run: Run, monkeypatch, constant: str, value: float) -> None:
    """A run of weeks whose agent was killed once a day was without an agent for a thousand saves after the twelfth. And
    one whose agents had ended within seconds twenty times was without one for half a million saves."""
    monkeypatch.setattr(agent_link, constant, value)
    with run.opened() as ckpt:
        ckpt.restore()
        for step in range(1, 5):
            run.step(ckpt, step)
            ckpt.wait()
            assert state(run.memory).attached == 1, f"step {step}"
            ended(str(run.memory))


def test_an_agent_that_cannot_be_started_is_reported_and_harms_nothing(run: Run, monkeypatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")
    with reported("could not be started: .*No such file.*the run goes on"), run.opened() as ckpt:
        ckpt.restore()
        run.step(ckpt, 1)
    assert steps(run.home) == [1]


def test_an_agent_that_hangs_is_replaced_by_the_next_opening(run: Run, monkeypatch) -> None:
    run.killed_at(3, attached=True)
    process = state(run.memory).process
    os.kill(process, signal.SIGSTOP)
    monkeypatch.setattr(agent_link, "ATTACH_SECONDS", 0.5)
    with reported("is replaced: TimeoutError"), run.opened() as ckpt:
        assert ckpt.restore().step == 3
        ckpt.wait()
        assert state(run.memory).process != process


def test_an_agent_that_is_out_of_memory_harms_nothing(run: Run, monkeypatch) -> None:
    # A busy machine may keep it from its answer, which is what this is about.
    monkeypatch.setattr(agent_work, "LIFE_SECONDS", LIMIT_SECONDS)
    monkeypatch.setattr(agent_link, "ATTACH_SECONDS", LIMIT_SECONDS)
    with run.opened() as ckpt:
        ckpt.restore()
        run.step(ckpt, 1)
        ckpt.wait()
        process = state(run.memory).process
        used = int(Path(f"/proc/{process}/statm").read_text().split()[0]) * resource.getpagesize()
        # It has room for what it does anyway, and none for the buffers of a work. Without any room a thread may fail
        # while it starts; Python waits for that one for ever, and the report names a timeout.
        resource.prlimit(process, resource.RLIMIT_AS, (used + limits.CHUNK_BYTES, used + limits.CHUNK_BYTES))
        with reported("could not (copy|read) step 2 .*it instead: .*too little memory: raise the limit"):
            run.step(ckpt, 2)
            ckpt.wait()
        assert ckpt.latest() == 2
    assert steps(run.home)[-1] == 2


def test_an_agent_that_hangs_makes_nobody_wait_twice(run: Run, monkeypatch) -> None:
    """Each save waited for 20 s: a training of 200 steps did not come to its end. Then one save still did."""
    with run.opened() as ckpt:
        ckpt.restore()
        run.step(ckpt, 1)
        ckpt.wait()
        process = state(run.memory).process
        monkeypatch.setattr(agent_link, "ATTACH_SECONDS", 0.3)
        os.kill(process, signal.SIGSTOP)
        with reported("could not (copy|read) step 2 .*instead"), reported("it did not answer, and was ended"):
            run.step(ckpt, 2)
            ckpt.wait()
        monkeypatch.undo()
        until(lambda: not os.path.exists(f"/proc/{process}/exe"))
        run.step(ckpt, 3)
        ckpt.wait()
    assert steps(run.home)[-1] == 3


def test_an_agent_runs_nothing_that_lies_in_the_current_folder(run: Run, tmp_path: Path, monkeypatch) -> None:
    """It imported msgspec from there, so that anybody who could write there ran code as the user who trains."""
    (tmp_path / "msgspec.py").write_text("raise SystemExit(f'{__file__} was run')")
    monkeypatch.chdir(tmp_path)
    make(run.memory)
    assert agent_start.started(f"memory://{run.memory}") == ""
    process = state(run.memory).process
    assert os.readlink(f"/proc/{process}/cwd") == "/", "it keeps no disk from being unmounted"
    ended(str(run.memory))


@pytest.mark.parametrize("held", [False, True], ids=["unused", "open elsewhere"])
def test_a_pipe_among_the_files_of_an_agent_is_not_waited_for(run: Run, held: bool) -> None:
    """`lastgood agent status` and every opening waited for ever where a pipe lay in place of AGENT.json or the log."""
    make(run.memory)
    for name in (agent_link.SPEC, agent_start.LOG):
        os.mkfifo(run.memory / name)
    url = f"memory://{run.memory}"
    calls = f"assert agent_link.read_spec({str(run.memory)!r}) is None; print(agent_start.started({url!r}))"
    command = [sys.executable, "-c", f"from lastgood.run import agent_link, agent_start; {calls}"]
    with contextlib.ExitStack() as ends:
        for name in (agent_link.SPEC, agent_start.LOG) if held else ():
            ends.callback(os.close, os.open(run.memory / name, os.O_RDWR))
        found = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=True)
    assert agent_start.LOG in found.stdout


def test_an_agent_of_another_version_is_replaced(run: Run, monkeypatch) -> None:
    run.killed_at(3, attached=True)
    process = state(run.memory).process
    monkeypatch.setattr(agent_link, "PROTOCOL", agent_link.PROTOCOL + 1)
    with (
        reported("is replaced: .*speaks version"),
        contextlib.closing(agent_link.AgentLink(f"memory://{run.memory}")) as link,
    ):
        assert not link.attach()
    monkeypatch.undo()
    until(lambda: not answers(run.memory))
    assert not os.path.exists(f"/proc/{process}/exe") and steps(run.memory)[-1] == 3


@pytest.mark.parametrize(
    ("data", "reads"),
    [
        (b'{"protocol":6,"gone":[1]}', "version 6 of the protocol, an older one; this is version 7"),
        (b'{"protocol":8,"process":1,"attached":0,"missing":[],"new":0}', "version 8 of the protocol, a newer one"),
        (
            b'{"protocol":7,"process":1,"attached":0,"missing":[],"absent2":[]}',
            "of another version of lastgood: .*absent2",
        ),
    ],
)
def test_the_version_of_an_agent_is_compared_before_its_fields(data: bytes, reads: str) -> None:
    """An agent of another version was replaced because of a "ValidationError: unknown field `absent`"."""
    with pytest.raises(ValueError, match=reads):
        agent_messages.answer_of(data, 7)


def test_a_process_that_attaches_stops_the_copies_before_it_is_answered(run: Run) -> None:
    run.killed_at(3, attached=True)
    with run.opened() as ckpt:
        assert ckpt.restore().step == 3
        ckpt.wait()
        assert state(run.memory).attached == 1
        run.step(ckpt, 4)
    until(lambda: state(run.memory).attached == 0)
    assert steps(run.home)[-1] == 4


def test_a_fork_does_not_keep_the_agent_waiting_for_its_parent(run: Run) -> None:
    """A data-loader worker that outlived its trainer would have delayed the copies for as long as it ran."""
    run.training.step()
    with agent(make(run.memory)):
        link = agent_link.AgentLink(f"memory://{run.memory}")
        assert link.attach() and state(run.memory).attached == 1
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(sender)
            os.read(receiver, 1)
            os._exit(0)
        os.close(receiver)
        link.close()
        until(lambda: state(run.memory).attached == 0)
        os.close(sender)
        os.waitpid(child, 0)


def make(folder: Path) -> Path:
    memory_place.make(str(folder))
    return folder


# ---- the socket ------------------------------------------------------------------------------------------------


def raw(folder: Path) -> socket.socket:
    connection = agent_link.connected(str(folder))
    connection.settimeout(60)
    return connection


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"\x00\xff\xfe garbage\n", b"this is no request"),
        (b"[]\n", b"this is no request"),
        (b'{"protocol":1,"call":"\xff"}\n', b"this is no request"),
        (b'{"\xff":1}\n', b"this is no request"),
        (b'{"protocol":1,"call":"burn"}\n', b"this is no request"),
        (b'{"protocol":1,"call":"status","more":1}\n', b"this is no request"),
        (b'{"protocol":99,"call":"attach"}\n', b"and not 99"),
        (b"x" * (agent_link.MESSAGE_LIMIT_BYTES + 8192), b""),
    ],
    ids=["bytes", "list", "no text", "no name", "unknown call", "unknown field", "future version", "endless line"],
)
def test_a_garbled_request_is_answered_and_the_agent_goes_on(run: Run, sent: bytes, answer: bytes) -> None:
    with agent(make(run.memory)), contextlib.closing(raw(run.memory)) as connection:
        with contextlib.suppress(ConnectionError):  # it is closed before all of an endless line is sent
            connection.sendall(sent)
            assert answer in connection.recv(4096)
        assert state(run.memory).attached == 0


def test_another_user_is_not_served(run: Run) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with agent(make(run.memory)):
        for one in (run.memory, run.memory.parent, run.memory.parent.parent):
            one.chmod(0o755)
        (run.memory / agent_link.SOCKET).chmod(0o777)
        asked = f"""
import os, socket, sys
os.setgroups([]); os.setgid(65534); os.setuid(65534)
one = socket.socket(socket.AF_UNIX)
one.connect({str(run.memory / agent_link.SOCKET)!r})
try:
    one.sendall(b'{{"protocol":1,"call":"status"}}\\n')
    sys.exit(1 if one.recv(1) else 0)
except ConnectionError:
    pass
"""
        assert subprocess.run([sys.executable, "-c", asked], cwd="/").returncode == 0
        assert answers(run.memory)


def test_an_agent_of_another_user_is_named_and_the_run_goes_on(run: Run, monkeypatch) -> None:
    """The trainer started agents again and again, and reported "cannot be reached" without a cause."""
    with agent(make(run.memory)):
        monkeypatch.setattr(agent_link, "user_of", lambda connection: 4711)
        with reported("belongs to user 4711.*Train as one user.*The run goes on"), run.opened() as ckpt:
            ckpt.restore()
            run.step(ckpt, 1)
            ckpt.wait()
    assert steps(run.home) == [1]


def test_an_agent_that_refuses_other_users_is_named_to_them(run: Run) -> None:
    """Its socket has the mode 0600, so that nobody else can connect: that was taken for no agent, `agent status` said
    "none", and a training process tried again and again to start another one."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    with agent(make(run.memory)):
        for one in (run.memory, run.memory.parent, run.memory.parent.parent):
            one.chmod(0o755)
        asked = f"""
import os
from lastgood.errors import NotWritable
from lastgood.run import agent_link
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for call in (agent_link.status, agent_link.process_of):
    try:
        call({str(run.memory)!r})
    except NotWritable as error:
        assert "belongs to user 0" in str(error), error
    else:
        raise AssertionError(call)
"""
        done = subprocess.run([sys.executable, "-c", asked], cwd="/", capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_folder_has_one_agent(run: Run) -> None:
    with agent(make(run.memory)) as first, agent(run.memory) as second:
        assert second.wait(60) == 5
        assert first.poll() is None


# ---- the command line ------------------------------------------------------------------------------------------


def test_an_agent_in_the_foreground_reports_how_it_ended(run: Run, call_json) -> None:
    run.killed_at(2)
    code, data = call_json("agent", "run", str(run.home), "--linger", "0")
    assert code == 0 and data["removed"] and steps(run.home) == [2]


def test_status_of_a_mistyped_run_is_refused(run: Run, call, call_json) -> None:
    """It showed a memory of 0 bytes without an agent, with code 0, whatever the path was, and that of a run on a disk
    without a word later too."""
    with lastgood.Checkpointer(run.home, Training().state) as ckpt:
        ckpt.save(1)
    code, data = call_json("agent", "status", str(run.home))
    assert code == 0 and data["runs"][0]["agent"] == "none", "a run without memory is no mistake"
    assert "nothing of this run is in the memory" in " ".join(call("agent", "status", str(run.home))[1].split())
    code, data = call_json("agent", "status", f"{run.home}x")
    assert code == 3 and "there is nothing at" in data["message"]


def test_an_agent_of_a_mistyped_run_reports_it_and_fails(tmp_path: Path, memory: Path, call, caplog) -> None:
    """It served an empty memory for ten minutes without a line, and ended with code 0."""
    code, _, err = call("agent", "run", str(tmp_path / "mistyped"), "--linger", "0")
    assert "there is nothing at" in caplog.text and "waits for a training process that makes the run" in caplog.text
    assert code == 3 and "no training process has made it" in err
    assert not (tmp_path / "mistyped").exists() and not any((memory / f"lastgood-{os.geteuid()}").iterdir())


def test_an_agent_may_be_started_before_its_run_is_made(run: Run, monkeypatch, call) -> None:
    """As the unit of systemd and the sidecar of Kubernetes do."""
    real = agent_cli.serve

    def trained(*arguments: object) -> bool:
        with lastgood.Checkpointer(run.home, Training().state) as ckpt:
            ckpt.save(1)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(agent_cli, "serve", trained)
    assert call("agent", "run", str(run.home), "--linger", "0")[0] == 0


def test_an_agent_removes_no_folder_that_has_replaced_its_own(run: Run) -> None:
    with agent(make(run.memory), linger_seconds=1.0) as process:
        run.memory.rename(run.memory.with_name("moved"))
        make(run.memory)
        assert process.wait(60) == 0
    assert run.memory.exists()


def test_an_agent_of_a_disk_copies_and_removes_nothing(tmp_path: Path, call_json) -> None:
    disk, home, training = tmp_path / "disk", tmp_path / "home", Training()
    with lastgood.Checkpointer(disk, training.state) as ckpt:
        ckpt.save(1)
    shutil.copytree(disk, home)
    shutil.rmtree(home / "gen")
    place = agent_messages.CopyTo(url=str(home), keep=lastgood.Keep(last=3))
    spec = agent_messages.AgentSpec(format=layout.FORMAT, places=[place], order=0, spill=None)
    (disk / agent_link.SPEC).write_bytes(layout.encode(spec))
    code, data = call_json("agent", "run", str(disk), "--linger", "0")
    assert code == 0 and not data["removed"]
    assert steps(home) == steps(disk) == [1] and lastgood.open(home).verify(1).good


def test_an_agent_of_a_disk_ends_although_a_place_below_is_lost(tmp_path: Path, call_json) -> None:
    """It tried again every minute for ever, and nothing showed it."""
    with lastgood.Checkpointer(tmp_path / "disk", Training().state) as ckpt:
        ckpt.save(1)
    place = agent_messages.CopyTo(url=str(tmp_path / "gone"), keep=lastgood.Keep(last=3))
    spec = agent_messages.AgentSpec(format=layout.FORMAT, places=[place], order=0, spill=None)
    (tmp_path / "disk" / agent_link.SPEC).write_bytes(layout.encode(spec))
    assert call_json("agent", "run", str(tmp_path / "disk"), "--linger", "0.1")[0] == 0
    assert call_json("agent", "status", str(tmp_path / "disk"))[1]["runs"][0]["agent"] == "none"
    assert steps(tmp_path / "disk") == [1]


def test_status_shows_memory_with_and_without_an_agent(run: Run, tmp_path: Path, call_json) -> None:
    run.killed_at(2, attached=True)
    other = make(run.memory.parent / "other-000000000000")
    rows = {one["folder"]: one for one in call_json("agent", "status")[1]["runs"]}
    assert rows[str(other)]["agent"] == "none"
    assert rows[str(run.memory)]["agent"] in ("copying", "waiting") and rows[str(run.memory)]["bytes"] > 20_000


def test_status_names_the_remedy_for_memory_without_an_agent(run: Run, call) -> None:
    """Where the agent was killed too, it said "none", and nothing of the save that was there only."""
    run.killed_at(2)
    text = " ".join(call("agent", "status")[1].split())
    assert f"lastgood agent run {run.memory} copies the saves in it" in text


def test_an_agent_of_another_version_does_not_hang(run: Run, call, call_json, monkeypatch) -> None:
    """It was shown as one that does not answer, with the advice to let it go on, although it had answered."""
    run.killed_at(2, attached=True)
    process = state(run.memory).process
    monkeypatch.setattr(agent_link, "PROTOCOL", agent_link.PROTOCOL + 1)
    (row,) = call_json("agent", "status")[1]["runs"]
    assert (row["agent"], row["process"]) == ("silent", process) and "version" in row["error"]
    text = " ".join(call("agent", "status")[1].split())
    assert "an older one" in text and f"kill {process} ends it" in text and "kill -CONT" not in text
    code, _, err = call("agent", "stop", str(run.home))
    text = " ".join(err.split())
    assert code == 5 and "cannot be asked to end: it speaks" in text and f"kill {process} ends it" in text
    assert "does not answer" not in text and "kill -CONT" not in text


def test_stop_copies_removes_and_ends(run: Run, call_json) -> None:
    run.killed_at(2, attached=True)
    code, data = call_json("agent", "stop", str(run.home))
    assert code == 0, data
    assert data["removed"] and not run.memory.exists() and steps(run.home) == [2]
    assert call_json("agent", "stop", str(run.home))[0] == 3, "there is none any more"


def sealed_beside(run: Run) -> str:
    """Makes of the committed step 2 in memory a step 3 that this node has sealed, and that has no COMMIT here."""
    (committed,) = (run.memory / "gen").glob("*2-*")
    sealed = committed.with_name(committed.name.replace("2-", "3-", 1))
    shutil.copytree(committed, sealed)
    (sealed / "COMMIT.json").unlink()
    return sealed.name


def test_an_agent_that_ends_by_itself_names_what_it_gives_up(run: Run, call, caplog) -> None:
    """After its linger it removed a save that this node's rank had sealed, and only `agent stop` named such a save."""
    run.killed_at(2)
    name = sealed_beside(run)
    assert call("agent", "run", str(run.home), "--linger", "0")[0] == 0
    assert f"removed with saves that have no COMMIT: ['{name}']" in caplog.text


def test_stop_names_a_save_that_has_no_commit_here(run: Run, call) -> None:
    """Of a job on several nodes whose agents do not listen, it removed a save that this node's rank had sealed, and
    said that all was copied; later, that nobody had committed it, which this node cannot know."""
    run.killed_at(2)
    sealed_beside(run)
    with agent(run.memory):
        code, out, _ = call("agent", "stop", str(run.home))
    text = " ".join(out.split())
    assert (
        code == 0
        and "a save of which this node has no COMMIT was removed too (step 3)" in text
        and steps(run.home) == [2]
    )


HELD_ONCE = """
from lastgood.agent import server
before, held = server.Server._serve, []
def noting(self, client, line):
    if b'"end"' in line:
        held.append("a process has the run open")
    before(self, client, line)
server.Server._serve = noting
server.commit_unless_held = lambda *_: held.pop() if held else ""
"""
"""An agent that meets the lock of a killed process, not released yet, in one attempt after it was asked to end."""


def test_stop_tries_again_after_one_attempt_that_failed(run: Run, call_json) -> None:
    """Right after a kill it ended with 5 where the attempt had begun before the locks were released."""
    run.killed_at(2)
    with agent(run.memory, prelude=HELD_ONCE):
        code, data = call_json("agent", "stop", str(run.home))
        assert code == 0 and data["removed"] and steps(run.home) == [2], data


def test_stop_does_not_wait_for_an_agent_that_hangs(run: Run, call_json, monkeypatch) -> None:
    """It waited for ever, and printed nothing."""
    run.killed_at(2, attached=True)
    process = state(run.memory).process
    monkeypatch.setattr(agent_link, "ATTACH_SECONDS", 0.3)
    os.kill(process, signal.SIGSTOP)
    try:
        code, data = call_json("agent", "stop", str(run.home))
        assert code == 5 and f"kill -CONT {process}" in str(data)
        (row,) = call_json("agent", "status")[1]["runs"]
        assert (row["agent"], row["process"]) == ("silent", process)
    finally:
        os.kill(process, signal.SIGCONT)
    assert call_json("agent", "stop", str(run.home))[0] == 0


def test_stop_is_refused_while_a_training_process_is_attached(run: Run, call_json) -> None:
    with run.opened() as ckpt:
        ckpt.restore()
        ckpt.wait()
        code, data = call_json("agent", "stop", str(run.home))
        assert code == 5 and "a training process is attached" in data["message"]
        assert "End the training first" in str(data) and "rm -r" not in str(data), "not the memory of a running job"


# ---- the end of the process ------------------------------------------------------------------------------------


NEVER_CLOSED = """
import sys
import torch
import lastgood

home = sys.argv[1]
every = lastgood.Every(steps=1)
ckpt = lastgood.Checkpointer(home, {"w": torch.ones(3)}, tiers=[lastgood.Tier(home + "-front", cadence=every)])
ckpt.restore()
ckpt.save(1).committed()
"""


def test_a_process_that_never_closes_a_run_in_two_places_ends(tmp_path: Path) -> None:
    """Its thread for the copies to the second place waited for ever, and the process with it."""
    ended = subprocess.run([sys.executable, "-c", NEVER_CLOSED, str(tmp_path / "home")], timeout=90)
    assert ended.returncode == 0 and steps(tmp_path / "home") == [1]


def test_an_agent_that_answers_late_is_missed_once_it_has_ended(tmp_path: Path, monkeypatch, caplog) -> None:
    """The late answer lay unread on the connection of the training process, which therefore never saw that the agent
    had ended: none was started in its place."""
    monkeypatch.setattr(agent_link, "ATTACH_SECONDS", 0.5)
    listener, folder, late = agent_link.listening(str(tmp_path)), str(tmp_path), threading.Event()
    listener.settimeout(20)
    answer = agent_messages.Answer(protocol=agent_link.PROTOCOL, process=1, attached=1, missing=[])

    def agent_of_the_test() -> None:
        with listener, listener.accept()[0] as training:
            training.recv(4096)
            training.sendall(msgspec.json.encode(answer) + b"\n")
            with listener.accept()[0] as serving:
                serving.recv(4096)
                assert late.wait(20)
                with contextlib.suppress(OSError):
                    serving.sendall(msgspec.json.encode(answer) + b"\n")

    link = agent_link.AgentLink(folder)
    link._serve = agent_messages.Serve(job="0" * 16, key="ab" * 32, node="a", host="127.0.0.1", port=0)
    with ThreadPoolExecutor(1) as other:
        ended = other.submit(agent_of_the_test)
        assert link.attach() and "does not serve other nodes" in caplog.text
        late.set()
        ended.result()
        assert link._connection is not None and agent_link.has_ended(link._connection)
    link.close()

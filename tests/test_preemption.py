"""Preemption: a signal ends a run at its next step, with that step durable, in the time that it was given."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import lastgood
from lastgood.errors import Refused
from lastgood.rawio.files import PosixFile
from lastgood.run import places
from lastgood.train.preemption import EXIT_CODE, Asked, Preempted, Preemption

LOOP = """
import sys, torch, lastgood
from lastgood.train import preemption
preemption.SAME_SECONDS = 0.0
root, stuck = sys.argv[1], sys.argv[2] == "stuck"
net = torch.nn.Linear(4, 4)
wish = lastgood.Preemption(grace_seconds=60)
with lastgood.Checkpointer(root, {"net": net}, cadence=lastgood.Every(steps=10**6), preemption=wish) as ckpt:
    step = ckpt.restore().step
    told = False
    while True:
        if ckpt.preempted and not told:
            print("asked", flush=True)
            told = True
        if not stuck:
            step += 1
            torch.nn.init.constant_(net.weight, step)
            ckpt.step(step)
        if step == 3 or stuck and not told:
            print("going", flush=True)
"""


def trained(root: Path, how: str = "steps") -> subprocess.Popen[str]:
    """A training loop in a process of its own, under way."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP, str(root), how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "going\n"
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_run_that_is_asked_to_end_saves_its_next_step_and_leaves_with_the_documented_code(tmp_path, number):
    process = trained(tmp_path / "run")
    process.send_signal(number)
    _, told = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE == 75, told
    newest = lastgood.open(tmp_path / "run").generations()[-1]
    assert newest.step > 3 and f"step {newest.step} is durable, exit 75" in told
    net = torch.nn.Linear(4, 4)
    assert lastgood.load(tmp_path / "run", {"net": net}).step == newest.step
    assert torch.equal(net.weight, torch.full((4, 4), float(newest.step)))


def test_a_second_signal_ends_a_loop_that_comes_to_no_step_at_once(tmp_path):
    process = trained(tmp_path / "run", "stuck")
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    while process.stdout.readline() != "asked\n":
        pass
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=60)
    assert process.returncode == EXIT_CODE and "a second signal" in told


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_same_request_twice_is_one_and_the_grace_runs_from_the_first():
    clock = Clock()
    asked = Asked(Preemption(signals=[signal.SIGUSR1], grace_seconds=30), clock)
    try:
        assert asked.at is None and asked.left_seconds == 30
        os.kill(os.getpid(), signal.SIGUSR1)
        clock.now += 0.9  # a launcher passes on what the whole process group had
        os.kill(os.getpid(), signal.SIGUSR1)
        assert asked.at == 100.0 and asked.left_seconds == pytest.approx(29.1)
        clock.now += 100
        assert asked.left_seconds == 0
    finally:
        asked.close()


def test_a_worker_that_was_forked_dies_of_the_signal_as_ever():
    """Story: data loaders end their workers with SIGTERM; one that only took note of it would hang for ever."""
    asked = Asked(Preemption())
    try:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert asked.at is None
    finally:
        asked.close()


def test_whoever_handled_the_signals_does_so_again_after_the_end(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(2)}, preemption=Preemption()):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_of_the_main_thread_it_is_refused_and_the_run_is_let_go(tmp_path):
    found: list[BaseException] = []

    def open_it() -> None:
        try:
            lastgood.Checkpointer(tmp_path / "run", {"w": torch.zeros(2)}, preemption=Preemption())
        except Refused as error:
            found.append(error)

    thread = threading.Thread(target=open_it)
    thread.start()
    thread.join()
    assert "main thread" in str(found[0])
    with places.for_writing(tmp_path / "run", "atomic_dirsync"):
        pass


@pytest.mark.parametrize("wrong", [{"signals": ()}, {"grace_seconds": 0}, {"exit_code": 256}])
def test_a_preemption_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(Refused):
        Preemption(**wrong)


def opened(root: Path, grace_seconds: float = 60.0, **options) -> lastgood.Checkpointer:
    wish = Preemption(grace_seconds=grace_seconds)
    cadence = lastgood.Every(steps=10**6)
    return lastgood.Checkpointer(root, {"w": torch.zeros(2)}, cadence=cadence, preemption=wish, **options)


def ask(ckpt: lastgood.Checkpointer) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
    assert ckpt.preempted


def test_a_save_of_this_step_that_is_under_way_is_waited_for_and_not_made_twice(tmp_path):
    with pytest.raises(Preempted) as ended, opened(tmp_path / "run") as ckpt:
        ckpt.save(1)
        ask(ckpt)
        ckpt.step(1)
    assert ended.value.durable == 1 and [one.step for one in lastgood.open(tmp_path / "run").generations()] == [1]


def test_a_save_that_could_not_be_durable_in_time_is_not_begun(tmp_path):
    with pytest.raises(Preempted) as ended, opened(tmp_path / "run") as ckpt:
        save = ckpt.save(1)
        save.result()
        save._begun -= 1000.0  # it took that long
        ask(ckpt)
        ckpt.step(2)
    assert ended.value.durable == 1 and [one.step for one in lastgood.open(tmp_path / "run").generations()] == [1]


@pytest.mark.parametrize("when_full", ["wait", "skip", "raise"])
def test_a_disk_that_hangs_does_not_outlast_the_grace_and_costs_nothing_that_was_durable(
    tmp_path, monkeypatch, when_full, capsys
):
    hangs, sync = threading.Event(), PosixFile.sync
    monkeypatch.setattr(PosixFile, "sync", lambda self: (hangs.wait(), sync(self))[1])
    hangs.set()
    ckpt = opened(tmp_path / "run", grace_seconds=0.3, in_flight=1, when_full=when_full)
    try:
        ckpt.save(1).result()
        ckpt.wait()
        hangs.clear()
        ckpt.save(2)
        ask(ckpt)
        begun = time.monotonic()
        with pytest.raises(Preempted) as ended:
            ckpt.step(3)
        assert time.monotonic() - begun < 20 and ended.value.durable == 1
        assert "step 1 is durable" in capsys.readouterr().err
    finally:
        hangs.set()
        ckpt.close()

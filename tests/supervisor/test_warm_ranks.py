"""`lastgood run --warm-ranks`: processes that wait for the next attempt while ranks train."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from lastgood.errors import Refused
from lastgood.supervisor import ahead, arguments
from lastgood.supervisor.ahead import READY, Ahead

SUPERVISOR = [str(Path(sys.executable).with_name("lastgood")), "run"]

TRAINING = '''
import os, signal, sys, time
import torch, torch.distributed as dist
import lastgood

run, kills = sys.argv[1], int(sys.argv[2])


def command(pid):
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()


def children():
    """The processes that were forked as this one was."""
    found = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as file:
                parent = file.read().rpartition(")")[2].split()[1]
            if int(parent) == os.getppid() and command(pid) == command("self"):
                found.add(int(pid))
        except OSError:
            continue
    return found


dist.init_process_group("gloo")
rank, attempt = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with open(f"{run}.{attempt}.{rank}", "w") as file:
    print(os.getpid(), file=file)
dist.barrier()
before = children()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
with lastgood.Checkpointer(run, {"model": model}, cadence=lastgood.Every(steps=1)) as ckpt:
    for n in range(ckpt.restore().step + 1, 4):
        ckpt.step(n)
        if (attempt, rank, n) == (0, 0, 2):
            while len(waiting := children() - before) < 2:
                time.sleep(0.02)
            with open(f"{run}.waiting", "w") as file:
                print(*waiting, file=file)
            for pid in sorted(waiting)[:kills]:
                os.kill(pid, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
'''


def numbers(path: Path) -> set[int]:
    return set(map(int, path.read_text().split()))


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 1], ids=["", "one of them is killed"])
def test_processes_that_wait_become_the_ranks_of_the_next_attempt(tmp_path: Path, kills: int) -> None:
    script, run = tmp_path / "train.py", tmp_path / "run"
    script.write_text(TRAINING)
    command = [*SUPERVISOR, "--warm-ranks", "--nproc-per-node", "2", str(script), str(run), str(kills)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second = ({pid for rank in (0, 1) for pid in numbers(tmp_path / f"run.{at}.{rank}")} for at in (0, 1))
    waiting = numbers(tmp_path / "run.waiting")
    assert len(waiting) == len(second) == 2 and not waiting & first
    assert len(waiting & second) == 2 - kills, "one that was killed is forked anew"
    assert not any(map(lives, first | second | waiting))


def test_warm_ranks_that_cannot_be_forked_are_refused() -> None:
    for other in ("--spawn", "--no-python"):
        with pytest.raises(Refused, match=f"--warm-ranks and {other} contradict"):
            arguments.parsed(["--warm-ranks", other, sys.executable], {})


@pytest.mark.parametrize("text", [b"", b"0"], ids=["silent", "something else"])
def test_a_process_that_is_not_ready_becomes_no_rank(text: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that never begins is no hang of the training, and nothing would end it."""
    monkeypatch.setattr(ahead, "READY_SECONDS", 0.0 if not text else 60.0)
    waiting, connections = Ahead(), list[socket.socket]()
    processes = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
    for local, process in enumerate(processes):
        process.returncode = 0  # its end is learned in Ahead
        ours, theirs = socket.socketpair()
        theirs.sendall(text)
        connections.append(theirs)
        waiting.add(local, process.pid, ours)
    assert waiting.start(0, b"", []) == 0
    assert not lives(processes[0].pid)
    assert lives(processes[1].pid) == bool(text), "a device for which one waits is not waited for again"
    waiting.close()
    assert not lives(processes[1].pid) and waiting.start(1, b"", []) == 0
    for one in connections:
        one.close()


def test_a_process_that_has_ended_becomes_no_rank() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.returncode = 0
    ours, theirs = socket.socketpair()
    theirs.sendall(READY)
    theirs.close()
    waiting = Ahead()
    waiting.add(0, process.pid, ours)
    assert waiting.start(0, b"start", []) == 0
    assert not lives(process.pid)

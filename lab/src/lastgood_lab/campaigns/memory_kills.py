"""SIGKILLs of training processes and of their agent, at random instants, of a run in memory in front of a directory.

A life restores, saves every step to memory and each fourth one to the directory, until it is killed; in some lives the
agent is killed too, before the training processes or after them. Every second run has two ranks, which die one shortly
after the other, in any order. Each life must restore the last committed save, or the one that was under way, to the
bit, and no older one than was sealed by all ranks when the last of them died. In half of the lives each COMMIT comes
later than it is due, so that many die between seal and COMMIT, and a thread of its own copies the state. Where the
agent is left, the directory must have the newest save once it has copied.
Writes lab/reports/memory_kills.*
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import lastgood
from lastgood.errors import NoSuchStep
from lastgood.format import commit, layout
from lastgood.records import Generation
from lastgood.run import access, agent_link, agent_messages, memory_place
from lastgood.run.reader import RunReader
from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.trials import progress
from lastgood_lab.worlds import CONTEXT

NUMBERS = 2_500_000
"""of the state, 10 MB: two chunks, in files whose memory is used again"""
LIVES_OF_A_RUN = 25
MOST_SAVES = 12
COPIED_SECONDS = 60.0
LATE_SECONDS = 0.02


class Rank(NamedTuple):
    """One rank of `ranks`. `port`: of the store of a job of several."""

    number: int
    ranks: int
    port: int


def life(home: str, memory: str, late: bool, rank: Rank, pipe: Connection) -> None:
    """Restore, then save steps until this process is killed. Posts what it has done.

    `late`: each COMMIT is created LATE_SECONDS later than it is due, and saves are overlapped.
    """
    os.environ[memory_place.VARIABLE] = memory
    torch.set_num_threads(1)
    if rank.ranks > 1:
        store = dist.TCPStore("127.0.0.1", rank.port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.ranks)
    if late:
        commit.publish = later(commit.publish)
    state = {f"w{rank.number}": torch.zeros(NUMBERS)}
    (weights,) = state.values()
    tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1))]
    options: dict[str, Any] = {"tiers": tiers, "cadence": lastgood.Every(steps=4)}
    ckpt = lastgood.Checkpointer(home, state, staging="overlap" if late else "blocking", **options)
    step = ckpt.restore().step
    pipe.send(("restored", step, bool((weights == float(step)).all())))
    while True:
        step += 1
        weights.fill_(float(step))
        save = ckpt.step(step)
        assert save is not None
        save.committed()
        pipe.send(("committed", step, True))


def later(publish: Callable[..., Generation]) -> Callable[..., Generation]:
    """The same function, LATE_SECONDS later."""

    def published(*arguments: Any) -> Generation:
        select.select([], [], [], LATE_SECONDS)
        return publish(*arguments)

    return published


class Run:
    """One run of `ranks` training processes, and what it must hold."""

    def __init__(self, folder: Path, memory: Path, number: int, ranks: int = 1) -> None:
        self._ranks = ranks
        self.home, self._root, self._chance = folder / f"run{number}", memory, random.Random(number)
        self.memory = memory_place.folder_of(self.home, {memory_place.VARIABLE: str(memory)})
        self.committed = self.sealed = 0
        self.ends = Counter[str]()
        self.problems: list[str] = []

    def live_and_die(self) -> None:
        """One life, its end, and what is found after it."""
        kind = self._chance.choice(["trainer", "trainer", "agent first", "both"])
        late = self._chance.random() < 0.5
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        processes, receivers = [], []
        for number in range(self._ranks):
            receiver, sender = CONTEXT.Pipe(duplex=False)
            rank = Rank(number, self._ranks, store.port)
            process = CONTEXT.Process(target=life, args=(str(self.home), str(self._root), late, rank, sender))
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        self._receive_restored(receivers)
        self._receive(receivers[0], self._chance.randrange(MOST_SAVES - 1))
        if kind == "agent first":
            kill_agent(self.memory)
            self._receive(receivers[0], self._chance.randrange(1, 4))
        order = self._chance.sample(processes, self._ranks)
        for process in order:
            select.select([], [], [], self._chance.uniform(0, LATE_SECONDS))
            process.kill()
        if kind == "both":
            kill_agent(self.memory)
        for process in processes:
            process.join()
        if order[0].exitcode != -signal.SIGKILL:  # one that is killed later may fail because of the first
            self.problems.append(f"{self.home.name}: a training process has ended with {order[0].exitcode}")
        self.sealed, late = newest_sealed(Path(self.memory), self._ranks)
        self.ends["sealed, and not committed"] += late
        for receiver in receivers:
            self._receive(receiver, MOST_SAVES * 100)
        self.ends[kind] += 1
        self.ends["training processes"] += self._ranks
        if kind == "trainer" and self._chance.random() < 0.5:
            self._judge_copied()

    def _receive_restored(self, pipes: list[Connection]) -> None:
        """What all ranks have restored, which has to be one step."""
        committed, steps = self.committed, list[int]()
        for pipe in pipes:
            self.committed = committed
            self._receive(pipe, 1)
            steps.append(self.committed)
        if len(set(steps)) > 1:
            self.problems.append(f"{self.home.name}: the ranks have restored the steps {steps}")

    def _receive(self, pipe: Connection, count: int) -> None:
        for _ in range(count):
            try:
                what, step, good = pipe.recv()
            except (EOFError, OSError):
                return
            if what == "restored" and (step not in (self.committed, self.committed + 1) or step < self.sealed):
                was = f"{self.committed} was committed, {self.sealed} sealed"
                self.problems.append(f"{self.home.name}: restored step {step}, and {was}")
            if not good:
                self.problems.append(f"{self.home.name}: step {step} was restored with other bytes")
            self.committed = max(self.committed, step)

    def _judge_copied(self) -> None:
        """The agent, which nobody killed, has copied the newest save to the home."""
        until = time.monotonic() + COPIED_SECONDS
        while (found := state_of(self.memory)) is not None and (found.copying or found.attached):
            if time.monotonic() > until:
                self.problems.append(f"{self.home.name}: not copied after {COPIED_SECONDS} s: {found.missing}")
                return
            select.select([], [], [], 0.02)
        if found is None:
            self.ends["no agent was left"] += 1  # it had been killed before, and its successor had not started yet
            return
        newest = 0
        with contextlib.suppress(NoSuchStep):  # it was killed before its first save
            newest = RunReader(access.for_reading(self.home)).generation().step
        if newest not in (self.committed, self.committed + 1) or newest < self.sealed:
            wanted = max(self.committed, self.sealed)
            self.problems.append(f"{self.home.name}: the home has step {newest} of {wanted}")
        self.ends["copied by the agent"] += 1


def state_of(folder: str) -> agent_messages.Answer | None:
    """The state of the agent of a memory folder; None if there is none that answers."""
    with contextlib.suppress(OSError, ValueError):
        return agent_link.status(folder)
    return None


def newest_sealed(memory: Path, ranks: int = 1) -> tuple[int, bool]:
    """The newest step of which the manifests of all ranks are in memory, and whether its COMMIT is not.

    (0, False) if there is none.
    """
    names = [layout.manifest_name(rank) for rank in range(ranks)]
    sealed = [one for one in memory.glob("gen/*") if all((one / name).exists() for name in names)]
    newest = max(sealed, default=None)
    if newest is None:
        return 0, False
    at = layout.parse_folder(newest.name)
    assert at is not None
    return at.step, not (newest / layout.COMMIT).exists()


def kill_agent(folder: str) -> None:
    """Kill the agent of a memory folder, if there is one."""
    with contextlib.suppress(OSError), contextlib.closing(agent_link.connected(folder)) as connection:
        agent_link.kill(connection)


@contextlib.contextmanager
def memory_for_agents() -> Iterator[Path]:
    """A folder in memory, in which no agent is left at the end."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=memory_place.DEFAULT) as folder:
        try:
            yield Path(folder)
        finally:
            for one in Path(folder).glob("lastgood-*/*"):
                kill_agent(str(one))


def series(folder: Path, memory: Path, number: int, lives: int) -> Run:
    """Kill one run `lives` times."""
    run = Run(folder, memory, number, ranks=1 + number % 2)
    for _ in range(lives):
        run.live_and_die()
        if run.problems:
            break
    kill_agent(run.memory)
    shutil.rmtree(run.memory, ignore_errors=True)
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000, help="how many lives to kill (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="determines the moments of the kills")
    options = parser.parse_args()
    begun, count = time.monotonic(), -(-options.kills // LIVES_OF_A_RUN)
    runs: list[Run] = []
    show = progress(count * LIVES_OF_A_RUN)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for number in range(options.seed * count, (options.seed + 1) * count):
            runs.append(series(Path(folder), Path(memory), number + 1, LIVES_OF_A_RUN))
            show(len(runs) * LIVES_OF_A_RUN, sum(bool(one.problems) for one in runs))
    ends = sum((one.ends for one in runs), Counter[str]())
    violated = [problem for one in runs for problem in one.problems]
    facts: dict[str, Any] = {
        "lives": ends["trainer"] + ends["agent first"] + ends["both"],
        "training_processes_killed": ends["training processes"],
        "agents_killed": ends["agent first"] + ends["both"],
        "newest_save_copied_by_the_agent_and_found_at_home": ends["copied by the agent"],
        "sealed_and_not_committed": ends["sealed, and not committed"],
        "saves_committed": sum(one.committed for one in runs),
        "violations": len(violated),
        "seconds": round(time.monotonic() - begun),
        "seed": options.seed,
        "violated": violated,
    }
    rows = "\n".join(f"| {name} | {number:,} |" for name, number in ends.most_common())
    report("memory_kills", "SIGKILLs of training processes and agents", facts, [f"| end | times |\n|---|---|\n{rows}"])
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())

"""Many saves of training processes in memory, whose agents are killed at random instants: nothing may grow.

A process saves every step to memory and each fiftieth one to a directory. Again and again its agent is killed, and
the process starts another one. Every save must be committed. Resident memory, descriptors, mappings and threads of both
processes, the files in memory and the folders of generations in the directory are sampled all the time; the last
quarter of the samples is compared with the second one, for the first holds what is made once. Agents are compared at
the same age: each is sampled once while it is young, and the last ones, which nobody kills, all the time once they are
old. At the end no deletion in the directory may be unfinished, and the newest save is restored and compared bit by bit.

`--copies`: two processes stand for two nodes of this machine, each with an agent of its own, and each save is copied to
the memory of the other node. In most of the lives of the agents a save must have been copied.
Writes lab/reports/memory_soak.* and memory_soak-copies.*
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import lastgood
from lastgood.format import commit
from lastgood.io.machine import NODE
from lastgood.run import access, agent_link, memory_place
from lastgood_lab.campaigns.memory_kills import kill_agent, state_of
from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.trials import progress
from lastgood_lab.worlds import CONTEXT

NUMBERS = 2_500_000
"""of the state of a process, 10 MB: two chunks, in files whose memory is used again"""
STEPS_TO_HOME = 50
SAVES_OF_A_MESSAGE = 10
ANSWER_SECONDS = 120.0
LIVED_SECONDS = 0.8 * agent_link.LIVED_SECONDS, 2 * agent_link.LIVED_SECONDS
"""How long an agent lives from the moment in which it answers. One that ends too soon is not replaced at once: of
shorter lives a soak would take hours."""
ALLOWED = 1.1
"""what a median may grow by, beyond `SLACK`"""
LEAST_SAMPLES = 40
"""of what is compared: of fewer, a median may be that of one agent that has just started"""
YOUNG, OLD = 3, 100
"""the age of an agent, in messages of the training process: 30 saves, and 1,000"""
SAVES_OF_THE_LAST_AGENTS = 0.1
"""The share of the saves that are made after the last kill."""
SLACK = {"memory_kb": 8_000, "descriptors": 2, "mappings": 10, "threads": 1, "files": 4, "generations": 4}


class Sample(NamedTuple):
    """What one process, or one folder, has at one time. -1: it was not asked."""

    memory_kb: int = -1
    descriptors: int = -1
    mappings: int = -1
    threads: int = -1
    files: int = -1
    generations: int = -1
    """folders of them, deleted ones too"""


def of_process(pid: int) -> Sample:
    """Raises OSError if the process has ended."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Sample(
        memory_kb=int(status["VmRSS"].split()[0]),
        descriptors=len(os.listdir(f"/proc/{pid}/fd")),
        mappings=len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
        threads=int(status["Threads"]),
    )


def of_folder(folder: str) -> Sample:
    return Sample(files=sum(len(names) for _, _, names in os.walk(folder)))


class Place(NamedTuple):
    """A run: its directory, the folder for memory, and the interval between saves in the directory, in steps."""

    home: str
    memory: str
    steps_to_home: int


class Node(NamedTuple):
    """The node that a training process stands for, one of `nodes`. `port`: of the store of a job of several nodes."""

    rank: int = 0
    nodes: int = 1
    port: int = 0

    def environment(self, memory: str) -> dict[str, str]:
        return {memory_place.VARIABLE: memory} | ({NODE: f"node{self.rank}"} if self.nodes > 1 else {})


def train(place: Place, node: Node, pipe: Connection) -> None:
    """Save steps until the other end of the pipe of node 0 is closed. Posts the newest step again and again, and how
    many of the saves since the last one have a copy on every node."""
    os.environ |= node.environment(place.memory)
    torch.set_num_threads(1)
    if node.nodes > 1:
        store = dist.TCPStore("127.0.0.1", node.port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=node.rank, world_size=node.nodes)
    weights = torch.zeros(NUMBERS)
    tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1), copies=node.nodes)]
    cadence = lastgood.Every(steps=place.steps_to_home)
    ckpt = lastgood.Checkpointer(place.home, {f"w{node.rank}": weights}, tiers=tiers, cadence=cadence)
    ckpt.restore()
    step = 0
    with contextlib.suppress(EOFError, BrokenPipeError):
        while not is_over(pipe, node):
            saves = []
            for _ in range(SAVES_OF_A_MESSAGE):
                step += 1
                weights.fill_(float(step))
                save = ckpt.step(step)
                assert save is not None
                save.committed(ANSWER_SECONDS)
                saves.append(save)
            if node.rank == 0:  # nobody reads what others post
                pipe.send((step, sum(one.durable("node") for one in saves)))
    ckpt.close()


def is_over(pipe: Connection, node: Node) -> bool:
    """Whether the training process of node 0 has received the request to end. All nodes return the same."""
    over = torch.tensor([int(node.rank == 0 and pipe.poll())])
    if node.nodes > 1:
        dist.broadcast(over, 0)
    return bool(over)


def age_of(messages: int) -> str:
    """How an agent that was seen at so many messages is called in the report; "": it is not sampled now."""
    return "young" if messages == YOUNG else "old" if messages > OLD else ""


class Soak:
    """The run, its samples and what is wrong with it. `nodes`: how many processes train, each with an agent."""

    def __init__(self, home: Path, memory: Path, seed: int, steps_to_home: int = STEPS_TO_HOME, nodes: int = 1) -> None:
        self._place = Place(str(home), str(memory), steps_to_home)
        self._home, self._chance, self.killed, self.saves, self.copied = home, random.Random(seed), 0, 0, 0
        environments = [Node(rank, nodes).environment(str(memory)) for rank in range(nodes)]
        self.folders = [memory_place.folder_of(home, one) for one in environments]
        self.samples: dict[str, list[Sample]] = {"directory": []}
        self._ages = Counter[int]()
        self.problems: list[str] = []

    def run(self, saves: int, kills: int) -> None:
        """Train until so many saves were made and so many agents were killed, and then for a tenth of the saves."""
        least = saves
        with self._training() as (pids, pipe):
            show, dying = progress(saves), 0
            due: float | None = 0.0  # the first one is killed at once
            while (self.saves < least or self.killed < kills) and not self.problems:
                if not pipe.poll(ANSWER_SECONDS):
                    self.problems.append(f"no save for {ANSWER_SECONDS:.0f} s after step {self.saves}")
                    break
                try:
                    self.saves, copied = pipe.recv()
                except EOFError:
                    self.problems.append(f"a training process has ended after step {self.saves}")
                    break
                self.copied += copied
                self._sample(pids)
                if self.saves % 500 == 0:
                    show(min(self.saves, saves), len(self.problems))
                if self.killed < kills:
                    least = max(saves, self.saves + int(SAVES_OF_THE_LAST_AGENTS * saves))
                if self.killed < kills and state_of(self.folders[dying]) is not None:
                    if due is None:
                        due = time.monotonic() + self._chance.uniform(*LIVED_SECONDS)
                    elif time.monotonic() > due:
                        kill_agent(self.folders[dying])
                        self.killed, due = self.killed + 1, None
                        dying = self._chance.randrange(len(self.folders))

    @contextlib.contextmanager
    def _training(self) -> Iterator[tuple[list[int], Connection]]:
        """The training processes, which end with the block: their numbers, and the pipe of the first one."""
        count = len(self.folders)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [CONTEXT.Pipe() for _ in self.folders]
        processes = [
            CONTEXT.Process(target=train, args=(self._place, Node(rank, count, store.port), theirs))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()
        yield [one.pid for one in processes if one.pid is not None], pipes[0][0]
        with contextlib.suppress(BrokenPipeError):
            pipes[0][0].send("end")
        for process in processes:
            process.join(ANSWER_SECONDS)
            if process.exitcode != 0:
                self.problems.append(f"a training process has ended with {process.exitcode}")

    def _sample(self, pids: Sequence[int]) -> None:
        self._note("directory", Sample(generations=sum(1 for _ in self._home.glob("gen/*"))))
        for rank, (pid, folder) in enumerate(zip(pids, self.folders, strict=True)):
            of_node = f" of node {rank}" if len(pids) > 1 else ""
            with contextlib.suppress(OSError):  # it may end at any instant
                self._note(f"training process{of_node}", of_process(pid))
                self._note(f"folder in memory{of_node}", of_folder(folder))
                if (agent := state_of(folder)) is not None:
                    self._ages[agent.process] += 1
                    if age := age_of(self._ages[agent.process]):
                        self._note(f"{age} agents{of_node}", of_process(agent.process))

    def _note(self, whose: str, sample: Sample) -> None:
        self.samples.setdefault(whose, []).append(sample)

    def judge(self) -> None:
        """Look at what was deleted, compare what is restored, and what has grown."""
        state = {f"w{rank}": torch.zeros(NUMBERS) for rank in range(len(self.folders))}
        with lastgood.Checkpointer(self._home, state) as ckpt:
            step = ckpt.restore().step
        if going := self.half_deleted():  # by an agent that was killed just before the end; this opening finishes it
            self.problems.append(f"{going} generations in the directory are not wholly deleted")
        last = self.saves - self.saves % self._place.steps_to_home
        if step < last or not all(bool((one == float(step)).all()) for one in state.values()):
            self.problems.append(f"step {step} was restored, {self.saves} was the last; or with other bytes")
        if len(self.folders) > 1 and self.copied < self.killed / 2:
            self.problems.append(f"{self.copied} saves were copied in the lives of {self.killed} agents")
        self.problems += [
            f"{row.what} of the {row.whose} grew from {row.before} to {row.after}" for row in self.grown()
        ]

    def half_deleted(self) -> int:
        """How many generations in the directory the training process has left so. The next opening finishes them."""
        return len(commit.survey(access.for_reading(self._home)).going)

    def grown(self) -> list[Row]:
        """What has grown by more than is allowed."""
        return [row for row in self.rows() if row.after > max(row.before * ALLOWED, row.before + SLACK[row.what])]

    def rows(self) -> list[Row]:
        """The medians of the second and the last quarter of the samples."""
        return [
            Row(whose, what, *(int(median(getattr(one, what) for one in part)) for part in quarters(samples)))
            for whose, samples in self.samples.items()
            for what in Sample._fields
            if len(samples) >= LEAST_SAMPLES and getattr(samples[0], what) >= 0
        ]


class Row(NamedTuple):
    """One line of the report."""

    whose: str
    what: str
    before: int
    after: int


def quarters(samples: Sequence[Sample]) -> tuple[Sequence[Sample], Sequence[Sample]]:
    """The second and the last quarter."""
    quarter = len(samples) // 4
    return samples[quarter : 2 * quarter], samples[-quarter:]


def soak(folder: Path, memory: Path, saves: int, kills: int, seed: int, nodes: int = 1) -> Soak:
    """Run one soak, and judge it."""
    found = Soak(folder / "run", memory, seed, nodes=nodes)
    try:
        found.run(saves, kills)
        if not found.problems:
            found.judge()
    finally:
        for one in found.folders:
            kill_agent(one)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=20_000, help="at least so many (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=300, help="of agents, at least (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="determines the moments of the kills")
    parser.add_argument("--copies", action="store_true", help="two nodes, each with a copy of the other one's saves")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        nodes = 2 if options.copies else 1
        found = soak(Path(folder), Path(memory), options.saves, options.kills, options.seed, nodes)
    facts: dict[str, Any] = {
        "saves": found.saves,
        **({"saves_with_a_copy_on_the_other_node_as_the_next_ones_began": found.copied} if options.copies else {}),
        "agents_killed": found.killed,
        "violations": len(found.problems),
        "samples": len(found.samples["directory"]),
        "seconds": round(time.monotonic() - begun),
        "seed": options.seed,
        "violated": found.problems,
    }
    rows = [f"| {row.whose} | {row.what} | {row.before:,} | {row.after:,} |" for row in found.rows()]
    table = ["| of | what | second quarter, median | last quarter, median |", "|---|---|---|---|", *rows]
    report(
        "memory_soak",
        "Many saves in memory, and agents that are killed",
        facts,
        ["\n".join(table)],
        tier="copies" if options.copies else "directory",
    )
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Many saves of one training process in memory, whose agent is killed at random instants: nothing may grow.

The process saves every step to memory and each fiftieth one to a directory. Again and again its agent is killed, and
the process starts another one. Every save must be committed. Resident memory, descriptors, mappings and threads of both
processes, the files in memory and the folders of generations in the directory are sampled all the time; the last
quarter of the samples is compared with the second one, for the first holds what is made once. At the end no deletion in
the directory may be unfinished, and the newest save is restored and compared bit for bit.
Writes lab/reports/memory_soak.*
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

import lastgood
from lastgood.format import commit
from lastgood.run import access, agent_link, memory_place
from lastgood_lab.campaigns.memory_kills import kill_agent, state_of
from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.trials import progress
from lastgood_lab.worlds import CONTEXT

NUMBERS = 2_500_000
"""of the state, 10 MB: two chunks, in files whose memory is used again"""
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


def train(home: str, memory: str, steps_to_home: int, pipe: Connection) -> None:
    """Save steps until the other end of the pipe is closed. Posts the newest step again and again."""
    os.environ[memory_place.VARIABLE] = memory
    torch.set_num_threads(1)
    state = {"w": torch.zeros(NUMBERS)}
    tiers = [lastgood.Tier("memory://", cadence=lastgood.Every(steps=1))]
    ckpt = lastgood.Checkpointer(home, state, tiers=tiers, cadence=lastgood.Every(steps=steps_to_home))
    ckpt.restore()
    step = 0
    with contextlib.suppress(EOFError, BrokenPipeError):
        while not pipe.poll():
            for _ in range(SAVES_OF_A_MESSAGE):
                step += 1
                state["w"].fill_(float(step))
                save = ckpt.step(step)
                assert save is not None
                save.committed(ANSWER_SECONDS)
            pipe.send(step)
    ckpt.close()


class Soak:
    """The run, its samples and what is wrong with it."""

    def __init__(self, home: Path, memory: Path, seed: int, steps_to_home: int = STEPS_TO_HOME) -> None:
        self._steps_to_home = steps_to_home
        self._home, self._chance, self.killed, self.saves = home, random.Random(seed), 0, 0
        self._folder = memory_place.folder_of(home, {memory_place.VARIABLE: str(memory)})
        self._memory = memory
        places = ("training process", "agent", "folder in memory", "directory")
        self.samples: dict[str, list[Sample]] = {of: [] for of in places}
        self.problems: list[str] = []

    def run(self, saves: int, kills: int) -> None:
        """Train until so many saves were made and so many agents were killed."""
        ours, theirs = CONTEXT.Pipe()
        process = CONTEXT.Process(target=train, args=(str(self._home), str(self._memory), self._steps_to_home, theirs))
        process.start()
        theirs.close()
        show = progress(saves)
        due: float | None = 0.0  # the first one is killed at once
        assert process.pid is not None
        while (self.saves < saves or self.killed < kills) and not self.problems:
            if not ours.poll(ANSWER_SECONDS):
                self.problems.append(f"no save for {ANSWER_SECONDS:.0f} s after step {self.saves}")
                break
            try:
                self.saves = int(ours.recv())
            except EOFError:
                self.problems.append(f"the training process has ended after step {self.saves}")
                break
            self._sample(process.pid)
            if self.saves % 500 == 0:
                show(min(self.saves, saves), len(self.problems))
            if self.killed < kills and state_of(self._folder) is not None:
                if due is None:
                    due = time.monotonic() + self._chance.uniform(*LIVED_SECONDS)
                elif time.monotonic() > due:
                    kill_agent(self._folder)
                    self.killed, due = self.killed + 1, None
        ours.send("end")
        process.join(ANSWER_SECONDS)
        if process.exitcode != 0:
            self.problems.append(f"the training process has ended with {process.exitcode}")

    def _sample(self, pid: int) -> None:
        with contextlib.suppress(OSError):  # it may end at any instant
            self.samples["training process"].append(of_process(pid))
            self.samples["folder in memory"].append(of_folder(self._folder))
            self.samples["directory"].append(Sample(generations=sum(1 for _ in self._home.glob("gen/*"))))
            if (agent := state_of(self._folder)) is not None:
                self.samples["agent"].append(of_process(agent.process))

    def judge(self) -> None:
        """Look at what was deleted, compare what is restored, and what has grown."""
        state = {"w": torch.zeros(NUMBERS)}
        with lastgood.Checkpointer(self._home, state) as ckpt:
            step = ckpt.restore().step
        if going := self.half_deleted():  # by an agent that was killed just before the end; this opening finishes it
            self.problems.append(f"{going} generations in the directory are not wholly deleted")
        last = self.saves - self.saves % self._steps_to_home
        if step < last or not bool((state["w"] == float(step)).all()):
            self.problems.append(f"step {step} was restored, {self.saves} was the last; or with other bytes")
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


def soak(folder: Path, memory: Path, saves: int, kills: int, seed: int) -> Soak:
    """Run one soak, and judge it."""
    found = Soak(folder / "run", memory, seed)
    try:
        found.run(saves, kills)
        if not found.problems:
            found.judge()
    finally:
        kill_agent(found._folder)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=20_000, help="at least so many (default: %(default)s)")
    parser.add_argument("--kills", type=int, default=300, help="of agents, at least (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="determines the moments of the kills")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        found = soak(Path(folder), Path(memory), options.saves, options.kills, options.seed)
    facts: dict[str, Any] = {
        "saves": found.saves,
        "agents_killed": found.killed,
        "violations": len(found.problems),
        "samples": len(found.samples["training process"]),
        "seconds": round(time.monotonic() - begun),
        "seed": options.seed,
        "violated": found.problems,
    }
    rows = [f"| {row.whose} | {row.what} | {row.before:,} | {row.after:,} |" for row in found.rows()]
    table = ["| of | what | second quarter, median | last quarter, median |", "|---|---|---|---|", *rows]
    report("memory_soak", "Many saves in memory, and agents that are killed", facts, ["\n".join(table)])
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())

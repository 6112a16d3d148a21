"""Nodes that are lost: network namespaces of this machine, four nodes of two ranks each, and one node in reserve.

A trial trains for a few saves in memory with copies or parity on other nodes, makes a fault, kills what is left of the
job, and starts it again. The faults: a node is killed whole (its processes, its agent, its memory), two at once, or a
rack of two; a node is cut off for a moment, or its agent is killed or stopped, while a save is made; a killed node is
replaced by an empty one; a node is cut off, replaced, and comes back later with what it had. The job must restore the
newest save of which `save.durable("node")` was true, or a newer one, bit for bit, and its next save must get its
copies. What the nodes send each other until then is measured at their interfaces, and in every second trial compared
with what had to be sent; such a trial begins when agents have ended what the killed job had asked of them. In each
trial what the restore alone reads from other nodes must be no more than its nodes lacked. Writes lab/reports/nodes.*
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lastgood.run import agent_link, memory_place
from lastgood_lab import namespaces
from lastgood_lab.campaigns.node_bytes import NODES, RANKS, RANKS_OF_A_NODE, due, due_with_parity, held_in, lacking
from lastgood_lab.campaigns.node_jobs import RankJob, run, serve_stores
from lastgood_lab.campaigns.node_outcomes import FAULTS, MODES, NOTES, Mode, Outcome, table
from lastgood_lab.campaigns.reports import report
from lastgood_lab.worlds import CONTEXT

ANSWER_SECONDS = 120.0
TRIALS_OF_A_RUN = 10
SILENCE_SECONDS, SILENCE_BYTES = 0.5, 10_000
"""Nodes that send each other no more than this are silent."""
OVERHEAD, OVERHEAD_BYTES = 1.05, 400_000
"""What nodes may send each other beyond the bytes of files: headers of packets, calls, manifests of all ranks."""
RECORDS_BYTES = 600_000
"""The same for each newer generation that a restore tries: each node reads the manifests of the others, some twice. A
file of a rank is larger."""


class Failed(Exception):
    """A rank did not do what it must."""


@dataclass
class Job:
    """The ranks of one start. `members`: the node of each slot; a slot has a name of its rack."""

    members: list[int]
    pipes: list[Connection] = field(default_factory=list)
    processes: list[Any] = field(default_factory=list)

    def ask(self, ranks: Sequence[int], *command: Any) -> list[Any]:
        """The answers of these ranks to a command; all are asked first."""
        for rank in ranks:
            self.pipes[rank].send(command)
        return [self.answer(rank) for rank in ranks]

    def answer(self, rank: int) -> Any:
        if not self.pipes[rank].poll(ANSWER_SECONDS):
            raise Failed(f"rank {rank} has not answered within {ANSWER_SECONDS:.0f} s")
        try:
            return self.pipes[rank].recv()
        except EOFError:
            raise Failed(f"rank {rank} has ended") from None

    def save(self, step: int, ranks: Sequence[int] = range(RANKS)) -> None:
        """Save a step on all ranks. Raises Failed unless it is committed."""
        self.require(self.ask(ranks, "save", step))

    def require(self, answers: Sequence[str]) -> None:
        if problems := sorted({one for one in answers if one}):
            raise Failed("; ".join(problems))

    def kill(self) -> None:
        for one in self.processes:
            one.kill()
        for one in self.processes:
            one.join()
        for pipe in self.pipes:
            pipe.close()


class Run:
    """One run on its nodes, through many trials."""

    def __init__(self, network: namespaces.Network, folder: Path, memory: Path, mode: Mode, seed: int) -> None:
        self._stores, theirs = CONTEXT.Pipe()
        hub = network.name(network.hub), network.address(network.hub)
        self._store_host = CONTEXT.Process(target=serve_stores, args=(*hub, theirs))
        self._store_host.start()
        theirs.close()
        self._network, self._home, self._memory, self._mode = network, folder / f"run{seed}", memory, mode
        self._chance = random.Random(seed)
        self._spare, self._life = NODES, 0
        self._placed = self._committed = 0
        """the newest step of which the copies were made, and the newest that was committed"""
        self._attempted = 0
        self._lost = dict[str, int]()
        """generation -> bytes that the nodes that were lost last had of it"""
        self.job = Job([*range(NODES)])

    # ---- a start -------------------------------------------------------------------------------------------

    def start(self, outcome: Outcome) -> None:
        """Start the job on its members, and check what it restores and what is sent until its copies are whole."""
        self._life += 1
        members, network = self.job.members, self._network
        if outcome.measured:
            self._await_silence()
        before, received, sent = self._held(), network.received_among(members), network.sent_between_nodes()
        self._stores.send("new")
        store_port, address = int(self._stores.recv()), network.address(network.hub)
        self.job = job = Job(members)
        for rank in range(RANKS):
            slot = rank // RANKS_OF_A_NODE
            node = members[slot]
            environment = {**self._environment(node), "LASTGOOD_RACK": f"rack{slot // 2}"}
            mine = RankJob(
                rank=rank,
                size=RANKS,
                namespace=network.name(node),
                environment=environment,
                store=(address, store_port),
                home=str(self._home),
                log=f"{self._home}.log",
                life=self._life,
                copies=self._mode.copies,
                spread=self._mode.spread,
                parity="{}+{}".format(*self._mode.code) if self._mode.code else None,
            )
            ours, theirs = CONTEXT.Pipe()
            process = CONTEXT.Process(target=run, args=(mine, theirs))
            process.start()
            theirs.close()
            job.pipes.append(ours)
            job.processes.append(process)
        found = [job.answer(rank) for rank in range(RANKS)]
        job.require(job.ask([0], "settled"))
        outcome.sent = network.received_among(members) - received
        outcome.sent_to_all = network.sent_between_nodes() - sent
        self._judge(found, before, outcome)

    def _judge(self, found: list[dict[str, Any]], before: list[dict[str, dict[int, int]]], outcome: Outcome) -> None:
        steps = {one["step"] for one in found}
        step = max(steps)
        if len(steps) > 1:
            outcome.problems.append(f"ranks restored different steps: {sorted(steps)}")
        if not self._placed <= step <= self._attempted:
            last = f"the newest with copies was {self._placed}, the newest committed {self._committed}"
            outcome.problems.append(f"restored step {step}; {last}, the newest attempted {self._attempted}")
        if not all(one["equal"] for one in found):
            outcome.problems.append(f"step {step} was restored with other bytes")
        outcome.restored = "the newest with copies" if step == self._placed else "a newer one"
        outcome.fetched = sum(one["sources"].get("other nodes", 0) for one in found)
        if any(str(self._home) == place for one in found for place in one["sources"]) and step >= self._placed > 0:
            outcome.restored += ", from the directory"
        self._committed = self._attempted = step
        folder = found[0]["folder"]  # a node that came back may hold another save of this step
        outcome.lost = self._lost.get(folder, 0)
        after, code = self._held(), self._mode.code
        held, later = ([one.get(folder, {}) for one in every] for every in (before, after))
        outcome.due = due_with_parity(held, code) if code else due(held, self._mode.copies, later)
        newer = sorted({name for one in before for name in one if name > folder})
        for name in [folder, *newer]:  # newer ones were tried first
            outcome.lacking += lacking(*([one.get(name, {}) for one in every] for every in (before, after)))
        if outcome.fetched > outcome.lacking:
            fetched = f"the restore has read {outcome.fetched:,} bytes from other nodes"
            outcome.problems.append(f"{fetched}; its nodes lacked {outcome.lacking:,}")
        if outcome.measured and outcome.sent > OVERHEAD * outcome.due + OVERHEAD_BYTES + RECORDS_BYTES * len(newer):
            sent = f"{outcome.sent:,} bytes between nodes, {outcome.sent_to_all:,} with the node in reserve"
            outcome.problems.append(f"{sent}; {outcome.due:,} had to be sent")

    def _held(self) -> list[dict[str, dict[int, int]]]:
        """For each slot, what its node has in memory."""
        return [held_in(self._folder(node)) for node in self.job.members]

    def _environment(self, node: int) -> dict[str, str]:
        memory = str(self._memory / f"node{node}")
        return {
            "LASTGOOD_NODE": f"node{node}",
            memory_place.VARIABLE: memory,
            "MASTER_ADDR": self._network.address(self._network.hub),
            "OMP_NUM_THREADS": "1",
        }

    def _folder(self, node: int) -> Path:
        return Path(memory_place.folder_of(self._home, self._environment(node)))

    # ---- a trial -------------------------------------------------------------------------------------------

    def trial(self, fault: str) -> Outcome:
        """Train, make the fault, start again, and train on."""
        outcome = Outcome(fault, [], measured=self._chance.random() < 0.5)
        try:
            self._train()
            self._make(fault)
            self.start(outcome)
            self.save(placed=True)
        except Failed as error:
            outcome.problems.append(f"{error}\n{self._reported()}")
        return outcome

    def _await_silence(self) -> None:
        """Wait until the agents have ended what the job that was killed had asked of them."""
        before, until = -1, time.monotonic() + ANSWER_SECONDS
        while (sent := self._network.sent_between_nodes()) - before > SILENCE_BYTES:
            if time.monotonic() > until:
                raise Failed("agents of a job that was killed do not come to rest")
            before = sent
            select.select([], [], [], SILENCE_SECONDS)

    def _reported(self) -> str:
        """The last lines that ranks have reported."""
        with contextlib.suppress(OSError):
            lines = Path(f"{self._home}.log").read_text(errors="replace").splitlines()
            return "\n".join([one for one in lines if "frame #" not in one][-12:])
        return ""

    def _train(self) -> None:
        """A few saves. After the last one, the fault comes at once, a moment later, or when its copies are made."""
        for _ in range(self._chance.randrange(1, 4)):
            self.save(placed=self._chance.random() < 0.5)
        if self._chance.random() < 0.7:
            self.save(placed=True)
        else:
            time.sleep(self._chance.uniform(0.0, 0.1))

    def save(self, placed: bool) -> None:
        self._attempted += 1
        self.job.save(self._attempted)
        self._committed = self._attempted
        if placed:
            self.job.require(self.job.ask([0], "placed"))
            self._placed = self._committed

    def _make(self, fault: str) -> None:
        """Make the fault, and kill what is left of the job."""
        members, chance, self._lost = self.job.members, self._chance, {}
        if fault == "a node cut off for a moment":
            network, node = self._network, chance.choice(members)
            self._disturb(lambda: network.cut(node), lambda: network.mend(node))
            self.job.kill()
            return
        if fault.startswith("the agent of a node"):
            agent = agent_link.process_of(str(self._folder(chance.choice(members))))
            if agent is None:
                raise Failed("a node has no agent")
            if fault == "the agent of a node killed":
                self._disturb(partial(os.kill, agent, signal.SIGKILL), lambda: None)
            else:
                self._disturb(partial(os.kill, agent, signal.SIGSTOP), partial(os.kill, agent, signal.SIGCONT))
            self.job.kill()
            return
        if fault == "a node cut off, replaced, and back later":
            slot = chance.randrange(NODES)
            self._network.cut(members[slot])
            self._note_lost(members[slot])
            self.job.kill()
            members[slot], self._spare = self._spare, members[slot]
            self._network.mend(self._spare)
            return
        first = chance.choice([0, 2]) if fault == "a rack of two killed" else chance.randrange(NODES)
        slots = [first]
        if fault == "a rack of two killed":
            slots = [first, first + 1]
        elif fault.startswith("two nodes killed at once"):
            slots = chance.sample(range(NODES), 2)
        silent = chance.random() < 0.5
        if silent:  # as when the power fails: connections fall silent, nothing is reset
            for slot in slots:
                self._network.cut(members[slot])
        for slot in slots:
            self._lose(members[slot])
        self.job.kill()
        for slot in slots:
            if silent:
                self._network.mend(members[slot])
        if fault == "a killed node replaced by an empty one":
            lost = dict(self._lost)
            self._lose(self._spare)
            self._lost = lost  # what the node in reserve had of earlier times was of no use
            members[first], self._spare = self._spare, members[first]

    def _lose(self, node: int) -> None:
        """Kill all processes of a node, and remove its memory."""
        self._network.kill(node)
        self._note_lost(node)
        shutil.rmtree(self._memory / f"node{node}", ignore_errors=True)

    def _note_lost(self, node: int) -> None:
        for folder, parts in held_in(self._folder(node)).items():
            self._lost[folder] = self._lost.get(folder, 0) + sum(parts.values())

    def _disturb(self, begin: Callable[[], object], end: Callable[[], object]) -> None:
        """Make a fault while a save is made, and end it: the save must end well, and so must its copies."""
        self._attempted += 1
        for pipe in self.job.pipes:
            pipe.send(("save", self._attempted))
        time.sleep(self._chance.uniform(0.0, 0.1))
        begin()
        time.sleep(self._chance.uniform(0.05, 1.0))
        end()
        self.job.require([self.job.answer(rank) for rank in range(RANKS)])
        self._committed = self._attempted
        if self._chance.random() < 0.5:
            self.job.require(self.job.ask([0], "placed"))
            self._placed = self._committed

    def end(self) -> None:
        self.job.kill()
        self._store_host.kill()
        self._store_host.join()
        self._stores.close()
        for node in range(NODES + 1):
            self._network.kill(node)
            shutil.rmtree(self._memory / f"node{node}", ignore_errors=True)
        shutil.rmtree(self._home, ignore_errors=True)
        Path(f"{self._home}.log").unlink(missing_ok=True)


@contextlib.contextmanager
def opened(network: namespaces.Network, folder: Path, memory: Path, mode: Mode, seed: int) -> Iterator[Run]:
    """A run that is started for the first time, and ended with the block."""
    found = Run(network, folder, memory, mode, seed)
    try:
        found.start(Outcome("", []))
        found.save(placed=True)  # before it there is nothing to go back to
        yield found
    finally:
        found.end()


def series(network: namespaces.Network, folder: Path, memory: Path, mode: str, seed: int, trials: int) -> list[Outcome]:
    """Trials on one run, until one finds a violation."""
    faults, outcomes = [fault for fault, of in FAULTS.items() if of == mode], list[Outcome]()
    with opened(network, folder, memory, MODES[mode], seed) as run:
        for number in range(trials):
            outcomes.append(run.trial(faults[(seed + number) % len(faults)]))
            if outcomes[-1].problems:
                break
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500, help="how many trials (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="determines the faults and their moments")
    options = parser.parse_args()
    if lacks := namespaces.missing():
        print(f"the campaign with nodes {lacks}", file=sys.stderr)
        return 2
    CONTEXT.set_forkserver_preload(["lastgood_lab.campaigns.node_jobs"])
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store warns of each client that was killed
    begun, outcomes, number = time.monotonic(), list[Outcome](), 0
    modes = [*FAULTS.values()]
    with (
        namespaces.Network(NODES + 1) as network,
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        while len(outcomes) < options.trials:
            mode, seed = modes[number % len(modes)], options.seed * 10_000 + number
            left = min(TRIALS_OF_A_RUN, options.trials - len(outcomes))
            outcomes += series(network, Path(folder), Path(memory), mode, seed, left)
            number += 1
            wrong = [f"\n{one.fault}: {one.problems[0]}" for one in outcomes[-1:] if one.problems]
            passed = f"{time.monotonic() - begun:.0f} s"
            print(f"{len(outcomes):,} of {options.trials:,} trials, {passed}{''.join(wrong)}", flush=True)
    violated = [f"{one.fault}: {problem}" for one in outcomes for problem in one.problems]
    restarts = [one for one in outcomes if not one.problems]
    facts: dict[str, Any] = {
        "trials": len(outcomes),
        "violations": len(violated),
        "nodes": f"{NODES} network namespaces of {RANKS_OF_A_NODE} ranks, and one in reserve",
        "restored_from_memory_and_peers_alone": sum("directory" not in one.restored for one in restarts),
        "trials_measured": sum(one.measured for one in restarts),
        "bytes_that_nodes_lacked": sum(one.lacking for one in restarts),
        "bytes_that_restores_read_from_other_nodes": sum(one.fetched for one in restarts),
        "bytes_due_between_nodes": sum(one.due for one in restarts if one.measured),
        "bytes_sent_between_nodes": sum(one.sent for one in restarts if one.measured),
        "seconds": round(time.monotonic() - begun),
        "seed": options.seed,
        "violated": violated,
    }
    report("nodes", "Nodes that are lost, cut off and replaced", facts, [table(outcomes), NOTES])
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())

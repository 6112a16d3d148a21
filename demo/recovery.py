"""The demo of recovery: four ranks on two nodes, with a rank killed, one hung, a loss that is NaN, and a node lost.

    python demo/recovery.py [--out demo-out/recovery]

Each node is a `lastgood run` of its own on this machine, with two ranks; a third one waits in reserve. The faults come
from outside: SIGKILL, SIGSTOP, a file at which one loss becomes NaN, and SIGKILL to everything on a node. Nobody
restarts anything but `lastgood run` itself. Then the same training runs in peace, without the batches that the NaN has
cost, and both are compared. It ends with status 1 if they differ in one bit, or if anything else does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from proof import Check
from recovery_picture import draw
from recovery_story import HUNG, KILLED, NAN, NODE, RANKS, Blow, Kind, Life, Story, checks, lives, story
from recovery_train import POISONED_RANK
from rich import box
from rich.console import Console
from rich.table import Table
from run import Failed, concluded, say

import lastgood
from lastgood.cli import app
from lastgood.run import job_logs
from lastgood.supervisor.nodes import free_port

TRAIN = Path(__file__).with_name("recovery_train.py")
FAULTS = (KILLED, HUNG, NAN, NODE)
SAVE_EVERY_STEPS = 12
SILENT_SECONDS = 120.0
"""a job that shows nothing for so long is given up"""
STORE, SECOND, RESERVE = "node-a", "node-b", "node-c"
COMMAND = [sys.executable, "-m", "lastgood", "run", "--hang-timeout", "4", "--preload", "sklearn.datasets"]


class Plan(NamedTuple):
    """When which faults come: one shortly before every second save, so that there are steps to train again."""

    faults: Sequence[Kind]
    save_every: int

    @property
    def steps(self) -> int:
        """That the job trains."""
        return self.due(len(self.faults) - 1) + self.save_every

    def due(self, number: int) -> int:
        """The step after which a fault comes."""
        return (2 * number + 2) * self.save_every - max(1, self.save_every // 5)


class Job:
    """The nodes of one job and their files, in a folder of its own. They end with the block."""

    def __init__(self, folder: Path, plan: Plan, left_out: Sequence[Sequence[int]] = ()) -> None:
        self.run, self.records, self.notes = folder / "run", folder / "records", folder / "lives.jsonl"
        self._folder, self._port = folder, free_port("127.0.0.1")
        self._nodes = dict[str, subprocess.Popen[bytes]]()
        self._script = [str(TRAIN), str(self.run), "--steps", str(plan.steps), "--save-every", str(plan.save_every)]
        self._script += ["--lives", str(self.notes), "--leave-out", json.dumps(left_out)]
        folder.mkdir(parents=True)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for name in self._nodes:
            self.lose(name)

    def start(self, name: str, ranks: int, nodes: int) -> float:
        """Start a node. Returns when."""
        options = ["--nproc-per-node", str(ranks), "--records", str(self.records)]
        if nodes > 1:
            host = "true" if name == STORE else "false"
            conf = f"is_host={host},last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=5"
            options += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-conf", conf]
            options += ["--rdzv-endpoint", f"127.0.0.1:{self._port}"]
        environment = {**os.environ, "LASTGOOD_NODE": name, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        with open(self._log(name), "wb") as log:
            self._nodes[name] = subprocess.Popen(
                [*COMMAND, *options, *self._script], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        return time.monotonic()

    def lose(self, name: str) -> None:
        """Kill every process of a node, as if its machine had lost its power."""
        node = self._nodes[name]
        for pid in [*_descendants(node.pid), node.pid] if node.poll() is None else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def lives(self, attempt: int) -> list[Life]:
        """The ranks of an attempt that have opened the run."""
        return [one for one in lives(self.notes) if one.attempt == attempt]

    def reached(self, attempt: int) -> int:
        """The newest step of an attempt; 0 if it has none."""
        return max((one.global_step for one in job_logs.steps(self.records, 0) if one.attempt == attempt), default=0)

    def until(self, happened: Callable[[], object]) -> None:
        """Wait. Raises Failed if a node ends that was not lost, if the job ends before, or if it shows nothing new."""
        shown_at, shown = time.monotonic(), ""
        while True:
            over = self.ended
            if happened():
                return
            now = f"{self.notes.read_text() if self.notes.exists() else ''} {len(job_logs.steps(self.records, 0))}"
            if now != shown:
                shown_at, shown = time.monotonic(), now
            failed = [name for name, one in self._nodes.items() if one.poll() not in (None, 0, -signal.SIGKILL)]
            if failed or over or time.monotonic() > shown_at + SILENT_SECONDS:
                texts = "\n".join(f"{name}:\n{self._log(name).read_text()[-2000:]}" for name in failed or self._nodes)
                state = "failed" if failed else "ended before its next fault" if over else "hangs"
                raise Failed(f"{' and '.join(failed) or 'the job'} {state}. The logs:\n{texts}")
            time.sleep(0.05)

    @property
    def ended(self) -> bool:
        return all(one.poll() is not None for one in self._nodes.values())

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def _descendants(root: int) -> list[int]:
    """The processes that a process has started, and those that they have started."""
    parents = dict[int, int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid]
    return found[1:]


# ---- the faults --------------------------------------------------------------------------------------------------


def strike(job: Job, kind: Kind, attempt: int) -> Blow:
    """Make a fault now: the kill on the node of the store, the hang and the loss of a node on the other one."""
    ranks = job.lives(attempt)
    if kind is NAN:
        hit = [one for one in ranks if one.rank == POISONED_RANK]
    else:
        node = STORE if kind is KILLED else SECOND
        hit = [one for one in ranks if one.node == node and (kind is NODE or one.local == 1)]
    saved = max((one.step for one in lastgood.open(job.run).lineage()), default=0)
    blow = Blow(kind, time.monotonic(), tuple(one.rank for one in hit), hit[0].node, saved)
    if kind is NAN:
        job.notes.with_suffix(".nan").touch()
    elif kind is NODE:
        job.lose(SECOND)
    else:
        os.kill(hit[0].pid, signal.SIGKILL if kind is KILLED else signal.SIGSTOP)
    return blow


def in_trouble(folder: Path, plan: Plan, console: Console) -> Story:
    """Train with the faults, each at its step."""
    blows, reserve = list[Blow](), None
    with Job(folder, plan) as job:
        for name in (STORE, SECOND):
            job.start(name, RANKS // 2, nodes=2)
        for number, kind in enumerate(plan.faults):
            job.until(lambda number=number: len(job.lives(number)) == RANKS)
            if NODE in plan.faults and reserve is None:
                reserve = RESERVE, job.start(RESERVE, RANKS // 2, nodes=2)
            job.until(lambda number=number: job.reached(number) >= plan.due(number))
            blows.append(blow := strike(job, kind, number))
            hit = "ranks " if len(blow.ranks) > 1 else "rank "
            hit += " and ".join(map(str, blow.ranks))
            say(console, f"after step {job.reached(number)}: {kind.name}, {hit} of {blow.node}")
        job.until(lambda: job.ended)
        return story(job.run, job.records, job.notes, blows, reserve)


def in_peace(folder: Path, plan: Plan, left_out: Sequence[Sequence[int]]) -> Story:
    """Train without a fault, on one node, and without the batches `left_out`."""
    with Job(folder, plan, left_out) as job:
        job.start("undisturbed", RANKS, nodes=1)
        job.until(lambda: job.ended)
        return story(job.run, job.records, job.notes, [])


# ---- all of it ---------------------------------------------------------------------------------------------------


def costs(healed: Story, plain: bool) -> Table:
    """A row for each fault: what was reported, and what it has cost."""
    caption = "first noticed: the first failure of any rank. Ranks that are connected to a lost node fail at once; "
    caption += "that the node shows no sign of life is known later."
    rows = Table(box=None if plain else box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for title in ("fault", "first cause, as recorded", "steps", "first noticed", "back after"):
        rows.add_column(title, overflow="fold")
    for number, (blow, attempt) in enumerate(zip(healed.blows, healed.attempts, strict=False)):
        cause, after = attempt.cause, healed.attempts[number + 1 :][:1]
        what = "none" if cause is None else cause.what.splitlines()[0]
        back = healed.back(number)
        rows.add_row(
            blow.kind.short,
            f"rank {cause.rank}: {what}" if cause is not None and cause.kind in ("signal", "hang") else what,
            f"{healed.reached(number)} -> {after[0].restored_step}" if after else "",
            f"{max(0.0, healed.noticed(number) - blow.at):.1f} s",
            "never" if back is None else f"{back - blow.at:.1f} s",
        )
    return rows


def demo(out: Path, plan: Plan, console: Console) -> tuple[list[Check], Story]:
    """Both jobs, the comparison and the picture, in `out`; what an earlier demo left there goes. Raises Failed."""
    for folder in ("faults", "undisturbed"):
        shutil.rmtree(out / folder, ignore_errors=True)
    (out / "timeline.png").unlink(missing_ok=True)
    healed = in_trouble(out / "faults", plan, console)
    say(console, f"finished at step {healed.reached(len(healed.attempts))} of {plan.steps}")
    begun = time.monotonic()
    calm = in_peace(out / "undisturbed", plan, [] if healed.finish is None else healed.finish.left_out)
    say(console, f"undisturbed, without what was left out: {plan.steps} steps in {time.monotonic() - begun:.0f} s")
    found = checks(calm, healed, out / "undisturbed/run", out / "faults/run", plan.steps)
    draw(out / "timeline.png", healed, all(one.holds for one in found))
    return found, healed


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--out", type=Path, default=Path("demo-out/recovery"))
    args = options.parse_args()
    console, begun = Console(width=None if sys.stdout.isatty() else 140), time.monotonic()
    try:
        found, healed = demo(args.out.absolute(), Plan(FAULTS, SAVE_EVERY_STEPS), console)
    except Failed as error:
        say(console, f"The demo failed: {error}")
        return 1
    except KeyboardInterrupt:
        say(console, "Stopped; all nodes have been ended.")
        return 130
    say(console, f"\nlastgood attempts {args.out / 'faults/run'}")
    sys.stdout.flush()
    app.main(["attempts", str(args.out / "faults/run")])
    console.print()
    console.print(costs(healed, plain=not console.is_terminal))
    say(console, f"\nPicture: {args.out / 'timeline.png'}")
    return concluded(found, console, begun)


if __name__ == "__main__":
    sys.exit(main())

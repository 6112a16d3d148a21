"""Faults in every phase of real jobs of four ranks under `lastgood run`, and whether each job came back exactly.

A job trains a small network (recovery_job.py). In each of its attempts a fault of recovery_faults.py happens, and
recovery_judge.py judges what followed; at the end losses, weights and samples are compared with those of a job without
faults. Finished jobs are kept in a journal, so that an interrupted campaign goes on. Needs root: the run lies in a
small file system of its own, and memory is limited by a control group. `--nodes 2`: the ranks belong to two nodes, each
with a supervisor of its own. Writes lab/reports/recovery.*, with two nodes recovery-nodes.*
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lastgood.run import access
from lastgood.supervisor import attempt_log
from lastgood_lab import provenance
from lastgood_lab.campaigns.recovery_faults import (
    BEFORE_PROGRESS,
    ENDING,
    PASSING,
    PHASES,
    Attempt,
    Fault,
    Plan,
    remove_groups,
)
from lastgood_lab.campaigns.recovery_judge import Note, Reported, Trial, compared, judged, reported
from lastgood_lab.campaigns.recovery_nodes import Life
from lastgood_lab.campaigns.reports import PROVED, report
from lastgood_lab.campaigns.trials import in_memory
from lastgood_lab.journal import Journal

RANKS, HANG_SECONDS, SLOW_WINDOW_SECONDS, ROOM, TOTAL = 4, 6, 0.3, "size=32m", 422
LIMIT_SECONDS = 1200.0
FRUITLESS_JOBS = 3
COMMAND = [sys.executable, "-m", "lastgood", "run", "--hang-timeout", str(HANG_SECONDS)]
COMMAND += ["--slow-window", str(SLOW_WINDOW_SECONDS)]
JOB = ["-m", "lastgood_lab.campaigns.recovery_job"]


class Lived(NamedTuple):
    """What a job was. `code`: exit code of its last supervisor. `left`: processes that outlived it."""

    notes: list[Note]
    reports: dict[int, Reported]
    code: int
    left: list[int]


def cells() -> list[tuple[str, str]]:
    """Every kind of fault in every phase. A loss comes first in the first step after a restore."""
    every = [(kind, phase) for kind in (*ENDING, *PASSING) for phase in PHASES]
    return [one for one in every if one not in (("nan", "start"), ("nan", "rendezvous"))]


def plan_of(number: int, room: str) -> Plan:
    """The plan of job `number`: every other one has one half of the cells, the next one the other half.

    An attempt that fails before it saves is followed by one that does: else the job would be given up.
    """
    chance, order = random.Random(number), random.Random(number // 2)
    shuffled = order.sample(cells(), len(cells()))
    chosen = [_fault(kind, phase, chance) for kind, phase in shuffled[number % 2 :: 2]]
    passing = [one for one in chosen if one.kind in PASSING]
    early = [one for one in chosen if one.kind not in PASSING and one.phase in BEFORE_PROGRESS]
    late = [one for one in chosen if one.kind not in PASSING and one.phase not in BEFORE_PROGRESS]
    attempts = list[Attempt]()
    while early or late or passing:
        if early:
            attempts.append(Attempt(faults=[early.pop()]))
        attempts.append(Attempt(faults=[late.pop()] if late else []))
        if passing and not early:
            attempts += [Attempt(faults=[passing.pop()]), Attempt()]
    return Plan(attempts=attempts, total=TOTAL, room=room)


def _fault(kind: str, phase: str, chance: random.Random) -> Fault:
    rank = 0 if kind == "store" else chance.randrange(RANKS)
    moment = 0.0 if kind == "nan" or (kind, phase) == ("stop", "teardown") else chance.random()
    return Fault(kind=kind, phase=phase, rank=rank, moment=moment)


@contextmanager
def mounted(folder: Path) -> Iterator[str]:
    """A small file system of its own in a folder."""
    room = folder / "room"
    room.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", ROOM, "tmpfs", room], check=True)
    try:
        yield str(room)
    finally:
        subprocess.run(["umount", room], check=True)


def lived(folder: Path, plan: Plan, nodes: int = 1) -> Lived:
    """Run a job to its end. A supervisor that was killed is started again."""
    (folder / "plan.json").write_bytes(msgspec.json.encode(plan))
    reports, first = dict[int, Reported](), 0
    while True:
        code, found = _life(folder, nodes, first)
        reports |= found
        notes = [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]
        if code >= 0:
            break
        first = max(one["attempt"] for one in notes) + 1
    remove_groups()
    reports = _with_slow(reports, notes, attempt_log.read(access.for_reading(Path(plan.room) / "run")))
    pids = {one["pid"] for one in notes if one["what"] == "start"}
    return Lived(notes, reports, code, [pid for pid in pids if _lives(pid, folder)])


def _life(folder: Path, nodes: int, first: int) -> tuple[int, dict[int, Reported]]:
    """Start a job once. Returns its exit code, negative if it is to be started again, and what was reported.

    `first`: the number of its first attempt.
    """
    command, program = [*COMMAND, "--nproc-per-node", str(RANKS // nodes)], [*JOB, str(folder)]
    if nodes > 1:
        life = Life(folder, first, command, program)
        return life.lived(time.monotonic() + LIMIT_SECONDS), life.reports()
    command += [*program, str(first)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS, check=False)
    return done.returncode, reported(done.stderr, first)


def _with_slow(
    reports: Mapping[int, Reported], notes: Sequence[Note], attempts: Sequence[attempt_log.Attempt]
) -> dict[int, Reported]:
    """The reports, with the ranks that the records of the attempts name as slow: each supervisor prints those of its
    node only."""
    found, clock = dict[int, Reported](), time.time() - time.monotonic()
    for number, line in reports.items():
        at = clock + min((one["at"] for one in notes if one["attempt"] == number), default=0.0)
        slow = [one.slow for one in attempts if one.began_at <= at <= one.began_at + one.seconds]
        ranks = {rank.rank for times in slow for one in times for rank in one.ranks}
        found[number] = line._replace(slow=tuple(sorted(ranks)))
    return found


def _lives(pid: int, folder: Path) -> bool:
    try:
        return str(folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def tried(folder: Path, number: int, nodes: int = 1) -> dict[str, Any]:
    """Run one job, and one without faults which leaves out the same batches. Returns its trials and problems."""
    begun = time.monotonic()
    with mounted(folder / "faults") as room:
        plan = plan_of(number, room)
        found = lived(folder / "faults", plan, nodes)
    ends = [one for one in found.notes if one["what"] == "end"]
    skipped = [(epoch, window) for epoch, window in ends[-1]["skipped"]] if ends else []
    with mounted(folder / "calm") as room:
        calm = lived(folder / "calm", Plan(attempts=[], total=TOTAL, room=room, skipped=skipped))
    trials = judged(plan, found.notes, found.reports)
    problems = compared(plan, found.notes, calm.notes, found.code)
    unsaved = [one for one in found.notes if one["what"] == "not saved"]
    problems += [f"process {pid} has outlived the job" for pid in found.left]
    reports = {number: [*line] for number, line in found.reports.items()}
    seconds = round(time.monotonic() - begun, 1)
    return {
        "trials": [[*one] for one in trials],
        "problems": problems,
        "reports": reports,
        "unsaved": unsaved,
        "seconds": seconds,
    }


def table(trials: Sequence[Trial]) -> str:
    """One row for each kind of fault: trials, and in parentheses how many went on without a restart, by phase."""
    lines = ["| fault | " + " | ".join(PHASES) + " |", "|---" * (len(PHASES) + 1) + "|"]
    for kind in (*ENDING, *PASSING):
        cells_of_kind = []
        for phase in PHASES:
            mine = [one for one in trials if (one.kind, one.phase) == (kind, phase)]
            on = sum(one.outcome == "went on" for one in mine)
            cells_of_kind.append(f"{len(mine)}" + (f" ({on})" if on else ""))
        lines.append(f"| {kind} | " + " | ".join(cells_of_kind) + " |")
    return "\n".join(lines)


def unnamed(trials: Sequence[Trial]) -> str:
    """The faults whose rank and kind were not named, counted."""
    counted = Counter((one.kind, one.phase) for one in trials if one.cause is False)
    rows = [f"| {kind} | {phase} | {count} |" for (kind, phase), count in counted.most_common()]
    return "\n".join(["| fault whose first cause was not named | phase | trials |", "|---|---|---|", *rows])


def write(jobs: Sequence[dict[str, Any]], first: int, nodes: int) -> int:
    """Write the report. Returns the number of violations."""
    trials = [Trial(*one) for job in jobs for one in job["trials"]]
    named = [one.cause for one in trials if one.cause is not None]
    violated = [text for job in jobs for text in job["problems"]]
    violated += [f"{one.kind} in {one.phase}: {text}" for one in trials for text in one.problems]
    facts = {
        "jobs": len(jobs),
        "trials": len(trials),
        "violations": len(violated),
        "first_cause_named": sum(named),
        "first_cause_to_name": len(named),
        "seconds": round(sum(job["seconds"] for job in jobs)),
        "ranks": RANKS,
        "first_job": first,
        "violated": violated,
    }
    title, tables = "Faults in every phase of jobs under `lastgood run`", [table(trials), unnamed(trials)]
    report("recovery", title, facts, tables, tier="nodes" if nodes > 1 else "directory")
    return len(violated)


def _in_memory(number: int, nodes: int) -> dict[str, Any]:
    """As `tried`. A job that hangs, or whose notes cannot be judged, is a violation, and the campaign goes on."""
    try:
        with in_memory() as folder:
            return tried(folder, number, nodes)
    except (subprocess.TimeoutExpired, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
        return {"trials": [], "problems": [problem], "reports": {}, "unsaved": [], "seconds": 0.0}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=2000, help="at least so many faults (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="number of the first job, which determines its faults")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="so many at once (default: %(default)s)")
    parser.add_argument("--journal", type=Path, default=Path(tempfile.gettempdir()) / "recovery.journal.jsonl")
    options = parser.parse_args()
    if os.geteuid():
        parser.error("needs root: it mounts file systems, and limits memory")
    if options.trials < 1 or options.jobs < 1:
        parser.error("--trials and --jobs: give at least 1")
    # What other code has lived through is no proof of this one.
    code = {"sources": provenance.digest(PROVED["recovery"])}
    journal, jobs, numbers = Journal(options.journal, code), list[dict[str, Any]](), count(options.first)
    trials, nodes = 0, options.nodes
    with ThreadPoolExecutor(options.jobs) as workers:
        while trials < options.trials:
            some = [next(numbers) for _ in range(options.jobs)]
            keys = {number: {"job": number} | ({"nodes": nodes} if nodes > 1 else {}) for number in some}
            known = {number: journal.get(**keys[number]) for number in some}
            begun = {number: workers.submit(_in_memory, number, nodes) for number in some if known[number] is None}
            for done in as_completed(begun.values()):
                number = next(at for at, one in begun.items() if one is done)
                known[number] = journal.put(done.result(), **keys[number])
            for number in some:
                jobs.append(known[number] or {})
                trials += len(jobs[-1]["trials"])
                for text in jobs[-1]["problems"]:
                    print(f"\njob {number}: {text}", flush=True)
            if len(jobs) >= FRUITLESS_JOBS and not any(job["trials"] for job in jobs[-FRUITLESS_JOBS:]):
                parser.exit(1, f"{FRUITLESS_JOBS} jobs in a row had no trial: see above. No report is written.\n")
            wrong = sum(bool(job["problems"]) for job in jobs)
            print(f"{trials:,} of {options.trials:,} trials, {len(jobs)} jobs, {wrong} with violations", flush=True)
    return 1 if write(jobs, options.first, nodes) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Fault injection into every system call of a save by several ranks: the call fails with an errno, or the rank dies.

A trial is a world of `rank_jobs.py`, real processes under gloo. It makes three saves, with the fault in the second.
All ranks must report the same outcome of that save in bounded time. A durable generation must exist bit for bit, and a
refused one must not exist. After an errno the next save must succeed; after the death of a rank another world must
restore the newest generation and save. Writes lab/reports/ranks.*
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import lastgood
from lastgood_lab.campaigns.rank_jobs import PATIENCE, faulted, resaved, whole
from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.trials import in_memory, progress
from lastgood_lab.worlds import world

WORLDS = {"ddp": 2, "fsdp": 3}
FAULTS = ("KILL", "EIO", "ENOSPC", "EDQUOT", "EACCES", "EMFILE")
BOUND_SECONDS = 4 * PATIENCE
"""within which every living rank must have learned the outcome of a save"""


class Fault(NamedTuple):
    """A fault: call number `at` of rank `who` in the second save of a world. `what`: KILL or the name of an errno."""

    kind: str
    who: int
    at: int
    what: str


class Result(NamedTuple):
    """The outcome of a trial. `hit`: the call and the file that failed. `seconds`: the longest that a rank waited."""

    fault: Fault
    hit: str
    outcome: str
    seconds: float
    problems: list[str]


def reference(at: Path, kind: str) -> tuple[dict[int, dict[str, bytes]], list[int]]:
    """A world without a fault: the contents of each step, and how many calls each rank makes in the second save."""
    by_rank = world(WORLDS[kind], faulted, kind, at / kind, -1, -1, "EIO")
    return {step: whole(at / kind, step) for step in (1, 2, 3)}, [one["calls"] for one in by_rank]


def faults(calls: dict[str, list[int]]) -> list[Fault]:
    """Every fault at every call of ranks 0 and 1. Rank 2 of the FSDP2 world makes the same calls as rank 1."""
    return [
        Fault(kind, rank, at, what)
        for kind, counts in calls.items()
        for rank, count in enumerate(counts[:2])
        for at in range(count)
        for what in FAULTS
    ]


def trial(folder: Path, expected: dict[str, dict[int, dict[str, bytes]]], fault: Fault) -> Result:
    """Run one world with its fault, and check what it reported and saved."""
    kind, rank, at, what = fault
    size, dies = WORLDS[kind], what == "KILL"
    with tempfile.TemporaryDirectory(dir=folder) as parent:
        root = Path(parent) / "run"
        try:
            by_rank = world(size, faulted, kind, root, rank, at, what, dies=(rank,) if dies else ())
        except RuntimeError as error:
            return Result(fault, "", "", 0.0, [str(error)])
        living = [one for one in by_rank if one is not None]
        steps = [one.step for one in lastgood.open(root).generations()]
        problems = judged(living, steps, dies, coordinated=by_rank[0] is not None)
        problems += [f"step {step} holds other bytes" for step in steps if whole(root, step) != expected[kind][step]]
        if dies:
            newest = max(steps)
            again = world(size, resaved, kind, [root])
            if again != [[newest]] * size or whole(root, newest + 1) != expected[kind][newest]:
                problems.append(f"another world restored {again}, or saved other bytes; the newest step was {newest}")
        if not lastgood.open(root).verify().good:
            problems.append("verification of the newest generation fails")
    outcomes = sorted({one["2"].partition(":")[0] for one in living})
    hit = next((one["hit"] for one in living if one["hit"]), "")
    return Result(fault, hit, "+".join(outcomes), max(one["2 seconds"] for one in living), problems)


def judged(living: list[dict[str, Any]], steps: list[int], dies: bool, coordinated: bool) -> list[str]:
    """The violations in the outcomes that the living ranks report. `steps`: those of the run's generations.

    `coordinated`: rank 0 lives. If it died, the others cannot know whether the save was committed.
    """
    second = [one["2"] for one in living]
    durable, unknown = second.count("durable"), not coordinated or any("CommitUnknown" in one for one in second)
    wrong = {
        "the ranks report different outcomes": 0 < durable < len(second) and not unknown,
        "reported as durable, but missing": bool(durable) and 2 not in steps,
        "refused, but committed": not durable and 2 in steps and not unknown,
        f"the outcome took more than {BOUND_SECONDS:.0f} s": max(one["2 seconds"] for one in living) > BOUND_SECONDS,
        "the first save failed": any(one["1"] != "durable" for one in living),
        "the next save failed": not dies and any(one["3"] != "durable" for one in living),
    }
    return [f"{name}: {living}" for name, holds in wrong.items() if holds]


def table(results: list[Result]) -> str:
    """One row for each fault and rank: the number of trials, and the outcomes that the living ranks reported."""
    lines = ["| fault | rank | trials | save durable | errors | longest, seconds |", "|---|---|---|---|---|---|"]
    for what in FAULTS:
        for rank in (0, 1):
            selected = [one for one in results if (one.fault.what, one.fault.who) == (what, rank)]
            failed = Counter(one.outcome for one in selected if one.outcome != "durable")
            errors = ", ".join(f"{outcome} {count}" for outcome, count in failed.most_common())
            durable = sum(one.outcome == "durable" for one in selected)
            longest = max((one.seconds for one in selected), default=0.0)
            lines.append(f"| {what} | {rank} | {len(selected)} | {durable} | {errors} | {longest:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=0, help="number of faults, chosen by the seed; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="determines the choice of faults")
    parser.add_argument(
        "--jobs", type=int, default=2, help="worlds at a time; a trial in which a rank dies mostly waits"
    )
    options = parser.parse_args()
    begun = time.monotonic()
    with in_memory() as folder:
        expected: dict[str, Any] = {}
        calls: dict[str, list[int]] = {}
        for kind in WORLDS:
            expected[kind], calls[kind] = reference(folder, kind)
        todo = faults(calls)
        if options.trials:
            todo = random.Random(options.seed).sample(todo, options.trials)
        results: list[Result] = []
        show = progress(len(todo))
        with ThreadPoolExecutor(options.jobs) as pool:
            for one in pool.map(partial(trial, folder, expected), todo):
                results.append(one)
                if one.problems:
                    print(f"\n{one.fault} {one.hit}\n  " + "\n  ".join(one.problems), flush=True)
                show(len(results), sum(bool(found.problems) for found in results))
    wrong = sum(bool(one.problems) for one in results)
    facts = {
        "trials": len(results),
        "violations": wrong,
        "patience_seconds": PATIENCE,
        "longest_until_all_ranks_knew_seconds": round(max(one.seconds for one in results), 1),
        "calls_of_a_save_by_rank": calls,
        "seconds": round(time.monotonic() - begun),
        "seed": options.seed,
    }
    report("ranks", "Faults on one rank of several", facts, [table(results)])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

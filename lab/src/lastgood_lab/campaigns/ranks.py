"""Every system call of a save by several ranks, on each rank: failed with an errno, or the process ended there.

A trial is a world of `rank_jobs.py`, real processes under gloo: three saves, the fault in the second. What all ranks
say of it must be one thing, in bounded time; what was durable is there to the bit, what was refused is not; after an
errno the next save works, and after a death another world restores the newest and saves. Writes lab/reports/ranks.*
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
"""in which every living rank has been told what became of a save"""


class Fault(NamedTuple):
    """What goes wrong: call number `at` of rank `who` in the second save of a world."""

    kind: str
    who: int
    at: int
    what: str


class Result(NamedTuple):
    """What a trial showed."""

    fault: Fault
    hit: str
    outcome: str
    seconds: float
    problems: list[str]


def reference(at: Path, kind: str) -> tuple[dict[int, dict[str, bytes]], list[int]]:
    """What each step holds when nothing goes wrong, and how many calls each rank makes during the second save."""
    told = world(WORLDS[kind], faulted, kind, at / kind, -1, -1, "EIO")
    return {step: whole(at / kind, step) for step in (1, 2, 3)}, [one["calls"] for one in told]


def faults(calls: dict[str, list[int]]) -> list[Fault]:
    """All of them. FSDP2's rank 2 makes the calls of rank 1."""
    return [
        Fault(kind, who, at, what)
        for kind, counts in calls.items()
        for who, count in enumerate(counts[:2])
        for at in range(count)
        for what in FAULTS
    ]


def trial(folder: Path, expected: dict[str, dict[int, dict[str, bytes]]], fault: Fault) -> Result:
    """One world with its fault, and what it left."""
    kind, who, at, what = fault
    size, dies = WORLDS[kind], what == "KILL"
    with tempfile.TemporaryDirectory(dir=folder) as home:
        root = Path(home) / "run"
        try:
            told = world(size, faulted, kind, root, who, at, what, dies=(who,) if dies else ())
        except RuntimeError as error:
            return Result(fault, "", "", 0.0, [str(error)])
        living = [one for one in told if one is not None]
        there = [one.step for one in lastgood.open(root).generations()]
        problems = judged(living, there, dies, coordinated=told[0] is not None)
        problems += [f"step {step} is not as it was" for step in there if whole(root, step) != expected[kind][step]]
        if dies:
            newest = max(there)
            again = world(size, resaved, kind, [root])
            if again != [[newest]] * size or whole(root, newest + 1) != expected[kind][newest]:
                problems.append(f"another world restored {again}, the newest was {newest}")
        if not lastgood.open(root).verify().good:
            problems.append("the newest does not verify")
    words = sorted({one["2"].partition(":")[0] for one in living})
    hit = next((one["hit"] for one in living if one["hit"]), "")
    return Result(fault, hit, "+".join(words), max(one["2 seconds"] for one in living), problems)


def judged(living: list[dict[str, Any]], there: list[int], dies: bool, coordinated: bool) -> list[str]:
    """What is wrong with what the living ranks were told. `coordinated`: rank 0 lives, which alone can know."""
    second = [one["2"] for one in living]
    durable, unknown = second.count("durable"), not coordinated or any("CommitUnknown" in one for one in second)
    wrong = {
        "not one outcome": 0 < durable < len(second) and not unknown,
        "called durable, and not there": bool(durable) and 2 not in there,
        "refused, and there": not durable and 2 in there and not unknown,
        f"more than {BOUND_SECONDS:.0f} s": max(one["2 seconds"] for one in living) > BOUND_SECONDS,
        "the first save failed": any(one["1"] != "durable" for one in living),
        "the next save failed": not dies and any(one["3"] != "durable" for one in living),
    }
    return [f"{name}: {living}" for name, holds in wrong.items() if holds]


def table(results: list[Result]) -> str:
    """By fault and rank: how many trials, and what the living ranks were told."""
    lines = ["| fault | rank | trials | save durable | told | longest, seconds |", "|---|---|---|---|---|---|"]
    for what in FAULTS:
        for who in (0, 1):
            mine = [one for one in results if (one.fault.what, one.fault.who) == (what, who)]
            told = Counter(one.outcome for one in mine if one.outcome != "durable")
            words = ", ".join(f"{word} {count}" for word, count in told.most_common())
            durable = sum(one.outcome == "durable" for one in mine)
            longest = max((one.seconds for one in mine), default=0.0)
            lines.append(f"| {what} | {who} | {len(mine)} | {durable} | {words} | {longest:.1f} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=0, help="a seeded choice of so many; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="worlds at a time; most of a death is waiting")
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

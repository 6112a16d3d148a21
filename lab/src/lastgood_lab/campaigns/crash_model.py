"""A million crash states of the real code on a disk that keeps nothing it was not asked to keep.

The disk is lastgood_lab/hostile.py. Every scenario of lastgood_lab/scenarios.py is played with one seed after another
until so many states have been judged. A state is counted once, by the digest of everything on the disk. It stops at the
fifth violation and prints the seeds that play them again. Writes lab/reports/crash_model.*
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from lastgood.storage.directory import WriteMode
from lastgood_lab.campaigns.reports import report
from lastgood_lab.crashmodel import Judge
from lastgood_lab.ledger import Violation
from lastgood_lab.scenarios import SCENARIOS, play

Play = tuple[int, WriteMode, int]


class Played(NamedTuple):
    """One scenario with one seed."""

    scenario: str
    mode: str
    states: set[int]
    judged: int
    lost: int
    violation: str


def one(what: Play) -> Played:
    place, mode, seed = what
    scenario = SCENARIOS[place]
    # The weaker modes are not carried on: what they leave need not be a run that can be.
    carry_on = Judge.carry_on if mode == "atomic_dirsync" else 0.0
    judge = Judge(random.Random(f"{scenario.name} {mode} {seed}"), carry_on=carry_on)
    violation = ""
    try:
        play(scenario, judge, mode)
    except Violation as error:
        violation = f"{scenario.name}, {mode}, seed {seed}: {error}"
    return Played(scenario.name, mode, judge.states, len(judge.judged), judge.lost, violation)


def plays(mode: WriteMode, seed: int) -> Iterator[Play]:
    while True:
        for place in range(len(SCENARIOS)):
            yield place, mode, seed
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=1_000_000, help="distinct states to judge, mode atomic_dirsync")
    parser.add_argument("--weaker", type=int, default=20_000, help="and of each of the two weaker write modes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    begun = time.monotonic()
    rows, violations = [], []
    total = 0
    goals: list[tuple[WriteMode, int]] = [
        ("atomic_dirsync", options.states),
        ("atomic_nodirsync", options.weaker),
        ("unsafe", options.weaker),
    ]
    for mode, goal in goals:
        states: set[int] = set()
        by_scenario, judged, lost = Counter[str](), Counter[str](), Counter[str]()
        # A fork would share the arena's memory. Ctrl-C is for this process: it ends the mode and reports what was done.
        with multiprocessing.get_context("spawn").Pool(
            options.jobs, signal.signal, (signal.SIGINT, signal.SIG_IGN)
        ) as pool:
            with contextlib.suppress(KeyboardInterrupt):
                for played in pool.imap_unordered(one, plays(mode, options.seed)):
                    before = len(states)
                    states |= played.states
                    by_scenario[played.scenario] += len(states) - before
                    judged[played.scenario] += played.judged
                    lost[played.scenario] += played.lost
                    if played.violation:
                        violations.append(played.violation)
                        print(f"\n{played.violation}")
                    seconds = time.monotonic() - begun
                    print(f"\r{mode}: {len(states):,} of {goal:,} states, {seconds:.0f} s", end="", flush=True)
                    if len(states) >= goal or len(violations) >= 5:
                        break
            pool.terminate()
        print()
        total += len(states)
        rows += [
            f"| {mode} | {name} | {by_scenario[name]:,} | {judged[name]:,} | {lost[name]:,} |"
            for name in by_scenario
            if judged[name]  # slots know one way to write
        ]
        rows.append(f"| {mode} | **all** | **{len(states):,}** | {judged.total():,} | {lost.total():,} |")
    table = "\n".join(
        ["| write mode | scenario | distinct states | judgements | acknowledged lost |", "|---|---|---|---|---|", *rows]
    )
    told = "The weaker modes promise no durability: only a torn generation that loads would be a violation there."
    facts = {
        "distinct states": total,
        "violations": len(violations),
        "seed": options.seed,
        "seconds": round(time.monotonic() - begun),
    }
    report(
        "crash_model", "Crash states of save, retention, recovery and pointer moves", facts, [table, told, *violations]
    )
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())

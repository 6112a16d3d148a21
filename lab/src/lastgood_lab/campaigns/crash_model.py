"""A million crash states of the real code, on a simulated disk that keeps only what was synced.

The disk is lastgood_lab/hostile.py. The scenarios of lastgood_lab/scenarios.py are played with ascending seeds until
the requested number of distinct states has been judged. States are distinct if the digests of the whole disk differ.
The campaign prints each violation with the seed that reproduces it, and stops at the fifth. Writes
lab/reports/crash_model.*
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
from lastgood_lab.judge import Judge
from lastgood_lab.ledger import Violation
from lastgood_lab.scenarios import SCENARIOS, play

Play = tuple[int, WriteMode, int]
TWO_PLACES_SAMPLES, TWO_PLACES_CARRY_ON = 48, 0.02
"""`Judge.samples` and `Judge.carry_on` for a run in two places: there are more states, because each place loses its
data independently of the other, and to play a next process takes twice as long."""


class Played(NamedTuple):
    """The result of one scenario with one seed. `states`: digests of the distinct states that it reached."""

    scenario: str
    mode: str
    states: set[int]
    judged: int
    lost: int
    violation: str


def one(task: Play) -> Played:
    """Play one scenario."""
    index, mode, seed = task
    scenario = SCENARIOS[index]
    # After a crash in a weaker mode no further lives are played, because the run may not be usable any more.
    carry_on = Judge.carry_on if mode == "atomic_dirsync" else 0.0
    judge = Judge(random.Random(f"{scenario.name} {mode} {seed}"), carry_on=carry_on)
    if scenario.places > 1:
        judge.samples, judge.carry_on = TWO_PLACES_SAMPLES, TWO_PLACES_CARRY_ON
    violation = ""
    try:
        play(scenario, judge, mode)
    except Violation as error:
        violation = f"{scenario.name}, {mode}, seed {seed}: {error}"
    return Played(scenario.name, mode, judge.states, len(judge.judged), judge.lost, violation)


def plays(mode: WriteMode, seed: int) -> Iterator[Play]:
    """Every scenario with this seed, then with the next seed, without end."""
    while True:
        for index in range(len(SCENARIOS)):
            yield index, mode, seed
        seed += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--states", type=int, default=1_000_000, help="distinct states to judge in mode atomic_dirsync")
    parser.add_argument("--weaker", type=int, default=20_000, help="the same for each of the two weaker write modes")
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
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
        # A fork would share the arena's memory. Only this process handles Ctrl-C: it ends the mode and still reports.
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
            if judged[name]  # slots have only one write mode
        ]
        rows.append(f"| {mode} | **all** | **{len(states):,}** | {judged.total():,} | {lost.total():,} |")
    table = "\n".join(
        ["| write mode | scenario | distinct states | judgements | acknowledged lost |", "|---|---|---|---|---|", *rows]
    )
    note = "The weaker modes promise no durability: the only violation there is a torn generation that loads."
    facts = {
        "distinct states": total,
        "violations": len(violations),
        "seed": options.seed,
        "seconds": round(time.monotonic() - begun),
    }
    report(
        "crash_model", "Crash states of save, retention, recovery and pointer moves", facts, [table, note, *violations]
    )
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())

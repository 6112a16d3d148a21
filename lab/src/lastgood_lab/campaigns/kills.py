"""Thousands of SIGKILLs at random instants of the process in victim.py; the run is judged after each.

One run is killed fifty times in a row, each life restoring what the one before left; then two undisturbed lives follow,
and a new run begins. Lives run with writer threads and real syncs. Writes lab/reports/kills.*
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.trials import VICTIM, environment, progress
from lastgood_lab.campaigns.victim import TIERS
from lastgood_lab.campaigns.victim_ledger import Ledger

IN_A_ROW = 50
SAVES = 5
LEAST_LINES = 4 * SAVES + 4
"""lines that every life prints; the kills are spread over them"""


class Series(NamedTuple):
    """One run and what was done to it."""

    ends: Counter[str]
    """the kind of the last line of each life, counted"""
    acknowledged: int
    problems: list[str]


def series(at: Path, number: int, kills: int, pause_seconds: float, tier: str = "directory") -> Series:
    """Kill one run `kills` times, each up to `pause_seconds` after a line of its output; then run it without faults."""
    chance = random.Random(number)
    run, ledger, ends, saves = str(at / f"run{number}"), Ledger(tier=tier), Counter[str](), 0
    for kill in range(kills):
        seed = number * 1_000_000 + kill
        lines = _cut(at, run, tier, seed, chance.randrange(1, LEAST_LINES), chance.uniform(0, pause_seconds))
        ledger.read(lines)
        ends[lines[-1].split()[0]] += 1
        saves += sum(line.startswith("durable") for line in lines)
        ledger.judge(run)
        ledger.problems += [f"the victim reported {one}, although nothing had failed" for one in ledger.reported]
        if ledger.problems:
            return Series(ends, saves, [f"run {number}, kill {kill}: {one}" for one in ledger.problems])
    ledger.go_on(run, number * 1_000_000 + kills)
    return Series(ends, saves, [f"run {number}, after {kills} kills: {one}" for one in ledger.problems])


def pause(at: Path, tier: str = "directory") -> float:
    """The time between two lines of a life's output, in seconds."""
    found = []
    for seed in range(1, 6):
        with _life(at, str(at / "measured"), tier, seed) as victim:
            assert victim.stdout is not None
            victim.stdout.readline()
            begun = time.monotonic()
            lines = len(victim.stdout.readlines())
            found.append((time.monotonic() - begun) / lines)
    return sorted(found)[2]


def _cut(at: Path, run: str, tier: str, seed: int, count: int, seconds: float) -> list[str]:
    """The output of a life that is killed `seconds` after its line number `count`."""
    with _life(at, run, tier, seed) as victim:
        assert victim.stdout is not None and victim.stderr is not None
        lines = [victim.stdout.readline() for _ in range(count)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            victim.wait(seconds)
        victim.kill()
        lines += victim.stdout.readlines()
        errors = victim.stderr.read()
    return [line.strip() for line in lines if line] + [f"wrong {errors[-300:]!r}"] * bool(errors)


def _life(at: Path, run: str, tier: str, seed: int) -> subprocess.Popen[str]:
    command = [*VICTIM, run, f"--seed={seed}", f"--saves={SAVES}", "--threads=2", f"--tier={tier}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(at))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kills",
        type=int,
        default=2500,
        help="how many lives to kill; a few end before their kill (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="determines the moments of the kills")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--tier", choices=TIERS, default="directory", help="how the runs are stored")
    options = parser.parse_args()
    begun = time.monotonic()
    count = -(-options.kills // IN_A_ROW)
    results: list[Series] = []
    where = "/dev/shm" if options.tier == "memory" else None
    with tempfile.TemporaryDirectory(dir=where) as folder, ThreadPoolExecutor(options.jobs) as pool:
        at = Path(folder)
        span = pause(at, options.tier)
        show = progress(count * IN_A_ROW)
        numbers = range(options.seed * count, (options.seed + 1) * count)
        for one in pool.map(lambda number: series(at, number + 1, IN_A_ROW, span, options.tier), numbers):
            results.append(one)
            show(len(results) * IN_A_ROW, sum(bool(each.problems) for each in results))
            for problem in one.problems:
                print(f"\n{problem}", flush=True)
    ends = sum((one.ends for one in results), Counter[str]())
    violated = [problem for one in results for problem in one.problems]
    facts = {
        "kills": ends.total() - ends["done"],
        "lives_that_ended_before_the_kill": ends["done"],
        "runs": count,
        "kills_in_a_row": IN_A_ROW,
        "saves_acknowledged_and_found_again": sum(one.acknowledged for one in results),
        "violations": len(violated),
        "seconds_between_words": round(span, 4),
        "seconds": round(time.monotonic() - begun),
        "seed": options.seed,
        "last_words": dict(ends.most_common()),
        "violated": violated,
    }
    table = "| last line of a life | lives |\n|---|---|\n" + "\n".join(
        f"| {word} | {lives:,} |" for word, lives in ends.most_common()
    )
    report("kills", "Random SIGKILLs", facts, [table], options.tier)
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())

"""A job with which nothing is wrong, under `lastgood run` with short limits: nothing may be reported of it.

Four ranks train 10,000 short steps, with evaluations, compilations, stalls of the data and other work on the machine
(quiet_job.py). Violations: an attempt that has failed, a restart, and a rank that was named as slow. That all
ranks became slower is no violation, because they do beside other work; it is counted. The limits are shorter than the
defaults, so that a stall comes near them. Writes lab/reports/false_alarms.*
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lastgood.run import access
from lastgood.supervisor import attempt_log
from lastgood.supervisor.attempt_log import Attempt
from lastgood_lab.campaigns.checkout import checkout
from lastgood_lab.campaigns.quiet_job import COUNTS, EVALUATION_SECONDS, RUN, STALL_SECONDS, Counts
from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.trials import in_memory
from lastgood_lab.report import spread

RANKS = 4
LIMITS = {"--hang-timeout": 6, "--hang-factor": 20, "--hang-long-timeout": 300, "--slow-factor": 2, "--slow-window": 2}
LIMIT_SECONDS = 1800.0
assert STALL_SECONDS[1] < LIMITS["--hang-timeout"]
assert EVALUATION_SECONDS[1] > 2 * LIMITS["--hang-timeout"], "phases are longer than what a step may take"


class Judged(NamedTuple):
    """What was reported of a job. `causes`: why attempts have failed. `named`: slow times with a slow rank, which is
    wrong here; `unnamed`: those without one."""

    causes: list[str]
    named: list[str]
    unnamed: list[str]


def judged(attempts: Sequence[Attempt]) -> Judged:
    """What the records of a job's attempts report."""
    causes = [f"rank {one.cause.rank}: {one.cause.what}" for one in attempts if one.cause is not None]
    slow = [one for attempt in attempts for one in attempt.slow]
    return Judged(causes, [one.what for one in slow if one.ranks], [one.what for one in slow if not one.ranks])


def lived(folder: Path, steps: int, seed: int) -> dict[str, Any]:
    """Run the job to its end. Returns what happened in it, and what was reported of it."""
    command = [sys.executable, "-m", "lastgood", "run", "--nproc-per-node", str(RANKS)]
    command += [text for option, value in LIMITS.items() for text in (option, str(value))]
    command += ["-m", "lastgood_lab.campaigns.quiet_job", str(folder), str(steps), str(seed)]
    compiles = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}  # nothing is there from before
    code = subprocess.run(command, timeout=LIMIT_SECONDS, check=False, env=compiles).returncode
    attempts = attempt_log.read(access.for_reading(folder / RUN))
    # A job that was given up has none.
    counts = (
        msgspec.json.decode((folder / COUNTS).read_bytes(), type=Counts) if (folder / COUNTS).exists() else Counts()
    )
    found = judged(attempts)
    return {
        "steps": counts.steps,
        "violations": len(found.causes) + len(found.named) + (code != 0) + (counts.steps != steps),
        "attempts": len(attempts),
        "attempts_with_a_cause": len(found.causes),
        "slow_ranks_named": len(found.named),
        "times_when_all_were_slower": len(found.unnamed),
        "exit_code": code,
        "stalls": counts.stalls,
        "stall_seconds": round(counts.stall_seconds, 1),
        "longest_stall_seconds": round(counts.longest_stall_seconds, 2),
        "evaluations": counts.evaluations,
        "evaluation_seconds": round(counts.evaluation_seconds, 1),
        "longest_evaluation_seconds": round(counts.longest_evaluation_seconds, 1),
        "compile_seconds": [round(one, 1) for one in counts.compile_seconds],
        "steps_beside_other_work": counts.busy_steps,
        "seconds": round(counts.seconds),
        "load_average": spread(counts.loads, ".1f"),
        "ranks": RANKS,
        "limits": " ".join(f"{option} {value}" for option, value in LIMITS.items()),
        "seed": seed,
        "reported": [text.replace(f"{checkout()}/", "") for one in found for text in one],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, help="of the job (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="determines stalls")
    options = parser.parse_args()
    with in_memory() as folder:
        facts = lived(folder, options.steps, options.seed)
    reported = "\n".join(f"- {text}" for text in facts["reported"])
    report("false_alarms", "A job with which nothing is wrong", facts, [f"Reported:\n\n{reported or '- nothing'}"])
    return 1 if facts["violations"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""`lastgood bench restart`: from a crash or a hang to the first new step, under `lastgood run` and under torchrun.

Each round runs one job of four ranks for each fault and contender, in an order that rotates. The jobs train the same
(restart_job.py): under `lastgood run` with the state in the memory of the machine or in a directory, and under plain
torchrun, with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 (without it no attempt after the first one connects) and torch.save.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lastgood.errors import Refused
from lastgood.run import access, memory_place
from lastgood.supervisor import attempt_log

from .campaigns.memory_kills import memory_for_agents
from .durable import of_contender, ratios
from .journal import Journal, rotated
from .report import Progress, Report, Table, hardware, spread
from .restart_job import CRASH, DIRECTORY, HANG, MEMORY, PLAIN
from .restart_notes import GROUP_SECONDS, PHASES, RUN, read, restarted
from .usage import working_place

RANKS = 4
OURS = {"lastgood run, memory": MEMORY, "lastgood run, directory": DIRECTORY}
THEIRS = "torchrun, torch.save"
CONTENDERS = {**OURS, THEIRS: PLAIN}
FAULTS = (CRASH, HANG)
STORE_VARIABLE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
LIMIT_SECONDS = 300.0
"""of one job"""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """`out`: for the journal and the report. `place`: for the runs; None: in `out`."""

    out: Path
    place: Path | None = None
    rounds: int = 5


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "restart.journal.jsonl", {"hardware": hardware()})
    keys: list[dict[str, Any]] = [
        {"fault": fault, "contender": name, "round": number}
        for number in range(options.rounds)
        for fault in FAULTS
        for name in rotated([*CONTENDERS], number)
    ]
    for key in keys:
        if journal.get(**key) is None:
            with working_place(options) as folder, memory_for_agents() as memory:
                found = _measured(folder, memory, key["fault"], key["contender"])
            journal.put(found, **key)
            progress(f"round {key['round'] + 1}/{options.rounds}  {key['fault']}  {key['contender']}")
    return [{**key, **(journal.get(**key) or {})} for key in keys]


def _measured(folder: Path, memory: Path, fault: str, name: str) -> dict[str, Any]:
    """Run one job. One under torchrun may not come back: then its row has `lost`. Raises Refused if ours does not."""
    ranks = ["--nproc-per-node", str(RANKS)]
    if name in OURS:
        command = [sys.executable, "-m", "lastgood", "run", *ranks, "--hang-timeout", str(GROUP_SECONDS)]
    else:
        command = [sys.executable, "-m", "torch.distributed.run", *ranks, "--max-restarts", "1"]
    command += ["-m", "lastgood_lab.restart_rank", str(folder), CONTENDERS[name], fault]
    environment = {**os.environ, memory_place.VARIABLE: str(memory), STORE_VARIABLE: "1"}
    load = os.getloadavg()[0]
    try:
        done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        if name != THEIRS:
            raise
        return {"lost": f"not within {LIMIT_SECONDS:.0f} s", "load": load}
    if done.returncode and name == THEIRS:
        causes = [line for line in done.stderr.splitlines() if re.match(r"\w*(Error|Exception)\b", line)]
        return {"lost": causes[0] if causes else f"exit code {done.returncode}", "load": load}
    if done.returncode:
        raise Refused(
            f"the job of {name} ended with exit code {done.returncode}: {done.stderr[-2000:]}",
            safe="What was measured before is in the journal.",
            todo="Start the bench again: it goes on with this job.",
        )
    found = restarted(read(folder))
    return {"seconds": found.seconds, "phases": found.phases, "load": load, **_recorded(folder, name)}


def _recorded(folder: Path, name: str) -> dict[str, float]:
    """What only the records of `lastgood run` tell: how long the supervisor took to end and to start the ranks."""
    if name not in OURS:
        return {}
    first, second = attempt_log.read(access.for_reading(folder / RUN))
    return {"tear_down": first.phases["tear down"], "start": second.phases["start"]}


def report(rows: Sequence[Row], options: Options) -> Report:
    loads, notes = [row["load"] for row in rows], list[str]()
    tables = []
    for fault in FAULTS:
        mine = [row for row in rows if row["fault"] == fault and "lost" not in row]
        tables.append(
            Table(f"{fault} to first new step, s", ["", "whole", *PHASES], [_line(mine, n) for n in CONTENDERS])
        )
        lost = [row["lost"] for row in rows if row["fault"] == fault and "lost" in row]
        if lost:
            notes.append(f"{fault}, {THEIRS}: {len(lost)} of {options.rounds} jobs did not come back: {lost[0]}")
        mine = [row for row in mine if row["round"] in {one["round"] for one in of_contender(mine, THEIRS)}]
        for name in OURS if mine else ():
            times = spread(ratios(mine, THEIRS, name, "seconds"), ".1f")
            notes.append(f"{fault}, {THEIRS} / {name}, round by round: {times}")
            if fault == HANG:
                beyond = [{**row, "seconds": row["seconds"] - GROUP_SECONDS} for row in mine]
                times = spread(ratios(beyond, THEIRS, name, "seconds"), ".1f")
                notes.append(f"the same, of the time beyond {GROUP_SECONDS:.0f} s: {times}")
    for name in OURS:
        recorded = [spread([row[what] for row in of_contender(rows, name)]) for what in ("tear_down", "start")]
        notes.append(f"{name}: the supervisor took {recorded[0]} s to end the ranks, and {recorded[1]} s to start them")
    notes.append(f"load average (1 minute) before the jobs: {spread(loads, '.1f')}")
    return Report(
        name="restart",
        title=f"From a fault to the first new step, {RANKS} gloo ranks",
        about=(
            f"Medians of {options.rounds} interleaved rounds, (least-most). Rank 1 is killed by SIGKILL, or waits for "
            f"ever. A hang is noticed after {GROUP_SECONDS:.0f} s: by `--hang-timeout`, or by the timeout of the "
            f"process group. A phase ends with the slowest rank. torchrun has {STORE_VARIABLE}=1."
        ),
        tables=tables,
        rows=rows,
        notes=notes,
    )


def _line(rows: Sequence[Row], name: str) -> list[str]:
    mine = of_contender(rows, name)
    if not mine:
        return [name, "did not come back", *["-"] * len(PHASES)]
    phases = [spread([row["phases"][number] for row in mine], ".2f") for number in range(len(PHASES))]
    return [name, spread([row["seconds"] for row in mine], ".2f"), *phases]

"""Runs many trials with one outcome each, which are reported as shares. An interrupted run resumes where it stopped.

A trial depends only on its key, which includes the seed, so that a trial that was lost is repeated exactly.
"""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from .journal import Journal
from .provenance import commit
from .report import Progress, Report, machine

Row = dict[str, Any]
CHUNK = 20
"""The number of trials that are sent to a process at a time."""
Z = 1.959963984540054


@dataclass(frozen=True)
class Options:
    """The options of an experiment whose trials are independent of each other."""

    out: Path
    trials: int = 400
    """trials of each kind; each experiment defines its kinds"""
    seed: int = 0
    jobs: int = 2


def memory() -> str | None:
    """A directory in memory for trials that need no disk, or None."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class Share(NamedTuple):
    """`hits` of `total`, with Wilson's 95 % interval (Wilson 1927; the study in `crash.py` has Clopper-Pearson's)."""

    hits: int
    total: int

    @property
    def value(self) -> float:
        return self.hits / self.total if self.total else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        if not self.total:
            return 0.0, 1.0
        share, spread = self.value, Z * Z / self.total
        middle = (share + spread / 2) / (1 + spread)
        half = Z * math.sqrt((share * (1 - share) + spread / 4) / self.total) / (1 + spread)
        return max(0.0, middle - half), min(1.0, middle + half)

    def as_text(self) -> str:
        low, high = self.interval
        return f"{self.hits:,} of {self.total:,} ({100 * low:.1f} to {100 * high:.1f} %)"

    def record(self) -> dict[str, Any]:
        low, high = self.interval
        return {"hits": self.hits, "total": self.total, "wilson_low": round(low, 6), "wilson_high": round(high, 6)}


def share(rows: Iterable[Mapping[str, Any]], of: Callable[[Mapping[str, Any]], object]) -> Share:
    """The share of rows for which `of` is true."""
    answers = [bool(of(row)) for row in rows]
    return Share(sum(answers), len(answers))


def error_bars(shares: Sequence[Share]) -> list[list[float]]:
    """The lengths of the error bars below and above each value, as matplotlib's `yerr` expects them."""
    ends = [(one.value, *one.interval) for one in shares]
    return [[max(0.0, value - low) for value, low, _ in ends], [max(0.0, high - value) for value, _, high in ends]]


def run(
    keys: Sequence[Row],
    one: Callable[[Row], Row],
    journal: Journal,
    jobs: int,
    progress: Progress,
    begin: Callable[..., object] | None = None,
    arguments: Sequence[Any] = (),
) -> list[Row]:
    """Run every trial that is not in the journal; returns the keys and outcomes of all trials, in the order of `keys`.

    `begin(*arguments)` is called once in each process before its first trial.
    """
    left = [key for key in keys if journal.get(**key) is None]
    done = len(keys) - len(left)
    if left:
        context = multiprocessing.get_context("spawn")
        with context.Pool(jobs, begin, tuple(arguments)) as pool:
            for key, found in pool.imap_unordered(
                partial(_keyed, one), left, chunksize=min(CHUNK, -(-len(left) // jobs))
            ):
                journal.put(found, **key)
                done += 1
                if done % 100 == 0 or done == len(keys):
                    progress(f"{done:,} of {len(keys):,} trials")
    return [{**key, **(journal.get(**key) or {})} for key in keys]


def _keyed(one: Callable[[Row], Row], key: Row) -> tuple[Row, Row]:
    return key, one(key)


def write(report: Report, summary: Mapping[str, Any], out: Path, command: str, today: str) -> list[Path]:
    """Write report.md, trials.csv, summary.json and the figures into `out`; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    text, table, totals = out / "report.md", out / "trials.csv", out / "summary.json"
    text.write_text(report.markdown(command, today))
    with table.open("w", newline="") as file:
        names = list(dict.fromkeys(name for row in report.rows for name in row))
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(report.rows)
    made = {"lab": report.name, "date": today, "machine": machine(), "commit": commit(), "command": command}
    record = {**made, **summary}
    totals.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
    return [text, table, totals, *report.draw(out)]

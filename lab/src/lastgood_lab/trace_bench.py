"""`lastgood bench trace`: a recorded failure trace, compressed in time, replayed through real processes.

At each drop of the trace one machine is killed and replaced, under `lastgood run` with agents and memory on nodes, and
for the policies of papers. What a replacement takes is not compressed, so it weighs more than in the trace; the report
gives the goodput with the compressed time, that of an ideal with the same replacements, and that of the trace's own
time. Beside them stands the replay by calculation (replay.py), with the measured costs.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .campaigns.memory_kills import memory_for_agents
from .goodput import read
from .journal import Journal
from .replay import Costs, published, replay
from .report import Progress, Report, Table, hardware, spread
from .trace_account import Account, Note, account
from .trace_cluster import ATTACH_SECONDS, DETECT_SECONDS, Alone, Cluster, Nodes
from .trace_job import NONE, NOTES, OURS, Spec
from .usage import working_place

CONTENDERS = (OURS, "PCcheck", "CheckFreq", "Gemini")
NEVER, BELOW_STEPS = 10**6, 200
CALM_SECONDS, START_SECONDS, POLL_SECONDS = 20.0, 120.0, 0.02
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Options:
    """`compress`: by which the time of the trace is divided. `until`: seconds of the trace that are replayed; 0: all.
    `interval`: steps between two saves. `device_seconds`: in each step, in which the processor waits as for a device.
    `model`, `scale`, `work`: of the network, as for `bench interval`."""

    out: Path
    trace: Path
    place: Path | None = None
    compress: float = 10.0
    until: float = 0.0
    interval: int = 5
    device_seconds: float = 0.2
    model: str = "gpt2-124m"
    scale: float = 0.02
    work: float = 0.02


def run(options: Options, progress: Progress) -> list[Row]:
    """Replay what is missing in the journal in `out`; returns all rows. Raises Refused for a trace that is none."""
    trace = read(options.trace)
    seconds = min(options.until or trace.seconds, trace.seconds)
    drops = [at for at in trace.drops() if at < seconds]
    known = {"trace": options.trace.stem, "digest": hashlib.sha256(options.trace.read_bytes()).hexdigest()[:12]}
    journal = Journal(options.out / "trace.journal.jsonl", {"hardware": hardware(), **known})
    found = list[Row]()
    for name in CONTENDERS:
        key = {"contender": name, "compress": options.compress, "until": seconds, "interval": options.interval}
        key |= {
            "detect": DETECT_SECONDS,
            "model": options.model,
            "scale": options.scale,
            "work": options.work,
            "device": options.device_seconds,
        }
        row = journal.get(**key)
        if row is None:
            plain = _plain(options, name)
            made = _replayed(options, name, options.interval, drops, seconds, plain)
            row = journal.put(made._asdict(), **key)
            progress(f"{name}: {made.steps} steps, goodput {made.goodput:.3f}, of ideal {made.of_ideal:.3f}")
        found.append({**key, **row})
    return found


def _plain(options: Options, name: str) -> float:
    """Seconds of a step without saves and failures, in as many processes."""
    calm = _replayed(options, OURS if name == OURS else NONE, NEVER, [], CALM_SECONDS * options.compress, 1.0)
    return calm.step_seconds


def _replayed(
    options: Options, name: str, interval: int, drops: Sequence[float], seconds: float, plain: float
) -> Account:
    """Replay drops of a trace, which lasts for `seconds`, with one contender."""
    with working_place(options) as folder, memory_for_agents() as memory:
        below = NEVER if interval == NEVER else BELOW_STEPS
        size = options.model, options.scale, options.work
        spec = Spec(str(folder), name, interval, *size, below, options.device_seconds)
        cluster: Cluster = Nodes(spec, memory) if name == OURS else Alone(spec)
        try:
            cluster.start()
            begun = _first_step(folder, cluster)
            ended, failures = begun + seconds / options.compress, list[float]()
            for at in drops:
                _sleep(cluster, begun + at / options.compress)
                failures.append(time.monotonic())
                cluster.lose()
            _sleep(cluster, ended)
        finally:
            cluster.end()
        return account(_notes(folder), failures, begun, ended, seconds, plain)


def _first_step(folder: Path, cluster: Cluster) -> float:
    """Wait until a step is completed. Returns when."""
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        cluster.poll()
        for one in _notes(folder):
            if one["what"] == "step":
                return float(one["at"])
        time.sleep(POLL_SECONDS)
    raise OSError(f"no step within {START_SECONDS:.0f} s")


def _sleep(cluster: Cluster, until: float) -> None:
    while time.monotonic() < until:
        cluster.poll()
        time.sleep(POLL_SECONDS)


def _notes(folder: Path) -> list[Note]:
    path = folder / NOTES
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def report(rows: Sequence[Row], options: Options) -> Report:
    lines, calculated, first = [], [], rows[0]
    drops = [at / options.compress for at in read(options.trace).drops() if at < first["trace_seconds"]]
    for row in rows:
        one = Account(*(row[name] for name in Account._fields))
        lines.append(
            [
                row["contender"],
                f"{one.of_ideal:.3f}",
                f"{one.goodput:.3f}",
                f"{one.uncompressed:.4f}",
                spread(one.down),
                f"{sum(one.redone)}",
                f"{100 * (one.step_seconds / one.plain_seconds - 1):+.1f}",
                f"{one.save_seconds:.3f}",
            ]
        )
        calculated.append([row["contender"], *_calculated(row["contender"], one, options.interval, drops)])
    head = ["", "of ideal", "goodput", "in the trace's own time", "down, s", "steps trained again", "steps slower, %"]
    return Report(
        name="trace",
        title="A failure trace through real processes",
        about=(
            f"{options.trace.stem}: {first['trace_seconds']:.0f} s with {len(first['down'])} drops, divided by "
            f"{options.compress:g}; a save every {options.interval} steps, in each of which the processor waits for "
            f"{options.device_seconds:g} s, as for a device. One machine is killed at each drop. "
            "lastgood: two nodes of one rank and one in reserve, each with an agent; a save lies in the memory of both "
            f"nodes, and is copied to a directory every {BELOW_STEPS} steps. A node is lost after "
            f"{DETECT_SECONDS:g} s without a sign of life. The others: one process, started again after the same "
            f"{DETECT_SECONDS:g} s, and {ATTACH_SECONDS} s more if its state is on a disk, which is attached elsewhere."
        ),
        tables=[
            Table("Replayed", [*head, "a save, s"], lines),
            Table("Goodput by calculation, with these costs", ["", "event by event", "published formula"], calculated),
        ],
        rows=rows,
        notes=[f"{row['contender']}: a step without saves {1000 * row['plain_seconds']:.1f} ms" for row in rows],
    )


def _calculated(name: str, one: Account, interval: int, drops: Sequence[float]) -> list[str]:
    """The goodput in compressed time by calculation, event by event and by the published formula."""
    down = statistics.fmean(one.down) if one.down else 0.0
    costs = Costs(
        policy=name.partition(" ")[0],
        interval=interval,
        step_seconds=one.plain_seconds,
        stall_seconds=max(0.0, (one.step_seconds - one.plain_seconds) * interval),
        save_seconds=one.save_seconds,
        load_seconds=0.0,
        restart_seconds=down,
        in_flight=2,
    )
    replayed = replay(drops, one.seconds, costs).goodput
    return [f"{replayed:.3f}", f"{published(len(drops), one.seconds, costs):.3f}"]

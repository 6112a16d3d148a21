"""`lastgood bench memory`: saves to the memory of the machine, beside saves to a directory, and restores from both.

Each round measures all contenders, in an order that rotates. A save counts from the call until it is verified. Its
processor time is that of the training process, with all its threads, and nothing of the agent. What the loop waits is
the call, and what the next step of the optimizer takes longer than one without a save: the fence, and what the copying
threads take from the step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lastgood
from lastgood.run import agent_link, agent_messages, memory_place

from .durable import of_contender, ratios
from .journal import Journal, rotated
from .models import Workload
from .report import Progress, Report, Table, hardware, spread
from .restore import RAW, drop_from_cache, raw_reads
from .restore import Options as Options
from .usage import working_place

MEMORY, DIRECTORY = "memory", "directory"
SAVES = (MEMORY, DIRECTORY)
RESTORES = (*RAW, MEMORY, DIRECTORY)
SAVES_A_ROUND = 4
Row = Mapping[str, Any]


def run(options: Options, progress: Progress) -> list[Row]:
    """Take the measurements that are missing in the journal in `out`; returns all rows, also those of earlier runs."""
    journal = Journal(options.out / "memory.journal.jsonl", {"hardware": hardware()})
    keys = list(_keys(options))
    if any(journal.get(**key) is None for key in keys):
        with working_place(options) as place, _agents_ended(place):
            trained = Workload("gpt2-124m", options.scale, 0.03)
            for key in keys:
                if journal.get(**key) is None:
                    measure = _saved if key["what"] == "save" else _restored
                    found = measure(trained, place, key["contender"])
                    journal.put(found, **key)
                    progress(f"round {key['round'] + 1}/{options.rounds}  {key['what']:8s}  {key['contender']}")
    return [{**key, **(journal.get(**key) or {})} for key in keys]


def _keys(options: Options) -> Iterator[dict[str, Any]]:
    for number in range(options.rounds):
        for what, names in (("save", SAVES), ("restore", RESTORES)):
            for name in rotated(names, number):
                yield {"scale": options.scale, "what": what, "contender": name, "round": number}


@contextlib.contextmanager
def _agents_ended(place: Path) -> Iterator[None]:
    """At the end the agent of the run has ended, and its memory is removed."""
    try:
        yield
    finally:
        folder = memory_place.folder_of(place / MEMORY)
        with contextlib.suppress(OSError, ValueError), contextlib.closing(agent_link.connected(folder)) as connection:
            connection.settimeout(600)
            agent_link.asked(connection, agent_messages.Request(protocol=agent_link.PROTOCOL, call="end"))


def _opened(trained: Workload, place: Path, name: str) -> lastgood.Checkpointer:
    """The run of a contender. That in memory is copied to its directory only at its end."""
    every, seldom = lastgood.Every(steps=1), lastgood.Every(steps=10**6)
    tiers = [lastgood.Tier("memory://", cadence=every)] if name == MEMORY else []
    state = {"model": trained.module, "optimizer": trained.optimizer}
    keep = lastgood.Keep(last=1)
    cadence = seldom if name == MEMORY else every
    return lastgood.Checkpointer(place / name, state, cadence=cadence, retention=keep, tiers=tiers)


def _saved(trained: Workload, place: Path, name: str) -> dict[str, Any]:
    """The medians of some saves, after the first two, which find their memory."""
    seconds, cpu = list[float](), list[float]()
    calls, longer, bare = list[float](), list[float](), list[float]()
    with _opened(trained, place, name) as ckpt:
        step = ckpt.restore().step
        for number in range(2 * SAVES_A_ROUND + 2):
            bare.append(_timed(trained.optimizer.step))
            step += 1
            begun, used = time.perf_counter(), time.process_time()
            save = ckpt.save(step)
            called = time.perf_counter() - begun
            if number < SAVES_A_ROUND + 2:
                ckpt.wait()
                seconds.append(time.perf_counter() - begun)
                cpu.append(time.process_time() - used)
            else:
                calls.append(called)
                longer.append(_timed(trained.optimizer.step) - statistics.median(bare))
                ckpt.wait()
        total = save.result().bytes
    middle = {"seconds": seconds[2:], "cpu": cpu[2:], "call": calls, "fence": longer}
    return {**{what: statistics.median(values) for what, values in middle.items()}, "bytes": total}


def _restored(trained: Workload, place: Path, name: str) -> dict[str, Any]:
    """A restore with a new Checkpointer, or a raw read of the same bytes from the disk, which checks nothing."""
    drop_from_cache(place)
    if name in RAW:
        (blob,) = (place / DIRECTORY).glob("gen/*/*.safetensors")
        return {"seconds": raw_reads(blob)[name](), "bytes": blob.stat().st_size}
    with _opened(trained, place, name) as ckpt:
        begun = time.perf_counter()
        found = ckpt.restore()
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "bytes": sum(one.bytes for one in found.sources.values())}


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def report(rows: Sequence[Row], options: Options) -> Report:
    saves = [row for row in rows if row["what"] == "save"]
    restores = [row for row in rows if row["what"] == "restore"]
    gigabytes = saves[0]["bytes"] / 1e9
    lines = []
    for name in SAVES:
        mine = of_contender(saves, name)
        cpu = spread([row["cpu"] / gigabytes for row in mine])
        lines.append([name, *(spread([row[what] for row in mine]) for what in ("seconds", "call", "fence")), cpu])
    read = [[name, spread([row["seconds"] for row in of_contender(restores, name)])] for name in RESTORES]
    raw = min(RAW, key=lambda name: statistics.median(row["seconds"] for row in of_contender(restores, name)))
    notes = [
        f"restore from memory / {raw}, times as fast, round by round: "
        f"{spread(ratios(restores, raw, MEMORY, 'seconds'), '.2f')}",
        f"processor, directory / memory: {spread(ratios(saves, DIRECTORY, MEMORY, 'cpu'), '.2f')}",
    ]
    return Report(
        name="memory",
        title=f"Memory of the machine, {gigabytes:.2f} GB GPT-2-size AdamW state",
        about=(
            f"Medians of {options.rounds} interleaved rounds, (least-most), of {SAVES_A_ROUND} saves each. Saves are "
            "verified. Before each restore the page cache is dropped, which leaves memory as it is."
        ),
        tables=[
            Table("saves", ["place", "s until verified", "s of the call", "s at the fence", "processor s/GB"], lines),
            Table("restores", ["from", "s"], read),
        ],
        rows=rows,
        notes=notes,
    )

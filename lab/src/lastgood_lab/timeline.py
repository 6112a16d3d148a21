"""`lastgood lab timeline`: records disk activity and the events of a run's saves, as a figure and as a trace file.

A small training loop saves every few steps while `/proc/diskstats` is read ten times a second. The file `trace.json`
can be opened in Perfetto or chrome://tracing. It has a row for each kind of event, and counters of the bytes that the
disk read and wrote.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lastgood.errors import Refused
from lastgood.events import Event
from lastgood.loop.checkpointer import Checkpointer
from lastgood.policy.cadence import Every
from lastgood.policy.retention import Keep

from .report import Progress, Report, Table
from .trials import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SECTOR_BYTES = 512
"""The unit of /proc/diskstats, which does not depend on the device."""
SPANS = ("staged", "written", "durable", "verified")
"""The events that have a duration; the others are instants."""


@dataclass(frozen=True)
class Options:
    out: Path
    seconds: float = 20.0
    hertz: float = 10.0
    width: int = 4096
    """width of the network's three layers; with 4096 the state has 600 MB"""
    every: int = 10
    place: Path | None = None


class Disk:
    """The bytes read from and written to the device of a folder since the system started. Linux only.

    Raises Refused without /proc/diskstats, and if the folder is not on a block device.
    """

    def __init__(self, folder: Path) -> None:
        device = os.stat(folder).st_dev
        self._device = [str(os.major(device)), str(os.minor(device))]
        self.seen()  # raises Refused

    def seen(self) -> tuple[int, int]:
        try:
            lines = Path("/proc/diskstats").read_text().splitlines()
        except OSError as error:
            raise Refused(f"/proc/diskstats: {error.strerror}", todo="This experiment needs Linux.") from error
        for line in lines:
            fields = line.split()
            if fields[:2] == self._device:
                return int(fields[5]) * SECTOR_BYTES, int(fields[9]) * SECTOR_BYTES
        raise Refused("the folder is not on a block device", todo="Give a directory on a disk: --place DIR.")


def run(options: Options, progress: Progress) -> list[Row]:
    options.out.mkdir(parents=True, exist_ok=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="lastgood-timeline-", dir=options.place or options.out) as folder:
        disk = Disk(Path(folder))
        ended = threading.Event()
        begun = time.monotonic()

        def sample() -> None:
            last = disk.seen()
            while not ended.wait(1 / options.hertz):
                now = disk.seen()
                rows.append(
                    {
                        "kind": "disk",
                        "at_seconds": time.monotonic() - begun,
                        "read_bytes": now[0] - last[0],
                        "written_bytes": now[1] - last[1],
                    }
                )
                last = now

        def record(event: Event) -> None:
            rows.append(
                {
                    "kind": event.kind,
                    "step": event.step,
                    "at_seconds": event.at_seconds - begun,
                    "seconds": event.seconds,
                    "bytes": event.bytes,
                }
            )

        sampler = threading.Thread(target=sample, name="lastgood-timeline")
        sampler.start()
        try:
            steps = _train(Path(folder) / "run", options, begun, record)
        finally:
            ended.set()
            sampler.join()
    progress(f"{steps} steps, {sum(row['kind'] == 'durable' for row in rows)} saves")
    rows.sort(key=lambda row: row["at_seconds"])
    (options.out / "trace.json").write_text(json.dumps(trace(rows)) + "\n")
    return rows


def _train(path: Path, options: Options, begun: float, record: Any) -> int:
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(3)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    step = 0
    with Checkpointer(path, state, cadence=Every(steps=options.every), retention=Keep(last=2), on_event=record) as ckpt:
        ckpt.restore()
        while step <= options.every or time.monotonic() - begun < options.seconds:  # one save before the last at least
            model(torch.randn(8, options.width)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            ckpt.step(step)
    return step


def trace(rows: Sequence[Row]) -> dict[str, Any]:
    """The rows in the Trace Event Format, in microseconds: complete events (X), instants (i) and counters (C)."""
    found: list[dict[str, Any]] = []
    threads = {
        kind: number for number, kind in enumerate(dict.fromkeys(row["kind"] for row in rows if "step" in row), 1)
    }
    for kind, number in threads.items():
        found.append({"name": "thread_name", "ph": "M", "pid": 1, "tid": number, "args": {"name": kind}})
    for row in rows:
        at = 1e6 * row["at_seconds"]
        if row["kind"] == "disk":
            counts = {"read": row["read_bytes"], "written": row["written_bytes"]}
            found.append({"name": "disk bytes", "ph": "C", "pid": 1, "ts": at, "args": counts})
            continue
        one = {"name": f"step {row['step']}", "cat": row["kind"], "pid": 1, "tid": threads[row["kind"]]}
        length = 1e6 * row["seconds"]
        if row["kind"] in SPANS:
            found.append({**one, "ph": "X", "ts": at - length, "dur": length, "args": {"bytes": row["bytes"]}})
        else:
            found.append({**one, "ph": "i", "ts": at, "s": "p"})
    return {"traceEvents": found, "displayTimeUnit": "ms"}


def report(rows: Sequence[Row], options: Options) -> Report:
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in rows if row["kind"] != "disk"):
        mine = [row["seconds"] for row in rows if row["kind"] == kind]
        lines.append([kind, str(len(mine)), f"{sum(mine) / len(mine):.3f}", f"{max(mine):.3f}"])
    disk = [row for row in rows if row["kind"] == "disk"]
    written, read = (sum(row[name] for row in disk) for name in ("written_bytes", "read_bytes"))
    return Report(
        name="timeline",
        title="Disk activity and the events of saves",
        about=f"A loop of {options.seconds:g} s that saves every {options.every} steps; the disk's counters are read "
        f"{options.hertz:g} times a second. `trace.json` can be opened in Perfetto.",
        tables=[Table("", ["event", "count", "mean s", "most s"], lines)],
        rows=rows,
        notes=[
            f"{written / 1e9:.2f} GB were written to the disk and {read / 1e9:.2f} GB read from it (verification reads "
            "past the page cache)."
        ],
        figures={"timeline": lambda: _figure(rows)},
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json."""
    disk = [row for row in rows if row["kind"] == "disk"]
    return {
        "samples": len(disk),
        "written_bytes": sum(row["written_bytes"] for row in disk),
        "read_bytes": sum(row["read_bytes"] for row in disk),
        "events": {
            kind: sum(row["kind"] == kind for row in rows) for kind in dict.fromkeys(row["kind"] for row in rows)
        },
    }


def _figure(rows: Sequence[Row]) -> Figure:
    from .figures import panels

    figure, (above, below) = panels(2, columns=1, wide=9.0, high=2.6)
    disk = [row for row in rows if row["kind"] == "disk"]
    at = [row["at_seconds"] for row in disk]
    gaps = [now - before for before, now in zip([0.0, *at], at, strict=False)]
    for name in ("written", "read"):
        rate = [row[f"{name}_bytes"] / gap / 1e9 for row, gap in zip(disk, gaps, strict=True)]
        above.plot(at, rate, label=name, drawstyle="steps-pre")
    above.set_ylabel("disk GB/s")
    above.legend(ncols=2)
    kinds = list(dict.fromkeys(row["kind"] for row in rows if row["kind"] != "disk"))
    for place, kind in enumerate(reversed(kinds)):
        mine = [row for row in rows if row["kind"] == kind]
        spans = [(row["at_seconds"] - row["seconds"], max(row["seconds"], 0.02)) for row in mine]
        below.broken_barh(spans, (place + 0.15, 0.7))
    below.set_yticks([place + 0.5 for place in range(len(kinds))], list(reversed(kinds)))
    below.set_xlabel("s")
    below.set_xlim(above.get_xlim())
    return figure

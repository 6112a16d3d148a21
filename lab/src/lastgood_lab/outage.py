"""`lastgood lab outage`: a directory in front of a bucket that is down for many saves: does the training loop notice?

A process trains a small model and saves after every step, into a directory and from there to an S3 server behind a
proxy. It makes `saves` saves with the server up, as many while every connection is cut, and as many with it up again.
After each save the process notes how long the loop has waited, its memory, threads and descriptors, what the directory
occupies, and how many generations wait for their copy. In the end it waits until all is copied, and everything that the
retention of the bucket selects must be there with the bytes that were saved.
"""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

import lastgood
from lastgood.errors import LastgoodError, TimedOut
from lastgood.units import size as size_text

from .object_faults import FaultyProxy
from .object_server import ObjectServer, make_bucket
from .report import Progress, Report, Table, quantile
from .trials import Row
from .usage import resident_bytes, stored_bytes, working_place

if TYPE_CHECKING:
    from matplotlib.figure import Figure

URL = "s3://outage/run"
UP, DOWN, AGAIN = "up", "down", "up again"
PHASES = (UP, DOWN, AGAIN)
FRONT_KEEP, IN_FLIGHT, BESIDE = 2, 2, 2
BELOW_KEEP, BELOW_EVERY = 3, 25
WARM_UP = 10
"""Saves before the first one that counts."""
POLL_SECONDS, LIMIT_SECONDS = 0.05, 300.0


@dataclass(frozen=True)
class Options:
    out: Path
    saves: int = 100
    """saves of each of the three phases"""
    width: int = 1024
    """of the model, a square matrix"""
    step_seconds: float = 0.1
    """how long the loop computes between two saves"""
    place: Path | None = None
    """folder for the saves and the server's data, on the disk to measure (default: `out`)"""


def run(options: Options, progress: Progress) -> list[Row]:
    """Measure. Returns a row for each save, and one of the phase "end" with what was found afterwards."""
    rows: list[Row] = []
    context = multiprocessing.get_context("spawn")
    with (
        working_place(options) as place,
        ObjectServer(place / "server") as server,
        FaultyProxy(server.endpoint) as proxy,
        mock.patch.dict(os.environ, server.environment(proxy.endpoint)),
        contextlib.ExitStack() as outage,
    ):
        make_bucket(URL)
        here, there = context.Pipe()
        job = context.Process(target=_train, args=(there, place / "front", options))
        job.start()
        there.close()
        while (message := here.recv()) is not None:
            if message in PHASES:
                progress(f"the server is {message}")
                outage.close()
                if message == DOWN:
                    outage.enter_context(proxy.down())
                here.send(message)
            else:
                rows.append(message)
            proxy.clear()  # it keeps a record of every request
        job.join()
    return rows


def _train(pipe: Connection, front: Path, options: Options) -> None:
    """The process that trains. Sends each phase and waits for an answer before it begins; sends rows, and then None."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    events, late, waited = Counter[str](), list[lastgood.Save](), 0
    with _Loop(front, options, events) as loop:
        for _ in range(WARM_UP):
            loop.save()
        for phase in PHASES:
            pipe.send(phase)
            pipe.recv()
            begun, caught_up, done = time.monotonic(), 0.0, list[lastgood.Save]()
            for _ in range(options.saves):
                row, saved = loop.save()
                pipe.send({"phase": phase, **row})
                done.append(saved)
                if phase == AGAIN and not caught_up and all(map(_settled, late)):
                    caught_up = time.monotonic() - begun
            if phase == DOWN:
                late, waited = done, loop.waiting()
        while not caught_up and time.monotonic() - begun < LIMIT_SECONDS:
            time.sleep(POLL_SECONDS)
            caught_up = time.monotonic() - begun if all(map(_settled, late)) else 0.0
        loop.ckpt.wait()
    pipe.send(
        {
            "phase": "end",
            "waited_after_outage": waited,
            "caught_up_seconds": caught_up or LIMIT_SECONDS,
            **loop.found_below(),
            "state_bytes": lastgood.open(front).generation().bytes,
            "failed_copies": events["not_copied"],
        }
    )
    pipe.send(None)


class _Loop:
    """The training loop: one `save` after each step. Close it with its `with` block."""

    def __init__(self, front: Path, options: Options, events: Counter[str]) -> None:
        self._front, self._pause_seconds, self._step = front, options.step_seconds, 0
        self._inputs = torch.randn(4, options.width)
        self._model = torch.nn.Linear(options.width, options.width)
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._digests = dict[int, str]()
        self.ckpt = lastgood.Checkpointer(
            URL,
            {"model": self._model, "optimizer": self._optimizer},
            cadence=lastgood.Every(steps=1),
            retention=lastgood.Keep(last=BELOW_KEEP, every=BELOW_EVERY),
            tiers=[lastgood.Tier(front, cadence=lastgood.Every(steps=1), retention=lastgood.Keep(last=FRONT_KEEP))],
            in_flight=IN_FLIGHT,
            on_event=lambda event: events.update([event.kind]),
            save_on_exit=False,
        )

    def __enter__(self) -> _Loop:
        self.ckpt.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.ckpt.__exit__(*error)

    def waiting(self) -> int:
        """How many generations wait for their copy to the bucket."""
        return self.ckpt._pipeline.places.below[0].waiting()

    def save(self) -> tuple[Row, lastgood.Save]:
        """One step of training and its save, which is committed in the directory on return."""
        self._step += 1
        self._model(self._inputs).square().sum().backward()
        time.sleep(self._pause_seconds)
        self._optimizer.step()
        begun = time.perf_counter()
        saved = self.ckpt.step(self._step)
        called = time.perf_counter()
        self._optimizer.zero_grad()
        self._digests[self._step] = _digest(self._model.weight)
        assert saved is not None
        saved.committed()
        row = {
            "step": self._step,
            "call_seconds": called - begun,
            "wait_seconds": saved.stall_seconds,
            "commit_seconds": time.perf_counter() - begun,
            "resident_bytes": resident_bytes(),
            "threads": threading.active_count(),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "front_bytes": stored_bytes(self._front),
            "waiting": self.waiting(),
        }
        return row, saved

    def found_below(self) -> Row:
        """What is in the bucket, compared with what its retention selects and with what was saved."""
        run, last = lastgood.open(URL), self._step
        found = {one.step: _digest(run.tensor("model.weight", step=one.step)) for one in run.generations()}
        wanted = {*range(last - BELOW_KEEP + 1, last + 1), *range(BELOW_EVERY, last + 1, BELOW_EVERY)}
        return {
            "wanted_below": len(wanted),
            "missing_below": len(wanted - found.keys()),
            "different_below": sum(digest != self._digests[step] for step, digest in found.items()),
        }


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest()


def _settled(save: lastgood.Save) -> bool:
    """Whether a save is in all places, or newer ones were copied instead."""
    try:
        save.result(0)
    except TimedOut:
        return False
    except LastgoodError:
        return True
    return True


# ---- the report ----------------------------------------------------------------------------------------------


def _of(rows: Sequence[Row], phase: str, name: str) -> list[float]:
    return [row[name] for row in rows if row["phase"] == phase]


def bound_bytes(end: Row, waiting: int) -> int:
    """What the directory may occupy while so many generations wait: its own, those in flight, and two beside them."""
    return int((FRONT_KEEP + IN_FLIGHT + BESIDE + waiting) * end["state_bytes"])


def report(rows: Sequence[Row], options: Options) -> Report:
    (end,) = (row for row in rows if row["phase"] == "end")
    times = []
    for name, title in (
        ("wait_seconds", "wait of the loop"),
        ("call_seconds", "`step()`"),
        ("commit_seconds", "committed in the directory"),
    ):
        for phase in PHASES:
            found = [1000 * one for one in _of(rows, phase, name)]
            base = [1000 * one for one in _of(rows, UP, name)]
            ratio = statistics.median(found) / max(statistics.median(base), 1e-9)
            middle, late = statistics.median(found), quantile(found, 0.99)
            times.append([title, phase, f"{middle:.1f}", f"{late:.1f}", f"{max(found):.1f}", f"{ratio:.2f}"])
    kept = []
    for phase in PHASES:
        memory, threads, opened, disk, waiting = (
            _of(rows, phase, name) for name in ("resident_bytes", "threads", "descriptors", "front_bytes", "waiting")
        )
        kept.append(
            [
                phase,
                f"{memory[0] / 1e6:.0f}, {memory[-1] / 1e6:.0f}, {max(memory) / 1e6:.0f}",
                f"{max(threads):.0f}",
                f"{max(opened):.0f}",
                f"{max(waiting):.0f}",
                f"{max(disk) / 1e6:.0f}",
                f"{bound_bytes(end, int(max(waiting))) / 1e6:.0f}",
            ]
        )
    head = [
        "server",
        "memory MB: first, last, most",
        "threads",
        "descriptors",
        "waiting",
        "directory MB",
        "its bound MB",
    ]
    return Report(
        name="outage",
        title="A bucket that is down behind a directory",
        about=f"{options.saves} saves of {size_text(end['state_bytes'])} in each phase, one after every step of "
        f"{options.step_seconds:g} s; the directory keeps {FRONT_KEEP}, the bucket the last {BELOW_KEEP} and every "
        f"{BELOW_EVERY}th step. Server and proxy run on the same machine, in other processes than the loop.",
        tables=[
            Table("Times", ["what", "server", "median ms", "p99 ms", "most ms", "median / that of up"], times),
            Table("What the process and the directory hold", head, kept),
        ],
        rows=rows,
        notes=[
            f"{end['waited_after_outage']} generations waited at the end of the outage, in which "
            f"{end['failed_copies']} attempts to copy failed. {end['caught_up_seconds']:.1f} s after the server was up "
            "again, none of them waited any more (a place that is down is tried every 60 s).",
            f"In the end the bucket lacks {end['missing_below']} of the {end['wanted_below']} generations that its "
            f"retention selects, those of the outage among them; {end['different_below']} differ from what was saved.",
            "The bound of the directory: what it keeps, what is in flight, two more, and what waits.",
        ],
        figures={"outage": lambda: _figure(rows)},
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json."""
    (end,) = (row for row in rows if row["phase"] == "end")
    return {
        **{name: value for name, value in end.items() if name != "phase"},
        "phases": {
            phase: {
                "saves": len(_of(rows, phase, "step")),
                "wait_median_seconds": statistics.median(_of(rows, phase, "wait_seconds")),
                "wait_p99_seconds": quantile(_of(rows, phase, "wait_seconds"), 0.99),
                "most_resident_bytes": max(_of(rows, phase, "resident_bytes")),
                "most_threads": max(_of(rows, phase, "threads")),
                "most_descriptors": max(_of(rows, phase, "descriptors")),
                "most_front_bytes": max(_of(rows, phase, "front_bytes")),
                "most_waiting": max(_of(rows, phase, "waiting")),
            }
            for phase in PHASES
        },
    }


def _figure(rows: Sequence[Row]) -> Figure:
    from .figures import panels

    figure, (above, below) = panels(2, columns=1, wide=9.0, high=2.6)
    saves = [row for row in rows if row["phase"] in PHASES]
    steps = [row["step"] for row in saves]
    down = [row["step"] for row in saves if row["phase"] == DOWN]
    above.plot(steps, [1000 * row["wait_seconds"] for row in saves], ".", markersize=3)
    above.set_ylabel("wait of the loop, ms")
    for name, label in (("resident_bytes", "memory of the process"), ("front_bytes", "directory")):
        below.plot(steps, [row[name] / 1e6 for row in saves], label=label)
    below.set_ylabel("MB")
    below.set_xlabel("save")
    below.legend()
    for axes in (above, below):
        axes.axvspan(down[0], down[-1], alpha=0.15)
    return figure

"""Faults at every request of a run in an object store: a real S3 server behind a proxy, and the campaigns' victim.

    python -m lastgood_lab.campaigns.requests [--stride 1] [--kinds KIND,KIND] [--jobs 2]

One trial: a life without faults; a life in which one request fails (or every request from there on, or the process is
killed at it, before or after the request takes effect); then the disk is judged as after every kill, and two more lives
without faults must succeed. The life that is disturbed opens the run, restores, saves three times, verifies, deletes.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from lastgood.storage import object_store, objects
from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.trials import VICTIM, environment, in_memory, progress
from lastgood_lab.campaigns.victim import live
from lastgood_lab.campaigns.victim_ledger import Ledger
from lastgood_lab.object_faults import KINDS, Fault, FaultyProxy, Request
from lastgood_lab.object_server import ObjectServer, make_bucket

QUICK = object_store.Deadlines(connect_seconds=2, request_seconds=3, retry_seconds=3, retries=1)
SETUP = ["--saves=2", "--seed=1"]
DISTURBED = ["--saves=3", "--seed=2"]
WAYS = ("once", "sticky")
KILLS = ("killed before", "killed after")


class Trial(NamedTuple):
    """A fault at one request. `kind`: of object_faults.KINDS, or one of KILLS. `way`: one of WAYS; "" for kills."""

    number: int
    kind: str
    way: str = ""


class Bench:
    """The server, the proxy and the folder of one campaign; each trial has a run of its own."""

    def __init__(self, proxy: FaultyProxy, at: Path) -> None:
        self._proxy, self._at = proxy, at
        self._runs = itertools.count()

    def requests(self) -> list[Request]:
        """The requests of a disturbed life without a fault."""
        run, ledger = self._begun()
        self._proxy.clear()
        ledger.read(self._life(run, DISTURBED))
        found = self._proxy.requests
        self._concluded(run, ledger)
        assert not ledger.problems, ledger.problems
        return found

    def tried(self, trial: Trial) -> tuple[str, list[str]]:
        """Make one trial. Returns the errors that the disturbed life reported, and the violations."""
        run, ledger = self._begun()
        self._proxy.clear()
        if trial.kind in KILLS:
            ledger.read(self._killed(run, trial))
        else:
            sticky = trial.way == "sticky"
            self._proxy.inject(
                Fault(
                    trial.kind,  # type: ignore[arg-type]
                    lambda request: request.number >= trial.number if sticky else request.number == trial.number,
                    None if sticky else 1,
                )
            )
            try:
                with short_deadlines():
                    ledger.read(self._life(run, DISTURBED))
            finally:
                self._proxy.inject(None)
        errors = "+".join(sorted({one.split()[0] for one in ledger.reported}))
        self._concluded(run, ledger)
        return errors, ledger.problems

    def _begun(self) -> tuple[str, Ledger]:
        run, ledger = f"s3://trials/{next(self._runs):06d}", Ledger()
        ledger.read(self._life(run, SETUP))
        return run, ledger

    def _life(self, run: str, options: list[str]) -> list[str]:
        lines: list[str] = []
        live([run, *options], lines.append)
        return lines

    def _killed(self, run: str, trial: Trial) -> list[str]:
        """The output of a life that is killed when it sends a request."""
        if trial.kind == "killed before":
            self._proxy.inject(Fault("cut_before", lambda request: request.number == trial.number, 1))
        process = subprocess.Popen(
            [*VICTIM, run, *DISTURBED], stdout=subprocess.PIPE, text=True, env=environment(self._at)
        )

        def kill(request: Request) -> None:
            if request.number == trial.number:
                process.kill()
                process.wait()

        self._proxy.before = kill
        try:
            assert process.stdout is not None
            with process.stdout:
                return process.stdout.read().splitlines()
        finally:
            process.wait()
            self._proxy.before = None
            self._proxy.inject(None)

    def _concluded(self, run: str, ledger: Ledger) -> None:
        ledger.judge(run)
        ledger.go_on(run, 1000)


@contextlib.contextmanager
def short_deadlines() -> Iterator[None]:
    """For a life with a fault. One without a fault keeps its own: a loaded machine must not look like an outage."""
    patient = object_store.DEADLINES, objects.CREATION_PAUSES_SECONDS
    object_store.DEADLINES, objects.CREATION_PAUSES_SECONDS = QUICK, (0.01, 0.02, 0.04, 0.08)
    try:
        yield
    finally:
        object_store.DEADLINES, objects.CREATION_PAUSES_SECONDS = patient


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    """A server with a proxy in front of it until the end of the block."""
    before = dict(os.environ)
    with in_memory() as at, ObjectServer(at / "server") as server, FaultyProxy(server.endpoint) as proxy:
        os.environ.update(server.environment(proxy.endpoint))
        make_bucket("s3://trials/x")
        try:
            yield Bench(proxy, at)
        finally:
            os.environ.clear()
            os.environ.update(before)


def trials(count: int, stride: int, kinds: tuple[str, ...]) -> list[Trial]:
    """The trials of a life of `count` requests: at every `stride`-th one, every kind shifted by one."""
    found = []
    ways = [(kind, way) for kind in kinds if kind not in KILLS for way in WAYS]
    for shift, (kind, way) in enumerate([*ways, *((one, "") for one in KILLS if one in kinds)]):
        found += [Trial(number, kind, way) for number in range(shift % stride, count, stride)]
    return found


class Tried(NamedTuple):
    """What one trial found: the errors that the disturbed life reported, and the violations."""

    trial: Trial
    errors: str
    problems: list[str]


_bench: list[Bench] = []
_held = contextlib.ExitStack()
"""The bench of a process that makes trials, which holds its server and proxy until the process ends."""


def _begin() -> None:
    _bench.append(_held.enter_context(bench()))


def _tried(trial: Trial) -> Tried:
    return Tried(trial, *_bench[-1].tried(trial))


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--stride", type=int, default=1, help="try every so manieth request")
    options.add_argument("--kinds", default=",".join([*KINDS, *KILLS]))
    options.add_argument("--jobs", type=int, default=2, help="processes, each with a server of its own")
    args = options.parse_args()
    wrong, outcomes, by_kind = list[str](), Counter[str](), Counter[str]()
    with bench() as one:
        requests = one.requests()
    todo = trials(len(requests), args.stride, tuple(args.kinds.split(",")))
    show = progress(len(todo))
    with multiprocessing.get_context("spawn").Pool(args.jobs, _begin) as pool:
        for done, (trial, errors, problems) in enumerate(pool.imap(_tried, todo), 1):
            outcomes[errors or "no error"] += 1
            by_kind[f"{trial.kind} {trial.way}".strip()] += 1
            request = requests[trial.number]
            wrong += [f"{trial} ({request.method} {request.target}): {problem}" for problem in problems]
            show(done, len(wrong))
    facts = {
        "requests_of_a_life": len(requests),
        "trials": len(todo),
        "stride": args.stride,
        "violations": len(wrong),
        "by_kind": dict(by_kind),
        "outcomes": dict(outcomes),
        "problems": wrong,
    }
    rows = "\n".join(f"| {name} | {count} |" for name, count in outcomes.most_common())
    kinds = "\n".join(f"| {name} | {count} |" for name, count in by_kind.items())
    listed = "\n".join(f"- {one}" for one in wrong)
    report(
        "requests",
        "Faults at every request of a run in an object store",
        facts,
        [
            f"| fault | trials |\n|---|---|\n{kinds}",
            f"| errors that the disturbed life reported | trials |\n|---|---|\n{rows}",
            *([listed] if listed else []),
        ],
    )
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

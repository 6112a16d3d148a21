"""Two processes that open one run in an object store for writing: their requests, interleaved by a scheduler.

    python -m lastgood_lab.campaigns.two_writers [--stride 6] [--random 200] [--seed 0]

Each writer is a life of the victim in a thread, behind a proxy of its own. The scheduler lets one request pass at a
time and waits until its writer is quiet again, so a schedule decides the order of all requests. A schedule is a list of
turns: how many requests one writer sends before the other one continues. After both have ended, what was acknowledged
must exist and be part of the lineage, at least one writer must have gone through, and the other one must have gone
through or have been refused by name.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence

from lastgood.engine.inline_executor import Inline
from lastgood.errors import LastgoodError
from lastgood.format import commit
from lastgood.policy.restore import lineage
from lastgood.run import access
from lastgood.storage import object_store, objects
from lastgood_lab.campaigns.reports import report
from lastgood_lab.campaigns.trials import in_memory, progress
from lastgood_lab.campaigns.victim import bytes_of, differs, live, place
from lastgood_lab.object_faults import FaultyProxy, Request
from lastgood_lab.object_server import ObjectServer, make_bucket

QUIET_SECONDS = 0.01
"""A writer that has sent nothing for so long after its reply, and whose thread runs on, is asked again."""
REFUSALS = {"RunReplaced", "RunLocked"}
LATEST = 60.0
"""A writer that neither sends a request nor ends for so many seconds hangs."""


class Writer:
    """One life, whose requests wait at the proxy until `allow` is called."""

    def __init__(self, proxy: FaultyProxy, run: str, seed: int) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._waiting = self._allowed = self._passed = 0
        self.ended = False
        proxy.before = self._arrive
        self._endpoint = os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
        self._thread = threading.Thread(target=self._live, args=(run, seed))
        self._thread.start()
        self.until_quiet()

    def _live(self, run: str, seed: int) -> None:
        try:
            live([run, "--saves=2", f"--seed={seed}"], self.lines.append)
        finally:
            with self._changed:
                self.ended = True
                self._changed.notify_all()

    def _arrive(self, request: Request) -> None:
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
            number = self._passed + self._waiting
            self._changed.wait_for(lambda: self._allowed >= number or self.ended, LATEST)
            self._waiting -= 1
            self._passed += 1

    def until_quiet(self) -> None:
        """Wait until a request of this writer waits, or its life has ended."""
        with self._changed:
            if not self._changed.wait_for(lambda: self.ended or self._passed + self._waiting > self._allowed, LATEST):
                raise TimeoutError(f"the writer hangs after {self._passed} requests: {self.lines[-2:]}")

    def allow(self) -> None:
        """Let its next request pass, and wait until the one after it waits or the life has ended."""
        os.environ["AWS_ENDPOINT_URL"] = self._endpoint  # obstore and boto3 read it when the writer makes a client
        with self._changed:
            self._allowed += 1
            self._changed.notify_all()
        self.until_quiet()

    def join(self) -> None:
        self._thread.join()


class Bench:
    """The server, and a proxy for each writer."""

    def __init__(self, server: ObjectServer, proxies: Sequence[FaultyProxy]) -> None:
        self._server, self._proxies = server, proxies
        self._runs = itertools.count()

    def tried(self, turns: Sequence[int]) -> tuple[str, list[str]]:
        """Run both writers in this order: `turns[0]` requests of the first, `turns[1]` of the second, and so on; then
        the first to its end, and the second. Returns what the writers reported, and the violations."""
        os.environ["AWS_ENDPOINT_URL"] = self._server.endpoint
        run = f"s3://trials/{next(self._runs):06d}"
        setup: list[str] = []
        live([run, "--saves=1", "--seed=1"], setup.append)
        writers = [Writer(proxy, run, seed) for seed, proxy in enumerate(self._proxies, 2)]
        try:
            for number, count in enumerate((*turns, 10**6, 10**6)):
                one = writers[number % 2]
                for _ in range(count):
                    if one.ended:
                        break
                    one.allow()
        finally:
            for one in writers:
                one.join()
        os.environ["AWS_ENDPOINT_URL"] = self._server.endpoint
        return judged(run, [setup, *(one.lines for one in writers)])


def judged(run: str, lives: Sequence[Sequence[str]]) -> tuple[str, list[str]]:
    """What two lives reported after a first one, and the violations of what they were promised."""
    problems, ends = list[str](), list[str]()
    for lines in lives[1:]:
        errors = {line.split()[1] for line in lines if line.startswith("error ")}
        ends.append("+".join(sorted(errors)) or "went through")
        if errors - REFUSALS or lines[-1:] != ["done"]:
            problems.append(f"a writer ended with {sorted(errors)}: {lines[-2:]}")
    if "went through" not in ends:
        problems.append("no writer went through")
    tier = access.for_reading(run)
    survey = commit.survey(tier)
    chain = {place(at) for at in lineage(survey).chain}
    retired = {line.split()[1] for lines in lives for line in lines if line.startswith("retiring ")}
    for at in (line.split()[1] for lines in lives for line in lines if line.startswith("durable ")):
        if at not in chain and at not in retired:
            problems.append(f"{at} was acknowledged, and is not in the lineage {sorted(chain)}")
    for generation in survey.generations.values():
        try:
            manifest = commit.read_manifest(tier, generation)
            if problem := differs(generation, manifest, bytes_of(tier, generation, manifest, Inline())):
                problems.append(problem)
        except LastgoodError as error:
            problems.append(f"{generation.id} is incomplete: {error}")
    more: list[str] = []
    if live([run, "--saves=1", "--seed=9"], more.append):
        problems.append(f"an undisturbed life fails afterwards: {more[-2:]}")
    return ", ".join(ends), problems


@contextlib.contextmanager
def bench() -> Iterator[Bench]:
    before = object_store.DEADLINES, objects.CREATION_PAUSES_SECONDS, dict(os.environ)
    with contextlib.ExitStack() as held:
        server = held.enter_context(ObjectServer(held.enter_context(in_memory()) / "server"))
        proxies = [held.enter_context(FaultyProxy(server.endpoint)) for _ in range(2)]
        os.environ.update(server.environment())
        make_bucket("s3://trials/x")
        try:
            yield Bench(server, proxies)
        finally:
            object_store.DEADLINES, objects.CREATION_PAUSES_SECONDS, environment = before
            os.environ.clear()
            os.environ.update(environment)


def schedules(length: int, stride: int, count: int, seed: int) -> list[list[int]]:
    """Every pair of switches at multiples of `stride` up to `length` requests, and `count` random schedules."""
    grid = [[first, second] for first in range(0, length, stride) for second in range(0, length, stride)]
    chance = random.Random(seed)
    return grid + [[chance.randint(1, length // 4) for _ in range(chance.randint(3, 20))] for _ in range(count)]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--length", type=int, default=110, help="about as many requests as a life sends")
    options.add_argument("--stride", type=int, default=6)
    options.add_argument("--random", type=int, default=200)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    wrong, outcomes = list[str](), Counter[str]()
    todo = schedules(args.length, args.stride, args.random, args.seed)
    with bench() as one:
        show = progress(len(todo))
        for done, turns in enumerate(todo, 1):
            ends, problems = one.tried(turns)
            outcomes[ends] += 1
            wrong += [f"{turns}: {problem}" for problem in problems]
            show(done, len(wrong))
    rows = "\n".join(f"| {name} | {count} |" for name, count in outcomes.most_common())
    facts = {"schedules": len(todo), "violations": len(wrong), "outcomes": dict(outcomes), "problems": wrong}
    table = f"| first writer, second writer | schedules |\n|---|---|\n{rows}"
    report("two_writers", "Two writers of one run in an object store", facts, [table, *wrong])
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())

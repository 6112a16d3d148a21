"""Mutation testing of the safeguards: each mutant (mutants/) changes one marked statement of a copy of the sources.

A mutant is killed if a test fails or does not end. A mutant that survives shows that no test covers its safeguard, or
that the safeguard is not needed. An equivalent mutant, which no test can kill, states the reason and is not run.

A verdict is kept in a file, so a run that was stopped can continue. It is valid as long as the code of the mutated
file and of the file with the test that killed the mutant is unchanged (for a survivor: the code of all its test files).
After a change, the test that killed the mutant the last time runs first.

The tests run in child processes of a forkserver that has imported torch and pytest, but no module of lastgood.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from lastgood_lab.campaigns.checkout import checkout
from lastgood_lab.campaigns.mutants import MUTANTS
from lastgood_lab.campaigns.mutants.change import Nothing, Unfit, marked_lines
from lastgood_lab.campaigns.mutants.record import Mutant, test_file
from lastgood_lab.campaigns.reports import REPORTS, report

ROOT = checkout()
KEPT = REPORTS / "mutation-verdicts.json"
LIMIT_SECONDS = 900
TEST_SECONDS = 180
"""after which a test that has not ended counts as failed"""
MEMORY_BYTES = 8 << 30
"""the address space of a child: a mutant that never ends may also allocate without end"""


CHILDREN = multiprocessing.get_context("forkserver")


class Judgement(NamedTuple):
    """The verdict on a mutant."""

    outcome: str
    """killed, survived, stale (the change does not fit the source), or stopped (no verdict)"""
    reason: str
    """the first test that failed, or why there is no verdict"""
    seconds: float
    of: str = ""
    """the fingerprint of what was judged"""


def judge(mutant: Mutant, last: Judgement | None = None) -> Judgement:
    """Run the tests on a mutant, first the test that killed it according to its `last` verdict."""
    file = holder(mutant)
    try:
        mutated = mutant.apply(file.read_text())
        compile(mutated, file, "exec")
    except Unfit as error:
        return Judgement("stale", str(error), 0.0)
    except SyntaxError as error:
        return Judgement("stale", f"the changed source is not valid Python: {error}", 0.0)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy, scratch = Path(folder, "copy"), Path(folder, "scratch")
        scratch.mkdir()
        shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        for beside in ("tests", "lab", "examples", "docs"):
            shutil.copytree(ROOT / beside, copy / beside, ignore=shutil.ignore_patterns("__pycache__", "reports"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / file.relative_to(ROOT)).write_text(mutated)
        rounds = [list(mutant.tests)]
        if last and last.outcome == "killed" and "::" in last.reason:
            stem, _, test = last.reason.partition(".py::")
            rounds.insert(0, [f"{test_file(stem)}::{test}"])
        for tests in rounds:
            child = CHILDREN.Process(target=run_tests, args=(copy, scratch, tests))
            child.start()
            child.join(LIMIT_SECONDS)
            if child.exitcode is None or child.pid is None:
                child.kill()
                child.join()
                return Judgement("killed", "it never ends", time.monotonic() - begun)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # ends processes that the tests left running
            output = Path(scratch, "output").read_text(errors="replace")
            found = re.search(r"^(?:FAILED|ERROR) tests/\w+/test_(.+?)(?: - .*)?$", output, re.M)
            if found:
                return Judgement("killed", found[1], time.monotonic() - begun)
    if child.exitcode in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGKILL):
        return Judgement("stopped", "the tests were ended by a signal", time.monotonic() - begun)
    if child.exitcode == 0:
        return Judgement("survived", "", time.monotonic() - begun)
    hung = re.search(r"^Timeout .*(?:.*\n)*?.* in (test_\w+)", output, re.M)
    reason = f"{hung[1]} never ends" if hung else f"it ended with {child.exitcode}"
    return Judgement("killed", reason, time.monotonic() - begun)


def run_tests(copy: Path, scratch: Path, tests: list[str]) -> NoReturn:
    """Run tests of a copy against the code of that copy, in a child process; all output goes to `scratch`/output."""
    assert not any(name.partition(".")[0] == "lastgood" for name in sys.modules), "lastgood is imported from the copy"
    os.setsid()
    os.chdir(copy)
    os.environ.update(PYTHONPATH=os.pathsep.join([str(copy / "src"), str(copy / "lab/src")]), TMPDIR=str(scratch))
    sys.path.insert(0, str(copy / "src"))
    tempfile.tempdir = None  # the cached folder is that of the parent process
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with Path(scratch, "output").open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    limits = ["-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true"]
    preloaded = ["-W", "ignore:Module already imported so cannot be rewritten"]  # the forkserver imported hypothesis
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    code = pytest.main(["-x", "--tb=no", *preloaded, *plugins, *limits, *tests])
    sys.stdout.flush()
    os._exit(code)


@functools.cache
def holders() -> dict[str, Path]:
    """The source file that holds the marker of each guard."""
    files = sorted((ROOT / "src").rglob("*.py"))
    return {name: file for file in files for name, _ in marked_lines(file.read_text())}


def holder(mutant: Mutant) -> Path:
    """The source file that a mutant changes. Raises LookupError if no statement is marked with its guard."""
    if mutant.guard not in holders():
        raise LookupError(f"{mutant.name}: no statement in src/ is marked `# guard: {mutant.guard}`")
    return holders()[mutant.guard]


def controls_of(wanted: list[Mutant]) -> list[Mutant]:
    """For each test file that runs on these mutants, a control that changes nothing.

    If a test fails on unchanged code, the verdicts of its file are void.
    """
    files = sorted({test for one in wanted for test in one.tests})
    return [Mutant("control", test, MUTANTS[0].guard, Nothing(test), (test,)) for test in files]


def fingerprint(mutant: Mutant, found: Judgement) -> str:
    """A digest of what a verdict depends on: the mutant, the code of its file, and the code of the deciding tests.

    The verdict on a control depends on all code in src/.
    """
    killer = found.reason.partition(".py::")[0] if found.outcome == "killed" and "::" in found.reason else ""
    tests = [test_file(killer)] if killer else mutant.tests
    judged = hashlib.sha256(f"{mutant.key} {mutant.tests}".encode())
    sources = sorted((ROOT / "src").rglob("*.py")) if isinstance(mutant.change, Nothing) else [holder(mutant)]
    for path in [*sources, *(ROOT / test for test in tests)]:
        judged.update(code_of(path).encode())
    return judged.hexdigest()[:16]


@functools.cache
def code_of(path: Path) -> str:
    """The code of a file without docstrings and comments, on which no verdict depends."""
    from lastgood_lab import provenance  # imported late: children import this module, and lastgood from a copy

    return provenance.code_of(path.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument(
        "--only", default="", help="only mutants whose kind or description contains this text; writes no report"
    )
    parser.add_argument("--new", action="store_true", help="only mutants without a kept verdict; writes no report")
    options = parser.parse_args()
    os.environ.update(CI="1", PYTHONDONTWRITEBYTECODE="1")  # hypothesis: no deadlines, the same examples in every run
    CHILDREN.set_forkserver_preload(["hypothesis", "pytest", "torch"])
    known = {key: Judgement(*one) for key, one in json.loads(KEPT.read_text()).items()} if KEPT.exists() else {}
    wanted = [one for one in MUTANTS if options.only in one.name and not one.equivalent]
    wanted = [one for one in wanted if not (options.new and one.key in known)]
    controls = controls_of(wanted)
    begun, done, turn = time.monotonic(), 0, threading.Lock()

    def run(mutant: Mutant) -> None:
        nonlocal done
        last = known.get(mutant.key)
        if last is None or last.of != fingerprint(mutant, last):
            judged = judge(mutant, last)
            if judged.outcome == "stopped":
                return
            judged = judged._replace(of=fingerprint(mutant, judged))
            with turn:
                known[mutant.key] = judged
                KEPT.parent.mkdir(exist_ok=True)
                KEPT.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
        done += 1
        found = known[mutant.key]
        if found.outcome != ("survived" if mutant in controls else "killed"):
            print(f"\n{found.outcome}: {mutant.name} {found.reason}")
        print(f"\r{done} of {len(wanted) + len(controls)}, {time.monotonic() - begun:.0f} s", end="", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            list(pool.map(run, [*controls, *wanted]))
        except KeyboardInterrupt:  # the verdicts so far are reported
            pool.shutdown(cancel_futures=True)
    print()
    if any(one.key not in known or known[one.key].outcome != "survived" for one in controls):
        print("Tests fail on the unchanged code, so no verdict counts.")
        return 2
    found = [(one, known[one.key]) for one in wanted if one.key in known]
    results = [(one, verdict) for one, verdict in found if verdict.of == fingerprint(one, verdict)]
    killed = sum(found.outcome == "killed" for _, found in results)
    if not (options.only or options.new):
        write(results, killed, len(wanted) - len(results))
    print(f"{killed} of {len(results)} killed, {len(wanted) - len(results)} not judged")
    return int(killed < len(wanted))


def write(results: list[tuple[Mutant, Judgement]], killed: int, unjudged: int) -> None:
    """Write the report. `unjudged`: the number of mutants without a verdict."""
    rows = [
        f"| {one.kind} | {one.what} | `{one.guard}` | {found.outcome} | {found.reason.replace('|', ' ')} |"
        for one, found in results
    ]
    equivalent = ["Equivalent mutants, which no test can kill, and which are not run:", ""]
    equivalent += [f"- {one.kind}, {one.what} (`{one.guard}`): {one.equivalent}." for one in MUTANTS if one.equivalent]
    facts = {
        "mutants": len(results),
        "killed": killed,
        "not_judged_yet": unjudged,
        "score": f"{100 * killed / len(results):.1f} %{' of those judged' * bool(unjudged)}",
        "seconds": round(sum(found.seconds for _, found in results)),
        "survived": [one.name for one, found in results if found.outcome != "killed"],
    }
    table = "\n".join(
        ["| kind | what the mutant does | guard | outcome | first test that failed |", "|---|---|---|---|---|", *rows]
    )
    report("mutation", "Mutants of the core", facts, [table, "\n".join(equivalent)])


if __name__ == "__main__":
    sys.exit(main())

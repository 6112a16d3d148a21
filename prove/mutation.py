"""Take one safeguard out, and see whether a test fails. Each mutant (mutants.py) is one exact replacement in a copy.

A mutant that no test kills is a safeguard that nothing guards: a test is missing, or the code is. A mutant that cannot
matter says why, and is not run; a test that never ends has found one.
A verdict is kept for as long as the mutated file and the file of the test that killed it (of a survivor: all tests)
are the same, so a run that was stopped goes on; after that, the test that killed a mutant is asked first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from mutants import BACKGROUND, DISK, Mutant, mutants
from syscalls import report

HERE = Path(__file__).resolve().parent
HOME = HERE.parent
KEPT = HERE / "reports" / "mutation-verdicts.json"
LIMIT_SECONDS = 900
SAME = "from __future__ import annotations"
TEST_SECONDS = 120
"""after which a test that has not ended counts as failed"""
MEMORY_BYTES = 8 << 30
"""of address space: a mutant that never ends may also never stop to grow"""


class Judgement(NamedTuple):
    """What became of a mutant."""

    outcome: str
    """killed, survived, stale, or stopped: no verdict"""
    told: str
    """by what: the first test that failed"""
    seconds: float
    of: str = ""
    """what was judged: the mutant, the file it stands in, the tests that decided"""


def judge(mutant: Mutant, last: Judgement | None = None) -> Judgement:
    """Run the tests on a mutant; first the one that killed it `last` time, when they were other tests."""
    source = (HOME / "src/lastgood" / mutant.file).read_text()
    if source.count(mutant.old) != 1:
        return Judgement("stale", f"its text is {source.count(mutant.old)} times in {mutant.file}", 0.0)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy, scratch = Path(folder, "copy"), Path(folder, "scratch")
        scratch.mkdir()
        shutil.copytree(HOME / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        shutil.copytree(HOME / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(HOME / "pyproject.toml", copy)
        (copy / "src/lastgood" / mutant.file).write_text(source.replace(mutant.old, mutant.new))
        env = {**os.environ, "PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch)}
        env["CI"] = "1"  # hypothesis: no deadlines, the same examples every time
        rounds = [mutant.tests()]
        if last and last.outcome == "killed" and "::" in last.told:
            rounds.insert(0, [f"tests/test_{last.told}"])
        for tests in rounds:
            limited = ["prlimit", f"--as={MEMORY_BYTES}", sys.executable, "-m", "pytest"]
            command = [*limited, "-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
            command += ["-o", f"faulthandler_timeout={TEST_SECONDS}", "-o", "faulthandler_exit_on_timeout=true"]
            try:
                done = subprocess.run(
                    [*command, *tests], cwd=copy, env=env, capture_output=True, text=True, timeout=LIMIT_SECONDS
                )
            except subprocess.TimeoutExpired:
                return Judgement("killed", "it never ends", time.monotonic() - begun)
            found = re.search(r"^(?:FAILED|ERROR) tests/test_(\S+)", done.stdout, re.M)
            if found:
                return Judgement("killed", found[1], time.monotonic() - begun)
    if -done.returncode in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        return Judgement("stopped", "somebody ended the tests", time.monotonic() - begun)
    if done.returncode == 0:
        return Judgement("survived", "", time.monotonic() - begun)
    hung = re.search(r"^Timeout .*(?:.*\n)*?.* in (test_\w+)", done.stderr, re.M)
    told = f"{hung[1]} never ends" if hung else f"it ended with {done.returncode}"
    return Judgement("killed", told, time.monotonic() - begun)


def fingerprint(mutant: Mutant, found: Judgement) -> str:
    killer = found.told.partition("::")[0] if found.outcome == "killed" and "::" in found.told else ""
    tests = [f"tests/test_{killer}"] if killer else mutant.tests()
    told = hashlib.sha256(repr(mutant).encode())
    for path in [HOME / "src/lastgood" / mutant.file, *(HOME / test for test in tests)]:
        told.update(path.read_bytes())
    return told.hexdigest()[:16]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="mutants whose kind or name holds this")
    options = parser.parse_args()
    known = {name: Judgement(*one) for name, one in json.loads(KEPT.read_text()).items()} if KEPT.exists() else {}
    wanted = [one for one in mutants() if options.only in one.name and not one.equivalent]
    controls = [Mutant("control", f"nothing in {file}", file, SAME, SAME) for file in (DISK, BACKGROUND)]
    begun, done, turn = time.monotonic(), 0, threading.Lock()

    def run(mutant: Mutant) -> None:
        nonlocal done
        last = known.get(mutant.name)
        if last is None or last.of != fingerprint(mutant, last):
            judged = judge(mutant, last)
            if judged.outcome == "stopped":
                return
            judged = judged._replace(of=fingerprint(mutant, judged))
            with turn:
                known[mutant.name] = judged
                KEPT.parent.mkdir(exist_ok=True)
                KEPT.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")
        done += 1
        found = known[mutant.name]
        if found.outcome != ("survived" if mutant in controls else "killed"):
            print(f"\n{found.outcome}: {mutant.name} {found.told}")
        print(f"\r{done} of {len(wanted) + len(controls)}, {time.monotonic() - begun:.0f} s", end="", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            list(pool.map(run, [*controls, *wanted]))
        except KeyboardInterrupt:  # what is judged already is reported
            pool.shutdown(cancel_futures=True)
    print()
    if any(one.name not in known or known[one.name].outcome != "survived" for one in controls):
        print("the tests fail as it is, so nothing was found out")
        return 2
    found = [(one, known[one.name]) for one in wanted if one.name in known]
    results = [(one, verdict) for one, verdict in found if verdict.of == fingerprint(one, verdict)]
    killed = sum(found.outcome == "killed" for _, found in results)
    if not options.only:
        write(results, killed, len(wanted) - len(results))
    print(f"{killed} of {len(results)} killed, {len(wanted) - len(results)} not judged")
    return int(killed < len(wanted))


def write(results: list[tuple[Mutant, Judgement]], killed: int, left: int) -> None:
    rows = [
        f"| {one.kind} | {one.what} | `{one.file}` | {found.outcome} | {found.told.replace('|', ' ')} |"
        for one, found in results
    ]
    told = ["Not run, because nobody could tell:", ""]
    told += [f"- {one.kind}, {one.what} (`{one.file}`): {one.equivalent}." for one in mutants() if one.equivalent]
    facts = {
        "mutants": len(results),
        "killed": killed,
        "not_judged_yet": left,
        "score": f"{100 * killed / len(results):.1f} %{' of those judged' * bool(left)}",
        "seconds": round(sum(found.seconds for _, found in results)),
        "survived": [one.name for one, found in results if found.outcome != "killed"],
    }
    table = "\n".join(
        ["| kind | what was taken out | file | outcome | first test that failed |", "|---|---|---|---|---|", *rows]
    )
    report("mutation", "Mutants of the core", facts, [table, "\n".join(told)])


if __name__ == "__main__":
    sys.exit(main())

"""Fault injection into every system call of save, restore and gc that touches a run.

At each call the process is killed, or the call fails with an errno: this call only, or all later ones of its name, too.

A scenario is one life (one process) of `victim.py` on a run that is copied anew for each trial. It is traced once
without a fault, which lists its calls and their paths. Then it is run again for every call and every fault, and the
victim's ledger judges the run that remains. Every acknowledged save exists bit for bit, and no refused save exists.
Each errno was reported as an error, or IGNORED has a reason why it need not be. Two more lives without faults succeed
and leave no litter.

strace can neither shorten a write nor fill a disk: RLIMIT_FSIZE, a small ext4 image and a small tmpfs do that (the
latter two as root). With `--keep FILE` the results are kept in a file, so a sweep that was stopped can continue; they
hold for the code that they were made of. Needs strace. Writes lab/reports/syscalls.*
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from lastgood.format import layout
from lastgood_lab import provenance
from lastgood_lab.campaigns.full_disks import full_disks
from lastgood_lab.campaigns.reports import PROVED, report
from lastgood_lab.campaigns.trials import VICTIM, environment, in_memory, progress
from lastgood_lab.campaigns.victim import TIERS, live
from lastgood_lab.campaigns.victim_ledger import Ledger

SCENARIOS: dict[str, list[str]] = {
    "fresh": ["--saves=2", "--seed=12"],
    "resume": ["--saves=2", "--seed=12"],
    "buffered": ["--saves=1", "--seed=12", "--buffered"],
    "restore": ["--mode=restore"],
    "gc": ["--mode=gc", "--saves=0", "--last=1", "--seed=12"],
    "recover": ["--saves=1", "--seed=12"],
}
"""arguments of the victim; all but `fresh` start on a run with saves, `recover` with leftovers of crashes (`mess`)"""
MISSED = "the fault missed its call"
TAKES_SPACE = {"openat", "pwrite64", "fallocate", "fsync", "link", "mkdir", "rename", "symlink", "ftruncate"}

# Calls whose failure need not be reported if it has no consequence: (pattern of the call in a line of the trace,
# pattern of the path, reason).
_READS = r"(openat|close|preadv2?|pread64|fadvise64)\("
_FULL = r"(openat|close|pwrite64|fsync|link|unlink|newfstatat|getdents64|mkdir)\(.* = -1 (ENOSPC|EDQUOT)"
IGNORED: list[tuple[str, str, str]] = [
    (r".*", r"/\.probe-", "the probe for direct I/O: if it fails, I/O goes through the page cache"),
    (r"close\(", r"", "the file is closed either way, and every error of a close was reported by the fsync before it"),
    (r"link\(", r"/COMMIT\.json$", "the name exists: its content is read back, and identical bytes are success"),
    (r"flock\(.*LOCK_UN", r"/\.lock$", "closing the file releases the lock as well"),
    (r"access\(", r"", "a check before the probe: if it fails, the probe is not made"),
    (r"(unlink|newfstatat)\(", r"\.tmp$", "the second name of a durable record: the next opening removes it"),
    (_READS, r"/(VERIFIED|DAMAGED|POINTER)\.json$", "a hint, which is written again when it is needed"),
    (_READS, r"/lastgood\.json$", "every commit repeats its content"),
    (r".*", r"/incarnations(/|$)", "each commit repeats its content, and the next save writes the record"),
    (_FULL, r"^run/gen(/|$)", "on a full disk a generation is deleted without its GOING record, to free space"),
]


class Fault(NamedTuple):
    """One trial: the process is killed at the n-th `call` of the scenario, or this call fails."""

    scenario: str
    call: str
    n: int
    """counted from the start of the process, as strace counts"""
    path: str
    """the path that the call names, relative to the trial's folder"""
    what: str
    """KILL or the name of an errno"""
    sticky: bool
    """whether all later calls of this name fail, too"""

    def __str__(self) -> str:
        return f"{self.scenario}: {self.call}({self.path}) [{self.n}{'+' if self.sticky else ''}] {self.what}"


class Result(NamedTuple):
    """`outcome`: killed, hung, ignored, or the names of the reported errors, `warned` for warnings, joined with "+"."""

    fault: Fault
    outcome: str
    problems: list[str]


class Kept:
    """The results of a sweep in a file, one to a line; without a file nothing is kept."""

    def __init__(self, file: Path | None) -> None:
        self._file, self._code = file, provenance.digest(PROVED["syscalls"])

    def read(self) -> dict[Fault, Result]:
        """The kept results without problems that were made of the present code."""
        lines = self._file.read_text().splitlines() if self._file and self._file.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("]")]  # the last one may have been cut
        own = [(Fault(*fault), outcome) for code, fault, outcome in rows if code == self._code]
        return {fault: Result(fault, outcome, []) for fault, outcome in own}

    def append(self, one: Result) -> None:
        """Keep one result, unless it has problems: such a trial is to be repeated."""
        if self._file and not one.problems:
            with self._file.open("a") as file:
                # The line break comes first: a process that was killed may have left a part of a line.
                file.write("\n" + json.dumps([self._code, one.fault, one.outcome]))


class Sweep:
    """The trials of all scenarios. `boxes` trials can run at a time, each in its own folder.

    Everything is below `at`: the folders, the runs that the scenarios start from, and the traces.
    """

    def __init__(
        self, at: Path, scenarios: Sequence[str] = tuple(SCENARIOS), boxes: int = 2, tier: str = "directory"
    ) -> None:
        self.at, self.tier, self.hung, self.missed = at, tier, 0, 0
        self._boxes: SimpleQueue[Path] = SimpleQueue()
        for number in range(boxes):
            (at / f"box{number}").mkdir()
            self._boxes.put(at / f"box{number}")
        self._starts = {one: self._start(one) for one in scenarios}
        # The first start writes bytecode files, which must not appear in a trace.
        subprocess.run([*VICTIM, "--help"], check=True, stdout=subprocess.DEVNULL, env=environment(at))
        self.calls = {one: self._trace(one) for one in scenarios}

    def faults(self) -> list[Fault]:
        """Every fault at every traced call."""
        found = []
        for scenario, calls in self.calls.items():
            for call, n, path in calls:
                found.append(Fault(scenario, call, n, path, "KILL", False))
                errors = ["EIO", "ENOSPC"] + ["EDQUOT"] * (call in TAKES_SPACE)
                # If every mmap failed, the process would get no memory either.
                often = (False,) if call == "mmap" else (False, True)
                found += [Fault(scenario, call, n, path, what, sticky) for what in errors for sticky in often]
        return found

    def trial(self, fault: Fault) -> Result:
        """Run one trial. It is repeated at most twice, where the life hangs or the fault hits another call."""
        result = Result(fault, "hung", ["it hung in all three attempts"])
        for _ in range(3):
            try:
                result = self._trial(fault)
            except subprocess.TimeoutExpired:  # a loaded machine may pause, too
                self.hung += 1
                continue
            if not any(one.startswith(MISSED) for one in result.problems):
                break
            self.missed += 1
        return result

    def _trial(self, fault: Fault) -> Result:
        box = self._boxes.get()
        try:
            ledger = self._fresh(fault.scenario, box)
            run = str(box / "run")
            code, lines, trace, stderr = self._strace(fault.scenario, box, fault)
            ledger.read(lines)
            problems = ledger.problems
            hits = [line for line in trace if "(INJECTED)" in line] if fault.what != "KILL" else trace[-1:]
            if not hits or _path(hits[0], box) != fault.path or not all(_path(line, box) for line in hits):
                problems.append(f"{MISSED}: {hits[:1]}, {stderr[-400:]}")
            if fault.what == "KILL":
                outcome = "killed"
                problems += [f"it was not killed: {code}"] if code != -9 else []
            else:
                reported = {one.partition(" ")[0] for one in ledger.reported} or {"warned" for _ in ledger.warned[:1]}
                outcome = "+".join(sorted(reported)) or "ignored"
                problems += _unreported(trace, box) if outcome == "ignored" else []
                if code not in (0, 3, 4, 5) or (code == 0) != (not [one for one in lines if one[:5] == "error"]):
                    problems.append(f"exit code {code}: {stderr[-400:]}")
            ledger.judge(run)
            if fault.scenario != "restore" or ledger.problems:
                ledger.go_on(run, 1000)
            return Result(fault, outcome, list(problems))
        finally:
            self._boxes.put(box)

    # ---- steps ---------------------------------------------------------------------------------------------

    def _start(self, scenario: str) -> Ledger:
        """Create the run that a scenario starts from; returns its ledger."""
        run, ledger = self.at / scenario / "run", Ledger(last=1 if scenario == "gc" else 2, tier=self.tier)
        (self.at / scenario).mkdir()
        if scenario == "fresh":
            return ledger
        for seed, saves in ((1, 2), (2, 2)) + ((3, 0),) * (scenario == "recover"):
            lines: list[str] = []
            live([str(run), f"--saves={saves}", f"--seed={seed}", "--last=2", f"--tier={self.tier}"], lines.append)
            ledger.read(lines)
        if scenario == "recover":
            mess(run, self.tier)
        return ledger

    def _fresh(self, scenario: str, box: Path) -> Ledger:
        """Replace the box by a copy of the run that the scenario starts from; returns a copy of its ledger."""
        shutil.rmtree(box)
        shutil.copytree(self.at / scenario, box, symlinks=True)
        return copy.deepcopy(self._starts[scenario])

    def _trace(self, scenario: str) -> list[tuple[str, int, str]]:
        """The calls of a life without a fault that touch the run: name, number, path."""
        box = self._boxes.get()
        self._fresh(scenario, box)
        _, lines, trace, stderr = self._strace(scenario, box, None)
        assert lines[-1:] == ["done"], stderr
        self._boxes.put(box)
        seen: Counter[str] = Counter()
        found = []
        for line in trace:
            call = _call(line)
            seen[call] += 1
            if (path := _path(line, box)) and call != "execve":
                found.append((call, seen[call], path))
        return found

    def _strace(self, scenario: str, box: Path, fault: Fault | None) -> tuple[int, list[str], list[str], str]:
        """Run one life under strace; returns exit code, lines of its output, lines of the trace, and standard error."""
        log = box.with_suffix(".trace")
        command = ["strace", "-y", "-qq", "-e", "signal=none", "-o", str(log)]
        # mkdir shows what folder a later sync of its parent is for.
        command += ["-e", f"trace={f'{fault.call},mkdir' if fault else '%file,%desc,msync'}"]
        if fault:
            what = "signal=KILL" if fault.what == "KILL" else f"error={fault.what}"
            command += ["-e", f"inject={fault.call}:{what}:when={fault.n}{'+' if fault.sticky else ''}"]
        if fault and fault.what != "KILL":  # strace 6.1 on Linux 6.18 injects no signal with --seccomp-bpf
            command += ["-f", "--seccomp-bpf"]
        life = [*command, *VICTIM, str(box / "run"), f"--tier={self.tier}", *SCENARIOS[scenario]]
        done = subprocess.run(life, capture_output=True, text=True, timeout=60, env=environment(self.at))
        return done.returncode, done.stdout.splitlines(), log.read_text(errors="replace").splitlines(), done.stderr


def mess(run: Path, tier: str) -> None:
    """Add to a run everything that earlier crashes may have left behind."""
    for name in (f"{layout.POINTER}.tmp", f"{layout.HEADER}.tmp", "incarnations/000003-33333333.json.tmp", ".probe-1"):
        (run / name).write_bytes(b"{")
    if tier != "directory":
        (run / "slots/table.tmp").write_bytes(b"{")
        return
    unfinished, going = run / "gen/000000000005-00000000", run / "gen/000000000001-11111111"
    for folder in (unfinished, going):
        folder.mkdir()
        (folder / layout.blob_name(0)).write_bytes(bytes(5000))
        (folder / layout.manifest_name(0)).write_bytes(b"{")
    (unfinished / f"{layout.COMMIT}.tmp").write_bytes(b"{")
    (going / layout.GOING).write_bytes(b"{")
    (run / "gen/000000000009-22222222").mkdir()
    (run / "latest_ok.tmp").symlink_to("gen/000000000009-22222222")


def _call(line: str) -> str:
    """The name of the call in a line of a trace."""
    return line.split("(")[0].split()[-1]


def _path(line: str, box: Path) -> str:
    """The last path that a call names, relative to the box; empty if it names none inside. Process ids become `*`."""
    if _call(line) == "msync":  # msync names an address, and only slots are mapped for writing
        return "run/slots/*"
    found = re.findall(rf'["<]{re.escape(str(box))}/?([^">]*)[">]', line.partition(" = ")[0])
    return re.sub(r"\d+-\d+(?=\.tmp)|(?<=\.probe-)\d+", "*", found[-1].replace("(deleted)", "") or ".") if found else ""


def _unreported(trace: list[str], box: Path) -> list[str]:
    """Problems for the first three failed calls that were not reported and that IGNORED does not excuse.

    An open or a sync of a folder right after a folder was made in it is for that one: it makes its name durable.
    """
    wrong = []
    for before, line in pairwise(["", *trace]):
        if "(INJECTED)" not in line:
            continue
        path = _path(line, box)
        if "mkdir(" in before and _call(line) in ("openat", "fsync"):
            made = _path(before, box)
            path = made if made.rpartition("/")[0] == path else path
        if not any(re.search(call, line) and re.search(of, path) for call, of, _ in IGNORED):
            wrong.append(f"an error that was not reported: {line}")
    return wrong[:3]


def spread(faults: Sequence[Fault], count: int, seed: int) -> list[Fault]:
    """A seeded choice of `count` faults, which alternates between scenarios, and in each between calls and faults."""
    chance = random.Random(seed)

    def in_turn(groups: Iterable[Sequence[Fault]]) -> list[Fault]:
        shuffled = chance.sample(found := [list(one) for one in groups], len(found))
        return [group[turn] for turn in range(max(map(len, found))) for group in shuffled if turn < len(group)]

    scenarios: dict[str, dict[tuple[str, str], list[Fault]]] = defaultdict(lambda: defaultdict(list))
    for one in faults:
        scenarios[one.scenario][one.call, f"{one.what}{one.sticky}"].append(one)
    shuffled = ([chance.sample(kind, len(kind)) for kind in kinds.values()] for kinds in scenarios.values())
    return in_turn(in_turn(kinds) for kinds in shuffled)[:count]


# ---- the campaign ----------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=0, help="number of faults, chosen by the seed; 0: all")
    parser.add_argument("--seed", type=int, default=0, help="determines the choice of faults")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time")
    parser.add_argument("--tier", choices=TIERS, default="directory", help="how the runs are stored")
    parser.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="only this one; may be repeated")
    parser.add_argument("--keep", type=Path, help="file in which results are kept, to continue from it")
    parser.add_argument("--no-disks", action="store_true", help="no trials on full disks and with short writes")
    options = parser.parse_args()
    begun = time.monotonic()
    with in_memory() as at:
        sweep = Sweep(at, options.scenario or list(SCENARIOS), options.jobs, options.tier)
        faults = sweep.faults()
        faults = spread(faults, options.trials, options.seed) if options.trials else faults
        kept = Kept(options.keep)
        known = kept.read()
        earlier = [known[one] for one in faults if one in known]
        results = earlier + _played(sweep, [one for one in faults if one not in known], kept, options.jobs)
        disks = [] if options.no_disks else list(full_disks(at, 1024, options.tier))
    for name, errors, problems in disks:
        if problems:
            print(f"{name}: {errors}\n  " + "\n  ".join(problems))
    wrong = sum(bool(one.problems) for one in results) + sum(bool(problems) for *_, problems in disks)
    facts = {
        "trials": len(results),
        "trials_of_earlier_runs_of_the_same_code": len(earlier),
        "full_disks_and_short_writes": len(disks),
        "lives_that_hung": sweep.hung,
        "lives_whose_fault_missed_its_call_and_was_tried_again": sweep.missed,
        "violations": wrong,
        "seconds": round(time.monotonic() - begun),
        "seed": options.seed,
        "calls": {
            scenario: dict(sorted(Counter(call for call, *_ in calls).items()))
            for scenario, calls in sweep.calls.items()
        },
        "outcomes": _counted(f"{one.fault.call} {one.fault.what}: {one.outcome}" for one in results),
        "ignored": _counted(
            f"{one.fault.call} {_general(one.fault.path)}" for one in results if one.outcome == "ignored"
        ),
        "disks": _counted(f"{name.split()[0]}: {errors or 'fitted'}" for name, errors, _ in disks),
        "violated": [{"fault": str(one.fault), "problems": one.problems} for one in results if one.problems]
        + [{"fault": name, "problems": problems} for name, _, problems in disks if problems],
    }
    title = f"{'A seeded choice of the' if options.trials else 'All'} system calls of save, restore and gc"
    report("syscalls", title, facts, _tables(facts, results), options.tier)
    return 1 if wrong else 0


def _played(sweep: Sweep, faults: Sequence[Fault], kept: Kept, jobs: int) -> list[Result]:
    """Run one trial for each of these faults; each result is kept. Returns the results."""
    results: list[Result] = []
    show = progress(len(faults))
    with ThreadPoolExecutor(jobs) as pool:
        for one in pool.map(sweep.trial, faults):
            kept.append(one)
            results.append(one)
            if one.problems:
                print(f"\n{one.fault}: {one.outcome}\n  " + "\n  ".join(one.problems), flush=True)
            show(len(results), sum(bool(one.problems) for one in results))
    return results


def _counted(keys: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(keys).items()))


def _general(path: str) -> str:
    return re.sub(r"\d{6,12}-[0-9a-f]{8}", "*", path)


def _tables(facts: dict[str, Any], results: list[Result]) -> Iterator[str]:
    yield "| scenario | calls on the run | trials |\n|---|---|---|\n" + "\n".join(
        f"| {scenario} | {', '.join(f'{count} {call}' for call, count in calls.items())} "
        f"| {sum(one.fault.scenario == scenario for one in results):,} |"
        for scenario, calls in facts["calls"].items()
    )
    ends = Counter((one.fault.what, one.outcome) for one in results)
    yield "| fault | reported by the victim | trials |\n|---|---|---|\n" + "\n".join(
        f"| {what} | {outcome} | {count:,} |" for (what, outcome), count in sorted(ends.items())
    )
    yield "Failures that were ignored, without a consequence:\n\n| call | on | trials |\n|---|---|---|\n" + "\n".join(
        f"| {' | '.join(key.split(' ', 1))} | {count} |" for key, count in facts["ignored"].items()
    )
    yield "Failures that may be ignored, with the reasons:\n\n" + "\n".join(
        f"- `{call}` on `{path or '.*'}`: {why}" for call, path, why in IGNORED
    )
    yield "| disk | trials |\n|---|---|\n" + "\n".join(f"| {key} | {count} |" for key, count in facts["disks"].items())


if __name__ == "__main__":
    sys.exit(main())

"""What must follow each fault of the campaign recovery.py, by the table of docs/recovery.md. Pure.

It knows nothing of policy/recovery.py: the expectations stand here a second time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lastgood_lab.campaigns.recovery_faults import MESSAGE, PASSING, SURVIVED, Fault, Plan

Note = Mapping[str, Any]
SUSPECTS = 2
"""so many batches at most are left out for one NaN: those since the last comparison of losses"""
REPORT = re.compile(r"lastgood: attempt (\d+): (?:rank (\d+) )?(.*), after ([\d.]+) s\. (\w+): (.*)\.$")


class Reported(NamedTuple):
    """One line of the report of `lastgood run`. `rank`: that is named; -1: none. `act`: what followed, and `why`.
    `slow`: the ranks that `lastgood attempts` names as slow."""

    rank: int
    what: str
    act: str
    why: str = ""
    slow: tuple[int, ...] = ()


class Trial(NamedTuple):
    """What became of one fault. `cause`: whether its rank and kind were named; None: nothing was to be named."""

    kind: str
    phase: str
    rank: int
    attempt: int
    outcome: str
    cause: bool | None
    seconds: float | None
    """from the fault to the first new step of the next attempt"""
    problems: list[str]


def reported(text: str, first: int) -> dict[int, Reported]:
    """Number of an attempt -> its line. `text`: stderr of a supervisor. `first`: number of its first attempt."""
    found = {}
    for line in text.splitlines():
        if match := REPORT.match(line):
            number, rank, what, _, act, why = match.groups()
            found[first + int(number) - 1] = Reported(int(rank or -1), what, act, why)
    return found


def judged(plan: Plan, notes: Sequence[Note], reports: Mapping[int, Reported]) -> list[Trial]:
    """The verdict on each fault that happened."""
    found = []
    for note in notes:
        if note["what"] != "fault":
            continue
        number = note["attempt"]
        (fault,) = [
            one
            for one in plan.attempts[number].faults
            if (one.kind, one.phase, one.rank) == (note["kind"], note["phase"], note["rank"])
        ]
        ended = any(other.kind not in PASSING for other in plan.attempts[number].faults if other is not fault)
        found.append(_of_fault(fault, note, notes, reports.get(number), ended))
    return found


def _of_fault(fault: Fault, note: Note, notes: Sequence[Note], line: Reported | None, another: bool) -> Trial:
    """`another`: whether another fault ends the attempt if this one does not."""
    number, problems = note["attempt"], list[str]()
    following = [one for one in notes if one["attempt"] == number + 1]
    new = [one["at"] for one in following if one["what"] == "step"]
    seconds = min(new) - note["at"] if new else None
    outcome, cause = "recovered", None
    if fault.kind == "node":
        if line is not None and not note.get("node"):
            problems.append(f"a supervisor that was killed has reported {line}")
        elif line is not None:
            cause = f"({note['node']}): no sign of life" in line.what  # another node has reported it
    elif line is None:
        problems.append("the attempt was not reported")
    elif line.act != "restart":
        problems.append(f"not started again: {line}")
    elif fault.kind in (*PASSING, "store") and (f"exit code {SURVIVED}" in line.what or another):
        outcome = "went on"
        if fault.kind == "slow" and fault.phase != "teardown":  # then no step is left in which the rank is slow
            cause = line.slow == (fault.rank,)
        if fault.kind == "full":
            cause = _full_disk_named(note, notes)
    elif fault.phase == "teardown" and f"exit code {SURVIVED}" in line.what and line.rank != fault.rank:
        pass  # nothing is to be named: that rank had ended before, as the plan of each attempt has it
    else:
        cause = _names(fault, line, note)
    kept = _kept(notes, number)
    restored = [one["step"] for one in following if one["what"] == "restored"]
    if fault.kind != "nan" and restored and min(restored) < kept:
        problems.append(f"step {kept} was saved, and step {min(restored)} restored")
    if len({*restored}) > 1:
        problems.append(f"the ranks restored different steps: {restored}")
    return Trial(fault.kind, fault.phase, fault.rank, number, outcome, cause, seconds, problems)


def _full_disk_named(note: Note, notes: Sequence[Note]) -> bool | None:
    """Whether each save that failed after the disk was filled names that, on one rank at least; None: none failed,
    because deletions had made room for it or it was under way already. No other fault is planned for such an attempt.
    """
    later = [one for one in notes if one["attempt"] == note["attempt"] and one["at"] > note["at"]]
    errors = dict[int, list[str]]()
    for one in later:
        if one["what"] == "not saved":
            errors.setdefault(one["step"], []).append(one["error"])
    named = [any("NoSpace" in text for text in some) for some in errors.values()]
    return all(named) if named else None


def _kept(notes: Sequence[Note], number: int) -> int:
    """The newest step that must not be lost by an attempt. After NaN that is what was restored next, and what was saved
    from then on: what was saved before may be suspect."""
    bad = max((one["attempt"] for one in notes if _is_nan(one) and one["attempt"] <= number), default=-1)
    later = [one for one in notes if bad < one["attempt"] <= number]
    saved = [one["step"] for one in later if one["what"] == "saved"]
    restored = [one["step"] for one in later if one["what"] == "restored"]
    return max([*saved, *restored[:1]], default=0)


def _is_nan(note: Note) -> bool:
    return bool(note["what"] == "fault" and note["kind"] == "nan")


def _names(fault: Fault, line: Reported, note: Note) -> bool:
    """Whether a report names the rank and the kind of a fault."""
    rank = line.rank == fault.rank or re.search(rf"\brank {fault.rank}\b", line.what) is not None
    match fault.kind:
        case "kill" | "oom":
            return rank and "SIGKILL" in line.what
        case "exit":
            return rank and "exit code 137" in line.what
        case "exception":
            return rank and MESSAGE in line.what
        case "stop":
            return rank and ("is stopped by a signal" in line.what or "posted nothing" in line.what)
        case "nan":
            return "TrainingDiverged" in line.what and f"step {note['step']}: loss nan" in line.what
        case "store":
            # A connection that another rank has lost is no sign of the store: that may be to any rank.
            return rank or re.search(r"store|DistNetworkError", line.what, re.IGNORECASE) is not None
        case "full":
            return "NoSpace" in line.what
    return False


def compared(plan: Plan, notes: Sequence[Note], reference: Sequence[Note], code: int) -> list[str]:
    """What of a whole job is wrong. `reference`: the notes of one without faults, which left out the same batches."""
    ends = [one for one in notes if one["what"] == "end" and one["step"] == plan.total]
    theirs = [one for one in reference if one["what"] == "end" and one["step"] == plan.total]
    if code or not ends or {one["rank"] for one in ends} != {one["rank"] for one in theirs}:
        without = f"{len(theirs)} without faults"
        return [f"the job ended with code {code}, and {len(ends)} ranks reached step {plan.total}, {without}"]
    problems = [] if all(one["exact"] for one in ends) else ["the samples are not exactly those of the order"]
    most = SUSPECTS * len({(one["attempt"], one["step"]) for one in notes if _is_nan(one)})
    if any(len(one["skipped"]) > most for one in ends):
        problems.append(f"{len(ends[-1]['skipped'])} batches are left out, where faults explain {most}")
    digests = {one["digest"] for one in theirs}
    if {one["digest"] for one in ends} != digests or len(digests) != 1:
        problems.append("weights or optimizer state differ from those of a job without faults")
    losses = {(one["rank"], one["step"]): one["loss"] for one in reference if one["what"] == "step"}
    last = {(one["rank"], one["step"]): one["loss"] for one in notes if one["what"] == "step"}
    if last != losses:
        wrong = sorted(key for key in losses if last.get(key) != losses[key])
        problems.append(f"losses differ from those of a job without faults, first at (rank, step) {wrong[:1]}")
    return problems

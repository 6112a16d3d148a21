"""The faults of the campaign with nodes, what a trial found, and the table of its report. Starts nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Mode(NamedTuple):
    """How a run protects its saves: `copies` and `spread` as for `Tier`, `code` as its `parity`."""

    name: str
    copies: int = 1
    spread: str | None = None
    code: tuple[int, int] | None = None


MODES = {
    "copies=2": Mode("copies=2", 2),
    "copies=3": Mode("copies=3", 3),
    "rack": Mode('copies=2, spread="rack"', 2, "rack"),
    "parity": Mode('parity="2+2"', code=(2, 2)),
}
FAULTS = {
    "one node killed": "copies=2",
    "two nodes killed at once": "copies=3",
    "two nodes killed at once, with parity": "parity",
    "a rack of two killed": "rack",
    "a node cut off for a moment": "copies=2",
    "the agent of a node killed": "copies=2",
    "the agent of a node stopped for a moment": "copies=2",
    "a killed node replaced by an empty one": "copies=2",
    "a node cut off, replaced, and back later": "copies=2",
}


@dataclass
class Outcome:
    """What one trial found. `lost`: bytes that the lost nodes had of the restored save. `due`: the most that had to be
    sent, by what lay in memory before. `sent`: by the interfaces of the job's nodes; `sent_to_all`: of all nodes.
    `lacking`: what the nodes of ranks lacked of the saves that the restore has tried; `fetched`: what it has read from
    other nodes."""

    fault: str
    problems: list[str]
    lost: int = 0
    due: int = 0
    sent: int = 0
    sent_to_all: int = 0
    lacking: int = 0
    fetched: int = 0
    restored: str = ""
    measured: bool = False
    """whether nothing of the job that was killed was still being sent when the next one began"""


def table(outcomes: Sequence[Outcome]) -> str:
    """One row for each fault. The bytes are means over the trials without a violation; those that were lost, due and
    sent, over those of them that were measured."""
    names = ["fault", "copies", "trials", "violations", "restored", "KB lacking", "KB fetched"]
    names += ["KB lost", "KB due", "KB sent", "sent / lost"]
    lines = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for fault, mode in FAULTS.items():
        of = [one for one in outcomes if one.fault == fault]
        good = [one for one in of if not one.problems]
        measured = [one for one in good if one.measured]
        if not of:
            continue
        restored = ", ".join(f"{name} {count}" for name, count in Counter(one.restored for one in good).most_common())
        read = [f"{_mean([getattr(one, name) for one in good]):,.0f}" for name in ("lacking", "fetched")]
        lost, due, sent = ([getattr(one, name) for one in measured] for name in ("lost", "due", "sent"))
        means = [*read, *(f"{_mean(one):,.0f}" for one in (lost, due, sent))]
        ratio = f"{sum(sent) / sum(lost):.3f}" if any(lost) else "-"
        cells = [fault, MODES[mode].name, len(of), len(of) - len(good), restored, *means, ratio]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _mean(sizes: Sequence[int]) -> float:
    """In KB."""
    return sum(sizes) / max(len(sizes), 1) / 1000


NOTES = """- Restored: the newest save with copies, or a newer one that needed none of the lost nodes.
- KB lacking: what the nodes of ranks lacked of what these wanted to restore. KB fetched: what the restore has read from
  other nodes; what is rebuilt from parity before is no part of it.
- KB lost: what the lost nodes had of the restored save in memory, their own part and copies of others.
- KB due: that, the copies that had not been made, and once more what ranks on new nodes read before its copy has come.
  With parity, each byte that is computed again counts as many times as a stripe has data cells.
- KB sent: what the nodes of the job have sent each other from its start until all copies were there again, by the
  counters of their interfaces."""

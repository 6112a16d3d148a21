"""The ledger of a victim's output: what the victim reported, and therefore what the disk must hold.

`Ledger.read` takes the lines that `victim.py` prints in one life; `Ledger.judge` compares the disk with them.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from lastgood.engine.inline_executor import Inline
from lastgood.errors import LastgoodError, NotARun
from lastgood.format import commit, layout
from lastgood.policy.restore import lineage
from lastgood.ports import Tier
from lastgood.records import Generation
from lastgood.run import access
from lastgood_lab.campaigns.victim import DIRECTORIES, bytes_of, differs, live, path, place, restored

_FULL = (os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT))
"""in a warning: the disk, or the quota of the user, was full"""


@dataclass
class Ledger:
    """The output of all lives of one run. `last` and `tier` are the options that the victim was started with.

    Generations are named by their folders; `-` stands for the state before the first generation.
    """

    last: int = 2
    tier: str = "directory"
    heads: set[str] = field(default_factory=lambda: {"-"})
    """generations that a restore may load: the newest acknowledged one, or two while an outcome is unknown"""
    maybe: set[str] = field(default_factory=set)
    """generations whose save began and was neither acknowledged nor refused: complete, or absent"""
    refused: set[str] = field(default_factory=set)
    """generations whose save ended in an error other than CommitUnknown; they must not exist"""
    durable: list[str] = field(default_factory=list)
    """acknowledged generations whose deletion was not announced, oldest first"""
    verified: set[str] = field(default_factory=set)
    perhaps: set[str] = field(default_factory=set)
    """of slots: the newest generation when its upkeep failed; it may be marked verified and older ones deleted"""
    cut_short: set[str] = field(default_factory=set)
    """generations deleted without a recorded reason because the disk was full; they may be reported as lost"""
    reported: list[str] = field(default_factory=list)
    """of the life that was read last: names of errors, and lines about damage that was skipped"""
    warned: list[str] = field(default_factory=list)
    """what that life reported outside of exceptions"""
    pressed: bool = False
    """whether older verified generations were deleted because the disk was full"""
    problems: list[str] = field(default_factory=list)
    """violated promises"""
    _saving: str = ""
    """the generation whose save is under way in the life that is being read"""
    _deleting: set[str] = field(default_factory=set)
    """generations whose deletion that life announced"""

    def read(self, lines: Iterable[str]) -> None:
        """Read the output of one life, from its first line to the point where it was cut off."""
        self._saving, self._deleting, self.reported, self.warned = "", set(), [], []
        for line in lines:
            kind, _, rest = line.partition(" ")
            self._read_line(kind, rest)
        # A deletion that fails is reported by a warning, and no save need fail with it.
        if "NoSpace" in self.reported or any(full in one for full in _FULL for one in self.warned):
            self.cut_short |= self._deleting

    def _read_line(self, kind: str, rest: str) -> None:
        first = rest.partition(" ")[0]
        match kind:
            case "restored":
                self._read_restored(first)
            case "beginning":
                self.heads = self.heads | {first}
            case "began":
                self._read_began(first)
            case "saving":
                self._saving = first
                self.maybe.add(first)
            case "durable":
                self._read_durable(first)
            case "verified" if first != "-":
                self.verified.add(first)
            case "retiring":
                self._read_retiring(first)
            case "error":
                self._read_error(first)
            case "pressed":
                self.pressed = True
            case "warned":
                self.warned.append(rest)
            case "stepped_over" | "unread":
                self.reported.append(f"{kind} {rest}")
            case "wrong":
                self._wrong(rest)

    def _read_restored(self, at: str) -> None:
        if at not in self.heads | self.maybe and not self.reported:
            self._wrong(f"the victim restored {at}, expected was one of {sorted(self.heads | self.maybe)}")

    def _read_began(self, at: str) -> None:
        # An incarnation is durable only with its first commit. Until then a generation that this process could not
        # read is the newest one again for the next process that can read it.
        self.heads, self.maybe = {at} if at in self.maybe else self.heads | {at}, set()
        if at != "-" and at not in self.durable:
            # The commit of an unknown outcome came true. With slots, it may have replaced the generations beside it.
            self.durable = [*self.durable, at] if self.tier in DIRECTORIES else [at]

    def _read_durable(self, at: str) -> None:
        self.heads, self._saving = {at}, ""
        self.maybe.discard(at)
        self.durable = [*self._kept_by_a_commit(), at]

    def _read_retiring(self, at: str) -> None:
        if at in self.heads:
            self._wrong(f"the victim deletes {at}, the newest generation that it acknowledged")
        self._deleting.add(at)
        if at in self.durable:
            self.durable.remove(at)

    def _read_error(self, name: str) -> None:
        self.reported.append(name)
        if self._saving and name != "CommitUnknown":
            self.maybe.discard(self._saving)
            self.refused.add(self._saving)
        if not self._saving and self.tier not in DIRECTORIES:
            self.perhaps |= {*self.durable[-1:]}
        self._saving = ""

    def judge(self, run: str) -> None:
        """Compare the disk with the ledger, without changing the disk; violations are added to `problems`."""
        try:
            tier = access.for_reading(path(run, self.tier))
        except NotARun:
            if self.durable:
                self._wrong("the run no longer exists")
            return
        survey = commit.survey(tier)
        generations = {place(at): one for at, one in survey.generations.items()}
        for broken, error in survey.broken.items():
            self._wrong(f"{place(broken)} has a COMMIT that is not valid: {error}")
        self._judge_existence(generations.keys())
        for at, generation in generations.items():
            self._judge_content(tier, at, generation)
        good = [at for at, one in generations.items() if one.verified or at in self.verified]
        owed = self.last if self.tier in DIRECTORIES and not self.pressed else 1
        if len(good) < min(owed, len(self.verified)):
            self._wrong(f"of {len(self.verified)} verified generations only {good} still exist")
        for at in {place(one) for one in lineage(survey).lost} - self.cut_short:
            self._wrong(f"{at} is reported as lost, but it was never acknowledged")
        self._judge_restore(tier, survey)

    def _judge_existence(self, existing: Set[str]) -> None:
        missing = set(self.durable) - existing
        if self.tier not in DIRECTORIES and self.maybe & existing:  # its commit kept one other; a mark decided which
            least = self._kept_by_a_commit()
            either = self.durable[self.durable.index(least[0]) :] if least else []
            missing = set() if existing & {*either} else {*least}
        newer = max(self.perhaps & existing, default="")
        for at in sorted(one for one in missing if one >= newer):
            self._wrong(f"{at} was acknowledged and no longer exists")
        for at in sorted(self.refused & existing):
            self._wrong(f"{at} exists, although its save was refused")

    def _judge_content(self, tier: Tier, at: str, generation: Generation) -> None:
        try:
            manifest = commit.read_manifest(tier, generation)
            problem = differs(generation, manifest, bytes_of(tier, generation, manifest, Inline()))
        except LastgoodError as error:
            problem = f"{at} is incomplete: {error}"
        if problem:
            self._wrong(problem)

    def _judge_restore(self, tier: Tier, survey: commit.Survey) -> None:
        lines: list[str] = []
        try:
            found = restored(tier, survey, Inline(), lines.append)
        except LastgoodError as error:
            self._wrong(f"a restore ends in {type(error).__name__}: {error}")
            return
        at = place(found.generation.id if found.generation else None)
        if at not in self.heads | self.maybe:
            self._wrong(f"a restore loads {at}, expected was one of {sorted(self.heads | self.maybe)}")
        for line in lines[:-1]:
            self._wrong(f"a restore reports: {line}")

    def go_on(self, run: str, seed: int) -> None:
        """Run two more lives without faults: both must succeed and leave no temporary files of earlier lives."""
        for more in (1, 2):
            lines: list[str] = []
            code = live(
                [run, f"--seed={seed + more}", "--saves=1", f"--last={self.last}", f"--tier={self.tier}"], lines.append
            )
            self.read(lines)
            if code or self.reported:
                self._wrong(f"an undisturbed life printed: {[one for one in lines if one.split()[0] in TROUBLE]}")
            self.judge(run)
            for one in litter(run):
                if not any(at in one for at in self.cut_short):
                    self._wrong(f"after {more} further lives {one} still exists")

    def _kept_by_a_commit(self) -> list[str]:
        """The durable generations that the commit of a further one keeps."""
        if self.tier in DIRECTORIES:
            return self.durable
        return [at for at in self.durable if at in self.verified][-1:] or self.durable[-1:]

    def _wrong(self, what: str) -> None:
        self.problems.append(what)


TROUBLE = ("error", "stepped_over", "unread", "wrong")


def litter(run: str) -> list[str]:
    """Names inside a run that belong neither to a generation nor to a record."""
    found = []
    for folder, names, files in os.walk(run):
        inside = os.path.relpath(folder, run)
        found += [f"{inside}/{one}" for one in (*names, *files) if re.search(r"\.tmp$|^\.probe-|^GOING", one)]
        if inside.startswith("gen/") and layout.COMMIT not in files:
            found.append(f"{inside} without COMMIT")
    return sorted(found)

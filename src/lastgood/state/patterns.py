"""Patterns: the name patterns of one caller, refused if they match no name. Reads; copies and changes nothing.

A pattern that matches nothing is nearly always misspelt, and would leave out, or keep, something else than intended.
Names are those of `lastgood.state.rules`. A pattern that matches a name also matches all names below it.

The state of an optimizer does not exist before its first step. So a pattern that may match names in the empty state of
an optimizer is not refused before the `CHECKS`-th check; one that begins with the name of this state is never refused.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from .. import reporting
from ..errors import Refused
from ..format.values import EVERYTHING, Filter
from .capture import visit, wanted
from .objects import find_objects

CHECKS = 3
"""the first step and two saves: an optimizer whose state is empty after these is assumed to keep none"""
_SUGGESTIONS = 3
_COMPARED = 5000
"""maximum number of names that a misspelt pattern is compared with, which bounds the time of a refusal to seconds"""


@dataclass(frozen=True)
class Names:
    """The names of a state, as far as a filter enters it."""

    found: frozenset[str]
    unseen: frozenset[str]
    """those of `found` that the filter does not enter, so that the names below them are unknown"""
    empty: frozenset[str]
    """the name `optimizer.state` of each optimizer whose state is empty, as before its first step"""


class Recorder(Filter):
    """Decides as the filter `names` does, and records every name that it is asked about."""

    def __init__(self, names: Filter) -> None:
        super().__init__()
        self.everything = False  # makes the codec ask about every name
        self._decides = names
        self.found: set[str] = set()
        self.unseen: set[str] = set()

    def keeps(self, name: str) -> bool:
        self.found.add(name)
        return self._decides.keeps(name)

    def enters(self, name: str) -> bool:
        self.found.add(name)
        enters = self._decides.enters(name)
        if not enters:
            self.unseen.add(name)
        return enters


def names_in(state: Mapping[str, Any], names: Filter = EVERYTHING) -> Names:
    """The names of `state` and of the random number generators, as far as the filter `names` enters them."""
    recorder = Recorder(names)
    visit(state, recorder)
    optimizers = {path: one for path, one in find_objects(state).items() if isinstance(one, Optimizer)}
    empty = frozenset(f"{path}.state" for path, one in optimizers.items() if not one.state)
    return Names(frozenset(recorder.found - {""}), frozenset(recorder.unseen), empty)  # "": tensors that are not stored


class Patterns:
    """The patterns of a caller, and which of them have matched no name yet.

    The arguments are those of `lastgood.Checkpointer`: lists of patterns. Raises Refused for a string instead of a
    list, and for a pattern that is both in `include` and in `exclude`, or both in `finite_also` and `finite_except`.
    """

    def __init__(
        self,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        finite_also: Sequence[str] = (),
        finite_except: Sequence[str] = (),
    ) -> None:
        given = {"include": include, "exclude": exclude, "finite_also": finite_also, "finite_except": finite_except}
        for argument, patterns in given.items():
            listed = isinstance(patterns, Collection) and not isinstance(patterns, (str, bytes, Mapping))
            if not listed or not all(isinstance(one, str) for one in patterns):
                some = repr(patterns) if isinstance(patterns, str) else '"model.*"'
                what = f"{argument}={patterns!r} is not a list of name patterns"
                raise Refused(what, safe="Nothing was touched.", todo=f"Give {argument}=[{some}].")
        for one, other in (("include", "exclude"), ("finite_also", "finite_except")):
            if both := [pattern for pattern in given[one] if pattern in given[other]]:
                what = f"{one} and {other} both have {', '.join(map(repr, both))}"
                raise Refused(
                    what, safe="Nothing was touched.", todo=f"Give it in one of them only: {other} takes precedence."
                )
        self._names = wanted(include, exclude)
        self._something = not include and not exclude
        """whether it is known that include and exclude leave something of the state"""
        self._include, self._exclude = list(include), list(exclude)
        self.pending = [(argument, one) for argument, patterns in given.items() for one in patterns]
        """(argument, pattern) of each that has matched no name yet: ("include", "model.*")"""
        self._checks = 0
        self._noted: frozenset[str] = frozenset()

    def note(self, names: Iterable[str]) -> None:
        """Add names that exist elsewhere, such as in a generation: patterns that match one are no longer pending."""
        if self.pending:
            self._noted |= frozenset(names)
            self.pending = [(argument, one) for argument, one in self.pending if not matches(one, self._noted)]

    def require(self, state: Mapping[str, Any]) -> None:
        """Raises Refused for patterns that match no name of the state and no noted name, or leave nothing of it."""
        found = self.unmatched(state)
        if found:
            raise refused(found, self._noted | names_in(state).found)
        if state and not self._something:
            names = names_in(state, self._names)
            self.require_something(names.found, names.empty)

    def require_something(self, names: Collection[str], empty: Iterable[str] = ()) -> None:
        """Raises Refused if include and exclude leave none of these names. `empty`: as in `Names`.

        Random number generators count only if `include` names them, because they are saved without being named.
        """
        if self._something:
            return
        containers = {name.rpartition(".")[0] for name in names}
        left = {name for name in names if name not in containers and self._names.keeps(name)}
        if not any(matches(one, ["rng"]) or one.startswith("rng.") for one in self._include):
            left = {name for name in left if name.partition(".")[0] != "rng"}
        if not left and not any(map(self._names.enters, empty)):
            given = " and ".join(
                f"{argument}={patterns!r}"
                for argument, patterns in (("include", self._include), ("exclude", self._exclude))
                if patterns
            )
            raise Refused(
                f"{given} {'leave' if ' and ' in given else 'leaves'} nothing of the state",
                safe="Nothing was written or loaded.",
                todo="Name in include what to save, and in exclude what to leave out of it: exclude takes precedence.",
            )
        self._something = True

    def report(self, state: Mapping[str, Any]) -> None:
        """Report each pattern that `require` would refuse, once. A save after the first is not refused for them."""
        found = self.unmatched(state)
        if found:
            self.pending = [one for one in self.pending if one not in found]
            reporting.threat(str(refused(found, self._noted | names_in(state).found).what))

    def unmatched(self, state: Mapping[str, Any]) -> list[tuple[str, str]]:
        """(argument, pattern) of each that `require` would refuse for matching no name."""
        if not self.pending:
            return []
        names = names_in(state, self._names)
        self.note(names.found)
        self._checks += 1
        return [(argument, one) for argument, one in self.pending if not self._may_match_later(one, names)]

    def _may_match_later(self, pattern: str, names: Names) -> bool:
        literal = re.split(r"[*?\[]", pattern)[0]
        below = [f"{path}." for path in (*names.unseen, *names.empty)]
        if any(literal.startswith(one) for one in below):
            return True
        # guard: pattern-wait-bounded
        return self._checks < CHECKS and any(f"{path}.".startswith(literal) for path in names.empty)


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern matches one of these names, or a name above one of them."""
    return any(map(Filter([pattern]).keeps, names))


def refused(patterns: Sequence[tuple[str, str]], names: Collection[str]) -> Refused:
    """The error for patterns that match none of these names; it suggests similar names and patterns."""
    lines = []
    for argument, pattern in patterns:
        near = ", ".join(map(repr, _similar(pattern, names)))
        top = ", ".join(sorted({name.partition(".")[0] for name in names})[:12])
        lines.append(
            f"{argument}=[{pattern!r}] matches no name. " + (f"Similar: {near}" if near else f"The state has: {top}")
        )
    return Refused(
        "\n".join(lines),
        safe="\nNothing was written or loaded.",
        todo="Correct the pattern, or remove it. It matches whole dotted names (fnmatch), and all below them.",
    )


def _similar(pattern: str, names: Collection[str]) -> list[str]:
    """A pattern that would match, or else names with a similar spelling."""
    wide = f"*{pattern.strip('*')}*"
    if matches(wide, names):
        return [wide]
    ends: dict[str, str] = {}
    """last component -> the shortest name that ends with it"""
    for name in sorted(names, key=lambda one: (len(one), one)):
        ends.setdefault(name.rpartition(".")[2].lower(), name)
    parts = [part for part in re.split(r"[*?\[\].]+", pattern.lower()) if len(part) > 1 and not part.isdigit()]
    spelt = [
        name
        for part in reversed(parts)
        for name in difflib.get_close_matches(part, list(ends)[:_COMPARED], _SUGGESTIONS)
    ]
    whole = difflib.get_close_matches(pattern, sorted(names)[:_COMPARED], _SUGGESTIONS)
    return list(dict.fromkeys([*(ends[one] for one in spelt), *whole]))[:_SUGGESTIONS]

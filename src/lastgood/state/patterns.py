"""Patterns: the name patterns of one caller, refused where they match no name. Reads; copies and changes nothing.

A pattern that matches nothing is nearly always misspelt, and would leave out, or keep, something else than was meant.
Names are those of `lastgood.state.rules`; as in `Filter`, a pattern that matches a name speaks of all below it too.

What an optimizer keeps does not exist before its first step. So a pattern that may speak of the state of an optimizer
without any is not refused until the `LOOKS`-th look; one that begins with such an optimizer's name never is.
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

LOOKS = 3
"""the first step and two saves: an optimizer that holds nothing by then is taken to keep nothing"""
_SUGGESTIONS = 3
_COMPARED = 5000
"""names at most that a misspelt pattern is compared with, so that a refusal takes no longer than seconds"""


@dataclass(frozen=True)
class Names:
    """The names of a state that a filter is asked about."""

    found: frozenset[str]
    unseen: frozenset[str]
    """those of them below which the filter wants nothing, and nothing was looked at"""
    empty: frozenset[str]
    """`optimizer.state` of each optimizer that holds none, as before its first step"""


class Recorder(Filter):
    """Decides as another filter does, and notes what it was asked about."""

    def __init__(self, names: Filter) -> None:
        super().__init__()
        self.everything = False  # every name is to be asked about
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
    """The names of `state` and of the random number generators, as far as `names` wants something below them."""
    recorder = Recorder(names)
    visit(state, recorder)
    optimizers = {path: one for path, one in find_objects(state).items() if isinstance(one, Optimizer)}
    empty = frozenset(f"{path}.state" for path, one in optimizers.items() if not one.state)
    return Names(frozenset(recorder.found - {""}), frozenset(recorder.unseen), empty)  # "": what is not stored


class Patterns:
    """The patterns that have matched no name yet, as (argument, pattern): ("include", "model.*").

    Raises Refused for a text in place of a list, and for a pattern that contradicts itself: in `include` and in
    `exclude`, or in `finite_also` and in `finite_except`.
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
                raise Refused(what, safe="Nothing was touched.", todo=f"Leave it in one of them: {other} goes first.")
        self._names = wanted(include, exclude)
        self._something = not include and not exclude
        """whether it is known that the patterns leave something of the state"""
        self._include, self._exclude = list(include), list(exclude)
        self.pending = [(argument, one) for argument, patterns in given.items() for one in patterns]
        self._looks = 0
        self._noted: frozenset[str] = frozenset()

    def note(self, names: Iterable[str]) -> None:
        """Names that are there: what matches one of them is not pending any more."""
        if self.pending:
            self._noted |= frozenset(names)
            self.pending = [(argument, one) for argument, one in self.pending if not matches(one, self._noted)]

    def require(self, state: Mapping[str, Any]) -> None:
        """Raises Refused for patterns that match no name of the state and none that was noted, or leave nothing."""
        found = self.unmatched(state)
        if found:
            raise refused(found, self._noted | names_in(state).found)
        if state and not self._something:
            names = names_in(state, self._names)
            self.require_something(names.found, names.empty)

    def require_something(self, names: Collection[str], empty: Iterable[str] = ()) -> None:
        """Raises Refused where include and exclude leave none of these names; `empty` as in `Names`.

        Random number generators count only where `include` names them: else they stay without being asked for.
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
                todo="Name in include what is wanted, in exclude what of it is not: exclude goes first.",
            )
        self._something = True

    def report(self, state: Mapping[str, Any]) -> None:
        """Report, once each, the patterns that `require` would refuse: no save is refused for them."""
        found = self.unmatched(state)
        if found:
            self.pending = [one for one in self.pending if one not in found]
            reporting.threat(str(refused(found, self._noted | names_in(state).found).what))

    def unmatched(self, state: Mapping[str, Any]) -> list[tuple[str, str]]:
        """The patterns that `require` would refuse."""
        if not self.pending:
            return []
        names = names_in(state, self._names)
        self.note(names.found)
        self._looks += 1
        return [(argument, one) for argument, one in self.pending if not self._may_match_later(one, names)]

    def _may_match_later(self, pattern: str, names: Names) -> bool:
        literal = re.split(r"[*?\[]", pattern)[0]
        below = [f"{path}." for path in (*names.unseen, *names.empty)]
        if any(literal.startswith(one) for one in below):
            return True
        # guard: pattern-wait-bounded
        return self._looks < LOOKS and any(f"{path}.".startswith(literal) for path in names.empty)


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Whether a pattern matches one of these names, or a name above one of them."""
    return any(map(Filter([pattern]).keeps, names))


def refused(patterns: Sequence[tuple[str, str]], names: Collection[str]) -> Refused:
    """The error for patterns that match none of these names, with names and patterns that are near."""
    lines = []
    for argument, pattern in patterns:
        near = ", ".join(map(repr, _near(pattern, names)))
        top = ", ".join(sorted({name.partition(".")[0] for name in names})[:12])
        lines.append(
            f"{argument}=[{pattern!r}] matches no name. " + (f"Near it: {near}" if near else f"There is: {top}")
        )
    return Refused(
        "\n".join(lines),
        safe="\nNothing was written or loaded.",
        todo="Correct the pattern, or remove it. It matches whole dotted names (fnmatch), and all below them.",
    )


def _near(pattern: str, names: Collection[str]) -> list[str]:
    """Patterns that would match, and names that are spelt alike."""
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

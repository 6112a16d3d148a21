"""Storable: whether all of a state can be stored, known before the first save. Reads; copies nothing.

A walk stops at the first entry that it cannot store. Where there is one, the state is walked again without it, until
the rest can be stored: all of them are reported at once.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Any

from ..errors import Unstorable
from .capture import Capture, Captured

LISTED = 20
"""entries that one error lists at most; each costs another walk"""


def require_storable(capture: Capture, state: Mapping[str, Any]) -> Captured:
    """As `capture.take(state)`. Raises one Unstorable that lists every entry that cannot be stored."""
    try:
        return capture.take(state)
    except Unstorable as error:
        found = _all(capture, state, error)
        if len(found) == 1:
            raise
        raise _listed(found) from error


def _all(capture: Capture, state: Mapping[str, Any], first: Unstorable) -> list[Unstorable]:
    found, passed = [first], list[str]()
    while len(found) < LISTED and (further := _passable(found[-1], passed)):  # guard: unstorable-entries-listed
        passed.append(further)
        try:
            capture.without(map(glob.escape, passed)).take(state)
        except Unstorable as error:
            if error.names != found[-1].names:
                found.append(error)
        else:
            break
    return found


def _listed(found: list[Unstorable]) -> Unstorable:
    lines = "\n".join(f"  {one.what}. {one.todo}" for one in found)
    more = " at least" if len(found) == LISTED else ""
    return Unstorable(
        f"{len(found)} entries{more} of the state cannot be stored:\n{lines}",
        safe="\nNothing was written.",
        todo="Change each as it says; one exclude=[...] can list several.",
        names=tuple(name for one in found for name in one.names),
    )


def _passable(error: Unstorable, passed: list[str]) -> str:
    """What to leave out next: the entry itself; if that did not help, all of its top-level entry; then nothing."""
    name = error.names[0] if error.names else ""
    return next((one for one in (name, name.partition(".")[0]) if one and one not in passed), "")

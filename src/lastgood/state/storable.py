"""Whether all of a state can be stored, checked before the first save. Reads; copies nothing.

A capture stops at the first entry that cannot be stored. It is then repeated without this entry, until the rest can be
stored. So one error lists all such entries.
"""

from __future__ import annotations

import glob
from collections.abc import Mapping
from typing import Any

from ..errors import Unstorable
from .capture import Capture, Captured

LISTED = 20
"""maximum number of entries in one error; each costs another capture"""


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
    found, left_out = [first], list[str]()
    while len(found) < LISTED and (further := _next_left_out(found[-1], left_out)):  # guard: unstorable-entries-listed
        left_out.append(further)
        try:
            capture.without(map(glob.escape, left_out)).take(state)
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
        todo="Change each entry as its line says. One exclude=[...] can list several entries.",
        names=tuple(name for one in found for name in one.names),
    )


def _next_left_out(error: Unstorable, left_out: list[str]) -> str:
    """What to leave out next: the entry; if that did not help, its whole top-level entry; else nothing (empty)."""
    name = error.names[0] if error.names else ""
    return next((one for one in (name, name.partition(".")[0]) if one and one not in left_out), "")

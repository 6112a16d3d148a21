"""The records by which a run in memory is found: kept by the process that has it open, and written again after somebody
has removed the folder, and a save has made it anew. They never decide what a restore takes: its COMMITs do.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from ..format import layout
from ..io.files import regular_file
from ..ports import Tier


def kept(folder: str) -> dict[str, bytes]:
    """The header of the run in `folder` and its list of places: name -> content, of those that can be read."""
    found = {}
    for name in (layout.HEADER, layout.PLACES):
        with contextlib.suppress(OSError), open(os.path.join(folder, name), "rb", opener=regular_file) as file:
            found[name] = file.read()
    return found


def write(tier: Tier, folder: str, records: Mapping[str, bytes]) -> None:
    """Write those that the place lacks, which is `folder`. Raises what writing raises; NameTaken where another run has
    begun there."""
    there = kept(folder)
    for name, data in records.items():
        if there.get(name) != data:
            tier.put_new(name, data)  # guard: records-of-removed-memory-written

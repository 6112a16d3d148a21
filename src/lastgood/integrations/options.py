"""What the integrations check alike, before anything is trained: their arguments, and who else would restore."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from typing import Any

from ..errors import NotARun, Refused
from ..loop.opened import open_run
from ..loop.options import option_names
from ..policy.cadence import Every
from ..run import paths


def checkpointer_options(every_steps: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a Checkpointer. Raises Refused, by name, for one that it does not have."""
    known = option_names()
    for name in options:
        near = difflib.get_close_matches(name, ["every_steps", *known])
        todo = f"Did you mean {near[0]}?" if near else f"There are every_steps, {', '.join(known)}."
        require(name in known, f"there is no argument {name}", todo)
    if every_steps is None:
        return dict(options)
    require("cadence" not in options, "every_steps and cadence both say when to save", "Give one of them.")
    return {**options, "cadence": Every(steps=every_steps)}


def require_path(path: str | os.PathLike[str]) -> str:
    """The run's path as text. Raises Refused for what a Checkpointer refuses as a path."""
    paths.parsed(path)
    return os.fspath(path)


def require_one_restore(path: str, other: str) -> None:
    """Raises Refused when the run at `path` holds a generation: it is restored, and so would be what `other` names."""
    try:
        newest = max((one.step for one in open_run(path).generations()), default=None)
    except NotARun:
        newest = None
    require(
        newest is None,
        f"{other} is to be loaded, and the run at {path} continues from its step {newest} by itself",
        "Leave one of them out: the argument, or the run (give a new path to start a run from that checkpoint).",
    )


def require(holds: bool, what: str, todo: str) -> None:
    """Raises Refused unless `holds`."""
    if not holds:
        raise Refused(what, safe="Nothing was trained.", todo=todo)

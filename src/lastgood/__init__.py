"""lastgood: checkpoints that cannot lose a training run. The face: these names, and nothing else, are public.

Names that need torch are imported when they are first asked for, so that reading a run costs no second of start-up.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .events import Event
from .policy.cadence import Every
from .policy.retention import Keep
from .policy.scrub import Scrub
from .records import Finding, Generation, Verdict

if TYPE_CHECKING:
    from .convert import dcp
    from .data.audit import Audit
    from .data.sampler import ResumableSampler
    from .loop.checkpointer import Checkpointer
    from .loop.load import Restored
    from .loop.oneshot import Loaded, Run
    from .loop.oneshot import load_once as load
    from .loop.oneshot import open_run as open
    from .loop.oneshot import save_once as save
    from .loop.preemption import Preempted, Preemption
    from .run.pipeline import Save

__version__ = "0.1.0"

_LAZY = {
    "Audit": ("data.audit", "Audit"),
    "Checkpointer": ("loop.checkpointer", "Checkpointer"),
    "Loaded": ("loop.oneshot", "Loaded"),
    "Preempted": ("loop.preemption", "Preempted"),
    "Preemption": ("loop.preemption", "Preemption"),
    "ResumableSampler": ("data.sampler", "ResumableSampler"),
    "Restored": ("loop.load", "Restored"),
    "Run": ("loop.oneshot", "Run"),
    "Save": ("run.pipeline", "Save"),
    "dcp": ("convert.dcp", ""),
    "load": ("loop.oneshot", "load_once"),
    "open": ("loop.oneshot", "open_run"),
    "save": ("loop.oneshot", "save_once"),
}

__all__ = [
    "Audit",
    "Checkpointer",
    "Event",
    "Every",
    "Finding",
    "Generation",
    "Keep",
    "Loaded",
    "Preempted",
    "Preemption",
    "Restored",
    "ResumableSampler",
    "Run",
    "Save",
    "Scrub",
    "Verdict",
    "dcp",
    "errors",
    "load",
    "open",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'lastgood' has no attribute {name!r}")
    room, attribute = _LAZY[name]
    found = importlib.import_module(f".{room}", __name__)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

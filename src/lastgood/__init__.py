"""lastgood: checkpoints that cannot lose a training run. The face: these names, and nothing else, are public.

Names that need torch are imported when they are first asked for, so that reading a run costs no second of start-up.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .policy.cadence import Every
from .policy.retention import Keep
from .policy.scrub import Scrub
from .records import Event, Finding, Generation, Verdict

if TYPE_CHECKING:
    from .data.audit import Audit
    from .data.sampler import ResumableSampler
    from .edges import dcp
    from .run.pipeline import Save
    from .train.access import Loaded, Run
    from .train.access import load_once as load
    from .train.access import open_run as open
    from .train.access import save_once as save
    from .train.checkpointer import Checkpointer
    from .train.loading import Restored
    from .train.preemption import Preempted, Preemption

__version__ = "0.1.0"

_LAZY = {
    "Audit": ("data.audit", "Audit"),
    "Checkpointer": ("train.checkpointer", "Checkpointer"),
    "Loaded": ("train.access", "Loaded"),
    "Preempted": ("train.preemption", "Preempted"),
    "Preemption": ("train.preemption", "Preemption"),
    "ResumableSampler": ("data.sampler", "ResumableSampler"),
    "Restored": ("train.loading", "Restored"),
    "Run": ("train.access", "Run"),
    "Save": ("run.pipeline", "Save"),
    "dcp": ("edges.dcp", ""),
    "load": ("train.access", "load_once"),
    "open": ("train.access", "open_run"),
    "save": ("train.access", "save_once"),
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

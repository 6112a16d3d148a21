"""lastgood: checkpoints that cannot lose a training run. The face: these names, and nothing else, are public.

A name is imported when it is first used. So a run is read without torch (`lastgood.open`), and a name that needs torch
raises NotInstalled where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .extras import needed
from .plan.cadence import Every
from .plan.retention import Keep
from .plan.scrub import Scrub
from .records import Event, Finding, Generation, Verdict

if TYPE_CHECKING:
    from .edges import dcp
    from .run.background import Save
    from .train.access import Loaded
    from .train.access import load_once as load
    from .train.access import save_once as save
    from .train.audit import Audit
    from .train.checkpointer import Checkpointer
    from .train.loading import Restored
    from .train.opened import Run
    from .train.opened import open_run as open
    from .train.preemption import Preempted, Preemption
    from .train.sampler import ResumableSampler

__version__ = "0.1.0"

_LAZY = {
    "Audit": ("train.audit", "Audit"),
    "Checkpointer": ("train.checkpointer", "Checkpointer"),
    "Loaded": ("train.access", "Loaded"),
    "Preempted": ("train.preemption", "Preempted"),
    "Preemption": ("train.preemption", "Preemption"),
    "ResumableSampler": ("train.sampler", "ResumableSampler"),
    "Restored": ("train.loading", "Restored"),
    "Run": ("train.opened", "Run"),
    "Save": ("run.background", "Save"),
    "dcp": ("edges.dcp", ""),
    "load": ("train.access", "load_once"),
    "open": ("train.opened", "open_run"),
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
    with needed("torch", f"lastgood.{name}"):
        found = importlib.import_module(f".{room}", __name__)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

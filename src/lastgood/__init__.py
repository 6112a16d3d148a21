"""lastgood: checkpoints that cannot lose a training run. The face: these names, and nothing else, are public.

A name is imported when it is first used. So a run is read without torch (`lastgood.open`), and a name that needs torch
raises NotInstalled where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors
from .events import Event
from .extras import needed
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
    from .loop.oneshot import Loaded
    from .loop.oneshot import load_once as load
    from .loop.oneshot import save_once as save
    from .loop.opened import Run
    from .loop.opened import open_run as open
    from .loop.options import Ranks, Tuning
    from .loop.preemption import Preempted, Preemption
    from .loop.sentinel_options import Sentinel
    from .loop.tiers import Tier
    from .run.save_handle import Save

__version__ = "0.1.0"

_LAZY = {
    "Audit": ("data.audit", "Audit"),
    "Checkpointer": ("loop.checkpointer", "Checkpointer"),
    "Loaded": ("loop.oneshot", "Loaded"),
    "Preempted": ("loop.preemption", "Preempted"),
    "Preemption": ("loop.preemption", "Preemption"),
    "Sentinel": ("loop.sentinel_options", "Sentinel"),
    "ResumableSampler": ("data.sampler", "ResumableSampler"),
    "Ranks": ("loop.options", "Ranks"),
    "Restored": ("loop.load", "Restored"),
    "Run": ("loop.opened", "Run"),
    "Save": ("run.save_handle", "Save"),
    "Tier": ("loop.tiers", "Tier"),
    "Tuning": ("loop.options", "Tuning"),
    "dcp": ("convert.dcp", ""),
    "load": ("loop.oneshot", "load_once"),
    "open": ("loop.opened", "open_run"),
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
    "Ranks",
    "Restored",
    "ResumableSampler",
    "Run",
    "Save",
    "Scrub",
    "Sentinel",
    "Tier",
    "Tuning",
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

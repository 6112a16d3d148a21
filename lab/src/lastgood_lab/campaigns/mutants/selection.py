"""The test files that are run on each table of mutants, by the names between `test_` and `.py`."""

from __future__ import annotations

_CORE = (
    "persist",
    "plan",
    "retention",
    "places",
    "writer",
    "reader",
    "tiers",
    "slots",
    "layout",
    "crash_model",
    "hostile",
    "flips",
    "pointers",
    "undeletable",
    "moved_run",
    "quota",
    "labels",
)


def core(*first: str) -> tuple[str, ...]:
    """The torch-free tests, `first` before the others."""
    return tuple(sorted(_CORE, key=lambda name: name not in first))


LOOP = (
    "in_flight",
    "full_disk",
    "many_generations",
    "frozen_infinity",
    "overlap",
    "pacing",
    "restore",
    "capture_plan",
    "exit",
    "reports_of_failures",
)
"""what runs in and behind a training loop; these need torch"""
MENDING = ("guard", "parity", "scrub", "mending")
"""verification, parity, scrubbing and repair"""
RANKS = ("agreeing", "reshard", "ranks_faults", "ranks")
"""coordination of several ranks; the last two start processes"""
REQUEST = ("load_once", "refusals")
"""what is refused before the first save, and the options of a load; these need torch"""
DROP_IN = ("dcp_faults", "dcp")
"""the storage under torch.distributed.checkpoint"""
LAYOUT = ("layouts", "capture_plan")
"""the memory order of tensors"""
DATA = ("sampler_loop", "sampler_resume", "sampler", "audit_worlds")
"""the order of the samples, and the record of what was trained on"""
SAVED_TWICE = ("saved_twice",)
"""steps that are saved a second time"""
ADAPTERS = ("peft", "subclasses")
"""adapters, and tensor subclasses"""

"""The test files that run on each table of mutants. A file is named by the part between `test_` and `.py`."""

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
    """The tests that need no torch. Those in `first` run before the others."""
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
"""saves in the training loop and in its background threads; these need torch"""
MENDING = ("guard", "parity", "scrub", "mending", "golden")
"""verification, parity, scrubbing and repair"""
RANKS = ("agreeing", "reshard", "ranks_faults", "ranks")
"""coordination of several ranks; the last two start processes"""
REQUEST = ("load_once", "refusals")
"""arguments and states that are refused, and the options of a load; these need torch"""
DROP_IN = ("dcp_faults", "dcp")
"""the storage under torch.distributed.checkpoint"""
LAYOUT = ("layouts", "capture_plan")
"""the memory order of tensors"""
DATA = ("sampler_loop", "elastic", "sampler_resume", "sampler", "skips", "audit_worlds")
"""the order of the samples, and the audit of the samples that were trained with"""
SAVED_TWICE = ("saved_twice",)
"""steps that are saved a second time"""
ADAPTERS = ("peft", "subclasses")
"""adapters, and tensor subclasses"""

"""Mutants of the safeguards of memory: its limits, its owner, and what stays in it."""

from __future__ import annotations

from .change import Never
from .record import Mutant, table

TESTS = ("memory_limits", "memory_files", "memory_runs")

MUTANTS: tuple[Mutant, ...] = (
    *table(
        "memory",
        TESTS,
        ("memory is taken beyond the limit of the control group", "memory-limit-before-reserve", Never()),
        ("a folder that another user made first is used", "memory-of-another-user-refused", Never()),
        ("a folder on a disk is used as memory", "memory-is-a-tmpfs", Never()),
        ("milestones stay in memory for ever", "memory-keeps-no-milestones", Never()),
    ),
)

"""The mutants of the campaign mutation.py: the named safeguards in the source, and the change that disables each."""

from __future__ import annotations

from . import (
    background,
    data,
    divergence,
    integrity,
    live_runs,
    memory,
    mending,
    nodes,
    objects,
    placement,
    protocol,
    ranks,
    recovery,
    slots,
    state,
    storage,
    wire,
)
from .record import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *storage.MUTANTS,
    *protocol.MUTANTS,
    *integrity.MUTANTS,
    *slots.MUTANTS,
    *objects.MUTANTS,
    *memory.MUTANTS,
    *live_runs.MUTANTS,
    *background.MUTANTS,
    *mending.MUTANTS,
    *ranks.MUTANTS,
    *placement.MUTANTS,
    *nodes.MUTANTS,
    *state.MUTANTS,
    *data.MUTANTS,
    *wire.MUTANTS,
    *recovery.MUTANTS,
    *divergence.MUTANTS,
)

"""The mutants of the campaign mutation.py: safeguards that are named in the source, and how each is taken out."""

from __future__ import annotations

from . import background, data, integrity, mending, protocol, ranks, slots, state, storage
from .record import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *storage.MUTANTS,
    *protocol.MUTANTS,
    *integrity.MUTANTS,
    *slots.MUTANTS,
    *background.MUTANTS,
    *mending.MUTANTS,
    *ranks.MUTANTS,
    *state.MUTANTS,
    *data.MUTANTS,
)

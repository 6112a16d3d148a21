"""Which samples a rank has trained in a step, as the audit of its state has seen them, or as the order says."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .audit import Audit, hashed
from .sampler import ResumableSampler


def trained_ids(audits: Sequence[Audit], sampler: ResumableSampler, epoch: int, first: int, count: int) -> np.ndarray:
    """The ids that this rank has trained in `count` windows of an epoch from window `first` on, int64 [n].

    As observed, if the state has one audit; else as scheduled by the `sampler`. `audits`: those of the state.
    """
    if len(audits) == 1:
        return audits[0].ids(epoch, range(first, first + count))
    left_out = {window for at, window in sampler.skipped if at == epoch}
    windows = [one for one in range(first, min(first + count, sampler.steps_per_epoch)) if one not in left_out]
    return sampler.order(epoch)[windows, sampler.part].reshape(-1)


def multiset_hash(ids: np.ndarray) -> int:
    """A hash of ids in any order: the sum of a hash of each, modulo 2**64, so that the hash of a union is a sum too."""
    return int(hashed(ids).sum(dtype=np.uint64))

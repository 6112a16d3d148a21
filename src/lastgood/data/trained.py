"""Which samples a rank has trained in a step, as the audit of its state has seen them, or as the order says.

A step has trained `count` windows of the order, from window `first` of an epoch on. Those behind the end of that epoch
are the first ones of the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from .audit import Audit, hashed
from .sampler import ResumableSampler


def trained_ids(audits: Sequence[Audit], sampler: ResumableSampler, epoch: int, first: int, count: int) -> np.ndarray:
    """The ids that this rank has trained in a step, int64 [n].

    As observed, if the state has one audit; else as scheduled by the `sampler`. `audits`: those of the state.
    """
    found, left_out = [np.empty(0, np.int64)], set(sampler.skipped)
    for at, windows in by_epoch(sampler, epoch, first, count):
        if len(audits) == 1:
            found.append(audits[0].ids(at, windows))
        else:
            trained = [one for one in windows if (at, one) not in left_out]
            found.append(sampler.order(at)[trained, sampler.part].reshape(-1))
    return np.concatenate(found)


def by_epoch(sampler: ResumableSampler, epoch: int, first: int, count: int) -> Iterator[tuple[int, range]]:
    """The windows of a step, epoch by epoch, those that are left out included."""
    while count > 0:
        windows = range(first, min(first + count, sampler.steps_per_epoch))
        yield epoch, windows
        epoch, first, count = epoch + 1, 0, count - len(windows)


def multiset_hash(ids: np.ndarray) -> int:
    """A hash of ids in any order: the sum of a hash of each, modulo 2**64, so that the hash of a union is a sum too."""
    return int(hashed(ids).sum(dtype=np.uint64))

"""The exactly-once audit: which samples the weights were trained with, compared with the order that was scheduled.

It keeps ids and counts. It never looks at data, and never decides what a difference means for the run.

Its state is a list of records, one an epoch and rank, and the state of several audits is the concatenation of theirs:
so `policy/merge_values.py` can give the records of a generation to the ranks of another world, each record to one rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import Refused
from ..policy.merge_values import RECORDS
from .order import whole_number
from .sampler import ResumableSampler


@dataclass(frozen=True)
class AuditReport:
    """Samples of all finished windows, in numbers: observed = scheduled - missing + duplicates + extra."""

    scheduled: int
    """samples in the windows before the sampler's cursor"""
    observed: int
    """samples that `observe` was called with"""
    duplicates: int
    """further sightings of a sample in the window where it belongs"""
    missing: int
    """scheduled samples that were not seen in their window"""
    extra: int
    """samples seen in a window where they do not belong, or in one that is not finished"""
    differing: tuple[tuple[int, int], ...]
    """(epoch, step) of the windows that these are in"""

    @property
    def exact(self) -> bool:
        """Every scheduled sample was seen exactly once, in its window, and nothing else was."""
        return self.duplicates == self.missing == self.extra == 0


class Audit:
    """Which sample ids this rank's weights were trained with, by (epoch, step).

    It belongs in the checkpointed state, so that it is rolled back with the weights. Let the dataset return its ids:

        for data, ids in loader:
            audit.observe(*sampler.position, ids)
            ...                                # train, then ckpt.step(n), which counts the window

    Every rank has one in its state, and each sample is observed on one rank only (not on all of a tensor-parallel
    group). After a restore on another number of ranks each old rank's record is with exactly one new rank; one process,
    or `lastgood.load`, has them all.

    Memory and storage: 1 to 8 bytes a sample, as the ids need, and 4 to 16 a window.
    """

    def __init__(self) -> None:
        # epoch -> arrays in the order of observation; they are joined now and then, and never changed in place
        self._windows: dict[int, list[np.ndarray]] = {}  # [2 k]: step, number of ids; and so on
        self._ids: dict[int, list[np.ndarray]] = {}  # [n]

    def observe(self, epoch: int, step: int, ids: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Record that window `step` of `epoch` was trained with these sample ids (integers, [n], any device).

        Raises Refused for anything else; the audit is then as it was.
        """
        epoch, step = whole_number("epoch", epoch), whole_number("step", step)
        seen = np.asarray(ids.numpy(force=True) if isinstance(ids, torch.Tensor) else ids)
        if seen.ndim != 1 or seen.dtype.kind not in "iu":
            raise Refused(f"ids are {seen.dtype} of shape {list(seen.shape)}, and not a list of integers")
        self._add(epoch, np.array([step, len(seen)]), seen)

    def _add(self, epoch: int, windows: np.ndarray, ids: np.ndarray) -> None:
        self._windows.setdefault(epoch, []).append(_narrowed(windows))
        self._ids.setdefault(epoch, []).append(_narrowed(ids))

    @staticmethod
    def merge(audits: Iterable[Audit]) -> Audit:
        """One audit that has seen what all of them have: those of all ranks of a run."""
        merged = Audit()
        for audit in audits:
            for epoch in audit._ids:
                merged._windows.setdefault(epoch, []).extend(audit._windows[epoch])
                merged._ids.setdefault(epoch, []).extend(audit._ids[epoch])
        return merged

    def report(self, sampler: ResumableSampler) -> AuditReport:
        """Hold what was seen, by all ranks (`merge` first), against every window before the sampler's cursor.

        Call it between steps: what was observed and not yet consumed counts as extra.
        """
        state = sampler.state_dict()
        now, cursor = state["epoch"], state["cursor_step"]
        scheduled = observed = duplicates = missing = extra = 0
        differing: list[tuple[int, int]] = []
        for epoch in sorted({*range(now + 1), *self._ids}):
            order = sampler.order(epoch)
            finished = len(order) if epoch < now else cursor if epoch == now else 0
            expected = order[:finished]
            steps, ids = self._seen(epoch)
            scheduled += expected.size
            observed += ids.size

            early = steps[steps >= finished]
            steps, ids = steps[steps < finished], ids[steps < finished]
            suspects = _differing_steps(steps, ids, expected)
            if suspects:
                by_step = np.argsort(steps, kind="stable")
                steps, ids = steps[by_step], ids[by_step]
            for step in suspects:
                here = slice(*np.searchsorted(steps, [step, step + 1]))
                seen, due = Counter(ids[here].tolist()), set(expected[step].tolist())
                duplicates += sum(seen[i] - 1 for i in due & seen.keys())
                missing += len(due - seen.keys())
                extra += sum(seen[i] for i in seen.keys() - due)
                differing.append((epoch, step))
            extra += early.size
            differing += [(epoch, step) for step in np.unique(early).tolist()]
        return AuditReport(scheduled, observed, duplicates, missing, extra, tuple(differing))

    def state_dict(self) -> dict[str, Any]:
        """{RECORDS: a list of [epoch, windows, ids]}; each array as [dtype, bytes], in the order of observation."""
        for chunks in (*self._windows.values(), *self._ids.values()):
            if len(chunks) > 1:
                chunks[:] = [np.concatenate(chunks)]
        return {RECORDS: [[e, _packed(self._windows[e][0]), _packed(self._ids[e][0])] for e in sorted(self._ids)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have seen what the state says, and nothing else. Raises Refused for a state that is not an audit's."""
        loaded = Audit()
        try:
            for epoch, windows, ids in _records(state):
                if not _fits(epoch, windows, ids):
                    raise Refused(
                        f"the audit's state does not fit together in epoch {epoch}", safe="The audit is as it was."
                    )
                loaded._add(epoch, windows, ids)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise Refused(f"this is not the state of an audit: {error!r}", safe="The audit is as it was.") from error
        self._windows, self._ids = loaded._windows, loaded._ids

    def _seen(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(step, id) of every sighting in an epoch: two int64 [n]."""
        if epoch not in self._ids:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        windows = np.concatenate(self._windows[epoch]).astype(np.int64)
        return np.repeat(windows[::2], windows[1::2]), np.concatenate(self._ids[epoch]).astype(np.int64)


def _records(state: Mapping[str, Any]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Epoch, windows and ids of each record; of a state that an earlier version wrote, too (in tensors)."""
    if RECORDS in state:
        for epoch, windows, ids in state[RECORDS]:
            yield epoch, _unpacked(*windows), _unpacked(*ids)
    else:
        for epoch, seen in state["epochs"].items():
            windows, ids = (seen[name].numpy(force=True) for name in ("windows", "ids"))
            if windows.dtype != np.int64 or windows.ndim != 2 or windows.shape[1] != 2:
                raise ValueError(f"windows of {windows.dtype} {windows.shape}")
            yield int(epoch), windows.reshape(-1), ids


def _fits(epoch: int, windows: np.ndarray, ids: np.ndarray) -> bool:
    return (
        type(epoch) is int
        and epoch >= 0
        and windows.dtype.kind in "iu"
        and ids.dtype.kind in "iu"
        and ids.ndim == 1
        and len(windows) % 2 == 0
        and bool((windows >= 0).all())
        and int(windows[1::2].sum()) == len(ids)
    )


def _narrowed(numbers: np.ndarray) -> np.ndarray:
    """A copy in the smallest unsigned type that holds all of them, or in int64."""
    fits = not numbers.size or (numbers.min() >= 0 and numbers.max() < 2**32)
    return numbers.astype(np.min_scalar_type(numbers.max(initial=0)) if fits else np.int64)


def _packed(numbers: np.ndarray) -> list[Any]:
    little = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    return [little.dtype.str, little.tobytes()]


def _unpacked(dtype: str, data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.dtype(dtype))


def _differing_steps(steps: np.ndarray, ids: np.ndarray, expected: np.ndarray) -> list[int]:
    """Windows whose count, or whose sum of hashed ids, is not what the order says: no sorting, no sets."""
    counts = np.bincount(steps, minlength=len(expected))
    sums = np.zeros(len(expected), np.uint64)
    np.add.at(sums, steps, _hashed(ids))
    due = _hashed(expected).sum(axis=1, dtype=np.uint64)
    return np.flatnonzero((counts != expected.shape[1]) | (sums != due)).tolist()


def _hashed(ids: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood, OOPSLA'14) of each id; sums of it wrap at 2**64 and forget the order."""
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

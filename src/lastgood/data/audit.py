"""The exactly-once audit: which samples the weights were trained with, compared with the order that was scheduled.

It keeps sample ids and counts. It reads no data, and it does not decide what a difference means for the run.

Its state is a list of records, one for each epoch and rank. The state of several audits is the concatenation of their
lists. So `policy/merge_values.py` can distribute the records of a generation to a world of another size, each record to
exactly one rank.
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
    """The result of `Audit.report`: numbers of samples. observed = scheduled - missing + duplicates + extra.

    A window is one global batch of the order; it is finished once the sampler's cursor has passed it.
    """

    scheduled: int
    """samples in the finished windows"""
    observed: int
    """samples that were given to `observe`, in any window"""
    duplicates: int
    """repeated observations of a sample in the window to which it belongs"""
    missing: int
    """scheduled samples that were not observed in their window"""
    extra: int
    """observations of a sample in a window to which it does not belong, or in a window that is not finished"""
    differing: tuple[tuple[int, int], ...]
    """(epoch, window) of every window with a duplicate, missing or extra sample"""
    skipped: tuple[int, ...] = ()
    """ids of the samples of windows that were left out (`ResumableSampler.skip`): they are not scheduled"""

    @property
    def exact(self) -> bool:
        """Whether every scheduled sample was observed exactly once, in its window, and nothing else was observed."""
        return self.duplicates == self.missing == self.extra == 0


class Audit:
    """A record of the sample ids that this rank's weights were trained with, by epoch and window.

    It takes no parameters. Put it into the checkpointed state, so that a restore rolls it back with the weights. The
    dataset must return the id of each sample with its data:

        state = {"model": model, "optimizer": optimizer, "sampler": sampler, "audit": lastgood.Audit()}
        for data, ids in sampler.loader(dataset):
            state["audit"].observe(*sampler.position, ids)
            ...                                # train, then ckpt.step(n), which counts the window
        assert state["audit"].report(sampler).exact

    Every rank has its own Audit in its state, and each sample must be observed on one rank only (not on every rank of a
    tensor-parallel group). After a restore on another number of ranks, exactly one new rank has the record of each old
    rank; a single process, or `lastgood.load`, has all records.

    Memory: 1, 2, 4 or 8 bytes for each sample, as the largest id requires, and 2 to 16 bytes for each window. In a save
    they take about 1.5 times as much.
    """

    def __init__(self) -> None:
        # epoch -> arrays in the order of observation; state_dict() joins them, and nothing changes them in place
        self._windows: dict[int, list[np.ndarray]] = {}  # [2 k]: window, number of ids, window, number of ids, ...
        self._ids: dict[int, list[np.ndarray]] = {}  # [n]

    def observe(self, epoch: int, step: int, ids: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Record that window `step` of `epoch` was trained with these sample ids.

        `epoch`, `step`: as `ResumableSampler.position` returns them. `ids`: integers of any dtype, shape [n], a
        sequence, an array or a tensor on any device. Raises Refused for anything else; the audit is then unchanged.
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
        """A new audit with the records of all given audits, as a rule those of all ranks of a run."""
        merged = Audit()
        for audit in audits:
            for epoch in audit._ids:
                merged._windows.setdefault(epoch, []).extend(audit._windows[epoch])
                merged._ids.setdefault(epoch, []).extend(audit._ids[epoch])
        return merged

    def report(self, sampler: ResumableSampler) -> AuditReport:
        """Compare the observed samples with every window before the cursor of `sampler`.

        With several ranks, `merge` their audits first. Call it between two steps: samples that were observed and whose
        step is not counted yet are reported as extra.
        """
        state = sampler.state_dict()
        now, cursor = state["epoch"], state["cursor_step"]
        scheduled = observed = duplicates = missing = extra = 0
        differing, skipped = list[tuple[int, int]](), list[int]()
        for epoch in sorted({*range(now + 1), *self._ids}):
            order = sampler.order(epoch)
            finished = len(order) if epoch < now else cursor if epoch == now else 0
            expected = order[:finished]
            left_out = [window for at, window in sampler.skipped if at == epoch and window < finished]
            skipped += expected[left_out].reshape(-1).tolist()
            steps, ids = self._seen(epoch)
            scheduled += expected.size - expected[left_out].size  # guard: skipped-samples-listed
            observed += ids.size

            early = steps[steps >= finished]
            steps, ids = steps[steps < finished], ids[steps < finished]
            suspects = _differing_steps(steps, ids, expected, left_out)
            if suspects:
                by_step = np.argsort(steps, kind="stable")
                steps, ids = steps[by_step], ids[by_step]
            for step in suspects:
                window = slice(*np.searchsorted(steps, [step, step + 1]))
                seen, due = Counter(ids[window].tolist()), set(() if step in left_out else expected[step].tolist())
                duplicates += sum(seen[i] - 1 for i in due & seen.keys())
                missing += len(due - seen.keys())
                extra += sum(seen[i] for i in seen.keys() - due)
                differing.append((epoch, step))
            extra += early.size
            differing += [(epoch, step) for step in np.unique(early).tolist()]
        return AuditReport(scheduled, observed, duplicates, missing, extra, tuple(differing), tuple(skipped))

    def ids(self, epoch: int, windows: range) -> np.ndarray:
        """The ids of the newest observations, as far back as these belong to `windows` of `epoch`: int64 [n]."""
        found: list[np.ndarray] = []
        pairs = zip(reversed(self._windows.get(epoch, [])), reversed(self._ids.get(epoch, [])), strict=True)
        for window, ids in pairs:
            inside = np.isin(np.repeat(window[::2], window[1::2]), windows)
            if not inside.any():
                break
            found.append(ids[inside].astype(np.int64))
        return np.concatenate(found[::-1]) if found else np.empty(0, np.int64)

    def state_dict(self) -> dict[str, Any]:
        """{RECORDS: a list of [epoch, windows, ids]}; each array is [dtype, bytes], in the order of observation."""
        for chunks in (*self._windows.values(), *self._ids.values()):
            if len(chunks) > 1:
                chunks[:] = [np.concatenate(chunks)]
        return {RECORDS: [[e, _packed(self._windows[e][0]), _packed(self._ids[e][0])] for e in sorted(self._ids)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all records by those of `state`. Raises Refused, and changes nothing, for any other state."""
        loaded = Audit()
        try:
            for epoch, windows, ids in _records(state):
                if not _fits(epoch, windows, ids):
                    raise Refused(
                        f"the audit's state contradicts itself in epoch {epoch}", safe="The audit is unchanged."
                    )
                loaded._add(epoch, windows, ids)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise Refused(f"this is not the state of an audit: {error!r}", safe="The audit is unchanged.") from error
        self._windows, self._ids = loaded._windows, loaded._ids

    def _seen(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Window and id of every observation in an epoch: two arrays, int64 [n]."""
        if epoch not in self._ids:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        windows = np.concatenate(self._windows[epoch]).astype(np.int64)
        return np.repeat(windows[::2], windows[1::2]), np.concatenate(self._ids[epoch]).astype(np.int64)


def _records(state: Mapping[str, Any]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """(epoch, windows, ids) of each record. Earlier versions wrote tensors; these are read too."""
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
    """Whether a record is well-formed: pairs of window and count, and as many ids as the counts add up to."""
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


def _differing_steps(steps: np.ndarray, ids: np.ndarray, expected: np.ndarray, left_out: list[int]) -> list[int]:
    """Windows whose number or sum of hashes of ids differs from the order; needs no sorting. `left_out`: windows of
    which none is expected."""
    counts = np.bincount(steps, minlength=len(expected))
    sums = np.zeros(len(expected), np.uint64)
    np.add.at(sums, steps, hashed(ids))
    due, numbers = hashed(expected).sum(axis=1, dtype=np.uint64), np.full(len(expected), expected.shape[1])
    due[left_out], numbers[left_out] = 0, 0
    return np.flatnonzero((counts != numbers) | (sums != due)).tolist()


def hashed(ids: np.ndarray) -> np.ndarray:
    """splitmix64 (Steele, Lea and Flood, OOPSLA'14) of each id. Sums of hashes wrap at 2**64 and ignore the order."""
    x = ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))

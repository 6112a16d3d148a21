"""The exactly-once audit: which samples the weights have seen, held against the order that was scheduled.

It keeps ids and counts. It never looks at data, and never decides what a difference means for the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..errors import Refused
from .sampler import ResumableSampler, whole_number


@dataclass(frozen=True)
class AuditReport:
    """Samples of all finished windows, in numbers: observed = scheduled - missing + duplicates + extra."""

    scheduled: int
    """samples in the windows before the sampler's cursor"""
    observed: int
    """samples that the audit was told of"""
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
    """Which sample ids this rank's weights have seen, by (epoch, step).

    It belongs in the checkpointed state, so that it is rolled back with the weights. Let the dataset return its ids:

        for data, ids in loader:
            audit.observe(*sampler.position, ids)
            ...                                # train, then ckpt.step(n), which consumes the window

    Memory and storage: 8 bytes a sample and 16 a window.
    """

    def __init__(self) -> None:
        # epoch -> tensors in the order of observation; they are joined now and then, and never changed in place
        self._windows: dict[int, list[torch.Tensor]] = {}  # int64 [k, 2]: step, number of ids
        self._ids: dict[int, list[torch.Tensor]] = {}  # int64 [n]

    def observe(self, epoch: int, step: int, ids: Sequence[int] | np.ndarray | torch.Tensor) -> None:
        """Record that window `step` of `epoch` was trained with these sample ids (integers, [n], any device).

        Raises Refused for anything else; the audit is then as it was.
        """
        epoch, step = whole_number("epoch", epoch), whole_number("step", step)
        seen = np.asarray(ids.numpy(force=True) if isinstance(ids, torch.Tensor) else ids)
        if seen.ndim != 1 or seen.dtype.kind not in "iu":
            raise Refused(f"ids are {seen.dtype} of shape {list(seen.shape)}, and not a list of integers")
        self._windows.setdefault(epoch, []).append(torch.tensor([[step, len(seen)]]))
        self._ids.setdefault(epoch, []).append(torch.from_numpy(seen.astype(np.int64)))

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
            finished = sampler.steps_per_epoch if epoch < now else cursor if epoch == now else 0
            expected = sampler.order(epoch)[:finished]
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
        """Per epoch, `windows` int64 [k, 2] (step, number of ids) and `ids` int64 [n], in the order of observation.

        Later observations change none of these tensors.
        """
        for chunks in (*self._windows.values(), *self._ids.values()):
            if len(chunks) > 1:
                chunks[:] = [torch.cat(chunks)]
        return {"epochs": {str(e): {"windows": self._windows[e][0], "ids": self._ids[e][0]} for e in sorted(self._ids)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have seen what the state says, and nothing else. Raises Refused for a state that is not an audit's."""
        try:
            wrong = [epoch for epoch, seen in state["epochs"].items() if not _fits(epoch, **seen)]
        except (KeyError, TypeError, AttributeError) as error:
            raise Refused(f"this is not the state of an audit: {error!r}", safe="The audit is as it was.") from error
        if wrong:
            raise Refused(
                f"the audit's state does not fit together in epoch {', '.join(wrong)}", safe="The audit is as it was."
            )
        self._windows = {int(epoch): [seen["windows"].cpu().clone()] for epoch, seen in state["epochs"].items()}
        self._ids = {int(epoch): [seen["ids"].cpu().clone()] for epoch, seen in state["epochs"].items()}

    def _seen(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(step, id) of every sighting in an epoch: two int64 [n]."""
        if epoch not in self._ids:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        windows = torch.cat(self._windows[epoch]).numpy()
        return np.repeat(windows[:, 0], windows[:, 1]), torch.cat(self._ids[epoch]).numpy()


def _fits(epoch: str, windows: torch.Tensor, ids: torch.Tensor) -> bool:
    return (
        epoch.isdecimal()
        and windows.dtype == ids.dtype == torch.int64
        and windows.dim() == 2
        and windows.shape[1] == 2
        and ids.dim() == 1
        and bool((windows >= 0).all())
        and int(windows[:, 1].sum()) == len(ids)
    )


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

"""The order of the samples: a pure function of its parameters and the epoch. Knows no rank and no cursor."""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

import numpy as np

from ..errors import Refused


class Order(NamedTuple):
    """The parameters that the order of the samples depends on, together with the epoch."""

    dataset_size: int
    global_batch: int
    seed: int
    shuffle: bool

    @property
    def steps_per_epoch(self) -> int:
        return self.dataset_size // self.global_batch

    def of(self, epoch: int) -> np.ndarray:
        """Sample ids of an epoch, int64 [steps_per_epoch, global_batch], read-only."""
        if self.shuffle:
            philox = np.random.Philox(key=np.array([self.seed, epoch], dtype=np.uint64))
            ids = np.random.RandomState(philox).permutation(self.dataset_size)
        else:
            ids = np.arange(self.dataset_size)
        ids = ids[: self.steps_per_epoch * self.global_batch].astype(np.int64, copy=False)
        ids.flags.writeable = False
        return ids.reshape(self.steps_per_epoch, self.global_batch)


def whole_number(name: str, value: object, *, low: int = 0, safe: str = "") -> int:
    """`value` as an int in [low, 2**63). Raises Refused for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise Refused(f"{name} is {value!r}, which is not an integer", safe=safe)
    number = int(value)
    if not low <= number < 2**63:
        raise Refused(f"{name} is {number}, outside [{low}, 2**63)", safe=safe)
    return number

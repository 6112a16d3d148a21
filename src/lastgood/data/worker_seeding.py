"""How the workers of a loader fetch samples: all random draws depend only on (seed, epoch, sample).

`SeededDataset` wraps the user's dataset inside a DataLoader. Before each sample it seeds the global CPU generators of
Python, numpy and torch, and it restores their states after the batch. So augmentation is the same for any number of
workers, before and after a resume, and no random number is drawn from the generators of the training loop.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info


class Window(NamedTuple):
    """The sample ids of one batch, and what their seeds depend on. A persistent worker lives for several epochs."""

    seed: int
    epoch: int
    ids: list[int]


class SeededDataset(Dataset[Any]):
    """The user's dataset; its random draws depend on the sample, and not on the worker or the time of fetching."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self._collate = dataset, collate

    def __getitems__(self, window: Window) -> Any:
        get_several = getattr(self.dataset, "__getitems__", None)
        samples = []
        with _global_rngs_kept():
            for i in window.ids:
                _seed_global_rngs("sample", window.seed, window.epoch, i)
                samples.append(get_several([i])[0] if get_several else self.dataset[i])
            return self._collate(samples)


class WorkerInit:
    """The `worker_init_fn`: shows a worker the user's dataset, not the wrapper; then calls the user's."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, SeededDataset)
        object.__setattr__(info, "dataset", info.dataset.dataset)  # a WorkerInfo is frozen
        if self._init is not None:
            self._init(worker_id)


def unchanged(batch: Any) -> Any:
    """The `collate_fn` of the DataLoader: SeededDataset has collated the batch already."""
    return batch


# ---- random numbers ------------------------------------------------------------------------------------------


def entropy(*key: str | int) -> tuple[int, int, int]:
    """Three 64-bit seeds from a key: for Python's, numpy's and torch's generator."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=24).digest()
    for_python, for_numpy, for_torch = struct.unpack("<3Q", digest)
    return for_python, for_numpy, for_torch


def _seed_global_rngs(*key: str | int) -> None:
    for_python, for_numpy, for_torch = entropy(*key)
    random.seed(for_python)
    np.random.seed([for_numpy & 0xFFFFFFFF, for_numpy >> 32])
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would seed those of the accelerators too


@contextlib.contextmanager
def _global_rngs_kept() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)

"""The resumable order of the samples, and the loader that counts what the training loop was given.

    order(seed, epoch) -> windows of B samples -> rank r's share of a window -> DataLoader -> training loop
                              ^ cursor                                                            |
                              `---------------------- consumed() at the end of a step -----------'

Invariants
  1. The order is a pure function of (seed, epoch); the world size only says who trains which part of a window.
  2. The cursor counts windows that the weights have seen. Fetching runs ahead of it and never moves it.
  3. One iteration at a time: a newer one, or a load, makes the older ones stale; they raise and move nothing.
  4. No global RNG is ever drawn from, and what a dataset draws depends on (seed, epoch, sample) alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate, get_worker_info

from ..errors import Refused

# What decides which samples come and in which order; with `in_order=False` the count of batches would name no window.
_OURS = {"batch_sampler", "batch_size", "drop_last", "generator", "in_order", "sampler", "shuffle"}
_UNTOUCHED = "The sampler is as it was."


class ResumableSampler(Sampler[list[int]]):
    """The order of the samples as a `batch_sampler`, with a cursor that is saved with the weights.

    An epoch has S = dataset_size // global_batch steps. Step s trains window s: the samples at [s * B, (s + 1) * B) of
    the epoch's permutation (B = global_batch, whatever the world size); rank r takes its r-th contiguous share. So a
    state saved by one world continues on another, and each of the S x B scheduled samples is trained exactly once.

    `consumed()` moves the cursor; a Checkpointer that has the sampler in its state calls it at each `step`. Take the
    batches from `loader`: it knows how many it handed out, which is right for gradient accumulation too. In a
    DataLoader of your own, with `batch_sampler=sampler`, `consumed()` moves by one window: one batch an optimizer
    step, and torch then draws that loader's base seed from the global RNG, so random augmentation does not resume.

    Memory: 8 bytes a sample for the permutation. Raises Refused, before anything else, for arguments that do not fit.
    """

    def __init__(
        self, dataset_size: int, global_batch: int, seed: int, rank: int = 0, world_size: int = 1, shuffle: bool = True
    ) -> None:
        self.dataset_size = whole_number("dataset_size", dataset_size, low=1)
        self.global_batch = whole_number("global_batch", global_batch, low=1)
        self.rank = whole_number("rank", rank)
        self.world_size = whole_number("world_size", world_size, low=1)
        self.shuffle = shuffle
        self._seed = whole_number("seed", seed)
        if self.rank >= self.world_size:
            raise Refused(f"rank {rank} is outside a world of {world_size}", todo=f"Use 0 to {world_size - 1}.")
        if self.dataset_size < self.global_batch:
            raise Refused(
                f"dataset_size {dataset_size} does not fill one global_batch of {global_batch}",
                todo="Use a smaller global batch.",
            )
        if self.global_batch % self.world_size:
            raise Refused(
                f"global_batch {global_batch} cannot be shared equally by world_size {world_size}",
                todo="Use a global batch that the world size divides; it stays the same on every world.",
            )
        self.steps_per_epoch = self.dataset_size // self.global_batch
        self._epoch = self._cursor = 0
        self._pass: _Pass | None = None
        self._in_hand: tuple[int, int] | None = None
        self._cached: tuple[tuple[int, int], np.ndarray] | None = None

    # ---- the order -----------------------------------------------------------------------------------------

    def order(self, epoch: int) -> np.ndarray:
        """Sample ids of every window of an epoch, all ranks together: int64 [steps_per_epoch, global_batch], read-only.

        Philox (Salmon et al., SC'11) keyed by (seed, epoch) under numpy's `RandomState`, whose stream is frozen (NEP
        19): a later numpy continues the same order.
        """
        key = (self._seed, whole_number("epoch", epoch))
        if self._cached is None or self._cached[0] != key:
            if self.shuffle:
                philox = np.random.Philox(key=np.array(key, dtype=np.uint64))
                ids = np.random.RandomState(philox).permutation(self.dataset_size)
            else:
                ids = np.arange(self.dataset_size)
            ids = ids[: self.steps_per_epoch * self.global_batch].astype(np.int64, copy=False)
            ids.flags.writeable = False
            self._cached = key, ids.reshape(self.steps_per_epoch, self.global_batch)
        return self._cached[1]

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's windows from the cursor to the end of the epoch. Raises Refused once it is stale."""
        windows = self._windows(self._begin(counted=False))
        return (window.ids for window in windows)

    def __len__(self) -> int:
        """Steps left in the current epoch: what an iteration that starts now yields."""
        return self.steps_per_epoch - self._cursor

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, step) of the batch in hand; where every batch is consumed, of the next one."""
        return self._in_hand or (self._epoch, self._cursor)

    # ---- the cursor ----------------------------------------------------------------------------------------

    def consumed(self) -> None:
        """Tell that the weights have seen what the loop was given. Past the last window comes (epoch + 1, 0)."""
        at = self._pass
        if at is None or not (at.counted or at.stale):
            self._move(self._epoch, self._cursor + 1)
        elif not at.stale:
            self._move(at.epoch, at.next_step)

    def state_dict(self) -> dict[str, int]:
        """The order and the place in it. Every rank holds the same, so it loads on any world."""
        return {"epoch": self._epoch, "cursor_step": self._cursor, "seed": self._seed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where a state ends, in its own order: its seed replaces the one given at construction.

        The dataset, `global_batch` and `shuffle` are not in the state and have to be the same. Raises Refused, with
        the sampler as it was, for a state that is not a sampler's or whose cursor is past the end of an epoch here.
        """
        if not isinstance(state, Mapping) or set(state) != {"epoch", "cursor_step", "seed"}:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise Refused(f"a sampler's state has epoch, cursor_step and seed; this one is {found}", safe=_UNTOUCHED)
        epoch, cursor, seed = (
            whole_number(f"{name} of the sampler's state", state[name], safe=_UNTOUCHED)
            for name in ("epoch", "cursor_step", "seed")
        )
        if cursor >= self.steps_per_epoch:
            raise Refused(
                f"the state stands at step {cursor} of epoch {epoch}, and an epoch has {self.steps_per_epoch} steps "
                f"here (dataset_size {self.dataset_size}, global_batch {self.global_batch}): one of these has changed",
                safe=_UNTOUCHED,
                todo="Use the dataset and the global batch that the state was saved with.",
            )
        self._retire()
        self._seed = seed
        self._move(epoch, cursor)

    # ---- iterations ----------------------------------------------------------------------------------------

    def loader(self, dataset: Dataset[Any], num_workers: int = 0, **dataloader_options: Any) -> Loader:
        """A DataLoader over this order that resumes exactly, workers, prefetching and augmentation included.

        Before each sample, Python's, numpy's and torch's CPU generators are seeded from (seed, epoch, sample), and put
        back after the batch: the same samples for any number of workers, and nothing is drawn from the loop's RNG
        (`collate_fn` draws on from the batch's last sample). A dataset with `__getitems__` is asked for one sample at
        a time. A generator that the dataset keeps to itself is its own to derive.

        Each iteration runs from the cursor to the end of the epoch. Do not fetch ahead of the training step in code
        around it (`prefetch_factor` and `pin_memory` do that inside): what it handed out counts as consumed.

        `dataloader_options` go to `torch.utils.data.DataLoader`. Raises Refused for those that the order decides, for
        an IterableDataset, and for a dataset whose length is not `dataset_size`.
        """
        if fighting := sorted(_OURS & set(dataloader_options)):
            raise Refused(
                f"{', '.join(fighting)} cannot be given to loader(): the sampler decides which samples come, and when",
                todo="Leave it out; batch size and shuffling are arguments of ResumableSampler.",
            )
        if isinstance(dataset, IterableDataset):
            raise Refused(
                "an IterableDataset has an order of its own, which cannot be resumed",
                todo="Use a dataset with __getitem__.",
            )
        if hasattr(dataset, "__len__") and len(dataset) != self.dataset_size:
            raise Refused(f"the dataset has {len(dataset)} samples and the sampler was made for {self.dataset_size}")
        seeded = _Seeded(dataset, dataloader_options.pop("collate_fn", None) or default_collate)
        init = _WorkerInit(dataloader_options.pop("worker_init_fn", None))
        return Loader(
            self,
            DataLoader(
                seeded,
                batch_sampler=_Fetching(self),  # type: ignore[arg-type]  # a window in place of a list of ids
                num_workers=num_workers,
                collate_fn=_as_it_is,
                worker_init_fn=init,
                generator=torch.Generator(),
                **dataloader_options,
            ),
        )

    def _begin(self, *, counted: bool) -> _Pass:
        self._retire()
        self._pass = _Pass(self._epoch, self._cursor, counted)
        return self._pass

    def _retire(self) -> None:
        if self._pass is not None:
            self._pass.stale = True
        self._in_hand = None

    def _windows(self, at: _Pass) -> Iterator[_Window]:
        share = self.global_batch // self.world_size
        mine = self.order(at.epoch)[:, self.rank * share : (self.rank + 1) * share]
        for step in range(at.next_step, self.steps_per_epoch):
            at.require_live()
            yield _Window(self._seed, at.epoch, mine[step].tolist())

    def _move(self, epoch: int, cursor: int) -> None:
        finished, self._cursor = divmod(cursor, self.steps_per_epoch)
        self._epoch = epoch + finished
        self._in_hand = None


class Loader:
    """What `ResumableSampler.loader` returns: iterate it, once an epoch; its length is the steps left in this one."""

    def __init__(self, sampler: ResumableSampler, batches: DataLoader[Any]) -> None:
        self._sampler, self._batches = sampler, batches

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        at = self._sampler._begin(counted=True)
        # iter(DataLoader) draws a base seed for its workers: from here, never from the global RNG
        self._batches.generator.manual_seed(_entropy("workers", self._sampler._seed, at.epoch)[0])
        return self._hand_out(at, iter(self._batches))

    def _hand_out(self, at: _Pass, batches: Iterator[Any]) -> Iterator[Any]:
        sampler = self._sampler
        at.require_live()
        for batch in batches:
            sampler._in_hand = (at.epoch, at.next_step)
            at.next_step += 1
            yield batch
            at.require_live()
        if at.next_step < sampler.steps_per_epoch:
            raise Refused(
                f"step {at.next_step} of epoch {at.epoch}: a StopIteration from the dataset or from collate_fn ended "
                f"the epoch before its {sampler.steps_per_epoch} steps",
                safe="The cursor has not moved past what was trained.",
                todo="Let the dataset raise another error, or return every sample.",
            )
        sampler._move(at.epoch, at.next_step)  # the loop came back for more: it has trained on all that it got


@dataclass
class _Pass:
    """One iteration over the rest of an epoch. `counted`: `next_step` follows what the loop was handed."""

    epoch: int
    next_step: int
    counted: bool
    stale: bool = False

    def require_live(self) -> None:
        if self.stale:
            raise Refused(
                f"this iteration over epoch {self.epoch} is over: the sampler was loaded or iterated anew since",
                safe="The cursor is where the load, or the newer iteration, has put it.",
                todo="Leave the loop and begin a new one over the same loader.",
            )


class _Window(NamedTuple):
    """What a worker needs for one batch; its copy of the dataset may be of another epoch (persistent_workers)."""

    seed: int
    epoch: int
    ids: list[int]


class _Fetching:
    """The `batch_sampler` of a Loader's DataLoader: windows of the iteration that is beginning."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[_Window]:
        assert self._sampler._pass is not None
        return self._sampler._windows(self._sampler._pass)


class _Seeded(Dataset[Any]):
    """The user's dataset, whose random draws depend on the sample and not on who fetches it, or when."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[[list[Any]], Any]) -> None:
        self.dataset, self._collate = dataset, collate

    def __getitems__(self, window: _Window) -> Any:
        together = getattr(self.dataset, "__getitems__", None)
        samples = []
        with _global_rngs_kept():
            for i in window.ids:
                _seed_global_rngs("sample", window.seed, window.epoch, i)
                samples.append(together([i])[0] if together else self.dataset[i])
            return self._collate(samples)


class _WorkerInit:
    """Shows a worker the user's dataset where torch would show the wrapper, then calls the user's function."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        assert info is not None and isinstance(info.dataset, _Seeded)
        object.__setattr__(info, "dataset", info.dataset.dataset)  # a WorkerInfo is frozen
        if self._init is not None:
            self._init(worker_id)


def _as_it_is(batch: Any) -> Any:
    return batch


# ---- random numbers ------------------------------------------------------------------------------------------


def _entropy(*key: str | int) -> tuple[int, int, int]:
    """Three 64-bit seeds from a key: for Python's, numpy's and torch's generator."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=24).digest()
    for_python, for_numpy, for_torch = struct.unpack("<3Q", digest)
    return for_python, for_numpy, for_torch


def _seed_global_rngs(*key: str | int) -> None:
    for_python, for_numpy, for_torch = _entropy(*key)
    random.seed(for_python)
    np.random.seed([for_numpy & 0xFFFFFFFF, for_numpy >> 32])
    torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would reach the accelerators' too


@contextlib.contextmanager
def _global_rngs_kept() -> Iterator[None]:
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


# ---- checks --------------------------------------------------------------------------------------------------


def whole_number(name: str, value: object, *, low: int = 0, safe: str = "") -> int:
    """`value` as an int in [low, 2**63). Raises Refused for anything else, booleans included."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise Refused(f"{name} is {value!r}, which is not an integer", safe=safe)
    number = int(value)
    if not low <= number < 2**63:
        raise Refused(f"{name} is {number}, outside [{low}, 2**63)", safe=safe)
    return number

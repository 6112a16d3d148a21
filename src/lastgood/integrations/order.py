"""A DataLoader that can resume after any batch: on each rank, a batch depends on (seed, epoch, its number) only.

    batch sampler, seeded by (seed, epoch) -> numbered indices
    dataset and collate_fn, seeded by (seed, epoch, number, indices) -> batch

Frameworks fetch batches ahead, skip indices of batches, and use worker processes. None of this changes a batch here,
and fetching does not advance the global CPU generators of the training loop.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data.dataloader import _DatasetKind

from ..data.sampler import ResumableSampler
from ..errors import Refused

_END = object()


def order_seed() -> int:
    """The seed of the data order of a new run: torch's initial seed; with several ranks that of rank 0.

    A restore replaces it by the seed that was saved.
    """
    seed = [torch.initial_seed()]
    if dist.is_available() and dist.is_initialized():
        dist.broadcast_object_list(seed)
    return seed[0]


class OrderedLoader(DataLoader[Any]):
    """A DataLoader over the same dataset as `loader`, in an order that can be continued after any batch.

    `loader`: a DataLoader over a map-style dataset, with any sampler. Its samplers may depend only on their arguments,
    the epoch and random numbers (of Python's, numpy's or torch's global generators, or of a `torch.Generator` in an
    attribute named `generator`). `seed`: seeds the order, and the random numbers that dataset and `collate_fn` draw.
    `len()` is the number of batches of a whole epoch, also if the iteration starts in the middle of one.

    Raises Refused for an IterableDataset, `in_order=False`, a ResumableSampler, which has a position of its own, and
    subclasses of DataLoader that override `__iter__`, but for torchdata's StatefulDataLoader, whose position is
    replaced by this one.
    """

    def __init__(self, loader: DataLoader[Any], seed: int) -> None:
        _require_map_style(loader)
        batches = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        fetcher = _DatasetKind.create_fetcher(
            _DatasetKind.Map, loader.dataset, loader.batch_sampler is not None, loader.collate_fn, loader.drop_last
        )
        self.order = Order(batches, seed)
        _require_one_position(self.order.samplers())
        self._fetched = 0
        self._samples = _length(loader.dataset)
        """of the newest iteration; None: unknown"""
        self.left = False
        """whether the newest iteration was closed while the loop held one of its batches, for example by `break`"""
        super().__init__(
            _SeededDataset(loader.dataset, fetcher.fetch),
            batch_sampler=self.order,  # type: ignore[arg-type]  # numbered batches in place of lists of indices
            num_workers=loader.num_workers,
            collate_fn=_unchanged,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=_WorkerInit(loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """The batches of the epoch of `order`, from `order.first` on. The next iteration starts at batch 0 again."""
        self._fetched = self.order.first
        self._samples = _length(self.dataset)
        self.generator.manual_seed(_seeds("workers", self.order.seed, self.order.epoch)[0])
        batches = super().__iter__()  # with workers torch asks the batch sampler for two iterators and uses the second,
        # so `first` is reset after both were made
        self.order.first = 0
        return self._count(batches)

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._fetched += 1
            self.left = False
            try:
                yield batch
            except GeneratorExit:
                self.left = True
                raise

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes on which the batches of the newest iteration depend, as far as they are known."""
        # That of another batch sampler may depend on the epoch.
        batch_size = next((one.batch_size for one in self.order.samplers() if type(one) is BatchSampler), None)
        found = {"samples": self._samples, "batch_size": batch_size}
        return {name: size for name, size in found.items() if isinstance(size, int)}

    def state_dict(self) -> dict[str, int]:
        """The position after the newest batch that the iterator returned."""
        return {"seed": self.order.seed, "epoch": self.order.epoch, "batches": self._fetched}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next iteration begin after the first `state["batches"]` batches of epoch `state["epoch"]`.

        If these are all its batches, it begins at batch 0 of the next epoch.
        """
        finished = state["batches"] >= len(self)
        self.order.seed = state["seed"]
        self.order.set_epoch(state["epoch"] + finished)
        self.order.first = self._fetched = 0 if finished else state["batches"]
        self.left = False


class NumberedBatch(NamedTuple):
    """The indices of one batch, and what the random numbers that dataset and `collate_fn` draw for it depend on."""

    seed: int
    epoch: int
    number: int
    indices: Any


class Order:
    """A batch sampler that wraps another one and numbers its batches. Other attributes are those of the wrapped one."""

    def __init__(self, batches: Any, seed: int) -> None:
        self._batches, self.seed = batches, seed
        self.epoch = 0
        self.first = 0
        """number of the first batch of the next iteration"""
        self.times_set = 0
        """the number of calls of `set_epoch` since this was set to 0"""

    def __getattr__(self, name: str) -> Any:
        if name == "_batches" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch in the next iteration."""
        self.epoch = epoch
        self.times_set += 1
        for sampler in self.samplers():
            if callable(getattr(sampler, "set_epoch", None)):
                sampler.set_epoch(epoch)

    def __iter__(self) -> Iterator[NumberedBatch]:
        return self._numbered(self.epoch, self.first)

    def _numbered(self, epoch: int, first: int) -> Iterator[NumberedBatch]:
        stream = _Stream("order", self.seed, epoch)
        for sampler in self.samplers():
            if isinstance(getattr(sampler, "generator", None), torch.Generator):
                sampler.generator.manual_seed(_seeds("sampler", self.seed, epoch)[0])
            if hasattr(sampler, "initial_seed"):
                sampler.initial_seed = self.seed  # accelerate's SeedableRandomSampler adds the epoch to it
        with stream:
            batches = iter(self._batches)
        for number in itertools.count():
            with stream:
                indices = next(batches, _END)
            if indices is _END:
                return
            if number >= first:
                yield NumberedBatch(self.seed, epoch, number, indices)

    def samplers(self) -> list[Any]:
        """The wrapped batch sampler, and every sampler inside of it."""
        found: dict[int, Any] = {}
        pending = [self._batches]
        while pending:
            one = pending.pop()
            if one is not None and id(one) not in found:
                found[id(one)] = one
                pending += [getattr(one, "sampler", None), getattr(one, "batch_sampler", None)]
        return list(found.values())


class _SeededDataset(Dataset[Any]):
    """The user's dataset. It makes a whole batch at once, with random numbers that are seeded for this batch."""

    def __init__(self, dataset: Any, fetch: Callable[[Any], Any]) -> None:
        self.dataset, self._fetch = dataset, fetch

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, batch: NumberedBatch) -> Any:
        # torch passes what the batch sampler yields. On several ranks batches of the same number have different
        # indices; where these are integers, the random numbers differ too.
        indices = batch.indices if isinstance(batch.indices, list) else [batch.indices]
        whole = [int(index) for index in indices if isinstance(index, int | np.integer)]
        with _Stream("batch", batch.seed, batch.epoch, batch.number, *whole):
            return self._fetch(batch.indices)


class _WorkerInit:
    """Calls the user's `worker_init_fn` with the user's dataset in `get_worker_info()`."""

    def __init__(self, init: Callable[[int], None] | None) -> None:
        self._init = init

    def __call__(self, worker_id: int) -> None:
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, _SeededDataset):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # WorkerInfo forbids plain assignment
        if self._init is not None:
            self._init(worker_id)


class _Stream:
    """Inside of `with`, the global CPU generators draw from a stream of their own, which the key seeds.

    The stream continues at the next `with`. Outside of it the generators are not advanced.
    """

    def __init__(self, *key: str | int) -> None:
        self._key = key
        self._inner: tuple[Any, Any, torch.Tensor] | None = None

    def __enter__(self) -> None:
        self._outer = _read_generators()
        if self._inner is None:
            for_torch, for_numpy, for_python = _seeds(*self._key)
            torch.default_generator.manual_seed(for_torch)  # torch.manual_seed would seed the accelerators too
            np.random.seed([for_numpy & 0xFFFFFFFF, for_numpy >> 32])
            random.seed(for_python)
        else:
            _write_generators(self._inner)

    def __exit__(self, *error: object) -> None:
        self._inner = _read_generators()
        _write_generators(self._outer)


def _read_generators() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _write_generators(state: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _seeds(*key: str | int) -> tuple[int, int, int]:
    """Three 63-bit seeds from a key."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=24).digest()
    first, second, third = (int.from_bytes(digest[at : at + 8], "little") >> 1 for at in (0, 8, 16))
    return first, second, third


def _unchanged(batch: Any) -> Any:
    return batch


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):  # a dataset with __getitem__ alone
        return None


def _require_one_position(samplers: list[Any]) -> None:
    if any(isinstance(one, ResumableSampler) for one in samplers):
        raise Refused(
            "the DataLoader has a ResumableSampler, and both it and this integration would skip the batches that are "
            "trained: some would never be trained",
            safe="Nothing was loaded.",
            todo="Give a plain DataLoader here, DataLoader(dataset, batch_size=8, shuffle=True), and register no "
            "sampler; or use lastgood.Checkpointer with the sampler in its state, and sampler.loader(dataset).",
        )


def _require_map_style(loader: DataLoader[Any]) -> None:
    what = ""
    if isinstance(loader.dataset, IterableDataset):
        what = "an IterableDataset has an order of its own, which cannot be resumed in the middle of an epoch"
    elif not loader.in_order:
        what = "a DataLoader with in_order=False returns batches in an order that depends on the speed of its workers"
    elif type(loader).__iter__ is not DataLoader.__iter__ and type(loader).__name__ != "StatefulDataLoader":
        what = f"{type(loader).__qualname__} iterates in its own way"
    if what:
        raise Refused(what, safe="Nothing was loaded.", todo="Use a torch DataLoader over a dataset with __getitem__.")

"""The resumable order of the samples, and the loader that hands them out.

    order(epoch) -> windows of B samples -> rank r's share of a window -> DataLoader -> training loop
                        ^ cursor                                                            |
                        `------------ advance_to(n) when optimizer step n is completed -----'

Invariants
  1. The order is a pure function of (dataset_size, global_batch, seed, shuffle) and the epoch. The world size only
     decides which rank trains which part of a window.
  2. The cursor counts windows that the weights were trained with. Fetching runs ahead of it and never moves it.
  3. Each optimizer step is counted once, by its number, however many checkpointers report it.
  4. Only one iteration is valid at a time. A newer one, or a load, ends the older ones: they raise and move nothing.
  5. No global random generator is drawn from, and what a dataset draws depends on (seed, epoch, sample) alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from .. import reporting
from ..errors import Refused
from .iteration import Iteration, require_batch_sampler
from .order import Order, whole_number
from .worker_seeding import SeededDataset, Window, WorkerInit, entropy, unchanged

# What decides which samples come and in which order; with `in_order=False` the count of batches would name no window.
_OURS = {"batch_sampler", "batch_size", "drop_last", "generator", "in_order", "sampler", "shuffle"}
_UNTOUCHED = "The sampler is as it was."
_AHEAD = (
    "the loader handed out one batch more before the first step of this iteration than before the second. If it is "
    "fetched ahead of the step, as frameworks do, a resume leaves that batch out: give the sampler batches_per_step."
)
_PLACE = {"epoch", "cursor_step", "seed"}
"""keys of the states that earlier versions wrote"""
_KEYS = _PLACE | {"dataset_size", "earlier", "global_batch", "shuffle", "step"}


class ResumableSampler(Sampler[list[int]]):
    """The order of the samples as a `batch_sampler`, with a cursor that is saved with the weights.

    An epoch has S = dataset_size // global_batch windows. Window s holds the samples at [s * B, (s + 1) * B) of the
    epoch's permutation (B = global_batch, whatever the world size); rank r trains its r-th contiguous share. So a
    state saved by one world continues on another, and each of the S x B scheduled samples is trained exactly once.

    A Checkpointer that has the sampler in its state counts each optimizer step by its number, in `step(n)` and
    `save(n)`. With `batches_per_step=None` (default) a step has trained on what `loader` handed out, however many
    batches that were; in a DataLoader of your own (`batch_sampler=sampler`), on one batch. With `batches_per_step=k`
    each step has trained on k batches, the last one of an epoch on what is left of it, and fetching ahead is allowed:
    give it under frameworks that fetch ahead of the step (Lightning, Transformers, Accelerate).

    `len()` is the number of batches of a whole epoch, `remaining` what is left of the current one. With a DataLoader
    of your own torch draws that loader's base seed from the global generator, so random augmentation does not resume.

    Memory: 8 bytes a sample for the permutation. Raises Refused, before anything else, for arguments that do not fit.
    See docs/data.md.
    """

    def __init__(
        self,
        dataset_size: int,
        global_batch: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
        batches_per_step: int | None = None,
    ) -> None:
        self.dataset_size = whole_number("dataset_size", dataset_size, low=1)
        self.global_batch = whole_number("global_batch", global_batch, low=1)
        self.rank = whole_number("rank", rank)
        self.world_size = whole_number("world_size", world_size, low=1)
        self.shuffle = bool(shuffle)
        self._seed = whole_number("seed", seed)
        if batches_per_step is not None:
            batches_per_step = whole_number("batches_per_step", batches_per_step, low=1)
        self.batches_per_step = batches_per_step
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
        self._order = Order(self.dataset_size, self.global_batch, self._seed, self.shuffle)
        self.steps_per_epoch = self._order.steps_per_epoch
        self._earlier: list[tuple[int, Order]] = []  # (epoch, order of the epochs before it), ascending
        self._epoch = self._cursor = 0
        self._step: int | None = 0  # number of the last optimizer step that was counted; None: unknown
        self._pass: Iteration | None = None
        self._in_hand: tuple[int, int] | None = None
        self._cached: tuple[tuple[Order, int], np.ndarray] | None = None

    # ---- the order -----------------------------------------------------------------------------------------

    def order(self, epoch: int) -> np.ndarray:
        """Sample ids of every window of an epoch, all ranks together: int64 [steps_per_epoch, global_batch], read-only.

        Philox (Salmon et al., SC'11) keyed by (seed, epoch) under numpy's `RandomState`, whose stream is frozen (NEP
        19): a later numpy continues the same order.
        """
        number = whole_number("epoch", epoch)
        key = next((order for until, order in self._earlier if number < until), self._order), number
        if self._cached is None or self._cached[0] != key:
            self._cached = key, key[0].of(number)
        return self._cached[1]

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's windows from the cursor to the end of the epoch. Raises Refused once it is stale.

        Raises Refused too where a DataLoader has this sampler as `sampler=`, with a `batch_size` above 1.
        """
        require_batch_sampler(self, sys._getframe(1))
        return self._ids(self._begin(follows=False))

    def __len__(self) -> int:
        """Batches of a whole epoch, before and after a resume: frameworks take it for the length of every epoch."""
        return self.steps_per_epoch

    @property
    def remaining(self) -> int:
        """Batches left in the current epoch: what an iteration that starts now yields."""
        return self.steps_per_epoch - self._cursor

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, window) of the batch in hand, where `loader` counts what it hands out; else of the next to count."""
        return self._in_hand or (self._epoch, self._cursor)

    # ---- the cursor ----------------------------------------------------------------------------------------

    def advance_to(self, step: int, previous: int = 0) -> None:
        """Count the optimizer steps up to number `step`: those since the last number, and none for the same number.

        A Checkpointer calls it, with the `previous` number that it has seen: no step before that is counted again, also
        where another Checkpointer has begun to number anew. A number below the last one belongs to another training,
        and counts as one step.
        Raises Refused, with the cursor as it was, where a DataLoader of your own, or `batches_per_step`, leaves open
        which batches these steps were trained with: more steps than batches were fetched, or several steps across two
        iterations.
        """
        if step != self._step:  # guard: step-counted-once
            # guard: steps-counted-by-number
            self._count(1 if self._step is None or step < self._step else step - max(self._step, previous))
            self._step = step

    def restart_after(self, step: int) -> None:
        """Let `advance_to` count from `step` on. Moves nothing; a Checkpointer calls it in `restore`."""
        self._step = step

    def is_unread_at(self, step: int) -> bool:
        """Whether `advance_to(step)` would count a step, although no batch and no `order` was read in this process."""
        return self._cached is None and step != self._step  # guard: counted-step-needs-no-read

    def consumed(self) -> None:
        """Count one more optimizer step, where no Checkpointer does. Past the last window comes (epoch + 1, 0)."""
        self._count(1)
        if self._step is not None and not (self._pass and self._pass.follows):
            self._step += 1

    def _count(self, steps: int) -> None:
        at = self._pass
        if at is None:
            self._move(*self._after(steps))
        elif at.follows and not at.stale:
            if at.count() and self.rank == 0:
                reporting.warning(_AHEAD)
            self._move(at.epoch, at.next_step)
        elif not at.stale:
            place = self._after(steps)
            # guard: counted-steps-were-fetched
            if place > at.fetched(self.steps_per_epoch) or (steps > 1 and not at.sure):
                raise Refused(
                    f"{steps} optimizer steps were completed since the last count, and it is not known with which "
                    f"batches: this iteration, over epoch {at.epoch}, began after {at.first_step} of its "
                    f"{self.steps_per_epoch} batches, and {at.next_step - at.first_step} were fetched since",
                    safe="The cursor stands where the last step was counted.",
                    todo="Let n in step(n) count completed optimizer steps, each of one batch (or batches_per_step), "
                    "and call step(n) at the end of each epoch too; or take the batches from sampler.loader(dataset).",
                )
            at.sure = True
            self._move(*place)

    def _after(self, steps: int) -> tuple[int, int]:
        """Epoch and cursor after so many more steps, of which none takes batches from two epochs."""
        each = self.batches_per_step or 1
        left = -(-self.remaining // each)  # guard: last-step-takes-remainder
        if steps < left:
            return self._epoch, self._cursor + steps * each
        epochs, steps = divmod(steps - left, -(-self.steps_per_epoch // each))
        return self._epoch + 1 + epochs, steps * each

    def _move(self, epoch: int, cursor: int) -> None:
        finished, self._cursor = divmod(cursor, self.steps_per_epoch)
        self._epoch = epoch + finished
        self._in_hand = None

    # ---- the state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the order depends on, the place in it, and the last step counted. The same on every rank."""
        return {
            "cursor_step": self._cursor,
            "dataset_size": self.dataset_size,
            "earlier": [[until, one.dataset_size, one.global_batch, one.shuffle] for until, one in self._earlier],
            "epoch": self._epoch,
            "global_batch": self.global_batch,
            "seed": self._seed,
            "shuffle": self.shuffle,
            "step": self._step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state ends, on any rank of any world size.

        The seed has to be that of the state. `dataset_size`, `global_batch` and `shuffle` too, in the middle of an
        epoch; a state that stands at the start of one is continued in the order of this sampler. Raises Refused, with
        the sampler as it was, for anything else; a Checkpointer finds that out (`differs`) before it loads anything.
        """
        saved = self._read(state)
        self._retire("a state was loaded into the sampler")
        self._earlier = saved.earlier
        if saved.order != self._order:
            if saved.epoch:
                self._earlier = [*saved.earlier, (saved.epoch, saved.order)]  # guard: earlier-epoch-orders-kept
            if self.rank == 0:
                reporting.info(
                    f"from epoch {saved.epoch} on the samples have another order: {self._unlike(saved.order)}"
                )
        self._step = saved.step
        self._move(saved.epoch, saved.cursor)

    def differs(self, state: object) -> str:
        """Why `load_state_dict` would refuse this state, and what to do; empty if it would not. Touches nothing."""
        try:
            self._read(state)
        except Refused as error:
            return f"{error.what}. {error.todo}".rstrip(". ")
        return ""

    def _read(self, state: object) -> _Saved:
        if not isinstance(state, Mapping) or set(state) not in (_KEYS, _PLACE):
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise Refused(f"a sampler's state has {', '.join(sorted(_KEYS))}; this one is {found}", safe=_UNTOUCHED)
        full = {**self.state_dict(), "step": None, "earlier": [], **state}  # what an older state lacks is as here
        epoch, cursor = (_stored(name, full[name]) for name in ("epoch", "cursor_step"))
        order = _stored_order([full[name] for name in Order._fields])
        step = None if full["step"] is None else _stored("step", full["step"])
        earlier = [_stored_change(one, order.seed) for one in full["earlier"]]
        if order != self._order and (cursor or order.seed != self._seed):  # guard: changed-order-refused
            raise Refused(
                f"the state, at step {cursor} of epoch {epoch}, goes by another order: {self._unlike(order)}",
                safe=_UNTOUCHED,
                todo="Make the sampler with the values of the state. dataset_size, global_batch and shuffle may change "
                "where an epoch begins (of a dataset that grew, use torch.utils.data.Subset until then), the seed not.",
            )
        if cursor >= order.steps_per_epoch:
            raise Refused(
                f"the state stands at step {cursor} of epoch {epoch}, and an epoch has {self.steps_per_epoch} steps "
                f"here (dataset_size {self.dataset_size}, global_batch {self.global_batch}): one of these has changed",
                safe=_UNTOUCHED,
                todo="Use the dataset and the global batch that the state was saved with.",
            )
        return _Saved(epoch, cursor, step, order, earlier)

    def _unlike(self, saved: Order) -> str:
        pairs = zip(Order._fields, saved, self._order, strict=True)
        return ", ".join(f"{name} {theirs} in the state, {ours} here" for name, theirs, ours in pairs if theirs != ours)

    # ---- iterations ----------------------------------------------------------------------------------------

    def loader(self, dataset: Dataset[Any], num_workers: int = 0, **dataloader_options: Any) -> Loader:
        """A DataLoader over this order that resumes exactly, workers, prefetching and augmentation included.

        Before each sample, Python's, numpy's and torch's CPU generators are seeded from (seed, epoch, sample), and put
        back after the batch: the same samples for any number of workers, and nothing is drawn from the loop's RNG
        (`collate_fn` draws on from the batch's last sample). A dataset with `__getitems__` is asked for one sample at
        a time. A generator that the dataset keeps to itself is its own to derive.

        Each iteration runs from the cursor to the end of the epoch. A step is counted as trained on all that was
        handed out before it, so code around the loader must not fetch ahead of the step (`prefetch_factor` and
        `pin_memory` do that inside, where it does no harm). Where a framework does, give the sampler
        `batches_per_step`: then steps are counted, and not what was handed out.

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
        seeded = SeededDataset(dataset, dataloader_options.pop("collate_fn", None) or default_collate)
        init = WorkerInit(dataloader_options.pop("worker_init_fn", None))
        return Loader(
            self,
            DataLoader(
                seeded,
                batch_sampler=_Fetching(self),  # type: ignore[arg-type]  # a window in place of a list of ids
                num_workers=num_workers,
                collate_fn=unchanged,
                worker_init_fn=init,
                generator=torch.Generator(),
                **dataloader_options,
            ),
        )

    def _begin(self, *, follows: bool) -> Iteration:
        before = self._pass
        sure = before is None or before.follows or bool(before.stale)
        if before is not None and not sure:
            counted = before.fetched(self.steps_per_epoch) <= (self._epoch, self._cursor)
            if before.ended and not counted:
                raise Refused(
                    f"epoch {before.epoch} has ended, and {self.remaining} of its batches belong to no step that was "
                    "counted",
                    safe="The cursor stands where the last step was counted.",
                    todo="Take an optimizer step at the end of each epoch, and call step(n) then; where steps span "
                    "epochs leave batches_per_step out.",
                )
            sure = before.sure and counted
        self._retire("the sampler was iterated anew")
        self._pass = Iteration(self._epoch, self._cursor, self._cursor, follows, sure)
        return self._pass

    def _retire(self, why: str) -> None:
        if self._pass is not None:
            self._pass.stale = why
        self._in_hand = None

    def _ids(self, at: Iteration) -> Iterator[list[int]]:
        for window in self._windows(at):
            at.next_step += 1
            yield window.ids

    def _windows(self, at: Iteration) -> Iterator[Window]:
        share = self.global_batch // self.world_size
        mine = self.order(at.epoch)[:, self.rank * share : (self.rank + 1) * share]
        for step in range(at.first_step, self.steps_per_epoch):
            at.require_live()
            yield Window(self._seed, at.epoch, mine[step].tolist())


class Loader:
    """What `ResumableSampler.loader` returns: iterate it once an epoch. An iteration starts at the sampler's cursor."""

    def __init__(self, sampler: ResumableSampler, batches: DataLoader[Any]) -> None:
        self._sampler, self._batches = sampler, batches

    def __len__(self) -> int:
        """Batches of a whole epoch, before and after a resume."""
        return len(self._sampler)

    @property
    def remaining(self) -> int:
        """Batches left in the current epoch: what an iteration that starts now yields."""
        return self._sampler.remaining

    def __iter__(self) -> Iterator[Any]:
        at = self._sampler._begin(follows=self._sampler.batches_per_step is None)  # guard: prefetch-not-counted
        # iter(DataLoader) draws a base seed for its workers: from here, never from the global RNG
        self._batches.generator.manual_seed(entropy("workers", self._sampler._seed, at.epoch)[0])
        return self._hand_out(at, iter(self._batches))

    def _hand_out(self, at: Iteration, batches: Iterator[Any]) -> Iterator[Any]:
        sampler = self._sampler
        at.require_live()
        for batch in batches:
            if at.follows:
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
        at.ended = True
        if at.follows:  # guard: prefetch-not-counted-at-epoch-end
            sampler._move(at.epoch, at.next_step)  # the loop came back for more: it has trained on all that it got


class _Saved(NamedTuple):
    """A state that can be continued."""

    epoch: int
    cursor: int
    step: int | None
    order: Order
    earlier: list[tuple[int, Order]]


class _Fetching:
    """The `batch_sampler` of a Loader's DataLoader: windows of the iteration that is beginning."""

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler

    def __iter__(self) -> Iterator[Window]:
        assert self._sampler._pass is not None
        return self._sampler._windows(self._sampler._pass)


def _stored(name: str, value: object) -> int:
    return whole_number(f"{name} of the sampler's state", value, safe=_UNTOUCHED)


def _stored_order(fields: list[Any]) -> Order:
    *numbers, shuffle = fields
    size, batch, seed = map(_stored, Order._fields, numbers)
    if type(shuffle) is not bool or not 0 < batch <= size:
        raise _malformed(fields)
    return Order(size, batch, seed, shuffle)


def _stored_change(fields: object, seed: int) -> tuple[int, Order]:
    if not isinstance(fields, list) or len(fields) != 4:
        raise _malformed(fields)
    until, size, batch, shuffle = fields
    return _stored("earlier", until), _stored_order([size, batch, seed, shuffle])


def _malformed(found: object) -> Refused:
    return Refused(f"the sampler's state is malformed: {found}", safe=_UNTOUCHED)

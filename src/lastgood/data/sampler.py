"""The resumable order of the samples, and the loader that yields their batches.

    order(epoch) -> windows of B samples -> rank r's batches of a window -> DataLoader -> training loop
                        ^ cursor                                                               |
                        `------------ advance_to(n) when optimizer step n is completed --------'

Invariants
  1. The order is a pure function of (dataset_size, global_batch, seed, shuffle) and the epoch. The world size and
     `largest_batch` only decide which rank trains which part of a window, in how many batches.
  2. The cursor counts the windows that the weights were trained with. Fetching runs ahead of it and never moves it.
     The next iteration begins behind an epoch that has ended, also if a step still has to count its last batches.
  3. Each optimizer step is counted once, by its number, however many checkpointers report it.
  4. Only one iteration is valid at a time. A newer one, or a load, invalidates the older ones: these raise Refused and
     move nothing.
  5. A window that is left out (`skip`) is never the next one: the cursor moves over it.
  6. No random number is drawn from a global generator. What a dataset draws depends only on (seed, epoch, sample).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from .. import reporting
from ..errors import Refused
from .division import divided
from .iteration import Iteration, require_no_joining_batch_sampler
from .loader import Fetching, Loader
from .order import Order, whole_number
from .skips import Skips
from .stored_state import SKIPPED, differences, stored_state
from .worker_seeding import SeededDataset, Window, WorkerInit, unchanged

# Options that decide the order of the samples; with `in_order=False` no number says which batches were trained.
_RESERVED = {"batch_sampler", "batch_size", "drop_last", "generator", "in_order", "sampler", "shuffle"}


class ResumableSampler(Sampler[list[int]]):
    """The order of the samples as a `batch_sampler`, with a cursor that is saved with the weights.

        sampler = lastgood.ResumableSampler(len(dataset), global_batch=64, seed=0, rank=rank, world_size=world_size)
        with lastgood.Checkpointer("run", {"model": model, "optimizer": optimizer, "sampler": sampler}) as ckpt:
            n = ckpt.restore().step
            for batch in sampler.loader(dataset, num_workers=4):  # the rest of the epoch
                train_step(batch)
                n += 1
                ckpt.step(n)

    `dataset_size`: number of samples in the dataset, at least `global_batch`. `global_batch`: samples of one window,
    over all ranks; without `largest_batch` a multiple of `world_size`. `seed`: of the permutations, from 0 to
    2**63 - 1. `rank` (default 0), `world_size` (default 1): of the ranks that divide each window. `shuffle`: True
    (default) permutes the samples anew in each epoch; False keeps the order of the dataset. `batches_per_step`: how
    many batches one optimizer step trains with; None (default) means all batches that `loader` has yielded since the
    last step. `largest_batch`: how many samples fit into one batch of a rank; None (default) makes one batch of its
    whole part.

    An epoch has S = dataset_size // global_batch windows. Window s holds the samples at [s * B, (s + 1) * B) of the
    epoch's permutation (B = global_batch, for every world size); rank r trains the r-th contiguous part of it. So a
    state that was saved in one world continues in another, and each of the S * B scheduled samples is trained exactly
    once. The other samples of an epoch, fewer than B, are left out. An iteration yields lists of sample ids (int).

    With `largest_batch` a window is one optimizer step in every world. Each rank's part of it is divided into as few
    batches as fit, the same number on all ranks, and the parts may differ by one sample. `loader` has the weight of
    each batch (`Loader.weight`) and knows when the step is due (`Loader.completes_step`). A loop must read both:

        loader = sampler.loader(dataset)
        for inputs, targets in loader:
            with nullcontext() if loader.completes_step else model.no_sync():
                (cross_entropy(model(inputs), targets) * loader.weight).backward()
            if loader.completes_step:
                optimizer.step()
                optimizer.zero_grad()
                n += 1
                ckpt.step(n)

    A Checkpointer that has the sampler in its state counts each optimizer step by its number, in `step(n)` and
    `save(n)`. With `batches_per_step=None` a step has trained on all batches that `loader` yielded since the last step;
    in a DataLoader of your own (`batch_sampler=sampler`), on one batch. With `batches_per_step=k` each step has trained
    on k batches, the last step of an epoch on those that are left, and fetching ahead of the step is allowed. It is
    required under frameworks that fetch ahead (Lightning, Transformers, Accelerate).

    A save at the last step of an epoch resumes in the next: do the work of the end of an epoch before it, where
    `loader.completes_epoch` is true. In a DataLoader of your own without `generator=` torch draws the base seed from
    the global generator, so dropout does not resume.

    Memory: 8 bytes for each sample of the permutation. Raises Refused for arguments outside of these ranges. See
    docs/data.md.
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
        largest_batch: int | None = None,
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
        if largest_batch is not None:
            largest_batch = whole_number("largest_batch", largest_batch, low=1)
        self.largest_batch = largest_batch
        if batches_per_step is not None and largest_batch is not None:
            raise Refused(
                "batches_per_step and largest_batch exclude each other: each says what one optimizer step is",
                todo="Give largest_batch in a loop of your own, batches_per_step under a framework that fetches ahead.",
            )
        if self.rank >= self.world_size:
            raise Refused(f"rank {rank} is outside a world of {world_size}", todo=f"Use 0 to {world_size - 1}.")
        if self.dataset_size < self.global_batch:
            raise Refused(
                f"dataset_size {dataset_size} does not fill one global_batch of {global_batch}",
                todo="Use a smaller global batch.",
            )
        self._division = divided(self.global_batch, self.rank, self.world_size, largest_batch)
        self._order = Order(self.dataset_size, self.global_batch, self._seed, self.shuffle)
        self.steps_per_epoch = self._order.steps_per_epoch
        self._earlier: list[tuple[int, Order]] = []  # (epoch, order of the epochs before it), ascending
        self._epoch = self._cursor = 0  # where the next iteration begins
        self._counted = (0, 0)  # the cursor: behind the last window that was counted
        self._counts_inside = False  # whether a step was counted before its iteration had ended
        self._step: int | None = 0  # number of the last optimizer step that was counted; None: unknown
        self._skips = Skips()
        self._iteration: Iteration | None = None
        self._last_yielded: tuple[int, int] | None = None
        self._cached: tuple[tuple[Order, int], np.ndarray] | None = None

    # ---- the order -----------------------------------------------------------------------------------------

    def order(self, epoch: int) -> np.ndarray:
        """Sample ids of every window of an epoch, for all ranks: int64 [steps_per_epoch, global_batch], read-only.

        Philox (Salmon et al., SC'11) keyed by (seed, epoch) under numpy's `RandomState`, whose stream is frozen (NEP
        19): a later numpy continues the same order.
        """
        number = whole_number("epoch", epoch)
        key = self._order_of(number), number
        if self._cached is None or self._cached[0] != key:
            self._cached = key, key[0].of(number)
        return self._cached[1]

    def _order_of(self, epoch: int) -> Order:
        return next((order for until, order in self._earlier if epoch < until), self._order)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's part of each window, from the cursor to the end of the epoch, as lists of sample ids.

        Raises Refused once a newer iteration or a load has invalidated it, if a DataLoader has this sampler as
        `sampler=` with a `batch_size` above 1, and with `largest_batch`, where batches need the weights of `loader`.
        """
        if self.largest_batch is not None:
            raise Refused(
                "a sampler with largest_batch cannot be iterated by a DataLoader of your own: it does not know the "
                "weights of its batches, nor which one completes a step",
                todo="Take the batches from sampler.loader(dataset), which knows both.",
            )
        require_no_joining_batch_sampler(self, sys._getframe(1))
        return self._ids(self._begin(counts_yielded=False))

    def __len__(self) -> int:
        """Batches of a whole epoch, before and after a resume: frameworks take it for the length of every epoch."""
        return self.steps_per_epoch * self._division.batches

    @property
    def part(self) -> slice:
        """Where the samples of this rank lie in each window: `order(epoch)[window, part]`."""
        return self._division.part

    @property
    def remaining(self) -> int:
        """Batches left in the current epoch: what an iteration that starts now yields."""
        return self._skips.remaining(self._epoch, self._cursor, self.steps_per_epoch) * self._division.batches

    @property
    def position(self) -> tuple[int, int]:
        """(epoch, window) of the batch that `loader` yielded last, until its step is counted.

        Otherwise that of the first batch of an iteration that starts now: before the first batch, after a counted step,
        the end of an epoch or a load, and always with a DataLoader of your own or with `batches_per_step`.
        """
        return self._last_yielded or (self._epoch, self._cursor)

    # ---- the cursor ----------------------------------------------------------------------------------------

    def advance_to(self, step: int, previous: int = 0) -> None:
        """Count the optimizer steps from the last counted number to `step`. The same number again counts nothing.

        A Checkpointer calls it with the `previous` number that it was given (default 0): steps up to that one are not
        counted again, also where another Checkpointer, whose steps have other numbers, has counted in between. A `step`
        below the last counted number belongs to such another numbering, and counts as one step.

        Raises Refused, and leaves the cursor unchanged, if it is unknown which batches these steps were trained with.
        With a DataLoader of your own, or with `batches_per_step`, that is so if there are more steps than fetched
        batches, or several steps across two iterations. With `largest_batch`, it is so in the middle of a window; and
        a loop that has not read both `weight` and `completes_step` of its loader is refused.
        """
        if step != self._step:  # guard: step-counted-once
            # guard: steps-counted-by-number
            self._count(1 if self._step is None or step < self._step else step - max(self._step, previous))
            self._step = step

    def restart_after(self, step: int) -> None:
        """Let `advance_to` count from `step` on. Does not move the cursor. A Checkpointer calls it in `restore`."""
        self._step = step

    def is_unread_at(self, step: int) -> bool:
        """Whether `advance_to(step)` would count a step although nothing of the order was read here, nor by `order`."""
        return self._cached is None and step != self._step  # guard: counted-step-needs-no-read

    @property
    def is_read_uncounted(self) -> bool:
        """Whether an iteration is under way, and no step was counted in it."""
        at = self._iteration
        return at is not None and at.batches > 0 and not (at.counted or at.stale or at.ended or at.fetched_all)

    @property
    def is_exhausted(self) -> bool:
        """Whether a loop that counts steps within iterations has counted several after the end of this one."""
        return self._counts_inside and self._iteration is not None and self._iteration.without_batch > 1

    @property
    def counted(self) -> tuple[int, int]:
        """(epoch, window) of the first batch that is not counted yet."""
        return self._counted

    def consumed(self) -> None:
        """Count one more optimizer step; without a Checkpointer. After the last window comes (epoch + 1, 0)."""
        self._count(1)
        if self._step is not None and not (self._iteration and self._iteration.counts_yielded):
            self._step += 1

    def _count(self, steps: int) -> None:
        at = self._iteration
        if at is None:
            self._move(*self._after(steps))
        elif at.counts_yielded and not at.stale:
            if self._counts_inside or not at.ended:  # guard: evaluation-makes-no-step
                at.require_step_due()
            at.note_step(self._place(at.epoch, at.next_step)[0] > at.epoch)
            self._counts_inside |= not at.ended
            self._move(at.epoch, at.next_step)
        elif not at.stale:
            place = self._after(steps)
            # guard: counted-steps-were-fetched
            if place > self._place(at.epoch, at.next_step) or (steps > 1 and not at.earlier_counted):
                raise Refused(
                    f"{steps} optimizer steps were completed since the last count, and it is not known with which "
                    f"batches: this iteration, over epoch {at.epoch}, began after {at.first_step} of its "
                    f"{self.steps_per_epoch} batches, and {at.next_step - at.first_step} were fetched since",
                    safe="The cursor is where the last step was counted.",
                    todo="Let n in step(n) count completed optimizer steps, each of one batch (or batches_per_step), "
                    "and call step(n) at the end of each epoch too; or take the batches from sampler.loader(dataset), "
                    "and the sampler out of the state once the loop trains with another one.",
                )
            at.note_step(place[0] > at.epoch)
            self._move(*place)

    def _after(self, steps: int) -> tuple[int, int]:
        return self._skips.after(self._epoch, self._cursor, self.steps_per_epoch, steps, self.batches_per_step or 1)

    def _place(self, epoch: int, cursor: int) -> tuple[int, int]:
        return self._skips.place(epoch, cursor, self.steps_per_epoch)

    def _move(self, epoch: int, cursor: int) -> None:
        self._go_on_from(epoch, cursor)
        self._counted = self._epoch, self._cursor

    def _go_on_from(self, epoch: int, cursor: int) -> None:
        self._epoch, self._cursor = self._place(epoch, cursor)
        self._last_yielded = None

    def _end(self, at: Iteration) -> None:
        # Where steps are counted inside of iterations, the batches since the last step belong to the next one. Other
        # iterations, as those of an evaluation, count as a whole.
        at.ended = True
        if at.counts_yielded:  # guard: prefetch-not-counted-at-epoch-end
            move = self._go_on_from if self._counts_inside else self._move  # guard: last-step-of-epoch-not-presumed
            move(at.epoch, at.next_step)

    def skip(self, epoch: int, first: int, count: int) -> list[int]:
        """Leave windows out of the order, for good. Returns the ids of their samples; empty if none is left out anew.

        `epoch`, `first`: the first of them, as in `position`. `count`: how many. Windows before the cursor are trained
        already, and are not left out. `lastgood run` and a `Sentinel` have it called by `Checkpointer.restore`, for
        batches that made training fail or diverge; `Audit.report` lists them. Iterations that have begun are over then.
        """
        epoch, first = whole_number("epoch", epoch), whole_number("first", first)
        ahead = range(first, min(first + whole_number("count", count), self.steps_per_epoch))
        known = self._skips.of(epoch)
        new = [one for one in ahead if (epoch, one) >= self._counted and one not in known]
        if not new:
            return []
        self._invalidate("batches were left out of the order")
        self._skips.add(epoch, new)
        self._counted = self._place(*self._counted)
        self._go_on_from(self._epoch, self._cursor)
        return [int(one) for one in self._order_of(epoch).of(epoch)[new].reshape(-1)]

    @property
    def skipped(self) -> list[tuple[int, int]]:
        """(epoch, window) of each window that is left out, ascending."""
        return [*self._skips]

    # ---- the state -----------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The parameters of the order, the position in it, and the last counted step. Equal on every rank."""
        return {
            "cursor_step": self._counted[1],
            "dataset_size": self.dataset_size,
            "earlier": [[until, one.dataset_size, one.global_batch, one.shuffle] for until, one in self._earlier],
            "epoch": self._counted[0],
            "global_batch": self.global_batch,
            "seed": self._seed,
            "shuffle": self.shuffle,
            "step": self._step,
            **({SKIPPED: self._skips.state()} if self._skips else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in `state`, on any rank of any world size.

        The seed must be equal. In the middle of an epoch `dataset_size`, `global_batch` and `shuffle` must be equal
        too; a state at the start of an epoch is continued in the order of this sampler. Raises Refused, and changes
        nothing, for anything else. A Checkpointer checks this (`differs`) before it loads anything.
        """
        saved = stored_state(state, self._order)
        self._invalidate("a state was loaded into the sampler")
        self._earlier, self._step, self._skips = saved.earlier, saved.step, saved.skips
        if saved.order != self._order:
            self._skips = saved.skips.before(saved.epoch)  # guard: skips-belong-to-their-order
            if saved.epoch:
                self._earlier = [*saved.earlier, (saved.epoch, saved.order)]  # guard: earlier-epoch-orders-kept
            if self.rank == 0:
                changed = differences(saved.order, self._order)
                reporting.info(f"from epoch {saved.epoch} on the samples have another order: {changed}")
        self._counts_inside = saved.cursor > 0
        self._move(saved.epoch, saved.cursor)

    def differs(self, state: object) -> str:
        """Why `load_state_dict` would refuse this state, and what to do; empty if it would not. Changes nothing."""
        try:
            stored_state(state, self._order)
        except Refused as error:
            return f"{error.what}. {error.todo}".rstrip(". ")
        return ""

    # ---- iterations ----------------------------------------------------------------------------------------

    def loader(self, dataset: Dataset[Any], num_workers: int = 0, **dataloader_options: Any) -> Loader:
        """A DataLoader over this order that resumes exactly, also with workers, prefetching and random augmentation.

        `dataset`: a map-style dataset of `dataset_size` samples. `num_workers`: number of worker processes (default 0:
        this process fetches). `dataloader_options`: further arguments of `torch.utils.data.DataLoader`. Raises Refused
        for options that the order decides (`batch_size`, `shuffle`, `sampler`, ...), for an IterableDataset, and for a
        dataset whose length is not `dataset_size`.

        Before each sample, Python's, numpy's and torch's CPU generators are seeded from (seed, epoch, sample). After
        the batch their states are restored. So samples are the same for any number of workers, and no number is drawn
        from the generators of the training loop. `collate_fn` continues with the random numbers of the batch's last
        sample. `__getitems__` of a dataset is called for one sample at a time. A dataset with a generator of its own
        must seed that itself.

        Each iteration runs from the cursor to the end of the epoch. A step counts as trained on all batches that were
        yielded before it, so code around the loader must not fetch ahead of the step, unless the sampler has
        `batches_per_step`. (`prefetch_factor` and `pin_memory` fetch ahead inside of the loader, which is safe.)
        """
        if reserved := sorted(_RESERVED & set(dataloader_options)):
            raise Refused(
                f"{', '.join(reserved)} cannot be given to loader(): the sampler decides which samples come, and when",
                todo="Leave it out; batch size and shuffling are arguments of ResumableSampler.",
            )
        if isinstance(dataset, IterableDataset):
            raise Refused(
                "an IterableDataset decides its own order, which cannot be resumed",
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
                batch_sampler=Fetching(self),  # type: ignore[arg-type]  # a window in place of a list of ids
                num_workers=num_workers,
                collate_fn=unchanged,
                worker_init_fn=init,
                generator=torch.Generator(),
                **dataloader_options,
            ),
        )

    def _begin(self, *, counts_yielded: bool) -> Iteration:
        before = self._iteration
        earlier_counted = before is None or before.counts_yielded or bool(before.stale)
        if before is not None and not earlier_counted:
            counted = self._place(before.epoch, before.next_step) <= (self._epoch, self._cursor)
            if before.ended and not counted:
                raise Refused(
                    f"epoch {before.epoch} has ended, and {self.remaining} of its batches belong to no step that was "
                    "counted",
                    safe="The cursor is where the last step was counted.",
                    todo="Make an optimizer step at the end of each epoch, and call step(n) then; where steps span "
                    "epochs leave batches_per_step out.",
                )
            if before.fetched_all and not counted:
                before.report_repeated(self.remaining, self.batches_per_step or 1)
            earlier_counted = before.earlier_counted and counted
        self._invalidate("a newer iteration over the sampler began")
        self._iteration = Iteration(
            self._epoch, self._cursor, self._cursor, counts_yielded, earlier_counted, self._division
        )
        return self._iteration

    def _invalidate(self, why: str) -> None:
        if self._iteration is not None:
            self._iteration.stale = why
        self._last_yielded = None

    def _ids(self, at: Iteration) -> Iterator[list[int]]:
        for window in self._windows(at):
            at.note_fetched(self._skips.next(at.epoch, at.next_step))
            yield window.ids
        at.fetched_all = True

    def _windows(self, at: Iteration) -> Iterator[Window]:
        windows, slices = self.order(at.epoch), at.division.slices
        step = self._skips.next(at.epoch, at.first_step)
        while step < self.steps_per_epoch:
            for batch in slices:
                at.require_live()
                yield Window(self._seed, at.epoch, windows[step, batch].tolist())
            step = self._skips.next(at.epoch, step + 1)

"""Checkpoints for loops over `accelerate`: a Checkpointer whose state is what the Accelerator has prepared.

model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
with Checkpointer(accelerator, "runs/net", every_steps=50) as ckpt:
    step = ckpt.restore().step
    for epoch in range(ckpt.epoch, epochs):
        for batch in loader:                    # begins after the last batch of the restored step
            ...
            if accelerator.sync_gradients:
                step += 1
                ckpt.step(step)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import Refused
from ..extras import needed
from ..loop import checkpointer
from ..loop.load import Restored
from ..run.save_handle import Save
from .options import (
    checkpointer_options,
    require,
    require_one_restore,
    require_path,
    require_same_sizes,
    restoring,
    with_own_entries,
)
from .order import OrderedLoader, order_seed

with needed("accelerate", "lastgood.integrations.accelerate"):
    from accelerate import Accelerator, DistributedType
    from accelerate.data_loader import DataLoaderShard


_OWN_ENTRIES = {"loader": ("seed", "epoch", "batches", "length"), "accelerator": ("step",), "scaler": ()}
"""kinds of entries of the state that every save has, whatever `include` names, and their parts"""


class Checkpointer(checkpointer.Checkpointer):
    """A `lastgood.Checkpointer` of everything that `accelerator` has prepared or registered for checkpointing.

    `accelerator`: an Accelerator after its `prepare` calls; objects that are prepared later are not saved. `path`: the
    directory of the run. `every_steps`: steps between two saves (default None: as `cadence` defines). `options`:
    further keyword arguments of `lastgood.Checkpointer`.

    The state consists of models, optimizers and schedules without their wrappers ("model", "model_1", ..., in the order
    of their preparation), the loss scale, registered objects, random number generators, the position in each prepared
    loader, and the number of accumulated batches.

    Call `step(n)` when `accelerator.sync_gradients` is true, after optimizer and schedule: gradients that are still
    being accumulated are not part of the state. A batch that accelerate has fetched ahead does not count as consumed.
    After `restore()`, a prepared loader whose iteration was running when `step(n)` was called begins its next iteration
    in the middle of the epoch, so do not skip batches yourself. Each iteration with a step is an epoch of its own, also
    if `break` ends it; after one that was ended before `step(n)` the next epoch begins. `accelerator.save_state` works
    as before, but `load_state` raises Refused once the run holds a generation. For a model of PEFT, register
    `lastgood.integrations.peft.Adapters(model)` with `register_for_checkpointing`.

    `step(n)` and `save(n)` raise Refused between two optimizer steps, where `accelerator.sync_gradients` is false.

    Raises Refused beside another Checkpointer of the same accelerator, before anything is prepared, for DeepSpeed and
    Megatron-LM, and for loaders over an IterableDataset, with `in_order=False`, or with `dispatch_batches=True`.
    """

    def __init__(
        self, accelerator: Accelerator, path: str | os.PathLike[str], every_steps: int | None = None, **options: Any
    ) -> None:
        self._path, self._accelerator = require_path(path), accelerator
        options = checkpointer_options(every_steps, options)
        _require_alone(accelerator)
        self._places = [_Place(one, accelerator) for one in accelerator._dataloaders]
        self._accumulated = _Accumulated(accelerator)
        state = _state(accelerator, self._places) | {"accelerator": self._accumulated}
        self._own = {name: parts for name in state for kind, parts in _OWN_ENTRIES.items() if name.startswith(kind)}
        self._given = with_own_entries(options, self._own)
        super().__init__(self._path, state, **self._given)
        self._load_state_hook = accelerator.register_load_state_pre_hook(self._before_load_state)

    @property
    def epoch(self) -> int:
        """After `restore()`, the epoch of the next iteration of the first prepared loader; 0 without a loader."""
        return self._places[0].epoch if self._places else 0

    def restore(
        self, step: int | None = None, strict: bool = True, rename: Mapping[str, str] | None = None
    ) -> Restored:
        with restoring(self._given, self._own):
            return super().restore(step, strict, rename)

    def step(self, n: int, metrics: Mapping[str, Any] | None = None) -> Save | None:
        _require_whole_step(self._accelerator, f"ckpt.step({n})")
        for place in self._places:
            place.step()
        self._accumulated.mark()
        return super().step(n, metrics)

    def save(self, n: int, milestone: bool = False, metrics: Mapping[str, Any] | None = None) -> Save:
        _require_whole_step(self._accelerator, f"ckpt.save({n})")
        self._saver.require_milestone(milestone)
        for place in self._places:
            place.mark()
        self._accumulated.mark()
        return super().save(n, milestone, metrics)

    def close(self, timeout: float | None = None) -> None:
        self._load_state_hook.remove()
        super().close(timeout)

    def _before_load_state(self, models: list[Any], folder: str) -> None:
        require_one_restore(self._path, f"load_state({folder!r})")


class _CountedLoader(OrderedLoader):
    """An OrderedLoader for which each iteration with a step is an epoch of its own. accelerate does not count those
    that `break` ends: the next one would have the same order. An epoch that the script has set stays.

    `shard`: the prepared loader, whose `iteration` is the epoch.
    """

    def __init__(self, shard: DataLoaderShard) -> None:
        super().__init__(shard.base_dataloader, order_seed())
        self._shard = shard
        self._begun: int | None = None
        """the epoch of the newest iteration"""
        self.stepped = False
        """whether a step was completed since that began"""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        set_by_script = self.order.times_set > 1  # accelerate sets it once before each iteration
        if self.stepped and not set_by_script and self._shard.iteration == self._begun:
            self._shard.set_epoch(self._shard.iteration + 1)
        self._begun, self.order.times_set = self._shard.iteration, 0
        self.stepped = self.order.first > 0  # in the middle of an epoch, of which a restored step was completed
        return super().__iter__()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        super().load_state_dict(state)
        self._shard.iteration, self._begun, self.order.times_set = self.order.epoch, None, 0


class _Place:
    """The position in a prepared loader. It replaces the inner DataLoader by an OrderedLoader, which can resume."""

    def __init__(self, loader: Any, accelerator: Accelerator) -> None:
        require(
            type(loader) is DataLoaderShard,
            f"a prepared loader is a {type(loader).__qualname__}",
            "Prepare a DataLoader over a dataset with __getitem__, with dispatch_batches=False.",
        )
        self._loader, base = loader, loader.base_dataloader
        self._accumulation = accelerator.gradient_accumulation_steps  # as given; a loop may change it
        self._processes = accelerator.num_processes
        self._ordered = base if isinstance(base, _CountedLoader) else _CountedLoader(loader)
        loader.base_dataloader = self._ordered
        loader.dl_state_dict = self._ordered.state_dict()  # from now on accelerate updates it before it fetches ahead
        self.mark()

    @property
    def epoch(self) -> int:
        return self._ordered.order.epoch

    def step(self) -> None:
        """A step is completed."""
        self._ordered.stepped = True
        self.mark()

    def mark(self) -> None:
        """Keep the position at this step. After an iteration that `break` has ended it is the next epoch."""
        self._marked = taken = self._taken()
        if self._ordered.left:
            self._marked = taken | {"epoch": taken["epoch"] + 1, "batches": 0}

    def state_dict(self) -> dict[str, Any]:
        """The position at the newest step, because leaving the `with` saves that step; batches may have been taken
        since, as the first ones of an optimizer step."""
        return self._marked  # guard: position-is-that-of-the-step

    def _taken(self) -> dict[str, Any]:
        taken = self._loader.dl_state_dict
        position = {name: taken[name] for name in ("seed", "epoch", "batches")}
        return position | {"length": len(self._ordered), "sizes": self._sizes()}

    def _sizes(self) -> dict[str, int]:
        return self._ordered.sizes | {
            "gradient_accumulation_steps": self._accumulation,
            "processes": self._processes,  # the same number of batches may be that of other shares of the ranks
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        require(
            saved["length"] == len(self._ordered),
            f"the run was saved with {saved['length']} batches an epoch, and this loader has {len(self._ordered)}",
            "Use the same batch size, dataset and number of processes, or a new run.",
        )
        if 0 < saved["batches"] < saved["length"]:  # in the middle of an epoch
            require_same_sizes(saved.get("sizes", {}), self._sizes())
        self._ordered.load_state_dict(saved)
        self._loader.dl_state_dict = self._ordered.state_dict()
        self.mark()


class _Accumulated:
    """The number of batches whose gradients the accelerator has accumulated, at the newest step: leaving the `with`
    saves that step, and a loop may have accumulated more since, which no save has."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.mark()

    def mark(self) -> None:
        """Keep the number at this step."""
        self._marked = self._accelerator.step

    def state_dict(self) -> dict[str, int]:
        return {"step": self._marked}  # guard: batches-after-step-are-not-saved

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        self._accelerator.step = saved["step"]
        self.mark()


def _state(accelerator: Accelerator, places: list[_Place]) -> dict[str, Any]:
    parts = {
        "model": [accelerator.unwrap_model(one) for one in accelerator._models],
        "optimizer": [one.optimizer for one in accelerator._optimizers],
        "scheduler": [one.scheduler for one in accelerator._schedulers],
        "loader": places,
        "registered": accelerator._custom_objects,
        "scaler": [accelerator.scaler] if accelerator.scaler is not None else [],
    }
    return {name if n == 0 else f"{name}_{n}": one for name, ones in parts.items() for n, one in enumerate(ones)}


def _require_whole_step(accelerator: Accelerator, call: str) -> None:
    """Raise Refused between two optimizer steps."""
    # With one batch a step, the flag may be that of another accelerator of this process: they share it.
    if not accelerator.sync_gradients and accelerator.gradient_accumulation_steps > 1:
        raise Refused(
            f"{call} was called between two optimizer steps, while gradients are accumulated, which no save has",
            safe="Nothing of this step was saved.",
            todo="Count optimizer steps: write `if accelerator.sync_gradients:` before `ckpt.step(step)`.",
        )


def _require_alone(accelerator: Accelerator) -> None:
    others = accelerator._load_model_state_pre_hook.values()
    require(
        not any(isinstance(getattr(one, "__self__", None), Checkpointer) for one in others),
        "this accelerator has a Checkpointer already",
        "Close it first; one Checkpointer saves everything that is prepared.",
    )
    engine = accelerator.distributed_type
    require(
        engine not in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM),
        f"{engine.value} is not supported: its engine holds the state of the optimizer",
        "Use DDP or FSDP2.",
    )
    require(
        bool(accelerator._models),
        "no model is prepared yet",
        "Call accelerator.prepare(model, ...) before you make the Checkpointer.",
    )

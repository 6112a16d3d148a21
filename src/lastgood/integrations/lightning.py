"""Checkpoints for Lightning: a callback that saves while `trainer.fit(model)` runs, and restores before it begins.

    lightning.Trainer(callbacks=[LastgoodCallback("runs/net", every_steps=50)], ...).fit(model)

A step is saved when the next batch begins, so that its validation, schedules, other callbacks and the end of its epoch
are part of the state; the last step is saved when training ends. `on_fit_start` restores the state before the first
batch is fetched, and uses Lightning's own restart to bring its loops to that batch. The restart changes the counters of
the loops and draws random numbers. When the batch begins, both are therefore set once more to their values at the save,
and the flags by which Lightning's loops know that they restart are cleared.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch

from .. import reporting
from ..extras import needed
from ..loop.checkpointer import Checkpointer
from ..state.adapters import adapters_entry
from ..state.objects import load_rng, read_rng
from .lightning_loops import (
    EPOCH_HOOK,
    Kept,
    Means,
    forget_restart,
    is_out_of_time,
    read_metric,
    report_fit,
    set_counters,
    write_metric,
)
from .options import (
    LOSS,
    LoopSteps,
    checkpointer_options,
    require,
    require_one_restore,
    require_path,
    require_same_sizes,
    restoring,
    wants_loss,
    with_own_entries,
)
from .order import OrderedLoader, order_seed

with needed("lightning", "lastgood.integrations.lightning"):
    from torchmetrics import Metric

    try:
        from lightning.pytorch import Callback, LightningModule
        from lightning.pytorch import __version__ as lightning_version
        from lightning.pytorch.callbacks import ProgressBar
        from lightning.pytorch.trainer import call
    except ModuleNotFoundError as error:
        if error.name not in ("lightning", "lightning.pytorch"):
            raise  # lightning is installed, and a package that it needs is missing
        from pytorch_lightning import Callback, LightningModule  # the older name of the same library; both work
        from pytorch_lightning import __version__ as lightning_version
        from pytorch_lightning.callbacks import ProgressBar
        from pytorch_lightning.trainer import call

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy")


class LastgoodCallback(Callback):
    """Saves the complete training state while `fit` runs, and continues it when `fit` is called again.

    `path`: the directory of the run. `every_steps`: optimizer steps between two saves (default None: as `cadence`
    defines). `options`: further keyword arguments of `lastgood.Checkpointer`, such as `retention`, `preemption` or
    `staging`.

    The state consists of module, optimizers, schedules, precision plugin, datamodule, the progress of the loops, other
    callbacks, logged metrics and their running means, torchmetrics of the module, random number generators, and the
    position in the data. Entries that `on_save_checkpoint` hooks add to a checkpoint are saved too. The mean loss of
    the batches of each step is its metric "loss", if the module optimizes automatically, and `sentinel=Sentinel()`, a
    `retention=Keep(best=("loss", "min", 3))`, `lastgood run --records` or `lastgood replay` uses it; of several
    processes the best is chosen by that of rank 0.

    `fit` raises Refused if something else saves or restores the same state: a second LastgoodCallback, or `ckpt_path`
    when the run holds a generation. ModelCheckpoint may write its `.ckpt` files. It also raises Refused for several
    training loaders, an IterableDataset, `reload_dataloaders_every_n_epochs`, and every strategy but
    SingleDeviceStrategy and DDPStrategy.
    With `fast_dev_run` nothing is saved or restored.
    """

    def __init__(self, path: str | os.PathLike[str], every_steps: int | None = None, **options: Any) -> None:
        self.path = require_path(path)
        self._options = checkpointer_options(every_steps, options)
        self.checkpointer: Checkpointer | None = None
        """open from `on_fit_start` to `on_train_end`"""
        self._progress: _Progress | None = None
        self._steps = LoopSteps()
        self._rng: dict[str, Any] | None = None  # to be set before the first batch after a restore
        self._phase = ExitStack()  # in it while a validation runs
        self._adds_loss = False  # whether anything uses the loss
        self._loss: Any = 0.0  # of the step that is trained, added up over its batches
        self._batches = 0
        self._newest_loss: Any = None  # of a step; that of one whose batches the module skips, by returning None

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.fast_dev_run:
            return
        _require_alone(trainer, self)
        # Before the others: a resume does again what they do when a batch begins. Lightning goes through the list now.
        trainer.callbacks = [self, *(one for one in trainer.callbacks if one is not self)]
        self._progress = progress = _Progress(trainer, _ordered_loader(trainer))
        state = {
            "model": pl_module,
            **adapters_entry(pl_module),
            "optimizers": list(trainer.optimizers),
            "schedulers": [one.scheduler for one in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin,
            "trainer": progress,
        }
        if trainer.datamodule is not None:
            state["datamodule"] = trainer.datamodule
        own = {"trainer": _PARTS} | ({"precision": ()} if trainer.precision_plugin.state_dict() else {})
        options = with_own_entries(self._options, own)
        self.checkpointer = Checkpointer(self.path, state, **options)
        with restoring(options, own):
            found = self.checkpointer.restore()
        report_fit(trainer, found, self.path)
        self._steps.restored(found.step)
        self._rng = read_rng() if found.generation is not None else None
        # What a module returns that optimizes by itself need not be a loss.
        self._adds_loss = wants_loss(self._options) and pl_module.automatic_optimization
        iter(
            trainer.fit_loop._data_fetcher
        )  # begin again: the iteration of setup_data has the position before the restore

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._keep_signals(trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._keep_signals(trainer)

    def _keep_signals(self, trainer: Any) -> None:
        """With `preemption`, remove Lightning's own handlers of signals, which it has put before those of the run: at
        SIGTERM they end the training without the last save, and with exit code 0."""
        if self.checkpointer is not None and self._options.get("preemption") is not None:
            trainer._signal_connector.teardown()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if self._progress is not None:
            self._progress.loader.order.set_epoch(trainer.current_epoch)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.checkpointer is None or self._progress is None:
            return
        self._progress.begin_batch()
        if self._rng is not None:
            load_rng(self._rng)
            self._rng = None
        self._step(self.checkpointer, trainer.global_step)

    def _step(self, checkpointer: Checkpointer, n: int) -> None:
        """Call `Checkpointer.step`, once for each step; not before there is a loss, if it is wanted."""
        if not self._steps.is_new(n):
            return
        metrics = self._metrics()
        if metrics or not self._adds_loss:
            self._steps.step(checkpointer, n, metrics)
        else:
            self._steps.note(n, metrics)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._adds_loss and isinstance(loss, torch.Tensor):
            self._loss, self._batches = self._loss + loss.detach().mean(), self._batches + 1

    def _metrics(self) -> dict[str, Any]:
        """The metrics of the step that was trained."""
        loss, batches = self._loss, self._batches
        self._loss, self._batches = 0.0, 0
        if batches:
            self._newest_loss = loss / batches
        return {} if self._newest_loss is None else {LOSS: self._newest_loss}

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if self._progress is not None:
            self._progress.end_epoch()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self.checkpointer is not None:  # `lastgood run` would take a long one for a hang
            # A name of its own: how long a few batches take says nothing about a whole validation.
            name = "sanity check" if trainer.sanity_checking else "validate"
            self._phase.enter_context(self.checkpointer.phase(name))

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._phase.close()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self.checkpointer is not None:
            self._step(self.checkpointer, trainer.global_step)  # a Sentinel looks at the last one too
            self._steps.save_last(self.checkpointer, trainer.global_step)
        self._close(None)  # before the strategy moves the module to another device

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._close(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._close(exception)

    def _close(self, error: BaseException | None) -> None:
        self._phase.close()
        checkpointer, self.checkpointer, self._progress = self.checkpointer, None, None
        self._adds_loss, self._loss, self._batches, self._newest_loss = False, 0.0, 0, None
        if checkpointer is not None:
            checkpointer.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


class _Progress:
    """The progress of a Lightning trainer and of its loops, and the state of its callbacks and metrics."""

    def __init__(self, trainer: Any, loader: OrderedLoader) -> None:
        self._trainer, self.loader = trainer, loader
        self._shape = {"batches_per_epoch": len(loader), "processes": trainer.world_size}
        self._accumulation = trainer.accumulate_grad_batches  # as given; a callback may change it
        self._at_batch: dict[str, Any] | None = None  # state of the loops at the save, to be set when the batch begins
        self._accumulated = 0  # batches a step at the save, if that was in the middle of an epoch
        self._cut = ""  # which epoch the training had ended in the middle of, if it had
        self._means = Means()

    # ---- at the events ---------------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """A batch begins. At the first one after a restore into the middle of an epoch, set the counters again."""
        if self._cut:
            reporting.warning(f"{self._cut}: it is not continued, and the next epoch begins")
            self._cut = ""
        if self._at_batch is not None:
            set_counters(self._trainer.fit_loop, self._at_batch)
            forget_restart(self._trainer.fit_loop)
            self._at_batch = None
            self._begin_epoch_again()
        self._means.add(self._trainer.fit_loop.epoch_loop._results)

    def _begin_epoch_again(self) -> None:
        """Call the hooks `on_train_epoch_start`, which Lightning leaves out when it restarts in the middle of an epoch.

        What they change of the restored state is put back: it was saved after they had changed it.
        """
        trainer = self._trainer
        kept = Kept(trainer, list(self._torchmetrics().values())) if _has_epoch_hook(trainer) else None
        call._call_callback_hooks(trainer, EPOCH_HOOK)
        call._call_lightning_module_hook(trainer, EPOCH_HOOK)
        if kept is not None:
            kept.put_back()
        if self._accumulated:
            trainer.accumulate_grad_batches = self._accumulated

    def end_epoch(self) -> None:
        self._means.add(self._trainer.fit_loop.epoch_loop._results)
        self._means.end_epoch()

    # ---- the state -------------------------------------------------------------------------------------------

    def _sizes(self) -> dict[str, int]:
        return self.loader.sizes | {"accumulate_grad_batches": self._accumulation}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        epochs, progress = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
        in_epoch, completed = epochs.started > epochs.processed, progress.current.completed
        connector = trainer._logger_connector
        return {
            "shape": self._shape,
            "sizes": self._sizes(),
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "loops": {**trainer.fit_loop.state_dict(), "state_dict": {}},
            "in_epoch": in_epoch,
            "cut_after": 0 if in_epoch or progress.is_last_batch else completed,
            "order": {
                "seed": self.loader.order.seed,
                "epoch": trainer.current_epoch,
                "batches": completed if in_epoch else 0,
            },
            "should_stop": trainer.should_stop,
            "timed_out": is_out_of_time(trainer),
            "logged": {name: dict(getattr(connector, name)) for name in _LOGGED},
            "means": self._means.read(trainer.fit_loop.epoch_loop._results),
            "torchmetrics": {name: read_metric(one) for name, one in self._torchmetrics().items()},
            "checkpoint": _read_checkpoint(trainer),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        trainer, now = self._trainer, self._shape
        changed = [f"{name} {was} -> {now[name]}" for name, was in saved["shape"].items() if was != now[name]]
        require(
            not changed,
            f"the run was saved with other batches per epoch or processes ({', '.join(changed)})",
            "Use the same batch size, dataset and number of processes, or a new run.",
        )
        if saved["order"]["batches"]:  # in the middle of an epoch
            require_same_sizes(saved.get("sizes", {}), self._sizes())
            self._accumulated = saved.get("accumulate_grad_batches", 0)
        _load_checkpoint(trainer, saved["checkpoint"], copy.deepcopy(saved["loops"]))
        in_time = saved.get("timed_out", False) and not is_out_of_time(trainer)  # max_time was raised
        trainer.should_stop = saved["should_stop"] and not in_time
        for name, values in saved["logged"].items():
            getattr(trainer._logger_connector, name).update(values)
        for name, metric in self._torchmetrics().items():
            write_metric(metric, saved["torchmetrics"].get(name, {}))
        self._means.load(saved["means"])
        if cut_after := saved.get("cut_after", 0):
            all_batches = saved["shape"]["batches_per_epoch"]
            self._cut = f"the training had ended an epoch after {cut_after} of its {all_batches} batches"
        self.loader.load_state_dict(saved["order"])
        self._load_loops(saved["loops"], saved["in_epoch"])

    def _load_loops(self, loops: dict[str, Any], in_epoch: bool) -> None:
        fit_loop = self._trainer.fit_loop
        last = loops["epoch_loop.batch_progress"]["is_last_batch"]
        # It was saved at the beginning of a batch and is about that one. Were it true, the restart would take the epoch
        # as finished; `begin_batch` sets it again.
        loops["epoch_loop.batch_progress"]["is_last_batch"] = False
        fit_loop.load_state_dict(loops)
        if in_epoch:
            loops["epoch_loop.batch_progress"]["is_last_batch"] = last
            self._at_batch = loops
        else:
            forget_restart(fit_loop)

    def _torchmetrics(self) -> dict[str, Metric]:
        modules = self._trainer.lightning_module.named_modules()
        return {name: one for name, one in modules if isinstance(one, Metric)}


_PARTS = ("shape", "loops", "in_epoch", "order", "should_stop", "logged", "means", "torchmetrics", "checkpoint")
"""parts of a _Progress, without which it cannot be restored"""
_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""attributes of a trainer's logger connector: the newest value of everything that was logged"""


def _ordered_loader(trainer: Any) -> OrderedLoader:
    """Let Lightning prepare its training loader, and replace it by an OrderedLoader. Raises Refused for several."""
    fit_loop = trainer.fit_loop
    fit_loop.setup_data()
    combined = fit_loop._combined_loader
    require(
        combined is not None and len(combined.flattened) == 1,
        "there is not exactly one training loader",
        "Join the datasets into one, in one DataLoader.",
    )
    loader = OrderedLoader(combined.flattened[0], order_seed())
    combined.flattened = [loader]
    return loader


def _require_alone(trainer: Any, callback: LastgoodCallback) -> None:
    found = [one for one in trainer.callbacks if isinstance(one, LastgoodCallback)]
    require(len(found) == 1, f"the trainer has {len(found)} LastgoodCallbacks", "Give it one.")
    if trainer.ckpt_path:
        require_one_restore(callback.path, f"ckpt_path={trainer.ckpt_path!r}")
    require(
        not trainer.reload_dataloaders_every_n_epochs,
        "reload_dataloaders_every_n_epochs makes a new training loader in the middle of the run",
        "Leave it out.",
    )
    strategy = type(trainer.strategy).__name__
    require(strategy in _STRATEGIES, f"the strategy is a {strategy}", f"Use one of {', '.join(_STRATEGIES)}.")


# ---- entries of hooks and callbacks ---------------------------------------------------------------------------


def _own_entries(trainer: Any) -> dict[str, Any]:
    """What is stored of a checkpoint of Lightning whether or not a hook reads it."""
    states = {one.state_key: one.state_dict() for one in trainer.callbacks}
    return {
        "epoch": trainer.current_epoch,
        "global_step": trainer.global_step,
        "callbacks": {key: state for key, state in states.items() if state},
    }


def _standard_entries(trainer: Any) -> dict[str, Any]:
    """What hooks find in a checkpoint of Lightning. Its tensors are those of the live state: nothing is copied."""
    module = trainer.lightning_module
    entries = {
        **_own_entries(trainer),
        "pytorch-lightning_version": lightning_version,
        "state_dict": module.state_dict(),
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "optimizer_states": [one.state_dict() for one in trainer.optimizers],
        "lr_schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
    }
    for one in (module, trainer.datamodule):
        if one is not None and one.hparams:
            entries[one.CHECKPOINT_HYPER_PARAMS_KEY] = dict(one.hparams)
    return entries


def _has_epoch_hook(trainer: Any) -> bool:
    """Whether a hook may change the state that was restored when it is called once more."""
    ours = (LastgoodCallback, ProgressBar)
    hooks = [(one, Callback) for one in trainer.callbacks if not isinstance(one, ours)]
    return _overrides(EPOCH_HOOK, [*hooks, (trainer.lightning_module, LightningModule)])


def _overrides(hook: str, owners: list[tuple[Any, Any]]) -> bool:
    return any(getattr(getattr(one, hook), "__func__", None) is not getattr(kind, hook) for one, kind in owners)


def _has_save_hook(trainer: Any) -> bool:
    """Whether the module or a callback has an `on_save_checkpoint` of its own. The entries for it take a while."""
    hooks = [(one, Callback) for one in trainer.callbacks] + [(trainer.lightning_module, LightningModule)]
    return _overrides("on_save_checkpoint", hooks)


def _read_checkpoint(trainer: Any) -> dict[str, Any]:
    """The state of the callbacks, and the entries that hooks add to a Lightning checkpoint, or replace."""
    module = trainer.lightning_module
    standard = _standard_entries(trainer) if _has_save_hook(trainer) else _own_entries(trainer)
    checkpoint = dict(standard)
    for one in trainer.callbacks:
        one.on_save_checkpoint(trainer, module, checkpoint)
    module.on_save_checkpoint(checkpoint)
    added = {
        key: value
        for key, value in checkpoint.items()
        if key not in standard or (key in _REPLACEABLE and value is not standard[key])
    }
    counters = {key: standard[key] for key in _COUNTERS}
    return {"callbacks": standard["callbacks"], "added": added, "counters": counters}


def _load_checkpoint(trainer: Any, saved: dict[str, Any], loops: dict[str, Any]) -> None:
    """Call the hooks with the entries of the save, `loops` among them, and load the callbacks."""
    module = trainer.lightning_module
    restored = {"callbacks": saved["callbacks"], "loops": {"fit_loop": loops}, **saved.get("counters", {})}
    checkpoint = {**_standard_entries(trainer), **restored, **saved["added"]}
    for one in trainer.callbacks:
        one.on_load_checkpoint(trainer, module, checkpoint)
        if one.state_key in saved["callbacks"]:
            one.load_state_dict(saved["callbacks"][one.state_key])
    module.on_load_checkpoint(checkpoint)


_REPLACEABLE = ("state_dict", "optimizer_states", "lr_schedulers")
"""entries of a checkpoint of which the one is stored that a hook has put there"""
_COUNTERS = ("epoch", "global_step")
"""entries of a checkpoint that are stored for its hooks: when they load it, the loops are not restored yet"""

"""Checkpoints for `transformers.Trainer`: a callback that saves, and a mixin that resumes.

    class MyTrainer(LastgoodTrainerMixin, transformers.Trainer): ...

    MyTrainer(model, arguments, callbacks=[LastgoodCallback("runs/bert", every_steps=50)], ...).train()

A step is saved when the next step begins, so that its logging, its evaluation and the end of its epoch are part of the
state; the last step is saved when training ends. A callback cannot make the Trainer start in the middle of an epoch, so
the mixin does it: it prepares model, optimizer and data before the Trainer computes where to start, restores, and
returns the restored position to the Trainer, which starts there.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

from .. import reporting
from ..extras import needed
from ..loop.checkpointer import Checkpointer
from ..state.adapters import adapters_entry
from ..state.objects import load_rng, read_rng
from ..units import shortened
from .options import (
    LOSS,
    LoopSteps,
    checkpointer_options,
    report_start,
    require,
    require_one_restore,
    require_path,
    require_same_sizes,
    restoring,
    wants_loss,
    with_own_entries,
)
from .order import OrderedLoader, order_seed

with needed("transformers", "lastgood.integrations.transformers"):
    from accelerate.data_loader import DataLoaderShard
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

_PROGRESS = (
    "epoch",
    "global_step",
    "num_input_tokens_seen",
    "total_flos",
    "log_history",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
"""fields of a TrainerState that training changes; the other fields follow from the arguments of this run"""
_OWN_ENTRIES = {"trainer": ("shape", "state", "callbacks", "current_flos", "seed", "loop"), "scaler": ()}
"""entries of the state that every save has, whatever `include` names, and their parts"""


class LastgoodCallback(TrainerCallback):
    """Saves the complete training state of a `LastgoodTrainerMixin` trainer, and restores it when `train()` is called.

    `path`: the directory of the run. `every_steps`: optimizer steps between two saves (default None: as `cadence`
    defines). `options`: further keyword arguments of `lastgood.Checkpointer`, such as `retention`, `preemption` or
    `staging`.

    The state consists of weights, optimizer, schedule, loss scale, random number generators, TrainerState, callbacks
    that are `ExportableState`, the running loss, and the position in the data; and of parameters that the optimizer
    trains beside the model, in modules that are attributes of the Trainer: as in the loss of sentence-transformers.

    The loss of each step, as `Trainer.training_step` returns it, is its metric "loss" where `sentinel=Sentinel()`, a
    `retention=Keep(best=("loss", "min", 3))`, `lastgood run --records` or `lastgood replay` uses it; of several
    processes the best is chosen by that of rank 0.

    `train()` raises Refused if something else saves or restores the same state: a second LastgoodCallback, a
    `save_strategy` that stores optimizer state, or `resume_from_checkpoint` when the run holds a generation. It also
    raises Refused in a `hyperparameter_search()`, for `auto_find_batch_size`, `ignore_data_skip`,
    `enable_jit_checkpoint`, DeepSpeed, an IterableDataset, and loaders that accelerate does not prepare.
    """

    def __init__(self, path: str | os.PathLike[str], every_steps: int | None = None, **options: Any) -> None:
        self.path = require_path(path)
        self._options = checkpointer_options(every_steps, options)
        self.checkpointer: Checkpointer | None = None
        """open while `train()` runs"""
        self._steps = LoopSteps()
        self._rng: dict[str, Any] | None = None  # to be set before the first step after a restore
        self._progress: _Progress | None = None
        self._adds_loss = False  # whether anything uses the loss
        self._loss: Any = None  # of the step that is trained, added up over its batches; None: of none yet

    @property
    def resumed(self) -> bool:
        """Whether the current `train()` continues a generation of the run."""
        return self._progress is not None and self._progress.loaded

    # ---- called by the mixin -------------------------------------------------------------------------------

    def restore(self, trainer: Any, loader: Any, steps_per_epoch: int, lifetime: ExitStack) -> int:
        """Open the run until `lifetime` ends, and restore it into the prepared trainer. Returns the step, or 0."""
        require(
            type(loader) is DataLoaderShard,
            f"the training data loader is a {type(loader).__qualname__}",
            "Use a dataset with __getitem__ in a DataLoader that accelerate prepares.",
        )
        loader.base_dataloader = OrderedLoader(loader.base_dataloader, order_seed())
        self._progress = _Progress(trainer, loader.base_dataloader, steps_per_epoch)
        state = {
            "model": trainer.model,
            **adapters_entry(trainer.model),
            "optimizer": getattr(trainer.optimizer, "optimizer", trainer.optimizer),
            "scheduler": trainer.lr_scheduler,
            "trainer": self._progress,
        }
        if trainer.accelerator.scaler is not None:
            state["scaler"] = trainer.accelerator.scaler
        own = {name: parts for name, parts in _OWN_ENTRIES.items() if name in state}
        options = with_own_entries(self._options, own)
        self.checkpointer = lifetime.enter_context(Checkpointer(self.path, state, **options))
        lifetime.callback(self._detach)
        with restoring(options, own):
            found = self.checkpointer.restore()
        if trainer.is_world_process_zero():
            has_ended = found.step >= trainer.state.max_steps
            report_start(found, self.path, has_ended=has_ended, was_stopped=self._progress.stopped)
        self._steps.restored(found.step)
        self._rng = read_rng() if self.resumed else None
        self._adds_loss = wants_loss(self._options)
        return found.step

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around what makes no steps while `train()` runs; see `Checkpointer.phase`."""
        return nullcontext() if self.checkpointer is None else self.checkpointer.phase(name)

    def note_loss(self, loss: Any) -> None:
        """Add the loss of a batch, which the Trainer has divided by the number of batches in a step."""
        if self._adds_loss:
            loss = loss.detach().mean()  # it may have a dimension of length 1
            self._loss = loss if self._loss is None else self._loss + loss

    def _metrics(self) -> dict[str, Any]:
        """The metrics of the step that was trained."""
        loss, self._loss = self._loss, None
        return {} if loss is None else {LOSS: loss}

    def save_last(self, step: int) -> None:
        """Save the state after the last step, if it is not saved yet."""
        if self.checkpointer is not None:
            self._step(self.checkpointer, step)  # a Sentinel looks at the last one too
            self._steps.save_last(self.checkpointer, step)

    def _step(self, checkpointer: Checkpointer, n: int) -> None:
        """Call `Checkpointer.step`, once for each step."""
        if self._steps.is_new(n):
            self._steps.step(checkpointer, n, self._metrics())

    def _detach(self) -> None:
        self.checkpointer = self._progress = self._rng = self._loss = None
        self._adds_loss = False

    # ---- events --------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        require(
            self._progress is not None,
            "LastgoodCallback is in a Trainer that cannot resume in the middle of an epoch",
            "Use `class MyTrainer(LastgoodTrainerMixin, Trainer)`, with the mixin before the Trainer.",
        )
        assert self._progress is not None
        self._progress.apply_to_loop(control)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._rng is not None:
            load_rng(self._rng)
            self._rng = None
        if self.checkpointer is not None:
            self._step(self.checkpointer, state.global_step)


class LastgoodTrainerMixin:
    """A base class that goes before `Trainer`, so that `train()` continues the run of its LastgoodCallback.

    Without a LastgoodCallback the Trainer behaves as without the mixin.
    """

    _lastgood: LastgoodCallback | None = None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """`Trainer.train`, continued from the newest good generation of the run; see LastgoodCallback."""
        self._lastgood = _only_callback(self)
        if self._lastgood is not None and resume_from_checkpoint:
            require_one_restore(self._lastgood.path, f"resume_from_checkpoint={resume_from_checkpoint!r}")
        require(
            self._lastgood is None or trial is None,
            "hyperparameter_search() trains several models, and each would go on where the one before has ended",
            "Search without LastgoodCallback (trainer.remove_callback), and train with it what the search has found.",
        )
        # What other callbacks do at the beginning of a step must not be in the save: a resume does it again.
        self.callback_handler.callbacks.sort(key=lambda one: one is not self._lastgood)  # type: ignore[attr-defined]
        with ExitStack() as self._lifetime:
            return super().train(resume_from_checkpoint, trial, *args, **kwargs)  # type: ignore[misc]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(*args, **kwargs)  # type: ignore[misc]
        if self._lastgood is not None:
            self._lastgood.note_loss(loss)
        return loss

    # `lastgood run` would take a long evaluation, or a slow place for the exported model, for a hang.

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("evaluate"):
            return super().evaluate(*args, **kwargs)  # type: ignore[misc]

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._phase("predict"):
            return super().predict(*args, **kwargs)  # type: ignore[misc]

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with self._phase("save_model"):
            super().save_model(*args, **kwargs)  # type: ignore[misc]

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self._lastgood is None else self._lastgood.phase(name)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        values = super().set_initial_training_values(args, dataloader)  # type: ignore[misc]
        self._train_loader = dataloader
        return values

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        """Where to start: (completed epochs, completed batches of the next epoch)."""
        start: tuple[int, int] = super()._init_training_state(  # type: ignore[misc]
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self._lastgood is None:
            return start
        prepare = super()._prepare_for_training  # type: ignore[misc]
        self._prepared = prepare(max_steps, self._train_loader, resume_from_checkpoint)
        step = self._lastgood.restore(self, self._prepared[1], num_update_steps_per_epoch, self._lifetime)
        if not self._lastgood.resumed:
            return start
        epochs, steps = divmod(step, num_update_steps_per_epoch)
        return epochs, steps * self.args.gradient_accumulation_steps  # type: ignore[attr-defined]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if self._lastgood is None:
            return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]
        return self.__dict__.pop("_prepared")

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        trainer: Any = self
        if self._lastgood is None:
            return super()._run_epoch(epoch=epoch, **kwargs)  # type: ignore[misc]
        # The restored state was saved after a callback had stopped it, or after the last step, in mid-epoch.
        if trainer.control.should_training_stop or trainer.state.global_step >= trainer.state.max_steps:
            return None
        if self._lastgood.resumed:  # any true value makes the Trainer skip batches; `_load_rng_state` ignores this one
            kwargs["resume_from_checkpoint"] = self._lastgood.checkpointer
        super()._run_epoch(epoch=epoch, **kwargs)  # type: ignore[misc]
        if trainer.control.should_training_stop or epoch + 1 == trainer.state.num_train_epochs:
            self._lastgood.save_last(trainer.state.global_step)
        return None

    def _load_rng_state(self, checkpoint: Any) -> None:
        if not isinstance(checkpoint, Checkpointer):
            super()._load_rng_state(checkpoint)  # type: ignore[misc]


class _Progress:
    """The progress of a Trainer, and the state of its callbacks."""

    def __init__(self, trainer: Any, loader: OrderedLoader, steps_per_epoch: int) -> None:
        self._trainer, self._loader = trainer, loader
        self._shape = {
            "steps_per_epoch": steps_per_epoch,
            "gradient_accumulation_steps": trainer.args.gradient_accumulation_steps,
            "processes": trainer.args.world_size,
        }
        self.trained_beside = _trained_beside(trainer)
        """parameters beside the model that are saved too; `state.forgotten.unstored` reads this"""
        self._in_loop = False  # whether the Trainer has set the attributes that `_read_loop` reads
        self._loop: dict[str, Any] = {}
        self.loaded = False

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        state = dataclasses.asdict(trainer.state)
        # guard: trained-loss-is-saved
        beside = {name: one.detach() for name, one in self.trained_beside.items()}
        return {
            "shape": self._shape,
            "sizes": self._loader.sizes,
            "state": {name: state[name] for name in _PROGRESS},
            "callbacks": [(type(one).__name__, one.state()["attributes"]) for one in self._exportable()],
            "current_flos": trainer.current_flos,
            "seed": self._loader.order.seed,
            "loop": self._read_loop() if self._in_loop else {},
            "beside": beside,
        }

    @property
    def stopped(self) -> bool:
        """Whether a callback had stopped the restored training before its last step."""
        return bool(self._loop.get("stopped"))

    def _read_loop(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "running_loss": trainer._tr_loss.item(),
            "last_logged": trainer._globalstep_last_logged,
            "stopped": trainer.control.should_training_stop and trainer.state.global_step < trainer.state.max_steps,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        changed = [
            f"{name} {was} -> {self._shape[name]}" for name, was in saved["shape"].items() if was != self._shape[name]
        ]
        require(
            not changed,
            f"the run was saved with other steps per epoch or processes ({', '.join(changed)})",
            "Use the same batch size, dataset, gradient accumulation and number of processes, or a new run.",
        )
        if saved["state"]["global_step"] % self._shape["steps_per_epoch"]:  # in the middle of an epoch
            require_same_sizes(saved.get("sizes", {}), self._loader.sizes)
        trainer = self._trainer
        for name, value in saved["state"].items():
            setattr(trainer.state, name, value)
        self._load_callbacks(saved["callbacks"])
        self._load_beside(saved.get("beside", {}))
        trainer.current_flos = saved["current_flos"]
        self._loader.order.seed = saved["seed"]
        self._loop = saved["loop"]
        self.loaded = True

    def _load_beside(self, saved: dict[str, torch.Tensor]) -> None:
        """Restore the parameters that are trained beside the model. An earlier version has saved none."""
        names = [name for name, one in self.trained_beside.items() if name in saved and one.shape == saved[name].shape]
        if lacking := [name for name in self.trained_beside if name not in names]:
            reporting.threat(
                f"the save lacks {shortened(lacking, 3)} in this shape, which the optimizer trains beside the "
                "model: it begins anew"
            )
        with torch.no_grad():
            for name in names:
                self.trained_beside[name].copy_(saved[name])

    def _load_callbacks(self, saved: list[Any]) -> None:
        """Restore callbacks by class, several of one class in list order. Report saved ones without a counterpart."""
        live = self._exportable()
        for kind, attributes in saved:
            one = next((one for one in live if type(one).__name__ == kind), None)
            if one is None:
                reporting.warning(f"the run holds the state of a callback {kind}, which this Trainer does not have")
            else:
                live.remove(one)
                vars(one).update(attributes)

    def apply_to_loop(self, control: Any) -> None:
        """Set the values that the Trainer resets between its preparation and its first step."""
        self._in_loop = True
        if self.loaded:
            trainer, loop = self._trainer, self._loop
            trainer._tr_loss.fill_(loop["running_loss"])
            # The Trainer adds the running loss to this sum. Without the part of earlier calls, `train_loss` is the mean
            # over the steps of this call only.
            trainer._total_loss_scalar = -loop["running_loss"]
            trainer._globalstep_last_logged = loop["last_logged"]
            control.should_training_stop = self.stopped

    def _exportable(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


def _trained_beside(trainer: Any) -> dict[str, nn.Parameter]:
    """The parameters, by name, that the optimizer of a Trainer trains and its model does not have, of modules that are
    attributes of the Trainer, or in mappings that are. Such a module may have the model inside, too."""
    own = set(map(id, trainer.model.parameters()))
    trained = {id(one) for group in trainer.optimizer.param_groups for one in group["params"]} - own
    found = dict[str, nn.Parameter]()
    for name, one in vars(trainer).items():
        for key, module in one.items() if isinstance(one, Mapping) else [("", one)]:
            if isinstance(module, nn.Module) and name != "model_wrapped":
                parameters = module.named_parameters(f"{name}.{key}" if key else name)
                found |= {full: part for full, part in parameters if id(part) in trained and part.requires_grad}
    return found


def _only_callback(trainer: Any) -> LastgoodCallback | None:
    """The trainer's LastgoodCallback, None if it has none. Raises Refused if something else conflicts with it."""
    found = [one for one in trainer.callback_handler.callbacks if isinstance(one, LastgoodCallback)]
    if not found:
        return None
    args = trainer.args
    require(len(found) == 1, f"the trainer has {len(found)} LastgoodCallbacks", "Give it one.")
    require(
        args.save_strategy == "no" or args.save_only_model,
        f"save_strategy={args.save_strategy.value!r} saves optimizer and progress too, beside LastgoodCallback",
        'Set save_strategy="no", or save_only_model=True to keep folders of the model alone.',
    )
    for name in ("auto_find_batch_size", "ignore_data_skip"):
        require(not getattr(args, name), f"{name}=True changes which samples belong to a step", "Leave it out.")
    require(
        not getattr(args, "enable_jit_checkpoint", False),  # not in every version of transformers
        "enable_jit_checkpoint=True stops the training at SIGTERM, and it would stay stopped when it is started again",
        "Leave it out, and give LastgoodCallback preemption=lastgood.Preemption().",
    )
    require(not trainer.is_deepspeed_enabled, "DeepSpeed keeps optimizer state of its own", "Use DDP or FSDP2.")
    return found[0]

"""Parts of a Lightning training that its integration reads and sets by their attributes: loops, what was logged,
torchmetrics, and what hooks change of the state that a restore has set."""

from __future__ import annotations

import copy
from typing import Any

import torch

from .. import reporting
from ..loop.load import Restored
from .options import report_start

EPOCH_HOOK = "on_train_epoch_start"

# ---- Lightning's loops -----------------------------------------------------------------------------------------


def set_counters(loop: Any, saved: dict[str, Any], prefix: str = "") -> None:
    """Set the progress counters of a loop and of the loops inside of it."""
    loop._load_from_state_dict(saved, prefix)
    for name, inner in _inner_loops(loop).items():
        set_counters(inner, saved, f"{prefix}{name}.")


def forget_restart(loop: Any) -> None:
    """Clear the flags of a restart in a loop and in the loops inside of it."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    loop.reset_restart_stage()
    for inner in _inner_loops(loop).values():
        forget_restart(inner)


def report_fit(trainer: Any, found: Restored, path: str) -> None:
    """Report after which step `fit` goes on with what was restored from the run at `path`."""
    loop = trainer.fit_loop
    limits = (loop.epoch_loop.global_step, loop.max_steps), (loop.epoch_progress.current.processed, loop.max_epochs)
    has_ended = any(limit is not None and 0 <= limit <= made for made, limit in limits)
    was_stopped = trainer.should_stop and loop._can_stop_early  # not before min_epochs and min_steps
    if trainer.is_global_zero:
        report_start(found, path, has_ended=has_ended, was_stopped=was_stopped)


def is_out_of_time(trainer: Any) -> bool:
    """Whether the training has lasted for its `max_time`, the lives before included."""
    left = [one.time_remaining() for one in trainer.callbacks if hasattr(one, "time_remaining")]  # Timer
    return any(seconds is not None and seconds <= 0 for seconds in left)


def _inner_loops(loop: Any) -> dict[str, Any]:
    return {name: one for name, one in vars(loop).items() if hasattr(one, "_load_from_state_dict")}


# ---- what was logged -------------------------------------------------------------------------------------------


class Means:
    """What was logged in an epoch before a restore, as Lightning reduces it over the epoch.

    `results`: of Lightning's loop, as the arguments of that name.
    """

    def __init__(self) -> None:
        self._saved: dict[str, dict[str, Any]] = {}

    def load(self, saved: dict[str, dict[str, Any]]) -> None:
        self._saved = dict(saved)

    def read(self, results: Any) -> dict[str, dict[str, Any]]:
        """What a save has to hold: of both before the restore and after it."""
        means = dict(self._saved)
        for key, one in results.items():
            if one.is_tensor and one.meta.on_epoch and not one.has_reset:
                samples = int(one.cumulated_batch_size) if one.meta.is_mean_reduction else 0
                means[key] = {"value": one.value.clone(), "samples": samples}
        return means

    def add(self, results: Any) -> None:
        """Combine what was logged before the restore with what was logged after it, where both exist."""
        for key in [key for key in self._saved if key in results]:
            saved, metric = self._saved.pop(key), results[key]
            if key.startswith(f"{EPOCH_HOOK}."):  # logged once an epoch: after the restore by the hook, once more
                for name, empty in metric._defaults.items():
                    setattr(metric, name, empty.clone().to(metric.value.device))
            if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
                metric.value = metric.meta.reduce_fx(saved["value"].to(metric.value.device), metric.value)
            else:
                metric.value = metric.value + saved["value"].to(metric.value.device)
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = metric.cumulated_batch_size + int(saved["samples"])

    def end_epoch(self) -> None:
        if self._saved:
            names = ", ".join(sorted(self._saved))
            reporting.warning(f"logged before the restore but not after it, so not in the means of this epoch: {names}")
            self._saved = {}


# ---- torchmetrics ----------------------------------------------------------------------------------------------


def read_metric(metric: Any) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    return {"states": states, "updates": metric._update_count}


def write_metric(metric: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.get("states", {}).items():
        setattr(metric, name, value)
    metric._update_count = saved.get("updates", 0)


# ---- hooks that are called after a restore ---------------------------------------------------------------------


class Kept:
    """Copies of what a restore has set of a trainer, and a hook may change: the tensors of the module, the
    hyperparameters of the optimizers, schedules, and torchmetrics."""

    def __init__(self, trainer: Any, metrics: list[Any]) -> None:
        self._module = trainer.lightning_module
        self._tensors = {name: one.detach().to("cpu", copy=True) for name, one in self._live().items()}
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._groups = [(group, _copied({key: group[key] for key in group if key != "params"})) for group in groups]
        schedules = [one.scheduler for one in trainer.lr_scheduler_configs]
        self._schedules = [(one, _copied(one.state_dict())) for one in schedules]
        self._metrics = [(one, _copied(read_metric(one))) for one in metrics]

    def put_back(self) -> None:
        """Set all of it again."""
        live = self._live()
        for name, kept in self._tensors.items():
            if name in live and not torch.equal(live[name].detach().cpu(), kept):
                with torch.no_grad():
                    live[name].copy_(kept)
        for group, kept in self._groups:
            group.update(kept)
        for schedule, kept in self._schedules:
            schedule.load_state_dict(kept)
        for metric, kept in self._metrics:
            write_metric(metric, kept)

    def _live(self) -> dict[str, torch.Tensor]:
        state = torch.nn.Module.state_dict(self._module, keep_vars=True)  # a module's own one may take no arguments
        return {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}


def _copied(part: Any) -> Any:
    """A deep copy; of a tensor with a history too, as of an average that is being computed."""
    if isinstance(part, torch.Tensor):
        return part.detach().clone()
    if isinstance(part, dict):
        return {key: _copied(one) for key, one in part.items()}
    return [_copied(one) for one in part] if type(part) is list else copy.deepcopy(part)

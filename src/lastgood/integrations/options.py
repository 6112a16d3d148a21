"""What all integrations share: the options of their Checkpointer, checks of arguments and of other checkpoints, and the
steps of a loop that their Checkpointer has received."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .. import reporting
from ..errors import NotARun, Refused, StateMismatch
from ..loop.checkpointer import Checkpointer
from ..loop.load import Restored
from ..loop.opened import open_run
from ..loop.options import near_option, option_names
from ..policy.cadence import Every
from ..run import job_logs, paths, replay_request
from ..state.patterns import matches

LOSS = "loss"
"""the metric that integrations give with each step, if anything uses it (`wants_loss`)"""


def checkpointer_options(every_steps: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The keyword arguments for a Checkpointer. Raises Refused for one that it does not have, and names it; also for
    `every_steps` beside `cadence`.

    `every_steps`: optimizer steps between two saves; None leaves the cadence to `options` and its default.
    """
    known = option_names()
    for name in options:
        near = near_option(name, ["every_steps"])
        todo = f"Did you mean {near}?" if near else f"The arguments are every_steps, {', '.join(known)}."
        require(name in known, f"there is no argument {name}", todo)
    if every_steps is None:
        return dict(options)
    require("cadence" not in options, "every_steps and cadence both define when to save", "Give one of them.")
    return {**options, "cadence": Every(steps=every_steps)}


def with_own_entries(options: Mapping[str, Any], own: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """The options, with an `include` that has the integration's own entries too. Without them a restart would train
    all steps once more, on the weights that are trained already.

    `own`: name of each of these entries -> the names of its parts. Raises Refused for a pattern of `exclude` that
    leaves out an entry, or a part of it.
    """
    include, exclude = options.get("include", ()), options.get("exclude", ())
    if isinstance(include, str) or isinstance(exclude, str):
        return dict(options)  # the Checkpointer refuses it
    for pattern in exclude:
        found = [one for one, parts in own.items() if matches(pattern, [one, *(f"{one}.{part}" for part in parts)])]
        require(
            not found,
            f"exclude=[{pattern!r}] leaves out {', '.join(found)}, from which this integration continues a training",
            'Name in exclude what it is meant for, with the entry: "model.embedding.*".',
        )
    return {**options, "include": list(dict.fromkeys([*include, *own]))} if include else dict(options)


@contextmanager
def restoring(options: Mapping[str, Any], own: Collection[str]) -> Iterator[None]:
    """Around a restore. Raises Refused for a generation that was saved with an `include` without the entries `own`.

    `options`: as `with_own_entries` returns them.
    """
    try:
        yield
    except StateMismatch as error:
        lacking = [name for name in error.missing if name in own]
        if not options.get("include") or not lacking:
            raise
        raise Refused(
            f"the generation has no {', '.join(lacking)}, from which this integration continues a training: it was "
            "saved with include or exclude by an earlier version, or without the integration",
            safe="Nothing was loaded.",
            todo='Begin a new run at another path. lastgood.load(path, {"model": model}, include=[...]) reads its '
            "weights.",
        ) from error


def report_start(found: Restored, path: str, *, has_ended: bool, was_stopped: bool) -> None:
    """Report after which step a training goes on: where a framework begins it, no call of restore() shows that. Without
    a report, the next fold of a cross-validation at the same path seems to be trained, and has the weights of the fold
    before, which was trained on the samples of this one's validation.

    `has_ended`: nothing of the training is left. `was_stopped`: a callback had stopped it, for good.
    """
    if found.generation is None:
        return
    if was_stopped:
        reporting.warning("a callback had stopped this training when it was saved: it is not continued")
    elif has_ended:  # guard: ended-training-reported
        reporting.warning(
            f"the training at {path} has ended with step {found.step}, and nothing is trained. Another training, such "
            "as the next fold of a cross-validation, needs a path of its own."
        )
    else:
        reporting.info(f"the training at {path} goes on after step {found.step}")


def wants_loss(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether anything uses the loss of each step: a Sentinel, `Keep(best=)` of the run or of a tier, the logs of
    `lastgood run --records`, or `lastgood replay`. Otherwise no step has to add it up, and no save to wait for it.

    `options`: as `checkpointer_options` returns them.
    """
    keeps = [options.get("retention"), *(getattr(one, "retention", None) for one in options.get("tiers") or ())]
    best = [getattr(one, "best", None) for one in keeps]
    if options.get("sentinel") is not None or any(one is not None and one[0] == LOSS for one in best):
        return True
    return bool(environ.get(job_logs.VARIABLE) or environ.get(replay_request.VARIABLE))


def require_path(path: str | os.PathLike[str]) -> str:
    """The path of the run as text. Raises Refused for a path that a Checkpointer refuses."""
    paths.parsed(path)
    return os.fspath(path)


def require_one_restore(path: str, other: str) -> None:
    """Raise Refused if the run at `path` holds a generation, because both it and `other` would be restored.

    `other`: text of the argument that names another checkpoint.
    """
    try:
        newest = max((one.step for one in open_run(path).generations()), default=None)
    except NotARun:
        newest = None
    require(
        newest is None,
        f"{other} would be loaded, and the run at {path}, which holds step {newest}, would be restored too",
        f"Remove {other}, or give a new path to start a new run from that checkpoint.",
    )


def require(holds: bool, what: str, todo: str) -> None:
    """Raise Refused with the texts `what` and `todo` unless `holds`."""
    if not holds:
        raise Refused(what, safe="Nothing was trained or loaded.", todo=todo)


def require_same_sizes(saved: Mapping[str, int], now: Mapping[str, int]) -> None:
    """Raise Refused if a run that was saved in the middle of an epoch would go on with other sizes: name -> size.

    `saved`: a version that did not save a size lacks it, and that is not compared.
    """
    changed = [f"{name} {was} -> {now[name]}" for name, was in saved.items() if name in now and now[name] != was]
    require(
        not changed,
        f"the run was saved in the middle of an epoch, of which samples would be trained twice, or never, with other "
        f"sizes ({', '.join(changed)})",
        "Use the same dataset, batch size, accumulation and number of processes until this epoch has ended: "
        "torch.utils.data.Subset(dataset, range(n)) keeps the length n of a dataset that has grown.",
    )


class LoopSteps:
    """The steps of a framework's loop that a Checkpointer has received, and which of them are saved."""

    def __init__(self) -> None:
        self.restored(0)

    def restored(self, step: int) -> None:
        """The loop goes on after this step."""
        self._newest = self._saved = step
        self._metrics: dict[str, Any] = {}

    def is_new(self, n: int) -> bool:
        """Whether step `n` was not noted yet."""
        return n > self._newest

    def note(self, n: int, metrics: dict[str, Any]) -> None:
        """Note a new step, and its metrics, for the last save."""
        self._newest, self._metrics = n, metrics

    def step(self, checkpointer: Checkpointer, n: int, metrics: dict[str, Any]) -> None:
        """Note a new step, and call `Checkpointer.step` for it."""
        self.note(n, metrics)
        if checkpointer.step(n, metrics=metrics) is not None:
            self._saved = n

    def save_last(self, checkpointer: Checkpointer, n: int) -> None:
        """Save the newest step, if it is not saved yet."""
        if n > self._saved:
            checkpointer.save(n, metrics=self._metrics)
            self._saved = n

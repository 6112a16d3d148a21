"""A training script under `lastgood replay`: its Checkpointer opens a copy of the run, saves each step, and ends early.

The command line decides all of it, and hands it over in the environment (run/replay_request.py). The script does not
change.
"""

from __future__ import annotations

import os
from dataclasses import replace

from ..errors import Refused
from ..policy.cadence import Every
from ..policy.retention import Keep
from ..run import paths
from ..run.pipeline import Pipeline
from ..run.replay_request import Replay, from_environment
from ..run.save_handle import Save
from .options import Options

STEPS_KEPT = 1_000_000
"""all of them: what is compared must not be deleted"""


def copy_of(replay: Replay, path: str | os.PathLike[str]) -> str:
    """What is opened in place of `path`. Raises Refused if it is another run: nothing may be written to that."""
    if paths.identity(path) != paths.identity(replay.of):
        raise Refused(
            f"{os.fspath(path)} was opened under `lastgood replay {replay.of}`, which replays one run",
            safe="Nothing was touched.",
            todo="Let the command open only this run.",
        )
    return replay.run


def refuse_save_once(path: str | os.PathLike[str]) -> None:
    """Raise Refused under `lastgood replay`: a save beside the Checkpointer would be made in a run of the user."""
    if from_environment() is not None:
        raise Refused(
            f"lastgood.save({os.fspath(path)!r}) under `lastgood replay`, which writes to no run",
            safe="Nothing was touched.",
            todo="Leave it out while LASTGOOD_REPLAY is set.",
        )


def adapted(options: Options) -> Options:
    """The options of the script with what matters in a replay only: every step is saved, in one place, and kept."""
    return replace(
        options,
        cadence=Every(steps=1),
        retention=Keep(last=STEPS_KEPT),
        tiers=(),
        parity=None,
        scrub=None,
        preemption=None,
        save_on_exit=False,
        tuning=replace(options.tuning, when_full="wait", overhead=None, mtbf=None, persist="direct"),
        ranks=replace(options.ranks, just_in_time_seconds=None),
    )


def after_step(replay: Replay | None, n: int, save: Save | None, pipeline: Pipeline) -> None:
    """Wait until step `n` is verified, so that no newer one takes its place. After the last one the process ends.
    Outside of a replay nothing is done."""
    if replay is None:
        return
    if save is not None:
        save.result()
    pipeline.wait()
    if n >= replay.until:
        raise SystemExit(0)

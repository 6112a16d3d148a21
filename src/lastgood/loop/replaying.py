"""A training script under `lastgood replay`: its Checkpointer opens a copy of the run, saves each step, and ends early.

The command line decides all of it, and hands it over in the environment. The script does not change.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from ..policy.cadence import Every
from ..policy.retention import Keep
from ..records import Record
from ..run.pipeline import Pipeline
from ..run.save_handle import Save
from .options import Options

VARIABLE = "LASTGOOD_REPLAY"
STEPS_KEPT = 1_000_000
"""all of them: what is compared must not be deleted"""


class Replay(Record, frozen=True, kw_only=True):
    """`run`: the directory that is opened in place of the script's own. `until`: the step after which it ends."""

    run: str
    until: int


def from_environment(environ: Mapping[str, str] = os.environ) -> Replay | None:
    """What this process is to replay; None: nothing."""
    text = environ.get(VARIABLE)
    return msgspec.json.decode(text, type=Replay) if text else None


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
        tuning=replace(options.tuning, when_full="wait", overhead=None),
    )


def after_step(replay: Replay, n: int, save: Save | None, pipeline: Pipeline) -> None:
    """Wait until step `n` is verified, so that no newer one takes its place. After the last one the process ends."""
    if save is not None:
        save.result()
    pipeline.wait()
    if n >= replay.until:
        raise SystemExit(0)

"""What `lastgood replay` asks of the training script that it starts, handed over in the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from ..records import Record

VARIABLE = "LASTGOOD_REPLAY"


class Replay(Record, frozen=True, kw_only=True):
    """`of`: the run that is replayed. `run`: the directory that is opened in its place. `until`: the step after which
    the process ends."""

    of: str
    run: str
    until: int


def from_environment(environ: Mapping[str, str] = os.environ) -> Replay | None:
    """What this process is to replay; None: nothing."""
    text = environ.get(VARIABLE)
    return msgspec.json.decode(text, type=Replay) if text else None

"""Helpers that several test files share: saves and loads without torch, continued runs, and captured reports."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import lastgood
from lastgood.engine.inline_executor import Inline
from lastgood.engine.write_file import filled
from lastgood.policy.retention import Keep
from lastgood.ports import Tier
from lastgood.reporting import LOGGER
from lastgood.run import access
from lastgood.run.content import Content
from lastgood.run.reader import RunReader
from lastgood.run.writer import RunWriter
from lastgood_lab.plain import State, load, save

__all__ = [
    "State",
    "continued",
    "digests",
    "filled",
    "flip",
    "load",
    "place",
    "reported",
    "reports",
    "save",
    "steps",
]


def continued(tier: Tier, keep: Keep) -> RunWriter:
    """A writer of the run in `tier` that continues the newest generation of its lineage, if any."""
    run = RunWriter(tier, Inline(), keep=keep)
    newest = next(iter(run.lineage()), None)
    run.begin(newest.id if newest else None)
    return run


def digests(path: str) -> dict[str, str]:
    """The SHA-256 of every tensor of the newest generation of a run, by its stored name."""
    run = lastgood.open(path)
    content = Content(run.tier, run.generation())
    return {name: hashlib.sha256(content.tensor(name)[1]).hexdigest() for name in content.names()}


def one_place(path: Path) -> RunReader:
    """One place of a run, without what only memory has."""
    return RunReader(access.for_reading(path))


def steps(path: Path) -> list[int]:
    """The steps of the generations in one place of a run, oldest first."""
    return [one.step for one in one_place(path).generations()]


def flip(path: Path, offset: int = -5) -> None:
    """Flip the lowest bit of one byte of a file."""
    with open(path, "r+b") as file:
        at = file.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 1]))


def place(sampler: lastgood.ResumableSampler) -> tuple[int, int]:
    """Epoch and step of a sampler, as in its saved state."""
    state = sampler.state_dict()
    return state["epoch"], state["cursor_step"]


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def reports(least: int = logging.INFO) -> Iterator[list[str]]:
    """Collect the texts that the package reports inside the block at the level `least` or above. The list is filled
    when the block ends."""
    kept, texts = _Kept(), list[str]()
    LOGGER.addHandler(kept)
    try:
        yield texts
    finally:
        LOGGER.removeHandler(kept)
        texts += [one.getMessage() for one in kept.records if one.levelno >= least]


@contextlib.contextmanager
def reported(match: str = "", least: int = logging.WARNING) -> Iterator[None]:
    """Fail unless the package reports a text that matches inside the block, at the level `least` or above."""
    with reports(least) as texts:
        yield
    assert any(re.search(match, one) for one in texts), f"{match!r} was not reported: {texts}"

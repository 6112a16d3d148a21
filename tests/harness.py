"""Torch-free saves and loads for tests, runs that go on, what was reported, and Debian packages that tests need."""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator

import lastgood
from lastgood.engine.inline_executor import Inline
from lastgood.policy.retention import Keep
from lastgood.ports import Tier
from lastgood.reporting import LOGGER
from lastgood.run.content import Content
from lastgood.run.writer import RunWriter
from lastgood_lab.plain import State, filled, load, save

__all__ = ["State", "continued", "digests", "filled", "install", "load", "reported", "reports", "save"]


def continued(tier: Tier, keep: Keep) -> RunWriter:
    """A writer of the run in `tier`, which goes on from the newest generation of its lineage, if there is one."""
    run = RunWriter(tier, Inline(), keep=keep)
    newest = next(iter(run.lineage()), None)
    run.begin(newest.id if newest else None)
    return run


def digests(path: str) -> dict[str, str]:
    """The SHA-256 of every tensor of the newest generation of a run, by its stored name."""
    run = lastgood.open(path)
    content = Content(run.tier, run.generation())
    return {name: hashlib.sha256(content.tensor(name)[1]).hexdigest() for name in content.names()}


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextlib.contextmanager
def reports(least: int = logging.INFO) -> Iterator[list[str]]:
    """The texts that the package reports inside, at the level `least` or above; complete when the block has ended."""
    kept, texts = _Kept(), list[str]()
    LOGGER.addHandler(kept)
    try:
        yield texts
    finally:
        LOGGER.removeHandler(kept)
        texts += [one.getMessage() for one in kept.records if one.levelno >= least]


@contextlib.contextmanager
def reported(match: str = "", least: int = logging.WARNING) -> Iterator[None]:
    """Fails unless something that matches is reported inside, at the level `least` or above."""
    with reports(least) as texts:
        yield
    assert any(re.search(match, one) for one in texts), f"{match!r} was not reported: {texts}"


def install(package: str) -> None:
    """Where root may. A test that still lacks it is skipped, and says so."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        command = ["apt-get", "-o", "DPkg::Lock::Timeout=120", "install", "-y", "-qq", "--no-install-recommends"]
        subprocess.run([*command, package], stdout=subprocess.DEVNULL, check=False)

"""The environment of a unit of the study: hardware, versions and commit. Recorded where it runs; measures nothing."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import msgspec

from .. import report
from ..provenance import commit


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """Where and with what a unit was run, for people."""

    system: str
    processor: str
    memory: str
    devices: str
    python: str
    torch: str
    commit: str


def here() -> Environment:
    """The environment of this process."""
    import torch

    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return Environment(
        system=f"{platform.system()} {platform.release()}",
        processor=f"{cpu[1] if cpu else platform.machine()}, {os.cpu_count()} cores",
        memory=f"{memory:.1f} GiB",
        devices=f"{report.accelerator()}, not used" if report.accelerator() else "none",
        python=platform.python_version(),
        torch=str(torch.__version__),
        commit=commit(),
    )

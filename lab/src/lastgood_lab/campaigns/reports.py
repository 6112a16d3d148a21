"""The reports of the campaigns: lab/reports/NAME.json and NAME.md. Runs nothing."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lastgood_lab.campaigns.checkout import checkout

REPORTS = checkout() / "lab/reports"
TORCH_FREE = ("io", "format", "storage", "engine", "policy", "coordination", "run")
PROVED = {
    "crash_model": TORCH_FREE,
    "dcp_torch_tests": ("convert", "ranks", "snapshot", "state", "run", "engine", "format"),
    "kills": ("",),
    "mutation": ("",),
    "optimizers": ("loop", "snapshot", "state", "run", "engine", "format"),
    "ranks": ("",),
    "syscalls": TORCH_FREE,
}
"""campaign -> the rooms of the package whose behaviour it shows ("" is the whole package)"""


def report(name: str, title: str, facts: dict[str, Any], tables: Iterable[str], tier: str = "directory") -> None:
    """lab/reports/NAME.json and NAME.md (of slots: NAME-slots), with date, machine, commit and command.

    `proved digest` is of the sources of PROVED: where it differs from today's, the report is of older code.
    """
    from lastgood_lab import provenance  # not at the top: the mutation run starts children that must import it afresh

    stem, title = (name, title) if tier == "directory" else (f"{name}-{tier}", f"{title}, {tier}")
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} x {cpu[1] if cpu else platform.machine()}, Linux {platform.release()}",
        "python": platform.python_version(),
        "commit": provenance.commit(),
        "proved_digest": provenance.digest(PROVED[name]),
        "command": f"python -m lastgood_lab.campaigns.{name} {' '.join(sys.argv[1:])}".strip(),
        **facts,
    }
    REPORTS.mkdir(exist_ok=True)
    (REPORTS / f"{stem}.json").write_text(json.dumps(facts, indent=1) + "\n")
    plain = {key.replace("_", " "): value for key, value in facts.items() if not isinstance(value, (list, dict))}
    short = "\n".join(f"- {key}: {value}" for key, value in plain.items())
    (REPORTS / f"{stem}.md").write_text(f"# {title}\n\n{short}\n" + "".join(f"\n{one}\n" for one in tables))

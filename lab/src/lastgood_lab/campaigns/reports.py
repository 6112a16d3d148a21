"""Writes the reports of the campaigns: lab/reports/NAME.json and NAME.md."""

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
    "false_alarms": ("supervisor", "policy", "loop", "io"),
    "kills": ("",),
    "memory_kills": ("",),
    "memory_soak": ("",),
    "mutation": ("",),
    "node_commit": (*TORCH_FREE, "agent"),
    "nodes": ("",),
    "optimizers": ("loop", "snapshot", "state", "run", "engine", "format"),
    "places_damage": ("",),
    "ranks": ("",),
    "recovery": ("",),
    "requests": TORCH_FREE,
    "syscalls": TORCH_FREE,
    "two_writers": TORCH_FREE,
    "wire_fuzz": ("wire",),
    "wire_fuzz_tls": ("wire",),
}
"""campaign -> the rooms of the package whose behaviour it tests ("" is the whole package)"""


def report(name: str, title: str, facts: dict[str, Any], tables: Iterable[str], tier: str = "directory") -> None:
    """Write lab/reports/NAME.json and NAME.md with date, machine, commit and command.

    For another tier than "directory" the names are NAME-TIER. `facts` go into both files, of which the page omits lists
    and mappings; `tables` are added to the page. `proved_digest` is the digest of the rooms in PROVED: where it differs
    from that of the present sources, the report is about older code.
    """
    from lastgood_lab import provenance  # imported late: children of mutation.py import lastgood from a copy

    if facts.get("trials") == 0:
        raise SystemExit("nothing was tried, so no report is written")
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

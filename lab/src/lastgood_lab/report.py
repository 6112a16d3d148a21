"""Writes the report of a benchmark as JSON, Markdown tables and figures, with the hardware, the date and the command.

The names of one report's files begin with the same stem, such as `interval-2026-11-21-2core`. The files contain no path
of the machine.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .provenance import commit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Progress = Callable[[str], None]
"""Called with each line of progress."""


@dataclass(frozen=True)
class Table:
    """A table of texts with a title, which may be empty."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [f"## {self.title}", ""] if self.title else []
        lines += [_row(self.head), "|" + "---|" * len(self.head), *map(_row, self.rows)]
        return "\n".join(lines)


@dataclass(frozen=True)
class Report:
    """The outcome of one benchmark.

    `about` is a paragraph below the title, `rows` are the measurements that are written as JSON, and `figures` maps the
    name of each figure to the function that draws it.
    """

    name: str
    title: str
    about: str
    tables: Sequence[Table]
    rows: Sequence[Mapping[str, Any]]
    notes: Sequence[str] = ()
    figures: Mapping[str, Callable[[], Figure]] = field(default_factory=dict)

    def markdown(self, command: str, today: str) -> str:
        parts = [f"# {self.title}", f"{today}, {machine()}, commit {commit()}; `{command}`. {self.about}"]
        parts += [table.markdown() for table in self.tables]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        return "\n\n".join(parts) + "\n"

    def write(self, out: Path, command: str, today: str) -> list[Path]:
        """Write the report's files into `out`; returns their paths."""
        out.mkdir(parents=True, exist_ok=True)
        stem = f"{self.name}-{today}-{hardware()}"
        text, data = out / f"{stem}.md", out / f"{stem}.json"
        text.write_text(self.markdown(command, today))
        record = {
            "bench": self.name,
            "date": today,
            "machine": machine(),
            "commit": commit(),
            "command": command,
            "rows": list(self.rows),
        }
        data.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        return [text, data, *self.draw(out, f"{stem}-")]

    def draw(self, out: Path, prefix: str = "") -> list[Path]:
        """Write the figures into `out`; returns their paths."""
        files: list[Path] = []
        if self.figures:
            from .figures import save

            for name, draw in self.figures.items():
                drawn = [out / f"{prefix}{name}.{kind}" for kind in ("png", "svg")]
                save(draw, *drawn)
                files += drawn
        return files


# ---- this machine --------------------------------------------------------------------------------------------


def hardware() -> str:
    """A name of this hardware for file names, such as `2core` or `16core-h100`."""
    parts = accelerator().lower().replace("nvidia", "").split()
    return "-".join([f"{os.cpu_count()}core", *(["".join(parts[:1])] if parts else [])])


def machine() -> str:
    """A description of this machine in one line."""
    import torch

    cores = f"{os.cpu_count()} cores {platform.machine()}"
    kernel = f"{platform.system()} {platform.release().split('-')[0]}"
    return ", ".join(part for part in (cores, accelerator(), kernel, f"torch {torch.__version__}") if part)


def accelerator() -> str:
    """The name of the first CUDA device; empty without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def today() -> str:
    return datetime.date.today().isoformat()


def command_line(argv: Sequence[str] | None = None) -> str:
    """The command line of this process, with only the last part of each path."""
    shown = [_last_part(argument) for argument in (sys.argv if argv is None else argv)]
    return " ".join(["lastgood", *shown[1:]])


def _last_part(argument: str) -> str:
    option, equals, value = argument.rpartition("=")
    return option + equals + (os.path.basename(value.rstrip("/")) if os.sep in value else value)


# ---- numbers as text -----------------------------------------------------------------------------------------


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """The median of the values and, if there are several, their range: "2.0 (1.0-3.0)"."""
    if not values:
        return "-"
    middle = format(statistics.median(values), form)
    return middle if len(values) == 1 else f"{middle} ({min(values):{form}}-{max(values):{form}})"


def percent(values: Sequence[float]) -> str:
    """Like `spread`, for shares in per cent: "1.0 % (-2.0 to 3.0)"."""
    if not values:
        return "-"
    middle = f"{100 * statistics.median(values):.1f} %"
    return middle if len(values) == 1 else f"{middle} ({100 * min(values):.1f} to {100 * max(values):.1f})"


def quantile(values: Sequence[float], share: float) -> float:
    """The quantile `share` of the values, interpolated linearly between neighbours, as NumPy does."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"

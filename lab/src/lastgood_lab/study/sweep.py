"""The study once for each choice of some fields of its size: interval of saves and saves in flight, as a rule.

    OUT/every=50,max_inflight=4/    the study of one cell, with all of its files; it goes on where it stopped
    OUT/analysis.md, sweep.csv      all cells side by side

Trains and measures nothing itself.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lastgood.errors import Refused

from .. import report
from ..report import Progress, Table
from . import matrix, tables
from . import study_figures as ecrl
from .matrix import Compared, Options
from .tables import NAMES, Mean, Triple
from .unit import VARIANTS, sized


class Cell(NamedTuple):
    """A cell, when it has been run. `gates`: as `tables.gates`."""

    options: Options
    rows: list[Compared]
    gates: dict[str, list[str]]


def cells(size: str, options: Options) -> list[Options]:
    """The options of each cell. `size`: as `sized` takes it, with several values for some fields, such as
    "scale=10,every=50:100,max_inflight=1:4". Raises Refused for what cannot be meant in any cell."""
    each = [one.partition("=") for one in filter(None, size.split(","))]
    swept = [name for name, _, values in each if ":" in values]
    found = []
    for numbers in itertools.product(*(values.split(":") for _, _, values in each)):
        fields = {name: f"{name}={number}" for (name, _, _), number in zip(each, numbers, strict=True)}
        of_cell = sized(",".join(fields.values()), options.cifar is not None)
        found.append(replace(options, out=options.out / ",".join(fields[name] for name in swept), size=of_cell))
        matrix.chosen(found[-1])
    if len({one.out for one in found}) != len(found):
        raise Refused(f"--size {size} has cells twice", safe="Nothing was run.", todo="Give each field and value once.")
    return found


def run(of_cells: Sequence[Options], progress: Progress, command: str) -> list[Cell]:
    """Run the study of each cell, as far as it is not completed, and write its files into its folder."""
    found = []
    for one in of_cells:
        progress(f"cell {one.out.name}")
        rows = matrix.run(one, progress)
        found.append(Cell(one, rows, tables.write(rows, one, command)))
    return found


def write(found: Sequence[Cell], options: Options, command: str) -> dict[str, list[str]]:
    """Write the files of the sweep into `options.out`. Returns the gates of all cells."""
    gates = dict[str, list[str]]()
    for cell in found:
        for gate, wrong in cell.gates.items():
            gates.setdefault(gate, []).extend(f"{cell.options.out.name} {one}" for one in wrong)
    lines = [line for cell in found for line in _lines(cell)]
    with (options.out / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*COLUMNS])
        writer.writeheader()
        writer.writerows({name: _plain(value) for name, value in line.items()} for line in lines)
    head = [*COLUMNS.values()]
    rows = [[_text(value) for value in line.values()] for line in lines]
    rows += [_published(variant) for variant in VARIANTS]
    units = sum(len(cell.rows) for cell in found)
    about = (
        f"{report.today()}, commit {tables.commits([row for cell in found for row in cell.rows])}; `{command}`. "
        f"{len(found)} cells, {units} units. Each cell has a folder with its own analysis.md, where its formulas, "
        "its environment and the load of the machine stand. ± is the half of a 95 % interval (Student's t) over seeds."
    )
    passed = [f"- {gate}: {'passed in all cells' if not wrong else '; '.join(wrong)}" for gate, wrong in gates.items()]
    parts = ["# The recovery study: a sweep", about, "## Gates\n\n" + "\n".join(passed)]
    parts.append(Table("Cells", head, rows).markdown())
    (options.out / "analysis.md").write_text("\n\n".join(parts) + "\n")
    return gates


COLUMNS = {
    "cell": "cell",
    "variant": "saves",
    "goodput": "goodput, steps/s",
    "gain_percent": "gain over blocking, %",
    "stall_seconds": "stall, s",
    "write_seconds": "write on the critical path, s",
    "replayed_steps": "steps trained again",
    "saves": "saves",
}
"""column of sweep.csv -> head of the table"""


def _lines(cell: Cell) -> list[Mapping[str, Any]]:
    """One line for each variant: means over the suites, with intervals over the seeds."""
    whole = tables.triples(cell.rows)

    def over(variant: str, value: Any) -> Mean:
        return tables.over(whole, lambda three: value(getattr(three, variant).found))

    def line(variant: str) -> dict[str, Any]:
        return {
            "cell": cell.options.out.name,
            "variant": NAMES[variant],
            "goodput": over(variant, lambda one: one.goodput),
            "gain_percent": tables.over(whole, _gain) if variant == "ovl" else "-",
            "stall_seconds": over(variant, lambda one: one.stall),
            "write_seconds": over(variant, lambda one: one.parts["write"]),
            "replayed_steps": over(variant, lambda one: one.replayed),
            "saves": over(variant, lambda one: one.saves),
        }

    return [line(variant) for variant in VARIANTS] if whole else []


def _published(variant: str) -> list[str]:
    """The row of one variant in ECRL's study, which had one cell: means over its suites."""
    gain = f"{ecrl.GAIN:.3f}" if variant == "ovl" else "-"
    means = [f"{of[variant]:.3f}" for of in (ecrl.GOODPUT, ecrl.STALL, ecrl.WRITE)]
    return ["ECRL: every=50,max_inflight=4", NAMES[variant], means[0], gain, *means[1:], "-", "-"]


def _gain(three: Triple) -> float:
    return three.gain


def _text(value: Mean | str) -> str:
    return value if isinstance(value, str) else value.text(".3f")


def _plain(value: Mean | str) -> str | float:
    return value if isinstance(value, str) else round(value.value, 4)

"""The tables, figures and files of the study, from its units. Measures nothing.

manifest.csv  summary.csv  detailed_table.csv  traces.csv  analysis.md  figure-*.png|svg       of all suites
SUITE/publishable.json                                                                         of one suite
"""

from __future__ import annotations

import csv
import json
import math
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from scipy import stats

from ..report import Table
from . import drawings
from . import study_figures as ecrl
from .conditions import CONDITIONS
from .environment import Environment
from .matrix import Compared, Options, largest
from .unit import STORAGES, VARIANTS, Size, Unit

PARTS = ("launch", "compute", "snapshot", "write", "sync", "recovery", "end")
TABLES = ("manifest.csv", "summary.csv", "detailed_table.csv", "traces.csv")
NAMES = {"ref": "reference", "blk": "blocking", "ovl": "overlapped"}


class Mean(NamedTuple):
    """A mean over seeds, with its 95 % interval; without one where there is one seed only."""

    value: float
    half: float

    def text(self, form: str = ".2f") -> str:
        return f"{self.value:{form}}" + ("" if math.isnan(self.half) else f" ± {self.half:{form.lstrip('+')}}")


def mean(values: Sequence[float]) -> Mean:
    """The mean of one value for each seed."""
    if len(values) < 2:
        return Mean(values[0] if values else math.nan, math.nan)
    quantile = float(stats.t.ppf(0.975, len(values) - 1))
    return Mean(statistics.fmean(values), quantile * statistics.stdev(values) / math.sqrt(len(values)))


class Triple(NamedTuple):
    """The three variants of a suite for one seed, all of which have reached the target."""

    ref: Compared
    blk: Compared
    ovl: Compared

    @property
    def unit(self) -> Unit:
        return self.ref.found.unit

    @property
    def gain(self) -> float:
        """Of overlapped over blocking, in per cent of goodput."""
        return 100 * (self.ovl.found.goodput / self.blk.found.goodput - 1)

    def drop(self, variant: str) -> float:
        one: Compared = getattr(self, variant)
        return 100 * (one.found.goodput / self.ref.found.goodput - 1)

    @property
    def stall_cut(self) -> float:
        return 100 * (1 - self.ovl.found.stall / self.blk.found.stall)

    @property
    def write_cut(self) -> float:
        return 100 * (1 - self.ovl.found.parts["write"] / self.blk.found.parts["write"])


def triples(rows: Sequence[Compared]) -> list[Triple]:
    """The complete ones."""
    by_name: dict[tuple[str, int], dict[str, Compared]] = {}
    for one in rows:
        if one.status != "failed":
            unit = one.found.unit
            by_name.setdefault((unit.suite, unit.seed), {})[unit.variant] = one
    return [Triple(**three) for three in by_name.values() if len(three) == len(VARIANTS)]


def gates(rows: Sequence[Compared], out: Path) -> dict[str, list[str]]:
    """Gate -> what is wrong; empty where it passes. Gate 3 is about the files, which are written before."""
    found: dict[str, list[str]] = {"target": [], "samples": [], "files": [], "records": [], "differences": []}
    for one in rows:
        name = f"{one.found.unit.suite} {one.found.unit.name}"
        for gate, wrong in (
            ("target", one.found.reached),
            ("samples", one.found.checked),
            ("records", one.found.agreed),
            ("differences", one.differs),
        ):
            found[gate] += [f"{name}: {wrong}"] if wrong else []
    names = [f"{suite}/publishable.json" for suite in {one.found.unit.suite for one in rows}]
    names += [*TABLES, *(f"figure-{name}.{kind}" for name in drawings.FIGURES for kind in drawings.KINDS)]
    found["files"] = [f"{name} is missing" for name in names if not (out / name).exists()]
    return found


def write(rows: Sequence[Compared], options: Options, command: str) -> dict[str, list[str]]:
    """Write all files. Returns the gates."""
    out, whole = options.out, triples(rows)
    _csv(out / "manifest.csv", [_manifest(one) for one in rows])
    _csv(out / "detailed_table.csv", [_detailed(one) for one in rows])
    _csv(out / "traces.csv", _traces(rows))
    _csv(out / "summary.csv", [_summary(suite, mine) for suite, mine in _by_suite(whole).items()])
    for suite in {one.found.unit.suite for one in rows}:
        mine = [one for one in rows if one.found.unit.suite == suite]
        record = {
            "suite": suite,
            "date": dates(mine),
            "environments": [msgspec.structs.asdict(one) for one in _environments(mine)],
            "command": command,
            "summary": _summary(suite, [one for one in whole if one.unit.suite == suite]),
            "units": [_detailed(one) for one in mine],
        }
        (out / suite / "publishable.json").write_text(json.dumps(record, indent=1) + "\n")
    drawings.write(whole, out)
    found = gates(rows, out)
    (out / "analysis.md").write_text(_analysis(rows, whole, found, options, command))
    return found


def _by_suite(whole: Sequence[Triple]) -> dict[str, list[Triple]]:
    found: dict[str, list[Triple]] = {}
    for one in whole:
        found.setdefault(one.unit.suite, []).append(one)
    return found


def _csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]) if rows else ["suite"])
        writer.writeheader()
        writer.writerows(rows)


def _manifest(one: Compared) -> dict[str, Any]:
    unit = one.found.unit
    return {"suite": unit.suite, "variant": unit.variant, "seed": unit.seed, "status": one.status}


def _detailed(one: Compared) -> dict[str, Any]:
    found = one.found
    return {
        **_manifest(one),
        "target": found.unit.target,
        "wall_seconds": round(found.wall, 4),
        "goodput": round(found.goodput, 4),
        "restarts": found.restarts,
        "replayed_steps": found.replayed,
        "lost_saves": found.lost,
        "saves": found.saves,
        "stall_seconds": round(found.stall, 4),
        **{f"{part}_seconds": round(found.parts.get(part, 0.0), 4) for part in PARTS},
        "mean_loss_difference": None if one.loss_difference is None else _number(one.loss_difference),
        "first_loss_difference": _number(one.first_difference),
        "checkpoints_compared": len(one.distances),
        "largest_l2": _number(largest(one.distances.values())),
        "buffers_differing": one.buffers,
        "gates": "; ".join(filter(None, (found.reached, found.checked, found.agreed, one.differs))) or "passed",
    }


def _traces(rows: Sequence[Compared]) -> list[dict[str, Any]]:
    """Of each step of each unit the loss, its difference from that of the reference, and the L2 distance of the
    parameters if it was saved."""
    references = {(one.found.unit.suite, one.found.unit.seed): one.found for one in rows if _is_reference(one)}
    found = list[dict[str, Any]]()
    for one in rows:
        unit, theirs = one.found.unit, references.get((one.found.unit.suite, one.found.unit.seed))
        if theirs is None or one.loss_difference is None:
            continue
        for step, (loss, its) in enumerate(zip(one.found.losses, theirs.losses, strict=True), 1):
            found.append(
                {
                    **{"suite": unit.suite, "variant": unit.variant, "seed": unit.seed, "step": step},
                    **{"loss": loss, "loss_difference": None if loss is None or its is None else loss - its},
                    **{"l2": one.distances.get(step, "")},
                }
            )
    return found


def _is_reference(one: Compared) -> bool:
    return one.found.unit.variant == VARIANTS[0]


def _summary(suite: str, mine: Sequence[Triple]) -> dict[str, Any]:
    """A suite: means over its seeds."""
    gain = mean([one.gain for one in mine])
    found: dict[str, Any] = {"suite": suite, "seeds": len(mine)}
    for variant in VARIANTS:
        rows: list[Compared] = [getattr(one, variant) for one in mine]
        found[f"{variant}_goodput"] = _rounded(mean([one.found.goodput for one in rows]).value)
        found[f"{variant}_stall_seconds"] = _rounded(mean([one.found.stall for one in rows]).value)
    return {
        **found,
        "gain_percent": _rounded(gain.value),
        "gain_half_interval": _rounded(gain.half),
        "stall_cut_percent": _rounded(mean([one.stall_cut for one in mine]).value),
        "write_cut_percent": _rounded(mean([one.write_cut for one in mine]).value),
        "largest_loss_difference": _largest([two.loss_difference for one in mine for two in one]),
        "largest_l2": _largest([value for one in mine for two in one for value in two.distances.values()]),
    }


def _largest(values: Sequence[float | None]) -> float | str | None:
    """None where there is no value."""
    known = [one for one in values if one is not None]
    return _number(largest(known)) if known else None


def _number(value: float) -> float | str:
    """A number for files, which have no NaN: JSON knows none."""
    return "NaN" if math.isnan(value) else value


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 4)


def _analysis(
    rows: Sequence[Compared], whole: Sequence[Triple], found: Mapping[str, list[str]], options: Options, command: str
) -> str:
    """The text of analysis.md."""
    size, seeds, rules = options.size, seeds_of_all(whole), CONDITIONS[options.condition]
    crash = "all saves have ended before a failure" if size.flushed and rules.flushes else "failures meet saves"
    compared = "losses, parameters and buffers are those of the reference, to the bit"
    if (near := rules.tolerance) is not None:
        compared = (
            f"losses differ by no more than {near.first:g} from those of the reference until {near.steps} steps after "
            f"the first failure, and by no more than {near.mean:g} on the mean of all steps: sums have another order "
            "on another number of ranks, so parameters are not judged; losses of both variants are equal to the bit"
        )
    device = f" Each step waits {size.device_ms} ms as for a device." if size.device_ms else ""
    about = (
        f"{dates(rows)}, commit {commits(rows)}; `{command}`. {len(rows)} units, "
        f"{len(whole)} complete suites and seeds ({seeds} seeds with all suites, of which means over suites are). "
        f"All numbers of steps are divided by {size.scale}: "
        f"{1600 // size.scale} steps with a save every {size.every // size.scale}; {crash}: "
        f"{rules.about}. Saved to {STORAGES[options.storage]}. Networks of width "
        f"{size.width} (full: 64), images of {size.side} x {size.side}, global batch {size.global_batch}, "
        f"{size.ranks} gloo ranks, max_inflight {size.max_inflight}.{device} "
        "± is the half of a 95 % interval (Student's t) over seeds. ECRL's figures are of its own hardware, one seed."
    )
    names = {"differences": f"differences ({compared})"}
    passed = [
        f"- {names.get(gate, gate)}: {'passed' if not wrong else '; '.join(wrong)}" for gate, wrong in found.items()
    ]
    parts = [
        "# The recovery study",
        about,
        _load(rows, size),
        "## Gates\n\n" + "\n".join(passed),
        FORMULAS,
        ARCHITECTURE,
    ]
    parts += [table.markdown() for table in [_environment(rows), *_tables(whole)]] if whole else []
    return "\n\n".join(parts) + "\n"


def _load(rows: Sequence[Compared], size: Size) -> str:
    """The load of the machine while the units ran, and whether other work has taken processors from the study."""
    loads = [one.found.load for one in rows if one.found.load is not None]
    ranks, cores = size.ranks, os.cpu_count() or 1
    if not loads:
        return "Load of the machine: not recorded."
    before, after = (max(one[at] for one in loads) for at in (0, 1))
    text = (
        f"Load of the machine, as the mean of a minute, at most: {before:.1f} when a command began, {after:.1f} at the "
        f"end of a unit; the study's own ranks are {ranks}, on {cores} cores."
    )
    other = max(before, after - ranks)
    if other >= 1 and other + ranks > cores:
        text += " The machine had other work: these times are no comparison with those of another machine or study."
    return text


FORMULAS = """## Formulas

    (5)  goodput   = committed logical steps / wall time; a step counts once
    (6)  wall time = launch + compute + snapshot + write + sync + recovery + end
    (7)  gain      = goodput of overlapped / goodput of blocking - 1, of the same seed

The numbers are those of ECRL's study. launch and end are not in its formula (6) of wall time.

snapshot: the loop is in the call that begins a save. write: it waits for a save to end, or for a place in flight.
sync: it waits before an update until the state is copied. recovery: from the last line of an attempt that failed until
the next one has trained its last step again, without the waits for saves in these steps."""

ARCHITECTURE = """## Figure 1: the parts

    lastgood run  -- Launch, Monitor, Recover, Terminate; supervisor.json, attempts in the run
      rank 0..3   -- DistributedDataParallel, ResumableSampler, Audit, Checkpointer; rank_*.jsonl
                       step -> snapshot -> [blocking: wait] -> next step
                                  `-> lanes (max_inflight) -> files -> commit by rank 0; checkpoint_rank0.jsonl"""


def _environments(rows: Sequence[Compared]) -> list[Environment]:
    """Those of the units; without those that were not recorded."""
    return list(dict.fromkeys(one.found.environment for one in rows if one.found.environment is not None))


def dates(rows: Sequence[Compared]) -> str:
    """On which the units were run: a day, or the first and the last one."""
    found = sorted({one.found.date for one in rows if one.found.date})
    return " to ".join(dict.fromkeys([found[0], found[-1]])) if found else "date not recorded"


def commits(rows: Sequence[Compared]) -> str:
    """Of the code that the units were run with."""
    return ", ".join(dict.fromkeys(one.commit for one in _environments(rows))) or "not recorded"


def _environment(rows: Sequence[Compared]) -> Table:
    """One column for each environment: a study may have gone on on another machine."""
    found = _environments(rows)
    names = {"system": "operating system", "processor": "processor", "memory": "memory", "devices": "devices"}
    lines = [
        [name, *(getattr(one, field) for one in found)]
        for field, name in {**names, "python": "Python", "torch": "torch", "commit": "commit"}.items()
    ]
    counts = [sum(one.found.environment == each for one in rows) for each in found]
    launch = dict.fromkeys(_launch(one.found.unit) for one in rows)
    lines.append(["launch", *("; ".join(launch) for _ in found)])
    return Table("Table 2: environment", ["what", *(f"of {count} units" for count in counts)], lines)


def _launch(unit: Unit) -> str:
    nodes = f" --nnodes {unit.nodes}, a command for each node" if unit.nodes else ""
    return f"lastgood run --nproc-per-node {unit.ranks_of_node}{nodes}, gloo"


def _tables(whole: Sequence[Triple]) -> list[Table]:
    return [_aggregate(whole), _decomposition(whole), _ranking(whole), *_slices(whole), _all(whole)]


def over(whole: Sequence[Triple], value: Any) -> Mean:
    """A mean over the suites, with its interval over the seeds. A seed that lacks a suite is left out: the mean of the
    others is one of other suites."""
    seeds: dict[int, list[float]] = {}
    for one in whole:
        seeds.setdefault(one.unit.seed, []).append(value(one))
    suites = len({one.unit.suite for one in whole})
    return mean([statistics.fmean(values) for values in seeds.values() if len(values) == suites])


def seeds_of_all(whole: Sequence[Triple]) -> int:
    """How many seeds have all suites, as `over` uses them."""
    suites = len({one.unit.suite for one in whole})
    return sum(count == suites for count in Counter(one.unit.seed for one in whole).values())


BESIDE = [f"{NAMES[one]}, {of}" for one in VARIANTS for of in ("here", "ECRL")]
"""the columns of a row of `_beside`"""


def _beside(
    whole: Sequence[Triple], name: str, value: Any, theirs: Mapping[str, float], form: str = ".2f"
) -> list[str]:
    """A row of means over the suites, each beside the study's own."""
    cells = [name]
    for variant in VARIANTS:
        published = theirs.get(variant)
        here = over(whole, lambda three, at=variant: value(getattr(three, at), three, at)).text(form)
        cells += [here, "-" if published is None else f"{published:g}"]
    return cells


def _aggregate(whole: Sequence[Triple]) -> Table:
    row = partial(_beside, whole)
    rows = [
        row("goodput, steps/s", lambda one, *_: one.found.goodput, ecrl.GOODPUT, ".3f"),
        row("against the reference, %", lambda _, three, at: three.drop(at), ecrl.DROP, "+.2f"),
        row("wall, s", lambda one, *_: one.found.wall, ecrl.WALL),
        row("restarts", lambda one, *_: one.found.restarts, ecrl.RESTARTS, "g"),
        row("steps trained again", lambda one, *_: one.found.replayed, {}, "g"),
        row("saves lost by failures", lambda one, *_: one.found.lost, {}, "g"),
        row("stall, s", lambda one, *_: one.found.stall, ecrl.STALL, ".3f"),
        row("write on the critical path, s", lambda one, *_: one.found.parts["write"], ecrl.WRITE, ".3f"),
        row("snapshot, s", lambda one, *_: one.found.parts["snapshot"], ecrl.SNAPSHOT, ".3f"),
        row("mean loss difference", lambda one, *_: one.loss_difference, ecrl.LOSS_DIFFERENCE, "g"),
        row("largest L2 of a checkpoint", lambda one, *_: largest(one.distances.values()), {}, "g"),
        row("buffers of ranks that differ", lambda one, *_: one.buffers, {}, "g"),
    ]
    cuts = [
        ("gain of overlapped, %", lambda one: one.gain, ecrl.GAIN, "+.2f"),
        ("stall less by, %", lambda one: one.stall_cut, ecrl.STALL_CUT, ".1f"),
        ("write less by, %", lambda one: one.write_cut, ecrl.WRITE_CUT, ".1f"),
    ]
    rows += [[name, *"----", over(whole, value).text(form), f"{theirs:g}"] for name, value, theirs, form in cuts]
    return Table("Table 5: means over the suites", ["", *BESIDE], rows)


def _decomposition(whole: Sequence[Triple]) -> Table:
    published = {"snapshot": ecrl.SNAPSHOT, "write": ecrl.WRITE}
    rows = [
        _beside(whole, part, lambda one, *_, at=part: one.found.parts[at], published.get(part, {}), ".3f")
        for part in PARTS
    ]
    rows.append(_beside(whole, "all", lambda one, *_: one.found.wall, ecrl.WALL, ".3f"))
    return Table("Wall time by parts, s", ["part", *BESIDE], rows)


def _ranking(whole: Sequence[Triple]) -> Table:
    gains = {suite: mean([one.gain for one in mine]) for suite, mine in _by_suite(whole).items()}
    order = sorted(gains, key=lambda suite: -gains[suite].value)
    rows = [[str(at), suite, gains[suite].text("+.2f")] for at, suite in enumerate(order, 1)]
    rows.append(["", "ECRL: least, most", f"{ecrl.LEAST_GAIN:+.2f}, {ecrl.MOST_GAIN:+.2f}"])
    return Table("Table 6: suites by the gain of overlapped saves, %", ["rank", "suite", "gain"], rows)


def _slices(whole: Sequence[Triple]) -> list[Table]:
    rows = []
    for what in ("dataset", "model", "schedule"):
        for value in sorted({getattr(one.unit, what) for one in whole}):
            mine = [one for one in whole if getattr(one.unit, what) == value]
            cells = [over(mine, lambda one: one.gain).text("+.2f"), over(mine, lambda one: one.stall_cut).text(".1f")]
            rows.append([what, value, *cells, over(mine, lambda one: one.ovl.loss_difference).text("g")])
    rows.append(["all", "ECRL", f"{ecrl.GAIN:+.2f}", f"{ecrl.STALL_CUT:.1f}", f"{ecrl.LOSS_DIFFERENCE['ovl']:g}"])
    head = ["by", "slice", "gain, %", "stall less by, %", "mean loss difference"]
    return [Table("Table 7: slices", head, rows)]


def _all(whole: Sequence[Triple]) -> Table:
    rows = []
    for suite, mine in _by_suite(whole).items():
        goodputs = [mean([getattr(one, at).found.goodput for one in mine]).text(".3f") for at in VARIANTS]
        cuts = [mean([one.gain for one in mine]).text("+.2f"), mean([one.stall_cut for one in mine]).text(".1f")]
        rows.append([suite, str(len(mine)), *goodputs, *cuts, mean([one.write_cut for one in mine]).text(".1f")])
    cuts = [f"{ecrl.GAIN:+.2f}", f"{ecrl.STALL_CUT:.1f}", f"{ecrl.WRITE_CUT:.1f}"]
    rows.append(["ECRL: mean of its suites", "1", *(f"{ecrl.GOODPUT[at]:.3f}" for at in VARIANTS), *cuts])
    head = ["suite", "seeds", *NAMES.values(), "gain, %", "stall less by, %", "write less by, %"]
    return Table("Table 8: all suites, goodput in steps/s", head, rows)

"""`lastgood plan`: size a job before it runs. The formulas are in policy/sizing.py, and in policy/interval.py that of
cadence="auto"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..policy import sizing
from ..policy.failures import Known
from ..policy.interval import IN_FLIGHT, Rule, longest_interval
from ..run import side_records
from ..supervisor import attempt_log
from ..units import size
from .answer import Answer
from .arguments import MOST_RANKS, Json, bytes_of, not_negative, positive
from .terminal import clean
from .texts import new_table, plural


def _seconds(text: str) -> Any:
    return typer.Option(metavar="SECONDS", parser=positive, help=text)


def _days(text: str) -> Any:
    return typer.Option(metavar="DAYS", parser=positive, help=text)


def _rate(text: str) -> Any:
    return typer.Option(metavar="SIZE", parser=bytes_of, help=text)


_PARAMETERS = typer.Option(metavar="COUNT", parser=positive, help="1e12.", show_default=False)
_PER_PARAMETER = typer.Option(metavar="BYTES", parser=positive, help="14: bf16 weights, fp32 master and two moments.")
_STATE = typer.Option(metavar="SIZE", parser=bytes_of, help="Instead of these two.", show_default=False)
_RESTORE = typer.Option(metavar="NAME=SIZE", help="Of a tier, bytes a second; several times.")
_OVERHEAD = typer.Option(metavar="FRACTION", parser=positive, help="By which saving may slow training, as in Tuning.")
_RESTART = typer.Option(metavar="SECONDS", parser=not_negative, help="R, from a failure until training goes on.")


def plan(
    parameters: Annotated[float | None, _PARAMETERS] = None,
    bytes_per_parameter: Annotated[float, _PER_PARAMETER] = 14.0,
    state_bytes: Annotated[int | None, _STATE] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="That share the state evenly (1, or as in RUN).")
    ] = None,
    copy_rate: Annotated[int | None, _rate("Bytes a second, each rank's snapshot.")] = None,
    write_rate: Annotated[int | None, _rate("Bytes a second, all ranks together.")] = None,
    restore_rate: Annotated[list[str], _RESTORE] = [],  # noqa: B006 - typer makes a list of its own for every call
    mtbf_seconds: Annotated[float | None, _seconds("M, of the whole job.")] = None,
    device_days: Annotated[float | None, _days("Mean days until one device fails.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=MOST_RANKS, help="How many of them (default: --ranks).")
    ] = None,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Its failures under `lastgood run` count too.")] = None,
    stall_seconds: Annotated[float | None, _seconds("C, instead of shard / copy rate.")] = None,
    write_seconds: Annotated[float | None, _seconds("Tw, instead of state / write rate.")] = None,
    in_flight: Annotated[int, typer.Option(min=1, max=MOST_RANKS, help="N.")] = IN_FLIGHT,
    overhead: Annotated[float | None, _OVERHEAD] = None,
    durable_within_seconds: Annotated[float | None, _seconds("As for the Checkpointer.")] = None,
    step_seconds: Annotated[float | None, _seconds("One step, no save.")] = None,
    restart_seconds: Annotated[float, _RESTART] = 0.0,
    minutes: Annotated[str, typer.Option(metavar="LIST", help="Intervals to weigh: 5,15,60.")] = "",
    run_days: Annotated[float | None, _days("Length of the run.")] = None,
    as_json: Json = False,
) -> Answer:
    """Size a job on paper: its state, a save, how often to save, what failures cost. Nothing is measured."""
    attempts = _attempts(run) if run else []
    ranks = ranks or (attempts[-1].ranks if attempts else 1)
    mtbf = mtbf_seconds or (sizing.mtbf_seconds(device_days, devices or ranks) if device_days else None)
    held = state_bytes or (sizing.state_bytes(parameters, bytes_per_parameter) if parameters else None)
    if mtbf is None and held is None and run is None:
        raise typer.BadParameter("give the state (--parameters or --state-bytes), failures (--mtbf-seconds), or both.")
    shard = held / ranks if held else None
    seen = attempt_log.failures(attempts, ranks, mtbf)
    facts = Facts(
        state_bytes=held,
        ranks=ranks,
        restore_rates=[_tier(one) for one in restore_rate],
        run=run,
        failures=seen,
        stall_seconds=stall_seconds or (shard / copy_rate if shard and copy_rate else None),
        write_seconds=write_seconds or (held / write_rate if held and write_rate else 0.0),
        in_flight=in_flight,
        overhead=overhead,
        longest_seconds=longest_interval(durable_within_seconds),
        step_seconds=step_seconds,
        restart_seconds=restart_seconds,
        intervals=[60 * positive(one) for one in minutes.split(",") if minutes],
        run_days=run_days,
    )
    data = sized(facts)
    if minutes and not data["intervals"]:
        raise typer.BadParameter(
            "--minutes needs M (--mtbf-seconds, --device-days, or failures in --run) and C (--stall-seconds, or "
            "--copy-rate and a state)."
        )
    return Answer(data, sized_view(data))


def _attempts(run: str) -> list[attempt_log.Attempt]:
    """The attempts that `lastgood run` has recorded in a run, oldest first."""
    side_records.of_run(run)  # raises what is wrong with the path
    with side_records.opened(run) as tier:
        return attempt_log.read(tier, run=run)


def _tier(text: str) -> tuple[str, int]:
    """The name and the bytes a second of NAME=SIZE. Raises BadParameter."""
    name, equals, rate = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"{text!r}: give NAME=SIZE, as in nvme=3GB.")
    return name, bytes_of(rate)


@dataclass(frozen=True)
class Facts:
    """What is known of a job; None for what is not."""

    state_bytes: float | None
    ranks: int
    restore_rates: Sequence[tuple[str, int]]
    """name of a tier, and the bytes a second at which it is read"""
    run: str | None
    """in which failures were looked for"""
    failures: Known
    """of the whole job, as expected and as seen"""
    stall_seconds: float | None
    """what a save takes from the training loop"""
    write_seconds: float
    """from the beginning of a save until it is durable; 0.0 if it is not known"""
    in_flight: int
    overhead: float | None
    """the fraction by which saving may slow training"""
    longest_seconds: float
    """a bound of the interval; infinite: there is none"""
    step_seconds: float | None
    restart_seconds: float
    intervals: Sequence[float]
    """seconds between two saves that are to be weighed"""
    run_days: float | None


def sized(facts: Facts) -> dict[str, Any]:
    """What follows from the facts; None for what needs a fact that is missing. Raises Refused."""
    state, stall, mtbf = facts.state_bytes, facts.stall_seconds, facts.failures.all.mean_seconds
    data: dict[str, Any] = {
        "state_bytes": state,
        "ranks": facts.ranks,
        "shard_bytes": state / facts.ranks if state else None,
        "stall_seconds": stall,
        "write_seconds": facts.write_seconds or None,
        "restore_seconds": {name: state / rate for name, rate in facts.restore_rates} if state else {},
        "mtbf_seconds": mtbf,
        "mtbf_expected_seconds": facts.failures.all.mtbf,
        "failures_seen": facts.failures.all.count if facts.run else None,
        "nodes_lost": facts.failures.of_nodes.count if facts.run else None,
        "observed_seconds": facts.failures.all.seconds if facts.run else None,
        "failures": facts.run_days * sizing.DAY_SECONDS / mtbf if facts.run_days and mtbf else None,
        "intervals": [],
    }
    if stall is None:
        return data
    bounds = facts.overhead, facts.longest_seconds
    auto = Rule(facts.failures.all, *bounds).interval(stall, facts.write_seconds, facts.in_flight)
    below = Rule(facts.failures.of_nodes, *bounds).interval(stall, facts.write_seconds, in_flight=1)
    data |= {
        "auto_seconds": auto.seconds,
        "auto_steps": auto.steps(facts.step_seconds) if facts.step_seconds else None,
        "auto_why": auto.why,
        "auto_below_seconds": below.seconds if facts.run else None,
    }
    if mtbf is None:
        return data
    job = sizing.Job(mtbf, stall, facts.write_seconds, facts.in_flight, facts.restart_seconds)
    data |= {
        "young_seconds": job.young,
        "daly_seconds": job.daly,
        "shortest_seconds": job.shortest,
        "best_seconds": job.best,
    }
    chosen = sorted({*facts.intervals, max(job.young, job.shortest), job.best, auto.seconds})
    data["intervals"] = [
        {
            "interval_seconds": one,
            "stalled": stall / one,
            "lost": job.wasted_first_order(one) - stall / one,
            "wasted_first_order": job.wasted_first_order(one),
            "useful": job.useful(one),
            "breaks_down": job.breaks_down(one),
            "too_short": one < job.shortest and one != auto.seconds,  # which has a floor of its own
        }
        for one in chosen
    ]
    return data


def sized_view(data: Mapping[str, Any]) -> RenderableType:
    facts = new_table("", "")
    facts.show_header = False
    for name, value in _facts(data):
        facts.add_row(name, value)
    parts: list[RenderableType] = [facts]
    if data["intervals"]:
        right = ("tau", "stalled", "lost", "wasted", "useful")
        rows = new_table(*right, "", right=right)
        for one in data["intervals"]:
            shares = [f"{100 * one[name]:.1f} %" for name in ("stalled", "lost", "wasted_first_order", "useful")]
            marks = ["~"] * one["breaks_down"] + ["!"] * one["too_short"]
            for mark in ("Young", "Daly", "best", "auto"):
                marks += [mark] * (one["interval_seconds"] == data[f"{mark.lower()}_seconds"])
            rows.add_row(_time(one["interval_seconds"]), *shares, " ".join(marks))
        parts += [Text(), rows, Text(), Text("wasted: to first order; useful: by the exact expectation")]
        if any(one["breaks_down"] for one in data["intervals"]):
            parts.append(Text("~ here the first order breaks down", style="yellow"))
        if any(one["too_short"] for one in data["intervals"]):
            parts.append(Text("! below Tw / N: saves queue up", style="yellow"))
    return Group(*parts)


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    if data["state_bytes"]:
        found += [
            ("state", size(data["state_bytes"])),
            (f"of each of {plural(data['ranks'], 'rank')}", size(data["shard_bytes"])),
        ]
    times = [
        ("a save stalls the loop, C", "stall_seconds"),
        ("until it is durable, Tw", "write_seconds"),
        ("mean time between failures, M", "mtbf_seconds"),
        ("interval by Young, sqrt(2 C M)", "young_seconds"),
        ("interval by Daly, higher order", "daly_seconds"),
        ("no shorter than Tw / N", "shortest_seconds"),
        ("best by the exact expectation", "best_seconds"),
    ]
    found += [(text, _time(data[name])) for text, name in times if data.get(name)]
    if data["failures_seen"] is not None:
        nodes = f" ({plural(data['nodes_lost'], 'lost node')})" if data["nodes_lost"] else ""
        seen = f"{data['failures_seen']}{nodes} in {_time(data['observed_seconds'])} that `lastgood run` has recorded"
        found.append(("failures seen", seen))
        if expected := data["mtbf_expected_seconds"]:
            found.append(("failures expected", f"one in {_time(expected)}"))
    found += [(f"to read it back from {clean(name)}", _time(one)) for name, one in data["restore_seconds"].items()]
    if data["failures"]:
        found.append(("failures to expect", f"{data['failures']:,.0f}"))
    if data.get("auto_seconds") is not None:
        steps = f", {plural(data['auto_steps'], 'step')}" if data["auto_steps"] else ""
        found.append(('cadence="auto" saves every', f"{_time(data['auto_seconds'])}{steps}: {data['auto_why']}"))
    if data.get("auto_below_seconds") is not None:
        found.append(("below memory with copies=1, for lost nodes only", _time(data["auto_below_seconds"])))
    return found


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return (
        f"{seconds:,.0f} s ({seconds / 60:.1f} min)" if seconds < 7200 else f"{seconds:,.0f} s ({seconds / 3600:.1f} h)"
    )

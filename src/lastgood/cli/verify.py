"""`lastgood verify`: read generations past the page cache and check every byte. Changes nothing, leaves no mark."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..engine import guard
from ..errors import Cancelled, Damaged, NotFinite
from ..limits import WORKERS
from ..policy import restore
from ..records import LAYERS, Finding, GenerationId, intact
from ..run import access, read_places
from ..run.kept import kept
from ..run.read_places import ReadPlaces
from ..run.watched import Watched
from ..units import size
from .answer import Answer
from .arguments import AnyStep, Json, Run
from .protection import unprotected
from .selection import find
from .sweep import damage
from .terminal import clean, progress
from .texts import id_of, named, newest_first, state_text

FINDINGS_SHOWN = 20


def verify(
    run: Run,
    step: AnyStep = None,
    every: Annotated[bool, typer.Option("--all", help="Every generation, abandoned ones too.")] = False,
    without: Annotated[
        list[str],
        typer.Option(metavar="LAYER", help=f"A layer that is left out: {', '.join(LAYERS)}.", show_default=False),
    ] = [],  # noqa: B006 - typer makes a list of its own for every call
    as_json: Json = False,
) -> Answer:
    """Read a generation past the page cache and check every byte. Changes nothing.

    Exit code 4 on damage, 8 where all is intact and something holds NaN or infinity that must not.

    Without STEP: what a restore would take, and what it would pass over (damaged, lost or not good).
    """
    if every and step is not None:
        raise typer.BadParameter("STEP and --all exclude each other.")
    if unknown := set(without) - set(LAYERS):
        raise typer.BadParameter(f"no layer {', '.join(sorted(unknown))}: there are {', '.join(LAYERS)}.")
    layers = [one for one in LAYERS if one not in without]
    if not layers:
        raise typer.BadParameter("--without every layer leaves nothing to check.")
    places = read_places.found(access.for_reading(run))
    rows = _read(places, _selected(places, step, every), layers, every)
    data = {
        "place": places.place,
        "good": all(one["good"] for one in rows),
        "intact": all(one["intact"] for one in rows),
        "layers": layers,
        "generations": rows,
    }
    code = 0 if data["good"] else NotFinite.exit_code if data["intact"] else Damaged.exit_code
    remarks = dict.fromkeys([places.remark(id_of(row)) for row in rows] or [places.remark(None)])
    return Answer(data, verified_view(data), code, note="\n".join(filter(None, remarks)))


class _Selection(NamedTuple):
    """What one call of `verify` answers for."""

    wanted: list[GenerationId]
    known_bad: dict[GenerationId, list[Finding]]
    """generations that are not read, because what is wrong with them is known"""


def _selected(places: ReadPlaces, step: str | None, every: bool) -> _Selection:
    survey = places.survey
    bad = {at: [guard.finding(error)] for at, error in survey.broken.items()}
    lost = Finding(kind="MissingBlob", what="its COMMIT is gone", layer="structure")
    bad |= {at: [lost] for at in restore.lineage(survey).lost}
    if every:
        return _Selection(newest_first(survey, {*survey.generations, *bad}), bad)
    if step is not None:
        return _Selection([find(survey, step)], bad)
    candidates, over = restore.choose(survey, None)
    restore.require_read(survey)
    wanted = [at for at, _ in over if not candidates or at.step >= candidates[0].step] + candidates[:1]
    marked = {at: survey.generations[at] for at in wanted if at in survey.generations and at not in candidates}
    bad |= {at: one.damaged or one.unfit for at, one in marked.items()}
    if not wanted:
        raise restore.no_such_step(restore.NOTHING_YET, survey, places.remark(None))
    return _Selection(wanted, bad)


def _read(places: ReadPlaces, selection: _Selection, layers: list[str], every: bool) -> list[dict[str, Any]]:
    survey, (wanted, bad) = places.survey, selection
    rows, lacking = list[dict[str, Any]](), unprotected(places.tier, places.here)

    def read(at: GenerationId) -> list[Finding]:
        with kept(places.tier_of(at), at) as tier:
            return damage(Watched(tier, count_bytes), survey.generations[at], workers, layers)

    total = sum(survey.generations[at].bytes for at in wanted if at not in bad)
    with progress("reading", total) as count_bytes, ThreadPoolExecutor(WORKERS) as workers:
        for at in wanted:
            begun = time.monotonic()
            try:
                findings = bad[at] if at in bad else read(at)
            except Cancelled:
                if not every or (at == wanted[-1] and not rows):  # guard: nothing-read-is-not-good
                    raise
                continue  # training has deleted it since it was listed
            read_bytes = 0 if at in bad else survey.generations[at].bytes
            rows.append(_row(at, findings, read_bytes, time.monotonic() - begun, lacking.get(at, "")))
    return rows


def _row(
    at: GenerationId, findings: list[Finding], read_bytes: int, seconds: float, unprotected: str
) -> dict[str, Any]:
    """One generation after its reading, as `--json` shows it."""
    names = ("layer", "kind", "what", "tensor", "blob", "offset", "chunk")
    rows = [{name: getattr(one, name) for name in names} for one in findings]
    return {
        **named(at),
        "good": not findings,
        "intact": intact(findings),
        "bytes": read_bytes,
        "seconds": round(seconds, 3),
        "findings": rows,
        "unprotected": unprotected,
    }


def verified_view(data: Mapping[str, Any]) -> RenderableType:
    lines: list[RenderableType] = []
    for row in data["generations"]:
        read = f"  {size(row['bytes'])} in {row['seconds']:.1f} s" if row["bytes"] else "  not read"
        state = state_text("good" if row["good"] else "not good" if row["intact"] else "damaged")
        lines.append(Text.assemble((f"step {row['step']}", "bold"), f" ({row['incarnation']})  ", state, read))
        lines += [Text(f"  {one['layer']}: {clean(one['what'])}") for one in row["findings"][:FINDINGS_SHOWN]]
        if len(row["findings"]) > FINDINGS_SHOWN:
            lines.append(Text(f"  and {len(row['findings']) - FINDINGS_SHOWN:,} more (--json has them all)"))
        lines += [Text(f"  it {row['unprotected']}", style="yellow")] if row["unprotected"] else []
    return Group(*lines) if lines else Text(restore.NOTHING_YET)

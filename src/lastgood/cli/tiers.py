"""`lastgood tiers`: which place of a run holds which generations. Reads no tensor."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from ..errors import LastgoodError, Refused, Unavailable
from ..format import commit
from ..policy import restore
from ..policy.places import merged
from ..ports import Tier
from ..run import access, copying, memory_place, paths, place_list
from ..run.left_behind import given_back, path_of
from ..units import size, span
from .answer import Answer
from .arguments import Json, Run
from .terminal import clean
from .texts import named, new_table, newest_first, plural, state_of, state_text


def tiers(
    run: Run,
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="PLACE...", help="Further places that the run does not name.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> Answer:
    """Which place of a run holds which generations, how old they are and how large. RUN: any of its places.

    Exit code 5 where a place cannot be read; the others are listed. Memory that was given back is no such place.
    """
    data = held(run, others or [])
    code = Unavailable.exit_code if any(one["error"] for one in data["places"]) else 0
    return Answer(data, held_view(data), code)


def held(run: str, others: list[str]) -> dict[str, Any]:
    """The places of a run with their generations.

    Raises Refused if one of `others` holds another run, and what opening `run` raises.
    """
    first = access.for_reading(run)
    listed = _listed(first)
    names = list(dict.fromkeys([*listed, first.place, *others]))
    surveys, errors, notes = {}, dict[str, str](), dict[str, str]()
    for name in names:
        if name not in others and (note := given_back(name)):
            notes[name] = note
            continue
        try:
            tier = first if name == first.place else access.for_reading(name)
            surveys[name] = commit.survey(tier)
        except LastgoodError as error:
            errors[name] = error.what
    of = copying.run_of(surveys[first.place]) if first.place in surveys else None
    for name, found in list(surveys.items()):
        if of is None or (other := copying.run_of(found)) in (None, of):
            continue
        what = f"{name} holds another run ({other}), not that of {first.place} ({of})"
        if name in others:
            raise Refused(what, safe="Nothing was touched.", todo="Give places of the same run.")
        errors[name] = what
        del surveys[name]
    whole = merged(list(surveys.values()))
    for name in _of_another_path(first.place, listed) & surveys.keys() - {*others}:
        notes[name] = f"{plural(len(surveys[name].generations), 'generation')}, which a start by this path does not see"
    seen = [one for name, one in surveys.items() if name not in notes]
    takes = next(iter(restore.choose(merged(seen), None).candidates), None) if seen else None
    now = time.time()
    rows = []
    for at in newest_first(whole, {*whole.generations, *whole.broken}):
        one = whole.generations.get(at)
        rows.append(
            {
                **named(at),
                "age_seconds": round(max(now - one.commit.created, 0.0), 1) if one else None,
                "bytes": one.bytes if one else None,
                "restores": at == takes,
                "states": {
                    name: state_of(found, at)[0]
                    for name, found in surveys.items()
                    if at in found.generations or at in found.broken
                },
            }
        )
    rows_of_places = [
        {
            "place": name,
            "generations": len(surveys[name].generations) if name in surveys else None,
            "bytes": sum(one.bytes for one in surveys[name].generations.values()) if name in surveys else None,
            "error": errors.get(name, ""),
            "note": notes.get(name, ""),
        }
        for name in names
    ]
    return {"run": whole.run, "places": rows_of_places, "restores": takes and named(takes), "generations": rows}


def _listed(tier: Tier) -> list[str]:
    """The places that the run of this one names, this one by its own name: the list may have it through a link."""
    found = place_list.listed(tier)
    for index, one in enumerate(found):
        with contextlib.suppress(LastgoodError):  # a damaged list
            if paths.identity(one) == paths.identity(tier.place):
                found[index] = tier.place
    return found


def _of_another_path(place: str, listed: list[str]) -> set[str]:
    """The memory among the `listed` places of a run that a start by the path of the run does not look at, because it
    belongs to an earlier path. `place`: the place that was asked for."""
    last = path_of(listed, place)
    if paths.in_memory(last):
        return set()
    return {one for one in listed if paths.in_memory(one) and one not in (place, memory_place.url_of(last))}


def held_view(data: Mapping[str, Any]) -> RenderableType:
    listed, lines = data["places"], list[RenderableType]()
    letters = {one["place"]: chr(ord("A") + index) for index, one in enumerate(listed)}
    for one in listed:
        text = one["error"] or one["note"] or f"{plural(one['generations'], 'generation')}, {size(one['bytes'])}"
        style = "red" if one["error"] else ""
        lines.append(Text(f"{letters[one['place']]}  {clean(one['place'])}: {clean(text)}", style=style))
    if not data["generations"]:
        return Group(*lines, Text(restore.NOTHING_YET))
    table = new_table("step", "incarnation", "age", "size", *letters.values(), right=("step", "age", "size"))
    for row in data["generations"]:
        age = "" if row["age_seconds"] is None else span(row["age_seconds"])
        cells = [state_text(row["states"].get(place, "")) for place in letters]
        table.add_row(str(row["step"]), row["incarnation"], age, size(row["bytes"] or 0), *cells)
    takes = data["restores"]
    end = f"a restore takes step {takes['step']} ({takes['incarnation']})" if takes else "NOTHING HERE CAN BE RESTORED"
    return Group(*lines, Text(), table, Text(), Text(end, style="bold"))

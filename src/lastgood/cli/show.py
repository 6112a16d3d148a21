"""What ls, show and verify say of a run, and the texts and tables that every command says it in. Reads no tensor.

Each pair `x` / `x_view` says the same twice, here and beside it; a view is made of the data only and prints nothing.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..errors import ManifestInvalid
from ..format import layout, values
from ..format.commit import Survey
from ..policy import restore
from ..ports import Tier
from ..records import Finding, GenerationId, intact
from ..run.content import Content
from ..units import size
from .protection import unprotected
from .terminal import clean

FINDINGS_SHOWN = 20
NOTHING_YET = "nothing has been committed in this run yet"
STYLES = {
    "verified": "green",
    "good": "green",
    "committed": "",
    "damaged": "bold red",
    "lost": "bold red",
    "not good": "bold red",
}
MEANINGS = {
    "committed": "durable, not yet read back",
    "not good": "intact, and holds NaN or infinity; never chosen by itself, restore(step=...) takes it",
    "abandoned": "left behind by a rewind; never chosen by itself, restore(step=...) takes it",
    "incomplete": "no COMMIT: a save that is under way, or one that did not end (`lastgood gc` clears it)",
    "deleting": "a deletion that did not end: it was interrupted, or a file cannot be removed (`lastgood gc`)",
}


# ---- texts -----------------------------------------------------------------------------------------------------


def when(seconds: float | None) -> str:
    try:
        return "" if seconds is None else datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, ValueError, OSError):
        return "?"


def natural(name: str) -> list[tuple[int, str]]:
    """Sorts h.2 before h.10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}{'es' if noun.endswith('s') else 's'}"


def named(at: GenerationId) -> dict[str, Any]:
    return {"step": at.step, "incarnation": at.incarnation}


def shape_text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "scalar"


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name in right)
    return table


def _state(state: str) -> Text:
    return Text(state.upper() if state in ("damaged", "lost") else state, style=STYLES.get(state, "yellow"))


# ---- ls --------------------------------------------------------------------------------------------------------


def newest_first(survey: Survey, those: Iterable[GenerationId]) -> list[GenerationId]:
    """By the order in which they came into being."""
    order = {one.id: one.order for one in survey.incarnations.values()}
    return sorted(those, key=lambda at: (order.get(at.incarnation, 0), at.step), reverse=True)


def state_of(survey: Survey, at: GenerationId) -> tuple[str, str]:
    """What a generation is, and why."""
    chain, lost = restore.lineage(survey)
    if at in survey.broken:
        return "damaged", str(survey.broken[at])
    if at in lost:
        return "lost", "its COMMIT is gone although nobody deleted it"
    if at in survey.incomplete or at in survey.going:
        return ("incomplete" if at in survey.incomplete else "deleting"), ""
    one = survey.generations[at]
    if one.damaged:
        return "damaged", restore.told(one.damaged)
    if one.unfit:
        return "not good", restore.told(one.unfit)
    if at not in chain:
        return "abandoned", ""
    return ("verified" if one.verified else "committed"), ""


def listing(tier: Tier, survey: Survey) -> dict[str, Any]:
    takes = next(iter(restore.choose(survey, None).candidates), None)
    hint = survey.pointer
    points = GenerationId(step=hint.step, incarnation=hint.incarnation) if hint else None
    known = {*survey.generations, *survey.broken, *survey.incomplete, *survey.going}
    lacking = unprotected(tier, survey)
    rows = []
    for at in newest_first(survey, known):
        (state, why), one = state_of(survey, at), survey.generations.get(at)
        rows.append(
            {
                **named(at),
                "state": state,
                "verified": one is not None and one.good,
                "created": one.commit.created if one else None,
                "bytes": one.bytes if one else weight(tier, at),
                "milestone": one is not None and one.commit.milestone,
                "metrics": one.commit.metrics if one else {},
                "lastgood": at == points,
                "restores": at == takes,
                "root": one.root if one else None,
                "why": why,
                "unprotected": lacking.get(at, ""),
            }
        )
    return {
        "place": tier.place,
        "run": survey.run,
        "lastgood": points and named(points),
        "restores": takes and named(takes),
        "generations": rows,
    }


def weight(tier: Tier, at: GenerationId) -> int:
    """Bytes of the files of a generation, whole or not."""
    return sum(length for length in tier.list(layout.folder(at)).values() if length is not None and length > 0)


def listing_view(data: Mapping[str, Any]) -> RenderableType:
    rows = data["generations"]
    if not rows:
        return Text(NOTHING_YET)
    table = new_table("", "step", "incarnation", "when", "size", "state", "notes", right=("step", "size"))
    below: list[Text] = []
    for row in rows:
        notes = ["milestone"] * row["milestone"] + [f"{clean(k)} {v:.6g}" for k, v in sorted(row["metrics"].items())]
        cells = ("*" if row["lastgood"] else "", str(row["step"]), row["incarnation"], when(row["created"]))
        table.add_row(*cells, size(row["bytes"]), _state(row["state"]), ", ".join(notes))
        if row["why"]:
            below.append(Text(f"step {row['step']} ({row['incarnation']}): {clean(row['why'])}", style="red"))
        if row["unprotected"]:
            below.append(Text(f"step {row['step']} ({row['incarnation']}) {row['unprotected']}", style="yellow"))
    if not any(row["milestone"] or row["metrics"] for row in rows):
        table.columns.pop()
    total = size(sum(row["bytes"] for row in rows))
    takes = data["restores"]
    end = f"a restore takes step {takes['step']} ({takes['incarnation']})" if takes else "NOTHING HERE CAN BE RESTORED"
    last = [Text(f"{plural(len(rows), 'generation')}, {total}; {end}", style="bold")]
    if any(row["lastgood"] for row in rows):
        last.append(Text(f"* {layout.POINTER} points here", style="dim"))
    elif data["lastgood"]:
        last.append(Text(f"{layout.POINTER} points to step {data['lastgood']['step']}, which is gone", style="yellow"))
    states = {row["state"] for row in rows}
    last += [Text(f"{state}: {what}", style="dim") for state, what in MEANINGS.items() if state in states]
    return Group(table, *([Text(), *below] if below else []), Text(), *last)


# ---- show ------------------------------------------------------------------------------------------------------


def contents(survey: Survey, content: Content, place: str) -> dict[str, Any]:
    generation = content.generation
    at, record = generation.id, generation.commit
    return {
        "place": place,
        **named(at),
        "state": state_of(survey, at)[0],
        "ranks": record.world.ranks,
        "created": record.created,
        "parent": record.parent and named(record.parent),
        "root": generation.root,
        "bytes": generation.bytes,
        "milestone": record.milestone,
        "metrics": record.metrics,
        "tensors": [
            {"name": name, "dtype": one.dtype, "shape": one.shape, "bytes": one.bytes, "digest": content.digest(name)}
            for name, one in sorted(content.tensors().items(), key=lambda entry: natural(entry[0]))
        ],
        "aliases": content.aliases,
        "values": content.values(),
    }


def contents_view(data: Mapping[str, Any], depth: int | None = None) -> RenderableType:
    tensors = {row["name"]: row for row in data["tensors"]}
    rows = tensors | {alias: {"bytes": 0, "alias": of} for alias, of in data["aliases"].items()}
    of = f" of {data['ranks']} ranks" if data["ranks"] > 1 else ""
    head = Text.assemble(
        (f"step {data['step']}", "bold"), f" ({data['incarnation']})  ", _state(data["state"]),
        f"  {when(data['created'])}  {size(data['bytes'])}{of}\nroot {data['root']}",
    )  # fmt: skip
    for name, metric in sorted(data["metrics"].items()):
        head.append(f"\n{clean(name)} {metric:.6g}")
    tree = Tree(Text(_sum_of(rows.values()), style="bold"), guide_style="dim")
    _grow(tree, {tuple(name.split(".")): rows[name] for name in sorted(rows, key=natural)}, depth or 1000)
    parts: list[RenderableType] = [head, Text(), tree]
    if any(not is_place(leaf) for _, leaf in leaves_of(data["values"])):
        more = Tree(Text("values", style="bold"), guide_style="dim")
        _grow_values(more, [(str(name), value) for name, value in data["values"].items()], depth or 1000)
        parts += [Text(), more]
    return Group(*parts)


def _grow(tree: Tree, rows: Mapping[tuple[str, ...], Mapping[str, Any]], depth: int) -> None:
    """Rows by what is left of their names: those that share a first part as a branch, the others as leaves."""
    groups: dict[str, dict[tuple[str, ...], Mapping[str, Any]]] = {}
    for path, row in rows.items():
        groups.setdefault(path[0], {})[path[1:]] = row
    leaves, branches = {}, {}
    for name, group in groups.items():
        if () in group:
            leaves[name] = group.pop(())
        while group and () not in group and len({path[0] for path in group}) == 1:  # a chain stands in one line
            name += "." + next(iter(group))[0]
            group = {path[1:]: row for path, row in group.items()}
        if () in group:
            leaves[name] = group.pop(())
        if group:
            branches[name] = group
    cells = {name: (row["dtype"], shape_text(row["shape"])) for name, row in leaves.items() if "alias" not in row}
    widths = [max(map(len, column)) for column in zip(*cells.values(), strict=True)]
    wide = max((len(clean(name)) for name in leaves), default=0)
    for name, row in leaves.items():
        label = Text(clean(name).ljust(wide), style="cyan")
        if "alias" in row:
            label.append(f"  = {clean(row['alias'])}", style="default")
        else:
            told = [cell.ljust(width) for cell, width in zip(cells[name], widths, strict=True)]
            label.append(f"  {'  '.join(told)}  {size(row['bytes'])}", style="default")
        tree.add(label)
    for name, group in branches.items():
        branch = tree.add(Text.assemble((clean(name), "bold"), f"  {_sum_of(group.values())}"))
        if depth > 1:
            _grow(branch, group, depth - 1)


def _sum_of(rows: Collection[Mapping[str, Any]]) -> str:
    stored = [row["bytes"] for row in rows if "alias" not in row]
    counts = [plural(len(stored), "tensor")] if stored else []
    counts += [plural(len(rows) - len(stored), "alias")] if len(rows) > len(stored) else []
    return ", ".join([*counts, *([size(sum(stored))] if stored else [])]) or "no tensors"


def _grow_values(tree: Tree, entries: Iterable[tuple[str, Any]], depth: int) -> None:
    for name, value in entries:
        if all(is_place(leaf) for _, leaf in leaves_of(value)):
            continue  # the tensors are shown above
        parts = parts_of(value)
        label = Text(clean(name), style="cyan")
        if not parts:
            label.append(f" = {told_value(value)}", style="default")
        elif depth <= 1:
            label.append(
                f"  {plural(sum(not is_place(leaf) for _, leaf in leaves_of(value)), 'value')}", style="default"
            )
        branch = tree.add(label)
        if parts and depth > 1:
            _grow_values(branch, parts, depth - 1)


def parts_of(value: Any) -> list[tuple[str, Any]]:
    """What a stored value (tagged JSON of format/values.py) is made of; empty for a leaf, which a row of numbers is."""
    if isinstance(value, dict):
        tag = next(iter(value), "")
        if tag in ("!dict", "!OrderedDict", "!Counter"):
            return [(key if isinstance(key, str) else told_value(key), part) for key, part in value[tag]]
        if not tag.startswith("!"):
            return list(value.items())
        if tag == "!permuted":
            return [("memory_order", value[tag][0])]
        value = value[tag]
        if isinstance(value, dict):  # an object and what it is made of
            return parts_of(value)
    if isinstance(value, list) and any(isinstance(part, dict) for part in value):
        return [(str(index), part) for index, part in enumerate(value)]
    return []


def is_place(value: Any) -> bool:
    """Whether this leaf only says where a tensor goes, or that a module has nothing beside its tensors."""
    return isinstance(value, dict) and next(iter(value), "!module") in ("!module", "!tensor", "!ndarray")


def leaves_of(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and leaf."""
    parts = parts_of(value)
    for name, part in parts:
        yield from leaves_of(part, f"{path}.{name}" if path else name)
    if not parts:
        yield path, value


class _Tagged:
    """Stands for a value that only the training room can build."""

    def __init__(self, tag: str, body: Any) -> None:
        self._text = f"{tag[1:]} {_short.repr(body)}"

    def __repr__(self) -> str:
        return self._text


_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60


def told_value(value: Any) -> str:
    """A leaf in one short line."""
    try:
        text = _short.repr(values.decode(value, lambda tag, body, _: _Tagged(tag, body)))
    except ManifestInvalid:
        text = _short.repr(value)
    return clean(text if len(text) <= 100 else f"{text[:96]} ...")


# ---- verify ----------------------------------------------------------------------------------------------------


def verified(
    at: GenerationId, findings: list[Finding], read_bytes: int, seconds: float, unprotected: str
) -> dict[str, Any]:
    names = ("layer", "kind", "what", "tensor", "blob", "offset", "chunk")
    told = [{name: getattr(one, name) for name in names} for one in findings]
    return {
        **named(at),
        "good": not findings,
        "intact": intact(findings),
        "bytes": read_bytes,
        "seconds": round(seconds, 3),
        "findings": told,
        "unprotected": unprotected,
    }


def verified_view(data: Mapping[str, Any]) -> RenderableType:
    lines: list[RenderableType] = []
    for row in data["generations"]:
        read = f"  {size(row['bytes'])} in {row['seconds']:.1f} s" if row["bytes"] else "  not read"
        state = _state("good" if row["good"] else "not good" if row["intact"] else "damaged")
        lines.append(Text.assemble((f"step {row['step']}", "bold"), f" ({row['incarnation']})  ", state, read))
        lines += [Text(f"  {one['layer']}: {clean(one['what'])}") for one in row["findings"][:FINDINGS_SHOWN]]
        if len(row["findings"]) > FINDINGS_SHOWN:
            lines.append(Text(f"  and {len(row['findings']) - FINDINGS_SHOWN:,} more (--json has them all)"))
        lines += [Text(f"  it {row['unprotected']}", style="yellow")] if row["unprotected"] else []
    return Group(*lines) if lines else Text(NOTHING_YET)

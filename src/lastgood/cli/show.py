"""`lastgood show`: names, types, shapes, bytes, aliases and values of one generation. Reads no tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from ..format.commit import Survey
from ..run import access, read_places
from ..run.content import Content
from ..units import size
from .answer import Answer
from .arguments import AnyStep, Json, Run
from .selection import pick
from .terminal import clean
from .texts import named, natural, plural, shape_text, state_of, state_text, when
from .value_tree import is_place, leaves_of, parts_of, value_text


def show(
    run: Run,
    step: AnyStep = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree; what is below is counted.")] = None,
    as_json: Json = False,
) -> Answer:
    """What a generation holds: names, types, shapes, bytes, aliases, values. Reads no tensor."""
    places = read_places.found(access.for_reading(run))
    generation = pick(places.survey, step, places.remark(None))
    tier = places.tier_of(generation.id)
    data = contents(places.survey, Content(tier, generation), tier.place)
    return Answer(data, contents_view(data, depth), note=places.remark(generation.id))


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
        "unfit": [one.what for one in generation.unfit],
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
        (f"step {data['step']}", "bold"), f" ({data['incarnation']})  ", state_text(data["state"]),
        f"  {when(data['created'])}  {size(data['bytes'])}{of}\nroot {data['root']}",
    )  # fmt: skip
    for name, metric in sorted(data["metrics"].items()):
        head.append(f"\n{clean(name)} {metric:.6g}")
    for line in (line for what in data["unfit"] for line in what.splitlines()):
        head.append(f"\nnot good: {clean(line)}")
    tree = Tree(Text(_counts(rows.values()), style="bold"), guide_style="dim")
    _grow(tree, {tuple(name.split(".")): rows[name] for name in sorted(rows, key=natural)}, depth or 1000)
    parts: list[RenderableType] = [head, Text(), tree]
    if any(not is_place(leaf) for _, leaf in leaves_of(data["values"])):
        more = Tree(Text("values", style="bold"), guide_style="dim")
        _grow_values(more, [(str(name), value) for name, value in data["values"].items()], depth or 1000)
        parts += [Text(), more]
    return Group(*parts)


def _grow(tree: Tree, rows: Mapping[tuple[str, ...], Mapping[str, Any]], depth: int) -> None:
    """Add rows to a tree by the remaining parts of their names: names with the same first part make a branch."""
    groups: dict[str, dict[tuple[str, ...], Mapping[str, Any]]] = {}
    for path, row in rows.items():
        groups.setdefault(path[0], {})[path[1:]] = row
    leaves, branches = {}, {}
    for name, group in groups.items():
        if () in group:
            leaves[name] = group.pop(())
        while group and () not in group and len({path[0] for path in group}) == 1:  # a single branch joins this line
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
            texts = [cell.ljust(width) for cell, width in zip(cells[name], widths, strict=True)]
            label.append(f"  {'  '.join(texts)}  {size(row['bytes'])}", style="default")
        tree.add(label)
    for name, group in branches.items():
        branch = tree.add(Text.assemble((clean(name), "bold"), f"  {_counts(group.values())}"))
        if depth > 1:
            _grow(branch, group, depth - 1)


def _counts(rows: Collection[Mapping[str, Any]]) -> str:
    """How many tensors and aliases there are, and the bytes of the tensors."""
    stored = [row["bytes"] for row in rows if "alias" not in row]
    counts = [plural(len(stored), "tensor")] if stored else []
    counts += [plural(len(rows) - len(stored), "alias")] if len(rows) > len(stored) else []
    return ", ".join([*counts, *([size(sum(stored))] if stored else [])]) or "no tensors"


def _grow_values(tree: Tree, entries: Iterable[tuple[str, Any]], depth: int) -> None:
    """Add values to a tree by their names; deeper levels than `depth` are counted."""
    for name, value in entries:
        if all(is_place(leaf) for _, leaf in leaves_of(value)):
            continue  # the tensors are shown above
        parts = parts_of(value)
        label = Text(clean(name), style="cyan")
        if not parts:
            label.append(f" = {value_text(value)}", style="default")
        elif depth <= 1:
            label.append(
                f"  {plural(sum(not is_place(leaf) for _, leaf in leaves_of(value)), 'value')}", style="default"
            )
        branch = tree.add(label)
        if parts and depth > 1:
            _grow_values(branch, parts, depth - 1)

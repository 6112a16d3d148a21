"""`lastgood lab placement`: how often copies and parity on other nodes are lost, from 16 to 4,096 nodes.

Groups of `policy/placement.py` are compared with a ring of all nodes, with groups of neighbours (both know no racks)
and with random nodes. In each trial some nodes fail at the same moment, or whole racks. A second table shows how much
of a placement stays when nodes change. Nothing is stored or sent: only placements are computed and failures drawn.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from lastgood.policy.placement import Node, ParityGroups, Placement, copies, groups

from .journal import Journal
from .losses import lost_in_one_ring, lost_in_rings, survived_by_formula
from .report import Progress, Report, Table
from .trials import Options as Trials
from .trials import Row, Share
from .trials import run as run_trials

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES = (16, 64, 256, 1024, 4096)
CHANGED_SIZES = (64, 256, 1024)
SCHEMES = ("k=2", "k=3", "4+2")
DATA, PARITY = 4, 2
RACKED, NEIGHBOURS, RING = "groups over racks", "groups of neighbours", "ring"
RANDOM, RANDOM_RACKED = "random", "random, other racks"
ANEW = "groups over racks, formed anew"
STRATEGIES = (RACKED, NEIGHBOURS, RING, RANDOM, RANDOM_RACKED)
CHANGES = ("a node replaced", "a node left", "a node joined", "a rack lost", "a rack replaced")
DRAWS = 20
"""placements or changes that are drawn for each row; medians are over them"""
MOST_FAILED = 64
"""the largest number of nodes that fail at once"""
RACK_FAILURES = ("1 rack", "2 racks", "1 rack and 1 node")


@dataclass(frozen=True)
class Options(Trials):
    """`trials`: drawn failures of each row; at least `DRAWS`."""

    trials: int = 2000
    sizes: tuple[int, ...] = SIZES
    changed_sizes: tuple[int, ...] = CHANGED_SIZES


def run(options: Options, progress: Progress) -> list[Row]:
    base = {"trials": options.trials, "seed": options.seed}
    keys = [
        {"nodes": size, "scheme": scheme, "strategy": strategy, "failure": failure, **base}
        for size in options.sizes
        for scheme in SCHEMES
        for strategy in _strategies(scheme)
        for failure in failures(size, scheme)
    ]
    changes = [
        {"nodes": size, "scheme": scheme, "strategy": strategy, "change": change, **base}
        for size in options.changed_sizes
        for scheme in SCHEMES[:2]
        for strategy in (RACKED, ANEW, RING)
        for change in CHANGES
    ]
    return run_trials([*keys, *changes], one, Journal(options.out / "trials.jsonl"), options.jobs, progress)


def one(key: Row) -> Row:
    return _changed(key) if "change" in key else _failed(key)


def failures(size: int, scheme: str) -> list[str]:
    """The failures that are drawn: numbers of nodes, from the first that can lose a part, and racks."""
    least = _window(scheme)[1] + 1
    counts = {least, least + 1, 2 * least, size // 64, min(size // 16, MOST_FAILED)}
    return [f"{count} nodes" for count in sorted(counts) if least <= count < size] + list(RACK_FAILURES)


def cluster(size: int) -> list[Node]:
    """A cluster with racks of 16 nodes, or with four smaller racks."""
    rack = min(16, size // 4)
    return [Node(f"n{at:04d}", f"r{at // rack:03d}") for at in range(size)]


def _strategies(scheme: str) -> tuple[str, ...]:
    return STRATEGIES if scheme.startswith("k") else (RACKED, NEIGHBOURS)


def _window(scheme: str) -> tuple[int, int]:
    """The number of nodes of a window, and how many of them may fail."""
    k = int(scheme[2:]) if scheme.startswith("k") else 0
    return (k, k - 1) if k else (DATA + PARITY, PARITY)


# ---- lost parts ----------------------------------------------------------------------------------------------


def placed(nodes: Sequence[Node], scheme: str, strategy: str, draw: Random) -> Placement | ParityGroups:
    """The placement that a strategy makes. `draw`: for the strategies that choose nodes at random."""
    names, size = [node.name for node in nodes], _window(scheme)[0]
    if strategy == NEIGHBOURS:
        nodes = [Node(name) for name in names]
    if scheme == "4+2":
        return groups(nodes, DATA, PARITY)
    if strategy in (RACKED, NEIGHBOURS):
        return copies(nodes, size)
    at = range(len(names))
    if strategy == RING:
        holders = {names[i]: tuple(names[(i + step) % len(names)] for step in range(1, size)) for i in at}
    else:
        holders = {node.name: _drawn(node, nodes, size - 1, strategy == RANDOM_RACKED, draw) for node in nodes}
    return Placement(holders, size - 1, 0)


def _drawn(owner: Node, nodes: Sequence[Node], count: int, other_racks: bool, draw: Random) -> tuple[str, ...]:
    chosen: list[Node] = []
    while len(chosen) < count:
        node = draw.choice(nodes)
        racks = [one.domain for one in (owner, *chosen)]
        if node is not owner and node not in chosen and not (other_racks and node.domain in racks):
            chosen.append(node)
    return tuple(node.name for node in chosen)


def _failed(key: Row) -> Row:
    nodes = cluster(key["nodes"])
    draw = Random(repr(sorted(key.items())))
    shares, hits, total = [], 0, 0
    each = max(1, key["trials"] // DRAWS)
    found: Placement | ParityGroups | None = None
    for _ in range(DRAWS):
        if found is None or key["strategy"] in (RANDOM, RANDOM_RACKED):
            found = placed(nodes, key["scheme"], key["strategy"], draw)
            loses = loss_of(found)
        count = sum(loses(failed_names(nodes, key["failure"], draw)) for _ in range(each))
        shares.append(count / each)
        hits, total = hits + count, total + each
    assert found is not None
    return {"lost": hits, "drawn": total, "median": statistics.median(shares), **_exact(key, found)}


def failed_names(nodes: Sequence[Node], failure: str, draw: Random) -> set[str]:
    """The names of the nodes of one drawn failure."""
    count = int(failure.split()[0])
    if "rack" not in failure:
        return {node.name for node in draw.sample(nodes, count)}
    racks = draw.sample(sorted({node.domain for node in nodes}), count)
    failed = {node.name for node in nodes if node.domain in racks}
    if failure.endswith("node"):
        failed.add(draw.choice([node.name for node in nodes if node.name not in failed]))
    return failed


def loss_of(found: Placement | ParityGroups) -> Callable[[set[str]], bool]:
    """A function that says whether a part is lost when these nodes fail. It visits the failed nodes only."""
    if isinstance(found, Placement):
        holders = found.holders
        return lambda failed: any(failed.issuperset(holders[name]) for name in failed)
    of = {name: ring for ring in found.groups for name in ring}
    size, spare = found.k + found.m, found.m

    def loses(failed: set[str]) -> bool:
        for ring in {of[name] for name in failed}:
            at = [name in failed for name in ring]
            if any(sum(at[(first + step) % len(ring)] for step in range(size)) > spare for first in range(len(ring))):
                return True
        return False

    return loses


def _exact(key: Row, found: Placement | ParityGroups) -> Row:
    """The exact probability of a loss and that of the published bound, where there are such."""
    count = int(key["failure"].split()[0])
    if "rack" in key["failure"] or key["strategy"] in (RANDOM, RANDOM_RACKED):
        return {}
    size, spare = _window(key["scheme"])
    if key["strategy"] == RING:
        return {"exact": lost_in_one_ring(key["nodes"], size, count)}
    lengths = ring_lengths(found)
    exact = {"exact": lost_in_rings(lengths, size, spare, count)}
    if isinstance(found, Placement) and key["nodes"] % size == 0:
        exact["published"] = 1 - survived_by_formula(key["nodes"], size, count)
    return exact


def ring_lengths(found: Placement | ParityGroups) -> list[int]:
    """The numbers of nodes of the groups."""
    if isinstance(found, ParityGroups):
        return [len(ring) for ring in found.groups]
    lengths, passed = [], set[str]()
    for first in found.holders:
        name, length = first, 0
        while name not in passed:
            passed.add(name)
            name, length = found.holders[name][0], length + 1
        lengths += [length] if length else []
    return lengths


# ---- placements that follow each other -----------------------------------------------------------------------


def _changed(key: Row) -> Row:
    nodes, draw = cluster(key["nodes"]), Random(repr(sorted(key.items())))
    strategy = RACKED if key["strategy"] == ANEW else key["strategy"]
    before = placed(nodes, key["scheme"], strategy, draw)
    assert isinstance(before, Placement)
    kept, possible = [], []
    for _ in range(DRAWS):
        now = changed_nodes(nodes, key["change"], draw)
        size = _window(key["scheme"])[0]
        after = copies(now, size, before) if key["strategy"] == RACKED else placed(now, key["scheme"], strategy, draw)
        assert isinstance(after, Placement)
        pairs = [(name, other) for name, others in before.holders.items() for other in others]
        kept.append(sum(other in after.holders.get(name, ()) for name, other in pairs) / len(pairs))
        names = {node.name for node in now}
        possible.append(sum({name, other} <= names for name, other in pairs) / len(pairs))
    return {"kept": statistics.median(kept), "least": min(kept), "possible": statistics.median(possible)}


def changed_nodes(nodes: Sequence[Node], change: str, draw: Random) -> list[Node]:
    """The nodes after one drawn change."""
    node = draw.choice(nodes)
    leaving = [one for one in nodes if one.domain == node.domain] if "rack" in change else [node]
    new = [Node(f"{one.name}-new", one.domain) for one in leaving]
    stay = [one for one in nodes if one not in leaving]
    if change.endswith("joined"):
        return [*nodes, *new]
    return [*stay, *new] if change.endswith("replaced") else stay


# ---- the report ----------------------------------------------------------------------------------------------


def report(rows: Sequence[Row], options: Options) -> Report:
    tables = []
    for scheme in SCHEMES:
        lines = [
            [
                f"{row['nodes']:,}",
                row["failure"],
                row["strategy"],
                f"{100 * row['median']:.2f}",
                Share(row["lost"], row["drawn"]).as_text(),
                *(f"{row[name]:.3g}" if row.get(name) is not None else "-" for name in ("exact", "published")),
            ]
            for row in rows
            if row["scheme"] == scheme and "failure" in row
        ]
        head = [
            "nodes",
            "failed at once",
            "placement",
            "median, %",
            "a part is lost (Wilson, 95 %)",
            "exact",
            "formula",
        ]
        title = f"Lost parts, {scheme} copies of each part" if scheme != "4+2" else "Lost parts, parity 4+2"
        tables.append(Table(title.replace("k=", ""), head, lines))
    lines = [
        [
            f"{row['nodes']:,}",
            row["scheme"],
            row["change"],
            row["strategy"],
            *(f"{100 * row[name]:.2f}" for name in ("kept", "least", "possible")),
        ]
        for row in rows
        if "change" in row
    ]
    head = ["nodes", "scheme", "change", "placement", "unchanged, %", "least, %", "possible, %"]
    tables.append(Table("Copies that stay where they are", head, lines))
    return Report(
        name="placement",
        title="Placement of copies and of parity on nodes",
        about="Racks of 16 nodes (16 nodes: four racks of four). k counts a part and its copies. Each row has "
        f"{options.trials:,} drawn failures in {DRAWS} blocks; the median is over the blocks, and random placements "
        "are drawn anew for each block.",
        tables=tables,
        rows=rows,
        notes=[
            "exact: counted over all sets of so many failed nodes. formula: Gemini (SOSP'23, corollary 1), an upper "
            "bound of the probability of a loss, which is exact below 2 k failures.",
            "possible: copies of which both nodes, that of the part and that of the copy, are still there.",
        ],
        figures={"losses": lambda: _figure(rows)},
    )


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The content of summary.json."""
    drawn = [row for row in rows if "failure" in row]
    return {
        "lost": {
            f"{row['nodes']} nodes, {row['scheme']}, {row['strategy']}, {row['failure']}": {
                **Share(row["lost"], row["drawn"]).record(),
                **{name: row[name] for name in ("median", "exact", "published") if row.get(name) is not None},
            }
            for row in drawn
        },
        "unchanged": {
            f"{row['nodes']} nodes, {row['scheme']}, {row['strategy']}, {row['change']}": row["kept"]
            for row in rows
            if "change" in row
        },
    }


def _figure(rows: Sequence[Row]) -> Figure:
    from .figures import legend_below, panels
    from .trials import error_bars

    shown = [(scheme, failure) for scheme in SCHEMES[:2] for failure in ("many nodes", "1 rack and 1 node")]
    figure, axes = panels(len(shown), columns=2, wide=4.0, high=3.0)
    for at, (scheme, failure) in zip(axes, shown, strict=True):
        for strategy in STRATEGIES:
            mine = [row for row in rows if (row["scheme"], row["strategy"]) == (scheme, strategy) and "failure" in row]
            many = f"{2 * int(scheme[2:])} nodes"
            mine = [row for row in mine if row["failure"] == (many if failure == "many nodes" else failure)]
            shares = [Share(row["lost"], row["drawn"]) for row in mine]
            values, bars = [100 * one.value for one in shares], error_bars(shares)
            bars = [[100 * value for value in side] for side in bars]
            at.errorbar([row["nodes"] for row in mine], values, yerr=bars, marker="o", capsize=2, label=strategy)
        at.set_xscale("log", base=2)
        at.set_ylim(bottom=0)
        at.set_xlabel("nodes")
        at.set_ylabel("a part is lost, %")
        at.set_title(f"{scheme}, {many if failure == 'many nodes' else failure} failed at once")
    legend_below(figure, axes[0])
    return figure

"""Merging: the values of many ranks -> those that one process is to take; what none of many processes takes. Pure.

A process takes what the rank of its number had. Where there were fewer, it takes what rank 0 had; its random number
generators are seeded anew then (`objects.seed_rng`). What it has a place for and that rank had not, as the stages of a
pipeline, is taken from the first that had it. What an optimizer says of its parameters is put together from all.

Records of an audit (data/audit.py) exist once: on another number of ranks, rank r of n takes those of the old ranks r,
r + n, r + 2n, ..., and none where there is no such rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..records import Manifest

RECORDS = "lastgood.audit"
"""the key of a dict, wherever in a state it stands, whose value is a list of records that exist once"""


def merged(
    manifests: Sequence[Manifest], rank: int, ranks: int, has_place: Callable[[str], bool] = lambda _: False
) -> dict[str, Any]:
    """The values of one generation, for process `rank` of `ranks`, which `has_place` for these entries."""
    values = dict(manifests[rank if rank < len(manifests) else 0].values)
    if len(manifests) > 1:
        for one in manifests:
            values |= {name: one.values[name] for name in one.values.keys() - values.keys() if has_place(name)}
        for name, tree in values.items():
            values[name] = _whole(tree, [one.values[name] for one in manifests if name in one.values])
    if len(manifests) != ranks:  # guard: audit-records-of-other-worlds
        for name, tree in values.items():
            # guard: audit-record-on-one-rank
            taken = [one.values[name] for one in manifests[rank::ranks] if name in one.values]
            values[name] = _with_records(tree, taken)
    return values


def homeless(unexpected: Sequence[Sequence[str]]) -> list[str]:
    """What no rank has a place for, of what each has none for; a name there speaks of all that lies below it."""
    listed = [set(names) for names in unexpected]
    # guard: unplaced-names-refused
    return sorted(name for name in set().union(*listed) if all(_covers(one, name) for one in listed))


def _covers(names: Collection[str], name: str) -> bool:
    ends = (at for at, letter in enumerate(name) if letter == ".")
    return name in names or any(name[:at] in names for at in ends)


def _whole(tree: Any, others: Sequence[Any]) -> Any:
    """Modules and optimizers of which each rank knows some parameters: with those of all, its own as they are."""
    if not isinstance(tree, dict) or all(other == tree for other in others):
        return tree
    if tree.keys() == {"!module"}:
        found = {name: one for other in others if _is(other, "!module") for name, one in other["!module"].items()}
        return {"!module": found | tree["!module"]}
    if tree.keys() == {"!optimizer"}:
        return {
            "!optimizer": _optimizer(
                tree["!optimizer"], [one["!optimizer"] for one in others if _is(one, "!optimizer")]
            )
        }
    return {
        key: _whole(value, [other[key] for other in others if isinstance(other, dict) and key in other])
        for key, value in tree.items()
    }


def _with_records(tree: Any, taken: Sequence[Any]) -> Any:
    """`tree` with the records of the same place in each of `taken`, and no others."""
    alike = [other for other in taken if type(other) is type(tree)]
    if isinstance(tree, list) and any(isinstance(one, (dict, list)) for one in tree):
        return [_with_records(one, [other[at] for other in alike if at < len(other)]) for at, one in enumerate(tree)]
    if not isinstance(tree, dict):
        return tree
    if tree.keys() == {RECORDS}:
        return {RECORDS: [record for other in alike if _is(other, RECORDS) for record in other[RECORDS]]}
    return {key: _with_records(one, [other[key] for other in alike if key in other]) for key, one in tree.items()}


def _is(tree: Any, tag: str) -> bool:
    return isinstance(tree, dict) and tree.keys() == {tag}


def _optimizer(one: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    alike = [other for other in others if len(other["groups"]) == len(one["groups"])]
    groups = []
    for index, group in enumerate(one["groups"]):
        params = {one[0]: one for other in alike for one in other["groups"][index]["params"]}
        groups.append({**group, "params": [*params.values()]})
    state = {name: entry for other in alike for name, entry in other["state"].items()}
    return {**one, "groups": groups, "state": state | one["state"]}
